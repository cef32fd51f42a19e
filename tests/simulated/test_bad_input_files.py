"""Files that are no files, that never end, or whose JSON says a thing twice: one typed error."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphrt.cli.files import read_batches, read_config
from graphrt.errors import BatchError, ConfigError, TraceError, shown
from graphrt.files import open_regular
from graphrt.planner import read_azure_csv, read_mooncake_jsonl, read_trace
from graphrt_llm import EngineConfig
from graphrt_llm.errors import EngineConfigError, ModelConfigError, WeightsFileError
from graphrt_llm.models import CausalLM, ModelConfig
from graphrt_llm.weights import INDEX, load_safetensors
from lab import HF_LLAMA

DEEP = "[" * 100_000
ROW = '{"timestamp": 1, "input_length": 1, "output_length": 1}'


def config(path: Path) -> Any:
    return read_config(path)


def batches(path: Path) -> Any:
    return list(read_batches(str(path)))


def trace(path: Path) -> Any:
    return read_trace(path)


def model(path: Path) -> Any:
    return ModelConfig.from_directory(renamed(path, "config.json"))


def index(path: Path) -> Any:
    folder = renamed(path, INDEX)
    (folder / "config.json").write_text(json.dumps(HF_LLAMA))
    load_safetensors(CausalLM(ModelConfig.from_directory(folder)), folder)


def shard(path: Path) -> Any:
    folder = renamed(path, "part.safetensors")
    (folder / "config.json").write_text(json.dumps(HF_LLAMA))
    (folder / INDEX).write_text('{"weight_map": {"norm.weight": "part.safetensors"}}')
    load_safetensors(CausalLM(ModelConfig.from_directory(folder)), folder)


def renamed(path: Path, name: str) -> Path:
    folder = path.parent / "model"
    folder.mkdir(exist_ok=True)
    (folder / name).symlink_to(path)
    return folder


READERS: list[tuple[Callable[[Path], Any], type[Exception]]] = [
    (config, ConfigError),
    (batches, BatchError),
    (trace, TraceError),
    (model, ModelConfigError),
    (shard, WeightsFileError),
]
BY_NAME = pytest.mark.parametrize(
    ("read", "error"), READERS, ids=[read.__name__ for read, _ in READERS]
)


@BY_NAME
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "nothing"])
def test_what_is_no_file_is_refused_before_it_is_read(
    read: Callable[[Path], Any], error: type[Exception], kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "input"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    with pytest.raises(error):
        read(path)


@BY_NAME
def test_file_of_gigabytes_is_refused_by_size(
    read: Callable[[Path], Any], error: type[Exception], tmp_path: Path
) -> None:
    path = tmp_path / "input"
    with path.open("wb") as file:
        file.truncate(64 * 2**30)  # One line of zeros that takes no room on the disk.
    with pytest.raises(error):
        read(path)


def test_index_that_is_no_file_or_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "input"
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(WeightsFileError):
        index(path)


JSON_TEXTS = {
    "deep": DEEP,
    "deep object": '{"a":' * 100_000,
    "infinity": '{"rms_norm_eps": Infinity, "max_num_seqs": 8}',
    "nan": '{"rms_norm_eps": NaN}',
    "overflow": '{"rms_norm_eps": 1e999}',
    "twice": '{"max_num_seqs": 8, "max_num_seqs": 8}',
    "twice inside": '{"compilation": {"level": 0, "level": 0}}',
    "twice in a list": '{"a": [{"level": 0, "level": 0}]}',
    "digits": '{"max_num_seqs": ' + "9" * 5000 + "}",
    "long name": json.dumps({"x" * 10**6: 1}),
    "deep value": '{"max_num_seqs": ' + "[" * 900 + "]" * 900 + "}",
    "no text": "\udcff",
}


@pytest.mark.parametrize("name", JSON_TEXTS)
@pytest.mark.parametrize(
    ("read", "error"), [*READERS[:4], (index, WeightsFileError)], ids=lambda item: item.__name__
)
def test_json_that_says_no_one_thing_is_a_typed_error(
    read: Callable[[Path], Any], error: type[Exception], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "input"
    path.write_bytes(JSON_TEXTS[name].encode(errors="surrogateescape"))
    with pytest.raises(error) as caught:
        read(path)
    assert len(str(caught.value)) < 4_000


@pytest.mark.parametrize(
    "change",
    [
        '"rms_norm_eps": Infinity',
        '"rms_norm_eps": NaN',
        '"rope_theta": 1e999',
        '"vocab_size": 64',
        '"rope_parameters": {"rope_theta": 1e4, "rope_theta": 1e5}',
        '"num_hidden_layers": 1000000000',
    ],
)
def test_model_config_with_one_wrong_value_is_refused(change: str, tmp_path: Path) -> None:
    text = json.dumps(HF_LLAMA)
    if change.startswith('"num_hidden_layers"'):
        text = text.replace('"num_hidden_layers": 1', change)
    else:
        text = f"{text[:-1]}, {change}}}"
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_model_number_that_is_not_finite_is_refused(name: str, value: float) -> None:
    fields = {slot: getattr(ModelConfig.tiny(), slot) for slot in ModelConfig.__slots__}
    with pytest.raises(ModelConfigError):
        ModelConfig(**{**fields, name: value})


@pytest.mark.parametrize(
    "row",
    [
        '{"timestamp": 1, "timestamp": 2, "input_length": 1, "output_length": 1}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "a": {"b": 1, "b": 2}}',
        '{"timestamp": 1, "input_length": 1, "output_length": ' + "[" * 5000 + "}",
        '{"timestamp": 1, "input_length": 1, "output_length": ' + "[" * 400 + "]" * 400 + "}",
        '{"timestamp": 1, "input_length": 1, "output_length": 1000000000000}',
        '{"timestamp": 1, "input_length": 1, "output_length": 1, "a": Infinity}',
        " " * (2**20 + 1) + ROW,
    ],
    ids=range(7),
)
def test_trace_row_that_says_no_one_thing_is_named(row: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(f"{ROW}\n{row}\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert caught.value.subject == f"{path}, row 2"
    assert len(read_trace(path, limit=1)) == 1


AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize("head", [b"", AZURE], ids=["at first", "after the header"])
@pytest.mark.parametrize("limit", [None, 1])
def test_trace_of_blank_rows_is_refused(head: bytes, limit: int | None, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(head + b"\n" * (10**6 + 1))
    with pytest.raises(TraceError, match="blank"):
        read_trace(path, limit)


def test_whole_trace_of_gigabytes_is_refused_and_its_first_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with path.open("wb") as file:
        file.write(f"{ROW}\n".encode())
        file.truncate(10 * 2**30)
    with pytest.raises(TraceError, match="bytes"):
        read_trace(path)
    assert len(read_trace(path, limit=1)) == 1


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1", float("nan")])
def test_limit_of_a_trace_that_is_no_count_is_refused(limit: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(f"{ROW}\n{ROW}\n")
    with pytest.raises(TraceError, match="limit"):
        read_trace(path, limit)


@pytest.mark.parametrize("text", ["{" + '"a": 1, ' * 50_000 + ROW[1:], "x," * 100_000])
def test_error_of_a_long_row_is_short(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(f"{ROW}\n{text}")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert len(str(caught.value)) < 4_000


def test_path_with_a_zero_byte_is_refused(tmp_path: Path) -> None:
    for read, error in READERS[:3]:
        with pytest.raises(error):
            read(tmp_path / "a\0b")


def test_endless_stdin_is_refused_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return len(buffer)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    with pytest.raises(BatchError, match="bytes"):
        list(read_batches("-"))


LIMITED = """
import resource, sys
import graphrt.cli, graphrt.cli.files, graphrt.config, graphrt_llm.demo.command
import graphrt_llm.demo.setup
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, in_use + 2**30))
for words in (
    ["resolve", "/dev/zero"],
    ["resolve", "pipe"],
    ["resolve", "long"],
    ["dispatch", "config.json", "/dev/zero"],
    ["dispatch", "config.json", "long"],
    ["dispatch", "config.json", "pipe"],
    ["dispatch", "config.json", "-"],
    ["resolve", "keys"],
    ["simulate-ranks", "--ranks", "2", "--trace", "blank"],
    ["simulate-ranks", "--ranks", "2", "--trace", "tokens"],
    ["cache", "list", "--dir", "x" * 5_000],
    ["demo", "--trace", "/dev/zero"],
    ["demo", "--trace", "pipe"],
    ["demo", "--trace", "long"],
    ["demo", "--model", "model"],
):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    try:
        graphrt.cli.main([*words, "--json"])
    except SystemExit as leaving:
        assert leaving.code == 2, (words, leaving.code)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 4, words
