"""The mix of ids in torch gives the bits of the one that reads logs."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowstead.data.hashing import hash_to_rows
from rowstead.kernels.mix import mix64_tensor, uniform

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, max_size=50), st.one_of(st.integers(1, 100), st.integers(1, 2**62)))
def test_mix_in_torch_gives_the_rows_of_training_bit_for_bit(ids, num_rows):
    mixed = torch.bitwise_and(mix64_tensor(torch.tensor(ids, dtype=torch.int64)), 2**63 - 1) % num_rows
    assert mixed.tolist() == hash_to_rows(np.array(ids, np.int64), num_rows, "mix").tolist()


@given(st.lists(INT64, min_size=1, max_size=50))
def test_mix_is_splitmix64_in_python_integers(ids):
    mask = 2**64 - 1

    def mixed(id64: int) -> int:
        z = (id64 + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert [value % 2**64 for value in mix64_tensor(torch.tensor(ids)).tolist()] == [mixed(i) for i in ids]


@given(INT64, INT64)
def test_uniform_numbers_are_from_0_to_below_1(counter, salt):
    value = uniform(torch.tensor([counter]), salt).item()
    assert 0 <= value < 1
    assert value == uniform(torch.tensor([counter]), salt).item()
