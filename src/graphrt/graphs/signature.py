"""The stale check: are these the arguments the program was captured with?

A ``Signature`` is what capture saw; comparing with it is thorough and slow. After the first
replay a checker specialised to that structure is generated: one straight line of ``is`` tests,
with the objects of the first replay as default arguments, because nothing in Python is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from graphrt.errors import StaleInputError, UnkeyedValueError
from graphrt.graphs.generated import make_function
from graphrt.graphs.values import (
    Kind,
    Node,
    Path,
    format_call_path,
    same_host_value,
    walk_call,
)

Checker = Callable[[tuple[Any, ...], Mapping[str, Any]], None]


class StaleCheck(Enum):
    """How much of the arguments every replay after the first compares."""

    OFF = "off"
    IDENTITY = "identity"
    """Are the objects the same? A miss falls back to address, shape, stride and dtype."""
    POINTER = "pointer"
    """Address, shape, stride and dtype of every leaf, and the current stream. For debugging."""


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """What capture saw at one place of the arguments."""

    path: str
    kind: Kind
    type: type
    address: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    value: Any = None
    """The value of a host leaf."""
    num_children: int = 0

    def describe(self) -> str:
        """Say what this leaf is, as an error message does."""
        if self.kind == "tensor":
            return (
                f"{self.dtype} tensor of shape {self.shape}, stride {self.stride}, "
                f"at {self.address:#x}"
            )
        if self.kind == "host":
            return repr(self.value)
        return f"{self.type.__name__} of {self.num_children} entries"


@dataclass(frozen=True, slots=True)
class Signature:
    """The structure of ``(args, kwargs)`` at capture: every leaf and container, by path."""

    leaves: Mapping[Path, InputLeaf]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        """Read the arguments of a call."""
        return cls({node.path: _read(node) for node in walk_call(args, kwargs)})

    def compare(self, args: Sequence[Any], kwargs: Mapping[str, Any], subject: str) -> None:
        """Raise ``StaleInputError`` or ``UnkeyedValueError`` for the first leaf that differs."""
        found = {node.path: node for node in walk_call(args, kwargs)}
        for path, leaf in self.leaves.items():
            node = found.get(path)
            if node is None:
                raise _stale(subject, leaf.path, leaf.describe(), "nothing")
            _compare_leaf(subject, leaf, _read(node))
        for path, node in found.items():
            if path not in self.leaves:
                seen = _read(node)
                raise _stale(subject, seen.path, "nothing", seen.describe())


def generate_checker(
    level: StaleCheck,
    signature: Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    by_address: Callable[[torch.Tensor], bool],
    full_check: Checker,
) -> Checker:
    """Return the checker of every replay after the first.

    ``args, kwargs``: those of the first replay; they are the references, never refreshed.
    ``by_address``: True for tensors that must not be kept alive (owning pool tensors).
    ``full_check``: decides after a miss, and raises.
    """
    if level is StaleCheck.OFF:
        return _no_check
    if level is StaleCheck.POINTER:
        return full_check
    constants: dict[str, Any] = {"full_check": full_check}
    tests = []
    for node in walk_call(args, kwargs)[1:]:
        tests.extend(_leaf_test(node, by_address, constants))
    # Unpacking is the quickest look-up there is, and it counts the arguments too.
    unpacking = "".join(f"a{number}, " for number in range(len(args)))
    source = (
        f"def check(args, kwargs, {', '.join(constants)}):\n"
        f"    try:\n"
        f"        {unpacking or '()'} = args\n"
        f"        if {' and '.join(tests)}:\n"
        f"            return\n"
        f"    except (LookupError, AttributeError, TypeError, ValueError):\n"
        f"        pass  # another structure: the full check names the place\n"
        f"    full_check(args, kwargs)\n"
    )
    return make_function(source, "<graphrt stale check>", {}, tuple(constants.values()))


def _no_check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    return None


def _leaf_test(
    node: Node, by_address: Callable[[torch.Tensor], bool], constants: dict[str, Any]
) -> list[str]:
    place = _expression(node.path, constants)

    def constant(value: Any) -> str:
        name = f"c{len(constants)}"
        constants[name] = value
        return name

    value = node.value
    if node.kind == "container":
        # The outermost two are what Python makes of a call: always a tuple and a dict.
        same_class = [f"{place}.__class__ is {constant(type(value))}"] if node.path[1:] else []
        # A dataclass has the fields of its class; everything else may have grown.
        counted = isinstance(value, dict | list | tuple)
        return [*same_class, *([f"len({place}) == {node.num_children}"] if counted else [])]
    if node.kind == "opaque":
        return []
    if node.kind == "tensor" and by_address(value):
        return [
            # Constants, not literals: the text is then the same for every program.
            f"{place}.data_ptr() == {constant(value.data_ptr())}",
            f"{place}.shape == {constant(value.shape)}",
            f"{place}.stride() == {constant(value.stride())}",
            f"{place}.dtype is {constant(value.dtype)}",
        ]
    if node.kind == "tensor" or isinstance(value, float | complex | type(None) | bool):
        # Equal floats may differ in bits (0.0 and -0.0), so they get no shortcut through ==.
        return [f"{place} is {constant(value)}"]
    name = constant(value)
    return [f"({place} is {name} or {place}.__class__ is {name}.__class__ and {place} == {name})"]


def _expression(path: Path, constants: dict[str, Any]) -> str:
    """Write the look-up of ``path``; keys without a literal become constants."""
    text, steps = path[0].name, path[1:]
    if text == "args":
        text, steps = f"a{steps[0].name}", steps[1:]
    for step in steps:
        if step.kind == "attribute":
            text += f".{step.name}"
        elif type(step.name) in (int, str):
            text += f"[{step.name!r}]"
        else:
            name = f"c{len(constants)}"
            constants[name] = step.name
            text += f"[{name}]"
    return str(text)


def _read(node: Node) -> InputLeaf:
    value = node.value
    path = format_call_path(node.path)
    if node.kind != "tensor":
        host_value = value if node.kind == "host" else None
        return InputLeaf(
            path, node.kind, type(value), value=host_value, num_children=node.num_children
        )
    if value.layout is not torch.strided:
        return InputLeaf(path, "opaque", type(value))
    return InputLeaf(
        path,
        "tensor",
        type(value),
        address=value.data_ptr(),
        shape=tuple(value.shape),
        stride=tuple(value.stride()),
        dtype=value.dtype,
    )


def _compare_leaf(subject: str, expected: InputLeaf, found: InputLeaf) -> None:
    if expected.kind == found.kind == "opaque":
        return
    if expected.kind == "host" and not (
        found.kind == "host" and same_host_value(expected.value, found.value)
    ):
        raise UnkeyedValueError(
            f"{subject}: {expected.path}",
            expected=f"{expected.value!r}, the value that was captured",
            found=found.describe(),
            do="put it in the key's `variant` or pass a tensor",
        )
    facts: tuple[str, ...] = ("kind", "num_children") if expected.kind == "container" else ()
    if expected.kind == "tensor":
        facts = ("kind", "address", "shape", "stride", "dtype")
    differs = any(getattr(expected, fact) != getattr(found, fact) for fact in facts)
    if differs or (expected.kind == "container" and expected.type is not found.type):
        raise _stale(subject, expected.path, expected.describe(), found.describe())
    if expected.kind == "opaque" and found.kind != "opaque":
        raise _stale(subject, expected.path, expected.type.__name__, found.describe())


def _stale(subject: str, path: str, expected: str, found: str) -> StaleInputError:
    return StaleInputError(
        f"{subject}: {path}",
        expected=expected,
        found=found,
        do="write new values into the captured tensor (`copy_`), or capture again",
    )
