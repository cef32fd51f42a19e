"""Which tokens of which requests the next step computes.

First come, first served, without exception: requests run in order of arrival, and the running ones
all arrived before the waiting ones. A step takes one token of every request that decodes, then
chunks of prompts in order of arrival until the token limit is reached.

A request is admitted when the cache has room for all its tokens known so far, so only decoding can
run out of blocks. Then the request that arrived last gives way: it keeps its output, loses its
blocks, goes back to the head of the queue and later computes prompt and output again. The earliest
request always advances, hence all of them finish.

A step's work is booked by ``advance``, its tokens by ``resolve``; in between the next step can be
scheduled already. A token that is not known yet has its place, and a request that stops at it
computes one token too many, which is ignored.

Everything is deterministic, and nothing here knows torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphrt_llm.blocks import blocks_for
from graphrt_llm.errors import (
    OutOfBlocksError,
    PromptTooLongError,
    RequestError,
    UnknownRequestError,
)
from graphrt_llm.limits import Limits
from graphrt_llm.request import FinishReason, Request, RequestOutput
from graphrt_llm.seats import Seats


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledBatch:
    """The work of one step, in batch order: decoding requests first. Arrays are [num_reqs]."""

    requests: tuple[Request, ...]
    seats: NDArray[np.int64]
    starts: NDArray[np.int64]
    """Position of the first token each request brings."""
    query_lens: NDArray[np.int64]
    """Tokens each request brings, at least 1."""
    completes: NDArray[np.bool_]
    """True where the tokens reach the last known one, so that the logits give the next token."""
    num_tokens: int
    preempted: tuple[str, ...]
    """Requests that lost their blocks before this step."""

    @property
    def num_reqs(self) -> int:
        return len(self.requests)

    @property
    def uniform(self) -> bool:
        """True if every request brings exactly one token."""
        return self.num_tokens == self.num_reqs


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation.

    ``schedule`` changes nothing that a second call would not find again, so a step that fails
    between ``schedule`` and ``update`` is simply repeated.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.seats = Seats(limits)
        self._unfinished: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    @property
    def running(self) -> Sequence[Request]:
        """Seated requests, in order of arrival."""
        return self._running

    @property
    def waiting(self) -> Sequence[Request]:
        """The others, in order of arrival."""
        return self._waiting

    def add(self, request: Request) -> None:
        """Queue ``request``.

        Errors: ``PromptTooLongError`` if it could never be served, ``RequestError`` if it has no
        prompt or the id of an unfinished request.
        """
        if request.request_id in self._unfinished:
            raise RequestError(
                f"request {request.request_id!r}",
                expected="an id of its own",
                found="an unfinished request with this id",
            )
        num_prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        if not num_prompt:
            raise RequestError(
                f"request {request.request_id!r}", expected="a prompt", found="no tokens"
            )
        asked = f"{num_prompt} prompt tokens and max_tokens = {max_tokens}"
        longest = self.limits.max_model_len
        if num_prompt + max_tokens > longest:
            raise PromptTooLongError(
                f"request {request.request_id!r}",
                expected=f"prompt and output within the context of {longest} tokens",
                found=asked,
                do="shorten the prompt or lower max_tokens.",
            )
        # The last token is returned, never fed back, so it needs no room in the cache.
        allocator = self.seats.allocator
        if blocks_for(num_prompt + max_tokens - 1, self.seats.block_size) > allocator.num_usable:
            raise PromptTooLongError(
                f"request {request.request_id!r}",
                expected=f"prompt and output within the cache of {allocator.num_usable} blocks"
                f" of {self.seats.block_size} tokens",
                found=asked,
                do="shorten the prompt, lower max_tokens, or give the engine more blocks.",
            )
        self._unfinished[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> RequestOutput:
        """End an unfinished request now. Errors: ``UnknownRequestError``."""
        request = self._unfinished.get(request_id)
        if request is None:
            raise UnknownRequestError(
                f"request {request_id!r}",
                expected="an unfinished request",
                found=f"none of the {len(self._unfinished)} unfinished ones has this id",
            )
        if request.seat is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
        self._end(request)
        return RequestOutput(request_id, (), FinishReason.ABORTED)

    def schedule(self) -> ScheduledBatch | None:
        """The next step's work; None if nothing is unfinished.

        Errors: ``OutOfBlocksError`` if the only running request needs a block and none is free.
        """
        preempted = self._give_blocks()
        self._admit()
        if not self._running:
            return None
        seats = self._running_seats()
        remaining = self.seats.num_tokens[seats] - self.seats.num_computed[seats]
        # Decoding requests first; a stable sort keeps the order of arrival among equals. A request
        # whose last token is on its way has nothing left to compute.
        order = np.argsort(remaining > 1, kind="stable")
        order = order[remaining[order] > 0]
        if not order.size:
            return None
        asked = remaining[order]
        asked_before = np.cumsum(asked) - asked
        query_lens = np.minimum(asked, self.limits.max_num_batched_tokens - asked_before)
        count = int(np.count_nonzero(query_lens > 0))
        order, query_lens = order[:count], query_lens[:count]
        seats = seats[order]
        return ScheduledBatch(
            requests=tuple([self._running[i] for i in order.tolist()]),
            seats=seats,
            starts=self.seats.num_computed[seats],
            query_lens=query_lens,
            completes=query_lens == asked[:count],
            num_tokens=int(query_lens.sum()),
            preempted=tuple(preempted),
        )

    def would_preempt(self) -> bool:
        """True if ``schedule`` would take blocks from a running request.

        Its unknown tokens have to be resolved before: whatever it computes again, it has to know.
        """
        return int(np.count_nonzero(self._is_short())) > self.seats.allocator.num_free

    def update(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> list[RequestOutput]:
        """Book what the step computed: ``advance``, then ``resolve``."""
        self.advance(batch)
        return self.resolve(batch, token_ids)

    def advance(self, batch: ScheduledBatch) -> None:
        """Book the step's work. What it sampled is not known yet, but has its place."""
        seats = self.seats
        seats.num_computed[batch.seats] += batch.query_lens
        growing = batch.seats[batch.completes]
        # The last token of a request is returned, never fed back.
        growing = growing[seats.num_tokens[growing] + 1 < seats.num_at_most[growing]]
        seats.num_tokens[growing] += 1

    def resolve(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> list[RequestOutput]:
        """Book the tokens of a step. ``token_ids`` [num_reqs]: the token sampled for each.

        A token counts only where ``batch.completes`` and the request has not ended since; the
        others are ignored. Returns one output for each token that counts; requests that finish
        leave the batch and free their blocks. Steps are resolved in the order they advanced.
        """
        outputs = []
        for request, end, token, counts in zip(
            batch.requests,
            (batch.starts + batch.query_lens).tolist(),
            token_ids,
            batch.completes.tolist(),
            strict=True,
        ):
            if not counts or self._unfinished.get(request.request_id) is not request:
                continue
            assert request.seat is not None, "a request gives way only when its tokens are known"
            self.seats.tokens[request.seat, end] = token
            request.output_token_ids.append(token)
            reason = request.finish_reason()
            if reason is not None:
                self._running.remove(request)
                self._end(request)
            outputs.append(RequestOutput(request.request_id, (token,), reason))
        return outputs

    def _running_seats(self) -> NDArray[np.int64]:
        return np.array([request.seat for request in self._running], np.int64)

    def _is_short(self) -> NDArray[np.bool_]:
        """Which running requests have no room for their newest token."""
        seats = self._running_seats()
        rooms = self.seats.num_blocks[seats] * self.seats.block_size
        is_short: NDArray[np.bool_] = rooms < self.seats.num_tokens[seats]
        return is_short

    def _give_blocks(self) -> list[str]:
        """Give every running request room for its newest token, the earliest first."""
        preempted: list[str] = []
        for request in [self._running[i] for i in np.flatnonzero(self._is_short())]:
            while request.seat is not None and not self.seats.allocator.num_free:
                preempted.append(self._preempt_last())
            if request.seat is not None:
                self.seats.grow(request.seat)
        return preempted

    def _preempt_last(self) -> str:
        if len(self._running) == 1:
            raise OutOfBlocksError(
                f"request {self._running[0].request_id!r}",
                expected="a free block",
                found="none, and no other running request that could give way",
                do="give the engine more blocks; the request keeps its place.",
            )
        request = self._running.pop()
        self._unseat(request)
        request.num_preemptions += 1
        self._waiting.appendleft(request)
        return request.request_id

    def _admit(self) -> None:
        """Seat waiting requests while the step has tokens left for them, and the cache room."""
        if not self._waiting:
            return
        seats = self._running_seats()
        asked = int((self.seats.num_tokens[seats] - self.seats.num_computed[seats]).sum())
        while (
            self._waiting
            and asked < self.limits.max_num_batched_tokens
            and self.seats.fits(self._waiting[0].num_tokens)
        ):
            request = self._waiting[0]
            request.seat = self.seats.take(request.prompt_token_ids, request.output_token_ids)
            most = len(request.prompt_token_ids) + request.params.max_tokens
            self.seats.num_at_most[request.seat] = most
            self._running.append(self._waiting.popleft())
            asked += request.num_tokens

    def _unseat(self, request: Request) -> None:
        assert request.seat is not None, "only a running request has a seat to give up"
        self.seats.leave(request.seat)
        request.seat = None

    def _end(self, request: Request) -> None:
        if request.seat is not None:
            self._unseat(request)
        del self._unfinished[request.request_id]
