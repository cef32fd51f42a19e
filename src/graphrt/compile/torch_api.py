"""What torch's releases name differently, or do not promise: each such thing is said here only."""

from __future__ import annotations

import inspect
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo
import torch._inductor
from torch import fx
from torch._dynamo.decorators import mark_dynamic, mark_unbacked
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CacheBase, torch_key
from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.standalone_compile import CompiledArtifact
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphrt.errors import UnrecordedCodeError
from graphrt.source import caller_source

INDUCTOR_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_MARKS_BOUNDS = "min" in inspect.signature(mark_unbacked).parameters


def mark(tensor: torch.Tensor, dim: int, axis: str, most: int, *, is_backed: bool) -> None:
    """Let ``dim`` of ``tensor`` vary in the next trace, together with all dims of ``axis``."""
    if is_backed:
        mark_dynamic(tensor, dim, min=2, max=most)
    elif _MARKS_BOUNDS:
        mark_unbacked(tensor, dim, shape_id=axis, min=1, max=most)
    else:
        mark_unbacked(tensor, dim, shape_id=axis)


def unmark(tensor: torch.Tensor) -> None:
    """Undo ``mark``."""
    for name in [name for name in vars(tensor) if name.startswith("_dynamo_")]:
        delattr(tensor, name)


def has_modes() -> bool:
    """Whether a mode is active, under which torch runs no code with guards."""
    return bool(_get_current_dispatch_mode_stack() or _get_current_function_mode_stack())


def no_recompile() -> AbstractContextManager[object]:
    """While entered, code that would be compiled again raises ``exc.RecompileError``."""
    patch: AbstractContextManager[object] = torch._dynamo.config.patch(error_on_recompile=True)
    return patch


def stock_compile(
    target: Callable[..., Any], backend: Callable[..., Any], tell: Callable[[str], None]
) -> Callable[..., Any]:
    """torch.compile with nothing asked. ``tell``: hears why something is compiled again."""
    decorate = torch._dynamo.optimize(backend, guard_fail_fn=lambda found: tell(found.reason))
    return decorate(target)


# -- Inductor


def compile_by_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], sizes: str
) -> Any:
    """An artifact that is called with what the piece takes. ``inputs``: fake; their mode is the
    current tracing context's. ``sizes``: names all that they may have.
    """
    # Inductor's own caches do not tell ranges of a size apart, and its code checks their ends.
    config = cast(Any, torch.compiler).config
    with config.patch(cache_key_tag=f"{config.cache_key_tag} {sizes}"):
        return torch._inductor.standalone_compile(
            module,
            list(inputs),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": dict(options)},
        )


def to_bytes(artifact: Any) -> bytes | None:
    """What ``from_bytes`` makes an artifact of in another process; None if it cannot be saved."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "artifact")
        try:
            artifact.save(path=str(path), format="binary")
        except (RuntimeError, AssertionError):
            return None
        return path.read_bytes()


def from_bytes(payload: bytes) -> Callable[..., Any]:
    """Raises whatever torch raises, about anything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "artifact")
        path.write_bytes(payload)
        return CompiledArtifact.load(path=str(path), format="binary")


def fast_call(artifact: Any) -> Callable[..., Any]:
    """What calling ``artifact`` calls, without the frame that keeps Dynamo off: what calls pieces
    is kept off by it already. ``artifact`` itself where torch keeps it otherwise."""
    call = getattr(artifact, "_compiled_fn", artifact)
    if getattr(call, "_torchdynamo_disable", False):
        call = getattr(call, "__wrapped__", call)
    return call  # type: ignore[no-any-return]


def inductor_options() -> Mapping[str, Any]:
    """Every option of Inductor that code depends on, as it is now."""
    return inductor_config.save_config_portable()


def inductor_option_names() -> Sequence[str]:
    return tuple(inductor_config.get_config_copy())


def matmul_precision() -> Sequence[str]:
    """What products of float32 are rounded to, on each backend.

    Asked of each, because the question for all raises once they were set one by one.
    """
    backends: Any = torch.backends
    kinds = (backends.cuda.matmul, backends.cudnn, backends.mkldnn)
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        return (torch.get_float32_matmul_precision(),)
    products = (kind.matmul for kind in kinds if hasattr(kind, "matmul"))
    return [getattr(kind, "fp32_precision", "") for kind in (backends, *kinds, *products)]


@cache
def versions() -> Mapping[str, str]:
    """What of graphrt, torch and Python compiled code depends on."""
    return {
        "graphrt": _version("graphrt"),
        "torch": torch.__version__,
        "torch source": torch_key().hex(),
        "python": sys.version,
        "triton": _version("triton"),
    }


def _version(package: str) -> str:
    """Of the package, whether it is imported or not; "" for one that is not installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


@cache
def device_name(device: torch.device) -> str:
    """What compiled code for ``device`` depends on, in words."""
    if device.type == "cpu":
        # Not Inductor's own question for the instruction set, which starts processes to try each.
        compiler = get_cpp_compiler()
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{capability} {compiler} {get_compiler_version_info(compiler)}"
    return f"{CacheBase.get_system()['device']} {DeviceProperties.create(device)}"


# -- the alarm


class _CompiledCodeAlarm:
    """Makes Inductor's code raise on the threads that record, because no recorder sees it run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[int] = []
        self._original: Any = None

    def enter(self) -> None:
        with self._lock:
            if not self._threads:
                self._original = original = CompiledFxGraph.__call__

                def call(graph: Any, inputs: Any) -> Any:
                    if threading.get_ident() in self._threads:
                        raise _unrecorded()
                    return original(graph, inputs)

                CompiledFxGraph.__call__ = call  # type: ignore[assignment, method-assign]
            self._threads.append(threading.get_ident())

    def leave(self) -> None:
        with self._lock:
            self._threads.remove(threading.get_ident())
            if not self._threads:
                CompiledFxGraph.__call__ = self._original  # type: ignore[method-assign]
                self._original = None


_alarm = _CompiledCodeAlarm()


@contextmanager
def compiled_code_refused() -> Iterator[None]:
    """While entered, code of Inductor that this thread runs raises ``UnrecordedCodeError``."""
    _alarm.enter()
    try:
        yield
    finally:
        _alarm.leave()


def _unrecorded() -> UnrecordedCodeError:
    return UnrecordedCodeError(
        "compiled code in a recording",
        expected="compiled pieces of the runtime, each recorded as one node",
        found=f"code of Inductor that was called directly, at {caller_source().with_text}",
        do="let the runtime compile it (level 3), or leave it uncompiled on the simulated device",
    )
