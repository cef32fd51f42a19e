"""What a user may ask, and the facts that limit it: frozen, keyword-only, checked, one error.

In an option ``None`` means "not asked: ``resolve`` decides". What is asked is used as asked, or is
adjusted with a reason, or is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from difflib import get_close_matches
from enum import Enum, IntEnum
from functools import wraps
from reprlib import Repr
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError

from graphrt.batch import CUDAGraphMode
from graphrt.errors import ConfigError, ConfigProblem

T = TypeVar("T")

_MOST_SHOWN = 50
_LONGEST_SHOWN = 200
_REPR = Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxdict = _MOST_SHOWN
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _LONGEST_SHOWN

CAPTURE_SIZES = "cudagraph_capture_sizes"
"""In ``compile_sizes``: the sizes that are captured."""

# Far above what any engine runs. Checked before a table is built, because tables have an entry for
# every number of tokens and of adapters.
MOST_TOKENS = 2**20
MOST_ADAPTERS = 2**10
MOST_WARMUPS = 1_000
MOST_SIZES = 2**16
MOST_UBATCHES = 64


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config_class(cls: type[T]) -> type[T]:
    """Make ``cls`` a strict, frozen value whose wrong construction is a ``ConfigError``.

    pydantic wraps whatever a validator raises, so its ``ValidationError`` is translated here: all
    problems of one construction, those of a nested config too, are in one error.
    """
    built: Any = pydantic.dataclasses.dataclass(
        frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid", strict=True)
    )(cls)
    construct = built.__init__
    known = tuple(field.name for field in fields(built))

    @wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        try:
            construct(self, *args, **kwargs)
        except ValidationError as error:
            raise config_error(cls.__name__, _problems(error, known)) from error

    built.__init__ = __init__
    return built  # type: ignore[no-any-return]  # pydantic's decorator is typed for its own caller


def config_error(subject: str, problems: Iterable[ConfigProblem]) -> ConfigError:
    """One error that names every problem."""
    listed = tuple(problems)
    count = "1 problem" if len(listed) == 1 else f"{len(listed)} problems"
    shown, num_more = listed[:_MOST_SHOWN], len(listed) - _MOST_SHOWN
    more = [f"and {num_more} more"] if num_more > 0 else []
    # One line each, below one another under the label of their part.
    next_line = "\n" + " " * len("  expected: ")
    return ConfigError(
        f"{subject}: {count}",
        expected=next_line.join([*(f"{p.field}: {p.accepted}" for p in shown), *more]),
        found=next_line.join([*(f"{p.field}: {p.found}" for p in shown), *more]),
        do="correct what is named; nothing was built",
        problems=listed,
    )


def shown(value: object) -> str:
    """The ``repr`` of ``value``, cut where it is long or nested deep."""
    try:
        return _REPR.repr(value)
    except ValueError:
        return "an integer of thousands of digits"


def unknown_key(name: str, known: Iterable[str], *, inside: str = "") -> ConfigProblem:
    """The problem of an unknown name, with the nearest known one."""
    name = name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}..."
    names = sorted(known)
    # A cutoff of 0 always finds a nearest name: a bad guess beside the full list does no harm.
    nearest = get_close_matches(name, names, n=1, cutoff=0.0)
    guess = f"nearest is {nearest[0]!r}; " if nearest else ""
    return ConfigProblem(f"{inside}{name}", "an unknown key", f"{guess}known: {', '.join(names)}")


def _problems(error: ValidationError, known: tuple[str, ...]) -> Iterable[ConfigProblem]:
    for item in error.errors(include_url=False):
        cause = item.get("ctx", {}).get("error")
        # ("sizes", 2) -> sizes[2]; ("compilation", "level") -> compilation.level
        first, *rest = item["loc"]
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
        place = str(first) + "".join(parts)
        if isinstance(cause, ConfigError):
            for inner in cause.problems:
                yield inner._replace(field=f"{place}.{inner.field}")
        elif item["type"] == "unexpected_keyword_argument":
            yield unknown_key(place, known)
        elif item["type"] == "unexpected_positional_argument":
            yield ConfigProblem(f"argument {place}", shown(item["input"]), "keywords only")
        elif item["type"] == "missing":
            yield ConfigProblem(place, "nothing", "a value; it has no default")
        else:
            accepted = str(cause) if cause is not None else item["msg"]
            accepted = accepted.removeprefix("Input should be ")
            yield ConfigProblem(place, shown(item["input"]), accepted)


def _by_name(kind: type[Enum], *numbers: int) -> BeforeValidator:
    """Accept the names of ``kind``, in any case, beside its members; and ``numbers`` as values."""
    accepted = ", ".join([*map(str, numbers), *kind.__members__])

    def member(value: object) -> object:
        if isinstance(value, str) and value.strip().upper() in kind.__members__:
            return kind[value.strip().upper()]
        if type(value) is int and value in numbers:
            return kind(value)
        if value is None or isinstance(value, kind):
            return value
        raise ValueError(accepted)

    return BeforeValidator(member)


def _sorted_once(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(set(values)))


def _as_compile_sizes(value: object) -> object:
    if value is None:
        return None
    given = (value,) if isinstance(value, str) else _as_tuple(value)
    if isinstance(given, tuple) and all(
        item == CAPTURE_SIZES
        if isinstance(item, str)
        else type(item) is int and 1 <= item <= MOST_TOKENS
        for item in given
    ):
        return tuple(dict.fromkeys(given))
    raise ValueError(f"integers from 1 to {MOST_TOKENS}, or {CAPTURE_SIZES!r}")


_SPLITTING_OP = re.compile(r"\w+::\w+(\.\w+)?|\w+(\.\w+)+")


def _check_splitting_ops(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not _SPLITTING_OP.fullmatch(name):
            raise ValueError("ns::op, ns::op.overload, ns.op or package.callable")
    return tuple(dict.fromkeys(names))


def _as_tuple(value: object) -> object:
    if isinstance(value, list | tuple) and len(value) > MOST_SIZES:
        raise ValueError(f"at most {MOST_SIZES} entries")
    return tuple(value) if isinstance(value, list) else value


_ListAsTuple = BeforeValidator(_as_tuple)
Positive = Annotated[int, Field(ge=1)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


class CompilationLevel(IntEnum):
    """How much of the model is compiled. Graphs need none of it: break points cut plain Python."""

    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3


@config_class
class CompilationConfig:
    """Which graphs to capture, and at which sizes.

    Units: sizes are tokens, at most 2**20. Modes and levels may be given by name, in any case;
    lists are accepted where a tuple is stored. Sizes are stored sorted and once each. Raises
    ``ConfigError`` with every problem of one construction.

    ``level``: 0..3 or a name. None: 3 if something was asked that only it has, else 0.
    ``cudagraph_mode``: None: FULL_AND_PIECEWISE, as far as the facts permit.
    ``cudagraph_capture_sizes``: None: the default ladder.
    ``max_cudagraph_capture_size``: Top of the default ladder; beside a list it must be the list's
      largest size.
    ``compile_sizes``: Sizes compiled with static shapes; "cudagraph_capture_sizes" means the
      captured ones.
    ``splitting_ops``: Operators (``ns::op``, ``ns::op.overload``, ``ns.op``) or callables
      (``package.callable``) between which level 3 captures pieces. None: the attention operators
      of the facts; empty: no cut, so that only FULL graphs exist.
    ``cudagraph_specialize_lora``: Also capture graphs without adapters. False: such a batch uses
      the smallest LoRA graph.
    ``cudagraph_num_of_warmups``: Runs before each capture, with the same callable and on the same
      stream.
    """

    level: Annotated[CompilationLevel | None, _by_name(CompilationLevel, 0, 1, 2, 3)] = None
    cudagraph_mode: Annotated[CUDAGraphMode | None, _by_name(CUDAGraphMode)] = None
    cudagraph_capture_sizes: (
        Annotated[tuple[Tokens, ...], _ListAsTuple, AfterValidator(_sorted_once)] | None
    ) = None
    max_cudagraph_capture_size: Tokens | None = None
    compile_sizes: Annotated[tuple[int | str, ...] | None, BeforeValidator(_as_compile_sizes)] = (
        None
    )
    splitting_ops: (
        Annotated[tuple[str, ...], _ListAsTuple, AfterValidator(_check_splitting_ops)] | None
    ) = None
    cudagraph_specialize_lora: bool = True
    cudagraph_num_of_warmups: Annotated[int, Field(ge=0, le=MOST_WARMUPS)] = 1


@config_class
class UBatchConfig:
    """Steps split into micro-batches, one of which computes while another communicates.

    Units: thresholds are unpadded tokens of the rank that has fewest. Raises ``ConfigError``.

    ``num_ubatches``: Micro-batches of a split step, at most 64. 1: no step is split.
    ``decode_token_threshold``: A uniform batch with fewer tokens is not split.
    ``prefill_token_threshold``: A mixed batch, and any batch without a split graph, with fewer
      tokens is not split.
    ``num_comm_sms``: Multiprocessors left to communication while a split step runs.
    ``allow_eager``: Split large batches that no split graph serves eagerly. False: they are not
      split.
    ``stall_timeout_s``: Seconds without a hand-over after which a split step or its capture is
      given up.
    """

    num_ubatches: Annotated[int, Field(ge=1, le=MOST_UBATCHES)] = 1
    decode_token_threshold: Tokens = 32
    prefill_token_threshold: Tokens = 512
    num_comm_sms: Annotated[int, Field(ge=0)] = 20
    allow_eager: bool = True
    stall_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0


@config_class
class RankConfig:
    """How long ranks wait for one another, and how often they compare decisions.

    Raises ``ConfigError``.

    ``step_timeout_s``: Most seconds that a rank waits for the others in a step.
    ``capture_timeout_s``: The same in a capture.
    ``check_every``: Steps between two comparisons among ranks that decide without a message.
    """

    step_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    capture_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    check_every: Positive = 256


def _from_mapping(kind: type) -> BeforeValidator:
    """Accept a mapping of the fields of ``kind`` beside its instances."""
    return BeforeValidator(lambda value: kind(**value) if isinstance(value, Mapping) else value)


@config_class
class RuntimeConfig:
    """Everything a user may ask of one runtime. The configs in it may be given as mappings.

    Raises ``ConfigError`` with every problem of one construction.

    ``compilation``: Which graphs to capture, and at which sizes.
    ``max_num_seqs``: S: most requests in one step; at most 2**20.
    ``max_num_batched_tokens``: B: most tokens in one step; at most 2**20.
    ``num_speculative_tokens``: A uniform decode request brings ``q = 1 + num_speculative_tokens``
      tokens.
    ``max_loras``: Most distinct adapters in one batch; 0: none. At most 1024.
    ``lora_capture``: Which adapter counts get graphs; the others are rounded up to one that has.
    ``interactivity``: Add every size 1..32 to the default ladder: less padding for few users, more
      graphs.
    ``on_miss``: strict: a step that would run eager raises ``MissError`` instead.
    ``verify_first_replay``: Compare each program's first replay with eager before it serves.
    ``verify_every``: Compare 1 of N replayed steps with eager. None: none.
    ``watch``: How a replaced weight, attribute, variable or host value that graphs read is
      noticed. spread: registrations in modules at once, all else four places a step; always: all
      at each step.
    ``nvtx``: Put a range with mode and key around each graph or eager run, for Nsight Systems.
    ``stale_check``: How a replay checks that its inputs are those that were captured.
    ``on_capture_error``: skip: a key whose capture fails runs eager, with CAPTURE_FAILED as its
      reason.
    ``max_graph_bytes``: Most bytes of pools and executables; a capture that exceeds it fails.
      None: no limit.
    ``max_graphs``: Most device graphs. None: as many as the device has.
    ``ubatch``: Which steps are split into micro-batches.
    ``ranks``: How long ranks wait for one another.
    """

    compilation: Annotated[CompilationConfig, _from_mapping(CompilationConfig)] = (
        CompilationConfig()
    )
    max_num_seqs: Tokens = 256
    max_num_batched_tokens: Tokens = 8192
    num_speculative_tokens: Annotated[int, Field(ge=0, lt=MOST_TOKENS)] = 0
    max_loras: Annotated[int, Field(ge=0, le=MOST_ADAPTERS)] = 0
    lora_capture: Literal["each", "powers_of_two", "max_only"] = "powers_of_two"
    interactivity: bool = False
    on_miss: Literal["eager", "strict"] = "eager"
    verify_first_replay: bool = True
    verify_every: Positive | None = None
    watch: Literal["spread", "always", "off"] = "spread"
    nvtx: bool = False
    stale_check: Literal["off", "identity", "pointer"] = "identity"
    on_capture_error: Literal["raise", "skip"] = "raise"
    max_graph_bytes: Positive | None = None
    max_graphs: Positive | None = None
    ubatch: Annotated[UBatchConfig, _from_mapping(UBatchConfig)] = UBatchConfig()
    ranks: Annotated[RankConfig, _from_mapping(RankConfig)] = RankConfig()


class AttentionSupport(IntEnum):
    """What an attention backend permits inside a FULL graph. Ordered: more is greater.

    ``NEVER``: No batch.
    ``UNIFORM_SINGLE_TOKEN_DECODE``: Every request brings exactly one token.
    ``UNIFORM_BATCH``: Every request brings equally many tokens.
    ``ALWAYS``: Every batch.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


