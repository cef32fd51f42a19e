"""The pairwise golden decisions, against a second and slow statement of the rules."""

from __future__ import annotations

import json
import runpy
from itertools import combinations, product
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parent / "golden"
REPLAY = runpy.run_path(str(GOLDEN / "replay.py"))
SIZES, MOST_REQUESTS, MOST_LORAS = REPLAY["SIZES"], REPLAY["MAX_NUM_SEQS"], REPLAY["MAX_LORAS"]
ROUTINES = {
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL": ("FULL", "FULL"),
    "FULL_DECODE_ONLY": ("FULL", None),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}


def mode_of(mode: str, support: str, q: int) -> str | None:
    """The mode that counts; None where the option is an error. Piecewise is always available."""
    if mode == "FULL" and support == "NEVER":
        return None
    if mode == "FULL" and support != "ALWAYS":
        mode = "FULL_AND_PIECEWISE"
    decodes = ["ALWAYS", "UNIFORM_BATCH"] + ["UNIFORM_SINGLE_TOKEN_DECODE"] * (q == 1)
    if ROUTINES[mode][0] == "FULL" and support not in decodes:
        mode = "PIECEWISE"
    return mode


def captured_counts(policy: str, specialize: bool, q: int) -> list[int]:
    def has_graph(count: int) -> bool:
        if count == 0:
            return specialize
        if policy == "each" and q == 1:
            return True
        if policy == "powers_of_two" and bin(count).count("1") == 1:
            return True
        return count == MOST_LORAS

    return [count for count in range(MOST_LORAS + 1) if has_graph(count)]


def decode_sizes(q: int) -> list[int]:
    limit = min(q * MOST_REQUESTS, max(SIZES))
    found = set()
    for size in SIZES:
        if size <= limit:
            while size % q:
                size += 1
            while size > limit:
                size -= q
            found.add(size)
    return sorted(found)


def decide(case: dict[str, Any], tokens: int, uniform: bool, loras: int) -> list[Any]:
    """Mode, tokens, requests, uniform, has_lora, adapters, reason: by looking at every key."""
    q = case["q"]
    mode = mode_of(case["mode"], case["support"], q)
    decode, mixed = ROUTINES[mode]
    count = min(
        n for n in captured_counts(case["lora_capture"], case["specialize"], q) if n >= loras
    )
    routines = []
    if uniform and decode != mixed:
        routines.append((decode, decode_sizes(q), True))
    if mixed is not None:
        routines.append((mixed, list(SIZES), False))
    fitting = [
        (name, min(s for s in sizes if s >= tokens), is_decode)
        for name, sizes, is_decode in routines
        if any(s >= tokens for s in sizes)
    ]
    allowed = [found for found in fitting if found[0] not in case["exclude"]]
    if not allowed:
        reason = "EXCLUDED" if fitting else "ABOVE_MAX" if routines else "MODE_NONE"
        return ["NONE", tokens, None, False, loras > 0, loras, reason]
    name, size, is_decode = allowed[0]
    requests = None
    if is_decode:
        requests = size // q
    elif name == "FULL":
        requests = min(size, MOST_REQUESTS)
    reason = "HIT" if (size, count) == (tokens, loras) else "PADDED"
    return [name, size, requests, is_decode, count > 0, count, reason]


def test_pairwise_decisions_are_those_of_the_slow_rules() -> None:
    lines = (GOLDEN / "pairwise.jsonl").read_text(encoding="utf-8").splitlines()
    case: dict[str, Any] = {}
    reasons = set()
    for line in map(json.loads, lines):
        if isinstance(line, dict):
            case = line
            mode = mode_of(case["mode"], case["support"], case["q"])
            assert ("error" in case) == (mode is None)
            if mode is not None:
                plan, q = case["resolved"], case["q"]
                assert plan["cudagraph_mode"] == mode
                assert plan["lora_counts"] == captured_counts(
                    case["lora_capture"], case["specialize"], q
                )
                is_separate = ROUTINES[mode][0] != ROUTINES[mode][1]
                assert plan["decode_capture_sizes"] == (decode_sizes(q) if is_separate else [])
            continue
        tokens, uniform, loras, *answer = line
        assert answer == decide(case, tokens, uniform, loras), (case, line)
        reasons.add(answer[-1])
    assert reasons == {"HIT", "PADDED", "ABOVE_MAX", "MODE_NONE", "EXCLUDED"}


def test_pairwise_file_is_what_the_library_decides() -> None:
    text = REPLAY["replay_pairwise"]()
    expected = (GOLDEN / "pairwise.jsonl").read_text(encoding="utf-8")
    for found, wanted in zip(text.splitlines(), expected.splitlines(), strict=False):
        assert found == wanted
    assert text == expected


def test_pairwise_selection_meets_every_pair_of_values() -> None:
    factors, cases = REPLAY["FACTORS"], REPLAY["pairwise_cases"]()
    assert len(cases) < 30
    for a, b in combinations(factors, 2):
        met = {(case[a], case[b]) for case in cases}
        assert met == set(product(factors[a], factors[b]))
