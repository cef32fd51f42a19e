"""Captures a set of keys: warms each up, freezes what graphs hold, captures, checks each replay."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from graphrt.batch import BatchDescriptor, Reason, RuntimeMode
from graphrt.config.checked import check_callable, check_type, checked_list
from graphrt.context import ForwardContext
from graphrt.errors import ConfigError, EmptyCaptureError, RankError, noting
from graphrt.externals import HostSnapshot, require_no_grad
from graphrt.graphs import (
    CaptureOptions,
    CaptureScope,
    CUDAGraphWrapper,
    Entry,
    GraphLibrary,
    Program,
    TimedPhase,
    capture_program,
    keep_undeclared,
    optional_methods,
)
from graphrt.graphs.writes import KeptTensors, keeping_writes
from graphrt.runner.comparisons import overwritten, wait_for
from graphrt.ubatch import UBatchWrapper
from graphrt.values import own_copy
from graphrt.verify import (
    NUM_ADVANCING_RUNS,
    check_replay,
    require_compared,
    require_like_whole,
    require_other_example,
    require_varied_for_memos,
)
from graphrt.verify.run_state import RunState, random_state, restored

Phase = Literal["warmup", "warmed", "capture", "captured", "failed"]
Gate = Callable[["CaptureJob", Phase], bool]
"""Asked before and after each warm-up (False skips the job), before each capture (the same) and
after it (False drops its programs); told of each failure, while it is handled. An error that it
raises fails the job, and a ``RankError`` ends everything."""

JobProgress = Callable[[int, int, "CaptureJob"], None]


@dataclass(frozen=True, slots=True, eq=False)
class CaptureJob:
    """One key to capture: ``target(*args, **kwargs)`` in a step of ``mode`` and ``key``.

    ``target``: a ``CUDAGraphWrapper`` or a ``UBatchWrapper``; with ``owner`` any callable, whose
    program is then found under that name; or a callable that itself calls wrappers of ``mode``.
    ``make_inputs`` returns ``(args, kwargs)``; it is called anew for every warm-up and for the
    capture, and its tensors must lie where steps will find them. If it takes an argument, that is
    a seed: 0 for warm-up and capture, 1 for the first replay, which is then compared with eager;
    of a target that calls wrappers, what it returns, unless they wait for a new generation.
    ``check``: plays the new program and raises if it is wrong, in place of that comparison.
    ``checked``: called when the check is over, whatever came of it.
    Errors: ``ConfigError`` for arguments of another kind.
    """

    target: Callable[..., Any]
    mode: RuntimeMode
    key: BatchDescriptor
    make_inputs: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
    owner: str = ""
    check: Callable[[Entry], None] | None = None
    checked: Callable[[Entry], None] | None = None

    def __post_init__(self) -> None:
        for name in ("target", "make_inputs"):
            check_callable(f"{name} of a CaptureJob", getattr(self, name))
        for name, kind in (("mode", RuntimeMode), ("key", BatchDescriptor), ("owner", str)):
            check_type(f"{name} of a CaptureJob", getattr(self, name), kind, f"a {kind.__name__}")
        for name in ("check", "checked"):
            if getattr(self, name) is not None:
                check_callable(f"{name} of a CaptureJob", getattr(self, name))

    @property
    def name(self) -> str:
        """The owner of its program, else the name of the target: how failures are recorded."""
        name = self.owner or getattr(self.target, "owner", None)
        name = name or getattr(self.target, "__qualname__", None)
        return name if isinstance(name, str) else type(self.target).__name__

    @property
    def is_direct(self) -> bool:
        """True if the target is what is captured, rather than calling wrappers that are."""
        wrapper = _wrapper_of(self.target)
        return bool(self.owner) or (wrapper is not None and wrapper.runtime_mode is self.mode)

    @property
    def takes_seed(self) -> bool:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(self.make_inputs).parameters.values()
        # A default keeps a variable of a loop, unless it is the seed's own.
        first = next((p for p in parameters if p.kind in kinds), None)
        return first is not None and (first.default is first.empty or first.name == "seed")


class CaptureReport(NamedTuple):
    """What ``capture_all`` did."""

    programs: tuple[Program, ...]
    """Those captured that still exist."""
    failures: tuple[Entry, ...]
    skipped: tuple[CaptureJob, ...]
    """Jobs that a gate turned away or dropped."""
    seconds: Mapping[CaptureJob, float]
    """Warm-ups, capture and check of each job that was attempted."""


def capture_all(
    library: GraphLibrary,
    jobs: Iterable[CaptureJob],
    options: CaptureOptions | None = None,
    *,
    gate: Gate | None = None,
    progress: JobProgress | None = None,
    later: Iterable[BatchDescriptor] = (),
    host: HostSnapshot | None = None,
    ended: Callable[[TimedPhase], None] = lambda phase: None,
) -> CaptureReport:
    """Warm every job up, freeze resources and workspaces, capture every job in order, check each.

    Runs in the scope that is open, with its options; else opens one. Order PIECEWISE before FULL,
    then by tokens, micro-batches and adapters, descending: the first capture sets the pool's
    high-water mark. Another order costs memory. First replays are checked after the scope, those
    of a scope that was open before inside it.

    ``progress(done, total, job)`` is called as each job is captured, or given up. ``later``: keys
    that other calls capture. Resources are reserved for the largest of these and the jobs' keys,
    because none may grow once a graph holds its address. ``host``: what the jobs' callable
    remembered before the first of several calls; by default taken now. What each run advances on
    the host (a counter) is put back when the call ends, also by an error, and so are the random
    generators of the library, of torch's host, of Python and NumPy; what only the first run for a
    key sets (a memo) stays. ``ended(phase)`` is called as all jobs are warmed up, captured
    and checked.
    Errors: the first failure, unless failures are skipped. A check that fails does not hinder
    those of the other jobs. ``ConfigError`` for arguments of another kind.
    """
    check_type("library", library, GraphLibrary, "the GraphLibrary that owns the programs")
    check_type("options", options, CaptureOptions | None, "CaptureOptions")
    check_type("host", host, HostSnapshot | None, "a HostSnapshot")
    for name, call in (("gate", gate), ("progress", progress), ("ended", ended)):
        if call is not None:
            check_callable(name, call)
    jobs = checked_list("jobs", jobs, CaptureJob, "a list of CaptureJobs")
    later = checked_list("later", later, BatchDescriptor, "keys without their modes")
    hosts = {} if host is None else {id(host.runnable): host}
    run = _Run(library, jobs, options or CaptureOptions(), gate or (lambda job, phase: True), hosts)
    opened = nullcontext(library.scope) if library.scope else library.capture_scope(run.options)
    restore_random: Callable[[], None] | None = None
    try:
        with opened as scope:
            restore_random = random_state(library.all_generators)
            options = run.options = scope.options
            run.kept = scope.kept
            run.reserve(later)
            for job in run.jobs:
                with run.attempt(job, "warmup") as goes_on:
                    if goes_on:
                        run.warm_up(job, scope)
            for freeze in optional_methods(options.prepared, "freeze"):
                freeze()
            library.freeze_workspaces(scope)
            ended("warmup")
            for done, job in enumerate(run.jobs, start=1):
                with run.attempt(job, "capture") as goes_on:
                    if goes_on:
                        run.capture(job, scope)
                if progress is not None:
                    progress(done, len(run.jobs), job)
            for job in run.captured_blindly():
                with run.attempt(job, "capture") as goes_on:
                    if goes_on:
                        run.capture(job, scope)
            ended("capture")
    except Exception as error:
        # What was captured serves all the same, and no check may hide the first failure. Without
        # the other ranks nothing can be checked.
        if not isinstance(error, RankError):
            run.check()
        raise
    else:
        failure = run.check()
        ended("check")
        # A scope that rebuilds a generation ends with an error, or the wrong program is published.
        is_rebuilding = options.generation == "new" and library.scope is not None
        if failure is not None and (options.on_error == "raise" or is_rebuilding):
            raise failure
        return run.report()
    finally:
        if restore_random is not None:
            restore_random()
        run.restore_hosts()
        run.put_back()
        library.settle(program for own in run.captured.values() for program in own)


@dataclass(eq=False)
class _Run:
    """One ``capture_all``: what each job captured, what failed, how long each took."""

    library: GraphLibrary
    jobs: tuple[CaptureJob, ...]
    options: CaptureOptions
    gate: Gate
    hosts: dict[int, HostSnapshot]
    """By id of each callable: what it remembered before its first warm-up."""
    captured: dict[CaptureJob, list[Program]] = field(default_factory=dict)
    failures: dict[CaptureJob, Entry] = field(default_factory=dict)
    skipped: list[CaptureJob] = field(default_factory=list)
    seconds: dict[CaptureJob, float] = field(default_factory=dict)
    _users: dict[int, list[CaptureJob]] = field(default_factory=dict)
    """The jobs of each callable that ran."""
    _ran_again: set[int] = field(default_factory=set)
    _warmed: set[tuple[str, RuntimeMode]] = field(default_factory=set)
    kept: KeptTensors | None = None
    """Of the scope, once it is entered."""

    def __post_init__(self) -> None:
        self._catalog = self.library.catalog
        self._takes_seed = {job: job.takes_seed for job in self.jobs}
        self._extents: dict[tuple[str, RuntimeMode], list[tuple[int, ...]]] = {}
        for job in self.jobs:
            self._extents.setdefault((job.name, job.mode), []).append(_extent(job.key))

    def report(self) -> CaptureReport:
        return CaptureReport(
            # To make room, a later capture of lazy generations may have retired an earlier one.
            tuple(
                program
                for programs in self.captured.values()
                for program in programs
                if program.state != "retired"
            ),
            tuple(self.failures.values()),
            tuple(self.skipped),
            MappingProxyType(self.seconds),
        )

    def reserve(self, later: Iterable[BatchDescriptor]) -> None:
        """Let resources allocate for the largest key of all."""
        keys = [*later, *(job.key for job in self.jobs)]
        if self.jobs:
            self.library.reserve(self.options.prepared, max(keys, key=_extent))

    @contextmanager
    def attempt(self, job: CaptureJob, phase: Literal["warmup", "capture"]) -> Iterator[bool]:
        """Around one phase of one job: yield False where there is nothing to do. A failure is
        recorded, and raised unless failures are skipped."""
        entry = self._entry(job)
        if entry.error is not None and self.options.on_error == "skip":
            self.failures[job] = entry
        if job in self.skipped or job in self.failures or self._is_captured(job):
            yield False
            return
        started = perf_counter()
        goes_on = False
        try:
            goes_on = self._asks(job, phase)
            if goes_on:
                self._catalog.require_untried(job.name, job.mode, job.key)
        except Exception as error:  # noqa: BLE001  Raised again, unless failures are skipped.
            goes_on = False
            self._fail(job, error)
        try:
            yield goes_on
            if goes_on and phase == "warmup":
                self._asks(job, "warmed")
        except Exception as error:  # noqa: BLE001  As above.
            self._fail(job, error)
        finally:
            self._time(job, phase, started)

    def _asks(self, job: CaptureJob, phase: Phase) -> bool:
        """Whether the job goes on; else it is skipped."""
        goes_on = self.gate(job, phase)
        if not goes_on:
            self.skipped.append(job)
        return goes_on

    def _time(self, job: CaptureJob, phase: TimedPhase, started: float) -> None:
        took = perf_counter() - started
        self.seconds[job] = self.seconds.get(job, 0.0) + took
        self._entry(job).seconds.add(phase, took)

    def _fail(self, job: CaptureJob, error: Exception) -> None:
        """Record a failure; raise it again unless failures are skipped."""
        if isinstance(error, RankError):
            raise error
        self.failures[job] = self._catalog.mark_failed(job.name, job.mode, job.key, error)
        self.gate(job, "failed")
        if self.options.on_error == "raise" and not self.library.has_ranks:
            raise error
        # Raises if the error left the device unusable: there is nothing to go on with. With ranks
        # also if the device waits in a collective that the rank which failed never came to.
        self.library.synchronize()
        if self.options.on_error == "raise":
            raise error
        _free_frames(error)

    def _host_of(self, job: CaptureJob, scope: CaptureScope) -> HostSnapshot:
        fn = self._callable_of(job) if job.is_direct else job.target
        host = self.hosts.get(id(fn))
        if host is None:
            host = self.hosts[id(fn)] = HostSnapshot(fn)
        scope.hosts[id(fn)] = host  # Captures of this scope go by it too.
        self._users.setdefault(id(fn), []).append(job)
        return host

    def restore_hosts(self) -> None:
        """Put back what each run of a callable advances on the host. Memos stay for the graphs that
        read them; where there is no graph, nothing does."""
        for fn, host in self.hosts.items():
            jobs = self._users.get(fn, ())
            host.restore_advanced(memos=bool(jobs) and not any(map(self._has_program, jobs)))

    def put_back(self) -> None:
        """Put back what runs of a callable wrote undeclared, as its memos, if no graph reads it."""
        if self.kept is None:
            return
        served = {fn for fn, jobs in self._users.items() if any(map(self._has_program, jobs))}
        if self.kept.put_back(lambda storage, fn: fn in self._users and fn not in served):
            self.library.synchronize()  # Before the copies are freed.
        self.kept.clear()

    def _has_program(self, job: CaptureJob) -> bool:
        """True if a program of the job's callable, of any key, may be replayed."""
        entries = self._catalog.of_owner(job.name, job.mode).by_key.values()
        programs = [p for entry in entries for p in (entry.program, entry.staged, *entry.inner)]
        return any(program is not None and program.is_valid for program in programs)

    def warm_up(self, job: CaptureJob, scope: CaptureScope) -> None:
        warmups = self.options.warmups
        scope.prepare_for_capture(job.key)
        doing = noting(f"in a warm-up of {job.name}, {job.mode.name}, {job.key}")
        with RunState(self.options.state if warmups else None).put_back(), doing:
            for number in range(warmups):
                # Libraries branch on "is this a capture": the last warm-up takes the same branch,
                # and what only that branch sets is a memo as well.
                is_last = number == warmups - 1
                reported = scope.device.report_capturing() if is_last else nullcontext()
                self._run_eagerly(job, scope, reported, is_first=number == 0 or is_last)
        self._warmed.add((job.name, job.mode))

    def _run_eagerly(
        self,
        job: CaptureJob,
        scope: CaptureScope,
        reported: AbstractContextManager[object],
        *,
        is_first: bool,
    ) -> None:
        """Run a job outside a recording; what it writes undeclared is kept, if it is observed."""
        host = self._host_of(job, scope)
        args, kwargs = self._inputs(job)
        keep = None
        options = self._options_of(job, is_first=(job.name, job.mode) not in self._warmed)
        if options.observe != "never":
            keep = keep_undeclared(self.library, scope, options, id(host.runnable))
        keeping = nullcontext() if keep is None else keeping_writes(keep)
        if job.owner:
            # Other views of a runner's static buffers than in any other run: what each run sets to
            # one is seen to change, and is no memo.
            kwargs = {name: view.view_as(view) for name, view in kwargs.items()}
        run, step = host.run(is_first=is_first), scope.step(RuntimeMode.NONE, job.key)
        with run, reported, step, keeping:
            require_no_grad()
            job.target(*args, **kwargs)

    def capture(self, job: CaptureJob, scope: CaptureScope) -> None:
        """Capture the program of a job, or those of the wrappers that its target calls."""
        before = len(scope.programs)
        # A target that calls wrappers runs for real around their recordings.
        state = None if job.is_direct else self.options.state
        is_first = self.options.warmups == 0
        try:
            args, kwargs = self._inputs(job)
            host = self._host_of(job, scope)
            # The capture of a direct job is a run of its own.
            run = nullcontext() if job.is_direct else host.run(is_first=is_first)
            with RunState(state).put_back(), run, scope.step(job.mode, job.key):
                if job.is_direct:
                    fn, options = self._callable_of(job), self._options_of(job)
                    if isinstance(job.target, UBatchWrapper):
                        job.target.prepare(job.key)
                    program = capture_program(
                        self.library, job.name, job.mode, job.key, fn, args, kwargs, options
                    )
                    is_blind = options.observe == "never" and self.options.observe != "never"
                    if not is_blind and not all(held.is_named for held in program.externals):
                        self._catalog.observe_always(job.name, job.mode)
                else:
                    job.target(*args, **kwargs)
                    self._require_match(job, scope.programs[before:])
                    self._entry(job).inner = tuple(scope.programs[before:])
            if is_first and host.changed() and id(host) not in self._ran_again:
                # A memo or a counter? One more run tells, where there was no warm-up.
                with RunState(self.options.state).put_back():
                    self._run_eagerly(job, scope, nullcontext(), is_first=False)
                self._ran_again.add(id(host))
            is_kept = self.gate(job, "captured")
        except BaseException:
            self._drop(scope, before)
            raise
        if is_kept:
            host.keep_memos()
            self.captured[job] = scope.programs[before:]
            if self._checker(job) is not None:
                self._catalog.mark_unchecked(self._entry(job))
        else:
            self._drop(scope, before)
            self.skipped.append(job)

    def captured_blindly(self) -> list[CaptureJob]:
        """Jobs whose program touches more than it names, as an observed one has shown since."""
        return [job for job, own in self.captured.items() if any(p.state == "invalid" for p in own)]

    def check(self) -> Exception | None:
        """Play each new program once; return the first error, when all were tried."""
        first: Exception | None = None
        unchecked = [
            (job, self._entry(job), check)
            for job in self.jobs
            if (check := self._checker(job)) is not None
            and (
                job in self.captured
                or (job.is_direct and self._entry(job).reason is not Reason.HIT)
            )
        ]
        for _, entry, _ in unchecked:
            self._catalog.mark_unchecked(entry)
        for job, entry, check in unchecked:
            started = perf_counter()
            try:
                if self._new_programs(job):
                    # Eager segments run their Python on both sides: both start from one count.
                    self.restore_hosts()
                    check(entry)
                    if job.is_direct:
                        self._catalog.mark_ready(entry)
            except RankError:
                raise
            except Exception as error:  # noqa: BLE001  The caller raises the first one.
                if entry.staged is not None:
                    entry.staged.invalidate()
                    self._catalog.mark_failed(entry.owner, entry.mode, entry.key, error)
                else:
                    self._catalog.mark_wrong(entry, error)
                    for program in entry.inner:
                        inner = self._catalog.entry(program.owner, program.mode, program.key)
                        self._catalog.mark_wrong(inner, error)
                self.failures[job] = entry
                first = first or error
                # Raises if the error left the device unusable: there is nothing to go on with.
                self.library.synchronize()
            if job.checked is not None:
                job.checked(entry)
            self._time(job, "check", started)
        return first

    def _new_programs(self, job: CaptureJob) -> tuple[Program, ...]:
        """What a check of the job plays; nothing if some of it may not be replayed."""
        entry = self._entry(job)
        if job.is_direct:
            program = entry.staged or entry.valid_program
            return () if program is None else (program,)
        return entry.inner if all(program.is_valid for program in entry.inner) else ()

    def _entry(self, job: CaptureJob) -> Entry:
        return self._catalog.entry(job.name, job.mode, job.key)

    def _callable_of(self, job: CaptureJob) -> Callable[..., Any]:
        target = _wrapper_of(job.target)
        if target is None:
            return job.target
        if target.library is not self.library:
            raise ConfigError(
                f"job of {job.name}",
                expected="a wrapper of the library that captures",
                found="a wrapper of another library",
                do="capture it with its own library",
            )
        return target.runnable

    def _options_of(self, job: CaptureJob, *, is_first: bool = True) -> CaptureOptions:
        """The options for one job: its wrapper's, and whether its recording is observed; or its
        warm-up, which may not be the ``is_first`` of its owner."""
        options, target = self.options, _wrapper_of(job.target)
        if target is not None:
            options = target.options_within(options)
        is_simulated = self.library.device.name == "simulated"
        observe = options.observe or ("always" if is_simulated else "ends")
        if observe == "ends":
            observe = "always" if self._is_end(job, is_first) else "never"
        return replace(options, observe=observe)

    def _is_end(self, job: CaptureJob, is_first: bool) -> bool:
        """True for the largest and the smallest key of an owner, the first that is captured, and
        every one once an observation has shown a tensor that nothing names."""
        owner = self._catalog.of_owner(job.name, job.mode)
        extents = [*self._extents[job.name, job.mode], *map(_extent, owner.by_key)]
        programs = [entry.program or entry.staged for entry in owner.by_key.values()]
        return (
            owner.is_observed_always
            or _extent(job.key) in (min(extents), max(extents))
            or (is_first and not any(p is not None and p.is_observed for p in programs))
        )

    def _is_captured(self, job: CaptureJob) -> bool:
        """True for a key whose program exists already: it is not run again."""
        entry, is_new = self._entry(job), self.options.generation == "new"
        if not job.is_direct:
            return not is_new and bool(entry.inner) and all(p.is_valid for p in entry.inner)
        program = entry.staged if is_new else entry.program
        return program is not None and program.is_valid

    def _drop(self, scope: CaptureScope, before: int) -> None:
        self.library.drop(scope.programs[before:])
        del scope.programs[before:]

    def _require_match(self, job: CaptureJob, captured: Sequence[Program]) -> None:
        """Raise if the target called no wrapper of its mode: nothing was captured or found."""
        if captured or any(
            entry.mode is job.mode and entry.key == job.key and (entry.program or entry.staged)
            for entry in self._catalog
        ):
            return
        raise EmptyCaptureError(
            f"{job.name}, {job.mode.name}, {job.key}",
            expected=f"a call of a {job.mode.name} wrapper of this library",
            found="none",
            do="wrap the callable, or part of it, in a CUDAGraphWrapper of this mode, "
            "or give the job an owner",
        )

    def _inputs(self, job: CaptureJob, seed: int = 0) -> tuple[Sequence[Any], Mapping[str, Any]]:
        args, kwargs = job.make_inputs(seed) if self._takes_seed[job] else job.make_inputs()
        for resource in self.options.prepared:
            resource.prepare(job.key, None)
        return args, kwargs

    def _checker(self, job: CaptureJob) -> Callable[[Entry], None] | None:
        """How the first replay of a job is checked; None where nothing can tell."""
        # Wrappers that a target calls find no program that waits to take another one's place.
        if job in self.skipped or not (job.is_direct or self.options.generation != "new"):
            return None
        is_compared = self._takes_seed[job] and self.options.checks == "all"
        return job.check or (partial(self._compare, job) if is_compared else None)

    def _compare(self, job: CaptureJob, entry: Entry) -> None:
        """Compare the first replay with eager, on inputs other than those of the capture."""
        programs = self._new_programs(job)
        # Wrappers that a target calls look their programs up, as in steps.
        fn = self._callable_of(job) if job.is_direct else job.target
        replay, layers = programs[0] if job.is_direct else job.target, self.options.layers

        def run_eager(key: BatchDescriptor = job.key) -> Any:
            args, kwargs = self._inputs(job, seed=1)
            modes = self.library.device.modes_of_recording()
            with torch.no_grad(), ForwardContext(RuntimeMode.NONE, key, layers=layers), modes:
                return fn(*args, **kwargs)

        def run_replay() -> Any:
            args, kwargs = self._inputs(job, seed=1)
            with torch.no_grad(), ForwardContext(job.mode, job.key, layers=layers):
                return replay(*args, **kwargs)

        subject = f"{job.name}, {job.mode.name}, {job.key}"
        captured = own_copy(self._inputs(job, seed=0))
        checked = own_copy(self._inputs(job, seed=1))
        require_other_example(subject, captured, checked)
        host = self.hosts.get(id(fn))
        whole = None
        if job.key.num_ubatches > 1:
            with RunState(self.options.state).put_back(), restored(host):
                whole = own_copy(run_eager(replace(job.key, num_ubatches=1)))
        tensors, num_left = overwritten(self.options.may_overwrite)
        guard, generators = self.options.state, self.library.all_generators
        wait = wait_for(self.library, guard, tensors.values())
        state = RunState(guard, tensors, generators=generators, wait=wait)
        with state.put_back():
            verification = check_replay(
                mode=job.mode,
                key=job.key,
                run_eager=run_eager,
                run_replay=run_replay,
                state=state,
                runnable=fn,
                before_warmup=host,
                kept=[name for program in programs for name in program.unchecked],
                observer=self.library.emit,
                num_runs=NUM_ADVANCING_RUNS if host is not None and host.advances else 1,
            )
        if whole is not None:  # Eager runs of the key compute the same micro-batches.
            require_like_whole(subject, whole, verification.outputs)
        require_varied_for_memos(subject, captured, checked, host)
        is_compared = require_compared(subject, verification, num_left)
        for program in programs:
            program.is_compared = is_compared


def _wrapper_of(target: object) -> CUDAGraphWrapper | None:
    if isinstance(target, UBatchWrapper):
        return target.graphs
    return target if isinstance(target, CUDAGraphWrapper) else None


def _free_frames(error: BaseException) -> None:
    """Free the frames of a failure that is not raised: they hold tensors, hence pool memory."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


def _extent(key: BatchDescriptor) -> tuple[int, int, int, int]:
    return (key.num_tokens, key.num_reqs or key.num_tokens, key.num_ubatches, key.num_active_loras)
