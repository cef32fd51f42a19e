"""Large host data, and classes that answer for themselves: walks end, and raise nothing of theirs.

The values are reached by every look: the walk, the snapshots around runs, and the watch.
"""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import io
import itertools
import math
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphrt import Reason
from graphrt.externals.places import contents_of, part_of
from graphrt.gc_pause import frozen_heap
from lab import random_rows, rows_runner
from ranks_lab import launcher


@pytest.fixture(autouse=True)
def heap():
    with frozen_heap():
        yield


def raises(*_: Any, **__: Any) -> Any:
    raise OSError("a class of the user's")


class Unhashable(type):
    __hash__ = None


class Raising(type):
    __eq__ = __hash__ = __instancecheck__ = __subclasscheck__ = __bool__ = raises


class Hidden(type):
    def __getattribute__(cls, name: str) -> Any:
        return raises() if name in ("__mro__", "__dict__") else type.__getattribute__(cls, name)


METACLASSES = (Unhashable, Raising, Hidden)
BASES = (object, dict, list, tuple, set, collections.deque, collections.OrderedDict, np.ndarray)
NAMES: tuple[dict[str, Any], ...] = (
    {"__module__": 3},
    {"__module__": property(raises)},
    {"__class__": property(raises)},
    {"__class__": property(lambda _: torch.Tensor)},
    {"__eq__": raises, "__hash__": raises},
    {"__eq__": lambda *_: torch.ones(2), "__hash__": object.__hash__},
    {"__dict__": property(raises)},
    {"__getattr__": raises},
    {"__len__": raises},
    {"__len__": lambda _: 5_000},
    {"__len__": lambda _: -1},
    {"__iter__": raises},
    {"__iter__": lambda _: itertools.count()},
    {"__bool__": raises, "__repr__": raises, "__contains__": raises},
    {"__getitem__": raises, "get": raises, "items": raises, "keys": raises, "values": raises},
    {"__copy__": raises, "__reduce_ex__": raises, "__sizeof__": raises},
    {"_fields": property(raises)},
    {"_fields": 3},
    {"__wrapped__": property(raises), "runnable": property(raises), "__func__": property(raises)},
    {"__next__": raises, "__call__": raises, "__missing__": raises},
    {"__array__": raises, "__array_interface__": property(raises)},
)


def made(kind: Any, base: type) -> Any:
    if base is np.ndarray:
        return kind((2, 2))
    if base is dict or base is collections.OrderedDict:
        found = kind()
        base.__setitem__(found, "a", 1)
        return found
    return kind() if base is object else kind([1, 2])


