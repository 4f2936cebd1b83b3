"""The kernels count the bytes of rows and state that they move."""

from __future__ import annotations

import numpy as np
import torch

from rowstead.kernels.cpu import embedding as cpu
from rowstead.kernels.cpu.traffic import kernel_traffic_bytes
from rowstead.kernels.row_state import new_row_state
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from tests.kernels.test_cpu import LAYOUT, NUM_SAMPLES, batch

WIDTHS = [4, 12, 12, 12, 12]
"""Of each feature's table."""


def test_lookups_and_updates_count_the_rows_of_every_id() -> None:
    random = torch.Generator().manual_seed(1)
    rows = [torch.randn(table.num_rows, table.width, generator=random) for table in LAYOUT.tables]
    states = [new_row_state("rowwise_adagrad", table) for table in rows]
    ids, offsets = batch(LAYOUT, random)
    num_ids = offsets[::NUM_SAMPLES].diff().tolist()
    before = kernel_traffic_bytes()
    pooled = cpu.lookup(rows, LAYOUT, ids, offsets)
    row_bytes = sum(4 * width * count for width, count in zip(WIDTHS, num_ids, strict=True))
    assert kernel_traffic_bytes() - before == row_bytes + pooled.nbytes
    before = kernel_traffic_bytes()
    optimizer = SparseOptimizerSpec(kind="rowwise_adagrad")
    cpu.update(rows, states, LAYOUT, ids, offsets, None, torch.ones_like(pooled), optimizer=optimizer, lr=0.1, step=1)
    assert kernel_traffic_bytes() - before == 3 * row_bytes + 2 * 4 * sum(num_ids)


def test_distinct_rows_are_counted() -> None:
    rows = [torch.ones(10, 4)]
    ids, bounds = np.array([1, 5, 7], np.int64), np.array([0, 3], np.int64)
    before = kernel_traffic_bytes()
    flat = cpu.gather_rows(rows, ids, bounds)
    assert kernel_traffic_bytes() - before == 2 * 3 * 4 * 4
    before = kernel_traffic_bytes()
    states = [new_row_state("sgd", rows[0])]
    cpu.update_rows(rows, states, ids, bounds, torch.ones_like(flat), optimizer=SparseOptimizerSpec(kind="sgd"), lr=0.1, step=1)
    assert kernel_traffic_bytes() - before == 3 * 3 * 4 * 4
