"""Devices: the protocol, and the one function that picks an implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from graphrt.errors import ConfigError, shown

if TYPE_CHECKING:
    from graphrt.device.base import Device

DeviceName = Literal["auto", "cuda", "simulated"]


def make_device(name: DeviceName = "auto", index: int | None = None) -> Device:
    """A new device. ``"auto"``: CUDA where torch sees a GPU, else the simulated one.

    ``index``: of the GPU, which becomes torch's current one; None: the current one.

    Errors: ``ConfigError`` for another name, and for ``"cuda"`` without a GPU.
    """
    if not isinstance(name, str) or name not in get_args(DeviceName):
        expected = '"auto", "cuda" or "simulated"'
        raise ConfigError("device", expected=expected, found=shown(name), do="name one of them")
    # Imported here: each implementation loads torch, which naming a device does not need.
    if name != "simulated":
        from graphrt.device.cuda import CUDADevice

        if name == "cuda" or CUDADevice.is_available():
            return CUDADevice() if index is None else CUDADevice.select(index)
    from graphrt.device.simulated import SimulatedDevice

    return SimulatedDevice()
