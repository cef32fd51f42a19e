"""From a batch's shape to a decision, by table look-up. Pure: no torch, no clock, no engine."""

from graphrt.dispatch.buckets import BucketDispatcher, BucketKey
from graphrt.dispatch.dispatcher import NOTHING, CUDAGraphDispatcher, check_count

__all__ = ["NOTHING", "BucketDispatcher", "BucketKey", "CUDAGraphDispatcher", "check_count"]
