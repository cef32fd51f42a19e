"""The two input files: a config (JSON) and batches (JSON lines). Their keys are stable.

An error names every problem of a config, but only the first wrong line of a batch file. In a config
a line that begins with ``//`` is a comment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from io import StringIO
from typing import IO, Any, NamedTuple, NoReturn

from graphrt.batch import Decision, RuntimeMode
from graphrt.config import Facts, RuntimeConfig
from graphrt.config.checked import config_error, shown, unknown_key
from graphrt.dispatch import CUDAGraphDispatcher
from graphrt.errors import BatchError, ConfigError, ConfigProblem
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


SAMPLE = """\
// What graphrt resolve reads: every key, with its default. All keys are optional; a line that
// begins with // is a comment. Sizes are tokens of one step.
{
  "compilation": {
    // How much is compiled: 0 to 3. null: 3 if something is asked that only it has, else 0.
    "level": null,
    // NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE, which null is.
    "cudagraph_mode": null,
    // A list such as [1, 2, 4, 8]. null: 1, 2, 4, then by 8, then by 16 from 256.
    "cudagraph_capture_sizes": null,
    // The largest size of that ladder. null: twice the largest decode batch, at most 512.
    "max_cudagraph_capture_size": null,
    // Whether batches without adapters get graphs of their own.
    "cudagraph_specialize_lora": true,
    // Whether inputs are copied into buffers of the runtime before PIECEWISE graphs.
    "cudagraph_copy_inputs": false,
    // What compiles: a name that torch knows, or package.module.function. Empty: as the next says.
    "backend": "",
    // Whether level 3 compiles with Inductor. null: on CUDA only.
    "use_inductor": null,
    // Operators, such as "graphrt_llm::attention", between which level 3 captures pieces.
    "splitting_ops": null,
    // Sizes to compile with static shapes, at level 3.
    "compile_sizes": null,
    // The last size of each range that level 3 compiles for. null: one range.
    "compile_ranges_endpoints": null,
    // How the size that varies is marked: auto, unbacked or backed.
    "dynamic_shapes": "auto",
    // What notices a change of what was traced: audit or keep.
    "guard_policy": "audit",
    // Which operators run their optimised form: "none,+name", or a list.
    "custom_ops": [],
    // Which passes rewrite compiled pieces, such as {"enable_fusion": true}.
    "pass_config": {},
    // Passes of one's own: {"name": "package.module.function"}.
    "inductor_passes": {},
    // Options of Inductor for every piece.
    "inductor_compile_config": {},
    // Whether Inductor cuts the graph, rather than graphrt.
    "use_inductor_graph_partition": null,
    // Where compiled code is kept. null: GRAPHRT_CACHE_DIR, else the user's cache folder.
    "cache_dir": null,
    // Whether it is kept.
    "compile_cache": true,
    // Where what was traced and compiled is written down.
    "debug_dump_path": null
  },
  // Most requests and most tokens of one step.
  "max_num_seqs": 256,
  "max_num_batched_tokens": 8192,
  // A decode request brings 1 + this many tokens.
  "num_speculative_tokens": 0,
  // Most LoRA adapters in one batch, and which counts get graphs: each, powers_of_two, max_only.
  "max_loras": 0,
  "lora_capture": "powers_of_two",
  // Steps cut into micro-batches: how many, from how many tokens on (decode, others), how many
  // multiprocessors communication gets, and whether batches without a split graph are cut too.
  "ubatch": {
    "num_ubatches": 1,
    "decode_token_threshold": 32,
    "prefill_token_threshold": 512,
    "num_comm_sms": 20,
    "allow_eager": true
  },
  // What the attention back end permits in a full graph: NEVER, UNIFORM_SINGLE_TOKEN_DECODE,
  // UNIFORM_BATCH or ALWAYS.
  "attention_support": "ALWAYS",
  // Whether the model can be cut at its break points.
  "piecewise_available": true,
  // Multiprocessors of the device, if it has any.
  "num_sms": null,
  // The device: cuda, cpu or simulated.
  "device": null,
  // The operators that compute attention.
  "attention_ops": [],
  // Ranks that share each layer.
  "tp_size": 1
}
"""


def parse_config(text: str) -> tuple[Any, list[str]]:
    """Return the JSON value, and the keys it repeats. Raises ``ValueError`` for other text."""
    # A string of JSON holds no line break, so that no line of one begins like this. Comments become
    # blank lines, because an error counts lines.
    lines = ("" if line.lstrip().startswith("//") else line for line in text.split("\n"))
    return parse_json("\n".join(lines))


# The sample has every key, in the order in which it is told.
_SAMPLE = parse_config(SAMPLE)[0]
COMPILATION_KEYS = tuple(_SAMPLE["compilation"])
FACT_KEYS = tuple(item.name for item in fields(Facts) if item.name in _SAMPLE)
RUNTIME_KEYS = tuple(name for name in _SAMPLE if name not in ("compilation", *FACT_KEYS))


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
    problems += [unknown_key(name, known) for name in value if name not in known]
    options: dict[str, Any] = {name: value[name] for name in RUNTIME_KEYS if name in value}
    compilation = value.get("compilation", {})
    if isinstance(compilation, dict):
        inner = options["compilation"] = {}
        for name in compilation:
            if name in COMPILATION_KEYS:
                inner[name] = compilation[name]
            else:
                problems.append(unknown_key(name, COMPILATION_KEYS, inside="compilation."))
    else:
        problems.append(ConfigProblem("compilation", _kind(compilation), "a JSON object"))
    try:
        config = RuntimeConfig(**options)
    except ConfigError as error:
        problems += error.problems
    try:
        asked_facts = {name: value[name] for name in FACT_KEYS if name in value}
        facts = Facts(**{"piecewise_available": True, **asked_facts})
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