"""


@pytest.mark.skipif(not os.path.exists("/proc/kmsg"), reason="a file of Linux's that waits")
@pytest.mark.parametrize(("read", "error"), [READERS[0], *READERS[2:]], ids=lambda i: i.__name__)
def test_file_that_waits_for_what_comes_is_not_waited_for(
    read: Callable[[Path], Any], error: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / "input").symlink_to("/proc/kmsg")
    with pytest.raises(error):
        read(tmp_path / "input")


@pytest.mark.skipif(sys.platform != "linux", reason="limits and sizes of a process are Linux's")
def test_commands_refuse_endless_input_in_little_memory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "config.json")
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "long").open("wb") as file:
        file.truncate(64 * 2**30)
    (tmp_path / "keys").write_text(json.dumps({f"key{number}": 1 for number in range(200_000)}))
    (tmp_path / "blank").write_bytes(b"\n" * (200 * 2**20))
    (tmp_path / "tokens").write_text(ROW[:-1] + "000000000}")
    with Path("/dev/zero").open("rb") as zeros:
        done = subprocess.run(
            [sys.executable, "-c", LIMITED],
            cwd=tmp_path,
            stdin=zeros,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    errors = [json.loads(line)["error"]["type"] for line in done.stdout.splitlines()]
    assert errors == [
        *["ConfigError"] * 3,
        *["BatchError"] * 4,
        *["ConfigError", "TraceError", "TraceError", "ConfigError"],
        *["TraceError"] * 3,
        "ModelConfigError",
    ]


NO_SIZES = [10**18, 10**5000, -1, 2.5, float("nan"), True, "a" * 10**6, itertools.count()]


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_model_len"])
@pytest.mark.parametrize("value", NO_SIZES, ids=shown)
def test_engine_number_that_is_no_size_is_refused_in_short(name: str, value: Any) -> None:
    with pytest.raises(EngineConfigError) as raised:
        EngineConfig(**{name: value})
    assert len(str(raised.value)) < 1_000


@pytest.mark.parametrize("name", ["vocab_size", "num_layers", "num_heads", "num_experts"])
@pytest.mark.parametrize("value", NO_SIZES, ids=shown)
def test_model_number_that_is_no_size_is_refused_in_short(name: str, value: Any) -> None:
    fields = {slot: getattr(ModelConfig.tiny(), slot) for slot in ModelConfig.__slots__}
    with pytest.raises(ModelConfigError) as raised:
        ModelConfig(**{**fields, name: value})
    assert len(str(raised.value)) < 1_000


@pytest.mark.parametrize("path", [5, True, None, [], 1.5, b"trace.csv"], ids=repr)
def test_path_of_another_type_is_refused(path: Any) -> None:
    for read in (read_trace, read_azure_csv, read_mooncake_jsonl):
        with pytest.raises(TraceError, match="the path of a file"):
            read(path)
    with pytest.raises(OSError, match="Errno"):
        open_regular(path)
