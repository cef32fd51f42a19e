"""What compiles a piece: nothing (eager), Inductor, or any backend that torch knows.

What Inductor makes is kept on disk between processes.
"""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from difflib import get_close_matches
from errno import EACCES, ENOSPC, EPERM, EROFS
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.backends.registry import list_backends, lookup_backend
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import config as inductor_config

from graphrt.compile import torch_api
from graphrt.compile.cache import CompileCache, key_of
from graphrt.compile.failures import asked_of_unbacked
from graphrt.compile.guards import environment
from graphrt.compile.partition import partitioned, refuse_own_cuts
from graphrt.compile.ranges import Range
from graphrt.compile.splitter import callable_at
from graphrt.config import CompilePlan
from graphrt.config.compilation import thawed
from graphrt.config.environment import environment_variable
from graphrt.errors import BackendError, ConfigError, GraphrtError, ShapeGuardError, shown
from graphrt.events import CacheMiss
from graphrt.externals.environment import FLAGS
from graphrt.values import tensors_of

FIELD = "compilation.backend"

# They run the graph operator by operator, so that a recorder sees each.
_SEEN_BY_RECORDERS = ("eager", "eager_noexcept")


class Job(NamedTuple):
    """One piece to compile, for some sizes."""

    module: fx.GraphModule
    inputs: Sequence[Any]
    """Fake, in the mode of the current tracing context."""
    name: str
    structure: str
    sizes: Range
    bounds: str
    """Of the other axes."""


class Form(NamedTuple):
    """A piece, compiled for some sizes. ``missed``: why it did not come from the cache."""

    call: Callable[..., Any]
    missed: CacheMiss | None


def find_backend(name: str) -> Callable[..., Any]:
    """A backend of torch's registry, or the callable at a dotted path."""
    known = list_backends(exclude_tags=())
    try:
        return lookup_backend(name) if name in known else callable_at(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        nearest = get_close_matches(name, known, n=1, cutoff=0.0)
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{FIELD}: {name!r}",
            expected=f"{', '.join(known)}, or package.module.function",
            found=found if "." in name else f"no registered backend; nearest is {nearest[0]!r}",
            do="correct it, or install or import what registers it before the runtime is made",
        ) from error


class BlackBox:
    """Any backend, called as ``backend(graph, fake inputs)``. Nothing of it is cached."""

    keys: Sequence[Mapping[str, object]] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self._backend = find_backend(name)
        self.is_opaque = name not in _SEEN_BY_RECORDERS
        """Whether its code hides kernels from dispatch modes, and may move what is written."""

    def cache(self) -> None:
        """It keeps nothing."""

    def compile(self, job: Job) -> Form:
        if self.name == "eager":
            return Form(job.module.forward, CacheMiss.UNCACHEABLE)
        # A copy, because a backend may change its graph.
        graph = fx.GraphModule(job.module, deepcopy(job.module.graph))
        call = compiled_by(self._backend, self.name, graph, list(job.inputs), job.name)
        return Form(call, CacheMiss.UNCACHEABLE)


def compiled_by(
    backend: Callable[..., Any],
    name: str,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    piece: str,
) -> Callable[..., Any]:
    """What ``backend`` makes of a graph. Errors: ``BackendError``."""
    with compiling(name, piece):
        found: Callable[..., Any] = backend(graph, inputs)
        if not callable(found):
            raise TypeError(f"it returned a {type(found).__name__}, which cannot be called")
        return found


