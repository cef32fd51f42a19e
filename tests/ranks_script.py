"""What one rank does: ``python tests/ranks_script.py SCENARIO,SCENARIO S``, as torchrun starts it.

After ``S`` seconds it says on stderr where it is, and ends. ``python tests/ranks_script.py serve``:
see ``ranks_lab.Launcher``; ``-c CODE WORDS`` in place of a scenario: as of Python.

The model multiplies by a weight and adds up over all ranks in a break point, so that a rank that
runs other graphs than the others, or none, leaves them waiting in a collective.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist

import graphrt.graphs.library
import graphrt.parallel.exchange
import graphrt.runtime.splitting
from graphrt import (
    BatchDescriptor,
    CompilationConfig,
    ForwardContext,
    OutputSpec,
    RankConfig,
    Reason,
    Runtime,
    RuntimeMode,
    SimulatedDevice,
    break_point,
    make_device,
)
from graphrt.errors import GraphrtError
from graphrt.events import Replayed
from graphrt.gc_pause import frozen_heap
from graphrt.parallel import (
    RankVote,
    Round,
    SplitRules,
    TorchExchange,
    agree,
    decide,
    make_tag,
    pack,
)
from graphrt.runner.comparisons import Comparisons
from graphrt.ubatch import index
from graphrt_llm import LLMEngine, SamplingParams
from graphrt_llm.assembly import TINY_CONFIG
from graphrt_llm.attention import AttentionInputs, AttentionMetadata
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.collectives import RankGroup, _groups
from graphrt_llm.kv_cache import KVCache
from graphrt_llm.models import CausalLM, ModelConfig
from graphrt_llm.weights import random_weights
from lab import INPUTS, OUTPUTS, WIDTH, config, example, values
from ranks_lab import serve_ranks

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
Said = dict[str, Any]


SPLIT: Any = {
    "num_ubatches": 2,
    "decode_token_threshold": 2,
    "prefill_token_threshold": 2,
    "auto_off": False,
}


def say(**said: Any) -> None:
    print(json.dumps(said), flush=True)


class Meeting(torch.nn.Module):
    """A toy whose break point meets the other ranks: each gets the sum of all first rows."""

    def __init__(self, most_s: float = 20) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(WIDTH) * 2)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=most_s))
        self.number = max(_meetings, default=0) + 1
        _meetings[self.number] = self
        self.fails_at = self.fails_before = self.is_wrong_at = 0
        self.fails_in = 0
        """In which micro-batch it fails."""
        self.pending: SimpleQueue[Any] | None = None
        """Exchanges that the device still waits for, as a GPU would; None: the host waits. Not a
        list, which would be put back after a failed capture."""
        self.memo: Any = None

    def forward(self, *, x: Any, ids: Any, lens: Any) -> dict[str, Any]:
        if x.shape[0] == self.is_wrong_at:
            # Made of the inputs of the first run, and frozen in the graph.
            self.memo = x[0, 0].clone() if self.memo is None else self.memo
            x = x * self.memo
        if x.shape[0] == self.fails_before:
            raise ValueError("this rank cannot run so many tokens")
        rows = self.meet(x @ self.weight)
        if x.shape[0] == self.fails_at and index() == self.fails_in:
            raise ValueError("this rank cannot run so many tokens")
        return {"rows": rows + ids[:, None], "lens": lens * 2}

    @break_point
    def meet(self, rows: Any) -> Any:
        total = rows[:1].clone()
        torch.ops.graphrt_ranks_script.add_up(total, self.number)
        return rows + 0 * total


def _add_up(x: torch.Tensor, number: int) -> None:
    meeting = _meetings[number]
    work = meeting.group.allreduce([x])
    if meeting.pending is None:
        work.wait()
    else:
        meeting.pending.put(work)


# A group must have no references left when the process ends.
_meetings: WeakValueDictionary[int, Meeting] = WeakValueDictionary()
# An operator, because FULL graphs record it: those of torch.distributed do not say what they write.
_library = torch.library.Library("graphrt_ranks_script", "FRAGMENT")
_library.define("add_up(Tensor(a!) x, int number) -> ()")
_library.impl("add_up", _add_up, "CPU")
torch.library.register_fake("graphrt_ranks_script::add_up", lambda x, number: None, lib=_library)


class WaitingDevice(SimulatedDevice):
    """A device that does not end before the exchanges of a model do."""

    def __init__(self, pending: SimpleQueue[Any]) -> None:
        super().__init__()
        self.pending = pending

    def ends_within(self, seconds: float) -> bool:
        while not self.pending.empty():
            work = self.pending.get()
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                self.pending.put(work)
                return False
        return True


def runtime(
    exchange: TorchExchange,
    model: Meeting,
    mode: str = "PIECEWISE",
    device: SimulatedDevice | None = None,
    resources: Sequence[Any] = (),
    **asked: Any,
) -> Runtime:
    return Runtime(
        model,
        inputs=INPUTS,
        outputs=OutputSpec(OUTPUTS),
        examples=example,
        config=config(mode, **asked),
        device=device or SimulatedDevice(),
        resources=resources,
        ranks=exchange,
    )


def step(made: Runtime, num_tokens: int, num_reqs: int) -> Said:
    if num_tokens:
        out = made.step(values(num_tokens, num_reqs), num_tokens=num_tokens, num_reqs=num_reqs)
        assert out["rows"].shape[0] == num_tokens
        expected = values(num_tokens, num_reqs)
        torch.testing.assert_close(out["rows"], expected["x"] * 2 + expected["ids"][:, None])
    elif not made.step_idle():
        return {"idle": True}
    mode, key, reason = made.last_decision  # type: ignore[misc]
    because = made.last_settled.eager_because if made.last_settled else None
    return {
        "mode": mode.name,
        "tokens": key.num_tokens,
        "reason": reason.name,
        "because": because and [because[0].name, because[1]],
        "across": made.runner._executor.num_tokens_across_ranks,
    }


def wires() -> None:
    """Both forms of a message, over the same votes, are what the pure function says."""
    exchanges = {"gather": TorchExchange(wire="gather")}
    exchanges["reduce"] = TorchExchange(wire="reduce")
    rules = SplitRules(2)
    for number in range(100):
        votes = [
            RankVote.idle(rank)
            if (number + rank) % 5 == 0
            else RankVote(
                rank, 1 + (number * 7 + rank * 3) % 64, 64, RuntimeMode(1 + number % 2),
                bool((number + rank) % 3), miss_reason=Reason.ABOVE_MAX,
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        tag = make_tag(Round.STEP, 0, number)
        for name, exchange in exchanges.items():
            pending = exchange.start(pack(votes[RANK], tag))
            assert decide(pending.result(), rules) == agree(votes, rules, tag), name
            tokens = tuple(vote.num_tokens_unpadded for vote in votes)
            assert pending.num_tokens_across_ranks == (tokens if name == "gather" else None)
    with exchanges["gather"].assume_equal():
        assert exchanges["gather"].start([1] * 10).result() == [1] * 10
    if RANK == 1:
        time.sleep(0.5)  # Late, and in time.
    exchanges["gather"].start([0] * 10, timeout_s=20).result()
    exchanges["reduce"].close()
    exchanges["gather"].close()
    say(ok=True)


BATCHES = {
    # Of ranks 0 and 1: tokens and requests.
    "padded to the larger": ((8, 3), (5, 3)),
    "one alone would be smaller": ((2, 2), (7, 3)),
    "rank 1 idle": ((4, 4), (0, 0)),
    "too large on rank 0": ((12, 4), (3, 3)),
    "eager beside an idle one": ((0, 0), (9, 2)),
    "all idle": ((0, 0), (0, 0)),
}


def steps() -> None:
    exchange = TorchExchange()
    with runtime(exchange, Meeting(), verify_every=3) as made:
        made.capture()
        for name, batches in BATCHES.items():
            say(name=name, **step(made, *batches[RANK]))
        # What one rank alone finds replaced makes all eager, until all capture again.
        if RANK == 1:
            made.runner.fn.weight = torch.nn.Parameter(torch.eye(WIDTH) * 2)
        say(name="replaced", **step(made, 4, 3))
        made.capture()
        say(name="captured again", **step(made, 4, 3))
    exchange.close()


class Scale:
    """A resource that sets a number for each batch: what the step says, or 1."""

    number = 1.0

    def prepare(self, key: BatchDescriptor, step_info: float | None) -> None:
        self.number = 1.0 if step_info is None else step_info


class Scaled(Meeting):
    """Multiplies by that number before it meets the others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, *, x: Any, ids: Any, lens: Any) -> dict[str, Any]:
        return super().forward(x=x * self.scale.number, ids=ids, lens=lens)


