"""The first replay against eager: what it finds, what state it leaves, what it reports."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrt import TensorStateGuard
from graphrt.batch import BatchDescriptor, RuntimeMode
from graphrt.errors import VerificationError
from graphrt.events import Event, Verified
from graphrt.externals import HostSnapshot
from graphrt.verify import (
    RunState,
    Verification,
    check_replay,
    forward_hooks,
    require_other_example,
)

KEY = BatchDescriptor(4)


def check(
    run_eager: Callable[[], Any], run_replay: Callable[[], Any], **facts: Any
) -> Verification:
    return check_replay(
        mode=RuntimeMode.FULL, key=KEY, run_eager=run_eager, run_replay=run_replay, **facts
    )


def test_host_memory_is_read_and_written_when_the_device_is_done() -> None:
    written = torch.zeros(2)
    queued = [1.0, 2.0]

    def wait() -> None:
        written.fill_(queued.pop(0))

    state = RunState(tensors={"host": written}, wait=wait)
    saved = state.save()
    assert torch.equal(saved.compared["host"], torch.ones(2))
    state.restore(saved)
    assert torch.equal(written, torch.ones(2))
    assert not queued


def test_replay_check_when_equal_returns_outputs() -> None:
    events: list[Event] = []
    out = torch.ones(3)
    verified = check(lambda: torch.ones(3), lambda: out, observer=events.append)
    assert verified.outputs is out
    assert verified.comparison.is_equal
    assert verified.state is None
    assert events == [Verified(RuntimeMode.FULL, KEY, True, 0.0)]


def test_replay_check_of_a_difference_names_key_and_place() -> None:
    events: list[Event] = []
    with pytest.raises(VerificationError) as raised:
        check(
            lambda: {"logits": torch.zeros(3)},
            lambda: {"logits": torch.tensor([0.0, 2.0, 0.0])},
            observer=events.append,
        )
    assert "FULL" in raised.value.subject
    assert str(KEY) in raised.value.subject
    assert "['logits']" in raised.value.found
    assert "[1]" in raised.value.found
    assert "frozen" in raised.value.do
    assert events == [Verified(RuntimeMode.FULL, KEY, False, 2.0)]


def test_replay_check_of_other_shapes_reports_nan() -> None:
    events: list[Event] = []
    with pytest.raises(VerificationError):
        check(lambda: torch.zeros(2), lambda: torch.zeros(3), observer=events.append)
    (event,) = events
    assert isinstance(event, Verified)
    assert math.isnan(event.max_abs_difference)


def test_replay_check_advances_state_once() -> None:
    counter = torch.tensor(5)

    def step() -> torch.Tensor:
        return counter.add_(1) * 10

    verified = check(step, step, state=TensorStateGuard([counter]))
    assert verified.outputs == 60
    assert counter == 6
    assert verified.state is not None
    assert verified.state.is_equal


def test_replay_check_of_another_state_raises() -> None:
    cache = torch.zeros(4)

    def eager() -> torch.Tensor:
        cache[1] = 7
        return torch.ones(1)

    def replay() -> torch.Tensor:
        cache[2] = 7
        return torch.ones(1)

    with pytest.raises(VerificationError) as raised:
        check(eager, replay, state=TensorStateGuard({"cache": cache}))
    assert "state" in raised.value.found
    assert "outputs" not in raised.value.found
    assert cache.eq(0).all()  # as before the call


def test_replay_check_copies_what_the_replay_overwrites() -> None:
    buffer = torch.zeros(2)
    with pytest.raises(VerificationError):
        check(lambda: buffer.fill_(1), lambda: buffer.fill_(2))


@pytest.mark.parametrize("failing", ["eager", "replay"])
def test_replay_check_of_a_run_that_fails_leaves_the_state_of_before(failing: str) -> None:
    counter = torch.zeros(1)

    def run(side: str) -> torch.Tensor:
        counter.add_(1)
        if side == failing:
            raise OSError(side)
        return torch.ones(1)

    with pytest.raises(OSError, match=failing):
        check(lambda: run("eager"), lambda: run("replay"), state=TensorStateGuard([counter]))
    assert counter.item() == 0


def test_replay_check_passes_errors_of_the_step_on() -> None:
    error = ValueError("mine")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="mine") as raised:
        check(fail, fail)
    assert raised.value is error


class Memo(torch.nn.Module):
    """Keeps what it computed from the first inputs it met."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Identity()
        self.scale: torch.Tensor | None = None
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.max().clone()
        if len(x) not in self.tables:
            self.tables[len(x)] = x.min().clone()
        return x / self.scale + self.tables[len(x)]


