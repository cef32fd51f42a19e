"""What a user may ask of compiling and capturing, and the hash of what changes compiled code."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum, IntEnum
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from graphrt.batch import CUDAGraphMode
from graphrt.config.checked import (
    MOST_TOKENS,
    FrozenMapping,
    ListAsTuple,
    Positive,
    Prepared,
    Tokens,
    as_tuple,
    by_name,
    config_class,
    config_error,
    from_mapping,
    option,
)
from graphrt.errors import ConfigProblem, ConfigWarning, shown
from graphrt.files import MOST_NAMED, checked_path, parse_json

CAPTURE_SIZES = "cudagraph_capture_sizes"
"""In ``compile_sizes``: the sizes that are captured."""
MOST_WARMUPS = 1_000
_DEEPEST = 16
_MOST_BITS = 1024

PASS_FLAGS = (
    "enable_fusion",
    "enable_attn_fusion",
    "enable_sequence_parallelism",
    "enable_async_tp",
    "enable_fi_allreduce_fusion",
)
"""Of ``PassConfig``: what level 3 alone does, all off unless asked for."""

# What other engines keep in the same class as the options, and where graphrt has it.
_ELSEWHERE = {
    "max_capture_size": "Plan.max_capture_size has it",
    "bs_to_padded_graph_size": "Plan.padding_table has it",
    "local_cache_dir": "CompilePlan.cache_dir has it, one folder for all ranks",
    "enabled_custom_ops": "graphrt.compile.count_custom_ops(model).enabled has it",
    "disabled_custom_ops": "graphrt.compile.count_custom_ops(model).disabled has it",
    "traced_files": "nothing has it: compiled code is cached by its graph, not by its files",
    "compilation_time": "CompileReport.compilation_time has it",
    "static_forward_context": "ForwardContext.layers has it; give layers= to Runtime",
}

_OLD = {"use_cudagraph": (False, "NONE"), "full_cuda_graph": (True, "FULL")}
"""Deprecated options: the value that asks for a ``cudagraph_mode``, and which."""


class CompilationLevel(IntEnum):
    """How much of the model is compiled. Graphs need none of it: break points cut plain Python."""

    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3


def _sorted_once(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _as_compile_sizes(value: object) -> object:
    if value is None:
        return None
    given = (value,) if isinstance(value, str) else as_tuple(value)
    if isinstance(given, tuple) and all(
        item == CAPTURE_SIZES
        if isinstance(item, str)
        else type(item) is int and 1 <= item <= MOST_TOKENS
        for item in given
    ):
        return tuple(dict.fromkeys(given))
    raise ValueError(f"integers from 1 to {MOST_TOKENS}, or {CAPTURE_SIZES!r}")


_SPLITTING_OP = re.compile(r"\w+::\w+(\.\w+)?|\w+(\.\w+)+")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def _check_splitting_ops(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not _SPLITTING_OP.fullmatch(name):
            raise ValueError("ns::op, ns::op.overload, ns.op or package.callable")
    return tuple(dict.fromkeys(names))


def _check_backend(name: str) -> str:
    if name and not _DOTTED.fullmatch(name):
        raise ValueError("'', the name of a registered backend, or package.module.function")
    return name


def _as_rules(value: object) -> object:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")] if value.strip() else []
    return as_tuple(value)


def _check_rules(rules: tuple[str, ...]) -> tuple[str, ...]:
    accepted = "'all', 'none', '+name', '-name'"
    for rule in rules:
        if rule not in ("all", "none") and not (rule[:1] in ("+", "-") and rule[1:].strip()):
            raise ValueError(f"{accepted}; {shown(rule)} is none of them")
    named = set(rules)
    pairs = [(word, word) for word in ("all", "none") if rules.count(word) > 1]
    pairs += [("all", "none")] if {"all", "none"} <= named else []
    pairs += [
        (rule, f"-{rule[1:]}") for rule in rules if rule[0] == "+" and f"-{rule[1:]}" in named
    ]
    if pairs:
        told = ", ".join(f"{shown(one)} with {shown(other)}" for one, other in pairs[:MOST_NAMED])
        raise ValueError(f"{accepted}, but not {told}")
    return tuple(dict.fromkeys(rules))


def _as_path(value: object) -> object:
    if not isinstance(value, str | Path):
        return value
    if value == "":
        return None
    return checked_path("", value, lambda _, expected, **parts: ValueError(expected))


def _check_passes(passes: Mapping[str, Any]) -> FrozenMapping:
    for value in passes.values():
        is_path = isinstance(value, str) and "." in value and _DOTTED.fullmatch(value)
        if not (is_path or callable(value)):
            raise ValueError("callable or 'package.module.name'")
        if isinstance(value, type):
            raise ValueError("an object of the class: a pass is called with the graph")
        _check_uuid(value)
    return FrozenMapping(passes)


def _frozen(value: object, depth: int = 0) -> object:
    """Lists and mappings as what nobody can change, because hashes are made of them."""
    if depth > _DEEPEST:
        raise ValueError(f"a mapping, nested at most {_DEEPEST} deep")
    if isinstance(value, Mapping):
        if depth and not all(isinstance(name, str) for name in value):
            raise ValueError("texts as the keys of a mapping inside it")
        return FrozenMapping({name: _frozen(item, depth + 1) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(_frozen(item, depth + 1) for item in value)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"numbers of at most {_MOST_BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("finite numbers: JSON has no others")
    _check_uuid(value)
    return value


def _check_uuid(value: object) -> None:
    """Now, because hashes are made where nobody expects that a user's code runs."""
    uuid = getattr(value, "uuid", None)
    if callable(uuid):
        try:
            uuid()
        except Exception as error:
            raise ValueError(f"one whose uuid() does not raise {type(error).__name__}") from error


