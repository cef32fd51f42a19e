"""The command line in a process of its own: bad input and Ctrl-C."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lab import HF_LLAMA
from ranks_lab import launcher

CONFIG = {**HF_LLAMA, "torch_dtype": "float32"}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


# The process has loaded torch already, which takes seconds.
COMMAND = """
import os, sys
from graphrt.cli import main
folder, *words = sys.argv[1:]
os.chdir(folder)
main(words)
"""


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
    (done,) = launcher().run(COMMAND, str(tmp_path), *command, "--json")
    assert done.status == 2
    answer = json.loads(done.stdout)["error"]
    assert answer["type"] == error
    for word in words:
        assert word in answer["message"]
    assert error in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("moment", ["capture", "serve"])
def test_ctrl_c_during_a_run_is_status_130_and_leaves_no_file(moment: str, tmp_path: Path) -> None:
    (ended,) = launcher().run(INTERRUPTED, moment, str(tmp_path))
    assert ended.status == 130, ended.stderr
    assert ended.stdout == "in the middle\n"
    assert "Traceback" not in ended.stderr
    assert "ResourceWarning" not in ended.stderr
    assert os.listdir(tmp_path) == []


# The command itself; Ctrl-C comes in the fifth call of the capture or of the serving.
INTERRUPTED = """
import os, signal, sys
from graphrt.cli import main
from graphrt_llm.models import CausalLM
import graphrt_llm.serving as serving

# A test run in the background ignores interrupts, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
moment, folder = sys.argv[1:]
os.chdir(folder)
calls = 0
def interrupt():
    global calls
    calls += 1
    if calls == 5:
        print("in the middle", flush=True)
        os.kill(os.getpid(), signal.SIGINT)

forward = CausalLM.forward
def interrupted_forward(self, *args, **kwargs):
    if moment == "capture":
        interrupt()
    return forward(self, *args, **kwargs)
CausalLM.forward = interrupted_forward

tokens = serving.prompt_tokens
def interrupted_tokens(*args):
    if moment == "serve":
        interrupt()
    return tokens(*args)
serving.prompt_tokens = interrupted_tokens

modes = "NONE" if moment == "serve" else "FULL"
# Too many to finish: only the interrupt ends this run.
requests = "10000" if moment == "serve" else "4"
main(["demo", "--device", "simulated", "--modes", modes, "--requests", requests, "--json"])
"""
