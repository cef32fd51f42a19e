"""Asks afterwards whether a step was right, and why it ran as it did."""

from __future__ import annotations

from graphrt.verify.compare import (
    Comparison as Comparison,
    Difference as Difference,
    compare as compare,
)
from graphrt.verify.cuts import (
    check_cut as check_cut,
    require_like_whole as require_like_whole,
)
from graphrt.verify.explain import advice as advice, explain as explain
from graphrt.verify.padding import (
    UNPADDED_TOLERANCE as UNPADDED_TOLERANCE,
    PaddingChecked as PaddingChecked,
    arbitrary_buffers as arbitrary_buffers,
    check_padding as check_padding,
    check_padding_unread as check_padding_unread,
    varied_padding as varied_padding,
)
from graphrt.verify.replay import (
    NUM_ADVANCING_RUNS as NUM_ADVANCING_RUNS,
    ForwardHook as ForwardHook,
    Verification as Verification,
    check_replay as check_replay,
    forward_hooks as forward_hooks,
    noted_eager_segments as noted_eager_segments,
    require_compared as require_compared,
    require_other_example as require_other_example,
    require_varied_for_memos as require_varied_for_memos,
    warn_unverified as warn_unverified,
)
from graphrt.verify.rounding import Rounding as Rounding
from graphrt.verify.run_state import (
    OtherRows as OtherRows,
    RunState as RunState,
    WrittenRows as WrittenRows,
)
