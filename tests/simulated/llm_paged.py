"""Batches over a paged cache, built by hand, and dense attention to compare with."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from graphrt import BatchDescriptor
from graphrt_llm.attention import (
    AttentionBackend,
    AttentionInputs,
    AttentionMetadata,
    attend,
)


class Step(NamedTuple):
    """One batch: ``spans`` are (tokens before, new tokens) of each request."""

    positions: Tensor
    attn: AttentionInputs
    logits_indices: Tensor
    metadata: AttentionMetadata
    num_tokens: int


def shuffled_tables(
    num_requests: int, max_blocks: int, num_blocks: int, generator: torch.Generator
) -> Tensor:
    """Block tables of random blocks, none of them the null block."""
    blocks = 1 + torch.randperm(num_blocks - 1, generator=generator)
    return blocks[: num_requests * max_blocks].view(num_requests, max_blocks)


def make_step(
    spans: list[tuple[int, int]],
    tables: Tensor,
    block_size: int,
    *,
    pad_tokens: int = 0,
    pad_requests: int = 0,
) -> Step:
    """The tensors of a batch; padding belongs to request 0 and writes to the null block."""
    positions, slots, owners = [], [], []
    for row, (before, new) in enumerate(spans):
        for position in range(before, before + new):
            block = int(tables[row, position // block_size])
            positions.append(position)
            slots.append(block * block_size + position % block_size)
            owners.append(row)
    num_tokens = len(positions)
    seq_lens = [before + new for before, new in spans]
    query_lens = [new for _, new in spans]
    ends = torch.tensor(query_lens).cumsum(0) - 1
    padding = [0] * pad_tokens
    rows = torch.zeros(len(spans) + pad_requests, tables.shape[1], dtype=torch.int64)
    for row, length in enumerate(seq_lens):
        used = -(-length // block_size)
        rows[row, :used] = tables[row, :used]
    return Step(
        torch.tensor(positions + padding),
        AttentionInputs(
            torch.tensor(slots + padding),
            torch.tensor(owners + padding),
            rows,
            torch.tensor(seq_lens + [0] * pad_requests),
        ),
        torch.cat((ends, torch.zeros(pad_requests, dtype=torch.int64))),
        AttentionMetadata(tuple(query_lens), tuple(seq_lens)),
        num_tokens,
    )


def key_of(step: Step, formula: str) -> BatchDescriptor:
    """The key that makes a backend use ``formula``: "static", "uniform" or "host"."""
    tokens, requests = len(step.positions), len(step.attn.seq_lens)
    if formula == "host":
        return BatchDescriptor(tokens)
    return BatchDescriptor(tokens, requests, uniform=formula == "uniform")


def dense(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last len(q) tokens of a sequence attend to all tokens up to themselves."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(q.shape[-1])
    unseen = torch.ones(len(q), len(keys), dtype=torch.bool).triu(len(keys) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), values)


class DenseDecode:
    """A kernel for decoding requests of ``query_len`` new tokens; ``rows``: of each call."""

    keep_alive: tuple[Tensor, ...] = ()

    def __init__(self, query_len: int) -> None:
        self.query_len = query_len
        self.rows: list[int] = []

    def __call__(
        self, heads: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor, out: Tensor
    ) -> None:
        self.rows.append(len(heads) // self.query_len)
        parts = heads.split(self.query_len), out.split(self.query_len)
        for row, (q, target) in enumerate(zip(*parts, strict=True)):
            keys, values = cache[block_tables[row]].flatten(0, 1)[: seq_lens[row]].unbind(1)
            target.copy_(dense(q[:, : out.shape[1]], keys, values))


def attention(
    backend: AttentionBackend,
    layer_index: int,
    q: Tensor,
    kv: Tensor,
    attn: AttentionInputs,
    shared: tuple[Tensor, ...] = (),
    out: Tensor | None = None,
) -> Tensor:
    """Store keys and values, as a model does, then attend."""
    backend.cache.slots[layer_index].index_copy_(0, attn.slot_mapping, kv)
    heads = torch.cat((q, kv.flatten(1, 2)), 1)
    return attend(backend, layer_index, heads, attn, shared, out=out)
