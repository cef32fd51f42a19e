"""``graphrt demo --ranks 2``: two processes share one traffic, and the tokens are those of one."""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
import typer
from typer.testing import CliRunner

from graphrt.cli import main
from graphrt_llm.demo.command import demo as command_of_one
from ranks_lab import launcher

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

ASKED = ("--requests", "12", "--modes", "NONE,FULL_DECODE_ONLY", "--report", "none", "--json")


@cache
def demo_of_one() -> Any:
    app = typer.Typer()
    app.command()(command_of_one)
    done = CliRunner().invoke(app, ASKED)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


COMMAND = """
import sys
from graphrt.cli import main
from graphrt_llm.demo import setup
setup.CAPTURE_SIZES = (2, 8, 16)  # A demo's time is its captures.
main(["demo", *sys.argv[1:]])
"""


def demo(*asked: str) -> Any:
    """What the first of two ranks printed, each started as by torchrun."""
    ended = launcher().run(COMMAND, *ASKED, *asked, world=2)
    assert [rank.status for rank in ended] == [0, 0], ended
    assert ended[1].stdout == ""
    return json.loads(ended[0].stdout)


def end_of(monkeypatch: pytest.MonkeyPatch, *asked: str) -> object:
    """The exit status of the command, which starts the ranks by itself."""
    monkeypatch.setattr(sys, "argv", ["graphrt", "demo", *ASKED, "--ranks", "2", *asked])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_two_ranks_give_the_tokens_of_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = demo_of_one()
    assert not end_of(monkeypatch)
    shared = json.loads(capfd.readouterr().out)
    assert shared["tokens_identical"]
    assert shared["tokens_digest"] == alone["tokens_digest"]
    assert alone["ranks"] == []
    assert [part["num_requests"] for part in shared["ranks"]] == [6, 6]
    assert [list(part["modes"]) for part in shared["ranks"]] == [["NONE", "FULL_DECODE_ONLY"]] * 2
    assert shared["modes"] == shared["ranks"][0]["modes"]


def test_ranks_that_share_layers_all_give_the_tokens_of_one() -> None:
    shared = demo("--tensor-parallel")
    assert shared["tokens_identical"]
    assert shared["tokens_digest"] == demo_of_one()["tokens_digest"]
    assert [part["num_requests"] for part in shared["ranks"]] == [12, 12]


def test_bad_input_of_all_ranks_ends_with_its_status(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert end_of(monkeypatch, "--trace", "no-such.csv") == 2
    assert "TraceError" in capfd.readouterr().err


def test_error_of_all_ranks_is_one_json_object(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert end_of(monkeypatch, "--tensor-parallel", "--expert-parallel") == 2
    out, err = capfd.readouterr()
    assert json.loads(out)["error"]["type"] == "EngineConfigError"
    assert err.count("EngineConfigError") == 2
