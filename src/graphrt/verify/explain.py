"""Says in plain text what a program captured, what it did not, and why a step ran as it did."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

from graphrt.batch import Decision, Reason, RuntimeMode
from graphrt.graphs import GraphSegment, Program

_MAX_SHOWN = 8

_WHY = {
    Reason.HIT: "a graph of exactly this size exists",
    Reason.PADDED: "the batch is padded to the next size, or LoRA count, that has a graph",
    Reason.ABOVE_MAX: "the batch is larger than the largest captured size",
    Reason.MODE_NONE: "the policy gives this kind of batch no graph",
    Reason.EXCLUDED: "the caller excluded every mode that could have served it",
    Reason.NO_KEY: "no key of the plan describes this batch",
    Reason.LORA_NOT_CAPTURED: "the plan has no graph for this number of adapters",
    Reason.NOT_CAPTURED_YET: "its key is planned, but no graph of it is published yet",
    Reason.CAPTURE_FAILED: "the capture or the verification of its key failed",
    Reason.INVALIDATED: "something that its graph reads was replaced since the capture",
    Reason.RANKS_DISAGREE: "the data-parallel ranks settled on a lesser mode",
    Reason.UBATCH_ABORTED: "its split was called off, and no unsplit graph exists",
}

_WHAT_TO_DO = {
    Reason.ABOVE_MAX: "raise max_cudagraph_capture_size if such batches are common",
    Reason.MODE_NONE: "choose a cudagraph_mode that covers it, FULL_AND_PIECEWISE for both",
    Reason.EXCLUDED: "look at who passes `exclude` for this step",
    Reason.NO_KEY: "add its size to the capture sizes",
    Reason.LORA_NOT_CAPTURED: "capture more LoRA counts (lora_capture)",
    Reason.NOT_CAPTURED_YET: "capture it, or wait for the capture that is under way",
    Reason.CAPTURE_FAILED: "read the failure record of the key; forget_failures() tries again",
    Reason.INVALIDATED: "copy into tensors instead of replacing them, or capture again",
}

_STATES = {
    "captured": "captured, never replayed",
    "ready": "ready: its first call was checked",
    "invalid": "invalid: something it reads has moved; a replay raises InvalidProgramError",
    "retired": "retired: its graphs are gone",
}


@singledispatch
def explain(subject: object) -> str:
    """Explain a ``Program`` or a ``Decision``: what is captured, what is not, and why."""
    raise TypeError(f"expected a Program or a Decision, found {type(subject).__name__}")


@explain.register
def _(decision: Decision) -> str:
    key, reason = decision.descriptor, decision.reason
    if decision.mode is RuntimeMode.NONE:
        what = f"{key.num_tokens} tokens run eager"
    else:
        what = f"A {decision.mode.name} graph of {key} serves it"
    text = f"{what} ({reason.name}): {_WHY[reason]}."
    do = _WHAT_TO_DO.get(reason)
    return f"{text}\nTo change that: {do}." if do else text


@explain.register
def _(program: Program) -> str:
    return "\n".join(_program_lines(program))


def _program_lines(program: Program) -> Iterator[str]:
    yield f"{program.title}, generation {program.generation}"
    yield f"state: {_STATES[program.state]}"
    yield f"captured: {_count(program.num_graphs, 'device graph')}{_nodes(program)}"
    for number, segment in enumerate(program.segments):
        if isinstance(segment, GraphSegment):
            nodes = segment.graph.num_nodes
            yield f"  {number}. graph" + ("" if nodes is None else f", {_count(nodes, 'kernel')}")
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
    written = [
        external.name or "an unnamed tensor" for external in program.externals if external.written
    ]
    yield (
        f"kept alive outside the pool: {_count(len(program.externals), 'tensor')}, "
        f"{program.memory.external_bytes} bytes"
    )
    if written:
        yield f"written outside the pool: {_some(written)}"


def _nodes(program: Program) -> str:
    nodes = program.memory.num_nodes
    return "" if nodes is None else f", {_count(nodes, 'kernel')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _some(items: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else ""
    return ", ".join(items[:_MAX_SHOWN]) + more
