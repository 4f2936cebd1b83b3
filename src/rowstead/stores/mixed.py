"""Several stores as one: each holds some of the tables, wherever it keeps them.

A batch is feature-major, so features that follow each other are a slice of its ids: where a store's features do, nothing of
them is copied but the offsets, which have to start at 0.

Letters: B examples, F features, T tables, nnz ids.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse
from rowstead.kernels.check import check_gradient
from rowstead.kernels.layout import Layout
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.checked import check_batch
from rowstead.stores.state import StatePart


def layout_for(layout: Layout, tables: Sequence[str]) -> Layout:
    """The layout of some tables alone: their features, in the order of the batch, numbered from 0."""
    features = [f for f, table in enumerate(layout.table_of) if layout.tables[table].name in tables]
    place = {feature: new for new, feature in enumerate(features)}
    kept = [table for table in layout.tables if table.name in tables]
    places = {table.name: new for new, table in enumerate(kept)}
    columns = [0]
    for feature in features:
        columns.append(columns[-1] + layout.columns[feature + 1] - layout.columns[feature])
    return Layout(
        tables=tuple(dataclasses.replace(t, features=tuple(place[f] for f in t.features)) for t in kept),
        table_of=tuple(places[layout.tables[layout.table_of[feature]].name] for feature in features),
        columns=tuple(columns),
        is_mean=tuple(layout.is_mean[feature] for feature in features),
    )


@dataclass(frozen=True)
class _Share:
    """What one store has of a batch."""

    layout: Layout
    runs: tuple[tuple[int, int], ...]
    """Its features, as first and last + 1 of those that follow each other."""
    columns: tuple[tuple[int, int], ...]
    """Where the vectors of each run are in the pooled vectors of the whole batch."""


@dataclass
class _SplitBatch:
    """A batch cut up for the stores."""

    ids: Tensor
    """Of the whole batch; by them a batch is known again."""
    parts: list[Sparse]


class MixedStore(EmbeddingStore):
    """An EmbeddingStore over others that hold the tables of `layout` between them.

    The stores' own layouts are those that `layout_for` gave. A HostStore works while the others do. A batch is cut up once, so a store sees the same ids when it is announced, looked up
    and updated. With `check`, batches are checked as a whole, and the stores trust them.
    """

    def __init__(self, layout: Layout, stores: Sequence[EmbeddingStore], *, check: bool = True) -> None:
        super().__init__(layout, check=check)
        self.stores = nn.ModuleList(stores)
        self._holder = {table.name: store for store in stores for table in store.tables}
        held = [table.name for store in stores for table in store.tables]
        assert sorted(held) == sorted(table.name for table in layout.tables), "each table is held by one store"
        self._shares = [_share(layout, store.layout) for store in stores]
        self._start_order = sorted(range(len(stores)), key=lambda index: not stores[index].runs_in_background)
        self._join = _joined_columns(self._shares)
        self._announced: deque[_SplitBatch] = deque()
        self._current: _SplitBatch | None = None

    def _each(self) -> list[EmbeddingStore]:
        return cast("list[EmbeddingStore]", list(self.stores))

    @property
    def kernel(self) -> str:
        names = [store.kernel for store in self._each()]
        return " and ".join(dict.fromkeys(name for name in names if name != "none")) or "none"

    def lookup(self, sparse: Sparse) -> Tensor:
        stores, parts = self._each(), self._parts_of(sparse)
        waits = {index: stores[index].start_lookup(parts[index]) for index in self._start_order}
        pooled = {index: wait() for index, wait in waits.items()}
        return torch.cat([pooled[store][:, first:last] for store, first, last in self._join], dim=1)

    @torch.no_grad()
    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        parts = self._parts_of(sparse)
        if self._check:
            check_gradient(self.layout, sparse.offsets, grad)
        stores = self._each()
        for index in self._start_order:
            pieces = [grad[:, first:last] for first, last in self._shares[index].columns]
            own = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
            stores[index].update(parts[index], own.contiguous(), lr=lr, step=step)
        self._current = None

    @property
    def batches_ahead(self) -> int:
        return max((store.batches_ahead for store in self._each()), default=0)

    def prefetch(self, sparse: Sparse) -> None:
        split = self._split(sparse)
        self._announced.append(split)
        for store, part in zip(self._each(), split.parts, strict=True):
            store.prefetch(part)

    def drop_prefetched(self) -> None:
        """Batches that were announced and not looked up are not coming after all."""
        self._announced.clear()
        self._current = None
        for store in self._each():
            store.drop_prefetched()

    def rows(self, table: str, ids: Tensor) -> Tensor:
        return self._holder[table].rows(table, ids)

    def parts(self) -> list[StatePart]:
        found = {store: store.parts() for store in self._each()}
        return [
            part
            for table in self.tables
            for part in found[self._holder[table.name]]
            if part.name.rpartition(".")[0] == table.name
        ]

    def limit_prefetch(self, num_batches: int) -> None:
        for store in self._each():
            store.limit_prefetch(num_batches)

    def flush(self) -> None:
        for store in self._each():
            store.flush()

    def close(self) -> None:
        for store in self._each():
            store.close()

    def figures(self) -> dict[str, float]:
        counts: Counter[str] = Counter()
        for store in self._each():
            counts.update(store.figures())
        return dict(counts)

    def _parts_of(self, sparse: Sparse) -> list[Sparse]:
        """What each store has of a batch: as it was announced, or as it was looked up, or cut up now."""
        if not self.training:  # the batch that is trained on may not have been updated yet
            return self._split(sparse).parts
        if self._current is None or self._current.ids is not sparse.ids:
            is_next = self._announced and self._announced[0].ids is sparse.ids
            self._current = self._announced.popleft() if is_next else self._split(sparse)
        return self._current.parts

    def _split(self, sparse: Sparse) -> _SplitBatch:
        if self._check:
            sparse = check_batch(sparse, self.layout)
        num_samples = sparse.num_samples
        none = [0] * (self.layout.num_features + 1)
        bounds = sparse.offsets[::num_samples].tolist() if num_samples else none  # on a GPU this waits for the batch
        return _SplitBatch(sparse.ids, [_part(sparse, share, bounds) for share in self._shares])


def _share(layout: Layout, own: Layout) -> _Share:
    names = {table.name for table in own.tables}
    features = [f for f, table in enumerate(layout.table_of) if layout.tables[table].name in names]
    assert len(features) == own.num_features, "a store's layout is that of its tables"
    borders = [0, *(place for place in range(1, len(features)) if features[place] != features[place - 1] + 1), len(features)]
    runs = tuple((features[first], features[last - 1] + 1) for first, last in pairwise(borders) if first < last)
    return _Share(own, runs, tuple((layout.columns[first], layout.columns[last]) for first, last in runs))


def _joined_columns(shares: Sequence[_Share]) -> list[tuple[int, int, int]]:
    """The pooled vectors of the whole batch, from left to right: store, first column there, and last + 1."""
    pieces = []
    for store, share in enumerate(shares):
        own = 0
        for first, last in share.columns:
            pieces.append((first, store, own, own + last - first))
            own += last - first
    return [(store, first, last) for _, store, first, last in sorted(pieces)]


def _part(sparse: Sparse, share: _Share, bounds: list[int]) -> Sparse:
    """The features of a share as a batch; `bounds` [F + 1] says where each feature's ids begin."""
    count, offsets = sparse.num_samples, sparse.offsets
    spans = [(bounds[first], bounds[last]) for first, last in share.runs]
    moved, end = [offsets[:1] * 0] if spans else [], 0
    for (first, last), (start, stop) in zip(share.runs, spans, strict=True):
        run = offsets[first * count + 1 : last * count + 1]
        moved.append(run - (start - end) if start != end else run)
        end += stop - start
    if len(spans) == 1 and share.runs[0][0] == 0:
        own_offsets = offsets[: share.runs[0][1] * count + 1]
    else:
        own_offsets = torch.cat(moved) if moved else offsets[:1]
    return Sparse(
        ids=_joined(sparse.ids, spans),
        offsets=own_offsets,
        num_features=share.layout.num_features,
        weights=None if sparse.weights is None else _joined(sparse.weights, spans),
        checked_for=share.layout,
    )


def _joined(values: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    if len(spans) == 1:
        return values[spans[0][0] : spans[0][1]]
    return torch.cat([values[start:stop] for start, stop in spans]) if spans else values[:0]
