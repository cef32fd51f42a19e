"""C-step: a whole ``Runtime.step`` over a stub replay, against the same parts called by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from benchmarks.harness import Case, Row, ratio, row, time_host
from graphrt import (
    BufferSpec,
    CompilationConfig,
    ForwardContext,
    OutputSpec,
    Padding,
    Runtime,
    RuntimeConfig,
    RuntimeMode,
    break_point,
)
from graphrt_llm import LLMEngine, SamplingParams
from graphrt_llm.assembly import TINY_CONFIG

INNER = 200
SIZES = (4, 8)
TOKENS, REQUESTS = 3, 3
INT64 = torch.int64
# Names, axes and dtypes of the reference engine's inputs.
INPUTS = (
    BufferSpec("input_ids", ("tokens",), INT64, Padding.zero()),
    BufferSpec("positions", ("tokens",), INT64, Padding.zero()),
    BufferSpec("slot_mapping", ("tokens",), INT64, Padding.fill(-1)),
    BufferSpec("token_requests", ("tokens",), INT64, Padding.zero()),
    BufferSpec("block_tables", ("requests", 16), INT64, Padding.zero()),
    BufferSpec("seq_lens", ("requests",), INT64, Padding.zero()),
    BufferSpec("logits_indices", ("requests",), INT64, Padding.zero()),
)


@break_point
def attend(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def model(*, input_ids: torch.Tensor, seq_lens: torch.Tensor, **_: torch.Tensor) -> Any:
    return {"tokens": attend(input_ids * 2) * 3, "requests": seq_lens + 1}


def examples(sizes: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
    made = {}
    for spec in INPUTS:
        shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
        generator = torch.Generator().manual_seed(seed + 1)
        made[spec.name] = torch.randint(0, 9, shape, generator=generator)
    return made


class Plan:
    """A resource as light as one can be."""

    def reserve(self, max_key: Any) -> None: ...

    def prepare(self, key: Any, step_info: Any) -> None: ...

    def freeze(self) -> None: ...


def stub() -> None:
    return None


def step(policy: str) -> Row:
    plan = Plan()
    with Runtime(
        model,
        inputs=INPUTS,
        outputs=OutputSpec({"tokens": "tokens", "requests": "requests"}),
        examples=examples,
        config=RuntimeConfig(
            compilation=CompilationConfig(cudagraph_mode=policy, cudagraph_capture_sizes=SIZES),
            max_num_seqs=max(SIZES),
            max_num_batched_tokens=max(SIZES),
        ),
        device="simulated",
        resources=[plan],
    ) as runtime:
        runtime.capture()
        values = examples({"tokens": TOKENS, "requests": REQUESTS}, 3)

        def whole() -> Any:
            for _ in range(INNER):
                outputs = runtime.step(
                    values,
                    num_tokens=TOKENS,
                    num_reqs=REQUESTS,
                    uniform=True,
                    exclude=frozenset(),
                    step_info=None,
                )
            return outputs

        expected = model(**values)
        found = whole()
        assert all(torch.equal(found[name], expected[name]) for name in expected), "equal first"
        mode, key, _ = runtime.last_decision or (None, None, None)
        assert mode is RuntimeMode[policy]
        assert key is not None
        ready = runtime.runner._ready[mode][id(key)]
        # The step is what is timed: the replay itself does nothing, in both arms.
        ready.program.replay = stub
        dispatch, stage = runtime.dispatcher.dispatch, ready.bound.stage
        prepare, program, unpad = plan.prepare, ready.program, ready.unpad
        is_full = mode is RuntimeMode.FULL

        def by_hand() -> None:
            for _ in range(INNER):
                decision = dispatch(TOKENS, True)
                sizes = {"tokens": TOKENS, "requests": REQUESTS}
                if is_full:
                    stage(sizes, values)
                    prepare(decision.descriptor, None)
                    program.replay()
                    unpad(sizes)
                    continue
                with torch.no_grad():
                    stage(sizes, values)
                    prepare(decision.descriptor, None)
                    with ForwardContext(decision.mode, decision.descriptor):
                        program.replay()
                    unpad(sizes)

        def staging() -> None:
            for _ in range(INNER):
                stage({"tokens": TOKENS, "requests": REQUESTS}, values)

        arms = {"step": whole, "by hand": by_hand, "staging": staging}
        samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))
    return row(
        f"C-step-{policy.lower()}",
        ratio(samples, "step", "by hand"),
        target=1.15,
        unit="ratio",
        samples=samples,
        inputs=len(INPUTS),
        timed="Runtime.step over a stub replay / dispatch, stage, prepare, replay, unpad by hand",
    )


def engine_step() -> Row:
    """A decode step with the arguments that the reference engine passes, its attention prepared."""
    with LLMEngine.tiny(replace(TINY_CONFIG, device="simulated")) as engine:
        engine.capture()
        calls: list[tuple[Any, dict[str, Any]]] = []
        runtime = engine.runtime
        whole_step = runtime.step

        def note(values: Any, **options: Any) -> Any:
            calls.append((values, options))
            return whole_step(values, **options)

        with mock.patch.object(runtime, "step", note):
            engine.generate([[5, 6, 7]] * 3, SamplingParams(max_tokens=3))
        values, options = calls[-1]
        whole_step(values, **options)
        mode, key, _ = runtime.last_decision or (None, None, None)
        assert mode is RuntimeMode.FULL
        assert key is not None
        ready = runtime.runner._ready[mode][id(key)]
        ready.program.replay = stub
        dispatch, stage, unpad = runtime.dispatcher.dispatch, ready.bound.stage, ready.unpad
        [resource] = runtime.runner._options.prepared
        program = ready.program
        num_tokens, num_reqs = options["num_tokens"], options["num_reqs"]

        def whole() -> None:
            for _ in range(INNER):
                whole_step(values, **options)

        def by_hand() -> None:
            for _ in range(INNER):
                decision = dispatch(num_tokens, options["uniform"], 0, options["exclude"])
                sizes = {"tokens": num_tokens, "requests": num_reqs}
                stage(sizes, values)
                resource.prepare(decision.descriptor, options["step_info"])
                program.replay()
                unpad(sizes)

        arms = {"step": whole, "by hand": by_hand}
        samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))
    return row(
        "C-step-engine",
        ratio(samples, "step", "by hand"),
        target=1.15,
        unit="ratio",
        samples=samples,
        timed="as C-step, with the arguments and the attention resource of the engine's step",
    )


def steps() -> Sequence[Row]:
    return [step("FULL"), step("PIECEWISE"), engine_step()]


CASES = [Case("C-step", "a step of the runtime over its parts called by hand", steps)]
