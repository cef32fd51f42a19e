"""What ``--json`` prints. Keys and types are stable, because scripts depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from graphrt.batch import BatchDescriptor, Decision, RuntimeMode
from graphrt.config import CompilePlan, Resolved


def of_resolved(resolved: Resolved) -> dict[str, Any]:
    """The plan and its adjustments."""
    plan = resolved.plan
    return {
        "cudagraph_mode": plan.cudagraph_mode.name,
        "capture_sizes": list(plan.capture_sizes),
        "decode_capture_sizes": list(plan.decode_capture_sizes),
        "max_capture_size": plan.max_capture_size,
        "num_keys": {mode.name: len(keys) for mode, keys in plan.keys.items()},
        "adjustments": [
            {
                "field": item.field,
                "from": plain(item.asked),
                "to": plain(item.effective),
                "reason": item.reason,
            }
            for item in resolved.adjustments
        ],
        "query_len": plan.query_len,
        "lora_counts": list(plan.lora_counts),
        "limits": {
            "max_num_seqs": plan.max_num_seqs,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
        },
        "capture_order": [_of_key(mode, key) for mode, key in plan.capture_order],
        **({"compile": _of_compile(resolved.compile)} if plan.level else {}),
    }


def _of_compile(plan: CompilePlan) -> dict[str, Any]:
    return {
        "level": int(plan.level),
        "backend": plan.backend,
        "splitting_ops": list(plan.splitting_ops),
        "ranges": [list(item) for item in plan.ranges],
        "sizes": list(plan.sizes),
        "hash": plan.compute_hash(),
    }


def of_decision(decision: Decision) -> dict[str, Any]:
    """Mode, key and reason of one batch."""
    return {**_of_key(decision.mode, decision.descriptor), "reason": decision.reason.name}


def _of_key(mode: RuntimeMode, key: BatchDescriptor) -> dict[str, Any]:
    return {
        "mode": RuntimeMode(mode).name,
        "num_tokens": key.num_tokens,
        "num_reqs": key.num_reqs,
        "uniform": key.uniform,
        "has_lora": key.has_lora,
        "num_active_loras": key.num_active_loras,
    }


def plain(value: object) -> object:
    """``value`` for JSON: enums by name, tuples as lists."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, Enum):
        return value.name
    return [plain(item) for item in value] if isinstance(value, tuple) else value