Support = Annotated[AttentionSupport, _by_name(AttentionSupport)]


@config_class
class ModeLimit:
    """Something that permits one mode (and NONE) only: every other mode becomes ``mode``.

    An encoder-decoder model is limited to FULL_DECODE_ONLY, a pooling model to PIECEWISE, a
    communication library that cannot be captured to NONE. ``reason`` is shown to the user.
    """

    mode: Annotated[CUDAGraphMode, _by_name(CUDAGraphMode)]
    reason: Annotated[str, Field(min_length=1)]


@config_class
class Facts:
    """What the engine and its device permit inside a graph, named without any model or library.

    Names of supports and modes are accepted as strings. Raises ``ConfigError``.

    ``attention_support``: What the attention backend permits inside a FULL graph.
    ``attention_groups``: Support by attention group; the least one counts, and messages name its
      group.
    ``has_break_points``: The model is cut by break points in plain Python; read below compile
      level 3.
    ``splitting``: What the compiler cuts at, at level 3: attention, only other ops, or nothing at
      all.
    ``attention_ops``: The operators that compute attention. Level 3 cuts at them unless
      ``splitting_ops`` says where; ``splitting`` then follows from both.
    ``piecewise_available``: Whether piecewise graphs are possible. None: it follows from the
      fields above.
    ``mode_limits``: Whatever else permits one mode only.
    ``compute_capability``: (major, minor) of the device; None where it has none.
    ``num_sms``: Multiprocessors of the device; None where it has none.
    """

    attention_support: Support = AttentionSupport.ALWAYS
    attention_groups: Annotated[
        Mapping[str, Support],
        BeforeValidator(lambda value: dict(value) if isinstance(value, Mapping) else value),
        AfterValidator(MappingProxyType),
    ] = field(default_factory=lambda: MappingProxyType({}))
    has_break_points: bool = True
    splitting: Literal["attention", "other", "none"] = "attention"
    attention_ops: Annotated[tuple[str, ...], _ListAsTuple] = ()
    piecewise_available: bool | None = None
    mode_limits: Annotated[tuple[ModeLimit, ...], _ListAsTuple] = ()
    compute_capability: tuple[int, int] | None = None
    num_sms: Positive | None = None

    def least_support(self) -> tuple[AttentionSupport, str]:
        """The support that counts, and what set it."""
        named = {f"attention group {name!r}": have for name, have in self.attention_groups.items()}
        named["the attention backend"] = self.attention_support
        who = min(named, key=lambda name: named[name])
        return named[who], who

    def piecewise_at(self, level: int) -> bool:
        """True if the model can be cut, with attention outside the pieces, at compile ``level``."""
        if self.piecewise_available is not None:
            return self.piecewise_available
        return self.splitting == "attention" if level == 3 else self.has_break_points
