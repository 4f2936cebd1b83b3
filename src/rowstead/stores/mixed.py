"""Several stores as one: each holds some of the tables.

A batch is feature-major, so consecutive features are a slice of its ids: if a store's features are consecutive, only their offsets
are copied, since these must start at 0.

Letters: B examples, F features, T tables, nnz ids.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse
from rowstead.kernels.check import check_gradient
from rowstead.kernels.layout import Layout
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.snapshot import Snapshot, join_snapshots
from rowstead.stores.state import StatePart, in_order_of


def select_tables(layout: Layout, tables: Sequence[str]) -> Layout:
    """The layout of some of the tables: their features, in the order of the batch, numbered from 0."""
    features = [f for f, table in enumerate(layout.table_of) if layout.tables[table].name in tables]
    index_of = {feature: new for new, feature in enumerate(features)}
    kept = [table for table in layout.tables if table.name in tables]
    table_index = {table.name: new for new, table in enumerate(kept)}
    widths = (layout.columns[feature + 1] - layout.columns[feature] for feature in features)
    return Layout(
        tables=tuple(dataclasses.replace(t, features=tuple(index_of[f] for f in t.features)) for t in kept),
        table_of=tuple(table_index[layout.tables[layout.table_of[feature]].name] for feature in features),
        columns=(0, *accumulate(widths)),
        is_mean=tuple(layout.is_mean[feature] for feature in features),
    )


@dataclass(frozen=True)
class Share:
    """One store's part of every batch."""

    layout: Layout
    runs: tuple[tuple[int, int], ...]
    """Its features, as ranges (first, last + 1) of consecutive ones."""
    columns: tuple[tuple[int, int], ...]
    """Columns of each range in the pooled vectors of the whole batch."""


@dataclass
class _SplitBatch:
    """A batch split between the stores."""

    ids: Tensor
    """Ids of the whole batch, which identify it."""
    parts: list[Sparse]


class JoinedStore(EmbeddingStore):
    """Base class of an EmbeddingStore over others that each hold some tables of `layout`.

    A batch is split once, so a store sees the same ids when it is prefetched, looked up and updated. With `check`, batches are checked as a
    whole, and the stores trust them.
    """

    def __init__(self, layout: Layout, stores: Sequence[EmbeddingStore], *, check: bool = True) -> None:
        super().__init__(layout, check=check)
        self.stores = nn.ModuleList(stores)
        self._holder = {table.name: store for store in stores for table in store.tables}
        held = [table.name for store in stores for table in store.tables]
        assert sorted(held) == sorted(table.name for table in layout.tables), "each table is held by one store"
        self._start_order = sorted(range(len(stores)), key=lambda index: not stores[index].runs_in_background)
        self._prefetched: deque[_SplitBatch] = deque()
        self._current: _SplitBatch | None = None

    @abstractmethod
    def _split_checked(self, sparse: Sparse) -> list[Sparse]:
        """Each store's part of a batch that fits the tables."""

    def _each(self) -> list[EmbeddingStore]:
        return cast("list[EmbeddingStore]", list(self.stores))

    @property
    def kernel(self) -> str:
        names = [store.kernel for store in self._each()]
        return " and ".join(dict.fromkeys(name for name in names if name != "none")) or "none"

    @property
    def batches_ahead(self) -> int:
        return max((store.batches_ahead for store in self._each()), default=0)

    def prefetch(self, sparse: Sparse) -> None:
        split = self._split(sparse)
        self._prefetched.append(split)
        for store, part in zip(self._each(), split.parts, strict=True):
            store.prefetch(part)

    def drop_prefetched(self) -> None:
        self._prefetched.clear()
        self._current = None
        for store in self._each():
            store.drop_prefetched()

    def rows(self, table: str, ids: Tensor) -> Tensor:
        return self._holder[table].rows(table, ids)

    def parts(self) -> list[StatePart]:
        return in_order_of(self.tables, (part for store in self._each() for part in store.parts()))

    def snapshot(self) -> Snapshot | None:
        return join_snapshots(self.tables, self._each())

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
        """Each store's part of a batch: as prefetched, as looked up, or split now."""
        if not self.training:  # the batch that is trained on may not be updated yet
            return self._split(sparse).parts
        current = self._current  # another thread may replace it
        if current is None or current.ids is not sparse.ids:
            is_next = self._prefetched and self._prefetched[0].ids is sparse.ids
            self._current = current = self._prefetched.popleft() if is_next else self._split(sparse)
        return current.parts

    def _split(self, sparse: Sparse) -> _SplitBatch:
        return _SplitBatch(sparse.ids, self._split_checked(self.check_batch(sparse)))


class MixedStore(JoinedStore):
    """A JoinedStore whose stores pool the rows of their tables.

    The layout of each store is `select_tables(layout, its tables)`. Stores that run in the background work while the others do.
    """

    def __init__(self, layout: Layout, stores: Sequence[EmbeddingStore], *, check: bool = True) -> None:
        super().__init__(layout, stores, check=check)
        self._shares = [share_of(layout, store.layout) for store in stores]
        self._join = _column_sources(self._shares)

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

    def _split_checked(self, sparse: Sparse) -> list[Sparse]:
        bounds = feature_bounds(sparse)
        return [take_share(sparse, share, bounds) for share in self._shares]


def feature_bounds(sparse: Sparse) -> list[int]:
    """Where the ids of each feature begin, and the end of the last one, [F + 1]; on a GPU the host waits for the batch."""
    num_samples = sparse.num_samples
    return sparse.offsets[::num_samples].tolist() if num_samples else [0] * (sparse.num_features + 1)


def share_of(layout: Layout, own: Layout) -> Share:
    """What the store with layout `own`, that of some tables, gets of every batch."""
    names = {table.name for table in own.tables}
    features = [f for f, table in enumerate(layout.table_of) if layout.tables[table].name in names]
    assert len(features) == own.num_features, "a store's layout is that of its tables"
    borders = [0, *(i for i in range(1, len(features)) if features[i] != features[i - 1] + 1), len(features)]
    runs = tuple((features[first], features[last - 1] + 1) for first, last in pairwise(borders) if first < last)
    return Share(own, runs, tuple((layout.columns[first], layout.columns[last]) for first, last in runs))


def _column_sources(shares: Sequence[Share]) -> list[tuple[int, int, int]]:
    """Sources of the pooled columns of the whole batch, from left to right: store, first column there, and last + 1."""
    pieces = []
    for store, share in enumerate(shares):
        own = 0
        for first, last in share.columns:
            pieces.append((first, store, own, own + last - first))
            own += last - first
    return [(store, first, last) for _, store, first, last in sorted(pieces)]


def take_share(sparse: Sparse, share: Share, bounds: list[int]) -> Sparse:
    """The features of a share as a batch; `bounds` [F + 1] holds the offset of each feature's ids."""
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
        ids=_concatenate(sparse.ids, spans),
        offsets=own_offsets,
        num_features=share.layout.num_features,
        weights=None if sparse.weights is None else _concatenate(sparse.weights, spans),
        checked_for=share.layout,
    )


def _concatenate(values: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    if len(spans) == 1:
        return values[spans[0][0] : spans[0][1]]
    return torch.cat([values[start:stop] for start, stop in spans]) if spans else values[:0]
