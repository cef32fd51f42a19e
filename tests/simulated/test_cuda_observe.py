"""What the observer of CUDA recordings learns, shown with CPU tensors: it sees operations only."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bug_classes import Packed
from graphrt.device.cuda import Observer, UseTracker, private, storage_address
from graphrt.device.torch_modes import enter, leave


def observed(fn: Any, pooled: Any = lambda address: False, operators: Any = None) -> UseTracker:
    tracker = UseTracker("cpu", pooled, {} if operators is None else operators)
    observer = Observer(tracker)
    enter(observer)
    try:
        fn()
    finally:
        leave(observer)
    return tracker


def test_inputs_are_external_and_results_are_not() -> None:
    x, w = torch.ones(3, 3), torch.ones(3, 3)
    tracker = observed(lambda: torch.relu(x @ w) + x)
    assert [(use.tensor is x or use.tensor is w, use.written) for use in tracker.externals()] == [
        (True, False),
        (True, False),
    ]
    assert not tracker.uses_rng


def test_observation_inside_a_compiled_function_is_not_compiled() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend, dynamic=True)
    x, results = torch.ones(4), []
    double(x)
    tracker = observed(lambda: results.append(double(x)))
    assert results[0].tolist() == [2.0] * 4
    assert [use.tensor is x for use in tracker.externals()] == [True]
    assert len(compiled) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_written_arguments_are_known_through_views(mode: Any) -> None:
    cache, total, rows, x = torch.zeros(4, 2), torch.zeros(2), torch.zeros(2), torch.ones(2)

    def body() -> None:
        with mode():
            cache[1].add_(x)
            torch.add(x, 1, out=total)
            torch._foreach_mul_([rows], 2.0)

    uses = {
        use.tensor.untyped_storage().data_ptr(): use.written for use in observed(body).externals()
    }
    assert uses == {
        cache.data_ptr(): True,
        x.data_ptr(): False,
        total.data_ptr(): True,
        rows.data_ptr(): True,
    }


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [False, True])
def test_statistics_are_written_in_training_alone(mode: Any, training: bool) -> None:
    x, mean, var = torch.ones(2, 3), torch.zeros(3), torch.ones(3)

    def body() -> None:
        with mode():
            torch.nn.functional.batch_norm(x, mean, var, training=training)

    externals = observed(body).externals()
    assert all(use.tensor is each for use, each in zip(externals, (x, mean, var), strict=True))
    assert [use.written for use in externals] == [False, training, training]


@pytest.mark.parametrize(
    ("name", "is_nested"),
    [("allreduce_", False), ("allgather_", True), ("broadcast_", False), ("send", False)],
)
def test_collectives_in_place_write_their_outputs(name: str, is_nested: bool) -> None:
    """Their schemas do not say it."""
    import torch.distributed  # It registers the operators.

    output, given = torch.ones(2), torch.ones(2)
    tracker = UseTracker("cpu", lambda address: False)
    outputs = [[output]] if is_nested else [output]
    tracker.inputs(getattr(torch.ops.c10d, name).default, (outputs, [given]), None)
    written = {id(use.tensor): use.written for use in tracker.externals()}
    assert written[id(output)] == (name != "send")
    assert not written.get(id(given))


def test_tensors_of_the_pool_are_not_external() -> None:
    x, pooled = torch.ones(2), torch.ones(2)
    tracker = observed(lambda: x + pooled, lambda address: address == pooled.data_ptr())
    assert [use.tensor is x for use in tracker.externals()] == [True]


def test_tensor_of_the_pool_is_not_kept_alive() -> None:
    """Held, its block could not be reused within the graph."""
    pooled = torch.ones(2)
    tracker = UseTracker("cpu", lambda address: True)
    tracker.inputs(torch.ops.aten.relu.default, (pooled,), None)
    seen = weakref.ref(pooled)
    del pooled
    assert seen() is None


def test_parts_of_a_packed_tensor_are_external() -> None:
    x, codes, scale = torch.ones(2, 4), torch.ones(4, 4, dtype=torch.int8), torch.ones(4)
    packed = Packed(codes, scale)
    tracker = observed(lambda: x @ packed)
    assert {id(use.tensor) for use in tracker.externals()} == {id(x), id(codes), id(scale)}


def test_each_recording_with_random_numbers_knows_it() -> None:
    x, operators = torch.ones(8), {}
    drawing, calm = (lambda: torch.bernoulli(x)), (lambda: x + 1)
    trackers = [observed(fn, operators=operators) for fn in (drawing, calm, drawing)]
    assert [tracker.uses_rng for tracker in trackers] == [True, False, True]


def kinds_of(argument: Any) -> str:
    return f"{argument.type} {argument.real_type}"


def test_every_argument_that_may_hold_tensors_is_seen() -> None:
    """Of every operator of torch's own: by position and by name, writes included."""
    num_seen = 0
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            operator = getattr(packet, overload)
            tracker = UseTracker("cpu", lambda address: False)
            tracker.inputs(operator, (), None)
            (info,) = tracker._operators.values()
            for position, argument in enumerate(operator._schema.arguments):
                written = argument.alias_info is not None and argument.alias_info.is_write
                may_hold = any(word in kinds_of(argument) for word in ("Tensor", "Dict", "Any"))
                if may_hold:
                    assert (position, written) in info.positions, (operator, argument.name)
                    assert info.is_written[argument.name] == written
                    num_seen += 1
    assert num_seen > 3000