def test_memo_of_warmup_inputs_is_found_and_named() -> None:
    model, x = Memo(), torch.tensor([1.0, 4.0])
    before = HostSnapshot(model)
    model(x)  # the warm-up, with other inputs than the check
    assert before.changed() == ("scale", "tables")
    x.copy_(torch.tensor([2.0, 8.0]))
    frozen = x / 4.0 + 1.0
    # Eager execution repeats the mistake, so it agrees unless it starts afresh.
    assert check(lambda: model(x), lambda: frozen).comparison.is_equal
    with pytest.raises(VerificationError) as raised:
        check(lambda: model(x), lambda: frozen, runnable=model, before_warmup=before)
    assert "scale" in raised.value.do
    assert "tables" in raised.value.do
    assert model.scale == 4.0  # what the graphs hold is back in place
    assert model.tables[2] == 1.0


class MemoInDict:
    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.seen.setdefault("first", x.clone())


class MemoMadeLater:
    def step(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "first"):
            self.first = x.clone()
        return x + self.first


@pytest.mark.parametrize(("make", "name"), [(MemoInDict, "seen"), (MemoMadeLater, "first")])
def test_memo_in_dict_or_new_attribute_is_restored(make: Any, name: str) -> None:
    owner = make()
    before = HostSnapshot(owner.step)
    owner.step(torch.ones(2))
    assert before.changed() == (name,)
    x = torch.full((2,), 5.0)
    with before.restored():
        assert owner.step(x).tolist() == [10.0, 10.0]
    assert owner.step(x).tolist() == [6.0, 6.0]


