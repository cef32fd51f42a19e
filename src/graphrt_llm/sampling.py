"""Choosing the next token of every request, on the device, for the whole batch at once.

A request draws the same tokens in every batch, mode and padding, and after a preemption too,
because its noise has no state: it is a function of (seed, number of the output token, vocabulary
entry). The token is the argmax of ``logits / temperature + Gumbel noise``, which
is a draw from their softmax. Greedy requests take the plain argmax; where several entries are
equal, the lowest id.

Sampled rows are computed in float64, so that neither other rows nor the order of a reduction change
which tokens ``top_p`` keeps. Nothing here waits for the device.

Sources: the Gumbel-max trick; SplitMix64 (Steele, Lea, Flood 2014) with Stafford's "mix 13".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphrt_llm.request import Request

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def _mix(value: int) -> int:
    """SplitMix64's finaliser: 64 bits in, 64 bits out that look like noise."""
    value &= _MASK
    for shift, factor in _MIX:
        value = (value ^ value >> shift) * factor & _MASK
    return value ^ value >> _LAST_SHIFT


def derive_seed(seed: int, index: int) -> int:
    """The seed of the ``index``-th of many streams that share ``seed``; in [0, 2**64)."""
    return _mix(_mix(seed + _GAMMA) + index * _GAMMA)


def _as_int64(value: int) -> int:
    """The same 64 bits, read as a signed integer, which is what tensors hold."""
    return value - 2**64 if value >= 2**63 else value


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [num_rows, vocab_size], float64; a pure function of ``keys``.

    ``keys``: [num_rows] int64, one for each (request, output token).
    """
    steps = torch.arange(vocab_size, device=keys.device) * _as_int64(_GAMMA)
    bits = keys[:, None] + steps
    # Integer tensors wrap, and shift arithmetically: the mask makes the shift a logical one.
    for shift, factor in _MIX:
        bits ^= (bits >> shift) & ((1 << (64 - shift)) - 1)
        bits *= _as_int64(factor)
    bits ^= (bits >> _LAST_SHIFT) & ((1 << (64 - _LAST_SHIFT)) - 1)
    # 52 bits and a half are exact in float64, and never 0 or 1.
    uniform = (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()


def kept_tokens(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which entries the filters keep: bool, shaped as ``scores`` [num_rows, vocab_size].

    ``top_k`` [num_rows] int64 and ``top_p`` [num_rows] float64; rows with ``vocab_size`` and 1
    keep everything. The most likely entry is always kept; of equal ones the lowest id comes first.
    """
    ordered, entry = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    kept = rank < top_k[:, None]
    probability = ordered.masked_fill(~kept, -torch.inf).softmax(-1)
    reached_before = probability.cumsum(-1) - probability
    # A sum that rounds to 1 early must not drop the tail of a row that keeps everything.
    kept &= (reached_before < top_p[:, None]) | (top_p[:, None] >= 1)
    return torch.zeros_like(kept).scatter_(1, entry, kept)


class Sampler:
    """Turns logits into tokens. Holds only the staging memory of the parameters.

    There are two such memories, because the device may still read that of the previous call.
    """

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._staging = [
            (
                torch.empty(max_rows, 3, dtype=torch.int64, pin_memory=pinned),
                torch.empty(max_rows, 2, dtype=torch.float64, pin_memory=pinned),
            )
            for _ in range(2)
        ]

    @torch.no_grad()
    def sample(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        *,
        greedy: Tensor,
        indices: Sequence[int],
        storage: int = 0,
    ) -> Tensor:
        """The next token of each request: [num_reqs] int64, on the device, not waited for.

        ``logits``: [num_reqs, vocab_size], any floating dtype; left as they are.
        ``greedy`` [num_reqs] int64: their argmax; returned itself if all requests are greedy.
        ``indices``: the number of each request's next output token.
        ``storage``: the memory to fill, 0 or 1; the device must have read it.
        """
        drawing = [row for row, request in enumerate(requests) if not request.params.is_greedy]
        if not drawing:
            return greedy
        vocab_size = logits.shape[-1]
        rows, keys, top_k, temperature, top_p = self._stage(
            drawing, requests, indices, vocab_size, self._staging[storage]
        )
        scores = logits.index_select(0, rows).double() / temperature[:, None]
        params = [requests[row].params for row in drawing]
        if any(p.top_k is not None or p.top_p < 1 for p in params):
            scores = scores.masked_fill(~kept_tokens(scores, top_k, top_p), -torch.inf)
        drawn = (scores + gumbel_noise(keys, vocab_size)).argmax(-1)
        return greedy.index_copy(0, rows, drawn)

    def _stage(
        self,
        drawing: Sequence[int],
        requests: Sequence[Request],
        indices: Sequence[int],
        vocab_size: int,
        staging: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Rows, noise keys, top_k, temperature and top_p of the drawing requests, on the device."""
        params = [requests[row].params for row in drawing]
        keys = [_as_int64(derive_seed(requests[row].seed, indices[row])) for row in drawing]
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        ints, floats = (memory[: len(drawing)] for memory in staging)
        ints.numpy().T[:] = (drawing, keys, top_k)
        floats.numpy().T[:] = ([p.temperature for p in params], [p.top_p for p in params])
        rows_keys_top_k = ints.to(self._device, non_blocking=True)
        temperature_top_p = floats.to(self._device, non_blocking=True)
        row, key, kept = rows_keys_top_k.unbind(1)
        divisor, share = temperature_top_p.unbind(1)
        return row, key, kept, divisor, share
