"""CPU kernels on batches large enough for threads and for several passes of the sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rowstead.kernels import cpu, reference
from rowstead.kernels.layout import Layout, layout_of
from rowstead.kernels.optimizer import RowState, new_row_state
from rowstead.spec.errors import DataError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, TableSpec, tables_of
from rowstead.spec.train import SparseOptimizerSpec

FEATURES = FeaturesSpec(
    sparse=(
        SparseFeatureSpec(name="deep", num_rows=300_000, width=4),
        SparseFeatureSpec(name="small", num_rows=50, pooling="mean"),
        SparseFeatureSpec(name="unread", num_rows=9),
        SparseFeatureSpec(name="left", table="shared"),
        SparseFeatureSpec(name="right", table="shared", pooling="mean"),
    ),
    tables=(TableSpec(name="shared", num_rows=5000),),
)
LAYOUT = layout_of(FEATURES, tables_of(FEATURES, width=12))
NUM_SAMPLES = 200


def trained(kernels, threads: int) -> tuple[list[Tensor], list[RowState], Tensor]:
    """Rows, states and the last look-up after three updates on the same batches."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        random = torch.Generator().manual_seed(5)
        rows = [torch.randn(t.num_rows, t.width, generator=random) for t in LAYOUT.tables]
        states = [new_row_state("adagrad", table) for table in rows]
        optimizer = SparseOptimizerSpec(kind="adagrad", clip=2.0)
        for step in (1, 2, 3):
            ids, offsets = batch(LAYOUT, random)
            grad = torch.randn(NUM_SAMPLES, LAYOUT.total_width, generator=random)
            pooled = kernels.lookup(rows, LAYOUT, ids, offsets)
            kernels.update(rows, states, LAYOUT, ids, offsets, None, grad, optimizer=optimizer, lr=0.1, step=step)
        return rows, states, pooled
    finally:
        torch.set_num_threads(before)


def batch(layout: Layout, random: torch.Generator) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(0, 30, (layout.num_features, NUM_SAMPLES), generator=random)
    lengths[2] = 0
    ids = [
        (layout.tables[table].num_rows * torch.rand(int(lengths[f].sum()), generator=random) ** 3).long()
        for f, table in enumerate(layout.table_of)
    ]
    return torch.cat(ids), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])


def test_any_number_of_threads_gives_the_same_bits() -> None:
    one, *others = (trained(cpu, threads) for threads in (1, 2, 5))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        assert all(torch.equal(a["sum"], b["sum"]) for a, b in zip(one[1], other[1], strict=True))
        assert torch.equal(one[2], other[2])


def test_large_batches_agree_with_the_reference() -> None:
    ours, theirs = trained(cpu, 2), trained(reference, 2)
    for mine, other in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [-1, 50])
def test_an_id_outside_its_table_is_named_before_it_is_read(wrong: int) -> None:
    ids, offsets = batch(LAYOUT, torch.Generator().manual_seed(1))
    place = int(offsets[NUM_SAMPLES]) + 7
    ids[place] = wrong
    rows = [torch.zeros(t.num_rows, t.width) for t in LAYOUT.tables]
    with pytest.raises(DataError, match=rf"id {wrong} of example \d+ is outside table `small`, whose rows are 0 to 49"):
        cpu.lookup(rows, LAYOUT, ids, offsets)
