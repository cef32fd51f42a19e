"""Captures of a whole runtime, interrupted at any operation: each lane runs them on its device.

A subclass is collected in a lane whose fixture ``device`` gives the device.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graphrt import (
    BatchDescriptor,
    BufferSpec,
    CompilationConfig,
    Device,
    OutputSpec,
    Padding,
    Runtime,
    RuntimeConfig,
    RuntimeMode,
    break_point,
)
from graphrt.errors import DeviceReplayError
from graphrt.gc_pause import frozen_heap
from lab import require_no_loss

FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE
EAGER = frozenset({FULL, PIECEWISE})
WIDTH = 16
NUM_IDS = 8
SIZES = (2, 4)
MAX_TOKENS, MAX_REQS = 8, 4
BATCHES = ((4, 4, True), (3, 3, True), (1, 1, True), (2, 1, False), (4, 2, False), (3, 1, False))
"""(tokens, requests, uniform): every key, full and padded."""

ROUNDS_TOGETHER = 5
"""Behind so many, no memory of the GPU may be lost."""


class InjectedError(Exception):
    """Raised by the tests alone."""


class Interrupt(TorchDispatchMode):
    """Counts the operations that run while it is entered; raises at one of them, once."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the compiler's guard around each operation: nothing compiles here."""
        return False

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at = at
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not infers_a_shape(types, kwargs):
            number, self.count = self.count, self.count + 1
            if number == self.at:
                raise InjectedError(f"operation {number}: {func}")
        return func(*args, **kwargs)


