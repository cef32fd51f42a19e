"""Asks afterwards whether a step was right, and why it ran as it did."""

from __future__ import annotations

from graphrt.verify.addresses import Address, Move, addresses_of, moved_inputs
from graphrt.verify.compare import Comparison, Difference, compare
from graphrt.verify.explain import explain
from graphrt.verify.hoststate import ForwardHook, HostState, forward_hooks
from graphrt.verify.poison import (
    Unwritten,
    check_padding_unread,
    find_unwritten,
    poison,
    poisoned_padding,
)
from graphrt.verify.replaycheck import Verification, check_replay

__all__ = [
    "Address",
    "Comparison",
    "Difference",
    "ForwardHook",
    "HostState",
    "Move",
    "Unwritten",
    "Verification",
    "addresses_of",
    "check_padding_unread",
    "check_replay",
    "compare",
    "explain",
    "find_unwritten",
    "forward_hooks",
    "moved_inputs",
    "poison",
    "poisoned_padding",
]