def set_by_resource(mode: str, **asked: Any) -> None:
    """One rank gets a number that its graph was not captured with, beside one that replays."""
    exchange, model = TorchExchange(), Scaled()
    with runtime(exchange, model, mode, resources=[model.scale], **asked) as made:
        made.capture()
        given = values(4, 4)
        for number in (1.0, 5.0, 1.0, 5.0):
            own = number if RANK == 1 else 1.0
            out = made.step(given, num_tokens=4, num_reqs=4, step_info=own)
            expected = given["x"] * 2 * own + given["ids"][:, None]
            torch.testing.assert_close(out["rows"], expected)
            assert made.last_decision is not None
            ran, key, why = made.last_decision
            say(mode=ran.name, reason=why.name, num_ubatches=key.num_ubatches)
    exchange.close()


def capture_fails(phase: str, on_error: str) -> None:
    exchange = TorchExchange()
    model = Meeting()
    if RANK == 1:
        setattr(model, "fails_at" if phase == "warmup" else "is_wrong_at", 4)
    with runtime(exchange, model, on_capture_error=on_error) as made:
        try:
            made.capture()
        except GraphrtError as error:
            say(error=type(error).__name__, text=str(error))
        except ValueError as error:
            say(error=type(error).__name__, text=str(error))
        report = made.report()
        say(
            missing={f"{key.num_tokens}": why.name for (_, key), why in report.missing.items()},
            failures={f"{key.num_tokens}": text for (_, key), text in report.failures.items()},
        )
        if on_error == "skip":
            say(**step(made, 3, 3))
            say(**step(made, 8, 3))
    exchange.close()


def micro_batch_fails() -> None:
    exchange = TorchExchange()
    model = Meeting()
    model.fails_at, model.fails_in = 2 * RANK, 1
    with runtime(
        exchange, model, "FULL_DECODE_ONLY", ubatch=SPLIT, on_capture_error="skip"
    ) as made:
        made.capture()
        report = made.report()
        say(
            missing=[f"{key.num_tokens} / {key.num_ubatches}" for _, key in report.missing],
            failures=[str(text) for text in report.failures.values()],
        )
        for num_tokens in (4, 2):
            say(**step(made, num_tokens, num_tokens))
            say(ubatches=made.last_decision.descriptor.num_ubatches)  # type: ignore[union-attr]
    exchange.close()