def infers_a_shape(types: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the simulated recorder asks what an operation would return: nothing runs there."""
    is_meta = kwargs.get("device") == torch.device("meta")
    return is_meta or any(issubclass(kind, FakeTensor) for kind in types)


class Model(torch.nn.Module):
    """Rows for tokens and for requests, two matrix products, and an eager segment between them."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.table = torch.nn.Parameter(torch.randn(NUM_IDS, WIDTH))
        self.to(place)

    def forward(
        self, *, x: torch.Tensor, ids: torch.Tensor, lens: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        hidden = self.mix(torch.relu(self.up(x)))
        return {"rows": self.down(hidden) + self.table[ids], "lens": lens * 2}

    @break_point
    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden) * 2


INPUTS = (
    BufferSpec("x", ("tokens", WIDTH), torch.float32),
    BufferSpec("ids", ("tokens",), torch.int64, Padding.fill(NUM_IDS - 1)),
    BufferSpec("lens", ("requests",), torch.int64, Padding.zero()),
)


class InterruptLab:
    """A model on the lane's device, runtimes over it, and what the process must look like."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = device.torch_device
        self.model = Model(self.place)
        self.stream = device.current_stream()

    def runtime(self) -> Runtime:
        """A runtime with a device of its own."""
        compilation = CompilationConfig(
            cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=SIZES
        )
        return Runtime(
            self.model,
            inputs=INPUTS,
            outputs=OutputSpec({"rows": "tokens", "lens": "requests"}),
            examples=self.example,
            config=RuntimeConfig(
                compilation=compilation, max_num_seqs=MAX_REQS, max_num_batched_tokens=MAX_TOKENS
            ),
            device=self.device.name,
        )

    def example(self, sizes: Mapping[str, int], seed: int) -> dict[str, torch.Tensor]:
        return self.values(sizes["tokens"], sizes["requests"], 100 + seed)

    def values(self, num_tokens: int, num_reqs: int, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
        values = {
            "x": torch.randn(num_tokens, WIDTH, generator=generator),
            "ids": torch.randint(0, NUM_IDS, (num_tokens,), generator=generator),
            "lens": torch.randint(1, 9, (num_reqs,), generator=generator),
        }
        return {name: value.to(self.place) for name, value in values.items()}

    def check_steps(self, runtime: Runtime, *, expects_graphs: bool = False) -> None:
        """Every batch, by whatever graph there is and eagerly, is the model's answer."""
        for seed, (num_tokens, num_reqs, uniform) in enumerate(BATCHES):
            values = self.values(num_tokens, num_reqs, seed)
            sizes = {"num_tokens": num_tokens, "num_reqs": num_reqs, "uniform": uniform}
            for exclude in (frozenset(), EAGER):
                found = runtime.step(values, **sizes, exclude=exclude)
                mode, key, _ = runtime.last_decision
                if expects_graphs and not exclude:
                    assert mode is (FULL if uniform else PIECEWISE)
                self.check_equal(found, self.answer(values, None if mode is NONE else key))

    def answer(
        self, values: Mapping[str, torch.Tensor], key: BatchDescriptor | None
    ) -> dict[str, torch.Tensor]:
        """The model itself, on the batch padded to ``key``: padding may choose other kernels."""
        num_tokens, num_reqs = len(values["x"]), len(values["lens"])
        if key is not None:
            padding = key.num_tokens - num_tokens
            reqs = (key.num_reqs or min(key.num_tokens, MAX_REQS)) - num_reqs
            pad = torch.nn.functional.pad
            values = {
                "x": pad(values["x"], (0, 0, 0, padding)),
                "ids": pad(values["ids"], (0, padding), value=NUM_IDS - 1),
                "lens": pad(values["lens"], (0, reqs)),
            }
        with torch.no_grad():
            answer = self.model(**values)
        return {"rows": answer["rows"][:num_tokens], "lens": answer["lens"][:num_reqs]}

    @staticmethod
    def check_equal(found: Any, expected: Mapping[str, torch.Tensor]) -> None:
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name

    def interrupt(self, runtime: Runtime, at: int) -> None:
        """Capture, fail at one operation, and leave nothing of it but what the runtime keeps."""
        # Not `raises`: it keeps the traceback, and that the tensors of every frame.
        error: BaseException | None = None
        try:
            with Interrupt(at):
                runtime.capture()
        except (InjectedError, DeviceReplayError) as caught:
            error = caught if isinstance(caught, InjectedError) else caught.__cause__
            error = error.with_traceback(None)
        # On the simulated device a replay, too, is made of operations that may fail.
        assert isinstance(error, InjectedError), f"operation {at} came and went"
        self.check_idle(runtime)

    def check_idle(self, runtime: Runtime) -> None:
        """No recording, scope, mode, stream or pause of the collector is left open."""
        assert not runtime.device.is_capturing()
        assert runtime.library.scope is None
        assert not _get_current_dispatch_mode_stack()
        assert not _get_current_function_mode_stack()
        assert self.device.current_stream() is self.stream
        assert gc.isenabled()

    @staticmethod
    def pool_bytes(runtime: Runtime) -> int:
        return sum(generation.pool.bytes() for generation in runtime.library.generations)

    def memory(self) -> tuple[int, int]:
        """Bytes in use and reserved by the allocator, with nothing cached. (0, 0) without CUDA."""
        gc.collect()
        if self.device.name != "cuda":
            return 0, 0
        self.device.trim()
        return torch.cuda.memory_allocated(), self.device.memory().reserved_bytes


def lose_everything(lab: InterruptLab, runtime: Runtime) -> None:
    """A weight moves: no program may serve, so the old ones go before new ones come."""
    weight = lab.model.up.weight
    weight.data = weight.data.clone()
    assert runtime.check_externals().moved == ("up.weight",)


def lose_the_pieces(lab: InterruptLab, runtime: Runtime) -> None:
    """The FULL programs serve on while all of them are captured anew beside them."""
    pieces = [p for p in runtime.library.programs if p.mode is PIECEWISE]
    assert len(pieces) == len(SIZES)
    for program in pieces:
        runtime.library.catalog.invalidate(program)
    assert runtime.check_externals().is_unchanged


Loss = Callable[[InterruptLab, Runtime], None]
LOSSES: tuple[Loss, ...] = (lose_everything, lose_the_pieces)


class RuntimeInterrupts:
    """``num_rounds``, ``num_recaptures``: how often each test is interrupted."""

    num_rounds = 50
    num_recaptures = 15

    @pytest.fixture
    def lab(self, device: Device) -> Iterator[InterruptLab]:
        with frozen_heap():
            yield InterruptLab(device)

    def test_12_first_capture_interrupted_anywhere_recovers(self, lab: InterruptLab) -> None:
        choice = random.Random(12)
        num_operations = [self.first_capture(lab) for _ in range(2)][-1]
        baseline = lab.memory()

        def rounds() -> None:
            for _ in range(ROUNDS_TOGETHER):
                self.first_capture(lab, choice.randrange(num_operations))
                assert lab.memory() == baseline

        for _ in range(self.num_rounds // ROUNDS_TOGETHER):
            require_no_loss(lab.device, rounds)

    def first_capture(self, lab: InterruptLab, at: int | None = None) -> int:
        """The life of one runtime: interrupted at ``at``, captured, closed; returns operations."""
        with lab.runtime() as runtime:
            num_operations = self.capture(lab, runtime, at)
        assert runtime.library.num_graphs == runtime.library.charged_bytes == 0
        assert not runtime.library.generations
        return num_operations

    def test_12_recapture_interrupted_anywhere_recovers(self, lab: InterruptLab) -> None:
        choice = random.Random(21)
        with lab.runtime() as runtime:
            self.capture(lab, runtime)
            num_operations = [self.recapture(lab, runtime, loss) for loss in LOSSES]
            steady, pool_bytes = lab.memory(), lab.pool_bytes(runtime)

            def rounds() -> None:
                for _ in range(ROUNDS_TOGETHER):
                    index = choice.randrange(len(LOSSES))
                    at = choice.randrange(num_operations[index])
                    self.recapture(lab, runtime, LOSSES[index], at)
                # What was captured in two goes may lie less densely; in one go it is as before.
                for loss in LOSSES:
                    self.recapture(lab, runtime, loss)
                assert lab.memory() == steady
                assert lab.pool_bytes(runtime) == pool_bytes

            for _ in range(self.num_recaptures // ROUNDS_TOGETHER):
                require_no_loss(lab.device, rounds)

    def recapture(
        self, lab: InterruptLab, runtime: Runtime, loss: Loss, at: int | None = None
    ) -> int:
        """Lose programs, and get them back; returns operations."""
        loss(lab, runtime)
        num_operations = self.capture(lab, runtime, at)
        assert len(runtime.library.generations) == 1
        return num_operations

    def capture(self, lab: InterruptLab, runtime: Runtime, at: int | None = None) -> int:
        """Capture, after an interrupt at ``at`` if that is given; returns operations."""
        if at is not None:
            lab.interrupt(runtime, at)
            assert len(runtime.report().failures) <= 1
            lab.check_steps(runtime)
        with Interrupt() as operations:
            report = runtime.capture()
        assert not report.missing
        assert not report.failures
        lab.check_steps(runtime, expects_graphs=True)
        lab.check_idle(runtime)
        return operations.count
