"""Runs beside those of steps: comparisons with eager, times, a trace. They put state back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any

import torch

from graphrt.batch import REQUESTS, TOKENS, BatchDescriptor, RuntimeMode
from graphrt.errors import GraphrtError, VerificationError, noting
from graphrt.events import Observer
from graphrt.externals import HostSnapshot
from graphrt.graphs import BoundBuffers, Entry, GraphLibrary, StateGuard
from graphrt.graphs.capture import guarded_storages
from graphrt.graphs.writes import storage_of
from graphrt.parallel import Lockstep
from graphrt.runner.examples import Sizes, Values, of_example
from graphrt.runner.executor import Call, Executor, ReadyGraph
from graphrt.runner.keys import batch_key
from graphrt.values import (
    bytes_of,
    dotted,
    format_path,
    own_copy,
    storage_start,
    tensors_of,
    walk,
)
from graphrt.verify import (
    NUM_ADVANCING_RUNS,
    Comparison,
    OtherRows,
    PaddingChecked,
    Rounding,
    RunState,
    Verification,
    WrittenRows,
    arbitrary_buffers,
    check_cut,
    check_padding,
    check_replay,
    compare,
    noted_eager_segments,
    require_compared,
    require_other_example,
    require_varied_for_memos,
    varied_padding,
    warn_unverified,
)
from graphrt.verify.run_state import SavedState

Varying = Sequence[tuple[torch.Tensor, int, str]]
"""Tensor, dimension, axis."""

_NONE: Values = MappingProxyType({})
TIMED_ROUNDS, TIMED_REPLAYS = 3, 2
MAX_COMPARED_BYTES = 1 << 26
"""Tensors of ``may_overwrite`` are compared whole up to this size together, or beside the rows that
an input names."""
ENOUGH_REQUESTS = 16
"""In steps of one kind that were right in micro-batches, for others of it to be trusted: few may
stand in an order, or be of a size, in which none changes another."""


@dataclass(kw_only=True, eq=False)
class Comparisons:
    """Which runs of one executor are compared, and with what.

    ``verifies`` False: first replays are played only, and cuts are trusted.
    ``reads_padding``: why results are meant to depend on the padding; empty if they are not.
    ``is_strict``: what no comparison can tell is an error.
    """

    executor: Executor
    lockstep: Lockstep | None
    observer: Observer
    verifies: bool
    tolerance: float | None
    reads_padding: str
    is_strict: bool

    def __post_init__(self) -> None:
        self._pads = False
        """Whether the next sample is a padded one."""
        self._advances_host = False
        """Whether runs advance host values, on which those of eager segments may depend."""
        self._rounding = Rounding()
        self._other_rows: dict[str, torch.Tensor] = {}
        """Of the sample before: what any padded row may hold, of a batch that is another one."""
        self.right_cuts: dict[Hashable, int] = {}
        """Kinds of calls whose cut was right, and how many requests those had together."""

    # -- of captures

    def first_replay(self, host: HostSnapshot, entry: Entry) -> None:
        """Play a new program once, on inputs other than those it was captured with.

        Compares it with eager, where ``host`` is what the callable remembered before its first
        warm-up: runs in succession of a batch that fills the key, and batches that are padded to
        it. State stays as it was.
        """
        advances = host.advances
        self._advances_host |= advances
        if self.verifies and self.lockstep is not None:
            # Runs meet in collectives: all ranks make as many.
            advances = not self.lockstep.served_by_all([not advances])[0]
        num_runs = NUM_ADVANCING_RUNS if advances else 1
        with self._among_ranks(entry):
            ready, call = self.executor.make_ready(entry), self.executor.example(entry.key, 1)
            whole, num_left = self._overwritten()
            state = self._state(whole)
            with state.put_back() as saved:
                if not self.verifies:
                    with noted_eager_segments():
                        self.executor.replay(ready, *call[:4])
                    return
                self._compare_full(ready, call, host, num_runs, num_left)
                entry.padding = self._compare_smaller(ready, host, state, saved, num_left)

    def _compare_full(
        self,
        ready: ReadyGraph,
        call: Call,
        host: HostSnapshot,
        num_runs: int,
        num_left: int,
    ) -> None:
        """Compare a new program on examples that fill its key."""
        entry, executor = ready.entry, self.executor
        captured, checked = executor.captured_with.get(entry.key), dict(call.values)
        subject = f"{entry.mode.name}, {entry.key}"
        reads_info = ready.program.reads_step_info and not executor.has_constant_info
        if captured is not None:
            require_other_example(subject, captured, (checked, call.step_info))
            if reads_info:
                _require_other_info(entry, captured[1], call.step_info)
        with of_example(), noting(f"in the check of the first replay of {subject}"):
            found = self.compare(ready, call, host, num_runs)
        if captured is not None:
            require_varied_for_memos(subject, captured[0], checked, host, is_strict=self.is_strict)
        ready.program.is_compared = require_compared(
            subject, found, num_left, is_strict=self.is_strict
        )
        if reads_info and executor.has_step_info:
            # The capture found none: one example may say what the callable does without.
            self.compare(ready, executor.example(entry.key, 0), host)
        if executor.options.warmups == 0:
            # The capture was the first run of all: a third one shows what counts runs, and
            # inputs other than before show what a first run kept of its own.
            for seed in (0, 1):
                self.compare(ready, executor.example(entry.key, seed))

    def _compare_smaller(
        self,
        ready: ReadyGraph,
        host: HostSnapshot,
        state: RunState,
        saved: SavedState,
        num_left: int,
    ) -> str:
        """Compare a new program on batches that are padded to its key; say in words what was."""
        entry, executor = ready.entry, self.executor
        subject = f"{entry.mode.name}, {entry.key}"
        captured = executor.captured_with.get(entry.key)
        compared: list[str] = []
        unlike: dict[str, Comparison] = {}
        uncompared = ""
        for sizes in self._sizes_to_pad(entry):
            # A batch of these sizes may have the rows that the full one left in scratch.
            state.restore(saved)
            doing = (
                f"in the check of {subject} with a batch of sizes {dict(sizes)}, as it is and "
                "padded: padded rows hold what the padding of their BufferSpec says"
            )
            with of_example(), noting(doing):
                call, others = executor.example_call(sizes, 1), captured and captured[0]
                found = self.compare_padding(ready, call, host, others)
            unlike |= found.unlike
            uncompared = uncompared or found.uncompared
            compared.append(" and ".join(f"{size} {axis}" for axis, size in sizes.items()))
        if not compared:
            return "no batch is padded to this key"
        told = f"compared with {', '.join(compared)}"
        if self.reads_padding:
            told = f"reads padding: {self.reads_padding}; {told}"
        if uncompared:
            told += f"; draws random numbers, without the unpadded batch: {uncompared}"
        if num_left:
            told += f"; without {num_left} of may_overwrite, too large without rows"
        if num_others := self._with_rows()[1]:
            told += f"; without the other rows of {num_others} of may_overwrite, too large"
        if unlike:
            left = "; ".join(
                f"{name} is left otherwise by a padded replay: {outcome}"
                for name, outcome in unlike.items()
            )
            # Rows of padding may have fallen on real ones; or it is scratch.
            warn_unverified(
                subject,
                expected="what the batch alone writes there, unless it is scratch that no "
                "later run reads",
                found=left,
                do="let padded rows point at a place of their own; may_overwrite={tensor: "
                "'input that indexes its rows'} compares the real rows",
                is_strict=self.is_strict,
            )
            told += f"; {left}"
        return told

    def _sizes_to_pad(self, entry: Entry) -> list[Sizes]:
        """Real sizes of batches padded to a key: of the one that missed it, else the smallest.

        Along an axis that the one that missed it fills, the smallest as well.
        """
        space = self.executor.space
        padded = space.axis_sizes(entry.key)
        smallest = [s for s in space.smaller_sizes(entry.mode, entry.key) if s != padded]
        if not smallest and entry.key.num_ubatches > 1:
            # Without padding: only this compares micro-batches with the batch as a whole.
            smallest = [padded]
        missed = entry.missed_sizes
        if missed is None or missed == padded or missed.keys() != padded.keys():
            return smallest
        full = {axis for axis, size in missed.items() if size == padded[axis]}
        return [missed, *(s for s in smallest if any(s[axis] < padded[axis] for axis in full))]

    # -- of steps

    def sample(self, ready: ReadyGraph, call: Call, *, is_prepared: bool = False) -> Any:
        """Replay a step and run it eagerly: on the padded views and as it is, in turns.

        ``is_prepared``: resources are, and what they set is compared: on the padded views.
        """
        with self._among_ranks(ready.entry):
            # A value may be an output of the run before, which the first replay here overwrites.
            staged = {**call.staged, **ready.bound.sizes_of(call.values, call.staged)}
            call = call._replace(values=own_copy(dict(call.values)), staged=staged)
            pads = self._pads and call.sizes != ready.bound.sizes and not is_prepared
            # Unpadded, ranks have sizes of their own, and runs that meet in collectives none in
            # common.
            self._pads = not self._pads and self.lockstep is None
            others, self._other_rows = self._other_rows, {}
            keeps_host = self._advances_host
            if not pads:
                outputs = self.compare(
                    ready, call, keeps_host=keeps_host, is_prepared=is_prepared
                ).outputs
            else:
                try:
                    outputs = self.compare_padding(
                        ready, call, others=others, keeps_host=keeps_host
                    ).outputs
                except VerificationError:
                    # Padding is not to blame where the graph itself is wrong, which this raises.
                    self.compare(ready, call, keeps_host=keeps_host)
                    raise
            for name in arbitrary_buffers(ready.bound):
                value, policy = call.values.get(name), ready.bound.specs[name].policy
                # Kept ones may be places in a state that holds something else by then.
                if value is not None and value.numel() and policy.kind != "keep":
                    self._other_rows[name] = value
            return outputs

    def run_cut(
        self, key: BatchDescriptor, call: Call, *, is_due: bool
    ) -> tuple[Any, GraphrtError | None]:
        """Run a call in micro-batches; the first ones of each kind, and what ``is_due``, also
        whole. Where these differ, returns what the whole batch did, and why."""
        slices = call.ubatch_slices
        assert slices is not None, "only cut calls are compared"
        pairs = pairwise(part.request_slice for part in slices)
        kind = (
            key.uniform,
            key.num_active_loras,
            any(before.stop > after.start for before, after in pairs),  # Cut inside a request.
            frozenset(call.values),
            # A model may take another way where there are more of them.
            tuple(size.bit_length() for size in call.sizes.values()),
        )
        known = self.right_cuts.get(kind, 0)
        # A list says something of each micro-batch, and nothing of the whole. Of several ranks none
        # runs more often than the others, because runs may meet.
        is_alone = type(call.step_info) in (list, tuple) or self.lockstep is not None
        if is_alone or (known >= ENOUGH_REQUESTS and not is_due):
            return self.executor.eager(key, call), None
        outputs, error = self._compare_cut(key, call, slices)
        if error is None:
            self.right_cuts[kind] = known + slices[-1].request_slice.stop
        return outputs, error

    # -- one comparison

    def compare(
        self,
        ready: ReadyGraph,
        call: Call,
        before_warmup: HostSnapshot | None = None,
        num_runs: int = 1,
        *,
        keeps_host: bool = False,
        is_prepared: bool = False,
    ) -> Verification:
        """Run one call eagerly and as a replay from the same state; raise if they differ.

        Eager means ``fn`` itself on the key's *padded* views: padding is not bit-neutral, because
        another number of rows may choose another kernel. Resources are prepared once.
        """
        key, bound, executor = ready.key, ready.bound, self.executor
        executor.outputs.expire()
        if not is_prepared:
            executor.stage(key, bound, call)

        # Each run stages again: the one before may have written buffers.
        def run_eager() -> Any:
            bound.stage(call.staged, call.values)
            return self._eager_compared(key, bound.views, call)

        def run_replay() -> Any:
            bound.stage(call.staged, call.values)
            return self._replay_compared(ready, call)

        whole, _ = self._overwritten()
        found = check_replay(
            mode=ready.mode,
            key=key,
            run_eager=run_eager,
            run_replay=run_replay,
            state=self._run_state(
                bound,
                call,
                bound.views,
                overwritten=whole,
                poisons=before_warmup is not None,
                keeps_host=keeps_host,
            ),
            runnable=executor.fn,
            before_warmup=before_warmup,
            tolerance=self.tolerance,
            find_moved=lambda: (
                *ready.program.find_moved(),
                *ready.program.find_replaced_by_resources(),
                *ready.program.find_set_otherwise(),
            ),
            kept=ready.program.unchecked,
            observer=self.observer,
            num_runs=num_runs,
            can_repeat=self.lockstep is None,
            observes=executor.options.observe != "never",
        )
        ready.program.accept_set_otherwise()
        return found

    def compare_padding(
        self,
        ready: ReadyGraph,
        call: Call,
        before_warmup: HostSnapshot | None = None,
        others: Values | None = None,
        *,
        keeps_host: bool = False,
    ) -> PaddingChecked:
        """Run one call as a padded replay and on the batch as it is; raise if real rows differ.

        Resources are prepared for the key and for the batch. See ``check_padding``.
        """
        key, bound, executor = ready.key, ready.bound, self.executor
        executor.outputs.expire()
        unpadded_key = batch_key(key, call.sizes)
        real = bound.real_views(call.sizes)

        def run_unpadded() -> Any:
            views = executor.own_views(unpadded_key, call.sizes, call.values)
            executor.prepare(unpadded_key, call.step_info)
            outputs = self._eager_compared(unpadded_key, views, call)
            for name, view in real.items():
                if bound.specs[name].written:  # Compared where replays write.
                    view.copy_(views[name])
            return outputs

        is_first = before_warmup is not None
        # Not compared as state is, because rows of padding may be written to a place of their own.
        scratch = self._overwritten()[0] if is_first else {}
        return check_padding(
            mode=ready.mode,
            key=key,
            bound=bound,
            sizes=call.sizes,
            stage=lambda: executor.stage(key, bound, call),
            replay=lambda: self._replay_compared(ready, call),
            run_padded=lambda: self._eager_compared(key, bound.views, call),
            run_unpadded=run_unpadded if call.staged == call.sizes else None,
            state=self._run_state(
                bound,
                call,
                real,
                scratch=scratch,
                poisons=is_first,
                varied=others or {},
                keeps_host=keeps_host,
            ),
            reads_padding=self.reads_padding,
            chosen_from=executor.outputs.chosen_from,
            tolerance=self.tolerance,
            before_warmup=before_warmup,
            observer=self.observer,
            can_repeat=self.lockstep is None,
            others=others or {},
            rounding=self._rounding,
        )

    def _compare_cut(
        self, key: BatchDescriptor, call: Call, slices: Sequence[Any]
    ) -> tuple[Any, GraphrtError | None]:
        """Run one call whole and in micro-batches. See ``check_cut``."""
        executor = self.executor
        options, outputs = executor.options, executor.outputs
        # A value may be an output of the run before, which runs may write.
        call = call._replace(values=own_copy(dict(call.values)))
        outputs.expire()
        bound = executor.unpadded(key, call.staged)
        whole, _ = self._overwritten()
        state = self._run_state(bound, call, bound.views, scratch=whole, poisons=False)
        may_write = {
            storage_of(tensor)
            for tensor in (
                *(bound.views[name] for name in call.values if name in bound.views),
                *state.tensors.values(),
                *(written.tensor for written in state.rows.values()),
                *whole.values(),
            )
        }
        may_write |= {workspace.storage for workspace in options.workspaces}
        if options.state is not None:
            may_write |= guarded_storages(options.state)

        # Floats, and what may hold any valid value.
        names = [
            name
            for name in call.values
            if (spec := bound.specs[name]).policy.arbitrary
            and (spec.dtype.is_floating_point or spec.policy.kind != "keep")
        ]
        *_, before, last = slices
        start = last.token_slice.start
        # A request that is cut inside belongs to both.
        others = {TOKENS: start, REQUESTS: before.request_slice.stop}
        first = {TOKENS: start, REQUESTS: last.request_slice.start}

        def first_rows(found: Any) -> Any:
            nodes = walk(outputs.bind(found).unpad(first))
            return {
                path: node.value for node in nodes if (path := dotted(node.path)) in outputs.axes
            }

        def run(key: BatchDescriptor) -> Any:
            cut = None if key.num_ubatches == 1 else slices
            return executor.run_eagerly(key, bound.views, call._replace(ubatch_slices=cut))

        return check_cut(
            key=key,
            stage=lambda key: executor.stage(key, bound, call),
            run=run,
            runnable=executor.fn,
            state=state,
            may_write=may_write,
            varied=partial(varied_padding, bound, others, names, by_real=True) if names else None,
            first_rows=first_rows,
            observes=options.observe != "never",
            chosen_from=outputs.chosen_from,
            tolerance=self.tolerance,
            observer=self.observer,
        )

    def _among_ranks(self, entry: Entry) -> AbstractContextManager[None]:
        return nullcontext() if self.lockstep is None else self.lockstep.comparing(entry)

    def _meet_ranks(self) -> None:
        if self.lockstep is not None:
            self.lockstep.before_run()

    def _eager_compared(self, key: BatchDescriptor, views: Values, call: Call) -> Any:
        executor = self.executor
        self._meet_ranks()
        modes = executor.library.device.modes_of_recording()
        with torch.no_grad(), executor.context(RuntimeMode.NONE, key, call.step_info), modes:
            return executor.outputs.bind(executor.fn(**views)).unpad(call.sizes)

    def _replay_compared(self, ready: ReadyGraph, call: Call) -> Any:
        self._meet_ranks()
        with torch.no_grad(), self.executor.context(ready.mode, ready.key, call.step_info):
            ready.program(**ready.bound.views)
        # Before results are read: that never ends where a rank failed before it replayed.
        self._meet_ranks()
        return ready.unpad(call.sizes)

    # -- state

    def _overwritten(self) -> tuple[dict[str, torch.Tensor], int]:
        written_rows, given = self.executor.written_rows, self.executor.options.may_overwrite
        return overwritten(tensor for tensor in given if tensor not in written_rows)

    def _run_state(
        self,
        bound: BoundBuffers,
        call: Call,
        views: Values,
        *,
        poisons: bool,
        overwritten: Values = _NONE,
        scratch: Values = _NONE,
        varied: Values = _NONE,
        keeps_host: bool = False,
    ) -> RunState:
        """Everything that a compared run may write. ``views``: what is real of the buffers.
        ``varied``: what their padding may hold as well. ``keeps_host``: each run begins with the
        host values that are there now."""
        specs = bound.specs
        tensors = {f"buffer {name}": view for name, view in views.items() if specs[name].written}
        tensors |= overwritten
        rows = {}
        for number, (tensor, name) in enumerate(self.executor.written_rows.items()):
            if name not in call.values:
                continue  # Optional, and not in this batch.
            real = [
                slice(call.sizes[size] if isinstance(size, str) else size)
                for size in specs[name].shape
            ]
            # Picked where the values are, because a GPU says by a wait how many are valid.
            index = call.values[name][tuple(real)].flatten().to(torch.int64)
            valid = index[(index >= 0) & (index < tensor.shape[0])]
            written = WrittenRows(tensor, valid.to(tensor.device, non_blocking=True))
            rows[f"rows {name} of may_overwrite {number}"] = written
        return RunState(
            self.executor.options.state,
            tensors,
            rows,
            self.executor.library.all_generators,
            scratch=scratch,
            others=self._rest_of_rows(bound, call, varied),
            poisons=poisons,
            host=HostSnapshot(self.executor.fn) if keeps_host else None,
            wait=self._wait_for(
                [*tensors.values(), *scratch.values(), *self.executor.written_rows]
            ),
        )

    def _with_rows(self) -> tuple[list[dict[str, tuple[torch.Tensor, str]]], int]:
        """The tensors of which an input names the rows, with its name, by storage; and how many
        there are whose other rows are not compared."""
        by_storage: dict[int, dict[str, tuple[torch.Tensor, str]]] = {}
        num_left = 0
        for number, item in enumerate(self.executor.written_rows.items()):
            if hasattr(item[0], "__tensor_flatten__"):  # It has no memory of its own.
                num_left += 1
            elif item[0].numel():
                of_storage = by_storage.setdefault(storage_start(item[0]), {})
                of_storage[f"other rows of may_overwrite {number}"] = item
        found, room = [], MAX_COMPARED_BYTES
        for items in by_storage.values():
            num_bytes = bytes_of([tensor for tensor, _ in items.values()]).numel()
            if num_bytes <= room:
                room -= num_bytes
                found.append(items)
            else:
                num_left += len(items)
        return found, num_left

    def keep_rows(self) -> Callable[[], None]:
        """Copy these tensors as they are now; what is returned puts them back, all their rows."""
        tensors = [[tensor for tensor, _ in each.values()] for each in self._with_rows()[0]]
        wait = self._wait_for(tensor for of_storage in tensors for tensor in of_storage)
        if wait is not None:
            wait()
        kept = [(whole, whole.clone()) for whole in map(bytes_of, tensors)]

        def put_back() -> None:
            if wait is not None:
                wait()
            with torch.inference_mode():
                for whole, copy in kept:
                    whole.copy_(copy)

        return put_back

    def _rest_of_rows(self, bound: BoundBuffers, call: Call, varied: Values) -> list[OtherRows]:
        """What a run may not write, of tensors of which it may write rows. Stages the call."""

        def all_rows(tensor: torch.Tensor, name: str) -> WrittenRows:
            named = [bound.views[name]]
            if name in varied and bound.specs[name].policy.arbitrary:
                named.append(varied[name])
            index = torch.cat([each.flatten().to(tensor.device, torch.int64) for each in named])
            # A negative one is taken from the end; what is no row is mostly written to the first.
            wrapped = torch.where(index < 0, index + len(tensor), index)
            return WrittenRows(tensor, torch.cat([index, wrapped]).clamp_(0, len(tensor) - 1))

        small, _ = self._with_rows()
        if small:
            bound.stage(call.staged, call.values)  # The padding names rows too.
        guard = self.executor.options.state
        guarded = set() if guard is None or not small else guarded_storages(guard)
        found = []
        for items in small:
            named = {name: all_rows(*item) for name, item in items.items()}
            is_guarded = any(storage_of(tensor) in guarded for tensor, _ in items.values())
            found.append(OtherRows(named, is_guarded=is_guarded))
        return found

    def _wait_for(self, written: Iterable[torch.Tensor]) -> Callable[[], None] | None:
        return wait_for(self.executor.library, self.executor.options.state, written)

    def _state(self, tensors: Values = _NONE) -> RunState:
        """What runs on examples may write."""
        wait = self._wait_for(tensors.values())
        guard = self.executor.options.state
        return RunState(guard, tensors, generators=self.executor.library.all_generators, wait=wait)

    # -- other runs on examples

    def time_replays(self, entries: Sequence[Entry]) -> list[int]:
        """Nanoseconds of a replay of each, on an example: the least of several, taken in turns.

        Until the device is done. State stays as it was.
        """
        executor, wait = self.executor, self.executor.library.synchronize
        least = [sys.maxsize] * len(entries)
        with self._state().put_back():
            calls = [(executor.make_ready(each), executor.example(each.key, 1)) for each in entries]
            for _ in range(TIMED_ROUNDS):
                for number, (ready, call) in enumerate(calls):
                    executor.replay(ready, *call[:4])
                    wait()
                    started = perf_counter_ns()
                    for _ in range(TIMED_REPLAYS):
                        ready.program.replay()
                    wait()
                    took = (perf_counter_ns() - started) // TIMED_REPLAYS
                    least[number] = min(least[number], took)
        return least

    def trace(self, sizes: Sizes, run: Callable[[Callable[[], Any], Varying], None]) -> None:
        """Give ``run`` a call of ``fn`` on an example of ``sizes``, as in an eager step, and the
        dimensions of its inputs that vary. State stays as it was."""
        executor = self.executor
        with self._state().put_back():
            key = BatchDescriptor(next(iter(sizes.values())))
            call = executor.example_call(sizes, 0)
            bound = executor.unpadded(key, sizes)
            executor.stage(key, bound, call)
            # Tensors of their own, because what they are marked with stays on them.
            views = {name: view.view_as(view) for name, view in bound.views.items()}
            varying = [
                (view, dim, axis)
                for name, view in views.items()
                for dim, axis in enumerate(bound.specs[name].shape)
                if isinstance(axis, str)
            ]
            with torch.no_grad(), executor.context(RuntimeMode.NONE, key, call.step_info):
                run(partial(executor.fn, **views), varying)


def overwritten(may_overwrite: Iterable[torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """What runs may overwrite without saying which rows, and how many of it are too large."""
    whole: dict[str, torch.Tensor] = {}
    room, num_left = MAX_COMPARED_BYTES, 0
    for tensor in may_overwrite:
        room -= tensor.nbytes
        if room >= 0:
            whole[f"may_overwrite {len(whole)}"] = tensor
        else:
            num_left += 1
    return whole, num_left


def wait_for(
    library: GraphLibrary, guard: StateGuard | None, written: Iterable[torch.Tensor]
) -> Callable[[], None] | None:
    """The wait of a ``RunState``: a GPU copies to pinned memory when its turn comes."""
    guarded = tensors_of(getattr(guard, "tensors", ()))
    on_host = any(t.device.type == "cpu" for t in [*written, *guarded])
    is_gpu = library.device.torch_device.type != "cpu"
    return library.synchronize if on_host and is_gpu else None


def _require_other_info(entry: Entry, captured: Any, step_info: Any) -> None:
    """Refuse a graph that holds what ``step_info`` said, where examples say the same in any part:
    nobody knows which parts the callable read."""
    both = [
        {node.path: node for node in walk(value) if node.kind != "container"}
        for value in (captured, step_info)
    ]
    same = [
        f"step_info{format_path(path)}"
        for path in dict.fromkeys([*both[0], *both[1]])
        if not (path in both[0] and path in both[1])
        or both[1][path].kind == "opaque"
        or compare(both[0][path].value, both[1][path].value).is_equal
    ]
    if same and not (captured is None and step_info is None):
        raise VerificationError(
            f"{entry.mode.name}, {entry.key}: step_info, read by the callable outside eager "
            "segments",
            expected="other values for each seed in all parts, because the graph holds those of "
            "the capture",
            found=f"the same for seeds 0 and 1, in one alone, or opaque: {', '.join(same)}",
            do="vary them with the seed; read them in an eager segment or pass a tensor if they "
            "change from step to step; Example(..., constant_info=True) if they never do",
        )
