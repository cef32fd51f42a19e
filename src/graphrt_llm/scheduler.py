"""Which tokens of which requests the next step computes.

First come, first served, without exception: requests run in order of arrival, and the running ones
all arrived before the waiting ones. A step takes one token of every request that decodes, then
chunks of prompts in order of arrival until the token limit is reached.

A request starts when the cache has room for all its tokens known so far, so only decoding can run
out of blocks. Then the running request that arrived last is preempted: it keeps its output, loses
its blocks, goes back to the head of the queue and later computes prompt and output again. The
earliest request always advances, hence all of them finish.

``advance`` counts a step's tokens as computed, ``resolve`` stores the tokens that it sampled; in
between the next step can be scheduled already. A token that is still unknown has its place in the
table, and a request that stops at it computes one token too many, which is ignored.

Everything is deterministic, and nothing here imports torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphrt_llm.blocks import blocks_for
from graphrt_llm.config import Limits
from graphrt_llm.drafts import ngram_drafts
from graphrt_llm.errors import (
    OutOfBlocksError,
    PromptTooLongError,
    RequestError,
    UnknownRequestError,
)
from graphrt_llm.input_batch import InputBatch
from graphrt_llm.request import FinishReason, Request, RequestOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledBatch:
    """The work of one step, in batch order: decoding requests first. Arrays are [num_reqs]."""

    requests: tuple[Request, ...]
    rows: NDArray[np.int64]
    """Of the requests in ``InputBatch``."""
    starts: NDArray[np.int64]
    """Position of each request's first new token."""
    query_lens: NDArray[np.int64]
    """New tokens of each request, at least 1."""
    completes: NDArray[np.bool_]
    """True where the new tokens end with the last known one, so that the logits give the next."""
    num_tokens: int
    preempted: tuple[str, ...]
    """Requests that lost their blocks before this step."""
    lora_slots: NDArray[np.int64]
    """Where each request's adapter stands; -1 without one."""
    active_loras: tuple[int, ...] = ()
    """The slots of its distinct adapters."""
    query_len: int = 1
    """Tokens of a decoding request: one, then drafts, then padding."""
    num_drafts: NDArray[np.int64] | None = None
    """With speculative decoding: the drafts of each request; -1 where it computes a prompt."""

    @property
    def num_reqs(self) -> int:
        return len(self.requests)

    @property
    def uniform(self) -> bool:
        """True if every request has exactly ``query_len`` new tokens."""
        if self.query_len == 1:
            return self.num_tokens == self.num_reqs
        return bool((self.query_lens == self.query_len).all())


class DraftCounts(NamedTuple):
    """Sums over the decode steps of requests, with speculative decoding.

    ``places``: Drafts that would have fitted; where there are fewer, a step computes padding.
    ``drafted``: Drafts that were verified.
    ``accepted``: Those accepted: each has saved its request a step.
    """

    places: int
    drafted: int
    accepted: int

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ones per draft; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None


