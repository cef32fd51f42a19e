"""Outputs at their real size: a program returns padded graph storage, a caller wants its rows.

Which dimension of which output is padded is declared, or inferred from two captured keys; one key
never suffices, because a dimension may equal the padded size by chance.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from types import MappingProxyType
from typing import Any, Literal, Self

import torch

from graphrt.config.checked import check_choice, check_count, check_type
from graphrt.errors import ConfigError, InputMismatchError, StaleOutputError, shown
from graphrt.graphs.buffers import Sizes, whole_number
from graphrt.graphs.bufferspec import remember
from graphrt.graphs.program import Program
from graphrt.values import (
    Node,
    Path,
    dotted,
    map_tensors,
    own_copy,
    rebuild,
    tensors_of,
    walk,
)

Length = str | Callable[[Any], int]
"""How long a dimension really is: an axis by name, or a function of what ``unpad`` was given."""

OutputPolicy = Literal["view", "clone", "checked_view"]


class OutputSpec:
    """Which dimensions of a callable's outputs are padded, and who owns what ``unpad`` returns.

    ``axes``: path -> length of dimension 0, or path -> {dimension: length}. A path joins names and
    indices with dots (``logits``, ``0``, ``past.1.key``); the empty path is the output itself. A
    tensor without an entry is returned whole.

    ``policy``: ``"clone"``, tensors of the caller's own; ``"view"``, slices of graph storage, which
    saves the copy, valid until the next replay or until their program is retired;
    ``"checked_view"``, views that raise ``StaleOutputError`` when they are used after that, or
    after an ``unpad`` or ``expire`` of this spec (to find out whether ``"view"`` would do).

    ``chosen_from``: path of an integer output -> path of the floating one that it indexes along the
    last dimension, as ``{"tokens": "logits"}`` for a greedy choice. A padded batch may choose
    another among elements that are equal within rounding: verification counts that as a tie.

    ``replay_count``: how often outputs were overwritten, as ``unpad`` and ``expire`` count it.

    Errors: ``ConfigError`` for axes and ``chosen_from`` that are no mappings by path, what is no
            dimension, and another policy; when bound, for a path that no output has.
    """

    def __init__(
        self,
        axes: Mapping[str, Length | Mapping[int, Length]],
        policy: OutputPolicy = "clone",
        *,
        chosen_from: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        check_choice("output policy", policy, ("view", "clone", "checked_view"))
        self.policy: OutputPolicy = policy
        by_path = "paths by path, such as {'tokens': 'logits'}"
        check_type("chosen_from", chosen_from, Mapping, by_path)
        for path in (*chosen_from, *chosen_from.values()):
            check_type("a path of chosen_from", path, str, by_path)
        self.chosen_from = MappingProxyType(dict(chosen_from))
        do = "pass {} if no output is padded, or use OutputSpec.infer with two captured keys"
        check_type("output axes", axes, Mapping, "axes by path, such as {'logits': 'tokens'}", do)
        for path in axes:
            check_type("a path of output axes", path, str, "a text, such as 'past.1.key'")
        by_dimension = {
            path: dict(lengths) if isinstance(lengths, Mapping) else {0: lengths}
            for path, lengths in axes.items()
        }
        for path, lengths in by_dimension.items():
            for dim, length in lengths.items():
                check_count(f"a dimension of output {shown(path)}", dim, least=0)
                expected = "the name of an axis, or a function of the sizes"
                do = "leave out outputs whose size is fixed"
                check_type(f"length of output {shown(path)}", length, str | Callable, expected, do)
        self.axes: Mapping[str, Mapping[int, Length]] = MappingProxyType(by_dimension)
        self.replay_count = 0

    @classmethod
    def infer(
        cls,
        first: tuple[Any, Mapping[str, int]],
        second: tuple[Any, Mapping[str, int]],
        policy: OutputPolicy = "clone",
    ) -> Self:
        """Learn the axes from two keys: (program or its outputs, axis -> padded size) of each.

        Errors: ``ConfigError`` if the keys share the size of an axis, if structures differ, or if
                a dimension that differs fits no axis, or more than one.
        """
        return cls(_infer(first, second), policy)

    def bind(
        self, captured: Program | Any, padded: Mapping[str, int] | None = None
    ) -> BoundOutputs:
        """Prepare ``unpad`` for one key's program, or for the outputs it returned.

        ``padded``: axis -> padded size, which dimensions declared with that axis must have.
        Errors: ``ConfigError`` for a path or dimension that is not there, or of another size.
        """
        _check_sizes("padded", {} if padded is None else padded)
        program = captured if isinstance(captured, Program) else None
        return BoundOutputs(self, _outputs_of(captured), padded or {}, program)

    def expire(self) -> None:
        """Make every checked view invalid: call it before anything of the same library replays."""
        self.replay_count += 1


class BoundOutputs:
    """One program's outputs, cut to real sizes."""

    __slots__ = ("_copy_containers", "_cuts", "_key", "_outputs", "_program", "_spec")

    def __init__(
        self, spec: OutputSpec, outputs: Any, padded: Mapping[str, int], program: Program | None
    ) -> None:
        nodes = list(walk(outputs))
        _check_paths(nodes, spec, padded)
        self._spec = spec
        self._program = program
        self._outputs = outputs
        self._cuts: dict[Any, Any] = {}
        self._key = _cache_key(spec.axes)
        self._copy_containers = _container_copier(nodes)

    def unpad(self, n: Sizes) -> Any:
        """The outputs of the latest replay at the real sizes ``n``: a number, or axis -> number.

        Aliasing: by policy, see ``OutputSpec``. Under ``"view"`` one size gives the same tensor
                  objects each time; containers that can be changed are made anew.
        Errors:   ``InputMismatchError`` for a length beyond the padded one, and what is no size.
        """
        try:
            cut = self._cuts[n if type(n) is int else self._key(n)]
        except (LookupError, TypeError, AttributeError):  # Of the last two: no sizes.
            cut = self._cut(n)
        spec = self._spec
        if spec.policy == "view":
            return cut if self._copy_containers is None else self._copy_containers(cut)
        if spec.policy == "clone":
            return own_copy(cut)
        spec.replay_count += 1
        replay, program = spec.replay_count, self._program
        return map_tensors(cut, lambda tensor: _checked(tensor, spec, replay, program))

    def _cut(self, given: Any) -> Any:
        is_sizes = isinstance(given, int | Mapping)
        n: Sizes = given if is_sizes else whole_number("real sizes", given)

        def cut_leaf(path: Path, leaf: Any) -> Any:
            lengths = self._spec.axes.get(dotted(path))
            if lengths is None or not isinstance(leaf, torch.Tensor):
                return leaf
            for dim, length in lengths.items():
                leaf = leaf.narrow(dim, 0, _real_length(dotted(path), leaf.shape[dim], length, n))
            return leaf

        cut = rebuild(self._outputs, cut_leaf)
        remember(self._cuts, n if isinstance(n, int) else self._key(n), cut)
        return cut


