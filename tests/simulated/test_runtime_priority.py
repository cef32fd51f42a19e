"""Capturing in parts, between steps: what comes first, what waits, and that all else is as ever."""

from __future__ import annotations

import gc
import itertools
import signal
import weakref
from contextlib import nullcontext, suppress
from unittest.mock import Mock

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import rule
from test_runtime_anything import Life

from graphrt import BatchDescriptor, GraphrtError, Reason, RuntimeMode, Workspace
from graphrt.errors import (
    ConfigError,
    LibraryClosedError,
    MissError,
    StaleOutputError,
    VerificationError,
)
from graphrt.events import Captured, CaptureFailed, KeysChanged, Retired, Verified
from graphrt.gc_pause import MOST_IMMORTAL, is_heap_frozen
from lab import (
    FULL,
    NONE,
    PIECEWISE,
    SIZES,
    RuntimeLab,
    Toy,
    assert_equal,
    example,
)

PIECES = [(PIECEWISE, 8), (PIECEWISE, 4), (PIECEWISE, 2)]
WHOLE = [(FULL, 4), (FULL, 2)]
"""The plan of a lab, in capture order: a decode batch has four requests at most."""


def named(lab: RuntimeLab, *names: tuple[RuntimeMode, int]) -> list:
    by_name = {(mode, key.num_tokens): (mode, key) for mode, key in lab.runtime.plan.capture_order}
    return [by_name[name] for name in names]


def check_steps(lab: RuntimeLab) -> None:
    """Every kind of batch is right, by whatever graph there is."""
    for batch in ((1, 1, True), (2, 2, True), (3, 3, True), (3, 2, False), (7, 2, False)):
        assert_equal(lab.step(*batch), lab.eager(*batch[:2]))


# -- a few keys


def test_capture_of_named_keys_leaves_the_rest_for_later():
    with RuntimeLab() as lab:
        reported = []
        report = lab.runtime.capture(
            lambda *facts: reported.append(facts[:2]), keys=named(lab, (FULL, 2), (PIECEWISE, 8))
        )
        assert reported == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert lab.captured == [(PIECEWISE, 8), (FULL, 2)]
        assert len(report.graphs) == 2
        assert set(lab.missing.values()) == {Reason.NOT_CAPTURED_YET}
        check_steps(lab)
        assert lab.runtime.last_decision.mode is PIECEWISE

        # Those that serve are not captured again.
        assert not lab.runtime.capture(keys=lab.runtime.plan.capture_order).missing
        assert sorted(lab.captured) == sorted([*PIECES, *WHOLE])
        check_steps(lab)


def test_capture_of_no_or_unknown_keys_does_nothing():
    with RuntimeLab() as lab:
        assert len(lab.runtime.capture(keys=[]).missing) == 5
        [(_, key)] = named(lab, (PIECEWISE, 8))
        for unknown in ((FULL, key), (PIECEWISE, BatchDescriptor(3)), (NONE, key), "key"):
            with pytest.raises(ConfigError, match="key"):
                lab.runtime.capture(keys=[unknown, *named(lab, (FULL, 2))])
            with pytest.raises(ConfigError, match="key"):
                lab.runtime.capture_next(first=unknown)
        assert [type(event) for event in lab.events] == [KeysChanged]  # Of the new runtime.


@pytest.mark.parametrize(("order", "num_growing"), [(SIZES[::-1], 2), (SIZES, 1)])
def test_capture_of_small_keys_first_shows_more_growth(order, num_growing):
    with RuntimeLab("FULL") as lab:
        for size in order:
            lab.runtime.capture(keys=named(lab, (FULL, size)))
        assert lab.captured == [(FULL, size) for size in order]
        graphs = lab.runtime.report().graphs
        assert sum(graph.memory.pool_growth_bytes > 0 for graph in graphs) == num_growing
        events = lab.events_of(Captured)
        grown = [event.pool_growth_bytes > 0 for event in events]
        assert (grown[0], sum(grown)) == (True, num_growing)
        check_steps(lab)


