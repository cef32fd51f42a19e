"""What programs hold outside the pool, and what happens when it moves or escapes."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from graphrt import BatchDescriptor, TensorStateGuard, break_point
from graphrt.errors import (
    EscapedAllocationError,
    InvalidProgramError,
    StateAdvancedError,
)
from graphrt.events import Invalidated
from graphrt.externals.held import Reads, modules_of
from lab import FULL, KEY, PIECEWISE, Lab


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(4, 4)
        self.unused = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.table = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.scale + self.table


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: setattr(m.used.weight, "data", m.used.weight.data.clone()), "used.weight"),
        (lambda m: setattr(m.used, "bias", torch.nn.Parameter(torch.ones(4))), "used.bias"),
        (lambda m: setattr(m, "scale", torch.ones(4)), "scale"),
        (lambda m: setattr(m, "table", torch.ones(4)), "table"),
        (lambda m: delattr(m, "table"), "table"),
    ],
)
def test_externals_rebound_storage_is_named_and_invalidates(
    lab: Lab, change: Any, name: str
) -> None:
    model, x = Layer(), torch.randn(2, 4)
    touching, other = lab.wrap(model, name="touching"), lab.wrap(torch.relu, name="other")
    for wrapper in (touching, other):
        lab.capture(wrapper, x)
        lab.step(wrapper, x)
    assert lab.library.check_externals().is_unchanged
    change(model)
    report = lab.library.check_externals()
    assert report.moved == (name,)
    assert report.invalidated == (("touching", FULL, KEY),)
    assert lab.events[-1] == Invalidated("touching", 1, (name,))
    with pytest.raises(InvalidProgramError, match=name):
        lab.step(touching, x)
    assert torch.equal(lab.step(other, x), torch.relu(x))
    assert lab.library.check_externals().invalidated == ()


def test_tensor_without_one_storage_has_moved_once_another_stands_there() -> None:
    model = Layer()
    model.table = torch.eye(4).to_sparse()
    [held] = [item for item in Reads(model, lambda tensor: False).tensors if item.name == "table"]
    assert (held.storage, held.has_moved()) == (None, False)
    model.table = torch.eye(4).to_sparse()
    assert held.has_moved()


def test_externals_reused_address_is_noticed(lab: Lab) -> None:
    model, x = Layer(), torch.randn(2, 4)
    lab.capture(lab.wrap(model), x)
    address = model.table.data_ptr()
    for _ in range(50):
        model.table = None
        gc.collect()
        model.table = torch.ones(4)
        assert model.table.data_ptr() != address
    assert lab.library.check_externals().moved == ("table",)


def test_externals_untouched_by_the_graph_may_move(lab: Lab) -> None:
    model, x = Layer(), torch.randn(2, 4)
    wrapper = lab.wrap(model)
    lab.capture(wrapper, x)
    model.unused.weight.data = torch.zeros(4, 4)
    assert lab.library.check_externals().is_unchanged
    with Lab(lab.device) as blind:
        wrapper = blind.wrap(model)
        blind.capture(wrapper, x, scope={"observe": "never"})
        model.unused.weight.data = torch.ones(4, 4)
        report = blind.library.check_externals()
        assert report.moved == ("unused.weight",)
        assert len(report.invalidated) == 1


def test_invalid_program_is_captured_again_in_a_scope(lab: Lab) -> None:
    model, x = Layer(), torch.randn(2, 4)
    wrapper = lab.wrap(model)
    old = lab.capture(wrapper, x)
    assert lab.library.invalidate() == 1
    assert lab.library.invalidate(wrapper.owner) == 0
    assert old.state == "invalid"
    new = lab.capture(wrapper, x)
    assert new is not old
    assert torch.equal(lab.step(wrapper, x), model(x))


def test_resource_is_prepared_before_each_run(lab: Lab) -> None:
    prepared: list[object] = []

    class Plan:
        def __init__(self) -> None:
            self.lengths = torch.zeros(2)

        def reserve(self, max_key: BatchDescriptor) -> None: ...

        def prepare(self, key: BatchDescriptor, step_info: object) -> None:
            prepared.append(step_info)
            self.lengths.fill_(len(prepared))

        def freeze(self) -> None: ...

    plan = Plan()
    addresses: set[int] = set()

    def model(x: Tensor) -> Tensor:
        addresses.add(plan.lengths.data_ptr())
        return x + plan.lengths

    wrapper, x = lab.wrap(model), torch.zeros(2)
    lab.capture_all(lab.job(wrapper, x), resources=[plan], warmups=2)
    assert prepared == [None] * 3
    for step in range(4, 8):
        plan.prepare(KEY, "live")
        assert lab.step(wrapper, x)[0].item() == step
    assert len(addresses) == 1


def test_escape_of_a_lazily_made_workspace_is_named(lab: Lab) -> None:
    class Lazy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._ws: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self._ws is None:
                self._ws = torch.zeros(4)
            return x + self._ws

    model = torch.nn.Sequential(Lazy())
    with pytest.raises(EscapedAllocationError, match=r"0\._ws") as caught:
        lab.capture(lab.wrap(model), torch.ones(4))
    assert "test_library_externals.py" in str(caught.value)
    assert lab.library.num_graphs == 0
    model[0]._ws = None
    lab.library.forget_failures()
    wrapper = lab.wrap(model, name="allowed")
    lab.capture(wrapper, torch.ones(4), scope={"allow_escape": ("*._ws",)})
    model[0]._ws = None
    warmed = lab.wrap(model, name="warmed")
    lab.capture_all(lab.job(warmed, torch.ones(4)), warmups=1)


def test_escape_check_ignores_a_reference_cycle(lab: Lab) -> None:
    def cyclic(x: Tensor) -> Tensor:
        holder: dict[str, Any] = {"y": x + 1}
        holder["me"] = holder
        return holder["y"] * 2

    wrapper, x = lab.wrap(cyclic), torch.ones(4)
    lab.capture(wrapper, x)
    assert torch.equal(lab.step(wrapper, x), cyclic(x))


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


def test_state_unguarded_is_named_with_or_without_warm_up(lab: Lab) -> None:
    model, x = torch.nn.Sequential(Counter()), torch.zeros(4)
    wrapper = lab.wrap(model)
    for warmups in (1, 0):
        with pytest.raises(StateAdvancedError, match=r"0\.count"):
            lab.capture_all(lab.job(wrapper, x), warmups=warmups)
        assert lab.library.num_graphs == 0
        lab.library.forget_failures()
    model[0].count.zero_()
    lab.capture_all(lab.job(wrapper, x), warmups=0, checks="none")
    assert torch.equal(model[0].count, torch.zeros(4))
    other = lab.wrap(model, name="sink")
    lab.capture_all(lab.job(other, x), warmups=1, may_overwrite=(model[0].count,))


def test_state_written_by_an_eager_segment_is_guarded_or_named(lab: Lab) -> None:
    cache = torch.zeros(4)

    @break_point
    def writes(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x + 1)
        return cache * 1

    wrapper, x = lab.wrap(lambda x: writes(x + 1, cache) + 1, PIECEWISE), torch.ones(4)
    with pytest.raises(StateAdvancedError):
        lab.capture_all(lab.job(wrapper, x), warmups=0)
    lab.library.forget_failures()
    cache.zero_()
    lab.capture_all(lab.job(wrapper, x), warmups=2, state=TensorStateGuard([cache]))
    assert not cache.any()
    lab.step(wrapper, x)
    assert torch.equal(cache, torch.full((4,), 3.0))


def test_libraries_over_one_device_do_not_interfere(lab: Lab) -> None:
    x = torch.ones(4)
    with Lab(lab.device) as other:
        ours, theirs = lab.wrap(lambda x: x + 1, name="m"), other.wrap(lambda x: x + 2, name="m")
        lab.capture(ours, x)
        other.capture(theirs, x)
        with lab.library.capture_scope() as one, other.library.capture_scope() as another:
            assert one.stream is not another.stream
        assert lab.library.graph_pool != other.library.graph_pool
        for _ in range(2):
            first, second = lab.step(ours, x), other.step(theirs, x)
            assert torch.equal(first, x + 1)
            assert torch.equal(second, x + 2)
        other.library.invalidate()
        assert torch.equal(lab.step(ours, x), x + 1)
    assert torch.equal(lab.step(ours, x), x + 1)


def test_capture_leaves_the_random_state_unchanged(lab: Lab) -> None:
    def draws(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    torch.manual_seed(3)
    state = torch.get_rng_state()
    lab.capture(lab.wrap(draws), torch.ones(16))
    assert torch.equal(torch.get_rng_state(), state)


def test_externals_see_a_model_changed_within_a_scope(lab: Lab) -> None:
    model, x = torch.nn.Sequential(Layer(), torch.nn.ReLU()), torch.randn(2, 4)
    first, second = lab.wrap(model, name="first"), lab.wrap(model, name="second")
    with lab.library.capture_scope() as scope:
        with scope.step(FULL, KEY):
            first(x)
        layer = model[0]
        layer.used.bias = torch.nn.Parameter(torch.ones(4))
        layer.table = torch.zeros(4)
        layer.late = torch.ones(3)
        model[1] = torch.nn.Linear(4, 4)
        model[1].register_forward_hook(lambda *_: None)
        with scope.step(FULL, KEY):
            second(x)
    new = second.concrete_cudagraph_entries[KEY]
    held = {item.name: item for item in new.externals}
    for name in ("0.used.bias", "0.table", "0.late", "1.weight"):
        place = model.get_submodule(name.rpartition(".")[0])
        assert held[name].tensor is getattr(place, name.rpartition(".")[2])
    assert (held["0.used.bias"].touched, held["0.late"].touched) == (True, False)
    report = lab.library.check_externals()
    assert set(report.moved) == {"0.used.bias", "0.table", "1"}
    assert [owner for owner, _, _ in report.invalidated] == ["first"]


def test_externals_are_merged_by_storage(lab: Lab) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer()
            self.embedding = self.head = torch.nn.Parameter(torch.ones(4))
            self.scale, self.view = torch.ones(4), self.inner.scale[1:]
            self.sparse = torch.ones(2, 2).to_sparse()

        def forward(self, x: Tensor, *, extra: Tensor) -> Tensor:
            self.scale.add_(0)
            return x + self.embedding + self.view.sum() + extra

    model, x, extra = Tied(), torch.ones(4), torch.zeros(4)
    scope = {"may_overwrite": [model.scale]}
    program = lab.capture(lab.wrap(model), x, extra=extra, scope=scope)
    facts = {item.name: (item.touched, item.written) for item in program.externals}
    assert facts == {
        "embedding": (True, False),
        "head": (True, False),
        "scale": (True, True),
        "view": (True, False),
        "sparse": (False, False),
        "inner.used.weight": (False, False),
        "inner.used.bias": (False, False),
        "inner.unused.weight": (False, False),
        "inner.unused.bias": (False, False),
        "inner.scale": (True, False),
        "inner.table": (False, False),
        "x": (True, False),
        "extra": (True, False),
    }


def test_externals_of_eager_segments_are_named_by_the_first(lab: Lab) -> None:
    shared, own, static = torch.ones(4), torch.ones(4), torch.ones(4)
    sparse = torch.ones(2, 2).to_sparse()
    # Where nothing finds them by a name.
    hidden = itertools.cycle((shared, sparse, own))
    del shared, sparse, own

    @break_point(name="first")
    def first(x: Tensor, inner: dict[str, Any]) -> Tensor:
        return x + inner["shared"]

    @break_point(name="second", out="out")
    def second(x: Tensor, inner: dict[str, Any], *, own: Tensor, out: Tensor | None = None) -> Any:
        return torch.add(x, own, out=out)

    def model(x: Tensor) -> Tensor:
        inner = {"shared": next(hidden), "sparse": next(hidden), "n": 3}
        y = first(x * 2, inner)
        return second(y + x, inner, own=next(hidden)) + 0

    program = lab.capture(lab.wrap(model, PIECEWISE), static)
    shared, sparse, own = (next(hidden) for _ in range(3))
    found: dict[str, set[int]] = {}
    for item in program.externals:
        place = item.name.partition(": ")[2].partition(" ")[0]
        found.setdefault(place, set()).add(id(item.tensor))
    assert found == {"": {id(static)}, "first": {id(shared), id(sparse)}, "second": {id(own)}}
    assert len(program.externals) == 4


def test_modules_are_named_as_in_named_modules() -> None:
    class Nest(torch.nn.Module):
        def __init__(self, depth: int, shared: torch.nn.Module) -> None:
            super().__init__()
            self.absent = None
            self.register_module("none", None)
            self.one = Nest(depth - 1, shared) if depth else shared
            self.two = shared
            self.three = torch.nn.ModuleList([shared, torch.nn.Identity()])

    model = Nest(3, torch.nn.Linear(1, 1))
    assert modules_of(model) == dict(model.named_modules())
    assert list(modules_of(model)) == [path for path, _ in model.named_modules()]
    model.three.append(model)  # a cycle
    assert list(modules_of(lambda: model)) == [
        f"model.{path}" if path else "model" for path, _ in model.named_modules()
    ]
