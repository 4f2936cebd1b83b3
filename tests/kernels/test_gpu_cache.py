"""Swapping rows over the bus, against plain torch; without a GPU the kernel runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from rowstead.kernels.gpu import cache  # noqa: E402
from rowstead.kernels.gpu.cache import swap_rows  # noqa: E402

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
    in_rows, in_slots, out_rows, out_slots = moves
    wanted = fast.clone(), behind.clone()
    wanted[1][out_rows] = fast[out_slots]
    wanted[0][in_slots] = behind[in_rows]
    ours = fast.to(DEVICE), behind.to(DEVICE)
    with pytest.MonkeyPatch.context() as patched:  # so that programs take many turns
        patched.setattr(cache, "MAX_ROWS", rows_per_turn)
        patched.setattr(cache, "PROGRAMS", 2)
        swap_rows(*ours, *(move.to(DEVICE) for move in moves), over_bus=over_bus)
    assert torch.equal(ours[0].cpu(), wanted[0])
    assert torch.equal(ours[1].cpu(), wanted[1])