@contextmanager
def compiling(backend: str, piece: str, root: Path | None = None) -> Iterator[None]:
    """Turns what a backend raises into a ``BackendError``; our own errors stay.

    What Inductor raises about a folder that it cannot write to, or that is full: a ``ConfigError``
    that names what says where that is; where it has to know a size that is unbacked: a
    ``ShapeGuardError``. ``root``: of the cache.
    """
    try:
        yield
    except GraphrtError:
        raise
    except Exception as error:
        denied: Any = getattr(error, "inner_exception", error)  # Inductor wraps what it meets.
        is_denied = isinstance(denied, OSError) and denied.errno in (EACCES, EPERM, EROFS)
        told = f"{type(denied).__name__}: {denied}"
        # A compiler, or a linker, tells of a full disk in its output.
        full = [line.strip() for line in told.splitlines() if os.strerror(ENOSPC) in line]
        if (is_denied or full) and backend == "inductor":
            is_elsewhere = getattr(denied, "filename", None) or not isinstance(denied, OSError)
            is_ours = root is not None and (f"{root}{os.sep}" in told or not is_elsewhere)
            ours = "compilation.cache_dir, or GRAPHRT_CACHE_DIR"
            raise ConfigError(
                ours if is_ours else torch_api.INDUCTOR_CACHE_VARIABLE,
                expected="a folder that this process may write to: Inductor keeps kernels there",
                found=full[0] if full else told,
                do="make it writable and make room, or name another one",
            ) from error
        if asked := asked_of_unbacked(error):
            raise ShapeGuardError(
                f"branch on a size, {backend} compiling {piece}",
                expected="operations that compile for sizes that vary",
                found=asked,
                do="use dynamic_shapes='auto' or 'backed', or cut it out (splitting_ops, level 3)",
            ) from error
        lines = str(error).strip().splitlines() or [""]
        do = "use another backend; backend='eager' compiles nothing"
        if "C++ compiler" in str(error):
            do = "install a C++ compiler (g++), or use backend='eager'"
        elif backend == "inductor" and isinstance(denied, UnicodeDecodeError):
            # torch 2.11 to 2.13 read some without saying that they are UTF-8.
            do = "set PYTHONUTF8=1: Inductor reads its own files in the encoding of the locale"
        raise BackendError(
            f"{backend}, compiling {piece}",
            expected="compiled code",
            found=f"{type(error).__name__}: {lines[0]}",
            do=do,
        ) from error


