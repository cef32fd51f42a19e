"""What resolution returns: the immutable plan, and what it changed of the user's wishes.

A new mode, another limit, other sizes: another plan. Nothing in a plan is ever "decided later".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from graphrt.batch import BatchDescriptor, CUDAGraphMode, RuntimeMode
from graphrt.config.wishes import CompilationLevel, RuntimeConfig


class Adjustment(NamedTuple):
    """One wish that could not be honoured as it was asked."""

    field: str
    asked: object
    effective: object
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which graphs exist, and how a batch is padded to one of them.

    Units: sizes are tokens. Sizes and counts ascend. Equal inputs of ``resolve`` give equal plans.
    """

    cudagraph_mode: CUDAGraphMode
    level: CompilationLevel
    query_len: int
    """q: tokens of one request in a uniform batch."""
    max_num_seqs: int
    max_num_batched_tokens: int
    capture_sizes: tuple[int, ...]
    """Sizes of mixed batches (of every batch, where decode has no routine of its own)."""
    decode_capture_sizes: tuple[int, ...]
    """Sizes of uniform batches, multiples of q; empty unless decode has its own FULL routine."""
    max_capture_size: int
    """The largest of ``capture_sizes``; 0 if there is none."""
    padding_table: tuple[int, ...]
    """``padding_table[n]``: the smallest capture size >= n, for n in 0..max_capture_size."""
    decode_padding_table: tuple[int, ...]
    """The same of ``decode_capture_sizes``."""
    max_loras: int
    lora_counts: tuple[int, ...]
    """Adapter counts that have graphs."""
    lora_padding_table: tuple[int, ...]
    """``lora_padding_table[n]``: the smallest captured count >= n, for n in 0..max_loras."""
    compile_sizes: tuple[int, ...]
    capture_order: tuple[tuple[RuntimeMode, BatchDescriptor], ...]
    """Every key. PIECEWISE before FULL; within a mode most tokens first, then most adapters."""

    @property
    def keys(self) -> Mapping[RuntimeMode, tuple[BatchDescriptor, ...]]:
        """The keys of PIECEWISE and of FULL, each in capture order."""
        return {
            wanted: tuple(key for mode, key in self.capture_order if mode is wanted)
            for wanted in (RuntimeMode.PIECEWISE, RuntimeMode.FULL)
        }


@dataclass(frozen=True, slots=True)
class Resolved:
    """The plan, every change to the user's wishes in order, and the config with them applied.

    Resolving ``config`` again, with the same facts, gives the same plan and no adjustment.
    """

    plan: Plan
    adjustments: tuple[Adjustment, ...]
    config: RuntimeConfig
