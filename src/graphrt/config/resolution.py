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
    Changes,
    check_parallel_sizes,
    compile_plan,
    fail,
    ranges_of,
    settle,
)
from graphrt.config.environment import read_environment
from graphrt.config.options import AttentionSupport, Facts, RuntimeConfig
from graphrt.config.plan import (
    MOST_DECISIONS,
    MOST_KEYS,
    Adjustment,
    Plan,
    Resolved,
    Sizes,
    capture_order,
    captured_lora_counts,
    decode_sizes_of,
    default_decode_sizes,
    default_maximum,
    has_all,
    ladder,
    padding_table,
)
from graphrt.errors import ConfigProblem, ConfigWarning, shown

MODE_FIELD = "cudagraph_mode"
MAXIMUM_FIELD = "max_cudagraph_capture_size"
GRAPHS_OFF = "graphs are off"
EVERY_FEW_USERS = range(1, 33)
"""The sizes ``interactivity`` adds."""


def resolve(config: RuntimeConfig, facts: Facts | None = None, strict: bool = False) -> Resolved:
    """Return the plan for ``config`` where ``facts`` hold, and which options were changed.

    ``facts`` None: nothing limits what may be captured, ``Facts()``.

    Pure: equal inputs give equal results. With ``strict`` an explicit option that would be adjusted
    is an error that lists all such adjustments. Raises ``ConfigError`` for what is not possible.
    """
    facts = Facts() if facts is None else facts
    asked = (("config", config, RuntimeConfig), ("facts", facts, Facts), ("strict", strict, bool))
    for name, given, kind in asked:
        if not isinstance(given, kind):
            fail(name, shown(given), f"a {kind.__name__}")
    environment = read_environment()
    changes = settle(config.compilation, facts, environment)
    query_len = 1 + config.num_speculative_tokens
    facts, splitting_ops = _splitting(changes.options.splitting_ops, changes.level, facts)
    mode = _mode(changes, query_len=query_len, facts=facts)
    if changes.options.cudagraph_copy_inputs and not mode.has_piecewise_cudagraphs():
        reason = f"only PIECEWISE graphs copy inputs, and mode {mode.name} has none"
        changes.set("cudagraph_copy_inputs", False, reason)
    capture_sizes, decode_capture_sizes = _sizes(changes, config, facts, mode, query_len)
    ranges = ranges_of(changes, config.max_num_batched_tokens)
    lora_capture = config.lora_capture
    if lora_capture == "each" and query_len > 1 and config.max_loras > 1:
        # Compiled code stays single.
        lora_capture = "max_only"
        reason = "speculative decoding captures the largest number of adapters only"
        changes.adjustments.append(Adjustment("lora_capture", "each", lora_capture, reason))
    interactivity = config.interactivity
    if interactivity and (not capture_sizes or changes.options.cudagraph_capture_sizes is not None):
        interactivity = False
        reason = "it adds to the default sizes, which are not captured"
        changes.adjustments.append(Adjustment("interactivity", True, False, reason))
    lora_counts = captured_lora_counts(
        config.max_loras, lora_capture, with_zero=changes.options.cudagraph_specialize_lora
    )
    _check_tables(config, capture_sizes, decode_capture_sizes, lora_counts)
    table = padding_table(capture_sizes)
    order = capture_order(config, mode, capture_sizes, decode_capture_sizes, lora_counts)
    if config.ubatch.num_ubatches > 1:
        is_split = any(key.num_ubatches > 1 for _, key in order)
        _check_ubatch(changes, config, facts, mode, has_split_keys=is_split)
    compile_sizes = _compile_sizes(changes, config, capture_sizes, table)
    if strict:
        _raise_if_adjusted(config, changes.adjustments)
    check_parallel_sizes(changes, compile_sizes, facts)
    compiled = compile_plan(
        changes, facts, environment, splitting_ops=splitting_ops, ranges=ranges, sizes=compile_sizes
    )
    if facts.device == "cuda" and order and changes.options.cudagraph_num_of_warmups == 0:
        text = "cudagraph_num_of_warmups=0: libraries then set up inside the capture, and may fail"
        warn_user(ConfigWarning, text)
    plan = Plan(
        cudagraph_mode=mode,
        level=changes.level,
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
    config = replaced(
        config,
        compilation=changes.options,
        lora_capture=lora_capture,
        interactivity=interactivity,
    )
    return Resolved(plan, tuple(changes.adjustments), config, compiled)


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


def _mode(changes: Changes, *, query_len: int, facts: Facts) -> CUDAGraphMode:
    """The effective mode; each step that leads to it is a change.

    Raises ``ConfigError`` if mixed batches are to run FULL and attention is never captured.
    """
    mode = changes.options.cudagraph_mode or CUDAGraphMode.FULL_AND_PIECEWISE
    support, who = facts.least_support()
    piecewise = facts.piecewise_at(changes.level)
    without_graph = CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE

    def step(mode: CUDAGraphMode, lower: CUDAGraphMode, reason: str) -> CUDAGraphMode:
        if lower is not mode:
            changes.set(MODE_FIELD, lower, reason, asked=mode)
        return lower

    for limit in facts.mode_limits:
        if mode not in (limit.mode, CUDAGraphMode.NONE):
            mode = step(mode, limit.mode, limit.reason)

    if changes.level is CompilationLevel.PIECEWISE and facts.splitting == "none":
        piecewise, without_graph = False, CUDAGraphMode.NONE
        if mode.has_piecewise_cudagraphs():
            reason = "compile level 3 without splitting ops is one piece that holds attention"
            mode = step(mode, CUDAGraphMode.FULL, reason)

    said = f"{who} supports {support.name}"
    if mode.mixed_mode() is RuntimeMode.FULL and support < AttentionSupport.ALWAYS:
        if support is AttentionSupport.NEVER:
            found = f"{mode.name}, but {said}: attention cannot be in any full graph"
            accepted = "PIECEWISE, FULL_AND_PIECEWISE or NONE" if piecewise else "NONE"
            fail(MODE_FIELD, found, accepted)
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
    return mode


def _sizes(
    changes: Changes, config: RuntimeConfig, facts: Facts, mode: CUDAGraphMode, query_len: int
) -> tuple[Sizes, Sizes]:
    """Return the sizes of mixed batches and those of decode batches.

    All are multiples of ``tp_size`` under sequence parallelism.
    """
    options = changes.options
    asked, asked_maximum = options.cudagraph_capture_sizes, options.max_cudagraph_capture_size
    batch_limit = config.max_num_batched_tokens
    multiple = facts.tp_size if options.pass_config.enable_sequence_parallelism else 1
    if mode is CUDAGraphMode.NONE:
        if asked:
            changes.set(CAPTURE_SIZES, (), GRAPHS_OFF)
        if asked_maximum is not None:
            changes.set(MAXIMUM_FIELD, None, GRAPHS_OFF)
        return (), ()

    too_large = f"no batch has more than max_num_batched_tokens = {batch_limit} tokens"
    if asked is not None:
        mixed = tuple(size for size in asked if size <= batch_limit)
        if not mixed:
            found = f"{list(asked)}; none is within max_num_batched_tokens = {batch_limit}"
            fail(CAPTURE_SIZES, found, "a size that a batch can have, or mode NONE")
        if mixed != asked:
            changes.set(CAPTURE_SIZES, mixed, too_large)
        shared = tuple(size for size in mixed if size % multiple == 0)
        if not shared:
            found = f"{list(mixed)}; sequence parallelism divides each among {multiple} ranks"
            fail(CAPTURE_SIZES, found, f"a multiple of {multiple}, or mode NONE")
        if shared != mixed:
            reason = f"sequence parallelism divides each among tp_size = {multiple} ranks"
            changes.set(CAPTURE_SIZES, shared, reason)
        mixed, maximum = shared, shared[-1]
        if asked_maximum not in (None, maximum):
            found = f"{asked_maximum}, while the largest usable size of the list is {maximum}"
            fail(MAXIMUM_FIELD, found, f"{maximum}, or none beside a list")
    else:
        maximum = asked_maximum or default_maximum(
            config.max_num_seqs, query_len, facts.compute_capability
        )
        maximum = min(maximum, batch_limit)
        if asked_maximum is not None and asked_maximum > maximum:
            changes.set(MAXIMUM_FIELD, maximum, too_large)
        extra = [batch_limit]
        if query_len == 1 and asked_maximum is None:
            extra.append(config.max_num_seqs)
        if config.interactivity:
            extra += EVERY_FEW_USERS
        sizes = {*ladder(maximum), *(size for size in extra if size <= maximum)}
        mixed = tuple(sorted(size for size in sizes if size % multiple == 0))
        if not mixed:
            found = f"{maximum}; sequence parallelism divides each size among {multiple} ranks"
            fail(MAXIMUM_FIELD, found, f"at least {multiple}, or mode NONE")
    decode: Sizes = ()
    reason = ""
    if mode.decode_mode() is RuntimeMode.FULL and mode.separate_routine():
        decode = _decode_sizes(config, query_len, mixed, maximum)
        decode = tuple(size for size in decode if size % multiple == 0)
        reason = _why_decode_differs(config, mode, query_len, mixed, decode)
    top = max([*mixed, *decode])
    if asked_maximum is not None and top < maximum:
        changes.set(MAXIMUM_FIELD, top, f"the default sizes have none from {top + 1} to {maximum}")
    if reason:
        asked_for = asked or asked_maximum
        changes.adjustments.append(Adjustment("decode_capture_sizes", asked_for, decode, reason))
    return mixed, decode


def _why_decode_differs(
    config: RuntimeConfig, mode: CUDAGraphMode, query_len: int, mixed: Sizes, decode: Sizes
) -> str:
    """What uniform decode batches do not get although the mode and the list ask for it, or "".

    A size that only mixed batches can have is served as it was asked where they have graphs.
    """
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
    config: RuntimeConfig, capture_sizes: Sizes, decode_capture_sizes: Sizes, lora_counts: Sizes
) -> None:
    """Raises ``ConfigError`` for a plan whose tables would fill memory."""
    num_decode = len(decode_capture_sizes) * (2 if config.ubatch.num_ubatches > 1 else 1)
    num_keys = (len(capture_sizes) + num_decode) * len(lora_counts)
    if num_keys > MOST_KEYS:
        fail(CAPTURE_SIZES, f"{num_keys} keys, adapter counts included", f"{MOST_KEYS}")
    num_decisions = (1 + max(capture_sizes, default=0)) * (1 + config.max_loras)
    if num_decisions > MOST_DECISIONS:
        found = f"{config.max_loras}, with graphs of {max(capture_sizes)} tokens"
        accepted = f"at most {MOST_DECISIONS} pairs of a number of tokens and one of adapters"
        fail("max_loras", found, accepted)


