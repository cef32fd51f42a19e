"""Generations, retirement, rebuilding, suspension, closing, forking."""

from __future__ import annotations

import gc
import linecache
import os
import traceback
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from graph_lab import FULL, KEY, PIECEWISE, Lab
from torch import Tensor

from graphrt.batch import BatchDescriptor
from graphrt.context import ForwardContext
from graphrt.device.simulated import SimulatedDevice
from graphrt.errors import (
    CaptureOutsideScopeError,
    ConfigError,
    ForkedProcessError,
    GraphMemoryError,
    InvalidProgramError,
    LibraryClosedError,
    ReplayError,
    RetiredProgramError,
    SuspendedError,
)
from graphrt.events import Retired
from graphrt.graphs import (
    BufferSet,
    BufferSpec,
    CUDAGraphWrapper,
    GraphBudget,
    GraphLibrary,
    break_point,
)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def test_a_program_that_was_never_called_does_not_replay(lab: Lab) -> None:
    program = lab.capture(lab.wrap(plus_one), x := torch.ones(2))
    assert program.state == "captured"
    with pytest.raises(ReplayError, match="never called"):
        program.replay()
    assert torch.equal(program(x), x + 1)
    assert program.state == "ready"
    program.replay()


def test_a_retired_program_raises_and_lets_go(lab: Lab) -> None:
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


def test_after_retirement_a_scope_opens_a_new_generation(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    lab.capture(wrapper, x)
    lab.library.retire(lab.library.generations[0].index)
    assert not lab.library.generations
    assert wrapper.graph_pool is None
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x), x + 1)


def test_bug_class_20_capture_and_retire_twenty_times_returns_every_charge(lab: Lab) -> None:
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


def test_retirement_waits_for_the_end_of_an_open_scope(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    program = lab.capture(wrapper, x)
    with lab.library.capture_scope():
        lab.library.retire()
        assert program.state == "captured"
    assert program.state == "retired"


def test_a_rebuilt_generation_is_published_at_exit_and_the_old_one_retired(lab: Lab) -> None:
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


def test_a_rebuild_that_fails_keeps_the_old_generation(lab: Lab) -> None:
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


def test_a_generation_of_no_program_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="generation_size"),
        Lab(generation_size=0),
    ):
        pass


def test_bug_class_8_lazy_generations_rotate_when_graphs_run_out() -> None:
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


def test_a_lazy_generation_holds_at_most_its_size() -> None:
    with Lab(generation_size=2) as lab:
        wrapper = lab.wrap(plus_one)
        with lab.library.capture_scope(generation="lazy") as scope:
            for size in range(1, 6):
                with scope.step(FULL, BatchDescriptor(size)):
                    wrapper(torch.ones(size))
        lazy = [g for g in lab.library.generations if g.kind == "lazy"]
        assert [len(g.programs) for g in lazy] == [2, 2, 1]
        assert len({g.pool.handle for g in lab.library.generations}) == 4


def test_bug_class_8_retiring_one_generation_spares_the_workspaces_of_another() -> None:
    with Lab(SimulatedDevice(workspace_model=True)) as lab:
        wrapper = lab.wrap(lambda x: x @ x)
        a, b = torch.randn(4, 4), torch.randn(5, 5)
        # The recording itself keeps its scratch: nobody's attribute.
        scope = {"allow_escape": ("*",)}
        lab.capture(wrapper, a, key=BatchDescriptor(4), scope={**scope, "generation": "lazy"})
        doomed = lab.library.generations[-1]
        lab.capture(wrapper, b, key=BatchDescriptor(5), scope=scope)
        lab.library.retire(doomed)
        for _ in range(2):
            assert torch.equal(lab.step(wrapper, b, key=BatchDescriptor(5)), b @ b)


def test_bug_class_8_a_cycle_that_holds_a_program_is_not_collected_in_a_window(lab: Lab) -> None:
    class Node:
        pass

    with Lab(lab.device) as other:
        node = Node()
        node.me, node.program = node, other.capture(other.wrap(plus_one), torch.ones(2))
        probe = weakref.ref(node)
        del node

        def allocates(x: Tensor) -> Tensor:
            for _ in range(2000):
                [[] for _ in range(10)]
            assert not gc.isenabled()
            return x + 1

        node_alive_inside: list[bool] = []
        wrapper = lab.wrap(lambda x: node_alive_inside.append(probe() is not None) or allocates(x))
        lab.capture(wrapper, torch.ones(2))
        assert len(node_alive_inside) == 1


