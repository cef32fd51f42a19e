"""What a user may ask of the engine. Batch limits and graphs are asked of the runtime inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from graphrt import RuntimeConfig
from graphrt_llm.errors import EngineConfigError

DType = Literal["float64", "float32", "bfloat16", "float16"]
LoadFormat = Literal["safetensors", "dummy"]
DeviceName = Literal["auto", "cuda", "simulated"]
CaptureWhen = Literal["before_serving", "by_priority"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Wishes; None means "not asked", and the docstring says what is done then.

    Errors: ``EngineConfigError`` for a value that cannot be meant. What depends on the model is
    checked when the engine is made.
    """

    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """``max_num_seqs`` and ``max_num_batched_tokens`` bound the scheduler too."""
    max_model_len: int | None = None
    """Tokens of prompt and output together. None: the model's longest context."""
    block_size: int = 16
    """Tokens in a block of the cache."""
    num_blocks: int | None = None
    """Blocks of the cache, the null block included. None: enough for ``max_num_seqs`` requests of
    full length; on a GPU at most what fits ``cache_memory_fraction``."""
    cache_memory_fraction: float = 0.8
    """Share of the device memory that is free after the weights were loaded."""
    dtype: DType | None = None
    """None: the checkpoint's; float32 if it names none."""
    load_format: LoadFormat = "safetensors"
    """``dummy``: random weights, seeded by ``seed``."""
    attention_backend: str = "auto"
    """``auto``: on a GPU in half precision ``paged``, our kernel for few decoding requests, over
    FlashInfer where it is installed and can serve dtype, heads and device, else over ``sdpa``;
    elsewhere ``sdpa``. The engine's ``attention`` says which, and why."""
    overlap: bool | None = None
    """Prepare a step while the device runs the one before: a step's tokens are then returned by the
    call after it, and a request that stops at a token runs one step too many. None: on a GPU."""
    capture: CaptureWhen = "before_serving"
    """``before_serving``: by ``LLMEngine.capture`` alone. ``by_priority``: every step captures at
    most one missing graph first, that of its own batch before others, until none is missing; what
    has none yet runs eager. Tokens are the same."""
    device: DeviceName = "auto"
    """``auto``: a GPU if there is one, else the simulated device."""
    seed: int = 0
    """Of random weights, and of requests that sample without a seed of their own."""

    def __post_init__(self) -> None:
        def check(holds: bool, name: str, expected: str) -> None:
            if not holds:
                raise EngineConfigError(
                    f"EngineConfig.{name}", expected=expected, found=repr(getattr(self, name))
                )

        for name in ("max_model_len", "block_size", "num_blocks"):
            value = getattr(self, name)
            is_unasked = value is None and name != "block_size"
            check(is_unasked or (type(value) is int and value >= 1), name, "an integer >= 1")
        check(type(self.seed) is int and 0 <= self.seed < 2**63, "seed", "an integer in [0, 2**63)")
        check(0 < self.cache_memory_fraction <= 1, "cache_memory_fraction", "a share in (0, 1]")
        check(
            self.dtype is None or self.dtype in get_args(DType),
            "dtype",
            f"None or one of {', '.join(get_args(DType))}",
        )
        check(
            self.load_format in get_args(LoadFormat),
            "load_format",
            f"one of {', '.join(get_args(LoadFormat))}",
        )
        check(
            self.capture in get_args(CaptureWhen),
            "capture",
            f"one of {', '.join(get_args(CaptureWhen))}",
        )
