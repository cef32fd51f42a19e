"""Wishes and facts become a plan, once and purely; each change to a wish is an ``Adjustment``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from graphrt.batch import CUDAGraphMode, RuntimeMode
from graphrt.config.checked import config_error
from graphrt.config.facts import Facts
from graphrt.config.keys import capture_order, captured_lora_counts
from graphrt.config.modes import MODE_FIELD, resolve_mode
from graphrt.config.plan import Adjustment, Plan, Resolved
from graphrt.config.sizes import (
    decode_sizes_of,
    default_decode_sizes,
    default_maximum,
    default_sizes,
    padding_table,
)
from graphrt.config.wishes import CAPTURE_SIZES, CompilationLevel, RuntimeConfig
from graphrt.errors import ConfigError, ConfigProblem

SIZES_FIELD = CAPTURE_SIZES
MAXIMUM_FIELD = "max_cudagraph_capture_size"
COMPILE_FIELD = "compile_sizes"
LORA_FIELD = "lora_capture"
EVERY_FEW_USERS = range(1, 33)
"""The sizes ``interactivity`` adds."""


class _Sizes(NamedTuple):
    mixed: tuple[int, ...]
    decode: tuple[int, ...]
    adjustments: list[Adjustment]


def resolve(config: RuntimeConfig, facts: Facts, strict: bool = False) -> Resolved:
    """Return the plan for ``config`` where ``facts`` hold, and what of the wishes was changed.

    Pure: equal inputs give equal results. With ``strict`` an explicit wish that would be adjusted
    is an error that lists all such adjustments. Raises ``ConfigError`` for what cannot be honoured.
    """
    wish = config.compilation
    query_len = 1 + config.num_speculative_tokens
    level = _level(config)
    asked = wish.cudagraph_mode or CUDAGraphMode.FULL_AND_PIECEWISE
    mode, adjustments = resolve_mode(asked, level=level, query_len=query_len, facts=facts)
    sizes = _sizes(config, facts, mode, query_len)
    adjustments += sizes.adjustments
    lora_counts = captured_lora_counts(
        config.max_loras,
        config.lora_capture,
        query_len=query_len,
        with_zero=wish.cudagraph_specialize_lora,
    )
    if config.lora_capture == "each" and query_len > 1 and config.max_loras > 1:
        reason = "speculative decoding captures the largest number of adapters only"
        adjustments.append(Adjustment(LORA_FIELD, "each", "max_only", reason))
    if strict:
        _refuse_adjustments(config, adjustments)
    table = padding_table(sizes.mixed)
    plan = Plan(
        cudagraph_mode=mode,
        level=level,
        query_len=query_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        capture_sizes=sizes.mixed,
        decode_capture_sizes=sizes.decode,
        max_capture_size=sizes.mixed[-1] if sizes.mixed else 0,
        padding_table=table,
        decode_padding_table=padding_table(sizes.decode),
        max_loras=config.max_loras,
        lora_counts=lora_counts,
        lora_padding_table=padding_table(lora_counts),
        compile_sizes=_compile_sizes(config, sizes.mixed, table),
        capture_order=capture_order(
            mode,
            capture_sizes=sizes.mixed,
            decode_capture_sizes=sizes.decode,
            lora_counts=lora_counts,
            query_len=query_len,
            max_num_seqs=config.max_num_seqs,
        ),
    )
    return Resolved(plan, tuple(adjustments), _applied(config, adjustments))


def _level(config: RuntimeConfig) -> CompilationLevel:
    """Level 3 if something was asked that only it has; else none: break points need no compiler."""
    wish = config.compilation
    if wish.level is None:
        only_at_3 = wish.compile_sizes
        return CompilationLevel.PIECEWISE if only_at_3 else CompilationLevel.NO_COMPILATION
    if wish.compile_sizes and wish.level is not CompilationLevel.PIECEWISE:
        raise _problem(
            COMPILE_FIELD, f"{list(wish.compile_sizes)} at level {int(wish.level)}", "level 3"
        )
    return wish.level


def _sizes(config: RuntimeConfig, facts: Facts, mode: CUDAGraphMode, query_len: int) -> _Sizes:
    wish = config.compilation
    asked, asked_maximum = wish.cudagraph_capture_sizes, wish.max_cudagraph_capture_size
    batch_limit = config.max_num_batched_tokens
    adjustments: list[Adjustment] = []
    if mode is CUDAGraphMode.NONE:
        if asked:
            adjustments.append(Adjustment(SIZES_FIELD, asked, (), "graphs are off"))
        if asked_maximum is not None:
            adjustments.append(Adjustment(MAXIMUM_FIELD, asked_maximum, None, "graphs are off"))
        return _Sizes((), (), adjustments)

    too_large = f"no batch has more than max_num_batched_tokens = {batch_limit} tokens"
    if asked is not None:
        mixed = tuple(size for size in asked if size <= batch_limit)
        if not mixed:
            found = f"{list(asked)}; none is within max_num_batched_tokens = {batch_limit}"
            raise _problem(SIZES_FIELD, found, "a size that a batch can have, or mode NONE")
        if mixed != asked:
            adjustments.append(Adjustment(SIZES_FIELD, asked, mixed, too_large))
        maximum = mixed[-1]
        if asked_maximum not in (None, maximum):
            found = f"{asked_maximum}, while the largest usable size of the list is {maximum}"
            raise _problem(MAXIMUM_FIELD, found, f"{maximum}, or none beside a list")
    else:
        maximum = asked_maximum or default_maximum(
            config.max_num_seqs, query_len, facts.compute_capability
        )
        maximum = min(maximum, batch_limit)
        if asked_maximum is not None and asked_maximum > maximum:
            adjustments.append(Adjustment(MAXIMUM_FIELD, asked_maximum, maximum, too_large))
        extra = [batch_limit]
        if query_len == 1 and asked_maximum is None:
            extra.append(config.max_num_seqs)
        if config.interactivity:
            extra += EVERY_FEW_USERS
        mixed = default_sizes(maximum, extra=extra)
    return _Sizes(mixed, _decode_sizes(config, mode, query_len, mixed, maximum), adjustments)


def _decode_sizes(
    config: RuntimeConfig,
    mode: CUDAGraphMode,
    query_len: int,
    mixed: tuple[int, ...],
    maximum: int,
) -> tuple[int, ...]:
    wish = config.compilation
    if mode.decode_mode() is not RuntimeMode.FULL or not mode.separate_routine():
        return ()
    limit = min(query_len * config.max_num_seqs, maximum)
    if wish.cudagraph_capture_sizes is not None:
        return decode_sizes_of(mixed, limit, query_len)
    extra = []
    if config.interactivity:
        extra += [-(-size // query_len) for size in EVERY_FEW_USERS]
    if wish.max_cudagraph_capture_size is None:
        extra.append(limit // query_len)
    if query_len == 1:
        return tuple(sorted({size for size in (*mixed, *extra) if size <= limit}))
    return default_decode_sizes(limit, query_len, extra_requests=[n for n in extra if n])


def _compile_sizes(
    config: RuntimeConfig, capture_sizes: tuple[int, ...], table: Sequence[int]
) -> tuple[int, ...]:
    sizes: set[int] = set()
    problems = []
    for size in config.compilation.compile_sizes or ():
        if isinstance(size, str):
            sizes |= set(capture_sizes)
        elif size > config.max_num_batched_tokens:
            accepted = f"at most max_num_batched_tokens = {config.max_num_batched_tokens}"
            problems.append(ConfigProblem(COMPILE_FIELD, f"{size}, which can never run", accepted))
        elif size < len(table) and table[size] != size:
            found = f"{size}, which would be padded to {table[size]}"
            problems.append(ConfigProblem(COMPILE_FIELD, found, f"any of {list(capture_sizes)}"))
        else:
            sizes.add(size)
    if problems:
        raise config_error("resolve", problems)
    return tuple(sorted(sizes))


def _refuse_adjustments(config: RuntimeConfig, adjustments: Sequence[Adjustment]) -> None:
    was_asked = {
        MODE_FIELD: config.compilation.cudagraph_mode is not None,
        SIZES_FIELD: config.compilation.cudagraph_capture_sizes is not None,
        MAXIMUM_FIELD: config.compilation.max_cudagraph_capture_size is not None,
        LORA_FIELD: True,
    }
    refused = [
        ConfigProblem(
            item.field, f"{_shown(item.asked)} would become {_shown(item.effective)}", item.reason
        )
        for item in adjustments
        if was_asked[item.field]
    ]
    if refused:
        raise config_error("resolve, strict", refused)


def _shown(value: object) -> object:
    return value.name if isinstance(value, Enum) else value


def _applied(config: RuntimeConfig, adjustments: Sequence[Adjustment]) -> RuntimeConfig:
    """The config in which every adjusted wish has its effective value. The last step wins."""
    outer = {item.field: item.effective for item in adjustments}
    inner = {name: outer.pop(name) for name in tuple(outer) if hasattr(config.compilation, name)}
    compilation = replace(config.compilation, **inner)  # type: ignore[arg-type]  # names are data
    return replace(config, compilation=compilation, **outer)  # type: ignore[arg-type]  # as above


def _problem(field: str, found: str, accepted: str) -> ConfigError:
    return config_error("resolve", [ConfigProblem(field, found, accepted)])
