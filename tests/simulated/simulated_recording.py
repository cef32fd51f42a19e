"""Recording a function on a simulated device, as the program builder does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphrt.device.simulated import SimulatedDevice


def record(
    device: SimulatedDevice,
    pool: Any,
    fn: Callable[[], Any],
    mode: Callable[[], Any] = torch.no_grad,
    **options: Any,
) -> tuple[Any, Any]:
    """Record ``fn`` on the stream "capture": graph and result. An error aborts, and passes."""
    stream = device.stream("capture")
    with mode(), device.use(stream):
        recording = device.begin(pool, stream, "case", **options)
        try:
            result = fn()
        except BaseException as error:
            recording.abort(error)
            raise
        return recording.end(), result


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves(one)]
    return []


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits (NaN and -0.0 too), shape, stride and dtype."""
    if (left.shape, left.stride(), left.dtype) != (right.shape, right.stride(), right.dtype):
        return False
    if left.is_complex():
        left, right = (
            torch.view_as_real(left.resolve_conj()),
            torch.view_as_real(right.resolve_conj()),
        )
    left, right = left.reshape(-1).clone(), right.reshape(-1).clone()
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
