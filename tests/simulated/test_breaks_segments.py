"""Break points: where a PIECEWISE capture is cut, and what a replay does there."""

from __future__ import annotations

import contextvars
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphrt import (
    CaptureJob,
    ForwardContext,
    Program,
    TensorStateGuard,
    break_at,
    break_call,
    break_point,
    get_forward_context,
    no_breaks,
)
from graphrt.errors import (
    BreakError,
    BreakOutputError,
    ConfigError,
    EmptyCaptureError,
    StateAdvancedError,
    UnkeyedValueError,
    VerificationError,
)
from graphrt.graphs import EagerSegment, GraphSegment
from graphrt.graphs.recorder import open_cuts
from lab import FULL, KEY, NONE, PIECEWISE, Lab, Tally, rows_runner


def kinds(program: Program) -> str:
    return "".join("G" if isinstance(s, GraphSegment) else "E" for s in program.segments)


def eager_of(program: Program) -> EagerSegment:
    [eager] = [s for s in program.segments if isinstance(s, EagerSegment)]
    return eager


def test_break_point_cuts_graph_eager_graph(lab: Lab) -> None:
    calls = []

    @break_point
    def doubled(x: Tensor) -> None:
        calls.append(1)
        x.mul_(2)

    def model(x: Tensor) -> None:
        x.add_(1)
        doubled(x)
        x.add_(5)

    wrapper, x = lab.wrap(model, PIECEWISE), torch.zeros(1)
    program = lab.capture(wrapper, x, scope={"checks": "none"})
    assert x.item() == 0
    assert len(calls) == 1
    assert kinds(program) == "GEG"
    for start, end in ((10.0, 27.0), (100.0, 207.0)):
        x.fill_(start)
        lab.step(wrapper, x)
        assert x.item() == end


def test_argument_reshaped_between_two_segments_is_bound_anew(lab: Lab) -> None:
    shapes = []

    @break_point(name="sum", out="out")
    def rows(h: Tensor, out: Tensor | None = None) -> Tensor:
        shapes.append(tuple(h.shape))
        out = torch.empty(6) if out is None else out
        return out.fill_(0).index_copy_(0, torch.arange(h.shape[0]), h.sum(1))

    def model(x: Tensor) -> Tensor:
        h = x * 2
        first = rows(h) * 1
        h.t_()
        return torch.cat((first, rows(h) * 1))

    wrapper, x = lab.wrap(model, PIECEWISE), torch.zeros(2, 3)
    lab.capture(wrapper, x)
    shapes.clear()
    x.copy_(torch.arange(6.0).view(2, 3))
    found = lab.step(wrapper, x)
    assert shapes == [(2, 3), (3, 2)]
    assert found.tolist() == [6, 24, 0, 0, 0, 0, 6, 10, 14, 0, 0, 0]


def test_break_point_inside_another_is_part_of_it(lab: Lab) -> None:
    @break_point
    def inner(x: Tensor) -> None:
        x.add_(1)

    @break_point
    def outer(x: Tensor) -> None:
        inner(x)
        x.add_(10)

    def model(x: Tensor) -> None:
        x.add_(2)
        outer(x)
        x.add_(100)

    wrapper, x = lab.wrap(model, PIECEWISE), torch.zeros(1)
    program = lab.capture(wrapper, x, scope={"checks": "none"})
    assert (program.num_graphs, program.num_eager) == (2, 1)
    x.zero_()
    lab.step(wrapper, x)
    assert x.item() == 113


