"""What people read, on a GPU: ranges in a profile, ``graphrt env``, the table of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engines import LLAMA, make_engine

from graphrt import (
    BufferSpec,
    CompilationConfig,
    OutputSpec,
    Padding,
    Runtime,
    RuntimeConfig,
)

MOST_UNNAMED = 2 << 20
"""Bytes that a capture may take without a name."""
MOST_TRIES = 12


@contextmanager
def runtime_of(nvtx: bool) -> Iterator[Runtime]:
    model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100)).cuda()
    with Runtime(
        model,
        inputs=[BufferSpec("input", ("tokens",), torch.int64, Padding.fill(0))],
        outputs=OutputSpec({"": "tokens"}),
        config=RuntimeConfig(
            compilation=CompilationConfig(cudagraph_capture_sizes=(1, 2, 4, 8)),
            max_num_seqs=4,
            nvtx=nvtx,
        ),
        device="cuda",
    ) as runtime:
        runtime.capture(like={"input": torch.arange(8, device="cuda")})
        yield runtime


@pytest.mark.parametrize("nvtx", [True, False])
def test_nvtx_asked_for_names_each_run(monkeypatch: pytest.MonkeyPatch, nvtx: bool) -> None:
    names, depth, push, pop = [], [], torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    with runtime_of(nvtx) as runtime:
        monkeypatch.setattr(
            torch.cuda.nvtx,
            "range_push",
            lambda label: (names.append(label), depth.append(push(label))),
        )
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: depth.append(pop()))
        decided = []
        for num_tokens in (3, 8, 20):
            runtime.step({"input": torch.arange(num_tokens, device="cuda")})
            mode, key, _ = runtime.last_decision
            decided.append(f"{mode.name} {key}")
    assert names == (decided if nvtx else [])
    # Where no tool listens the driver says -1 or counts from 0; each push has its pop either way.
    assert len(depth) == 2 * len(names)


def test_env_tells_of_the_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "graphrt", "env", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    properties = torch.cuda.get_device_properties(0)
    assert found["cuda"] == torch.version.cuda
    assert found["driver"]
    assert found["devices"][0]["name"] == properties.name
    assert found["devices"][0]["memory_bytes"] == properties.total_memory


def test_memory_that_a_capture_takes_is_named() -> None:
    rests: list[int] = []
    # Free memory is the whole GPU's: another process may begin or end during most of them.
    while len(rests) < MOST_TRIES and min(rests, default=MOST_UNNAMED + 1) > MOST_UNNAMED:
        with make_engine(LLAMA, "FULL_AND_PIECEWISE") as engine:
            report = engine.runtime.report()
            before, after = report.memory
            taken = report.memory_taken
            text = str(report)
        assert taken.total == before.free - after.free
        assert taken.pools == after.pools > 0
        # What comparisons with eager runs took is given back, apart from parts of used segments.
        assert taken.cached < 64 << 20
        for name in ("taken by captures", "pools of graphs"):
            assert any(line.strip().startswith(name) for line in text.splitlines()), name
        rests.append(abs(taken.rest))
    assert min(rests) <= MOST_UNNAMED
