"""What torch's releases name differently, or do not promise: each such thing is said here only."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial, wraps
from hashlib import sha256
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from importlib.metadata import PackageNotFoundError, version
from logging import CRITICAL, Logger
from pathlib import Path
from traceback import FrameSummary, walk_tb
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch._inductor
import torch._inductor.async_compile
from torch import fx
from torch._C._dynamo.guards import GlobalStateGuard
from torch._decomp import global_decomposition_table as decomposition_table
from torch._dynamo import config as dynamo_config, eval_frame, guards, symbolic_convert
from torch._dynamo.decorators import mark_dynamic, mark_unbacked
from torch._dynamo.device_interface import get_interface_for_device
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState
from torch._dynamo.source import AttrSource, NNModuleSource
from torch._guards import Guard, GuardsSet
from torch._inductor import (
    codecache,
    config as inductor_config,
    cpu_vec_isa,
    utils as inductor_utils,
)
from torch._inductor.codecache import PyCodeCache, torch_key
from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.standalone_compile import CacheCompiledArtifact
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton
from torch._subclasses import fake_tensor
from torch.fx.experimental import symbolic_shapes
from torch.overrides import _get_current_function_mode_stack
from torch.utils._appending_byte_serializer import BytesReader
from torch.utils._filelock import FileLock
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphrt.compile.cache import CompileCache, key_of
from graphrt.errors import UnrecordedCodeError
from graphrt.source import Source, caller_source

_CHECK = "assert_size_stride"
INDUCTOR_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
ALIGNMENT: int = inductor_utils.ALIGNMENT
MARKS_BOUNDS = "min" in inspect.signature(mark_unbacked).parameters
"""Whether a dimension that varies is marked with its bounds; since torch 2.13."""
_CODE = "torch._inductor.runtime.compile_tasks."
"""Modules of code that Inductor has written are named so."""
_KEYS_OF_OTHERS = ("CPU", "CUDA", "AutocastCPU", "AutocastCUDA")
"""Of kernels that torch would call before, or in place of, the function of a custom op."""
_KEYS_OF_GRADIENTS = ("Autograd", "AutogradCPU", "AutogradCUDA")
_tracing = threading.RLock()
"""Held while a model is traced, or runs as if it were."""
_FOLDER_OF_TORCH = str(Path(torch.__file__).parent) + os.sep
_LITTLE_ENDIAN_ELF_OF_64_BITS = b"\x7fELF\x02\x01"
_LONG_FLUSH = 256 * 2**20
"""Bytes; an H200 fills them in 70 us."""


def mark(tensor: torch.Tensor, dim: int, axis: str, most: int, *, is_backed: bool) -> None:
    """Let ``dim`` of ``tensor`` vary in the next trace, together with all dims of ``axis``."""
    if is_backed:
        mark_dynamic(tensor, dim, min=2, max=most)
    else:
        bounds = {"min": 1, "max": most} if MARKS_BOUNDS else {}
        mark_unbacked(tensor, dim, shape_id=axis, **bounds)


def unmark(tensor: torch.Tensor) -> None:
    """Undo ``mark``."""
    for name in [name for name in vars(tensor) if name.startswith("_dynamo_")]:
        delattr(tensor, name)


def has_modes() -> bool:
    """Whether a mode is active on this thread."""
    return is_recorded() or bool(_get_current_function_mode_stack())


def is_recorded() -> bool:
    """Whether a mode on this thread sees each operation, as recorders do."""
    return bool(_get_current_dispatch_mode_stack())


class GuardParts(NamedTuple):
    """A guard, for another process."""

    guard_type: str
    name: str
    """Of what it is about: an expression."""
    made_of: tuple[Any, Any] | None
    """None for one that is not made."""
    value: object = None
    """What it is about, in the process that makes it again."""


def _parts_of(guard: Any, is_made: bool) -> GuardParts:
    own = guard.orig_guard
    made_of = (own.originating_source, own.create_fn) if is_made else None
    return GuardParts(guard.guard_type, guard.name, made_of)


def attribute_asked(guard: GuardParts) -> tuple[str, str] | None:
    """The expression, and the attribute, of a guard on whether something has that."""
    if guard.guard_type != "HASATTR" or guard.made_of is None:
        return None
    source, made = guard.made_of
    if isinstance(made, partial):
        return guard.name, made.keywords["attr"]
    # In torch 2.11 such a guard is about the attribute, which may not be there.
    source = source.base if isinstance(source, NNModuleSource) else source
    return (source.base.name, source.member) if isinstance(source, AttrSource) else None


class Traced(NamedTuple):
    """What Dynamo made of a function."""

    results: Any
    """Of the traced call."""
    call: FunctionType | None = None
    """Does the same and asks Dynamo nothing; None where Dynamo left the function as it is."""
    guards: Any = None
    """Those that were chosen."""
    parts: Sequence[GuardParts] = ()
    """Of all guards."""
    ordered: Any = frozenset()
    """Sources of dicts of which guards compare the order."""


def traced(
    root: FunctionType,
    backend: Callable[..., Any],
    chosen: Callable[[Sequence[Any]], list[bool]],
    args: Any,
    kwargs: Any,
    *,
    guards_hooks: bool,
) -> Traced:
    """A call of ``root``, compiled by ``backend``. ``chosen``: which of the guards stay;
    ``guards_hooks``: of hooks torch makes none by default."""
    is_chosen = is_short = False
    parts: list[GuardParts] = []
    ordered: Any = frozenset()
    # Dynamo keeps ``choose`` where a trace fails: what it refers to is taken out of this list.
    choosers = [chosen]
    build = CheckFunctionManager.build_guards

    def choose(found: Sequence[Any]) -> list[bool]:
        nonlocal is_chosen
        is_chosen = True
        stays = choosers[0](found)
        parts.extend(map(_parts_of, found, stays))
        return stays

    def build_chosen(owner: Any, found: Any, *about: Any, **options: Any) -> Any:
        nonlocal is_short, ordered
        if any(one is root.__code__ for one in about):
            is_short, ordered = not is_chosen, owner.output_graph.guard_on_key_order
            # Those of no name refuse sizes that became numbers.
            found = [one for one in found if not (is_short and one.name)]
        return build(owner, found, *about, **options)

    # dynamic=False, because numbers that differ between two runtimes of one class would else
    # become inputs. Dimensions that are marked vary all the same.
    entry = torch.compile(
        root,
        backend=backend,
        fullgraph=True,
        dynamic=False,
        # A fresh dict for each: torch.compile takes entries out of it.
        options={"guard_filter_fn": choose},
    )
    options = {"run_gc_after_compile": False}  # Captures do, before they begin.
    if guards_hooks:
        options["skip_nnmodule_hook_guards"] = False
    unheard = Logger("graphrt.unheard", CRITICAL + 1)
    try:
        with (
            _tracing,
            dynamo_config.patch(options),
            # For debug logs alone, Dynamo reads names of functions out of each file it comes to.
            _replaced(symbolic_convert, "get_funcname", lambda *_: None),
            # Dynamo makes all guards before it asks which of them stay, and then those once more;
            # and tells of each the user's line, which nothing shows. torch 2.11 to 2.13; drop this
            # where it asks first.
            _replaced(CheckFunctionManager, "build_guards", build_chosen),
            _replaced(guards, "get_verbose_code_part", lambda code, _: code),
            # For its logs alone, Dynamo times the guards, with the CPU's caches emptied.
            _replaced(guards, "profile_guard_manager", lambda *_: 0.0),
            # The line of a branch on a size, of whose path torch leaves out what its own begins
            # with.
            _replaced(symbolic_shapes, "format_frame", _line_of),
            # Of what refuses the trace torch logs a page, beside the error that is translated.
            _replaced(torch._guards, "log", unheard),
            _replaced(fake_tensor, "log", unheard),
        ):
            results = entry(*args, **kwargs)
    except RuntimeError as error:
        if not is_told_not_to(error):
            raise
        return Traced(None)
    finally:
        choosers.clear()
    assert not is_short, "Dynamo makes guards of those that were chosen"
    for made in eval_frame._debug_get_cache_entry_list(root.__code__):
        call = FunctionType(made.code, root.__globals__, "root", None, root.__closure__)
        return Traced(results, call, made.guard_manager, parts, ordered)
    return Traced(results)


def guards_of(
    root: FunctionType, scope: Mapping[str, Any], parts: Iterable[GuardParts], ordered: Any
) -> Any:
    """Guards about what stands in ``scope`` and in the globals of ``root`` now, as ``traced`` has
    them of what stood there. ``ordered``: as there."""
    made = [Guard(*one.made_of) for one in parts if one.made_of is not None]
    state = OutputGraphGuardsState(
        local_scope=dict(scope),
        global_scope=root.__globals__,
        torch_function_mode_stack=[],
        guard_on_key_order=ordered,
        input_source_to_sizes_strides={},
        dual_level=0,
        functorch_layers=[],
        current_device=None,
        global_state_guard=GlobalStateGuard(),
        _guards=GuardsSet(OrderedSet(made)),
        _aotautograd_guards=[],
        skip_guards_check=True,
    )
    with _tracing, _replaced(guards, "get_verbose_code_part", lambda code, _: code):
        checks = CheckFunctionManager(
            root.__code__,
            OutputGraphCommon(state),
            runtime_global_scope=root.__globals__,
        )
    return checks.guard_manager


def options_of_traces() -> dict[str, object]:
    """Dynamo's configuration, but for folders, and for what ``traced`` says by ``dynamic``, which
    stays where a trace fails."""
    own = ("base_dir", "debug_dir_root", "automatic_dynamic_shapes", "assume_static_by_default")
    options = dynamo_config.save_config_portable()
    return {
        name: sorted(map(str, value)) if isinstance(value, set) else value
        for name, value in options.items()
        if name not in own
    }


def may_compile() -> bool:
    """Whether Dynamo compiles what it is given to compile."""
    return eval_frame._stance.stance == "default" and not dynamo_config.disable


def _device_context() -> Any:
    # To ask ``get_default_device`` may make a tensor.
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


_SETTINGS: Sequence[tuple[Callable[[], Any], Callable[[Any], object]]] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_device_context, lambda before: torch.set_default_device(before and before.device)),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_num_threads, torch.set_num_threads),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
)


def settings() -> tuple[Any, ...]:
    """What code may set of torch for all that follows, but for gradients and autocast."""
    return tuple(get() for get, _ in _SETTINGS)


@contextmanager
def as_if_traced() -> Iterator[None]:
    """While entered, models on this thread take the branch that they take where they are traced,
    and what of them is compiled by torch runs as it is. Not while another thread traces. An
    autocast, a mode of gradients, and ``settings`` that they leave are put back."""
    thread, is_compiling = threading.get_ident(), torch.compiler.is_compiling

    def is_compiling_here() -> bool:
        return threading.get_ident() == thread or is_compiling()

    kinds = ("cpu", "cuda")
    casts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds
    ]
    records, set_before = torch.is_grad_enabled(), settings()
    try:
        with (
            _tracing,
            torch.compiler.set_stance("force_eager"),
            _replaced(torch.compiler, "is_compiling", is_compiling_here),
        ):
            yield
    finally:
        torch._C._set_grad_enabled(records)
        for (_, put), before, now in zip(_SETTINGS, set_before, settings(), strict=True):
            if before != now:
                put(before)
        for kind, dtype, is_on in casts:
            torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_enabled(kind, is_on)


class _FilesOfTorch:
    """In place of the list that ``symbolic_shapes.uninteresting_files`` makes of some of them."""

    def __contains__(self, file: str) -> bool:
        return file.startswith(_FOLDER_OF_TORCH)


@contextmanager
def without_importing_export() -> Iterator[None]:
    """While entered, torch makes symbols without importing its export: 320 modules, for the name of
    one file whose lines are not the user's. Not while another thread traces."""
    files = _FilesOfTorch()
    with _tracing, _replaced(symbolic_shapes, "uninteresting_files", lambda: files):
        yield


