"""Compares a step that is cut into micro-batches with the same batch as a whole.

A model may mix the rows of several requests (a mean over the batch, a rank among requests). Its
micro-batches compute something else then, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.errors import GraphrtError, StateAdvancedError, VerificationError, noting
from graphrt.events import Observer, Verified
from graphrt.externals.held import find_holder
from graphrt.externals.host_snapshot import HostSnapshot
from graphrt.graphs.writes import Write, observed_writes, storage_of
from graphrt.values import own_copy
from graphrt.verify.compare import Comparison, compare
from graphrt.verify.padding import IN_FLOAT32, UNPADDED_TOLERANCE, Float32Seen, compare_within
from graphrt.verify.replay import warn_unverified
from graphrt.verify.run_state import RunResult, RunState

_Around = AbstractContextManager[None]
_DO = (
    "give each request what it reads of others as an input of its own (rebase= where values are "
    "places in the batch), or leave ubatch.num_ubatches at 1; ubatch.allow_eager=False splits only "
    "what has a graph, each of which is compared by itself. capture() and withdraw() let the next "
    "step try again"
)


def check_cut(
    *,
    key: BatchDescriptor,
    stage: Callable[[BatchDescriptor], None],
    run: Callable[[BatchDescriptor], Any],
    runnable: object,
    state: RunState,
    may_write: Collection[Any],
    varied: Callable[[], _Around] | None,
    first_rows: Callable[[Any], Any],
    observes: bool,
    chosen_from: Mapping[str, str],
    tolerance: float | None,
    observer: Observer | None,
) -> tuple[Any, GraphrtError | None]:
    """Run one batch whole and in the micro-batches of ``key``, from one state, and compare.

    Returns the outputs of the micro-batches and None; or, where these differ or nobody knows, the
    outputs of the whole batch and the error that says why. State and host values are then as one
    run left them, that of the outputs; after an error of a run as before.

    ``stage(key)`` puts the batch in place and ``run(key)`` runs it: whole for a key of one
    micro-batch. ``runnable``: what it remembers on the host is put back before the second run, and
    ``state``, which is compared too, within ``UNPADDED_TOLERANCE`` as the outputs are. What else
    the runnable may write is in the storages ``may_write``; if it writes another tensor, it cannot
    be run twice. Scratch of ``state`` that is left otherwise is warned of (``UnverifiedWarning``).
    ``varied``: while entered, a batch that is staged has other rows in its last micro-batch; the
    whole batch must give the ``first_rows``, those before it, the same bits then, because a
    tolerance hides small dependencies.
    ``observes`` False: nobody looks, because it behaves otherwise under a torch mode.
    ``tolerance``: an absolute one that is accepted as well. A run that draws random numbers is not
    compared: they fall on other rows.
    """
    whole_key, subject = replace(key, num_ubatches=1), f"{key.num_ubatches} micro-batches, {key}"
    host = HostSnapshot(runnable)
    expected: list[Any] = []

    def difference(rows: Any, around: Callable[[], _Around]) -> Comparison | None:
        """How another run of the whole batch differs from ``rows``, if it does for this reason and
        not from run to run."""
        outcome = None
        for each in (around, nullcontext):
            _put_back(state, saved, host)
            stage(whole_key)
            with each(), host.run(is_first=True), noting(f"while {key} was compared"):
                again = compare(rows, first_rows(run(whole_key)), tolerance=tolerance)
            if again.is_equal:
                return outcome
            if outcome is not None:
                return None
            outcome = again
        return outcome

    with state.put_back(on_error=True) as saved:
        stage(whole_key)
        watch = observed_writes() if observes else nullcontext(list[Write]())
        seen = Float32Seen()
        try:
            with host.run(is_first=True), watch as writes, seen if observes else nullcontext():
                expected.append(run(whole_key))
        except VerificationError as error:  # Of host values that cannot be put back.
            if expected:
                return expected[0], error
            raise
        beyond = [w for w in writes if not w.is_staged and storage_of(w.tensor) not in may_write]
        if beyond:
            return expected[0], _cannot_be_put_back(subject, beyond, runnable)
        whole = RunResult(own_copy(expected[0]), state.save())
        is_random = state.drew_random(saved)
        outcome: Comparison | None = None
        if varied is not None and not is_random:
            outcome = difference(own_copy(first_rows(whole.outputs)), varied)
        if outcome is None:
            _put_back(state, saved, host)
            stage(key)
            with host.run(is_first=True):
                found = RunResult(run(key), state.save())
            if is_random or state.drew_random(saved):
                return found.outputs, None
            limits = IN_FLOAT32 if seen.is_any else UNPADDED_TOLERANCE
            outcome = compare_within(whole, found, limits, tolerance, chosen_from)
        if observer is not None:
            largest = outcome.max_abs_difference
            observer(Verified(RuntimeMode.NONE, key, outcome.is_equal, largest))
        if outcome.is_equal:
            _warn_of_scratch(subject, state.unlike_scratch(saved, whole.left, limits))
            return found.outputs, None
        _put_back(state, saved, host)
        stage(whole_key)
        return run(whole_key), _unlike(subject, outcome)


def require_like_whole(subject: str, whole: Any, cut: Any) -> None:
    """Errors: ``VerificationError`` if micro-batches returned other than the whole batch did."""
    outcome = compare(whole, cut, tolerance=UNPADDED_TOLERANCE)
    if not outcome.is_equal:
        raise _unlike(subject, outcome)


def _unlike(subject: str, outcome: Comparison) -> VerificationError:
    return VerificationError(
        subject,
        expected="the rows and the state of the whole batch, within the tolerance of their dtype",
        found=f"rows of one micro-batch depend on those of another: {outcome}",
        do=_DO,
    )


def _warn_of_scratch(subject: str, unlike: Mapping[str, Comparison]) -> None:
    if unlike:
        warn_unverified(
            subject,
            expected="what the whole batch writes, unless it is scratch that no later run reads",
            found="; ".join(f"{name} is left otherwise: {it}" for name, it in unlike.items()),
            do="may_overwrite={tensor: 'input that indexes its rows'} compares the rows",
            is_strict=False,
        )


def _put_back(state: RunState, saved: Any, host: HostSnapshot) -> None:
    host.restore_advanced(memos=True)
    state.restore(saved)


def _cannot_be_put_back(
    subject: str, writes: Collection[Write], runnable: object
) -> StateAdvancedError:
    places: dict[str, Write] = {}
    for write in writes:
        storage = write.tensor.untyped_storage()
        name = find_holder(storage.data_ptr(), storage.nbytes(), runnable)
        places.setdefault(name or "a tensor", write)
    return StateAdvancedError(
        f"{subject}: {', '.join(places)}",
        expected="a callable that writes only what a comparison with the whole batch can put back: "
        "static buffers, what state= guards, and what may_overwrite= names, with the input that "
        "indexes its rows where it is large",
        found=", ".join(
            f"{name} is written" + (f" at {write.source}" if write.source else "")
            for name, write in places.items()
        ),
        do=f"declare it there; {_DO}",
        source=next(filter(None, (write.source for write in writes)), ""),
    )
