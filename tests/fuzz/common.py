"""What engine and runner cases share: faults on demand, what should serve, leaks, tolerances."""

from __future__ import annotations

import gc
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from graphrt import CUDAGraphMode, Event, Program, Reason, RuntimeMode, SimulatedDevice
from graphrt.errors import (
    GraphMemoryError,
    GraphrtError,
    MissError,
    TooManyFailuresError,
    VerificationError,
)
from graphrt.events import Captured, CaptureFailed, PaddingVerified, RanEager, Replayed, Verified

Key = tuple[Any, Any]
Case = dict[str, Any]
"""A configuration: names and Python-readable values."""

TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Largest difference over the largest element, where other row counts take other kernels."""


@dataclass
class Counts:
    engine_steps: int = 0
    runner_steps: int = 0
    cases: int = 0
    wrong: int = 0
    unexplained: int = 0
    leaks: int = 0
    faults: int = 0
    ties: int = 0
    refused: int = 0
    missed: int = 0
    """Wrong answers of models that are wrong for some sizes or values, in runs nobody compared."""
    late: int = 0
    """Graph steps with what was replaced before, within the documented bound."""
    eager: dict[str, int] = field(default_factory=dict)
    """Explained eager steps, by reason."""

    def __add__(self, other: Counts) -> Counts:
        own, its = vars(self), vars(other)
        eager = dict(Counter(self.eager) + Counter(other.eager))
        return Counts(
            **{name: own[name] + its[name] for name in own.keys() - {"eager"}}, eager=eager
        )

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.unexplained or self.leaks)

    def line(self, seed: int) -> str:
        return (
            f"fuzz: {self.engine_steps:,} engine steps, {self.runner_steps:,} runner steps, "
            f"{self.wrong} wrong, {self.unexplained} unexplained eager, {self.leaks} leaks, "
            f"{self.faults:,} faults injected (seed {seed}; {self.cases:,} cases, "
            f"{self.ties} ties, {self.refused} refused, {self.missed} missed, {self.late} late; "
            f"eager: "
            + (", ".join(f"{n:,} {name}" for name, n in sorted(self.eager.items())) or "none")
            + ")"
        )


class Problem(Exception):  # noqa: N818  It is a finding, not an error of the program.
    """What a case found: ``kind`` is "wrong", "unexplained" or "leaks"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def require(is_so: bool, kind: str, text: str | Callable[[], str]) -> None:
    if not is_so:
        raise Problem(kind, text if isinstance(text, str) else text())


# -- faults


class InjectedError(RuntimeError):
    """An error that the fuzzer raised on purpose."""


class _Armed(NamedTuple):
    point: str
    kind: str
    left: int
    """Passes of the point before it goes off."""


# Queues, because no snapshot of what a model remembers looks into one: neither an armed fault nor
# the number of those that went off may look like state of the model, which captures put back.
_ARMED: SimpleQueue[_Armed] = SimpleQueue()
"""Empty, or the one that is armed."""
_FIRED: SimpleQueue[None] = SimpleQueue()

POINTS = ("forward", "eager_segment", "examples", "observer")
KINDS = ("error", "memory", "interrupt")
DEVICE_FAULTS = ("op", "allocation", "end", "replay_op")


def arm(point: str, kind: str, after: int) -> None:
    """Let pass number ``after`` of ``point`` fail, once."""
    disarm()
    _ARMED.put(_Armed(point, kind, after))


def disarm() -> None:
    while not _ARMED.empty():
        _ARMED.get_nowait()


def num_fired() -> int:
    return _FIRED.qsize()


def note_fired() -> None:
    _FIRED.put(None)


def touch(point: str) -> None:
    """Pass a point of user code, where an armed fault goes off."""
    if _ARMED.empty():
        return
    armed = _ARMED.get_nowait()
    if armed.point != point or armed.left:
        _ARMED.put(armed if armed.point != point else armed._replace(left=armed.left - 1))
        return
    note_fired()
    if armed.kind == "interrupt":
        signal.raise_signal(signal.SIGINT)
    elif armed.kind == "memory":
        raise torch.OutOfMemoryError(f"injected: out of memory in {point}")
    else:
        raise InjectedError(f"injected in {point}")


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_injected(error: BaseException) -> bool:
    """True if ``error`` is one of ours, or says that it comes from one."""
    return any(isinstance(e, KeyboardInterrupt) or "injected" in str(e) for e in chain(error))


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where a shell has started us with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# -- what serves, and why not