def thawed(value: Any) -> Any:
    """Mappings as dicts and tuples as lists, which JSON and Inductor ask for."""
    if isinstance(value, FrozenMapping):
        return {name: thawed(item) for name, item in value.items()}
    return [thawed(item) for item in value] if isinstance(value, tuple) else value


def _freeze_mapping(value: object) -> object:
    return _frozen(value) if isinstance(value, Mapping) else value


_Freeze = BeforeValidator(_freeze_mapping)
_Path = Annotated[Path | None, BeforeValidator(_as_path)]


# Before the classes, whose signature shows their defaults where docstrings are stripped (-OO).
def _not_default(config: Any) -> dict[str, object]:
    """The fields that differ from their defaults, as JSON has them."""
    told: dict[str, object] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if value == item.default:
            continue
        if isinstance(value, PassConfig):
            value = _not_default(value)
        elif isinstance(value, Enum):
            value = value.name
        elif isinstance(value, Path):
            value = str(value)
        elif item.name == "inductor_passes":
            value = {n: v if isinstance(v, str) else _name_of(v) for n, v in value.items()}
        elif isinstance(value, Mapping):
            value = {name: thawed(inner) for name, inner in value.items() if _is_plain(inner)}
        told[item.name] = value
    return told


@config_class
class PassConfig:
    """Which passes rewrite the pieces that level 3 compiles. Raises ``ConfigError``.

    ``enable_noop``: Remove operations that change nothing; fusions match more after it.
    ``enable_fusion``: RMSNorm and SiluMul with FP8 quantisation, and add with RMSNorm.
    ``enable_attn_fusion``: Attention with FP8 quantisation of its output; attention is then inside
      the pieces.
    ``enable_sequence_parallelism``: All-reduce as reduce-scatter, norm on the shard, all-gather.
    ``enable_async_tp``: Overlap matrix products with the collectives of sequence parallelism.
    ``enable_fi_allreduce_fusion``: All-reduce with RMSNorm.
    ``fi_allreduce_fusion_max_token_num``: Most tokens of a step that this fusion serves.
    ``self_check``: Compare each pattern with what replaces it, before it is used.
    """

    enable_noop: bool = option(True, "graph")
    enable_fusion: bool = option(False, "graph")
    enable_attn_fusion: bool = option(False, "graph")
    enable_sequence_parallelism: bool = option(False, "graph")
    enable_async_tp: bool = option(False, "graph")
    enable_fi_allreduce_fusion: bool = option(False, "graph")
    fi_allreduce_fusion_max_token_num: Positive = option(16384, "graph")
    self_check: bool = option(True, "nothing_compiled")

    def __repr__(self) -> str:
        return json.dumps(_not_default(self))

    def uuid(self) -> str:
        """SHA-256 of the fields that change what is compiled."""
        return hash_of(graph_values(self, self))

    def _doubts(self) -> Iterator[tuple[type[Warning], str]]:
        for name in ("enable_fusion", "enable_attn_fusion", "enable_fi_allreduce_fusion"):
            if getattr(self, name) and not self.enable_noop:
                text = f"pass_config.{name} without enable_noop: no-ops hide its patterns"
                yield ConfigWarning, text
        if self.enable_async_tp and not self.enable_sequence_parallelism:
            yield (
                ConfigWarning,
                "pass_config.enable_async_tp without enable_sequence_parallelism: it matches only "
                "what the model itself gathers and scatters",
            )