def _cache_key(axes: Mapping[str, Mapping[int, Length]]) -> Callable[[Any], Any]:
    """Make the function that turns the real sizes of a step into what a cut is cached by."""
    lengths = [length for dims in axes.values() for length in dims.values()]
    names = dict.fromkeys(length for length in lengths if isinstance(length, str))
    if any(map(callable, lengths)):
        return lambda n: frozenset(n.items())  # A function may read any of the sizes.
    return operator.itemgetter(*names) if names else lambda n: ()


def _real_length(path: str, padded: int, length: Length, n: Sizes) -> int:
    subject = f"output {path!r}"
    if callable(length):
        told = length(n)
        try:
            real = operator.index(told)
        except TypeError:
            real = -1
        if not 0 <= real <= padded:
            raise ConfigError(
                subject,
                expected=f"a whole number of 0 to {padded}, of the function that says its length",
                found=f"{shown(told)} for {n}",
                do="correct the function in OutputSpec",
            )
        return real
    if isinstance(n, int):
        real = whole_number(subject, n)
    elif length in n:
        real = whole_number(subject, n[length])
    else:
        raise InputMismatchError(
            subject,
            expected=f"a real size of axis {length!r}",
            found=f"sizes of {', '.join(map(str, n))}",
            do="pass the sizes of every declared axis to unpad()",
        )
    if not 0 <= real <= padded:
        raise InputMismatchError(
            subject,
            expected=f"a length of 0 to {padded}, the padded one",
            found=shown(real),
            do="correct the declared length, or unpad the program of the step's key",
        )
    return real


def _container_copier(nodes: list[Node]) -> Callable[[Any], Any] | None:
    """Make the function that copies what a caller could change of a cached result."""
    changeable = [
        node for node in nodes if node.kind == "container" and not isinstance(node.value, tuple)
    ]
    if not changeable:
        return None
    root = nodes[0].value
    if len(changeable) == 1 and type(root) in (dict, list):
        return type(root).copy  # type: ignore[no-any-return]  # dict.copy or list.copy
    return lambda value: map_tensors(value, lambda tensor: tensor)


def _check_sizes(name: str, sizes: object) -> None:
    check_type(name, sizes, Mapping, "padded sizes by axis, such as {'tokens': 8}")
    for axis, size in sizes.items():  # type: ignore[attr-defined]  # a mapping, as asked above
        check_type(f"{name}: axis {shown(axis)}", size, Integral, "a whole number")


def _outputs_of(captured: Program | Any) -> Any:
    return captured.outputs if isinstance(captured, Program) else captured


def _tensors(nodes: Iterable[Node]) -> dict[str, torch.Tensor]:
    """Those among the ``nodes``, by path. Errors: ``ConfigError`` if two paths read alike."""
    tensors: dict[str, torch.Tensor] = {}
    for node in nodes:
        if node.kind == "tensor":
            path = dotted(node.path)
            if path in tensors:
                raise ConfigError(
                    "output axes",
                    expected="a path for each output",
                    found=f"two outputs at {path!r}",
                    do="rename a key so that no two paths read alike",
                )
            tensors[path] = node.value
    return tensors