class Watch:
    """Keeps, key by key, what must serve: from what was asked and injected, not from the runtime.

    ``has_budget``: captures may fail for want of memory or graphs.
    """

    def __init__(self, keys: Iterable[Key], *, has_budget: bool) -> None:
        self.status: dict[Key, Reason] = dict.fromkeys(keys, Reason.NOT_CAPTURED_YET)
        self.unnoticed: set[Key] = set()
        """What is ``INVALIDATED``, and graphrt need not know yet: a graph step would show it."""
        self.has_budget = has_budget
        self.is_disturbed = False
        """True once a fault has gone off while something was captured."""
        self.num_failures = 0
        self.steps: list[Replayed | RanEager] = []
        self.problem: Problem | None = None
        self.may_differ = False
        """True where a comparison with eager may find what was replaced."""
        self.num_padding_compared = 0

    def observe(self, event: Event) -> None:
        """The observer: notes what happened, then may fail."""
        if isinstance(event, Replayed | RanEager):
            self.steps.append(event)
        elif isinstance(event, CaptureFailed):
            self._explain(event)
        elif isinstance(event, PaddingVerified):
            self.num_padding_compared += 1
        elif isinstance(event, Verified) and not event.equal and not self.may_differ:
            self.problem = Problem("wrong", f"a right program was refused: {event}")
        elif isinstance(event, Captured):
            self.num_failures = 0
        touch("observer")

    def _explain(self, event: CaptureFailed) -> None:
        """Every failure has a cause that we know: injected, the budget, or three of these."""
        self.num_failures += 1
        known = "injected" in event.message
        if self.may_differ and event.error == VerificationError.__name__:
            known = True
        if "injected fault" in event.message:
            note_fired()  # By the device, which arms none.
        if event.error == GraphMemoryError.__name__ and self.has_budget:
            known = True
        if event.error == TooManyFailuresError.__name__ and self.num_failures > 3:
            known = True
        if event.error in ("RetiredProgramError", "InvalidProgramError"):
            known = self.is_disturbed
        if not known:
            self.problem = Problem("wrong", f"a capture failed that nothing disturbed: {event}")

    def replaced(self) -> None:
        """A thing that every program reads was replaced, and graphrt was not told."""
        for key, status in self.status.items():
            if status is Reason.HIT:
                self.status[key] = Reason.INVALIDATED
                self.unnoticed.add(key)

    def noticed(self, missing: Mapping[Key, Reason]) -> None:
        """Graphrt has asked for everything that was replaced.

        After an interrupt there may be programs that were captured and not checked.
        """
        self.unnoticed.clear()
        for key, status in self.status.items():
            is_invalid = missing.get(key) is Reason.INVALIDATED
            if status is Reason.NOT_CAPTURED_YET and self.is_disturbed and is_invalid:
                self.status[key] = Reason.INVALIDATED

    def hear(self, missing: Callable[[], Mapping[Key, Reason]]) -> None:
        """After a step, which may have noticed what was replaced before it failed."""
        if self.unnoticed and self.unnoticed & missing().keys():
            self.noticed(missing())

    def captured(
        self,
        missing: Mapping[Key, Reason],
        asked: Collection[Key] | None,
        *,
        fired: bool,
        at_most: int | None = None,
    ) -> None:
        """Compare what serves after a capture with what must.

        ``asked``: the keys of ``capture``; None with ``at_most``: those of ``capture_next``.
        ``fired``: a fault went off meanwhile.
        """
        self.raise_problem()
        self.is_disturbed |= fired
        now = {key: missing.get(key, Reason.HIT) for key in self.status}
        if asked is not None:
            self.unnoticed.clear()  # ``capture`` asks first.
        for key in tuple(self.unnoticed):
            if now[key] is Reason.HIT:
                now[key] = Reason.INVALIDATED
            else:
                self.unnoticed.remove(key)
        if not self.is_disturbed:
            self._check_undisturbed(now, asked, at_most)
        elif not (fired or self.has_budget):
            for key, status in now.items():
                # What serves goes on; what failed is captured when it is asked for again.
                was = self.status[key]
                is_due = was is Reason.HIT or (asked is not None and key in asked)
                require(
                    status is Reason.HIT or not is_due,
                    "unexplained",
                    f"{key}: {was.name} before a capture that nothing disturbed, {status.name}"
                    " after it",
                )
        self.status = now

    def _check_undisturbed(
        self, now: Mapping[Key, Reason], asked: Collection[Key] | None, at_most: int | None
    ) -> None:
        num_new = 0
        for key, status in now.items():
            was = self.status[key]
            allowed = {was}
            if was is Reason.INVALIDATED:
                allowed.add(Reason.NOT_CAPTURED_YET)  # Retired with its whole generation.
            if asked is not None and key in asked:
                allowed = {Reason.HIT}
            elif asked is None and was is Reason.NOT_CAPTURED_YET:
                allowed.add(Reason.HIT)
            if self.has_budget:
                # Without a graph no further one fits: the failure itself was explained above.
                allowed |= {Reason.CAPTURE_FAILED, Reason.NOT_CAPTURED_YET}
            num_new += status is Reason.HIT and was is not Reason.HIT
            require(
                status in allowed,
                "unexplained",
                lambda key=key, was=was, status=status, allowed=allowed: (
                    f"{key} was {was.name} before a capture and is {status.name} after it, "
                    f"expected {'/'.join(reason.name for reason in allowed)}"
                ),
            )
        if at_most is not None and not self.has_budget:
            pending = sum(s is Reason.NOT_CAPTURED_YET for s in self.status.values())
            require(
                num_new == min(at_most, pending),
                "unexplained",
                f"capture_next({at_most}) with {pending} missing keys captured {num_new}",
            )

    def raise_problem(self) -> None:
        if self.problem is not None:
            raise self.problem

    def explain_step(
        self,
        decision: tuple[Any, Any, Reason],
        rules: Callable[[Mapping[Key, Reason]], tuple[Any, Reason]],
        missing: Callable[[], Mapping[Key, Reason]],
        counts: Counts,
        *,
        may_be_late: bool = False,
    ) -> bool:
        """Compare a decision with what the rules say: (key with its mode or None, reason).

        ``rules(status)``. ``missing()``: what graphrt says now. ``may_be_late``: a program that
        reads what was replaced may still serve; returns True if one did.
        """
        mode, key, reason = decision
        chosen = None if reason.is_miss else (mode, key)
        expected = rules({**self.status, **dict.fromkeys(self.unnoticed, Reason.HIT)})
        is_late = False
        if expected[0] in self.unnoticed:
            is_late = may_be_late and (chosen, reason) == expected
            if not is_late:
                expected = (None, Reason.INVALIDATED)
        require(
            (chosen, reason) == expected,
            "unexplained",
            lambda: f"decided {chosen}, {reason.name}; the rules say {expected}",
        )
        self.hear(missing)
        if reason.is_miss:
            counts.eager[reason.name] = counts.eager.get(reason.name, 0) + 1
        counts.late += is_late
        return is_late