def is_told_not_to(error: RuntimeError) -> bool:
    """Whether it says that Dynamo was told not to compile (``set_stance``)."""
    *_, (innermost, _) = walk_tb(error.__traceback__)
    return type(error) is RuntimeError and innermost.f_code.co_filename == eval_frame.__file__


def _line_of(frame: FrameSummary, **_: Any) -> str:
    return Source(frame.filename, frame.lineno or 0, frame.name).with_text


def stock_compile(
    target: Callable[..., Any], backend: Callable[..., Any], tell: Callable[[str], None]
) -> Callable[..., Any]:
    """torch.compile with its guards. ``tell``: hears why something is compiled again."""
    return torch._dynamo.optimize(backend, guard_fail_fn=lambda found: tell(found.reason))(target)


def nodes_by_line(module: fx.GraphModule) -> dict[int, fx.Node]:
    """By line of the code of ``module``, the node that it was written for."""
    nodes, written = [*module.graph.nodes], module._lineno_map or {}
    first = type(module).forward.__code__.co_firstlineno
    return {first + line: nodes[at] for line, at in written.items() if at is not None}


def python_of(operator: str, args: Sequence[Any], kwargs: Any) -> Callable[..., Any] | None:
    """The function that is ``ns::op`` on every device, for a call of it with these arguments; None
    where torch alone calls it."""
    known: Any = OPDEFS.get(operator)
    if known is None or set(known._backend_fns) != {None} or known._disabled_kernel:
        return None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if any(has_kernel(operator, key) for key in _KEYS_OF_OTHERS):
        return None
    function: Callable[..., Any] = known._init_fn
    types = {one.name: str(one.type) for one in known._opoverload._schema.arguments}
    given = dict(zip(types, args, strict=False)) | kwargs
    floats = [given[name] for name in given if "float" in types[name]]
    # torch makes a float of an integer, which would choose the dtype of results.
    if not all(one is None or isinstance(one, float) for one in floats):
        return None
    return function if [*types] == [*inspect.signature(function).parameters] else None