def test_capture_of_a_failed_key_retries_it_alone():
    model = FailsAt(8, 4)
    with RuntimeLab("FULL", model=model, asked={"on_capture_error": "skip"}) as lab:
        lab.runtime.capture()
        failed = Reason.CAPTURE_FAILED
        assert lab.missing == {(FULL, 8): failed, (FULL, 4): failed}
        model.sizes.clear()
        assert lab.runtime.capture(keys=named(lab, (FULL, 4))).failures.keys() == {
            *named(lab, (FULL, 8))
        }
        assert lab.missing == {(FULL, 8): failed}
        assert lab.runtime.capture_next() == 0
        assert lab.missing == {(FULL, 8): failed}


def test_capture_of_a_moved_key_recaptures_what_serves():
    with RuntimeLab("FULL", model=Routed()) as lab:
        lab.runtime.capture()
        lab.model.small.data = torch.full((4,), 3.0)
        lab.runtime.check_externals()
        invalidated = Reason.INVALIDATED
        assert lab.missing == {(FULL, 4): invalidated, (FULL, 2): invalidated}
        lab.runtime.capture(keys=named(lab, (FULL, 4)))
        # Nobody asked for 2, but 8 was serving. What shares a pool goes together.
        assert lab.captured[3:] == [(FULL, 8), (FULL, 4)]
        assert lab.missing == {(FULL, 2): Reason.NOT_CAPTURED_YET}
        assert [event.num_programs for event in lab.events_of(Retired)] == [3]
        check_steps(lab)
        assert lab.runtime.capture_next() == 0
        check_steps(lab)
        assert lab.runtime.last_decision.mode is FULL


def test_capture_of_a_key_beside_a_moved_one_leaves_it():
    with RuntimeLab("FULL", model=Routed()) as lab:
        lab.runtime.capture(keys=named(lab, (FULL, 8), (FULL, 2)))
        lab.model.small.data = torch.full((4,), 3.0)
        lab.runtime.capture(keys=named(lab, (FULL, 4)))
        assert lab.captured == [(FULL, 8), (FULL, 2), (FULL, 4)]
        assert lab.missing == {(FULL, 2): Reason.INVALIDATED}
        check_steps(lab)


class Routed(Toy):
    """Reads another weight where there are few tokens to read it with."""

    def __init__(self):
        super().__init__()
        self.small = torch.nn.Parameter(torch.ones(4))

    def forward(self, *, x, ids, lens):
        if x.shape[0] <= 4:
            x = x * self.small
        return super().forward(x=x, ids=ids, lens=lens)


# -- the next key


def test_capture_next_without_a_miss_follows_capture_order():
    with RuntimeLab() as lab:
        assert [lab.runtime.capture_next() for _ in range(5)] == [4, 3, 2, 1, 0]
        assert lab.captured == [*PIECES, *WHOLE]
        verified = lab.events_of(Verified)
        assert [event.equal for event in verified] == [True] * 5
        check_steps(lab)
        num_calls, num_events = lab.model.num_calls, len(lab.events)
        assert lab.runtime.capture_next() == 0
        assert (lab.model.num_calls, len(lab.events)) == (num_calls, num_events)


def test_capture_next_takes_several_keys_at_a_time():
    with RuntimeLab() as lab:
        assert [lab.runtime.capture_next(2) for _ in range(4)] == [3, 1, 0, 0]
        assert lab.captured == [*PIECES, *WHOLE]
        for at_most in (0, -1, 1.0, True, None):
            with pytest.raises(ConfigError, match="at_most"):
                lab.runtime.capture_next(at_most)


def test_capture_next_takes_the_most_missed_key_first():
    with RuntimeLab() as lab:
        for batch in ((3, 3, True), (5, 2, False), (2, 1, False), (5, 2, False), (2, 2, True)):
            lab.step(*batch)
            assert lab.runtime.last_decision.reason is Reason.NOT_CAPTURED_YET
        # Neither of these misses anything that a capture would give it.
        lab.step(4, 2, exclude=frozenset({PIECEWISE, FULL}))
        lab.step(12, 2)
        while lab.runtime.capture_next():
            check_steps(lab)
        missed = [(PIECEWISE, 8), (FULL, 2), (PIECEWISE, 2), (FULL, 4)]
        assert lab.captured[:1] == missed[:1]
    with RuntimeLab() as lab:
        for batch in ((3, 3, True), (5, 2, False), (2, 1, False), (5, 2, False), (2, 2, True)):
            lab.step(*batch)
        while lab.runtime.capture_next():
            pass
        assert lab.captured == [*missed, (PIECEWISE, 4)]


