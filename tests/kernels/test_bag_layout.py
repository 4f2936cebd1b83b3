"""Example-major to feature-major ids: the CPU's kernel against plain loops, and the GPU's against the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.kernels.cpu import bag_layout as cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def bags(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, lengths and starts of a batch; bags from empty to longer than a tile."""
    num_samples, num_features = draw(st.sampled_from([0, 1, 3, 33])), draw(st.sampled_from([1, 2, 5, 35]))
    longest = draw(st.sampled_from([0, 1, 3, 60, 255]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    lengths = random.integers(0, longest + 1, (num_samples, num_features))
    totals = lengths.sum(1)
    ids = random.integers(0, 2**31 - 1, totals.sum())
    dtypes = draw(st.sampled_from([(np.int32, np.uint8), (np.int64, np.int32)]))
    return ids.astype(dtypes[0]), lengths.astype(dtypes[1]), np.cumsum(totals) - totals


@settings(deadline=None, max_examples=50)
@given(bags())
def test_ids_are_reordered_by_feature_and_back(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    ids, lengths, starts = batch
    num_samples, num_features = lengths.shape
    found, offsets = cpu.to_feature_major(ids, lengths, starts)
    pieces = np.split(ids, np.cumsum(lengths.astype(np.int64))[:-1])
    expected = [pieces[b * num_features + f] for f in range(num_features) for b in range(num_samples)]
    assert found.tolist() == [int(id_) for piece in expected for id_ in piece]
    assert offsets.tolist() == [0, *np.cumsum(lengths.T.astype(np.int64)).tolist()]
    back, counts, begins = cpu.to_example_major(found, offsets, num_features, ids.dtype.type)
    assert back.tolist() == ids.tolist()
    assert counts.tolist() == lengths.tolist()
    assert begins.tolist() == [*starts.tolist(), len(ids)]


@settings(deadline=None, max_examples=15 if DEVICE == "cpu" else 100)
@given(bags())
def test_the_gpu_reorders_as_the_cpu_does(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    pytest.importorskip("triton")
    from rowstead.kernels.gpu import bag_layout as gpu

    ids, offsets = gpu.to_feature_major(*(torch.from_numpy(part).to(DEVICE) for part in batch))
    expected = cpu.to_feature_major(*batch)
    assert ids.dtype == torch.from_numpy(batch[0]).dtype
    assert (ids.tolist(), offsets.tolist()) == (expected[0].tolist(), expected[1].tolist())
