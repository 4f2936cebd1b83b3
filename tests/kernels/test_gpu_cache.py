"""Mapping ids to rows and swapping rows over the bus, against plain torch; without a GPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from rowstead.kernels.gpu import cache  # noqa: E402
from rowstead.kernels.gpu.cache import map_ids_to_rows, swap_rows, swap_rows_reference  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(), dtype=st.sampled_from(DTYPES), width=st.sampled_from([1, 3, 4, 64, 100]),
    rows_per_turn=st.sampled_from([1, 4, 256]), over_bus=st.booleans(),
)  # fmt: skip
def test_rows_swap_slots_as_in_plain_torch(
    data: st.DataObject, dtype: torch.dtype, width: int, rows_per_turn: int, over_bus: bool
) -> None:
    num_rows, num_slots = (4000, 2000) if DEVICE == "cuda" else (80, 40)
    num_in, num_out = (data.draw(st.integers(0, num_slots * 3 // 4)) for _ in range(2))
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    rows, slots = torch.randperm(num_rows, generator=draws), torch.randperm(num_slots, generator=draws)
    moves = [
        rows[:num_in].sort().values,
        slots[:num_in],
        rows[num_in : num_in + num_out].sort().values,
        slots[:num_out],
    ]
    fast = torch.randn(num_slots, width, generator=draws).to(dtype)
    behind = torch.randn(num_rows, width, generator=draws).to(dtype)
    wanted = fast.clone(), behind.clone()
    swap_rows_reference([wanted[0]], [wanted[1]], *moves)
    ours = fast.to(DEVICE), behind.to(DEVICE)
    with pytest.MonkeyPatch.context() as patched:  # so that programs take many turns
        patched.setattr(cache, "MAX_ROWS", rows_per_turn)
        patched.setattr(cache, "PROGRAMS", 2)
        swap_rows(*ours, *(move.to(DEVICE) for move in moves), over_bus=over_bus)
    assert torch.equal(ours[0].cpu(), wanted[0])
    assert torch.equal(ours[1].cpu(), wanted[1])


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_ids_are_mapped_to_rows_of_all_tables(lengths: list[list[int]], dtype: torch.dtype) -> None:
    firsts = [-1 if feature == 2 else 100 * feature for feature in range(len(lengths))]
    counts = torch.tensor(lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.flatten().cumsum(0)])
    ids = torch.arange(int(offsets[-1]), dtype=dtype)
    first = torch.repeat_interleave(torch.tensor(firsts), counts.sum(1))
    wanted = torch.where(first < 0, -1, ids + first)
    named = map_ids_to_rows(ids.to(DEVICE), offsets.to(DEVICE), torch.tensor(firsts, device=DEVICE))
    assert torch.equal(named.cpu(), wanted)
