"""``graphrt resolve``: its answer, its errors, its tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphrt.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``graphrt`` in this process; return exit status, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def write(config: Any) -> Path:
        path = tmp_path / "config.json"
        text = config if isinstance(config, str) else json.dumps(config)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def error_of(result: tuple[int, str, str]) -> dict[str, str]:
    status, out, err = result
    assert status == 2
    assert err
    answer = json.loads(out)
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"type", "message"}
    return answer["error"]  # type: ignore[no-any-return]


def test_the_answer_of_an_empty_config(run: Run, write: Callable[[Any], Path]) -> None:
    status, out, err = run("resolve", write({}), "--json")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert list(answer) == [
        "cudagraph_mode",
        "capture_sizes",
        "decode_capture_sizes",
        "max_capture_size",
        "num_keys",
        "adjustments",
    ]
    assert answer["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert answer["max_capture_size"] == 512
    assert answer["num_keys"] == {"PIECEWISE": 51, "FULL": 35}
    assert answer["adjustments"] == []


def test_every_key_of_the_contract_is_accepted(run: Run, write: Callable[[Any], Path]) -> None:
    config = {
        "compilation": {
            "level": None,
            "cudagraph_mode": "full_and_piecewise",
            "cudagraph_capture_sizes": None,
            "max_cudagraph_capture_size": None,
            "compile_sizes": None,
            "cudagraph_specialize_lora": True,
        },
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "num_speculative_tokens": 0,
        "max_loras": 0,
        "lora_capture": "powers_of_two",
        "attention_support": "ALWAYS",
        "piecewise_available": True,
    }
    assert run("resolve", write(config), "--json") == run("resolve", write({}), "--json")


def test_adjustments_are_told_from_and_to(run: Run, write: Callable[[Any], Path]) -> None:
    config = {
        "compilation": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [4, 99]},
        "max_num_batched_tokens": 50,
        "attention_support": "UNIFORM_BATCH",
    }
    _, out, _ = run("resolve", write(config), "--json")
    mode, sizes = json.loads(out)["adjustments"]
    assert list(mode) == ["field", "from", "to", "reason"]
    assert (mode["field"], mode["from"], mode["to"]) == (
        "cudagraph_mode",
        "FULL",
        "FULL_AND_PIECEWISE",
    )
    assert (sizes["from"], sizes["to"]) == ([4, 99], [4])


def test_strict_refuses_adjustments(run: Run, write: Callable[[Any], Path]) -> None:
    path = write({"compilation": {"cudagraph_mode": "PIECEWISE"}, "piecewise_available": False})
    assert run("resolve", path)[0] == 0
    assert error_of(run("resolve", path, "--strict", "--json"))["type"] == "ConfigError"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"max_num_seq": 4}, ["max_num_seq", "'max_num_seqs'"]),
        (
            {"compilation": {"cudagraph_mod": "FULL"}},
            ["compilation.cudagraph_mod", "'cudagraph_mode'"],
        ),
        ({"interactivity": True}, ["interactivity"]),
        ({"compilation": {"cudagraph_num_of_warmups": 1}}, ["cudagraph_num_of_warmups"]),
        ({"compilation": {"level": 4}}, ["compilation.level", "0, 1, 2, 3"]),
        ({"compilation": {"cudagraph_mode": "ALL"}}, ["FULL_DECODE_ONLY"]),
        ({"compilation": []}, ["compilation", "a list"]),
        ({"attention_support": "SOMETIMES"}, ["attention_support", "UNIFORM_BATCH"]),
        ({"attention_support": None}, ["attention_support"]),
        ({"piecewise_available": "yes"}, ["piecewise_available"]),
        ({"max_num_seqs": 4.0}, ["max_num_seqs", "4.0"]),
        ({"max_num_seqs": True}, ["max_num_seqs", "True"]),
        ({"max_num_seqs": None}, ["max_num_seqs"]),
        ('{"max_loras": 1, "max_loras": 2}', ["max_loras", "twice"]),
        ([1], ["a list"]),
        ("{", ["line 1"]),
        ("", ["JSON"]),
        ("[" * 100_000, ["JSON"]),
    ],
)
def test_a_bad_config_is_an_error_that_names_the_key(
    run: Run, write: Callable[[Any], Path], config: Any, named: list[str]
) -> None:
    error = error_of(run("resolve", write(config), "--json"))
    assert error["type"] == "ConfigError"
    for text in named:
        assert text in error["message"]


def test_every_problem_of_a_config_is_told_at_once(run: Run, write: Callable[[Any], Path]) -> None:
    config = {"max_loras": -1, "extra": 1, "attention_support": "X", "compilation": {"level": 9}}
    message = error_of(run("resolve", write(config), "--json"))["message"]
    assert "4 problems" in message


def test_a_file_that_cannot_be_read_is_an_error(run: Run, tmp_path: Path) -> None:
    missing = error_of(run("resolve", tmp_path / "none.json", "--json"))
    assert "none.json" in missing["message"]
    assert error_of(run("resolve", tmp_path, "--json"))["type"] == "ConfigError"
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe4"}')
    assert error_of(run("resolve", tmp_path / "latin.json", "--json"))["type"] == "ConfigError"


def test_without_json_errors_are_text_on_stderr(run: Run, write: Callable[[Any], Path]) -> None:
    status, out, err = run("resolve", write({"max_loras": -1}))
    assert (status, out) == (2, "")
    assert err.startswith("ConfigError: ")
    assert "max_loras" in err


def test_without_json_a_person_reads_tables(run: Run, write: Callable[[Any], Path]) -> None:
    config = {"compilation": {"cudagraph_mode": "FULL"}, "attention_support": "UNIFORM_BATCH"}
    status, out, err = run("resolve", write(config))
    assert (status, err) == (0, "")
    assert "8..256 by 8" in out
    assert "Adjustments" in out
    assert "Every option is used as asked" in run("resolve", write({}))[1]