def is_seen_whole(op: torch._ops.OpOverload) -> bool:
    """Whether compilers call ``op`` as it is. Others they write out, as its kernels say in Python:
    those of compositions and of ``triton_op``, decompositions, kernels for gradients or modes."""
    name = op.name()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # The kernels for gradients that torch makes for a custom op call the op itself.
    gradients = () if op._schema.name in OPDEFS else _KEYS_OF_GRADIENTS
    # Whoever added to it has imported it.
    by_inductor = vars(sys.modules.get("torch._inductor.decomposition", torch))
    return not (
        any(has_kernel(name, key) for key in ("CompositeImplicitAutograd", *gradients))
        or op.py_kernels
        or op.python_key_table
        or singleton.find(op._schema.name).torch_dispatch_rules._data
        or any(op in decomposition_table[kind] for kind in decomposition_table)
        or op in by_inductor.get("decompositions", ())
    )


def chosen_overload(operator: str, args: Any, kwargs: Any) -> str:
    """The overload of ``ns::op`` that torch would call with these; "" for none."""
    with suppress(RuntimeError):
        name: str = torch._C._jit_resolve_packet(operator, *args, **kwargs)
        return name
    return ""


# -- Inductor


def compile_by_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], piece: str
) -> tuple[Any, Mapping[str, bytes]]:
    """An artifact that is called with what the piece takes; and the files of Inductor's folder that
    it has loaded, by name. ``inputs``: fake; their mode is the current tracing context's.
    ``piece``: names what is computed, and all sizes that it may have.
    """
    # Inductor's own caches tell neither ranges of a size apart, whose ends its code checks, nor the
    # bodies of operators that it writes out. Said in an option that nothing else reads, because
    # tuned kernels are not found by another ``cache_key_tag`` than that of the process that loads
    # them.
    patches = {"aot_inductor.metadata": {"piece": piece}, **options}
    is_tuned = options.get("coordinate_descent_tuning", inductor_config.coordinate_descent_tuning)
    if is_tuned:
        # Kernels that were pickled do not know that they were tuned, and would be at each start.
        patches["use_static_cuda_launcher"] = False
    loaded: list[str] = []
    _remove_cut_libraries()
    # Libraries are those of this artifact then, and lie in the folder that it is kept in.
    forget_libraries()
    noted = _replaced(PyCodeCache, "load_by_key_path", partial(_load_module, loaded))
    with _timed_behind_a_long_flush() if is_tuned else nullcontext(), noted:
        artifact = torch._inductor.standalone_compile(
            module,
            list(inputs),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": patches},
        )
    if is_tuned:
        _prepare_tuning()
    folder = Path(cache_dir())
    paths = {Path(path) for path in loaded}
    for key in {key for known in _LIBRARIES for key in known.cache}:
        paths.update(folder.glob(f"{key[1:3]}/{key}*.so"))
    return artifact, {
        str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if path.is_relative_to(folder)
    }


