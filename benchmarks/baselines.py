"""What users write without graphrt: captures by hand. The baselines of the G cases.

On the simulated device the same functions record through the device protocol, so that the
correctness of every case can be tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from graphrt import Device


class HandCaptured(NamedTuple):
    """A graph captured by hand, and what ``fn`` returned: overwritten by each replay."""

    replay: Callable[[], None]
    outputs: Any
    reset: Callable[[], None]


def hand_capture(
    fn: Callable[[], Any], device: Device, *, pool: Any = None, warmups: int = 3
) -> HandCaptured:
    """Capture ``fn`` as PyTorch's documentation does: side stream, warm-ups, ``cuda.graph``.

    ``pool``: a handle to share; None makes the graph a pool of its own.
    """
    if device.name != "cuda":
        return _record(fn, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmups):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = fn()
    return HandCaptured(graph.replay, outputs, graph.reset)


def _record(fn: Callable[[], Any], device: Device) -> HandCaptured:
    pool, stream = device.new_pool(), device.stream("by hand")
    with device.use(stream):
        recording = device.begin(pool, stream, "by hand")
        outputs = fn()
        graph = recording.end()
    # The capture stream is ordered before whoever replays, as leaving ``cuda.graph`` does.
    device.order(device.current_stream(), stream)
    return HandCaptured(graph.replay, outputs, graph.reset)


def require_equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Nothing is timed that does not compute the same: bit for bit."""
    if not torch.equal(found, expected):
        wrong = int((found != expected).sum())
        raise AssertionError(f"{what}: {wrong} of {expected.numel()} elements differ from eager")


def poison(tensor: torch.Tensor) -> None:
    """Make sure that what is compared next was written by the replay in between."""
    tensor.fill_(float("nan"))
