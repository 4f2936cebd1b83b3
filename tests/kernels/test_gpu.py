"""Triton kernels on a real GPU, over the widths that people use; tests/stores drives them in the interpreter everywhere."""

from __future__ import annotations

import pytest
import torch

from rowstead.kernels import reference
from rowstead.kernels.layout import layout_of
from rowstead.kernels.optimizer import new_row_state
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.train import SparseOptimizerSpec


def test_a_run_of_equal_ids_over_many_tiles_is_summed_once() -> None:
    from rowstead.kernels import gpu

    device = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="hot", num_rows=3),))
    layout = layout_of(features, tables_of(features, width=4))
    rows, others = torch.zeros(3, 4, device=device), torch.zeros(3, 4, device=device)
    ids = torch.full((1500,), 1, device=device)
    ids[:3], ids[-2:] = 0, 2
    offsets = torch.tensor([0, 700, 1500], device=device)
    grad = torch.tensor([[1.0, 2, 3, 4], [10, 20, 30, 40]], device=device)
    for kernels, table in ((gpu, rows), (reference, others)):
        kernels.update(
            [table], [{}], layout, ids, offsets, None, grad, optimizer=SparseOptimizerSpec(kind="sgd"), lr=1.0, step=1
        )
    torch.testing.assert_close(rows, others)
    assert rows[1, 0].item() == -(697 * 1 + 798 * 10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("num_ids", [1, 3, 28])
@pytest.mark.parametrize("width", [4, 8, 12, 16, 32, 48, 64, 128, 200, 512])
def test_every_width_compiles_and_agrees_with_the_reference(width: int, num_ids: int) -> None:
    from rowstead.kernels import gpu

    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f{i}", repeat=4, num_rows=200),))
    layout = layout_of(features, tables_of(features, width=width))
    ours = [torch.randn(200, width, device="cuda") for _ in range(4)]
    theirs = [rows.clone() for rows in ours]
    states = [[new_row_state("rowwise_adagrad", rows) for rows in ours] for _ in range(2)]
    lengths = torch.randint(0, 2 * num_ids + 1, (4 * 256,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).cuda()
    ids = (200 * torch.rand(int(lengths.sum()), device="cuda") ** 3).long()
    grad = torch.randn(256, layout.total_width, device="cuda")
    expected = reference.lookup(theirs, layout, ids, offsets)
    torch.testing.assert_close(gpu.lookup(ours, layout, ids, offsets), expected, rtol=1e-5, atol=1e-5)
    for kernels, rows, state in ((gpu, ours, states[0]), (reference, theirs, states[1])):
        kernels.update(rows, state, layout, ids, offsets, None, grad, optimizer=SparseOptimizerSpec(), lr=0.1, step=1)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
