"""The reference answers: all of them in this process, some also through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphrt import CUDAGraphDispatcher, RuntimeMode
from graphrt.cli.files import read_config
from graphrt.cli.json_output import of_decision, of_resolved
from graphrt.config import Facts, RuntimeConfig, resolve
from graphrt.errors import ConfigError


def cases(shared: Path, name: str) -> list[dict[str, Any]]:
    text = (shared / "vectors" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def config_file(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["sizes.jsonl", "resolve.jsonl"])
def test_every_config_resolves_as_in_the_reference(shared: Path, tmp_path: Path, name: str) -> None:
    wrong = []
    for case in cases(shared, name):
        try:
            answer = of_resolved(resolve(*read_config(config_file(tmp_path, case["config"]))))
        except ConfigError:
            answer = None
        expected = None if case.get("expect_error") else case["expect"]
        found = answer and expected and {field: answer[field] for field in expected}
        if (answer is None) != (expected is None) or found != expected:
            wrong.append((case["id"], expected, found))
    assert wrong == []


def test_every_batch_is_dispatched_as_in_the_reference(shared: Path, tmp_path: Path) -> None:
    wrong = []
    num_batches = 0
    for case in cases(shared, "dispatch.jsonl"):
        plan = resolve(*read_config(config_file(tmp_path, case["config"]))).plan
        dispatcher = CUDAGraphDispatcher(plan)
        for batch_row, expected_row in zip(case["batches"], case["expect"], strict=True):
            batch = dict(zip(case["batch_fields"], batch_row, strict=True))
            expected = dict(zip(case["expect_fields"], expected_row, strict=True))
            if expected["mode"] == "NONE":
                del expected["has_lora"], expected["num_active_loras"]
            batch["exclude"] = frozenset(RuntimeMode[name] for name in batch["exclude"])
            answer = of_decision(dispatcher.dispatch(**batch))
            found = {field: answer[field] for field in expected}
            num_batches += 1
            # The text tells true, 1 and 1.0 apart.
            if json.dumps(found) != json.dumps(expected):
                wrong.append((case["id"], batch, expected, found))
    assert wrong == []
    assert num_batches > 4000


def test_adapter_counts_are_those_of_the_reference(shared: Path) -> None:
    text = (shared / "vectors" / "lora_counts.json").read_text(encoding="utf-8")
    for case in json.loads(text)["cases"]:
        config = RuntimeConfig(max_loras=case["max_loras"], lora_capture=case["lora_capture"])
        plan = resolve(config, Facts()).plan
        assert list(plan.lora_counts) == [0, *case["captured"]], case
        assert list(plan.lora_padding_table) == case["rounded"], case


def graphrt(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "graphrt", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("place", [0, 40, 114])
def test_the_command_line_resolves_as_the_reference_does(
    shared: Path, tmp_path: Path, place: int
) -> None:
    case = cases(shared, "sizes.jsonl")[place]
    done = graphrt("resolve", config_file(tmp_path, case["config"]))
    answer = json.loads(done.stdout)
    if case.get("expect_error"):
        assert done.returncode == 2
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"type", "message"}
    else:
        assert done.returncode == 0
        assert {field: answer[field] for field in case["expect"]} == case["expect"]


def test_the_command_line_dispatches_as_the_reference_does(shared: Path, tmp_path: Path) -> None:
    case = cases(shared, "dispatch.jsonl")[1]
    batches = tmp_path / "batches.jsonl"
    rows = [dict(zip(case["batch_fields"], row, strict=True)) for row in case["batches"]]
    batches.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = graphrt("dispatch", config_file(tmp_path, case["config"]), batches)
    assert done.returncode == 0
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for answer, row in zip(answers, case["expect"], strict=True):
        expected = dict(zip(case["expect_fields"], row, strict=True))
        if expected["mode"] == "NONE":
            del expected["has_lora"], expected["num_active_loras"]
        assert {field: answer[field] for field in expected} == expected
