"""Rows gathered and scattered by the GPU's own kernels; without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rowstead.kernels.rows_gpu import gather_rows, scatter_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_rows_come_and_go_as_they_are(width: int, dtype: torch.dtype, kind: torch.dtype) -> None:
    whole = torch.randn(300, width, device=DEVICE).to(dtype)
    rows = torch.randperm(300, device=DEVICE)[:77].to(kind)
    into = torch.zeros(80, width, dtype=dtype, device=DEVICE)
    gather_rows(whole, rows, into)
    assert torch.equal(into[:77], whole[rows.long()])
    assert not into[77:].any()
    target = torch.zeros_like(whole)
    scatter_rows(target, rows, into)
    expected = torch.zeros_like(whole)
    expected[rows.long()] = into[:77]
    assert torch.equal(target, expected)


def test_no_rows_are_no_work() -> None:
    gather_rows(
        torch.ones(3, 4, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.ones(1, 4, device=DEVICE)
    )
