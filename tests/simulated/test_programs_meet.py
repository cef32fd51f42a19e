"""Programs, libraries and owners that meet: inside each other, on one device, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphrt import (
    BatchDescriptor,
    BufferSet,
    BufferSpec,
    CaptureJob,
    CUDAGraphRunner,
    CUDAGraphWrapper,
    ForwardContext,
    GraphBudget,
    GraphLibrary,
    OutputSpec,
    Padding,
    SimulatedDevice,
    break_point,
    capture_all,
    get_forward_context,
)
from graphrt.errors import (
    BreakError,
    CaptureInProgressError,
    LibraryClosedError,
    MutatedInputError,
    NestedReplayError,
    StateAdvancedError,
    SuspendedError,
    TooManyFailuresError,
)
from graphrt.graphs import capture_program
from lab import FULL, KEY, NONE, PIECEWISE, Lab, rows_runner

SMALL = BatchDescriptor(4)


def is_capture() -> bool:
    context = get_forward_context()
    return context is not None and context.capture_scope is not None


class Pair:
    """A program with an eager segment, and what happens inside that segment at replays."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.inside: Callable[[], Any] = lambda: None
        self.x = torch.ones(64, 64)

        @break_point
        def eager(x: Tensor) -> Tensor:
            if not is_capture():
                self.inside()
            return x * 1

        self.model = lambda x: (x + 1) + eager(x * 2)
        self.main = lab.wrap(self.model, PIECEWISE, "main")
        lab.capture(self.main, self.x)

    def step(self) -> float:
        return float(self.lab.step(self.main, self.x)[0, 0])


@pytest.fixture
def pair(lab: Lab) -> Pair:
    return Pair(lab)


def draft_of(lab: Lab, mode: Any) -> tuple[CUDAGraphWrapper, Tensor]:
    seven = break_point(lambda y: y + 1) if mode is PIECEWISE else lambda y: y + 1
    draft, y = lab.wrap(lambda y: seven(y @ y) + torch.ones(64), mode, "draft"), torch.ones(64, 64)
    lab.capture(draft, y, key=SMALL)
    return draft, y


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
@pytest.mark.parametrize("is_remembered", [False, True])
def test_replay_inside_an_eager_segment_is_refused(
    lab: Lab, pair: Pair, mode: Any, is_remembered: bool
) -> None:
    draft, y = draft_of(lab, mode)
    program = draft.concrete_cudagraph_entries[SMALL]
    if is_remembered:
        lab.step(draft, y, key=SMALL)
    insides = [lambda: lab.step(draft, y, key=SMALL), lambda: program(y)]
    if is_remembered:
        insides.append(lambda: program.replay())
    for inside in insides:
        pair.inside = inside
        for _ in range(2):
            with pytest.raises(NestedReplayError) as caught:
                pair.step()
            assert "draft" in str(caught.value)
            assert "main PIECEWISE" in str(caught.value)
    pair.inside = lambda: lab.step(draft, y, key=SMALL, mode=NONE)
    assert pair.step() == 4
    for _ in range(2):
        assert torch.equal(lab.step(draft, y, key=SMALL), draft.runnable(y))
    pair.inside = lambda: None
    assert pair.step() == 4


def test_program_inside_its_own_eager_segment_is_refused(lab: Lab, pair: Pair) -> None:
    pair.inside = lambda: lab.step(pair.main, pair.x)
    with pytest.raises(NestedReplayError):
        pair.step()
    pair.inside = lambda: None
    assert pair.step() == 4


def test_eager_segment_may_replay_another_librarys_program(lab: Lab, pair: Pair) -> None:
    with Lab(lab.device) as other:
        draft, y = draft_of(other, FULL)
        found = []
        pair.inside = lambda: found.append(other.step(draft, y, key=SMALL).clone())
        for _ in range(2):
            assert pair.step() == 4
        assert all(torch.equal(one, draft.runnable(y)) for one in found)


