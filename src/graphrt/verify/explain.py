"""Says in plain text what a program captured, what it did not, and why a step ran as it did."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

from graphrt.batch import BatchDescriptor, Decision, Reason, RuntimeMode, is_key
from graphrt.errors import ConfigError, shown
from graphrt.graphs import GraphSegment, Program

_MAX_SHOWN = 8

_WHAT_TO_DO = {
    Reason.ABOVE_MAX: "capture a larger size (sizes=) if such batches are common",
    Reason.MODE_NONE: "choose a cudagraph_mode that covers it, FULL_AND_PIECEWISE for both",
    Reason.EXCLUDED: "look at who passes `exclude` for this step",
    Reason.NO_KEY: "add its size to the capture sizes",
    Reason.LORA_NOT_CAPTURED: "capture more LoRA counts (lora_capture)",
    Reason.NOT_CAPTURED_YET: "capture it, or wait for the capture that is under way",
    Reason.CAPTURE_FAILED: "read report().failures, correct the cause, and capture again",
    Reason.INVALIDATED: "copy into tensors instead of replacing them, or capture again",
}

_STATES = {
    "captured": "captured, never replayed",
    "invalid": "invalid: something it reads has moved; a replay raises InvalidProgramError",
    "retired": "retired: its graphs are gone",
}


@singledispatch
def explain(subject: object) -> str:
    """Say in words what is captured, what is not, and why.

    ``subject``: a ``Decision``, a ``Program``, the report of a runtime or runner, or a key: a
    ``BatchDescriptor`` or ``(mode, key)``. ``Runtime.explain`` and ``CUDAGraphRunner.explain`` take
    the same, and add what they know of it: failures, misses, hits. Errors: ``ConfigError``.
    """
    raise ConfigError(
        "what to explain",
        expected="a Decision, a Program, a report, a BatchDescriptor or (mode, BatchDescriptor)",
        found=shown(subject),
        do="take it from the runner: last_decision, keys, report()",
    )


@explain.register
def _(decision: Decision) -> str:
    key, reason = decision.descriptor, decision.reason
    if not (is_key((decision.mode, key)) and isinstance(reason, Reason)):
        return explain.dispatch(object)(decision)
    if decision.mode is RuntimeMode.NONE:
        what = f"{key.num_tokens} tokens run eager"
    else:
        what = f"A {decision.mode.name} graph of {key} serves it"
    text = f"{what} ({reason.name}): {reason.meaning}."
    return f"{text}\nTo change that: {advice(reason)}." if advice(reason) else text


@explain.register
def _(key: BatchDescriptor) -> str:
    return (
        f"The key of {_batches(key)}. Which graph serves it, a runner knows: runner.explain(key)."
    )


@explain.register
def _(pair: tuple) -> str:  # type: ignore[type-arg]  # singledispatch takes classes
    if not is_key(pair):
        return explain.dispatch(object)(pair)
    return f"{pair[0]}: {explain(pair[1])}"


def advice(reason: Reason) -> str:
    """What makes steps with this reason run in a graph; empty where nothing does."""
    return _WHAT_TO_DO.get(reason, "")


def _batches(key: BatchDescriptor) -> str:
    requests = "" if key.num_reqs is None else f" and {_count(key.num_reqs, 'request')}"
    kind = "uniform decode batches" if key.uniform else "batches"
    more = [f"{_count(key.num_active_loras, 'LoRA adapter')}"] * key.has_lora
    more += [f"{key.num_ubatches} micro-batches"] * (key.num_ubatches > 1)
    more += [f"variant {key.variant!r}"] * (key.variant is not None)
    with_more = f" with {', '.join(more)}" if more else ""
    return f"{kind} padded to {_count(key.num_tokens, 'token')}{requests}{with_more}"


@explain.register
def _(program: Program) -> str:
    return "\n".join(_program_lines(program))


def _program_lines(program: Program) -> Iterator[str]:
    yield f"{program.title}, generation {program.generation}"
    yield f"state: {_state(program)}"
    kernels = _kernels(program.memory.num_nodes)
    yield f"captured: {_count(program.num_graphs, 'device graph')}{kernels}"
    for number, segment in enumerate(program.segments):
        if isinstance(segment, GraphSegment):
            yield f"  {number}. graph{_kernels(segment.graph.num_nodes)}"
        else:
            yield f"  {number}. eager: {segment.site}"
    if program.num_eager:
        yield (
            f"not captured: {_count(program.num_eager, 'eager segment')}, because a break point "
            "cuts there; its Python runs at every step"
        )
    elif program.state != "retired":
        yield "not captured: nothing; no Python of the callable runs at a step"
    tensors = sum(leaf.kind == "tensor" for leaf in program.inputs)
    frozen = [leaf for leaf in program.inputs if leaf.kind == "host" and leaf.value is not None]
    yield f"read in place: {_count(tensors, 'tensor argument')}; contents may change, addresses not"
    if frozen:
        values = _some([f"{leaf.path} = {leaf.value!r}" for leaf in frozen])
        yield f"frozen at capture and compared at each step: {values}"
    if program.unchecked:
        yield f"not compared, because no check looks into them: {_some(program.unchecked)}"
    for item in program.unwatched:
        yield f"not watched: {item}"
    written = [
        external.name or "an unnamed tensor" for external in program.externals if external.written
    ]
    yield (
        f"kept alive outside the pool: {_count(len(program.externals), 'tensor')}, "
        f"{program.memory.external_bytes} bytes"
    )
    if written:
        yield f"written outside the pool: {_some(written)}"


def _state(program: Program) -> str:
    if program.state != "ready":
        return _STATES[program.state]
    if program.is_compared:
        return "ready: its first replay was compared with eager execution, and equal"
    return "ready: its arguments were checked, its results never compared with eager execution"


def _kernels(number: int | None) -> str:
    return "" if number is None else f", {_count(number, 'kernel')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _some(items: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else ""
    return ", ".join(items[:_MAX_SHOWN]) + more
