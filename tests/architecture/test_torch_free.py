"""The deciding rooms never load torch: proven by the absence of the module."""

from __future__ import annotations

import subprocess
import sys

import pytest

ROOMS = [
    "graphrt",
    "graphrt.batch",
    "graphrt.errors",
    "graphrt.events",
    "graphrt.files",
    "graphrt.context",
    "graphrt.interrupts",
    "graphrt.waits",
    "graphrt.config",
    "graphrt.dispatch",
    "graphrt.parallel",
    "graphrt.parallel.agreement",
    "graphrt.planner",
    "graphrt.report",
    "graphrt.ubatch",
    "graphrt.ubatch.communication",
    "graphrt.ubatch.slices",
    "graphrt.cli",
    "graphrt_llm.blocks",
    "graphrt_llm.scheduler",
]


@pytest.mark.parametrize("room", ROOMS)
def test_importing_a_torch_free_room_does_not_load_torch(room: str) -> None:
    code = f"import sys, {room}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or f"{room} loaded torch"
