"""Inductor's own partition on a GPU: the same programs, cut where Inductor cuts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import partitions
from graphrt import BufferSpec, OutputSpec, Runtime, RuntimeConfig
from partitions import MAX_TOKENS, NUM_LAYERS, WIDTH, Decoder

# Of torch's own modules as they are imported, and its advice about TF32.
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@contextmanager
def runtime_of(model: Decoder, folder: Path, mode: str) -> Iterator[Runtime]:
    options = {"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES}
    with Runtime(
        model,
        inputs=[BufferSpec("x", ("tokens", WIDTH), torch.float32)],
        outputs=OutputSpec({"": "tokens"}),
        config=RuntimeConfig(
            compilation=partitions.compilation(folder, **options),
            max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=16,
        ),
        facts=partitions.facts(),
        may_overwrite=[model.cache],
        device="cuda",
    ) as runtime:
        runtime.capture(like={"x": torch.randn(MAX_TOKENS, WIDTH, device="cuda")})
        yield runtime


@pytest.mark.parametrize(
    ("mode", "shape", "calls_a_step"),
    [("PIECEWISE", (NUM_LAYERS + 1, NUM_LAYERS), NUM_LAYERS), ("FULL", (1, 0), 0)],
)
def test_partitions_replay_what_eager_computes(folder, mode, shape, calls_a_step) -> None:
    model, other = Decoder().cuda(), Decoder(seed=8).cuda()
    with runtime_of(model, folder, mode) as runtime, runtime_of(other, folder, mode) as second:
        found = runtime.report()
        assert {(one.num_graphs, one.num_eager) for one in found.graphs} == {shape}
        assert len(found.compile.pieces) == 2 * NUM_LAYERS + 1
        assert found.compile.num_compiled == NUM_LAYERS + 1
        assert second.report().compile.num_compiles == 0
        for size in (1, 2, 5, 8, 13, 16, 40):
            x = torch.randn(size, WIDTH, device="cuda")
            for net, used in ((model, runtime), (other, second)):
                first = used.step({"x": x}).clone()  # May be compared with an eager run.
                partitions.calls.clear()
                rows = used.step({"x": x}).clone()
                assert torch.equal(first, rows)
                replays = size <= max(SIZES)
                assert len(partitions.calls) == (calls_a_step if replays else NUM_LAYERS)
                cache = net.cache.clone()
                with torch.no_grad():
                    torch.testing.assert_close(rows, net(x), atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(cache, net.cache, atol=1e-4, rtol=1e-4)
        assert runtime.report().compile.num_compiles == found.compile.num_compiles
    assert found.compile.num_compiles + found.compile.num_loaded == 1