def test_capture_next_of_equal_misses_takes_the_latest():
    with RuntimeLab() as lab:
        for num_reqs in (4, 2, 2, 4):
            lab.step(num_reqs, num_reqs, True)
        lab.runtime.capture_next()
        assert lab.captured == [(FULL, 4)]


def test_capture_next_counts_no_miss_that_piecewise_served():
    with RuntimeLab() as lab:
        lab.runtime.capture(keys=named(lab, (PIECEWISE, 4)))
        for _ in range(3):
            lab.step(3, 3, True)
            assert lab.runtime.last_decision.mode is PIECEWISE
        lab.step(2, 2, True)
        assert lab.runtime.last_decision.reason is Reason.NOT_CAPTURED_YET
        lab.runtime.capture_next(2)
        assert lab.captured[1:] == [(PIECEWISE, 8), (FULL, 2)]


def test_capture_next_counts_strict_misses():
    with RuntimeLab(asked={"on_miss": "strict"}) as lab:
        with pytest.raises(MissError):
            lab.step(2, 2, True)
        lab.runtime.capture_next()
        assert_equal(lab.step(2, 2, True), lab.eager(2, 2))


def test_capture_next_first_precedes_misses_and_allow_defers():
    with RuntimeLab() as lab:
        lab.step(2, 2, True)
        [first] = named(lab, (FULL, 4))
        small = lambda key: key.num_tokens < 4  # noqa: E731
        assert lab.runtime.capture_next(first=first, allow=small) == 4
        assert lab.runtime.capture_next(first=first, allow=small) == 3
        assert lab.runtime.capture_next(5, first=first, allow=small) == 3
        assert lab.captured == [(FULL, 2), (PIECEWISE, 2)]
        assert lab.missing[FULL, 4] is Reason.NOT_CAPTURED_YET
        check_steps(lab)
        # One that serves already is no reason to capture nothing.
        [served] = named(lab, (FULL, 2))
        assert lab.runtime.capture_next(first=first) == 2
        assert lab.runtime.capture_next(first=served) == 1
        assert lab.captured[2:] == [(FULL, 4), (PIECEWISE, 8)]


def test_key_for_names_the_key_before_it_is_captured():
    with RuntimeLab() as lab:
        ask = lab.runtime.key_for

        def name(*args, **options):
            item = ask(*args, **options)
            assert item is None or item in lab.runtime.plan.capture_order
            return None if item is None else (item[0], item[1].num_tokens)

        for _ in range(2):
            assert name(3) == (PIECEWISE, 4)
            assert name(3, uniform=True) == (FULL, 4)
            assert name(3, uniform=True, exclude=frozenset({FULL})) == (PIECEWISE, 4)
            assert name(9) is None
            assert name(2, exclude=frozenset({FULL, PIECEWISE})) is None
            lab.runtime.capture()
    failing = RuntimeLab(model=FailsAt(4), asked={"on_capture_error": "skip"})
    with failing as lab:
        [key] = named(lab, (FULL, 4))
        assert lab.runtime.key_for(3, uniform=True) == key
        lab.runtime.capture(keys=[key])
        # It will never serve, so the step takes what is below it.
        assert lab.runtime.key_for(3, uniform=True) == named(lab, (PIECEWISE, 4))[0]


# -- failures


class FailsAt(Toy):
    """Fails in a capture scope, for some numbers of tokens."""

    def __init__(self, *sizes):
        super().__init__()
        # Kept where no walk finds it: what code reads and tests change ends the programs.
        self._sizes = itertools.repeat(set(sizes))

    @property
    def sizes(self):
        return next(self._sizes)

    def forward(self, *, x, ids, lens):
        if x.shape[0] in self.sizes:
            raise OSError("no such size")
        return super().forward(x=x, ids=ids, lens=lens)


def test_capture_next_failure_waits_for_a_whole_capture():
    with RuntimeLab("FULL", model=FailsAt(8)) as lab:
        with pytest.raises(OSError, match="no such size"):
            lab.runtime.capture_next()
        assert lab.missing[FULL, 8] is Reason.CAPTURE_FAILED
        assert [lab.runtime.capture_next() for _ in range(3)] == [1, 0, 0]
        assert lab.captured == [(FULL, 4), (FULL, 2)]
        assert [event.error for event in lab.events_of(CaptureFailed)] == ["OSError"]
        lab.model.sizes.clear()
        assert not lab.runtime.capture().missing