def test_eager_segment_may_call_another_library_at_capture(lab: Lab) -> None:
    with Lab(lab.device) as other:
        draft, y = draft_of(other, FULL)
        total = torch.zeros(1)

        @break_point
        def eager(x: Tensor) -> Tensor:
            with ForwardContext(FULL, SMALL):
                total.copy_(draft(y)[0, :1])
            return x * 1

        wrapper, x = lab.wrap(lambda x: eager(x + 1) + 1, PIECEWISE), torch.ones(2)
        options = {"may_overwrite": [total]}
        with lab.library.capture_scope(**options) as scope, scope.step(PIECEWISE, KEY):
            wrapper(x)
        assert lab.step(wrapper, x).tolist() == [3.0, 3.0]
        assert total.item() == 66


def runner_in(
    lab: Lab, fn: Callable[[Tensor], Tensor] = lambda x: x + 1, **options: Any
) -> CUDAGraphRunner:
    return CUDAGraphRunner(
        fn,
        inputs=[BufferSpec("x", ("tokens", 2), torch.float32)],
        outputs=OutputSpec({"": "tokens"}),
        sizes={"tokens": [4]},
        examples=lambda sizes, seed: {"x": torch.full((sizes["tokens"], 2), 1.0 + seed)},
        library=lab.library,
        name="runner",
        **options,
    )


def test_runner_inside_an_eager_segment_is_refused(lab: Lab, pair: Pair) -> None:
    runner, x = runner_in(lab), torch.ones(4, 2)
    runner.capture()
    for inside in (lambda: runner.run({"x": x}), runner.capture):
        pair.inside = inside
        with pytest.raises(NestedReplayError, match="runner"):
            pair.step()
    pair.inside = lambda: None
    assert pair.step() == 4
    assert torch.equal(runner.run({"x": x}), x + 1)

    @break_point
    def eager(x: Tensor) -> Tensor:
        runner.run({"x": torch.ones(4, 2)})
        return x * 1

    with pytest.raises(NestedReplayError, match="which is being captured"):
        lab.capture(lab.wrap(lambda x: eager(x + 1) + 1, PIECEWISE), torch.ones(2))
    runner.close()


@pytest.mark.parametrize("captures", [True, False])
def test_runner_of_another_library_may_run_inside_an_eager_segment(
    lab: Lab, captures: bool
) -> None:
    """As the refusal of a runner of the same library advises."""
    with Lab(lab.device) as other:
        inner = runner_in(other)
        if captures:
            inner.capture()

        @break_point
        def eager(x: Tensor) -> Tensor:
            return inner.run({"x": x}) * 1

        with runner_in(lab, lambda x: eager(x + 1) * 3, modes=("PIECEWISE",)) as outer:
            outer.capture()
            for rows in (4, 3, 1):
                x = torch.arange(2.0 * rows).view(rows, 2)
                assert torch.equal(outer.run({"x": x}), (x + 2) * 3)
                assert outer.last_decision.mode is PIECEWISE
        inner.close()


@pytest.mark.parametrize("is_its_own", [True, False])
def test_buffer_staged_inside_an_eager_segment_is_refused_where_anything_else_writes_it(
    lab: Lab, is_its_own: bool
) -> None:
    with Lab(lab.device) as other:
        buffers = (lab if is_its_own else other).buffers(BufferSpec("x", (2,), torch.float32))
        bound, by_hand = buffers.bind(KEY), [lambda: None]

        @break_point
        def eager(x: Tensor) -> Tensor:
            bound.stage(2, {"x": x})
            by_hand[0]()
            return bound.views["x"] * 1

        def capture(name: str) -> None:
            lab.capture(lab.wrap(lambda x: eager(x + 1) + 1, PIECEWISE, name), torch.ones(2))

        if is_its_own:  # Graphs of this library may read it as an input.
            with pytest.raises(MutatedInputError):
                capture("staged")
            return
        capture("staged")
        by_hand[0] = lambda: bound.views["x"].add_(1)
        with pytest.raises(StateAdvancedError, match="<lambda>; no state"):
            capture("by hand")


