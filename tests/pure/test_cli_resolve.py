"""``graphrt resolve``: its answer, its errors, its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from graphrt import CompilationConfig, Facts, RuntimeConfig
from graphrt.cli import main
from graphrt.cli.files import COMPILATION_KEYS, FACT_KEYS, RUNTIME_KEYS

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
        "query_len",
        "lora_counts",
        "limits",
        "capture_order",
    ]
    assert answer["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert answer["max_capture_size"] == 512
    assert answer["num_keys"] == {"PIECEWISE": 51, "FULL": 35}
    assert answer["adjustments"] == []
    assert answer["limits"] == {"max_num_seqs": 256, "max_num_batched_tokens": 8192}


def test_plan_of_compiling_is_told_where_something_compiles(
    run: Run, write: Callable[[Any], Path]
) -> None:
    config = {
        "compilation": {
            "level": 3,
            "compile_ranges_endpoints": [8],
            "guard_policy": "keep",
            "inductor_compile_config": {"post_grad_fusion_options": {"a": {"b": [1]}}},
        },
        "attention_ops": ["llm::attention"],
    }
    answer = json.loads(run("resolve", write(config), "--json")[1])
    assert len(answer["compile"].pop("hash")) == 64
    assert answer["compile"] == {
        "level": 3,
        "backend": "eager",
        "splitting_ops": ["llm::attention"],
        "ranges": [[1, 8], [9, 8192]],
        "sizes": [],
    }
    changed = answer["adjustments"][0]
    asked = {"post_grad_fusion_options": {"a": {"b": [1]}}}
    assert (changed["from"], changed["to"]) == (asked, {})
    assert "level 3, backend eager, cut at llm::attention" in run("resolve", write(config))[1]


def test_json_lists_every_key_in_capture_order(run: Run, write: Callable[[Any], Path]) -> None:
    config = {"compilation": {"cudagraph_capture_sizes": [2, 8]}, "max_num_seqs": 4}
    answer = json.loads(run("resolve", write(config), "--json")[1])
    keys = [(key["mode"], key["num_tokens"], key["num_reqs"]) for key in answer["capture_order"]]
    assert keys == [("PIECEWISE", 8, None), ("PIECEWISE", 2, None), ("FULL", 2, 2)]
    first = answer["capture_order"][0]
    assert set(first) == {
        *("mode", "num_tokens", "num_reqs", "uniform", "has_lora", "num_active_loras")
    }


def test_every_key_of_the_contract_is_accepted(run: Run, write: Callable[[Any], Path]) -> None:
    config = {
        "compilation": {
            "level": None,
            "cudagraph_mode": "full_and_piecewise",
            "cudagraph_capture_sizes": None,
            "max_cudagraph_capture_size": None,
            "compile_sizes": None,
            "splitting_ops": None,
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


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def type_in(text: str) -> None:
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(text.encode())))

    return type_in


def test_a_dash_reads_the_config_from_stdin(
    run: Run, write: Callable[[Any], Path], type_in: Callable[[str], None]
) -> None:
    config = {"max_num_seqs": 4}
    type_in(json.dumps(config))
    assert run("resolve", "-", "--json") == run("resolve", write(config), "--json")
    type_in('{"max_num_seq": 4}')
    assert "config stdin" in error_of(run("resolve", "-", "--json"))["message"]


def test_the_sample_has_every_key_and_resolves(
    run: Run, write: Callable[[Any], Path], type_in: Callable[[str], None]
) -> None:
    status, sample, _ = run("resolve", "--schema")
    assert status == 0
    type_in(sample)
    assert run("resolve", "-", "--json") == run("resolve", write({}), "--json")
    value = json.loads(run("resolve", "--schema", "--json")[1])
    assert value.keys() == {"compilation", *RUNTIME_KEYS, *FACT_KEYS}
    kinds = (CompilationConfig, RuntimeConfig, Facts)
    for kind, keys in zip(kinds, (COMPILATION_KEYS, RUNTIME_KEYS, FACT_KEYS), strict=True):
        assert set(keys) < {item.name for item in fields(kind)}
    # Every key has a comment of its own, or shares one with the key above.
    assert sample.count("//") >= len(value) + len(value["compilation"]) - 1


def test_an_error_counts_the_comment_lines_too(run: Run, write: Callable[[Any], Path]) -> None:
    message = error_of(run("resolve", write("// one\n{\n  // three\n  oops}"), "--json"))["message"]
    assert "line 4" in message


@pytest.mark.parametrize(
    "words", [["resolve"], ["resolve", "c.json", "--schema"], ["dispatch", "-", "-"]]
)
def test_input_that_is_not_one_source_is_an_error(run: Run, words: list[str]) -> None:
    error = error_of(run(*words, "--json"))
    assert error["type"] == "ConfigError"
    assert error["message"].startswith(f"graphrt {words[0]}\n")


@pytest.mark.parametrize("columns", ["44", "60", "80"])
def test_a_narrow_terminal_breaks_no_name(
    run: Run, write: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    config = {
        "compilation": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [4, 99]},
        "max_num_batched_tokens": 50,
        "max_loras": 2,
        "attention_support": "UNIFORM_BATCH",
    }
    out = run("resolve", write(config))[1]
    for name in ("FULL -> FULL_AND_PIECEWISE", "cudagraph_capture_sizes: [4, 99] -> [4]"):
        assert name in out
    batches = write(config).with_name("b.jsonl")
    batches.write_text(
        '{"num_tokens": 3, "num_active_loras": 2, "exclude": ["FULL"]}\n'
        '{"num_tokens": 3, "exclude": ["PIECEWISE", "FULL"]}\n',
        encoding="utf-8",
    )
    out = run("dispatch", write(config), batches)[1]
    for name in ("PIECEWISE", "EXCLUDED", "LoRA", "PADDED"):
        assert name in out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= int(columns)


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


def test_schema_without_docstrings_has_the_same_keys(run: Run) -> None:
    words = ("resolve", "--schema", "--json")
    command = [sys.executable, "-OO", "-m", "graphrt", *words]
    stripped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(stripped.stdout) == json.loads(run(*words)[1])
