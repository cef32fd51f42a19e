"""Micro-batches on one GPU: a split graph that communicates by copies to pinned memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.lab import Lab, Tally

from graphrt import (
    BatchDescriptor,
    BufferSpec,
    ForwardContext,
    OutputSpec,
    Runtime,
    RuntimeMode,
    ubatch,
)
from graphrt.config import UBatchConfig
from graphrt.device.cuda import CUDADevice
from graphrt.ubatch import UBatchWrapper, make_slices

FULL, NONE = RuntimeMode.FULL, RuntimeMode.NONE
TOKENS, WIDTH, SENT = 48, 256, 128


class PinnedCopies(torch.nn.Module):
    """In each layer two products, then half of every row to the host and back."""

    def __init__(self, num_ubatches: int) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, device="cuda") * WIDTH**-0.5
        self.weight = torch.nn.Parameter(weight)
        # One for each micro-batch, because several are under way at the same time.
        self.host = [torch.empty(TOKENS, SENT, pin_memory=True) for _ in range(num_ubatches)]
        # How many runs of micro-batch 1 until one fails.
        self.fails_in = Tally(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(4):
            x = x @ self.weight @ self.weight
            if ubatch.index() == 1 and layer == 1 and self.fails_in[0]:
                self.fails_in[0] -= 1
                if not self.fails_in[0]:
                    raise KeyError("asked to fail")
            send = x[:, :SENT]
            host, received = self.host[ubatch.index()][: len(x)], torch.empty_like(send)
            with ubatch.communication(f"layer{layer}", send):
                host.copy_(send, non_blocking=True)
                received.copy_(host, non_blocking=True)
            x = torch.cat([received, x[:, SENT:]], 1)
        return x


@pytest.fixture
def lab(device: CUDADevice) -> Iterator[Lab]:
    threads = threading.active_count()
    with Lab(device) as lab:
        yield lab
    assert threading.active_count() == threads


def run(wrapper: Any, mode: RuntimeMode, key: BatchDescriptor, x: Any, slices: Any = None) -> Any:
    with ForwardContext(mode, key, ubatch_slices=slices):
        return wrapper(x)


def capture(lab: Lab, wrapper: Any, key: BatchDescriptor, x: torch.Tensor) -> None:
    with lab.library.capture_scope(may_overwrite=wrapper.host) as scope:
        for mode in (NONE, FULL):
            with scope.step(mode, key):
                wrapper(x)


def wrapped(lab: Lab, num_ubatches: int) -> tuple[UBatchWrapper, BatchDescriptor, torch.Tensor]:
    config = UBatchConfig(
        num_ubatches=num_ubatches,
        decode_token_threshold=num_ubatches,
        prefill_token_threshold=num_ubatches,
    )
    model = PinnedCopies(num_ubatches)
    wrapper = UBatchWrapper(model, lab.library, FULL, config, input_axes={"x": 0})
    key = BatchDescriptor(TOKENS, TOKENS, True, num_ubatches=num_ubatches)
    return wrapper, key, torch.randn(TOKENS, WIDTH, device="cuda")


@pytest.mark.parametrize("num_ubatches", [2, 3])
def test_split_graph_equals_slices_one_by_one(lab: Lab, num_ubatches: int) -> None:
    wrapper, key, x = wrapped(lab, num_ubatches)
    capture(lab, wrapper, key, x)
    slices = make_slices([1] * TOKENS, TOKENS, TOKENS, num_ubatches)
    for number in range(1000):
        x.copy_(torch.randn(TOKENS, WIDTH, device="cuda"))
        replayed = run(wrapper, FULL, key, x).clone()
        one_by_one = run(wrapper, NONE, key, x)
        assert torch.equal(replayed, one_by_one), number
        if number % 100 == 0:
            assert torch.equal(run(wrapper, NONE, key, x, slices), one_by_one)
    lab.library.close()
    wrapper.close()


def test_failed_capture_of_a_micro_batch_leaves_a_usable_device(lab: Lab) -> None:
    wrapper, key, x = wrapped(lab, 2)
    wrapper.fails_in[0] = 2  # The warm-up passes, the capture fails.
    with pytest.raises(KeyError) as caught:
        capture(lab, wrapper, key, x)
    assert "in micro-batch 1 of 2" in caught.value.__notes__[0]
    assert not lab.device.is_capturing()
    assert not wrapper.concrete_cudagraph_entries
    lab.library.forget_failures()
    capture(lab, wrapper, key, x)
    assert torch.equal(run(wrapper, FULL, key, x).clone(), run(wrapper, NONE, key, x))
    lab.library.close()
    wrapper.close()


def test_pinned_memory_is_compared_once_steps_have_written_it(device: CUDADevice) -> None:
    model = PinnedCopies(1)
    runtime = Runtime(
        model,
        inputs=[BufferSpec("x", ("tokens", WIDTH), torch.float32)],
        outputs=OutputSpec({"": "tokens"}),
        device=device,
        mode="FULL",
        sizes=[TOKENS],
        max_num_seqs=TOKENS,
        may_overwrite=model.host,
    )
    runtime.capture(like={"x": torch.randn(TOKENS, WIDTH, device="cuda")})
    assert not runtime.report().missing
    runtime.close()


def test_workspaces_of_threads_are_taken_before_the_recording(lab: Lab) -> None:
    """A second capture of the same key, into a new generation, takes no more of the pool."""
    wrapper, key, x = wrapped(lab, 2)
    sizes = []
    for _ in range(2):
        with lab.library.capture_scope(generation="new", may_overwrite=wrapper.host) as scope:
            with scope.step(NONE, key):
                wrapper(x)
            with scope.step(FULL, key):
                wrapper(x)
        sizes.append(wrapper.concrete_cudagraph_entries[key].memory.pool_growth_bytes)
    assert sizes[0] == sizes[1]
    lab.library.close()
    wrapper.close()