def test_library_is_left_alone_inside_an_eager_segment(lab: Lab, pair: Pair) -> None:
    def open_scope() -> None:
        with lab.library.capture_scope():
            pass

    for inside in (
        open_scope,
        lab.library.close,
        lab.library.retire,
        lambda: lab.library.suspend(keep_programs=False),
        lambda: capture_program(lab.library, "new", FULL, KEY, lambda: pair.x * 2),
    ):
        pair.inside = inside
        with pytest.raises(NestedReplayError):
            pair.step()
    pair.inside = lambda: None
    assert pair.step() == 4


def test_error_in_an_eager_segment_lets_later_replays_run(lab: Lab, pair: Pair) -> None:
    draft, y = draft_of(lab, FULL)

    def fail() -> None:
        raise KeyboardInterrupt

    pair.inside = fail
    with pytest.raises(KeyboardInterrupt):
        pair.step()
    assert torch.equal(lab.step(draft, y, key=SMALL), draft.runnable(y))
    pair.inside = lambda: None
    assert pair.step() == 4


# -- two libraries


@pytest.mark.parametrize("shares_device", [True, False])
def test_call_inside_a_foreign_recording_runs_plainly(lab: Lab, shares_device: bool) -> None:
    with Lab(lab.device if shares_device else None) as other:
        inner, x = other.wrap(lambda x: x * 2, FULL, "inner"), torch.ones(4)
        other.capture(inner, x)
        other.step(inner, x)
        outer = lab.wrap(lambda x: inner(x) + 1, FULL, "outer")
        lab.capture(outer, x)
        assert other.device.is_capturing() is False
        x.fill_(5)
        assert lab.step(outer, x).tolist() == [11.0] * 4
        for library in (lab.library, other.library):
            library.retire()


@pytest.mark.parametrize("shares_device", [True, False])
def test_scope_inside_a_foreign_recording_is_refused(lab: Lab, shares_device: bool) -> None:
    with Lab(lab.device if shares_device else None) as other:
        runner, x = runner_in(other), torch.ones(4)
        job = CaptureJob(lambda: x * 2, FULL, KEY, lambda: ((), {}), owner="job")

        def open_scope() -> None:
            with other.library.capture_scope():
                pass

        def greedy(x: Tensor) -> Tensor:
            for way in (
                open_scope,
                lambda: capture_all(other.library, [job]),
                lambda: capture_program(other.library, "program", FULL, KEY, lambda: x * 2),
                runner.capture,
            ):
                with pytest.raises(CaptureInProgressError):
                    way()
            return x + 1

        wrapper = lab.wrap(greedy)
        lab.capture(wrapper, x)
        assert lab.step(wrapper, x).tolist() == [2.0] * 4
        assert not other.library.programs
        assert not other.library.failures
        assert len(runner.capture().graphs) == 1
        runner.close()


# -- owners


@pytest.mark.parametrize("is_asked", [None, "other", "none"])
def test_three_failures_stop_their_own_owner_only(lab: Lab, is_asked: str | None) -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("no")

    bad, good = lab.wrap(fail, FULL, "bad"), lab.wrap(lambda x: x * 2, FULL, "good")
    keys, x = [BatchDescriptor(size) for size in range(1, 6)], torch.ones(2)
    report = lab.capture_all(*(lab.job(bad, x, key=key) for key in keys), on_error="skip")
    assert [type(entry.error) for entry in report.failures].count(TooManyFailuresError) == 2
    if is_asked is not None:
        asked = [("good", FULL, key) for key in keys] if is_asked == "other" else []
        lab.library.catalog.forget_failures(asked)
        assert len(lab.library.failures) == 5
        with pytest.raises(TooManyFailuresError):
            lab.capture(bad, x, key=BatchDescriptor(9))
    lab.capture(good, x)
    assert lab.step(good, x).tolist() == [2.0, 2.0]
    lab.library.catalog.forget_failures([("bad", FULL, keys[0])])
    assert not lab.library.catalog.has_given_up("bad")
    assert keys[0] not in [entry.key for entry in lab.library.failures]


