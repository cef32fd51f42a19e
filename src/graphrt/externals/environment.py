"""What surrounds a call without being its argument: the modes and switches kernels depend on.

A graph freezes them. Warm-up and capture must therefore run under the same ones, or the capture
records kernels that nothing has warmed up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from graphrt.device.base import Device, Stream
from graphrt.errors import EnvironmentMismatchError


class _Precisions(dict[str, str]):
    """One object for each. Unset is as exact as can be, and is that once it was set and reset."""

    def __missing__(self, name: str) -> str:
        return self.setdefault(name, "ieee" if name == "none" else name)


@lru_cache(maxsize=256)
def _one_object(value: object) -> object:
    """The same for equal values."""
    return value


_MATMUL, _CUDNN, _CUDA = "backends.cuda.matmul.", "backends.cudnn.", "backends.cuda."
_BOOLS = {
    f"{_MATMUL}allow_fp16_accumulation": "cublas_allow_fp16_accumulation",
    f"{_CUDNN}enabled": "cudnn_enabled",
    f"{_CUDNN}benchmark": "cudnn_benchmark",
    f"{_CUDNN}deterministic": "cudnn_deterministic",
    f"{_CUDA}flash_sdp_enabled()": "flash_sdp_enabled",
    f"{_CUDA}mem_efficient_sdp_enabled()": "mem_efficient_sdp_enabled",
    f"{_CUDA}math_sdp_enabled()": "math_sdp_enabled",
    f"{_CUDA}cudnn_sdp_enabled()": "cudnn_sdp_enabled",
    f"{_CUDA}fp16_bf16_reduction_math_sdp_allowed()": "math_sdp_allow_fp16_bf16_reduction",
    "are_deterministic_algorithms_enabled()": "deterministic_algorithms",
}
"""By the name that users know, how C++ calls it; a release may lack one."""
_TUPLES = {
    f"{_MATMUL}allow_fp16_reduced_precision_reduction": (
        "cublas_allow_fp16_reduced_precision_reduction"
    ),
    f"{_MATMUL}allow_bf16_reduced_precision_reduction": (
        "cublas_allow_bf16_reduced_precision_reduction"
    ),
    "nn.attention.sdpa_kernel(set_priority=True)": "sdp_priority_order",
}
_PRECISIONS = {
    f"{_MATMUL}fp32_precision": ("cuda", "matmul"),
    f"{_CUDNN}conv.fp32_precision": ("cuda", "conv"),
    f"{_CUDNN}rnn.fp32_precision": ("cuda", "rnn"),
    "backends.mkldnn.matmul.fp32_precision": ("mkldnn", "matmul"),
}


def _flags() -> Iterator[tuple[str, Iterator[Any]]]:
    """Iterators, because a step asks these without any Python of its own."""
    never, one_of = object(), _Precisions()
    yield "get_default_dtype()", iter(torch.get_default_dtype, never)
    for name, of_torch in (_BOOLS | _TUPLES).items():
        get = getattr(torch._C, f"_get_{of_torch}", None)
        if get is not None:
            found: Iterator[Any] = iter(get, never)
            if isinstance(get(), list):
                found = map(tuple, found)
            yield name, map(_one_object, found) if name in _TUPLES else found
    for name, of_operator in _PRECISIONS.items():
        ask = partial(torch._C._get_fp32_precision_getter, *of_operator)
        yield name, map(one_of.__getitem__, iter(ask, never))


FLAGS: Mapping[str, Iterator[Any]] = {f"torch.{name}": found for name, found in _flags()}
"""What chooses kernels, and how exact they are, in the whole process: a graph holds those of its
capture. Each ``next`` says what it is now; equal values are one object."""


def _now(names: Iterable[str]) -> tuple[Any, ...]:
    return tuple(next(FLAGS[f"torch.{name}"]) for name in names)


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
    """Of ``_PRECISIONS``: matmul on CUDA, convolution, recurrence, matmul elsewhere."""

    @classmethod
    def read(cls, device: Device) -> CaptureEnvironment:
        """The environment of the calling thread."""
        kinds = dict.fromkeys(("cpu", device.torch_device.type))
        return cls(
            stream=device.current_stream().name,
            grad_mode=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in kinds
            ),
            sdpa=_now(name for name in _BOOLS if name.endswith("_sdp_enabled()")),
            default_dtype=torch.get_default_dtype(),
            deterministic=(
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            float32_precision=_now(_PRECISIONS),
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
                expected="; ".join(f"{name}={was}, as at the warm-up" for name, was, _ in changed),
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
