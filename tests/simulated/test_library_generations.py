"""Generations, retirement, rebuilding, suspension, closing, forking."""

from __future__ import annotations

import gc
import linecache
import traceback
import weakref

import pytest
import torch
from torch import Tensor

from graphrt import (
    BatchDescriptor,
    BufferSet,
    BufferSpec,
    GraphBudget,
    GraphLibrary,
    SimulatedDevice,
    break_point,
)
from graphrt.device import simulated
from graphrt.errors import (
    CaptureError,
    CaptureOutsideScopeError,
    ConfigError,
    ForkedProcessError,
    GraphMemoryError,
    InvalidProgramError,
    LibraryClosedError,
    LifetimeError,
    RankLostError,
    ReplayError,
    RetiredProgramError,
    SuspendedError,
)
from graphrt.events import Retired
from lab import FULL, KEY, PIECEWISE, BusyDevice, Lab, in_a_child


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def test_program_that_was_never_called_does_not_replay(lab: Lab) -> None:
    program = lab.capture(lab.wrap(plus_one), x := torch.ones(2))
    assert program.state == "captured"
    with pytest.raises(ReplayError, match="never called"):
        program.replay()
    assert torch.equal(program(x), x + 1)
    assert program.state == "ready"
    program.replay()


def test_program_retired_raises_and_releases_its_inputs(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    program = lab.capture(wrapper, x)
    program(x)
    held = weakref.ref(x)
    lab.library.retire()
    assert program.state == "retired"
    for use, args in ((program.replay, ()), (program, (x,)), (program.check, ((x,), {}))):
        with pytest.raises(RetiredProgramError):
            use(*args)
    with pytest.raises(CaptureOutsideScopeError):
        lab.step(wrapper, x)
    assert [type(event) for event in lab.events][-1] is Retired
    del x, args
    assert held() is None


def test_scope_after_retirement_opens_a_new_generation(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    lab.capture(wrapper, x)
    lab.library.retire(lab.library.generations[0].index)
    assert not lab.library.generations
    assert wrapper.graph_pool is None
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x), x + 1)


