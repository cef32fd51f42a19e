"""Random engines and traffic: the tokens of each request must be those of an engine without graphs.

In float64 another number of rows changes no choice of a token. In float32 it may: where the first
token that differs was chosen by less than ``TIE``, the request counts as a tie and is compared no
further; requests in float32 are greedy, so that this margin is known.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch

from graphrt import CUDAGraphMode, Reason, RuntimeConfig, RuntimeMode
from graphrt.errors import ConfigError, MissError
from graphrt_llm import EngineConfig, FinishReason, LLMEngine, SamplingParams
from graphrt_llm.attention.sdpa import SdpaAttention
from graphrt_llm.errors import EngineConfigError, UnknownRequestError
from graphrt_llm.inputs import Examples
from graphrt_llm.models import CausalLM, ModelConfig

from .common import (
    Case,
    Counts,
    Problem,
    Watch,
    attempt,
    decide_tokens,
    num_fired,
    require,
    require_no_leaks,
    touch,
)

VOCABULARY = 48
TIE = 1e-4
MOST_STEPS = 600


def make_case(seed: int) -> Case:
    """One random engine and its traffic."""
    rng = random.Random(f"engine {seed}")
    max_num_seqs = rng.randint(1, 6)
    max_tokens = max_num_seqs + rng.choice([0, rng.randint(0, 8), rng.randint(8, 24)])
    mode = rng.choice([*CUDAGraphMode.__members__, *["FULL_AND_PIECEWISE"] * 3, "FULL"])
    sizes = sorted(rng.sample(range(1, max_tokens + 1), min(max_tokens, rng.randint(1, 5))))
    block_size = rng.choice([1, 2, 4, 8])
    max_model_len = rng.randint(24, 64)
    longest = -(-max_model_len // block_size)
    enough = 1 + max_num_seqs * longest
    capture = rng.choice(["none", *["all", "parts", "by_priority"] * 3])
    others = random.Random(f"drafts and adapters {seed}")
    num_drafts = others.choice([0, 0, 1, 2, 4])
    max_tokens += max_num_seqs * num_drafts
    return {
        "seed": seed,
        "family": rng.choice(["LlamaForCausalLM", "Qwen3ForCausalLM"]),
        "dtype": rng.choice(["float64", "float64", "float32"]),
        "num_layers": rng.choice([1, 1, 2]),
        "mode": mode,
        "sizes": None if mode == "NONE" or rng.random() < 0.15 else sizes,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_tokens,
        "block_size": block_size,
        # Often too few for all requests, which are then preempted.
        "num_blocks": rng.choice([enough, rng.randint(longest + 1, enough)]),
        "max_model_len": max_model_len,
        "overlap": rng.random() < 0.5 and not num_drafts,
        "num_drafts": num_drafts,
        "max_loras": others.choice([0, 0, 1, 3]),
        "lora_capture": others.choice(["each", "powers_of_two", "max_only"]),
        "capture": capture,
        "on_miss": "strict" if capture == "all" and rng.random() < 0.15 else "eager",
        "on_capture_error": rng.choice(["raise", "skip"]),
        "verify_first_replay": rng.random() < 0.9,
        "verify_every": rng.choice([None, None, 1, 3, 7]),
        "stale_check": rng.choice(["identity", "pointer", "off"]),
        "warmups": rng.choice([1, 1, 0, 2]),
        "max_graphs": rng.randint(1, 12) if rng.random() < 0.15 else None,
        "max_graph_bytes": rng.choice([1 << 14, 1 << 17]) if rng.random() < 0.1 else None,
        "num_requests": rng.randint(2, 16),
        "rounds": rng.randint(1, 3),
        "aborts": rng.choice([0.0, 0.0, 0.05, 0.2]),
        "faults": rng.choice([0.0, 0.0, 0.05, 0.3]),
        "interrupts": rng.random() < 0.5,
        "weights": rng.choice(
            ["kept", "copied", "replaced", "replaced", "replaced and recaptured"]
        ),
        "watch": rng.choice(["spread", "spread", "always", "off"]),
    }


def simplify(case: Case) -> Iterator[Case]:
    """The same case with one field simpler."""
    simple: Case = {
        "family": "LlamaForCausalLM",
        "dtype": "float64",
        "num_layers": 1,
        "num_drafts": 0,
        "max_loras": 0,
        "overlap": False,
        "capture": "all",
        "on_miss": "eager",
        "on_capture_error": "skip",
        "verify_first_replay": True,
        "verify_every": None,
        "stale_check": "identity",
        "warmups": 1,
        "max_graphs": None,
        "max_graph_bytes": None,
        "rounds": 1,
        "aborts": 0.0,
        "faults": 0.0,
        "interrupts": False,
        "weights": "kept",
        "watch": "spread",
        "block_size": 8,
        "num_blocks": 65,
    }
    for name, value in simple.items():
        if case[name] != value:
            yield {**case, name: value}
    for name in ("num_requests", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if case[name] > 1:
            yield {**case, name: case[name] // 2}
            yield {**case, name: case[name] - 1}
    if case["sizes"] and len(case["sizes"]) > 1:
        yield from ({**case, "sizes": [s for s in case["sizes"] if s != n]} for n in case["sizes"])


def _model(case: Case) -> ModelConfig:
    return ModelConfig(
        architecture=case["family"],
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_layers=case["num_layers"],
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )


def _engine(case: Case, observer: Any) -> LLMEngine:
    config = RuntimeConfig(
        compilation={
            "cudagraph_mode": case["mode"],
            "cudagraph_capture_sizes": case["sizes"],
            "cudagraph_num_of_warmups": case["warmups"],
        },
        num_speculative_tokens=case["num_drafts"],
        **{
            name: case[name]
            for name in (
                "max_num_seqs",
                "max_num_batched_tokens",
                "max_loras",
                "lora_capture",
                "on_miss",
                "on_capture_error",
                "verify_first_replay",
                "verify_every",
                "stale_check",
                "watch",
                "max_graphs",
                "max_graph_bytes",
            )
        },
    )
    num_blocks = case["num_blocks"]
    while True:
        try:
            engine = LLMEngine.with_random_weights(
                _model(case),
                EngineConfig(
                    runtime=config,
                    max_model_len=case["max_model_len"],
                    block_size=case["block_size"],
                    num_blocks=num_blocks,
                    dtype=case["dtype"],
                    overlap=case["overlap"],
                    capture="by_priority" if case["capture"] == "by_priority" else "before_serving",
                    device="simulated",
                    seed=case["seed"],
                ),
                observer=observer,
            )
            for number in range(case["max_loras"] and case["max_loras"] + 1):
                engine.add_lora(str(number), seed=number)
            return engine
        except EngineConfigError:
            num_blocks += 4  # The largest batch must fit.
            if num_blocks > 2000:
                raise


def _reference(case: Case) -> LLMEngine:
    """The same weights, no graph, no overlap, and room for every request."""
    plain = {
        "mode": "NONE",
        "sizes": None,
        "num_drafts": 0,
        "num_blocks": 4 * 64 + 1,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "overlap": False,
        "capture": "none",
        "on_miss": "eager",
        "verify_every": None,
        "watch": "off",
        "max_graphs": None,
        "max_graph_bytes": None,
    }
    return _engine({**case, **plain}, None)


Request = tuple[list[int], SamplingParams, str | None]


def _requests(case: Case, rng: random.Random, most_tokens: int) -> list[Request]:
    made: list[Request] = []
    others = random.Random(f"adapters of {case['seed']}")
    names = [None, *map(str, range(case["max_loras"] and case["max_loras"] + 1))]
    for _ in range(case["num_requests"]):
        length = rng.choice([1, rng.randint(1, 8), rng.randint(1, most_tokens - 1)])
        length = min(length, most_tokens - 1)
        num_tokens = rng.randint(1, max(1, min(20, most_tokens - length)))
        sampled: Case = {}
        if case["dtype"] == "float64" and rng.random() < 0.5:
            sampled = {
                "temperature": rng.choice([0.7, 1.0, 1.5]),
                "top_k": rng.choice([None, 5, 20]),
                "top_p": rng.choice([1.0, 0.9]),
                "seed": rng.randrange(1 << 32),
            }
        stop = tuple(rng.sample(range(VOCABULARY), 2)) if rng.random() < 0.2 else ()
        params = SamplingParams(max_tokens=num_tokens, stop_token_ids=stop, **sampled)
        prompt = rng.choices(range(VOCABULARY), k=length)
        made.append((prompt, params, others.choice(names)))
    return made


@contextmanager
def touching() -> Iterator[None]:
    """Let the engine's user code pass the points where faults go off."""
    patched: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, point: str) -> None:
        before = getattr(owner, name)

        @wraps(before)
        def passing(*args: Any, **kwargs: Any) -> Any:
            touch(point)
            return before(*args, **kwargs)

        patched.append((owner, name, before))
        setattr(owner, name, passing)

    patch(CausalLM, "forward", "forward")
    patch(Examples, "__call__", "examples")
    patch(SdpaAttention, "forward", "eager_segment")
    try:
        yield
    finally:
        for owner, name, before in patched:
            setattr(owner, name, before)