def decide_tokens(
    status: Mapping[Key, Reason],
    policy: CUDAGraphMode,
    num_tokens: int,
    uniform: bool,
    exclude: Collection[RuntimeMode] = (),
    num_loras: int = 0,
) -> tuple[Key | None, Reason]:
    """The rules of an engine's batch, without tables: the smallest key that holds it, FULL first.

    Returns the key with its mode, None if the step runs eager, and the reason.
    """
    kinds = [(policy.mixed_mode(), False)]
    if policy.separate_routine() and uniform:
        kinds.insert(0, (policy.decode_mode(), True))
    kinds = [kind for kind in kinds if kind[0] is not RuntimeMode.NONE]
    if not kinds:
        return None, Reason.MODE_NONE
    count = min((n for n in {k.num_active_loras for _, k in status} if n >= num_loras), default=0)
    wanted = [(*kind, count) for kind in kinds]
    families = [
        [item for item in status if (item[0], item[1].uniform, item[1].num_active_loras) == kind]
        for kind in wanted
    ]
    if not any(families):
        return None, Reason.NO_KEY
    fitting = [[item for item in each if item[1].num_tokens >= num_tokens] for each in families]
    if not any(fitting):
        return None, Reason.ABOVE_MAX
    why = Reason.EXCLUDED
    for family in fitting:
        if not family or family[0][0] in exclude:
            continue
        best = min(family, key=lambda item: item[1].num_tokens)
        if status[best] is Reason.HIT:
            is_exact = (best[1].num_tokens, count) == (num_tokens, num_loras)
            return best, Reason.HIT if is_exact else Reason.PADDED
        why = status[best] if why is Reason.EXCLUDED else why
    return None, why


