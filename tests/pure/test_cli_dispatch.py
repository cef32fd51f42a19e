"""``graphrt dispatch``: one answer a line, none if a line is wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphrt.cli import main

Run = Callable[..., tuple[int, str, str]]
CONFIG = {
    "compilation": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    "max_num_seqs": 8,
    "max_loras": 2,
}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Dispatch ``lines``, from a file or from stdin; return exit status, stdout and stderr."""

    def run(lines: str | bytes, *options: str, stdin: bool = False) -> tuple[int, str, str]:
        config, batches = tmp_path / "config.json", tmp_path / "batches.jsonl"
        config.write_text(json.dumps(CONFIG), encoding="utf-8")
        data = lines.encode() if isinstance(lines, str) else lines
        batches.write_bytes(data)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        with pytest.raises(SystemExit) as caught:
            main(["dispatch", str(config), "-" if stdin else str(batches), *options])
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return run


LINES = """{"num_tokens": 3, "uniform": true, "num_active_loras": 1}
{"num_tokens": 9, "exclude": ["full", "PIECEWISE"]}

{"num_tokens": 17}
"""
ANSWERS = [
    '{"mode": "FULL", "num_tokens": 4, "num_reqs": 4, "uniform": true, "has_lora": true, '
    '"num_active_loras": 1, "reason": "PADDED"}',
    '{"mode": "NONE", "num_tokens": 9, "num_reqs": null, "uniform": false, "has_lora": false, '
    '"num_active_loras": 0, "reason": "EXCLUDED"}',
    '{"mode": "NONE", "num_tokens": 17, "num_reqs": null, "uniform": false, "has_lora": false, '
    '"num_active_loras": 0, "reason": "ABOVE_MAX"}',
]


@pytest.mark.parametrize("stdin", [False, True])
@pytest.mark.parametrize("lines", [LINES, LINES.rstrip("\n"), LINES.replace("\n", "\r\n")])
def test_one_answer_a_line(run: Run, lines: str, stdin: bool) -> None:
    status, out, err = run(lines, "--json", stdin=stdin)
    assert (status, err) == (0, "")
    assert out.splitlines() == ANSWERS


def test_no_lines_no_answers(run: Run) -> None:
    assert run("", "--json") == (0, "", "")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"num_token": 3}', ["'num_tokens'"]),
        ('{"uniform": true}', ["num_tokens"]),
        ('{"num_tokens": 3, "unifrom": true}', ["'uniform'"]),
        ('{"num_tokens": true}', ["True"]),
        ('{"num_tokens": 3.0}', ["3.0"]),
        ('{"num_tokens": -3}', ["-3"]),
        ('{"num_tokens": null}', ["None"]),
        ('{"num_tokens": 3, "uniform": 1}', ["uniform"]),
        ('{"num_tokens": 3, "num_active_loras": 3}', ["max_loras = 2"]),
        ('{"num_tokens": 3, "num_active_loras": "1"}', ["num_active_loras"]),
        ('{"num_tokens": 3, "exclude": "FULL"}', ["exclude"]),
        ('{"num_tokens": 3, "exclude": ["ALL"]}', ["PIECEWISE"]),
        ('{"num_tokens": 3, "exclude": [2]}', ["exclude"]),
        ('{"num_tokens": 3, "num_tokens": 4}', ["twice"]),
        ("[3]", ["a list"]),
        ("3", ["a number"]),
        ("null", ["null"]),
        ('{"num_tokens": 3', ["JSON"]),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_answered(run: Run, line: str, named: list[str]) -> None:
    status, out, err = run(f'{{"num_tokens": 3}}\n\n{line}\n{{"num_tokens": -1}}\n', "--json")
    assert status == 2
    answer = json.loads(out)
    assert set(answer) == {"error"}
    assert answer["error"]["type"] == "BatchError"
    for text in ("line 3", *named):
        assert text in answer["error"]["message"]
        assert text in err


def test_bytes_that_are_no_text_are_named_by_line(run: Run) -> None:
    status, out, _ = run(b'{"num_tokens": 3}\n{"num_tokens": \xff}\n', "--json")
    assert status == 2
    assert "line 2" in json.loads(out)["error"]["message"]


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        main(["dispatch", str(tmp_path / "c.json"), str(tmp_path / "none"), "--json"])
    assert caught.value.code == 2
    assert "none" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_without_json_a_person_reads_a_table(run: Run) -> None:
    status, out, err = run(LINES)
    assert (status, err) == (0, "")
    assert "3 uniform" in out
    assert "4 tokens, 4" in out
    assert "ABOVE_MAX" in out