def test_capture_next_skipped_failure_is_reported():
    asked = {"on_capture_error": "skip"}
    with RuntimeLab("FULL", model=FailsAt(8), asked=asked) as lab:
        assert lab.runtime.capture_next(2) == 1
        assert lab.runtime.capture_next(2) == 0
        assert lab.captured == [(FULL, 4), (FULL, 2)]
        assert [key.num_tokens for _, key in lab.runtime.report().failures] == [8]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_capture_next_three_failures_in_a_row_end_it(on_error):
    model = FailsAt(8, 4, 2)
    asked = {"on_capture_error": on_error}
    with RuntimeLab(model=model, asked=asked) as lab:
        left = []
        for _ in range(3):
            if on_error == "raise":
                with pytest.raises(OSError, match="no such size"):
                    lab.runtime.capture_next()
            else:
                left.append(lab.runtime.capture_next())
        assert left in ([], [4, 3, 0])
        assert lab.runtime.capture_next() == 0
        assert set(lab.missing.values()) == {Reason.CAPTURE_FAILED}
        failed = [event.error for event in lab.events_of(CaptureFailed)]
        assert failed == ["OSError"] * 3 + ["TooManyFailuresError"] * 2
        model.sizes.clear()
        assert not lab.runtime.capture().missing


class FailsLater(FailsAt):
    """Warms up, and fails when it is captured."""

    def forward(self, *, x, ids, lens):
        fails = x.shape[0] in self.sizes and self.num_calls >= 4
        return (super() if fails else super(FailsAt, self)).forward(x=x, ids=ids, lens=lens)


def test_capture_next_keeps_what_was_captured_before_it_gave_up():
    asked = {"on_capture_error": "skip", "compilation": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
    with RuntimeLab("FULL", model=FailsLater(4, 2, 1), asked=asked) as lab:
        assert lab.runtime.capture_next(4) == 0
        assert lab.captured == [(FULL, 8)]
        assert set(lab.missing) == {(FULL, 4), (FULL, 2), (FULL, 1)}


def test_capture_next_wrong_program_fails_alone():
    def examples(sizes, seed):
        # Eager execution of size 4 reads another value than its graph did.
        return example(sizes, seed)._replace(step_info=2.0 if sizes["tokens"] == 4 else None)

    class ReadsContext(Toy):
        def forward(self, *, x, ids, lens):
            from graphrt import get_forward_context

            live = get_forward_context().attn_metadata
            return super().forward(x=x if live is None else x * live, ids=ids, lens=lens)

    asked = {"on_capture_error": "skip"}
    with RuntimeLab("FULL", model=ReadsContext(), examples=examples, asked=asked) as lab:
        assert [lab.runtime.capture_next() for _ in range(3)] == [2, 1, 0]
        assert lab.missing == {(FULL, 4): Reason.CAPTURE_FAILED}
        assert lab.captured == [(FULL, 8), (FULL, 4), (FULL, 2)]
        assert not lab.events_of(Retired)


class Memoises(Toy):
    """Keeps a tensor of its first inputs, as if it were a constant."""

    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, *, x, ids, lens):
        if self.scale is None:
            self.scale = x.sum()
        return super().forward(x=x * self.scale, ids=ids, lens=lens)


@pytest.mark.parametrize("policy", ["FULL", "PIECEWISE"])
def test_capture_next_memo_of_an_earlier_warm_up_never_serves(policy):
    with RuntimeLab(policy, model=Memoises()) as lab:
        for _ in SIZES:
            with pytest.raises(VerificationError, match="scale"):
                lab.runtime.capture_next()
            lab.step(4, 2)
        assert lab.runtime.capture_next() == 0
        assert set(lab.missing.values()) == {Reason.CAPTURE_FAILED}


class Scaled(Toy):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, *, x, ids, lens):
        return super().forward(x=x * self.scale, ids=ids, lens=lens)


def test_capture_next_accepts_attributes_set_in_between():
    with RuntimeLab("FULL", model=Scaled()) as lab:
        lab.runtime.capture_next()
        lab.model.scale = 2.0
        assert lab.runtime.capture_next() == 1
        assert_equal(lab.step(3, 2), lab.eager(3, 2))
        assert lab.runtime.last_decision.mode is FULL


