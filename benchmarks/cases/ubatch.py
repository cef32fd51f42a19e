"""C-ubatch: what micro-batches cost on the host, where they run and where nothing is split."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from benchmarks.cases.wrapper import INNER, stub
from benchmarks.harness import Case, Row, difference, ratio, row, time_host
from graphrt import (
    BatchDescriptor,
    CUDAGraphWrapper,
    ForwardContext,
    GraphLibrary,
    RuntimeMode,
    SimulatedDevice,
)
from graphrt.config import UBatchConfig
from graphrt.ubatch import UBatchWrapper, communication
from graphrt.ubatch.baton import Worker, WorkerCrew

ROUNDS = 500
SPLIT = BatchDescriptor(4, 4, True, num_ubatches=2)
WHOLE = BatchDescriptor(4, 4, True)


def ping_pong() -> None:
    """Two threads and two locks, each released by the other: the least that a hand-over can be."""
    locks = [threading.Lock(), threading.Lock()]
    for lock in locks:
        lock.acquire()

    def play(own: threading.Lock, other: threading.Lock) -> None:
        for _ in range(ROUNDS):
            own.acquire()
            other.release()

    threads = [threading.Thread(target=play, args=args) for args in (locks, reversed(locks))]
    for thread in threads:
        thread.start()
    locks[0].release()
    for thread in threads:
        thread.join()


def hand_over() -> Sequence[Row]:
    """Two workers that hand the baton to and fro, over two threads that do so with bare locks."""
    crew = WorkerCrew(2)

    def yields(worker: Worker) -> None:
        for _ in range(ROUNDS):
            worker.hand_over("layer")

    arms = {"hand-over": lambda: crew.run([yields, yields]), "ping-pong": ping_pong}
    samples = time_host(arms, per_call=dict.fromkeys(arms, 2 * ROUNDS), block_ms=100.0)
    crew.close()
    return [
        row(
            "C-ubatch-hand-over",
            ratio(samples, "hand-over", "ping-pong"),
            target=1.3,
            unit="ratio",
            samples=samples,
            timed=f"{2 * ROUNDS} hand-overs between two threads",
        )
    ]


def outside() -> Sequence[Row]:
    """A ``communication`` block where nothing is split, in empty calls."""

    def block() -> None:
        for _ in range(INNER):
            with communication("layer"):
                pass

    def empty() -> None:
        for _ in range(INNER):
            stub()

    def loop() -> None:
        for _ in range(INNER):
            pass

    arms = {"block": block, "empty call": empty, "loop": loop}
    with ForwardContext(RuntimeMode.NONE, WHOLE):
        samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))
    net = {name: difference(samples, name, "loop") for name in ("block", "empty call")}
    return [
        row(
            "C-ubatch-outside",
            ratio(net, "block", "empty call"),
            target=10.0,
            unit="ratio",
            samples=samples,
            timed="a communication block outside a micro-batch, less the loop, over an empty call",
        )
    ]


def split_replay() -> Sequence[Row]:
    """Replay of a split key through ``UBatchWrapper``, less that of its unsplit twin through
    ``CUDAGraphWrapper``; both replay a stub."""
    device = SimulatedDevice()
    library = GraphLibrary(device)
    config = UBatchConfig(num_ubatches=2, decode_token_threshold=2, prefill_token_threshold=2)

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x, full = torch.ones(4), RuntimeMode.FULL
    plain = CUDAGraphWrapper(double, library, full, name="plain")
    split = UBatchWrapper(double, library, full, config, input_axes={"x": 0}, name="split")
    wrappers = {"plain": (plain, WHOLE), "split": (split, SPLIT)}
    for wrapper, key in wrappers.values():
        with torch.no_grad(), library.capture_scope() as scope:
            for mode in (RuntimeMode.NONE, full):
                with scope.step(mode, key):
                    wrapper(x)
        with ForwardContext(full, key):
            assert torch.equal(wrapper(x), double(x)), "a replay equals eager before it is timed"
        wrapper.concrete_cudagraph_entries[key].replay = stub

    def arm(name: str) -> object:
        wrapper, key = wrappers[name]

        def run() -> None:
            with ForwardContext(full, key):
                for _ in range(INNER):
                    wrapper(x)

        return run

    arms = {name: arm(name) for name in wrappers}
    samples = time_host(arms, per_call=dict.fromkeys(arms, INNER))  # type: ignore[arg-type]
    library.close()
    split.close()
    device.close()
    return [
        row(
            "C-wrapper-split",
            [value / 1000 for value in difference(samples, "split", "plain")],
            target=1.0,
            unit="us",
            samples=samples,
            timed="call of UBatchWrapper with a split key, less CUDAGraphWrapper with its twin",
        )
    ]


CASES = [
    Case("C-ubatch-hand-over", "hand-over over a bare ping-pong of two locks", hand_over),
    Case("C-ubatch-outside", "a communication block outside a micro-batch", outside),
    Case("C-wrapper-split", "replay of a split key over that of its unsplit twin", split_replay),
]