def _check_ubatch(
    changes: Changes, config: RuntimeConfig, facts: Facts, mode: CUDAGraphMode, has_split_keys: bool
) -> None:
    """Raises ``ConfigError`` for micro-batches that no step could have."""
    ubatch = config.ubatch
    count, num_comm_sms = ubatch.num_ubatches, ubatch.num_comm_sms
    for name in ("decode_token_threshold", "prefill_token_threshold"):
        if getattr(ubatch, name) < count:
            found, accepted = str(getattr(ubatch, name)), f"at least num_ubatches = {count}"
            changes.wrong(f"ubatch.{name}", found, accepted)
    if facts.num_sms is not None and num_comm_sms >= facts.num_sms:
        accepted = f"fewer than the device's {facts.num_sms} multiprocessors"
        changes.wrong("ubatch.num_comm_sms", str(num_comm_sms), accepted)
    eager_from, most = ubatch.prefill_token_threshold, config.max_num_batched_tokens
    if not has_split_keys and not (ubatch.allow_eager and eager_from <= most):
        found = (
            f"{count}, with mode {mode.name}, allow_eager={ubatch.allow_eager} and at most"
            f" {most} tokens in a batch: none is split"
        )
        accepted = (
            "1, or full graphs of uniform decode batches of"
            f" {max(count, ubatch.decode_token_threshold)} tokens or more, or allow_eager=True and"
            f" batches of {eager_from} tokens"
        )
        changes.wrong("ubatch.num_ubatches", found, accepted)
    changes.require_none_wrong()


