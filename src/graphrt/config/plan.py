"""The immutable plan: which keys exist, at which sizes, and how a batch is padded to one of them.

Unit of sizes: tokens. In formulas S = max_num_seqs, B = max_num_batched_tokens, q = tokens of one
request in a uniform batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from graphrt.batch import BatchDescriptor, CUDAGraphMode, RuntimeMode
from graphrt.config.compilation import (
    CompilationConfig,
    CompilationLevel,
    PassConfig,
    enabled_passes,
    graph_values,
    hash_of,
    unhashable,
)
from graphrt.config.options import RuntimeConfig, UBatchConfig

Sizes = tuple[int, ...]
"""In tokens, or counts of adapters; ascending."""

# Checked before a table is built.
MOST_KEYS = 2**16
MOST_DECISIONS = 2**22


class Adjustment(NamedTuple):
    """One option that could not be used as it was asked.

    ``field``: The option's name; "decode_capture_sizes" for what follows from the options of
      sizes.
    ``asked``: The value that was asked for.
    ``effective``: The value that counts.
    ``reason``: In words.
    """

    field: str
    asked: object
    effective: object
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which graphs exist, and how a batch is padded to one of them.

    Units: sizes are tokens. Sizes and counts ascend. Equal inputs of ``resolve`` give equal plans.
    A plan never changes: another mode, limit or size is another plan.

    ``cudagraph_mode``: The policy that counts.
    ``level``: Of compilation.
    ``query_len``: q: tokens of one request in a uniform batch.
    ``max_num_seqs``: Most requests in a batch.
    ``max_num_batched_tokens``: Most tokens in a batch.
    ``capture_sizes``: Sizes of mixed batches (of every batch, where decode has no routine of its
      own).
    ``decode_capture_sizes``: Sizes of uniform batches, multiples of q; empty unless decode has its
      own FULL routine.
    ``max_capture_size``: The largest of ``capture_sizes``; 0 if there is none.
    ``padding_table``: ``padding_table[n]``: the smallest capture size >= n, for n in
      0..max_capture_size.
    ``max_loras``: Most distinct adapters in a batch.
    ``lora_counts``: Adapter counts that have graphs.
    ``lora_padding_table``: ``lora_padding_table[n]``: the smallest captured count >= n, for n in
      0..max_loras.
    ``compile_sizes``: Sizes that are compiled for, in tokens.
    ``splitting_ops``: Where level 3 cuts the traced graph; empty below it.
    ``capture_order``: Every key. PIECEWISE before FULL; within a mode most tokens first, then most
      adapters, then the split key before the unsplit one.
    ``ubatch``: How many micro-batches a split step has, and which batches are split.
    """

    cudagraph_mode: CUDAGraphMode
    level: CompilationLevel
    query_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    capture_sizes: tuple[int, ...]
    decode_capture_sizes: tuple[int, ...]
    max_capture_size: int
    padding_table: tuple[int, ...]
    max_loras: int
    lora_counts: tuple[int, ...]
    lora_padding_table: tuple[int, ...]
    compile_sizes: tuple[int, ...]
    splitting_ops: tuple[str, ...]
    capture_order: tuple[tuple[RuntimeMode, BatchDescriptor], ...]
    ubatch: UBatchConfig

    @property
    def keys(self) -> Mapping[RuntimeMode, tuple[BatchDescriptor, ...]]:
        """The keys of PIECEWISE and of FULL, each in capture order."""
        return {
            wanted: tuple(key for mode, key in self.capture_order if mode is wanted)
            for wanted in (RuntimeMode.PIECEWISE, RuntimeMode.FULL)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilePlan:
    """How the model is compiled: what follows from the options and the facts.

    Units: sizes are tokens. Equal inputs of ``resolve`` give equal plans.

    ``level``: Of compilation.
    ``backend``: What compiles: "eager", "inductor", the name of one registered with torch, or a
      dotted path. Empty at level 0 only.
    ``splitting_ops``: Where level 3 cuts the traced graph; empty below it.
    ``attention_ops``: The operators that compute attention, as the facts name them.
    ``attention_writes_cache``: Whether these write the cache that they read.
    ``ranges``: (first, last) size of each range that level 3 compiles for; last None: no limit.
      Ascending, without holes, the first from 1. Empty below level 3.
    ``sizes``: Sizes compiled with static shapes besides, ascending.
    ``dynamic_shapes``: How the size that varies is marked: auto, unbacked or backed.
    ``guard_policy``: What notices a change of what was traced: audit or keep.
    ``custom_ops``: Rules of which operators run their optimised form.
    ``inductor_compile_config``: Options of Inductor for every piece.
    ``inductor_passes``: Name -> a pass over the graph, or where to import one from.
    ``pass_config``: Which passes rewrite the pieces.
    ``use_inductor_graph_partition``: Whether Inductor cuts the graph.
    ``cache_dir``: Root of the cache of compiled code; None where nothing is kept.
    ``compile_cache``: Whether the cache is read and written.
    ``debug_dump_path``: Where what was traced and compiled is written down; None: nowhere.
    """

    level: CompilationLevel
    backend: str
    splitting_ops: tuple[str, ...]
    attention_ops: tuple[str, ...]
    attention_writes_cache: bool
    ranges: tuple[tuple[int, int | None], ...]
    sizes: tuple[int, ...]
    dynamic_shapes: Literal["auto", "unbacked", "backed"]
    guard_policy: Literal["audit", "keep"]
    custom_ops: tuple[str, ...]
    inductor_compile_config: Mapping[str, Any]
    inductor_passes: Mapping[str, Any]
    pass_config: PassConfig
    use_inductor_graph_partition: bool
    cache_dir: Path | None
    compile_cache: bool
    debug_dump_path: Path | None

    @property
    def attention_is_split(self) -> bool:
        """Whether the cut leaves every attention operator outside the pieces."""
        return bool(self.attention_ops) and has_all(self.splitting_ops, self.attention_ops)

    @property
    def moves_writes(self) -> bool:
        """Whether what compiles a graph may move what the graph writes to its end.

        Everything may but the backend "eager", which does too where passes rewrite the graph.
        """
        has_passes = bool(enabled_passes(self.pass_config) or self.inductor_passes)
        return self.level > 0 and (self.backend != "eager" or has_passes)

    @property
    def unhashable_passes(self) -> tuple[str, ...]:
        """Passes and options that nothing tells apart in another process: then nothing is cached.

        Those are callables without ``uuid()`` and without text of their own.
        """
        return unhashable(self.inductor_compile_config) + unhashable(self.inductor_passes)

    def compute_hash(self) -> str:
        """SHA-256 of what changes compiled code, the same in every process.

        Neither ranges and sizes, which each compiled piece has in its own key, nor paths are in it.
        """
        return hash_of(graph_values(self, CompilationConfig))


@dataclass(frozen=True, slots=True)
class Resolved:
    """The plan, every change to the options in order, and the config with these applied.

    ``compile`` is the part of the plan that the compiler reads.

    Resolving ``config`` again, with the same facts, gives the same plan, and no adjustment but that
    of the decode sizes: they follow from ``cudagraph_capture_sizes``, which mixed batches use too.
    """

    plan: Plan
    adjustments: tuple[Adjustment, ...]
    config: RuntimeConfig
    compile: CompilePlan


def has_all(names: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether every operator of ``wanted`` is in ``names``, however it is spelled."""
    return set(map(op_name, wanted)) <= set(map(op_name, names))


def op_name(name: str) -> str:
    """``ns::op`` for ``ns.op`` and for its default overload; other names as they are."""
    if "::" not in name and name.count(".") == 1:
        name = name.replace(".", "::")
    return name.removesuffix(".default") if "::" in name else name


def default_maximum(
    max_num_seqs: int, query_len: int, compute_capability: tuple[int, int] | None
) -> int:
    """``min(S * q * 2, 512)``, 1024 on compute capability 10.x.

    Twice the largest decode batch leaves room for mixed ones.
    """
    is_10 = compute_capability is not None and compute_capability[0] == 10
    return min(max_num_seqs * query_len * 2, 1024 if is_10 else 512)


def ladder(maximum: int) -> list[int]:
    """1, 2, 4, then by 8 from 8, by 16 from 256: padding wastes at most one such step."""
    rungs = [1, 2, 4, *range(8, 256, 8), *range(256, maximum + 1, 16)]
    return [rung for rung in rungs if rung <= maximum]


def default_decode_sizes(limit: int, query_len: int, *, extra_requests: Sequence[int]) -> Sizes:
    """Multiples of q within ``limit``: the ladder counts requests, not tokens."""
    requests = {*ladder(limit // query_len), *extra_requests}
    return tuple(sorted(count * query_len for count in requests if count * query_len <= limit))


def decode_sizes_of(sizes: Sequence[int], limit: int, query_len: int) -> Sizes:
    """A user's sizes within ``limit``, each rounded up to a multiple of q.

    One that rounding would carry past the limit becomes the largest multiple within it instead, so
    that the largest batches keep a graph.
    """
    largest = limit // query_len * query_len
    rounded = {min(-(-size // query_len) * query_len, largest) for size in sizes if size <= limit}
    return tuple(sorted(rounded - {0}))


def padding_table(sizes: Sequence[int]) -> tuple[int, ...]:
    """``table[n]`` is the smallest of the ascending ``sizes`` that is >= n, for 0..the largest."""
    return tuple(sizes[bisect_left(sizes, n)] for n in range(sizes[-1] + 1)) if sizes else ()


def captured_lora_counts(max_loras: int, lora_capture: str, *, with_zero: bool) -> Sizes:
    """Adapter counts that get graphs, ascending. Without adapters: 0 alone."""
    if max_loras == 0:
        return (0,)
    if lora_capture == "powers_of_two":
        counts = {1 << power for power in range(max_loras.bit_length())} | {max_loras}
    elif lora_capture == "each":
        counts = set(range(1, max_loras + 1))
    else:
        counts = {max_loras}
    return tuple(sorted(counts | {0} if with_zero else counts))


def capture_order(
    config: RuntimeConfig,
    mode: CUDAGraphMode,
    capture_sizes: Sizes,
    decode_capture_sizes: Sizes,
    lora_counts: Sizes,
) -> tuple[tuple[RuntimeMode, BatchDescriptor], ...]:
    """Every key with its mode, in the order of capture.

    Largest first: smaller graphs then reuse the pool's memory. PIECEWISE before FULL. Most adapters
    first. Split before unsplit, because micro-batches that overlap need memory at the same time.
    Uniform keys alone are split: there every cut lies between two requests, so that the inputs of a
    micro-batch are views of the whole batch's static buffers.
    """
    query_len, ubatch = 1 + config.num_speculative_tokens, config.ubatch
    mixed = mode.mixed_mode()
    keys: list[tuple[RuntimeMode, BatchDescriptor]] = []
    for count in lora_counts:
        if mixed is not RuntimeMode.NONE:
            for size in capture_sizes:
                # The pieces do not depend on requests; a full graph does, through attention.
                num_reqs = min(size, config.max_num_seqs) if mixed is RuntimeMode.FULL else None
                keys.append((mixed, BatchDescriptor(size, num_reqs, False, count > 0, count)))
        for size in decode_capture_sizes:
            num_reqs = size // query_len
            key = BatchDescriptor(size, num_reqs, True, count > 0, count)
            keys.append((RuntimeMode.FULL, key))
            if 1 < ubatch.num_ubatches <= num_reqs and size >= ubatch.decode_token_threshold:
                split = replace(key, num_ubatches=ubatch.num_ubatches)
                keys.append((RuntimeMode.FULL, split))

    def place(item: tuple[RuntimeMode, BatchDescriptor]) -> tuple[int, ...]:
        mode, key = item
        return mode, -key.num_tokens, -key.num_active_loras, -key.num_ubatches

    return tuple(sorted(keys, key=place))