# -- what capture() promises holds for parts


class Grows:
    """A resource whose memory may not grow once a graph holds its address."""

    def __init__(self):
        self.workspace = Workspace("scratch")
        self.reserved = []

    def reserve(self, max_key):
        assert not self.workspace.is_frozen
        self.reserved.append(max_key.num_tokens)
        self.prepare(max_key, None)

    def prepare(self, key, step_info):
        self.workspace.get((key.num_tokens,), torch.float32)

    def freeze(self):
        self.workspace.freeze()


@pytest.mark.parametrize("in_parts", ["capture_next", "keys"])
def test_resource_is_reserved_once_for_the_largest_key(in_parts):
    resource = Grows()
    with RuntimeLab(resources=[resource]) as lab:
        for item in reversed(lab.runtime.plan.capture_order):
            if in_parts == "keys":
                lab.runtime.capture(keys=[item])
            else:
                lab.runtime.capture_next(first=item)
        assert not lab.runtime.report().missing
        assert resource.reserved == [8]
        assert resource.workspace.num_bytes == 32


def test_capture_next_leaves_a_replaced_weight_to_capture():
    with RuntimeLab("FULL") as lab:
        lab.runtime.capture_next()
        lab.model.weight.data = torch.eye(4)
        lab.runtime.check_externals()
        assert [lab.runtime.capture_next() for _ in range(3)] == [1, 0, 0]
        assert lab.missing == {(FULL, 8): Reason.INVALIDATED}
        check_steps(lab)
        assert not lab.runtime.capture().missing
        check_steps(lab)


@pytest.mark.parametrize("at", range(1, 7))
def test_capture_next_interrupted_goes_on_with_that_key(at):
    class Interrupted(Toy):
        """Ctrl-C, as a terminal would send it, at the n-th time that its Python runs."""

        def forward(self, *, x, ids, lens):
            if self.num_calls + 1 == at:
                signal.raise_signal(signal.SIGINT)
            return super().forward(x=x, ids=ids, lens=lens)

    # A warm-up, a capture and an eager run for each of two keys.
    with RuntimeLab("FULL", model=Interrupted()) as lab:
        with pytest.raises(KeyboardInterrupt):
            lab.runtime.capture_next(2)
        verified = lab.events_of(Verified)
        assert len(lab.missing) == 3 - len(verified)
        while lab.runtime.capture_next():
            pass
        assert lab.captured == [(FULL, 8), (FULL, 4), (FULL, 2)]
        check_steps(lab)


def test_unchecked_program_over_a_moved_weight_is_invalid():
    class Interrupted(Toy):
        def forward(self, *, x, ids, lens):
            if self.num_calls + 1 == 4:  # Two warm-ups and a capture have run: none is checked yet.
                signal.raise_signal(signal.SIGINT)
            return super().forward(x=x, ids=ids, lens=lens)

    with RuntimeLab("FULL", model=Interrupted()) as lab:
        with pytest.raises(KeyboardInterrupt):
            lab.runtime.capture_next(2)
        lab.model.weight.data = torch.eye(4)
        while lab.runtime.capture_next():
            pass
        assert set(lab.missing.values()) == {Reason.INVALIDATED}
        check_steps(lab)
        assert not lab.runtime.capture().missing
        check_steps(lab)


def test_checked_view_expires_when_a_capture_begins():
    with RuntimeLab("FULL", policy="checked_view", model=FailsAt(4)) as lab:
        lab.runtime.capture_next()
        for fails in (True, False):
            outputs = lab.step(8, 2)
            outputs["rows"].sum()
            with pytest.raises(OSError, match="no such size") if fails else nullcontext():
                lab.runtime.capture_next()
            with pytest.raises(StaleOutputError):
                outputs["rows"].sum()


def test_capture_next_after_close_is_refused():
    lab = RuntimeLab()
    lab.runtime.close()
    with pytest.raises(LibraryClosedError):
        lab.runtime.capture_next()
    with pytest.raises(LibraryClosedError):
        lab.runtime.capture(keys=[])


# -- the collector


class Cycle:
    def __init__(self):
        self.myself = self


