"""C-step: a whole ``Runtime.step`` over a stub replay, against the same parts called by hand.

And what looking for replaced weights adds to a step, and comparing each step with eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.harness import Case, Row, Samples, difference, medians, ratio, row, time_host
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
from graphrt.device.torch_modes import set_grad_enabled
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


NUM_LAYERS = 28


@break_point
def attend(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class Layer(nn.Module):
    """As many modules and parameters as a decoder layer has, each of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(7))
        self.norms = nn.ModuleList(nn.RMSNorm(1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (*self.linears, *self.norms):
            x = part(x)
        return x


class Model(nn.Module):
    """What a step looks after: 308 parameters, and the modules that hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.requires_grad_(False)

    def forward(
        self, *, input_ids: torch.Tensor, seq_lens: torch.Tensor, **_: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x = input_ids[:, None].float()
        for layer in self.layers:
            x = layer(x)
        return {"tokens": attend(x) * 3, "requests": seq_lens + 1}


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


def runtime_of(policy: str, plan: Plan, **options: Any) -> Runtime:
    """A captured runtime over a ``Model``; ``options`` are those of a ``RuntimeConfig``."""
    runtime = Runtime(
        Model(),
        inputs=INPUTS,
        outputs=OutputSpec({"tokens": "tokens", "requests": "requests"}, "view"),
        examples=examples,
        config=RuntimeConfig(
            compilation=CompilationConfig(cudagraph_mode=policy, cudagraph_capture_sizes=SIZES),
            max_num_seqs=max(SIZES),
            max_num_batched_tokens=max(SIZES),
            **options,
        ),
        device="simulated",
        resources=[plan],
    )
    runtime.capture()
    return runtime


def steps_of(
    runtime: Runtime, policy: str, values: Mapping[str, torch.Tensor], count: int
) -> Callable[[], Any]:
    """``count`` steps in a row, which graphs of ``policy`` serve; compared with eager first."""

    def steps() -> Any:
        for _ in range(count):
            outputs = runtime.step(
                values,
                num_tokens=TOKENS,
                num_reqs=REQUESTS,
                uniform=True,
                exclude=frozenset(),
                step_info=None,
            )
        return outputs

    expected = runtime.runner.fn(**values)
    found = steps()
    assert all(torch.equal(found[name], expected[name]) for name in expected), "equal first"
    assert runtime.last_decision is not None
    assert runtime.last_decision.mode is RuntimeMode[policy]
    return steps


def without_replay(runtime: Runtime) -> Any:
    """The graph of the last step. Its replay does nothing from now on: the step is what counts."""
    mode, key, _ = runtime.last_decision or (None, None, None)
    assert mode is not None
    assert key is not None
    ready = runtime.runner._ready[mode][id(key)]
    ready.program.replay = stub  # type: ignore[method-assign]  # what no step can do
    return ready


def rows_of(name: str, samples: Samples, num_watched: int, **config: Any) -> list[Row]:
    """The step over its parts, and the step itself, which is compared between commits."""
    times = {arm: [figure / 1000 for figure in figures] for arm, figures in samples.items()}
    by_arm = {f"{arm} us": median for arm, median in medians(times).items()}
    told = {"num_watched": num_watched, **by_arm, **config}
    return [
        row(
            name,
            ratio(samples, "step", "by hand"),
            target=1.15,
            unit="ratio",
            samples=samples,
            **told,
        ),
        row(f"{name}-us", times["step"], target=None, unit="us", samples={}, **told),
    ]


def step(policy: str) -> Sequence[Row]:
    plan = Plan()
    values = examples({"tokens": TOKENS, "requests": REQUESTS}, 3)
    with runtime_of(policy, plan) as runtime:
        whole = steps_of(runtime, policy, values, INNER)
        ready = without_replay(runtime)
        dispatch, stage = runtime.dispatcher.dispatch, ready.bound.stage_without_grad
        look, prepare = runtime.runner._look, plan.prepare
        program, unpad = ready.program, ready.unpad
        is_full = policy == "FULL"

        def by_hand() -> None:
            for _ in range(INNER):
                decision = dispatch(TOKENS, True)
                sizes = {"tokens": TOKENS, "requests": REQUESTS}
                look()
                if is_full:
                    set_grad_enabled(False)
                    stage(sizes, values)
                    prepare(decision.descriptor, None)
                    program.replay()
                    unpad(sizes)
                    set_grad_enabled(True)
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

        def looking() -> None:
            for _ in range(INNER):
                look()

        arms = {"step": whole, "by hand": by_hand, "staging": staging, "watch": looking}
        samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))
        num_watched = runtime.runner.num_watched
    return rows_of(
        f"C-step-{policy.lower()}",
        samples,
        num_watched,
        inputs=len(INPUTS),
        timed="Runtime.step over a stub replay / dispatch, look, stage, prepare, replay, unpad by"
        " hand",
    )


def watching() -> Sequence[Row]:
    """What looking after a model's weights adds to a step: ``watch``'s modes against "off"."""
    values = examples({"tokens": TOKENS, "requests": REQUESTS}, 3)
    with ExitStack() as stack:
        arms, num_watched = {}, 0
        for watch in ("off", "spread", "always"):
            runtime = stack.enter_context(runtime_of("FULL", Plan(), watch=watch))
            arms[watch] = steps_of(runtime, "FULL", values, INNER)
            without_replay(runtime)
            num_watched = runtime.runner.num_watched
        samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))

    def added(metric: str, watch: str, target: float | None) -> Row:
        return row(
            metric,
            [ns / 1000 for ns in difference(samples, watch, "off")],
            target=target,
            unit="us",
            samples={arm: samples[arm] for arm in (watch, "off")},
            parameters=NUM_LAYERS * 11,
            num_watched=num_watched,
            timed=f"Runtime.step over a stub replay, watch={watch!r} less watch='off'",
        )

    return [
        added("C-step-watch", "spread", 0.6),
        added("C-step-watch-always", "always", None),
    ]


def verifying() -> Row:
    """A step that is compared with eager, over one that is not; both replay."""
    values = examples({"tokens": TOKENS, "requests": REQUESTS}, 3)
    count = 2  # The batch as it is, and padded, are compared in turns.
    with ExitStack() as stack:
        arms = {
            name: steps_of(
                stack.enter_context(runtime_of("FULL", Plan(), verify_every=every)),
                "FULL",
                values,
                count,
            )
            for name, every in {"verify_every=1": 1, "step": None}.items()
        }
        samples = time_host(arms, per_call=dict.fromkeys(arms, count))
    return row(
        "C-step-verify-every",
        ratio(samples, "verify_every=1", "step"),
        target=None,
        unit="ratio",
        samples=samples,
        timed="Runtime.step on the simulated device, verify_every=1 over none, replays included",
        **{f"{arm} us": median / 1000 for arm, median in medians(samples).items()},
    )


def engine_step() -> Sequence[Row]:
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
        ready = without_replay(runtime)
        assert ready.mode is RuntimeMode.FULL
        dispatch, stage, unpad = (
            runtime.dispatcher.dispatch,
            ready.bound.stage_without_grad,
            ready.unpad,
        )
        look, num_watched = runtime.runner._look, runtime.runner.num_watched
        [resource] = runtime.runner._executor.options.prepared
        program = ready.program
        num_tokens, num_reqs = options.pop("num_tokens"), options.pop("num_reqs")
        uniform, exclude = options.pop("uniform"), options.pop("exclude")
        step_info, query_lens = options.pop("step_info"), options.pop("query_lens")
        loras, unsplit = options.pop("num_active_loras"), options.pop("unsplit")
        assert not options, f"the engine passes {options.keys()} too"

        def whole() -> None:
            for _ in range(INNER):
                # Named as the engine names them: to unpack a dict costs more, and is no part of it.
                whole_step(
                    values,
                    num_tokens=num_tokens,
                    num_reqs=num_reqs,
                    uniform=uniform,
                    num_active_loras=loras,
                    exclude=exclude,
                    step_info=step_info,
                    query_lens=query_lens,
                    unsplit=unsplit,
                )

        def by_hand() -> None:
            for _ in range(INNER):
                decision = dispatch(num_tokens, uniform, loras, exclude)
                sizes = {"tokens": num_tokens, "requests": num_reqs}
                look()
                set_grad_enabled(False)
                stage(sizes, values)
                resource.prepare(decision.descriptor, step_info)
                program.replay()
                unpad(sizes)
                set_grad_enabled(True)

        def looking() -> None:
            for _ in range(INNER):
                look()

        arms = {"step": whole, "by hand": by_hand, "watch": looking}
        samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))
    return rows_of(
        "C-step-engine",
        samples,
        num_watched,
        timed="as C-step, with the arguments and the attention resource of the engine's step",
    )


def steps() -> Sequence[Row]:
    return [*step("FULL"), *step("PIECEWISE"), *engine_step(), *watching(), verifying()]


CASES = [Case("C-step", "a step of the runtime over its parts; watching; comparing", steps)]