def enabled_passes(passes: PassConfig) -> list[str]:
    """Those of ``PASS_FLAGS`` that are on, as ``pass_config.name``."""
    return [f"pass_config.{name}" for name in PASS_FLAGS if getattr(passes, name)]


@config_class
class CompilationConfig:
    """How the model is compiled, and which graphs are captured at which sizes.

    Units: sizes are tokens, at most 2**20. Modes and levels may be given by name, in any case;
    lists are accepted where a tuple is stored. Sizes are stored sorted and once each. Its ``repr``
    is JSON of what differs from the defaults. Raises ``ConfigError`` with every problem of one
    construction.

    ``level``: 0..3 or a name. None: 3 if something was asked that only it has, or attention can be
      cut in no other way; else 0.
    ``backend``: At levels 1 and 2 it compiles the whole graph, at level 3 each piece: the name of
      one registered with torch, or ``package.module.function``. Empty: at level 3 inductor or
      eager, as ``use_inductor`` says; else eager.
    ``custom_ops``: Which operators run their optimised form: ``all``, ``none``, ``+name``,
      ``-name``, also as one string with commas. Empty: none where Inductor compiles, else all.
    ``splitting_ops``: Operators (``ns::op``, ``ns::op.overload``, ``ns.op``) or callables
      (``package.callable``) between which level 3 captures pieces. None: the attention operators
      of the facts; empty: no cut, so that only FULL graphs exist.
    ``use_inductor``: Whether level 3 compiles with Inductor where ``backend`` is empty. None: on
      CUDA only.
    ``compile_sizes``: Sizes compiled with static shapes; "cudagraph_capture_sizes" means the
      captured ones.
    ``compile_ranges_endpoints``: The last size of each range that is compiled for itself. None:
      one range, but for limits of passes.
    ``dynamic_shapes``: How the size that varies is marked for the trace. unbacked: no branch on it
      is possible; backed: branches that hold for every planned size are; auto: unbacked, then
      backed.
    ``guard_policy``: What notices a change of what was traced at levels 2 and 3. audit: a
      comparison around captures; keep: torch's guards at each eager call.
    ``use_inductor_graph_partition``: Let Inductor cut the graph. None: no.
    ``inductor_compile_config``: Options of Inductor for every piece.
    ``inductor_passes``: Name -> a pass over the graph, or where to import one from.
    ``pass_config``: Which passes rewrite the pieces: a ``PassConfig``, or a mapping.
    ``cache_dir``: Where compiled code is kept. None: GRAPHRT_CACHE_DIR, else the user's cache
      folder.
    ``compile_cache``: False: neither read nor write it.
    ``debug_dump_path``: Where what was traced and compiled is written down. None: nowhere.
    ``cudagraph_mode``: NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE. None: the
      last, as far as the facts permit.
    ``cudagraph_capture_sizes``: A list, such as [1, 2, 4, 8]. None: the default ladder, 1, 2, 4,
      then by 8, then by 16 from 256.
    ``max_cudagraph_capture_size``: Top of the default ladder; beside a list it must be the list's
      largest size.
    ``cudagraph_specialize_lora``: Also capture graphs without adapters. False: such a batch uses
      the smallest LoRA graph.
    ``cudagraph_num_of_warmups``: Runs before each capture, with the same callable and on the same
      stream.
    ``cudagraph_copy_inputs``: Copy inputs into buffers of the runtime before PIECEWISE graphs.
      ``Runtime`` does so always; an engine with buffers of its own reads it off the config.
    ``use_cudagraph``: Deprecated; False: ``cudagraph_mode=NONE``. Stored as None.
    ``full_cuda_graph``: Deprecated; True: ``cudagraph_mode=FULL``. Stored as None.
    """

    level: Annotated[CompilationLevel | None, by_name(CompilationLevel, 0, 1, 2, 3)] = option(
        None, "graph"
    )
    backend: Annotated[str, AfterValidator(_check_backend)] = option("", "graph")
    custom_ops: Annotated[
        tuple[str, ...], BeforeValidator(_as_rules), AfterValidator(_check_rules)
    ] = option((), "graph")
    splitting_ops: (
        Annotated[tuple[str, ...], ListAsTuple, AfterValidator(_check_splitting_ops)] | None
    ) = option(None, "graph")
    use_inductor: bool | None = option(None, "graph")
    compile_sizes: Annotated[tuple[int | str, ...] | None, BeforeValidator(_as_compile_sizes)] = (
        option(None, "nothing_compiled")
    )
    compile_ranges_endpoints: (
        Annotated[tuple[Tokens, ...], ListAsTuple, AfterValidator(_sorted_once)] | None
    ) = option(None, "nothing_compiled")
    dynamic_shapes: Literal["auto", "unbacked", "backed"] = option("auto", "graph")
    guard_policy: Literal["audit", "keep"] = option("audit", "nothing_compiled")
    use_inductor_graph_partition: bool | None = option(None, "graph")
    inductor_compile_config: Annotated[
        Mapping[str, Any], _Freeze, AfterValidator(FrozenMapping)
    ] = option(FrozenMapping({}), "graph")
    inductor_passes: Annotated[Mapping[str, Any], _Freeze, AfterValidator(_check_passes)] = option(
        FrozenMapping({}), "graph"
    )
    pass_config: Annotated[PassConfig, from_mapping(PassConfig)] = option(PassConfig(), "graph")
    cache_dir: _Path = option(None, "nothing_compiled")
    compile_cache: bool = option(True, "nothing_compiled")
    debug_dump_path: _Path = option(None, "nothing_compiled")
    cudagraph_mode: Annotated[CUDAGraphMode | None, by_name(CUDAGraphMode)] = option(
        None, "nothing_compiled"
    )
    cudagraph_capture_sizes: (
        Annotated[tuple[Tokens, ...], ListAsTuple, AfterValidator(_sorted_once)] | None
    ) = option(None, "nothing_compiled")
    max_cudagraph_capture_size: Tokens | None = option(None, "nothing_compiled")
    cudagraph_specialize_lora: bool = option(True, "nothing_compiled")
    cudagraph_num_of_warmups: Annotated[int, Field(ge=0, le=MOST_WARMUPS)] = option(
        1, "nothing_compiled"
    )
    cudagraph_copy_inputs: bool = option(False, "nothing_compiled")
    use_cudagraph: bool | None = option(None, "nothing_compiled")
    full_cuda_graph: bool | None = option(None, "nothing_compiled")

    def __repr__(self) -> str:
        return json.dumps(_not_default(self))

    @classmethod
    def from_json(cls, text: str) -> CompilationConfig:
        """The config of which ``text`` is the ``repr``. Raises ``ConfigError``."""
        value, found = None, ""
        repeated: Sequence[str] = ()
        try:
            value, repeated = parse_json(text)
        except (ValueError, TypeError) as error:  # The second: it is no text.
            found = str(error)
        if not isinstance(value, dict) or repeated:
            found = found or (f"{', '.join(repeated)} twice" if repeated else shown(value))
            problem = ConfigProblem("the text", found, "one JSON object, each key once")
            raise config_error(cls.__name__, [problem])
        return cls(**value)

    def compute_hash(self) -> str:
        """SHA-256 of the options that change compiled code, the same in every process."""
        return hash_of(graph_values(self, self))

    @staticmethod
    def _prepare(arguments: dict[str, Any]) -> Prepared:
        """Deprecated options become ``cudagraph_mode``; those that have no place here are named."""
        given = {name: value for name, value in arguments.items() if name not in _ELSEWHERE}
        problems = [
            ConfigProblem(name, "an argument", f"no such option: {_ELSEWHERE[name]}")
            for name in _ELSEWHERE
            if name in arguments
        ]
        mode = given.get("cudagraph_mode")
        old = {name: given.pop(name) for name in _OLD if isinstance(given.get(name), bool)}
        asked = {name: _OLD[name][1] for name in old if old[name] is _OLD[name][0]}
        warned: list[tuple[type[Warning], str]] = []
        for name, value in old.items():
            does = f"={asked[name]}" if name in asked else f"; {name}={value} does nothing"
            text = f"{name} is deprecated: use cudagraph_mode{does}"
            warned.append((DeprecationWarning, text))
        if asked and (mode is not None or len(asked) > 1):
            told = [f"{name}={old[name]}" for name in asked]
            told += [f"cudagraph_mode={getattr(mode, 'name', mode)}"] if mode is not None else []
            accepted = "cudagraph_mode alone, because they are mutually exclusive"
            problems.append(ConfigProblem(next(iter(asked)), " with ".join(told), accepted))
        elif asked:
            [given["cudagraph_mode"]] = asked.values()
        backend = given.get("backend")
        if (
            isinstance(backend, str)
            and backend == "inductor"
            and given.get("use_inductor") is False
        ):
            found = "False, with backend='inductor'"
            problems.append(ConfigProblem("use_inductor", found, "True or None, or a backend"))
        return Prepared(given, problems, warned)