def admitted(values: list[Any]) -> tuple[Any, ...]:
    """What is not watched of a callable that reads ``values``; it serves with its graph."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if values is not None else values.a + len(values)

    with rows_runner(fn) as runner, torch.no_grad():
        runner.capture()
        for _ in range(math.ceil(runner.num_watched / 4)):
            runner.run(random_rows({"n": 2}, 5))
            assert runner.last_decision.reason is Reason.HIT
        assert runner.check_externals().is_unchanged
        return runner.report().unwatched


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("number", range(len(NAMES)))
def test_class_with_odd_methods_is_walked_without_running_them(base: type, number: int) -> None:
    kind = type("Odd", (base,), dict(NAMES[number]))
    admitted([made(kind, base), kind])


@pytest.mark.parametrize("base", [object, dict, list])
@pytest.mark.parametrize("meta", METACLASSES)
def test_class_whose_metaclass_answers_for_it_is_named(meta: type, base: type) -> None:
    kind = meta.__new__(meta, "Odd", (base,), {})
    found = admitted([made(kind, base), kind, {"a": made(kind, base)}])
    assert {(item.kind, item.because) for item in found} == {
        ("Odd", "its metaclass answers for it"),
        (meta.__name__, "its metaclass answers for it"),
    }


class Armed:
    """A key that raises when it is hashed, once it is told to."""

    is_armed = False

    def __hash__(self) -> int:
        return raises() if self.is_armed else 5

    def __eq__(self, other: object) -> bool:
        return raises() if self.is_armed else self is other


BOXES: dict[str, Any] = {
    "set": lambda key: {key},
    "frozenset": lambda key: frozenset({key}),
    "set of tuples": lambda key: {(key, 1)},
    "dict": lambda key: {"a": 0, key: 1},
    "dict of tuples": lambda key: {(1, key): 1},
    "in order": lambda key: collections.OrderedDict({key: 1}),
    "with a default": lambda key: collections.defaultdict(int, {key: 1}),
}


@pytest.mark.parametrize("box", BOXES)
def test_container_with_a_key_that_cannot_be_hashed_is_named(box: str) -> None:
    key = Armed()
    made_of = BOXES[box](key)
    key.is_armed = True
    (found,) = admitted([made_of])
    assert found.because == "a key of it raises when it is hashed"


@pytest.mark.parametrize("box", BOXES)
def test_key_that_cannot_be_hashed_later_raises_nothing(box: str) -> None:
    key = Armed()
    values = [BOXES[box](key)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + len(values[0]))

    with rows_runner(fn) as runner, torch.no_grad():
        runner.capture()
        key.is_armed = True
        for _ in range(math.ceil(runner.num_watched / 4)):
            runner.run(random_rows({"n": 2}, 5))
        assert runner.last_decision.reason in (Reason.HIT, Reason.INVALIDATED)
        runner.check_externals()


TENSORS: tuple[dict[str, Any], ...] = (
    {"__getattr__": raises},
    {"__getattribute__": raises},
    {"__torch_function__": classmethod(raises)},
    {"__tensor_flatten__": raises},
    {"__tensor_flatten__": property(raises)},
    {"__tensor_flatten__": lambda _: (["absent"], None)},
    {"__tensor_flatten__": 3},
    {"layout": property(raises)},
    {"untyped_storage": raises},
)


@pytest.mark.parametrize("number", range(len(TENSORS)))
def test_tensor_whose_class_raises_is_named(number: int) -> None:
    kind = type("Odd", (torch.Tensor,), dict(TENSORS[number]))
    (found,) = admitted([torch.ones(2).as_subclass(kind)])
    assert found.path == "values[0]"
    assert "code of its class raises" in found.because


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class MoreSlots(Slots):
    __slots__ = ("more",)


@pytest.mark.parametrize("kind", [Slots, MoreSlots])
def test_slot_that_is_asked_by_its_name_is_watched(kind: type[Slots]) -> None:
    found, other = kind(2.0), type("Other", (), {"scale": 1.0})()
    other.scale = 1.0

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(found, "scale", 1.0) * other.__dict__["scale"]

    with rows_runner(fn) as runner, torch.no_grad():
        runner.capture()
        assert torch.equal(runner.run({"x": torch.ones(2, 4)}), torch.full((2, 4), 2.0))
        found.scale = 3.0
        for _ in range(math.ceil(runner.num_watched / 4)):
            out = runner.run({"x": torch.ones(2, 4)})
        assert runner.last_decision.reason is Reason.INVALIDATED
        assert torch.equal(out, torch.full((2, 4), 3.0))


@pytest.mark.parametrize("name", ["__getattribute__", "__getattr__", "func", "args", "keywords"])
def test_partial_whose_class_raises_is_walked(name: str) -> None:
    own = raises if name.startswith("__") else property(raises)
    kind = type("Odd", (functools.partial,), {name: own})
    assert not admitted([kind(math.sqrt, 2.0)])


# --- arrays, as they lie in memory


ARRAYS: dict[str, tuple[Any, Any]] = {
    "broadcast": (np.zeros((1, 3)), lambda base: np.broadcast_to(base, (10**4, 10**4, 3))),
    "transposed": (np.zeros((30, 40, 50)), lambda base: base.transpose(1, 2, 0)),
    "fortran": (np.zeros((300, 400)), lambda base: base.T),
    "strided": (np.zeros((301, 400)), lambda base: base[::2, ::3]),
    "one row in two": (np.zeros((5, 300_000)), lambda base: base[::2]),
    "two long rows": (np.zeros((2, 300_001)), lambda base: base[:, ::2]),
    "odd columns": (np.zeros((300_001, 3), "f4"), lambda base: base[:, ::2]),
    "records": (np.zeros(100_001, "f8, u1"), lambda base: base[::2]),
    "backwards": (np.zeros((300, 400)), lambda base: base[::-1, ::-1]),
    "overlapping": (
        np.zeros(50_000),
        lambda base: np.lib.stride_tricks.sliding_window_view(base, 20_000),
    ),
    "one number": (np.zeros(()), lambda base: base),
    "strings": (np.full(10, "two"), lambda base: base),
    "large": (np.zeros(9 * 2**20), lambda base: base),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("place", [0, -1])
def test_element_of_an_array_is_noticed_however_it_lies_in_memory(name: str, place: int) -> None:
    base = ARRAYS[name][0].copy()
    table = ARRAYS[name][1](base)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + table.ndim)

    with rows_runner(fn) as runner, torch.no_grad():
        runner.capture()
        assert runner.check_externals().is_unchanged
        base.flat[place] = 1
        assert runner.check_externals().moved == ("table[:]",)


@pytest.mark.parametrize("name", ARRAYS)
def test_parts_of_an_array_are_those_of_its_contents(name: str) -> None:
    base = ARRAYS[name][0].copy()
    base.reshape(-1).view("u1")[:] = np.arange(base.nbytes, dtype="u4").astype("u1")
    table = ARRAYS[name][1](base)
    contents = contents_of(table)
    assert len(contents) > 1
    assert contents == tuple(part_of(table, number) for number in range(len(contents)))


BUFFERS: dict[str, Callable[[bytes], Any]] = {
    "numbers": lambda data: array.array("d", data),
    "numbers of C": lambda data: (ctypes.c_int * (len(data) // 4)).from_buffer_copy(data),
    "every second": lambda data: memoryview(array.array("h", data))[::2],
    "two dimensions": lambda data: memoryview(data).cast("f", (125, len(data) // 500)),
    "bytes": bytearray,
    "file": io.BytesIO,
}


@pytest.mark.parametrize("name", BUFFERS)
def test_parts_of_a_buffer_are_those_of_its_contents(name: str) -> None:
    data = np.arange(10_000, dtype="u4").tobytes()
    last = data[:-4] + b"\1" + data[-3:]
    contents, other = (contents_of(BUFFERS[name](each)) for each in (data, last))
    value = BUFFERS[name](data)
    assert contents == tuple(part_of(value, number) for number in range(len(contents)))
    assert contents[-1] != other[-1]
    assert contents[:-1] == other[:-1]
    num_bytes = len(data) // 2 if name == "every second" else len(data)
    assert len(contents) == 1 + math.ceil(num_bytes / 4096)


SLOW = """
import array, resource, sys, numpy, torch
from lab import rows_runner
def fn(x):
    return x * (2 + (kept is None))
