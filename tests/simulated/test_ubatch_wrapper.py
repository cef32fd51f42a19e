"""A callable cut into micro-batches: what is cut, captured and replayed, and what comes out."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.lab import FULL, NONE, PIECEWISE, Lab, Tally
from tests.ubatch_models import WIDTH, Layers, uniform_key

from graphrt import (
    BatchDescriptor,
    CaptureJob,
    CUDAGraphWrapper,
    ForwardContext,
    OutputSpec,
    Reason,
    TensorStateGuard,
    get_forward_context,
    ubatch,
)
from graphrt.config import UBatchConfig
from graphrt.errors import (
    CaptureOutsideScopeError,
    ConfigError,
    ContextError,
    InputNotSliceableError,
    MissError,
    OutputsDifferError,
    UBatchBusyError,
    VerificationError,
)
from graphrt.events import RanEager
from graphrt.ubatch import InputAxes, UBatchWrapper, make_slices

CONFIG = UBatchConfig(num_ubatches=2, decode_token_threshold=2, prefill_token_threshold=2)
KEY, WHOLE = uniform_key(8), uniform_key(8, 1)


@pytest.fixture
def lab() -> Iterator[Lab]:
    threads = threading.active_count()
    with Lab() as lab:
        yield lab
    assert threading.active_count() == threads, "a thread was left behind"


class Wrapped:
    """A wrapper over a function, closed when the library is."""

    def __init__(self, lab: Lab, fn: Callable[..., Any], mode: Any = FULL, **more: Any) -> None:
        self.lab, self.calls = lab, list[int]()

        def count(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(len(x))
            return fn(x, *args, **kwargs)

        options = {"input_axes": {"x": 0}, **more}
        self.wrapper = UBatchWrapper(count, lab.library, mode, CONFIG, **options)

    def __enter__(self) -> UBatchWrapper:
        return self.wrapper

    def __exit__(self, *error: object) -> None:
        self.wrapper.close()

    def taken(self) -> list[int]:
        """How long the batches were that the function saw since the last look."""
        taken, self.calls[:] = list(self.calls), []
        return taken


def slices_of(key: BatchDescriptor) -> tuple[ubatch.UBatchSlice, ...]:
    return make_slices([1] * key.num_tokens, key.num_tokens, key.num_tokens, key.num_ubatches)


def step(wrapper: Any, mode: Any, key: Any, slices: Any, *args: Any, **kwargs: Any) -> Any:
    with ForwardContext(mode, key, ubatch_slices=slices):
        return wrapper(*args, **kwargs)


def capture(
    lab: Lab, wrapper: Any, x: torch.Tensor, key: BatchDescriptor = KEY, skips: Any = None
) -> Any:
    """Warm up and capture; ``skips``: the mode of the one that is left out."""
    with lab.library.capture_scope() as scope:
        if skips is not NONE:
            with scope.step(NONE, key):
                wrapper(x)
        with scope.step(FULL, key):
            wrapper(x)
    return wrapper.concrete_cudagraph_entries[key]


@pytest.mark.parametrize("num_ubatches", [2, 3, 4])
def test_split_program_replays_what_sequential_slices_give(lab: Lab, num_ubatches: int) -> None:
    model, x, key = Layers(), lab.random(12, WIDTH), uniform_key(12, num_ubatches)
    wrapped = Wrapped(lab, model)
    with wrapped as wrapper:
        capture(lab, wrapper, x, key)
        assert set(wrapped.taken()) == {12 // num_ubatches}
        for seed in range(3):
            x.copy_(lab.random(12, WIDTH, seed=seed))
            expected = torch.cat([model(part) for part in x.chunk(num_ubatches)])
            # As a FULL step has no slices, and nothing calls the callable.
            assert torch.equal(step(wrapper, FULL, key, None, x), expected)
            assert torch.equal(step(wrapper, NONE, key, slices_of(key), x), expected)
            assert torch.equal(step(wrapper, NONE, key, None, x), expected)
        assert step(wrapper, FULL, key, None, x) is not None
        wrapped.taken()
        step(wrapper, FULL, key, None, x)
        assert wrapped.taken() == []


def test_call_without_slices_passes_through(lab: Lab) -> None:
    x, wrapped = lab.random(8, WIDTH), Wrapped(lab, lambda x, flag=None: (x, flag))
    with wrapped as wrapper:
        for mode in (NONE, PIECEWISE):
            out, flag = step(wrapper, mode, WHOLE, None, x, flag="kept")
            assert out is x
            assert flag == "kept"
        assert wrapper(x)[0] is x
        assert wrapped.taken() == [8, 8, 8]


def test_pieces_and_captures_outside_a_scope_are_refused(lab: Lab) -> None:
    x = lab.random(8, WIDTH)
    with Wrapped(lab, Layers()) as wrapper:
        with pytest.raises(ContextError, match="PIECEWISE"):
            step(wrapper, PIECEWISE, KEY, slices_of(KEY), x)
        for slices in (None, slices_of(KEY)):
            with pytest.raises(CaptureOutsideScopeError):
                step(wrapper, FULL, KEY, slices, x)
        with pytest.raises(ContextError, match="as many slices"):
            step(wrapper, NONE, WHOLE, slices_of(KEY), x)
        with pytest.raises(ContextError, match="slices in the forward context"):
            step(wrapper, NONE, BatchDescriptor(8, num_ubatches=2), None, x)
    with Wrapped(lab, Layers(), NONE) as wrapper:
        with pytest.raises(ContextError, match="mode NONE"):
            step(wrapper, FULL, KEY, None, x)
        assert len(step(wrapper, NONE, KEY, slices_of(KEY), x)) == 8
    with pytest.raises(ConfigError):
        UBatchWrapper(Layers(), lab.library, PIECEWISE, CONFIG)


def test_split_called_off_runs_eager_and_is_counted(lab: Lab) -> None:
    x, wrapped = lab.random(8, WIDTH), Wrapped(lab, Layers())
    with wrapped as wrapper:
        capture(lab, wrapper, x)
        wrapped.taken()
        assert torch.equal(step(wrapper, FULL, WHOLE, None, x), Layers()(x))
        assert wrapped.taken() == [8]
        found = [event for event in lab.events if isinstance(event, RanEager)]
        assert [event.reason for event in found] == [Reason.UBATCH_ABORTED]
        assert WHOLE not in wrapper.concrete_cudagraph_entries
        # In a scope it may be captured, and is another program.
        capture(lab, wrapper, x, WHOLE)
        assert set(wrapper.concrete_cudagraph_entries) == {KEY, WHOLE}
        wrapped.taken()
        assert torch.equal(step(wrapper, FULL, WHOLE, None, x), Layers()(x))
        assert wrapped.taken() == []


def test_strict_wrapper_raises_where_a_split_is_called_off(lab: Lab) -> None:
    with Wrapped(lab, Layers(), on_miss="strict") as wrapper:
        capture(lab, wrapper, lab.random(8, WIDTH))
        with pytest.raises(MissError) as caught:
            step(wrapper, FULL, WHOLE, None, lab.random(8, WIDTH))
        assert caught.value.reason is Reason.UBATCH_ABORTED


def test_key_names_every_fact_of_a_split_program(lab: Lab) -> None:
    x = lab.random(8, WIDTH)
    with Wrapped(lab, Layers()) as wrapper:
        loras = BatchDescriptor(8, 8, True, True, 2, num_ubatches=2)
        fewer = BatchDescriptor(8, 4, True, num_ubatches=2)
        programs = {capture(lab, wrapper, x, key) for key in (KEY, loras, fewer)}
        assert len(programs) == 3


def test_slice_sees_a_context_of_its_own(lab: Lab) -> None:
    seen: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        context = ubatch_context()
        seen.append(
            (
                context.cudagraph_runtime_mode,
                context.ubatch_slices,
                context.attn_metadata,
                context.slot_mapping,
                context.num_tokens_across_ranks,
                (ubatch.active(), ubatch.index(), ubatch.count(), ubatch.token_offset()),
            )
        )
        return x * 1

    def ubatch_context() -> ForwardContext:
        context = get_forward_context()
        assert context is not None
        return context

    key, x = uniform_key(9), lab.random(9, 1)
    with (
        Wrapped(lab, look) as wrapper,
        ForwardContext(
            NONE,
            key,
            ["first", "second"],
            [{"layer": 1}, {}],
            num_tokens_across_ranks=(9, 9),
            ubatch_slices=slices_of(key),
        ) as outer,
    ):
        wrapper(x)
        assert outer.attn_metadata == ["first", "second"]
    assert seen == [
        (NONE, None, "first", {"layer": 1}, (4, 4), (True, 0, 2, 0)),
        (NONE, None, "second", None, (5, 5), (True, 1, 2, 4)),
    ]
    assert (ubatch.active(), ubatch.index(), ubatch.count(), ubatch.token_offset()) == (
        False,
        0,
        1,
        0,
    )


def test_nested_wrapper_passes_through_in_a_slice(lab: Lab) -> None:
    inner, x = Wrapped(lab, Layers()), lab.random(8, WIDTH)
    with inner as nested, Wrapped(lab, lambda x: nested(x)) as wrapper:
        capture(lab, wrapper, x)
        assert set(inner.taken()) == {4}
        assert not nested.concrete_cudagraph_entries


class Result(NamedTuple):
    rows: torch.Tensor
    extra: Any


def test_arguments_and_results_of_every_kind_are_cut_and_joined(lab: Lab) -> None:
    def fn(
        x: Any,
        positions: Any,
        inputs_embeds: Any,
        intermediate_tensors: Any,
        weights: Any,
        scale: Any,
    ) -> Result:
        assert x is None
        rows = inputs_embeds + positions.sum(0)[:, None] * scale
        return Result(
            rows, {"nested": [intermediate_tensors["h"] * 2, None], "tables": rows.sum(1), "n": 7}
        )

    positions = torch.arange(24).view(3, 8)
    embeds, hidden = lab.random(8, WIDTH), lab.random(8, 2)
    args = (None, positions, embeds)
    kwargs = {"intermediate_tensors": {"h": hidden, "none": None}, "weights": [1, 2], "scale": 2.0}
    wrapper = UBatchWrapper(fn, lab.library, NONE, CONFIG)
    try:
        found = step(wrapper, NONE, KEY, slices_of(KEY), *args, **kwargs)
    finally:
        wrapper.close()
    expected = fn(*args, **kwargs)
    assert type(found) is Result
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.extra["nested"][0], hidden * 2)
    assert found.extra["nested"][1] is None
    assert torch.equal(found.extra["tables"], expected.extra["tables"])
    assert found.extra["n"] == 7


@pytest.mark.parametrize("outputs", [None, OutputSpec({"last": "requests", "names": "tokens"})])
def test_request_rows_and_rebased_places_follow_the_cut(
    lab: Lab, outputs: OutputSpec | None
) -> None:
    """10, 20 and 30 tokens, padded to 64: the last request lies in both slices.

    Without ``outputs`` as many rows as there are requests are rows of requests.
    """
    lens, key = [10, 20, 30], BatchDescriptor(64, 3, num_ubatches=2)
    x = lab.random(64, 1)
    last = torch.tensor([9, 29, 59])
    owners = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    owners = torch.cat([owners, torch.zeros(4, dtype=torch.int64)])
    names = torch.tensor([5.0, 6.0, 7.0])

    def fn(x: Any, last: Any, owners: Any, names: Any) -> Any:
        return {"last": x[last], "names": names[owners]}

    wrapper = UBatchWrapper(
        fn,
        lab.library,
        NONE,
        CONFIG,
        input_axes={
            "x": 0,
            "last": InputAxes(requests=0, rebase="tokens"),
            "owners": InputAxes(tokens=0, rebase="requests"),
            "names": InputAxes(requests=0),
        },
        outputs=outputs,
    )
    try:
        found = step(wrapper, NONE, key, make_slices(lens, 64, 3, 2), x, last, owners, names)
    finally:
        wrapper.close()
    assert torch.equal(found["last"], x[last])
    assert torch.equal(found["names"][:60], names[owners][:60])


def test_output_of_a_declared_length_is_joined_as_it_comes(lab: Lab) -> None:
    outputs = OutputSpec({"": lambda sizes: 2 * sizes["tokens"]})
    x = lab.random(8, WIDTH)
    wrapped = Wrapped(lab, lambda x: x.repeat_interleave(2, 0), outputs=outputs)
    with wrapped as wrapper:
        found = step(wrapper, NONE, KEY, slices_of(KEY), x)
    assert torch.equal(found, x.repeat_interleave(2, 0))


def test_what_cannot_be_cut_or_joined_is_refused(lab: Lab) -> None:
    x, other = lab.random(8, WIDTH), lab.random(8)
    with Wrapped(lab, lambda x, other: x) as wrapper:
        with pytest.raises(InputNotSliceableError) as caught:
            step(wrapper, NONE, KEY, slices_of(KEY), x, other)
        assert "argument" in str(caught.value)
        with pytest.raises(InputNotSliceableError):
            step(wrapper, NONE, KEY, slices_of(KEY), x[:7], 1)
    wrapped = Wrapped(lab, lambda x, other: x, input_axes={"x": 0, "other": 0})
    with wrapped as wrapper, pytest.raises(InputNotSliceableError, match="mapping"):
        step(wrapper, NONE, KEY, slices_of(KEY), x, other=[other, other])
    results: list[Callable[[], Any]] = [
        lambda: (1, 2)[: 1 + ubatch.index()],
        lambda: ubatch.index(),
        lambda: torch.zeros(()),
        lambda: {f"k{ubatch.index()}": 1},
        lambda: torch.zeros(1, WIDTH),
        lambda: torch.zeros(4, dtype=(torch.int32, torch.int64)[ubatch.index()]),
    ]
    for result in results:
        wrapped = Wrapped(lab, lambda x, result=result: result())
        with wrapped as wrapper, pytest.raises(OutputsDifferError):
            step(wrapper, NONE, KEY, slices_of(KEY), x)


def test_attributes_come_from_the_runnable(lab: Lab) -> None:
    model = Layers()
    inner = lab.wrap(model)
    wrapper = UBatchWrapper(inner, lab.library, FULL, CONFIG)
    assert wrapper.depth == model.depth
    assert wrapper.unwrap() is inner
    assert wrapper.unwrap(deep=True) is model
    outer = CUDAGraphWrapper(wrapper, lab.library, PIECEWISE)
    assert outer.unwrap() is wrapper
    assert outer.unwrap(deep=True) is model
    with pytest.raises(AttributeError, match="UBatchWrapper"):
        _ = wrapper.missing
    assert copy.copy(wrapper).runnable is inner
    wrapper.close()


class Control:
    def __init__(self, most: int | None = None, fails: bool = False) -> None:
        self.calls: list[Any] = []
        self.most, self.fails = most, fails
        self.now = (4, 128)

    def max_comm_sms(self) -> int | None:
        return self.most

    def get(self) -> tuple[int, int]:
        return self.now

    def set_comm(self, number: int) -> None:
        self.calls.append(("comm", number))
        self.now = number, self.now[1]

    def set_compute(self, number: int) -> None:
        self.calls.append(("compute", number))
        if self.fails and number != 128:
            raise OSError("refused")
        self.now = self.now[0], number


def test_multiprocessors_are_divided_and_given_back(lab: Lab) -> None:
    x = lab.random(8, WIDTH)
    for most, comm in ((None, 20), (8, 8), (0, None)):
        control = Control(most)
        with Wrapped(lab, Layers(), sm_control=control) as wrapper:
            step(wrapper, NONE, KEY, slices_of(KEY), x)
        entered = [("comm", comm), ("compute", 132 - (comm or 0))]
        left = [("comm", 4), ("compute", 128)]
        assert control.calls == ([] if comm is None else entered + left)
    control = Control(fails=True)
    with Wrapped(lab, Layers(), sm_control=control) as wrapper:
        with pytest.raises(OSError, match="refused"):
            step(wrapper, NONE, KEY, slices_of(KEY), x)
        assert control.now == (4, 128)
        control.fails = False
        capture(lab, wrapper, x)
        control.calls.clear()
        step(wrapper, FULL, KEY, None, x)
        assert control.calls == []


def test_first_replay_is_compared_with_slices_one_by_one(lab: Lab) -> None:
    is_wrong = Tally(0)

    def model(x: torch.Tensor) -> torch.Tensor:
        is_worker = threading.current_thread() is not threading.main_thread()
        return x.flip(0) * 1 if is_wrong[0] and is_worker else x * 2

    def inputs(seed: int) -> Any:
        return (x.copy_(lab.random(8, WIDTH, seed=seed)),), {}

    x, wrapped = lab.random(8, WIDTH), Wrapped(lab, model)
    with wrapped as wrapper:
        job = CaptureJob(wrapper, FULL, KEY, inputs)
        is_wrong[0] = 1
        with pytest.raises(VerificationError):
            lab.capture_all(job)
        is_wrong[0] = 0
        lab.library.forget_failures()
        fewer = CaptureJob(
            wrapper, FULL, uniform_key(4), lambda seed: ((inputs(seed)[0][0][:4],), {})
        )
        report = lab.capture_all(job, fewer)
        assert [program.is_compared for program in report.programs] == [True, True]


def test_first_replay_is_compared_with_the_whole_batch(lab: Lab) -> None:
    model = Counted()

    def inputs(seed: int) -> Any:
        return (x.copy_(lab.random(8, WIDTH, seed=seed)),), {}

    x, state = lab.random(8, WIDTH), TensorStateGuard([model.total])
    wrapper = UBatchWrapper(model, lab.library, FULL, CONFIG, input_axes={"x": 0})
    job = CaptureJob(wrapper, FULL, KEY, inputs)
    with pytest.raises(VerificationError, match="depend on those of another"):
        lab.capture_all(job, state=state)
    model.mixes = False
    lab.library.forget_failures()
    report = lab.capture_all(job, state=state)
    assert [program.is_compared for program in report.programs] == [True]
    assert (model.calls, model.total.item(), model.sizes) == (0, 0, {4})
    wrapper.close()


class Counted(torch.nn.Module):
    """Counts its runs on the host and its rows on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.total, self.mixes = 0, torch.zeros(1), True
        self.sizes = set[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sizes.add(len(x))
        self.total += len(x)
        return x - x.mean(0) if self.mixes else x * 2


def test_all_multiprocessors_for_communication_are_refused(lab: Lab) -> None:
    config = UBatchConfig(num_ubatches=2, num_comm_sms=132)
    with pytest.raises(ConfigError, match="132"):
        UBatchWrapper(Layers(), lab.library, FULL, config)


class Hook:
    def __init__(self, lab: Lab) -> None:
        self.lab, self.seen = lab, list[Any]()

    def before(self, pool_handle: Any) -> None:
        self.seen.append((pool_handle, self.lab.device.is_capturing()))

    def join(self) -> None:
        self.seen.append(self.lab.device.is_capturing())


def test_capture_hooks_are_called_around_the_recording(lab: Lab) -> None:
    hook = Hook(lab)
    with Wrapped(lab, Layers(), capture_hooks=[hook]) as wrapper:
        capture(lab, wrapper, lab.random(8, WIDTH))
    assert hook.seen == [(lab.library.graph_pool, False), True]


def test_second_thread_is_refused(lab: Lab) -> None:
    refused: list[BaseException] = []

    def enter_again(x: torch.Tensor) -> torch.Tensor:
        def other() -> None:
            try:
                step(wrapper, NONE, KEY, slices_of(KEY), whole)
            except UBatchBusyError as error:
                refused.append(error)

        if not refused:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return x * 1

    whole = lab.random(8, WIDTH)
    with Wrapped(lab, enter_again) as wrapper:
        step(wrapper, NONE, KEY, slices_of(KEY), whole)
    assert len(refused) == 1


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("num_ubatches", [2, 3])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_failing_micro_batch_leaves_nothing_behind(
    lab: Lab, num_ubatches: int, failing: int, at: int, is_captured: bool
) -> None:
    key, model = uniform_key(12, num_ubatches), Layers(depth=1)
    failing = min(failing, num_ubatches - 1)
    armed, unwound = Tally(0), Tally()

    def fails(x: torch.Tensor) -> torch.Tensor:
        armed_here = armed[0] and ubatch.index() == failing
        try:
            for layer in range(2):
                if armed_here and at == layer:
                    raise KeyError("broken")
                x = model(x)
            if armed_here:
                raise KeyError("broken")
            return x
        finally:
            unwound.append(ubatch.index())

    x, control = lab.random(12, WIDTH), Control()
    with Wrapped(lab, fails, sm_control=control) as wrapper:
        expected = step(wrapper, NONE, key, slices_of(key), x)
        stream, armed[0] = lab.device.current_stream(), 1
        unwound.clear()
        with pytest.raises(KeyError) as caught:
            capture(lab, wrapper, x, key, NONE if is_captured else FULL)
        assert f"in micro-batch {failing} of {num_ubatches}" in caught.value.__notes__[0]
        assert len(unwound) == (num_ubatches if at else failing + 1)
        assert lab.device.current_stream() is stream
        assert control.now == (4, 128)
        assert not wrapper.concrete_cudagraph_entries
        armed[0] = 0
        lab.library.forget_failures()
        capture(lab, wrapper, x, key)
        assert torch.equal(step(wrapper, FULL, key, None, x), expected)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(5, 24))
def test_overlapped_equals_sequential_bit_for_bit(num_ubatches: int, num_tokens: int) -> None:
    key = uniform_key(num_tokens, num_ubatches)
    with Lab() as lab, Wrapped(lab, Layers()) as wrapper:
        x = lab.random(num_tokens, WIDTH)
        found = step(wrapper, NONE, key, slices_of(key), x)
        assert torch.equal(found, step(wrapper, NONE, key, None, x))
