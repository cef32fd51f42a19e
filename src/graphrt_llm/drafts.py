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
    # Most requests have none: comparing their last token with the others is all that these cost.
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    for back in range(1, LONGEST):
        longer = places[places >= back]
        if longer.size:
            longer = longer[tokens[longer - back] == tokens[-1 - back]]
        if not longer.size:
            break
        places = longer
    if not places.size:
        return tokens[:0]
    start = places[-1] + 1
    return tokens[start : start + most]