class Worn(torch.nn.Module):
    """Attributes of every kind that a snapshot keeps, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.tensor = 1, torch.ones(1)
        self.table: dict[Any, Any] = {1: "one", "two": [2]}
        self.row: list[Any] = [self.tensor, None]
        self.members: set[Any] = {"a", 2.5}
        self.deep = {"never": {"copied": 1}}
        self.no_table: dict[Any, Any] = {}
        self.no_row: list[Any] = []
        self.no_members: set[Any] = set()


def held(*modules: torch.nn.Module) -> list[Any]:
    """What the modules hold, by identity, and what their containers do, in order."""
    seen: list[Any] = []
    for module in modules:
        for name, value in sorted(vars(module).items()):
            items: Any = None
            if type(value) is dict:
                items = [(id(key), id(item)) for key, item in value.items()]
            elif type(value) in (list, set):
                items = [id(item) for item in value]
            seen.append((name, id(value), sorted(items) if type(value) is set else items))
    return seen


def refill(table: dict[Any, Any], entries: dict[Any, Any]) -> None:
    table.clear()
    table.update(entries)


WEAR: list[Callable[[Worn], object]] = [
    lambda m: setattr(m, "number", 1000),
    lambda m: setattr(m, "memo", torch.ones(2)),
    lambda m: setattr(m, "memos", {"of": [1]}),
    lambda m: vars(m).pop("tensor", None),
    lambda m: setattr(m, "training", not m.training),
    lambda m: m.table.update(three=3),
    lambda m: m.table.pop(1, None),
    lambda m: m.table.update(two=None),
    # As equal as can be, and not the same: the keys are floats where they were integers.
    lambda m: refill(m.table, {float(k) if k == 1 else k: v for k, v in m.table.items()}),
    lambda m: m.table.update({1: m.table.pop(1, "one")}),  # another order
    lambda m: setattr(m, "table", {1: "one"}),
    lambda m: m.row.append(4),
    lambda m: m.row.reverse(),
    lambda m: m.row.__setitem__(0, torch.ones(1)),
    lambda m: m.members.add("b"),
    lambda m: m.members.clear(),
    lambda m: m.members.symmetric_difference_update({"a", "c"}),
    lambda m: m.no_table.update(first=1),
    lambda m: m.no_row.append(1),
    lambda m: m.no_members.add(1),
    lambda m: setattr(m, "no_row", []),  # as empty, and not the same
    lambda m: setattr(m, "same_row", m.row),  # one container under two names
    lambda m: setattr(m, "other", m.table),
]


@pytest.mark.parametrize("seed", range(40))
def test_snapshot_restored_in_any_order_starts_as_first(seed: int) -> None:
    draw = random.Random(seed)
    worn = [Worn(), Worn()]
    model = torch.nn.Sequential(worn[0], torch.nn.Linear(1, 1), worn[1])
    before, first = HostSnapshot(model), held(*worn)
    for _ in range(4):
        for change in draw.choices(WEAR, k=draw.randrange(4)):
            change(draw.choice(worn))
        found = held(*worn)
        with before.restored():
            assert held(*worn) == first
            for change in draw.choices(WEAR, k=draw.randrange(4)):
                change(draw.choice(worn))
        assert held(*worn) == found


@pytest.mark.parametrize("change", WEAR)
def test_snapshot_restores_each_kind_of_change(change: Any) -> None:
    model = Worn()
    before, first = HostSnapshot(model), held(model)
    change(model)
    found = held(model)
    assert found != first
    with before.restored():
        assert held(model) == first
    assert held(model) == found


def test_snapshot_changed_names_the_module_and_ignores_order() -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), Worn())
    worn = model[1]
    before = HostSnapshot(model)
    worn.table = worn.table  # the same object again
    worn.table["two"] = worn.table.pop("two")
    worn.table[1] = worn.table.pop(1)
    assert before.changed() == ()
    worn.number = 1000
    worn.table[1] = "another"
    worn.row.reverse()
    del worn.members
    worn.memo = None
    changed = ("number", "table", "row", "members", "memo")
    assert sorted(before.changed()) == sorted(f"1.{name}" for name in changed)


def test_memo_that_ignores_inputs_passes() -> None:
    class Lazy:
        table: torch.Tensor | None = None

        def step(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(3.0)
            return x + self.table

    lazy = Lazy()
    before = HostSnapshot(lazy.step)
    warm = lazy.step(torch.zeros(3))
    assert before.changed() == ("table",)
    x = torch.ones(3)
    assert check(lambda: lazy.step(x), lambda: warm + 1, before_warmup=before).comparison.is_equal
    assert lazy.table is not None


def test_snapshot_holds_closure_variables() -> None:
    memo = None
    entries: list[int] = []

    def step() -> int:
        nonlocal memo
        memo = 1 if memo is None else memo + 1
        entries.append(memo)
        return memo

    before = HostSnapshot(step)
    assert before.changed() == ()
    step()
    step()
    assert set(before.changed()) == {"entries", "memo"}
    with before.restored():
        assert step() == 1
        assert entries == [1]
    assert memo == 2
    assert entries == [1, 2]


def test_snapshot_of_an_unassigned_variable_works() -> None:
    def step() -> int:
        return late

    before = HostSnapshot(step)
    late = 3
    assert before.changed() == ("late",)
    with before.restored(), pytest.raises(NameError):
        step()
    assert step() == 3


def test_forward_hooks_are_reported() -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())

    def count(*_: object) -> None: ...

    model[1].register_forward_hook(count)
    model[0].register_forward_pre_hook(count)
    assert [hook.module for hook in forward_hooks(model)] == ["0", "1"]
    verified = check(lambda: 1, lambda: 1, runnable=model)
    assert {hook.module for hook in verified.hooks} == {"0", "1"}
    assert all("count" in hook.hook for hook in verified.hooks)
    with pytest.raises(VerificationError) as raised:
        check(lambda: 1, lambda: 2, runnable=model)
    assert "hooks" in raised.value.do


@pytest.mark.parametrize(
    ("values", "others"),
    [
        ({"x": 0.0, "ids": 3}, {"x": 0.0, "ids": 3}),
        ({"x": math.nan}, {"x": torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)}),
    ],
    ids=["numbers", "bits of NaN"],
)
def test_examples_of_equal_values_are_refused(
    values: dict[str, Any], others: dict[str, Any]
) -> None:
    examples = [{name: torch.as_tensor(x) for name, x in each.items()} for each in (values, others)]
    with pytest.raises(VerificationError, match="equal contents"):
        require_other_example("case", *examples)


def test_examples_that_differ_in_one_integer_pass() -> None:
    examples = [({"x": torch.zeros(2), "ids": torch.tensor([1, last])}, None) for last in (2, 3)]
    require_other_example("case", *examples)
