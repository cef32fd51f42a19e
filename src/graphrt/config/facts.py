"""What the engine and its device say about themselves: no wishes, no model and no library by name.

Torch-free, so that a plan can be resolved, tested and compared where there is no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import IntEnum
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from graphrt.batch import CUDAGraphMode
from graphrt.config.checked import by_name, config_class


class AttentionSupport(IntEnum):
    """What an attention backend permits inside a FULL graph. Ordered: more is greater."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Every request brings exactly one token."""
    UNIFORM_BATCH = 2
    """Every request brings equally many tokens."""
    ALWAYS = 3


def _as_dict(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


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
    """What may be inside a graph here. Names of supports and modes are accepted as strings."""

    attention_support: Support = AttentionSupport.ALWAYS
    attention_groups: Annotated[
        Mapping[str, Support], BeforeValidator(_as_dict), AfterValidator(MappingProxyType)
    ] = field(default_factory=lambda: MappingProxyType({}))
    """Support by attention group; the least one counts, and messages name its group."""
    has_break_points: bool = True
    """The model is cut by break points in plain Python; read below compile level 3."""
    splitting: Literal["attention", "other", "none"] = "attention"
    """What the compiler cuts at, at level 3: attention, only other ops, or nothing at all."""
    piecewise_available: bool | None = None
    """The engine's own word on piecewise graphs. None: it follows from the two fields above."""
    mode_limits: Annotated[
        tuple[ModeLimit, ...],
        BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    ] = ()
    compute_capability: tuple[int, int] | None = None
    """(major, minor) of the device; None where it has none."""

    def least_support(self) -> tuple[AttentionSupport, str]:
        """The support that counts, and who set it."""
        named = {f"attention group {name!r}": have for name, have in self.attention_groups.items()}
        named["the attention backend"] = self.attention_support
        who = min(named, key=lambda name: named[name])
        return named[who], who

    def piecewise_at(self, level: int) -> bool:
        """True if the model can be cut, with attention outside the pieces, at compile ``level``."""
        if self.piecewise_available is not None:
            return self.piecewise_available
        return self.splitting == "attention" if level == 3 else self.has_break_points
