"""One thread for each micro-batch, and the baton: the right to run, which one of them has.

Threads, and not greenlets or generators, because a yield may lie below any operator of torch's, and
a switch of stacks below the dispatcher ends the process. They outlive the step: libraries keep
workspaces for each thread and stream, whose addresses a captured graph holds.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from graphrt.device.torch_modes import (
    enter,
    leave,
    modes_of_thread,
    report_capturing,
    reports_capturing,
)
from graphrt.errors import UBatchBusyError, UBatchDeadlockError


class UBatchAborted(BaseException):
    """Unwinds a micro-batch because another one failed, or the caller was interrupted."""


class Worker:
    """One thread of a crew, and where its micro-batch is."""

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.next: Worker = self
        """Who gets the baton next."""
        self.tag: str | None = None
        """Of its latest yield."""
        self.stream = ""
        """The name of its current stream, for the report of a stall."""
        self.lock = _locked()
        """Released to give it the baton."""
        self.ended = _locked()
        """Released when it ends after a stall."""
        self.task: Callable[[], None] | None = None
        self.body: Callable[[Worker], Any] | None = None
        """What the task calls, which takes it out: what it holds ends with it."""
        self.run: _Run | None = None
        self.is_abandoned = False
        self.thread = threading.Thread(target=_serve, args=(self,), name=name, daemon=True)
        self.thread.start()

    def hand_over(self, tag: str) -> None:
        """Let the others run; return when it is this one's turn again.

        Errors: ``UBatchAborted`` once another micro-batch has failed, at each further call too.
        """
        run, following = self.run, self.next
        assert run is not None, "only a running micro-batch yields"
        self.tag = tag
        if following is not self and not run.is_aborting:
            run.num_hand_overs += 1
            run.holder = following
            following.lock.release()
            self.lock.acquire()
        if run.is_aborting:
            raise UBatchAborted(f"micro-batch {self.index}: another one failed")

    @property
    def where(self) -> str:
        return "before its first yield" if self.tag is None else f"after yield {self.tag!r}"


class _Run:
    """One call of ``WorkerCrew.run``. An abandoned worker keeps its own."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.live = list(workers)
        self.holder = workers[0]
        self.num_hand_overs = 0
        self.results: list[Any] = [None] * len(workers)
        self.error: BaseException | None = None
        self.is_aborting = False
        self.is_stalled = False
        self.is_done = False
        self.done = _locked()

    def fail(self, worker: Worker, error: BaseException) -> None:
        """Keep the first error; later ones are notes of it."""
        if self.error is not None:
            self.error.add_note(f"while micro-batch {worker.index} unwound: {error!r}")
            return
        error.add_note(f"in micro-batch {worker.index} of {len(self.results)}, {worker.where}")
        self.error = error
        self.is_aborting = True

    def leave(self, worker: Worker) -> None:
        """A worker ends: the baton goes on, of an aborted run to the lowest index."""
        self.live.remove(worker)
        self.num_hand_overs += 1
        if self.is_stalled:  # The caller releases one after the other.
            worker.ended.release()
            return
        if not self.live:
            self.is_done = True
            self.done.release()
            return
        for one in self.live:
            if one.next is worker:
                one.next = worker.next
        self.holder = self.live[0] if self.is_aborting else worker.next
        self.holder.lock.release()