class Inductor:
    """Compiles with ``torch._inductor.standalone_compile``."""

    name = "inductor"
    is_opaque = True

    def __init__(self, plan: CompilePlan, rank: int) -> None:
        _check_options(plan.inductor_compile_config)
        if plan.use_inductor_graph_partition:
            refuse_own_cuts(plan.inductor_compile_config)
        self._plan = plan
        self._index = f"{plan.compute_hash()}/rank_{rank}"
        self._cache: CompileCache | None = None
        self._versions: Mapping[str, str] = {}
        """Of torch and others, once ``cache`` was asked for."""
        self.keys: Sequence[Mapping[str, object]] = ()

    def compile(self, job: Job) -> Form:
        plan = self._plan
        partitions = partitioned(job.module) if plan.use_inductor_graph_partition else nullcontext()
        # What is set for it is the process's, and where a trace is a kept one Dynamo locks nothing.
        with compile_lock, compiling(self.name, job.name, plan.cache_dir), partitions:
            cache = self.cache()
            if cache is None:
                is_off = plan.cache_dir is None or not plan.compile_cache
                missed = CacheMiss.DISABLED if is_off else CacheMiss.UNHASHABLE_PASS
                return Form(torch_api.fast_call(self._compiled(job)[0]), missed)
            key = self._key_of(job, cache)
            try:
                form = self._loaded_or_compiled(job, cache, key, cache.inductor_folder)
            except Exception as error:
                can_write = False
                with suppress(OSError):
                    cache.prepare()
                    can_write = os.access(cache.inductor_folder.parent, os.W_OK)
                if isinstance(error, GraphrtError) or not can_write:
                    raise
                # Inductor trusts what is in its folder, and another process may have moved that: is
                # it the folder, or the piece?
                torch_api.forget_libraries()
                with cache.other_inductor_folder() as folder:
                    form = self._loaded_or_compiled(job, cache, key, folder)
                form = form._replace(missed=CacheMiss.CORRUPT)
            names = ("piece", "sizes", "key")
            cache.write_index(self._index, [{n: one[n] for n in names} for one in self.keys])
            return form

    def _loaded_or_compiled(self, job: Job, cache: CompileCache, key: str, folder: Path) -> Form:
        found = cache.read(key)
        with _inductor_folder(cache, folder):
            if isinstance(found, bytes):
                try:
                    return Form(torch_api.fast_call(torch_api.from_bytes(found)), None)
                except Exception:  # noqa: BLE001 - whatever torch says of it, it is compiled anew
                    found = CacheMiss.LOAD_FAILED
            artifact, files = self._compiled(job)
            call, payload = torch_api.fast_call(artifact), torch_api.to_bytes(artifact, files)
        if payload is None:
            return Form(call, CacheMiss.UNCACHEABLE)
        about = {"piece": job.name, "sizes": str(job.sizes), "structure": job.structure}
        cache.write(key, payload, about)
        return Form(call, found)

    def _compiled(self, job: Job) -> tuple[Any, Mapping[str, bytes]]:
        options = thawed(self._plan.inductor_compile_config)
        on_cpu = all(one.device.type == "cpu" for one in tensors_of(job.inputs))
        if job.sizes.is_static and not on_cpu:
            options = {"max_autotune": True, "coordinate_descent_tuning": True, **options}
        piece = f"{job.structure} {job.sizes}, {job.bounds}"
        return torch_api.compile_by_inductor(job.module, job.inputs, options, piece)

    def cache(self) -> CompileCache | None:
        """Where compiled code is kept; None: nowhere."""
        root = self._plan.cache_dir if self._plan.compile_cache else None
        if root is None or self._plan.unhashable_passes or None in torch_api.own_passes().values():
            return None
        if self._cache is None:
            self._cache = CompileCache(root)
            self._versions = torch_api.versions(self._cache)
            self._cache.torch = key_of(self._versions)
        return self._cache

    def _key_of(self, job: Job, cache: CompileCache) -> str:
        devices = {one.device for one in tensors_of(job.inputs)}
        factors = {
            "torch": self._versions,
            "device": device_text(devices),
            "structure": job.structure,
            "sizes": (*job.sizes, job.bounds),
            "plan": self._plan.compute_hash(),
            "inductor": inductor_config.save_config_portable(),
            "passes": torch_api.own_passes(),
            "modes": {
                **environment(next(iter(devices)).type if devices else "cpu"),
                **{name: next(values) for name, values in FLAGS.items()},
                "threads": torch.get_num_threads(),
                "inference mode": torch.is_inference_mode_enabled(),
            },
        }
        cache.device = cache.device or str(factors["device"])
        key = key_of(factors)
        self.keys = [*self.keys, {"piece": job.name, "key": key, **factors}]
        return key


def device_text(devices: Iterable[torch.device]) -> str:
    """What compiled code for ``devices`` depends on, in words."""
    return ", ".join(sorted({platform.machine(), *map(torch_api.device_name, devices)}))


def _inductor_folder(cache: CompileCache, folder: Path) -> AbstractContextManager[None]:
    """Inductor's own caches are kept beside the entries, which need them to load quickly.

    What cannot be written is told with an entry. Inductor uses its own folder then.
    """
    with suppress(OSError):
        cache.prepare()
        folder.mkdir(exist_ok=True)
        # torch makes a command of the C++ compiler of it, and splits that as a shell does.
        if os.access(folder, os.W_OK) and shlex.quote(str(folder)) == str(folder):
            return environment_variable(torch_api.INDUCTOR_CACHE_VARIABLE, str(folder))
    return nullcontext()


def _check_options(options: Mapping[str, Any]) -> None:
    """Errors: ``ConfigError`` for what is no option of Inductor, or not a value of its type."""
    known = inductor_config.get_config_copy()
    for name, value in options.items():
        if name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.0)
            expected = f"an option of torch._inductor.config; nearest are {', '.join(near)}"
            found, do = "an unknown key", "correct the name"
        else:
            kind: Any = inductor_config.get_type(name)  # type: ignore[attr-defined]
            accepted = (int, float) if kind is float else kind
            if kind not in (bool, int, float, str) or isinstance(value, accepted):
                continue
            expected, found, do = f"a value of type {kind.__name__}", shown(value), "correct it"
        raise ConfigError(
            f"compilation.inductor_compile_config.{name}", expected=expected, found=found, do=do
        )
