"""Outputs at their real size: a program returns padded graph storage, a caller wants its rows.

Which dimension of which output is padded is declared, or inferred from two captured keys; one key
never suffices, because a dimension may equal the padded size by chance.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

import torch

from graphrt.errors import ConfigError, InputMismatchError, StaleOutputError
from graphrt.graphs.buffers import Sizes
from graphrt.graphs.leaves import Node, Path, map_tensors, rebuild, walk
from graphrt.graphs.program import Program

Length = str | Callable[[Any], int]
"""How long a dimension really is: the name of an axis, or a function of what ``take`` was given."""

OutputPolicy = Literal["view", "clone", "lease"]

_MAX_CACHED = 1024


class OutputSpec:
    """Which dimensions of a callable's outputs are padded, and who owns what ``take`` returns.

    ``axes``: path -> length of dimension 0, or path -> {dimension: length}. A path joins names and
    indices with dots (``logits``, ``0``, ``past.1.key``); the empty path is the output itself. A
    tensor without an entry is returned whole.

    ``policy``: ``"view"``, slices of graph storage, valid until the next replay; ``"clone"``,
    tensors of the caller's own; ``"lease"``, views that raise ``StaleOutputError`` when they are
    used after the next ``take`` or ``expire`` of this spec (for debugging: every use is checked).
    """

    def __init__(
        self,
        axes: Mapping[str, Length | Mapping[int, Length]] | None,
        policy: OutputPolicy = "view",
    ) -> None:
        if policy not in ("view", "clone", "lease"):
            raise ConfigError(
                "output policy", expected="view, clone or lease", found=repr(policy), do="pick one"
            )
        self.policy: OutputPolicy = policy
        self.axes = None if axes is None else MappingProxyType(_by_dimension(axes))
        self._term = _Term()

    @classmethod
    def infer(
        cls,
        first: tuple[Any, Mapping[str, int]],
        second: tuple[Any, Mapping[str, int]],
        policy: OutputPolicy = "view",
    ) -> Self:
        """Learn the axes from two keys: (program or its outputs, axis -> padded size) of each.

        Errors: ``ConfigError`` if the keys share the size of an axis, if structures differ, or if
                a dimension that differs fits no axis, or more than one.
        """
        return cls(_infer(first, second), policy)

    def bind(self, captured: Program | Any) -> BoundOutputs:
        """Prepare ``take`` for one key's program, or for the outputs it returned."""
        outputs = captured.outputs if isinstance(captured, Program) else captured
        if self.axes is None:
            raise ConfigError(
                "output axes",
                expected="axes by path, or two captured keys to infer them from",
                found="neither",
                do="pass axes={} if no output is padded, or use OutputSpec.infer",
            )
        return BoundOutputs(outputs, self.axes, self.policy, self._term)

    def expire(self) -> None:
        """End every lease: call it before anything of the same library replays."""
        self._term.number += 1


class BoundOutputs:
    """One program's outputs, cut to real sizes. ``opaque``: paths that no policy can own."""

    __slots__ = ("_axes", "_hand_out", "_outputs", "_policy", "_taken", "_term", "opaque")

    def __init__(
        self,
        outputs: Any,
        axes: Mapping[str, Mapping[int, Length]],
        policy: OutputPolicy,
        term: _Term,
    ) -> None:
        nodes = list(walk(outputs))
        _check_paths(nodes, axes)
        self.opaque = tuple(_dotted(node.path) for node in nodes if node.kind == "opaque")
        self._axes = axes
        self._outputs = outputs
        self._policy = policy
        self._term = term
        self._taken: dict[Any, Any] = {}
        self._hand_out = _hand_out(nodes)

    def take(self, n: Sizes) -> Any:
        """The outputs of the latest replay at the real sizes ``n``: a number, or axis -> number.

        Aliasing: by policy, see ``OutputSpec``. Under ``"view"`` one size gives the same tensor
                  objects each time; containers that can be changed are made anew.
        Errors:   ``InputMismatchError`` for a length beyond the padded one.
        """
        key = n if isinstance(n, int) else frozenset(n.items())
        cut = self._taken.get(key)
        if cut is None:
            cut = self._cut(n)
            if len(self._taken) >= _MAX_CACHED:
                self._taken.clear()
            self._taken[key] = cut
        if self._policy == "view":
            return self._hand_out(cut)
        if self._policy == "clone":
            return map_tensors(cut, lambda leaf: leaf.clone())
        term = self._term
        term.number += 1
        number = term.number
        return map_tensors(cut, lambda leaf: _leased(leaf, term, number))

    def _cut(self, n: Sizes) -> Any:
        def cut_leaf(path: Path, leaf: Any) -> Any:
            lengths = self._axes.get(_dotted(path))
            if lengths is None or not isinstance(leaf, torch.Tensor):
                return leaf
            for dim, length in lengths.items():
                leaf = leaf.narrow(dim, 0, _real_length(_dotted(path), leaf.shape[dim], length, n))
            return leaf

        return rebuild(self._outputs, cut_leaf)


def _real_length(path: str, padded: int, length: Length, n: Sizes) -> int:
    subject = f"output {path!r}"
    if callable(length):
        real = length(n)
    elif isinstance(n, int):
        real = n
    elif length in n:
        real = n[length]
    else:
        raise InputMismatchError(
            subject,
            expected=f"a real size of axis {length!r}",
            found=f"sizes of {', '.join(n)}",
            do="pass the sizes of every declared axis to take()",
        )
    real = operator.index(real)
    if not 0 <= real <= padded:
        raise InputMismatchError(
            subject,
            expected=f"a length of 0 to {padded}, the padded one",
            found=str(real),
            do="correct the declared length, or take from the program of the step's key",
        )
    return real


