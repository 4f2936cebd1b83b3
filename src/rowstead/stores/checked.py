"""Batches that are known to fit the tables."""

from __future__ import annotations

import dataclasses

import torch

from rowstead.data.batch import Batch, Sparse
from rowstead.data.source import Source, SourceWrapper
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


class CheckedSource(SourceWrapper):
    """A Source whose batches are known to fit the tables; whoever reads ahead in a thread has them checked there.

    A source that makes batches in several threads checks them there, so that the one that asks for them need not.
    """

    def __init__(self, source: Source, layout: Layout) -> None:
        super().__init__(source)
        self._layout = layout
        if hasattr(source, "finish_with"):
            source.finish_with(self._changed)

    def _changed(self, batch: Batch) -> Batch:
        sparse = check_batch(batch.sparse, self._layout)
        return batch if sparse is batch.sparse else dataclasses.replace(batch, sparse=sparse)
