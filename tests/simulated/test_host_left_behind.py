"""What is made anew for each run, and what remembers how a callable was does about it."""

import weakref

import torch

from graphrt.graphs import HostSnapshot
from graphrt.graphs.host_snapshot import MOST_NEW

NUM_RUNS = 20 * MOST_NEW


class Numbers(list):
    """A list that tells when it is gone."""


class Planned(torch.nn.Module):
    """Reads a plan that a resource makes anew before each run, as attention libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = Numbers([0])
        self.first = self.plan
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.plan[0] + self.first[0] + self.calls


def planned_runs(model: Planned, snapshot: HostSnapshot, number: int) -> list[weakref.ref]:
    plans = []
    for run in range(number):
        model.plan = Numbers([run])
        plans.append(weakref.ref(model.plan))
        with snapshot.run(is_first=not run):
            model(torch.ones(2))
    return plans


def test_plans_of_earlier_runs_are_let_go_of():
    model = Planned()
    snapshot = HostSnapshot(model)
    plans = planned_runs(model, snapshot, NUM_RUNS)
    assert sum(plan() is not None for plan in plans) <= 2 * MOST_NEW
    assert plans[-1]() is model.plan


def test_what_only_the_snapshot_knows_of_the_callable_stays():
    model = Planned()
    snapshot, old = HostSnapshot(model), weakref.ref(model.first)
    model.first = Numbers([7])
    planned_runs(model, snapshot, NUM_RUNS)
    assert old() is not None, "it may have to be put back"
    with snapshot.run(is_first=False):
        model.first = Numbers([8])
    snapshot.restore_advanced()
    assert model.first == [0]


def test_a_plan_that_took_the_place_of_many_is_put_back_when_a_run_changes_it():
    model = Planned()
    snapshot = HostSnapshot(model)
    planned_runs(model, snapshot, NUM_RUNS)
    current = model.plan
    with snapshot.restored():
        current.append(5)
        current[0] = -1
    assert current == [NUM_RUNS - 1]
    for _ in range(NUM_RUNS):  # Others may have the ids of those that are gone.
        model.plan = Numbers([1])
        with snapshot.run(is_first=False):
            model(torch.ones(2))
    with snapshot.restored():
        model.plan.append(5)
    assert model.plan == [1]
    snapshot.restore_advanced()
    assert model.calls == 0


def test_a_plan_that_something_else_still_holds_is_looked_at():
    model = Planned()
    snapshot = HostSnapshot(model)
    with snapshot.run(is_first=True):
        model.kept = [model.plan]
    model.plan = held = Numbers([3])
    with snapshot.run(is_first=False):
        model(torch.ones(2))
    planned_runs(model, snapshot, NUM_RUNS)
    with snapshot.restored():
        held.append(4)
    assert held == [3]