class Plain(TorchDispatchMode):
    """What a tracker should know, computed for each operation from storages alone."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()
        self.uses: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        given |= kwargs or {}
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(given.get(argument.name)):
                address = isinstance(tensor, torch.Tensor) and storage_address(tensor)
                if address and address not in self.made:
                    first, was_written = self.uses.get(address, (tensor, False))
                    self.uses[address] = (first, was_written or written)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            address = isinstance(tensor, torch.Tensor) and storage_address(tensor)
            if address and address not in self.uses:
                self.made.add(address)
        return result


class Sub(torch.Tensor):
    """A tensor whose type is not torch's own, and whose storage is."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def draw_operations(draw: random.Random, tensors: list[torch.Tensor]) -> Callable[[], object]:
    """Some operations on ``tensors`` and on what came out, the same each time it is called."""
    seed = draw.random()

    def run() -> object:
        pick = random.Random(seed)
        pool = list(tensors)
        moves: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
            lambda a, b: a + b,
            lambda a, b: a[1:].add_(b[:1].sum()),
            lambda a, b: torch.add(a, b, out=b),
            lambda a, b: a.select(0, 1).mul_(2),
            lambda a, b: torch._foreach_add_([a, b[1:]], 1.0),
            lambda a, b: a.t().copy_(b.clone()),
            lambda a, b: a.detach()[:0] + b[:0],
            lambda a, b: torch.nn.functional.linear(a, b, b[0]),
            lambda a, b: torch.where(a > 0, b, a),
            lambda a, b: a[torch.arange(2), None],
            lambda a, b: torch.cat([a, b])[2:],
            lambda a, b: a.to_sparse() @ b,
            lambda a, b: torch.max(a, 0),
            lambda a, b: a.resize_as_(b).zero_(),
        ]
        for _ in range(12):
            found = pick.choice(moves)(pick.choice(pool), pick.choice(pool))
            pool += [
                leaf
                for leaf in tree_leaves(found)
                if isinstance(leaf, torch.Tensor)
                and leaf.shape == (2, 2)
                and leaf.dtype == torch.float32
                and leaf.layout is torch.strided
            ]
        return pool

    return run


@pytest.mark.parametrize("seed", range(60))
def test_noted_pointers_change_nothing_that_is_learned(seed: int) -> None:
    draw = random.Random(seed)
    base = torch.rand(4, 2)
    tensors = [
        torch.rand(2, 2),
        torch.nn.Parameter(torch.rand(2, 2), requires_grad=False),
        torch.rand(2, 2).as_subclass(Sub),
        base[:2],
        base[2:],  # two tensors of one storage, of which one alone may be written
    ]
    run = draw_operations(draw, tensors)
    plain = Plain()
    with torch.no_grad(), plain:
        kept = run()
    tracker = observed(run)
    assert kept
    found = [(use.tensor.data_ptr(), use.tensor.shape, use.written) for use in tracker.externals()]
    assert found == [(t.data_ptr(), t.shape, written) for t, written in plain.uses.values()]
    assert found


def test_operator_without_a_schema_is_searched_everywhere() -> None:
    tensors = [torch.ones(1) for _ in range(4)]
    tracker = UseTracker("cpu", lambda address: False)
    tracker.inputs(
        object(), (1, tensors[0], [(tensors[1],)], None), {"rest": {"a": tensors[2:]}, "b": "c"}
    )
    assert [use.tensor for use in tracker.externals()] == tensors


def test_operator_with_a_call_of_its_own_is_not_bypassed() -> None:
    class Counting(type(torch.ops.aten.add.Tensor)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.num_calls, self._op = 0, None

        def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1

    x, counting, higher = torch.ones(2), Counting(), torch.ops.higher_order.cond
    assert private.bare_operator(torch.ops.aten.add.Tensor)(x, x, alpha=2).tolist() == [3.0, 3.0]
    assert private.bare_operator(counting) is counting
    assert private.bare_operator(higher) is higher


def test_tensor_without_storage_is_skipped() -> None:
    sparse, dense = torch.ones(2, 2).to_sparse(), torch.ones(2, 2)
    tracker = observed(lambda: (sparse @ dense, torch.empty(0) + torch.ones(0)))
    assert dense.data_ptr() in {use.tensor.data_ptr() for use in tracker.externals()}


def test_first_failure_is_kept_with_its_operation() -> None:
    x = torch.ones(2, 3)

    def body() -> None:
        for _ in range(2):
            try:
                x @ x
            except RuntimeError:
                continue

    tracker = observed(body)
    error, operation = tracker.take_failure()
    assert isinstance(error, RuntimeError)
    assert operation == "aten.mm.default"
    assert tracker.take_failure()[0] is None