def comparison_raises() -> None:
    """One rank raises in a sampled comparison: the model, then for a batch that does not fit."""
    exchange = TorchExchange()
    model = Meeting()
    with runtime(exchange, model, verify_every=2) as made:
        made.capture()
        for num_tokens, broken in ((8, "model"), (4, "batch")):
            say(**step(made, 2, 2))
            batch = values(num_tokens, 3)
            if RANK == 1 and broken == "batch":
                batch["x"] = batch["x"][:, 1:]
            model.fails_at = num_tokens if RANK == 1 and broken == "model" else 0
            try:
                made.step(batch, num_tokens=num_tokens, num_reqs=3)
            except (GraphrtError, ValueError) as error:
                say(error=type(error).__name__, text=str(error))
            model.fails_at = 0
            say(**step(made, num_tokens, 3))
    exchange.close()


def late() -> None:
    exchange = TorchExchange()
    exchange.start([0] * 10).result()
    if RANK == 1:
        time.sleep(6)
    try:
        exchange.start([0] * 10, timeout_s=1).result()
        exchange.start([0] * 10, timeout_s=1).result()
    except GraphrtError as error:
        say(error=type(error).__name__, missing=error.missing, text=str(error))  # type: ignore[attr-defined]
    exchange.close()


def dies() -> None:
    exchange = TorchExchange()
    exchange.start([0] * 10).result()
    for wrong in (0, float("inf")):
        say(timeout=error_of(lambda wrong=wrong: exchange.start([0] * 10, timeout_s=wrong)))
    if RANK == 1:
        os._exit(3)
    started = time.monotonic()
    try:
        exchange.start([0] * 10).result()
    except GraphrtError as error:
        say(error=type(error).__name__, missing=error.missing, s=time.monotonic() - started)  # type: ignore[attr-defined]

    def again(held: object) -> None:
        exchange.start([0] * 10)

    held = SimulatedDevice()
    held_by = ref(held)
    try:
        again(held)
    except GraphrtError as error:
        say(again=type(error).__name__)
    del held
    exchange.close()
    gc.collect()
    say(kept=held_by() is not None, again=error_of(lambda: exchange.start([0] * 10)))
    say(post=error_of(lambda: exchange.post("a", "b")), read=error_of(lambda: exchange.read("a")))


def stopped() -> None:
    """Rank 0, which has the store, is stopped; rank 1 lets it go on once it has its error."""
    exchange = TorchExchange()
    graphrt.parallel.exchange.STORE_S = 1.0
    pid, *_ = exchange.start([os.getpid() * (RANK == 0), *[0] * 9]).result()
    if RANK == 0:
        os.kill(pid, signal.SIGSTOP)
    try:
        exchange.start([0] * 10, timeout_s=2).result()
    except GraphrtError as error:
        say(error=type(error).__name__, missing=error.missing, text=str(error))  # type: ignore[attr-defined]
    exchange.close()
    if RANK == 1:
        say(another=time_of(lambda: TorchExchange(most_s=1)))
        os.kill(pid, signal.SIGCONT)
        # Python before 3.14 aborts if the call comes back while the interpreter shuts down.
        for thread in threading.enumerate():
            if thread.name == "graphrt waits":
                thread.join(30)


def mismatch() -> None:
    exchange = TorchExchange()
    sizes = [2, 4, 8] if RANK == 0 else [2, 8]
    try:
        runtime(exchange, Meeting(), compilation={"cudagraph_capture_sizes": sizes})
    except GraphrtError as error:
        say(error=type(error).__name__, text=str(error))
    exchange.close()


def interrupted() -> None:
    exchange = TorchExchange()
    with runtime(exchange, Meeting()) as made:

        def progress(done: int, total: int, key: object) -> None:
            if RANK == 1 and done == 2:
                raise KeyboardInterrupt

        try:
            made.capture(progress)
        except KeyboardInterrupt as error:
            say(error="KeyboardInterrupt", text=str(error))
        say(num_missing=len(made.report().missing))
        made.capture()
        say(num_missing=len(made.report().missing), **step(made, 4, 3))
    exchange.close()


def engines() -> None:
    """A data-parallel engine: rank 1 has less to do, then nothing; the tokens are those of one."""
    exchange = TorchExchange()
    prompts = [[1, 2, 3], [4] * 20, [5, 6], [7] * 9, [8] * 40]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    own = prompts[:4] if RANK == 0 else prompts[4:]
    with LLMEngine.tiny() as alone:
        expected = [alone.generate(prompt, params) for prompt in own]
    compilation = CompilationConfig(cudagraph_capture_sizes=(1, 2, 4, 16))
    few = replace(TINY_CONFIG, runtime=replace(TINY_CONFIG.runtime, compilation=compilation))
    for overlap in (False, True):
        with LLMEngine.tiny(replace(few, overlap=overlap), ranks=exchange) as engine:
            engine.capture()
            found = engine.generate(own, params)
            only_first = engine.generate(own if RANK == 0 else [], params)
            say(
                overlap=overlap,
                same=found == expected and only_first == (expected if RANK == 0 else []),
                ranks=[engine.rank, engine.world],
            )
    exchange.close()


