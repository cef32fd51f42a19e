"""Says in plain text what a program captured, what it did not, and why a step ran as it did."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch

from graphrt.batch import Decision, MissReason, RuntimeMode
from graphrt.graphs.program import Program
from graphrt.graphs.segments import GraphSegment

_MAX_SHOWN = 8

_WHY = {
    MissReason.HIT: "a graph of exactly this size exists",
    MissReason.PADDED: "the batch is padded to the next size, or LoRA count, that has a graph",
    MissReason.ABOVE_MAX: "the batch is larger than the largest captured size",
    MissReason.MODE_NONE: "the policy gives this kind of batch no graph",
    MissReason.EXCLUDED: "the caller excluded every mode that could have served it",
    MissReason.NO_KEY: "no key of the plan describes this batch",
    MissReason.LORA_NOT_CAPTURED: "the plan has no graph for this number of adapters",
    MissReason.NOT_CAPTURED_YET: "its key is planned, but no graph of it is published yet",
    MissReason.CAPTURE_FAILED: "the capture or the verification of its key failed",
    MissReason.INVALIDATED: "a tensor that its graph reads has moved since the capture",
    MissReason.RANKS_DISAGREE: "the data-parallel ranks settled on a lesser mode",
    MissReason.UBATCH_ABORTED: "its split was called off, and no unsplit graph exists",
}

_WHAT_TO_DO = {
    MissReason.ABOVE_MAX: "raise max_cudagraph_capture_size if such batches are common",
    MissReason.MODE_NONE: "choose a cudagraph_mode that covers it, FULL_AND_PIECEWISE for both",
    MissReason.EXCLUDED: "look at who passes `exclude` for this step",
    MissReason.NO_KEY: "add its size to the capture sizes",
    MissReason.LORA_NOT_CAPTURED: "capture more LoRA counts (lora_capture)",
    MissReason.NOT_CAPTURED_YET: "capture it, or wait for the capture that is under way",
    MissReason.CAPTURE_FAILED: "read the failure record of the key; forget_failures() tries again",
    MissReason.INVALIDATED: "copy into tensors instead of replacing them, or capture again",
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
        lines = [f"{key.num_tokens} tokens run eager ({reason.name}): {_WHY[reason]}."]
    else:
        lines = [
            f"A {decision.mode.name} graph of {key} serves it ({reason.name}): {_WHY[reason]}."
        ]
    if reason in _WHAT_TO_DO:
        lines.append(f"To change that: {_WHAT_TO_DO[reason]}.")
    return "\n".join(lines)


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
            yield f"  {number}. eager gap: {segment.site}"
    if program.num_gaps:
        yield (
            f"not captured: {_count(program.num_gaps, 'gap')}, because a break point cuts there; "
            "its Python runs at every step"
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
        f"{program.external_bytes} bytes"
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
