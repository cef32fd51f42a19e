"""What replaces Dynamo's guards: checks of the arguments, and of what the trace read.

Dynamo would evaluate its guards at every call. Arguments and modes are compared at every call of
the compiled code; what else the trace read, before each capture.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from graphrt.compile import torch_api
from graphrt.errors import ContractError, GraphrtError, GuardAuditError, RecompileError, shown
from graphrt.externals.environment import autocast_dtype
from graphrt.externals.places import attributes_of, is_foreign, module_of

Axes = Mapping[int, Mapping[int, str]]
"""By id of a tensor: its dimensions that vary, and their axes."""


class Given(NamedTuple):
    """What a traced call is given."""

    args: Any
    kwargs: Any
    axes: Axes
    """What varies of these."""


HOST = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str))


def environment(device_type: str) -> dict[str, object]:
    """The modes that a trace holds as constants."""
    return {
        "autocast": autocast_dtype(device_type),
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
    is_lazy: tuple[bool, bool]
    """Whether it is conjugated, and negated, when it is read."""


class Contract:
    """The arguments of the traced call: every later call has to have the same but for sizes."""

    def __init__(self, given: Given, sizes: Mapping[str, int], least: int = 1) -> None:
        args, kwargs, axes = given
        paths, self._structure = pytree.tree_flatten_with_path((args, kwargs))
        leaves = [leaf for _, leaf in paths]
        self._same = _first_places(leaves)
        self._names = [argument_name(path) for path, _ in paths]
        self._most = dict(sizes)
        self._least = least
        self._leaves = [
            _Tensor(
                leaf.dtype,
                leaf.device,
                tuple(axes.get(id(leaf), {}).get(dim, n) for dim, n in enumerate(leaf.shape)),
                None if leaf.is_contiguous() else leaf.stride(),
                (leaf.is_conj(), leaf.is_neg()),
            )
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        told = [leaf for leaf in self._leaves if isinstance(leaf, _Tensor)]
        self.axes = frozenset(size for leaf in told for size in leaf.sizes if isinstance(size, str))
        """Those that vary."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._device_type = tensors[0].device.type if tensors else "cpu"
        self._environment = environment(self._device_type)
        self._is_flat = _is_flat(args, kwargs)
        self._keywords = tuple(kwargs)
        named = {"args": args, "kwargs": kwargs}
        self.scope: dict[str, Any] = pytree.tree_map_only(torch.Tensor, lambda _: None, named)
        """Where expressions about the arguments that are objects find these."""
        parts = {_expression(path[:end]) for path, _ in paths for end in range(2, len(path) + 1)}
        self.compared = frozenset({"args", "kwargs", *parts}) - {
            _expression(path) for path, leaf in paths if not isinstance(leaf, (torch.Tensor, *HOST))
        }
        """Expressions of what ``check`` compares: all but what is in such objects."""

    @property
    def told(self) -> list[tuple[str, object]]:
        """What each argument was, by its name, and each mode."""
        leaves = [tuple(leaf) if isinstance(leaf, _Tensor) else leaf for leaf in self._leaves]
        form = ("the form of the arguments", (str(self._structure), self._same))
        return [form, *zip(self._names, leaves, strict=True), *self._environment.items()]

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
                isinstance(expected, HOST) and type(leaf) is type(expected) and leaf == expected
            ):
                raise _breach(name, shown(expected), shown(leaf))
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
        if (is_lazy := (leaf.is_conj(), leaf.is_neg())) != expected.is_lazy:
            told = (
                f"is_conj {is_conj}, is_neg {is_neg}"
                for is_conj, is_neg in (expected.is_lazy, is_lazy)
            )
            raise _breach(f"bits of {name}", *told)


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


def _expression(path: Sequence[Any]) -> str:
    """Of a part of the arguments, as torch's guards name it."""
    return ("args", "kwargs")[path[0].idx] + pytree.keystr(tuple(path[1:]))


def argument_name(path: Sequence[Any]) -> str:
    """Of a part of ``(args, kwargs)``, as errors say it."""
    (first, *rest) = path[1:]
    name = f"argument {first.idx}" if hasattr(first, "idx") else f"argument {first.key!r}"
    return name + pytree.keystr(tuple(rest))


