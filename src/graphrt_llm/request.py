"""A request: its sampling parameters, its tokens so far, and why it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from graphrt_llm.errors import SamplingParamsError

MIN_TEMPERATURE = 1e-3
"""Below it logits divided by temperature leave the range where float32 keeps their order."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Raises ``SamplingParamsError``.

    The order is temperature, then ``top_k``, then ``top_p`` on the remaining tokens.

    ``max_tokens``: Most output tokens.
    ``temperature``: 0 is greedy: the most likely token, the lowest id among equals.
    ``top_k``: Keep the k most likely tokens. None: all.
    ``top_p``: Keep the smallest set of most likely tokens whose probability reaches p.
    ``seed``: The same seed and prompt give the same tokens in any batch. None: derived from the
      engine's seed and the request's number of arrival.
    ``stop_token_ids``: End after one of these, which stays in the output. The model's end token is
      added unless ``ignore_eos``.
    ``ignore_eos``: True: the end-of-sequence token does not end it.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def check(is_met: bool, name: str, expected: str) -> None:
            if not is_met:
                raise SamplingParamsError(
                    f"SamplingParams.{name}", expected=expected, found=repr(getattr(self, name))
                )

        t = self.temperature
        is_number = isinstance(t, int | float) and not isinstance(t, bool) and math.isfinite(t)
        check(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", "an integer >= 1")
        check(
            is_number and (t == 0 or t >= MIN_TEMPERATURE),
            "temperature",
            f"0 (greedy) or a finite number >= {MIN_TEMPERATURE}",
        )
        check(
            self.top_k is None or (_is_int(self.top_k) and self.top_k >= 1),
            "top_k",
            "None (all) or an integer >= 1",
        )
        check(
            isinstance(self.top_p, int | float) and 0 < self.top_p <= 1,
            "top_p",
            "a number in (0, 1]",
        )
        check(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**64),
            "seed",
            "None or an integer in [0, 2**64)",
        )
        check(
            isinstance(self.stop_token_ids, tuple)
            and all(_is_int(token) and token >= 0 for token in self.stop_token_ids),
            "stop_token_ids",
            "a tuple of token ids",
        )
        check(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class FinishReason(Enum):
    """Why a request ended.

    ``STOP``: It produced a stop token, or the model's end token.
    ``LENGTH``: It produced ``max_tokens`` tokens.
    ``ABORTED``: It was taken back.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class RequestOutput(NamedTuple):
    """What one step, or an abort, did to one request.

    ``request_id``: As `add_request` returned it.
    ``new_token_ids``: Tokens of this step.
    ``finish_reason``: None while the request runs on.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(eq=False, slots=True)
class Request:
    """A request that only the scheduler changes.

    ``output_token_ids`` survives a preemption; its row and blocks do not.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    """``params.seed``, or the one the engine chose."""
    stop_token_ids: frozenset[int] = frozenset()
    """All tokens that end it, the model's end tokens included."""
    output_token_ids: list[int] = field(default_factory=list)
    row: int | None = None
    """In ``InputBatch``; None while it waits."""
    num_preemptions: int = 0
    adapter: object = None
    """Its ``LoRAAdapter``, which only what computes looks into; None: the model as it is."""

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def finish_reason(self) -> FinishReason | None:
        """Why it ends with the token it produced last; None if it goes on."""
        if self.output_token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if len(self.output_token_ids) >= self.params.max_tokens:
            return FinishReason.LENGTH
        return None