def test_eager_segments_replay_in_capture_order(lab: Lab) -> None:
    order: list[int] = []

    @break_point
    def eager(x: Tensor, number: int) -> None:
        order.append(number)

    def model(x: Tensor) -> Tensor:
        for number in (3, 1, 2):
            eager(x, number)
            x = x + 1
        return x

    wrapper, x = lab.wrap(model, PIECEWISE), torch.zeros(4)
    program = lab.capture(wrapper, x)
    assert kinds(program) == "EGEGEG"
    order.clear()
    lab.step(wrapper, x)
    assert order == [3, 1, 2]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [("g.g", "GEG"), (".g", "EG"), ("g.", "GE"), ("g..g", "GEEG"), ("..g..", "EEGEE")],
)
def test_empty_graph_segments_are_dropped(lab: Lab, parts: str, expected: str) -> None:
    @break_point
    def eager(x: Tensor) -> None:
        x.mul_(2)

    def model(x: Tensor) -> None:
        for part in parts:
            x.add_(1) if part == "g" else eager(x)

    wrapper, x, reference = lab.wrap(model, PIECEWISE), torch.zeros(2), torch.zeros(2)
    program = lab.capture(wrapper, x, scope={"checks": "none"})
    assert kinds(program) == expected
    for value in (1.0, 7.0):
        x.fill_(value)
        lab.step(wrapper, x)
        reference.fill_(value)
        model(reference)
        assert torch.equal(x, reference)


def test_capture_of_eager_segments_alone_is_empty(lab: Lab) -> None:
    wrapper = lab.wrap(break_point(lambda x: None), PIECEWISE)
    with pytest.raises(EmptyCaptureError):
        lab.capture(wrapper, torch.zeros(1))


def test_break_point_in_a_full_capture_is_recorded(lab: Lab) -> None:
    eager = break_point(lambda x: x * 3)
    wrapper, x = lab.wrap(lambda x: eager(x + 1) + 1), torch.ones(2)
    program = lab.capture(wrapper, x)
    assert kinds(program) == "G"
    assert torch.equal(lab.step(wrapper, x), torch.full((2,), 7.0))


def test_no_breaks_records_break_points(lab: Lab) -> None:
    eager = break_point(lambda x: x * 3)
    wrapper = lab.wrap(lambda x: eager(x + 1) + 1, PIECEWISE)
    with no_breaks():
        assert kinds(lab.capture(wrapper, torch.ones(2))) == "G"

    def partly(x: Tensor) -> Tensor:
        with no_breaks():
            x = eager(x)
        return eager(x)

    assert kinds(lab.capture(lab.wrap(partly, PIECEWISE), torch.ones(2))) == "GE"


def test_break_point_outside_a_recording_is_a_plain_call(lab: Lab) -> None:
    eager = break_point(lambda x: x * 3)
    with lab.library.capture_scope() as scope, scope.step(NONE, KEY):
        assert eager(2) == 6
    assert eager(2) == 6
    assert break_call(lambda x: x, 5) == 5


def test_break_point_in_another_thread_is_a_plain_call(lab: Lab) -> None:
    results: list[Any] = []
    eager = break_point(lambda x: x * 3)

    def model(x: Tensor) -> Tensor:
        here = contextvars.copy_context()
        host = torch.ones(1)
        for run in (lambda f: here.run(f), lambda f: f()):
            worker = threading.Thread(target=run, args=(lambda: results.append(eager(5)),))
            worker.start()
            worker.join()
        del host
        return x + 1

    program = lab.capture(lab.wrap(model, PIECEWISE), torch.ones(2))
    assert kinds(program) == "G"
    assert results == [15, 15]


def test_eager_segment_sees_zeros_only_at_capture(lab: Lab) -> None:
    seen: list[Tensor] = []

    @break_point
    def eager(x: Tensor, more: dict[str, Tensor], wide: Tensor) -> Tensor:
        seen.extend(t.clone() for t in (x, more["y"], wide))
        return x + wide

    def model(x: Tensor) -> Tensor:
        y = x + 1
        return eager(y, {"y": y * 2}, (x + 2)[:, :1].expand(2, 3)) + 0

    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2, 3)
    lab.capture(wrapper, x)
    assert not any(t.any() for t in seen)
    seen.clear()
    out = lab.step(wrapper, x)
    assert [t.unique().item() for t in seen] == [2, 4, 3]
    assert torch.equal(out, model(x))