def _hand_out(nodes: list[Node]) -> Callable[[Any], Any]:
    """How a cached result is given away so that nobody can change the cache through it."""
    changeable = [
        node for node in nodes if node.kind == "container" and not isinstance(node.value, tuple)
    ]
    if not changeable:
        return _same
    root = nodes[0].value
    if len(changeable) == 1 and type(root) in (dict, list):
        return type(root).copy  # type: ignore[no-any-return]  # dict.copy or list.copy
    return _with_own_containers


def _same(value: Any) -> Any:
    return value


def _with_own_containers(value: Any) -> Any:
    return rebuild(value, lambda _, leaf: leaf)


def _dotted(path: Path) -> str:
    return ".".join(str(step.name) for step in path)


def _by_dimension(
    axes: Mapping[str, Length | Mapping[int, Length]],
) -> dict[str, Mapping[int, Length]]:
    return {
        path: dict(lengths) if isinstance(lengths, Mapping) else {0: lengths}
        for path, lengths in axes.items()
    }


def _check_paths(nodes: Iterable[Node], axes: Mapping[str, Mapping[int, Length]]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for node in nodes:
        if node.kind == "tensor":
            if _dotted(node.path) in tensors:
                raise ConfigError(
                    "output axes",
                    expected="a path for each output",
                    found=f"two outputs at {_dotted(node.path)!r}",
                    do="rename a key so that no two paths read alike",
                )
            tensors[_dotted(node.path)] = node.value
    for path, lengths in axes.items():
        dims = range(tensors[path].dim()) if path in tensors else range(0)
        if path not in tensors or not all(dim in dims for dim in lengths):
            raise ConfigError(
                f"output {path!r}",
                expected=f"a tensor with dimensions {', '.join(map(str, lengths))} at this path",
                found=", ".join(f"{p!r} {tuple(t.shape)}" for p, t in tensors.items()) or "none",
                do="correct the path or the dimension",
            )


# --- inference


def _infer(
    first: tuple[Any, Mapping[str, int]], second: tuple[Any, Mapping[str, int]]
) -> dict[str, dict[int, Length]]:
    (one, sizes), (other, other_sizes) = first, second
    same = [axis for axis, size in sizes.items() if other_sizes.get(axis) in (None, size)]
    if same or sizes.keys() != other_sizes.keys():
        raise _no_inference(
            "two keys that differ in every axis",
            f"{dict(sizes)} and {dict(other_sizes)}",
        )
    left = _tensors(one)
    right = _tensors(other)
    if left.keys() != right.keys():
        raise _no_inference(
            "one structure of outputs", f"tensors at {sorted(left)} and at {sorted(right)}"
        )
    axes: dict[str, dict[int, Length]] = {}
    for path, tensor in left.items():
        shapes = tuple(tensor.shape), tuple(right[path].shape)
        if len(shapes[0]) != len(shapes[1]):
            raise _no_inference(f"one rank of output {path!r}", f"shapes {shapes}")
        for dim, pair in enumerate(zip(*shapes, strict=True)):
            if pair[0] == pair[1]:
                continue
            fitting = [axis for axis in sizes if pair == (sizes[axis], other_sizes[axis])]
            if len(fitting) != 1:
                raise _no_inference(
                    f"one axis for dimension {dim} of output {path!r}, {pair[0]} and {pair[1]}",
                    " and ".join(fitting) or f"none of {dict(sizes)} and {dict(other_sizes)}",
                )
            axes.setdefault(path, {})[dim] = fitting[0]
    return axes


def _tensors(captured: Any) -> dict[str, torch.Tensor]:
    outputs = captured.outputs if isinstance(captured, Program) else captured
    return {_dotted(node.path): node.value for node in walk(outputs) if node.kind == "tensor"}


def _no_inference(expected: str, found: str) -> ConfigError:
    return ConfigError(
        "output axes",
        expected=expected,
        found=found,
        do="declare the axes by path, a length other than an axis as a function of the sizes",
    )


# --- leases


class _Term:
    """The number of the latest take; leases of earlier ones are over."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class LeasedTensor(torch.Tensor):
    """A view of graph storage that refuses every use after its term.

    What shares its bytes (views, slices) is leased for the same term; results of their own are
    plain tensors.
    """

    _term: _Term
    _number: int

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leases = [node.value for node in walk((args, kwargs)) if type(node.value) is cls]
        for lease in leases:
            if lease._number != lease._term.number:
                raise StaleOutputError(
                    "leased output",
                    expected="a use before the next replay, which overwrites the bytes",
                    found=f"{getattr(func, '__name__', func)} of take {lease._number}, "
                    f"after take or expiry {lease._term.number}",
                    do="use it sooner, clone it, or take with the policy 'clone'",
                )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            leased = {lease.untyped_storage().data_ptr(): lease for lease in leases}

            def lease_again(_: Path, leaf: Any) -> Any:
                if not isinstance(leaf, torch.Tensor) or isinstance(leaf, cls):
                    return leaf
                lease = leased.get(leaf.untyped_storage().data_ptr())
                return leaf if lease is None else _leased(leaf, lease._term, lease._number)

            return rebuild(result, lease_again)


def _leased(leaf: Any, term: _Term, number: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    lease = leaf.as_subclass(LeasedTensor)
    lease._term = term
    lease._number = number
    return lease