class CompiledMeeting(Meeting):
    """Meets the other ranks in an operator, in each run: a rank that ran more often would wait."""

    def meet(self, rows: Any) -> Any:
        total = rows[:1].clone()
        torch.ops.graphrt_ranks_script.add_up(total, self.number)
        return rows + 0 * total


def compiled() -> None:
    """Starts at level 3: without kept code, with it, and with it on rank 0 alone."""
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)  # Inductor's own.
    exchange = TorchExchange()
    with tempfile.TemporaryDirectory() as folder:
        for name, place in (("none", "shared"), ("all", "shared"), ("one", f"of {RANK}")):
            # Those of rank 0 are the entries that it wrote before.
            own = "shared" if RANK == 0 else place
            model = CompiledMeeting()
            asked = {
                "level": 3,
                "backend": "inductor",
                "inductor_compile_config": {"fallback_by_default": True},  # No C++ to compile.
                "splitting_ops": ["graphrt_ranks_script.add_up"],
                "cache_dir": Path(folder, own),
            }
            with runtime(exchange, model, compilation=asked) as made:
                made.capture()
                report = made.report().compile
                assert report is not None
                served = step(made, 8, 3), step(made, 3, 2)
                say(
                    name=name,
                    is_kept=report.is_trace_kept,
                    why=report.why_traced,
                    modes=[one["mode"] for one in served],
                )
            del model, made
            gc.collect()  # So that the next one has its number, as in a process of its own.
    exchange.close()


