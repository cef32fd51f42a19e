"""What captures and retirements clean up, in which order, and what they make room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from graphrt import (
    BufferSet,
    BufferSpec,
    CUDAGraphRunner,
    GraphBudget,
    OutputSpec,
    Reason,
    TensorStateGuard,
    Workspace,
    break_at,
)
from graphrt.batch import BatchDescriptor
from graphrt.device.simulated import SimulatedDevice
from graphrt.errors import (
    CaptureError,
    EscapedAllocationError,
    GraphMemoryError,
    InvalidProgramError,
    MutatedInputError,
    RetiredProgramError,
    StateAdvancedError,
)
from lab import KEY, Lab

OTHER, THIRD = BatchDescriptor(4), BatchDescriptor(2)


class WatchedDevice(SimulatedDevice):
    """Writes down when it is waited for and trimmed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[str] = []

    def synchronize(self, stream: Any = None) -> None:
        self.log.append("synchronize")
        super().synchronize(stream)

    def trim(self) -> None:
        self.log.append("trim")
        super().trim()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(WatchedDevice()) as lab:
        yield lab


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def graph_bytes(lab: Lab) -> int:
    """Bytes of the driver that no pool has: what graphs cost."""
    reading = lab.device.memory()
    return reading.total_bytes - reading.free_bytes - reading.reserved_bytes


def watch_resets(lab: Lab, log: list[str]) -> None:
    """Let the graphs of the first generation write their keys down when they are reset."""

    def reset(graph: Any, name: str, original: Callable[[], None]) -> None:
        if not graph.is_reset:
            log.append(name)
        original()

    for program in lab.library.generations[0].programs:
        [segment] = program.segments
        graph = segment.graph
        graph.reset = partial(reset, graph, f"reset {program.key.num_tokens}", graph.reset)


# --- captures that are refused


def escape(lab: Lab) -> None:
    kept = []

    def keeps(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x + 1

    lab.capture(lab.wrap(keeps, name="keeps"), torch.ones(4))


def write_input(lab: Lab) -> None:
    specs = [BufferSpec("x", ("rows",), torch.float32)]
    buffers = BufferSet(specs, {"rows": 8}, lambda key: {"rows": 8}, lab.device)
    lab.library.add_buffers(buffers)
    lab.capture(lab.wrap(lambda x: x.add_(1), name="writes"), **buffers.bind(KEY).views)


def advance_state(lab: Lab) -> None:
    counter = torch.zeros(4)
    lab.capture_all(lab.job(lab.wrap(lambda x: counter.add_(x), name="counts"), torch.ones(4)))


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (escape, EscapedAllocationError),
        (write_input, MutatedInputError),
        (advance_state, StateAdvancedError),
    ],
)
def test_refused_capture_resets_its_graphs(
    refused: Callable[[Lab], None], error: type[CaptureError]
) -> None:
    with Lab(SimulatedDevice(max_graphs=1)) as lab:
        with pytest.raises(error):
            refused(lab)
        assert graph_bytes(lab) == 0
        # The device holds one graph: this one.
        wrapper, x = lab.wrap(plus_one), torch.ones(4)
        lab.capture(wrapper, x)
        assert graph_bytes(lab) > 0
        assert torch.equal(lab.step(wrapper, x), x + 1)


def test_program_over_budget_leaves_its_generation() -> None:
    with Lab(budget=GraphBudget(max_bytes=64)) as lab:
        with pytest.raises(GraphMemoryError):
            lab.capture(lab.wrap(plus_one), torch.ones(1000))
        [generation] = lab.library.generations
        assert not generation.programs
        assert graph_bytes(lab) == 0


def test_dropped_program_leaves_its_generation(lab: Lab) -> None:
    wrapper = lab.wrap(plus_one)
    report = lab.capture_all(
        lab.job(wrapper, torch.ones(4)), gate=lambda job, phase: phase != "captured"
    )
    assert len(report.skipped) == 1
    [generation] = lab.library.generations
    assert not generation.programs
    assert not wrapper.concrete_cudagraph_entries


def test_known_failure_is_raised_as_a_copy(lab: Lab) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise OSError("no")

    wrapper = lab.wrap(fails)
    for _ in range(2):
        with pytest.raises(OSError, match="no") as caught:
            lab.capture(wrapper, torch.ones(4))
        [entry] = lab.library.failures
        assert caught.value is not entry.error
        assert entry.error.__traceback__ is None


