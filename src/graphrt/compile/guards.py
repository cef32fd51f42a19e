"""What replaces Dynamo's guards: checks of the arguments, and of what the trace read.

Dynamo's own guards would be evaluated at every call, and are all dropped. Arguments and modes are
compared at every call of the compiled code; what else the trace read, before each capture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from graphrt.errors import ContractError, GuardAuditError

Axes = Mapping[int, Mapping[int, str]]
"""By id of a tensor: its dimensions that vary, and their axes."""

_HOST = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str))
_QUESTIONS = {
    "HASATTR": "hasattr({1}, {0!r})",
    "NOT_PRESENT_IN_GENERIC_DICT": "{0!r} in {1}.__dict__",
}
"""By kind of guard, as an expression of the attribute and the object."""
_BY_IDENTITY = (
    *(type, FunctionType, BuiltinFunctionType, ModuleType, Enum),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)


def environment(device_type: str) -> dict[str, object]:
    """The modes that a trace holds as constants."""
    autocast = torch.is_autocast_enabled(device_type)
    return {
        "autocast": torch.get_autocast_dtype(device_type) if autocast else None,
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


class _Tensor(NamedTuple):
    """What an argument was when it was traced. ``sizes``: an axis where that varies."""

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int | str, ...]
    stride: tuple[int, ...] | None
    """None: contiguous."""


class Contract:
    """The arguments of the traced call: every later call has to have the same but for sizes."""

    def __init__(
        self, args: Any, kwargs: Any, axes: Axes, sizes: Mapping[str, int], least: int = 1
    ) -> None:
        paths, self._structure = pytree.tree_flatten_with_path((args, kwargs))
        leaves = [leaf for _, leaf in paths]
        self._same = _first_places(leaves)
        self._names = [_argument_name(path) for path, _ in paths]
        self._most = dict(sizes)
        self._least = least
        self._leaves = [
            _Tensor(
                leaf.dtype,
                leaf.device,
                tuple(axes.get(id(leaf), {}).get(dim, n) for dim, n in enumerate(leaf.shape)),
                None if leaf.is_contiguous() else leaf.stride(),
            )
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._device_type = tensors[0].device.type if tensors else "cpu"
        self._environment = environment(self._device_type)
        self._is_flat = _is_flat(args, kwargs)
        self._keywords = tuple(kwargs)

    def check(self, args: Any, kwargs: Any) -> None:
        """Errors: ``ContractError`` with argument, expected and found.

        At every call: texts are made for errors alone, and containers walked where there are some.
        """
        leaves: Sequence[Any] = (*args, *kwargs.values())
        is_known = tuple(kwargs) == self._keywords and len(leaves) == len(self._leaves)
        if not (self._is_flat and is_known and _is_flat(args, kwargs)):
            leaves, structure = pytree.tree_flatten((args, kwargs))
            if structure != self._structure:
                raise _breach("arguments", str(self._structure), str(structure))
        same = _first_places(leaves)
        if same != self._same:
            at = next(at for at, first in enumerate(same) if first != self._same[at])
            told = [
                "a tensor of its own" if one == at else f"the tensor of {self._names[one]}"
                for one in (self._same[at], same[at])
            ]
            raise _breach(self._names[at], *told)
        found: dict[str, tuple[int, int, str]] = {}
        for name, expected, leaf in zip(self._names, self._leaves, leaves, strict=True):
            if isinstance(expected, _Tensor):
                self._check_tensor(name, expected, leaf, found)
            elif leaf is not expected and not (
                isinstance(expected, _HOST) and type(leaf) is type(expected) and leaf == expected
            ):
                raise _breach(name, repr(expected), repr(leaf))
        now = environment(self._device_type)
        if now != self._environment:
            mode = next(mode for mode, value in self._environment.items() if now[mode] != value)
            raise _breach(mode, str(self._environment[mode]), str(now[mode]))

    def axes_of_one(self, args: Any, kwargs: Any) -> frozenset[str]:
        """The axes that have size 1 in a call, as far as it is one that ``check`` would take."""
        leaves = pytree.tree_leaves((args, kwargs))
        return frozenset(
            axis
            for expected, leaf in zip(self._leaves, leaves, strict=False)
            if isinstance(expected, _Tensor) and isinstance(leaf, torch.Tensor)
            for axis, size in zip(expected.sizes, leaf.shape, strict=False)
            if isinstance(axis, str) and size == 1
        )

    def _check_tensor(
        self, name: str, expected: _Tensor, leaf: Any, found: dict[str, tuple[int, int, str]]
    ) -> None:
        if not isinstance(leaf, torch.Tensor):
            raise _breach(name, "a tensor", type(leaf).__name__)
        shape = leaf.shape
        for what, traced, now in (
            ("dtype", expected.dtype, leaf.dtype),
            ("device", expected.device, leaf.device),
            ("rank", len(expected.sizes), len(shape)),
        ):
            if traced != now:
                raise _breach(f"{what} of {name}", str(traced), str(now))
        for dim, (wanted, size) in enumerate(zip(expected.sizes, shape, strict=True)):
            if wanted == size:
                continue
            accepted = str(wanted)
            if isinstance(wanted, int):
                accepted += ", as it was traced"
            else:
                other, where, owner = found.setdefault(wanted, (size, dim, name))
                accepted = f"{self._least} to {self._most[wanted]} {wanted}"
                if size == other and self._least <= size <= self._most[wanted]:
                    continue
                if size != other:
                    accepted = f"{other} {wanted}, as dimension {where} of {owner} has"
            raise _breach(f"dimension {dim} of {name}", accepted, str(size))
        if expected.stride is None and not leaf.is_contiguous():
            raise _breach(f"layout of {name}", "contiguous", f"strides {leaf.stride()}")
        if expected.stride not in (None, leaf.stride()):
            raise _breach(f"strides of {name}", str(expected.stride), str(leaf.stride()))


def _is_flat(args: Any, kwargs: Any) -> bool:
    return all(type(leaf) in _PLAIN for leaf in (*args, *kwargs.values()))


def _first_places(leaves: Sequence[Any]) -> list[int]:
    """Of each leaf where it is found first: a tensor given twice is one input of the graph."""
    first: dict[int, int] = {}
    return [
        first.setdefault(id(leaf), at) if isinstance(leaf, torch.Tensor) else at
        for at, leaf in enumerate(leaves)
    ]


def _breach(what: str, expected: str, found: str) -> ContractError:
    return ContractError(
        what,
        expected=expected,
        found=found,
        do="call it as it was traced, or make a runtime of its own for such calls",
    )


def _argument_name(path: Sequence[Any]) -> str:
    (first, *rest) = path[1:]
    name = f"argument {first.idx}" if hasattr(first, "idx") else f"argument {first.key!r}"
    return name + pytree.keystr(tuple(rest))


class Audit:
    """What the trace read besides its arguments, to be compared with what stands there now.

    ``unchecked``: expressions that cannot be evaluated again, in the user's terms.
    """

    def __init__(self, guards: Iterable[Any], scope: Mapping[str, Any], globals_: Any) -> None:
        self._scope = {**scope, "G": globals_}
        reads = {}
        for guard in guards:
            if guard.name and guard.has_value and not re.match(r"(args|kwargs)\b", guard.name):
                reads[guard.name] = _told(guard.value)
                reads |= {question: self._now(question) for question in _asked(guard)}
        checked = {one: told for one, told in reads.items() if self._now(one) == told}
        self.unchecked = tuple(as_written(one) for one in reads if one not in checked)
        self._reads = {
            one: (compile(one, "<graphrt audit>", "eval"), told) for one, told in checked.items()
        }
        """By expression, its code; how it is compared, and what it was."""
        self._shared = self._sharing()

    @property
    def num_checked(self) -> int:
        return len(self._reads)

    def told(self) -> dict[str, list[str]]:
        """What is compared, with its value, and what cannot be."""
        compared = [f"{as_written(one)}: {was!r}" for one, (_, (_, was)) in self._reads.items()]
        return {"compared": compared, "not compared": list(self.unchecked)}

    def check(self) -> None:
        """Errors: ``GuardAuditError`` with the first thing that differs from the trace."""
        for expression, (code, told) in self._reads.items():
            now = self._now(code)
            if now != told:
                expected = f"{told[1]!r}, which the trace holds as a constant"
                raise _changed(expression, expected, repr(now[1]))
        for expression, first in self._sharing().items():
            if first != (before := self._shared[expression]):
                expected = f"the tensor that {as_written(before)} is, as when it was traced"
                found = "another one" if first == expression else f"that of {as_written(first)}"
                raise _changed(expression, expected, found)

    def _sharing(self) -> dict[str, str]:
        """Of each tensor that the trace read, where it read that same tensor first: it is one
        input of the graph."""
        # With the tensors, because an id is one's own only while it lives.
        first: dict[int, tuple[str, Any]] = {}
        found = {}
        for expression, (code, (kind, _)) in self._reads.items():
            if kind == "a tensor":
                value = eval(code, self._scope)
                found[expression] = first.setdefault(id(value), (expression, value))[0]
        return found

    def _now(self, code: Any) -> tuple[str, object]:
        try:
            return _told(eval(code, self._scope))
        except Exception as error:  # noqa: BLE001 - whatever it is, it stands there no more
            return "error", f"{type(error).__name__}: {error}"


def _changed(expression: str, expected: str, found: str) -> GuardAuditError:
    return GuardAuditError(
        as_written(expression),
        expected=expected,
        found=found,
        do="put it back, or make another runtime, which traces the model as it is now",
    )


def _asked(guard: Any) -> Iterator[str]:
    """What the trace asked an object about its attributes: whether it has one, and whether one that
    its class has is its own."""
    if (question := _QUESTIONS.get(guard.guard_type)) is not None:
        made_by = getattr(getattr(guard, "orig_guard", None), "create_fn", None)
        for name in getattr(made_by, "keywords", {}).values():
            yield question.format(name, guard.name)


def _told(value: Any) -> tuple[str, object]:
    if isinstance(value, _HOST):
        return f"a {type(value).__name__}", value
    if isinstance(value, torch.Tensor):
        stride = value.stride() if value.layout is torch.strided else None
        return "a tensor", (value.dtype, value.device, tuple(value.shape), stride)
    if isinstance(value, MethodType):
        return "a method", (id(value.__self__), _told(value.__func__))
    if isinstance(value, FunctionType):
        return "an object", (value, value.__code__)
    if isinstance(value, _BY_IDENTITY):
        return "an object", value
    if isinstance(value, dict):
        return type(value).__name__, tuple(map(str, value))
    if isinstance(value, set | frozenset):
        return type(value).__name__, frozenset(value)
    if isinstance(value, tuple) and _is_constant(value):
        # By its text too, in which 1, 1.0 and True differ.
        return f"{type(value).__name__} {value!r}", value
    if isinstance(value, list | tuple | torch.nn.ModuleList):
        return type(value).__name__, len(value)
    if isinstance(value, torch.nn.Module):
        return "an object of", (type(value), _told(type(value).forward))
    return "an object of", type(value)


def _is_constant(value: Any) -> bool:
    """Whether it is one constant for torch, which looks at each item of other tuples itself."""
    is_plain = isinstance(value, _HOST)
    return is_plain or (isinstance(value, tuple) and all(map(_is_constant, value)))


def as_written(expression: str) -> str:
    """As the user writes it: ``model.layers.0.scale``."""
    plain = re.sub(r"^L\['(\w+)'\]", r"\1", expression)
    plain = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", plain)
    return re.sub(r"G\['__import_(\w+)'\]", lambda m: m[1].replace("_dot_", "."), plain)