class Summing(torch.nn.Module):
    """Adds the sum of all ranks' first rows to each row: a collective inside a FULL graph.

    ``fails_at``: so many tokens raise before it while ``is_failing()`` is true.
    """

    def __init__(self, device: Any, is_failing: Any, fails_at: int = 0, group: Any = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(2 * torch.eye(WIDTH, device=device))
        self.is_failing, self.fails_at, self.group = is_failing, fails_at, group
        self.scale = Scale()

    def forward(self, *, x: Any, ids: Any, lens: Any) -> dict[str, Any]:
        if len(x) == self.fails_at and self.is_failing():
            raise ValueError("this rank cannot capture so many tokens")
        rows = x @ self.weight * self.scale.number
        total = rows[0].clone()
        dist.all_reduce(total, group=self.group)
        return {"rows": rows + total, "lens": lens * 2}


def on_gpus() -> None:
    """Over NCCL: messages on the device in both forms, and a collective inside FULL graphs."""
    local = int(os.environ["LOCAL_RANK"])
    device = make_device("cuda", local)
    dist.init_process_group("nccl", device_id=device.torch_device)
    nccl = dist.group.WORLD
    dist.all_reduce(torch.zeros(1, device=device.torch_device))  # Communicators are built lazily.
    rules = SplitRules(2)
    for wire in ("gather", "reduce"):
        exchange = TorchExchange(nccl, wire=wire)  # type: ignore[arg-type]
        for number in range(200):
            votes = [RankVote(r, 1 + (number + 5 * r) % 60, 64) for r in range(WORLD)]
            tag = make_tag(Round.STEP, 0, number)
            pending = exchange.start(pack(votes[RANK], tag))
            assert decide(pending.result(), rules) == agree(votes, rules, tag), wire
        exchange.close()
    say(wires=True)
    exchange = TorchExchange()  # gloo beside NCCL: the host does not wait for the device.
    model = Summing(device.torch_device, bool)
    made = Runtime(
        model,
        inputs=INPUTS,
        outputs=OutputSpec(OUTPUTS),
        examples=example,
        config=config("FULL", verify_every=4),
        device=device,
        resources=[model.scale],
        ranks=exchange,
    )
    made.capture()
    say(missing=[f"{key}: {why.name}" for key, why in made.report().missing.items()])
    for batches in ((8, 5), (2, 7), (4, 0), (12, 3), (0, 9), (0, 0)) * 20:
        own = batches[RANK]
        if not own:
            made.step_idle()
            continue
        each = [values(n, min(n, 4)) for n in batches]
        out = made.step(each[RANK], num_tokens=own, num_reqs=min(own, 4))
        total = sum(2 * value["x"][:1].sum(0) for value in each)
        expected = 2 * each[RANK]["x"] + total
        torch.testing.assert_close(out["rows"].cpu(), expected, rtol=1e-2, atol=1e-2)
    say(hits=sum(graph.hits for graph in made.report().graphs) > 0)
    # What one rank's resource sets to another number: that rank runs eager beside a replay. Not
    # in each fourth run, which is compared, and raises.
    given, ran = values(8, 4), set()
    for _ in range(3):
        out = made.step(given, num_tokens=8, num_reqs=4, step_info=5.0 if RANK == 1 else 1.0)
        rows, numbers = 2 * given["x"], (1, 5)
        expected = rows * numbers[RANK] + sum(numbers) * rows[0]
        torch.testing.assert_close(out["rows"].cpu(), expected, rtol=1e-2, atol=1e-2)
        ran.add(" ".join(each.name for each in made.last_decision[::2]))  # type: ignore[index]
    say(set_by_resource=sorted(ran))
    made.close()
    # What torch itself says is true in the last warm-up as well.
    is_capturing = torch._C._cuda_isCurrentStreamCapturing
    made = Runtime(
        Summing(device.torch_device, is_capturing, 4 * RANK),
        inputs=INPUTS,
        outputs=OutputSpec(OUTPUTS),
        examples=example,
        config=config("FULL", on_capture_error="skip"),
        device=device,
        ranks=exchange,
    )
    made.capture()
    report = made.report()
    say(
        missing=[f"{key.num_tokens} {why.name}" for (_, key), why in report.missing.items()],
        failures=list(report.failures.values()),
    )
    for num_tokens in (3, 8):
        made.step(values(num_tokens, 3), num_tokens=num_tokens, num_reqs=3)
        say(mode=made.last_decision.mode.name)  # type: ignore[union-attr]
    made.close()
    exchange.close()
    del nccl, made
    device.close()
    dist.destroy_process_group()


def engines_on_gpus() -> None:
    """Ranks that share experts or layers over NCCL: the tokens of one GPU."""
    exchange = TorchExchange()
    prompts = [[number + 1, 2, 3] for number in range(8)] + [[4] * 20, [5] * 9]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    for name, model, shares in (
        ("experts", "tiny-moe", {"expert_parallel": True}),
        ("layers", "tiny", {"tensor_parallel": True}),
    ):
        described = ModelConfig.named(model)
        own = prompts if name == "layers" else prompts[RANK::WORLD]
        on_gpu = replace(TINY_CONFIG, device="cuda", **shares)
        with LLMEngine.with_random_weights(described, replace(TINY_CONFIG, device="cuda")) as alone:
            expected = [alone.generate(prompt, params) for prompt in own]
        for ubatch in ({}, SPLIT):
            compilation = CompilationConfig(
                cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=(1, 2, 4, 6, 10, 64)
            )
            asked = replace(
                on_gpu, runtime=replace(on_gpu.runtime, compilation=compilation, ubatch=ubatch)
            )
            steps: list[Any] = []
            with LLMEngine.with_random_weights(
                described, asked, ranks=exchange, observer=steps.append
            ) as engine:
                missing = engine.capture().missing
                found = engine.generate(own, params)
            replayed = [e for e in steps if isinstance(e, Replayed)]
            say(
                name=name,
                same=found == expected,
                missing=[f"{key} {why.name}" for key, why in missing.items()],
                modes=sorted({e.mode.name for e in replayed}),
                is_split=any(e.num_ubatches > 1 for e in replayed),
            )
    exchange.close()


def time_of(call: Callable[[], object]) -> Said:
    """How a call ended, and after how many seconds."""
    started = time.monotonic()
    found: Said = {}
    try:
        call()
    except (GraphrtError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        found = {
            "error": type(error).__name__,
            "text": f"{error}\n{getattr(error, '__notes__', '')}",
        }
    return {**found, "s": time.monotonic() - started}


def left_waiting() -> None:
    """Rank 1 fails in a warm-up before a collective, in which the device of rank 0 then waits."""
    graphrt.graphs.library.END_S = 0.1
    exchange = TorchExchange()
    model = Meeting(most_s=4)
    model.pending = SimpleQueue()
    model.fails_before = 4 * RANK
    limits = RankConfig(step_timeout_s=1)
    device = WaitingDevice(model.pending)
    made = runtime(exchange, model, device=device, on_capture_error="skip", ranks=limits)
    say(capture=time_of(made.capture))
    say(close=time_of(made.close))
    say(again=time_of(made.close))
    end_without_groups(exchange)


def left_waiting_in_a_step() -> None:
    """Rank 1 fails in an eager step after the collective, then in one before it."""
    graphrt.graphs.library.END_S = 0.1
    exchange = TorchExchange()
    model = Meeting(most_s=4)
    model.pending = SimpleQueue()
    limits = RankConfig(step_timeout_s=1)
    made = runtime(exchange, model, device=WaitingDevice(model.pending), ranks=limits)
    made.capture()
    for name in ("fails_at", "fails_before"):
        setattr(model, name, 12 * RANK)
        say(failed=time_of(lambda: step(made, 12, 4)))
        setattr(model, name, 0)
        say(after=time_of(lambda: step(made, 12, 4)))
        say(after=time_of(lambda: step(made, 3, 3)))
    end_without_groups(exchange)


def wait_for_rank_1(exchange: TorchExchange) -> None:
    """Let rank 0, which has the store, stay until rank 1 has heard of its error."""
    if RANK == 1:
        exchange.post("heard", "")
    while RANK == 0 and exchange.read("heard") is None:
        time.sleep(0.05)


def end_without_groups(exchange: TorchExchange) -> None:
    wait_for_rank_1(exchange)
    exchange.close(together=False)
    os._exit(0)  # What the device uses is never freed, and with it the group of the model.


def left_in_a_warm_up() -> None:
    """Rank 1 fails in a warm-up before a collective, in which the GPU of rank 0 then waits."""
    device = make_device("cuda", int(os.environ["LOCAL_RANK"]))
    group = dist.new_group(backend="nccl")
    dist.all_reduce(torch.zeros(1, device=device.torch_device), group=group)
    exchange = TorchExchange()
    made = Runtime(
        # The last warm-up answers as a capture does.
        Summing(
            device.torch_device, lambda: torch.cuda.is_current_stream_capturing(), 4 * RANK, group
        ),
        inputs=INPUTS,
        outputs=OutputSpec(OUTPUTS),
        examples=example,
        config=config("FULL", on_capture_error="skip", ranks=RankConfig(step_timeout_s=5)),
        device=device,
        ranks=exchange,
    )
    say(capture=time_of(made.capture))
    say(close=time_of(made.close))
    wait_for_rank_1(exchange)
    exchange.close(together=False)
    device.close()
    say(destroyed=time_of(lambda: dist.destroy_process_group(group)))


def left_in_a_step(overlap: bool, num_steps: int) -> None:
    """Rank 1 takes no part in a graph that both have agreed on, in which rank 0 then waits."""
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    exchange = TorchExchange()
    asked = replace(
        TINY_CONFIG,
        device="cuda",
        overlap=overlap,
        expert_parallel=True,
        runtime=replace(TINY_CONFIG.runtime, ranks=RankConfig(step_timeout_s=5)),
    )
    engine = LLMEngine.with_random_weights(ModelConfig.named("tiny-moe"), asked, ranks=exchange)
    engine.capture()
    engine.generate([1, 2, 3], params)
    say(served=True)
    if RANK == 1:
        engine.runtime._execute = lambda *_: time.sleep(15)  # type: ignore[method-assign]
    engine.add_request([1, 2, 3], params)
    for _ in range(num_steps if RANK == 0 else 1):
        say(step=time_of(engine.step))
    say(close=time_of(engine.close))
    exchange.close(together=False)


def failed_step_on_gpus() -> None:
    """A step of rank 1 fails in a layer, where the GPU of rank 0 waits; then both step again."""
    exchange = TorchExchange()
    runtime = replace(
        TINY_CONFIG.runtime,
        compilation=CompilationConfig(cudagraph_mode="NONE"),  # type: ignore[arg-type]
        ranks=RankConfig(step_timeout_s=5),
    )
    asked = replace(TINY_CONFIG, device="cuda", expert_parallel=True, runtime=runtime)
    engine = LLMEngine.with_random_weights(ModelConfig.named("tiny-moe"), asked, ranks=exchange)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.generate([1, 2, 3], params)
    layer = next(m for m in engine.runtime.runner.fn.modules() if isinstance(m, CausalLM)).layers[1]
    if RANK == 1:
        layer.forward = no_sample  # type: ignore[method-assign]
    engine.add_request([1, 2, 3], params)
    say(failed=time_of(engine.step))
    if RANK == 1:
        del layer.forward
    say(after=time_of(engine.step))
    wait_for_rank_1(exchange)
    say(close=time_of(engine.close))
    exchange.close(together=False)


def most_apart_from_one_process(described: ModelConfig) -> float:
    """How far a layer of shared experts is from all of them in one process, in float64."""
    sizes = (5, 3)
    group = RankGroup(RANK, WORLD, torch.device("cpu"))
    layers = []
    for each in (None, group):
        model = CausalLM(described, torch.float64, group=each)
        random_weights(model, seed=3)
        layers.append(model.layers[0].experts)
    rows = torch.randn(sizes[RANK], described.hidden_size, dtype=torch.float64)
    with ForwardContext(num_tokens_across_ranks=sizes):
        alone, shared = (layer(rows) for layer in layers)  # type: ignore[operator]
    group.close()
    return float(((shared - alone).abs() / alone.abs().clamp(min=1)).max())


def experts() -> None:
    """Ranks that share experts: logits as of one process with all, and its tokens."""
    exchange = TorchExchange()
    described = ModelConfig.named("tiny-moe")
    prompts = [[1, 2, 3], [4] * 20, [5, 6], [7] * 9, [8] * 40]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    own = prompts[:4] if RANK == 0 else prompts[4:]
    with LLMEngine.with_random_weights(described, TINY_CONFIG) as alone:
        expected = [alone.generate(prompt, params) for prompt in own]
    say(largest=most_apart_from_one_process(described))
    for mode in ("NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        compilation = CompilationConfig(
            cudagraph_mode=mode,  # type: ignore[arg-type]
            cudagraph_capture_sizes=None if mode == "NONE" else (1, 2, 4, 16),
        )
        asked = replace(
            TINY_CONFIG,
            expert_parallel=True,
            runtime=replace(TINY_CONFIG.runtime, compilation=compilation),
        )
        with LLMEngine.with_random_weights(described, asked, ranks=exchange) as engine:
            missing = engine.capture().missing
            found = engine.generate(own, params)
            only_first = engine.generate(own if RANK == 0 else [], params)
            say(
                mode=mode,
                same=found == expected and only_first == (expected if RANK == 0 else []),
                missing=len(missing),
                modes=sorted({key[0].name for key in engine.runtime.plan.capture_order}),
            )
    exchange.close()


def micro_batches() -> None:
    """Shared experts with steps of two micro-batches: the tokens of one process."""
    exchange = TorchExchange()
    described = ModelConfig.named("tiny-moe")
    prompts = [[number + 1, 2, 3] for number in range(7)]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    own = prompts[:4] if RANK == 0 else prompts[4:]
    with LLMEngine.with_random_weights(described, TINY_CONFIG) as alone:
        expected = [alone.generate(prompt, params) for prompt in own]
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        asked = replace(
            TINY_CONFIG,
            expert_parallel=True,
            runtime=replace(
                TINY_CONFIG.runtime,
                ubatch=SPLIT,
                compilation=CompilationConfig(
                    cudagraph_mode=mode,  # type: ignore[arg-type]
                    cudagraph_capture_sizes=None if mode == "NONE" else (1, 2, 4, 16),
                ),
            ),
        )
        steps: list[Any] = []
        with LLMEngine.with_random_weights(
            described, asked, ranks=exchange, observer=steps.append
        ) as engine:
            engine.capture()
            found = engine.generate(own, params)
            split = [e for e in steps if isinstance(e, Replayed) and e.num_ubatches > 1]
            say(mode=mode, same=found == expected, split=len(split))
    # On rank 1 alone a step in micro-batches takes longer: the slowest rank decides for all.
    graphrt.runtime.splitting._TIMED_DEVICES = ("simulated",)
    Comparisons.time_replays = lambda *_: [3 + 2 * RANK, 4]  # type: ignore[method-assign]
    ubatch = {**SPLIT, "auto_off": True}
    asked = replace(asked, runtime=replace(asked.runtime, ubatch=ubatch))
    steps = []
    with LLMEngine.with_random_weights(
        described, asked, ranks=exchange, observer=steps.append
    ) as engine:
        engine.capture()
        found = engine.generate(own, params)
        replayed = [e for e in steps if isinstance(e, Replayed)]
        reasons = sorted({e.ubatch_reason.name for e in replayed if e.ubatch_reason is not None})
        split = sum(e.num_ubatches > 1 for e in replayed)
        say(same=found == expected, split=split, reasons=reasons)
    exchange.close()


def largest_difference_of_logits(device: str = "cpu", **changes: Any) -> float:
    """Between a model that the ranks share and all of it, in float64, as a share of the largest."""
    described = replace(ModelConfig.tiny(), **changes)
    group = RankGroup(RANK, WORLD, torch.device(device))
    tokens = torch.arange(7, device=device)
    zeros = torch.zeros_like(tokens)
    inputs = AttentionInputs(
        tokens, zeros, torch.zeros(1, 1, dtype=torch.int64, device=device), 7 + zeros[:1]
    )
    logits = []
    for each in (None, group):
        model = CausalLM(described, torch.float64, device, group=each)
        random_weights(model, seed=3)
        cache = KVCache(
            model.config, num_blocks=2, block_size=16, dtype=torch.float64, device=device
        )
        model.attention = SdpaAttention(cache)
        model.attention.prepare(BatchDescriptor(7), AttentionMetadata([7], [7]))
        logits.append(model(tokens * 70, tokens, inputs, tokens))
    group.close()
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())


def tensor_parallel() -> None:
    """Ranks that share every layer: logits and tokens of one process; unequal requests."""
    exchange = TorchExchange()
    for changes in ({}, {"num_kv_heads": 1, "attention_bias": True, "mlp_bias": True}):
        say(largest=largest_difference_of_logits(**changes))
    prompts = [[1, 2, 3], [4] * 20, [5, 6], [7] * 9, [8, 9] * 20]
    params = [SamplingParams(max_tokens=9, ignore_eos=True)] * 4
    params.append(SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=5))
    with LLMEngine.tiny() as alone:
        expected = alone.generate(prompts, params)
    for name, mode, also in (
        ("eager", "NONE", {}),
        ("full", "FULL_DECODE_ONLY", {}),
        ("piecewise", "FULL_AND_PIECEWISE", {"verify_every": 3}),
        ("drafts", "FULL_DECODE_ONLY", {"num_speculative_tokens": 2}),
        ("unchecked", "FULL_DECODE_ONLY", {"ranks": RankConfig(check_every=5)}),
        ("split", "FULL_AND_PIECEWISE", {"ubatch": SPLIT}),
    ):
        compilation = CompilationConfig(
            cudagraph_mode=mode,  # type: ignore[arg-type]
            cudagraph_capture_sizes=None if mode == "NONE" else (1, 2, 4, 6, 16),
        )
        asked = replace(
            TINY_CONFIG,
            tensor_parallel=True,
            runtime=replace(TINY_CONFIG.runtime, compilation=compilation, **also),
        )
        steps: list[Any] = []
        with LLMEngine.tiny(asked, ranks=exchange, observer=steps.append) as engine:
            missing = engine.capture().missing
            steps.clear()
            num_rounds = exchange.num_rounds
            found = engine.generate(prompts, params)
            say(
                name=name,
                same=found == expected,
                missing=len(missing),
                replayed=sum(isinstance(e, Replayed) for e in steps),
                split=sum(isinstance(e, Replayed) and e.num_ubatches > 1 for e in steps),
                spared=len(steps) > 1.5 * (exchange.num_rounds - num_rounds),
                margin=engine.top2_margin([1, 2, 3]) > 0,
            )
    with LLMEngine.tiny(asked, ranks=exchange) as engine:
        try:
            engine.generate(prompts[: 1 + RANK], params[: 1 + RANK])
        except GraphrtError as error:
            say(error=type(error).__name__, notes=error.__notes__)
    exchange.close()


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except GraphrtError as error:
        return type(error).__name__
    return ""


