"""Asks afterwards whether a step was right, and why it ran as it did."""

from __future__ import annotations

from graphrt.verify.compare import Comparison, Difference, compare
from graphrt.verify.explain import explain
from graphrt.verify.host_snapshot import ForwardHook, HostSnapshot, forward_hooks
from graphrt.verify.padding import (
    Unwritten,
    check_padding_unread,
    find_unwritten,
    poison,
    poisoned_padding,
)
from graphrt.verify.replay import Verification, check_replay

__all__ = [
    "Comparison",
    "Difference",
    "ForwardHook",
    "HostSnapshot",
    "Unwritten",
    "Verification",
    "check_padding_unread",
    "check_replay",
    "compare",
    "explain",
    "find_unwritten",
    "forward_hooks",
    "poison",
    "poisoned_padding",
]
