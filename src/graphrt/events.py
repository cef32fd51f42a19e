"""Events: small values that counters, tables and logs observe, all in one stream.

Fields are numbers with units and members of closed sets, so that they can be metric labels.
Names and fields are public: a change goes into the changelog.
"""

from __future__ import annotations

from enum import StrEnum
from operator import add
from typing import NamedTuple, Protocol

from graphrt.batch import BatchDescriptor, Reason, RuntimeMode, UBatchReason


class CaptureBegan(NamedTuple):
    """A runner begins to warm up, capture and check keys.

    ``owner``: The name of the runner.
    ``num_keys``: Keys that it sets out to capture.
    """

    owner: str
    num_keys: int


class MemoryTaken(NamedTuple):
    """What captures took from the device, in bytes by part; negative where they gave some back.

    The driver tells of memory in pages of 2 MiB, and another process may take some meanwhile.

    ``pools``: Segments of the pools of graphs, the scratch of cuBLAS in recordings included.
    ``executables``: Executable graphs: what each took while it was recorded and instantiated.
    ``tensors``: Live tensors outside the pools: workspaces, attention plans, buffers.
    ``cached``: Kept by the allocator for later tensors, outside the pools.
    ``warmup``: Taken past the allocator by warm-ups: kernels and libraries, loaded at first use.
    ``capture``: The same by captures, beside the executables.
    ``check``: The same by first replays and their comparison with eager runs.
    ``rest``: By none of them.
    """

    pools: int = 0
    executables: int = 0
    tensors: int = 0
    cached: int = 0
    warmup: int = 0
    capture: int = 0
    check: int = 0
    rest: int = 0

    @property
    def total(self) -> int:
        """By how much free memory fell."""
        return sum(self)

    def plus(self, other: MemoryTaken) -> MemoryTaken:
        return MemoryTaken(*map(add, self, other))


class CaptureEnded(NamedTuple):
    """A runner is done with them, or stopped by an error.

    ``owner``: The name of the runner.
    ``num_keys``: Keys that it had set out to capture.
    ``num_served``: Keys of the runner that graphs serve now, those of earlier captures included.
    ``seconds``: Warm-ups, captures and checks together.
    ``memory``: What they took from the device.
    """

    owner: str
    num_keys: int
    num_served: int
    seconds: float
    memory: MemoryTaken = MemoryTaken()


class KeysChanged(NamedTuple):
    """What graphs of a runner serve has changed, or is known for the first time.

    ``owner``: The name of the runner.
    ``num_graphs``: Device graphs of its programs that are alive.
    ``missing``: Why keys are not served, and how many: one entry a reason.
    """

    owner: str
    num_graphs: int
    missing: tuple[tuple[Reason, int], ...]


class Captured(NamedTuple):
    """A program was captured and registered in the library.

    ``owner``: The name under which its programs are found.
    ``mode``: What it runs: FULL or PIECEWISE.
    ``key``: The key of its graph.
    ``num_graphs``: Device graphs.
    ``num_eager``: Eager segments between them.
    ``num_nodes``: Kernel nodes; None where the device cannot know.
    ``seconds``: The recording alone, without warm-up and check.
    ``pool_growth_bytes``: What the pool took from the device for it.
    ``exec_bytes``: Of the executable graphs.
    ``static_output_bytes``: Pool memory that receives what eager segments return.
    ``external_bytes``: Tensors outside the pool that it keeps alive; other programs share them.
    """

    owner: str
    mode: RuntimeMode
    key: BatchDescriptor
    num_graphs: int
    num_eager: int
    num_nodes: int | None
    seconds: float
    pool_growth_bytes: int
    exec_bytes: int
    static_output_bytes: int
    external_bytes: int


class CaptureFailed(NamedTuple):
    """A capture failed or did not fit the budget; the key runs eager.

    ``owner``: The name under which its programs are found.
    ``mode``: What it runs: FULL or PIECEWISE; NONE: a step was not cut into micro-batches rightly,
      and none is from then on.
    ``key``: The key of its graph.
    ``error``: The class of the error, by name.
    ``message``: Its text.
    """

    owner: str
    mode: RuntimeMode
    key: BatchDescriptor
    error: str
    message: str


class CacheMiss(StrEnum):
    """Why compiled code did not come from the cache.

    ``ABSENT``: There is no such entry.
    ``DISABLED``: The cache is switched off.
    ``CORRUPT``: The file is cut short, or its checksum is another; or Inductor failed in its own
      folder, and compiled in a new one.
    ``FOREIGN_SCHEMA``: Another version of graphrt wrote it, in another form.
    ``FOREIGN_TORCH``: Another version of torch, Python or Triton wrote it.
    ``FOREIGN_DEVICE``: It was compiled for another device.
    ``LOAD_FAILED``: It cannot be read, others own it or may write there, or torch does not take it.
    ``UNHASHABLE_PASS``: A pass or an option has no text that tells it from others.
    ``UNCACHEABLE``: The backend's code cannot be kept.
    """

    ABSENT = "absent"
    DISABLED = "disabled"
    CORRUPT = "corrupt"
    FOREIGN_SCHEMA = "foreign_schema"
    FOREIGN_TORCH = "foreign_torch"
    FOREIGN_DEVICE = "foreign_device"
    LOAD_FAILED = "load_failed"
    UNHASHABLE_PASS = "unhashable_pass"
    UNCACHEABLE = "uncacheable"