# --- Hashes and text


def hash_of(values: Mapping[str, object]) -> str:
    """SHA-256 over canonical JSON: neither the order of keys nor of rules counts."""
    known = {name: _canonical(value) for name, value in values.items()}
    for name in ("custom_ops", "splitting_ops"):
        if known.get(name) is not None:
            known[name] = sorted(known[name])
    return sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def identity_of(value: object) -> str | None:
    """What tells a callable from others in every process, or None: its ``uuid()``, else its text.

    A function that reads variables of its surroundings has none, because its text does not tell
    what they hold.
    """
    uuid = getattr(value, "uuid", None)
    if callable(uuid):
        own = uuid()
        return None if own is None else f"{_name_of(value)} {own!r}"
    if not inspect.isfunction(value) or value.__closure__:
        return None
    if value.__defaults__ or value.__kwdefaults__:
        return None
    try:
        text = inspect.getsource(value)
    except OSError:
        return None
    # Two on one line have the same text.
    return None if value.__name__ == "<lambda>" and text.count("lambda") > 1 else text


def unhashable(values: Mapping[str, object]) -> tuple[str, ...]:
    """Names in ``values`` of what ``identity_of`` does not know."""
    return tuple(
        name
        for name, value in values.items()
        if not _is_plain(value) and identity_of(value) is None
    )


def graph_values(config: Any, marked: Any) -> dict[str, object]:
    """The values in ``config`` of the fields that ``marked`` says change compiled code."""
    return {
        item.name: getattr(config, item.name)
        for item in fields(marked)
        if item.metadata["affects"] == "graph" and hasattr(config, item.name)
    }


def _is_plain(value: object) -> bool:
    # Not any sequence: bytes are no JSON, and of a ``range`` each number would be looked at.
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, str | int | float)


def _canonical(value: Any) -> Any:
    if isinstance(value, PassConfig):
        return value.uuid()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {name: _canonical(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if _is_plain(value):
        return value
    return identity_of(value) or _name_of(value)


def _name_of(value: object) -> str:
    # A generator has a name and no module.
    kind: Any = value if hasattr(value, "__module__") else type(value)
    kind = kind if hasattr(kind, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
