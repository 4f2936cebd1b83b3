"""The shipped recipe with a history, small: its history shares a table with the target, and is read once more, pooled, from a table of its own."""

from __future__ import annotations

from typing import Any

import torch

from rowstead.data.batch import Sparse
from rowstead.data.open_log import open_sources
from rowstead.kernels.layout import Layout
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.histories import HistoryLayout, HistoryStore

SMALL = ("data.interests.num_train_samples=20_000", "data.interests.num_eval_samples=2_000", "train.batch_size=256")
MEAN = "{name: mean, column: history, num_rows: 900, pooling: mean, max_ids: 20}"
ENCODER = "{kind: din, target: item, hidden: [8]}"
SPARSE = (
    "features.sparse=[{name: item, table: items, hash: modulo}, "
    f"{MEAN}, {{name: history, table: items, hash: modulo, pooling: none, max_ids: 20, encoder: {ENCODER}}}]"
)


def din_spec(*changes: str) -> RunSpec:
    return load_recipe("din", [*SMALL, SPARSE, *changes])


def local_store(layout: Layout, optimizer: SparseOptimizerSpec, **options: Any) -> EmbeddingStore:
    """The tables of a layout, with histories or without, in this process."""
    if not layout.is_history:
        return DeviceStore(layout, optimizer, **options)
    parts = HistoryLayout(layout)
    return HistoryStore(parts, [DeviceStore(one, optimizer, **options) for one in parts.stores])


def batches_of(spec: RunSpec, count: int) -> list[Sparse]:
    """The first batches of the log."""
    source = open_sources(spec).train.batches(spec.train.batch_size)
    return [batch.sparse for (batch, _), _ in zip(source, range(count), strict=False)]


def gradient_of(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """A random gradient of what a look-up returned."""
    return torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(rows.dtype)
