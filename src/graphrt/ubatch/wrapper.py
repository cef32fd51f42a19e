"""Captures and replays a callable that may be cut into micro-batches, as vLLM wraps a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from graphrt.batch import BatchDescriptor, Reason, RuntimeMode
from graphrt.config import UBatchConfig
from graphrt.config.checked import check_callable, check_choice, check_type, checked_list
from graphrt.context import current_forward_context
from graphrt.errors import ConfigError, ContextError, MissError, shown
from graphrt.events import RanEager
from graphrt.graphs import CUDAGraphWrapper, GraphLibrary, OutputSpec, Program
from graphrt.graphs.catalog import Programs
from graphrt.graphs.wrapper import innermost, read_from_runnable
from graphrt.ubatch.split import CaptureHook, InputAxes, SMControl, SplitCallable


class UBatchWrapper:
    """Like ``CUDAGraphWrapper``, of steps that may be cut into micro-batches.

    ``runtime_mode``: FULL, or NONE for eager steps alone. The forward context decides: with
    ``ubatch_slices`` the step is cut, and a FULL one is captured and replayed under its key, which
    says so too (``num_ubatches``). ``sm_control``: splits the multiprocessors while a cut step is
    issued. ``input_axes``: how arguments are cut, beside those that models usually have; a number
    is the dimension of the tokens. ``outputs``: along which axes results are put together.
    ``on_miss``: see ``RuntimeConfig``.

    Unknown attributes are read from the runnable; setting is not forwarded. Errors: ``ConfigError``
    for another mode, and arguments of another kind.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        library: GraphLibrary,
        runtime_mode: RuntimeMode,
        config: UBatchConfig,
        *,
        sm_control: SMControl | None = None,
        input_axes: Mapping[str, InputAxes | int] | None = None,
        outputs: OutputSpec | None = None,
        capture_hooks: Sequence[CaptureHook] = (),
        on_miss: Literal["eager", "strict"] = "eager",
        name: str | None = None,
    ) -> None:
        check_callable("the callable of a wrapper", runnable)
        check_type("library", library, GraphLibrary, "a GraphLibrary")
        if type(runtime_mode) is not RuntimeMode or runtime_mode is RuntimeMode.PIECEWISE:
            raise ConfigError(
                "UBatchWrapper",
                expected="runtime mode NONE or FULL",
                found=shown(runtime_mode),
                do="put a FULL one around what is captured in pieces",
            )
        check_type("config", config, UBatchConfig, "a UBatchConfig")
        check_type("outputs", outputs, OutputSpec | None, "an OutputSpec")
        check_type("input_axes", input_axes, Mapping | None, "axes by name of an argument")
        check_choice("on_miss", on_miss, ("eager", "strict"))
        check_type("name", name, str | None, "a text")
        expected = "a list of objects with the methods before and join"
        capture_hooks = checked_list("capture_hooks", capture_hooks, object, expected)
        self.runnable = runnable
        self.library = library
        self.runtime_mode = runtime_mode
        self._is_strict = on_miss == "strict"
        self._split = SplitCallable(
            runnable,
            library.device,
            config,
            sm_control=sm_control,
            input_axes=input_axes,
            outputs=outputs,
            capture_hooks=capture_hooks,
        )
        self.graphs: CUDAGraphWrapper | None = None
        """Captures and replays; None for mode NONE."""
        self.owner = name or self._split.__qualname__
        if runtime_mode is RuntimeMode.FULL:
            self.graphs = CUDAGraphWrapper(self._split, library, runtime_mode, name=name)
            self.owner = self.graphs.owner
        self._entries = library.catalog.of_owner(self.owner, RuntimeMode.FULL)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the program of the context's key, capture it in a scope, or run the runnable.

        Aliasing: as ``CUDAGraphWrapper``; what an eager split returns is the caller's own.
        Errors:   those of ``CUDAGraphWrapper``; ``ContextError`` for slices in a PIECEWISE step,
                  and for slices that are not those of the key; ``UBatchBusyError`` for a second
                  thread;
                  ``InputNotSliceableError``; ``OutputsDifferError``; what a micro-batch raises.
        """
        context = current_forward_context()
        if context is None or context.ubatch is not None:
            return self.runnable(*args, **kwargs)
        mode, graphs = context.cudagraph_runtime_mode, self.graphs
        if mode is not RuntimeMode.FULL:
            if mode is RuntimeMode.PIECEWISE and context.ubatch_slices is not None:
                raise ContextError(
                    f"a PIECEWISE step of {context.batch_descriptor} in micro-batches",
                    expected="mode FULL or NONE, because pieces would be replayed over the same "
                    "memory while they overlap",
                    found="ubatch_slices in a PIECEWISE step",
                    do="run it without slices, or eagerly with them",
                )
            return self._split(*args, **kwargs)
        if graphs is None:
            raise ContextError(
                f"a FULL step of {self.owner}",
                expected="steps of mode NONE, because it was made for these",
                found="FULL",
                do="make the wrapper with runtime_mode=RuntimeMode.FULL",
            )
        key = context.batch_descriptor
        if context.capture_scope is None:
            if key is not self._entries.memo_key and self._is_called_off(key):
                return self._run_called_off(key, args, kwargs)
        elif key is not None and not self.library.device.is_capturing():
            self.prepare(key)
        return graphs(*args, **kwargs)

    def prepare(self, key: BatchDescriptor) -> None:
        """Before a recording of ``key``: make the threads ready, and call capture hooks."""
        if key.num_ubatches > 1:
            self._split.prepare(key.num_ubatches)
            self._split.before_recording(self.library.graph_pool)

    def _is_called_off(self, key: BatchDescriptor | None) -> bool:
        """True for an unsplit step that only a split program exists for."""
        programs = self.concrete_cudagraph_entries
        if key is None or key.num_ubatches > 1 or key in programs:
            return False
        return any(replace(other, num_ubatches=1) == key for other in programs)

    def _run_called_off(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # To capture now would be a pause of a step, for a graph that is rarely needed.
        if self._is_strict:
            raise MissError(
                f"{self.owner}, {key}",
                reason=Reason.UBATCH_ABORTED,
                expected="a graph, because misses are errors here",
                found="a split program of this key alone",
                do="capture the unsplit key as well",
            )
        self.library.emit(
            RanEager(Reason.UBATCH_ABORTED, key.num_tokens, key.num_reqs or 0, key.uniform, 0.0)
        )
        return self.runnable(*args, **kwargs)

    @property
    def concrete_cudagraph_entries(self) -> Mapping[BatchDescriptor, Program]:
        """Read-only: key -> program. A program appears only after its capture succeeded."""
        return Programs(self._entries)

    def unwrap(self, deep: bool = False) -> Callable[..., Any]:
        """Return the runnable; with ``deep`` the innermost one, through nested wrappers."""
        return innermost(self.runnable) if deep else self.runnable

    def close(self) -> None:
        """End the threads, after the library has retired their programs. Idempotent."""
        self._split.close()

    def __getattr__(self, name: str) -> Any:
        return read_from_runnable(self, name)