def apart() -> None:
    """Ranks that share layers, and of which one does something else: no rank gets wrong tokens."""
    exchange = TorchExchange()
    limits = RankConfig(step_timeout_s=2)
    config = replace(
        TINY_CONFIG, tensor_parallel=True, runtime=replace(TINY_CONFIG.runtime, ranks=limits)
    )
    other = replace(config, seed=RANK)
    say(seed=error_of(lambda: LLMEngine.tiny(other, ranks=exchange)))
    small = replace(config, num_blocks=3)
    say(blocks=error_of(lambda: LLMEngine.tiny(small, ranks=exchange)), groups=len(_groups))
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True)
    rarely = replace(limits, check_every=4)
    rare = replace(config, runtime=replace(config.runtime, ranks=rarely))
    with LLMEngine.tiny(rare, ranks=exchange) as engine:
        engine.generate(prompt, params)
        say(later=error_of(lambda: engine.generate([1 + RANK, 2, 3], params)))
    with LLMEngine.tiny(config, ranks=exchange) as engine:
        expected = engine.generate(prompt, params)
        say(tokens=error_of(lambda: engine.generate([1 + RANK, 2, 3], params)))
        for number in range(2):
            engine.add_request(prompt, params, f"{number}")
        engine.step()
        engine.abort(f"{RANK}")
        say(abort=error_of(engine.step))
        engine.abort_all()
        # A step that fails here, when its tokens were sampled there.
        sample = engine._sampler.sample
        if RANK:
            engine._sampler.sample = no_sample  # type: ignore[method-assign]
        engine.add_request(prompt, params)
        with suppress(ValueError):
            engine.step()
        engine._sampler.sample = sample  # type: ignore[method-assign]
        say(step=error_of(engine.step))
        engine.abort_all()
        say(same=engine.generate(prompt, params) == expected)
        # One that fails in a layer, while the others wait there.
        if RANK:
            model = next(m for m in engine.runtime.runner.fn.modules() if isinstance(m, CausalLM))
            model.layers[1].forward = no_sample  # type: ignore[method-assign]
        engine.add_request(prompt, params)
        try:
            say(layer=error_of(engine.step))
        except ValueError:
            say(layer="ValueError")
        exchange.post(f"waited {RANK}", "")
        while exchange.read("waited 0") is None:
            time.sleep(0.05)
    exchange.close()


