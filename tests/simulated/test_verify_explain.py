"""What the explanation of a program or a decision says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from graphrt import CUDAGraphWrapper, GraphLibrary, break_point
from graphrt.batch import BatchDescriptor, Decision, Reason, RuntimeMode
from graphrt.device.simulated import SimulatedDevice
from graphrt.errors import ConfigError
from graphrt.verify import explain

KEY = BatchDescriptor(4)


@pytest.mark.parametrize("reason", list(Reason))
def test_explain_of_each_reason_names_it(reason: Reason) -> None:
    mode = RuntimeMode.NONE if reason.is_miss else RuntimeMode.FULL
    text = explain(Decision(mode, BatchDescriptor(17), reason))
    assert reason.name in text
    assert "17" in text
    assert ("eager" in text) is reason.is_miss


@pytest.mark.parametrize(
    "subject",
    [
        *(3, "key", None, [], int, Decision, torch.ones(2), 10**5000, itertools.count()),
        *((), (RuntimeMode.FULL,), (RuntimeMode.FULL, 10**5000), (RuntimeMode.FULL, KEY, 3)),
        *(Decision("FULL", KEY, Reason.HIT), Decision(RuntimeMode.FULL, None, Reason.HIT)),
        Decision(RuntimeMode.FULL, KEY, "HIT"),
    ],
    ids=lambda subject: type(subject).__name__,
)
def test_explain_of_what_is_no_subject_is_refused(subject: Any) -> None:
    with pytest.raises(ConfigError, match="what to explain"):
        explain(subject)


@break_point(name="attention")
def attention(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_explain_of_a_program_says_what_is_captured() -> None:
    class Meta:
        pass

    cache = torch.zeros(4)

    def model(x: torch.Tensor, n: int, meta: object) -> torch.Tensor:
        cache.copy_(x * n)
        return attention(cache + 1) * 2

    device = SimulatedDevice()
    key, meta, x = BatchDescriptor(4), Meta(), torch.ones(4)
    with GraphLibrary(device) as library, torch.inference_mode():
        pieces = CUDAGraphWrapper(model, library, RuntimeMode.PIECEWISE, name="model")
        whole = CUDAGraphWrapper(model, library, RuntimeMode.FULL, name="model")
        with library.capture_scope(may_overwrite=[cache]) as scope:
            with (
                scope.step(RuntimeMode.PIECEWISE, key),
                pytest.warns(UserWarning, match="meta"),
            ):
                pieces(x, 3, meta)
            with scope.step(RuntimeMode.FULL, key):
                whole(x, 3, meta)
        cut = pieces.concrete_cudagraph_entries[key]
        uncut = whole.concrete_cudagraph_entries[key]
        text = explain(cut)
        assert "model PIECEWISE" in text
        assert "never replayed" in text
        assert "2 device graphs" in text
        assert "1. eager: " in text
        assert "attention" in text
        assert "not captured: 1 eager segment," in text
        assert "= 3" in text  # the frozen host value
        assert "not compared" in text
        assert "written outside the pool" in text
        assert "not captured: nothing" in explain(uncut)
        cut.invalidate(["w"])
        assert "InvalidProgramError" in explain(cut)
        library.retire()
        assert "retired" in explain(uncut)
    device.close()
