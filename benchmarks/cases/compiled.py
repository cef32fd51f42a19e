"""G10: HF decoders captured as they are, against ``torch.compile(mode="reduce-overhead")``.

One process, one set of weights: the HF module with a static cache is compiled, and captured by a
``Runtime``: with break points at its attention (``G10-SHAPE``), and at level 3 by Inductor's pieces
(``G10-SHAPE-level3``): whole, and cut at attention; with Inductor's tuning in ``G10-SHAPE-tuned``,
twice in the process and once in another one.
Greedy decoding; every step ends in an argmax that feeds the next. Starts are cold where nothing
else is said: kernels are loaded before, no compiler finds anything in a cache.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.baselines import require_equal
from benchmarks.harness import (
    CannotRunError,
    Case,
    Row,
    Samples,
    cuda_device,
    medians,
    ratio,
    row,
    time_wall,
)
from benchmarks.models import BLOCK, DecodeStep, decode_key
from graphrt import (
    BufferSpec,
    CompilationConfig,
    CUDAGraphWrapper,
    Device,
    ForwardContext,
    GraphLibrary,
    OutputSpec,
    Padding,
    Runtime,
    RuntimeConfig,
    RuntimeMode,
    TensorStateGuard,
    break_at,
)
from graphrt_llm.models import ModelConfig

SIZES = (1, 2, 4)
STEPS = 64
"""Of a block; caches are set back to the prompt's end before each."""
PROMPT = 128
CACHE = 256
TOLERANCE = 0.05
"""Of logits, ||difference|| / ||eager||: compiled code rounds to bf16 at other places."""

ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
TUNED_TARGETS = {"qwen3-0.6b": 0.65, "llama-1b": 0.82}
NUM_TOKENS = 48
"""Compared with eager ones."""
TIE = 0.25
"""Logits of two tokens that are no further apart than this are a tie: sums in another order may
change the greedy choice."""

SHAPES = {
    "qwen3-0.6b": ModelConfig.named("qwen3-0.6b"),
    # The published shape of Llama-3.2-1B but for its rope scaling, which moves no bytes.
    "llama-1b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        tie_word_embeddings=True,
    ),
}


