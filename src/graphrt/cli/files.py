"""The two input files: a config (JSON) and batches (JSON lines). Their keys are stable.

An error names every problem of a config, but only the first wrong line of a batch file. In a config
a line that begins with ``//`` is a comment.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from enum import Enum
from inspect import getdoc
from io import StringIO
from textwrap import fill
from typing import IO, Any, NamedTuple, NoReturn

from graphrt.batch import Decision, RuntimeMode
from graphrt.config import CompilationConfig, Facts, RuntimeConfig, UBatchConfig
from graphrt.config.checked import config_error, unknown_key, unknown_keys
from graphrt.dispatch import CUDAGraphDispatcher
from graphrt.errors import BatchError, ConfigError, ConfigProblem, shown
from graphrt.files import open_regular, parse_json, read_at_most

BATCH_KEYS = ("num_tokens", "uniform", "num_active_loras", "exclude")
STDIN = "-"
MOST_CONFIG_BYTES = 4 * 2**20
MOST_BATCH_BYTES = 16 * 2**20


class Batch(NamedTuple):
    """One line of a batch file, and its place."""

    place: str
    num_tokens: int
    uniform: bool
    num_active_loras: int
    exclude: frozenset[RuntimeMode]


COMPILATION_KEYS = (
    *("level", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
    *("cudagraph_specialize_lora", "cudagraph_copy_inputs", "backend", "use_inductor"),
    *("splitting_ops", "compile_sizes", "compile_ranges_endpoints", "dynamic_shapes"),
    *("guard_policy", "custom_ops", "pass_config", "inductor_passes", "inductor_compile_config"),
    *("use_inductor_graph_partition", "cache_dir", "compile_cache", "debug_dump_path"),
)
RUNTIME_KEYS = (
    *("max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens", "max_loras"),
    *("lora_capture", "ubatch"),
)
FACT_KEYS = (
    *("attention_support", "piecewise_available", "num_sms", "device", "attention_ops", "tp_size"),
)
# The model of a command line is not there to look at.
FACTS = Facts(piecewise_available=True)


def sample() -> str:
    """What ``read_config`` reads: every key, with its meaning and its default."""
    body = (
        _told(CompilationConfig(), COMPILATION_KEYS, "compilation"),
        _told(RuntimeConfig(), RUNTIME_KEYS),
        _told(FACTS, FACT_KEYS),
    )
    return (
        "// What graphrt resolve reads: every key, with its default. All keys are optional; a line"
        "\n// that begins with // is a comment. Sizes are tokens of one step. None is null here.\n"
        "{\n" + ",\n".join(body) + "\n}\n"
    )


def _told(config: Any, keys: Iterable[str], name: str = "", indent: str = "  ") -> str:
    """The fields of ``config``, each below what its class says of it; inside ``name``, if given."""
    if name:
        inner = _told(config, keys, indent=f"{indent}  ")
        return f'{indent}"{name}": {{\n{inner}\n{indent}}}'
    meanings = dict(re.findall(r"``(\w+)``: (.+?)(?=\n``|\Z)", getdoc(config) or "", re.DOTALL))
    parts = []
    for key in keys:
        value = getattr(config, key)
        told = fill(" ".join(meanings.get(key, "").replace("``", "").split()), 94)
        text = "".join(f"{indent}// {line}\n" for line in told.splitlines())
        if isinstance(value, UBatchConfig):
            parts.append(text + _told(value, [item.name for item in fields(value)], key, indent))
        else:
            value = value.name if isinstance(value, Enum) else value
            # What json does not know is an option whose default is an empty object.
            parts.append(f'{text}{indent}"{key}": {json.dumps(value, default=lambda _: {})}')
    return ",\n".join(parts)


def parse_config(text: str) -> tuple[Any, list[str]]:
    """Return the JSON value, and the keys it repeats. Raises ``ValueError`` for other text."""
    # A string of JSON holds no line break, so that no line of one begins like this. Comments become
    # blank lines, because an error counts lines.
    lines = ("" if line.lstrip().startswith("//") else line for line in text.split("\n"))
    return parse_json("\n".join(lines))


def read_config(source: str) -> tuple[RuntimeConfig, Facts]:
    """Return the options and facts of a config file, or of stdin for ``-``.

    Raises ``ConfigError`` with every problem.
    """
    subject = f"config {_name(source)}"
    try:
        with _opened(source) as file:
            text = read_at_most(file, MOST_CONFIG_BYTES).decode("utf-8")
        value, repeated = parse_config(text)
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise ConfigError(
            subject, expected="a readable file", found=found, do="check the path"
        ) from error
    except ValueError as error:
        expected = f"one JSON object in UTF-8, of at most {MOST_CONFIG_BYTES} bytes"
        raise ConfigError(
            subject, expected=expected, found=str(error), do="correct the file"
        ) from error
    if not isinstance(value, dict):
        raise config_error(subject, [ConfigProblem("the file", _kind(value), "one JSON object")])

    problems = [ConfigProblem(name, "the same key twice", "each key once") for name in repeated]
    known = ("compilation", *RUNTIME_KEYS, *FACT_KEYS)
    problems += unknown_keys(value, known)
    options: dict[str, Any] = {name: value[name] for name in RUNTIME_KEYS if name in value}
    compilation = value.get("compilation", {})
    if isinstance(compilation, dict):
        problems += unknown_keys(compilation, COMPILATION_KEYS, inside="compilation.")
        options["compilation"] = {n: compilation[n] for n in COMPILATION_KEYS if n in compilation}
    else:
        problems.append(ConfigProblem("compilation", _kind(compilation), "a JSON object"))
    try:
        config = RuntimeConfig(**options)
    except ConfigError as error:
        problems += error.problems
    try:
        asked_facts = {name: value[name] for name in FACT_KEYS if name in value}
        facts = replace(FACTS, **asked_facts)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise config_error(subject, problems)
    return config, facts


def read_batches(source: str) -> Iterator[Batch]:
    """Yield the batches of a file, or of stdin for ``-``. Blank lines are skipped, and counted.

    Raises ``BatchError`` naming the first wrong line, when it is reached.
    """
    name = _name(source)
    try:
        with _opened(source) as file:
            data = read_at_most(file, MOST_BATCH_BYTES)
        text = data.decode("utf-8")
    except OSError as error:
        _wrong(name, "a readable file", error.strerror or type(error).__name__, error)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        _wrong(f"{name}, line {line}", "text in UTF-8", error.reason, error)
    except ValueError as error:
        _wrong(name, f"at most {MOST_BATCH_BYTES} bytes", str(error), error)
    # Only \n ends a line of JSON; splitlines would also cut at separators inside strings.
    for number, row in enumerate(StringIO(text, newline="\n"), start=1):
        if row.strip():
            yield _batch(f"{name}, line {number}", row)


def decide(dispatcher: CUDAGraphDispatcher, batch: Batch) -> Decision:
    """Return the decision for ``batch``. Raises ``BatchError`` naming its line."""
    try:
        return dispatcher.dispatch(
            batch.num_tokens, batch.uniform, batch.num_active_loras, batch.exclude
        )
    except BatchError as error:
        error.subject = f"{batch.place}: {error.subject}"
        raise


def _name(source: str) -> str:
    return "stdin" if source == STDIN else source


def _opened(source: str) -> AbstractContextManager[IO[bytes]]:
    return nullcontext(sys.stdin.buffer) if source == STDIN else open_regular(source)


def _batch(place: str, line: str) -> Batch:
    try:
        value, repeated = parse_json(line)
    except ValueError as error:
        _wrong(place, "one JSON object", str(error), error)
    if not isinstance(value, dict):
        _wrong(place, "one JSON object", _kind(value))
    if repeated:
        _wrong(place, "each key once", f"{', '.join(repeated)} twice")
    for name in value:
        if name not in BATCH_KEYS:
            problem = unknown_key(name, BATCH_KEYS)
            _wrong(place, problem.accepted, f"{problem.found}: {shown(name)}")
    if "num_tokens" not in value:
        _wrong(place, "num_tokens, the unpadded size of the batch", "no such key")
    batch = Batch(
        place,
        value["num_tokens"],
        value.get("uniform", False),
        value.get("num_active_loras", 0),
        _modes(place, value.get("exclude", [])),
    )
    for name in ("num_tokens", "num_active_loras"):
        number = getattr(batch, name)
        if type(number) is not int or number < 0:
            _wrong(place, f"{name}: an integer >= 0", shown(number))
    if type(batch.uniform) is not bool:
        _wrong(place, "uniform: true or false", shown(batch.uniform))
    return batch


def _modes(place: str, names: object) -> frozenset[RuntimeMode]:
    known = RuntimeMode.__members__
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name.upper() in known for name in names
    ):
        _wrong(place, f"exclude: a list of {', '.join(known)}", shown(names))
    return frozenset(known[name.upper()] for name in names)


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _wrong(place: str, expected: str, found: str, cause: Exception | None = None) -> NoReturn:
    raise BatchError(
        place, expected=expected, found=found, do="correct it; no line was answered"
    ) from cause