def test_capture_stub_runs_only_at_capture(lab: Lab) -> None:
    calls: list[str] = []

    def stub(x: Tensor) -> Tensor:
        calls.append("stub")
        return torch.empty_like(x)

    @break_point(capture_stub=stub, name="attention")
    def eager(x: Tensor) -> Tensor:
        calls.append("real")
        return x * 3

    wrapper, x = lab.wrap(lambda x: eager(x + 1) + 1, PIECEWISE), torch.ones(2)
    program = lab.capture(wrapper, x)
    assert calls == ["stub"]
    assert "attention" in eager_of(program).site
    assert torch.equal(lab.step(wrapper, x), torch.full((2,), 7.0))
    assert calls == ["stub", "real"]


@pytest.mark.parametrize(("observe", "ran"), [("always", "real"), ("never", "stub")])
def test_stub_when_unobserved_leaves_the_function_to_observed_captures(
    lab: Lab, observe: str, ran: str
) -> None:
    calls: list[str] = []

    def stub(x: Tensor, out: Tensor) -> Tensor:
        calls.append("stub")
        return out

    @break_point(out="out", capture_stub=stub, stub_when="unobserved")
    def eager(x: Tensor, out: Tensor) -> Tensor:
        calls.append("real")
        return out.copy_(x * 3)

    def model(x: Tensor) -> Tensor:
        y = x + 1
        return eager(y, out=torch.empty_like(y)) + 1

    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2)
    lab.capture(wrapper, x, scope={"observe": observe})
    assert calls == [ran]
    assert torch.equal(lab.step(wrapper, x), torch.full((2,), 7.0))
    assert calls == [ran, "real"]


