"""Asks afterwards whether a step was right, and why it ran as it did."""

from __future__ import annotations

from graphrt.verify.compare import Comparison, Difference, compare
from graphrt.verify.explain import advice, explain
from graphrt.verify.padding import (
    UNPADDED_TOLERANCE,
    arbitrary_buffers,
    check_padding,
    check_padding_unread,
    varied_padding,
)
from graphrt.verify.replay import (
    ForwardHook,
    Verification,
    check_replay,
    forward_hooks,
    require_compared,
    require_other_example,
    require_varied_for_memos,
)
from graphrt.verify.run_state import RunState, WrittenRows

__all__ = [
    "UNPADDED_TOLERANCE",
    "Comparison",
    "Difference",
    "ForwardHook",
    "RunState",
    "Verification",
    "WrittenRows",
    "advice",
    "arbitrary_buffers",
    "check_padding",
    "check_padding_unread",
    "check_replay",
    "compare",
    "explain",
    "forward_hooks",
    "require_compared",
    "require_other_example",
    "require_varied_for_memos",
    "varied_padding",
]