@pytest.mark.parametrize("fails_on", [1, 2])
def test_state_of_a_failed_warmup_is_restored(lab: Lab, fails_on: int) -> None:
    state, calls = torch.zeros(4), []

    def advance(x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        calls.append(len(calls))
        if len(calls) == fails_on:
            raise OSError("after the write")
        return state * 2

    guard = TensorStateGuard([state])
    with pytest.raises(OSError, match="after the write"):
        lab.capture_all(lab.job(lab.wrap(advance), torch.ones(4)), state=guard, warmups=2)
    assert torch.equal(state, torch.zeros(4))


# --- scopes and generations


def test_scope_entry_trims_the_device(lab: Lab) -> None:
    lab.device.log.clear()
    with lab.library.capture_scope():
        assert lab.device.log == ["trim"]


def test_device_is_idle_before_graphs_are_reset(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(4)
    for key in (KEY, OTHER):
        lab.capture(wrapper, x, key=key)
    watch_resets(lab, lab.device.log)
    lab.device.log.clear()
    lab.library.retire()
    # Newest first.
    assert lab.device.log == ["synchronize", "reset 4", "reset 8", "trim"]


def test_retired_program_stays_retired_once_invalid(lab: Lab) -> None:
    program = lab.capture(lab.wrap(plus_one), x := torch.ones(4))
    program.invalidate(("weight",))
    with pytest.raises(InvalidProgramError, match="weight"):
        program(x)
    lab.library.retire()
    program.invalidate(("weight",))
    assert program.state == "retired"
    with pytest.raises(RetiredProgramError):
        program(x)


def test_oldest_lazy_generation_is_retired_first() -> None:
    with Lab(budget=GraphBudget(max_graphs=2), generation_size=1) as lab:
        wrapper, x = lab.wrap(plus_one), torch.ones(4)
        for key in (KEY, OTHER, THIRD):
            lab.capture(wrapper, x, key=key, scope={"generation": "lazy"})
        assert list(wrapper.concrete_cudagraph_entries) == [OTHER, THIRD]


def test_room_is_made_before_a_capture_needs_it() -> None:
    # The device refuses the second graph as soon as its recording ends.
    with Lab(SimulatedDevice(max_graphs=1), generation_size=1) as lab:
        wrapper, x = lab.wrap(plus_one), torch.ones(4)
        for key in (KEY, OTHER):
            lab.capture(wrapper, x, key=key, scope={"generation": "lazy"})
        assert list(wrapper.concrete_cudagraph_entries) == [OTHER]


def test_next_lazy_generation_freezes_workspaces_too() -> None:
    workspace = Workspace("scratch")
    with Lab(generation_size=1) as lab:
        wrapper, x = lab.wrap(plus_one), torch.ones(4)
        jobs = [lab.job(wrapper, x, key=key) for key in (KEY, OTHER)]
        lab.capture_all(*jobs, generation="lazy", resources=[workspace])
        older, newer = (g for g in lab.library.generations if g.kind == "lazy")
        lab.library.retire(older)
        assert workspace.is_frozen
        lab.library.retire(newer)
        assert not workspace.is_frozen


class Reserved:
    """A resource that keeps the keys it was reserved for."""

    def __init__(self) -> None:
        self.keys: list[BatchDescriptor] = []

    def reserve(self, max_key: BatchDescriptor) -> None:
        self.keys.append(max_key)

    def prepare(self, key: BatchDescriptor, step_info: Any) -> None: ...

    def freeze(self) -> None: ...


@pytest.mark.parametrize("num_reqs", [(2, 8, 4), (8, 4, 2), (2, 4, 8), (2, None, 4)])
def test_key_with_most_requests_is_reserved_for(lab: Lab, num_reqs: tuple[int | None, ...]) -> None:
    # A key that names no number of requests may have one for each token.
    resource, wrapper = Reserved(), lab.wrap(plus_one)
    keys = [BatchDescriptor(8, num_reqs=count, uniform=True) for count in num_reqs]
    keys.append(BatchDescriptor(4, num_reqs=4, uniform=True))
    lab.capture_all(
        *(lab.job(wrapper, torch.ones(4), key=key) for key in keys), resources=[resource]
    )
    [largest] = resource.keys
    assert (largest.num_tokens, largest.num_reqs or 8) == (8, 8)


# --- what serves, and what is put back


def test_rebuilt_key_waits_for_its_own_check() -> None:
    with CUDAGraphRunner(
        lambda x: x + 1,
        inputs=[BufferSpec("x", ("rows",), torch.float32)],
        outputs=OutputSpec({"": "rows"}),
        sizes={"rows": [2, 4]},
        examples=lambda sizes, seed: {"x": torch.full((sizes["rows"],), float(seed))},
        device=SimulatedDevice(),
    ) as runner:
        runner.capture()
        small, large = sorted(runner.keys, key=lambda item: item[1].num_tokens)
        [stale] = [p for p in runner.library.programs if p.key == large[1]]
        runner.library.catalog.invalidate(stale)

        def interrupt(done: int, total: int, key: BatchDescriptor) -> None:
            if done == total - 1:  # The first of two checks is over.
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            runner.capture(progress=interrupt)
        assert runner.missing() == {small: Reason.NOT_CAPTURED_YET}


def test_break_at_gives_a_module_its_own_forward_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())

    def own(x: torch.Tensor) -> torch.Tensor:
        return x

    model[1].forward = own
    with break_at(model, types=torch.nn.ReLU):
        assert model[1].forward is not own
    assert vars(model[1])["forward"] is own