def _check_paths(nodes: Iterable[Node], spec: OutputSpec, padded: Mapping[str, int]) -> None:
    """Refuse paths and dimensions that are not there, and a dimension that is not as long as its
    axis is padded to: other rows would be cut."""
    tensors = _tensors(nodes)
    for path, indexed in spec.chosen_from.items():
        if not _indexes(tensors.get(path), tensors.get(indexed)):
            raise ConfigError(
                f"chosen_from {shown(path)}: {shown(indexed)}",
                expected="an output of whole numbers, and the floating one that it indexes along "
                "the last dimension",
                found=", ".join(f"{p!r} {tuple(t.shape)} {t.dtype}" for p, t in tensors.items())
                or "none",
                do="correct the paths",
            )
    for path, lengths in spec.axes.items():
        dims = range(tensors[path].dim()) if path in tensors else range(0)
        if path not in tensors or not all(dim in dims for dim in lengths):
            raise ConfigError(
                f"output {shown(path)}",
                expected=f"a tensor with dimensions {', '.join(map(str, lengths))} at this path",
                found=", ".join(f"{p!r} {tuple(t.shape)}" for p, t in tensors.items()) or "none",
                do="correct the path or the dimension",
            )
        shape = tuple(tensors[path].shape)
        for dim, axis in lengths.items():
            expected = padded.get(axis) if isinstance(axis, str) else None
            if expected is not None and shape[dim] != expected:
                raise ConfigError(
                    f"output {path!r}, dimension {dim}",
                    expected=f"{shown(expected)}, the size of axis {axis!r}",
                    found=f"{shape[dim]}, in shape {shape}",
                    do="correct the axis; declare a length of another kind as a function of the "
                    "sizes",
                )


def _indexes(choice: torch.Tensor | None, scores: torch.Tensor | None) -> bool:
    """Whether ``choice`` can be what was chosen from ``scores``: one for each row, or several."""
    if choice is None or scores is None:
        return False
    rows = choice.shape if scores.dim() == choice.dim() + 1 else choice.shape[:-1]
    is_measure = choice.is_floating_point() or choice.is_complex()
    fits = len(rows) + 1 == scores.dim() and all(map(operator.le, rows, scores.shape))
    return fits and scores.is_floating_point() and not is_measure


# --- inference


def _infer(
    first: tuple[Any, Mapping[str, int]], second: tuple[Any, Mapping[str, int]]
) -> dict[str, dict[int, Length]]:
    keys: tuple[Any, Any] = (first, second)
    for given in keys:
        if not isinstance(given, tuple) or len(given) != 2:
            expected = "(a program or its outputs, padded sizes by axis) of each key"
            raise _no_inference(expected, shown(given))
        _check_sizes("padded sizes", given[1])
    (one, sizes), (other, other_sizes) = first, second
    same = [axis for axis, size in sizes.items() if other_sizes.get(axis) in (None, size)]
    if same or sizes.keys() != other_sizes.keys():
        raise _no_inference(
            "two keys that differ in every axis", f"{dict(sizes)} and {dict(other_sizes)}"
        )
    left, right = (_tensors(walk(_outputs_of(captured))) for captured in (one, other))
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


def _no_inference(expected: str, found: str) -> ConfigError:
    return ConfigError(
        "output axes",
        expected=expected,
        found=found,
        do="declare the axes by path, a length other than an axis as a function of the sizes",
    )


# --- checked views


class CheckedView(torch.Tensor):
    """A view of graph storage that refuses every use after the next replay.

    What shares its bytes (views, slices) is checked alike; results of their own are plain tensors.
    """

    _spec: OutputSpec
    _replay: int
    _program: Program | None
    """Whose retirement gives the bytes back."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        views = [tensor for tensor in tensors_of((args, kwargs)) if type(tensor) is cls]
        for view in views:
            is_retired = view._program is not None and view._program.state == "retired"
            if is_retired or view._replay != view._spec.replay_count:
                raise StaleOutputError(
                    "checked output",
                    expected="a use before its program is retired, which frees the bytes"
                    if is_retired
                    else "a use before the next replay, which overwrites the bytes",
                    found=f"{getattr(func, '__name__', func)} of the output of replay "
                    f"{view._replay}, after replay {view._spec.replay_count}",
                    do="use it sooner, clone it, or unpad with the policy 'clone'",
                )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            checked = {view.untyped_storage().data_ptr(): view for view in views}

            def check_alias(tensor: torch.Tensor) -> torch.Tensor:
                view = checked.get(tensor.untyped_storage().data_ptr())
                # All tensors without elements have one address.
                if view is None or isinstance(tensor, cls) or not tensor.numel():
                    return tensor
                return _checked(tensor, view._spec, view._replay, view._program)

            return map_tensors(result, check_alias)


def _checked(
    tensor: torch.Tensor, spec: OutputSpec, replay: int, program: Program | None
) -> CheckedView:
    view = tensor.as_subclass(CheckedView)
    view._spec = spec
    view._replay = replay
    view._program = program
    return view
