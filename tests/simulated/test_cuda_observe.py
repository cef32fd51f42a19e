"""The observer that learns externals on CUDA, on CPU tensors: it asks the dispatcher only."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from bug_classes import Packed
from graphrt.device.cuda.observe import Ledger, Observer


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def observed(fn: Any, pooled: Any = lambda address: False) -> Ledger:
    ledger = Ledger("cpu", pooled)
    observer = Observer(ledger)
    observer.enter()
    try:
        fn()
    finally:
        observer.leave()
    return ledger


def test_inputs_are_external_and_results_are_not() -> None:
    x, w = torch.ones(3, 3), torch.ones(3, 3)
    ledger = observed(lambda: torch.relu(x @ w) + x)
    assert [(use.tensor is x or use.tensor is w, use.written) for use in ledger.externals()] == [
        (True, False),
        (True, False),
    ]
    assert not ledger.uses_rng


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_are_read_from_the_schema_through_views_too(mode: Any) -> None:
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


def test_what_the_pool_owns_is_left_out() -> None:
    x, pooled = torch.ones(2), torch.ones(2)
    ledger = observed(lambda: x + pooled, lambda address: address == pooled.data_ptr())
    assert [use.tensor is x for use in ledger.externals()] == [True]


def test_the_parts_of_a_packed_tensor_are_external_not_the_tensor_that_has_no_storage() -> None:
    x, codes, scale = torch.ones(2, 4), torch.ones(4, 4, dtype=torch.int8), torch.ones(4)
    packed = Packed(codes, scale)
    ledger = observed(lambda: x @ packed)
    assert {id(use.tensor) for use in ledger.externals()} == {id(x), id(codes), id(scale)}


def test_random_operations_are_noticed() -> None:
    x = torch.ones(8)
    assert observed(lambda: torch.bernoulli(x)).uses_rng


def test_the_first_failure_is_kept_with_its_operation() -> None:
    x = torch.ones(2, 3)

    def body() -> None:
        for _ in range(2):
            try:
                x @ x
            except RuntimeError:
                continue

    ledger = observed(body)
    error, operation = ledger.take_failure()
    assert isinstance(error, RuntimeError)
    assert operation == "aten.mm.default"
    assert ledger.take_failure()[0] is None


def test_leaving_from_below_another_mode_keeps_that_mode_and_torchs_flags() -> None:
    observer, passing = Observer(Ledger("cpu", lambda address: False)), Passing()
    observer.enter()
    with passing:
        observer.leave()
        assert _python_dispatch._get_current_dispatch_mode_stack() == [passing]
    assert _python_dispatch._get_current_dispatch_mode_stack() == []
    assert not _python_dispatch.is_in_torch_dispatch_mode()


@pytest.mark.parametrize("first", [0, 1])
def test_threads_that_observe_at_once_leave_no_flag_behind(first: int) -> None:
    """The flags of torch are the process's; each thread enters and leaves in its own order."""
    entered, turns = threading.Barrier(3, timeout=30), [threading.Event(), threading.Event()]

    def observe(number: int) -> None:
        observer = Observer(Ledger("cpu", lambda address: False))
        if number != first:
            turns[first].wait(30)
        observer.enter()
        turns[number].set()
        entered.wait()
        if number != first:
            threads[first].join(30)  # Left by who entered first, while this one still observes.
        observer.leave()

    threads = [threading.Thread(target=observe, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    entered.wait()
    for thread in threads:
        thread.join(30)
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    assert torch.compile(torch.neg, backend="eager")(torch.ones(2)).tolist() == [-1.0, -1.0]
