"""Two ranks on two GPUs: messages over NCCL, and a collective of NCCL inside FULL graphs."""

from __future__ import annotations

import pytest
import torch

from ranks_lab import all_said, launch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_two_gpus_agree_and_replay_their_collective() -> None:
    for said in all_said(launch("tests/ranks_script.py", "on gpus", timeout_s=240)):
        assert said[1:] == [{"wires": True}, {"missing": []}, {"hits": True}]
