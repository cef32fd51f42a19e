"""What devices change in torch, on several threads at once: its stack of modes, and one query."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from graphrt.device.torch_modes import enter, leave, report_capturing


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "stack"),
    [
        (Dispatch, _python_dispatch._get_current_dispatch_mode_stack),
        (Function, _get_current_function_mode_stack),
    ],
)
def test_mode_left_from_below_others_leaves_those(kind: Any, stack: Any) -> None:
    mode, inner, innermost = kind(), kind(), kind()
    enter(mode)
    with inner, innermost:
        leave(mode)
        assert stack() == [inner, innermost]
    assert stack() == []
    assert not _python_dispatch.is_in_torch_dispatch_mode()


@pytest.mark.parametrize("first", [0, 1])
def test_modes_of_two_threads_leave_no_flag_behind(first: int) -> None:
    """torch's flags are the process's; each thread enters and leaves in its own order."""
    entered, turns = threading.Barrier(3, timeout=30), [threading.Event(), threading.Event()]

    def use_a_mode(number: int) -> None:
        mode = Dispatch()
        if number != first:
            turns[first].wait(30)
        enter(mode)
        turns[number].set()
        entered.wait()
        if number != first:
            threads[first].join(30)  # That thread leaves first, while this mode is still entered.
        leave(mode)

    threads = [threading.Thread(target=use_a_mode, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    entered.wait()
    for thread in threads:
        thread.join(30)
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    assert torch.compile(torch.neg, backend="eager")(torch.ones(2)).tolist() == [-1.0, -1.0]


def original() -> bool:
    """torch's own function; on a CPU build that raises."""
    return False


@pytest.fixture(autouse=True)
def _torch_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", original)


def is_reported() -> bool:
    return torch.cuda.is_current_stream_capturing()


def test_nested_report_ends_with_the_last_scope_in_any_order() -> None:
    first, second = report_capturing(), report_capturing()
    with first:
        with second:
            assert is_reported()
        assert is_reported()
    assert torch.cuda.is_current_stream_capturing is original
    first, second = report_capturing(), report_capturing()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_reported()
    second.__exit__(None, None, None)
    assert torch.cuda.is_current_stream_capturing is original


def test_report_that_raises_restores_torchs_function() -> None:
    with pytest.raises(KeyError), report_capturing():
        raise KeyError
    assert torch.cuda.is_current_stream_capturing is original


def test_report_is_seen_by_its_own_thread_only() -> None:
    asked, answers = threading.Event(), []

    def other() -> None:
        answers.append(is_reported())
        with report_capturing():
            answers.append(is_reported())
            asked.set()
            ended.wait(30)
            answers.append(is_reported())
        answers.append(torch.cuda.is_current_stream_capturing is original)

    ended, thread = threading.Event(), threading.Thread(target=other)
    with report_capturing():
        thread.start()
        assert asked.wait(30)
    assert not is_reported()  # The other thread still reports.
    ended.set()
    thread.join(30)
    assert answers == [False, True, True, True]


def test_saved_query_put_back_later_still_asks_torch() -> None:
    with report_capturing():
        saved = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = saved  # As a patch that ends after the scope does.
    assert not is_reported()
    with report_capturing():
        assert is_reported()
    assert torch.cuda.is_current_stream_capturing is original


def test_many_threads_that_report_at_once_lose_no_answer() -> None:
    """The last to leave puts torch's function back while others enter."""
    failures = []

    def enter_and_leave() -> None:
        for _ in range(300):
            with ExitStack() as stack:
                stack.enter_context(report_capturing())
                if not is_reported():
                    failures.append("inside")
            if is_reported():
                failures.append("outside")

    threads = [threading.Thread(target=enter_and_leave) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert torch.cuda.is_current_stream_capturing is original