class AdapterSlots:
    """Which adapter is in which slot, and how many running requests use it.

    An adapter that no running request uses stays until another one needs its slot: the one that was
    given back first.
    """

    def __init__(self, count: int) -> None:
        self.adapters: list[object] = [None] * count
        """What each slot is to hold; None: nothing."""
        self._users = [0] * count
        self._idle = list(range(count))

    def has_room(self, adapter: object) -> bool:
        """True if a request with ``adapter`` could start now."""
        return adapter is None or adapter in self.adapters or bool(self._idle)

    def assign(self, adapter: object) -> int:
        """The slot of ``adapter``, one user more; -1 for None."""
        if adapter is None:
            return -1
        if adapter in self.adapters:
            place = self.adapters.index(adapter)
        else:
            place = self._idle[0]
            self.adapters[place] = adapter
        if not self._users[place]:
            self._idle.remove(place)
        self._users[place] += 1
        return place

    def give_back(self, place: int) -> None:
        """A request no longer uses the slot ``place``; -1 is the place of requests without one."""
        if place >= 0:
            self._users[place] -= 1
            if not self._users[place]:
                self._idle.append(place)

    def forget(self, adapter: object) -> None:
        """Empty the slot of an adapter without users, if it has one."""
        if adapter in self.adapters:
            place = self.adapters.index(adapter)
            assert place in self._idle, "refused while a request uses it"
            self.adapters[place] = None
            self._idle.remove(place)
            self._idle.insert(0, place)


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation.

    With ``limits.query_len`` above 1 a decoding request also computes drafts, and padding where it
    has fewer: all of them have blocks, and the tokens that are rejected are overwritten later.

    ``schedule`` may be called again without a step in between and then gives the same batch, so a
    step that fails between ``schedule`` and ``update`` is simply repeated.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.input_batch = InputBatch(limits)
        self.adapter_slots = AdapterSlots(limits.max_loras)
        self._num_drafts = limits.query_len - 1
        self.drafts = DraftCounts(0, 0, 0)
        self._unfinished: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def users_of(self, adapter: object) -> list[str]:
        """The unfinished requests with this adapter."""
        return [name for name, r in self._unfinished.items() if r.adapter is adapter]

    @property
    def running(self) -> Sequence[Request]:
        """Requests that have a row of the table, in order of arrival."""
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
        table = self.input_batch
        num_usable = table.allocator.num_usable
        most = num_prompt + max_tokens - 1 + self._num_drafts
        if blocks_for(most, table.block_size) > num_usable:
            raise PromptTooLongError(
                f"request {request.request_id!r}",
                expected=f"prompt and output within the cache of {num_usable} blocks"
                f" of {table.block_size} tokens",
                found=asked,
                do="shorten the prompt, lower max_tokens, or give the engine more blocks.",
            )
        self._unfinished[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> RequestOutput:
        """End an unfinished request now. Errors: ``UnknownRequestError``."""
        request = self._unfinished.get(request_id) if isinstance(request_id, str) else None
        if request is None:
            raise UnknownRequestError(
                f"request {request_id!r}",
                expected="an unfinished request",
                found=f"none of the {len(self._unfinished)} unfinished ones has this id",
            )
        if request.row is None:
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
        self._start_waiting()
        if not self._running:
            return None
        table, rows = self.input_batch, self._running_rows()
        remaining = table.num_tokens[rows] - table.num_computed[rows]
        # A request whose last token is still unknown has nothing left to compute.
        order = _order(remaining, table.num_computed[rows])
        order = order[remaining[order] > 0]
        if not order.size:
            return None
        decodes = remaining[order] == 1
        asked = np.where(decodes, self.limits.query_len, remaining[order])
        asked_before = np.cumsum(asked) - asked
        query_lens = np.minimum(asked, self.limits.max_num_batched_tokens - asked_before)
        count = int(np.count_nonzero(query_lens > 0))
        order, query_lens = order[:count], query_lens[:count]
        rows = rows[order]
        lora_slots = table.lora_slots[rows]
        active_loras: tuple[int, ...] = ()
        if self.limits.max_loras:
            active_loras = tuple(np.unique(lora_slots[lora_slots >= 0]).tolist())
        return ScheduledBatch(
            requests=tuple([self._running[i] for i in order.tolist()]),
            rows=rows,
            starts=table.num_computed[rows],
            query_lens=query_lens,
            completes=query_lens == asked[:count],
            num_tokens=int(query_lens.sum()),
            preempted=tuple(preempted),
            lora_slots=lora_slots,
            active_loras=active_loras,
            query_len=self.limits.query_len,
            num_drafts=self._draft(rows, decodes[:count]) if self._num_drafts else None,
        )

    def would_preempt(self) -> bool:
        """True if ``schedule`` would take blocks from a running request.

        Its tokens have to be resolved before, because it will compute all of them again.
        """
        return int(np.count_nonzero(self._is_short())) > self.input_batch.allocator.num_free

    def update(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> list[RequestOutput]:
        """Store the tokens that a step sampled: one output for each request that got some.

        ``token_ids``: [num_reqs], or [num_reqs * query_len] with speculative decoding: what follows
        each of the last ``query_len`` new tokens of a request.
        """
        if batch.num_drafts is not None:
            return self._accept(batch, token_ids, batch.num_drafts)
        self.advance(batch)
        return self.resolve(batch, token_ids)

    def _draft(self, rows: NDArray[np.int64], decodes: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Write drafts, then padding, behind the tokens of decoding requests; count the drafts."""
        table, places = self.input_batch, np.flatnonzero(decodes)
        counts, rows = np.full(len(rows), -1), rows[places]
        known = table.num_tokens[rows]
        behind = known[:, None] + np.arange(self._num_drafts)
        table.tokens[rows[:, None], behind] = table.tokens[rows, known - 1][:, None]
        # With as many tokens accepted a request has all that it asked for.
        most = np.minimum(self._num_drafts, table.max_num_tokens[rows] - known - 1)
        columns = (places.tolist(), rows.tolist(), known.tolist(), most.tolist())
        for place, row, end, limit in zip(*columns, strict=True):
            drafts = ngram_drafts(table.tokens[row, :end], limit)
            table.tokens[row, end : end + len(drafts)] = drafts
            counts[place] = len(drafts)
        return counts

    def _accept(
        self, batch: ScheduledBatch, token_ids: Sequence[int], num_drafts: NDArray[np.int64]
    ) -> list[RequestOutput]:
        """Keep the drafts that equal what was sampled in their place, and the token after them.

        A draft is a single token, so this is rejection sampling: it is accepted with its
        probability, and otherwise the sample is a draw from what is left of the distribution.
        """
        table, q, outputs = self.input_batch, batch.query_len, []
        places, drafted, accepted = self.drafts
        for place, request in enumerate(batch.requests):
            row, count = batch.rows[place], int(num_drafts[place])
            if self._unfinished.get(request.request_id) is not request:
                continue
            if not batch.completes[place]:
                table.num_computed[row] += batch.query_lens[place]
                continue
            sampled = token_ids[place * q : (place + 1) * q]
            known = int(table.num_tokens[row])
            if count < 0:
                new, sampled = 1, sampled[-1:]
            else:
                drafts = table.tokens[row, known : known + count].tolist()
                new = 1 + next((i for i in range(count) if drafts[i] != sampled[i]), count)
            tokens, reason = [], None
            for token in sampled[:new]:
                tokens.append(token)
                request.output_token_ids.append(token)
                reason = request.finish_reason()
                if reason is not None:
                    break
            if count >= 0:
                places += q - 1
                drafted += count
                accepted += len(tokens) - 1
            table.num_computed[row] = known + len(tokens) - 1
            table.tokens[row, known : known + len(tokens)] = tokens
            table.num_tokens[row] = known + len(tokens)
            if reason is not None:
                self._running.remove(request)
                self._end(request)
            outputs.append(RequestOutput(request.request_id, tuple(tokens), reason))
        self.drafts = DraftCounts(places, drafted, accepted)
        return outputs

    def advance(self, batch: ScheduledBatch) -> None:
        """Count the step's tokens as computed, and make room for those that it samples."""
        table = self.input_batch
        table.num_computed[batch.rows] += batch.query_lens
        growing = batch.rows[batch.completes]
        # The last token of a request is returned, never fed back.
        growing = growing[table.num_tokens[growing] + 1 < table.max_num_tokens[growing]]
        table.num_tokens[growing] += 1

    def resolve(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> list[RequestOutput]:
        """Store the tokens that a step sampled; ``token_ids`` [num_reqs]: one for each request.

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
            assert request.row is not None, "preempted only when its tokens are known"
            self.input_batch.tokens[request.row, end] = token
            request.output_token_ids.append(token)
            reason = request.finish_reason()
            if reason is not None:
                self._running.remove(request)
                self._end(request)
            outputs.append(RequestOutput(request.request_id, (token,), reason))
        return outputs

    def _running_rows(self) -> NDArray[np.int64]:
        return np.array([request.row for request in self._running], np.int64)

    def _is_short(self) -> NDArray[np.bool_]:
        """Which running requests have no room for their newest token."""
        return self.input_batch.is_short(self._running_rows())

    def _give_blocks(self) -> list[str]:
        """Give every running request room for its newest token, the earliest first."""
        preempted: list[str] = []
        for request in [self._running[i] for i in np.flatnonzero(self._is_short())]:
            # Several blocks where several tokens were accepted.
            while request.row is not None and self.input_batch.is_short(np.array([request.row])):
                if self.input_batch.allocator.num_free:
                    self.input_batch.add_block(request.row)
                else:
                    preempted.append(self._preempt_last())
        return preempted

    def _preempt_last(self) -> str:
        if len(self._running) == 1:
            raise OutOfBlocksError(
                f"request {self._running[0].request_id!r}",
                expected="a free block",
                found="none, and no other running request to preempt",
                do="give the engine more blocks; the request keeps its place.",
            )
        request = self._running.pop()
        self._release_row(request)
        request.num_preemptions += 1
        self._waiting.appendleft(request)
        return request.request_id

    def _start_waiting(self) -> None:
        """Start waiting requests while the step has tokens left for them, the cache room, and
        their adapter a slot. In order: no later request overtakes one that waits for a slot."""
        if not self._waiting:
            return
        table, rows = self.input_batch, self._running_rows()
        remaining = table.num_tokens[rows] - table.num_computed[rows]
        asked = int(np.where(remaining == 1, self.limits.query_len, remaining).sum())
        while (
            self._waiting
            and asked < self.limits.max_num_batched_tokens
            and table.fits(self._waiting[0].num_tokens)
            and self.adapter_slots.has_room(self._waiting[0].adapter)
        ):
            request = self._waiting[0]
            prompt = request.prompt_token_ids
            longest = len(prompt) + request.params.max_tokens
            request.row = table.add(
                prompt,
                request.output_token_ids,
                max_num_tokens=longest,
                lora_slot=self.adapter_slots.assign(request.adapter),
            )
            self._running.append(self._waiting.popleft())
            asked += request.num_tokens if request.num_tokens > 1 else self.limits.query_len

    def _release_row(self, request: Request) -> None:
        assert request.row is not None, "only a running request has a row"
        self.adapter_slots.give_back(int(self.input_batch.lora_slots[request.row]))
        self.input_batch.remove(request.row)
        request.row = None

    def _end(self, request: Request) -> None:
        if request.row is not None:
            self._release_row(request)
        del self._unfinished[request.request_id]


def _order(remaining: NDArray[np.int64], num_computed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Decoding requests first, the longest of them before the others, then chunks; by arrival else.

    A GPU starts the attention of the requests in this order: a long one that began last would run
    alone at the end. All decoding requests grow alike, so the order seldom changes between steps.
    """
    is_chunk = remaining > 1
    by_arrival = np.arange(len(remaining))
    return np.lexsort((np.where(is_chunk, by_arrival, -num_computed), is_chunk))
