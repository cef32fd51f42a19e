"""Carries the messages of ranks: over torch.distributed, or between ranks of one process.

A message is a few integers; what comes back is the largest of each over all ranks. One message is
under way at a time. An exchange that failed is dead: it repeats its error, and nothing is retried,
because nobody knows what the other ranks have seen.

Healthy rounds are one collective and nothing else. Who is missing is asked only after a failure, by
a roll-call through the store that also brought the group up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any, Literal, NoReturn, Protocol, cast, runtime_checkable
from weakref import ref

from graphrt.config.checked import check_choice, check_count
from graphrt.config.options import MOST_TIMEOUT_S
from graphrt.errors import (
    AgreementInFlightError,
    ConfigError,
    RankError,
    RankLostError,
    RankTimeoutError,
)
from graphrt.parallel.agreement import NUM_WORDS, Round, check_round, make_tag, merge, tokens_of
from graphrt.waits import within

Wire = Literal["auto", "reduce", "gather"]
MOST_GATHERED = 16
"""Up to so many ranks ``auto`` gathers: one hop, where a reduction takes several."""
ROLL_CALL_S = 2.0
"""How long ranks that give up wait for the others to answer."""
STORE_S = 5.0
"""How long the store may take to answer a rank that gives up."""
LOOK_S = 1.0
"""How often a waiting rank looks whether another one has given up."""
TIMEOUT_S = 30.0


class Pending:
    """A message under way. ``take()``: waits for those of all ranks, or for the largest words."""

    def __init__(self, take: Callable[[], Sequence[Sequence[int]]], world: int) -> None:
        self._take: Callable[[], Sequence[Sequence[int]]] | None = take
        self._world = world
        self._messages: Sequence[Sequence[int]] = ()

    def result(self) -> Sequence[int]:
        """Wait for all ranks; the largest of each word. Errors: ``RankError``."""
        if self._take is not None:
            self._messages = self._take()
            self._take = None  # It holds the group.
        return merge(self._messages)

    @property
    def num_tokens_across_ranks(self) -> tuple[int, ...] | None:
        """Of a step's message, once there is a result: the unpadded tokens of each rank, 0 for an
        idle one. None where only the largest of each word is known."""
        if len(self._messages) < self._world:
            return None
        return tuple(map(tokens_of, self._messages))


@runtime_checkable
class Exchange(Protocol):
    """What brings the messages of ``world`` ranks together; this is rank ``rank``.

    ``num_rounds``: messages started so far, which is the same on every rank. ``tells_sizes``: what
    comes back tells every rank's token count. ``model_groups``: of torch.distributed, over which
    the models of this exchange's runtimes communicate: what ``give_up`` ends.
    """

    rank: int
    world: int
    num_rounds: int
    tells_sizes: bool
    model_groups: list[Any]

    def start(
        self, words: Sequence[int], *, timeout_s: float = TIMEOUT_S, about: str = ""
    ) -> Pending:
        """Send this rank's words, as many as every rank sends, each of 64 bits.

        ``about``: what the round is about, for messages of errors.
        Errors: ``AgreementInFlightError`` before the result of the last message was taken; after
                the error that ended the exchange a new one like it, of which it is the cause.
        """
        ...

    def post(self, name: str, text: str) -> None:
        """Leave a text for the other ranks, which read it in any later round."""
        ...

    def read(self, name: str) -> str | None:
        """A text that a rank left; None: nobody did yet."""
        ...

    def give_up(self, error: RankError) -> None:
        """End with ``error``, which later rounds repeat, because the device waits for another rank.

        What the device waits in ends too: NCCL's groups in ``model_groups``, which cannot be used
        again. Where it is empty, all of NCCL's in this process end, because nothing tells which
        of them a model uses; a note of ``error`` says so. Ranks that wait for this one end with
        ``RankLostError``.
        """
        ...

    def close(self) -> None:
        """Leave together with all ranks, and drop what was made for the exchange. Idempotent."""
        ...


class _Member:
    """What every exchange keeps: who it is, and how it has ended."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.num_rounds = rank, world, 0
        self.tells_sizes = True
        self.model_groups: list[Any] = []
        self._is_waiting = False
        self._error: RankError | None = None

    def _require_alive(self) -> None:
        """Errors: one like that which ended the exchange: raised again, that one itself would grow
        by a traceback each time."""
        ended = self._error
        if ended is not None:
            again = copy(ended)
            again.__notes__ = [*getattr(ended, "__notes__", ()), "the exchange has ended before"]
            raise again from ended

    def _require_free(self) -> None:
        self._require_alive()
        if self._is_waiting:
            raise AgreementInFlightError(
                f"rank {self.rank}",
                expected="one message under way",
                found="another one, whose result was not taken",
                do="take the result of each message before the next one starts",
            )

    def _end(self, error: RankError, cause: BaseException | None = None) -> NoReturn:
        self._error = error
        raise error from cause


