"""Break points: where a PIECEWISE capture is cut, and what a replay does there."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from graph_lab import FULL, KEY, NONE, PIECEWISE, Lab
from torch import Tensor

from graphrt.context import ForwardContext, get_forward_context
from graphrt.errors import (
    BreakError,
    BreakOutputError,
    ConfigError,
    EmptyCaptureError,
    UnkeyedValueError,
)
from graphrt.graphs import (
    EagerSegment,
    GraphSegment,
    Program,
    break_at,
    break_call,
    break_point,
    no_breaks,
)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


def kinds(program: Program) -> str:
    return "".join("G" if isinstance(s, GraphSegment) else "E" for s in program.segments)


def gap_of(program: Program) -> EagerSegment:
    [gap] = [s for s in program.segments if isinstance(s, EagerSegment)]
    return gap


def test_the_worked_case_runs_graph_gap_graph_in_order(lab: Lab) -> None:
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
    program = lab.capture(wrapper, x)
    assert x.item() == 0
    assert len(calls) == 1
    assert kinds(program) == "GEG"
    for start, end in ((10.0, 27.0), (100.0, 207.0)):
        x.fill_(start)
        lab.step(wrapper, x, mode=PIECEWISE)
        assert x.item() == end


def test_a_gap_inside_a_gap_is_part_of_the_outer_one(lab: Lab) -> None:
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
    program = lab.capture(wrapper, x)
    assert (program.num_graphs, program.num_gaps) == (2, 1)
    x.zero_()
    lab.step(wrapper, x, mode=PIECEWISE)
    assert x.item() == 113


def test_gaps_replay_in_the_order_of_capture(lab: Lab) -> None:
    order: list[int] = []

    @break_point
    def gap(x: Tensor, number: int) -> None:
        order.append(number)

    def model(x: Tensor) -> Tensor:
        for number in (3, 1, 2):
            gap(x, number)
            x = x + 1
        return x

    wrapper, x = lab.wrap(model, PIECEWISE), torch.zeros(4)
    program = lab.capture(wrapper, x)
    assert kinds(program) == "EGEGEG"
    order.clear()
    lab.step(wrapper, x, mode=PIECEWISE)
    assert order == [3, 1, 2]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [("g.g", "GEG"), (".g", "EG"), ("g.", "GE"), ("g..g", "GEEG"), ("..g..", "EEGEE")],
)
def test_empty_graph_segments_are_dropped(lab: Lab, parts: str, expected: str) -> None:
    @break_point
    def gap(x: Tensor) -> None:
        x.mul_(2)

    def model(x: Tensor) -> None:
        for part in parts:
            x.add_(1) if part == "g" else gap(x)

    wrapper, x, twin = lab.wrap(model, PIECEWISE), torch.zeros(2), torch.zeros(2)
    program = lab.capture(wrapper, x)
    assert kinds(program) == expected
    for value in (1.0, 7.0):
        x.fill_(value)
        lab.step(wrapper, x, mode=PIECEWISE)
        twin.fill_(value)
        model(twin)
        assert torch.equal(x, twin)


def test_gaps_alone_are_no_capture(lab: Lab) -> None:
    wrapper = lab.wrap(break_point(lambda x: None), PIECEWISE)
    with pytest.raises(EmptyCaptureError):
        lab.capture(wrapper, torch.zeros(1))


def test_a_full_program_captures_the_break_point_with_the_rest(lab: Lab) -> None:
    gap = break_point(lambda x: x * 3)
    wrapper, x = lab.wrap(lambda x: gap(x + 1) + 1), torch.ones(2)
    program = lab.capture(wrapper, x)
    assert kinds(program) == "G"
    assert torch.equal(lab.step(wrapper, x), torch.full((2,), 7.0))


def test_no_breaks_records_through(lab: Lab) -> None:
    gap = break_point(lambda x: x * 3)
    wrapper = lab.wrap(lambda x: gap(x + 1) + 1, PIECEWISE)
    with no_breaks():
        assert kinds(lab.capture(wrapper, torch.ones(2))) == "G"

    def partly(x: Tensor) -> Tensor:
        with no_breaks():
            x = gap(x)
        return gap(x)

    assert kinds(lab.capture(lab.wrap(partly, PIECEWISE), torch.ones(2))) == "GE"


def test_outside_a_window_a_break_point_is_a_plain_call(lab: Lab) -> None:
    gap = break_point(lambda x: x * 3)
    with lab.library.capture_scope() as scope, scope.step(NONE, KEY):
        assert gap(2) == 6
    assert gap(2) == 6
    assert break_call(lambda x: x, 5) == 5


def test_another_thread_makes_a_plain_call(lab: Lab) -> None:
    results: list[Any] = []
    gap = break_point(lambda x: x * 3)

    def model(x: Tensor) -> Tensor:
        here = contextvars.copy_context()
        host = torch.ones(1)
        for run in (lambda f: here.run(f), lambda f: f()):
            worker = threading.Thread(target=run, args=(lambda: results.append(gap(5)),))
            worker.start()
            worker.join()
        del host
        return x + 1

    program = lab.capture(lab.wrap(model, PIECEWISE), torch.ones(2))
    assert kinds(program) == "G"
    assert results == [15, 15]


def test_pool_owned_arguments_are_zero_at_capture_and_hold_values_at_replay(lab: Lab) -> None:
    seen: list[Tensor] = []

    @break_point
    def gap(x: Tensor, more: dict[str, Tensor], wide: Tensor) -> Tensor:
        seen.extend(t.clone() for t in (x, more["y"], wide))
        return x + wide

    def model(x: Tensor) -> Tensor:
        y = x + 1
        return gap(y, {"y": y * 2}, (x + 2)[:, :1].expand(2, 3)) + 0

    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2, 3)
    lab.capture(wrapper, x)
    assert not any(t.any() for t in seen)
    seen.clear()
    out = lab.step(wrapper, x, mode=PIECEWISE)
    assert [t.unique().item() for t in seen] == [2, 4, 3]
    assert torch.equal(out, model(x))


def test_a_capture_stub_runs_instead_and_only_at_capture(lab: Lab) -> None:
    calls: list[str] = []

    def stub(x: Tensor) -> Tensor:
        calls.append("stub")
        return torch.empty_like(x)

    @break_point(capture_stub=stub, name="attention")
    def gap(x: Tensor) -> Tensor:
        calls.append("real")
        return x * 3

    wrapper, x = lab.wrap(lambda x: gap(x + 1) + 1, PIECEWISE), torch.ones(2)
    program = lab.capture(wrapper, x)
    assert calls == ["stub"]
    assert "attention" in gap_of(program).site
    assert torch.equal(lab.step(wrapper, x, mode=PIECEWISE), torch.full((2,), 7.0))
    assert calls == ["stub", "real"]


def test_returned_tensors_go_through_slots(lab: Lab) -> None:
    @break_point
    def gap(x: Tensor) -> dict[str, Any]:
        return {"a": x * 2, "b": (x.sum(0), x.t()), "n": 5, "same": x}

    def model(x: Tensor) -> Tensor:
        y = x + 1
        out = gap(y)
        assert out["same"] is y or lab_is_idle()
        return out["a"] + out["b"][0] + out["b"][1].t() + out["n"] + out["same"]

    def lab_is_idle() -> bool:
        return not lab.device.is_capturing()

    wrapper, x = lab.wrap(model, PIECEWISE), torch.randn(3, 3)
    program = lab.capture(wrapper, x)
    gap_segment = gap_of(program)
    assert [leaf.kind for leaf in gap_segment.returned] == [
        "slot",
        "slot",
        "passed",
        "host",
        "passed",
    ]
    assert program.memory.slot_bytes >= sum(slot.nbytes for slot in gap_segment.slots)
    for seed in range(3):
        x.copy_(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(lab.step(wrapper, x, mode=PIECEWISE), model(x))


def test_a_gap_that_returns_the_out_it_was_given_needs_no_slot_and_no_look(lab: Lab) -> None:
    @break_point(out="out")
    def gap(x: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(x, 2, out=out)

    def model(x: Tensor) -> Tensor:
        buffer = torch.empty_like(x)
        total = x
        for number in range(3):
            total = total + gap(x + number, out=buffer)
        return total

    wrapper, x = lab.wrap(model, PIECEWISE), torch.randn(4)
    program = lab.capture(wrapper, x)
    gaps = [segment for segment in program.segments if isinstance(segment, EagerSegment)]
    for segment in gaps:
        assert not segment.slots
        # By identity: what the replay's generated text asks before it looks any further.
        assert segment.returned[0].value is segment.kwargs["out"]
    assert program.memory.slot_bytes == 0
    for seed in range(3):
        x.copy_(torch.randn(4, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(lab.step(wrapper, x, mode=PIECEWISE), model(x))


def test_slots_keep_strides_and_give_room_to_broadcast_results(lab: Lab) -> None:
    @break_point
    def gap(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).t().clone(memory_format=torch.preserve_format), x.sum().expand(2, 3)

    wrapper = lab.wrap(lambda x: sum(t.sum() for t in gap(x + 1)) + 0, PIECEWISE)
    x = torch.ones(2, 3)
    program = lab.capture(wrapper, x)
    transposed, wide = gap_of(program).slots
    assert transposed.stride() == (1, 3)
    assert wide.is_contiguous()
    assert lab.step(wrapper, x, mode=PIECEWISE).item() == 24 + 72


def test_the_slots_block_is_reused_once_the_model_dropped_it(lab: Lab) -> None:
    gap = break_point(lambda x: x * 2)
    program = lab.capture(lab.wrap(lambda x: gap(x + 1) + 1, PIECEWISE), torch.ones(2))
    [generation] = lab.library.generations
    assert gap_of(program).slots
    assert not generation.pool.live_blocks()


@pytest.mark.parametrize(
    "returns", [lambda y: y, lambda y: (y, 5), lambda y: None], ids=["tensor", "tuple", "nothing"]
)
def test_side_streams_are_joined_before_a_gaps_result_is_stored(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, returns: Any
) -> None:
    side = lab.library.stream("side")
    ended: list[str] = []

    @break_point
    def gap(x: Tensor) -> Any:
        ended.append("gap")
        return returns(x * 7)

    def model(x: Tensor) -> Tensor:
        result = gap(x + 0)
        y = result[0] if isinstance(result, tuple) else result
        return x + 3 if y is None else y + 3

    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2)
    program = lab.capture(wrapper, x)
    slots = gap_of(program).slots
    out = lab.step(wrapper, x, mode=PIECEWISE)
    order = lab.device.order

    def logged(after: Any, before: Any) -> None:
        assert (after, before) == (lab.device.current_stream(), side)
        ended.append(f"join over slots {[slot.tolist() for slot in slots]}")
        order(after, before)

    monkeypatch.setattr(lab.device, "order", logged)
    ended.clear()
    x.fill_(2)
    lab.step(wrapper, x, mode=PIECEWISE)
    # The slot still held the result of the step before.
    assert ended == ["gap", f"join over slots {[[7.0, 7.0] for _ in slots]}"]
    assert out.tolist() == [17.0 if slots else 5.0] * 2


def test_side_streams_are_joined_before_a_capture_copies_a_gaps_result(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = lab.library.stream("side")
    log: list[str] = []
    order, alloc = lab.device.order, lab.device.alloc

    @break_point
    def gap(x: Tensor) -> Tensor:
        log.append("gap")
        return x * 7

    def logged_order(after: Any, before: Any) -> None:
        log.append("join" if before is side else "fork")
        order(after, before)

    def logged_alloc(*args: Any) -> Tensor:
        log.append("slot")
        return alloc(*args)

    wrapper = lab.wrap(lambda x: gap(x + 0) + 3, PIECEWISE)
    monkeypatch.setattr(lab.device, "order", logged_order)
    monkeypatch.setattr(lab.device, "alloc", logged_alloc)
    lab.capture(wrapper, torch.ones(2))
    at_capture = len(log) - log[::-1].index("gap")  # A warm-up runs the gap too.
    assert log[at_capture : at_capture + 2] == ["join", "slot"]


def test_out_passes_the_slot_under_its_keyword(lab: Lab) -> None:
    outs: list[Tensor | None] = []

    @break_point(out="into")
    def gap(x: Tensor, into: Tensor | None = None) -> Tensor | None:
        outs.append(into)
        if into is None:
            return x * 2
        torch.mul(x, 2, out=into)
        return None if len(outs) % 2 else into

    wrapper, x = lab.wrap(lambda x: gap(x + 1) + 1, PIECEWISE), torch.ones(2)
    program = lab.capture(wrapper, x)
    assert outs == [None]
    [slot] = gap_of(program).slots
    for value in (1.0, 2.0):
        x.fill_(value)
        assert torch.equal(lab.step(wrapper, x, mode=PIECEWISE), (x + 1) * 2 + 1)
        assert outs[-1] is slot


def test_out_wants_one_tensor(lab: Lab) -> None:
    gap = break_point(out="into")(lambda x, into=None: None)
    with pytest.raises(BreakError):
        lab.capture(lab.wrap(lambda x: gap(x + 1), PIECEWISE), torch.ones(2))


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
def test_a_result_that_no_longer_fits_is_refused(lab: Lab, captured: Any, replayed: Any) -> None:
    fn = captured
    gap = break_point(lambda x: fn(x))
    wrapper = lab.wrap(lambda x: gap(x + 1) is not None and x + 1, PIECEWISE)
    x = torch.ones(2)
    program = lab.capture(wrapper, x)
    lab.step(wrapper, x, mode=PIECEWISE)
    fn = replayed
    with pytest.raises(BreakOutputError):
        lab.step(wrapper, x, mode=PIECEWISE)
    assert program.state == "ready"


@pytest.mark.parametrize(("captured", "replayed"), [(4, 5), (None, 4), (True, 1), ("a", None)])
def test_a_host_value_the_model_acted_on_must_not_change(
    lab: Lab, captured: Any, replayed: Any
) -> None:
    answer = captured
    gap = break_point(lambda x: answer)

    def model(x: Tensor) -> Tensor:
        gap(x)
        return x + 1

    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2)
    lab.capture(wrapper, x)
    lab.step(wrapper, x, mode=PIECEWISE)
    answer = replayed
    with pytest.raises(UnkeyedValueError):
        lab.step(wrapper, x, mode=PIECEWISE)


def test_an_exception_at_capture_is_the_same_object_with_its_place(lab: Lab) -> None:
    original = ValueError("broken weights")

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x + 1)

        @break_point
        def attention(self, x: Tensor) -> Tensor:
            raise original

    model = torch.nn.Sequential(torch.nn.Identity(), Layer())
    wrapper = lab.wrap(model, PIECEWISE, name="decoder")
    with pytest.raises(ValueError, match="broken weights") as caught:
        lab.capture(wrapper, torch.ones(2))
    assert caught.value is original
    [note] = original.__notes__
    for part in ("decoder", "PIECEWISE", "num_tokens=8", "segment 1", ": 1,", "attention"):
        assert part in note
    assert not lab.device.is_capturing()
    assert not wrapper.concrete_cudagraph_entries
    assert lab.library.num_graphs == 0


def test_a_model_that_swallows_its_gaps_exception_is_not_captured(lab: Lab) -> None:
    @break_point
    def gap(x: Tensor) -> None:
        raise ValueError("swallowed")

    def model(x: Tensor) -> Tensor:
        try:
            gap(x)
        except ValueError:
            x = x - 1
        return x + 1

    with pytest.raises(ValueError, match="swallowed"):
        lab.capture(lab.wrap(model, PIECEWISE), torch.ones(2))


def test_bug_class_24_an_exception_at_replay_stops_there_and_keeps_the_program(lab: Lab) -> None:
    fails = False
    model_calls = 0

    @break_point
    def gap(x: Tensor) -> None:
        if fails:
            raise ValueError("this step only")

    def model(x: Tensor) -> None:
        nonlocal model_calls
        model_calls += 1
        x.add_(1)
        gap(x)
        x.add_(10)

    wrapper, x = lab.wrap(model, PIECEWISE), torch.zeros(1)
    program = lab.capture(wrapper, x)
    lab.step(wrapper, x, mode=PIECEWISE)
    fails = True
    x.zero_()
    with pytest.raises(ValueError, match="this step only"):
        lab.step(wrapper, x, mode=PIECEWISE)
    assert x.item() == 1
    assert program.state == "ready"
    fails = False
    lab.step(wrapper, x, mode=PIECEWISE)
    assert x.item() == 12
    assert model_calls == 1


def test_a_gap_reads_this_steps_context(lab: Lab) -> None:
    @break_point
    def gap(x: Tensor) -> Tensor:
        return x * get_forward_context().attn_metadata

    wrapper, x = lab.wrap(lambda x: gap(x + 1) + 0, PIECEWISE), torch.ones(2)
    with lab.library.capture_scope(), ForwardContext(PIECEWISE, KEY, attn_metadata=1):
        wrapper(x)
    for scale in (3, 5):
        with ForwardContext(PIECEWISE, KEY, attn_metadata=scale):
            assert wrapper(x)[0].item() == 2 * scale


def test_objects_are_kept_and_containers_are_not(lab: Lab) -> None:
    @dataclass
    class Stateful:
        scale: float

        @break_point
        def apply(self, x: Tensor, options: dict[str, float]) -> Tensor:
            return x * self.scale + options["shift"]

    thing, options = Stateful(2.0), {"shift": 1.0}
    wrapper, x = lab.wrap(lambda x: thing.apply(x + 0, options) + 0, PIECEWISE), torch.ones(2)
    lab.capture(wrapper, x)
    assert lab.step(wrapper, x, mode=PIECEWISE)[0].item() == 3
    thing.scale = 5.0
    options["shift"] = 100.0
    assert lab.step(wrapper, x, mode=PIECEWISE)[0].item() == 6


def test_break_at_cuts_modules_one_cannot_edit_and_restores_them(lab: Lab) -> None:
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
    assert torch.equal(lab.step(wrapper, x, mode=PIECEWISE), model(x))
    with break_at(model, names="?.1"):
        assert kinds(lab.capture(lab.wrap(model, PIECEWISE), x)) == "GEGEG"
    with pytest.raises(ConfigError), break_at(model, names="nothing.like.this"):
        pass


def test_break_call_cuts_at_one_place(lab: Lab) -> None:
    wrapper = lab.wrap(lambda x: break_call(torch.mul, x + 1, 3) + 1, PIECEWISE)
    x = torch.ones(2)
    assert kinds(lab.capture(wrapper, x)) == "GEG"
    assert lab.step(wrapper, x, mode=PIECEWISE)[0].item() == 7


def test_dynamo_is_told_to_use_a_splitting_op() -> None:
    gap = break_point(lambda x: x * 2)
    compiled = torch.compile(lambda x: gap(x + 1), backend="eager")
    with pytest.raises(BreakError, match="Dynamo"):
        compiled(torch.ones(2))


def test_bug_class_22_captured_in_inference_mode_replays_outside_and_back(lab: Lab) -> None:
    @break_point
    def gap(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    def model(x: Tensor) -> Tensor:
        return gap(x + 1) + 1

    wrapper, x = lab.wrap(model, PIECEWISE), torch.ones(2)
    with torch.inference_mode():
        lab.capture(wrapper, x)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        x.fill_(2.0)
        with mode():
            out = lab.step(wrapper, x, mode=PIECEWISE)
        assert torch.equal(out, model(x))
        assert not out.requires_grad


def test_both_producers_give_the_same_program(lab: Lab) -> None:
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
        ours = lab.step(by_hand, x, mode=PIECEWISE).clone()
        assert torch.equal(ours, lab.step(as_compiled, x, mode=PIECEWISE))
        assert torch.equal(ours, stitched(interleaved)(x))


def test_a_full_step_after_piecewise_captures_the_same_result(lab: Lab) -> None:
    gap = break_point(lambda x: x * 3)

    def model(x: Tensor) -> Tensor:
        return gap(x + 1) + 1

    inner = lab.wrap(model, PIECEWISE)
    outer = lab.wrap(inner, FULL)
    x = torch.ones(2)
    report = lab.capture_all(
        *[
            type(lab.job(outer, x))(outer, mode, KEY, lambda: ((x,), {}))
            for mode in (PIECEWISE, FULL)
        ]
    )
    assert [kinds(program) for program in report.programs] == ["GEG", "G"]
    for mode in (PIECEWISE, FULL):
        assert torch.equal(lab.step(outer, x, mode=mode), model(x))
