"""Ids of batches are mapped to the rows of cached tables, by compiled loops on a CPU and by torch on a GPU."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.batch import Sparse
from rowstead.kernels.cpu.cache import map_ids_to_rows
from rowstead.stores.groups import map_ids_with_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_ids_are_mapped_to_rows_of_all_tables(lengths: list[list[int]], dtype: torch.dtype) -> None:
    firsts = [-1 if feature == 2 else 100 * feature for feature in range(len(lengths))]
    wanted, offsets = [], [0]
    for first, bags in zip(firsts, lengths, strict=True):
        for length in bags:
            wanted += [-1 if first < 0 else first + id64 for id64 in range(offsets[-1], offsets[-1] + length)]
            offsets.append(offsets[-1] + length)
    sparse = Sparse(ids=torch.arange(offsets[-1], dtype=dtype), offsets=torch.tensor(offsets), num_features=len(lengths))
    by_torch = map_ids_with_torch(sparse.to(DEVICE), torch.tensor(firsts, device=DEVICE))
    assert by_torch.dtype == torch.int64
    assert by_torch.tolist() == wanted
    compiled = np.empty(offsets[-1], np.int64)
    map_ids_to_rows(sparse.ids.numpy(), sparse.offsets.numpy(), sparse.num_samples, np.array(firsts), compiled)
    assert compiled.tolist() == wanted
