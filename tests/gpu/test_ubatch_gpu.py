"""Micro-batches on a GPU: overlapped in a graph, equal to the bit to one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from graphrt import BatchDescriptor, ForwardContext, GraphLibrary, RuntimeMode, ubatch
from graphrt.config import UBatchConfig
from graphrt.device.cuda import CUDADevice
from graphrt.ubatch import UBatchWrapper, make_slices

FULL, NONE = RuntimeMode.FULL, RuntimeMode.NONE
TOKENS, WIDTH, DEPTH = 240, 256, 4


class Layers(torch.nn.Module):
    """Products, then rows to pinned memory and back on the communication stream."""

    def __init__(self, num_ubatches: int) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5
        self.weight = torch.nn.Parameter(weight.to(torch.bfloat16))
        self.hosts = [
            torch.empty(TOKENS, WIDTH // 2, dtype=torch.bfloat16, pin_memory=True)
            for _ in range(num_ubatches)
        ]
        self.runs_before_failure = [-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        host = self.hosts[ubatch.index()]
        for layer in range(DEPTH):
            x = x @ self.weight @ self.weight
            if ubatch.index() == 1 and layer == 1:
                self.runs_before_failure[0] -= 1
                if not self.runs_before_failure[0]:
                    raise KeyError("asked to fail")
            send = x[:, : WIDTH // 2]
            received = torch.empty_like(send)
            with ubatch.communication(f"layer{layer}", send, host):
                host[: len(x)].copy_(send, non_blocking=True)
                received.copy_(host[: len(x)], non_blocking=True)
            x = torch.cat([received, x[:, WIDTH // 2 :]], 1)
        return x


class Split:
    """A wrapper, its library and its key."""

    def __init__(self, num_ubatches: int) -> None:
        self.device = CUDADevice()
        self.library = GraphLibrary(self.device)
        self.key = BatchDescriptor(TOKENS, TOKENS, True, num_ubatches=num_ubatches)
        self.model = Layers(num_ubatches)
        config = UBatchConfig(
            num_ubatches=num_ubatches, decode_token_threshold=8, prefill_token_threshold=8
        )
        self.wrapper = UBatchWrapper(self.model, self.library, FULL, config, input_axes={"x": 0})
        self.x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)

    def capture(self) -> None:
        with self.library.capture_scope(may_overwrite=self.model.hosts) as scope:
            for mode in (NONE, FULL):
                with scope.step(mode, self.key):
                    self.wrapper(self.x)

    def run(self, mode: RuntimeMode, slices=None) -> torch.Tensor:
        with ForwardContext(mode, self.key, ubatch_slices=slices):
            return self.wrapper(self.x)

    def close(self) -> None:
        self.library.close()
        self.wrapper.close()
        self.device.close()


@pytest.fixture(params=[2, 3])
def split(request) -> Iterator[Split]:
    threads = threading.active_count()
    with torch.no_grad():
        split = Split(request.param)
        yield split
    split.close()
    assert threading.active_count() == threads


def test_replays_equal_the_micro_batches_one_after_another(split):
    split.capture()
    number = split.key.num_ubatches
    slices = make_slices([1] * TOKENS, TOKENS, TOKENS, number)
    for seed in range(100):
        torch.manual_seed(seed)
        split.x.normal_()
        replayed = split.run(FULL).clone()
        in_turns = split.run(NONE)
        assert torch.equal(replayed, in_turns), seed
        if seed % 20 == 0:
            assert torch.equal(split.run(NONE, slices), in_turns), seed


def test_failure_in_one_micro_batch_leaves_a_wrapper_that_captures(split):
    split.model.runs_before_failure[0] = 2  # After the warm-up: in the recording.
    with pytest.raises(KeyError) as raised:
        split.capture()
    assert "in micro-batch 1" in raised.value.__notes__[0]
    split.library.forget_failures()
    split.capture()
    assert torch.equal(split.run(FULL).clone(), split.run(NONE))