with rows_runner(lambda x: x * 2) as runner, torch.no_grad():
    runner.capture()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
for made in sys.argv[1:]:
    print(made, file=sys.stderr)
    kept = eval(made)
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, hard))
    with rows_runner(fn) as runner, torch.no_grad():
        runner.capture()
        assert runner.check_externals().is_unchanged
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
"""
LARGE = (
    "numpy.broadcast_to(numpy.float32(1), (10**4, 10**4, 100))",
    "numpy.lib.stride_tricks.sliding_window_view(numpy.zeros(10**6), 5 * 10**5)",
    "list(range(10**6))",
    "array.array('d', bytes(64 << 20))",
    "memoryview(array.array('d', bytes(64 << 20)))[::2]",
    "[[number] for number in range(150_000)]",
)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process are Linux's")
def test_large_host_data_is_walked_in_little_memory() -> None:
    # Copied or gone through one by one, the arrays alone would take gigabytes and many minutes.
    assert resource.RLIMIT_AS
    (done,) = launcher().run(SLOW, *LARGE)
    assert done.status == 0, done.stderr


def test_list_of_a_subclass_is_put_back_after_captures() -> None:
    class Lying(list[int]):
        __len__ = __iter__ = raises

    kept, plain = Lying([1]), [1]

    def fn(x: torch.Tensor) -> torch.Tensor:
        list.append(kept, 1)
        plain.append(1)
        return x * 2

    with rows_runner(functools.partial(fn)) as runner, torch.no_grad():
        runner.capture()
    assert (list.__len__(kept), len(plain)) == (1, 1)
