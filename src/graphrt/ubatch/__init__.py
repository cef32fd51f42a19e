"""Micro-batches: how a batch is cut into slices. Torch-free."""

from graphrt.ubatch.slices import (
    SliceMetadata,
    UBatchSlice,
    make_slices,
    slice_metadata,
    wants_split,
)

__all__ = ["SliceMetadata", "UBatchSlice", "make_slices", "slice_metadata", "wants_split"]
