"""Every combination of options that resolves to other keys, served once by an engine."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from test_llm_pairwise import CASES, LOAD, REPLAY, named, resolution, serves_what_it_decides


def other_resolutions() -> list[dict[str, Any]]:
    """A case for every resolution that no pairwise case has."""
    met, chosen = {resolution(case) for case in CASES}, []
    factors = {**REPLAY["FACTORS"], "exclude": ((),)}
    for values in product(*factors.values()):
        case = dict(zip(factors, values, strict=True))
        if resolution(case) not in met:
            met.add(resolution(case))
            chosen.append(case)
    return chosen


@pytest.mark.parametrize("case", other_resolutions(), ids=named)
def test_every_other_resolution_is_met_by_the_engine(case):
    """With the pairwise cases: each combination that resolves differently is met once."""
    serves_what_it_decides(case, LOAD[:3], max_loras=2, verify_first_replay=False)
