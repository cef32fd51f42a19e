"""One rank of G11: ``python -m benchmarks.rank_overlap FILE``, as torchrun starts it on two GPUs.

A step of two micro-batches: in each of 16 layers four products, then an exchange of a stated size
with the other GPU. Bytes travel by copy engines, through memory that both GPUs map, because
transport that runs on multiprocessors takes them from the products. All arms are FULL graphs; rank
0 writes the samples of the slower rank to FILE.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphrt import (
    BatchDescriptor,
    CUDAGraphWrapper,
    ForwardContext,
    GraphLibrary,
    RuntimeMode,
    make_device,
    ubatch,
)
from graphrt.config import UBatchConfig
from graphrt.ubatch import PeerCopies, UBatchWrapper

BLOCKS, REPEATS = 9, 5
LAYERS, TOKENS, WIDTH, PRODUCTS = 16, 1024, 4096, 4
RATIOS = (0.1, 0.5, 1.0, 1.5)
"""Of communication to computation. At the first one, micro-batches hardly pay."""
DTYPE = torch.bfloat16
FULL, NONE = RuntimeMode.FULL, RuntimeMode.NONE
WHOLE = BatchDescriptor(2 * TOKENS, 2 * TOKENS, True)
SPLIT = BatchDescriptor(2 * TOKENS, 2 * TOKENS, True, num_ubatches=2)


class NCCL:
    """Exchanges rows with the other GPU through NCCL, as it chooses."""

    def __init__(self, most: int, rank: int, device: torch.device) -> None:
        self.received = torch.empty(most, dtype=DTYPE, device=device)
        self._rank = rank

    def __call__(self, sent: Tensor, layer: int) -> Tensor:
        received, rows = self.received[: len(sent)], [len(sent), len(sent)]
        rows[self._rank] = 0
        dist.all_to_all_single(received, sent, rows, rows)
        return received


class Layers(torch.nn.Module):
    """``exchange`` None: the products alone. ``elements``: sent for a micro-batch of each layer;
    the first row that is sent is computed, and the first row received is computed with."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        weights = torch.randn(PRODUCTS, WIDTH, WIDTH, dtype=DTYPE, device=device)
        self.weights = torch.nn.Parameter(weights.mul_(WIDTH**-0.5), requires_grad=False)
        self.exchange: Callable[[Tensor, int], Tensor] | None = None
        self.elements = 0
        self.computes = True
        self.sent: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        size = self.elements * len(x) // TOKENS
        for layer in range(LAYERS):
            for weight in self.weights if self.computes else ():
                x = x @ weight
            if self.exchange is not None:
                send = self.sent[ubatch.index()][:size]
                send[:WIDTH].copy_(x[0])
                with ubatch.communication("exchange", send):
                    received = self.exchange(send, layer)
                x[0].copy_(received[:WIDTH])
        return x


def agreed(number: float, device: torch.device) -> float:
    """Rank 0's number: ranks that size their messages by clocks of their own would not meet."""
    told = torch.tensor([number], dtype=torch.float64, device=device)
    dist.broadcast(told, 0)
    return float(told.item())


