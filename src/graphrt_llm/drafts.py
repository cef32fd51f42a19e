"""Drafts for speculative decoding: what followed the same few tokens earlier in the same request.

Source: prompt look-up decoding (Saxena 2023).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LONGEST = 3
"""Tokens that are looked up, and fewer where so many do not occur earlier."""


def ngram_drafts(tokens: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """At most ``most`` tokens that may follow ``tokens``, a pure function of both.

    The latest earlier place that ends with the same tokens decides; none where there is none.
    """
    for length in range(min(LONGEST, len(tokens) - 1), 0, -1):
        places = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
        found = np.flatnonzero((places == tokens[-length:]).all(1))
        if found.size:
            start = found[-1] + length
            return tokens[start : start + most]
    return tokens[:0]
