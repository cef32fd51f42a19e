"""What ``graphrt env`` asks of CUDA: nothing that fails where there is no GPU or no driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from graphrt.cli import environment
from graphrt.device.cuda import device, private


class Management:
    """The driver's management library, with one answer."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(text: ctypes.Array[ctypes.c_char] | None = None, size: int = 0) -> int:
            self.calls.append(name)
            if text is not None:
                assert size == len(text)
                text.value = b"570.86.15"
            return self.code

        return call


def management_of(found: Management | OSError) -> Callable[[str], Management]:
    def load(name: str) -> Management:
        assert name == "libnvidia-ml.so.1"
        if isinstance(found, OSError):
            raise found
        return found

    return load


@pytest.mark.parametrize(
    ("found", "version"),
    [
        (Management(0), "570.86.15"),
        (Management(9), "NVML error 9"),
        (OSError("no such library"), None),
    ],
)
def test_driver_version_is_what_the_library_answers(
    found: Management | OSError, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private.ctypes, "CDLL", management_of(found))
    assert private.driver_version() == version
    if isinstance(found, Management):
        assert found.calls[-1] == "nvmlShutdown"


def test_no_device_is_visible_where_torch_sees_none() -> None:
    if device.CUDADevice.is_available():
        pytest.skip("torch sees a GPU here")
    assert device.visible_devices() == []


def test_env_keeps_a_drivers_failure_as_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(device, "visible_devices", fail)
    found = environment.describe()
    assert found["devices"] == []
    assert any("the driver is too old" in text for text in environment.lines(found))