class Audit:
    """What the trace read besides its arguments, to be compared with what stands there now.

    torch's own guards compare it, those that ``chosen`` chooses while they are made; but tensors,
    whose guards also tell gradients and modes, and hooks, whose guards take long to make.
    ``at_calls``: those too, because each call asks the guards.
    """

    def __init__(
        self,
        scope: Mapping[str, Any],
        globals_: Mapping[str, Any],
        contract: Contract,
        *,
        at_calls: bool,
    ) -> None:
        self.at_calls = at_calls
        self.changed: Sequence[str] = ()
        """Globals that the traced code changes."""
        self.traced: frozenset[CodeKey] = frozenset()
        """All code that was traced."""
        self.names: frozenset[str] = frozenset()
        """That this code has."""
        self.guards: Any = None
        """Made when the trace is compiled."""
        self.scope = {**scope, **contract.scope}
        self._by_contract = contract.compared
        # Guards name an array of NumPy as the tensor that the trace has in its place.
        self._globals = {"G": globals_, "___from_numpy": torch.as_tensor}
        self._codes: dict[str, Any] = {}
        """By expression."""
        self.kept: list[tuple[str, str, object]] = []
        """Kind, expression and value. Of what guards know by its id, which is its own only while
        it lives; of no tensor."""
        self._compared: dict[str, tuple[Any, object]] = {}
        """What torch's guards leave out, or compare by more than matters: by expression, its code
        and what is compared."""
        self._unguarded: list[tuple[Any, object]] = []
        """Those of them that no guard of torch's compares."""
        self._classes: set[type] = set()
        """Whose methods are among these."""
        self._sizes: dict[type, int] = {}
        """How much is in the dicts of their classes."""
        self._objects: dict[str, tuple[Any, dict[str, str]]] = {}
        """By expression of an object that a guard is about: its code; where the names that traced
        code has are found in it. torch guards what stood there, not what comes to hide it."""

    @property
    def told(self) -> list[str]:
        """How each thing is compared, and where it stands."""
        return [f"{kind} {as_written(name)}" for kind, name, _ in self.kept]

    def chosen(self, guards: Sequence[Any]) -> list[bool]:
        """Which of the guards stay."""
        return [self._stays(guard.guard_type, guard.name, guard.value) for guard in guards]

    def note_traced(self, codes: Iterable[CodeType]) -> None:
        """Note what code was traced, before the guards are chosen."""
        found = [*codes]
        self.traced = frozenset(map(_key_of, found))
        self.names = frozenset(name for code in found for name in code.co_names)

    def value_of(self, expression: str) -> object:
        """What stands there now; an exception where nothing does."""
        return self._now(self._code_of(expression))

    def read(self) -> Iterator[tuple[str, object]]:
        """Each thing that is compared, by its expression, as it stands there now."""
        for kind, name, _ in self.kept:
            if kind == "HASATTR":  # It need not be there.
                continue
            value = self.value_of(name)
            # Guards of what is in a container, or is not, say that themselves.
            is_of_type = kind == "TYPE_MATCH" or kind.endswith("_CONTAINS")
            yield f"{kind} {name}", type(value) if is_of_type else value
        for name, (_, told) in self._compared.items():
            yield f"{name} compared", told[0] if isinstance(told, tuple) and told else told
        for name, (_, owners) in self._objects.items():
            yield f"{name} names", sorted(owners.items())

    def _stays(self, kind: str, name: str, value: object) -> bool:
        is_changed = any(re.match(rf"{re.escape(one)}\b", as_written(name)) for one in self.changed)
        if not name or name in self._by_contract or is_changed:
            return False
        self.kept.append((kind, name, None if isinstance(value, torch.Tensor) else value))
        is_left_out = kind in ("TENSOR_MATCH", "EMPTY_NN_MODULE_HOOKS_DICT")
        # Of hooks of all modules torch compares the type alone.
        is_unguarded = name.endswith("_hooks") and not is_left_out
        if is_left_out or is_unguarded or isinstance(value, torch.nn.Module):
            self._compare(name, value, is_unguarded)
        if name not in self._objects and not is_foreign(_home_of(value)):
            self._objects[name] = self._code_of(name), _owners(value, self.names)
            self._sizes.update((base, len(vars(base))) for base in type(value).__mro__)
        if type(value) not in self._classes:
            self._classes.add(type(value))
            for method, function in _methods(type(value), self.traced):
                self._compare(f"type({name}).{method}", function, True)
        return self.at_calls or not is_left_out

    def _compare(self, name: str, value: object, is_unguarded: bool) -> None:
        self._compared[name] = found = self._code_of(name), _told(value)
        if is_unguarded:
            self._unguarded.append(found)

    def _code_of(self, expression: str) -> Any:
        # Several guards are about one thing, and to compile takes longer than to evaluate.
        if expression not in self._codes:
            self._codes[expression] = compile(expression, "<graphrt audit>", "eval")
        return self._codes[expression]

    def check_call(self) -> None:
        """As ``check``, without what torch's guards compare by more than matters.

        Errors: ``RecompileError``.
        """
        # Under a mode, as in simulated recordings, guards of tensors take each for another one.
        if not torch_api.has_modes() and (
            any(_told(self._now(code)) != told for code, told in self._unguarded)
            or any(len(vars(kind)) != size for kind, size in self._sizes.items())
            or not self.guards.check(self.scope)
        ):
            self.check(RecompileError)

    def check(self, kind: type[GraphrtError] = GuardAuditError) -> None:
        """Errors: one of ``kind`` with the first thing that differs from the trace."""
        for name, (code, told) in self._compared.items():
            if (now := _told(self._now(code))) != told:
                raise _changed(kind, as_written(name), str(told), str(now))
        if not self.guards.check(self.scope):
            reasons = self.guards.check_verbose(self.scope).verbose_code_parts
            reason = as_written(" ".join(reasons))
            # torch says of lengths alone what is wrong.
            reason = re.sub(r"^(len\(.*\)) != (\d+)$", r"\1 == \2", reason)
            place = reason.partition(", type=")[0]
            names = [name for _, name, _ in self.kept if as_written(name) in place]
            name = max(names, key=len, default=reason)
            raise _changed(kind, as_written(name), reason, shown(self._now(name)))
        for name, (code, owners) in self._objects.items():
            if (found := _owners(self._now(code), self.names)) != owners:
                one = next(n for n in {**owners, **found} if found.get(n) != owners.get(n))
                told, now = (each.get(one, "no such attribute") for each in (owners, found))
                raise _changed(kind, f"{as_written(name)}.{one}", told, now)

    def _now(self, code: Any) -> object:
        try:
            return eval(code, self._globals, self.scope)
        except Exception as error:  # noqa: BLE001 - whatever it is, it stands there no more
            return error