class _Run:
    """One engine that serves the traffic of a case."""

    def __init__(self, case: Case, counts: Counts, say: Callable[[str], None]) -> None:
        self.case, self.counts, self.say = case, counts, say
        self.rng = random.Random(f"engine traffic {case['seed']}")
        self.num_serving = 0
        budget = case["max_graphs"] is not None or case["max_graph_bytes"] is not None
        self.watch = Watch((), has_budget=budget)
        self.engine = _engine(case, self.watch.observe)
        runtime = self.engine.runtime
        self.watch.status = dict.fromkeys(runtime.plan.capture_order, Reason.NOT_CAPTURED_YET)
        self.policy = runtime.plan.cudagraph_mode
        capture_next = runtime.capture_next

        def watched(*args: Any, **options: Any) -> int:
            fired, error = num_fired(), True
            try:
                remaining = capture_next(*args, **options)
                error = False
                return remaining
            finally:
                self.settle(None, num_fired() > fired or error)

        runtime.capture_next = watched  # type: ignore[method-assign]

    def settle(self, asked: Any, fired: bool) -> None:
        self.watch.captured(self.engine.runtime.report().missing, asked, fired=fired)

    def attempt(self, act: Callable[[], Any]) -> Any:
        device = self.engine.runtime.device
        return attempt(act, self.case, self.rng, device, self.watch, self.say, self.counts)

    def capture(self) -> None:
        if self.case["capture"] in ("none", "by_priority"):
            return
        runtime = self.engine.runtime
        keys = list(runtime.plan.capture_order)
        asked = keys
        if self.case["capture"] == "parts":
            asked = self.rng.sample(keys, self.rng.randint(0, len(keys)))
        fired = num_fired()
        if self.case["capture"] == "all":
            done = self.attempt(self.engine.capture)
        else:
            done = self.attempt(lambda: runtime.capture(keys=asked))
        disturbed = num_fired() > fired or done is None
        self.settle(asked, disturbed)

    def serve(self, requests: list[Request]) -> tuple[list[list[int]], list[Any]]:
        engine, rng, case = self.engine, self.rng, self.case
        tokens: list[list[int]] = [[] for _ in requests]
        reasons: list[Any] = [None for _ in requests]
        waiting = list(enumerate(requests))
        names = {}

        def note(outputs: Any) -> None:
            for output in outputs:
                index = names[output.request_id]
                require(reasons[index] is None, "wrong", f"request {index}: a token after its end")
                tokens[index] += output.new_token_ids
                reasons[index] = output.finish_reason

        for number in range(MOST_STEPS):
            while waiting and rng.random() < 0.5:
                index, (prompt, params, lora) = waiting.pop(0)
                name = engine.add_request(prompt, params, f"{self.num_serving} {index}", lora)
                names[name] = index
            if names and rng.random() < case["aborts"]:
                with suppress(UnknownRequestError):  # It has ended.
                    note([engine.abort(rng.choice(list(names)))])
            if not engine.has_unfinished():
                if not waiting:
                    return tokens, reasons
                continue
            self.watch.steps.clear()
            result = self.attempt(engine.step)
            self.watch.raise_problem()
            self.counts.engine_steps += 1
            if result is None:
                self.watch.hear(lambda: engine.runtime.report().missing)
                continue
            note(result.outputs)
            if result.decision is not None:
                self.explain(result)
            self.say(f"step {number}: {result}")
        raise Problem("wrong", f"requests do not finish within {MOST_STEPS} steps")

    def explain(self, result: Any) -> None:
        event = self.watch.steps[-1]
        batch = (result.num_tokens, result.uniform)
        loras = event.num_active_loras
        self.watch.explain_step(
            result.decision,
            lambda status: decide_tokens(status, self.policy, *batch, num_loras=loras),
            lambda: self.engine.runtime.report().missing,
            self.counts,
        )
        require(
            (event.reason, event.num_tokens, event.num_reqs)
            == (result.decision.reason, result.num_tokens, result.num_reqs),
            "unexplained",
            lambda: f"the event {event} of a step decided {result.decision}",
        )

    def change_weights(self, reference: LLMEngine) -> None:
        how = self.case["weights"]
        if how == "kept":
            return
        model = self.engine.runtime.runner.fn.model
        path = self.rng.choice([name for name, _ in model.named_parameters()])
        for engine in (self.engine, reference):
            module, _, name = path.rpartition(".")
            owner = engine.runtime.runner.fn.model.get_submodule(module)
            before = getattr(owner, name)
            with torch.no_grad():
                if how == "copied" or engine is reference:
                    before.mul_(1.25).add_(0.01)
                else:
                    after = before.clone(memory_format=torch.preserve_format).mul_(1.25).add_(0.01)
                    if self.case["watch"] != "spread" and self.rng.random() < 0.5:
                        before.data = after  # No hook sees it.
                    else:
                        setattr(owner, name, torch.nn.Parameter(after, requires_grad=False))
        if how != "copied":
            self.watch.replaced()
            if self.case["watch"] == "off":
                self.engine.runtime.check_externals()
                self.watch.noticed(self.engine.runtime.report().missing)
            if how == "replaced and recaptured" and self.case["capture"] != "none":
                self.recapture()

    def recapture(self) -> None:
        fired = num_fired()
        done = self.attempt(self.engine.capture)
        disturbed = num_fired() > fired or done is None
        self.settle(list(self.watch.status), disturbed)

    def compare(self, reference: LLMEngine, requests: list[Request], served: Any) -> None:
        prompts, params, loras = (list(each) for each in zip(*requests, strict=True))
        expected = reference.generate(prompts, params, loras)
        for index, ((prompt, _, lora), got, reason, want) in enumerate(
            zip(requests, *served, expected, strict=True)
        ):
            if reason is FinishReason.ABORTED:
                want = want[: len(got)]
            if got == want:
                continue
            at = next(
                (i for i, pair in enumerate(zip(got, want, strict=False)) if len({*pair}) > 1), None
            )
            is_rounded = at is not None and self.case["dtype"] == "float32"
            if is_rounded and reference.top2_margin([*prompt, *want[:at]], lora) < TIE:
                self.counts.ties += 1
                continue
            raise Problem("wrong", f"request {index}: tokens {got}, without graphs {want}")