def attempt(
    act: Callable[[], Any],
    case: Case,
    rng: random.Random,
    device: SimulatedDevice,
    watch: Watch,
    say: Callable[[str], None],
    counts: Counts,
) -> Any:
    """Do it, perhaps with a fault; None if it failed as it was asked to.

    Errors: ``MissError`` as it is, and ``VerificationError`` where one may come; ``Problem`` for
            an error that nobody asked for.
    """
    fired = num_fired()
    if rng.random() < case["faults"]:
        if rng.random() < 0.3:
            name = rng.choice(DEVICE_FAULTS)
            setattr(device.faults, name, True if name == "end" else rng.randint(0, 8))
        else:
            # Without a check, nothing tells a program that an interrupt left unchecked.
            kinds = KINDS if case["interrupts"] and case["verify_first_replay"] else KINDS[:2]
            arm(rng.choice(POINTS), rng.choice(kinds), rng.randint(0, 4))
    try:
        return act()
    except (Problem, MissError):
        raise
    except BaseException as error:
        if watch.may_differ and isinstance(error, VerificationError):
            raise
        if case.get("wrong") and isinstance(error, GraphrtError):
            counts.refused += 1
            say(f"refused: {error}")
            return None
        watch.raise_problem()
        if num_fired() == fired and "injected fault" in str(error):
            note_fired()  # By the device, which arms none.
        is_full = watch.has_budget and isinstance(error, GraphMemoryError | TooManyFailuresError)
        if is_full or (num_fired() > fired and is_injected(error)):
            say(f"as asked: {type(error).__name__}")
            return None
        if not isinstance(error, Exception):
            raise  # A Ctrl-C of whoever runs this.
        text = f"an error that nobody injected: {type(error).__name__}: {error}"
        raise Problem("wrong", text) from error
    finally:
        disarm()
        for name in DEVICE_FAULTS:
            setattr(device.faults, name, False if name == "end" else None)


# -- leaks


def num_programs() -> int:
    """Programs that anything still holds. The collector's frozen objects are not looked at."""
    gc.collect()
    return sum(type(item) is Program for item in gc.get_objects())


def require_no_leaks(device: Any, num_threads: int) -> None:
    """Of a closed device, and after everything that used it: memory, recordings, threads."""
    reading = device.memory()
    require(reading.free_bytes == reading.total_bytes, "leaks", f"device memory: {reading}")
    require(not device.is_capturing(), "leaks", "a recording was left open")
    require(threading.active_count() == num_threads, "leaks", "a thread was left")
    left = num_programs()
    require(left == 0, "leaks", f"{left} programs are still held")


# -- values


def same(actual: Any, expected: Any, tolerance: float) -> bool:
    """Equal structure, shapes and dtypes; values bit for bit, or within ``tolerance``."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor):
            return False
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            return False
        actual = actual.as_subclass(torch.Tensor)
        is_exact = not (expected.dtype.is_floating_point or expected.dtype.is_complex)
        if is_exact or not tolerance or not expected.numel():
            return torch.equal(actual, expected)
        wide = torch.complex128 if expected.dtype.is_complex else torch.float64
        difference = (actual.to(wide) - expected.to(wide)).abs().max()
        return bool(difference <= tolerance * expected.abs().max().double().clamp(min=1e-3))
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(
            same(actual[name], value, tolerance) for name, value in expected.items()
        )
    if isinstance(expected, tuple | list):
        return len(actual) == len(expected) and all(
            same(*pair, tolerance) for pair in zip(actual, expected, strict=True)
        )
    return bool(actual == expected)
