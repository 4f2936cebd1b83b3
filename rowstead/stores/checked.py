"""Batches that are known to fit the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from typing import Any

import torch

from rowstead.contracts.batch import Batch, Sparse
from rowstead.contracts.source import Cursor, Source
from rowstead.kernels.check import check_sparse
from rowstead.kernels.layout import Layout


def checked(sparse: Sparse, layout: Layout, device: torch.device | None = None) -> Sparse:
    """The same batch, marked as one that fits `layout`; raises a DataError that names what does not fit.

    A batch that has the mark is not read again, also after it was moved to another device. `device` is where the rows are.
    """
    if sparse.checked_for is layout and (device is None or sparse.ids.device == device):
        return sparse
    check_sparse(layout, sparse.ids, sparse.offsets, sparse.weights, num_features=sparse.num_features, device=device)
    return dataclasses.replace(sparse, checked_for=layout)


class CheckedSource:
    """A Source whose batches are known to fit the tables; whoever reads ahead in a thread has them checked there.

    A source that makes batches in several threads checks them there, so that the one that asks for them need not.
    """

    def __init__(self, source: Source, layout: Layout) -> None:
        self._source, self._layout = source, layout
        self.num_samples = source.num_samples
        if hasattr(source, "finish_with"):
            source.finish_with(self._checked)

    def batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world: int = 1, cursor: Cursor | None = None
    ) -> Iterator[tuple[Batch, Cursor]]:
        batches = self._source.batches(batch_size, epoch=epoch, rank=rank, world=world, cursor=cursor)
        try:
            for batch, after in batches:
                yield self._checked(batch), after
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def _checked(self, batch: Batch) -> Batch:
        sparse = checked(batch.sparse, self._layout)
        return batch if sparse is batch.sparse else dataclasses.replace(batch, sparse=sparse)

    def __getattr__(self, name: str) -> Any:
        """What some sources know besides, such as `num_skipped`."""
        return getattr(self._source, name)