def test_returned_tensors_go_through_static_outputs(lab: Lab) -> None:
    @break_point
    def eager(x: Tensor) -> dict[str, Any]:
        return {"a": x * 2, "b": (x.sum(0), x.t()), "n": 5, "same": x}

    def model(x: Tensor) -> Tensor:
        y = x + 1
        out = eager(y)
        assert out["same"] is y or lab_is_idle()
        return out["a"] + out["b"][0] + out["b"][1].t() + out["n"] + out["same"]

    def lab_is_idle() -> bool:
        return not lab.device.is_capturing()

    wrapper, x = lab.wrap(model, PIECEWISE), torch.randn(3, 3)
    program = lab.capture(wrapper, x)
    segment = eager_of(program)
    assert [leaf.kind for leaf in segment.returned] == [
        "static_output",
        "static_output",
        "passed",
        "host",
        "passed",
    ]
    assert program.memory.static_output_bytes >= sum(each.nbytes for each in segment.static_outputs)
    for seed in range(3):
        x.copy_(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(lab.step(wrapper, x), model(x))


def test_returned_out_argument_needs_no_static_output(lab: Lab) -> None:
    @break_point(out="out")
    def eager(x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(x, 2, out=out)

    def model(x: Tensor) -> Tensor:
        buffer = torch.empty_like(x)
        total = x
        for number in range(3):
            total = total + eager(x + number, out=buffer)
        return total

    wrapper, x = lab.wrap(model, PIECEWISE), torch.randn(4)
    program = lab.capture(wrapper, x)
    segments = [segment for segment in program.segments if isinstance(segment, EagerSegment)]
    for segment in segments:
        assert not segment.static_outputs
        # By identity: what the replay's generated text asks before it looks any further.
        assert segment.returned[0].value is segment.kwargs["out"]
    assert program.memory.static_output_bytes == 0
    for seed in range(3):
        x.copy_(torch.randn(4, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(lab.step(wrapper, x), model(x))


def test_static_outputs_keep_strides_and_expand_broadcasts(lab: Lab) -> None:
    @break_point
    def eager(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).t().clone(memory_format=torch.preserve_format), x.sum().expand(2, 3)

    wrapper = lab.wrap(lambda x: sum(t.sum() for t in eager(x + 1)) + 0, PIECEWISE)
    x = torch.ones(2, 3)
    program = lab.capture(wrapper, x)
    transposed, wide = eager_of(program).static_outputs
    assert transposed.stride() == (1, 3)
    assert wide.is_contiguous()
    assert lab.step(wrapper, x).item() == 24 + 72


@pytest.mark.parametrize(
    "returns", [lambda y: y, lambda y: (y, 5), lambda y: None], ids=["tensor", "tuple", "nothing"]
)
def test_side_streams_join_before_a_result_is_stored(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, returns: Any
) -> None:
    side = lab.library.stream("side")
    ended: list[str] = []

    @break_point
    def eager(x: Tensor) -> Any:
        ended.append("eager")
        return returns(x * 7)

    def model(x: Tensor) -> Tensor:
        result = eager(x + 0)
        y = result[0] if isinstance(result, tuple) else result
        return x + 3 if y is None else y + 3

    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2)
    program = lab.capture(wrapper, x)
    static_outputs = eager_of(program).static_outputs
    out = lab.step(wrapper, x)
    order = lab.device.order

    def logged(after: Any, before: Any) -> None:
        assert (after, before) == (lab.device.current_stream(), side)
        ended.append(f"join over static outputs {[each.tolist() for each in static_outputs]}")
        order(after, before)

    monkeypatch.setattr(lab.device, "order", logged)
    ended.clear()
    x.fill_(2)
    lab.step(wrapper, x)
    # The static output still held the result of the step before.
    assert ended == ["eager", f"join over static outputs {[[7.0, 7.0] for _ in static_outputs]}"]
    assert out.tolist() == [17.0 if static_outputs else 5.0] * 2


def test_side_streams_join_before_capture_copies_a_result(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = lab.library.stream("side")
    log: list[str] = []
    order, alloc = lab.device.order, lab.device.alloc

    @break_point
    def eager(x: Tensor) -> Tensor:
        log.append("eager")
        return x * 7

    def logged_order(after: Any, before: Any) -> None:
        log.append("join" if before is side else "fork")
        order(after, before)

    def logged_alloc(*args: Any) -> Tensor:
        log.append("static_output")
        return alloc(*args)

    wrapper = lab.wrap(lambda x: eager(x + 0) + 3, PIECEWISE)
    monkeypatch.setattr(lab.device, "order", logged_order)
    monkeypatch.setattr(lab.device, "alloc", logged_alloc)
    lab.capture(wrapper, torch.ones(2))
    at_capture = len(log) - log[::-1].index("eager")  # A warm-up runs it too.
    assert log[at_capture : at_capture + 2] == ["join", "static_output"]


def test_out_keyword_receives_the_static_output(lab: Lab) -> None:
    outs: list[Tensor | None] = []

    @break_point(out="into")
    def eager(x: Tensor, into: Tensor | None = None) -> Tensor | None:
        outs.append(into)
        if into is None:
            return x * 2
        torch.mul(x, 2, out=into)
        return None if len(outs) % 2 else into

    wrapper, x = lab.wrap(lambda x: eager(x + 1) + 1, PIECEWISE), torch.ones(2)
    program = lab.capture(wrapper, x)
    assert outs == [None]
    [static_output] = eager_of(program).static_outputs
    for value in (1.0, 2.0):
        x.fill_(value)
        assert torch.equal(lab.step(wrapper, x), (x + 1) * 2 + 1)
        assert outs[-1] is static_output


def test_given_out_and_several_results_are_asked_for_at_each_replay(lab: Lab) -> None:
    returns = [True]

    @break_point(out="out")
    def eager(x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        return (x + 1, x + 2) if returns[0] else None

    def model(x: Tensor, buffer: Tensor) -> Tensor:
        one, two = eager(x * 1, out=buffer)
        return one + two

    wrapper, args = lab.wrap(model, PIECEWISE), (torch.zeros(2), torch.zeros(2))
    lab.capture(wrapper, *args)
    assert lab.step(wrapper, *args).tolist() == [3, 3]
    returns[0] = False
    with pytest.raises(BreakOutputError):
        lab.step(wrapper, *args)


def test_keywords_that_are_no_names_reach_an_eager_segment(lab: Lab) -> None:
    @break_point
    def eager(x: Tensor, **others: Any) -> Tensor:
        return x + others["two words"] * others["class"]

    def model(x: Tensor, y: Tensor) -> Tensor:
        return eager(x * 1, **{"two words": y * 2, "class": 3}) + 1

    wrapper, args = lab.wrap(model, PIECEWISE), (torch.zeros(2), torch.ones(2))
    lab.capture(wrapper, *args)
    args[1].fill_(4)
    assert lab.step(wrapper, *args).tolist() == [25, 25]


def test_out_keyword_without_a_tensor_result_is_refused(lab: Lab) -> None:
    eager = break_point(out="into")(lambda x, into=None: None)
    with pytest.raises(BreakError):
        lab.capture(lab.wrap(lambda x: eager(x + 1), PIECEWISE), torch.ones(2))


@pytest.mark.parametrize(
    ("captured", "replayed"),
    [
        (lambda x: x * 2, lambda x: x[:1] * 2),
        (lambda x: x * 2, lambda x: (x * 2).double()),
        (lambda x: x * 2, lambda x: None),
        (lambda x: (x * 2, x), lambda x: x * 2),
        (lambda x: x, lambda x: x.clone()),
        (lambda x: [x * 2], lambda x: [x * 2, x]),
    ],
)
def test_returned_structure_that_changes_is_refused(lab: Lab, captured: Any, replayed: Any) -> None:
    fn = captured
    eager = break_point(lambda x: fn(x))
    wrapper = lab.wrap(lambda x: eager(x + 1) is not None and x + 1, PIECEWISE)
    x = torch.ones(2)
    program = lab.capture(wrapper, x)
    lab.step(wrapper, x)
    fn = replayed
    with pytest.raises(BreakOutputError):
        lab.step(wrapper, x)
    assert program.state == "ready"


@pytest.mark.parametrize("reads_argument", [True, False])
@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[1:], lambda x: x.t()])
def test_result_that_becomes_an_argument_is_refused_where_it_is_written(
    lab: Lab, part: Any, reads_argument: bool
) -> None:
    copies = True
    eager = break_point(lambda x: part(x).clone() if copies else part(x))

    def model(x: Tensor) -> Tensor:
        hidden = x + 1
        found = eager(hidden)
        (found if reads_argument else hidden).add_(5)
        return hidden * 2 if reads_argument else found * 2

    x = torch.arange(9.0).view(3, 3)
    wrapper = lab.wrap(model, PIECEWISE)
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x), model(x))
    copies = False
    with pytest.raises(BreakOutputError, match="of its own"):
        lab.step(wrapper, x)


def test_result_that_becomes_an_argument_is_copied_where_nothing_is_written(lab: Lab) -> None:
    copies = True
    eager = break_point(lambda x: x.clone() if copies else x)
    model = lambda x: eager(x + 1) * 2  # noqa: E731
    wrapper, x = lab.wrap(model, PIECEWISE), torch.arange(3.0)
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x), (x + 1) * 2)
    copies = False
    assert torch.equal(lab.step(wrapper, x), (x + 1) * 2)


