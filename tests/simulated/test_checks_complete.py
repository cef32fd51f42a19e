"""Checks look at all they name: shape, stride and dtype, expiry, edges of recordings, keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated_recording import record

from graphrt import (
    BufferSpec,
    CUDAGraphDispatcher,
    CUDAGraphOptions,
    CUDAGraphRunner,
    OutputSpec,
    Reason,
)
from graphrt.config import Facts, RuntimeConfig, resolve
from graphrt.device.cuda import UseTracker
from graphrt.device.simulated import SimulatedDevice
from graphrt.errors import (
    CaptureInProgressError,
    ForbiddenOperationError,
    StaleInputError,
    StaleOutputError,
    VerificationError,
)
from graphrt.events import CaptureFailed, PaddingVerified, Verified
from graphrt.runner.comparisons import Comparisons
from graphrt.verify import compare
from lab import KEY, PIECEWISE, Lab, RuntimeLab, Toy


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# --- arguments of replays

OTHER_LAYOUTS = [
    pytest.param(lambda x: x[:1], id="shape"),
    pytest.param(lambda x: x.t(), id="stride"),
    pytest.param(lambda x: x.view(torch.int32), id="dtype"),
]


@pytest.mark.parametrize("other", OTHER_LAYOUTS)
def test_first_replay_refuses_another_layout(
    lab: Lab, other: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    program = lab.capture(lab.wrap(double), x := torch.ones(2, 2))
    with pytest.raises(StaleInputError):
        program(other(x))
    assert torch.equal(program(x), x * 2)


@pytest.mark.parametrize("other", OTHER_LAYOUTS)
def test_pool_argument_of_another_layout_is_refused(
    lab: Lab, other: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    # The output of one program, which no check may keep alive, is the argument of the next.
    strong = CUDAGraphOptions(weak_ref_output=False)
    first = lab.wrap(double, PIECEWISE, cudagraph_options=strong, name="first")
    last = lab.wrap(double, PIECEWISE, name="last")
    x = torch.ones(2, 2)
    with lab.library.capture_scope() as scope, scope.step(PIECEWISE, KEY):
        last(first(x))
    pooled = lab.step(first, x, mode=PIECEWISE)
    assert lab.device.owns(pooled)
    for _ in range(2):  # The first check, and the generated one.
        assert torch.equal(lab.step(last, pooled, mode=PIECEWISE), x * 4)
    with pytest.raises(StaleInputError):
        lab.step(last, other(pooled), mode=PIECEWISE)
    assert torch.equal(lab.step(last, pooled.view(2, 2), mode=PIECEWISE), x * 4)


# --- outputs of runs


class ReadsEarlierOutput(Toy):
    """Uses the output of an earlier step while an eager step runs."""

    earlier: tuple[torch.Tensor, ...] = ()

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        for tensor in self.earlier:
            tensor.sum()
        return super().forward(**inputs)


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_checked_view_ends_before_an_eager_step_runs(mode: str) -> None:
    model = ReadsEarlierOutput()
    with RuntimeLab(mode, policy="checked_view", model=model) as lab:
        lab.runtime.capture()
        rows = lab.step(4, 2)["rows"]
        rows.sum()
        model.earlier = (rows,)  # In a tuple: the module shall not register it.
        with pytest.raises(StaleOutputError):
            lab.step(9, 2)
        assert lab.runtime.last_decision.reason in (Reason.ABOVE_MAX, Reason.MODE_NONE)


# --- comparisons


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.float16, torch.bfloat16),
        (torch.int32, torch.float32),
        (torch.int64, torch.float64),
        (torch.uint8, torch.bool),
        (torch.float32, torch.float64),
    ],
)
def test_equal_bits_of_another_dtype_differ(left: torch.dtype, right: torch.dtype) -> None:
    found = compare({"t": torch.zeros(3, dtype=left)}, {"t": torch.zeros(3, dtype=right)})
    assert not found.is_equal
    [difference] = found.differences
    assert str(left) in difference.expected
    assert str(right) in difference.found


# --- recordings of the simulated device


def set_by_mask(x: torch.Tensor, mask: torch.Tensor) -> None:
    x[mask] = x[:1]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
@pytest.mark.parametrize("use", [lambda x, mask: x[mask], set_by_mask], ids=["read", "write"])
def test_mask_of_either_dtype_is_refused_in_recordings(
    use: Callable[[torch.Tensor, torch.Tensor], Any], dtype: torch.dtype
) -> None:
    device = SimulatedDevice()
    x, mask = torch.zeros(3), torch.tensor([1, 0, 1], dtype=dtype)
    with pytest.raises(ForbiddenOperationError, match="boolean mask"):
        record(device, device.new_pool(), lambda: use(x, mask))
    assert torch.equal(x, torch.zeros(3))


def test_pool_takes_one_recording_of_any_thread() -> None:
    device = SimulatedDevice()
    pool = device.new_pool()
    caught: list[BaseException] = []

    def begin_elsewhere() -> None:
        stream = device.stream("elsewhere")
        with device.use(stream):
            try:
                device.begin(pool, stream, "second").abort(RuntimeError())
            except CaptureInProgressError as error:
                caught.append(error)

    def fn() -> torch.Tensor:
        thread = threading.Thread(target=begin_elsewhere)
        thread.start()
        thread.join()
        return torch.ones(2) + 1

    record(device, pool, fn)
    assert len(caught) == 1


# --- what is remembered


def test_tracker_keeps_the_first_of_several_failures() -> None:
    tracker = UseTracker("cpu", lambda address: False)
    first, second = RuntimeError("first"), RuntimeError("second")
    tracker.fail("aten::add", first)
    tracker.fail("aten::mul", second)
    assert tracker.take_failure() == (first, "aten::add")
    assert tracker.take_failure()[0] is None


def test_dispatcher_shares_decisions_up_to_the_limit_only() -> None:
    plan = resolve(RuntimeConfig(max_num_seqs=8, max_num_batched_tokens=64), Facts()).plan
    dispatcher = CUDAGraphDispatcher(plan)
    assert dispatcher.dispatch(64) is dispatcher.dispatch(64)
    # Sizes beyond it have no bound: to keep each would be a leak.
    assert dispatcher.dispatch(65) == dispatcher.dispatch(65)
    assert dispatcher.dispatch(65) is not dispatcher.dispatch(65)


# --- first replays of several keys

SIZES = [2, 4, 8]
"""The largest is captured and checked first."""


def runner_of(fn: Callable[..., Any], **changes: Any) -> CUDAGraphRunner:
    options: dict[str, Any] = {
        "inputs": [BufferSpec("x", ("tokens",), torch.float64)],
        "outputs": OutputSpec({"": "tokens"}),
        "sizes": {"tokens": SIZES},
        "examples": lambda sizes, seed: {"x": torch.arange(sizes["tokens"]) + 1.0 + seed},
        "device": "simulated",
    }
    return CUDAGraphRunner(fn, **{**options, **changes})


def frozen(size: int | None) -> Callable[..., Any]:
    """Holds, for one size, what it computed from its first inputs."""
    memo: dict[int, torch.Tensor] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        first = memo.setdefault(x.shape[0], x.sum().clone())
        return x + (first if x.shape[0] == size else 1)

    return fn


def padded(size: int) -> Callable[..., Any]:
    """Depends on the padded size, for one size."""
    return lambda x: x * (8 if x.shape[0] == size else 1) + 1


def sizes_of(runner: CUDAGraphRunner, reason: Reason) -> set[int]:
    return {key.num_tokens for (_, key), why in runner.missing().items() if why is reason}


def served_by(runner: CUDAGraphRunner) -> set[int]:
    return {key.num_tokens for _, key in runner.keys - runner.missing().keys()}


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wrong", [frozen, padded])
def test_wrong_key_among_others_is_named_and_dropped(
    wrong: Callable[[int], Callable[..., Any]], size: int, on_error: str
) -> None:
    events: list[Any] = []
    with runner_of(wrong(size), on_capture_error=on_error, observer=events.append) as runner:
        if on_error == "raise":
            with pytest.raises(VerificationError, match=f"num_tokens={size}"):
                runner.capture()
        else:
            assert [key.num_tokens for _, key in runner.capture().failures] == [size]
        assert sizes_of(runner, Reason.CAPTURE_FAILED) == {size}
        assert served_by(runner) == {*SIZES} - {size}
        assert [e.key.num_tokens for e in events if isinstance(e, CaptureFailed)] == [size]
        told = [e.key.num_tokens for e in events if isinstance(e, Verified | PaddingVerified)]
        assert all(told.count(other) == 2 for other in SIZES if other != size)
        x = torch.arange(3.0, dtype=torch.float64)
        assert torch.equal(runner.run({"x": x}), x + 1)
        served = Reason.CAPTURE_FAILED if size == 4 else Reason.PADDED
        assert runner.last_decision.reason is served


def test_error_of_the_first_wrong_key_is_raised() -> None:
    def examples(sizes: dict[str, int], seed: int) -> dict[str, torch.Tensor]:
        if sizes["tokens"] == 4 and seed:
            raise OSError("no example")
        return {"x": torch.arange(sizes["tokens"]) + 1.0 + seed}

    with runner_of(frozen(8), examples=examples) as runner:
        with pytest.raises(VerificationError, match="num_tokens=8"):
            runner.capture()
        assert sizes_of(runner, Reason.CAPTURE_FAILED) == {4, 8}


def test_interrupt_among_checks_leaves_the_rest_unchecked() -> None:
    def progress(done: int, total: int, key: object) -> None:
        if done == 4:  # The first of three checks has ended.
            raise KeyboardInterrupt

    with runner_of(frozen(None)) as runner:
        with pytest.raises(KeyboardInterrupt):
            runner.capture(progress=progress)
        assert served_by(runner) == {8}
        assert not runner.capture().missing


def test_state_of_any_guard_is_put_back_when_the_device_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Guard:
        def __init__(self) -> None:
            self.tensors = [torch.zeros(1)]

        def save(self) -> list[torch.Tensor]:
            story.append("saved")
            return [each.clone() for each in self.tensors]

        def restore(self, token: object) -> None:
            story.append("restored")

    story: list[str] = []
    # As on a GPU, where tensors of the host may still be written.
    monkeypatch.setattr(Comparisons, "_wait_for", lambda *_: lambda: story.append("waited"))
    with runner_of(frozen(None), state=Guard(), sizes={"tokens": [2]}) as runner:
        runner.capture()
    assert story[-2:] == ["waited", "restored"]
