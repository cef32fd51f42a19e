"""Break points: where a PIECEWISE capture ends a segment and plain Python runs between graphs.

A break point finds the recorder through the forward context. Without one, or in any other
mode, it is a plain call: a FULL capture records the function with the rest.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch

from graphrt.batch import RuntimeMode
from graphrt.config.checked import check_callable, check_choice, check_type, checked_list
from graphrt.context import ForwardContext, current_forward_context
from graphrt.errors import BreakError, ConfigError, LateInitError
from graphrt.graphs.recorder import ProgramRecorder, open_cuts
from graphrt.graphs.scope import CaptureScope
from graphrt.source import caller_source

P = ParamSpec("P")
R = TypeVar("R")

StubWhen = Literal["always", "unobserved"]


@overload
def break_point(fn: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def break_point(
    fn: None = None,
    /,
    *,
    name: str | None = None,
    out: str | None = None,
    capture_stub: Callable[..., Any] | None = None,
    stub_when: StubWhen = "always",
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def break_point(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    out: str | None = None,
    capture_stub: Callable[..., Any] | None = None,
    stub_when: StubWhen = "always",
) -> Any:
    """Make a function or method a break point: PIECEWISE programs run it between two graphs.

    Its arguments are bound at capture: tensors to their storage, host values to what they were,
    objects by reference. What it returns is copied into *static outputs* that the next graph reads.

    ``out``: keyword under which a replay passes the static output; the function writes it (and
    allocates its result where the keyword is absent or None). The preferred form: no copy.
    ``capture_stub``: runs at capture in place of the function; must return the same structure.
    ``stub_when="unobserved"``: only at captures that are not observed (``CaptureOptions.observe``),
    to save the time of a function that could run; the others see what the function itself writes.

    Aliasing: in a capture, the kernels before it have not run: its pool-owned arguments are zero.
    Compiled: Dynamo traces through it, as through any function. A capture cannot cut there:
              compile the parts between break points instead.
    Errors:   ``ConfigError`` for arguments of another kind, when it is made; ``BreakError`` where a
              PIECEWISE capture would have to cut compiled code.
    """
    for what, text in (("name", name), ("out", out)):
        check_type(f"{what} of a break point", text, str | None, "a string, or None")
    if capture_stub is not None:
        check_callable("capture_stub of a break point", capture_stub)
    check_choice("stub_when of a break point", stub_when, ("always", "unobserved"))
    if fn is None:
        return functools.partial(
            break_point, name=name, out=out, capture_stub=capture_stub, stub_when=stub_when
        )
    check_callable("the function of a break point (what it is called is name=)", fn)
    keyword_of_out = out
    label = name or _label(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _cutting_recorder(label)
        if recorder is None:
            return fn(*args, **kwargs)
        wanted = None if stub_when == "unobserved" and recorder.observe else capture_stub
        bound, rest, stub = _bind_self(fn, args, wanted)
        return _uncompiled(ProgramRecorder.run_eager)(
            recorder, bound, rest, kwargs, name=_site(label), out=keyword_of_out, stub=stub
        )

    return call


def break_call(fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Call ``fn`` as a break point at this one place."""
    label = _label(fn)
    recorder = _cutting_recorder(label)
    if recorder is None:
        return fn(*args, **kwargs)
    run_eager = _uncompiled(ProgramRecorder.run_eager)
    result: R = run_eager(recorder, fn, args, kwargs, name=_site(label))
    return result


def opaque_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    describe: Callable[[], tuple[Any, Sequence[int] | Mapping[int, str]]],
    recorded: Callable[..., Any],
) -> Any:
    """Call ``fn``, whose kernels no recorder sees; a recording takes the call as one node.

    ``describe()``: what it returns and writes, see ``Recording.opaque``. ``recorded``: the form of
    ``fn`` for recordings.
    """
    recorder = _open_recorder()
    return fn(*args) if recorder is None else recorder.opaque(recorded, args, describe)


def is_recording_here() -> bool:
    """Whether a recorder of this library records what the calling thread does."""
    return _open_recorder() is not None


def _open_scope() -> CaptureScope | None:
    context = current_forward_context()
    return None if context is None else context.capture_scope


def _open_recorder() -> ProgramRecorder | None:
    """What records the calling thread, of the library whose scope is entered."""
    scope = _open_scope()
    recorder = None if scope is None else scope.recorder
    return recorder if recorder is not None and recorder.records_here else None