class Keeps(torch.nn.Module):
    """Its eager segment returns a tensor that it keeps, and what follows writes into that."""

    def __init__(self, part: Any, declares: bool) -> None:
        super().__init__()
        self.kept = torch.zeros(2, 4)
        self.part = part
        self.state = TensorStateGuard([self.kept]) if declares else None

    @break_point
    def first(self, x: Tensor) -> Tensor:
        return self.part(self.kept)

    @break_point
    def second(self, x: Tensor) -> Tensor:
        return self.kept + 0

    def forward(self, x: Tensor) -> Tensor:
        self.first(x).copy_(self.part(x))
        return self.second(x)


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[1:], lambda x: x.t()])
def test_kept_tensor_that_a_graph_would_write_is_refused(part: Any) -> None:
    # Eager execution has written it before the replay that is compared: both give the same.
    with (
        rows_runner(Keeps(part, declares=False), modes=["PIECEWISE"]) as runner,
        pytest.raises(StateAdvancedError, match=r"kept is written at .*return a copy"),
    ):
        runner.capture()


def test_kept_tensor_that_is_declared_and_not_written_is_refused() -> None:
    model = Keeps(lambda x: x, declares=True)
    with (
        rows_runner(model, modes=["PIECEWISE"], state=model.state) as runner,
        pytest.raises(VerificationError),
    ):
        runner.capture()