def _missing_text(missing: Sequence[int]) -> str:
    if not missing:
        return "all ranks, but too late"
    return f"nothing from rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"


def _timeout(missing: tuple[int, ...], rank: int, about: str, timeout_s: float) -> RankTimeoutError:
    return RankTimeoutError(
        f"rank {rank}, {about or 'a round'}",
        missing=missing,
        expected=f"every rank within {timeout_s:g} s",
        found=_missing_text(missing),
        do="see what those ranks did last; a rank without work has to take part too. Start all "
        "ranks again: this exchange has ended",
    )


def _lost(missing: tuple[int, ...], rank: int, about: str, found: str) -> RankLostError:
    return RankLostError(
        f"rank {rank}, {about or 'a round'}",
        missing=missing,
        expected="a connection to every rank",
        found=f"{_missing_text(missing)} ({found})" if missing else found,
        do="look for the error that ended that rank, and start all ranks again",
    )


# -- ranks of one process


class InProcessExchange:
    """``world`` ranks in one process and one thread, without torch: all start, then all take.

    ``ranks`` has the ``Exchange`` of each. A rank that takes a result before all have started is
    told at once who is missing: time is virtual.
    """

    def __init__(self, world: int) -> None:
        check_count("world of InProcessExchange", world)
        self.texts: dict[str, str] = {}
        self.rounds: dict[int, list[Sequence[int]]] = {}
        """By number: the messages of each that not every rank has started, () for missing ones."""
        self.ranks = tuple(_InProcessRank(self, rank, world) for rank in range(world))


