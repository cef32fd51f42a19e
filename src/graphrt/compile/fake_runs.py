"""Runs of a model and of its traced graph with fake tensors, compared operation by operation.

Sizes that vary are symbols there. Code that branches on one fails or leaves a guard, so that runs
which call the same operations do so at every size. Nothing is computed, and no memory is written.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphrt.compile import ranges, torch_api
from graphrt.compile.guards import HOST, Axes, Given
from graphrt.compile.kept_graphs import NotKeptError, fake_tensor
from graphrt.compile.ranges import FreshSymbols
from graphrt.compile.splitter import digest_of
from graphrt.errors import SideEffectError
from graphrt.externals.host_snapshot import HostSnapshot
from graphrt.gc_pause import all_objects

PLAIN = (*HOST, torch.layout, torch.memory_format)
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_CHECKS = ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
"""Of sizes: Dynamo writes them into graphs."""
_LEFT_OUT = frozenset(f"aten::{name}" for name in (*_EMPTY, *_CHECKS))
_LARGEST_CONSTANT = 1 << 26
"""Bytes: to read larger ones takes longer than a trace."""
_OF_TORCH = ("aten", "prims")
_OF_CONTENTS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_CACHE = type(lru_cache(len))
_CODE = (type, ModuleType, FunctionType)
_DEPTH_OF_CACHES = 4
"""An entry is in a dict or a list in one, and a result may be a tuple."""

Call = Callable[..., Any]


class TracedCall(NamedTuple):
    """A call of a model, and what was traced of such a call."""

    graph: fx.GraphModule
    fresh: FreshSymbols
    """The symbols of the graph."""
    function_of: Callable[[Call], Call]
    """Makes, of what runs the graph, what takes the arguments and returns what the model does."""
    given: Given

    @property
    def examples(self) -> Sequence[Any]:
        """The values that the graph was traced with."""
        inputs = self.graph.graph.find_nodes(op="placeholder")
        return [node.meta["example_value"] for node in inputs]

    @property
    def inputs(self) -> Sequence[Any]:
        """What this call gives to the graph. Errors: ``NotKeptError`` if it gives nothing."""
        found: list[Any] = []

        def stop(*inputs: Any) -> Any:
            found.extend(inputs)
            raise _StoppedError

        try:
            self.function_of(stop)(*self.given.args, **self.given.kwargs)
        except _StoppedError:
            return found
        raise NotKeptError("its graph is not called")


class _StoppedError(Exception):
    """Ends a call once the inputs of its graph are known."""


class Calls(NamedTuple):
    """What a run did, in words that are the same in every process."""

    told: Sequence[Any]
    """The operations, each with its arguments and results, and last what the run returned."""
    assumed: Sequence[str]
    """What it takes for granted of the sizes."""
    results: Mapping[Any, Any]
    """Of operations of torch, by their arguments."""


def calls_of(traced: TracedCall) -> Calls:
    """What the graph calls. Errors: ``NotKeptError``, and whatever else is wrong with it."""
    run, args, kwargs = _started(traced, {})
    examples = traced.examples
    run.note(traced.function_of(lambda *_: traced.graph(*examples)), args, kwargs)
    calls = run.calls()
    _, results, *_ = calls.told[-1]
    if others := [one[0] for one in results if one[1:] == (None,) and one[0] is not type(None)]:
        raise NotKeptError(f"a result of {others[0]}, whose contents nothing compares")
    return calls


def difference(before: Calls, traced: TracedCall, root: Call) -> str:
    """What ``root`` does otherwise than the graph in ``before``; "" if nothing is. What it changes
    on the host is put back, and functions with a cache (``lru_cache``) forget the run.

    Errors: ``SideEffectError`` if something still has a fake tensor of the run.
    """
    run: _Run | None = None
    try:
        host = HostSnapshot(root)
        run, args, kwargs = _started(traced, before.results)
        try:
            run.note(root, args, kwargs)
        finally:
            args = kwargs = None
            changed = host.undo()
        if changed:
            return f"it changes {changed[0]}"
        calls = run.calls()
        # A check that the graph does not make, or a branch that not every size takes.
        if more := [text for text in calls.assumed if text not in before.assumed]:
            return f"it takes for granted that {more[0]}"
        ranges.refuse_shape_guards(traced.fresh.mode, traced.fresh.made, None)
    except Exception as error:  # noqa: BLE001 - whatever it is, the model is traced again
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    finally:
        if run is not None:
            run.refuse_left_overs()
    for one, another in zip(calls.told, before.told, strict=False):
        if one != another:
            return f"it calls {_shown(one)}, before {_shown(another)}"
    return "" if len(calls.told) == len(before.told) else "the number of calls"


def _started(traced: TracedCall, results: Mapping[Any, Any]) -> tuple[_Run, Any, Any]:
    """A run that has met the inputs of the graph, and the arguments with fake tensors in them.
    Errors: ``NotKeptError`` for inputs that the graph was not traced with."""
    examples, inputs = traced.examples, traced.inputs
    if misfit := _misfit(examples, inputs, traced.given.axes):
        raise NotKeptError(misfit)
    run = _Run(traced.fresh, results, examples, inputs)
    return run, *_fakes(traced, run)


def _misfit(examples: Sequence[Any], inputs: Sequence[Any], axes: Axes) -> str:
    """What is otherwise in the inputs than in the values that the graph was traced with."""
    numbers: list[tuple[Any, Any]] = []
    memories: set[tuple[int, int]] = set()
    for at, (example, value) in enumerate(zip(examples, inputs, strict=True)):
        if not isinstance(example, torch.Tensor):
            numbers.append((_plain(example), value))
            continue
        dims = {dim for dim, size in enumerate(example.shape) if type(size) is not int}
        before = example.dtype, _device_of(example), dims
        now = value.dtype, value.device, {*axes.get(id(value), ())}
        if now != before:
            return f"input {at} of the graph: {now}, before {before}"
        numbers += zip(map(_plain, _numbers(example)), _numbers(value), strict=True)
        memories.add((_memory_of(example), _memory_of(value)))
    sizes = {one: value for one, value in numbers if getattr(one, "is_Symbol", False)}
    for one, value in numbers:
        if (one.xreplace(sizes) if hasattr(one, "xreplace") else one) != value:
            return f"a size, stride or offset of an input of the graph: {value}, before {one}"
    if any(len({pair[side] for pair in memories}) < len(memories) for side in (0, 1)):
        return "which inputs of the graph share memory"
    return ""


def _fakes(traced: TracedCall, run: _Run) -> tuple[Any, Any]:
    """The arguments, with fake tensors for those that are inputs of the graph, or vary."""
    args, kwargs, axes = traced.given

    def fake(leaf: Any) -> Any:
        varying = axes.get(id(leaf), {})
        known = run.fakes.get(id(leaf))
        if known is not None:
            return run.as_argument(known)
        if not varying:
            return leaf
        if not leaf.is_contiguous():
            raise NotKeptError("an argument with strides that the graph does not take")
        fresh, shape = traced.fresh, [*leaf.shape]
        for dim, axis in varying.items():
            shape[dim] = fresh.size_of(axis)
        with fresh.mode:
            return run.as_argument(torch.empty(shape, dtype=leaf.dtype, device=leaf.device))

    args, kwargs = pytree.tree_map(fake, (args, kwargs))
    return args, kwargs


class _Layout:
    """Of tensors in a run. Equal ones are one object, so that to find what an operation returns
    takes no time."""

    __slots__ = ("device", "dtype", "sizes", "words")

    def __init__(self, words: Any, size: Callable[[Any], Any]) -> None:
        numbers, self.dtype, self.device, *_ = self.words = words
        shape_and_stride = [*map(size, numbers[:-1])]
        half = len(shape_and_stride) // 2
        self.sizes = shape_and_stride[:half], shape_and_stride[half:], size(numbers[-1])


class _Tensor(NamedTuple):
    """In a run."""

    memory: int
    layout: _Layout


class _Result(NamedTuple):
    """What an operation returns when it is called with what is alike."""

    argument: int | None
    """The one that it is."""
    memory: int | None
    """The argument whose memory it has; None: its own."""
    layout: _Layout


class _Words:
    """What is said of values. Symbols have the names of their axes, and those of no axis are
    numbered as they are met."""

    def __init__(self, fresh: FreshSymbols) -> None:
        self._names: dict[Any, Any] = dict(fresh.names)
        self._num_of_axes = len(self._names)

    @property
    def has_new(self) -> bool:
        """Whether there were symbols of no axis."""
        return len(self._names) > self._num_of_axes

    def of(self, leaf: Any) -> Any:
        """Of a tensor sizes, strides, offset, dtype, device, and whether it is conjugated, or
        negated, when it is read; of an object that is not plain, its type."""
        if isinstance(leaf, torch.Tensor):
            numbers = (n if type(n) is int else self.of_size(n.node.expr) for n in _numbers(leaf))
            return (*numbers,), leaf.dtype, _device_of(leaf), leaf.is_conj(), leaf.is_neg()
        if isinstance(leaf, torch.SymInt | torch.SymBool | torch.SymFloat):
            return type(leaf), self.of_size(leaf.node.expr)
        if isinstance(leaf, float | complex):  # Zeros of both signs are equal, nan is not.
            return type(leaf), repr(leaf)
        return type(leaf), leaf if isinstance(leaf, PLAIN) else None

    def of_size(self, expression: Any) -> Any:
        for symbol in sorted(expression.free_symbols - self._names.keys(), key=str):
            name = f"new{len(self._names)}"
            self._names[symbol] = sympy.Symbol(name, integer=True)
        return expression.xreplace(self._names)


class _Run(TorchDispatchMode):
    """The operations of a run, but for those that only make views of tensors, or tensors without
    contents. Memories are numbered as they are met, first those of ``inputs`` of the graph, for
    which ``examples`` stand. ``results``: of an earlier run."""

    def __init__(
        self,
        fresh: FreshSymbols,
        results: Mapping[Any, Any],
        examples: Sequence[Any],
        inputs: Sequence[Any],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes: dict[int, torch.Tensor] = {}
        """By id of the tensors that they stand for."""
        self._mode, self._fresh = fresh.mode, fresh
        self._words = _Words(fresh)
        self._settings = torch_api.settings()
        self._told: list[Any] = []
        self._tensors: dict[int, _Tensor] = {}
        """By id, of fake ones."""
        self._layouts: dict[Any, _Layout] = {}
        self._results: dict[Any, tuple[Any, Sequence[_Result]]] = {}
        """Of operations of torch: most of a model is layers that are alike, and to ask torch what
        one operation returns takes a third of a millisecond, the first time several."""
        self._results_before = results
        self._memories: dict[int, int] = {}
        """Their numbers."""
        self._bases: dict[int, torch.Tensor] = {}
        """By real memory of inputs of the graph, a fake tensor of the memory that stands for it."""
        self._met: list[Any] = []
        """Tensors and memories, so that no other gets the address of one that is gone."""
        self._made: list[tuple[Any, ref[torch.Tensor]]] = []
        for example, value in zip(examples, inputs, strict=True):
            if isinstance(example, torch.Tensor):
                # Compositions of torch are others where a weight may get gradients.
                example.requires_grad_(value.requires_grad)
                self._stands_for(example, value)
                self._bases[_memory_of(value)] = example

    def as_argument(self, fake: Any) -> torch.Tensor:
        """The same tensor, for the model, which must not keep it."""
        argument = self._like(fake, fake.untyped_storage())
        self._made.append(("the call, as an argument", ref(argument)))
        return argument

    def note(self, call: Call, args: Any, kwargs: Any) -> None:
        """Run ``call``; note its operations, and what it returns."""
        random = torch.get_rng_state()
        with torch_api.as_if_traced():
            with self._mode, self, enable_python_dispatcher():
                results = call(*args, **kwargs)
            self._require_settings()
        # Fake tensors draw none, and who seeds a GPU's generator seeds this one too.
        if not torch.equal(random, torch.get_rng_state()):
            torch.set_rng_state(random)
            raise NotKeptError("a seed that it sets")
        leaves, structure = pytree.tree_flatten(results)
        self._told.append(("results", [*map(self._of, leaves)], [], str(structure)))

    def _require_settings(self) -> None:
        """Errors: ``NotKeptError`` where one is not as it was before the run: neither what
        operations return nor graphs say so."""
        if torch_api.settings() != self._settings:
            raise NotKeptError("a setting of torch that it changes")

    def calls(self) -> Calls:
        """What was noted."""
        told = [
            (name, [*map(_words_of, given)], [*map(_words_of, results)], form)
            for name, given, results, form in self._told
        ]
        env: Any = self._mode.shape_env
        names = self._fresh.names
        asserts = [one.expr for some in env.deferred_runtime_asserts.values() for one in some]
        assumed = [
            *(f"{name} is in {env.var_to_range[symbol]}" for symbol, name in names.items()),
            *(str(one.xreplace(names)) for one in asserts),
        ]
        results = {
            tuple(map(_words_of, key)): (
                kind,
                [one._replace(layout=one.layout.words) for one in alike],
            )
            for key, (kind, alike) in self._results.items()
        }
        return Calls(told, assumed, results)

    def refuse_left_overs(self) -> None:
        """Errors: ``SideEffectError`` if something still has a tensor that the run made."""
        self._met.clear()
        self._tensors.clear()
        for forget in (gc.collect, self._forget_in_caches):
            if any(tensor() is not None for _, tensor in self._made):
                forget()
        for operation, tensor in self._made:
            if tensor() is not None:
                raise SideEffectError(
                    "a kept trace",
                    expected="a model that keeps no tensor of the run that is compared with it",
                    found=f"a fake result of {operation} that is still there after it",
                    do="set compile_cache to False for this model",
                )

    def _forget_in_caches(self) -> None:
        """Empty the functions' caches that hold tensors of the run, wherever these functions are:
        other decorators hide some."""
        left = {id(tensor()) for _, tensor in self._made} - {id(None)}
        for cache in [one for one in all_objects() if type(one) is _CACHE]:
            found: list[Any] = [cache]
            for _ in range(_DEPTH_OF_CACHES):
                found = [one for one in gc.get_referents(*found) if type(one) not in _CODE]
                if not left.isdisjoint(map(id, found)):
                    cache.cache_clear()
                    break

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        self._require_settings()
        if name == "prim::device":  # A question.
            return func(*args, **kwargs)
        if name.startswith("profiler::"):  # Dynamo leaves them out.
            with _disable_current_modes():
                return func(*args, **kwargs)
        leaves: list[Any] = []
        form = _flat(args, leaves), _flat(kwargs, leaves)
        told = [self._of(leaf) for leaf in leaves]
        places: dict[int, int] = {}
        key: Any = [func.name(), form]
        for at, one in enumerate(told):
            if isinstance(one, _Tensor):
                key.append(_Tensor(places.setdefault(one.memory, at), one.layout))
            else:
                key.append(one)
        key = (*key,)
        known = self._results.get(key) or self._known_before(key)
        if known is not None:
            kind, alike = known
            made = [self._again(func, one, leaves) for one in alike]
            results = made[0] if kind is FakeTensor else kind(made)
        else:
            leaves = [*map(self._faked, leaves)]
            results = self._called(func, args, kwargs)
            made = pytree.tree_leaves(results)
            new = [one for one in made if _memory_of(one) and _at(one, leaves) is None]
            self._made += [(func, ref(one)) for one in new]
            if self._is_repeatable(func, results, leaves, told):
                alike = [self._result(one, leaves) for one in made]
                self._results[key] = type(results), alike
        of_results = [self._of(leaf) for leaf in made]
        are_old = (isinstance(one, _Tensor) and one.memory in places for one in of_results)
        is_view = bool(made) and all(are_old)
        only_views = is_view and not func._schema.is_mutable and func.namespace in _OF_TORCH
        if name not in _LEFT_OUT and not only_views:
            self._told.append((str(func), told, of_results, form))
        return results

    def _known_before(self, key: Any) -> Any:
        before = self._results_before.get(tuple(map(_words_of, key)))
        if before is not None:
            kind, results = before
            alike = [one._replace(layout=self._layout(one.layout)) for one in results]
            self._results[key] = before = kind, alike
        return before

    def _layout(self, words: Any) -> _Layout:
        if words not in self._layouts:
            self._layouts[words] = _Layout(words, self._size)
        return self._layouts[words]

    def _size(self, number: Any) -> Any:
        return number if type(number) is int else self._fresh.of_names(number)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        # What makes fake tensors of constants has to see these.
        if func not in self._mode.lift_fns:
            args, kwargs = pytree.tree_map(self._faked, (args, kwargs))
        return func(*args, **kwargs)

    def _is_repeatable(self, func: Any, results: Any, leaves: Sequence[Any], told: Any) -> bool:
        """Whether a call with what is alike is known to return, and do, what is alike."""
        if func._schema.is_mutable:
            self._tensors.clear()  # Sizes may be others now.
            if [*map(self._of, leaves)] != told:
                return False
        made = [results] if type(results) is FakeTensor else results
        return (
            func.namespace in _OF_TORCH
            and not _OF_CONTENTS & {*func.tags}
            and not self._words.has_new
            and type(made) in (tuple, list)
            and all(type(one) is FakeTensor and _memory_of(one) for one in made)
            and not any(one.is_conj() or one.is_neg() for one in made)
        )

    def _result(self, made: torch.Tensor, leaves: Sequence[Any]) -> _Result:
        memory = _memory_of(made)
        owner = next((at for at, one in enumerate(leaves) if _memory_of(one) == memory), None)
        return _Result(_at(made, leaves), owner, self._of(made).layout)

    def _again(self, func: Any, known: _Result, leaves: Sequence[Any]) -> Any:
        if known.argument is not None:
            return self._faked(leaves[known.argument])
        memory, layout = None, known.layout
        if known.memory is not None:
            memory = self._faked(leaves[known.memory]).untyped_storage()
        made = fake_tensor(self._mode, memory, layout.dtype, layout.device, layout.sizes)
        self._made.append((func, ref(made)))
        self._meet(made, layout)
        return made

    def _faked(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if id(leaf) not in self.fakes:
            base = self._bases.get(_memory_of(leaf))
            if base is not None:
                fake = self._like(leaf, base.untyped_storage())
            else:
                # Neither given nor made: a constant, as torch.tensor(2.0) makes.
                self._told.append(("a constant", [_contents(leaf)], [], None))
                fake = self._mode.from_tensor(leaf, static_shapes=True)
            self._stands_for(fake, leaf)
        return self.fakes[id(leaf)]

    def _like(self, tensor: torch.Tensor, memory: torch.UntypedStorage) -> torch.Tensor:
        layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        fake = fake_tensor(self._mode, memory, tensor.dtype, _device_of(tensor), layout)
        return fake.requires_grad_(tensor.requires_grad)

    def _stands_for(self, fake: torch.Tensor, tensor: torch.Tensor) -> None:
        self.fakes[id(tensor)] = fake
        self._met += fake, tensor
        self._of(fake)

    def _of(self, leaf: Any) -> Any:
        """What is known of it in this run: of a tensor, a ``_Tensor``."""
        known = self._tensors.get(id(leaf))
        # Its memory is another one after ``tensor.data = other``, which is no operation.
        if known is not None and self._memories.get(_memory_of(leaf)) == known.memory:
            return known
        if not isinstance(leaf, torch.Tensor):
            return self._words.of(leaf)
        fake = self._faked(leaf)
        if not _memory_of(fake):
            return (type(fake),)
        if fake is leaf:
            return self._meet(leaf, self._layout(self._words.of(leaf)))
        return self._of(fake)

    def _meet(self, tensor: torch.Tensor, layout: _Layout) -> _Tensor:
        storage = tensor.untyped_storage()
        number = self._memories.setdefault(storage._cdata, len(self._memories))
        self._met += tensor, storage
        met = self._tensors[id(tensor)] = _Tensor(number, layout)
        return met


def _words_of(value: Any) -> Any:
    return (value.memory, *value.layout.words) if isinstance(value, _Tensor) else value


def _shown(call: tuple[Any, ...]) -> str:
    return " ".join(map(str, call[:3]))


def _flat(value: Any, leaves: list[Any]) -> Any:
    """Adds the leaves; returns the form without them."""
    if isinstance(value, tuple | list):
        return (*(_flat(one, leaves) for one in value),)
    if isinstance(value, dict):
        return (*((name, _flat(one, leaves)) for name, one in value.items()),)
    leaves.append(value)
    return None


def _at(value: Any, leaves: Sequence[Any]) -> int | None:
    return next((at for at, one in enumerate(leaves) if one is value), None)


def _numbers(tensor: torch.Tensor) -> tuple[Any, ...]:
    return *tensor.shape, *tensor.stride(), tensor.storage_offset()


def _device_of(tensor: Any) -> torch.device:
    # To ask a fake tensor for ``device`` calls an operation.
    device: torch.device = getattr(tensor, "fake_device", None) or tensor.device
    return device


def _memory_of(value: Any) -> int:
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if is_strided else 0


def _plain(number: Any) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt | torch.SymBool) else number


def _contents(tensor: torch.Tensor) -> str:
    storage = tensor.untyped_storage()
    if storage.nbytes() > _LARGEST_CONSTANT:
        raise NotKeptError(f"a constant of {storage.nbytes()} bytes")
    with _disable_current_modes(), torch.no_grad():
        return digest_of(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
