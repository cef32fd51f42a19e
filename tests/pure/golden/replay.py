"""Replay a trace under each config, and batches under a pairwise selection of configs.

Every decision is written down. Run it to write the files anew.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

from graphrt.batch import RuntimeMode
from graphrt.cli.files import read_config
from graphrt.cli.json_output import of_decision, of_resolved
from graphrt.config import (
    AttentionSupport,
    CompilationConfig,
    Facts,
    Plan,
    Resolved,
    RuntimeConfig,
    resolve,
)
from graphrt.dispatch import CUDAGraphDispatcher
from graphrt.errors import ConfigError
from graphrt.planner import TraceRequest, read_trace

FOLDER = Path(__file__).resolve().parent
TRACE = FOLDER / "trace.jsonl"
CONFIGS = FOLDER / "configs.json"
DECISIONS = FOLDER / "decisions.jsonl"
PAIRWISE = FOLDER / "pairwise.jsonl"
STEP_S = 0.05
LONGEST_PROMPT, LONGEST_OUTPUT = 1_000, 100
"""Longer ones are cut, so that the replay stays small."""


@dataclass
class Running:
    """A request that is being served."""

    prompt_left: int
    output_left: int
    adapter: int


def steps(trace: list[TraceRequest], plan: Plan) -> Iterator[tuple[int, bool, int]]:
    """Serve the trace first come, first served; yield tokens, uniform and adapters of each step."""
    waiting = deque(enumerate(trace))
    running: list[Running] = []
    now_s = 0.0
    while waiting or running:
        while waiting and waiting[0][1].arrival_s <= now_s and len(running) < plan.max_num_seqs:
            place, request = waiting.popleft()
            prompt = min(request.num_prompt_tokens, LONGEST_PROMPT)
            output = min(request.num_output_tokens, LONGEST_OUTPUT)
            running.append(Running(prompt, output, place % (plan.max_loras + 1)))
        now_s += STEP_S
        room = plan.max_num_batched_tokens
        lengths, adapters = [], set()
        for request in running:
            length = min(request.prompt_left or plan.query_len, room)
            if length == 0:
                break
            room -= length
            lengths.append(length)
            adapters.add(request.adapter)
            if request.prompt_left:
                request.prompt_left -= length
            else:
                request.output_left -= length
        running = [request for request in running if request.output_left > 0]
        if lengths:
            uniform = all(length == plan.query_len for length in lengths)
            yield sum(lengths), uniform, len(adapters - {0})


def replay() -> str:
    """Return the file: the plan of each config, then a line a step."""
    lines = []
    trace = read_trace(TRACE)
    for config in json.loads(CONFIGS.read_text(encoding="utf-8")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            resolved = resolve(*read_config(str(path)))
        lines.append(json.dumps(of_resolved(resolved)))
        dispatcher = CUDAGraphDispatcher(resolved.plan)
        for batch in steps(trace, resolved.plan):
            lines.append(json.dumps([batch, *of_decision(dispatcher.dispatch(*batch)).values()]))
    return "\n".join(lines) + "\n"


FACTORS: dict[str, tuple[Any, ...]] = {
    "mode": ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
    "q": (1, 2, 3, 5),
    "lora_capture": ("each", "powers_of_two", "max_only"),
    "specialize": (True, False),
    "support": ("ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE", "NEVER"),
    "exclude": ((), ("FULL",), ("FULL", "PIECEWISE")),
}
# Not multiples of any q; counts between the captured ones.
SIZES, MAX_NUM_SEQS, MAX_LORAS = (1, 2, 4, 7, 10, 16, 23, 32), 6, 5


def pairwise_cases() -> list[dict[str, Any]]:
    """Few cases in which every two values of two factors meet: the best of all, one by one."""
    names = list(FACTORS)
    every = [dict(zip(names, values, strict=True)) for values in product(*FACTORS.values())]
    pairs_of = [{((a, case[a]), (b, case[b])) for a, b in combinations(names, 2)} for case in every]
    missing, chosen = set().union(*pairs_of), []
    while missing:
        best = max(range(len(every)), key=lambda place: len(pairs_of[place] & missing))
        missing -= pairs_of[best]
        chosen.append(every[best])
    return chosen


def resolve_case(case: dict[str, Any]) -> Resolved:
    compilation = CompilationConfig(
        cudagraph_mode=case["mode"],
        cudagraph_capture_sizes=SIZES,
        cudagraph_specialize_lora=case["specialize"],
    )
    config = RuntimeConfig(
        compilation=compilation,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=40,
        num_speculative_tokens=case["q"] - 1,
        max_loras=MAX_LORAS,
        lora_capture=case["lora_capture"],
    )
    return resolve(config, Facts(attention_support=AttentionSupport[case["support"]]))


def batches(q: int) -> Iterator[tuple[int, bool, int]]:
    """Tokens, uniform and adapters: every uniform batch and every mixed one, up to one too many."""
    for loras in (0, 1, 3, MAX_LORAS):
        yield from ((count * q, True, loras) for count in range(1, 2 * MAX_NUM_SEQS))
        yield from ((tokens, False, loras) for tokens in range(1, SIZES[-1] + 2))


def replay_pairwise() -> str:
    """Return the file: each case of the selection, then a line a batch."""
    lines = []
    for case in pairwise_cases():
        try:
            resolved = resolve_case(case)
        except ConfigError as error:
            lines.append(json.dumps({**case, "error": type(error).__name__}))
            continue
        told = of_resolved(resolved)
        del told["capture_order"]
        lines.append(json.dumps({**case, "resolved": told}))
        dispatcher = CUDAGraphDispatcher(resolved.plan)
        exclude = frozenset(RuntimeMode[name] for name in case["exclude"])
        for batch in batches(case["q"]):
            decision = of_decision(dispatcher.dispatch(*batch, exclude))
            lines.append(json.dumps([*batch, *decision.values()]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAIRWISE.write_text(replay_pairwise(), encoding="utf-8")
    DECISIONS.write_text(replay(), encoding="utf-8")
