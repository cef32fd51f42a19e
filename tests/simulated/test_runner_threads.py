"""Two threads that run one runner at once: one of them is refused, wherever the other one is."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch
from tests.lab import rows_runner

from graphrt.errors import ReentrantStepError
from graphrt.runner import CUDAGraphRunner

WAIT_S = 30.0


class Meeting:
    """A model that waits in one thread until the other one is done with its run."""

    def __init__(self) -> None:
        self.is_inside, self.is_over = threading.Event(), threading.Event()
        self.waits_in = ""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first = x * 1
        if threading.current_thread().name == self.waits_in:
            self.is_inside.set()
            assert self.is_over.wait(WAIT_S)
        return first + x


def meet(at_opcode: int, runner: CUDAGraphRunner, model: Meeting) -> tuple[list[Any], bool]:
    """Begin a run; at its ``at_opcode``-th instruction let another thread begin one and wait inside
    the model; end the first; then the other. Return what each got, and whether there was such an
    instruction."""
    found: list[Any] = [None, None]
    model.is_inside.clear()
    model.is_over.clear()
    model.waits_in = "other"
    number = 0

    def run(place: int) -> None:
        rows = torch.full((2, 4), float(place + 1))
        try:
            found[place] = runner.run({"x": rows})
        except ReentrantStepError as error:
            found[place] = error

    def run_other() -> None:
        try:
            run(1)
        finally:
            model.is_inside.set()  # Also where it was refused.

    other = threading.Thread(target=run_other, name="other")

    def at_instruction(frame: FrameType, event: str, _: object) -> Any:
        nonlocal number
        if event == "opcode":
            if number == at_opcode:
                other.start()
                assert model.is_inside.wait(WAIT_S)
            number += 1
        return at_instruction

    def at_call(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not CUDAGraphRunner.execute.__code__:
            return None
        frame.f_trace_opcodes = True
        return at_instruction

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        run(0)
    finally:
        sys.settrace(before)
        model.is_over.set()
        if number > at_opcode:
            other.join(WAIT_S)
    return found, number > at_opcode


def test_second_thread_at_any_instruction_gets_its_rows_or_is_refused() -> None:
    model = Meeting()
    with rows_runner(model) as runner:
        refused = [0, 0]
        for at_opcode in range(1_000):
            found, is_there = meet(at_opcode, runner, model)
            if not is_there:
                break
            for place, rows in enumerate(found):
                if isinstance(rows, ReentrantStepError):
                    refused[place] += 1
                else:
                    assert torch.equal(rows, torch.full((2, 4), 2.0 * (place + 1))), at_opcode
        assert at_opcode > 50
        assert min(refused) > 5  # Either of them, by which one had begun.


def test_refusal_names_the_places_of_both_threads() -> None:
    model = Meeting()
    model.waits_in = "other"
    with rows_runner(model) as runner:
        other = threading.Thread(target=lambda: runner.run({"x": torch.ones(2, 4)}), name="other")
        other.start()
        assert model.is_inside.wait(WAIT_S)
        with pytest.raises(ReentrantStepError) as raised:
            runner.run({"x": torch.ones(2, 4)})
        with pytest.raises(ReentrantStepError):
            runner.withdraw([], "while it runs")
        model.is_over.set()
        other.join(WAIT_S)
        assert "here 'MainThread' at" in raised.value.found
        assert "in test_refusal_names_the_places_of_both_threads" in raised.value.found
        assert "there 'other' at" in raised.value.found
        assert "in Meeting.__call__" in raised.value.found
        model.waits_in = ""
        assert runner.run({"x": torch.ones(2, 4)}).eq(2).all()


@pytest.mark.parametrize("event", ["call", "return", "c_return"])
@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("is_observed", [False, True])
def test_interrupt_wherever_python_notices_it_lets_later_runs_be(
    event: str, rows: int, is_observed: bool
) -> None:
    """Python looks for Ctrl-C where a function begins and where the call of a builtin ends."""
    observer = (lambda _: None) if is_observed else None
    x, interrupts = torch.ones(rows, 4), list[BaseException]()
    with rows_runner(lambda x: x * 2, observer=observer) as runner:
        runner.capture()

        def run_to(place: int) -> bool:
            """Run, interrupted at an event of our code; False if there are fewer of them."""
            left = place

            def look(frame: FrameType, name: str, _: object) -> None:
                nonlocal left
                # Not by folder, because a checkout may have the same name, with its environment.
                module = frame.f_globals.get("__name__", frame.f_code.co_filename)
                is_ours = module.startswith(("graphrt", "<graphrt"))  # Generated code has no name.
                if name == event and is_ours and frame.f_code.co_name != "<genexpr>":
                    left -= 1
                    if left < 0:
                        sys.setprofile(None)
                        raise KeyboardInterrupt

            before = sys.getprofile()
            sys.setprofile(look)
            try:
                runner.run({"x": x})
            except KeyboardInterrupt as error:
                interrupts.append(error)  # Its frames live on, as in a notebook.
            finally:
                sys.setprofile(before)
            return left < 0

        place = 0
        while run_to(place):
            assert torch.is_grad_enabled(), place
            assert runner.run({"x": x}).eq(2).all(), place
            place += 1
        assert place == len(interrupts) > 10