class WorkerCrew:
    """As many persistent threads as micro-batches, of which one runs at a time.

    If k counts the yields of a worker, what lies between them runs in the order of (k, index): the
    model alone decides, so that it is the same in every run and on every rank.
    ``stall_timeout_s``: seconds without a hand-over after which a run is given up.
    """

    def __init__(self, num_workers: int, stall_timeout_s: float = 60.0) -> None:
        self.num_abandoned = 0
        """Threads that never came back, and run on by themselves."""
        self.stall_timeout_s = stall_timeout_s
        self._num_workers = num_workers
        self._workers: list[Worker] = []
        self._process = 0
        self._open: list[object] = []
        """The run that is open, if one is, and calls that are about to be refused."""

    def run(self, bodies: Sequence[Callable[[Worker], Any]]) -> list[Any]:
        """Run ``bodies[i]`` on worker i, and return what they returned.

        Each runs in a copy of the caller's context, and in its grad and inference mode, autocast
        and torch modes. Errors: ``UBatchBusyError`` if a run is open; ``UBatchDeadlockError``; the
        first error of a body, with a note of its micro-batch and yield. The crew stays usable.
        """
        if self._process != os.getpid():  # Threads and locks do not survive a fork.
            self._process, self._workers = os.getpid(), []
            self._open.clear()
        own = object()
        try:
            # Inside, because an interrupt right behind a lock that is taken would leave it so.
            self._open.append(own)
            if self._open[0] is not own:
                raise UBatchBusyError(
                    "micro-batches",
                    expected="one thread at a time that runs them",
                    found="a second one",
                    do="call it from one thread, or make one wrapper for each thread",
                )
            return self._run(bodies)
        finally:
            self._open.remove(own)

    def _run(self, bodies: Sequence[Callable[[Worker], Any]]) -> list[Any]:
        if not self._workers:
            names = [f"graphrt micro-batch {index}" for index in range(self._num_workers)]
            self._workers = [Worker(index, name) for index, name in enumerate(names)]
        workers = self._workers
        run, state = _Run(workers), _thread_state()
        for worker, body in zip(workers, bodies, strict=True):
            worker.next = workers[(worker.index + 1) % len(workers)]
            worker.tag, worker.stream, worker.run, worker.body = None, "", run, body
            context = contextvars.copy_context()
            worker.task = partial(context.run, _work, run, worker, state)
        self._wait(run, workers[0])
        for worker in workers:
            worker.run = run if worker.is_abandoned else None
        # Out of the run, because the thread of the last one may still be about to let go of it.
        error, run.error = run.error, None
        results, run.results = run.results, [None] * len(workers)
        if error is None:
            return results
        try:
            raise error
        finally:
            # Together with the traceback they would be a cycle that holds tensors.
            del error, run, results

    def _wait(self, run: _Run, first: Worker) -> None:
        """Give ``first`` the baton, wait for the end; an interrupt ends it at the next yields."""
        seen, is_begun = -1, False
        while not run.is_done:
            try:
                if not is_begun:
                    # In here, because an interrupt must not leave workers running by themselves.
                    is_begun = True
                    first.lock.release()
                while not run.is_done and not run.done.acquire(timeout=self.stall_timeout_s):
                    if run.num_hand_overs == seen:
                        self._give_up(run)
                        return
                    seen = run.num_hand_overs
            except BaseException as error:  # noqa: BLE001  Raised by the caller, when all ended.
                run.error = run.error or error
                run.is_aborting = True

    def _give_up(self, run: _Run) -> None:
        """End a run in which nothing has moved: release who waits, abandon who never returns."""
        frames = sys._current_frames()
        found = []
        for worker in run.live:
            role = "holds the baton" if worker is run.holder else "parked"
            stack = "".join(traceback.format_stack(frames.get(worker.thread.ident or 0))).rstrip()
            where = f"{role}, {worker.where}, on stream {worker.stream!r}"
            found.append(f"micro-batch {worker.index} ({where})\n{stack}")
        del frames
        error = UBatchDeadlockError(
            f"micro-batches: no hand-over in {self.stall_timeout_s} s",
            expected="each micro-batch to reach its next yield, or its end",
            found="\n".join(found),
            do="look for what the holder waits for: a transfer that no other rank takes part in, "
            "or a lock of a parked micro-batch; stall_timeout_s sets the limit",
        )
        if run.error is not None:
            error.add_note(f"while unwinding after {run.error!r}")
        run.error, run.is_aborting, run.is_stalled = error, True, True
        for worker in [one for one in run.live if one is not run.holder]:
            if worker.lock.locked():
                worker.lock.release()
            worker.ended.acquire(timeout=self.stall_timeout_s)
        for worker in list(run.live):
            worker.is_abandoned = True
            self.num_abandoned += 1
        self.close()

    def close(self) -> None:
        """End the threads. Idempotent; a later run makes new ones."""
        workers = [worker for worker in self._workers if not worker.is_abandoned]
        self._workers = []
        if self._process == os.getpid():
            for worker in workers:
                worker.task = None  # Of a run that an interrupt ended before it began.
                worker.lock.release()
            for worker in workers:
                worker.thread.join()


def _thread_state() -> Callable[[], AbstractContextManager[None]]:
    """What torch keeps for the calling thread, the modes that its code runs in but for those of an
    open recording: what is returned enters them in another thread."""
    is_inference, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    autocasts = [(kind, torch.get_autocast_dtype(kind)) for kind in on]
    caches_casts, is_reported = torch.is_autocast_cache_enabled(), reports_capturing()
    modes = modes_of_thread()

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(has_grad))
            for kind, dtype in autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=caches_casts))
            if is_reported:
                stack.enter_context(report_capturing())
            for mode in modes:
                enter(mode)
                stack.callback(leave, mode)
            yield

    return entered


def _locked() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _serve(worker: Worker) -> None:
    while True:
        worker.lock.acquire()
        task, worker.task = worker.task, None
        if task is None:
            return
        run = worker.run
        assert run is not None, "a task belongs to a run"
        task()
        # Before the others go on, because a recording that ends meanwhile counts what is held here.
        del task
        run.leave(worker)
        del run
        if worker.is_abandoned:
            return


def _work(run: _Run, worker: Worker, state: Callable[[], AbstractContextManager[None]]) -> None:
    body, worker.body = worker.body, None
    try:
        if not run.is_aborting:
            assert body is not None, "given with the task"
            with state():
                run.results[worker.index] = body(worker)
    except UBatchAborted as error:
        if not run.is_aborting:  # Raised by the body itself.
            run.fail(worker, error)
    except BaseException as error:  # noqa: BLE001  Raised by the caller.
        run.fail(worker, error)
