"""What a runner says of itself: what is captured, what is not and why, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from graphrt.batch import BatchDescriptor, Decision, Reason, RuntimeMode
from graphrt.dispatch import BucketKey
from graphrt.errors import GraphrtError, text_of, with_notes
from graphrt.events import MemoryTaken
from graphrt.externals import Unwatched
from graphrt.graphs import Entry, GraphLibrary, GraphMemory, Key, Program, TimedPhase
from graphrt.report import Metrics, StepCounts, TextRow, TextTable, size_text, time_text
from graphrt.verify import advice, explain

AxisSizes = Callable[[BatchDescriptor], Mapping[str, int]]


class CapturedGraph(NamedTuple):
    """One program of a report: what it is, what it cost, what it did.

    ``mode``: FULL or PIECEWISE.
    ``key``: What is captured.
    ``sizes``: Axis -> padded size.
    ``state``: ``captured``, ``ready``, ``invalid`` or ``retired``; see ``Program.state``.
    ``is_compared``: True once a replay of it equalled eager execution.
    ``num_graphs``: Device graphs.
    ``num_eager``: Eager segments between them.
    ``seconds``: Of all captures of the key so far: the three that follow together.
    ``warmup_seconds``: Of warm-ups.
    ``capture_seconds``: Of captures.
    ``check_seconds``: Of first replays, compared with eager execution.
    ``memory``: What the program costs, in bytes.
    ``hits``: Runs that it, or an earlier program of its key, served.
    ``padding_percent``: Share of padding in the tokens of these runs. None: not counted, because
      the observer is no ``StepMetrics``, or counts what other keys and runners did as well.
    ``is_observed``: True if the capture learned what its graphs touch outside the pool. False:
      nothing has checked that this program writes only what is guarded or declared
      (``observe="always"`` has).
    ``padding``: How padded batches were compared with eager runs of the batch as it is; empty if
      never.
    """

    mode: RuntimeMode
    key: BatchDescriptor
    sizes: Mapping[str, int]
    state: str
    is_compared: bool
    num_graphs: int
    num_eager: int
    seconds: float
    warmup_seconds: float
    capture_seconds: float
    check_seconds: float
    memory: GraphMemory
    hits: int
    padding_percent: float | None
    is_observed: bool
    padding: str


@dataclass(slots=True)
class Misses:
    """Runs that were eager for one reason, and the range of their sizes, axis by axis.

    ``runs``: How many.
    ``smallest``: Axis -> smallest size.
    ``largest``: Axis -> largest size.
    """

    runs: int = 0
    smallest: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)

    def add(self, sizes: Mapping[str, int]) -> None:
        self.runs += 1
        for axis, size in sizes.items():
            self.smallest[axis] = min(size, self.smallest.get(axis, size))
            self.largest[axis] = max(size, self.largest.get(axis, size))

    def copy(self) -> Misses:
        return Misses(self.runs, dict(self.smallest), dict(self.largest))

    def ranges(self) -> str:
        """``17 to 40 tokens, 2 requests``."""
        return ", ".join(
            f"{low} {axis}"
            if low == self.largest[axis]
            else f"{low} to {self.largest[axis]} {axis}"
            for axis, low in self.smallest.items()
        )

    def __str__(self) -> str:
        return f"{self.runs} eager for this reason, of {self.ranges()}"


class DeviceMemory(NamedTuple):
    """Where the device's memory was at one moment, in bytes.

    ``free``: As the driver sees it: other processes take of it, too.
    ``reserved``: Held by the allocator, the pools of graphs included.
    ``pools``: Pools of the library.
    ``executables``: Executable graphs of the library, by what free memory fell when each was made.
    ``tensors``: Held by tensors outside the pools.
    """

    free: int
    reserved: int
    pools: int
    executables: int
    tensors: int

    @classmethod
    def read(cls, library: GraphLibrary) -> Self:
        reading = library.device.memory()
        each = [generation.pool for generation in library.generations]
        pools = sum(pool.bytes() for pool in each)
        live = sum(block.num_bytes for pool in each for block in pool.live_blocks())
        return cls(
            reading.free_bytes,
            reading.reserved_bytes,
            pools,
            library.charged_bytes - pools,
            reading.tensor_bytes - live,
        )


class CaptureMemory:
    """What one capture takes from the device, by part: told as each of its phases ends."""

    def __init__(self, library: GraphLibrary) -> None:
        self._library = library
        self.before = DeviceMemory.read(library)
        self._last = self._allocated_or_free()
        self._past_allocator = dict.fromkeys(("warmup", "capture", "check"), 0)

    def ended(self, phase: TimedPhase) -> None:
        """What the driver gave away in this phase, and the allocator did not take, is its own."""
        last, self._last = self._last, self._allocated_or_free()
        self._past_allocator[phase] += last - self._last

    def taken(self) -> tuple[DeviceMemory, MemoryTaken]:
        """Where memory is now, and what was taken since the capture began."""
        before, after = self.before, DeviceMemory.read(self._library)
        pools = after.pools - before.pools
        executables = after.executables - before.executables
        tensors = after.tensors - before.tensors
        parts = MemoryTaken(
            pools=pools,
            executables=executables,
            tensors=tensors,
            cached=after.reserved - before.reserved - pools - tensors,
            warmup=self._past_allocator["warmup"],
            capture=self._past_allocator["capture"] - executables,
            check=self._past_allocator["check"],
        )
        return after, parts._replace(rest=before.free - after.free - parts.total)

    def _allocated_or_free(self) -> int:
        reading = self._library.device.memory()
        return reading.free_bytes + reading.reserved_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerReport:
    """What is captured, what is not and why, and what it costs. ``print`` shows it as a table.

    ``device``: Its name.
    ``graphs``: One entry for each key with a program.
    ``missing``: Keys that no graph serves now.
    ``failures``: What captures of keys failed with; of mode NONE, a step that was cut into
      micro-batches eagerly.
    ``misses``: Runs that were eager, by reason.
    ``largest``: Axis -> its largest padded size among the keys.
    ``capture_seconds``: Everything that captures took together; see ``other_seconds``.
    ``missing_seconds``: The part of keys that have no program: their captures failed.
    ``graph_bytes``: Pools, static outputs in them, and executables of the library.
    ``held_bytes``: Tensors outside the pools that the programs keep alive (weights, buffers), each
      once.
    ``unwatched``: What the callable reads and no step compares, once for all graphs; see
      ``Unwatched``.
    ``memory``: Before the first capture, and after the last one that ended without an error.
    ``memory_taken``: What captures that ended without one took from the device, by part.
    """

    device: str
    graphs: tuple[CapturedGraph, ...]
    missing: Mapping[Key, Reason]
    failures: Mapping[Key, str]
    misses: Mapping[Reason, Misses]
    largest: Mapping[str, int]
    capture_seconds: float
    missing_seconds: float
    graph_bytes: int
    held_bytes: int
    unwatched: tuple[Unwatched, ...]
    memory: tuple[DeviceMemory, DeviceMemory] | None
    memory_taken: MemoryTaken

    @property
    def other_seconds(self) -> float:
        """The part of no key: the scope and its collection, reserving, looking at what graphs read,
        dispatch tables."""
        return (
            self.capture_seconds - self.missing_seconds - sum(item.seconds for item in self.graphs)
        )

    def __str__(self) -> str:
        return "\n\n".join(_parts(self))


Subject = Decision | BatchDescriptor | Key | Program | RunnerReport
"""What ``explain`` takes."""


def captured_graphs(
    entries: Iterable[Entry], axis_sizes: AxisSizes, metrics: Metrics | None
) -> tuple[CapturedGraph, ...]:
    """One row for each entry that has a program, valid or not."""
    return tuple(
        CapturedGraph(
            mode=entry.mode,
            key=entry.key,
            sizes=axis_sizes(entry.key),
            state=entry.program.state,
            is_compared=entry.program.is_compared,
            num_graphs=entry.program.num_graphs,
            num_eager=entry.program.num_eager,
            seconds=entry.seconds.total,
            warmup_seconds=entry.seconds.warmup,
            capture_seconds=entry.seconds.capture,
            check_seconds=entry.seconds.check,
            memory=entry.program.memory,
            hits=entry.hits,
            padding_percent=_padding_percent(entry, metrics),
            is_observed=entry.program.is_observed,
            padding=entry.padding,
        )
        for entry in entries
        if entry.program is not None
    )


def _padding_percent(entry: Entry, metrics: Metrics | None) -> float | None:
    """Of the steps that an observer counted, where these are the runs of this key alone."""
    if metrics is None or not entry.hits:
        return None
    counts = StepCounts()
    for kind, counted in metrics.steps.items():
        kind_of_key = (entry.mode, entry.key.num_tokens, entry.key.uniform)
        if (kind.mode, kind.num_padded_tokens, kind.uniform) == kind_of_key:
            counts = counts.plus(counted)
    return counts.padding_percent if counts.steps == entry.hits else None


def above_largest(sizes: Mapping[str, int], largest: Mapping[str, int]) -> Iterator[str]:
    """How far a batch is above the largest size, for each axis on which it is."""
    for axis, size in sizes.items():
        most = largest.get(axis, size)
        if size > most:
            yield f"{size} {axis} are {size - most} above the largest captured size, {most}"


def replaced(entry: Entry) -> str:
    """What an invalid program of a key reads and was replaced."""
    moved = entry.program.moved if entry.program is not None else None
    return ", ".join(moved or ()) or "nothing: it was invalidated by hand"


def failure_text(error: BaseException) -> str:
    """What a capture or its check failed with. An error of ours begins with its subject."""
    text = with_notes(error)
    return text if isinstance(error, GraphrtError) else f"{type(error).__name__}: {text}"


def explain_entry(entry: Entry) -> Iterator[str]:
    """What is known of one key."""
    name = f"{entry.mode.name} {entry.key}"
    program = entry.program
    if entry.reason is Reason.HIT and program is not None:
        compared = "compared with eager execution" if program.is_compared else "never compared"
        yield f"{name}: a graph serves it, {compared}; it served {_runs(entry.hits)}."
        if entry.padding:
            yield f"  Its padding: {entry.padding}."
    else:
        yield f"{name}: no graph serves it ({entry.reason.name}): {entry.reason.meaning}."
    if entry.error is not None:
        yield f"  It failed: {type(entry.error).__name__}: {text_of(entry.error)}"
    if entry.reason is Reason.INVALIDATED:
        yield f"  Replaced since the capture: {replaced(entry)}."
    if entry.misses:
        yield f"  {_runs(entry.misses)} wanted it before it was captured."
    if entry.seconds.total:
        parts = ("warmup", "capture", "check")
        told = ", ".join(f"{part} {_time(getattr(entry.seconds, part))}" for part in parts)
        yield f"  Time spent on it: {told}."


@explain.register
def _(report: RunnerReport) -> str:
    """Its tables, and what would change what they say."""
    total = len({(item.mode, item.key) for item in report.graphs} | report.missing.keys())
    served = total - len(report.missing)
    told = [f"Graphs serve {served} of {total} keys ({report.device} device).", str(report)]
    if Reason.ABOVE_MAX in report.misses:
        told += above_largest(report.misses[Reason.ABOVE_MAX].largest, report.largest)
    for reason in dict.fromkeys((*report.missing.values(), *report.misses)):
        if advice(reason):
            told.append(f"To change {reason.name}: {advice(reason)}.")
    return "\n".join(told)


def _parts(report: RunnerReport) -> Iterator[str]:
    yield str(_graph_table(report))
    if report.missing:
        rows = (
            TextRow(f"{mode.name} {_kind(key)}".rstrip(), (_told(key), reason.name, reason.meaning))
            for (mode, key), reason in report.missing.items()
        )
        columns = ("key", "reason", "meaning")
        yield str(TextTable("Not served by a graph", columns, tuple(rows), is_numeric=False))
    for (mode, key), message in report.failures.items():
        yield f"{mode.name} {key} failed:\n{message}"
    if report.misses:
        found = report.misses.items()
        rows = (
            TextRow(reason.name, (f"{item.runs:,}", item.ranges(), reason.meaning))
            for reason, item in found
        )
        columns = ("runs", "sizes", "meaning")
        note = f"Largest captured sizes: {_sizes(report.largest)}."
        yield str(TextTable("Ran eager", columns, tuple(rows), note, is_numeric=False))
    if report.unwatched:
        told = (
            f"Not watched: {len(report.unwatched)} of what the callable reads. After a change: "
            "withdraw(keys, reason), or capture() again."
        )
        yield "\n".join([told, *(f"  {item}" for item in report.unwatched)])
    if report.memory is not None:
        yield str(_memory_table(*report.memory, report))


def _graph_table(report: RunnerReport) -> TextTable:
    axes = tuple(report.largest)
    rows = [
        TextRow(
            f"{item.mode.name} {_kind(item.key)}".rstrip(),
            (
                *(str(item.sizes.get(axis, "")) for axis in axes),
                _state(item),
                *map(_time, (item.warmup_seconds, item.capture_seconds, item.check_seconds)),
                _time(item.seconds),
                size_text(item.memory.pool_growth_bytes + item.memory.exec_bytes),
                f"{item.hits:,}",
                _padding(item),
            ),
        )
        for item in report.graphs
    ]
    blank = ("",) * (len(axes) + 4)
    if report.missing_seconds:
        rows.append(TextRow("of keys without a graph", (*blank, _time(report.missing_seconds))))
    if report.capture_seconds:
        rows.append(TextRow("of no key", (*blank, _time(report.other_seconds))))
    hits = sum(item.hits for item in report.graphs)
    end = (_time(report.capture_seconds), size_text(report.graph_bytes), f"{hits:,}")
    rows.append(TextRow("all", (*blank, *end)))
    costs = ("state", "warm-up", "capture", "check", "together", "memory", "hits", "padding")
    columns = (*axes, *costs)
    width = len(columns)
    return TextTable(
        f"Graphs on the {report.device} device",
        columns,
        tuple(TextRow(row.name, (*row.cells, *("",) * (width - len(row.cells)))) for row in rows),
        "Time of no key: opening scopes, collecting garbage, reserving, looking at what graphs "
        "read. Memory: what the pool grew by, and the executable. Hits: runs it served; padding: "
        "share of their tokens, counted by a StepMetrics as observer. "
        f"Kept alive beside that: {size_text(report.held_bytes)} of weights and other tensors.",
    )


_PARTS = (
    "pools of graphs",
    "executable graphs",
    "tensors outside the pools",
    "kept by the allocator",
    "kernels and libraries, in warm-ups",
    "kernels and libraries, in captures",
    "kernels and libraries, in checks",
    "the rest: other processes, for one",
)
"""What the table calls the fields of ``MemoryTaken``."""


def _memory_table(before: DeviceMemory, after: DeviceMemory, report: RunnerReport) -> TextTable:
    taken = report.memory_taken
    rows = (
        TextRow("free before the first capture", (size_text(before.free),)),
        TextRow("free after the last", (size_text(after.free),)),
        TextRow("taken by captures", (_change(taken.total),)),
        *(
            TextRow(name, (_change(num_bytes),), is_part=True)
            for name, num_bytes in zip(_PARTS, taken, strict=True)
            if num_bytes
        ),
    )
    return TextTable(
        f"Memory of the {report.device} device",
        ("",),
        rows,
        "Kernels and libraries: what their first use takes past the allocator, once in a process."
        if any((taken.warmup, taken.capture, taken.check))
        else "",
    )


def _padding(item: CapturedGraph) -> str:
    if item.padding_percent is None:
        return "not counted" if item.hits else "-"
    return f"{item.padding_percent:.1f} %"


def _state(item: CapturedGraph) -> str:
    if item.state != "ready":
        return item.state
    return "compared" if item.is_compared else "not compared"


def _kind(key: BatchDescriptor) -> str:
    """What tells keys of equal sizes apart."""
    variant = key.variant.variant if isinstance(key.variant, BucketKey) else key.variant
    found = ["uniform"] * key.uniform
    found += [f"LoRA {key.num_active_loras}"] * key.has_lora
    found += [f"{key.num_ubatches} micro-batches"] * (key.num_ubatches > 1)
    found += [f"{variant}"] * (variant is not None)
    return ", ".join(found)


def _told(key: BatchDescriptor) -> str:
    if isinstance(key.variant, BucketKey):
        return " x ".join(map(str, key.variant.sizes))
    return f"{key.num_tokens} tokens"


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{size} {axis}" for axis, size in sizes.items())


def _time(seconds: float) -> str:
    return time_text(1e6 * seconds) if seconds else "-"


def _change(num_bytes: int) -> str:
    return f"-{size_text(-num_bytes)}" if num_bytes < 0 else size_text(num_bytes)


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number:,} runs"
