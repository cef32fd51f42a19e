"""What levels 1 to 3 make of a model: traced in an eager run, in place until its runtime ends.

Imported where something is compiled only: it loads the compiler, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch

from graphrt.batch import REQUESTS, TOKENS
from graphrt.compile import Compiled, CompileReport, PieceInfo, Stock
from graphrt.config import CompilationLevel, Resolved
from graphrt.device.base import Device
from graphrt.errors import CompileDuringCaptureError, CompileError, ConfigError, GraphrtError
from graphrt.events import Event, Invalidated, Observer
from graphrt.gc_pause import gc_paused
from graphrt.graphs import break_point
from graphrt.graphs.breaks import break_points_refused, is_recording_here, opaque_call
from graphrt.runner import CUDAGraphRunner, Example
from graphrt.runner.comparisons import Varying
from graphrt.runner.executor import Inputs


class CompiledPart:
    """``model``, or the module ``part`` inside it, compiled as ``resolved`` says.

    ``entry`` is what is called in place of ``model``. ``rank``: None where there are no others.
    Errors: ``ConfigError`` for a part that another runtime has compiled.
    """

    def __init__(
        self,
        resolved: Resolved,
        model: Callable[..., Any],
        inputs: Inputs,
        part: torch.nn.Module | None,
        impls: Mapping[str, Callable[..., Any]] | None,
        observer: Observer | None,
        rank: int | None,
    ) -> None:
        if part is not None and isinstance(part.forward, Compiled | Stock):
            raise ConfigError(
                "compile_part",
                expected="a module that no other runtime compiles",
                found="one that another runtime has compiled",
                do="close that runtime first",
            )
        plan, target = resolved.plan, model if part is None else part.forward
        self._part = part
        self._has_both_axes = not callable(inputs) and {TOKENS, REQUESTS} <= {
            axis for spec in inputs for axis in spec.axes
        }
        # A ``forward`` set on the instance hides its class's: ``restore`` puts it back.
        own = getattr(part, "__dict__", {})
        self._forward = {"forward": own["forward"]} if "forward" in own else {}
        self._is_whole = plan.level is not CompilationLevel.DYNAMO_AS_IS
        self._code = (
            Compiled(
                target,
                resolved.compile,
                limits={TOKENS: plan.max_num_batched_tokens, REQUESTS: plan.max_num_seqs},
                impls=impls,
                wrap=_as_segment,
                observer=observer,
                rank=rank or 0,
            )
            if self._is_whole
            else Stock(target, resolved.compile, refuse_now=_refuse_in_recordings, rank=rank or 0)
        )
        self.entry: Callable[..., Any] = self._code if part is None else model

    @property
    def report(self) -> CompileReport | None:
        """What was compiled; None before it was."""
        return self._code.report

    def guard(self, device: Device) -> bool:
        """Let ``device`` guard the code in recordings; return whether none may be observed, because
        its kernels run differently under the mode that does."""
        device.guard_compiled_code(self._code.refused)
        return self._code.is_opaque and device.name == "cuda"

    def hearing(self, observer: Observer | None) -> Observer:
        """``observer``, of a library. What it finds replaced may be a constant of the trace, which
        the next eager call compares."""

        def hear(event: Event) -> None:
            if isinstance(event, Invalidated):
                self._code.is_audit_due = True
            if observer is not None:
                observer(event)

        return hear

    def install(self) -> None:
        """Let the part be called compiled."""
        if self._part is not None:
            self._part.forward = self._code

    def trace(
        self,
        runner: CUDAGraphRunner,
        sizes: Mapping[str, int],
        like: Example | Mapping[str, torch.Tensor] | None,
    ) -> None:
        """Compile, in an eager run, before the first step and before what the model remembers on
        the host is noted: traces leave things there."""
        tokens, requests = sizes[TOKENS], sizes[REQUESTS]
        # A trace makes so many objects, most of which live on, that collections take long.
        refused = break_points_refused() if self._is_whole else nullcontext()
        with gc_paused(collects=False, ages=True), refused:
            if not self._is_whole or tokens != requests or tokens <= 2 or like is not None:
                self._trace(runner, tokens, requests, like)
                return
            try:
                # Of two sizes that are equal a trace would make one.
                self._trace(runner, tokens, requests - 1)
            except Exception as error:
                if isinstance(error, GraphrtError) and type(error) is not CompileError:
                    raise
                # A model of decode steps alone takes as many requests as tokens: one axis.
                with suppress(Exception):
                    self._trace(runner, tokens, tokens, as_one_axis=True)
                    return
                raise

    def _trace(
        self,
        runner: CUDAGraphRunner,
        tokens: int,
        requests: int,
        like: Example | Mapping[str, torch.Tensor] | None = None,
        *,
        as_one_axis: bool = False,
    ) -> None:
        def trace(run: Callable[[], Any], varying: Varying) -> None:
            code.trace(run, [(x, dim, TOKENS) for x, dim, _ in varying] if as_one_axis else varying)

        code = self._code
        first = {TOKENS: tokens, REQUESTS: requests}
        if self._part is not None and isinstance(code, Compiled):
            # Its arguments may be computed by the model around it.
            half = {axis: max(1, size // 2) for axis, size in first.items()}
            runner.trace(half, code.look, like)
        runner.trace(first, trace, like)
        if code.is_backed and requests > 1 and self._has_both_axes and not as_one_axis:
            runner.trace({TOKENS: tokens, REQUESTS: 1}, trace)
        if code.is_backed and tokens > 1:
            runner.trace({TOKENS: 1, REQUESTS: 1}, trace)

    def audit(self) -> None:
        """Errors: ``GuardAuditError`` for a change since the trace: a capture would not see it."""
        self._code.audit(again=True)

    def restore(self) -> None:
        """Put the part's own ``forward`` back."""
        part = self._part
        if part is not None and vars(part).get("forward") is self._code:
            del part.forward
            vars(part).update(self._forward)


def _refuse_in_recordings() -> None:
    """Errors: ``CompileDuringCaptureError`` while this thread records."""
    if is_recording_here():
        raise CompileDuringCaptureError(
            "compile level 1",
            expected="code that was compiled before it is captured",
            found="a call in a recording that torch would compile for",
            do="capture with cudagraph_num_of_warmups of 1 or more, or use level 2 or 3",
        )


def _as_segment(piece: Callable[..., Any], info: PieceInfo) -> Callable[..., Any]:
    """A splitting piece as a break point; a Python function given for its op cuts by itself.

    A recording takes an opaque piece as one node.
    """
    describe = info.describe
    if describe is not None:
        recorded = getattr(piece, "recorded", piece)
        return lambda *args: opaque_call(piece, args, partial(describe, args), recorded)
    if info.kind == "captured" or info.is_plain:
        return piece
    return break_point(name=info.name)(piece)
