"""Options and facts become a plan, once and purely; each change to an option is an ``Adjustment``.

The mode is lowered step by step, each with a reason. Less attention support never gives more graph;
more graph means first more for uniform decode batches, then more for mixed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Literal

from graphrt.batch import CUDAGraphMode, RuntimeMode
from graphrt.config.checked import config_error, replaced, warn_user
from graphrt.config.compilation import CAPTURE_SIZES, CompilationLevel
from graphrt.config.compile_rules import (
    check_parallel_sizes,
    compile_plan,
    ranges_of,
    settle,
    with_value,
)
from graphrt.config.environment import read_environment
from graphrt.config.options import AttentionSupport, Facts, RuntimeConfig, UBatchConfig
from graphrt.config.plan import (
    MOST_DECISIONS,
    MOST_KEYS,
    Adjustment,
    Plan,
    Resolved,
    capture_order,
    captured_lora_counts,
    decode_sizes_of,
    default_decode_sizes,
    default_maximum,
    has_all,
    ladder,
    padding_table,
)
from graphrt.errors import ConfigError, ConfigProblem, ConfigWarning

LEVEL_FIELD = "level"
MODE_FIELD = "cudagraph_mode"
SIZES_FIELD = CAPTURE_SIZES
MAXIMUM_FIELD = "max_cudagraph_capture_size"
COMPILE_FIELD = "compile_sizes"
COPY_FIELD = "cudagraph_copy_inputs"
DECODE_FIELD = "decode_capture_sizes"
LORA_FIELD = "lora_capture"
EVERY_FEW_USERS = range(1, 33)
"""The sizes ``interactivity`` adds."""


def resolve(config: RuntimeConfig, facts: Facts | None = None, strict: bool = False) -> Resolved:
    """Return the plan for ``config`` where ``facts`` hold, and which options were changed.

    ``facts`` None: nothing limits what may be captured, ``Facts()``.

    Pure: equal inputs give equal results. With ``strict`` an explicit option that would be adjusted
    is an error that lists all such adjustments. Raises ``ConfigError`` for what is not possible.
    """
    facts = Facts() if facts is None else facts
    for name, given, kind in (("config", config, RuntimeConfig), ("facts", facts, Facts)):
        if not isinstance(given, kind):
            raise _problem(name, repr(given), f"a {kind.__name__}")
    environment = read_environment()
    settled = settle(config.compilation, facts, environment)
    options, level = settled.options, settled.level
    adjustments = settled.adjustments
    is_piecewise_level = level is CompilationLevel.PIECEWISE
    query_len = 1 + config.num_speculative_tokens
    facts, splitting_ops = _splitting(options.splitting_ops, level, facts)
    asked = options.cudagraph_mode or CUDAGraphMode.FULL_AND_PIECEWISE
    mode, mode_adjustments = _mode(asked, level=level, query_len=query_len, facts=facts)
    adjustments += mode_adjustments
    if options.cudagraph_copy_inputs and not mode.has_piecewise_cudagraphs():
        reason = f"only PIECEWISE graphs copy inputs, and mode {mode.name} has none"
        adjustments.append(Adjustment(COPY_FIELD, True, False, reason))
    multiple = facts.tp_size if options.pass_config.enable_sequence_parallelism else 1
    capture_sizes, decode_capture_sizes, size_adjustments = _sizes(
        config, facts, mode, query_len, multiple
    )
    adjustments += size_adjustments
    ranges: tuple[tuple[int, int], ...] = ()
    if is_piecewise_level:
        ranges, range_adjustments = ranges_of(options, config.max_num_batched_tokens)
        adjustments += range_adjustments
    lora_counts = captured_lora_counts(
        config.max_loras,
        config.lora_capture,
        query_len=query_len,
        with_zero=options.cudagraph_specialize_lora,
    )
    if config.lora_capture == "each" and query_len > 1 and config.max_loras > 1:
        reason = "speculative decoding captures the largest number of adapters only"
        adjustments.append(Adjustment(LORA_FIELD, "each", "max_only", reason))
    if strict:
        _raise_if_adjusted(config, adjustments)
    _check_tables(config, capture_sizes, decode_capture_sizes, lora_counts)
    table = padding_table(capture_sizes)
    order = capture_order(
        mode,
        capture_sizes=capture_sizes,
        decode_capture_sizes=decode_capture_sizes,
        lora_counts=lora_counts,
        query_len=query_len,
        max_num_seqs=config.max_num_seqs,
        ubatch=config.ubatch,
    )
    if config.ubatch.num_ubatches > 1:
        is_split = any(key.num_ubatches > 1 for _, key in order)
        _check_ubatch(config.ubatch, facts, mode, has_split_keys=is_split)
    compile_sizes = _compile_sizes(config, capture_sizes, table)
    lacking = check_parallel_sizes(options, compile_sizes, facts)
    if lacking is not None:
        raise config_error("resolve", [lacking])
    compiled = compile_plan(
        settled, facts, environment, splitting_ops=splitting_ops, ranges=ranges, sizes=compile_sizes
    )
    if facts.device == "cuda" and order and options.cudagraph_num_of_warmups == 0:
        text = "cudagraph_num_of_warmups=0: libraries then set up inside the capture, and may fail"
        warn_user(ConfigWarning, text)
    plan = Plan(
        cudagraph_mode=mode,
        level=level,
        query_len=query_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        capture_sizes=capture_sizes,
        decode_capture_sizes=decode_capture_sizes,
        max_capture_size=capture_sizes[-1] if capture_sizes else 0,
        padding_table=table,
        max_loras=config.max_loras,
        lora_counts=lora_counts,
        lora_padding_table=padding_table(lora_counts),
        compile_sizes=compile_sizes,
        splitting_ops=splitting_ops,
        capture_order=order,
        ubatch=config.ubatch,
    )
    return Resolved(plan, tuple(adjustments), _applied(config, adjustments), compiled)


def _splitting(
    asked: tuple[str, ...] | None, level: CompilationLevel, facts: Facts
) -> tuple[Facts, tuple[str, ...]]:
    """The facts with what follows for ``splitting``, and where level 3 cuts."""
    if level is not CompilationLevel.PIECEWISE:
        return facts, ()
    names = facts.attention_ops if asked is None else asked
    if asked is None and not names:
        return facts, ()
    kind: Literal["attention", "other", "none"] = "none"
    if names:
        kind = "attention" if has_all(names, facts.attention_ops) else "other"
    return replace(facts, splitting=kind), names


def _mode(
    asked: CUDAGraphMode, *, level: CompilationLevel, query_len: int, facts: Facts
) -> tuple[CUDAGraphMode, list[Adjustment]]:
    """Return the effective mode and the steps that led to it.

    Raises ``ConfigError`` if mixed batches are to run FULL and attention is never captured.
    """
    steps: list[Adjustment] = []
    support, who = facts.least_support()
    piecewise = facts.piecewise_at(level)
    without_graph = CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE

    def step(mode: CUDAGraphMode, lower: CUDAGraphMode, reason: str) -> CUDAGraphMode:
        if lower is not mode:
            steps.append(Adjustment(MODE_FIELD, mode, lower, reason))
        return lower

    mode = asked
    for limit in facts.mode_limits:
        if mode not in (limit.mode, CUDAGraphMode.NONE):
            mode = step(mode, limit.mode, limit.reason)

    if level is CompilationLevel.PIECEWISE and facts.splitting == "none":
        piecewise, without_graph = False, CUDAGraphMode.NONE
        if mode.has_piecewise_cudagraphs():
            reason = "compile level 3 without splitting ops is one piece that holds attention"
            mode = step(mode, CUDAGraphMode.FULL, reason)

    said = f"{who} supports {support.name}"
    if mode.mixed_mode() is RuntimeMode.FULL and support < AttentionSupport.ALWAYS:
        if support is AttentionSupport.NEVER:
            found = f"{mode.name}, but {said}: attention cannot be in any full graph"
            accepted = "PIECEWISE, FULL_AND_PIECEWISE or NONE" if piecewise else "NONE"
            raise _problem(MODE_FIELD, found, accepted)
        lower = CUDAGraphMode.FULL_AND_PIECEWISE if piecewise else CUDAGraphMode.FULL_DECODE_ONLY
        mode = step(mode, lower, f"{said}; a full graph of mixed batches needs ALWAYS")
    if mode.decode_mode() is RuntimeMode.FULL and support is AttentionSupport.NEVER:
        mode = step(mode, without_graph, f"{said}; full graphs of decode batches need more")
    if (
        mode.decode_mode() is RuntimeMode.FULL
        and query_len > 1
        and support < AttentionSupport.UNIFORM_BATCH
    ):
        reason = f"{said}; decode batches of {query_len} tokens a request need UNIFORM_BATCH"
        mode = step(mode, without_graph, reason)
    if not piecewise:
        mode = step(mode, mode.without_piecewise(), "piecewise graphs are not available")

    # The rules above, or another limit, may have chosen a mode that a limit does not permit.
    for limit in facts.mode_limits:
        if mode not in (limit.mode, CUDAGraphMode.NONE):
            mode = step(mode, CUDAGraphMode.NONE, limit.reason)
    return mode, steps


def _sizes(
    config: RuntimeConfig, facts: Facts, mode: CUDAGraphMode, query_len: int, multiple: int
) -> tuple[tuple[int, ...], tuple[int, ...], list[Adjustment]]:
    """Return the sizes of mixed batches, those of decode batches, and what was adjusted.

    All are multiples of ``multiple``.
    """
    options = config.compilation
    asked, asked_maximum = options.cudagraph_capture_sizes, options.max_cudagraph_capture_size
    batch_limit = config.max_num_batched_tokens
    adjustments: list[Adjustment] = []
    if mode is CUDAGraphMode.NONE:
        if asked:
            adjustments.append(Adjustment(SIZES_FIELD, asked, (), "graphs are off"))
        if asked_maximum is not None:
            adjustments.append(Adjustment(MAXIMUM_FIELD, asked_maximum, None, "graphs are off"))
        return (), (), adjustments

    too_large = f"no batch has more than max_num_batched_tokens = {batch_limit} tokens"
    if asked is not None:
        mixed = tuple(size for size in asked if size <= batch_limit)
        if not mixed:
            found = f"{list(asked)}; none is within max_num_batched_tokens = {batch_limit}"
            raise _problem(SIZES_FIELD, found, "a size that a batch can have, or mode NONE")
        if mixed != asked:
            adjustments.append(Adjustment(SIZES_FIELD, asked, mixed, too_large))
        shared = tuple(size for size in mixed if size % multiple == 0)
        if not shared:
            found = f"{list(mixed)}; sequence parallelism divides each among {multiple} ranks"
            raise _problem(SIZES_FIELD, found, f"a multiple of {multiple}, or mode NONE")
        if shared != mixed:
            reason = f"sequence parallelism divides each among tp_size = {multiple} ranks"
            adjustments.append(Adjustment(SIZES_FIELD, mixed, shared, reason))
        mixed, maximum = shared, shared[-1]
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
        sizes = {*ladder(maximum), *(size for size in extra if size <= maximum)}
        mixed = tuple(sorted(size for size in sizes if size % multiple == 0))
        if not mixed:
            found = f"{maximum}; sequence parallelism divides each size among {multiple} ranks"
            raise _problem(MAXIMUM_FIELD, found, f"at least {multiple}, or mode NONE")
    decode = _decode_sizes(config, mode, query_len, mixed, maximum)
    decode = tuple(size for size in decode if size % multiple == 0)
    reason = _why_decode_differs(config, mode, query_len, mixed, decode)
    if reason:
        adjustments.append(Adjustment(DECODE_FIELD, asked or asked_maximum, decode, reason))
    return mixed, decode, adjustments


def _why_decode_differs(
    config: RuntimeConfig,
    mode: CUDAGraphMode,
    query_len: int,
    mixed: tuple[int, ...],
    decode: tuple[int, ...],
) -> str:
    """What uniform decode batches do not get although the mode and the list ask for it, or "".

    A size that only mixed batches can have is served as it was asked where they have graphs.
    """
    if mode.decode_mode() is not RuntimeMode.FULL or not mode.separate_routine():
        return ""
    largest = query_len * config.max_num_seqs
    batches = (
        f"a decode batch has a multiple of {query_len} tokens, at most"
        f" {query_len} * max_num_seqs = {largest}"
    )
    if not decode:
        return f"{batches}; no size up to {mixed[-1]} serves one, so that none has a full graph"
    if config.compilation.cudagraph_capture_sizes is None:
        return ""
    others = sorted(set(decode) - set(mixed))
    if others:
        return f"{batches}; sizes are rounded to {others}"
    if mode.mixed_mode() is RuntimeMode.NONE and decode != mixed:
        unused = sorted(set(mixed) - set(decode))
        return f"{batches}; {unused} would serve nothing"
    if decode[-1] < min(largest, mixed[-1]) // query_len * query_len:
        return f"{batches}; those above {decode[-1]} have no full graph"
    return ""


def _check_tables(
    config: RuntimeConfig,
    capture_sizes: Sequence[int],
    decode_capture_sizes: Sequence[int],
    lora_counts: Sequence[int],
) -> None:
    """Raises ``ConfigError`` for a plan whose tables would fill memory."""
    num_decode = len(decode_capture_sizes) * (2 if config.ubatch.num_ubatches > 1 else 1)
    num_keys = (len(capture_sizes) + num_decode) * len(lora_counts)
    if num_keys > MOST_KEYS:
        raise _problem(SIZES_FIELD, f"{num_keys} keys, adapter counts included", f"{MOST_KEYS}")
    num_decisions = (1 + max(capture_sizes, default=0)) * (1 + config.max_loras)
    if num_decisions > MOST_DECISIONS:
        found = f"{config.max_loras}, with graphs of {max(capture_sizes)} tokens"
        accepted = f"at most {MOST_DECISIONS} pairs of a number of tokens and one of adapters"
        raise _problem("max_loras", found, accepted)


def _check_ubatch(
    ubatch: UBatchConfig, facts: Facts, mode: CUDAGraphMode, *, has_split_keys: bool
) -> None:
    """Raises ``ConfigError`` for micro-batches that no step could have."""
    count = ubatch.num_ubatches
    problems = [
        ConfigProblem(f"ubatch.{name}", str(value), f"at least num_ubatches = {count}")
        for name, value in (
            ("decode_token_threshold", ubatch.decode_token_threshold),
            ("prefill_token_threshold", ubatch.prefill_token_threshold),
        )
        if value < count
    ]
    if facts.num_sms is not None and ubatch.num_comm_sms >= facts.num_sms:
        accepted = f"fewer than the device's {facts.num_sms} multiprocessors"
        problems.append(ConfigProblem("ubatch.num_comm_sms", str(ubatch.num_comm_sms), accepted))
    if not has_split_keys and not ubatch.allow_eager:
        found = (
            f"{count}, with allow_eager=False and mode {mode.name}, whose keys of uniform decode"
            f" batches with {max(count, ubatch.decode_token_threshold)} tokens or more are none"
        )
        accepted = "1, or full graphs of such decode batches, or allow_eager=True"
        problems.append(ConfigProblem("ubatch.num_ubatches", found, accepted))
    if problems:
        raise config_error("resolve", problems)


def _decode_sizes(
    config: RuntimeConfig, mode: CUDAGraphMode, query_len: int, mixed: tuple[int, ...], maximum: int
) -> tuple[int, ...]:
    if mode.decode_mode() is not RuntimeMode.FULL or not mode.separate_routine():
        return ()
    limit = min(query_len * config.max_num_seqs, maximum)
    if config.compilation.cudagraph_capture_sizes is not None:
        return decode_sizes_of(mixed, limit, query_len)
    extra = []
    if config.interactivity:
        extra += [-(-size // query_len) for size in EVERY_FEW_USERS]
    if config.compilation.max_cudagraph_capture_size is None:
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


def _raise_if_adjusted(config: RuntimeConfig, adjustments: Sequence[Adjustment]) -> None:
    # A default of these that is lowered was not asked for; other defaults are None.
    implicit = {
        name for name in (LEVEL_FIELD, MODE_FIELD) if getattr(config.compilation, name) is None
    }
    problems = [
        ConfigProblem(field, f"{_shown(asked)} would become {_shown(effective)}", reason)
        for field, asked, effective, reason in adjustments
        if field not in implicit and asked is not None
    ]
    if problems:
        raise config_error("resolve, strict", problems)


def _shown(value: object) -> object:
    return value.name if isinstance(value, Enum) else value


def _applied(config: RuntimeConfig, adjustments: Sequence[Adjustment]) -> RuntimeConfig:
    """The config in which every adjusted option has its effective value. The last step wins."""
    outer: dict[str, object] = {}
    compilation = config.compilation
    for field, _, effective, _ in adjustments:
        if hasattr(compilation, field.partition(".")[0]):
            compilation = with_value(compilation, field, effective)
        elif field != DECODE_FIELD:
            outer[field] = effective
    return replaced(config, compilation=compilation, **outer)


def _problem(field: str, found: str, accepted: str) -> ConfigError:
    return config_error("resolve", [ConfigProblem(field, found, accepted)])