def test_retire_returns_every_byte_to_the_device(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(64)
    free = []
    for _ in range(20):
        program = lab.capture(wrapper, x)
        assert torch.equal(program(x), x + 1)
        assert lab.library.charged_bytes > 0
        lab.library.retire()
        assert lab.library.charged_bytes == 0
        free.append(lab.device.memory().free_bytes)
    assert len(set(free)) == 1


def test_retire_in_an_open_scope_waits_for_its_end(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    program = lab.capture(wrapper, x)
    with lab.library.capture_scope():
        lab.library.retire()
        assert program.state == "captured"
    assert program.state == "retired"


def test_rebuild_publishes_and_retires_at_exit(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    old = lab.capture(wrapper, x)
    old(x)
    with lab.library.capture_scope(generation="new") as scope:
        with scope.step(FULL, KEY):
            wrapper(x)
        assert wrapper.concrete_cudagraph_entries[KEY] is old
        with scope.step(FULL, KEY):
            assert torch.equal(wrapper(x), x + 1)
        assert old.state == "ready"
    new = wrapper.concrete_cudagraph_entries[KEY]
    assert new is not old
    assert old.state == "retired"
    assert len(lab.library.generations) == 1
    assert torch.equal(lab.step(wrapper, x), x + 1)


def test_rebuild_that_fails_keeps_the_old_generation(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    old = lab.capture(wrapper, x)

    def rebuild() -> None:
        with lab.library.capture_scope(generation="new") as scope:
            with scope.step(FULL, KEY):
                wrapper(x)
            raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        rebuild()
    assert wrapper.concrete_cudagraph_entries[KEY] is old
    assert len(lab.library.generations) == 1
    assert torch.equal(lab.step(wrapper, x), x + 1)


def test_generation_size_of_zero_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="generation_size"),
        Lab(generation_size=0),
    ):
        pass


def test_lazy_generations_make_room_and_others_stay() -> None:
    with Lab(budget=GraphBudget(max_graphs=3), generation_size=1) as lab:
        wrapper = lab.wrap(lambda x: torch.relu(x @ x.t()))
        pinned = torch.randn(3, 3)
        lab.capture(wrapper, pinned, key=BatchDescriptor(99))
        inputs = {size: torch.randn(size, size) for size in range(1, 7)}
        for _ in range(5):
            for size, x in inputs.items():
                key = BatchDescriptor(size)
                if key not in wrapper.concrete_cudagraph_entries:
                    lab.capture(wrapper, x, key=key, scope={"generation": "lazy"})
                assert torch.equal(lab.step(wrapper, x, key=key), torch.relu(x @ x.t()))
                assert lab.library.num_graphs <= 3
        assert torch.equal(
            lab.step(wrapper, pinned, key=BatchDescriptor(99)), torch.relu(pinned @ pinned.t())
        )
        for size in (10, 11):
            lab.capture(wrapper, torch.randn(size, size), key=BatchDescriptor(size))
        with pytest.raises(GraphMemoryError):
            lab.capture(wrapper, torch.randn(12, 12), key=BatchDescriptor(12))


def test_lazy_generation_holds_at_most_its_size() -> None:
    with Lab(generation_size=2) as lab:
        wrapper = lab.wrap(plus_one)
        with lab.library.capture_scope(generation="lazy") as scope:
            for size in range(1, 6):
                with scope.step(FULL, BatchDescriptor(size)):
                    wrapper(torch.ones(size))
        lazy = [g for g in lab.library.generations if g.kind == "lazy"]
        assert [len(g.programs) for g in lazy] == [2, 2, 1]
        assert len({g.pool.handle for g in lab.library.generations}) == 4


def test_retire_spares_the_workspace_of_another_generation() -> None:
    with Lab(SimulatedDevice(workspace_model=True)) as lab:
        wrapper = lab.wrap(lambda x: x @ x)
        a, b = torch.randn(4, 4), torch.randn(5, 5)
        # The recording itself keeps its scratch, as no attribute.
        scope = {"allow_escape": ("*",)}
        lab.capture(wrapper, a, key=BatchDescriptor(4), scope={**scope, "generation": "lazy"})
        doomed = lab.library.generations[-1]
        lab.capture(wrapper, b, key=BatchDescriptor(5), scope=scope)
        lab.library.retire(doomed)
        for _ in range(2):
            assert torch.equal(lab.step(wrapper, b, key=BatchDescriptor(5)), b @ b)


def test_close_drops_everything_and_later_use_raises(lab: Lab) -> None:
    buffers = BufferSet(
        [BufferSpec("x", ("tokens",), torch.float32)],
        {"tokens": 4},
        lambda key: {"tokens": key.num_tokens},
        lab.device,
    )
    lab.library.add_buffers(buffers)
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    program = lab.capture(wrapper, x)
    program(x)
    lab.library.close()
    lab.library.close()
    with pytest.raises(LibraryClosedError):
        lab.step(wrapper, x)
    with pytest.raises(RetiredProgramError):
        program(x)
    with pytest.raises(LibraryClosedError):
        buffers.bind(KEY)
    assert torch.equal(wrapper(x), x + 1)


@pytest.mark.parametrize("is_freed", [True, False])
def test_close_ends_where_the_device_waits_for_a_rank(is_freed: bool) -> None:
    device = BusyDevice()
    lab = Lab(device)
    given_up: list[str] = []
    lab.library.limit_waits(0.5, lambda error: given_up.append("all"))
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    with torch.no_grad():
        program = lab.capture(wrapper, x)
    pool = weakref.ref(lab.library.generations[0].pool)
    device.answers = (False, is_freed, is_freed)
    with pytest.raises(RankLostError) as lost:
        lab.library.close()
    notes = getattr(lost.value, "__notes__", [""])
    assert ("stays in memory until the process exits" in notes[0]) is not is_freed
    lab.library.close()
    assert given_up == ["all"]
    with pytest.raises(RetiredProgramError if is_freed else LibraryClosedError):
        program(x)
    with pytest.raises(LibraryClosedError):
        lab.library.capture_scope().__enter__()
    assert device.memory().reserved_bytes == 0 or not is_freed
    del lab, wrapper, program, device, lost
    gc.collect()
    assert (pool() is None) is is_freed


def test_failed_job_with_ranks_waits_no_longer_than_they_do() -> None:
    for on_error in ("skip", "raise"):
        device = BusyDevice()
        with Lab(device) as lab:
            lab.library.limit_waits(0.5, lambda error: None)
            device.answers = (False,)
            with pytest.raises(RankLostError, match=r"within 0\.5 s"):
                lab.capture_all(lab.job(lab.wrap(failing), torch.ones(2)), on_error=on_error)


def failing(x: Tensor) -> Tensor:
    raise ValueError("this rank fails")


def test_library_over_a_device_by_name_owns_it() -> None:
    with GraphLibrary("simulated") as library:
        device = library.device
        assert device.name == "simulated"
        with library.capture_scope():
            pass
    with pytest.raises(LifetimeError):
        device.new_pool()
    for wrong in ("gpu", torch.device("cpu"), None):
        with pytest.raises(ConfigError, match="device"):
            GraphLibrary(wrong)  # type: ignore[arg-type]


def test_library_closed_in_a_child_leaves_the_parents_device() -> None:
    with GraphLibrary("simulated") as library:

        def close() -> str:
            library.close()
            library.device.new_pool()
            return "open"

        assert in_a_child(close) == "open"


def test_library_that_cannot_be_made_closes_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SimulatedDevice] = []

    def make_one() -> SimulatedDevice:
        made.append(SimulatedDevice(max_streams=0))
        return made[-1]

    monkeypatch.setattr(simulated, "SimulatedDevice", make_one)
    with pytest.raises(CaptureError, match="streams"):
        GraphLibrary("simulated")
    with pytest.raises(LifetimeError):
        made[0].new_pool()


def test_library_closed_gives_its_streams_back() -> None:
    device = SimulatedDevice(max_streams=2)
    with Lab(device) as kept:
        for _ in range(5):
            with Lab(device) as lab:
                wrapper, x = lab.wrap(plus_one), torch.ones(2)
                lab.capture(wrapper, x)
                assert lab.step(wrapper, x).tolist() == [2, 2]
        assert not kept.library.num_graphs


def test_library_never_closed_warns() -> None:
    library = GraphLibrary(SimulatedDevice())
    del library
    gc.collect()
    with Lab() as lab:
        lab.capture(lab.wrap(plus_one), torch.ones(2))
        with pytest.warns(ResourceWarning, match="never closed"):
            lab.library.__del__()


def test_suspend_with_programs_needs_a_given_pool(lab: Lab) -> None:
    with pytest.raises(ConfigError):
        lab.library.suspend(keep_programs=True)


def test_suspend_stops_replays_and_resume_checks_externals() -> None:
    order: list[str] = []
    with Lab() as owner:
        kept = {"pool": owner.library.graph_pool}
        hooks = {
            "before_suspend": [lambda: order.append("before")],
            "after_resume": [lambda: order.append("after")],
        }
        with Lab(owner.device, **kept, **hooks) as lab:
            model = torch.nn.Linear(2, 2)
            wrapper, other = lab.wrap(model, name="a"), lab.wrap(torch.relu, name="b")
            x = torch.ones(1, 2)
            for each in (wrapper, other):
                lab.capture(each, x)
                lab.step(each, x)
            lab.library.suspend(keep_programs=True)
            for use in (lambda: lab.step(wrapper, x), lambda: lab.capture(wrapper, x)):
                with pytest.raises(SuspendedError):
                    use()
            model.weight = torch.nn.Parameter(torch.zeros(2, 2))
            report = lab.library.resume()
            assert report.moved == ("weight",)
            assert torch.equal(lab.step(other, x), torch.relu(x))
            with pytest.raises(InvalidProgramError, match="weight"):
                lab.step(wrapper, x)
            assert order == ["before", "after"]


def test_suspend_without_programs_retires_them(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    lab.library.before_suspend.append(lambda: lab.events.append("before"))
    program = lab.capture(wrapper, x)
    lab.library.suspend(keep_programs=False)
    assert program.state == "retired"
    with pytest.raises(SuspendedError):
        lab.step(wrapper, x)
    lab.library.resume()
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x), x + 1)


