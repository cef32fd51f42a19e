"""Frozen, keyword-only values: one ``ConfigError`` names everything wrong with one of them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from graphrt.errors import ConfigError, ConfigProblem, shown
from graphrt.files import MOST_NAMED
from graphrt.source import is_user_file

T = TypeVar("T")

_LONGEST_SHOWN = 200

# Far above what any engine runs. Checked before a table is built, because tables have an entry for
# every number of tokens and of adapters.
MOST_TOKENS = 2**20
MOST_SIZES = 2**16

_PYDANTIC = str(Path(pydantic.__file__).parent)


class Prepared(NamedTuple):
    """What a config class made of the arguments before they are checked."""

    arguments: dict[str, Any]
    problems: list[ConfigProblem]
    warned: list[tuple[type[Warning], str]]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def config_class(cls: type[T]) -> type[T]:
    """Make ``cls`` a strict, frozen value whose wrong construction is a ``ConfigError``.

    pydantic wraps whatever a validator raises, so its ``ValidationError`` is translated here: all
    problems of one construction, those of a nested config too, are in one error. A class may have
    ``_prepare(arguments)``, which is called before the check, and ``_doubts()``, which lists
    warnings of the value.
    """
    built: Any = pydantic.dataclasses.dataclass(
        frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid", strict=True)
    )(cls)
    construct = built.__init__
    known = tuple(field.name for field in fields(built))

    @wraps(construct)
    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        kwargs, problems, warned = (
            built._prepare(kwargs) if hasattr(built, "_prepare") else Prepared(kwargs, [], [])
        )
        if len(kwargs.keys() - known) > MOST_NAMED:  # Each would be told at length.
            raise config_error(cls.__name__, [*problems, *unknown_keys(kwargs, known)])
        try:
            construct(self, *args, **kwargs)
        except ValidationError as error:
            raise config_error(cls.__name__, [*problems, *_problems(error, known)]) from error
        if problems:
            raise config_error(cls.__name__, problems)
        # Here, because a warning raised inside a validator points at no line of the user's.
        for kind, text in [*warned, *(self._doubts() if hasattr(built, "_doubts") else ())]:
            warn_user(kind, text)

    built.__init__ = __init__
    built._construct = construct
    return built  # type: ignore[no-any-return]  # pydantic's decorator is typed for its own caller


def replaced(config: T, **changes: object) -> T:
    """``config`` with changes, checked, without the warnings of its first construction."""
    kind: Any = type(config)
    new: T = kind.__new__(kind)
    kind._construct(
        new, **{item.name: getattr(config, item.name) for item in fields(kind)} | changes
    )
    return new


def option(default: T, affects: Literal["graph", "nothing_compiled"]) -> T:
    """A field with what it changes: the compiled graph, so that it is part of hashes, or not."""
    return field(default=default, metadata={"affects": affects})


def warn_user(kind: type[Warning], text: str) -> None:
    """Warn at the innermost line of the user's."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and not (
        is_user_file(frame.f_code.co_filename)
        and not frame.f_code.co_filename.startswith(_PYDANTIC)
    ):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, kind, stacklevel=depth)


