"""The stale check: are these the arguments the program was captured with?

A ``Signature`` is what capture saw; comparing with it is thorough and slow. After the first
replay a checker specialised to that structure is generated: one straight line of ``is`` tests,
with the objects of the first replay as default arguments, because nothing in Python is faster.
Engines that slice their inputs anew at each step miss it, so a second such line compares contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from graphrt.errors import StaleInputError, UnkeyedValueError
from graphrt.graphs.generated import make_function
from graphrt.values import (
    Kind,
    Node,
    Path,
    format_call_path,
    is_equal_only_if_same,
    is_mutable_host,
    kept_host_value,
    same_host_value,
    walk_call,
)

Checker = Callable[[tuple[Any, ...], Mapping[str, Any]], None]


class StaleCheck(Enum):
    """How much of the arguments every replay after the first compares.

    ``OFF``: Nothing after the first replay.
    ``IDENTITY``: Are the objects the same? Where not: address, shape, stride, dtype, conj and neg
      bit.
    ``POINTER``: All of these of every leaf at every replay, and the current stream. For debugging.
    """

    OFF = "off"
    IDENTITY = "identity"
    POINTER = "pointer"


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """What capture saw at one place of the arguments."""

    path: str
    kind: Kind
    type: type
    address: int | tuple[int, ...] = 0
    """Of a tensor made of others (packed weights): theirs."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    is_conj: bool = False
    is_neg: bool = False
    value: Any = None
    """The value of a host leaf; the keys of a dict, in its order, which models iterate in."""
    num_children: int = 0
    besides: tuple[str, ...] = ()
    """Attributes that a list, tuple or dict has besides its entries: nothing compares them."""

    def describe(self) -> str:
        """Say what this leaf is, as an error message does."""
        if self.kind == "tensor":
            addresses = self.address if isinstance(self.address, tuple) else (self.address,)
            bits = [name for name in ("conj", "neg") if getattr(self, f"is_{name}")]
            return (
                f"{self.dtype} tensor of shape {self.shape}, stride {self.stride}, "
                f"at {', '.join(f'{address:#x}' for address in addresses)}"
                + "".join(f", with the {name} bit" for name in bits)
            )
        if self.kind == "host":
            return repr(self.value)
        if self.kind == "opaque":
            return self.type.__name__
        keys = f": {', '.join(map(repr, self.value))}" if self.value else ""
        return f"{self.type.__name__} of {self.num_children} entries{keys}"


@dataclass(frozen=True, slots=True)
class Signature:
    """The structure of ``(args, kwargs)`` at capture: every leaf and container, by path."""

    leaves: Mapping[Path, InputLeaf]
    names: tuple[str, ...] = ()
    """Of the parameters that take positional arguments."""

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any], names: tuple[str, ...] = ()
    ) -> Signature:
        """Read the arguments of a call."""
        leaves = {node.path: _read(node, names) for node in walk_call(args, kwargs)}
        return cls(leaves, names)

    def compare(self, args: Sequence[Any], kwargs: Mapping[str, Any], subject: str) -> None:
        """Raise ``StaleInputError`` or ``UnkeyedValueError`` for the first leaf that differs."""
        found = {node.path: node for node in walk_call(args, kwargs)}
        self._compare_keywords(kwargs, subject)
        for path, leaf in self.leaves.items():
            node = found.get(path)
            if node is None:
                raise _stale(subject, leaf.path, leaf.describe(), "nothing")
            _compare_leaf(subject, leaf, _read(node, self.names))
        # Nothing is new: each container has as many entries as at capture, and all of those.

    def _compare_keywords(self, kwargs: Mapping[str, Any], subject: str) -> None:
        """Name every keyword that is missing or new, because one tells less than all of them."""
        captured = {path[1].name for path in self.leaves if path[1:] and path[0].name == "kwargs"}
        missing, new = captured - kwargs.keys(), kwargs.keys() - captured
        if missing or new:
            told = {"missing": missing, "new": new}
            raise StaleInputError(
                f"{subject}: other arguments than at capture",
                expected=f"the keywords {', '.join(sorted(captured)) or '(none)'}",
                found="; ".join(f"{what}: {', '.join(sorted(s))}" for what, s in told.items() if s),
                do="pass the same arguments at every step of a key; for each other set of them "
                "capture a key of its own, told apart by its `variant`",
            )


