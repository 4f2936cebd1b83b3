"""Batches that are known to fit the tables."""

from __future__ import annotations

import dataclasses

import torch

from rowstead.data.batch import Batch, Sparse
from rowstead.data.source import Source
from rowstead.kernels.check import check_sparse
from rowstead.kernels.layout import Layout


def check_batch(sparse: Sparse, layout: Layout, device: torch.device | None = None) -> Sparse:
    """The same batch, marked as one that fits `layout`; raises a DataError that names what does not fit.

    A batch that has the mark is not read again, also after it was moved to another device. `device` is where the rows are.
    """
    if sparse.checked_for is layout and (device is None or sparse.ids.device == device):
        return sparse
    check_sparse(layout, sparse.ids, sparse.offsets, sparse.weights, num_features=sparse.num_features, device=device)
    return dataclasses.replace(sparse, checked_for=layout)


def check_source(source: Source, layout: Layout) -> Source:
    """The same source with each batch checked against `layout` by the threads that make batches."""

    def check(batch: Batch) -> Batch:
        sparse = check_batch(batch.sparse, layout)
        return batch if sparse is batch.sparse else dataclasses.replace(batch, sparse=sparse)

    return source.map(check)
