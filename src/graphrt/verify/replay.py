"""Checks one replay against eager execution of the same inputs, state included.

A replay runs no Python, so whatever the capture read on the host is frozen in it: a length in a
closure, a context value, a memo, a hook. Only inputs that *differ from those of the capture* can
show that, and only if both sides start from the same state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.errors import GraphrtError, UnverifiedWarning, VerificationError
from graphrt.events import Observer, Verified
from graphrt.externals.held import modules_of
from graphrt.externals.host_snapshot import HostSnapshot
from graphrt.graphs.resources import StateGuard
from graphrt.graphs.writes import first_source
from graphrt.values import Node, dotted, own_copy, walk
from graphrt.verify.compare import Comparison, compare, largest_of
from graphrt.verify.run_state import VARYING, RunState, restored

NUM_ADVANCING_RUNS = 3
"""Runs in succession that a first check compares where runs advance host values: what alternates or
goes round in threes differs from the capture in one of them."""


class ForwardHook(NamedTuple):
    """A hook that runs at capture and at no replay: a replay runs no Python of the module."""

    module: str
    """Path of the module; empty for the outermost one."""
    hook: str


class Verification(NamedTuple):
    """A replay that agreed with eager execution, and what no comparison can tell."""

    outputs: Any
    """What the replay returned."""
    comparison: Comparison
    state: Comparison | None
    """The state both sides left behind; None without a guard."""
    runnable: object = None

    @property
    def is_equal(self) -> bool:
        return self.comparison.is_equal and (self.state is None or self.state.is_equal)

    @property
    def max_abs_difference(self) -> float:
        return largest_of(each.max_abs_difference for each in (self.comparison, self.state) if each)

    def __str__(self) -> str:
        told = {"outputs": self.comparison, "state": self.state}
        return "; ".join(
            f"{what}: {each}" for what, each in told.items() if each and not each.is_equal
        )

    @property
    def hooks(self) -> tuple[ForwardHook, ...]:
        """Forward hooks of ``runnable``: they ran at the capture and run in no replay.

        Looked for when asked, because that is a walk of everything the callable reaches.
        """
        return () if self.runnable is None else forward_hooks(self.runnable)


def check_replay(
    *,
    mode: RuntimeMode,
    key: BatchDescriptor,
    run_eager: Callable[[], Any],
    run_replay: Callable[[], Any],
    state: StateGuard | RunState | None = None,
    runnable: object = None,
    before_warmup: HostSnapshot | None = None,
    tolerance: float | None = None,
    find_moved: Callable[[], Iterable[str]] = tuple,
    kept: Sequence[str] = (),
    observer: Observer | None = None,
    num_runs: int = 1,
    can_repeat: bool = True,
    observes: bool = True,
) -> Verification:
    """Run one step eagerly and as a replay, from the same state, and compare.

    Call it for each new program with inputs that differ from those of its capture, and for
    sampled steps later on. Both callables read the same static inputs, which are in place.

    ``state``: saves and restores what a step advances and writes; without it ``run_eager`` must
    change nothing. After a success the state is the one the replay left, as if the step had run
    once; after a failure the one before the call. A guard whose tokens hold tensors also has its
    state compared: a step may return the right rows and write the wrong ones. Of a ``RunState``
    that poisons, ``others`` may not be written; with them it is as before after a success, too.
    ``runnable``: its modules' forward hooks are reported.
    ``before_warmup``: what it remembered before its first warm-up. With it the eager side runs as
    if for the first time, which is the only way to see a value memoised from warm-up inputs.
    ``tolerance``: as for ``compare``; None asks for equal bits.
    ``find_moved``: called after a difference; names tensors that moved since the capture.
    ``kept``: names of objects that the program keeps as captured, and that nothing compares.
    ``num_runs``: how many runs in succession of each side are compared, all from the same state but
    with the host values that the run before left: ``NUM_ADVANCING_RUNS`` where ``before_warmup``
    says that runs advance some, because one run may find those of the capture by chance.
    ``can_repeat``: a difference may be followed by more replays, which show whether their bits vary
    from run to run: not where other ranks would have to replay too.
    ``observes`` False: no run looks for a line, because the callable behaves otherwise under a
    torch mode.

    Errors: ``VerificationError`` with key, mode and the first places that differ;
            ``StateAdvancedError`` for a replay that writes what ``others`` of the state says that
            none may; errors of the two callables pass unchanged.
    """
    guarded = state if isinstance(state, RunState) else RunState(state)

    def replay_at_first() -> Any:
        with restored(before_warmup):
            return run_replay()

    def find_line(name: str) -> str:
        if not (can_repeat and observes):
            return ""
        guarded.begin(saved)
        with restored(before_warmup):
            return first_source(run_eager, lambda: guarded.is_beside(name))

    with guarded.put_back(on_error=True) as saved:
        for num_before in range(num_runs):
            if num_before:
                guarded.restore(saved)
                if before_warmup is not None:
                    before_warmup.restore_advanced()
            guarded.poison()
            # Both sides run after ``num_before`` others that advance host values alone.
            with restored(before_warmup):
                for _ in range(num_before):
                    run_eager()
                    guarded.begin(saved)
                # The replay may overwrite what eager returned: an output can view a static input.
                expected = own_copy(run_eager())
            left_by_eager = guarded.save().compared
            with noted_eager_segments():
                for _ in range(num_before):  # Eager segments of a replay advance host values too.
                    guarded.begin(saved)
                    run_replay()
                guarded.begin(saved, is_last=True)
                outputs = run_replay()
            left_by_replay = guarded.save().compared
            guarded.settle(saved, left_by_eager, left_by_replay)
            comparison = compare(expected, outputs, tolerance=tolerance)
            states = None
            if left_by_eager:
                states = compare(left_by_eager, left_by_replay, tolerance=tolerance)
            verification = Verification(outputs, comparison, states, runnable)
            if observer is not None:
                largest = verification.max_abs_difference
                observer(Verified(mode, key, verification.is_equal, largest))
            if not verification.is_equal:
                raise VerificationError(
                    f"{mode.name}, {key}",
                    expected="the replay's outputs and state equal to eager execution of the same "
                    "inputs"
                    + (f" within {tolerance:g}" if tolerance is not None else ", bit for bit"),
                    found=str(verification),
                    do=_advice(
                        ", ".join(find_moved()),
                        ", ".join(kept),
                        can_repeat and guarded.varies(saved, replay_at_first),
                        verification.hooks,
                        before_warmup,
                        guarded,
                    ),
                )
            if guarded.poisons:
                guarded.require_rows(f"{mode.name}, {key}", left_by_replay, runnable, find_line)
    return verification


@contextmanager
def noted_eager_segments() -> Iterator[None]:
    """Around a first replay: say of an error of an eager segment what is not there in a replay."""
    try:
        yield
    except GraphrtError:
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<graphrt "):
            trace = trace.tb_next
        if trace is not None:
            error.add_note(
                "in the first replay of a graph: a replay runs eager segments alone, without the "
                "Python of the model before, between and after them. What that sets for a segment "
                "(an attribute, a variable, a context) is not there, or is what was left last: "
                "pass it as an argument or step_info, or set it in the segment"
            )
        raise


def require_other_example(subject: str, captured: Any, checked: Any) -> None:
    """Refuse examples that ignore the seed: a graph that holds their values would look right.

    ``captured``, ``checked``: inputs of seeds 0 and 1, host metadata included.
    Errors: ``VerificationError`` if all of them are equal.
    """
    if any(map(_has_other_integers, walk(captured), walk(checked))):
        return  # Token ids, say: one input says it, and most have some.
    same = compare(captured, checked)
    if same.num_compared and same.is_equal and not same.unchecked:
        raise VerificationError(
            f"{subject}: examples",
            expected="other values for each seed, in at least one input",
            found="seeds 0 and 1 with equal contents, which cannot show a value frozen at capture",
            do="draw the values of the example from a generator seeded with `seed`; of "
            "capture(like=...), give a batch whose rows differ, or examples",
        )


def _has_other_integers(one: Node, other: Node) -> bool:
    """True if two values at one place are tensors of integers, of one shape, that differ."""
    if not (one.kind == other.kind == "tensor") or one.path != other.path:
        return False
    left, right = one.value, other.value
    is_alike = left.dtype is right.dtype and left.shape == right.shape
    is_exact = not (left.dtype.is_floating_point or left.dtype.is_complex)
    return is_alike and is_exact and left.device == right.device and not torch.equal(left, right)


def require_varied_for_memos(
    subject: str,
    captured: Any,
    checked: Any,
    before_warmup: HostSnapshot | None,
    *,
    is_strict: bool = False,
) -> None:
    """Warn of tensors that the callable keeps since its first warm-up, where some input is the
    same in both examples: one made of it looks right in every check. Refuse it where ``is_strict``.

    ``captured``, ``checked``: inputs of seeds 0 and 1.
    Errors: ``VerificationError``. Warns: ``UnverifiedWarning``.
    """
    memos = before_warmup.changed(only_tensors=True) if before_warmup is not None else ()
    if not memos:
        return
    earlier = {node.path: node.value for node in walk(captured) if node.kind == "tensor"}
    same = [
        dotted(node.path)
        for node in walk(checked)
        if node.path in earlier and compare(earlier[node.path], node.value).is_equal
    ]
    if not same:
        return
    warn_unverified(
        f"{subject}: {', '.join(memos)}, set by the first warm-up",
        expected="other values for each seed in every input that it may be made of",
        found=f"the same {', '.join(same)} for seeds 0 and 1",
        do="give examples(sizes, seed) that vary them, or call the model once before the capture "
        "if what it keeps depends on no input",
        is_strict=is_strict,
    )


def require_compared(
    subject: str,
    verification: Verification,
    num_left: int = 0,
    *,
    is_strict: bool = False,
) -> bool:
    """True if anything was compared. If nothing was, which proves nothing, warn; or refuse it where
    ``is_strict``.

    ``num_left``: tensors that the run may overwrite and that are too large to compare.
    Errors: ``VerificationError``. Warns: ``UnverifiedWarning``.
    """
    states = verification.state
    if verification.comparison.num_compared + (states.num_compared if states else 0):
        return True
    opaque = ", ".join(path or "the result" for path in verification.comparison.unchecked)
    found = (
        f"nothing but opaque values, which are not compared: {opaque}" if opaque else "no output"
    )
    if num_left:
        found += f", and {num_left} overwritten tensors that are too large to compare"
    warn_unverified(
        f"{subject}: nothing was compared",
        expected="at least one output, guarded state or written rows",
        found=found,
        do="return what the run computes, guard what it advances with state=, or say which rows it "
        "writes: may_overwrite={tensor: 'name of the input that indexes its rows'}",
        is_strict=is_strict,
    )
    return False


def warn_unverified(subject: str, *, expected: str, found: str, do: str, is_strict: bool) -> None:
    """Warn of what a check cannot tell, where whoever called the caller stands; or refuse it where
    ``is_strict``. Errors: ``VerificationError``. Warns: ``UnverifiedWarning``."""
    if is_strict:
        raise VerificationError(subject, expected=expected, found=found, do=do)
    warnings.warn(f"{subject}: expected {expected}, found {found}; {do}", UnverifiedWarning, 3)


def _advice(
    moved: str,
    kept: str,
    varies: bool,
    hooks: tuple[ForwardHook, ...],
    before_warmup: HostSnapshot | None,
    state: RunState,
) -> str:
    """What was found to be amiss, before what is only possible."""
    causes = []
    if moved:
        causes.append(f"moved since the capture: {moved}")
    if kept:
        causes.append(f"kept as captured, because nothing looks into objects of its kind: {kept}")
    if varies:
        causes.append(VARYING)
    if state.poisoned:
        causes.append(
            "rows that may_overwrite names are poisoned before each run, so that a run which "
            "reads one before it writes all of it (adds to it, keeps a history in it) differs: "
            "give such a tensor to state= too"
        )
    changed = before_warmup.changed() if before_warmup is not None else ()
    if changed:
        causes.append(f"set since the first warm-up, perhaps from its inputs: {', '.join(changed)}")
    if hooks:
        named = ", ".join(f"{hook.hook} on {hook.module or 'the module'}" for hook in hooks)
        causes.append(f"forward hooks, which no replay runs: {named}")
    frozen = (
        "a host value read at capture is frozen in the graph: pass it as a tensor, or put it in "
        "the key's variant"
    )
    unguarded = "no StateGuard was given: if the step changes state, eager changed it first"
    possible = [frozen] if state.guard is not None else [frozen, unguarded]
    if causes:
        return f"{'; '.join(causes)}. If that is not it: {'; '.join(possible)}"
    return "look for the cause among: " + "; ".join(possible)


def forward_hooks(runnable: object) -> tuple[ForwardHook, ...]:
    """List the forward hooks of a callable's modules; a replay runs none of them."""
    return tuple(
        ForwardHook(path, getattr(hook, "__qualname__", repr(hook)))
        for path, module in modules_of(runnable).items()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    )
