"""Level 3 on a GPU: pieces of Inductor in graphs, with the tokens of the uncompiled engine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from graphrt import CompilationConfig
from graphrt_llm import LLMEngine
from graphrt_llm.assembly import TINY_CONFIG

# Of torch's own modules as they are imported, and its advice about TF32.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPTS = [[1, 2, 3, 4, 5], [9] * 20, [7], [3, 1, 4, 1, 5, 9, 2, 6]]


def tiny(mode, level, **compilation):
    options = CompilationConfig(
        level=level, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4, 8, 16], **compilation
    )
    config = replace(TINY_CONFIG, runtime=replace(TINY_CONFIG.runtime, compilation=options))
    return LLMEngine.tiny(replace(config, device="cuda", dtype="float32"))


@pytest.fixture(scope="module")
def expected():
    with tiny("NONE", 0) as engine:
        return engine.generate(PROMPTS)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_compiled_engine_gives_the_tokens_of_the_uncompiled(expected, cache, backend, mode):
    with tiny(mode, 3, backend=backend, cache_dir=cache) as engine:
        report = engine.capture()
        assert not report.missing
        assert engine.generate(PROMPTS) == expected
    shapes = {graph.mode.name: (graph.num_graphs, graph.num_eager) for graph in report.graphs}
    assert shapes == {name: {"PIECEWISE": (3, 2), "FULL": (1, 0)}[name] for name in shapes}


def test_second_engine_of_a_warm_cache_compiles_nothing(expected, cache):
    for _ in range(2):
        with tiny("PIECEWISE", 3, backend="inductor", cache_dir=cache) as engine:
            found = engine.capture().compile
    assert (found.num_compiles, found.num_loaded) == (0, found.num_unique)


def test_exact_sizes_and_ranges_give_the_uncompiled_tokens(expected, cache):
    sizes = {"compile_sizes": [1, 8], "compile_ranges_endpoints": [4]}
    with tiny("FULL_AND_PIECEWISE", 3, backend="inductor", cache_dir=cache, **sizes) as engine:
        engine.capture()
        assert engine.generate(PROMPTS) == expected


TUNES = """
import sys
from pathlib import Path
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from graphrt import CompilationConfig, RuntimeConfig, resolve
from graphrt.compile import Compiled

timed = []  # torch's own counter is set, on loading, to what compiling had counted.
bench = CachingAutotuner.bench
CachingAutotuner.bench = lambda *args, **kwargs: timed.append(1) or bench(*args, **kwargs)
config = CompilationConfig(
    level=2,
    backend="inductor",
    cache_dir=Path(sys.argv[1]),
    inductor_compile_config={"max_autotune": True, "coordinate_descent_tuning": True},
)
plan = resolve(RuntimeConfig(compilation=config)).compile
x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)


def attend(x):
    weights = torch.softmax(x * 2.0, -1)
    # A product of one row is a reduction, of which several configurations are tried first.
    return weights @ x, weights[:1] @ x


for _ in range(2):
    one = Compiled(attend, plan, limits={})
    one.trace(lambda: one(x), [])
    one(x)
    print(one.report.num_loaded, len(timed))
    timed.clear()
"""


def test_tuned_kernels_are_not_tuned_at_the_next_start(tmp_path):
    """In the process that tuned them, and in another one."""
    told = []
    for _ in range(2):
        program = [sys.executable, "-W", "ignore", "-c", TUNES, str(tmp_path)]
        found = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
        told += [[int(number) for number in line.split()] for line in found.stdout.splitlines()]
    (loaded, benched), *later = told
    assert loaded == 0 < benched
    assert later == [[1, 0]] * 3