class Raised(torch.Tensor):
    def __mul__(self, other: Any) -> Any:
        return torch.Tensor.__mul__(self, other) + 100


@pytest.mark.parametrize("is_plain_first", [True, False])
def test_result_of_another_class_than_at_capture_is_refused(lab: Lab, is_plain_first: bool) -> None:
    is_plain = is_plain_first
    eager = break_point(lambda x: x * 2 if is_plain else (x * 2).as_subclass(Raised))
    model = lambda x: eager(x + 1) * 2  # noqa: E731
    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2)
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x).as_subclass(Tensor), model(x).as_subclass(Tensor))
    is_plain = not is_plain
    with pytest.raises(BreakOutputError, match="Raised"):
        lab.step(wrapper, x)


@pytest.mark.parametrize(("captured", "replayed"), [(4, 5), (None, 4), (True, 1), ("a", None)])
def test_returned_host_value_that_changes_is_refused(
    lab: Lab, captured: Any, replayed: Any
) -> None:
    answer = captured
    eager = break_point(lambda x: answer)

    def model(x: Tensor) -> Tensor:
        eager(x)
        return x + 1

    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2)
    lab.capture(wrapper, x)
    lab.step(wrapper, x)
    answer = replayed
    with pytest.raises(UnkeyedValueError):
        lab.step(wrapper, x)


def test_eager_segment_error_at_capture_is_noted_with_its_place(lab: Lab) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x + 1)

        @break_point
        def attention(self, x: Tensor) -> Tensor:
            raise ValueError("broken weights")

    model = torch.nn.Sequential(torch.nn.Identity(), Layer())
    wrapper = lab.wrap(model, PIECEWISE, name="decoder")
    with pytest.raises(ValueError, match="broken weights") as caught:
        lab.capture(wrapper, torch.ones(2))
    [note] = caught.value.__notes__
    for part in ("decoder", "PIECEWISE", "num_tokens=8", "segment 1", ": 1,", "attention"):
        assert part in note
    assert not lab.device.is_capturing()
    assert not wrapper.concrete_cudagraph_entries
    assert lab.library.num_graphs == 0


def test_eager_segment_error_swallowed_is_raised(lab: Lab) -> None:
    @break_point
    def eager(x: Tensor) -> None:
        raise ValueError("swallowed")

    def model(x: Tensor) -> Tensor:
        try:
            eager(x)
        except ValueError:
            x = x - 1
        return x + 1

    with pytest.raises(ValueError, match="swallowed"):
        lab.capture(lab.wrap(model, PIECEWISE), torch.ones(2))


def test_eager_segment_reads_the_context_of_its_step(lab: Lab) -> None:
    @break_point
    def eager(x: Tensor) -> Tensor:
        return x * get_forward_context().attn_metadata

    wrapper, x = lab.wrap(lambda x: eager(x + 1) + 0, PIECEWISE), torch.ones(2)
    with lab.library.capture_scope(), ForwardContext(PIECEWISE, KEY, attn_metadata=1):
        wrapper(x)
    for scale in (3, 5):
        with ForwardContext(PIECEWISE, KEY, attn_metadata=scale):
            assert wrapper(x)[0].item() == 2 * scale


def test_eager_segment_keeps_objects_and_copies_containers(lab: Lab) -> None:
    @dataclass
    class Stateful:
        scale: float

        @break_point
        def apply(self, x: Tensor, options: dict[str, float]) -> Tensor:
            return x * self.scale + options["shift"]

    thing, options = Stateful(2.0), {"shift": 1.0}
    wrapper, x = lab.wrap(lambda x: thing.apply(x + 0, options) + 0, PIECEWISE), torch.ones(2)
    lab.capture(wrapper, x)
    assert lab.step(wrapper, x)[0].item() == 3
    thing.scale = 5.0
    options["shift"] = 100.0
    assert lab.step(wrapper, x)[0].item() == 6


