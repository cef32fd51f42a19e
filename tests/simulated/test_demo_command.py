"""The command: its outputs, its exit statuses, and no partial report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from graphrt import CUDAGraphMode
from graphrt.errors import VerificationError
from graphrt_llm.demo import compare, setup
from graphrt_llm.demo.command import DEFAULT_MODES, demo, parse_modes
from lab import HF_LLAMA

CONFIG = {**HF_LLAMA, "torch_dtype": "float32"}

Run = Callable[..., Result]

ALL_SIZES = setup.CAPTURE_SIZES
ALL_MODES = "NONE,PIECEWISE,FULL,FULL_DECODE_ONLY,FULL_AND_PIECEWISE"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(demo)

    # A demo's time is its captures. One test has all: ``test_it_prints_the_table``.
    monkeypatch.setattr(setup, "CAPTURE_SIZES", (2, 8, 16, 48))

    def run(*options: str) -> Result:
        few = () if "--requests" in options else ("--requests", "4")
        return CliRunner().invoke(app, ["--device", "simulated", *few, *options])

    return run


def write_model(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def test_it_prints_the_table_and_where_the_report_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "CAPTURE_SIZES", ALL_SIZES)
    result = run()
    assert result.exit_code == 0, result.output
    report = tmp_path / "graphrt-report.html"
    assert f"report: {report}" in result.stdout
    assert report.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    for words in ("All 4 policies produced the same", "step time / NONE", "simulated device"):
        assert words in result.stdout
    assert "capture" in result.stderr
    assert os.listdir(tmp_path) == ["graphrt-report.html"]


def test_json_is_one_object_and_nothing_else(run: Run, tmp_path: Path) -> None:
    result = run("--json", "--modes", "none,Full_And_Piecewise", "--report", "here.html")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert set(printed) == {
        "device",
        "trace",
        "num_requests",
        "tokens_identical",
        "tokens_digest",
        "ranks",
        "ties",
        "report",
        "modes",
        "compiled",
        "speculation",
        "padding_by_axis",
        "unwatched",
    }
    assert printed["compiled"] == printed["speculation"] == {}
    assert printed["report"] == str(tmp_path / "here.html")
    assert list(printed["modes"]) == ["NONE", "FULL_AND_PIECEWISE"]
    assert set(printed["modes"]["NONE"]) == {
        "steps",
        "runtime_modes",
        "uniform_steps",
        "tokens_by_runtime_mode",
        "miss_reasons",
        "split_steps",
        "unsplit_reasons",
        "padding_percent",
        "num_graphs",
        "capture_seconds",
        "graph_bytes",
        "memory_taken",
        "host_us_p50",
        "host_us_p99",
        "step_us_p50",
        "step_time_ratio_to_none",
        "seconds",
        "lora_steps",
    }


def test_adapters_and_drafts_are_served_and_reported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "CAPTURE_SIZES", (8, 48))  # Of each, as many as adapters and drafts.
    options = ("--loras", "2", "--speculate", "2", "--modes", "NONE,FULL_AND_PIECEWISE")
    result = run("--json", "--requests", "9", *options)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["tokens_identical"]
    for name, found in printed["modes"].items():
        counted = found["lora_steps"]
        assert sum(sum(by.values()) for by in counted.values()) == found["steps"]
        assert set(counted) <= {"0", "1", "2"}
        served = {captured for by in counted.values() for captured in by}
        assert served >= ({"eager"} if name == "NONE" else {"1", "2"})
        told = printed["speculation"][name]
        assert 0 <= told["accepted"] <= told["drafted"]
        assert told["request_steps_saved"] == told["accepted"]
        padding = printed["padding_by_axis"][name]
        assert padding["tokens"] == found["padding_percent"]
        assert padding["drafts"] == pytest.approx(
            100 * told["padded_places"] / (told["padded_places"] + told["drafted"])
        )
        assert (padding["adapters"] is None) == (name == "NONE")
    page = (tmp_path / "graphrt-report.html").read_text(encoding="utf-8")
    few = (*options[:4], "--modes", "FULL_AND_PIECEWISE", "--report", "none")
    shown = run("--requests", "3", *few).stdout
    for words in ("drafts were accepted", "2 random adapters", "Padding by axis", "captured"):
        assert words in page
        assert words in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--speculate", "9"), "num_speculative_tokens"), (("--loras", "5000"), "max_loras")],
)
def test_more_drafts_or_adapters_than_possible_exit_2(run: Run, options, named) -> None:
    result = run(*options)
    assert result.exit_code == 2, result.output
    assert named in result.stderr


def test_no_report_is_written_where_none_is_asked(run: Run, tmp_path: Path) -> None:
    result = run("--modes", "NONE", "--report", "none")
    assert result.exit_code == 0, result.output
    assert "report:" not in result.stdout
    printed = json.loads(run("--modes", "NONE", "--report", "none", "--json").stdout)
    assert printed["report"] is None
    assert os.listdir(tmp_path) == []


def test_compiled_policies_equal_a_run_that_is_not(run: Run) -> None:
    result = run(
        "--json", "--level", "3", "--piecewise", "compile", "--report", "none", "--modes", ALL_MODES
    )
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert (printed["tokens_identical"], printed["ties"]) == (True, 0)
    assert list(printed["modes"]) == ["UNCOMPILED", *ALL_MODES.split(",")]
    assert list(printed["compiled"]) == ALL_MODES.split(",")
    for compiled in printed["compiled"].values():
        assert compiled.pop("compile_seconds") > 0
        assert compiled == {
            "pieces": 5,
            "compiled_pieces": 3,
            "unique_pieces": 3,
            "backend": "eager",
            "compiles": 3,
            "cache_hits": 0,
            "trace_from_cache": False,
        }


WRONG_AT_ONCE = {
    "--level 1": "--level",
    "--trace no-such.csv": "no-such.csv",
    "--model no-such-folder": "no-such-folder",
    "--report no/such/page.html": "page.html",
    "--loras 100000": "max_loras",
    "--tensor-parallel": "--tensor-parallel",
    "--expert-parallel": "--expert-parallel",
    "--tensor-parallel --ranks 3": "heads",
    "--level 3 --ubatches 2": "--ubatches",
    "--level 3": "TORCH_COMPILE_DISABLE",
    "--level 2": "TORCH_COMPILE_DISABLE",
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, bool]]:
    """Status, words on stderr, and whether torch was loaded by then: of one process, in turn."""
    code = (
        "import contextlib, io, json, sys; from graphrt.cli import main\n"
        "for words in sys.argv[1:]:\n"
        "    stderr, status = io.StringIO(), None\n"
        "    try:\n"
        "        with contextlib.redirect_stderr(stderr): main(['demo', *words.split()])\n"
        "    except SystemExit as ended: status = ended.code\n"
        "    print(json.dumps([words, [status, stderr.getvalue(), 'torch' in sys.modules]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *WRONG_AT_ONCE],
        cwd=tmp_path_factory.mktemp("empty"),
        env={**os.environ, "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("words", WRONG_AT_ONCE)
def test_wrong_options_are_refused_before_torch_loads(
    words: str, refused: dict[str, tuple[int, str, bool]]
) -> None:
    status, stderr, is_torch_loaded = refused[words]
    assert status == 2, stderr
    assert WRONG_AT_ONCE[words] in stderr
    assert not is_torch_loaded


@pytest.mark.parametrize(
    "trace",
    ["azure2023/AzureLLMInferenceTrace_conv.csv", "mooncake/conversation_trace.jsonl"],
)
def test_published_traces_can_be_served(run: Run, shared: Path, trace: str) -> None:
    path = str(shared / "traces" / trace)
    asked = ("--requests", "8", "--modes", "NONE,FULL_AND_PIECEWISE", "--report", "none")
    result = run("--json", "--trace", path, *asked)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["trace"] == path
    assert printed["num_requests"] == 8
    assert printed["tokens_identical"]


def test_a_model_directory_can_be_served_with_random_weights(run: Run, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    result = run(
        "--json",
        "--model",
        str(folder),
        "--load-format",
        "dummy",
        "--report",
        "none",
        "--modes",
        "NONE,FULL",
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens_identical"]


def no_trace(folder: Path) -> list[str]:
    return ["--trace", str(folder / "missing.csv")]


def bad_row(folder: Path) -> list[str]:
    path = folder / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,many\n"
    )
    return ["--trace", str(path)]


def no_model(folder: Path) -> list[str]:
    return ["--model", str(folder / "missing")]


def unknown_architecture(folder: Path) -> list[str]:
    return ["--model", str(write_model(folder / "model", architectures=["GPT2LMHeadModel"]))]


def no_weights(folder: Path) -> list[str]:
    return ["--model", str(write_model(folder / "model"))]


def unknown_dtype(folder: Path) -> list[str]:
    return ["--model", str(write_model(folder / "model", torch_dtype="float8_e4m3fn"))]


def no_folder_for_the_report(folder: Path) -> list[str]:
    return ["--report", str(folder / "missing" / "report.html")]


BAD_INPUTS = [
    (no_trace, "TraceError", "missing.csv"),
    (bad_row, "TraceError", "row 2"),
    (no_model, "ModelConfigError", "config.json"),
    (unknown_architecture, "ModelConfigError", "GPT2LMHeadModel"),
    (no_weights, "WeightsFileError", "safetensors"),
    (unknown_dtype, "EngineConfigError", "float8_e4m3fn"),
    (no_folder_for_the_report, "ReportError", "no folder"),
]


@pytest.mark.parametrize(("make", "error", "words"), BAD_INPUTS)
def test_bad_input_is_one_clear_error(
    make: Callable[[Path], list[str]], error: str, words: str, run: Run, tmp_path: Path
) -> None:
    options = make(tmp_path)
    before = sorted(os.listdir(tmp_path))
    result = run(*options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert error in result.stderr
    assert words in result.stderr.replace("\n", "")
    assert "Traceback" not in result.stderr
    assert sorted(os.listdir(tmp_path)) == before

    printed = json.loads(run(*options, "--json").stdout)
    assert printed["error"]["type"] == error
    assert words in printed["error"]["message"]


@pytest.mark.parametrize(
    "options",
    [
        ["--modes", "NONE,QUICK"],
        ["--modes", ""],
        ["--modes", "NONE,none"],
        ["--requests", "0"],
        ["--level", "4"],
        ["--level", "3", "--piecewise", "breaks"],
        ["--piecewise", "compile"],
        ["--level", "2", "--piecewise", "compile"],
        ["--device", "tpu"],
        ["--dtype", "int8"],
        ["--load-format", "gguf"],
        ["--seed", "-1"],
        ["--seed", str(2**64)],
    ],
)
def test_invalid_options_are_refused(options: list[str], run: Run, tmp_path: Path) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert os.listdir(tmp_path) == []


def test_policies_keep_their_order() -> None:
    assert parse_modes(" full, NONE") == (CUDAGraphMode.FULL, CUDAGraphMode.NONE)
    assert [mode.name for mode in parse_modes(DEFAULT_MODES)] == [
        "NONE",
        "PIECEWISE",
        "FULL_DECODE_ONLY",
        "FULL_AND_PIECEWISE",
    ]
    with pytest.raises(typer.BadParameter, match="FULL_DECODE_ONLY"):
        parse_modes("FULL_DECODE")


def test_different_tokens_exit_with_1_and_a_report(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve = compare.serve
    calls: list[int] = []

    def change_a_token_of_the_second(*args: object, **kwargs: object) -> object:
        result = serve(*args, **kwargs)
        calls.append(1)
        if len(calls) == 2:
            first = result.tokens[0]
            result.tokens[0] = ((first[0] + 1) % 512, *first[1:])
        return result

    monkeypatch.setattr(compare, "serve", change_a_token_of_the_second)
    result = run("--json", "--modes", "NONE,FULL_AND_PIECEWISE")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["tokens_identical"] is False
    page = (tmp_path / "graphrt-report.html").read_text(encoding="utf-8")
    assert "DIFFER" in page


def failing_with(error: BaseException) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


def test_a_failed_run_exits_with_1_and_leaves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = VerificationError("FULL 8", expected="equal outputs", found="a difference of 1")
    monkeypatch.setattr(compare, "serve", failing_with(error))
    result = run("--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["type"] == "VerificationError"
    assert "a difference of 1" in result.stderr
    assert os.listdir(tmp_path) == []


def test_an_interrupt_exits_with_130_and_leaves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compare, "serve", failing_with(KeyboardInterrupt()))
    result = run("--json")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert os.listdir(tmp_path) == []
