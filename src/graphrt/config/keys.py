"""Which keys exist: sizes x adapter counts, for each runtime mode of the policy."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.batch import BatchDescriptor, CUDAGraphMode, RuntimeMode


def captured_lora_counts(
    max_loras: int, lora_capture: str, *, query_len: int, with_zero: bool
) -> tuple[int, ...]:
    """Adapter counts that get graphs, ascending. Without adapters: 0 alone.

    With speculative decoding "each" captures the maximum only: it keeps the compiled code single.
    """
    if max_loras == 0:
        return (0,)
    if lora_capture == "powers_of_two":
        counts = {1 << power for power in range(max_loras.bit_length())} | {max_loras}
    elif lora_capture == "each" and query_len == 1:
        counts = set(range(1, max_loras + 1))
    else:
        counts = {max_loras}
    return tuple(sorted(counts | {0} if with_zero else counts))


def capture_order(
    mode: CUDAGraphMode,
    *,
    capture_sizes: Sequence[int],
    decode_capture_sizes: Sequence[int],
    lora_counts: Sequence[int],
    query_len: int,
    max_num_seqs: int,
) -> tuple[tuple[RuntimeMode, BatchDescriptor], ...]:
    """Every key with its mode, in the order of capture.

    Largest first: smaller graphs then reuse the pool's memory. PIECEWISE before FULL. Most adapters
    first.
    """
    mixed, decode = mode.mixed_mode(), mode.decode_mode()
    keys: list[tuple[RuntimeMode, BatchDescriptor]] = []
    for count in lora_counts:
        if mixed is not RuntimeMode.NONE:
            for size in capture_sizes:
                # The pieces do not depend on requests; a full graph does, through attention.
                num_reqs = min(size, max_num_seqs) if mixed is RuntimeMode.FULL else None
                keys.append((mixed, _key(size, num_reqs, False, count)))
        if mode.separate_routine() and decode is RuntimeMode.FULL:
            for size in decode_capture_sizes:
                keys.append((decode, _key(size, size // query_len, True, count)))
    keys.sort(key=lambda item: (item[0], -item[1].num_tokens, -item[1].num_active_loras))
    return tuple(keys)


def _key(size: int, num_reqs: int | None, uniform: bool, count: int) -> BatchDescriptor:
    return BatchDescriptor(size, num_reqs, uniform, count > 0, count)