def test_fork_child_use_is_refused(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    program = lab.capture(wrapper, x)
    lab.step(wrapper, x)
    for use in (lambda: lab.step(wrapper, x), lambda: program.replay(), lab.capture_all):
        assert in_a_child(use).startswith(ForkedProcessError.__name__)
    assert torch.equal(lab.step(wrapper, x), x + 1)


def test_fork_child_of_a_closed_library_stays_closed() -> None:
    with Lab() as lab:
        lab.library.close()
        assert in_a_child(lambda: lab.library.is_closed) == "True"
        assert in_a_child(lab.capture_all).startswith(LibraryClosedError.__name__)


def test_traceback_of_an_eager_segment_shows_its_line(lab: Lab) -> None:
    fails = False

    @break_point(name="router")
    def eager(x: Tensor) -> None:
        if fails:
            raise ValueError("in the eager segment")

    def model(x: Tensor) -> Tensor:
        eager(x)
        return x + 1

    wrapper, x = lab.wrap(model, PIECEWISE, name="decoder"), torch.ones(2)
    program = lab.capture(wrapper, x)
    lab.step(wrapper, x)
    fails = True
    with pytest.raises(ValueError, match="in the eager segment") as caught:
        lab.step(wrapper, x)
    text = "".join(traceback.format_exception(caught.value))
    assert "<graphrt decoder PIECEWISE" in text
    assert "eager_0(arg_0_0)" in text
    assert "router" in text
    assert "eager_0" in program.source
    lab.library.retire()
    assert not [name for name in linecache.cache if name.startswith("<graphrt decoder")]


def test_wrapper_forgets_a_program_invalidated_or_retired(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    lab.capture(wrapper, x)
    for _ in range(2):
        lab.step(wrapper, x)
    lab.library.invalidate()
    new = lab.capture(wrapper, x)
    assert lab.step(wrapper, x) is new.outputs
    lab.library.retire()
    with pytest.raises(CaptureOutsideScopeError):
        lab.step(wrapper, x)
