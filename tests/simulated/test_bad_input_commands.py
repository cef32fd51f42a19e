"""The command line in a process of its own: bad input and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lab import HF_LLAMA

CONFIG = {**HF_LLAMA, "torch_dtype": "float32"}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def graphrt(*words: str, folder: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "graphrt", *words],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def truncated_safetensors(folder: Path) -> list[str]:
    import torch
    from safetensors.torch import save_file

    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.embed_tokens.weight": torch.zeros(64, 32)}, model / "model.safetensors")
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return ["demo", "--model", str(model)]


def malformed_row(folder: Path) -> list[str]:
    rows = "2023-11-16 18:15:46.6805900,374,44\n" * 2 + "2023-11-16 18:15:50.9951690,396\n"
    (folder / "trace.csv").write_text(AZURE + rows)
    return ["demo", "--trace", "trace.csv"]


def unknown_key(folder: Path) -> list[str]:
    (folder / "config.json").write_text('{"compilation": {"cudagraph_capture_size": [1]}}')
    return ["resolve", "config.json"]


def above_the_limits(folder: Path) -> list[str]:
    sizes = {"cudagraph_capture_sizes": [64, 128], "max_cudagraph_capture_size": 128}
    config = {"compilation": sizes, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return ["resolve", "config.json"]


def zero_and_negative(folder: Path) -> list[str]:
    config = {"max_num_seqs": 0, "compilation": {"cudagraph_capture_sizes": [-8]}}
    (folder / "config.json").write_text(json.dumps(config))
    return ["resolve", "config.json"]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (unknown_key, "ConfigError", ["cudagraph_capture_size", "cudagraph_capture_sizes"]),
        (above_the_limits, "ConfigError", ["cudagraph_capture_sizes", "32"]),
        (zero_and_negative, "ConfigError", ["max_num_seqs", "cudagraph_capture_sizes", "-8"]),
        (malformed_row, "TraceError", ["trace.csv", "row 4"]),
        (truncated_safetensors, "WeightsFileError", ["model.safetensors"]),
    ],
)
def test_bad_input_is_status_2_with_one_typed_message(
    make: Callable[[Path], list[str]], error: str, words: Sequence[str], tmp_path: Path
) -> None:
    command = make(tmp_path)
    before = sorted(os.listdir(tmp_path))
    done = graphrt(*command, "--json", folder=tmp_path)
    assert done.returncode == 2
    answer = json.loads(done.stdout)["error"]
    assert answer["type"] == error
    for word in words:
        assert word in answer["message"]
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("moment", ["capture", "serve"])
def test_ctrl_c_during_a_run_is_status_130_and_leaves_no_file(moment: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, moment],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        # The child prints this in the middle of its run, and then goes on.
        assert process.stdout.readline().strip() == "in the middle"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert "ResourceWarning" not in err
    assert os.listdir(tmp_path) == []


# The command itself; its model prints a line in the fifth call of the capture or of the serving.
INTERRUPTIBLE = """
import signal, sys
from graphrt.cli import main
from graphrt_llm.models import CausalLM
import graphrt_llm.serving as serving

# A test run in the background ignores interrupts, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
moment = sys.argv[1]
calls = 0
def announce():
    global calls
    calls += 1
    if calls == 5:
        print("in the middle", flush=True)

forward = CausalLM.forward
def announcing_forward(self, *args, **kwargs):
    if moment == "capture":
        announce()
    return forward(self, *args, **kwargs)
CausalLM.forward = announcing_forward

tokens = serving.prompt_tokens
def announcing_tokens(*args):
    if moment == "serve":
        announce()
    return tokens(*args)
serving.prompt_tokens = announcing_tokens

modes = "NONE" if moment == "serve" else "FULL"
# Too many to finish: only the interrupt ends this run.
requests = "10000" if moment == "serve" else "4"
main(["demo", "--device", "simulated", "--modes", modes, "--requests", requests, "--json"])
"""
