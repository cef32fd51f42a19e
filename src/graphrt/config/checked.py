"""The decorator of every class a user fills in: frozen, keyword-only, checked, one error.

pydantic wraps whatever a validator raises, so its ``ValidationError`` is translated here, once, at
the door: all problems of one construction, those of a nested config too, are in one ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from typing import Any, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, ValidationError

from graphrt.errors import ConfigError, ConfigProblem

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config_class(cls: type[T]) -> type[T]:
    """Make ``cls`` a strict, frozen value whose wrong construction is a ``ConfigError``."""
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


def by_name(kind: type[Enum]) -> BeforeValidator:
    """Accept the names of ``kind``, in any case, beside its members."""

    def member(value: object) -> object:
        if isinstance(value, str) and value.strip().upper() in kind.__members__:
            return kind[value.strip().upper()]
        if value is None or isinstance(value, kind):
            return value
        raise ValueError(", ".join(kind.__members__))

    return BeforeValidator(member)


def config_error(subject: str, problems: Iterable[ConfigProblem]) -> ConfigError:
    """One error that names every problem."""
    listed = tuple(problems)
    count = "1 problem" if len(listed) == 1 else f"{len(listed)} problems"
    # One line each, below one another under the label of their part.
    next_line = "\n" + " " * len("  expected: ")
    return ConfigError(
        f"{subject}: {count}",
        expected=next_line.join(f"{p.field}: {p.accepted}" for p in listed),
        found=next_line.join(f"{p.field}: {p.found}" for p in listed),
        do="correct what is named; nothing was built",
        problems=listed,
    )


def unknown_key(name: str, known: Iterable[str], *, inside: str = "") -> ConfigProblem:
    """The problem of a name nobody knows, with the nearest one that exists."""
    names = sorted(known)
    # A cutoff of 0 always finds a nearest name: a bad guess beside the full list does no harm.
    nearest = get_close_matches(name, names, n=1, cutoff=0.0)
    guess = f"nearest is {nearest[0]!r}; " if nearest else ""
    return ConfigProblem(f"{inside}{name}", "an unknown key", f"{guess}known: {', '.join(names)}")


def _problems(error: ValidationError, known: tuple[str, ...]) -> Iterable[ConfigProblem]:
    for item in error.errors(include_url=False):
        cause = item.get("ctx", {}).get("error")
        place = _place(item["loc"])
        if isinstance(cause, ConfigError):
            for inner in cause.problems:
                yield inner._replace(field=f"{place}.{inner.field}")
        elif item["type"] == "unexpected_keyword_argument":
            yield unknown_key(place, known)
        elif item["type"] == "unexpected_positional_argument":
            yield ConfigProblem(f"argument {place}", repr(item["input"]), "keywords only")
        elif item["type"] == "missing":
            yield ConfigProblem(place, "nothing", "a value; it has no default")
        else:
            accepted = str(cause) if cause is not None else item["msg"]
            accepted = accepted.removeprefix("Input should be ")
            yield ConfigProblem(place, repr(item["input"]), accepted)


def _place(location: tuple[int | str, ...]) -> str:
    place = ""
    for part in location:
        if isinstance(part, int) and place:
            place += f"[{part}]"
        else:
            place += f".{part}" if place else str(part)
    return place
