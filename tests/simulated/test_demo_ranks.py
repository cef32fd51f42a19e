"""``graphrt demo --ranks 2``: two processes share one traffic, and the tokens are those of one."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from graphrt_llm.demo.command import demo as command_of_one

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

ASKED = ("--requests", "12", "--modes", "NONE,FULL_DECODE_ONLY", "--report", "none", "--json")


@cache
def demo_of_one() -> Any:
    app = typer.Typer()
    app.command()(command_of_one)
    done = CliRunner().invoke(app, ASKED)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def demo(*asked: str) -> Any:
    command = [sys.executable, "-W", "error", "-m", "graphrt", "demo", *ASKED, *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_ranks_give_the_tokens_of_one() -> None:
    alone, shared = demo_of_one(), demo("--ranks", "2")
    assert shared["tokens_identical"]
    assert shared["tokens_digest"] == alone["tokens_digest"]
    assert alone["ranks"] == []
    assert [part["num_requests"] for part in shared["ranks"]] == [6, 6]
    assert [list(part["modes"]) for part in shared["ranks"]] == [["NONE", "FULL_DECODE_ONLY"]] * 2
    assert shared["modes"] == shared["ranks"][0]["modes"]


def test_ranks_that_share_layers_all_give_the_tokens_of_one() -> None:
    shared = demo("--ranks", "2", "--tensor-parallel")
    assert shared["tokens_identical"]
    assert shared["tokens_digest"] == demo_of_one()["tokens_digest"]
    assert [part["num_requests"] for part in shared["ranks"]] == [12, 12]


def test_bad_input_of_all_ranks_ends_with_its_status() -> None:
    command = [sys.executable, "-m", "graphrt", "demo", "--ranks", "2", "--trace", "no-such.csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "TraceError" in done.stderr


def test_error_of_all_ranks_is_one_json_object() -> None:
    asked = ("--ranks", "2", "--tensor-parallel", "--expert-parallel")
    command = [sys.executable, "-m", "graphrt", "demo", *ASKED, *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["type"] == "EngineConfigError"
