"""Cuts a callable into micro-batches: its arguments, its runs, and one result of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain, repeat
from typing import Any, Literal, Protocol

import torch

from graphrt.batch import REQUESTS, TOKENS, BatchDescriptor
from graphrt.config import UBatchConfig
from graphrt.context import CaptureContext, ForwardContext, current_forward_context
from graphrt.device.base import Device, Stream
from graphrt.errors import ConfigError, ContextError, InputNotSliceableError, OutputsDifferError
from graphrt.graphs import OutputSpec
from graphrt.ubatch.baton import Worker, WorkerCrew
from graphrt.ubatch.communication import MicroBatch
from graphrt.ubatch.slices import UBatchSlice, slices_of_key
from graphrt.values import dotted, map_leaves, parameters_of, tensors_of, walk


@dataclass(frozen=True, slots=True)
class InputAxes:
    """Which dimensions of an argument are cut. Neither: every micro-batch gets all of it.

    ``tokens``, ``requests``: the dimension that is as long as the batch has of them.
    ``rebase``: its values are places in the batch along this axis: each micro-batch counts them
      from its own first one, and places that it does not hold become the nearest that it does.
    """

    tokens: int | None = None
    requests: int | None = None
    rebase: Literal["tokens", "requests"] | None = None


KNOWN_AXES: Mapping[str, InputAxes] = {
    "input_ids": InputAxes(tokens=0),
    "positions": InputAxes(tokens=-1),
    "inputs_embeds": InputAxes(tokens=0),
    "intermediate_tensors": InputAxes(tokens=0),
}
"""Of arguments that models usually have. ``positions`` may be [tokens] or [3, tokens]."""


class CaptureHook(Protocol):
    """Whatever takes part in a capture: communicators that register memory, offload streams."""

    def before(self, pool_handle: Any) -> None:
        """Called before the recording begins, with the handle of its pool."""

    def join(self) -> None:
        """Called inside it, when all micro-batches are done: join what it forked."""


class SMControl(Protocol):
    """What an engine implements over its communication library and its matrix products.

    Launch sizes are part of a captured graph: a replay calls none of this.
    """

    def max_comm_sms(self) -> int | None:
        """The most that communication can use; None: no limit."""

    def get(self) -> tuple[int, int]:
        """Multiprocessors of communication and of computation, as they are set now."""

    def set_comm(self, number: int) -> None: ...

    def set_compute(self, number: int) -> None: ...


class SplitCallable:
    """Calls ``runnable`` whole, or cut into micro-batches where the forward context has slices.

    A uniform key with ``num_ubatches`` above 1 stands for its slices. In warm-ups and captures, and
    where the context itself has slices, micro-batches overlap; else they run one after the other:
    what a replay is compared with.
    ``outputs``: along which dimensions results are put together; without an entry, dimension 0.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        device: Device,
        config: UBatchConfig,
        *,
        sm_control: SMControl | None = None,
        input_axes: Mapping[str, InputAxes | int] | None = None,
        outputs: OutputSpec | None = None,
        capture_hooks: Sequence[CaptureHook] = (),
    ) -> None:
        if config.num_comm_sms >= device.limits.num_sms:
            raise ConfigError(
                f"ubatch.num_comm_sms = {config.num_comm_sms}",
                expected=f"fewer than the {device.limits.num_sms} multiprocessors of the device",
                found=str(config.num_comm_sms),
                do="leave some to computation",
            )
        self.runnable = runnable
        """What walks of what it reaches follow."""
        self._device = device
        self._config = config
        self._sm_control = sm_control
        given = {
            name: InputAxes(tokens=axes) if isinstance(axes, int) else axes
            for name, axes in (input_axes or {}).items()
        }
        self._axes = {**KNOWN_AXES, **given}
        self._outputs = {} if outputs is None else outputs.axes
        self._hooks = tuple(capture_hooks)
        self._names = parameters_of(runnable)
        self.__qualname__ = str(getattr(runnable, "__qualname__", type(runnable).__qualname__))
        with suppress(TypeError, ValueError):  # It may be no Python function.
            # For whoever asks which parameters it takes.
            self.__signature__ = signature(
                runnable.forward if isinstance(runnable, torch.nn.Module) else runnable
            )
        self._crews: dict[int, WorkerCrew] = {}
        self._comm: Stream | None = None
        self._num_comms = 0
        self._prepared: set[tuple[int, Stream, Stream]] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = current_forward_context()
        if context is None or context.ubatch is not None:
            return self.runnable(*args, **kwargs)
        slices, key = context.ubatch_slices, context.batch_descriptor
        if slices is not None:
            return self._run(context, slices, args, kwargs, overlaps=True)
        if key is None or key.num_ubatches == 1:
            return self.runnable(*args, **kwargs)
        slices = slices_of_key(key)
        scope = context.capture_scope
        is_recorded = scope is not None and scope.recorder is not None
        overlaps = is_recorded or isinstance(context, CaptureContext)
        return self._run(context, slices, args, kwargs, overlaps=overlaps)

    def prepare(self, num_ubatches: int) -> None:
        """Make the threads, and let each set libraries up for the current stream, before a
        recording opens there."""
        compute, comm = self._device.current_stream(), self._comm_stream()
        if (num_ubatches, compute, comm) not in self._prepared:
            prepare = partial(self._device.prepare_thread, (compute, comm))
            self._crew(num_ubatches).run([lambda _: prepare()] * num_ubatches)
            self._prepared.add((num_ubatches, compute, comm))

    def before_recording(self, pool_handle: Any) -> None:
        for hook in self._hooks:
            hook.before(pool_handle)

    def close(self) -> None:
        """End the threads, when no graph that they recorded is left. Idempotent."""
        for crew in self._crews.values():
            crew.close()
        self._crews.clear()
        self._prepared.clear()
        self._drop_comm()

    def _crew(self, num_ubatches: int) -> WorkerCrew:
        crew = self._crews.get(num_ubatches)
        if crew is None:
            crew = WorkerCrew(num_ubatches, self._config.stall_timeout_s)
            self._crews[num_ubatches] = crew
        return crew

    def _comm_stream(self) -> Stream:
        if self._comm is None:
            self._num_comms += 1
            name = f"graphrt comm {id(self):x}.{self._num_comms}"
            self._comm = self._device.stream(name)
        return self._comm

    def _drop_comm(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            self._device.forget_stream(comm)

    def _run(
        self,
        context: ForwardContext,
        slices: Sequence[UBatchSlice],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        overlaps: bool,
    ) -> Any:
        _require_match(slices, context.batch_descriptor)
        device, tokens = self._device, slices[-1].token_slice.stop
        calls = [self._cut(part, tokens, args, kwargs) for part in slices]
        scope = context.capture_scope
        recorder = None if scope is None else scope.recorder
        if recorder is not None and recorder.in_eager:
            recorder = None
        if overlaps:
            self.prepare(len(slices))
        compute, comm = device.current_stream(), self._comm_stream()
        siblings: list[MicroBatch] = []
        for number, part in enumerate(slices):
            start = part.token_slice.start
            siblings.append(MicroBatch(number, start, device, compute, comm, siblings))

        def body(worker: Worker | None, ubatch: MicroBatch) -> Any:
            tokens = slices[ubatch.index].token_slice
            own_args, own_kwargs = calls[ubatch.index]
            joined = nullcontext() if recorder is None else recorder.join_thread()
            own = context.of_micro_batch(ubatch, tokens.stop - tokens.start)
            with joined, own, ubatch.running(worker):
                return self.runnable(*own_args, **own_kwargs)

        bodies = [partial(body, ubatch=ubatch) for ubatch in siblings]
        num_sms = device.limits.num_sms
        budget = _sm_budget(self._sm_control, self._config.num_comm_sms, num_sms)
        with budget, nullcontext() if recorder is not None else device.watch_races():
            try:
                # Forked and joined always: work on a stream outside a recording would be lost.
                device.order(comm, compute)
                if overlaps:
                    results = self._crew(len(slices)).run(bodies)
                else:
                    results = [run(None) for run in bodies]
                device.order(compute, comm)
            except BaseException:
                if recorder is not None:
                    self._drop_comm()  # It may still record.
                raise
            if recorder is not None:
                for hook in self._hooks:
                    hook.join()
            return self._joined(results, slices)

    # -- inputs and outputs

    def _cut(
        self, part: UBatchSlice, num_tokens: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        def cut(name: str, value: Any) -> Any:
            return self._cut_value(name, value, part, num_tokens)

        names = chain(self._names, repeat(""))
        return list(map(cut, names, args)), {name: cut(name, kwargs[name]) for name in kwargs}

    def _cut_value(self, name: str, value: Any, part: UBatchSlice, num_tokens: int) -> Any:
        if value is None:
            return None
        axes = self._axes.get(name)
        if axes is None:
            if any(tensor.dim() and len(tensor) == num_tokens for tensor in tensors_of(value)):
                raise InputNotSliceableError(
                    f"argument {name or 'without a name'} of a step in micro-batches",
                    expected="to know how it is cut, because it is as long as the batch",
                    found=f"{num_tokens} rows, and no entry in input_axes",
                    do="add it to input_axes: InputAxes(tokens=0), or InputAxes() to pass it whole",
                )
            return value
        if isinstance(value, torch.Tensor):
            return _cut_tensor(name, value, axes, part)
        if isinstance(value, Mapping):
            return {key: _cut_tensor(name, member, axes, part) for key, member in value.items()}
        if axes == InputAxes():
            return value
        if isinstance(value, Sequence) or axes.tokens is None:
            raise InputNotSliceableError(
                f"argument {name} of a step in micro-batches",
                expected="a tensor, a mapping of tensors, or an object that tokens are cut of",
                found=type(value).__qualname__,
                do="pass a mapping, or InputAxes() in input_axes to pass it whole",
            )
        return value[part.token_slice]

    def _joined(self, results: Sequence[Any], slices: Sequence[UBatchSlice]) -> Any:
        """One result of those of all micro-batches, in their order."""
        walks = [list(walk(result)) for result in results]
        shapes = [[(n.path, n.kind, n.num_children, type(n.value)) for n in w] for w in walks]
        for number, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise _differ("", results, number)
        joined = iter(
            [
                self._joined_leaf(dotted(nodes[0].path), [node.value for node in nodes], slices)
                for nodes in zip(*walks, strict=True)
                if nodes[0].kind != "container"
            ]
        )
        return map_leaves(results[0], lambda _: next(joined))

    def _joined_leaf(self, path: str, values: list[Any], slices: Sequence[UBatchSlice]) -> Any:
        first = values[0]
        if not isinstance(first, torch.Tensor):
            for number, value in enumerate(values):
                if value is not first and value != first:
                    raise _differ(path, values, number)
            return first
        for number, value in enumerate(values):
            if (value.dim(), value.dtype) != (first.dim(), first.dtype) or not value.dim():
                raise _differ(path, values, number)
        declared = self._outputs.get(path, {})
        axes = [(dim, length) for dim, length in declared.items() if length in (TOKENS, REQUESTS)]
        dim, axis = axes[0] if axes else (0, TOKENS)
        rows, lengths = [value.size(dim) for value in values], _lengths(slices, axis)
        if not declared and rows != lengths and rows == _lengths(slices, REQUESTS):
            axis, lengths = REQUESTS, rows
        if (axes or not declared) and rows != lengths:
            raise OutputsDifferError(
                f"output {path!r} of a step in micro-batches",
                expected=f"{lengths} rows of the micro-batches along dimension {dim}: {axis}",
                found=str([tuple(value.shape) for value in values]),
                do="return one row for each token or request of the micro-batch, and say in "
                "outputs along which dimension",
            )
        if axis == REQUESTS:
            # Of a request in two slices, the later one has its last token.
            following = [part.request_slice for part in slices[1:]]
            for number, after in enumerate(following):
                kept = after.start - slices[number].request_slice.start
                values[number] = values[number].narrow(dim, 0, kept)
        return torch.cat(values, dim)


def _lengths(slices: Sequence[UBatchSlice], axis: str) -> list[int]:
    """How many tokens or requests each micro-batch has."""
    rows = [part.token_slice if axis == TOKENS else part.request_slice for part in slices]
    return [each.stop - each.start for each in rows]


def sm_pair(control: SMControl | None, num_comm_sms: int, num_sms: int) -> tuple[int, int] | None:
    """Multiprocessors of communication and of computation in a split step; None: as they are."""
    most = None if control is None else control.max_comm_sms()
    comm = num_comm_sms if most is None else min(num_comm_sms, most)
    return None if control is None or comm == 0 else (comm, num_sms - comm)


@contextmanager
def _sm_budget(control: SMControl | None, num_comm_sms: int, num_sms: int) -> Iterator[None]:
    """While entered, communication has ``num_comm_sms`` of ``num_sms``, as far as it can use them,
    and computation the rest; then both what they had before."""
    pair = sm_pair(control, num_comm_sms, num_sms)
    if control is None or pair is None:
        yield
        return
    comm_before, compute_before = control.get()
    try:
        control.set_comm(pair[0])
        control.set_compute(pair[1])
        yield
    finally:
        try:
            control.set_comm(comm_before)
        finally:
            control.set_compute(compute_before)


def _require_match(slices: Sequence[UBatchSlice], key: BatchDescriptor | None) -> None:
    tokens = slices[-1].token_slice.stop
    if key is not None and (key.num_ubatches, key.num_tokens) == (len(slices), tokens):
        return
    raise ContextError(
        "a step in micro-batches",
        expected="as many slices as the key has micro-batches, over its padded tokens",
        found=f"{len(slices)} slices of {tokens} tokens, and the key {key}",
        do="make the slices of the key that is in the context",
    )


def _cut_tensor(name: str, value: torch.Tensor | None, axes: InputAxes, part: UBatchSlice) -> Any:
    if value is None:
        return None
    for dim, where in ((axes.tokens, part.token_slice), (axes.requests, part.request_slice)):
        if dim is not None:
            if not -value.dim() <= dim < value.dim() or value.size(dim) < where.stop:
                raise InputNotSliceableError(
                    f"argument {name} of a step in micro-batches",
                    expected=f"at least {where.stop} rows along dimension {dim}, padding included",
                    found=f"shape {tuple(value.shape)}",
                    do="pass it padded to the key, or correct its entry in input_axes",
                )
            value = value.narrow(dim, where.start, where.stop - where.start)
    if axes.rebase is not None:
        where = part.token_slice if axes.rebase == "tokens" else part.request_slice
        value = (value - where.start).clamp_(0, where.stop - where.start - 1)
    return value


def _differ(path: str, values: Sequence[Any], number: int) -> OutputsDifferError:
    def told(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"a tensor of shape {tuple(value.shape)}"
        return f"{type(value).__qualname__} {value!r}"[:80]

    one, other = told(values[0]), told(values[number])
    return OutputsDifferError(
        f"output {path!r} of a step in micro-batches" if path else "outputs of micro-batches",
        expected="tensors with a dimension to put them together along, and equal plain values",
        found=f"{one} of micro-batch 0, {other} of micro-batch {number}",
        do="return tensors, one row for each token or request of the micro-batch",
    )