def generate_checker(
    level: StaleCheck,
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
        return lambda args, kwargs: None
    if level is StaleCheck.POINTER:
        return full_check
    nodes = walk_call(args, kwargs)[1:]
    # A function of its own: the constants of the second line would cost the first one time.
    by_content = _generate_line(nodes, len(args), _content_test, full_check)

    def identity_test(node: Node, place: str, constant: Callable[[Any], str]) -> list[str]:
        value = node.value
        # New ones of these are left to the second line: 0.0 and -0.0 are equal, and not the same.
        is_plain = node.kind == "host" and isinstance(value, float | complex | type(None) | bool)
        if is_plain or (node.kind == "tensor" and not by_address(value)):
            return [f"{place} is {constant(value)}"]
        return _content_test(node, place, constant)

    return _generate_line(nodes, len(args), identity_test, by_content)


_LeafTest = Callable[[Node, str, Callable[[Any], str]], list[str]]
"""Writes the tests of one leaf at a place; the function given names a constant."""


def _generate_line(nodes: Sequence[Node], num_args: int, test: _LeafTest, miss: Checker) -> Checker:
    """Return the function that makes one test of all ``nodes``, and calls ``miss`` if it fails."""
    constants: dict[str, Any] = {"miss": miss}

    def constant(value: Any) -> str:
        name = f"c{len(constants)}"
        constants[name] = value
        return name

    tests = [
        text for node in nodes for text in test(node, _expression(node.path, constant), constant)
    ]
    # Unpacking is the quickest look-up there is, and it counts the arguments too.
    unpacking = "".join(f"a{number}, " for number in range(num_args))
    source = (
        f"def check(args, kwargs, {', '.join(constants)}):\n"
        f"    try:\n"
        f"        {unpacking or '()'} = args\n"
        f"        if {' and '.join(tests)}:\n"
        f"            return\n"
        f"    except (LookupError, AttributeError, TypeError, ValueError):\n"
        f"        pass  # another structure: the full check names the place\n"
        f"    miss(args, kwargs)\n"
    )
    return make_function(source, "<graphrt stale check>", {}, tuple(constants.values()))


def _content_test(node: Node, place: str, constant: Callable[[Any], str]) -> list[str]:
    value = node.value
    if node.kind == "container":
        # The outermost two are what Python makes of a call: always a tuple and a dict.
        same_class = [f"{place}.__class__ is {constant(type(value))}"] if node.path[1:] else []
        if isinstance(value, dict) and node.path[1:]:
            keys = constant(tuple(value))
            if all(type(name) is str for name in value):
                return [*same_class, f"(*{place},) == {keys}"]
            return [*same_class, f"{constant(same_host_value)}({keys}, (*{place},))"]
        # A dataclass has the fields of its class; everything else may have grown.
        counted = isinstance(value, dict | list | tuple)
        return [*same_class, *([f"len({place}) == {node.num_children}"] if counted else [])]
    if node.kind == "opaque":
        return [f"{place}.__class__ is {constant(type(value))}"]
    if node.kind == "tensor":
        return _tensor_test(value, place, constant)
    if is_mutable_host(value):
        return [f"{constant(same_host_value)}({constant(kept_host_value(value))}, {place})"]
    name = constant(value)
    if is_equal_only_if_same(value):
        test = f"{place}.__class__ is {name}.__class__ and {place} == {name}"
    else:
        test = f"{constant(same_host_value)}({name}, {place})"
    return [f"({place} is {name} or {test})"]


def _tensor_test(value: torch.Tensor, place: str, constant: Callable[[Any], str]) -> list[str]:
    if value.layout is not torch.strided or hasattr(value, "__tensor_flatten__"):
        # Without strides, or made of others (packed weights): only the full check looks into it.
        return ["False"]
    # Constants, not literals: the text is then the same for every program.
    tests = [
        f"{place}.data_ptr() == {constant(value.data_ptr())}",
        f"{place}.shape == {constant(value.shape)}",
        f"{place}.stride() == {constant(value.stride())}",
        f"{place}.dtype is {constant(value.dtype)}",
    ]
    # No more questions than needed, because engines ask them at every step.
    if value.is_complex():
        tests.append(f"{place}.is_conj() is {value.is_conj()}")
    if value.is_complex() or value.is_floating_point():
        # The imaginary part of a conjugated tensor has it.
        tests.append(f"{place}.is_neg() is {value.is_neg()}")
    return tests


def _expression(path: Path, constant: Callable[[Any], str]) -> str:
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
            text += f"[{constant(step.name)}]"
    return str(text)


def _read(node: Node, names: Sequence[str]) -> InputLeaf:
    value = node.value
    path = format_call_path(node.path, names)
    if node.kind != "tensor":
        kept = kept_host_value(value) if node.kind == "host" else None
        if isinstance(value, dict) and node.path[1:]:  # Named arguments come in any order.
            kept = tuple(value)
        besides: tuple[str, ...] = ()
        if isinstance(value, dict | list | tuple):
            entries = value if isinstance(value, dict) else ()
            besides = tuple(name for name in getattr(value, "__dict__", ()) if name not in entries)
        return InputLeaf(
            path,
            node.kind,
            type(value),
            value=kept,
            num_children=node.num_children,
            besides=besides,
        )
    if value.layout is not torch.strided:
        return InputLeaf(path, "opaque", type(value))
    return InputLeaf(
        path,
        "tensor",
        type(value),
        address=_address(value),
        shape=tuple(value.shape),
        stride=tuple(value.stride()),
        dtype=value.dtype,
        is_conj=value.is_conj(),
        is_neg=value.is_neg(),
    )


def _address(tensor: torch.Tensor) -> int | tuple[int, ...]:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.data_ptr() if tensor.layout is torch.strided else 0
    names, _ = tensor.__tensor_flatten__()
    parts = (_address(getattr(tensor, name)) for name in names)
    return tuple(
        address for part in parts for address in (part if isinstance(part, tuple) else (part,))
    )


_COMPARED = {
    "container": ("kind", "num_children", "type"),
    "tensor": ("kind", "address", "shape", "stride", "dtype", "is_conj", "is_neg"),
    "opaque": ("kind",),
}
"""What of a leaf has to be as at capture; of a host value, and of a dict's keys, the value."""


def _compare_leaf(subject: str, expected: InputLeaf, found: InputLeaf) -> None:
    is_same_value = expected.kind == found.kind and same_host_value(expected.value, found.value)
    if expected.kind == "host":
        if not is_same_value:
            raise UnkeyedValueError(
                f"{subject}: {expected.path}",
                expected=f"{expected.value!r}, the value that was captured",
                found=found.describe(),
                do="put it in the key's `variant` or pass a tensor",
            )
        return
    facts = _COMPARED[expected.kind]
    if not is_same_value or any(getattr(expected, fact) != getattr(found, fact) for fact in facts):
        raise _stale(subject, expected.path, expected.describe(), found.describe())


def _stale(subject: str, path: str, expected: str, found: str) -> StaleInputError:
    return StaleInputError(
        f"{subject}: {path}",
        expected=expected,
        found=found,
        do="write new values into the captured tensor (`copy_`), or capture again",
    )
