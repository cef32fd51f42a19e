"""Devices: the protocol, and the one function that picks an implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from graphrt.errors import ConfigError

if TYPE_CHECKING:
    from graphrt.device.base import Device

DeviceName = Literal["auto", "cuda", "simulated"]


def make_device(name: DeviceName = "auto", index: int | None = None) -> Device:
    """A new device. ``"auto"``: CUDA where torch sees a GPU, else the simulated one.

    ``index``: of the GPU, which becomes torch's current one; None: the current one.

    Errors: ``ConfigError`` for another name, and for ``"cuda"`` without a GPU.
    """
    # Imported here: each implementation loads torch, which naming a device does not need.
    if name in ("auto", "cuda"):
        from graphrt.device.cuda import CUDADevice

        if name == "cuda" or CUDADevice.is_available():
            return CUDADevice() if index is None else CUDADevice.select(index)
        name = "simulated"
    if name == "simulated":
        from graphrt.device.simulated import SimulatedDevice

        return SimulatedDevice()
    raise ConfigError(
        "device", expected='"auto", "cuda" or "simulated"', found=repr(name), do="name one of them"
    )
