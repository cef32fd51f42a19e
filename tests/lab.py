"""The laboratory of the tests: a library or a whole runtime on one device, and the usual moves."""

from __future__ import annotations

import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any
from warnings import catch_warnings, simplefilter

import torch

from graphrt import (
    BatchDescriptor,
    BufferSet,
    BufferSpec,
    CaptureJob,
    CUDAGraphRunner,
    CUDAGraphWrapper,
    Device,
    Event,
    Example,
    ForwardContext,
    GraphLibrary,
    OutputSpec,
    Padding,
    Program,
    Reason,
    Runtime,
    RuntimeConfig,
    RuntimeMode,
    SimulatedDevice,
    break_point,
    capture_all,
)
from graphrt.events import Captured, RanEager, Replayed
from graphrt.gc_pause import frozen_heap
from graphrt.runner import CaptureReport

FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE
KEY = BatchDescriptor(8)
SIZES = (8, 4, 2)
HF_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
"""A ``config.json`` of transformers, of the smallest Llama."""
GRANULE_BYTES = 2 << 20
"""The driver hands device memory out in no smaller pieces."""


def require_no_loss(device: Device, rounds: Callable[[], None], most_tries: int = 10) -> None:
    """Run ``rounds``, and again if less memory of the GPU is free behind them than before.

    Other processes take of it too; what ``rounds`` themselves leave behind adds up each time.
    """
    lost: list[int] = []
    while not lost or lost[-1] >= GRANULE_BYTES:
        assert len(lost) < most_tries, f"bytes lost: {lost}"
        before = device.memory().free_bytes
        rounds()
        lost.append(before - device.memory().free_bytes)


class Tally:
    """Whole numbers that no capture puts back, and no step notices: they lie in a file without a
    name, of which Python knows a number only. For what a model counts or is told by a test.
    """

    def __init__(self, *numbers: int) -> None:
        self._file, path = tempfile.mkstemp()
        os.unlink(path)
        weakref.finalize(self, os.close, self._file)
        for number in numbers:
            self.append(number)

    def __len__(self) -> int:
        return os.fstat(self._file).st_size // 8

    def __iter__(self) -> Iterator[int]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> int:
        found = os.pread(self._file, 8, index * 8)
        if not found:
            raise IndexError(index)
        return int.from_bytes(found, "little", signed=True)

    def __setitem__(self, index: int, number: int) -> None:
        os.pwrite(self._file, number.to_bytes(8, "little", signed=True), index * 8)

    def append(self, number: int) -> None:
        self[len(self)] = number

    def clear(self) -> None:
        os.truncate(self._file, 0)


