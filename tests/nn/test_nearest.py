"""Nearest neighbours are those of a sort of all scores, as arrays that other libraries take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.nn import nearest as module
from rowstead.nn.nearest import Metric, nearest
from rowstead.spec.errors import RowsteadError


@settings(max_examples=50, deadline=None)
@given(
    num_queries=st.integers(0, 5),
    num_keys=st.integers(0, 20),
    width=st.integers(1, 4),
    k=st.integers(1, 25),
    metric=st.sampled_from(["cosine", "dot"]),
    seed=st.integers(0, 1000),
)
def test_they_are_the_first_of_all_keys_sorted(
    num_queries: int, num_keys: int, width: int, k: int, metric: Metric, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    queries = rng.integers(-3, 4, (num_queries, width)).astype(np.float32)
    keys = rng.integers(-3, 4, (num_keys, width)).astype(np.float32)
    scores, indices = nearest(queries, keys, k, metric=metric)
    exact = queries.astype(np.float64) @ keys.T
    if metric == "cosine":
        lengths = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(keys, axis=1)
        exact = np.divide(exact, lengths, out=np.zeros_like(exact), where=lengths > 0)
    assert scores.shape == indices.shape == (num_queries, min(k, num_keys))
    assert (scores.dtype, indices.dtype) == (np.float32, np.int64)
    assert scores.flags.c_contiguous
    assert indices.flags.c_contiguous
    np.testing.assert_allclose(scores, -np.sort(-exact, axis=1)[:, :k], atol=1e-6)
    np.testing.assert_allclose(scores, np.take_along_axis(exact, indices, axis=1), atol=1e-6)
    assert all(len(set(row)) == len(row) for row in indices.tolist())


def test_many_queries_are_searched_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    queries, keys = rng.normal(size=(50, 8)).astype(np.float32), rng.normal(size=(30, 8)).astype(np.float32)
    whole = nearest(queries, keys, 4)
    monkeypatch.setattr(module, "BLOCK_SCORES", 100)
    np.testing.assert_array_equal(nearest(queries, keys, 4)[1], whole[1])


def test_what_does_not_fit_is_refused() -> None:
    one, other = np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)
    with pytest.raises(RowsteadError, match="must be two tables of vectors of one width"):
        nearest(one, other)
    with pytest.raises(RowsteadError, match="k must be at least 1"):
        nearest(one, one, 0)
    with pytest.raises(RowsteadError, match="no metric `cosin`: did you mean `cosine`"):
        nearest(one, one, metric="cosin")  # type: ignore[arg-type]
