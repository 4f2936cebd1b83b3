"""Exact nearest neighbours among embedding rows, in NumPy, a block of queries at a time."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rowstead.spec.errors import RowsteadError, did_you_mean

Metric = Literal["cosine", "dot"]
BLOCK_SCORES = 1 << 24
"""Scores that are held at a time, 64 MiB."""


def nearest(
    queries: NDArray[np.float32], keys: NDArray[np.float32], k: int = 10, *, metric: Metric = "cosine"
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The `k` keys with the highest scores for each query: scores [n, k], best first, and indices [n, k] of keys.

    `queries` are [n, width] and `keys` [m, width]. The score is their dot product, with `cosine` of vectors scaled to length 1. With
    fewer than `k` keys there are fewer columns. What FAISS's `IndexFlatIP` finds, without its index.
    """
    queries, keys = (np.ascontiguousarray(vectors, np.float32) for vectors in (queries, keys))
    if queries.ndim != 2 or keys.ndim != 2 or queries.shape[1] != keys.shape[1]:
        raise RowsteadError(f"queries {queries.shape} and keys {keys.shape} must be two tables of vectors of one width")
    if k < 1:
        raise RowsteadError(f"k must be at least 1, got {k}")
    if metric not in get_args(Metric):
        raise RowsteadError(f"no metric `{metric}`: {did_you_mean(metric, get_args(Metric))}")
    if metric == "cosine":
        queries, keys = _unit(queries), _unit(keys)
    k = min(k, len(keys))
    scores, indices = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
    if not k:
        return scores, indices
    step = max(1, BLOCK_SCORES // len(keys))
    for start in range(0, len(queries), step):
        block = queries[start : start + step] @ keys.T
        best = np.argpartition(-block, k - 1, axis=1)[:, :k] if k < len(keys) else np.tile(np.arange(k), (len(block), 1))
        best.sort(axis=1)  # of equal scores, the lower index comes first
        found = np.take_along_axis(block, best, axis=1)
        order = np.argsort(-found, axis=1, kind="stable")
        scores[start : start + step] = np.take_along_axis(found, order, axis=1)
        indices[start : start + step] = np.take_along_axis(best, order, axis=1)
    return scores, indices


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """The vectors scaled to length 1; zeros stay zeros."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1), np.float32)
