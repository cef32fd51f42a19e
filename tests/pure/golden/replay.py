"""Replay a trace under each config and write down every decision; run it to write the file anew."""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphrt.cli.files import read_config
from graphrt.cli.json_output import of_decision, of_resolved
from graphrt.config import Plan, resolve
from graphrt.dispatch import CUDAGraphDispatcher
from graphrt.planner import TraceRequest, read_trace

FOLDER = Path(__file__).resolve().parent
TRACE = FOLDER / "trace.jsonl"
CONFIGS = FOLDER / "configs.json"
DECISIONS = FOLDER / "decisions.jsonl"
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


if __name__ == "__main__":
    DECISIONS.write_text(replay(), encoding="utf-8")