def _decode_sizes(config: RuntimeConfig, query_len: int, mixed: Sizes, maximum: int) -> Sizes:
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
    changes: Changes, config: RuntimeConfig, capture_sizes: Sizes, table: Sizes
) -> Sizes:
    sizes: set[int] = set()
    most = config.max_num_batched_tokens
    for size in changes.options.compile_sizes or ():
        if isinstance(size, str):
            sizes |= set(capture_sizes)
        elif size > most:
            accepted = f"at most max_num_batched_tokens = {most}"
            changes.wrong("compile_sizes", f"{size}, which can never run", accepted)
        elif size < len(table) and table[size] != size:
            found = f"{size}, which would be padded to {table[size]}"
            changes.wrong("compile_sizes", found, f"any of {list(capture_sizes)}")
        else:
            sizes.add(size)
    changes.require_none_wrong()
    usable = tuple(sorted(sizes))
    if CAPTURE_SIZES in (changes.options.compile_sizes or ()) and not capture_sizes:
        # Without sizes to compile for, the same options might give another level.
        changes.options = replaced(changes.options, level=changes.level)
        changes.set("compile_sizes", usable, "no size is captured")
    return usable


def _raise_if_adjusted(config: RuntimeConfig, adjustments: Sequence[Adjustment]) -> None:
    # A default of these that is lowered was not asked for; other defaults are None.
    implicit = {n for n in ("level", MODE_FIELD) if getattr(config.compilation, n) is None}
    problems = [
        ConfigProblem(field, f"{_shown(asked)} would become {_shown(effective)}", reason)
        for field, asked, effective, reason in adjustments
        if field not in implicit and asked is not None
    ]
    if problems:
        raise config_error("resolve, strict", problems)


def _shown(value: object) -> object:
    return value.name if isinstance(value, Enum) else value