def _home_of(value: object) -> str:
    """The module of a class or function, or of what has no module itself the class's."""
    if isinstance(value, FunctionType):
        return str(value.__module__)
    return module_of(value if isinstance(value, type) else type(value))


def _owners(value: Any, names: frozenset[str]) -> dict[str, str]:
    """By name, in which dict it stands first: of the object, or of a class; also what stands there,
    if that is plain and the dict is one of a class or function. Classes of torch stay as they are.
    """
    found: dict[str, str] = {}
    kinds = (*(value.__mro__ if isinstance(value, type) else (value,)), *type(value).__mro__)
    for owner in kinds:
        is_class = isinstance(owner, type)
        if is_foreign(_home_of(owner)):
            continue
        own = attributes_of(owner)
        is_told = is_class or isinstance(owner, FunctionType)
        place = owner.__qualname__ if is_class else "the object itself"
        for name in names & own.keys():
            is_plain = is_told and isinstance(own[name], HOST)
            found.setdefault(name, f"{own[name]!r} of {place}" if is_plain else f"that of {place}")
    return found


def _changed(kind: type[GraphrtError], name: str, expected: str, found: str) -> GraphrtError:
    return kind(
        name,
        expected=f"{expected}, as when it was traced",
        found=found,
        do="put it back, or make another runtime, which traces the model as it is now",
    )


def _told(value: object) -> object:
    if isinstance(value, torch.nn.Module):
        return type(value)
    if isinstance(value, FunctionType | MethodType):
        return value, value.__code__
    if not isinstance(value, torch.Tensor):
        return tuple(map(str, value)) if isinstance(value, dict) else value
    stride = value.stride() if value.layout is torch.strided else None
    bits = value.is_conj(), value.is_neg()
    return type(value), value.dtype, value.device, tuple(value.shape), stride, bits


CodeKey = tuple[str, int, str]
"""File, line and name of some code."""


def _key_of(code: CodeType) -> CodeKey:
    return code.co_filename, code.co_firstlineno, code.co_name


def _methods(kind: type, traced: Collection[CodeKey]) -> Iterator[tuple[str, object]]:
    """Those methods of a class whose code was traced: torch takes them for granted."""
    for place, owner in enumerate(kind.__mro__):
        for name, made in vars(owner).items():
            code = getattr(getattr(made, "__func__", made), "__code__", None)
            is_traced = isinstance(code, CodeType) and _key_of(code) in traced
            if is_traced or (name == "__call__" and isinstance(made, FunctionType)):
                yield name, getattr(kind, name)
                yield f"__mro__[{place}].{name}", getattr(owner, name)


def as_written(expression: str) -> str:
    """As the user writes it: ``model.layers.0.scale``."""
    plain = re.sub(r"\bL\['(\w+)'\]", r"\1", expression)
    plain = re.sub(r"\.__dict__\['(\w+)'\]", r".\1", plain)
    plain = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", plain)
    return re.sub(r"G\['__import_(\w+)'\]", lambda m: m[1].replace("_dot_", "."), plain)
