"""What surrounds a call without being its argument: the modes and switches kernels depend on.

A graph freezes them. Warm-up and capture must therefore run under the same ones, or the capture
records kernels that nothing has warmed up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphrt.device.base import Device, Stream
from graphrt.errors import EnvironmentMismatchError


class CaptureEnvironment(NamedTuple):
    """The state of the calling thread and process that chooses kernels."""

    stream: str
    grad_mode: bool
    inference_mode: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    sdpa: tuple[bool, ...]
    """Flash, memory-efficient, math and cuDNN attention allowed."""
    default_dtype: torch.dtype
    deterministic: tuple[bool, bool]
    """Deterministic algorithms, and warn only."""
    float32_precision: tuple[str, ...]
    """TF32 switches: matmul on CUDA, convolution, matmul elsewhere."""

    @classmethod
    def read(cls, device: Device) -> CaptureEnvironment:
        """The environment of the calling thread."""
        kinds = dict.fromkeys(("cpu", device.torch_device.type))
        backends = torch.backends
        return cls(
            stream=device.current_stream().name,
            grad_mode=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in kinds
            ),
            sdpa=(
                backends.cuda.flash_sdp_enabled(),
                backends.cuda.mem_efficient_sdp_enabled(),
                backends.cuda.math_sdp_enabled(),
                backends.cuda.cudnn_sdp_enabled(),
            ),
            default_dtype=torch.get_default_dtype(),
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            float32_precision=(
                backends.cuda.matmul.fp32_precision,
                backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]  # set at run time
                backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]  # as above
            ),
        )

    def require_equal(self, capture: CaptureEnvironment) -> None:
        """Raise ``EnvironmentMismatchError`` naming what changed between warm-up and capture."""
        changed = [
            (name, before, after)
            for name, before, after in zip(self._fields, self, capture, strict=True)
            if before != after
        ]
        if changed:
            raise EnvironmentMismatchError(
                ", ".join(name for name, _, _ in changed),
                expected="; ".join(
                    f"{name}={before}, as at the warm-up" for name, before, _ in changed
                ),
                found="; ".join(f"{name}={after}" for name, _, after in changed),
                do="enter the same modes around warm-up and capture",
            )


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast computes in on devices of this kind, None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def autocast_error(key: object, captured: torch.dtype | None) -> EnvironmentMismatchError:
    is_on = captured is not None
    return EnvironmentMismatchError(
        f"autocast in a step of {key}",
        expected=f"autocast on with {captured}, as at its capture"
        if is_on
        else "autocast off, as at its capture",
        found="another dtype, or off" if is_on else "autocast on",
        do="enter the same autocast around captures and steps, or inside the callable",
    )


def require_no_grad() -> None:
    """Raise ``EnvironmentMismatchError`` if grad mode is on, because a graph has no history."""
    if torch.is_grad_enabled():
        raise EnvironmentMismatchError(
            "grad mode",
            expected="torch.no_grad() or torch.inference_mode() around warm-up and capture",
            found="grad mode is on",
            do="enter torch.no_grad() around the scope or inside the callable",
        )


def require_stream(expected: Stream, current: Stream) -> None:
    """Raise ``EnvironmentMismatchError`` if a capture would not be on its scope's stream."""
    if current is not expected:
        raise EnvironmentMismatchError(
            "current stream",
            expected=f"the scope's capture stream {expected.name!r}",
            found=f"stream {current.name!r}",
            do="call the wrapper on the scope's stream; fork side streams inside the callable",
        )