def test_break_at_cuts_modules_and_restores_them(lab: Lab) -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    def layer() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), Attention())

    model = torch.nn.Sequential(layer(), layer(), torch.nn.Linear(4, 4))
    wrapper, x = lab.wrap(model, PIECEWISE), torch.randn(2, 4)
    with break_at(model, types=Attention) as paths:
        assert paths == ("0.1", "1.1")
        program = lab.capture(wrapper, x)
    assert kinds(program) == "GEGEG"
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(lab.step(wrapper, x), model(x))
    with break_at(model, names="?.1"):
        assert kinds(lab.capture(lab.wrap(model, PIECEWISE), x)) == "GEGEG"
    with pytest.raises(ConfigError), break_at(model, names="nothing.like.this"):
        pass


def test_break_call_cuts_at_one_place(lab: Lab) -> None:
    wrapper = lab.wrap(lambda x: break_call(torch.mul, x + 1, 3) + 1, PIECEWISE)
    x = torch.ones(2)
    assert kinds(lab.capture(wrapper, x)) == "GEG"
    assert lab.step(wrapper, x)[0].item() == 7


def test_break_point_in_compiled_code_is_cut_never_lost(lab: Lab) -> None:
    eager = break_point(lambda x: x * 2)
    compiled = torch.compile(lambda x: eager(x + 1) + 1, backend="eager", fullgraph=True)
    direct, x = torch.compile(eager, backend="eager"), torch.ones(2)
    for _ in range(2):
        assert compiled(x).tolist() == [5.0, 5.0]
        assert direct(x).tolist() == [2.0, 2.0]
    compiled = torch.compile(lambda x: eager(x + 1) + 1, backend="eager")
    assert compiled(x).tolist() == [5.0, 5.0]
    wrapper = lab.wrap(compiled, PIECEWISE, "model")
    assert kinds(lab.capture(wrapper, x)) == "GEG"
    assert lab.step(wrapper, x).tolist() == compiled(x).tolist() == [5.0, 5.0]


def test_break_point_compiled_before_a_capture_is_refused() -> None:
    # Frames that earlier tests compiled too often run as plain Python, which a capture cuts.
    torch._dynamo.reset()
    eager = break_point(lambda x: x * 2)
    compiled, x = torch.compile(lambda x: eager(x + 1) + 1, backend="eager"), torch.ones(2)
    # A recording of the simulated device turns Dynamo off, so none is open here.
    recorder = SimpleNamespace(mode=PIECEWISE, records_here=True, run_eager=lambda *_, **__: x)
    inside = ForwardContext(PIECEWISE, KEY, capture_scope=SimpleNamespace(recorder=recorder))
    assert compiled(x).tolist() == [5.0, 5.0]
    open_cuts.add(1)
    try:
        assert compiled(x).tolist() == [5.0, 5.0]  # another thread's capture
        with inside, pytest.raises(BreakError, match="that Dynamo traces"):
            compiled(x)
    finally:
        open_cuts.add(-1)
    assert compiled(x).tolist() == [5.0, 5.0]


def test_break_point_cuts_while_another_thread_compiles(lab: Lab, monkeypatch) -> None:
    # torch's, of the process: set while any thread compiles.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    eager = break_point(lambda x: x * 2)
    wrapper = lab.wrap(lambda x: eager(x + 1) + 1, PIECEWISE, "model")
    assert kinds(lab.capture(wrapper, torch.ones(2))) == "GEG"


def test_capture_in_inference_mode_replays_in_any_grad_mode(lab: Lab) -> None:
    @break_point
    def eager(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    def model(x: Tensor) -> Tensor:
        return eager(x + 1) + 1

    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2)
    with torch.inference_mode():
        lab.capture(wrapper, x)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        x.fill_(2.0)
        with mode():
            out = lab.step(wrapper, x)
        assert torch.equal(out, model(x))
        assert not out.requires_grad