class Compiled(NamedTuple):
    """A piece of a traced model was compiled for some sizes, or loaded.

    ``piece``: Its name.
    ``start``: The smallest size, in tokens.
    ``end``: The largest.
    ``seconds``: What it took.
    ``missed``: Why it did not come from the cache; None if it did.
    """

    piece: str
    start: int
    end: int
    seconds: float
    missed: CacheMiss | None


class Verified(NamedTuple):
    """A replay was compared with eager execution of the same inputs.

    ``mode``: What it runs: FULL or PIECEWISE; NONE: a step that was cut into micro-batches eagerly
      was compared with the whole batch.
    ``key``: The key of its graph.
    ``equal``: True if they agreed: bit for bit, or within the tolerance.
    ``max_abs_difference``: The largest between elements; NaN if a NaN was on one side.
    """

    mode: RuntimeMode
    key: BatchDescriptor
    equal: bool
    max_abs_difference: float


class PaddingVerified(NamedTuple):
    """A padded replay was compared with the unpadded batch, and with other rows as padding.

    ``mode``: What it runs: FULL or PIECEWISE.
    ``key``: The key of its graph.
    ``equal``: True if the real rows agreed, and no bit of them changed with the padding.
    ``max_abs_difference``: From the unpadded batch, whose kernels may sum in another order.
    ``num_ties``: Choices that differ between elements equal within the tolerance.
    """

    mode: RuntimeMode
    key: BatchDescriptor
    equal: bool
    max_abs_difference: float
    num_ties: int


class Invalidated(NamedTuple):
    """Programs of ``owner`` became invalid because the named tensors they read have moved.

    ``num_programs``: How many; 0 where a resource set, for a step of one of several ranks, a value
      that no example had: that step ran eager.
    ``names``: Of what was replaced; empty if they were invalidated by hand.
    """

    owner: str
    num_programs: int
    names: tuple[str, ...]


class Withdrawn(NamedTuple):
    """A caller withdrew programs: their keys run eager until they are captured again.

    ``owner``: The name under which the programs were found.
    ``num_programs``: How many there were; 0 if none of the keys was captured yet.
    ``reason``: The caller's reason.
    """

    owner: str
    num_programs: int
    reason: str


class Retired(NamedTuple):
    """A generation was retired and its memory freed.

    ``generation``: Its number.
    ``num_programs``: Programs that went.
    ``freed_bytes``: Of its pool and executables.
    """

    generation: int
    num_programs: int
    freed_bytes: int


class Replayed(NamedTuple):
    """A step replayed a graph. ``host_us``: time the runtime took on the host.

    ``mode``: What ran: FULL or PIECEWISE.
    ``reason``: HIT or PADDED.
    ``num_tokens``: Real tokens, without padding.
    ``num_padded_tokens``: The captured size that served it.
    ``num_reqs``: Real requests; 0 where the batch has no such axis.
    ``uniform``: Whether it was a uniform decode batch.
    ``num_active_loras``: Distinct adapters of the batch.
    ``num_captured_loras``: The captured count that served it, at least as many.
    ``num_ubatches``: Micro-batches it was split into; 1 where it was not.
    ``ubatch_reason``: Why it was not split; None if it was, or where nothing splits steps.
    """

    mode: RuntimeMode
    reason: Reason
    num_tokens: int
    num_padded_tokens: int
    num_reqs: int
    uniform: bool
    host_us: float
    num_active_loras: int = 0
    num_captured_loras: int = 0
    num_ubatches: int = 1
    ubatch_reason: UBatchReason | None = None


class RanEager(NamedTuple):
    """A step ran eager; ``reason`` is a miss. ``host_us`` as in ``Replayed``.

    ``num_tokens``: Real tokens, without padding.
    ``num_reqs``: Real requests; 0 where the batch has no such axis.
    ``uniform``: Whether it was a uniform decode batch.
    ``num_active_loras``: Distinct adapters of the batch.
    ``num_ubatches``, ``ubatch_reason``: As in ``Replayed``.
    """

    reason: Reason
    num_tokens: int
    num_reqs: int
    uniform: bool
    host_us: float
    num_active_loras: int = 0
    num_ubatches: int = 1
    ubatch_reason: UBatchReason | None = None


Event = (
    CaptureBegan
    | CaptureEnded
    | KeysChanged
    | Captured
    | CaptureFailed
    | Compiled
    | Verified
    | PaddingVerified
    | Invalidated
    | Withdrawn
    | Retired
    | Replayed
    | RanEager
)


class Observer(Protocol):
    """Receives every event, in order, on the thread that caused it.

    It runs within the step: it must not block, and an exception in it reaches the step's caller.
    """

    def __call__(self, event: Event, /) -> None: ...
