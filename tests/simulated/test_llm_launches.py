"""A launch that fails leaves the host memory of the step in flight alone, wherever it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from llm_traffic import engine_config, prompt

from graphrt import RuntimeMode
from graphrt_llm import LLMEngine, SamplingParams
from graphrt_llm.inputs import HostInputs
from graphrt_llm.runner import LaunchedStep
from graphrt_llm.sampling import Sampler

PARAMS = SamplingParams(max_tokens=9, temperature=1.0, seed=5)


class Watched:
    """An engine whose host memories know which step last filled them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = LLMEngine.tiny(engine_config("NONE", overlap=True))
        self.filled_by: dict[int, tuple[Any, Any]] = {}
        """By id, each memory and the batch that last filled it. Both are kept alive, because Python
        gives the id of a freed object to another."""
        self.num_fills = self.num_waits = 0
        fill, stage = HostInputs.fill, Sampler._stage
        synchronize = self.engine._device.synchronize

        def watched_fill(inputs: HostInputs, batch: Any, table: Any) -> Any:
            self.fills(inputs, batch)
            self.batch = batch
            return fill(inputs, batch, table)

        def watched_stage(sampler: Sampler, *args: Any) -> Any:
            self.fills(args[-1][0], self.batch)
            return stage(sampler, *args)

        def watched_wait(*args: Any) -> None:
            self.num_waits += 1
            synchronize(*args)

        monkeypatch.setattr(HostInputs, "fill", watched_fill)
        monkeypatch.setattr(Sampler, "_stage", watched_stage)
        monkeypatch.setattr(self.engine._device, "synchronize", watched_wait)

    def fills(self, memory: Any, batch: Any) -> None:
        _, last = self.filled_by.get(id(memory), (None, None))
        pending = [step.batch for step in self.engine._in_flight]
        assert not any(last is batch for batch in pending), "the device still reads it"
        self.filled_by[id(memory)] = memory, batch
        self.num_fills += 1


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(monkeypatch)
    with watched.engine:
        yield watched


def serve(engine: LLMEngine, fail: Callable[[int], bool] = lambda number: False) -> list[int]:
    """The tokens of one request; a step for which ``fail`` is true must raise, and is retried."""
    engine.add_request(prompt(5, 3), PARAMS)
    tokens: list[int] = []
    number = 0
    while engine.has_unfinished():
        number += 1
        if fail(number):
            with pytest.raises(torch.OutOfMemoryError):
                engine.step()
        for output in engine.step().outputs:
            tokens += output.new_token_ids
    return tokens


def raise_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> None:
    real = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        if after:
            real(*args, **kwargs)
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(owner, name, failing)


PLACES = [
    ("HostInputs.fill", True),
    ("runtime.step", False),
    ("runtime.step", True),
    ("Sampler.sample", False),
    ("Sampler.sample", True),
    ("LaunchedStep.__init__", True),
    ("LaunchedStep.wait", False),
]


@pytest.mark.parametrize(("place", "after"), PLACES)
@pytest.mark.parametrize("number", [2, 3, 4])
def test_failed_launch_leaves_the_memory_of_the_step_in_flight(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, place: str, after: bool, number: int
) -> None:
    expected = serve(watched.engine)
    watched.num_waits = 0
    owners = {
        "HostInputs": HostInputs,
        "runtime": watched.engine.runtime,
        "Sampler": Sampler,
        "LaunchedStep": LaunchedStep,
    }
    name, _, method = place.partition(".")

    def fail(step: int) -> bool:
        if step == number:
            raise_once(monkeypatch, owners[name], method, after=after)
        return step == number

    assert serve(watched.engine, fail) == expected
    assert watched.num_fills > len(expected)
    # What the failed launch may have begun to copy has ended before its memory is filled again.
    assert watched.num_waits == (place != "LaunchedStep.wait")


def test_step_without_a_failure_never_waits_for_the_device(watched: Watched) -> None:
    serve(watched.engine)
    assert watched.num_waits == 0


def test_margin_asked_with_a_step_in_flight_spares_its_memory(watched: Watched) -> None:
    engine = watched.engine
    margin = engine.top2_margin([1, 2, 3])
    engine.add_request(prompt(5, 3), PARAMS, "stops")
    engine.step()
    engine.step()
    engine.abort("stops")
    assert engine._in_flight
    assert engine.top2_margin([1, 2, 3]) == margin
    assert engine.runtime.last_decision.mode is RuntimeMode.NONE