def hf_model(shape: ModelConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The HF module of this shape with random weights, SDPA attention."""
    try:
        import transformers
    except ImportError as error:
        raise CannotRunError(f"it needs transformers: {error}") from error
    family = shape.architecture.removesuffix("ForCausalLM")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_word_embeddings,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, shape.architecture)(config)
    return model.to(dtype).eval().requires_grad_(False)


class Decoder:
    """The HF module over static caches, one for each batch size, at the end of a random prompt.

    Caches are passed by position here because the argument's name, ``past_key_values``, became
    ``cache`` in transformers 5.24.
    """

    def __init__(
        self, shape: ModelConfig, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        from transformers import StaticCache

        self.model = hf_model(shape, dtype, device)
        self.caches: dict[int, Any] = {}
        generator = torch.Generator(device).manual_seed(0)
        for size in sizes:
            cache = StaticCache(config=self.model.config, max_cache_len=CACHE)
            shared = {"batch_size": size, "dtype": dtype, "device": device}
            cache.early_initialization(
                num_heads=shape.num_kv_heads, head_dim=shape.head_dim, **shared
            )
            for layer in cache.layers:
                layer.keys[:, :, :PROMPT].normal_(generator=generator)
                layer.values[:, :, :PROMPT].normal_(generator=generator)
            self.caches[size] = cache
        self.counters = [
            layer.cumulative_length for c in self.caches.values() for layer in c.layers
        ]
        self.rewind()

    def rewind(self, position: int = PROMPT) -> None:
        """Back to the end of the prompt, or to another position."""
        for counter in self.counters:
            counter.fill_(position)

    @property
    def memory(self) -> list[torch.Tensor]:
        """Keys and values of all caches."""
        layers = [layer for cache in self.caches.values() for layer in cache.layers]
        return [tensor for layer in layers for tensor in (layer.keys, layer.values)]

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [requests, vocab_size] of one more token a request, ``ids`` [requests]."""
        cache = self.caches[ids.shape[0]]
        return self.model(ids[:, None], None, None, cache).logits[:, -1]


def attention_class(model: Any) -> type:
    return type(model.model.layers[0].self_attn)


@contextmanager
def captured(
    decoder: Decoder, sizes: Sequence[int], vocab_size: int, device: Device
) -> Iterator[Runtime]:
    """A runtime over the decoder, every key captured: FULL, and PIECEWISE cut at attention."""

    def model(ids: torch.Tensor) -> torch.Tensor:
        return decoder(ids)

    def example(sizes: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab_size, (sizes["tokens"],), generator=generator)
        return {"ids": ids.to(device.torch_device)}

    runtime = Runtime(
        model,
        inputs=[BufferSpec("ids", ("tokens",), torch.int64, Padding.zero())],
        outputs=OutputSpec({"": "tokens"}, "view"),
        examples=example,
        config=RuntimeConfig(
            compilation=CompilationConfig(cudagraph_capture_sizes=tuple(sizes)),
            max_num_seqs=max(sizes),
            max_num_batched_tokens=max(sizes),
        ),
        device=device,
        state=TensorStateGuard(decoder.counters),
        may_overwrite=decoder.memory,
    )
    with runtime:
        # Closed again after the capture: Dynamo refuses to trace a break point.
        with break_at(decoder.model, types=(attention_class(decoder.model),)):
            runtime.capture()
        yield runtime


class OneCache(torch.nn.Module):
    """The HF module over its cache for one request, as level 3 traces it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.model = decoder.model
        self.cache = decoder.caches[1]

    def forward(self, *, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids[:, None], None, None, self.cache).logits
        return logits[:, -1]


@contextmanager
def level_3(decoder: Decoder, vocab_size: int, device: Device, **options: Any) -> Iterator[Runtime]:
    """A runtime over the decoder for one request, compiled and captured FULL.

    ``options``: of ``CompilationConfig``.
    """

    def example(sizes: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab_size, (1,), generator=generator)
        return {"ids": ids.to(device.torch_device)}

    asked = {"splitting_ops": (), "backend": "inductor", **options}
    with Runtime(
        OneCache(decoder),
        inputs=[BufferSpec("ids", (1,), torch.int64)],
        outputs=OutputSpec({}, "view"),
        examples=example,
        config=RuntimeConfig(
            compilation=CompilationConfig(
                level=3,
                cudagraph_mode="FULL",
                cudagraph_capture_sizes=(1,),
                **asked,
            ),
            max_num_seqs=1,
            max_num_batched_tokens=1,
        ),
        device=device,
        state=TensorStateGuard(decoder.counters),
        may_overwrite=decoder.memory,
    ) as runtime:
        runtime.capture()
        yield runtime


def greedy(
    forward: Callable[[torch.Tensor], torch.Tensor], num_reqs: int, device: torch.device
) -> Callable[[], None]:
    """A step that decodes: its token feeds the next one."""
    ids = torch.ones(num_reqs, dtype=torch.int64, device=device)

    def step() -> None:
        torch.argmax(forward(ids), -1, out=ids)

    return step


def through(runtime: Runtime) -> Callable[[torch.Tensor], torch.Tensor]:
    """Logits by ``Runtime.step``, for a decode batch of as many requests as tokens."""

    def forward(ids: torch.Tensor) -> torch.Tensor:
        size = ids.shape[0]
        logits: torch.Tensor = runtime.step(
            {"ids": ids}, num_tokens=size, num_reqs=size, uniform=True
        )
        return logits

    return forward


@contextmanager
def engine_model(
    shape: ModelConfig, weights: Any, dtype: torch.dtype, device: Device, first: torch.Tensor
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """graphrt_llm's decoder with the same weights, captured FULL for one request.

    ``first``: the HF module's logits of token 1 over an empty cache, to compare with. When timed,
    the position stays in the middle of the cache, which is as long as the HF module's.
    """
    step = DecodeStep(shape, max_reqs=1, context=CACHE, dtype=dtype, device=device.torch_device)
    state = weights.state_dict()
    for tensor in step.model.checkpoint_tensors():
        tensor.destination.copy_(state[tensor.name])
    step.prepare(1)
    inputs = step.inputs(1)
    inputs["temperature"].fill_(1)
    key = decode_key(1)
    with GraphLibrary(device) as library:
        wrapper = CUDAGraphWrapper(step, library, RuntimeMode.FULL, name="engine model")
        with library.capture_scope(may_overwrite=[step.cache.tensor]) as scope:
            for mode in (RuntimeMode.NONE, RuntimeMode.FULL):
                with scope.step(mode, key):
                    wrapper(**inputs)

        def forward(ids: torch.Tensor) -> torch.Tensor:
            inputs["ids"].copy_(ids)
            with ForwardContext(RuntimeMode.FULL, key):
                logits: torch.Tensor = wrapper(**inputs)
            return logits

        ids = torch.ones(1, dtype=torch.int64, device=device.torch_device)
        timed = {name: tensor.clone() for name, tensor in inputs.items()}
        for name, value in (("positions", 0), ("slot_mapping", BLOCK), ("seq_lens", 1)):
            inputs[name].fill_(value)
        found = forward(ids).clone()
        require_equal(found, step(**inputs), "G10 engine model")
        require_close(found, first, "G10 engine model against HF")
        for name, tensor in timed.items():
            inputs[name].copy_(tensor)
        yield forward


def compiled_forward(decoder: Decoder) -> Callable[[torch.Tensor], torch.Tensor]:
    """The HF module under ``torch.compile``, in one graph: nothing is left to Python inside."""
    model = torch.compile(decoder.model.forward, mode="reduce-overhead", fullgraph=True)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        cache = decoder.caches[ids.shape[0]]
        logits: torch.Tensor = model(ids[:, None], None, None, cache).logits[:, -1]
        return logits

    return forward


@contextmanager
def no_compiler_cache() -> Iterator[None]:
    """A cold start is one that finds nothing compiled on disk."""
    import torch._inductor.config

    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def started_compiled(
    decoder: Decoder, ids: torch.Tensor, device: Device
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, float]:
    """The baseline's forward, what its first replay returned, and the seconds until then."""
    decoder.rewind()
    device.synchronize()
    started = perf_counter()
    with no_compiler_cache():
        forward = compiled_forward(decoder)
        # The third call is the first that replays: compile, warm up, record.
        for _ in range(3):
            decoder.rewind()
            compiled = forward(ids).clone()
        device.synchronize()
    return forward, compiled, perf_counter() - started


def cudagraph_skips() -> int:
    """How often Inductor has given up on a graph so far, in this process."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def require_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> float:
    """||found - expected|| / ||expected||, which NaN never passes."""
    difference = (found.double() - expected.double()).norm() / expected.double().norm()
    if not float(difference) <= TOLERANCE:
        raise AssertionError(f"{what}: logits differ by {float(difference):.3g} of their norm")
    return float(difference)


def captures_when_shapes_vary(runtime: Runtime, decoder: Decoder, num_steps: int) -> int:
    """Captures and eager steps while batches of every size come and go. There should be none."""
    before = runtime.library.num_cudagraph_captured
    forward = through(runtime)
    sizes = random.Random(0)
    num_eager = 0
    place = decoder.counters[0].device
    for number in range(num_steps):
        if number % STEPS == 0:
            decoder.rewind()
        size = sizes.randint(1, max(decoder.caches))
        forward(torch.ones(size, dtype=torch.int64, device=place))
        assert runtime.last_decision is not None, "a step leaves its decision"
        num_eager += runtime.last_decision.reason.is_miss
    return runtime.library.num_cudagraph_captured - before + num_eager


def measure(name: str, shape: ModelConfig, device: Device) -> list[Row]:
    place, dtype = device.torch_device, torch.bfloat16
    decoder = Decoder(shape, SIZES, dtype, place)
    for size in SIZES:  # Kernels and libraries are loaded before any start is timed.
        greedy(decoder, size, place)()
    ids = torch.ones(1, dtype=torch.int64, device=place)
    decoder.rewind(0)
    first = decoder(ids).clone()
    decoder.rewind()
    expected = decoder(ids).clone()

    decoder.rewind()
    device.synchronize()
    started = perf_counter()
    with captured(decoder, SIZES, shape.vocab_size, device) as runtime:
        found = through(runtime)(ids).clone()
        device.synchronize()
        our_start = perf_counter() - started
        # The eager run above and this replay had the same cache up to the prompt's end.
        require_equal(found, expected, f"G10 {name}, captured")

        skips_before = cudagraph_skips()
        forward, compiled, their_start = started_compiled(decoder, ids, device)
        # Evidence that the baseline is what it should be: its graphs were not skipped.
        num_skips = cudagraph_skips() - skips_before
        error = require_close(compiled, expected, f"G10 {name}, compiled")

        with engine_model(shape, decoder.model, dtype, device, first) as engine:
            arms = {
                "compiled": greedy(forward, 1, place),
                "captured": greedy(through(runtime), 1, place),
                "engine model": greedy(engine, 1, place),
            }
            samples = time_wall(
                arms,
                repeats=STEPS,
                warmup=STEPS // 2,
                synchronize=device.synchronize,
                before=decoder.rewind,
            )
        slow = time_wall(
            {"eager": greedy(decoder, 1, place)},
            blocks=3,
            repeats=STEPS // 4,
            synchronize=device.synchronize,
            before=decoder.rewind,
        )
        recaptured = captures_when_shapes_vary(runtime, decoder, 200)
        num_graphs = runtime.library.num_cudagraph_captured
    starts: Samples = {"captured": [our_start], "compiled": [their_start]}
    shared = {
        "shape": name,
        "layers": shape.num_layers,
        "cache": CACHE,
        "prompt": PROMPT,
        "requests": 1,
        "medians_ms": medians(samples) | medians(slow),
        "compiled_logits_differ_by": error,
        "compiled_cudagraph_skips": num_skips,
    }
    steps = [
        row(
            f"G10-{name}-{label}",
            ratio(samples, arm, "compiled"),
            target=0.75,
            unit="ratio",
            samples=samples,
            timed=f"ms a greedy step over a block of {STEPS}, host and GPU",
            **shared,
        )
        for label, arm in (("step", "captured"), ("engine", "engine model"))
    ]
    return [
        *steps,
        row(
            f"G10-{name}-cold",
            ratio(starts, "captured", "compiled"),
            target=0.2,
            unit="ratio",
            samples=starts,
            timed="s from the loaded module to the first graphed token; ours: every key, verified",
            num_graphs=num_graphs,
            sizes=SIZES,
            **shared,
        ),
        row(
            f"G10-{name}-recaptures",
            [float(recaptured)],
            target=0.0,
            unit="captures",
            samples={"captured": [float(recaptured)]},
            timed="captures and eager steps in 200 steps of 1 to 4 requests",
            **shared,
        ),
    ]


def tokens_of(
    forward: Callable[[torch.Tensor], torch.Tensor], decoder: Decoder
) -> list[tuple[int, torch.Tensor]]:
    """The first tokens of greedy decoding, each with its logits [vocab_size]."""
    decoder.rewind()
    ids, found = torch.ones_like(decoder.counters[0], dtype=torch.int64).view(1), []
    for _ in range(NUM_TOKENS):
        logits = forward(ids)[0].float()
        found.append((int(logits.argmax()), logits))
        ids = logits.argmax().view(1)
    return found


def require_tokens(
    found: Sequence[tuple[int, Any]], eager: Sequence[tuple[int, torch.Tensor]], what: str
) -> int:
    """How many tokens are those of eager decoding. The first other one must be a tie."""
    for at, ((token, _), (expected, logits)) in enumerate(zip(found, eager, strict=True)):
        if token != expected:
            margin = float(logits[expected] - logits[token])
            if not margin <= TIE:
                raise AssertionError(
                    f"{what}: token {at} is {token}, {margin:.3g} below {expected}"
                )
            return at
    return len(found)


START_TUNED = """
import sys, torch
from pathlib import Path
from benchmarks.cases.compiled import (
    ATTENTION, SHAPES, TUNED, Decoder, cuda_device, greedy, level_3, perf_counter, through
)
torch.set_num_threads(1)  # As the process that filled the cache: it is part of each key.
shape = SHAPES[sys.argv[1]]
with cuda_device() as device, torch.no_grad():
    decoder = Decoder(shape, (1,), torch.bfloat16, device.torch_device)
    greedy(decoder, 1, device.torch_device)()
    decoder.rewind()
    device.synchronize()
    began = perf_counter()
    options = {"splitting_ops": (ATTENTION,), "inductor_compile_config": TUNED}
    with level_3(
        decoder, shape.vocab_size, device, cache_dir=Path(sys.argv[2]), **options
    ) as runtime:
        through(runtime)(torch.ones(1, dtype=torch.int64, device=device.torch_device))
        device.synchronize()
        seconds = perf_counter() - began
        found = runtime.report().compile
print(seconds, len(found.pieces), found.num_compiles, found.num_loaded)
"""


def tuned_start_of_a_process(name: str, cache: Path) -> tuple[float, list[int]]:
    """Seconds of a start in a process of its own, imports of the compiler included, and its
    pieces, compiles and loads."""
    program = [sys.executable, "-W", "ignore", "-c", START_TUNED, name, str(cache)]
    told = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return float(told[-4]), [int(number) for number in told[-3:]]


def measure_level_3(
    name: str, shape: ModelConfig, device: Device, folder: Path, *, is_tuned: bool
) -> list[Row]:
    place, dtype = device.torch_device, torch.bfloat16
    decoder = Decoder(shape, (1,), dtype, place)
    greedy(decoder, 1, place)()
    ids = torch.ones(1, dtype=torch.int64, device=place)
    decoder.rewind()
    expected = decoder(ids).clone()
    eager = tokens_of(decoder, decoder)
    cut = {"splitting_ops": (ATTENTION,)}
    forms: dict[str, dict[str, Any]] = {"level 3": {}, "level 3, cut": cut}
    if is_tuned:
        tuned = {**cut, "inductor_compile_config": TUNED}
        forms = {"level 3, tuned": tuned, "level 3, tuned again": tuned}
    starts: Samples = {}
    reports, num_equal, arms = {}, {}, {}
    with ExitStack() as stack:
        for label, options in forms.items():
            decoder.rewind()
            device.synchronize()
            started = perf_counter()
            cache = folder / ("tuned" if is_tuned else str(len(starts)))
            pieces = level_3(decoder, shape.vocab_size, device, cache_dir=cache, **options)
            runtime = stack.enter_context(pieces)
            found = through(runtime)(ids)
            device.synchronize()
            starts[label] = [perf_counter() - started]
            require_close(found, expected, f"G10 {name}, {label}")
            report = runtime.report().compile
            assert report is not None, "level 3 compiles"
            reports[label] = [len(report.pieces), report.num_compiles, report.num_loaded]
            num_equal[label] = require_tokens(tokens_of(through(runtime), decoder), eager, label)
            arms[label] = greedy(through(runtime), 1, place)
        if is_tuned:
            label = "level 3, tuned, another process"
            seconds, reports[label] = tuned_start_of_a_process(name, folder / "tuned")
            starts[label] = [seconds]
        # Behind them, because torch.compile compiles again when hooks of modules come and go.
        forward, compiled, their_start = started_compiled(decoder, ids, device)
        starts["compiled"] = [their_start]
        require_close(compiled, expected, f"G10 {name}, compiled")
        num_equal["compiled"] = require_tokens(tokens_of(forward, decoder), eager, "compiled")
        arms["compiled"] = greedy(forward, 1, place)
        samples = time_wall(
            arms,
            repeats=STEPS,
            warmup=STEPS // 2,
            synchronize=device.synchronize,
            before=decoder.rewind,
        )
    return [
        row(
            f"G10-{name}-level3{suffix}",
            ratio(samples, arm, "compiled"),
            target=target,
            unit="ratio",
            samples=samples,
            timed=f"ms a greedy step over a block of {STEPS}, host and GPU",
            shape=name,
            layers=shape.num_layers,
            cache=CACHE,
            prompt=PROMPT,
            requests=1,
            medians_ms=medians(samples),
            starts_s=starts,
            pieces_compiled_loaded=reports,
            tokens_as_eager=num_equal,
        )
        for suffix, arm, target in (
            ("", "level 3", 1.0),
            ("-cut", "level 3, cut", 1.0),
            ("-tuned", "level 3, tuned again", TUNED_TARGETS[name]),
        )
        if arm in forms
    ]


def against_compile(name: str) -> Callable[[], Sequence[Row]]:
    def run() -> Sequence[Row]:
        with cuda_device() as device, torch.no_grad():
            try:
                return measure(name, SHAPES[name], device)
            finally:
                torch.compiler.reset()  # Its graphs too, before the next case captures.

    return run


def level_3_against_compile(name: str, *, is_tuned: bool) -> Callable[[], Sequence[Row]]:
    def run() -> Sequence[Row]:
        with cuda_device() as device, torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            try:
                place = Path(folder)
                return measure_level_3(name, SHAPES[name], device, place, is_tuned=is_tuned)
            finally:
                torch.compiler.reset()

    return run


CASES = [
    case
    for name in SHAPES
    for case in (
        Case(
            f"G10-{name}",
            f"HF {name} decode over torch.compile reduce-overhead",
            against_compile(name),
        ),
        Case(
            f"G10-{name}-level3",
            f"HF {name} decode compiled at level 3 over torch.compile reduce-overhead",
            level_3_against_compile(name, is_tuned=False),
        ),
        Case(
            f"G10-{name}-tuned",
            f"HF {name} decode tuned at level 3 over torch.compile reduce-overhead",
            level_3_against_compile(name, is_tuned=True),
        ),
    )
]