_load_by_key_path = PyCodeCache.load_by_key_path


def _load_module(loaded: list[str], key: str, path: str, *args: Any, **kwargs: Any) -> ModuleType:
    loaded.append(path)
    return _load_by_key_path(key, path, *args, **kwargs)


def own_passes() -> dict[str, str | None]:
    """The passes, and lists of functions, that are set in Inductor's configuration, which its text
    leaves out, each with what it says of itself; None: nothing."""
    options = inductor_config.get_config_copy()
    kinds = r"_?(pre_grad|post_grad|joint|pre_fusion|post_fusion)_custom_.*"
    found: dict[str, str | None] = {}
    for name in options:
        if re.fullmatch(kinds, name) and options[name] is not None:
            told = getattr(options[name], "uuid", lambda: None)()
            found[name] = None if told is None else repr(told)
        elif isinstance(options[name], list) and any(map(callable, options[name])):
            found[name] = None
    return found


def _prepare_tuning() -> None:
    """Let kernels know that they were tuned which lost it on their way from Inductor's workers, and
    time others as ``_timed_behind_a_long_flush``.

    Inductor tunes kernels at their first launch. Those found in its cache would be tuned once more.
    """
    for module in PyCodeCache.modules:
        for kernel, state in _tunable(module):
            if state == "hit":
                for result in kernel.compile_results:
                    result.config.found_by_coordesc = True
            elif "bench" not in vars(kernel):
                kernel.bench = partial(_bench, type(kernel).bench, kernel)


