"""The vocabulary of a step: its mode, the key of its graph, and the reason.

Everything here is a torch-free value, so that decisions can be tested, hashed and sent to another
rank without a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum, IntEnum
from typing import NamedTuple


class RuntimeMode(IntEnum):
    """What one step runs: a full graph, graphs and eager segments, or eager code. Ordered."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class CUDAGraphMode(Enum):
    """The policy a user asks for: (mode of uniform decode batches, mode of all other batches)."""

    NONE = (RuntimeMode.NONE, RuntimeMode.NONE)
    PIECEWISE = (RuntimeMode.PIECEWISE, RuntimeMode.PIECEWISE)
    FULL = (RuntimeMode.FULL, RuntimeMode.FULL)
    FULL_DECODE_ONLY = (RuntimeMode.FULL, RuntimeMode.NONE)
    FULL_AND_PIECEWISE = (RuntimeMode.FULL, RuntimeMode.PIECEWISE)

    @classmethod
    def parse(cls, text: str) -> CUDAGraphMode:
        """Return the mode named by ``text``, in any case. Raises ``KeyError`` for another name."""
        return cls[text.strip().upper()]

    def decode_mode(self) -> RuntimeMode:
        """What a uniform decode batch runs."""
        return self.value[0]

    def mixed_mode(self) -> RuntimeMode:
        """What every other batch runs."""
        return self.value[1]

    def separate_routine(self) -> bool:
        """True if decode and mixed batches run different modes, hence have different keys."""
        return self.value[0] is not self.value[1]

    def has_mode(self, mode: RuntimeMode) -> bool:
        """True if decode or mixed batches run ``mode``."""
        return mode in self.value

    def max_cudagraph_mode(self) -> RuntimeMode:
        """The greater of the two modes."""
        return max(self.value)

    def has_full_cudagraphs(self) -> bool:
        return self.has_mode(RuntimeMode.FULL)

    def has_piecewise_cudagraphs(self) -> bool:
        return self.has_mode(RuntimeMode.PIECEWISE)

    def requires_piecewise_compilation(self) -> bool:
        """True if the model must be cut, by break points or by the compiler."""
        return self.has_piecewise_cudagraphs()

    def without_piecewise(self) -> CUDAGraphMode:
        """The same policy for a model that cannot be cut: PIECEWISE becomes NONE."""
        if self is CUDAGraphMode.PIECEWISE:
            return CUDAGraphMode.NONE
        if self is CUDAGraphMode.FULL_AND_PIECEWISE:
            return CUDAGraphMode.FULL_DECODE_ONLY
        return self


class Reason(IntEnum):
    """Why a step replays a graph (HIT, PADDED) or runs eager (every other reason, a miss).

    Values stay below 256 (they travel between ranks in one byte) and never change meaning.
    """

    HIT = 0
    """A graph of exactly this size."""
    PADDED = 1
    """A graph of a larger size, or of a larger LoRA count."""
    ABOVE_MAX = 2
    """Larger than the largest captured size for this kind of batch."""
    MODE_NONE = 3
    """The policy gives this kind of batch no graph."""
    EXCLUDED = 4
    """The caller excluded every mode that could have served it."""
    NO_KEY = 5
    """No key of the plan describes this batch."""
    LORA_NOT_CAPTURED = 6
    """The plan has no graph for this number of adapters."""
    NOT_CAPTURED_YET = 7
    """The key is in the plan; its graph is not captured yet."""
    CAPTURE_FAILED = 8
    """The key's capture failed, or its program failed verification."""
    INVALIDATED = 9
    """A tensor the program reads has moved since its capture."""
    RANKS_DISAGREE = 10
    """Data-parallel ranks agreed on a lower mode."""
    UBATCH_ABORTED = 11
    """A step split into micro-batches was aborted, and no unsplit graph exists for it."""

    @property
    def is_miss(self) -> bool:
        """True if the step runs eager for this reason."""
        return self > Reason.PADDED


@dataclass(frozen=True, slots=True, repr=False)
class BatchDescriptor:
    """The key of a graph: every fact about a batch that changes what its graph does.

    ``num_reqs`` is None where the graph does not depend on the number of requests (piecewise
    keys). ``variant`` is free for the caller's own facts; it must be hashable. The hash is computed
    once.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0
    num_ubatches: int = 1
    variant: object = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._facts()))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[BatchDescriptor], tuple[object, ...]]:
        # Hashes of None and of strings differ between processes: an unpickled key computes its own.
        return BatchDescriptor, self._facts()

    def _facts(self) -> tuple[object, ...]:
        return (
            self.num_tokens,
            self.num_reqs,
            self.uniform,
            self.has_lora,
            self.num_active_loras,
            self.num_ubatches,
            self.variant,
        )

    def __repr__(self) -> str:
        """Only what differs from the defaults, because keys are printed in every message."""
        shown = (
            f"{item.name}={getattr(self, item.name)!r}"
            for item in fields(self)
            if item.compare
            and (item.name == "num_tokens" or getattr(self, item.name) != item.default)
        )
        return f"BatchDescriptor({', '.join(shown)})"

    def relax_for_mixed_batch(self) -> BatchDescriptor:
        """The key of graphs that do not depend on requests: no ``num_reqs``, not uniform."""
        return replace(self, num_reqs=None, uniform=False)


class Decision(NamedTuple):
    """What one step does, with which graph, and why."""

    mode: RuntimeMode
    descriptor: BatchDescriptor
    """The padded key of the graph to replay; the unpadded batch when ``mode`` is NONE."""
    reason: Reason
