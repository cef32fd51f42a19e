"""Which steps run in micro-batches: by their size, by what is captured, by what was measured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from graphrt.batch import (
    REQUESTS,
    TOKENS,
    BatchDescriptor,
    Decision,
    Reason,
    RuntimeMode,
    UBatchReason,
    last_ubatch_is_empty,
    ubatch_stride,
)
from graphrt.config import Plan
from graphrt.device.base import Device
from graphrt.errors import BatchError, ConfigError, shown
from graphrt.graphs import BufferSpec, OutputSpec
from graphrt.runner import CUDAGraphRunner
from graphrt.ubatch import (
    InputAxes,
    SMControl,
    SplitCallable,
    UBatchSlice,
    make_slices,
    wants_split,
)

Batch = tuple[int, bool, int, frozenset[RuntimeMode]]
"""Tokens, whether it is uniform, adapters, excluded modes: what a dispatcher decides by."""

_TIMED_DEVICES = ("cuda",)
"""Where the time of a replay is that of the model: a simulated one computes in turns."""
# CPython 3.11 looks a member up through a Python property; a step has no time for that.
_EAGER, _NOT_CAPTURED_YET = RuntimeMode.NONE, Reason.NOT_CAPTURED_YET


class SplitSteps:
    """``callable`` runs ``fn`` in micro-batches where ``decide`` says so.

    ``may_miss``: eager steps are permitted. ``times_ms``: see ``RuntimeReport.split_ms``.
    Errors: ``ConfigError`` for inputs that depend on the key.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        device: Device,
        plan: Plan,
        inputs: Sequence[BufferSpec],
        outputs: OutputSpec,
        sm_control: SMControl | None,
        *,
        may_miss: bool,
    ) -> None:
        axes, self._cuts_requests = _cut_axes(inputs, outputs)
        self.callable = SplitCallable(
            fn, device, plan.ubatch, sm_control=sm_control, input_axes=axes, outputs=outputs
        )
        self.times_ms: dict[BatchDescriptor, tuple[float, float]] = {}
        self._plan = plan
        self._may_cut = plan.ubatch.allow_eager and may_miss
        # Of graphs; eager steps are not cut then, because that was slower wherever it was measured.
        self._times_splits = device.name in _TIMED_DEVICES and plan.ubatch.auto_off
        self._unprofitable: frozenset[BatchDescriptor] = frozenset()

    def decide(
        self,
        runner: CUDAGraphRunner,
        batch: Batch,
        num_reqs: int,
        query_lens: Iterable[int] | None,
        unsplit: UBatchReason | None,
    ) -> tuple[Decision, Sequence[UBatchSlice] | None, UBatchReason | None]:
        """What a step runs, where an eager one is cut, and why it is not split."""
        num_tokens, uniform, _, _ = batch
        dispatch, config = runner.dispatcher.dispatch, self._plan.ubatch
        query_len, num_ubatches = self._plan.query_len if uniform else 1, config.num_ubatches
        if runner.split_failure:
            unsplit = UBatchReason.SPLIT_FAILED
        why = wants_split(num_tokens, uniform, config, unsplit)
        if why is not None:
            return dispatch(*batch), None, why
        if not ubatch_stride(num_tokens, query_len, num_ubatches):
            return dispatch(*batch), None, UBatchReason.TOO_FEW_TOKENS
        found = dispatch(*batch, num_ubatches)
        if found.mode is not _EAGER:
            padded = found.descriptor.num_tokens
            if last_ubatch_is_empty(num_tokens, padded, query_len, num_ubatches):
                return dispatch(*batch), None, UBatchReason.LAST_SLICE_EMPTY
            if found.descriptor in self._unprofitable:
                return dispatch(*batch), None, UBatchReason.NOT_PROFITABLE
            return found, None, None
        why = UBatchReason.NO_FULL_GRAPH
        if self._may_cut and num_tokens >= config.prefill_token_threshold:
            lens: list[int] | None = None
            if self._times_splits:
                why = UBatchReason.NOT_PROFITABLE
            elif query_lens is not None:
                lens = _check_query_lens(query_lens, num_tokens, num_reqs)
            elif uniform:
                lens = [query_len] * num_reqs
            elif not self._cuts_requests:  # Nothing is cut by requests: as if there was one.
                lens = [num_tokens]
            if lens is not None:
                slices = make_slices(lens, num_tokens, num_reqs, num_ubatches, query_len)
                return found, slices, None
        if found.reason is _NOT_CAPTURED_YET:
            sizes = {TOKENS: num_tokens, REQUESTS: num_reqs}
            runner.note_miss(*batch, num_ubatches, real_sizes=sizes)
        return dispatch(*batch), None, why

    def compare_times(self, runner: CUDAGraphRunner) -> frozenset[BatchDescriptor]:
        """Find out which split graphs are no faster than the unsplit ones, once for each, and split
        none of them from here on."""
        if not self._times_splits:
            return self._unprofitable
        missing = runner.missing()
        for mode, key in self._plan.capture_order:
            pair = (mode, key), (mode, replace(key, num_ubatches=1))
            is_new = key.num_ubatches > 1 and key not in self.times_ms
            if is_new and missing.keys().isdisjoint(pair):
                split, unsplit = runner.time_replays(pair)
                self.times_ms[key] = split / 1e6, unsplit / 1e6
        found = {key for key, (split, unsplit) in self.times_ms.items() if split >= unsplit}
        self._unprofitable = frozenset(found)
        return self._unprofitable

    def forget_times(self, keys: Iterable[BatchDescriptor]) -> None:
        """Compare these again once they are captured: other kernels take another time."""
        for key in keys:
            self.times_ms.pop(replace(key, num_ubatches=self._plan.ubatch.num_ubatches), None)


def _cut_axes(inputs: Any, outputs: OutputSpec) -> tuple[dict[str, InputAxes], bool]:
    """How inputs are cut into micro-batches, and whether anything has a row for each request.

    Errors: ``ConfigError`` for inputs that depend on the key.
    """
    if callable(inputs):
        raise ConfigError(
            "inputs of a runtime that splits steps into micro-batches",
            expected="one list of BufferSpecs for all keys",
            found="a function of the key",
            do="declare them for the largest key, or leave ubatch.num_ubatches at 1",
        )

    def place(spec: BufferSpec, axis: str) -> int | None:
        return spec.shape.index(axis) if axis in spec.shape else None

    axes = {
        spec.name: InputAxes(place(spec, TOKENS), place(spec, REQUESTS), spec.rebase)
        for spec in inputs
    }
    lengths = [length for dims in outputs.axes.values() for length in dims.values()]
    return axes, REQUESTS in lengths or any(cut.requests is not None for cut in axes.values())


def _check_query_lens(query_lens: Iterable[int], num_tokens: int, num_reqs: int) -> list[int]:
    """The tokens of each request. Errors: ``BatchError`` if they are not those of the batch."""
    try:
        # One more than there are requests tells of too many; an iterator may never end.
        lens = [operator.index(length) for length in islice(query_lens, num_reqs + 1)]
    except TypeError:
        lens = []
    if sum(lens) != num_tokens or len(lens) != num_reqs:
        raise BatchError(
            "query_lens",
            expected=f"{num_reqs} whole numbers that add up to num_tokens = {num_tokens}",
            found=shown(query_lens),
            do="pass the tokens of each request of this batch, in order",
        )
    return lens
