"""What a user may ask of a runtime, and the facts that limit it: frozen, keyword-only, checked.

In an option ``None`` means "not asked: ``resolve`` decides". What is asked is used as asked, or is
adjusted with a reason, or is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from graphrt.batch import CUDAGraphMode
from graphrt.config.checked import (
    MOST_TOKENS,
    FrozenMapping,
    ListAsTuple,
    Natural,
    Positive,
    Tokens,
    as_dict,
    by_name,
    config_class,
    from_mapping,
)
from graphrt.config.compilation import CompilationConfig

MOST_ADAPTERS = 2**10
MOST_UBATCHES = 64
MOST_TIMEOUT_S = 10.0**6
"""Of a wait: eleven days. Threads and sockets refuse some times that are much longer."""


@config_class
class UBatchConfig:
    """Steps split into micro-batches, one of which computes while another communicates.

    Units: thresholds are unpadded tokens of the rank that has fewest. Raises ``ConfigError``.

    ``num_ubatches``: Micro-batches of a split step, at most 64. 1: no step is split.
    ``decode_token_threshold``: A uniform batch with fewer tokens is not split.
    ``prefill_token_threshold``: A mixed batch, and any batch without a split graph, with fewer
      tokens is not split.
    ``num_comm_sms``: Multiprocessors left to communication while a split step runs.
    ``allow_eager``: Split large batches that no split graph serves eagerly. False: they are not
      split.
    ``auto_off``: On a GPU, a ``Runtime`` times each split graph and its unsplit form once both are
      captured, and leaves a size unsplit (``NOT_PROFITABLE``) where that is not slower. It cuts no
      eager step then.
    ``stall_timeout_s``: Seconds without a hand-over after which a split step or its capture is
      given up.
    """

    num_ubatches: Annotated[int, Field(ge=1, le=MOST_UBATCHES)] = 1
    decode_token_threshold: Tokens = 32
    prefill_token_threshold: Tokens = 512
    num_comm_sms: Natural = 20
    allow_eager: bool = True
    auto_off: bool = True
    stall_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0


@config_class
class RankConfig:
    """How long ranks wait for one another, and how often they compare decisions.

    Raises ``ConfigError``.

    ``step_timeout_s``: Most seconds that a rank waits for the others in a step; at most 10**6.
    ``capture_timeout_s``: The same in a capture.
    ``same_batch``: The ranks share a model and see one batch, as with tensor parallelism: another
      batch than that of the other ranks is an error.
    ``check_every``: After how many steps such ranks compare what they have decided and served: in
      between each decides by itself. Above 1 a step costs no message, and a rank that serves
      something else may give wrong tokens until the next comparison.
    """

    step_timeout_s: Annotated[float, Field(gt=0, le=MOST_TIMEOUT_S)] = 30.0
    capture_timeout_s: Annotated[float, Field(gt=0, le=MOST_TIMEOUT_S)] = 600.0
    same_batch: bool = False
    check_every: Positive = 1


@config_class
class RuntimeConfig:
    """Everything a user may ask of one runtime. The configs in it may be given as mappings.

    Raises ``ConfigError`` with every problem of one construction.

    ``compilation``: Which graphs to capture, and at which sizes.
    ``max_num_seqs``: S: most requests in one step; at most 2**20.
    ``max_num_batched_tokens``: B: most tokens in one step; at most 2**20.
    ``num_speculative_tokens``: A uniform decode request brings ``q = 1 + num_speculative_tokens``
      tokens.
    ``max_loras``: Most distinct adapters in one batch; 0: none. At most 1024.
    ``lora_capture``: Which adapter counts get graphs: each, powers_of_two or max_only; the others
      are rounded up to one that has.
    ``interactivity``: Add every size 1..32 to the default ladder: less padding for few users, more
      graphs.
    ``on_miss``: strict: a step that would run eager raises ``MissError`` instead.
    ``verify_first_replay``: Compare each program's first replay with eager before it serves, and
      the first step of each kind that is cut into micro-batches eagerly with the whole batch.
    ``verify_every``: Compare 1 of N steps that are replayed, or cut eagerly. None: none.
    ``watch``: How a replaced weight, attribute, variable or host value that graphs read is
      noticed. spread: registrations in modules at once, all else four places a step; always: all
      at each step.
    ``nvtx``: Put a range with mode and key around each graph or eager run, for Nsight Systems.
    ``stale_check``: How a replay checks that its inputs are those that were captured.
    ``on_capture_error``: skip: a key whose capture fails runs eager, with CAPTURE_FAILED as its
      reason.
    ``max_graph_bytes``: Most bytes of pools and executables; a capture that exceeds it fails.
      None: no limit.
    ``max_graphs``: Most device graphs. None: as many as the device has.
    ``ubatch``: Which steps are split into micro-batches.
    ``ranks``: How long ranks wait for one another.
    """

    compilation: Annotated[CompilationConfig, from_mapping(CompilationConfig)] = CompilationConfig()
    max_num_seqs: Tokens = 256
    max_num_batched_tokens: Tokens = 8192
    num_speculative_tokens: Annotated[int, Field(ge=0, lt=MOST_TOKENS)] = 0
    max_loras: Annotated[int, Field(ge=0, le=MOST_ADAPTERS)] = 0
    lora_capture: Literal["each", "powers_of_two", "max_only"] = "powers_of_two"
    interactivity: bool = False
    on_miss: Literal["eager", "strict"] = "eager"
    verify_first_replay: bool = True
    verify_every: Positive | None = None
    watch: Literal["spread", "always", "off"] = "spread"
    nvtx: bool = False
    stale_check: Literal["off", "identity", "pointer"] = "identity"
    on_capture_error: Literal["raise", "skip"] = "raise"
    max_graph_bytes: Positive | None = None
    max_graphs: Positive | None = None
    ubatch: Annotated[UBatchConfig, from_mapping(UBatchConfig)] = UBatchConfig()
    ranks: Annotated[RankConfig, from_mapping(RankConfig)] = RankConfig()


class AttentionSupport(IntEnum):
    """What an attention backend permits inside a FULL graph. Ordered: more is greater.

    ``NEVER``: No batch.
    ``UNIFORM_SINGLE_TOKEN_DECODE``: Every request brings exactly one token.
    ``UNIFORM_BATCH``: Every request brings equally many tokens.
    ``ALWAYS``: Every batch.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


