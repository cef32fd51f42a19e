"""What a user wishes: frozen, torch-free, written once and read by ``resolve`` only.

``None`` means "not asked: ``resolve`` decides". A wish that is given is honoured, or is an error,
or is adjusted with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from graphrt.batch import CUDAGraphMode
from graphrt.config.checked import by_name, config_class

CAPTURE_SIZES = "cudagraph_capture_sizes"
"""In ``compile_sizes``: the sizes that are captured."""


class CompilationLevel(IntEnum):
    """How much of the model is compiled. Graphs need none of it: break points cut plain Python."""

    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3


def _as_level(value: object) -> object:
    if isinstance(value, str) and value.strip().upper() in CompilationLevel.__members__:
        return CompilationLevel[value.strip().upper()]
    if type(value) is int and 0 <= value <= 3:
        return CompilationLevel(value)
    if value is None or isinstance(value, CompilationLevel):
        return value
    raise ValueError(f"0, 1, 2, 3, {', '.join(CompilationLevel.__members__)}")


def _list_as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _sorted_once(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _as_compile_sizes(value: object) -> object:
    if value is None:
        return None
    given = (value,) if isinstance(value, str) else value
    if isinstance(given, list | tuple) and all(
        item == CAPTURE_SIZES if isinstance(item, str) else type(item) is int and item >= 1
        for item in given
    ):
        return tuple(dict.fromkeys(given))
    raise ValueError(f"integers >= 1, or {CAPTURE_SIZES!r}")


def _as_compilation(value: object) -> object:
    return CompilationConfig(**value) if isinstance(value, Mapping) else value


Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


@config_class
class CompilationConfig:
    """Which graphs are wanted, and at which sizes.

    Units: sizes are tokens. Modes and levels may be given by name, in any case; lists are accepted
    where a tuple is stored. Sizes are stored sorted and once each. Raises ``ConfigError`` with
    every problem of one construction.
    """

    level: Annotated[CompilationLevel | None, BeforeValidator(_as_level)] = None
    """0..3 or a name. None: 3 if something was asked that only it has, else 0."""
    cudagraph_mode: Annotated[CUDAGraphMode | None, by_name(CUDAGraphMode)] = None
    """None: FULL_AND_PIECEWISE, as far as the facts permit."""
    cudagraph_capture_sizes: (
        Annotated[
            tuple[Positive, ...], BeforeValidator(_list_as_tuple), AfterValidator(_sorted_once)
        ]
        | None
    ) = None
    """None: the default ladder."""
    max_cudagraph_capture_size: Positive | None = None
    """Top of the default ladder; beside a list it must be the list's largest size."""
    compile_sizes: Annotated[tuple[int | str, ...] | None, BeforeValidator(_as_compile_sizes)] = (
        None
    )
    """Sizes compiled with static shapes; the string "cudagraph_capture_sizes" stands for those."""
    cudagraph_specialize_lora: bool = True
    """Also capture graphs without adapters. False: such a batch uses the smallest LoRA graph."""
    cudagraph_num_of_warmups: NotNegative = 1
    """Runs before each capture, with the same callable and on the same stream."""


@config_class
class RuntimeConfig:
    """Everything a user may ask of one runtime. ``compilation`` may be given as a mapping."""

    compilation: Annotated[CompilationConfig, BeforeValidator(_as_compilation)] = (
        CompilationConfig()
    )
    max_num_seqs: Positive = 256
    """S: most requests in one step."""
    max_num_batched_tokens: Positive = 8192
    """B: most tokens in one step."""
    num_speculative_tokens: NotNegative = 0
    """A uniform decode request brings ``q = 1 + num_speculative_tokens`` tokens."""
    max_loras: NotNegative = 0
    """Most distinct adapters in one batch; 0: none."""
    lora_capture: Literal["each", "powers_of_two", "max_only"] = "powers_of_two"
    """Which adapter counts get graphs; the others are rounded up to one that has."""
    interactivity: bool = False
    """Add every size 1..32 to the default ladder: less padding for few users, more graphs."""
    on_miss: Literal["eager", "strict"] = "eager"
    """strict: a step that would run eager raises ``MissError`` instead."""
    verify_first_replay: bool = True
    """Compare each program's first replay with eager before it serves."""
    verify_every: Positive | None = None
    """Compare 1 of N replayed steps with eager. None: none."""
    stale_check: Literal["off", "identity", "pointer"] = "identity"
    """How a replay checks that its inputs are those that were captured."""
    on_capture_error: Literal["raise", "skip"] = "raise"
    """skip: a key whose capture fails runs eager, with CAPTURE_FAILED as its reason."""
    max_graph_bytes: Positive | None = None
    max_graphs: Positive | None = None
