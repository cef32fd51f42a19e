"""``python -m benchmarks.parts``: which parts of a capture, and of a start, take the time.

It explains G5 and G6 and sets no target. The library's functions are wrapped from outside while it
runs. A part's time is its own: what another part takes inside it is not counted twice. It is host
time, so GPU work still queued at the end of a part falls to whoever waits for it. A wrapper costs
below a microsecond a call.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.baselines import hand_capture
from benchmarks.cases import capture as g6, engine as g5
from benchmarks.harness import CannotRunError, cuda_device, machine
from benchmarks.models import DecodeStep, decode_step_of_06b
from graphrt import Device, GraphLibrary, SimulatedDevice, gc_pause
from graphrt.externals import HostSnapshot
from graphrt.externals.held import Reads
from graphrt.graphs import capture as capturing, recorder
from graphrt.runner import comparisons, executor, jobs, runner
from graphrt.verify import RunState, padding, replay
from graphrt_llm import LLMEngine
from graphrt_llm.assembly import TINY_CONFIG
from graphrt_llm.models import ModelConfig

MODEL, REST = "model", "rest"
Place = tuple[object, str]
"""A class or module, and the name of a function in it."""
Parts = Mapping[str, Sequence[Place]]

OF_A_CAPTURE: Parts = {
    REST: [(jobs, "capture_program")],
    MODEL: [(recorder.ProgramRecorder, "record")],
    "eager segments": [(recorder.ProgramRecorder, "run_eager")],
    "begin": [(recorder.ProgramRecorder, "_open_segment")],
    "end": [(recorder.ProgramRecorder, "_close_segment")],
    "reads": [
        (Reads, name)
        for name in (
            "__init__",
            "leads_to_the_same",
            "has_same_tensors",
            "_read_values",
            "values_since",
        )
    ],
    "host state": [
        (HostSnapshot, name) for name in ("__init__", "_note", "_pending", "restore_advanced")
    ],
    "externals": [(recorder.ProgramRecorder, "externals")],
    "signature": [(capturing.Signature, "of")],
    "escapes": [(capturing._Capture, "_refuse_escapes")],
    "writes": [
        (capturing._Capture, name) for name in ("_refuse_mutated_inputs", "_refuse_advanced_state")
    ],
    "cost": [(capturing, "_cost")],
    "program": [(capturing, "Program")],
    "library": [
        (GraphLibrary, name)
        for name in ("generation_for", "make_room", "require_budget", "add", "emit")
    ],
}
OF_A_START: Parts = {
    REST: [(LLMEngine, "capture")],
    "reserve": [(jobs._Run, "reserve")],
    "warm-up": [(jobs._Run, "warm_up")],
    "capture": [(jobs._Run, "capture")],
    "first-replay check": [(jobs._Run, "check")],
    "padded comparison": [(comparisons.Comparisons, "compare_padding")],
    "eager, compared": [(comparisons.Comparisons, "_eager_compared")],
    "replays": [(comparisons.Comparisons, "_replay_compared")],
    "state": [(RunState, name) for name in ("save", "restore", "poison", "settle")],
    "comparing": [(replay, "compare"), (padding, "compare")],
    "examples": [(jobs._Run, "_inputs"), (executor.Executor, "example_call")],
    "collector": [(gc_pause._Collector, "pause"), (gc_pause._Collector, "resume")],
    "reads": OF_A_CAPTURE["reads"],
    "host state": OF_A_CAPTURE["host state"],
    "watch": [(runner.Watch, "update")],
    "first token": [(g5, "first_graphed_token")],
}


def device_parts(device: Device) -> Parts:
    """What every device has, and on CUDA where torch and the driver come in."""
    pool = device.new_pool()
    parts: dict[str, Sequence[Place]] = {
        "alias": [(type(device), "weak_alias")],
        "live blocks": [(type(pool), "live_blocks")],
        "memory reading": [(type(device), "memory")],
    }
    if device.name == "cuda":
        from graphrt.device.cuda import private

        parts |= {
            "capture_begin": [(torch.cuda.CUDAGraph, "capture_begin")],
            "capture_end": [(torch.cuda.CUDAGraph, "capture_end")],
            "pool snapshot": [(type(pool), "_segments")],
            "BLAS workspaces": [(private, "clear_blas_workspaces")],
        }
    pool.release()
    return parts


class Clock:
    """Seconds of named parts, each without the parts inside it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside: list[float] = []
        """Of each call that is open, the outermost first: what its inner parts took."""

    def timed(self, part: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            started = perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                took = perf_counter() - started
                self.seconds[part] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return call

    @contextmanager
    def watching(self, parts: Parts) -> Iterator[None]:
        """While entered, the functions of ``parts`` are timed wherever they are called from."""
        with ExitStack() as patches:
            for part, places in parts.items():
                for owner, name in places:
                    wrapped: Any = self.timed(part, getattr(owner, name))
                    if isinstance(vars(owner).get(name), classmethod | staticmethod):
                        wrapped = staticmethod(wrapped)  # What ``getattr`` found is bound already.
                    patches.enter_context(mock.patch.object(owner, name, wrapped))
            yield


class PartRow(NamedTuple):
    """Milliseconds of one part of one arm, the median of the blocks."""

    metric: str
    arm: str
    ms: float
    share: float
    """Of the sum of the arm's parts."""
    samples: Sequence[float]


def rows(metric: str, arms: Mapping[str, Sequence[Mapping[str, float]]]) -> list[PartRow]:
    """``arms``: by name, seconds by part for each block. The largest part of an arm comes first."""
    made = []
    for arm, blocks in arms.items():
        samples = {
            part: [1000 * block.get(part, 0.0) for block in blocks]
            for part in {part for block in blocks for part in block}
        }
        medians = {part: statistics.median(figures) for part, figures in samples.items()}
        total = sum(medians.values())
        for part, ms in sorted(medians.items(), key=lambda item: -item[1]):
            name = f"{metric}-part-{part.replace(' ', '-')}"
            made.append(PartRow(name, arm, ms, ms / total, samples[part]))
        whole = [1000 * sum(block.values()) for block in blocks]
        made.append(PartRow(f"{metric}-part-all", arm, statistics.median(whole), 1.0, whole))
    return made


# -- G6: one capture


@torch.no_grad()
def capture_parts(
    step: DecodeStep, sizes: Sequence[int], device: Device, blocks: int
) -> list[PartRow]:
    """A graph of G6: by hand, and through the library under each policy of observing."""
    decode = g6.Decode(step)
    parts = device_parts(device)
    arms: dict[str, list[Mapping[str, float]]] = {}

    def per_graph(arm: str, clock: Clock) -> None:
        each = {part: seconds / len(sizes) for part, seconds in clock.seconds.items()}
        arms.setdefault(arm, []).append(each)

    def by_hand() -> None:
        clock, captured = Clock(), []
        with clock.watching(parts):
            for size in sizes:
                step.prepare(size)
                call = clock.timed(MODEL, partial(step, **step.inputs(size)))
                device.synchronize()
                captured.append(clock.timed(REST, hand_capture)(call, device, warmups=0))
        per_graph("by hand", clock)
        for graph in captured:
            graph.reset()

    g6.eager(step, sizes, device)  # Nothing may be initialised for the first time in a capture.
    with GraphLibrary(device) as library:
        for block in range(1 + blocks):
            by_hand()
            for policy in g6.POLICIES:
                clock = Clock()
                with clock.watching({**OF_A_CAPTURE, **parts}):
                    g6.through_library(library, decode, sizes, policy)
                # The readings that a scope takes outside its captures count too.
                per_graph(policy or "default", clock)
            if not block:
                arms.clear()  # The first round loads kernels.
    return rows("G6", arms)


# -- G5: a start


def start_parts(make_engine: Callable[[], Any], blocks: int) -> list[PartRow]:
    """From an engine to its first graphed token, every key captured before."""
    found: list[Mapping[str, float]] = []
    for block in range(1 + blocks):
        with make_engine() as engine:
            clock = Clock()
            with clock.watching(OF_A_START):
                engine.capture()
                g5.first_graphed_token(engine, seed=block)
        if block:  # The first round compiles kernels.
            found.append(dict(clock.seconds))
    return rows("G5", {"start": found})


def on_cuda(blocks: int) -> list[PartRow]:
    with cuda_device() as device:
        step = decode_step_of_06b(g6.SIZES, g6.CONTEXT, device)
        made = capture_parts(step, g6.SIZES, device, blocks)
        del step
    with cuda_device():
        return made + start_parts(partial(g5.engine_of, "qwen3-0.6b"), blocks)


def simulated(blocks: int) -> list[PartRow]:
    """The tiny model: it shows that the parts are found, and nothing about a GPU."""
    device = SimulatedDevice()
    step = DecodeStep(
        ModelConfig.tiny(),
        max_reqs=4,
        context=32,
        dtype=torch.float32,
        device=device.torch_device,
    )
    made = capture_parts(step, (4, 2, 1), device, blocks)
    device.close()
    config = replace(TINY_CONFIG, device="simulated")
    return made + start_parts(partial(LLMEngine.tiny, config), blocks)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.parts", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "simulated"), default="cuda")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--commit", help="record this commit: for a copy without its history")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        made = (on_cuda if args.device == "cuda" else simulated)(args.blocks)
    except CannotRunError as why:
        print(f"cannot run here: {why}", file=sys.stderr)
        return 1
    for item in made:
        print(f"{item.metric:28} {item.arm:10} {item.ms:10.3f} ms {item.share:7.1%}")
    if args.json is not None:
        where = machine(args.commit)
        written = [item._asdict() | where for item in made]
        args.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
