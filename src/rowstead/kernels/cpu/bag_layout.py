"""From example-major ids, as packed files have them, to feature-major ones, as a `Batch` has them; and back.

Letters: B examples, F features, nnz ids.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]


def to_feature_major(ids: Ints, lengths: Ints, starts: Ints) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids int64 [nnz] and offsets int64 [F*B + 1] of a batch.

    ids int32 or int64 [nnz], example by example, and in each feature by feature; lengths uint8 or int32 [B, F]; starts int64 [B], where the
    ids of each example begin.
    """
    num_samples, num_features = lengths.shape
    out, offsets = np.empty(len(ids), np.int64), np.empty(num_features * num_samples + 1, np.int64)
    _to_feature_major(ids, lengths, starts, out, offsets)
    return out, offsets


def to_example_major(ids: Ints, offsets: Ints, num_features: int, ids_dtype: type) -> tuple[Ints, NDArray[np.int32], Ints]:
    """The inverse: ids of `ids_dtype` [nnz], lengths int32 [B, F], and starts int64 [B + 1], the last of them nnz."""
    num_samples = (len(offsets) - 1) // num_features if num_features else 0
    out: Ints = np.empty(len(ids), ids_dtype)
    lengths = np.empty((num_samples, num_features), np.int32)
    starts = np.empty(num_samples + 1, np.int64)
    _to_example_major(ids, offsets, out, lengths, starts)
    return out, lengths, starts


_kernel = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")


@_kernel
def _to_feature_major(ids, lengths, starts, out, offsets):  # type: ignore[no-untyped-def]
    num_samples, num_features = lengths.shape
    total = offsets[0] = 0
    for f in range(num_features):
        for b in range(num_samples):
            total += lengths[b, f]
            offsets[f * num_samples + b + 1] = total
    for b in range(num_samples):
        at = starts[b]
        for f in range(num_features):
            first = offsets[f * num_samples + b]
            for i in range(np.int64(lengths[b, f])):
                out[first + i] = ids[at + i]
            at += lengths[b, f]


@_kernel
def _to_example_major(ids, offsets, out, lengths, starts):  # type: ignore[no-untyped-def]
    num_samples, num_features = lengths.shape
    at = np.int64(0)
    for b in range(num_samples):
        starts[b] = at
        for f in range(num_features):
            first = offsets[f * num_samples + b]
            count = offsets[f * num_samples + b + 1] - first
            lengths[b, f] = count
            for i in range(count):
                out[at + i] = ids[first + i]
            at += count
    starts[num_samples] = at
