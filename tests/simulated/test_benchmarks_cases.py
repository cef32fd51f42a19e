"""The cases build, compare with eager and dispatch as they say, on the simulated device.

Their figures mean nothing here and none is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import time
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks import parts
from benchmarks.__main__ import choose, run
from benchmarks.baselines import require_equal
from benchmarks.cases import (
    all_cases,
    capture,
    compiled,
    engine,
    entry,
    memory,
    never_slower,
    primitives,
    serving,
    staging,
    step as steps,
    tails,
    ubatch as ubatches,
)
from benchmarks.harness import CannotRunError, Case, Row, row, time_host
from benchmarks.models import DecodeStep, small_runtime
from benchmarks.table import number_of

from graphrt import CompilationConfig, GraphLibrary, Runtime, RuntimeMode, SimulatedDevice
from graphrt.planner import TraceRequest
from graphrt.verify import PaddingChecked
from graphrt_llm import LLMEngine
from graphrt_llm.assembly import TINY_CONFIG
from graphrt_llm.models import ModelConfig
from ranks_lab import launcher

ROOT = Path(__file__).resolve().parents[2]
TINY = ModelConfig.tiny()


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


@pytest.fixture
def step(device: SimulatedDevice) -> DecodeStep:
    place = device.torch_device
    return DecodeStep(TINY, max_reqs=4, context=32, dtype=torch.float32, device=place)


@pytest.fixture
def small(device: SimulatedDevice) -> Iterator[tuple[Runtime, Any]]:
    with small_runtime(
        device, (1, 8), layers=2, hidden=32, heads=2, dtype=torch.float32
    ) as runtime:
        yield runtime


@pytest.mark.parametrize("is_reversed", [False, True])
def test_replays_of_a_chain_equal_eager(device: SimulatedDevice, is_reversed: bool) -> None:
    names = ["bare", "wrapper", "program", "bare again"]
    with primitives.arms_of(10, device, is_reversed=is_reversed) as arms:
        assert list(arms) == (names[::-1] if is_reversed else names)


def test_every_way_of_staging_equals_eager(device: SimulatedDevice) -> None:
    with staging.arms_of(TINY, torch.float32, device) as arms, torch.no_grad():
        assert len(arms) >= 6, "each was compared with eager when it was made"
        for arm in arms.values():
            arm()


def test_a_case_that_computes_something_else_is_not_timed() -> None:
    with pytest.raises(AssertionError, match="1 of 2 elements"):
        require_equal(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), "case")
    with pytest.raises(AssertionError, match="1 of 1 elements"):
        require_equal(torch.tensor([torch.nan]), torch.tensor([torch.nan]), "NaN")


@torch.no_grad()
def test_capture_is_measured_for_every_arm(
    device: SimulatedDevice, step: DecodeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "NUM_OBJECTS", 1000)
    samples, num_observed = capture.measure(step, (4, 2, 1), device, blocks=2)
    assert {"eager", "default", "always", "never", "large heap"} <= samples.keys()
    assert all(len(figures) == 2 for figures in samples.values())
    assert num_observed == {"default": 3, "always": 3, "never": 0, "large heap": 3}


@torch.no_grad()
def test_the_default_policy_of_a_gpu_observes_the_ends(
    device: SimulatedDevice, step: DecodeStep
) -> None:
    with GraphLibrary(device) as library:
        times = capture.through_library(library, capture.Decode(step), (4, 2, 1), "ends")
    assert times.num_observed == 2, "nothing that a step touches is left unnamed"


@torch.no_grad()
def test_smaller_sizes_cost_their_executables_and_no_pool(
    device: SimulatedDevice, step: DecodeStep
) -> None:
    library, cost = memory.by_library(step, (4, 2, 1), device)
    assert cost.taken == cost.executables > 0 == cost.pool_growth
    library.close()


def test_each_key_is_served_by_every_mode_that_can(small: tuple[Runtime, Any]) -> None:
    runtime, model = small
    found = [never_slower.arms_of(runtime, model, key) for _, key in runtime.plan.capture_order]
    assert [(k.key.num_tokens, k.key.uniform, k.chosen, list(k.arms)) for k in found] == [
        (8, False, "PIECEWISE", ["PIECEWISE", "NONE"]),
        (1, False, "PIECEWISE", ["PIECEWISE", "NONE"]),
        (8, True, "FULL", ["FULL", "PIECEWISE", "NONE"]),
        (1, True, "FULL", ["FULL", "PIECEWISE", "NONE"]),
    ]


def test_a_step_and_its_baseline_by_hand_are_timed_alternately(
    device: SimulatedDevice, small: tuple[Runtime, Any]
) -> None:
    runtime, model = small
    arms, reset = tails.arms_of(runtime, model, device)
    samples = tails.host_times(arms, 5, device.synchronize)
    assert {name: len(figures) for name, figures in samples.items()} == dict.fromkeys(arms, 5)
    reset()


SDPA = "torch.nn.functional.scaled_dot_product_attention"


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_hf_module_captured_equals_eager_and_the_engines_model(
    device: SimulatedDevice, architecture: Any
) -> None:
    shape, place = replace(TINY, architecture=architecture), device.torch_device
    decoder = compiled.Decoder(shape, (1, 2), torch.float32, place)
    ids = torch.ones(1, dtype=torch.int64)
    decoder.rewind(0)
    first = decoder(ids).clone()
    decoder.rewind()
    expected = decoder(ids).clone()
    decoder.rewind()
    with compiled.captured(decoder, (1, 2), shape.vocab_size, device) as runtime:
        require_equal(compiled.through(runtime)(ids), expected, "captured")
        graphs = {(graph.mode, graph.num_eager) for graph in runtime.report().graphs}
        assert graphs == {(RuntimeMode.FULL, 0), (RuntimeMode.PIECEWISE, shape.num_layers)}
        with compiled.engine_model(shape, decoder.model, torch.float32, device, first) as engine:
            compiled.greedy(engine, 1, place)()
        assert compiled.captures_when_shapes_vary(runtime, decoder, 6) == 0
    decoder.rewind()
    options = {"backend": "eager", "splitting_ops": [SDPA]}
    with compiled.level_3(decoder, shape.vocab_size, device, **options) as runtime:
        found = compiled.through(runtime)(ids)
        compiled.require_close(found, expected, "level 3")
        report = runtime.report().compile
        assert report is not None
        assert report.num_compiled == shape.num_layers + 1


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_program_is_replayed_as_its_last_step_left_it(mode: str) -> None:
    runtime = replace(TINY_CONFIG.runtime, compilation=CompilationConfig(cudagraph_mode=mode))
    # As on a GPU: a step's input is then what the step before left on the device.
    config = replace(TINY_CONFIG, device="simulated", runtime=runtime, overlap=True)
    with LLMEngine.tiny(config) as served:
        served.capture()
        with engine.last_program(served, 1) as program:
            assert (program.mode.name, program.key.num_tokens) == (mode, 1)
            figures = engine.host_ms(program, lambda: None, blocks=2)
        assert len(figures) == 2
        assert not served.has_unfinished()


def test_first_graphed_token_comes_before_most_captures() -> None:
    config = replace(TINY_CONFIG, device="simulated", capture="by_priority")
    with LLMEngine.tiny(config) as served:
        engine.first_graphed_token(served, seed=0)
        assert not served.has_unfinished()
        # Two chunks of the prompt are larger than any graph; the step after them has its own.
        graphs = [(graph.mode, graph.key.num_tokens) for graph in served.runtime.report().graphs]
        assert len(graphs) == 3
        assert (RuntimeMode.FULL, 1) in graphs
        while served.runtime.report().missing:
            served.step()


def test_a_start_without_the_padded_comparison_makes_none() -> None:
    few = CompilationConfig(cudagraph_capture_sizes=(4,))
    runtime = replace(TINY_CONFIG.runtime, compilation=few)
    config = replace(TINY_CONFIG, device="simulated", runtime=runtime)
    counts = []
    found = PaddingChecked(None, {}, "")
    with mock.patch("graphrt.runner.comparisons.check_padding", return_value=found) as check:
        for around in (engine.unpadded(), nullcontext()):
            with around, LLMEngine.tiny(config) as served:
                served.capture()
            counts.append(check.call_count)
    assert counts[0] == 0 < counts[1]


def test_a_start_of_compiled_code_tells_all_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = entry.config
    # Without a C++ compiler.
    eager = lambda folder, **options: own(folder, **(options | {"backend": "eager"}))  # noqa: E731
    monkeypatch.setattr(entry, "config", eager)
    began = time()
    found = entry.first_result(2, tmp_path, began)
    assert (found["compiles"], found["loads"]) == (3, 0)
    parts = ["imports of the compiler", "trace", "split", "compile", "load", "rest"]
    assert list(found["seconds"]) == ["python, torch and graphrt", *parts]
    assert all(value >= 0 for value in found["seconds"].values())
    assert sum(found["seconds"].values()) <= time() - began


def test_starts_are_compared_with_and_without_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Path]] = []

    def start(num_layers: int, folder: Path) -> dict[str, Any]:
        is_warm = (num_layers, folder) in asked
        asked.append((num_layers, folder))
        seconds = {"python, torch and graphrt": 10.0, "trace": 1.0, "load": 1.0 if is_warm else 9.0}
        return {"seconds": seconds, "compiles": 0 if is_warm else 3, "loads": 3 * is_warm}

    monkeypatch.setattr(entry, "start_of_its_own", start)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    rows = {item.metric: item for item in entry.starts()}
    assert {name: item.value for name, item in rows.items()} == {
        "C-compile-start-4": 0.2,
        "C-compile-start-4-process": 0.6,
        "C-compile-start-32": 0.2,
        "C-compile-start-32-process": 0.6,
    }
    assert [item.target for item in rows.values()] == [0.25, None, 0.3, None]
    assert rows["C-compile-start-4"].config["parts_s"]["warm"]["load"] == 1.0
    (_, *timed) = asked
    assert len(set(timed)) == len(timed) / 2, "each cold start has a folder of its own"
    assert asked[0] not in timed, "the first start writes bytecode, and counts for nothing"


def test_starts_without_bytecode_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    for starts in (lambda: next(entry.starts()), engine.compiled_starts):
        with pytest.raises(CannotRunError, match="unset PYTHONDONTWRITEBYTECODE"):
            starts()


def test_the_watch_is_a_part_of_a_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "INNER", 1)
    monkeypatch.setattr(steps, "NUM_LAYERS", 2)
    monkeypatch.setattr(steps, "time_host", partial(time_host, blocks=1, block_ms=0.1))
    rows = {item.metric: item for item in steps.steps()}
    assert {"C-step-watch", "C-step-watch-always", "C-step-verify-every"} <= rows.keys()
    for name in ("full", "piecewise", "engine"):
        item = rows[f"C-step-{name}"]
        assert "watch" in item.samples
        assert item.config["num_watched"] > 0
        assert rows[f"C-step-{name}-us"].is_reached, "it has no target"


def test_the_cases_of_micro_batches_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ubatches, "INNER", 1)
    monkeypatch.setattr(ubatches, "ROUNDS", 2)
    monkeypatch.setattr(ubatches, "time_host", partial(time_host, blocks=1, block_ms=0.1))
    rows = [item for case in ubatches.CASES for item in case.run()]
    assert [item.metric for item in rows] == [case.number for case in ubatches.CASES]


def test_the_parts_of_a_capture_and_of_a_start_are_all_found(
    device: SimulatedDevice, step: DecodeStep
) -> None:
    captured = parts.capture_parts(step, (2, 1), device, blocks=1)
    named = capture.parts_of(step, (2, 1), device)
    assert named.keys() == {row.arm for row in captured}
    policies = {"default", "always", "never"}
    measured = {(row.metric.removeprefix("G6-part-"), row.arm) for row in captured}
    wanted = (parts.OF_A_CAPTURE | parts.device_parts(device)).keys() - {"eager segments"}
    assert measured >= {(part.replace(" ", "-"), arm) for part in wanted for arm in policies}
    few = CompilationConfig(cudagraph_capture_sizes=(1, 4))
    runtime = replace(TINY_CONFIG.runtime, compilation=few)
    config = replace(TINY_CONFIG, device="simulated", runtime=runtime)
    started = parts.start_parts(partial(LLMEngine.tiny, config), 1)
    assert {row.metric.removeprefix("G5-part-").replace("-", " ") for row in started} == {
        *(part.replace("-", " ") for part in parts.OF_A_START),
        "all",
    }
    assert all(row.ms >= 0 for row in (*captured, *started))


def test_a_part_s_time_is_its_own_also_after_an_error() -> None:
    clock = parts.Clock()
    inner = clock.timed("inner", fail)
    outer = clock.timed("outer", inner)
    with (
        mock.patch.object(parts, "perf_counter", iter([0.0, 3.0, 4.0, 9.0]).__next__),
        pytest.raises(ZeroDivisionError),
    ):
        outer()
    assert clock.seconds == {"inner": 1.0, "outer": 8.0}


def test_logits_that_are_another_model_s_are_not_close() -> None:
    assert compiled.require_close(torch.ones(4), torch.ones(4), "same") == 0
    for found in (torch.full((4,), 1.1), torch.full((4,), torch.nan)):
        with pytest.raises(AssertionError, match="differ"):
            compiled.require_close(found, torch.ones(4), "other")


# -- the command


def figure() -> Row:
    return row("G0", [1.0], target=2.0, unit="ratio", samples={"arm": [1.0]})


def cannot() -> list[Row]:
    raise CannotRunError("no such machine")


def fail() -> list[Row]:
    raise ZeroDivisionError("broken case")


def test_one_case_that_fails_or_cannot_run_takes_no_result_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        Case("G1", "", lambda: [figure()]),
        Case("G2", "", cannot),
        Case("G3", "", fail),
        Case("G4", "", lambda: [figure()]),
    ]
    path = tmp_path / "result.json"
    assert run(cases[:2], [path], None) is True
    assert run(cases, [path], "abc") is False
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert [(item["metric"], item["commit"]) for item in rows] == [("G0", "abc")] * 2
    told = capsys.readouterr()
    assert "G2: cannot run here: no such machine" in told.err
    assert "broken case" in told.err
    assert told.out.count("reached") == 3


def test_a_number_names_all_its_cases_and_no_others() -> None:
    cases = [Case(number, "", cannot) for number in ("G1", "G10-a", "G10-b", "C-wrapper-stale")]
    numbers = lambda only: [case.number for case in choose(cases, only)]  # noqa: E731
    assert numbers(None) == ["G1", "G10-a", "G10-b", "C-wrapper-stale"]
    assert numbers("G1") == ["G1"]
    assert numbers("G10, G1, G10-a") == ["G10-a", "G10-b", "G1"]
    assert numbers("C-wrapper") == ["C-wrapper-stale"]
    with pytest.raises(SystemExit, match="no case 'G'"):
        numbers("G")
    assert choose(cases, "G1, G10", "G10-a") == [cases[0], cases[2]]
    assert choose(cases, None, "G10") == [cases[0], cases[3]]
    with pytest.raises(SystemExit, match="no case 'G2'"):
        choose(cases, None, "G2")


def test_case_numbers_are_unique_and_have_a_target() -> None:
    numbers = [case.number for case in all_cases()]
    assert len(set(numbers)) == len(numbers)
    assert all(number_of(number) for number in numbers)


COMMAND = """
import os, runpy, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
"""


def test_the_command_writes_what_it_was_asked_for(tmp_path: Path) -> None:
    """A case of the CPU gives rows; one that needs a GPU says so and gives none."""
    path = tmp_path / "result.json"
    words = ["--only", "C-dispatch-plan,G1", "--json", str(path)]
    (done,) = launcher().run(COMMAND, str(ROOT), *words)
    assert done.status == 0, done.stderr
    (row,) = json.loads(path.read_text(encoding="utf-8"))
    assert row["metric"] == "C-dispatch-plan"
    assert row["samples"]["resolve and build"]
    assert "G1: cannot run here: it needs a CUDA device" in done.stderr


def test_a_service_returns_every_token_of_the_trace() -> None:
    trace = [TraceRequest(0.0, 30, 8), TraceRequest(0.1, 400, 4), TraceRequest(0.2, 3, 500)]
    requests = serving.from_trace(trace, 64, TINY.vocab_size)
    assert [(len(prompt), output) for prompt, output in requests] == [(30, 8), (60, 4), (1, 63)]
    with LLMEngine.tiny() as engine, mock.patch("torch.cuda.synchronize"):
        [row] = [serving.service_row("G3-serve", engine, requests, 1.2, 100)]
        assert not engine.has_unfinished()
    assert (row.config["requests"], row.config["tokens"]) == (3, 166)
    assert number_of(row.metric) == "G3-serve"


@contextmanager
def tiny_of(
    shape: str,
    mode: str | None = None,
    *,
    context: int = 256,
    capture: Any = "before_serving",
    observer: Any = None,
    sizes: Sequence[int] | None = None,
    level: Any = None,
    dtype: Any = "float32",
    num_blocks: int | None = None,
    is_first: bool = False,
) -> Iterator[LLMEngine]:
    compilation = CompilationConfig(
        level=level,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=None if sizes is None else tuple(sizes),
    )
    runtime = replace(TINY_CONFIG.runtime, compilation=compilation, max_num_batched_tokens=256)
    config = replace(
        TINY_CONFIG,
        runtime=runtime,
        max_model_len=context,
        num_blocks=num_blocks,
        capture=capture,
        dtype=dtype,
    )
    with LLMEngine.tiny(config, observer=observer) as engine:
        yield engine


def test_compiled_steps_are_of_the_dtype_that_the_case_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, Any]] = []

    def tiny(shape: str, **options: Any) -> Any:
        asked.append((options.get("level"), options["dtype"]))
        return tiny_of(shape, **options)

    for name, value in {
        "engine_of": tiny,
        "cuda_device": nullcontext,
        "FEW_REQS": (1,),
        "PREFILLS": (16, 32),
        "NUM_PROMPT": 16,
        "SHORT": 1,
        "LONG": 2,
        "COMPILED_BLOCKS": 1,
        "NUM_BLOCKS": 128,
    }.items():
        monkeypatch.setattr(engine, name, value)
    [case] = [case for case in engine.CASES if case.number == "G2-compiled-float32"]
    with mock.patch("torch.cuda.synchronize"):
        rows = {item.metric: item for item in case.run()}
    assert list(rows) == ["G2-compiled-float32-1", "G2-compiled-float32-prefill-16"]
    assert all(item.config["pieces"] == 2 * TINY.num_layers + 1 for item in rows.values())
    assert asked == [(level, "float32") for level in (None, 3, 3, None)]
    assert all(len(found) == 2 for item in rows.values() for found in item.samples.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_engine_of_a_shape_has_the_dtype_that_was_asked(dtype: Any) -> None:
    with (
        mock.patch("torch.cuda.empty_cache"),
        mock.patch.object(LLMEngine, "with_random_weights") as made,
    ):
        made.return_value.__enter__.return_value.is_building = False
        with engine.engine_of("qwen3-0.6b", dtype=dtype):
            pass
    _, config = made.call_args.args
    assert config.dtype == dtype


@pytest.mark.parametrize("capture_when", ["by_priority", "before_serving"])
def test_a_start_tells_its_parts(capture_when: Any) -> None:
    with mock.patch("torch.cuda.synchronize"), mock.patch.object(serving, "engine_of", tiny_of):
        found = serving.one_start(256, capture_when)
    assert ("first token" in found) is (capture_when == "by_priority")
    assert ("every key" in found) is (capture_when == "before_serving")
    assert found.get("every key", found.get("first token")) > found["engine"] > 0
    assert found["keys"] > 0


def test_rows_of_cold_starts_come_as_they_are_measured() -> None:
    asked: list[tuple[Any, ...]] = []

    def start(*what: Any) -> dict[str, Any]:
        asked.append(what)
        return {"engine": 0.25, "first token": 0.5, "every key": float(len(asked))}

    with (
        mock.patch.object(serving, "cuda_device", nullcontext),
        mock.patch.object(serving, "start_of_its_own", start),
    ):
        rows = serving.cold_starts()
        assert next(rows).value == 0.5
        [(_, _, folder)] = asked
        others = list(rows)
    assert not folder.exists()
    assert [row.metric for row in others] == [
        "G5-cold-warm",
        "G5-cold-keys",
        "G5-cold-keys-4352",
    ]
    assert set(asked[:-5]) == {(2048, "by_priority", folder)}
    assert asked[-4:] == [(context, "before_serving") for _ in range(2) for context in (2048, 4352)]


def test_tokens_of_all_modes_are_compared_with_eager_ones() -> None:
    with (
        mock.patch.object(serving, "engine_of", tiny_of),
        mock.patch.dict(serving.DECODE_MS, {"tiny": {1: 1.0, 2: 1.0}}),
        mock.patch.object(serving, "NUM_COMPARED", 4),
    ):
        row = serving.equal_tokens("tiny")
    assert row.is_reached
    assert set(row.samples) == {"NONE", "PIECEWISE", "FULL", "default"}