class _InProcessRank(_Member):
    """One rank's exchange."""

    def __init__(self, shared: InProcessExchange, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self._shared = shared

    def start(
        self, words: Sequence[int], *, timeout_s: float = TIMEOUT_S, about: str = ""
    ) -> Pending:
        self._require_free()
        number, rounds = self.num_rounds, self._shared.rounds
        self.num_rounds += 1
        self._is_waiting = True
        messages = rounds.setdefault(number, [()] * self.world)
        messages[self.rank] = tuple(words)
        if () not in messages:
            del rounds[number]
        return Pending(partial(self._take, messages, timeout_s, about), self.world)

    def _take(
        self, messages: Sequence[Sequence[int]], timeout_s: float, about: str
    ) -> Sequence[Sequence[int]]:
        self._require_alive()
        missing = tuple(rank for rank, words in enumerate(messages) if not words)
        if missing:
            self._end(_timeout(missing, self.rank, about, timeout_s))
        self._is_waiting = False
        return messages

    def post(self, name: str, text: str) -> None:
        self._shared.texts[name] = text

    def read(self, name: str) -> str | None:
        return self._shared.texts.get(name)

    def give_up(self, error: RankError) -> None:
        self._error = self._error or error

    def close(self) -> None:
        self.give_up(_lost((), self.rank, "a round", "a closed exchange"))


# -- over torch.distributed


class TorchExchange(_Member):
    """The ranks of a process group of torch.distributed.

    ``group`` None: a gloo group of its own, on GPU machines too, because the host would wait for a
    message on the device. It is made of the default group; without one, of the variables that
    torchrun sets. A group that is given is not destroyed.
    ``wire``: how the largest words are found: ``reduce`` on the way, ``gather`` here, which also
    tells every rank's token count; ``auto`` gathers up to 16 ranks. Alike on every rank.
    ``most_s``: most seconds that any round of a group of its own may take.
    ``model_groups``: see ``Exchange``; ``LLMEngine`` adds its own. Name those of a model where
    the process has other groups over NCCL, which shall live on when a rank of the model is lost.
    Make it soon after the default group, before anything imports torch's compiler, which would keep
    that group until the process exits. A forked child cannot use it.

    Errors: ``RankLostError`` where no group can be made, ``ConfigError``.
    """

    def __init__(
        self,
        group: Any = None,
        wire: Wire = "auto",
        *,
        most_s: float = 600.0,
        model_groups: Sequence[Any] = (),
    ) -> None:
        check_choice("wire", wire, ("auto", "reduce", "gather"))
        _check_time("most_s", most_s)
        # Here, because deciding alone needs no torch.
        import torch
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        _import_what_keeps_groups(c10d)
        self._made: Any = None
        if group is None:
            limit = timedelta(seconds=most_s)

            def new_group() -> Any:
                if dist.is_initialized():
                    return dist.new_group(backend="gloo", timeout=limit)
                dist.init_process_group("gloo", timeout=limit)
                return dist.group.WORLD

            try:
                # Torch's own limit does not hold where the process that has the store is stopped.
                self._made = group = _within(most_s + STORE_S, new_group)
            except (RuntimeError, ValueError) as error:
                raise RankLostError(
                    "a group of all ranks",
                    expected="every rank, found by the variables that torchrun sets",
                    found=str(error),
                    do="start with torchrun, or call torch.distributed.init_process_group first",
                ) from error
        super().__init__(group.rank(), group.size())
        self._group = group
        self.model_groups = list(model_groups)
        self.tells_sizes = wire == "gather" or (wire == "auto" and self.world <= MOST_GATHERED)
        self._max = cast("Any", dist.AllreduceOptions())
        self._max.reduceOp = dist.ReduceOp.MAX
        self._is_on_device = dist.get_backend(group) != "gloo"
        self._host_device = torch.device("cpu")
        self._timeout_s = 0.0
        self._storages: dict[int, _Storage] = {}
        self._assumes_equal = False
        self._store: Any = c10d.PrefixStore(
            f"graphrt/{group.group_name}", c10d._get_default_store()
        )
        try:
            # Each rank opens its exchanges over a group in the same order.
            number = self._ask_store("opening an exchange", "add", f"opened by {self.rank}", 1)
            self._store = c10d.PrefixStore(f"{number}", self._store)
            self._require_same_wire("gather" if self.tells_sizes else "reduce")
        except BaseException:
            self.close(together=False)
            raise
        here = ref(self)
        os.register_at_fork(after_in_child=lambda: _leave_to_parent(here()))

    def _require_same_wire(self, wire: str) -> None:
        """Errors: ``ConfigError``; ranks that have opened it with another one lose this one."""
        first = self._ask_store("opening an exchange", "compare_set", "wire", "", wire).decode()
        if first != wire:
            self._tell_end()
            raise ConfigError(
                "wire",
                expected="the same on every rank, because they would wait for each other",
                found=f"{wire} on rank {self.rank}, {first} on another one",
                do="pass wire= alike on every rank, or leave it out",
            )

    def start(
        self, words: Sequence[int], *, timeout_s: float = TIMEOUT_S, about: str = ""
    ) -> Pending:
        self._require_free()
        if self._assumes_equal:
            return Pending(lambda: (words,) * self.world, self.world)
        storage = self._storages.get(len(words))
        if storage is None:
            storage = _Storage(
                len(words), self.world if self.tells_sizes else 1, self._is_on_device
            )
            self._storages[len(words)] = storage
        if timeout_s != self._timeout_s:
            self._limit(timeout_s)
        storage.fill(words)
        self.num_rounds += 1
        self._is_waiting = True
        try:
            if self.tells_sizes:
                work = self._group._allgather_base(storage.received, storage.sent)
            else:
                work = self._group.allreduce([storage.sent], self._max)
        except RuntimeError as error:
            self._fail(about, timeout_s, error)
        return Pending(partial(self._take, work, storage, timeout_s, about), self.world)

    def _limit(self, timeout_s: float) -> None:
        """Let operations of gloo end by themselves, if later than this side gives up: a group
        cannot be destroyed before they do."""
        _check_time("timeout_s", timeout_s)
        self._timeout_s = timeout_s
        if self._made is not None:
            backend = self._made._get_backend(self._host_device)
            backend._set_default_timeout(timedelta(seconds=timeout_s + ROLL_CALL_S + 1))

    @contextmanager
    def assume_equal(self) -> Iterator[None]:
        """Inside, the words of this rank stand for those of all, and nothing is sent: for profiling
        one rank alone."""
        before, self._assumes_equal = self._assumes_equal, True
        try:
            yield
        finally:
            self._assumes_equal = before

    def post(self, name: str, text: str) -> None:
        about = f"posting {name}"
        self._ask_store(about, "set", f"text {name}", text)
        # A store answers no set: only after this is it there for a rank that hears of it.
        self._ask_store(about, "check", [f"text {name}"], seconds=self._timeout_s)

    def read(self, name: str) -> str | None:
        about, at, seconds = f"reading {name}", f"text {name}", self._timeout_s
        if not self._ask_store(about, "check", [at], seconds=seconds):
            return None
        text: str = self._ask_store(about, "get", at, seconds=seconds).decode()
        return text

    def give_up(self, error: RankError) -> None:
        if _end_collectives([*self.model_groups, self._group] if self.model_groups else None):
            error.add_note(
                "every NCCL group of this process has ended with it, because TorchExchange has no "
                "model_groups, which would say what the model communicates over"
            )
        if self._error is None:
            self._error = error
            try:
                self._tell_end()
            except RankError as lost:
                error.add_note(f"and the other ranks could not be told: {lost}")

    def close(self, *, together: bool = True) -> None:
        """Leave together with all ranks, and drop the group that was made here. Idempotent.

        ``together`` False: leave at once, because of an error here. The others then find the
        connection broken.
        Errors: ``RankError`` where the others do not leave; the group is dropped all the same.
        """
        try:
            if together and self._error is None and not self._is_waiting:
                tag = make_tag(Round.CLOSE, 0, self.num_rounds)
                rest = [0] * (NUM_WORDS - 2)
                check_round(self.start([tag, -tag, *rest], about="closing").result())
        finally:
            # A copy has no traceback, whose frames hold the engine that the error has ended.
            self._error = copy(self._error or _lost((), self.rank, "a round", "a closed exchange"))
            made, self._made, self._group, self._store = self._made, None, None, None
            self._storages.clear()
            self.model_groups.clear()
            if made is not None:
                import torch.distributed as dist

                # A process that exits while its gloo threads live, or anything refers to the
                # group, may abort. Whoever destroys the default group destroys this one as well.
                if made in dist.distributed_c10d._world.pg_map:
                    dist.destroy_process_group(None if made is dist.group.WORLD else made)

    # -- when a rank is missing

    def _take(
        self, work: Any, storage: _Storage, timeout_s: float, about: str
    ) -> Sequence[Sequence[int]]:
        """Wait until the words are here, looking now and then whether somebody has given up."""
        self._require_alive()
        deadline = monotonic() + timeout_s
        while True:
            left = deadline - monotonic()
            try:
                if storage.wait(work, max(0.0, min(left, LOOK_S))):
                    self._is_waiting = False
                    return storage.read()
            except RuntimeError as error:
                self._fail(about, timeout_s, error)
            if left <= LOOK_S or self._has_given_up(about, left):
                self._fail(about, timeout_s, None)

    def _has_given_up(self, about: str, seconds: float) -> bool:
        try:
            return bool(self._ask_store(about, "check", ["roll-call"], seconds=seconds))
        except RankError:
            return True  # The roll-call says it.

    def _ask_store(self, about: str, call: str, *arguments: Any, seconds: float = 0.0) -> Any:
        """Errors: ``RankLostError`` also where it does not answer."""
        if self._store is None:
            self._require_alive()
        try:
            # A set waits too, for a call that was left behind.
            return _within(max(seconds, STORE_S), getattr(self._store, call), *arguments)
        except RuntimeError as error:
            # torchrun's own process has the store, or else rank 0.
            found = f"the store that brought the ranks together: {error}"
            raise _lost((0,), self.rank, about, found) from error

    def _tell_end(self) -> None:
        """Have the ranks that wait for this one end."""
        for name in ("a connection broke", "roll-call"):
            self._ask_store("the end of an exchange", "set", name, "1")

    def _fail(self, about: str, timeout_s: float, broken: RuntimeError | None) -> NoReturn:
        """Ask who is still there; end the exchange. ``broken``: the connection that failed."""
        about = about or f"round {self.num_rounds}"
        ask = partial(self._ask_store, about)

        def not_waiting() -> tuple[int, ...]:
            ranks = range(self.world)
            return tuple(rank for rank in ranks if not ask("check", [f"rank {rank} waits"]))

        try:
            if broken is not None:
                ask("set", "a connection broke", "1")
            ask("set", f"rank {self.rank} waits", about)
            ask("set", "roll-call", "1")
            until = monotonic() + ROLL_CALL_S
            while (missing := not_waiting()) and monotonic() < until:
                sleep(0.05)
            is_broken = broken is not None or ask("check", ["a connection broke"])
        except RankError as lost:
            self._end(lost, lost.__cause__)
        if not is_broken:
            self._end(_timeout(missing, self.rank, about, timeout_s))
        found = (
            str(broken) if broken is not None else "another rank has ended, or lost its connection"
        )
        self._end(_lost(missing, self.rank, about, found), broken)


def _leave_to_parent(exchange: TorchExchange | None) -> None:
    """Give a forked child nothing to wait for: it has none of the threads that answer."""
    if exchange is not None:
        exchange._made = exchange._store = None
        exchange._error = _lost((), exchange.rank, "a round", "the exchange of a parent process")


def _within(seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """``call(*arguments)``. Errors: ``RuntimeError``, also if it takes longer, because the calls of
    a store have no time-out of their own where the process that has it is stopped."""
    found = within(seconds, call, *arguments)
    if not found:
        raise RuntimeError(f"no answer within {seconds:g} s")
    return found[0]


def _check_time(name: str, seconds: object) -> None:
    if not isinstance(seconds, int | float) or not 0 < seconds <= MOST_TIMEOUT_S:
        raise ConfigError(
            name,
            expected=f"seconds above 0, at most {MOST_TIMEOUT_S:g}",
            found=repr(seconds),
            do="pass a time after which a rank that does not come is given up",
        )


def _end_collectives(groups: Sequence[Any] | None) -> bool:
    """Have the device end every collective of NCCL that it waits in, of these groups; of all, for
    None: then, whether there were any. Returns at once.

    Torch's watchdog does the same after a time-out, but for calls alone: it does not know of
    collectives inside graphs. The device is free soon; a communicator goes once no graph holds a
    collective of its own, because NCCL waits for that.
    """
    import torch
    import torch.distributed.distributed_c10d as c10d

    gpu, ends_all = torch.device("cuda"), False
    for group in list(c10d._world.pg_map):
        is_meant = groups is None or group in groups
        if is_meant and gpu in group._device_types and c10d.is_nccl_available():
            backend = group._get_backend(gpu)
            if isinstance(backend, c10d.ProcessGroupNCCL):
                # Each in a thread: the end of one may wait for that of another, and for graphs.
                within(0, backend.abort)
                ends_all = groups is None
    return ends_all


def _import_what_keeps_groups(c10d: Any) -> None:
    """Import ``torch.distributed.nn`` while there is no default group.

    Its functions have the default group of that moment as a default argument, for ever; torch's
    compiler imports it. The threads of such a group live until the process exits, and then may end
    it with "terminate called without an active exception".
    """
    world, c10d._world.default_pg = c10d._world.default_pg, None
    try:
        import torch.distributed.nn.functional  # noqa: F401
    finally:
        c10d._world.default_pg = world


class _Storage:
    """Where messages of one length lie: nothing is allocated in a round.

    On a GPU the words go through pinned memory, and one event says that they are back.
    """

    def __init__(self, num_words: int, num_messages: int, is_on_device: bool) -> None:
        import torch

        def zeros(count: int) -> Any:
            return torch.zeros(count, dtype=torch.int64, pin_memory=is_on_device)

        self._host, self._back = zeros(num_words), zeros(num_messages * num_words)
        device = torch.device("cuda" if is_on_device else "cpu")
        self.sent = self._host.to(device)
        self.received = self._back.to(device) if num_messages > 1 else self.sent
        """What comes back, flat: the gathered messages, or the reduced one in place."""
        self._messages = (self._back if is_on_device else self.received).view(-1, num_words)
        self._event = torch.Event(device) if is_on_device else None
        self._of: Any = None
        """The work whose copy back is under way."""
        self._tensor = torch.tensor

    def fill(self, words: Sequence[int]) -> None:
        self._host.copy_(self._tensor(words))
        if self._event is not None:
            self.sent.copy_(self._host, non_blocking=True)

    def wait(self, work: Any, seconds: float) -> bool:
        """True once the messages are on the host. Errors: ``RuntimeError`` of a lost connection."""
        event = self._event
        if event is None:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                if not work.is_completed():
                    return False
                # It has failed, which this repeats, or else ended as the time was over.
                work.wait()
            return True
        if self._of is not work:
            self._of = work
            work.wait()  # The stream waits for it, the host does not.
            self._back.copy_(self.received, non_blocking=True)
            event.record()
        until = monotonic() + seconds
        while not event.query():
            if monotonic() > until:
                return False
        self._of = None
        return True

    def read(self) -> list[list[int]]:
        messages: list[list[int]] = self._messages.tolist()
        return messages