class Lab:
    """A library on ``device``, a new simulated one by default, and every event it emitted.

    Inside, gradients are off, and the heap is frozen unless ``frozen`` is false: each scope
    collects, and all that torch has loaded takes a fifth of a second each time.
    """

    def __init__(
        self, device: Device | None = None, *, frozen: bool = True, **library_options: Any
    ) -> None:
        self.device = SimulatedDevice() if device is None else device
        self.events: list[Event] = []
        self.library = GraphLibrary(self.device, observer=self.events.append, **library_options)
        self._frozen = frozen
        self._inside = ExitStack()

    def __enter__(self) -> Lab:
        self._inside.enter_context(frozen_heap() if self._frozen else nullcontext())
        self._inside.enter_context(torch.no_grad())
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.close()
        self.library.close()

    def full(self, shape: tuple[int, ...], value: float) -> torch.Tensor:
        return torch.full(shape, value, device=self.device.torch_device)

    def random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device.torch_device)

    def wrap(
        self, fn: Callable[..., Any], mode: RuntimeMode = FULL, name: str | None = None, **more: Any
    ) -> CUDAGraphWrapper:
        return CUDAGraphWrapper(fn, self.library, mode, name=name, **more)

    @staticmethod
    def job(
        wrapper: CUDAGraphWrapper, *args: Any, key: BatchDescriptor = KEY, **kwargs: Any
    ) -> CaptureJob:
        return CaptureJob(wrapper, wrapper.runtime_mode, key, lambda: (args, kwargs))

    def capture(
        self,
        wrapper: CUDAGraphWrapper,
        *args: Any,
        key: BatchDescriptor = KEY,
        scope: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Program:
        """Capture by a call of the wrapper inside a scope, without a warm-up."""
        with (
            self.library.capture_scope(**(scope or {})) as opened,
            opened.step(wrapper.runtime_mode, key),
        ):
            wrapper(*args, **kwargs)
        return wrapper.concrete_cudagraph_entries[key]

    def capture_all(
        self, *jobs: CaptureJob, gate: Any = None, progress: Any = None, **scope: Any
    ) -> CaptureReport:
        with self.library.capture_scope(**scope) as opened:
            return capture_all(opened.library, jobs, gate=gate, progress=progress)

    def wrap_and_capture(
        self,
        fn: Callable[..., Any],
        *args: Any,
        mode: RuntimeMode = FULL,
        key: BatchDescriptor = KEY,
        scope: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> CUDAGraphWrapper:
        """Warm up and capture ``fn``, which may be a wrapper already."""
        wrapper = fn if isinstance(fn, CUDAGraphWrapper) else self.wrap(fn, mode)
        self.capture_all(self.job(wrapper, *args, key=key, **kwargs), **(scope or {}))
        return wrapper

    @staticmethod
    def step(
        wrapper: Callable[..., Any],
        *args: Any,
        mode: RuntimeMode | None = None,
        key: BatchDescriptor | None = KEY,
        **kwargs: Any,
    ) -> Any:
        """Call the wrapper as an engine would; ``mode``: the wrapper's own."""
        with ForwardContext(wrapper.runtime_mode if mode is None else mode, key):
            return wrapper(*args, **kwargs)

    def buffers(self, *specs: BufferSpec) -> BufferSet:
        """Static buffers for up to 8 tokens."""
        sizes = {"tokens": max(SIZES)}
        buffers = BufferSet(specs, sizes, lambda key: {"tokens": key.num_tokens}, self.device)
        self.library.add_buffers(buffers)
        return buffers

    def capture_sizes(
        self, fn: Callable[..., Any], buffers: BufferSet, sizes: Any = SIZES, **scope: Any
    ) -> CUDAGraphWrapper:
        """Capture ``fn`` over the static buffers of every size."""
        wrapper = self.wrap(fn)
        jobs = [
            CaptureJob(wrapper, FULL, key, lambda key=key: ((), buffers.bind(key).views))
            for key in map(BatchDescriptor, sizes)
        ]
        self.capture_all(*jobs, **scope)
        return wrapper

    def staged(
        self, wrapper: CUDAGraphWrapper, buffers: BufferSet, n: int, **values: torch.Tensor
    ) -> Any:
        """Stage ``n`` rows and step with the smallest size that holds them."""
        key = BatchDescriptor(min(size for size in SIZES if size >= n))
        bound = buffers.bind(key)
        bound.stage(n, values)
        return self.step(wrapper, key=key, **bound.views)


# -- a whole runtime, on the simulated device

WIDTH = 4
MAX_TOKENS, MAX_REQS = 16, 4
POLICIES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


class Toy(torch.nn.Module):
    """Tokens in, one row for each token and one for each request out; one break point inside."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.calls, self.eager_calls = Tally(0), Tally(0)

    def forward(
        self, *, x: torch.Tensor, ids: torch.Tensor, lens: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        self.calls[0] += 1
        hidden = self.middle(torch.tanh(x @ self.weight))
        return {"rows": hidden @ self.weight + ids[:, None], "lens": lens * 2}

    @break_point
    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        self.eager_calls[0] += 1
        return torch.sigmoid(hidden @ self.weight)

    @property
    def num_calls(self) -> int:
        return self.calls[0]

    @property
    def num_eager_calls(self) -> int:
        """Calls of the break point."""
        return self.eager_calls[0]


INPUTS = (
    BufferSpec("x", ("tokens", WIDTH), torch.float32),
    BufferSpec("ids", ("tokens",), torch.int64, Padding.fill(-1)),
    BufferSpec("lens", ("requests",), torch.int64, Padding.zero()),
)
OUTPUTS = {"rows": "tokens", "lens": "requests"}


def values(num_tokens: int, num_reqs: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return {
        "x": torch.randn(num_tokens, WIDTH, generator=generator),
        "ids": torch.randint(0, 50, (num_tokens,), generator=generator),
        "lens": torch.randint(1, 9, (num_reqs,), generator=generator),
    }


def example(sizes: Mapping[str, int], seed: int) -> Example:
    return Example(values(sizes["tokens"], sizes["requests"], 90 + seed))


def random_rows(sizes: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
    """``x`` [n, 4], for ``rows_runner``."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(sizes["n"], 4, generator=generator)}


def nested(rows: torch.Tensor) -> torch.Tensor:
    """A nested tensor without strides, of which torch tells no shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That their interface is to change.
        return torch.nested.nested_tensor([rows, rows])


def rows_runner(
    fn: Callable[..., Any], sizes: tuple[int, ...] | Mapping[Any, Any] = (2,), **options: Any
) -> CUDAGraphRunner:
    """A runner of ``fn(x)`` [n, 4], which returns as many rows; ``sizes`` of n have keys.

    ``options``: of the runner, in place of these.
    """
    return CUDAGraphRunner(
        fn,
        **{
            "inputs": [BufferSpec("x", ("n", 4), torch.float32)],
            "device": "simulated",
            "outputs": OutputSpec({"": "n"}),
            "sizes": sizes if isinstance(sizes, Mapping) else {"n": list(sizes)},
            "examples": random_rows,
            **options,
        },
    )


def config(mode: str = "FULL_AND_PIECEWISE", **asked: Any) -> RuntimeConfig:
    compilation = {"cudagraph_mode": mode, **asked.pop("compilation", {})}
    if mode != "NONE":
        compilation.setdefault("cudagraph_capture_sizes", sorted(SIZES))
    limits = {"max_num_seqs": MAX_REQS, "max_num_batched_tokens": MAX_TOKENS}
    return RuntimeConfig(compilation=compilation, **{**limits, **asked})


class BusyDevice(SimulatedDevice):
    """A device that says whether it ends in time as a test lets it."""

    answers: tuple[bool, ...] = ()

    def ends_within(self, seconds: float) -> bool:
        answer, *self.answers = self.answers or (True,)
        return answer


class RuntimeLab:
    """A runtime of ``model`` on a simulated device, and every event it emitted.

    ``asked``: options of its config. ``frozen``: as of ``Lab``.
    """

    def __init__(
        self,
        mode: str = "FULL_AND_PIECEWISE",
        *,
        model: Callable[..., Any] | None = None,
        device: SimulatedDevice | None = None,
        policy: str = "view",
        outputs: Mapping[str, Any] | OutputSpec = OUTPUTS,
        inputs: Any = INPUTS,
        examples: Any = example,
        asked: dict[str, Any] | None = None,
        frozen: bool = True,
        **options: Any,
    ) -> None:
        self.model = Toy() if model is None else model
        self.device = SimulatedDevice() if device is None else device
        self.events: list[Event] = []
        self._frozen = frozen
        self._inside = ExitStack()
        self.runtime = Runtime(
            self.model,
            inputs=inputs,
            outputs=outputs if isinstance(outputs, OutputSpec) else OutputSpec(outputs, policy),
            examples=examples,
            config=config(mode, **(asked or {})),
            device=self.device,
            observer=self.events.append,
            **options,
        )

    def __enter__(self) -> RuntimeLab:
        self._inside.enter_context(frozen_heap() if self._frozen else nullcontext())
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.close()
        self.runtime.close()

    def step(
        self, num_tokens: int, num_reqs: int, uniform: bool = False, seed: int = 0, **options: Any
    ) -> Any:
        return self.runtime.step(
            values(num_tokens, num_reqs, seed),
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            uniform=uniform,
            **options,
        )

    def eager(self, num_tokens: int, num_reqs: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """The model itself on the batch of the last step, padded as its key says."""
        mode, key, _ = self.runtime.last_decision
        batch = values(num_tokens, num_reqs, seed)
        if mode is not NONE:
            tokens = key.num_tokens - num_tokens
            reqs = (key.num_reqs or min(key.num_tokens, MAX_REQS)) - num_reqs
            batch = {
                "x": torch.cat([batch["x"], torch.zeros(tokens, WIDTH)]),
                "ids": torch.cat([batch["ids"], torch.full((tokens,), -1)]),
                "lens": torch.cat([batch["lens"], torch.zeros(reqs, dtype=torch.int64)]),
            }
        with torch.no_grad():
            padded = self.model(**batch)
        return {"rows": padded["rows"][:num_tokens], "lens": padded["lens"][:num_reqs]}

    def events_of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    @property
    def step_events(self) -> list[Replayed | RanEager]:
        return self.events_of(Replayed, RanEager)

    @property
    def missing(self) -> dict[tuple[RuntimeMode, int], Reason]:
        """Why each key that does not serve is missing, by mode and number of tokens."""
        missing = self.runtime.report().missing
        return {(mode, key.num_tokens): why for (mode, key), why in missing.items()}

    @property
    def captured(self) -> list[tuple[RuntimeMode, int]]:
        """Mode and number of tokens of all that was captured so far, in that order."""
        return [(event.mode, event.key.num_tokens) for event in self.events_of(Captured)]


def assert_equal(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def in_a_child(body: Callable[[], object]) -> str:
    """Run ``body`` in a forked process: its result, or its error, as text."""
    reader, writer = os.pipe()
    with catch_warnings():
        simplefilter("ignore", DeprecationWarning)  # That other threads exist is no worry here.
        child = os.fork()
    if child == 0:
        answer = "nothing happened"
        try:
            answer = str(body())
        except BaseException as error:  # noqa: BLE001  # the parent gets it
            answer = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text