class FrozenMapping(Mapping[str, Any]):
    """A read-only copy of a mapping, which, unlike ``MappingProxyType``, can be pickled."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        # Values may be lists; equal mappings have equal keys.
        return hash(frozenset(self._items))

    def __repr__(self) -> str:
        return repr(self._items)


def config_error(subject: str, problems: Iterable[ConfigProblem]) -> ConfigError:
    """One error that names every problem."""
    listed = tuple(problems)
    count = "1 problem" if len(listed) == 1 else f"{len(listed)} problems"
    named, num_more = listed[:MOST_NAMED], len(listed) - MOST_NAMED
    more = [f"and {num_more} more"] if num_more > 0 else []
    # One line each, below one another under the label of their part.
    next_line = "\n" + " " * len("  expected: ")
    return ConfigError(
        f"{subject}: {count}",
        expected=next_line.join([*(f"{p.field}: {p.accepted}" for p in named), *more]),
        found=next_line.join([*(f"{p.field}: {p.found}" for p in named), *more]),
        do="correct what is named; nothing was built",
        problems=listed,
    )


def unknown_key(name: str, known: Iterable[str], *, inside: str = "") -> ConfigProblem:
    """The problem of an unknown name, with the nearest known one."""
    name = name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}..."
    names = sorted(known)
    # A cutoff of 0 always finds a nearest name: a bad guess beside the full list does no harm.
    nearest = get_close_matches(name, names, n=1, cutoff=0.0)
    guess = f"nearest is {nearest[0]!r}; " if nearest else ""
    return ConfigProblem(f"{inside}{name}", "an unknown key", f"{guess}known: {', '.join(names)}")


def unknown_keys(
    names: Iterable[str], known: Sequence[str], *, inside: str = ""
) -> Sequence[ConfigProblem]:
    """The problem of each name that is not known; where these are many, one of them all."""
    unknown = [name for name in names if name not in known]
    if len(unknown) <= MOST_NAMED:
        return [unknown_key(name, known, inside=inside) for name in unknown]
    found = f"{len(unknown)} unknown keys, the first of them {shown(unknown[0])}"
    return [ConfigProblem(f"{inside}*", found, f"known: {', '.join(sorted(known))}")]


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


def by_name(kind: type[Enum], *numbers: int) -> BeforeValidator:
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


def as_tuple(value: object) -> object:
    if isinstance(value, list | tuple) and len(value) > MOST_SIZES:
        raise ValueError(f"at most {MOST_SIZES} entries")
    return tuple(value) if isinstance(value, list) else value


def as_dict(value: object) -> object:
    if isinstance(value, Mapping) and len(value) > MOST_SIZES:
        raise ValueError(f"at most {MOST_SIZES} entries")
    return dict(value) if isinstance(value, Mapping) else value


ListAsTuple = BeforeValidator(as_tuple)
Natural = Annotated[int, Field(ge=0, le=sys.maxsize)]
Positive = Annotated[int, Field(ge=1, le=sys.maxsize)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


def from_mapping(kind: type) -> BeforeValidator:
    """Accept a mapping of the fields of ``kind`` beside its instances."""

    def build(value: object) -> object:
        is_named = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
        return kind(**value) if is_named else value  # type: ignore[arg-type]  # as asked above

    return BeforeValidator(build)


# --- Arguments of constructors that are no config classes


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Errors: ``ConfigError`` for a value that is none of ``choices``."""
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        raise _wrong(name, " or ".join(map(repr, choices)), shown(value), "choose one of them")


def check_hashable(name: str, value: object) -> None:
    """Errors: ``ConfigError`` for what cannot be hashed."""
    try:
        hash(value)
    except Exception:  # noqa: BLE001  A ``__hash__`` may raise anything.
        raise _wrong(name, "a value that can be hashed", shown(value)) from None


def check_callable(name: str, value: object) -> None:
    """Errors: ``ConfigError`` for what cannot be called."""
    if not callable(value):
        raise _wrong(name, "a callable", shown(value), "pass one")


def check_number(name: str, value: object) -> None:
    """Errors: ``ConfigError`` for what is no finite number >= 0."""
    if not isinstance(value, Real) or not 0.0 <= value <= sys.float_info.max:  # type: ignore[operator]  # numbers have it
        raise _wrong(name, "a finite number >= 0", shown(value))


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Errors: ``ConfigError`` for what is no integer >= ``least`` of 64 bits."""
    if type(value) is not int or not least <= value <= sys.maxsize:
        raise _wrong(name, f"an integer >= {least}", shown(value))


def check_type(name: str, value: object, kind: Any, expected: str, do: str = "correct it") -> None:
    """Errors: ``ConfigError`` for what is no ``kind``, a type or a union of some."""
    if not isinstance(value, kind):
        raise _wrong(name, expected, shown(value), do)


def check_flags(owner: str, **flags: object) -> None:
    """Errors: ``ConfigError`` for one that is no bool: ``"no"`` would count as True."""
    for name, value in flags.items():
        check_type(f"{owner}: {name}", value, bool, "True or False")


def checked_list(
    name: str, value: object, kind: Any, expected: str, do: str = "put it into a list"
) -> tuple[Any, ...]:
    """The items of ``value``, each asked for as it comes, because an iterator may never end.

    Errors: ``ConfigError`` for what cannot be iterated, more than 2**16 items, and one that is no
            ``kind``.
    """
    try:
        items = iter(value)  # type: ignore[call-overload]  # what it raises is the answer
    except TypeError:
        raise _wrong(name, expected, shown(value), do) from None
    found: list[Any] = []
    for item in items:
        check_type(name, item, kind, expected, do)
        if len(found) == MOST_SIZES:
            raise _wrong(name, f"at most {MOST_SIZES} items", "more", "leave some out")
        found.append(item)
    return tuple(found)


def _wrong(name: str, expected: str, found: str, do: str = "correct it") -> ConfigError:
    return ConfigError(name, expected=expected, found=found, do=do)
