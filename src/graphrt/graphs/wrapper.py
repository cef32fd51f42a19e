"""The wrapper: a callable that replays in the mode it was made for, and passes through otherwise.

It trusts the forward context and owns neither buffers nor policy. Outside a capture scope it can
only replay; ``__call__`` is on the path of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphrt.batch import BatchDescriptor, CUDAGraphMode, RuntimeMode
from graphrt.context import ForwardContext, current_forward_context
from graphrt.errors import BreakError, ConfigError

if TYPE_CHECKING:
    from graphrt.graphs.library import GraphLibrary
    from graphrt.graphs.program import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class CUDAGraphOptions:
    """How one wrapper captures."""

    debug_log_enable: bool = True
    """Mark this wrapper's ``Captured`` events for display."""
    gc_disable: bool = False
    """Accepted, without effect: no capture ever collects."""
    weak_ref_output: bool = True
    """True: later captures reuse the output's bytes; the output is an alias that keeps nothing
    allocated. False: the owning tensor (every piece but the last of a model captured in pieces)."""


_COPY_PROTOCOL = frozenset(
    ("__copy__", "__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__setstate__")
)


class CUDAGraphWrapper:
    """Replays ``runnable`` in steps of ``runtime_mode``; everything else goes straight through.

    ``runtime_mode``: PIECEWISE or FULL, as ``RuntimeMode`` or ``CUDAGraphMode``.
    ``name``: the owner of its programs in ``library``; by default made from the runnable's type.

    Unknown attributes are read from the runnable; setting is not forwarded.
    Errors: ``ConfigError`` for another mode, or a name that another wrapper of this mode has.
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
        self.runnable = runnable
        self.library = library
        self.runtime_mode = _single_mode(runtime_mode)
        self.cudagraph_options = cudagraph_options or CUDAGraphOptions()
        default_name = getattr(runnable, "__qualname__", type(runnable).__qualname__)
        self._table = library.new_table(name, self.runtime_mode, default_name)
        self.owner = self._table.owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the program of the context's key, or call the runnable.

        Aliasing: a replay returns graph storage, valid until the next replay of any program of
                  the library. In a capture the values are undefined: the kernels have not run.
        Errors:   ``CaptureOutsideScopeError`` for an unseen key, ``ContextError`` for no key,
                  ``StaleInputError`` and ``UnkeyedValueError`` for arguments other than captured.
        """
        context = current_forward_context()
        # One look-up on self: a class with __getattr__ pays for each (40 ns on CPython 3.11).
        table = self._table
        if context is None or context.cudagraph_runtime_mode is not table.mode:
            return self.runnable(*args, **kwargs)
        if context.capture_scope is not None:
            return self._call_in_scope(context, args, kwargs)
        key = context.batch_descriptor
        # A key of None finds no program and is refused where that is noticed.
        program = table.memo_program if key is table.memo_key else table.find(key)
        # Read, then called: CPython 3.11 does not specialise a method call that finds a slot.
        check = program.check
        check(args, kwargs)
        replay = program.replay  # only now: the first check installs it
        replay()
        return program.outputs

    def _call_in_scope(
        self, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        scope = context.capture_scope
        builder = scope.builder
        if self.library.device.is_capturing():
            if builder is not None:
                builder.num_inlined += 1
            return self.runnable(*args, **kwargs)
        if builder is not None and builder.in_gap:
            raise BreakError(
                f"{self.owner} {self.runtime_mode.name}",
                expected="gaps that call no wrapper of the mode being captured",
                found=f"called inside a gap of {builder.owner}",
                do="enter a ForwardContext with mode NONE in the gap, or unwrap it there",
            )
        key = context.batch_descriptor
        if scope.library is not self.library:
            program = self._table.find(key)
            return program(*args, **kwargs)
        program = scope.find(self._table, key)
        if program is not None:
            return program(*args, **kwargs)
        return scope.capture(
            self._table, key, self.runnable, args, kwargs, self.cudagraph_options
        ).outputs

    @property
    def concrete_cudagraph_entries(self) -> Mapping[BatchDescriptor, Program]:
        """Read-only: key -> program. An entry appears only after its capture succeeded."""
        return self._table.view

    @property
    def graph_pool(self) -> Any:
        """Handle of the current generation's pool."""
        return self.library.graph_pool

    def unwrap(self, deep: bool = False) -> Callable[..., Any]:
        """Return the runnable; with ``deep`` the innermost one, through nested wrappers."""
        inner = self.runnable
        while deep and isinstance(inner, CUDAGraphWrapper):
            inner = inner.runnable
        return inner

    def __getattr__(self, name: str) -> Any:
        # Found through __dict__: a copy or an unpickled wrapper has no runnable yet. How to copy it
        # is not the runnable's business either.
        try:
            runnable = self.__dict__[name if name in _COPY_PROTOCOL else "runnable"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} without a runnable: {name!r}") from None
        try:
            return getattr(runnable, name)
        except AttributeError:
            raise AttributeError(
                f"neither {type(self).__name__} nor its runnable of type "
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
        found=str(mode),
        do="wrap twice for a pair of modes: a FULL wrapper over a PIECEWISE one",
    )
