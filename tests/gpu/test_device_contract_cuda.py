"""The device contract, held to by CUDA."""

from __future__ import annotations

import pytest
import torch

from device_contract import Bench, DeviceContract
from graphrt.errors import ConfigError


class TestCUDADevice(DeviceContract):
    def test_adopted_stream_of_torch_is_the_current_one(self, bench: Bench) -> None:
        device, given = bench.device, torch.cuda.Stream()
        adopted = device.adopt_stream(given)
        with torch.cuda.stream(given):
            assert device.current_stream() is adopted
            recording = device.begin(bench.pool, adopted, "on torch's stream")
            y = bench.full((4,), 1.0) + 1
            bench.graphs.append(recording.end())
        bench.graphs[-1].replay()
        assert y.eq(2).all()
        with pytest.raises(ConfigError, match="default"):
            device.adopt_stream(torch.cuda.default_stream())
