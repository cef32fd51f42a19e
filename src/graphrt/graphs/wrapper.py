"""The wrapper: a callable that replays in the mode it was made for, and passes through otherwise.

It trusts the forward context and owns neither buffers nor policy. Outside a capture scope it can
only replay; ``__call__`` is on the path of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphrt.batch import BatchDescriptor, CUDAGraphMode, RuntimeMode
from graphrt.config.checked import check_callable, check_flags, check_type
from graphrt.context import ForwardContext, current_forward_context
from graphrt.errors import BreakError, ConfigError, shown
from graphrt.graphs.capture import capture_program
from graphrt.graphs.catalog import Programs
from graphrt.graphs.library import GraphLibrary
from graphrt.graphs.program import Program
from graphrt.graphs.scope import CaptureOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class CUDAGraphOptions:
    """How one wrapper captures.

    ``debug_log_enable``: Accepted, without effect: what is shown of a capture is its observer's
      choice.
    ``gc_disable``: Accepted, without effect: no capture ever collects.
    ``weak_ref_output``: True: later captures reuse the output's bytes; the output is an alias that
      keeps nothing allocated. False: the owning tensor (every piece but the last of a model
      captured in pieces).
    """

    debug_log_enable: bool = True
    gc_disable: bool = False
    weak_ref_output: bool = True

    def __post_init__(self) -> None:
        flags = ("debug_log_enable", "gc_disable", "weak_ref_output")
        check_flags("CUDAGraphOptions", **{name: getattr(self, name) for name in flags})


_COPY_PROTOCOL = frozenset(
    ("__copy__", "__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__setstate__")
)


class CUDAGraphWrapper:
    """Replays ``runnable`` in steps of ``runtime_mode``; everything else goes straight through.

    ``runtime_mode``: PIECEWISE or FULL, as ``RuntimeMode`` or ``CUDAGraphMode``.
    ``name``: the owner of its programs in ``library``; by default made from the runnable's type.

    Unknown attributes are read from the runnable; setting is not forwarded.
    Errors: ``ConfigError`` for another mode, arguments of another kind, or a name that another
            wrapper of this mode has.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        library: GraphLibrary,
        runtime_mode: RuntimeMode | CUDAGraphMode,
        cudagraph_options: CUDAGraphOptions | None = None,
        *,
        name: str | None = None,
    ) -> None:
        check_callable("the callable of a wrapper", runnable)
        check_type("library", library, GraphLibrary, "a GraphLibrary")
        expected = "CUDAGraphOptions"
        check_type("cudagraph_options", cudagraph_options, CUDAGraphOptions | None, expected)
        check_type("name", name, str | None, "a text")
        self.runnable = runnable
        self.library = library
        self.runtime_mode = _single_mode(runtime_mode)
        self.cudagraph_options = cudagraph_options or CUDAGraphOptions()
        default_name = getattr(runnable, "__qualname__", type(runnable).__qualname__)
        self._entries = library.catalog.add_owner(name, self.runtime_mode, default_name)
        self.owner = self._entries.owner
        library.watch_registrations(self.owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the program of the context's key, or call the runnable.

        Aliasing: a replay returns graph storage, valid until the next replay of any program of
                  the library. In a capture the values are undefined: the kernels have not run.
        Errors:   ``CaptureOutsideScopeError`` for an unseen key, ``ContextError`` for no key,
                  ``StaleInputError`` and ``UnkeyedValueError`` for arguments other than captured,
                  ``NestedReplayError`` in an eager segment of a program of the library.
        """
        context = current_forward_context()
        # One look-up on self: a class with __getattr__ pays for each (40 ns on CPython 3.11).
        entries = self._entries
        if context is None or context.cudagraph_runtime_mode is not entries.mode:
            return self.runnable(*args, **kwargs)
        if context.capture_scope is not None:
            return self._call_in_scope(context, args, kwargs)
        key = context.batch_descriptor
        if key is entries.memo_key:
            program = entries.memo_program
        else:
            program = self.library.require_program(entries, key)
        # Read, then called: CPython 3.11 does not specialise a method call of a slotted attribute.
        check = program.check
        check(args, kwargs)
        replay = program.replay  # only now: the first check installs it
        replay()
        return program.outputs

    def _call_in_scope(
        self, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run inline while something records; else replay, or capture on this call."""
        scope, key = context.capture_scope, context.batch_descriptor
        if self.library.device.is_capturing():
            return self.runnable(*args, **kwargs)
        if scope.library is not self.library or key is None:
            return self.library.require_program(self._entries, key)(*args, **kwargs)
        if scope.recorder is not None and scope.recorder.in_eager:
            raise BreakError(
                f"{self.owner} {self.runtime_mode.name}",
                expected="eager segments that call no wrapper of the mode being captured",
                found=f"called inside an eager segment of {scope.recorder.owner}",
                do="enter a ForwardContext with mode NONE in the segment, or unwrap it there",
            )
        entry = self.library.catalog.entry(self.owner, self.runtime_mode, key)
        is_new = scope.options.generation == "new"
        program = entry.staged if is_new else entry.valid_program
        if program is not None:
            return program(*args, **kwargs)
        options = self.options_within(scope.options)
        program = capture_program(
            self.library, self.owner, self.runtime_mode, key, self.runnable, args, kwargs, options
        )
        scope.host_of(self.runnable).keep_memos()
        return program.outputs

    def options_within(self, options: CaptureOptions) -> CaptureOptions:
        """``options`` of a scope, changed to what this wrapper asks."""
        weak = options.weak_outputs and self.cudagraph_options.weak_ref_output
        return replace(options, weak_outputs=weak)

    @property
    def concrete_cudagraph_entries(self) -> Mapping[BatchDescriptor, Program]:
        """Read-only: key -> program. A program appears only after its capture succeeded."""
        return Programs(self._entries)

    @property
    def graph_pool(self) -> Any:
        """Handle of the current generation's pool."""
        return self.library.graph_pool

    def unwrap(self, deep: bool = False) -> Callable[..., Any]:
        """Return the runnable; with ``deep`` the innermost one, through nested wrappers."""
        return innermost(self.runnable) if deep else self.runnable

    def __getattr__(self, name: str) -> Any:
        return read_from_runnable(self, name)


def innermost(runnable: Any) -> Any:
    """``runnable``, or what it runs in the end if it is a wrapper, of whichever class."""
    while hasattr(type(runnable), "concrete_cudagraph_entries"):
        runnable = runnable.runnable
    return runnable


def read_from_runnable(wrapper: Any, name: str) -> Any:
    """What a wrapper's ``__getattr__`` answers: the runnable's attribute."""
    # Found through __dict__: a copy or an unpickled wrapper has no runnable yet. How to copy it is
    # not the runnable's business either.
    kind = type(wrapper).__name__
    try:
        runnable = wrapper.__dict__[name if name in _COPY_PROTOCOL else "runnable"]
    except KeyError:
        raise AttributeError(f"{kind} without a runnable: {name!r}") from None
    try:
        return getattr(runnable, name)
    except AttributeError:
        raise AttributeError(
            f"neither {kind} nor its runnable of type "
            f"{type(runnable).__name__} has an attribute {name!r}"
        ) from None


def _single_mode(mode: RuntimeMode | CUDAGraphMode) -> RuntimeMode:
    single = mode
    if isinstance(mode, CUDAGraphMode) and not mode.separate_routine():
        single = mode.mixed_mode()
    if single is RuntimeMode.PIECEWISE or single is RuntimeMode.FULL:
        return single
    raise ConfigError(
        "CUDAGraphWrapper",
        expected="runtime mode PIECEWISE or FULL",
        found=shown(mode),
        do="wrap twice for a pair of modes: a FULL wrapper over a PIECEWISE one",
    )