@pytest.mark.usefixtures("usual_heap")
def test_capture_next_collects_only_what_it_made(monkeypatch):
    note, counts = Mock(), []
    count = gc.get_freeze_count

    class Littering(Toy):
        def forward(self, *, x, ids, lens):
            note(weakref.ref(Cycle()))  # To append to a list would be put back.
            return super().forward(x=x, ids=ids, lens=lens)

    with RuntimeLab("FULL", model=Littering(), frozen=False) as lab:
        monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
        gc.disable()
        old = weakref.ref(Cycle())
        lab.runtime.capture_next()
        gc.enable()
        # To count objects is to visit them all.
        assert max(counts) <= MOST_IMMORTAL
        warmed_up, captured, *_ = (call.args[0] for call in note.call_args_list)
        assert warmed_up() is captured() is None, "garbage of the capture stayed"
        assert old() is not None, "the whole heap was collected"
        assert not is_heap_frozen()
        gc.collect()
        assert old() is None


@pytest.mark.usefixtures("usual_heap")
def test_capture_next_collects_young_garbage_first():
    """One part ages all that lives, so garbage that it met would outlive the whole series."""
    with RuntimeLab(frozen=False) as lab:
        kept = Cycle()
        gc.collect()
        old, kept = weakref.ref(kept), None
        left = len(lab.runtime.plan.capture_order)
        while left:
            died = [weakref.ref(Cycle()) for _ in range(5)]
            left = lab.runtime.capture_next()
            assert not any(ref() for ref in died)
        assert old() is not None, "the whole heap was collected"
        gc.collect()
        assert old() is None


@pytest.mark.usefixtures("usual_heap")
@pytest.mark.parametrize("fails", [False, True])
def test_capture_next_leaves_the_collector_as_it_was(fails):
    model = FailsAt(8) if fails else Toy()
    asked = {"on_capture_error": "skip"}
    for is_enabled in (True, False):
        for is_frozen in (False, True):
            with RuntimeLab("FULL", model=model, asked=asked, frozen=False) as lab:
                callbacks = list(gc.callbacks)
                if not is_enabled:
                    gc.disable()
                if is_frozen:
                    gc.freeze()
                    kept = gc.get_freeze_count()
                lab.runtime.capture_next()
                assert gc.isenabled() is is_enabled
                gc.enable()
                # Frozen objects may die, none may be thawed.
                assert gc.get_freeze_count() > 0.9 * kept if is_frozen else not is_heap_frozen()
                gc.unfreeze()
                assert gc.callbacks == callbacks


@pytest.mark.usefixtures("usual_heap")
def test_capture_next_interrupted_leaves_the_heap_thawed(monkeypatch):
    freeze, callbacks = gc.freeze, list(gc.callbacks)

    def interrupted():
        freeze()
        raise KeyboardInterrupt

    with RuntimeLab("FULL", frozen=False) as lab:
        monkeypatch.setattr(gc, "freeze", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab.runtime.capture_next()
        assert not is_heap_frozen()
        assert gc.callbacks == callbacks
        monkeypatch.undo()
        assert lab.runtime.capture_next() == len(lab.runtime.plan.capture_order) - 1


# -- anything


class LifeInParts(Life):
    """As ``Life``, with captures of a few keys between its steps."""

    @rule(at_most=st.integers(1, 3), size=st.sampled_from([None, *SIZES]))
    def capture_next(self, at_most, size):
        def allow(key):
            return size is None or key.num_tokens != size

        missing = self.lab.runtime.report().missing
        before = {item for item, why in missing.items() if why is Reason.NOT_CAPTURED_YET}
        left = self.lab.runtime.capture_next(at_most, allow=allow)
        waiting = [key for _, key in before if allow(key)]
        assert left == len(before) - min(at_most, len(waiting))

    @rule(numbers=st.sets(st.integers(0, 5)))
    def capture_some(self, numbers):
        order = self.lab.runtime.plan.capture_order
        some = [item for number, item in enumerate(order) if number in numbers]
        report = self.lab.runtime.capture(keys=iter(some))
        assert not {*some} & report.missing.keys()
        self.is_stale = False

    @rule()
    def capture_next_and_fail(self):
        self.lab.device.faults.op = 1
        with suppress(GraphrtError):
            self.lab.runtime.capture_next()
        self.lab.device.faults.op = None


LifeInParts.TestCase.settings = settings(max_examples=20, stateful_step_count=16, deadline=None)
TestLifeInParts = LifeInParts.TestCase