def _bench(bench: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _timed_behind_a_long_flush():
        return bench(*args, **kwargs)


def _timed_behind_a_long_flush() -> AbstractContextManager[None]:
    """While entered, what Inductor times it launches while the GPU is still busy.

    Before each launch it overwrites as many bytes as the L2 cache has. That takes less time than
    the launch, so that small kernels all seem to take as long as Python takes to launch them: which
    one tuning chose was chance (Llama-1B's step took 1.08 to 1.40 ms). So do torch 2.11 to 2.13.
    """
    return _replaced(benchmarker, "L2_cache_size", _LONG_FLUSH)


def _forget_untuned() -> None:
    """Let the next load make those kernels anew that this process has as they were untuned.

    To tune a kernel that a worker compiled, Inductor makes it once more here and keeps it in
    memory, where a load would find it with every configuration to try, or with the best of those
    that coordinate descent began at, and tune it again.
    """
    for path, module in [*PyCodeCache.modules_no_attr.items()]:
        if not all(_is_tuned(kernel, state) for kernel, state in _tunable(module)):
            PyCodeCache.modules_no_attr.pop(path, None)


def _is_tuned(kernel: Any, state: str) -> bool:
    if state == "miss" or not kernel.inductor_meta.get("coordinate_descent_tuning"):
        return state != "miss"
    configs = kernel.configs or [result.config for result in kernel.compile_results]
    return all(getattr(config, "found_by_coordesc", False) for config in configs)


def _tunable(module: ModuleType) -> Iterator[tuple[Any, str]]:
    """Kernels in ``module`` that Inductor tunes, with what it found of them in its cache when it
    made them."""
    for kernel in vars(module).values():
        about = getattr(kernel, "__dict__", {}).get("autotune_cache_info") or {}
        if state := about.get("autotune_cache_state"):
            yield kernel, state


@contextmanager
def partitioned(ops: Sequence[str], wrapper: Callable[[Any, Any], Any]) -> Iterator[None]:
    """While entered, Inductor compiles, and loads, graphs as partitions between ``ops``.

    ``wrapper``: of a partition and what torch says about it, makes what is called in its place.
    Inductor asks it when it decides on partitions, and when code is loaded. It is the process's:
    enter it inside a compilation, of which Dynamo permits one at a time.
    """
    holder = inductor_utils._unstable_customized_partition_wrapper
    options = {"graph_partition": True, "custom_should_partition_ops": list(ops)}
    with _replaced(holder, "wrapper", wrapper), inductor_config.patch(options):
        yield


def to_bytes(artifact: Any, files: Mapping[str, bytes]) -> bytes | None:
    """What ``from_bytes`` makes an artifact of in another process; None if it cannot be saved.
    ``files``: that it needs, as ``compile_by_inductor`` has them."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "artifact")
        try:
            artifact.save(path=str(path), format="binary")
        except (RuntimeError, AssertionError):
            return None
        # Not asked for where Inductor compiled nothing for a CPU: it would compile to find out.
        found = cpu_vec_isa.valid_vec_isa_list
        isas = found() if found.cache_info().currsize else None
        return pickle.dumps((isas, _plain_kernels(), files, path.read_bytes()))


def from_bytes(payload: bytes) -> Callable[..., Any]:
    """What ``to_bytes`` was given. Errors: whatever torch raises, about anything."""
    # An entry is code, and from a folder of this user's.
    isas, kernels, files, saved = pickle.loads(payload)
    for name, data in files.items():
        _put(Path(cache_dir(), name), data)
    _forget_untuned()
    # In this process: kernels come from its workers pickled, and do not know that they were tuned.
    in_process = inductor_config.patch(compile_threads=1)
    with in_process, _without_compiler(isas), _without_lowering(kernels):
        # Not ``CompiledArtifact.load``, which reads inside of assertions (torch 2.11 to 2.13):
        # ``python -O`` leaves these out.
        reader = BytesReader(saved)
        if (header := reader.read_bytes()) != CacheCompiledArtifact.CACHE_HEADER:
            raise ValueError(f"an artifact of another kind: {header!r}")
        reader.read_bytes()  # Of torch's source, as in the key of the entry.
        key = reader.read_str()
        torch.compiler.load_cache_artifacts(reader.read_bytes())
        return CacheCompiledArtifact._load_impl(nullcontext(), key)


def _put(path: Path, data: bytes) -> None:
    """Let Inductor find ``data``. It trusts what lies there, and to load half a library ends the
    process; where nothing lies it compiles."""
    with suppress(OSError):
        if path.read_bytes() == data:
            return
    codecache.write_atomic(str(path), data, make_dirs=True)
    forget_libraries()


_LIBRARIES: Sequence[Any] = (
    codecache.CppCodeCache,
    codecache.CppPythonBindingsCodeCache,
    codecache.CppWrapperCodeCache,
    codecache.HalideCodeCache,
)


def _remove_cut_libraries() -> None:
    """Of Inductor's folder, as a linker that was killed leaves them. Inductor uses what it finds:
    what is missing ends the process, or makes it take the CPU for one without vectors.

    A library that another process is linking is waited for, by Inductor's lock of it.
    """
    for path in filter(_is_cut, Path(cache_dir()).glob("??/*.so")):
        with suppress(OSError):  # Where nothing can be written, Inductor uses another folder.
            lock = Path(codecache.get_lock_dir(), f"{path.name.partition('.')[0]}.lock")
            with FileLock(lock, timeout=codecache.LOCK_TIMEOUT):
                if _is_cut(path):
                    path.unlink()


def _is_cut(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        header, size = file.read(64), file.seek(0, os.SEEK_END)
        if not header.startswith(_LITTLE_ENDIAN_ELF_OF_64_BITS):
            return size == 0
        # The table of sections stands at the end.
        start = int.from_bytes(header[40:48], "little")
        length, number = (int.from_bytes(header[at : at + 2], "little") for at in (58, 60))
        return len(header) < 64 or size < start + length * number
    return False


def forget_libraries() -> None:
    """Let Inductor look for C++ libraries in its folder. It finds in memory, by their code, also
    those that this process made in another folder, and those that could not be made."""
    for known in _LIBRARIES:
        known.cache_clear()


@contextmanager
def _without_compiler(isas: Sequence[Any] | None) -> Iterator[None]:
    """While entered, Inductor does not start the C++ compiler, or a process, to find out what is
    known: whether the header that it compiled beforehand is stale, which ``isas`` the CPU has."""
    found = cpu_vec_isa.valid_vec_isa_list if isas is None else lambda: isas
    with (
        _replaced(codecache, "_precompile_header", lambda *_, **__: ""),
        _replaced(cpu_vec_isa, "valid_vec_isa_list", found),
    ):
        yield


def _plain_kernels() -> list[str]:
    """The names of those of Inductor's ``extern_kernels`` that are functions of torch."""
    found = vars(import_module("torch._inductor.select_algorithm").extern_kernels)
    return [name for name, call in found.items() if call is getattr(torch, name, None)]


@contextmanager
def _without_lowering(kernels: Sequence[str]) -> Iterator[None]:
    """While entered, code is loaded without the modules of Inductor that make code, whose imports
    take most of the time of a load.

    torch 2.11 to 2.13 import them for one name each, which is given to who asks for it there;
    whoever asks for anything else imports them. ``kernels``: what ``_plain_kernels`` said where the
    code was made.
    """
    extern = _ExternKernels(**{name: getattr(torch, name) for name in kernels})
    # What a load asks of Inductor's graphs is whether a test wants the code.
    graphs = SimpleNamespace(save_output_code=None)
    given: list[tuple[str, str, str, Any]] = [
        ("compile_fx", "torch._inductor.standalone_compile", "_CompileFxKwargs", dict),
        ("decomposition", "torch._inductor.codecache", "select_decomp_table", None),
        ("graph", "torch._inductor.codecache", "GraphLowering", graphs),
        ("select_algorithm", _CODE, "extern_kernels", extern),
        ("codegen.memory_planning", _CODE, "_align", inductor_utils._align),
    ]
    thread = threading.get_ident()
    placed = [_StandIn(f"torch._inductor.{one[0]}", *one[1:], thread) for one in given]
    for one in placed:
        sys.modules.setdefault(one.__name__, one)
    if not hasattr(torch._inductor, "debug"):
        # Each call of the code asks it, so it stays until someone imports the module itself.
        asks = "torch._inductor.output_code"
        debug = _StandIn("torch._inductor.debug", asks, "RECORD_GRAPH_EXECUTION", False)
        torch._inductor.debug = debug
    try:
        yield
    finally:
        for one in placed:
            one.remove()


class _StandIn(ModuleType):
    """A module that is not imported, with the one name that modules called ``user``... ask for,
    on one ``thread``. Whoever else imports it, or asks for a name, gets the module itself."""

    def __init__(
        self, module: str, user: str, name: str, value: Any, thread: int | None = None
    ) -> None:
        super().__init__(module)
        del self.__spec__  # Which import statements ask for, also where they find this.
        self._given = user, name, value, thread

    def __getattr__(self, name: str) -> Any:
        user, known, value, thread = self._given
        asking: Any = sys._getframe(1)
        while "importlib" in asking.f_code.co_filename:
            asking = asking.f_back
        is_user = asking.f_globals.get("__name__", "").startswith(user)
        is_user = is_user and thread in (None, threading.get_ident())
        if is_user and name == known:
            return value
        is_import = name == "__spec__" and not is_user
        is_there = sys.modules.get(self.__name__, self) is not self
        if name.startswith("__") and not is_import and not is_there:
            raise AttributeError(name)  # For who looks at all modules.
        self.remove()
        return getattr(import_module(self.__name__), name)

    def remove(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


class _ExternKernels(SimpleNamespace):
    """Some of Inductor's ``extern_kernels``; the module is imported for others."""

    def __getattr__(self, name: str) -> Any:
        owner = import_module("torch._inductor.select_algorithm").extern_kernels
        return getattr(owner, name)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def fast_call(artifact: Any) -> Callable[..., Any]:
    """What calling ``artifact`` calls at its bottom, from the second call on: code of Inductor, out
    of the frames of AOTAutograd. ``artifact`` itself where these change arguments or results.

    Its ``recorded`` does not check layouts: for recordings, which keep tensors that were checked.
    """
    slow = getattr(artifact, "_compiled_fn", artifact)
    if getattr(slow, "_torchdynamo_disable", False):
        # What calls pieces keeps Dynamo off already.
        slow = getattr(slow, "__wrapped__", slow)
    codes: list[Callable[[list[Any]], Any]] = []
    is_known = False

    def other_call(args: tuple[Any, ...]) -> Any:
        nonlocal is_known
        seen: list[tuple[Any, list[Any], Any]] = []

        def look(graph: Any, inputs: Any, run: Callable[[Any, Any], Any]) -> Any:
            given = list(inputs)
            found = run(graph, inputs)  # It empties ``inputs``.
            seen.append((graph.current_callable, given, found))
            return found

        if is_known or threading.get_ident() in _watchers:
            return slow(*args)
        with _watched(look):
            results = slow(*args)
        is_known = True
        if len(seen) == 1 and _are_same(seen[0][1], args) and _are_same(seen[0][2], results):
            codes.extend((seen[0][0], without_checks(seen[0][0])))
        return results

    def caller(number: int) -> Any:
        def call(*args: Any) -> Any:
            # Products refuse to write their results for parameters while gradients are recorded.
            if not codes or _watchers or torch.is_grad_enabled():
                return other_call(args)
            return codes[number](list(args))

        return call

    call = caller(0)
    call.recorded = caller(1)
    return call  # type: ignore[no-any-return]


def without_checks(code: Any) -> Any:
    """Code of Inductor that does not compare sizes and strides with those it was compiled for."""
    function = getattr(code, "__func__", code)
    scope = getattr(function, "__globals__", {})
    if _CHECK not in scope:
        return code
    own = FunctionType(
        function.__code__,
        scope | {_CHECK: lambda *_: None},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return own if function is code else MethodType(own, code.__self__)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """The same tensors, and equal numbers."""
    return len(some) == len(others) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(some, others, strict=True)
    )


def versions(kept: CompileCache) -> Mapping[str, str]:
    """What of graphrt, torch and Python compiled code depends on."""
    return {
        "graphrt": _version("graphrt"),
        "torch": torch.__version__,
        "torch source": _source_of_torch(kept).hex(),
        "python": sys.version,
        "triton": _version("triton"),
    }


_SOURCE = (*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES, ".cpp", ".ld")
"""How the files end that ``torch_key`` reads. Not bytecode: imports write that."""


def _source_of_torch(kept: CompileCache) -> bytes:
    """A hash of torch's source, which Inductor asks for too. It is kept under size and time of each
    file, because to read them all takes ten times as long as to ask for these."""
    files = _source_files(torch.__path__[0])
    key = key_of({"torch": torch.__version__, "files": files})
    found = kept.read(key)
    if isinstance(found, bytes) and len(found) == sha256().digest_size:
        with suppress(RuntimeError, AssertionError):  # It is known already; before 2.13 the latter.
            torch_key.set(found)  # type: ignore[attr-defined]
        return torch_key()
    found = torch_key()
    kept.write(key, found, {"piece": "hash of torch's source"})
    return found


@cache
def _source_files(folder: str) -> list[tuple[str, int, int]]:
    """Path, size and time of each, as they were when this process first asked."""
    return sorted(_files_in(folder))


def _files_in(folder: str) -> Iterator[tuple[str, int, int]]:
    for item in os.scandir(folder):
        if item.is_dir():
            yield from _files_in(item.path)
        elif item.name.endswith(_SOURCE):
            state = item.stat()
            yield item.path, state.st_size, state.st_mtime_ns


def _version(package: str) -> str:
    """Of the package, whether it is imported or not; "" for one that is not installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


@cache
def device_name(device: torch.device) -> str:
    """What compiled code for ``device`` depends on, in words."""
    if device.type == "cpu":
        # Not Inductor's own question for instruction sets, which starts processes to try each: what
        # it finds follows from what the CPU says that it has, and from the compiler.
        asked = re.compile(r"_is_\w+_supported")
        has = [
            name for name in dir(torch.cpu) if asked.fullmatch(name) and getattr(torch.cpu, name)()
        ]
        compiler = get_cpp_compiler()
        known = (torch.backends.cpu.get_cpu_capability(), *has, compiler)
        return f"{' '.join(known)} {get_compiler_version_info(compiler)}"
    # Not Inductor's own question, which hashes the source of Triton to say its version too.
    about = get_interface_for_device(device).get_device_properties(device)
    return f"{about.name} {DeviceProperties.create(device)}"


# -- calls of compiled code


Watcher = Callable[[Any, Any, Callable[[Any, Any], Any]], Any]
"""Is called in place of compiled code: with its graph, its inputs, and what runs it."""


_watchers: dict[int, list[Watcher]] = {}
"""Of the calls of Inductor's code, by thread; the last one counts."""
_watching = threading.Lock()


@contextmanager
def _watched(watcher: Watcher) -> Iterator[None]:
    """While entered, this thread's calls of Inductor's code are made by ``watcher``."""
    thread = threading.get_ident()
    with _watching:
        if not _watchers:
            _replace_call(CompiledFxGraph.__call__)
        _watchers.setdefault(thread, []).append(watcher)
    try:
        yield
    finally:
        with _watching:
            _watchers[thread].pop()
            if not _watchers[thread]:
                del _watchers[thread]
            if not _watchers:
                original = vars(CompiledFxGraph)["__call__"].__wrapped__
                CompiledFxGraph.__call__ = original  # type: ignore[method-assign]


def _replace_call(original: Any) -> None:
    @wraps(original)
    def call(graph: Any, inputs: Any) -> Any:
        watchers = _watchers.get(threading.get_ident())
        return watchers[-1](graph, inputs, original) if watchers else original(graph, inputs)

    CompiledFxGraph.__call__ = call  # type: ignore[assignment, method-assign]


def compiled_code_refused() -> AbstractContextManager[None]:
    """While entered, code of Inductor that this thread runs raises ``UnrecordedCodeError``.

    No recorder sees what it launches.
    """
    return _watched(_refuse)


def _refuse(graph: Any, inputs: Any, run: Any) -> Any:
    raise UnrecordedCodeError(
        "compiled code in a recording",
        expected="compiled pieces of the runtime, each recorded as one node",
        found=f"code of Inductor that was called directly, at {caller_source().with_text}",
        do="let the runtime compile it (level 3), or leave it uncompiled on the simulated device",
    )
