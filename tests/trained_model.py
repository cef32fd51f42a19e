"""A small model trained on texts whose every token follows from the ones before.

Random weights leave the two largest logits close together, so that in bfloat16 a greedy choice may
turn with the order of a sum, and equal tokens prove little. After training the choices are clear,
and a token that differs is a mistake.

HF transformers trains the model and writes the checkpoint, so the engine's reader, its layers and
the transformers reference all meet the same file.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from graphrt_llm import TokenComparison, compare_tokens
from graphrt_llm.demo.compare import TIE_TOLERANCE

TASKS = ("count", "add", "repeat", "brackets")
"""What a text is about; its first token says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A model's shape, its texts and its training."""

    hidden_size: int
    num_layers: int
    head_dim: int
    numbers: int
    """Counting and adding is modulo this."""
    letters: int
    """Of repeated phrases."""
    pairs: int
    """Kinds of brackets."""
    longest: int
    """Letters of a phrase, depth of brackets."""
    length: int
    """Tokens of a text."""
    batch: int
    steps: int
    rate: float

    @property
    def vocab_size(self) -> int:
        return self.numbers + self.letters + 2 * self.pairs + 1 + len(TASKS)

    @property
    def prompt_length(self) -> int:
        """The shortest prompt: it shows two phrases, or brackets opened and closed once."""
        return 2 * self.longest + 2

    def texts(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """``count`` texts [count, length], int64, and which tokens follow from those before."""

        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, (count, *shape), generator=generator)

        at = torch.arange(self.length - 1)
        first, second = draw(0, self.numbers, 1), draw(0, self.numbers, 1)
        counted = (first + at * second) % self.numbers
        added = [first, second]
        while len(added) < len(at):
            added.append((added[-2] + added[-1]) % self.numbers)

        size = draw(2, self.longest + 1, 1)
        phrase = self.numbers + draw(0, self.letters, self.longest)
        separator = self.numbers + self.letters + 2 * self.pairs
        in_phrase = at % (size + 1)
        repeated = phrase.gather(1, in_phrase.clamp(max=self.longest - 1))
        repeated = torch.where(in_phrase < size, repeated, separator)

        opened = self.numbers + self.letters + draw(0, self.pairs, self.longest)
        level = at % (2 * size)
        is_open = level < size
        depth = torch.where(is_open, level, 2 * size - 1 - level)
        nested = opened.gather(1, depth) + torch.where(is_open, 0, self.pairs)

        task = draw(0, len(TASKS), 1)
        bodies = torch.stack([counted, torch.cat(added, 1), repeated, nested])
        body = bodies.gather(0, task[None].expand(1, -1, len(at)))[0]
        known_from = torch.where(task < 2, 2, size + 1)
        tags = separator + 1 + task
        never = torch.zeros(count, 1, dtype=torch.bool)
        return torch.cat([tags, body], 1), torch.cat([never, at >= known_from], 1)

    def prompts(self, count: int, seed: int, longest: int) -> list[list[int]]:
        """The beginnings of ``count`` texts, of up to ``longest`` tokens."""
        generator = torch.Generator().manual_seed(seed)
        texts, _ = self.texts(count, generator)
        lengths = torch.randint(self.prompt_length, longest + 1, (count,), generator=generator)
        return [
            text[:length] for text, length in zip(texts.tolist(), lengths.tolist(), strict=True)
        ]


@contextmanager
def _foreign_warnings_ignored() -> Iterator[None]:
    """Around work of transformers, which warns about its own dependencies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _make_hf_model(family: str, plan: Plan) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=plan.vocab_size,
        hidden_size=plan.hidden_size,
        intermediate_size=2 * plan.hidden_size,
        num_hidden_layers=plan.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=plan.head_dim,
        max_position_embeddings=2 * plan.length,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return model


@_foreign_warnings_ignored()
def train(family: str, plan: Plan, device: str = "cpu") -> Any:
    """A ``transformers`` model of ``family`` (Qwen3, Llama) that continues texts of ``plan``.

    float32, on ``device``; seeded.
    """
    model = _make_hf_model(family, plan).to(device).train()
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.rate, total_steps=plan.steps, pct_start=0.1, cycle_momentum=False
    )
    for _ in range(plan.steps):
        texts, known = (part.to(device) for part in plan.texts(plan.batch, generator))
        logits = model(texts[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits[known[:, 1:]], texts[:, 1:][known[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


class Continuation(NamedTuple):
    """What transformers makes of prompts, one greedy token after another."""

    tokens: list[list[int]]
    margins: list[list[float]]
    """By how much the two largest logits of each of these tokens differ."""

    def compare(self, found: list[list[int]], tolerance: float) -> TokenComparison:
        """Where ``found`` differs first, request by request; below ``tolerance`` it is a tie."""
        return compare_tokens(
            dict(enumerate(self.tokens)),
            dict(enumerate(found)),
            lambda index, position: self.margins[index][position],
            tolerance,
        )

    def check(self, found: list[list[int]], dtype: str, what: object) -> None:
        """Require the same tokens, but for what ``dtype`` leaves undecided, which is rare."""
        result = self.compare(found, TIE_TOLERANCE[dtype])
        print(f"{what}: {result.ties} of {len(found)} requests tied")
        assert result.identical, (what, result.differences)
        assert result.ties <= len(found) // 32, (what, result.ties)

    def share_below(self, tolerance: float) -> float:
        """The share of tokens whose margin is smaller."""
        margins = [margin for each in self.margins for margin in each]
        return sum(margin < tolerance for margin in margins) / len(margins)

    def quantiles(self) -> dict[str, float]:
        """Of the margins: the smallest, the median and what lies between."""
        margins = torch.tensor([margin for each in self.margins for margin in each])
        shares = {"min": 0.0, "0.1%": 0.001, "1%": 0.01, "10%": 0.1, "median": 0.5}
        return {name: round(margins.quantile(share).item(), 3) for name, share in shares.items()}


@_foreign_warnings_ignored()
@torch.no_grad()
def continue_greedily(model: Any, prompts: list[list[int]], count: int) -> Continuation:
    """``count`` tokens after each of ``prompts`` by ``generate`` of transformers, with its margins.

    Prompts of one length are one batch, so that nothing is padded.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    margins: list[list[float]] = [[] for _ in prompts]
    for length in sorted(set(map(len, prompts))):
        rows = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        asked = torch.tensor([prompts[index] for index in rows], device=model.device)
        made = model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            do_sample=False,
            max_new_tokens=count,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(made.logits, 1).double().topk(2).values
        for index, text, row in zip(rows, made.sequences, best, strict=True):
            tokens[index] = text[length:].tolist()
            margins[index] = (row[:, 0] - row[:, 1]).tolist()
    return Continuation(tokens, margins)


@_foreign_warnings_ignored()
def save(model: Any, directory: Path, dtype: torch.dtype) -> Any:
    """Write ``model`` as a checkpoint of ``dtype``; return what transformers reads from it."""
    copy.deepcopy(model).to(dtype).save_pretrained(directory)
    return type(model).from_pretrained(directory, dtype=dtype).to(model.device).eval()