Support = Annotated[AttentionSupport, by_name(AttentionSupport)]


@config_class
class ModeLimit:
    """Something that permits one mode (and NONE) only: every other mode becomes ``mode``.

    An encoder-decoder model is limited to FULL_DECODE_ONLY, a pooling model to PIECEWISE, a
    communication library that cannot be captured to NONE. ``reason`` is shown to the user.
    """

    mode: Annotated[CUDAGraphMode, by_name(CUDAGraphMode)]
    reason: Annotated[str, Field(min_length=1)]


@config_class
class Facts:
    """What the engine and its device permit inside a graph, named without any model or library.

    Names of supports and modes are accepted as strings. Raises ``ConfigError``.

    ``attention_support``: What the attention backend permits inside a FULL graph: NEVER,
      UNIFORM_SINGLE_TOKEN_DECODE, UNIFORM_BATCH or ALWAYS.
    ``attention_groups``: Support by attention group; the least one counts, and messages name its
      group.
    ``has_break_points``: The model is cut by break points in plain Python; read below compile
      level 3.
    ``splitting``: What the compiler cuts at, at level 3: attention, only other ops, or nothing at
      all.
    ``attention_ops``: The operators that compute attention. Level 3 cuts at them unless
      ``splitting_ops`` says where; ``splitting`` then follows from both.
    ``attention_writes_cache``: Whether these operators write the cache that they read, as arguments
      declared mutable. Only then compiled code may hold them: a compiler moves other writes to the
      end of its graph, and attention would read the cache of the step before.
    ``device``: "cuda", "cpu" or "simulated"; None: not known, taken as one without Inductor.
    ``tp_size``: Ranks that share each layer by tensor parallelism.
    ``piecewise_available``: Whether piecewise graphs are possible. None: it follows from the
      fields above.
    ``mode_limits``: Whatever else permits one mode only.
    ``compute_capability``: (major, minor) of the device; None where it has none.
    ``num_sms``: Multiprocessors of the device; None where it has none.
    """

    attention_support: Support = AttentionSupport.ALWAYS
    attention_groups: Annotated[
        Mapping[str, Support],
        BeforeValidator(as_dict),
        AfterValidator(FrozenMapping),
    ] = FrozenMapping({})
    has_break_points: bool = True
    splitting: Literal["attention", "other", "none"] = "attention"
    attention_ops: Annotated[tuple[str, ...], ListAsTuple] = ()
    attention_writes_cache: bool = False
    device: Literal["cuda", "cpu", "simulated"] | None = None
    tp_size: Positive = 1
    piecewise_available: bool | None = None
    mode_limits: Annotated[tuple[ModeLimit, ...], ListAsTuple] = ()
    compute_capability: tuple[Natural, Natural] | None = None
    num_sms: Positive | None = None

    def least_support(self) -> tuple[AttentionSupport, str]:
        """The support that counts, and what set it."""
        named = {f"attention group {name!r}": have for name, have in self.attention_groups.items()}
        named["the attention backend"] = self.attention_support
        who = min(named, key=lambda name: named[name])
        return named[who], who

    def piecewise_at(self, level: int) -> bool:
        """True if the model can be cut, with attention outside the pieces, at compile ``level``.

        Level 3 cuts what it traced; levels 1 and 2 never do; level 0 has break points.
        """
        if self.piecewise_available is not None:
            return self.piecewise_available
        if level in (1, 2):
            return False
        return self.splitting == "attention" if level == 3 else self.has_break_points
