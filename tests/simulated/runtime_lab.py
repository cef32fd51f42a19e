"""A small laboratory for runtime tests: one model with a gap, its inputs, and every event."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphrt import (
    SENTINEL,
    ZERO,
    BatchDescriptor,
    BufferSpec,
    Event,
    Example,
    OutputSpec,
    RanEager,
    Replayed,
    Runtime,
    RuntimeConfig,
    RuntimeMode,
    SimulatedDevice,
    break_point,
)

# Every scope collects. Torch's own heap is a fifth of a second each time; frozen, it is skipped.
gc.collect()
gc.freeze()

FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE
WIDTH = 4
SIZES = (2, 4, 8)
MAX_TOKENS, MAX_REQS = 16, 4
POLICIES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


class Toy(torch.nn.Module):
    """Tokens in, one row for each token and one for each request out; one break point inside."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        # In a list: what a verification rolls back are attributes, and this shall count all calls.
        self.calls: tuple[list[int]] = ([0],)
        self.gap_calls: tuple[list[int]] = ([0],)

    def forward(
        self, *, x: torch.Tensor, ids: torch.Tensor, lens: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        self.calls[0][0] += 1
        hidden = self.middle(torch.tanh(x @ self.weight))
        return {"rows": hidden @ self.weight + ids[:, None], "lens": lens * 2}

    @break_point
    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        self.gap_calls[0][0] += 1
        return torch.sigmoid(hidden @ self.weight)

    @property
    def num_calls(self) -> int:
        return self.calls[0][0]

    @property
    def num_gap_calls(self) -> int:
        return self.gap_calls[0][0]


INPUTS = (
    BufferSpec("x", ("tokens", WIDTH), torch.float32),
    BufferSpec("ids", ("tokens",), torch.int64, SENTINEL(-1)),
    BufferSpec("lens", ("requests",), torch.int64, ZERO),
)
OUTPUTS = {"rows": "tokens", "lens": "requests"}


def values(num_tokens: int, num_reqs: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return {
        "x": torch.randn(num_tokens, WIDTH, generator=generator),
        "ids": torch.randint(0, 50, (num_tokens,), generator=generator),
        "lens": torch.randint(1, 9, (num_reqs,), generator=generator),
    }


def example(key: BatchDescriptor, seed: int) -> Example:
    num_reqs = key.num_reqs or min(key.num_tokens, MAX_REQS)
    return Example(values(key.num_tokens, num_reqs, 90 + seed), key.num_tokens, num_reqs)


def config(mode: str = "FULL_AND_PIECEWISE", **wishes: Any) -> RuntimeConfig:
    compilation = {"cudagraph_mode": mode, **wishes.pop("compilation", {})}
    if mode != "NONE":
        compilation.setdefault("cudagraph_capture_sizes", SIZES)
    limits = {"max_num_seqs": MAX_REQS, "max_num_batched_tokens": MAX_TOKENS}
    return RuntimeConfig(compilation=compilation, **{**limits, **wishes})


class RuntimeLab:
    """A runtime of ``model`` on a simulated device, and every event it emitted."""

    def __init__(
        self,
        mode: str = "FULL_AND_PIECEWISE",
        *,
        model: Callable[..., Any] | None = None,
        device: SimulatedDevice | None = None,
        policy: str = "view",
        outputs: Mapping[str, Any] | OutputSpec = OUTPUTS,
        inputs: Any = INPUTS,
        examples: Any = example,
        wishes: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.model = Toy() if model is None else model
        self.device = SimulatedDevice() if device is None else device
        self.events: list[Event] = []
        self.runtime = Runtime(
            self.model,
            inputs=inputs,
            outputs=outputs if isinstance(outputs, OutputSpec) else OutputSpec(outputs, policy),
            examples=examples,
            config=config(mode, **(wishes or {})),
            device=self.device,
            observer=self.events.append,
            **options,
        )

    def __enter__(self) -> RuntimeLab:
        return self

    def __exit__(self, *error: object) -> None:
        self.runtime.close()

    def step(
        self, num_tokens: int, num_reqs: int, uniform: bool = False, seed: int = 0, **options: Any
    ) -> Any:
        return self.runtime.step(
            values(num_tokens, num_reqs, seed),
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            uniform=uniform,
            **options,
        )

    def eager(self, num_tokens: int, num_reqs: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """The model itself on the batch of the last step, padded as its key says."""
        mode, key, _ = self.runtime.last_decision
        batch = values(num_tokens, num_reqs, seed)
        if mode is not NONE:
            tokens = key.num_tokens - num_tokens
            reqs = (key.num_reqs or min(key.num_tokens, MAX_REQS)) - num_reqs
            batch = {
                "x": torch.cat([batch["x"], torch.zeros(tokens, WIDTH)]),
                "ids": torch.cat([batch["ids"], torch.full((tokens,), -1)]),
                "lens": torch.cat([batch["lens"], torch.zeros(reqs, dtype=torch.int64)]),
            }
        with torch.no_grad():
            padded = self.model(**batch)
        return {"rows": padded["rows"][:num_tokens], "lens": padded["lens"][:num_reqs]}

    @property
    def step_events(self) -> list[Replayed | RanEager]:
        return [event for event in self.events if isinstance(event, Replayed | RanEager)]


def assert_equal(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
