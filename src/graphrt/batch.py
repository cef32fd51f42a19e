"""The vocabulary of a step: its mode, the key of its graph, and the reason.

Everything here is a torch-free value, so that decisions can be tested, hashed and sent to another
rank without a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum, IntEnum
from numbers import Integral
from operator import attrgetter
from typing import NamedTuple

from graphrt.errors import BatchError, shown

TOKENS, REQUESTS = "tokens", "requests"
"""The two axes of an engine's batch."""


class _NamedInt(IntEnum):
    """An integer that prints as its name; ``f"{member:d}"`` and JSON have the number."""

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if spec[-1:] == "d" else format(self.name, spec)


class RuntimeMode(_NamedInt):
    """What one step runs: a full graph, graphs and eager segments, or eager code. Ordered.

    ``NONE``: Eager.
    ``PIECEWISE``: Graphs, with eager segments between them.
    ``FULL``: One graph.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class CUDAGraphMode(Enum):
    """The policy a user asks for: (mode of uniform decode batches, mode of all other batches).

    ``NONE``: Every batch eager.
    ``PIECEWISE``: Every batch in graphs with eager segments between.
    ``FULL``: Every batch in one graph.
    ``FULL_DECODE_ONLY``: Uniform decode batches in one graph, others eager.
    ``FULL_AND_PIECEWISE``: Uniform decode batches in one graph, others in graphs with eager
      segments between.
    """

    NONE = (RuntimeMode.NONE, RuntimeMode.NONE)
    PIECEWISE = (RuntimeMode.PIECEWISE, RuntimeMode.PIECEWISE)
    FULL = (RuntimeMode.FULL, RuntimeMode.FULL)
    FULL_DECODE_ONLY = (RuntimeMode.FULL, RuntimeMode.NONE)
    FULL_AND_PIECEWISE = (RuntimeMode.FULL, RuntimeMode.PIECEWISE)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, text: str) -> CUDAGraphMode:
        """Return the mode named by ``text``, in any case. Raises ``KeyError`` for another name."""
        if not isinstance(text, str):
            raise KeyError(text)
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
        none, cut = RuntimeMode.NONE, RuntimeMode.PIECEWISE
        decode, mixed = (none if mode is cut else mode for mode in self.value)
        return CUDAGraphMode((decode, mixed))


class Reason(_NamedInt):
    """Why a step replays a graph (HIT, PADDED) or runs eager (every other reason, a miss).

    Values stay below 256 (they travel between ranks in one byte) and never change meaning.

    ``HIT``: A graph of exactly this size.
    ``PADDED``: A graph of a larger size, or of a larger LoRA count.
    ``ABOVE_MAX``: Larger than the largest captured size for this kind of batch.
    ``MODE_NONE``: The policy gives this kind of batch no graph.
    ``EXCLUDED``: The caller excluded every mode that could have served it.
    ``NO_KEY``: No key of the plan describes this batch.
    ``LORA_NOT_CAPTURED``: The plan has no graph for this number of adapters.
    ``NOT_CAPTURED_YET``: The key is in the plan; its graph is not captured yet.
    ``CAPTURE_FAILED``: The key's capture failed, or its program failed verification.
    ``INVALIDATED``: A tensor the program reads has moved since its capture.
    ``RANKS_DISAGREE``: Data-parallel ranks agreed on a lower mode.
    ``UBATCH_ABORTED``: A step split into micro-batches was aborted, and no unsplit graph exists
      for it.
    """

    HIT = 0
    PADDED = 1
    ABOVE_MAX = 2
    MODE_NONE = 3
    EXCLUDED = 4
    NO_KEY = 5
    LORA_NOT_CAPTURED = 6
    NOT_CAPTURED_YET = 7
    CAPTURE_FAILED = 8
    INVALIDATED = 9
    RANKS_DISAGREE = 10
    UBATCH_ABORTED = 11

    @property
    def is_miss(self) -> bool:
        """True if the step runs eager for this reason."""
        return self > Reason.PADDED

    @property
    def meaning(self) -> str:
        """The reason in words, for readers of a report."""
        return _MEANINGS[self]


_MEANINGS = {
    Reason.HIT: "a graph of exactly this size exists",
    Reason.PADDED: "the batch is padded to the next size, or LoRA count, that has a graph",
    Reason.ABOVE_MAX: "the batch is larger than the largest captured size",
    Reason.MODE_NONE: "the policy gives this kind of batch no graph",
    Reason.EXCLUDED: "the caller excluded every mode that could have served it",
    Reason.NO_KEY: "no key of the plan describes this batch",
    Reason.LORA_NOT_CAPTURED: "the plan has no graph for this number of adapters",
    Reason.NOT_CAPTURED_YET: "its key is planned, but no graph of it is captured yet",
    Reason.CAPTURE_FAILED: "the capture or the verification of its key failed",
    Reason.INVALIDATED: "something that its graph reads was replaced since",
    Reason.RANKS_DISAGREE: "the data-parallel ranks settled on a lesser mode",
    Reason.UBATCH_ABORTED: "its split was called off, and no unsplit graph exists",
}


class UBatchReason(IntEnum):
    """Why a step was not split into micro-batches. Not splitting is a decision, not a failure.

    Values are 1 to 255 (they travel between ranks in one byte, where 0 means "split") and never
    change meaning. Where several hold, the largest is told.

    ``DISABLED``: The plan splits nothing.
    ``BELOW_THRESHOLD``: Too few tokens for a split to pay.
    ``TOO_FEW_TOKENS``: Fewer tokens (uniform batches: requests) than micro-batches.
    ``LAST_SLICE_EMPTY``: A rank has so few tokens that its last micro-batch would be padding alone.
    ``REQUEST_DEPENDENCY``: A request reads what another request of the same batch writes.
    ``NO_FULL_GRAPH``: No split graph fits, and the step is too small, or not allowed, to be split
      eagerly.
    ``NOT_PROFITABLE``: Measured: the split graph is not faster.
    ``PEER_IDLE``: A rank has no work.
    ``ENGINE_DECLINED``: The engine asked for an unsplit step.
    ``SPLIT_FAILED``: A step that was cut eagerly was compared with the whole batch, and its rows
      differed, or it wrote what nobody can put back: the report's ``failures`` say which.
    """

    DISABLED = 1
    BELOW_THRESHOLD = 2
    TOO_FEW_TOKENS = 3
    LAST_SLICE_EMPTY = 4
    REQUEST_DEPENDENCY = 5
    NO_FULL_GRAPH = 6
    NOT_PROFITABLE = 7
    PEER_IDLE = 8
    ENGINE_DECLINED = 9
    SPLIT_FAILED = 10


def ubatch_stride(num_tokens: int, query_len: int, num_ubatches: int) -> int:
    """Tokens of each micro-batch but the last, which takes the rest of ``num_tokens`` (padded).

    A multiple of ``query_len``, so that uniform requests stay whole; 0: too few tokens to split.
    """
    return num_tokens // query_len // num_ubatches * query_len


def last_ubatch_is_empty(
    num_tokens: int, num_padded_tokens: int, query_len: int, num_ubatches: int
) -> bool:
    """True if the last micro-batch would hold none of the ``num_tokens`` real tokens."""
    stride = ubatch_stride(num_padded_tokens, query_len, num_ubatches)
    return stride * (num_ubatches - 1) >= num_tokens


@dataclass(frozen=True, slots=True, repr=False)
class BatchDescriptor:
    """The key of a graph: every fact about a batch that changes what its graph does.

    ``num_reqs`` is None where the graph does not depend on the number of requests (piecewise
    keys). ``variant`` is free for the caller's own facts; it must be hashable. The hash is computed
    once.

    Errors: ``BatchError`` for what is not hashable, and for counts that are no integers.

    ``num_tokens``: Tokens, padded in a key.
    ``uniform``: True for a decode batch in which every request brings equally many tokens.
    ``has_lora``: True if any adapter is active.
    ``num_active_loras``: Distinct adapters, rounded up in a key.
    ``num_ubatches``: Micro-batches that the step is split into; 1 where it is not.
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
        if not (
            type(self.num_tokens) is int
            and (self.num_reqs is None or type(self.num_reqs) is int)
            and type(self.num_active_loras) is int
            and type(self.num_ubatches) is int
        ):
            self._check_counts()
        try:
            object.__setattr__(self, "_hash", hash(_facts_of(self)))
        except Exception as error:  # A ``__hash__`` may raise anything.
            raise BatchError(
                "BatchDescriptor",
                expected="a variant that can be hashed",
                found=shown(self.variant),
                do="pass a tuple in place of a list, and a frozen value in place of an object",
            ) from error

    def _check_counts(self) -> None:
        for name in ("num_tokens", "num_reqs", "num_active_loras", "num_ubatches"):
            count = getattr(self, name)
            if not isinstance(count, Integral) and (count is not None or name != "num_reqs"):
                raise BatchError(
                    f"BatchDescriptor: {name}",
                    expected="an integer",
                    found=shown(count),
                    do="pass the size of the batch",
                )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[BatchDescriptor], tuple[object, ...]]:
        # Hashes of None and of strings differ between processes: an unpickled key computes its own.
        return BatchDescriptor, _facts_of(self)

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


_facts_of = attrgetter(*(item.name for item in fields(BatchDescriptor) if item.init))


class Decision(NamedTuple):
    """What one step does, with which graph, and why.

    ``mode``: What runs.
    ``descriptor``: The padded key of the graph to replay; the unpadded batch when ``mode`` is
      NONE.
    ``reason``: Why.
    """

    mode: RuntimeMode
    descriptor: BatchDescriptor
    reason: Reason


def is_key(pair: tuple[object, ...]) -> bool:
    """True for a mode and a descriptor."""
    kinds = (RuntimeMode, BatchDescriptor)
    return len(pair) == 2 and all(map(isinstance, pair, kinds))