# -- the end of a library, and of its programs


def test_closed_library_opens_nothing_again() -> None:
    device = SimulatedDevice()
    library = GraphLibrary(device)
    with torch.no_grad(), library.capture_scope() as scope:
        pass
    library.close()
    num_pools = len(device._memory.pools)
    buffers = BufferSet([], {"tokens": 1}, lambda key: {"tokens": 1}, device)

    def open_scope() -> None:
        with library.capture_scope():
            pass

    for way in (
        open_scope,
        lambda: library.generation_for(scope),
        lambda: library.freeze_workspaces(scope),
        lambda: library.stream("side"),
        lambda: library.register_stream(device.stream("mine")),
        lambda: library.add_buffers(buffers),
        lambda: library.reserve(None, KEY),
        lambda: library.suspend(keep_programs=False),
        library.resume,
        lambda: capture_program(library, "owner", FULL, KEY, lambda: torch.ones(1)),
        lambda: capture_all(library, []),
    ):
        with pytest.raises(LibraryClosedError):
            way()
    library.close()
    assert not library.generations
    assert len(device._memory.pools) == num_pools
    assert list(device._streams) == ["mine"]


def test_library_closed_while_suspended_stays_closed() -> None:
    library = GraphLibrary(SimulatedDevice())
    library.suspend(keep_programs=False)
    with pytest.raises(SuspendedError):
        library.stream("side")
    library.close()
    with pytest.raises(LibraryClosedError):
        library.resume()


def test_lazy_captures_report_the_programs_that_remain() -> None:
    with Lab(budget=GraphBudget(max_graphs=3), generation_size=1) as lab:
        wrapper = lab.wrap(lambda x: x * 2)
        sizes = {BatchDescriptor(size): torch.ones(size) for size in (6, 5, 4, 3, 2, 1)}
        jobs = [lab.job(wrapper, x, key=key) for key, x in sizes.items()]
        report = lab.capture_all(*jobs, generation="lazy")
        assert [program.key.num_tokens for program in report.programs] == [3, 2, 1]
        assert set(report.programs) == set(lab.library.programs)
        assert lab.library.num_cudagraph_captured == 6
        for program in report.programs:
            assert torch.equal(program(sizes[program.key]), sizes[program.key] * 2)


def test_wrapper_in_its_own_librarys_eager_segment_is_refused(lab: Lab) -> None:
    inner = lab.wrap(lambda x: x * 2, FULL, "inner")

    @break_point
    def eager(x: Tensor) -> Tensor:
        with ForwardContext(FULL, SMALL):
            return inner(x)

    with pytest.raises(BreakError):
        lab.capture(lab.wrap(lambda x: eager(x + 1) + 1, PIECEWISE), torch.ones(2))


