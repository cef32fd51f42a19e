"""The check of one key is read when that of the next is begun, and finds as much."""

from __future__ import annotations

from array import array

import pytest
import torch

from graphrt import (
    BufferSpec,
    CUDAGraphRunner,
    OutputSpec,
    Reason,
    RuntimeMode,
)
from graphrt.errors import VerificationError
from graphrt.events import CaptureFailed, PaddingVerified, Verified
from graphrt.runner.executor import Executor

FULL = RuntimeMode.FULL
SIZES = [2, 4, 8]
"""The largest is captured and checked first."""


def make(fn, **changes):
    options = {
        "inputs": [BufferSpec("x", ("tokens",), torch.float64)],
        "outputs": OutputSpec({"": "tokens"}),
        "sizes": {"tokens": SIZES},
        "examples": lambda sizes, seed: {"x": torch.arange(sizes["tokens"]) + 1.0 + seed},
        "device": "simulated",
    }
    return CUDAGraphRunner(fn, **{**options, **changes})


def frozen(size):
    """Holds, for one size, what it computed from its first inputs."""
    memo = {}

    def fn(x):
        first = memo.setdefault(x.shape[0], x.sum().clone())
        return x + (first if x.shape[0] == size else 1)

    return fn


def padded(size):
    """Depends on the padded size, for one size."""
    return lambda x: x * (8 if x.shape[0] == size else 1)


def of_another_dtype(size):
    """Returns, eagerly and for one size, another dtype than was captured."""
    calls = array("q")  # Nothing puts it back.

    def fn(x):
        calls.append(x.shape[0])
        return x.float() if x.shape[0] == size and calls.count(size) > 2 else x + 0

    return fn


WRONG = {"replay": frozen, "padding": padded, "dtype": of_another_dtype}


def sizes_of(runner, reason):
    if reason is Reason.HIT:
        return {key.num_tokens for _, key in runner.keys} - {
            key.num_tokens for _, key in runner.missing()
        }
    return {key.num_tokens for (_, key), why in runner.missing().items() if why is reason}


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_key_among_others_is_named_and_dropped(kind, size, on_error):
    events = []
    with make(WRONG[kind](size), on_capture_error=on_error, observer=events.append) as runner:
        if on_error == "raise":
            with pytest.raises(VerificationError, match=f"num_tokens={size}"):
                runner.capture()
        else:
            failures = runner.capture().failures
            assert [key.num_tokens for _, key in failures] == [size]
        assert sizes_of(runner, Reason.CAPTURE_FAILED) == {size}
        assert sizes_of(runner, Reason.HIT) == {*SIZES} - {size}
        failed = [event.key.num_tokens for event in events if isinstance(event, CaptureFailed)]
        assert failed == [size]
        told = [e.key.num_tokens for e in events if isinstance(e, Verified | PaddingVerified)]
        assert [size for size in SIZES if told.count(size) != 2] in ([], [size])
        right = torch.arange(3.0, dtype=torch.float64)
        expected = frozen(None)(right) if kind == "replay" else right
        assert torch.equal(runner.run({"x": right}), expected)
        served = Reason.CAPTURE_FAILED if size == 4 else Reason.PADDED
        assert runner.last_decision.reason is served


def test_check_is_read_when_the_next_one_is_begun():
    story = []

    def examples(sizes, seed):
        story.append(("example", sizes["tokens"], seed))
        return {"x": torch.arange(sizes["tokens"]) + 1.0 + seed}

    def observer(event):
        if isinstance(event, Verified):
            story.append(("read", event.key.num_tokens))

    with make(frozen(None), examples=examples, observer=observer) as runner:
        runner.capture()
    begun = {size: story.index(("example", size, 1)) for size in SIZES}
    read = {size: story.index(("read", size)) for size in SIZES}
    assert begun[8] < begun[4] < read[8] < begun[2] < read[4] < read[2]


def test_first_error_is_that_of_the_first_key():
    def examples(sizes, seed):
        if sizes["tokens"] == 4 and seed:
            raise OSError("no example")
        return {"x": torch.arange(sizes["tokens"]) + 1.0 + seed}

    with make(frozen(8), examples=examples) as runner:
        with pytest.raises(VerificationError, match="num_tokens=8"):
            runner.capture()
        assert sizes_of(runner, Reason.CAPTURE_FAILED) == {4, 8}


def test_difference_that_does_not_come_again_fails_the_key():
    calls = array("q")

    def fn(x):
        calls.append(x.shape[0])
        # Warm-up, capture, and the eager side of the check.
        return x + (x.shape[0] == 4 and calls.count(4) == 3)

    with make(fn) as runner:
        with pytest.raises(VerificationError, match="none when it was repeated"):
            runner.capture()
        assert sizes_of(runner, Reason.CAPTURE_FAILED) == {4}


def test_interrupt_leaves_what_was_begun_unchecked():
    def progress(done, total, key):
        if done == 4:  # The first of three checks has ended.
            raise KeyboardInterrupt

    with make(frozen(None)) as runner:
        with pytest.raises(KeyboardInterrupt):
            runner.capture(progress=progress)
        assert sizes_of(runner, Reason.HIT) == {8}
        assert not runner.capture().missing


def test_state_of_any_guard_is_put_back_when_the_device_is_done(monkeypatch):
    class Guard:
        def __init__(self):
            self.tensors = [torch.zeros(1)]

        def save(self):
            story.append("saved")
            return [each.clone() for each in self.tensors]

        def restore(self, token):
            story.append("restored")

    story = []
    # As on a GPU, where tensors of the host may still be written.
    monkeypatch.setattr(Executor, "_wait_for", lambda *_: lambda: story.append("waited"))
    with make(frozen(None), state=Guard(), sizes={"tokens": [2]}) as runner:
        runner.capture()
    assert story[-2:] == ["waited", "restored"]