def test_close_drops_everything_and_says_so_afterwards(lab: Lab) -> None:
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


def test_libraries_that_come_and_go_on_one_device_never_use_up_its_streams() -> None:
    device = SimulatedDevice(max_streams=2)
    with GraphLibrary(device) as kept:
        for _ in range(5):
            with GraphLibrary(device) as library:
                wrapper = CUDAGraphWrapper(lambda x: x + 1, library, FULL, name="one more")
                x = torch.ones(2)
                with (
                    torch.no_grad(),
                    library.capture_scope() as scope,
                    scope.step(FULL, KEY),
                ):
                    wrapper(x)
                with ForwardContext(FULL, KEY):
                    assert wrapper(x).tolist() == [2, 2]
        assert not kept.num_graphs


def test_an_unclosed_library_only_warns() -> None:
    library = GraphLibrary(SimulatedDevice())
    del library
    gc.collect()
    with Lab() as lab:
        lab.capture(lab.wrap(plus_one), torch.ones(2))
        with pytest.warns(ResourceWarning, match="never closed"):
            lab.library.__del__()


def test_suspension_with_kept_programs_needs_a_pool_of_the_users(lab: Lab) -> None:
    with pytest.raises(ConfigError):
        lab.library.suspend(keep_programs=True)


def test_suspended_replays_raise_and_resume_checks_externals() -> None:
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


def test_suspension_without_programs_retires_them_first(lab: Lab) -> None:
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


def test_bug_class_15_a_forked_child_cannot_replay(lab: Lab) -> None:
    wrapper, x = lab.wrap(plus_one), torch.ones(2)
    program = lab.capture(wrapper, x)
    lab.step(wrapper, x)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads exist is not this test's worry
        child = os.fork()
    if child == 0:
        raised = []
        for use in (lambda: lab.step(wrapper, x), lambda: program.replay(), lab.capture_all):
            try:
                use()
            except ForkedProcessError:
                raised.append("yes")
            except BaseException as error:  # noqa: BLE001 - reported to the parent
                raised.append(repr(error))
        os.write(writer, ",".join(raised).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        assert answers.read() == "yes,yes,yes"
    assert torch.equal(lab.step(wrapper, x), x + 1)


def test_a_traceback_out_of_a_gap_shows_its_segment_and_the_text_goes_with_it(lab: Lab) -> None:
    fails = False

    @break_point(name="router")
    def gap(x: Tensor) -> None:
        if fails:
            raise ValueError("in the gap")

    def model(x: Tensor) -> Tensor:
        gap(x)
        return x + 1

    wrapper, x = lab.wrap(model, PIECEWISE, name="decoder"), torch.ones(2)
    program = lab.capture(wrapper, x)
    lab.step(wrapper, x, mode=PIECEWISE)
    fails = True
    with pytest.raises(ValueError, match="in the gap") as caught:
        lab.step(wrapper, x, mode=PIECEWISE)
    text = "".join(traceback.format_exception(caught.value))
    assert "<graphrt decoder PIECEWISE" in text
    assert "gap_0(arg_0_0)" in text
    assert "router" in text
    assert "gap_0" in program.source
    lab.library.retire()
    assert not [name for name in linecache.cache if name.startswith("<graphrt decoder")]


def test_an_annotated_replay_does_the_same_under_profiler_ranges(lab: Lab) -> None:
    gap = break_point(lambda x: x.mul_(2))
    wrapper, x = lab.wrap(lambda x: gap(x).add_(1), PIECEWISE), torch.ones(2)
    program = lab.capture(wrapper, x)
    lab.step(wrapper, x, mode=PIECEWISE)
    x.fill_(3)
    # torch 2.11 warns where events are not accumulated.
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        program.annotated_replay()()
    assert x[0].item() == 7
    names = {event.name for event in profile.events()}
    assert {"segment 0", "segment 1"} <= names
    assert "annotation" not in program.source


def test_a_remembered_program_is_forgotten_when_the_table_changes(lab: Lab) -> None:
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