class Refusing:
    """As ``torch.classes`` and lazy modules do: any attribute is an error of its own."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"cannot load {name}")


REFUSING = Refusing()


def test_named_global_that_refuses_attributes_is_left_alone(lab: Lab) -> None:
    def model(x: Tensor) -> Tensor:
        return REFUSING.load(torch.classes.unknown) if x is None else x * 2

    wrapper, x = lab.wrap(model), torch.ones(2)
    lab.capture(wrapper, x)
    assert lab.step(wrapper, x).tolist() == [2.0, 2.0]
    assert not lab.library.check_externals().moved


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("of_one_library", [False, True])
def test_runner_called_by_a_captured_model_is_named(
    is_captured: bool, of_one_library: bool
) -> None:
    with GraphLibrary("simulated") as library:
        where = {"library": library, "device": "auto"} if of_one_library else {}
        with (
            rows_runner(lambda x: x * 2, **where) as inner,
            rows_runner(lambda x: inner.run({"x": x}) + 1, **where) as outer,
        ):
            if is_captured:
                inner.capture()
            with pytest.raises(NestedReplayError, match=r"runner\.fn") as raised:
                outer.capture()
            assert f"run of the runner {inner.name!r} inside the recording" in str(raised.value)
            assert f"{outer.name} FULL" in str(raised.value)
            assert "in test_runner_called_by_a_captured_model_is_named" in str(raised.value)
            for rows in (2, 1):
                x = torch.randn(rows, 4)
                assert torch.equal(outer.run({"x": x}), x * 2 + 1)
            with rows_runner(lambda x: inner.fn(x) + 1) as other:
                other.capture()
                assert other.run({"x": torch.ones(2, 4)}).eq(3).all()


def test_runner_too_small_for_a_recording_is_refused_in_it() -> None:
    """The outer graph would hold the weight, and nothing would notice that it is replaced."""
    model = torch.nn.Linear(4, 4)
    with (
        rows_runner(model, (1,), inputs=[BufferSpec("input", ("n", 4), torch.float32)]) as inner,
        rows_runner(lambda x: inner.run({"input": x}) + 1, on_capture_error="skip") as outer,
    ):
        (failure,) = outer.capture().failures.values()
        assert failure.startswith(f"a run of the runner {inner.name!r} inside the recording")
        for _ in range(2):
            model.weight = torch.nn.Parameter(torch.randn(4, 4))
            x = torch.randn(2, 4)
            assert torch.equal(outer.run({"x": x}), model(x) + 1)


@pytest.mark.parametrize("is_captured", [False, True])
def test_runner_of_another_device_in_an_eager_segment_is_named(is_captured: bool) -> None:
    """One device knows the memory that the graphs of all its libraries write."""
    with rows_runner(lambda x: x * 2) as inner:
        if is_captured:
            inner.capture()

        @break_point
        def part(x: Tensor) -> Tensor:
            return inner.run({"x": x}) * 1

        with rows_runner(lambda x: part(x + 1) + 1, modes=("PIECEWISE",)) as outer:
            if is_captured:
                with pytest.raises(StateAdvancedError, match=r"device=outer\.device") as raised:
                    outer.capture()
                assert f"inside it runs the runner {inner.name!r}" in str(raised.value)
            else:
                outer.capture()
            x = torch.randn(1, 4)
            assert torch.equal(outer.run({"x": x}), (x + 1) * 2 + 1)


def test_runner_refused_in_a_recording_has_staged_nothing() -> None:
    """A recording runs nothing: the inner runner would trust padding that nobody filled."""
    options = {
        "inputs": [BufferSpec("x", ("n",), torch.float32, Padding.fill(-1))],
        "examples": lambda sizes, seed: {"x": torch.full((sizes["n"],), seed + 1.0)},
    }
    with (
        rows_runner(lambda x: x * 1, (4,), **options) as inner,
        rows_runner(lambda x: inner.run({"x": x[:2]}).sum() + x, (4,), **options) as outer,
    ):
        inner.capture()
        inner.run({"x": torch.full((4,), 7.0)})
        with pytest.raises(NestedReplayError):
            outer.capture()
        inner.run({"x": torch.full((2,), 5.0)})
        (buffers,) = inner.library.static_buffers
        assert buffers.tensors["x"].tolist() == [5, 5, -1, -1]


@pytest.mark.parametrize("fails_in", ["run", "capture"])
def test_wrapper_that_runs_a_runner_is_refused_with_its_name(lab: Lab, fails_in: str) -> None:
    with rows_runner(lambda x: x * 2, library=lab.library, device="auto") as inner:
        call = {"run": lambda x: inner.run({"x": x}), "capture": lambda x: inner.capture()}
        wrapper, x = lab.wrap(call[fails_in]), torch.ones(2, 4)
        with pytest.raises((NestedReplayError, CaptureInProgressError)) as raised:
            lab.capture(wrapper, x)
        assert inner.name in str(raised.value) or fails_in == "capture"
