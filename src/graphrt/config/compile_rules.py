"""What follows from the options of compiling: level, backend, cuts, passes, ranges.

Each rule that changes an option says so by an ``Adjustment``, so that resolving the changed options
again changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from graphrt.config.checked import config_error, replaced
from graphrt.config.compilation import CompilationConfig, CompilationLevel, enabled_passes
from graphrt.config.environment import Environment
from graphrt.config.options import Facts
from graphrt.config.plan import Adjustment, CompilePlan, op_name
from graphrt.errors import ConfigProblem

_FULL_CHAIN = ("enable_attn_fusion", "enable_sequence_parallelism")
"""Passes that match across attention, which must then be inside the graph."""
_BETWEEN_RANKS = ("enable_sequence_parallelism", "enable_async_tp", "enable_fi_allreduce_fusion")


class Changes:
    """Options that are changed one by one, why, and what is wrong with them; then the level and
    backend that count."""

    def __init__(self, options: CompilationConfig) -> None:
        self.options = options
        self.adjustments: list[Adjustment] = []
        self.problems: list[ConfigProblem] = []
        self.level = CompilationLevel.NO_COMPILATION
        self.backend = ""

    def set(self, field: str, effective: object, reason: str, asked: object = None) -> None:
        """Of a field, or of ``pass_config.field``. ``asked`` None: what the options say."""
        outer, _, inner = field.partition(".")
        before: object = getattr(self.options, outer)
        after = replaced(before, **{inner: effective}) if inner else effective
        if asked is None:
            asked = getattr(before, inner) if inner else before
        self.adjustments.append(Adjustment(field, asked, effective, reason))
        self.options = replaced(self.options, **{outer: after})

    def wrong(self, field: str, found: str, accepted: str) -> None:
        self.problems.append(ConfigProblem(field, found, accepted))

    def require_none_wrong(self) -> None:
        """Errors: ``ConfigError`` with everything that is wrong."""
        if self.problems:
            raise config_error("resolve", self.problems)


def fail(field: str, found: str, accepted: str) -> NoReturn:
    """Errors: ``ConfigError``, at once, because nothing can follow from this."""
    raise config_error("resolve", [ConfigProblem(field, found, accepted)])


def settle(options: CompilationConfig, facts: Facts, environment: Environment) -> Changes:
    """Level and backend, and the options that they and the facts permit.

    Raises ``ConfigError`` with everything that is asked and not possible.
    """
    changes = Changes(options)
    if facts.tp_size == 1 and options.level in (None, CompilationLevel.PIECEWISE):
        # First, because otherwise such a pass would decide the level.
        for name in _BETWEEN_RANKS:
            if getattr(options.pass_config, name):
                changes.set(f"pass_config.{name}", False, "one rank has no collectives: tp_size 1")
    level = changes.level = _level(changes, facts, environment)
    backend = changes.backend = _backend(changes, level, facts)
    _partition(changes, level, backend, facts)
    if level is CompilationLevel.PIECEWISE:
        _passes(changes, backend, facts)
    changes.require_none_wrong()
    return changes


def _level(changes: Changes, facts: Facts, environment: Environment) -> CompilationLevel:
    """Level 3 if something was asked that only it has, or nothing else cuts at attention.

    Else none: break points need no compiler.
    """
    options = changes.options
    asked = _asked_of_level_3(options)
    level, why = options.level, ""
    if level is None:
        is_needed = bool(asked) or bool(options.use_inductor_graph_partition)
        # Also empty, which it is once all endpoints were too large.
        is_needed |= options.compile_ranges_endpoints is not None
        is_needed |= bool(facts.attention_ops) and not facts.has_break_points
        level = CompilationLevel.PIECEWISE if is_needed else CompilationLevel.NO_COMPILATION
        if environment.compile_disabled and is_needed:
            level, why = CompilationLevel.NO_COMPILATION, "TORCH_COMPILE_DISABLE is 1"
            changes.set("level", level, why, CompilationLevel.PIECEWISE)
    elif level is not CompilationLevel.NO_COMPILATION and environment.compile_disabled:
        found = f"{level.name}, while TORCH_COMPILE_DISABLE is 1"
        changes.wrong("level", found, "level 0, or the variable unset")
    if level is not CompilationLevel.PIECEWISE:
        at = f"level {int(level)}" + (f", because {why}" if why else "")
        for name, value in asked.items():
            changes.wrong(name, f"{value} at {at}", "level 3")
    return level


def _asked_of_level_3(options: CompilationConfig) -> dict[str, object]:
    """What is asked that only level 3 has; the partition says for itself what it needs."""
    names = ("splitting_ops", "compile_sizes", "compile_ranges_endpoints")
    asked: dict[str, object] = {
        name: list(value) for name in names if (value := getattr(options, name))
    }
    if options.inductor_passes:
        asked["inductor_passes"] = sorted(options.inductor_passes)
    return asked | dict.fromkeys(enabled_passes(options.pass_config), True)


def _backend(changes: Changes, level: CompilationLevel, facts: Facts) -> str:
    """Its name, "" at level 0; and what other levels and backends do not read is set back."""
    options = changes.options
    at = f"level {int(level)}"
    if level is CompilationLevel.PIECEWISE:
        is_inductor = options.use_inductor
        if is_inductor is None:
            is_inductor = facts.device == "cuda"
        backend = options.backend or ("inductor" if is_inductor else "eager")
        if options.use_inductor and backend != "inductor":
            changes.set("use_inductor", None, f"backend {backend!r} was asked for")
    else:
        backend = "" if level is CompilationLevel.NO_COMPILATION else options.backend or "eager"
        if options.backend and not backend:
            changes.set("backend", "", f"{at} compiles nothing")
        if options.use_inductor is not None:
            changes.set("use_inductor", None, f"{at} has no choice of it: level 3 has")
        if level is not CompilationLevel.DYNAMO_ONCE:
            for name, default in (("dynamic_shapes", "auto"), ("guard_policy", "audit")):
                if getattr(options, name) != default:
                    changes.set(name, default, f"{at} makes no trace that serves every size")
    if level is CompilationLevel.NO_COMPILATION:
        if options.debug_dump_path is not None:
            changes.set("debug_dump_path", None, f"{at} compiles nothing that it could tell of")
        if options.splitting_ops == ():
            changes.set("splitting_ops", None, f"{at} cuts at break points: level 3 at operators")
    if not _uses_inductor(level, backend):
        where = f"backend {backend!r} at {at}" if backend else at
        reason = f"{where} compiles no piece with Inductor"
        if options.inductor_compile_config:
            changes.set("inductor_compile_config", {}, reason)
        if options.cache_dir is not None:
            changes.set("cache_dir", None, f"{reason}, and keeps nothing")
    elif options.cache_dir is not None and not options.compile_cache:
        changes.set("cache_dir", None, "compile_cache=False keeps nothing")
    return backend


def _uses_inductor(level: CompilationLevel, backend: str) -> bool:
    """Whether pieces are compiled with its options, and kept in the cache."""
    return level >= CompilationLevel.DYNAMO_ONCE and backend == "inductor"


def _partition(changes: Changes, level: CompilationLevel, backend: str, facts: Facts) -> None:
    if not changes.options.use_inductor_graph_partition:
        return
    needs = {
        "level 3": level is CompilationLevel.PIECEWISE,
        "backend 'inductor'": backend == "inductor",
        "a CUDA device": facts.device == "cuda",
    }
    missing = [what for what, is_there in needs.items() if not is_there]
    if missing:
        found = f"True, without {', '.join(missing)}"
        changes.wrong("use_inductor_graph_partition", found, ", ".join(needs))


def _passes(changes: Changes, backend: str, facts: Facts) -> None:
    """At level 3: what backend and device must have for them, and a graph that holds attention."""
    options = changes.options
    passes = options.pass_config
    enabled = enabled_passes(passes)
    if backend not in ("eager", "inductor"):
        for name in [*enabled, *(["inductor_passes"] if options.inductor_passes else [])]:
            changes.wrong(name, f"with backend {backend!r}", "none, or backend eager or inductor")
    if passes.enable_async_tp and facts.device != "cuda":
        found = f"True on device {facts.device or 'not known'}"
        changes.wrong("pass_config.enable_async_tp", found, "False, or a CUDA device")
    whole = [f"pass_config.{name}" for name in _FULL_CHAIN if getattr(passes, name)]
    if not whole or options.use_inductor_graph_partition:
        return
    if options.splitting_ops is None:
        reason = f"{', '.join(whole)} needs attention inside the graph"
        changes.set("splitting_ops", (), reason)
        return
    attention = set(map(op_name, facts.attention_ops))
    cut = [name for name in options.splitting_ops if op_name(name) in attention]
    if cut:
        found = f"{cut}, while {', '.join(whole)} needs attention inside the graph"
        changes.wrong("splitting_ops", found, "no attention operator, or None")


def check_parallel_sizes(changes: Changes, sizes: Sequence[int], facts: Facts) -> None:
    """Raises ``ConfigError`` where sequence parallelism, which is compiled for exact sizes that the
    ranks can share, has none."""
    if not changes.options.pass_config.enable_sequence_parallelism:
        return
    if not any(size % facts.tp_size == 0 for size in sizes):
        found = f"{list(sizes)}, with pass_config.enable_sequence_parallelism"
        fail("compile_sizes", found, f"at least one multiple of tp_size = {facts.tp_size}")


def ranges_of(changes: Changes, most_tokens: int) -> tuple[tuple[int, int], ...]:
    """The ranges that are compiled for at level 3, the last up to ``most_tokens``; else none."""
    if changes.level is not CompilationLevel.PIECEWISE:
        return ()
    asked, passes = changes.options.compile_ranges_endpoints or (), changes.options.pass_config
    kept = tuple(end for end in asked if end <= most_tokens)
    if kept != asked:
        reason = f"no batch has more than max_num_batched_tokens = {most_tokens} tokens"
        changes.set("compile_ranges_endpoints", kept, reason)
    ends = {*kept, most_tokens}
    if passes.enable_fi_allreduce_fusion:
        ends.add(min(passes.fi_allreduce_fusion_max_token_num, most_tokens))
    ordered = sorted(ends)
    return tuple(zip([1, *(end + 1 for end in ordered)], ordered, strict=False))


def compile_plan(
    changes: Changes,
    facts: Facts,
    environment: Environment,
    *,
    splitting_ops: tuple[str, ...],
    ranges: tuple[tuple[int, int | None], ...],
    sizes: tuple[int, ...],
) -> CompilePlan:
    """Raises ``ConfigError`` where compiled code is to be kept and no folder is known."""
    options, level = changes.options, changes.level
    cache_dir = None
    if options.compile_cache and level is not CompilationLevel.NO_COMPILATION:
        cache_dir = options.cache_dir or environment.cache_dir
        if cache_dir is None and _uses_inductor(level, changes.backend):
            accepted = "a path, GRAPHRT_CACHE_DIR, a home directory, or compile_cache=False"
            fail("cache_dir", "None", accepted)
    return CompilePlan(
        level=level,
        backend=changes.backend,
        splitting_ops=splitting_ops,
        attention_ops=facts.attention_ops,
        attention_writes_cache=facts.attention_writes_cache,
        ranges=ranges,
        sizes=sizes,
        dynamic_shapes=options.dynamic_shapes,
        guard_policy=options.guard_policy,
        custom_ops=options.custom_ops,
        inductor_compile_config=options.inductor_compile_config,
        inductor_passes=options.inductor_passes,
        pass_config=options.pass_config,
        use_inductor_graph_partition=bool(options.use_inductor_graph_partition),
        cache_dir=cache_dir,
        compile_cache=options.compile_cache,
        debug_dump_path=options.debug_dump_path,
    )