def timed(arms: dict[str, Callable[[], object]], device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each arm on the slower rank, a figure a block."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(-1, BLOCKS):
        for name, arm in list(arms.items())[:: 1 if block % 2 else -1]:
            dist.barrier()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPEATS):
                arm()
            end.record()
            torch.cuda.synchronize()
            if block >= 0:
                samples[name].append(start.elapsed_time(end) / REPEATS)
    told = torch.tensor(list(samples.values()), dtype=torch.float64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return dict(zip(samples, told.tolist(), strict=True))


def require_equal(name: str, found: Tensor, expected: Tensor) -> None:
    """Before anything is timed. Errors: ``RuntimeError`` that says what differs."""
    apart = (found.double() - expected.double()).abs()
    if found.shape != expected.shape or apart.max() > 0 or not apart.isfinite().all():
        rows = (apart > 0).flatten(1).any(1).nonzero().flatten().tolist()
        raise RuntimeError(
            f"{name}: {len(rows)} of {len(apart)} rows differ, first {rows[:8]}, "
            f"by up to {float(apart.max())} of {float(expected.abs().max())}"
        )


def main() -> None:
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    device = make_device("cuda", int(os.environ["LOCAL_RANK"]))
    place = device.torch_device
    dist.init_process_group("nccl", device_id=place)
    library = GraphLibrary(device)
    model, x = Layers(place), torch.randn(2 * TOKENS, WIDTH, dtype=DTYPE, device=place)
    config = UBatchConfig(num_ubatches=2)
    split: list[UBatchWrapper] = []
    num_graphs = 0

    def one_by_one(x: Tensor) -> Tensor:
        return torch.cat([model(part) for part in x.chunk(2)])

    def captured(fn: Any, key: BatchDescriptor) -> Callable[[], Tensor]:
        """The replay of ``fn``, as the model is set up now."""
        nonlocal num_graphs
        num_graphs += 1
        name = f"graph {num_graphs}"
        wrapper: Any
        if key is SPLIT:
            wrapper = UBatchWrapper(fn, library, FULL, config, input_axes={"x": 0}, name=name)
            split.append(wrapper)
        else:
            wrapper = CUDAGraphWrapper(fn, library, FULL, name=name)
        scope_of = library.capture_scope(
            may_overwrite=[*model.sent, nccl.received], resources=peer.workspaces
        )
        with torch.no_grad(), scope_of as scope:
            for mode in (NONE, FULL):
                dist.barrier()
                with scope.step(mode, key):
                    wrapper(x)

        def replay() -> Tensor:
            with torch.no_grad(), ForwardContext(FULL, key):
                found: Tensor = wrapper(x)
            return found

        return replay

    most = 96 * 2**20
    peer, nccl = PeerCopies(2 * most, DTYPE, place, num_ubatches=2), NCCL(2 * most, rank, place)

    def by_copies(sent: Tensor, layer: int) -> Tensor:
        return peer.all_to_all(sent.expand(2, -1), layer)[1 - rank]

    model.sent = [torch.zeros(2 * most, dtype=DTYPE, device=place) for _ in range(2)]
    compute = captured(one_by_one, WHOLE)
    model.exchange, model.computes, model.elements = by_copies, False, 16 * 2**20
    found = timed({"compute": compute, "16 Mi elements": captured(one_by_one, WHOLE)}, place)
    compute_ms, comm_ms = (min(values) for values in found.values())
    per_ratio = agreed(16 * 2**20 * compute_ms / comm_ms, place)
    results = {}
    for ratio in RATIOS:
        model.elements = min(int(per_ratio * ratio) // WIDTH * WIDTH, most)
        model.computes = False
        arms: dict[str, Callable[[], Any]] = {"compute": compute}
        model.exchange = by_copies
        arms["comm"] = captured(one_by_one, WHOLE)
        model.computes = True
        arms["serial"] = captured(one_by_one, WHOLE)
        arms["overlapped"] = captured(model, SPLIT)
        arms["unsplit"] = captured(model, WHOLE)
        model.exchange = nccl
        arms["serial over NCCL"] = captured(one_by_one, WHOLE)
        arms["unsplit over NCCL"] = captured(model, WHOLE)
        expected = {name: arms[name]().clone() for name in ("serial", "unsplit")}
        for name, like in (
            ("overlapped", "serial"),
            ("serial over NCCL", "serial"),
            ("unsplit over NCCL", "unsplit"),
        ):
            require_equal(f"{name}, ratio {ratio}, rank {rank}", arms[name](), expected[like])
        samples = timed(arms, place)
        results[str(ratio)] = {"samples": samples, "mib": 2 * model.elements / 2**20}
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")
    library.close()
    for wrapper in split:
        wrapper.close()
    dist.barrier()
    dist.destroy_process_group()
    device.close()


if __name__ == "__main__":
    main()
