"""Checks one replay against eager execution of the same inputs, state included.

A replay runs no Python, so whatever the capture read on the host is frozen in it: a length in a
closure, a context value, a memo, a hook. Only inputs that *differ from those of the capture* can
show that, and only if both sides start from the same state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.errors import VerificationError
from graphrt.events import Observer, Verified
from graphrt.graphs.resources import StateGuard
from graphrt.graphs.values import own_copy
from graphrt.verify.compare import Comparison, compare
from graphrt.verify.host_snapshot import ForwardHook, HostSnapshot, forward_hooks


class Verification(NamedTuple):
    """A replay that agreed with eager execution, and what no comparison can tell."""

    outputs: Any
    """What the replay returned."""
    comparison: Comparison
    state: Comparison | None
    """The state both sides left behind; None without a guard."""
    hooks: tuple[ForwardHook, ...]
    """Forward hooks: they ran at the capture and run in no replay."""


def check_replay(
    *,
    mode: RuntimeMode,
    key: BatchDescriptor,
    run_eager: Callable[[], Any],
    run_replay: Callable[[], Any],
    state: StateGuard | None = None,
    runnable: object = None,
    before_warmup: HostSnapshot | None = None,
    tolerance: float | None = None,
    observer: Observer | None = None,
) -> Verification:
    """Run one step eagerly and as a replay, from the same state, and compare.

    Call it for each new program with inputs that differ from those of its capture, and for
    sampled steps later on. Both callables read the same static inputs, which are in place.

    ``state``: saves and restores what a step advances; without it ``run_eager`` must change
    nothing. After a success the state is the one the replay left, as if the step had run once;
    after a failure the one before the call. A guard whose tokens hold tensors also has its state
    compared: a step may return the right rows and write the wrong ones.
    ``runnable``: its modules' forward hooks are reported.
    ``before_warmup``: what it remembered before its first warm-up. With it the eager side runs as
    if for the first time, which is the only way to see a value memoised from warm-up inputs.
    ``tolerance``: as for ``compare``; None asks for equal bits.

    Errors: ``VerificationError`` with key, mode and the first places that differ; errors of the
            two callables pass unchanged.
    """
    saved = state.save() if state is not None else None
    with before_warmup.restored() if before_warmup is not None else nullcontext():
        # The replay may overwrite what eager returned: an output can be a view of a static input.
        expected = own_copy(run_eager())
    expected_state = state.save() if state is not None else None
    if state is not None:
        state.restore(saved)
    outputs = run_replay()

    comparison = compare(expected, outputs, tolerance=tolerance)
    states = None
    if state is not None:
        states = compare(expected_state, state.save(), tolerance=tolerance)
    is_equal = comparison.is_equal and (states is None or states.is_equal)
    if observer is not None:
        sizes = [comparison.max_abs_difference]
        sizes += [] if states is None else [states.max_abs_difference]
        largest = math.nan if any(map(math.isnan, sizes)) else max(sizes)
        observer(Verified(mode, key, is_equal, largest))
    hooks = forward_hooks(runnable) if runnable is not None else ()
    if is_equal:
        return Verification(outputs, comparison, states, hooks)

    if state is not None:
        state.restore(saved)
    found = [f"outputs: {comparison}"] if not comparison.is_equal else []
    if states is not None and not states.is_equal:
        found.append(f"state: {states}")
    raise VerificationError(
        f"{mode.name}, {key}",
        expected="the replay's outputs and state equal to eager execution of the same inputs"
        + (f" within {tolerance:g}" if tolerance is not None else ", bit for bit"),
        found="; ".join(found),
        do=_advice(hooks, before_warmup, state is not None),
    )


def _advice(
    hooks: tuple[ForwardHook, ...], before_warmup: HostSnapshot | None, is_guarded: bool
) -> str:
    causes = [
        "a host value read at capture is frozen in the graph: pass it as a tensor, or put it in "
        "the key's variant"
    ]
    changed = before_warmup.changed() if before_warmup is not None else ()
    if changed:
        causes.append(f"set since the first warm-up, perhaps from its inputs: {', '.join(changed)}")
    if hooks:
        named = ", ".join(f"{hook.hook} on {hook.module or 'the module'}" for hook in hooks)
        causes.append(f"forward hooks, which no replay runs: {named}")
    if not is_guarded:
        causes.append("no StateGuard was given: if the step changes state, eager changed it first")
    return "look for the cause among: " + "; ".join(causes)
