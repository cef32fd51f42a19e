"""The start: captures keys of the plan, and admits each program whose first replay was right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from graphrt.batch import BatchDescriptor, MissReason, RuntimeMode
from graphrt.config import Plan, RuntimeConfig
from graphrt.graphs import CaptureJob, CUDAGraphWrapper, GraphLibrary
from graphrt.runtime.admission import Admissions, Key
from graphrt.runtime.steps import REQUESTS, TOKENS, Steps
from graphrt.verify.hoststate import HostState

Progress = Callable[[int, int, BatchDescriptor], None]
"""``progress(done, total, key)``, called after each capture and each first replay."""


class Example(NamedTuple):
    """Valid inputs that fill a key: what warm-up, capture and verification run on."""

    values: Mapping[str, torch.Tensor]
    """By input name, of the key's full size."""
    num_tokens: int
    num_reqs: int
    live: Any = None
    """What ``Resource.prepare`` gets when the example runs for real (verification)."""


class Capturer:
    """Captures keys of ``plan``, plays each new program once, and tells ``admissions`` the outcome.

    From one call to the next it keeps nothing but what the model remembered on the host.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        plan: Plan,
        library: GraphLibrary,
        wrappers: Mapping[RuntimeMode, CUDAGraphWrapper],
        steps: Steps,
        admissions: Admissions,
        *,
        examples: Callable[[BatchDescriptor, int], Example],
        sinks: tuple[torch.Tensor, ...],
        holds: tuple[torch.Tensor, ...],
    ) -> None:
        self._config = config
        self._plan = plan
        self._library = library
        self._wrappers = wrappers
        self._steps = steps
        self._admissions = admissions
        self._examples = examples
        self._sinks = sinks
        self._holds = holds
        self._parts: _Parts | None = None

    def capture(
        self,
        wanted: frozenset[Key],
        missing: Mapping[Key, MissReason],
        progress: Progress | None,
        check_interrupt: Callable[[], None],
    ) -> None:
        """Capture those ``wanted`` that are ``missing``; all, if a program of theirs is invalid."""
        generation, keys = self._what_to_capture(wanted, missing)
        self._library.forget_failures()
        self._admissions.forget_failures(wanted)
        self._run(keys, generation, _Ticker(progress, 2 * len(keys), check_interrupt))

    def add(self, keys: Sequence[Key], check_interrupt: Callable[[], None]) -> None:
        """Capture ``keys`` beside what serves."""
        self._run(keys, "current", _Ticker(None, 2 * len(keys), check_interrupt))

    def refuse(self, keys: Sequence[Key]) -> None:
        """Let keys fail untried: three captures in a row have failed."""
        book = self._library.failure_book
        for mode, key in keys:
            owner = self._wrappers[mode].owner
            self._admissions.note_failure(
                book.add(owner, mode, key, book.fuse_error(owner, mode, key))
            )

    def forget_parts(self) -> None:
        """No other part follows: the next warm-up is the first one."""
        self._parts = None

    # -- inside

    def _what_to_capture(
        self, wanted: frozenset[Key], missing: Mapping[Key, MissReason]
    ) -> tuple[Literal["current", "new"], Sequence[Key]]:
        """Which of the keys to capture, and whether beside what serves or in its place.

        No program is freed alone, so one that can never serve again costs its memory until its
        whole generation goes. Memory comes first where none serves, service where one does.
        """
        programs = self._admissions.programs()
        in_order = self._plan.capture_order
        if all(program.is_valid for item, program in programs.items() if item in wanted):
            return "current", [item for item in in_order if item in wanted and item in missing]
        if len(missing) < len(in_order):
            # Some serve: what takes the old generation's place has to serve what that one serves.
            valid = {item for item, program in programs.items() if program.is_valid}
            return "new", [item for item in in_order if item in wanted or item in valid]
        for generation in {program.generation for program in programs.values()}:
            self._library.retire(generation)
        return "current", [item for item in in_order if item in wanted]

    def _run(
        self, keys: Sequence[Key], generation: Literal["current", "new"], tell: _Ticker
    ) -> None:
        before_warmup = self._state_before_warmup()
        self._steps.outputs.expire()
        try:
            try:
                self._capture_all(keys, generation, tell)
            except Exception:
                # The others serve all the same, and none of them may hide the first failure.
                self._admit_all(keys, before_warmup, tell, on_error="skip")
                raise
            self._admit_all(keys, before_warmup, tell, self._config.on_capture_error)
        finally:
            if before_warmup is not None:
                self._parts = _Parts(before_warmup, HostState(self._steps.model))

    def _state_before_warmup(self) -> HostState | None:
        """What the model remembered before the first warm-up, be it of an earlier part.

        Where something else has changed it since, only a new picture tells that from a warm-up.
        """
        if not self._config.verify_first_replay:
            return None
        if self._parts is not None and not self._parts.after.changed():
            return self._parts.before
        return HostState(self._steps.model)

    def _capture_all(
        self, keys: Sequence[Key], generation: Literal["current", "new"], tell: _Ticker
    ) -> None:
        jobs = []
        for mode, key in keys:
            if generation == "current" and self._admissions.valid_program(mode, key) is not None:
                tell(key)  # An interrupt came between its capture and its first replay.
            else:
                inputs = partial(self._example_call, key, seed=0)
                jobs.append(CaptureJob(self._wrappers[mode], mode, key, inputs))
        if not jobs:
            return

        def before_warmup(job: CaptureJob, phase: str) -> bool:
            if phase == "warmup":
                tell.check_interrupt()
            return True

        try:
            with self._library.capture_scope(
                state=self._steps.state,
                sinks=self._sinks,
                holds=self._holds,
                resources=self._steps.resources,
                warmups=self._config.compilation.cudagraph_num_of_warmups,
                on_error=self._config.on_capture_error,
                generation=generation,
            ) as scope:
                scope.capture_all(
                    jobs,
                    gate=before_warmup,
                    progress=lambda done, total, job: tell(job.key),
                    later=[key for _, key in self._plan.capture_order],
                )
        finally:
            for record in self._library.failures:
                self._admissions.note_failure(record)

    def _admit_all(
        self,
        keys: Sequence[Key],
        before_warmup: HostState | None,
        tell: _Ticker,
        on_error: Literal["raise", "skip"],
    ) -> None:
        """Let new programs serve whose first replay is right; the keys of the others have failed.

        The first error is raised only when the remaining ones were tried.
        """
        for number, (mode, key) in enumerate(keys, start=1):
            program = self._admissions.valid_program(mode, key)
            try:
                if program is not None and not self._admissions.is_admitted(program):
                    self._first_replay(mode, key, before_warmup)
                    self._admissions.admit(program)
            except Exception as error:
                self._admissions.reject(mode, key, error)
                # Raises if the error left the device unusable: there is nothing to go on with.
                self._library.device.synchronize()
                tell(key)
                if on_error == "raise":
                    self._admit_all(keys[number:], before_warmup, tell, on_error="skip")
                    raise
            else:
                tell(key)

    def _first_replay(
        self, mode: RuntimeMode, key: BatchDescriptor, before_warmup: HostState | None
    ) -> None:
        """Play a new program once, on inputs other than those it was captured with."""
        example = self._examples(key, 1)
        sizes = {TOKENS: example.num_tokens, REQUESTS: example.num_reqs}
        launch = self._steps.launch(self._wrappers[mode], key)
        state = self._steps.state
        saved = None if state is None else state.save()
        try:
            if before_warmup is None:
                self._steps.replay(launch, sizes, example.values, example.live)
            else:
                self._steps.verified(launch, sizes, example.values, example.live, before_warmup)
        finally:
            if state is not None:
                state.restore(saved)

    def _example_call(self, key: BatchDescriptor, seed: int) -> tuple[tuple[()], dict[str, Any]]:
        """Stage an example and return the call that reads it."""
        example = self._examples(key, seed)
        bound = self._steps.buffers.bind(key)
        bound.stage({TOKENS: example.num_tokens, REQUESTS: example.num_reqs}, example.values)
        return (), bound.views


class _Parts(NamedTuple):
    """What the model remembered before and after the parts of a capture so far."""

    before: HostState
    after: HostState


class _Ticker:
    """Counts progress for a caller who may not care, and lets an interrupt in between two keys."""

    def __init__(
        self, progress: Progress | None, total: int, check_interrupt: Callable[[], None]
    ) -> None:
        self.check_interrupt = check_interrupt
        self._progress = progress
        self._total = total
        self._done = 0

    def __call__(self, key: BatchDescriptor) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total, key)
        self.check_interrupt()