@contextmanager
def break_at(
    model: torch.nn.Module,
    *,
    types: type[torch.nn.Module] | tuple[type[torch.nn.Module], ...] = (),
    names: str | Sequence[str] = (),
) -> Iterator[tuple[str, ...]]:
    """While entered, the ``forward`` of matching modules of ``model`` are break points.

    ``types``: module classes. ``names``: module paths, with ``*`` and ``?`` as in a shell. Yields
    the paths that matched. For models one cannot edit: programs captured inside keep their breaks.

    Errors: ``ConfigError`` if nothing matches, and for arguments of another kind.
    """
    check_type("model of break_at", model, torch.nn.Module, "a torch.nn.Module")
    classes = types if isinstance(types, tuple) else (types,)
    classes = checked_list("types of break_at", classes, type | UnionType, "module classes")
    paths = (names,) if isinstance(names, str) else names
    patterns = checked_list("names of break_at", paths, str, "module paths")
    matching = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, classes) or any(fnmatchcase(path, pattern) for pattern in patterns)
    }
    if not matching:
        raise ConfigError(
            "break_at",
            expected=f"a module of types {types!r} or names {patterns!r}",
            found=f"none in {type(model).__name__}",
            do="list the paths with model.named_modules()",
        )
    shadowed = {path: vars(module).get("forward") for path, module in matching.items()}
    try:
        for path, module in matching.items():
            module.forward = break_point(module.forward, name=path or type(module).__name__)
        yield tuple(matching)
    finally:
        for path, module in matching.items():
            vars(module).pop("forward", None)
            if shadowed[path] is not None:
                module.forward = shadowed[path]


def no_breaks() -> AbstractContextManager[ForwardContext]:
    """While entered, break points are plain calls: a PIECEWISE capture records through them."""
    outer = current_forward_context()
    return ForwardContext(breaks=False) if outer is None else outer.derive(breaks=False)


@contextmanager
def break_points_refused() -> Iterator[None]:
    """While entered, a break point that Dynamo traces is an error of its trace."""
    open_cuts.add(1)
    try:
        yield
    finally:
        open_cuts.add(-1)


def forbid_in_capture(what: str) -> None:
    """Raise ``LateInitError`` while this thread records; call it where ``what`` happens.

    For code that initialises, compiles or tunes on first use: the warm-up must have done it.
    """
    scope = _open_scope()
    if scope is not None and scope.device.is_capturing():
        raise LateInitError(
            what,
            expected="it to happen in a warm-up",
            found="its first use inside a capture",
            do="capture with warmups=1 or more, or initialise it before the scope",
        )


def _cutting_recorder(label: str) -> ProgramRecorder | None:
    if torch.compiler.is_dynamo_compiling():
        # Dynamo guards this number, so that a capture which would cut here traces anew.
        if open_cuts.count:
            _refuse_to_cut(label)
        return None
    return _recorder_here()


def _recorder_here() -> ProgramRecorder | None:
    """The open recorder, where a break point ends a segment of it."""
    context, recorder = current_forward_context(), _open_recorder()
    if context is None or recorder is None or not context.breaks:
        return None
    modes = {recorder.mode, context.cudagraph_runtime_mode}
    return recorder if modes == {RuntimeMode.PIECEWISE} else None


def _uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, which Dynamo leaves alone where a compiled model calls it."""
    # Its import takes seconds; where it has not happened, nothing is compiled.
    return _disabled(fn) if "torch._dynamo" in sys.modules else fn


# Kept, because torch takes longer to make one than most eager segments do to run.
_disabled = functools.cache(torch.compiler.disable)


def _refuse_to_cut(label: str) -> None:
    """Raise ``BreakError`` if this thread is the one that records in pieces."""
    if _recorder_here() is not None:
        raise BreakError(
            f"break point {label}",
            expected="plain Python, which a capture can cut",
            found="a function that Dynamo traces",
            do="name the operation a splitting op of the compiler, compile the parts between "
            "break points, or capture FULL",
        )


# What ``torch.compiler.disable`` sets, without its import of the whole compiler: Dynamo runs the
# function instead of tracing it. It cannot trace a raise of an error like ours in every release.
_refuse_to_cut._torchdynamo_disable = True  # type: ignore[attr-defined]


def _bind_self(
    fn: Callable[..., Any], args: tuple[Any, ...], stub: Callable[..., Any] | None
) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[..., Any] | None]:
    """Split a method's ``self`` off: an object is kept as it is, even where it is a dataclass."""
    code = getattr(fn, "__code__", None)
    takes_self = code is not None and code.co_varnames[:1] == ("self",) and code.co_argcount > 0
    if not args or inspect.ismethod(fn) or not takes_self:
        return fn, args, stub
    bound_stub = None if stub is None else functools.partial(stub, args[0])
    return functools.partial(fn, args[0]), args[1:], bound_stub


def _label(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def _site(label: str) -> str:
    """Name the break point and the user's line that led to it."""
    return f"{label} ({caller_source()})"
