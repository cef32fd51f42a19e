"""From a batch's shape to a decision, by table look-up. Pure: no torch, no clock, no engine."""

from graphrt.dispatch.buckets import (
    BucketDispatcher as BucketDispatcher,
    BucketKey as BucketKey,
    ordered_sizes as ordered_sizes,
)
from graphrt.dispatch.dispatcher import (
    NOTHING as NOTHING,
    CUDAGraphDispatcher as CUDAGraphDispatcher,
    check_count as check_count,
    check_uniform as check_uniform,
)
