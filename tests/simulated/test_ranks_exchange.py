"""An exchange over torch.distributed in a world of one: what ends it, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from graphrt.config import RankConfig
from graphrt.errors import ConfigError, RankLostError
from graphrt.parallel import InProcessExchange, Lockstep, RankVote, SplitRules, TorchExchange
from lab import RuntimeLab, in_a_child

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture
def world() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def lost() -> RankLostError:
    return RankLostError("the device", expected="an end", found="none", do="start again")


def test_dead_exchange_raises_a_new_error_each_time() -> None:
    (rank,) = InProcessExchange(1).ranks
    first = lost()
    first.add_note("rank 1 was last at: a step")
    rank.give_up(first)
    found = []
    for _ in range(3):
        with pytest.raises(RankLostError, match="the device") as caught:
            rank.start([1])
        found.append(caught.value)
    assert len({id(error) for error in found}) == 3
    for error in found:
        assert error.__cause__ is first
        assert error.__notes__ == [*first.__notes__, "the exchange has ended before"]
    assert first.__traceback__ is None


def test_group_destroyed_before_the_exchange_is_closed(world: Any) -> None:
    exchange = TorchExchange()
    assert list(exchange.start([1, 2]).result()) == [1, 2]
    dist.destroy_process_group()
    exchange.close()
    with pytest.raises(RankLostError, match="a closed exchange"):
        exchange.post("name", "text")


def test_forked_child_cannot_use_the_exchange(world: Any) -> None:
    exchange = TorchExchange()
    found = in_a_child(lambda: exchange.start([1]).result())
    assert "RankLostError" in found
    assert "the exchange of a parent process" in found
    assert in_a_child(exchange.close) == "None"
    assert list(exchange.start([1]).result()) == [1]
    exchange.close()


def test_ranks_with_another_wire_are_refused(world: Any) -> None:
    store = c10d.PrefixStore(f"graphrt/{world.group_name}/1", c10d._get_default_store())
    store.set("wire", "reduce")  # What the other rank has said.
    with pytest.raises(ConfigError, match="gather on rank 0, reduce on another one"):
        TorchExchange(world)
    assert store.check(["roll-call"])


def test_words_that_do_not_fit_start_no_round(world: Any) -> None:
    exchange = TorchExchange()
    with pytest.raises((ValueError, RuntimeError)):  # As torch says it.
        exchange.start([2**80])
    assert list(exchange.start([5]).result()) == [5]
    exchange.close()


def test_interrupt_in_a_round_ends_the_exchange(world: Any, monkeypatch: Any) -> None:
    exchange = TorchExchange()

    def interrupted(*args: object) -> bool:
        raise KeyboardInterrupt

    lockstep = Lockstep(exchange, RankConfig())
    with monkeypatch.context() as patched:
        patched.setattr("graphrt.parallel.exchange._Storage.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lockstep.agree(RankVote(0, 1, 1), SplitRules())
    with pytest.raises(RankLostError, match="an interrupt of this rank meanwhile"):
        lockstep.agree(RankVote(0, 1, 1), SplitRules())
    exchange.close()


def test_interrupted_step_has_all_ranks_wait_for_their_devices() -> None:
    (rank,) = InProcessExchange(1).ranks
    with RuntimeLab("NONE", ranks=rank) as lab:
        rounds = []
        for stops in (False, True, False, False):
            before, forward = rank.num_rounds, lab.model.forward
            if stops:
                lab.model.forward = _stop
                with pytest.raises(KeyboardInterrupt):
                    lab.step(3, 3)
                lab.model.forward = forward
            else:
                lab.step(3, 3)
            rounds.append(rank.num_rounds - before)
        assert rounds == [1, 1, 2, 1]


def _stop(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


class Nccl:
    """A group whose collectives the device waits in."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self._device_types = [torch.device("cuda")]
        self.abort = lambda: ended.append(name)

    def _get_backend(self, device: torch.device) -> Nccl:
        return self


@pytest.mark.parametrize("names", ["", "a", "ab"])
def test_only_the_groups_of_the_model_end_with_it(world: Any, monkeypatch: Any, names: str) -> None:
    ended: list[str] = []
    groups = {name: Nccl(name, ended) for name in "abc"}
    exchange = TorchExchange(world, model_groups=[groups[name] for name in names])
    error = lost()
    with monkeypatch.context() as patched:
        patched.setattr(c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups.values())))
        patched.setattr(c10d, "is_nccl_available", lambda: True)
        patched.setattr(c10d, "ProcessGroupNCCL", Nccl, raising=False)
        exchange.give_up(error)
    assert sorted(ended) == list(names or "abc")
    notes = getattr(error, "__notes__", [])
    assert ["model_groups" in note for note in notes] == ([] if names else [True])
    exchange.close()
