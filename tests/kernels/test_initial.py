"""Initial rows have the same bits whichever way they are made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.kernels.initial import draw_with_numba, draw_with_torch, fill_initial_rows, initial_rows, initial_rows_at, salt_of
from rowstead.spec.features import Table

CPU = torch.device("cpu")


@settings(deadline=None)  # the first is compiled
@given(
    first_row=st.integers(0, 2**40),
    first_column=st.integers(0, 9),
    width=st.integers(1, 40),
    numbers=st.lists(st.integers(0, 2**40), min_size=1, max_size=20),
    salt=st.integers(-(2**63), 2**63 - 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_numba_draws_the_bits_of_torch(first_row, first_column, width, numbers, salt, dtype) -> None:
    whole = (2**42, width + 10)
    at = {"first_row": first_row, "first_column": first_column, "whole": whole}
    table = Table(name="t", num_rows=2**41, width=width, features=(0,), **at)
    given = torch.tensor(numbers)
    assert torch.equal(draw_with_numba(table, given, salt, dtype), draw_with_torch(table, given, salt, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_table_that_threads_share_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    table = Table(name="t", num_rows=70_000, width=64, features=(0,))
    numbers = torch.arange(70_000)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = draw_with_torch(table, numbers, salt_of(table, 3), wide).to(dtype)
    assert torch.equal(initial_rows(table, seed=3, dtype=dtype, device=CPU), expected)
    some = torch.tensor([69_999, 5, 5, 0])
    assert torch.equal(initial_rows_at(table, some, seed=3, dtype=dtype), expected[some])
    into = torch.zeros(70_020, 64, dtype=dtype)
    fill_initial_rows(into[10:-10], table, seed=3, device=CPU)
    assert torch.equal(into[10:-10], expected)
    assert not into[:10].any()
    assert not into[-10:].any()
