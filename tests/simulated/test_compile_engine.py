"""The reference engine compiled at level 3, beside the same engine cut at break points."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from graphrt import CompilationConfig, RuntimeConfig, resolve
from graphrt.compile import Compiled
from graphrt.graphs.program import EagerSegment, GraphSegment
from graphrt_llm import LLMEngine
from graphrt_llm.assembly import TINY_CONFIG
from graphrt_llm.attention import ATTENTION_OP
from graphrt_llm.kernels import EAGER
from graphrt_llm.kernels.operators import Operators
from graphrt_llm.model_config import ModelConfig
from graphrt_llm.models import CausalLM
from lab import FULL, PIECEWISE

QWEN = replace(ModelConfig.tiny(), architecture="Qwen3ForCausalLM")
PROMPTS = [[1, 2, 3, 4, 5], [9] * 20, [7]]


def engine(level, model=QWEN, seed=0):
    compilation = CompilationConfig(level=level, cudagraph_capture_sizes=[1, 2, 8, 32])
    runtime = replace(TINY_CONFIG.runtime, compilation=compilation)
    config = replace(TINY_CONFIG, runtime=runtime, seed=seed)
    return LLMEngine.with_random_weights(model, config)


def programs(of):
    """By mode and key."""
    runtime = of.runtime
    keys = [(entry.mode, entry.key) for entry in runtime.report().graphs]
    return {key: runtime.library.program(runtime.runner.name, *key) for key in keys}


def files_run_by_replays(run):
    """The files of the Python functions that replays call, those of the device left out."""
    files, depth = set(), 0

    def note(frame, event, _):
        nonlocal depth
        is_replay = frame.f_code.co_qualname == "Executor.replay"
        file = frame.f_code.co_filename
        if event == "call":
            depth += is_replay
            if depth and "/graphrt/device/" not in file:
                files.add(file)
        elif event == "return":
            depth -= is_replay

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files


@pytest.fixture(scope="module")
def pair():
    """Cut at break points, and compiled."""
    with engine(0) as breaks, engine(3) as compiled:
        for one in (breaks, compiled):
            one.capture()
        yield breaks, compiled


def test_programs_have_the_same_segments_however_cut(pair):
    breaks, compiled = map(programs, pair)
    assert compiled.keys() == breaks.keys()
    assert {mode for mode, _ in compiled} == {FULL, PIECEWISE}
    for key, program in compiled.items():
        kinds = [type(segment) for segment in program.segments]
        assert kinds == [type(segment) for segment in breaks[key].segments]
        assert kinds.count(EagerSegment) == (QWEN.num_layers if key[0] is PIECEWISE else 0)


def test_replay_runs_no_python_but_eager_segments(pair):
    files = []
    for one in pair:
        one.generate(PROMPTS)
        files.append(files_run_by_replays(lambda one=one: one.generate(PROMPTS)))
    breaks, compiled = files
    assert any(file.endswith("attention/base.py") for file in breaks)
    assert {file for file in compiled if not file.startswith("<graphrt model")} <= breaks
    for name in ("_dynamo", "torch/fx/", "/graphrt/compile/", "stitched", "causal_lm"):
        assert not [file for file in compiled if name in file], name


def test_kernels_of_the_splitting_op_are_recorded(pair):
    for (mode, _), program in programs(pair[1]).items():
        names = [
            call.operation
            for segment in program.segments
            if isinstance(segment, GraphSegment)
            for call in segment.graph.calls
        ]
        assert not [name for name in names if ATTENTION_OP in name]
        assert any("scaled_dot_product" in name for name in names) is (mode is FULL)


def test_engines_of_one_process_share_no_trace(pair):
    """Of one class: another model, and the same one with other weights."""
    llama = replace(ModelConfig.tiny(), num_layers=3)
    for model, seed in ((llama, 0), (QWEN, 1), (QWEN, 2)):
        with engine(0, model, seed) as plain:
            expected = plain.generate(PROMPTS)
        with engine(3, model, seed) as compiled:
            compiled.capture()
            assert compiled.generate(PROMPTS) == expected
            assert compiled.runtime.report().compile.num_compiles == 3
    assert pair[0].generate(PROMPTS) == pair[1].generate(PROMPTS)


def test_operators_are_all_kernels_where_rules_leave_them():
    triton = EAGER._replace(name="triton")
    for rules, device, expected in (
        ("", "cuda", True),
        ("all", "cuda", True),
        ("all,-norm_gate", "cuda", False),
        ("none", "cuda", False),
        ("", "cpu", False),
    ):
        compilation = CompilationConfig(level=3, custom_ops=rules, backend="inductor")
        plan = resolve(RuntimeConfig(compilation=compilation)).compile
        operators = Operators(triton, plan, torch.device(device))
        assert operators.are_all_kernels is expected
        has_kernel = operators.norm_linear is torch.ops.graphrt_llm.norm_linear
        assert has_kernel == (device == "cuda" and rules != "none")
        assert (operators.norm_gate is torch.ops.graphrt_llm.norm_gate) == expected
        assert not Operators(EAGER, plan, torch.device(device)).are_all_kernels


def test_steps_above_the_largest_graph_run_the_model_as_it_is(pair, monkeypatch):
    monkeypatch.setattr(Operators, "are_all_kernels", True)
    sizes = []
    forward = CausalLM.forward

    def noted(self, input_ids, *args):
        sizes.append(input_ids.shape[0])
        return forward(self, input_ids, *args)

    prompts = [*PROMPTS, [3] * 40]
    expected = pair[0].generate(prompts)
    monkeypatch.setattr(CausalLM, "forward", noted)
    with engine(3) as compiled:
        compiled.capture()
        assert compiled.generate(prompts) == expected
        assert compiled.runtime.report().compile.num_compiles == 3
    assert min(sizes) > 32


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # Of torch's own modules.
@pytest.mark.parametrize(
    ("marking", "backend"),
    [
        ("unbacked", "eager"),
        ("backed", "eager"),
        pytest.param("unbacked", "inductor", marks=NEEDS_COMPILER),
    ],
)
def test_sizes_are_served_without_compiling_again(marking, backend, tmp_path):
    most, width = 512, 8
    weight = torch.randn(width, width)

    def model(x):
        return torch.sigmoid(torch.tanh(x @ weight) + x.flatten().view(-1, width)) * x.shape[0]

    config = RuntimeConfig(
        compilation=CompilationConfig(
            level=3,
            backend=backend,
            cache_dir=tmp_path,
            splitting_ops=["torch.sigmoid"],
            dynamic_shapes=marking,
        ),
        max_num_batched_tokens=most,
    )
    one = Compiled(model, resolve(config).compile, limits={"tokens": most})
    for first in (13, 1)[: 1 + (marking == "backed")]:  # Size 1 has a trace of its own.
        x = torch.randn(first, width)
        one.trace(lambda: one(x), [(x, 0, "tokens")])  # noqa: B023  # It runs at once.
    counts = one.report.num_compiles, counters["stats"]["unique_graphs"]
    assert counts[0] == 2
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if backend == "inductor" else {"atol": 0, "rtol": 0}
    for size in (*range(1, most + 1), 64, 13, 8, 5, 2, 1):
        x = torch.randn(size, width)
        torch.testing.assert_close(one(x), model(x), **tolerance)
    assert counts == (one.report.num_compiles, counters["stats"]["unique_graphs"])