def test_break_points_or_inner_wrappers_give_the_same_program(lab: Lab) -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x, -1)

    pieces = [torch.nn.Linear(4, 4) for _ in range(3)]
    attention = [Attention() for _ in range(2)]

    def stitched(calls: list[Any]) -> Any:
        def model(x: Tensor) -> Tensor:
            for call in calls:
                x = call(x)
            return x

        return model

    interleaved = [pieces[0], attention[0], pieces[1], attention[1], pieces[2]]
    by_hand = lab.wrap(
        stitched([break_point(c) if c in attention else c for c in interleaved]), PIECEWISE
    )
    as_compiled = lab.wrap(
        stitched(
            [break_point(c) if c in attention else lab.wrap(c, PIECEWISE) for c in interleaved]
        ),
        PIECEWISE,
    )
    x = torch.randn(2, 4)
    assert kinds(lab.capture(by_hand, x)) == kinds(lab.capture(as_compiled, x)) == "GEGEG"
    for seed in range(3):
        x.copy_(torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)))
        ours = lab.step(by_hand, x).clone()
        assert torch.equal(ours, lab.step(as_compiled, x))
        assert torch.equal(ours, stitched(interleaved)(x))


def test_capture_of_both_modes_gives_the_same_result(lab: Lab) -> None:
    eager = break_point(lambda x: x * 3)

    def model(x: Tensor) -> Tensor:
        return eager(x + 1) + 1

    inner = lab.wrap(model, PIECEWISE)
    outer = lab.wrap(inner, FULL)
    x = torch.ones(2)
    report = lab.capture_all(
        *[CaptureJob(outer, mode, KEY, lambda: ((x,), {})) for mode in (PIECEWISE, FULL)]
    )
    assert [kinds(program) for program in report.programs] == ["GEG", "G"]
    for mode in (PIECEWISE, FULL):
        assert torch.equal(lab.step(outer, x, mode=mode), model(x))


@pytest.mark.parametrize("verify", ["first", "off"])
def test_error_of_an_eager_segment_in_the_first_replay_says_what_a_replay_does_not_run(
    verify: str,
) -> None:
    model = SimpleNamespace(scale=None)

    @break_point
    def scaled(x):
        return x * model.scale["n"]

    def forward(x):
        model.scale = {"n": 2}
        y = scaled(x + 1)
        model.scale = None
        return y * 1

    with rows_runner(forward, modes=("PIECEWISE",), verify=verify) as runner:
        with pytest.raises(TypeError, match="not subscriptable") as raised:
            runner.capture()
        note = raised.value.__notes__[0]
        assert "without the Python of the model before, between and after them" in note
        failure = str(*runner.report().failures.values())
        assert note in failure


def test_error_of_an_eager_run_in_a_first_check_gets_no_note_of_replays() -> None:
    calls = Tally(0)

    def forward(x):
        calls[0] += 1
        if calls[0] > 3:
            raise KeyError("weights")
        return once(x + 1) * 1

    once = break_point(lambda x: x * 2)
    with (
        rows_runner(forward, modes=("PIECEWISE",), warmups=2) as runner,
        pytest.raises(KeyError) as raised,
    ):
        runner.capture()
    (note,) = raised.value.__notes__
    assert note.startswith("in the check of the first replay of ")


def test_object_that_a_segment_passes_to_the_next_is_named_where_results_differ() -> None:
    plan = break_point(lambda x: SimpleNamespace(total=x.sum(1, keepdim=True)))
    scale = break_point(lambda x, planned: x * planned.total)
    with (
        rows_runner(lambda x: scale(x * 2, plan(x + 1)) + 1, modes=("PIECEWISE",)) as runner,
        pytest.warns(UserWarning, match="kept as captured"),
        pytest.raises(VerificationError) as raised,
    ):
        runner.capture()
    assert raised.value.do.startswith("kept as captured, because nothing looks into")
    assert "segment 1: " in raised.value.do