def no_sample(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("this rank fails")


def many() -> None:
    """Random steps of several ranks, after one capture: no rank is left behind."""
    import random

    exchange = TorchExchange()
    source = random.Random(RANK)
    with runtime(exchange, Meeting(), "FULL_AND_PIECEWISE") as made:
        made.capture()
        modes: dict[str, int] = {}
        for _ in range(500):
            num_tokens = source.choice(
                [0, 1, 2, 3, 4, 5, 7, 8, 12] if source.random() < 0.9 else [0]
            )
            found = step(made, num_tokens, min(num_tokens, 4) or 0)
            key = (
                f"{found.get('mode')} {found.get('tokens') if found.get('mode') != 'NONE' else ''}"
            )
            modes[key] = modes.get(key, 0) + 1
    exchange.close()
    say(modes=modes)


SCENARIOS: dict[str, Callable[[], None]] = {
    "wires": wires,
    "steps": steps,
    "warm-up fails and is skipped": lambda: capture_fails("warmup", "skip"),
    "warm-up fails and is raised": lambda: capture_fails("warmup", "raise"),
    "comparison fails and is skipped": lambda: capture_fails("comparison", "skip"),
    "comparison fails and is raised": lambda: capture_fails("comparison", "raise"),
    "sampled comparison raises": comparison_raises,
    "late": late,
    "dies": dies,
    "stopped": stopped,
    "micro-batch fails": micro_batch_fails,
    "resource sets for pieces": lambda: set_by_resource("PIECEWISE"),
    "resource sets for micro-batches": lambda: set_by_resource("FULL_DECODE_ONLY", ubatch=SPLIT),
    "mismatch": mismatch,
    "interrupted": interrupted,
    "engines": engines,
    "compiled": compiled,
    "experts": experts,
    "micro-batches": micro_batches,
    "tensor parallel": tensor_parallel,
    "apart": apart,
    "many": many,
    "on gpus": on_gpus,
    "engines on gpus": engines_on_gpus,
    "left waiting": left_waiting,
    "left waiting in a step": left_waiting_in_a_step,
    "failed step on gpus": failed_step_on_gpus,
    "left in a warm-up": left_in_a_warm_up,
    "left in a step": lambda: left_in_a_step(overlap=False, num_steps=1),
    "left in a step read later": lambda: left_in_a_step(overlap=True, num_steps=2),
    "left in a step never read": lambda: left_in_a_step(overlap=True, num_steps=1),
}

ENDING = {"late", "dies", "stopped", "on gpus"}
"""Scenarios with a launch and a default group of their own: after most of them a rank is gone."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "serve":
        SimulatedDevice().close()  # It imports what takes seconds.
        serve_ranks()
        RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if sys.argv[1] == "-c":
        if WORLD == 1:  # The code is a command that runs alone, not a rank.
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                del os.environ[name]
        del sys.argv[1]
        code, sys.argv[:] = sys.argv[1], ["-c", *sys.argv[2:]]
        try:
            with frozen_heap():
                exec(code, {"__name__": "__main__"})
        finally:
            gc.freeze()
        sys.exit()
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    names = sys.argv[1].split(",")
    with frozen_heap():
        if names[0] not in ENDING:
            dist.init_process_group("gloo")
        for name in names:
            print(json.dumps({"scenario": name}), flush=True)
            SCENARIOS[name]()
        gc.collect()  # An error that ended an exchange refers to it by its traceback.
        if names[0] not in ENDING:
            dist.destroy_process_group()
            # A group that something still refers to may abort the process when it exits.
            threads = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
            assert not [name for name in threads if "gloo" in name], threads
    gc.freeze()  # Or the end of the process would visit all of torch, which takes two seconds.