def run_case(case: Case, counts: Counts, say: Callable[[str], None] = lambda text: None) -> None:
    """Serve one case. Raises ``Problem``."""
    fired, threads = num_fired(), threading.active_count()
    try:
        run = _Run(case, counts, say)
    except ConfigError as error:
        say(f"refused: {error}")
        counts.refused += 1
        return
    engine, device = run.engine, run.engine.runtime.device
    try:
        with _reference(case) as reference:
            run.capture()
            for number in range(case["rounds"]):
                run.num_serving = number
                requests = _requests(case, run.rng, min(engine.max_request_tokens, 60))
                try:
                    served = run.serve(requests)
                except MissError as error:
                    _check_strict(run, error)
                    break
                run.compare(reference, requests, served)
                allocator = engine.scheduler.input_batch.allocator
                require(
                    allocator.num_free == allocator.num_usable,
                    "leaks",
                    lambda a=allocator: f"{a.num_usable - a.num_free} blocks of the cache",
                )
                if number == 0:
                    run.change_weights(reference)
    finally:
        engine.close()
        counts.faults += num_fired() - fired
    del run, engine, reference
    require_no_leaks(device, threads)


def _check_strict(run: _Run, error: MissError) -> None:
    """In strict mode the error names the reason that an eager step would have had."""
    require(run.case["on_miss"] == "strict", "unexplained", str(error))
    batch = run.engine.scheduler.schedule()
    assert batch is not None, "a step has just refused it"
    run.watch.explain_step(
        (RuntimeMode.NONE, None, error.reason),
        lambda status: decide_tokens(
            status,
            run.policy,
            batch.num_tokens,
            batch.uniform,
            num_loras=len(batch.active_loras),
        ),
        lambda: run.engine.runtime.report().missing,
        Counts(),
    )
    run.engine.abort_all()
