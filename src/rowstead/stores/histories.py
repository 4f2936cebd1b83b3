"""Tables with histories: features whose rows are kept in order, one by one, instead of being pooled.

A history is looked up as bags of one id each. A table that a history reads has a store of its own (on sparse servers a router,
`fleet/history_router.py`) in which all features that read the table are one: their bags come one after the other, those of a history one for each id. So every kind of store does what it does for pooled
features, and an update is exact: the gradients of one row are summed over its ids in histories and over the other features that share
the table. The other tables are in a store of pooled features.

The result of a look-up is one flat tensor: the pooled rows [B, sum of their widths], then for each table with histories its rows [N, D].
`HistoryLayout.unpack` takes it apart. Memory follows the ids: nothing is padded.

Letters: B examples, F features, T tables, N bags of a table, D width.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import Layout
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.mixed import JoinedStore, feature_bounds, select_tables, share_of, take_share


class HistoryLayout:
    """How a layout with histories is divided among stores: `pooled`, if any table is without histories, and `tables`, one for each other."""

    def __init__(self, layout: Layout) -> None:
        readers = {layout.table_of[feature] for feature, is_history in enumerate(layout.is_history) if is_history}
        names = [table.name for index, table in enumerate(layout.tables) if index not in readers]
        self.whole = layout
        self.pooled = select_tables(layout, names) if names else None
        self.tables = [_one_feature(layout, index) for index in sorted(readers)]
        self._features = [layout.tables[index].features for index in sorted(readers)]
        """Features of each of `tables`, in the order of the batch."""
        self._share = None if self.pooled is None else share_of(layout, self.pooled)

    @property
    def stores(self) -> list[Layout]:
        """The layout of each store."""
        return [*([] if self.pooled is None else [self.pooled]), *self.tables]

    def split(self, sparse: Sparse) -> list[Sparse]:
        """Each store's part of a batch."""
        bounds = feature_bounds(sparse)
        parts = [] if self._share is None else [take_share(sparse, self._share, bounds)]
        for layout, features in zip(self.tables, self._features, strict=True):
            parts.append(self._bags(sparse, layout, features, bounds))
        return parts

    def _bags(self, sparse: Sparse, layout: Layout, features: Sequence[int], bounds: Sequence[int]) -> Sparse:
        """The bags of all features that read a table, as those of one feature."""
        offsets, count, end = sparse.offsets, sparse.num_samples, 0
        own, spans = [offsets[:1] * 0], []
        for feature in features:
            first, last = bounds[feature], bounds[feature + 1]
            if self.whole.is_history[feature]:
                own.append(torch.arange(end + 1, end + last - first + 1, device=offsets.device))
            else:
                own.append(offsets[feature * count + 1 : (feature + 1) * count + 1] + (end - first))
            spans.append(slice(first, last))
            end += last - first
        return Sparse(
            ids=torch.cat([sparse.ids[span] for span in spans]),
            offsets=torch.cat(own),
            num_features=1,
            weights=None if sparse.weights is None else torch.cat([sparse.weights[span] for span in spans]),
            checked_for=layout,
        )

    def shapes(self, sparse: Sparse) -> list[tuple[int, int]]:
        """The shape of each store's rows in the result of a look-up."""
        bounds, count = feature_bounds(sparse), sparse.num_samples
        shapes = [] if self.pooled is None else [(count, self.pooled.total_width)]
        for layout, features in zip(self.tables, self._features, strict=True):
            num_bags = [self._num_bags(feature, bounds, count) for feature in features]
            shapes.append((sum(num_bags), layout.total_width))
        return shapes

    def unpack(self, flat: Tensor, sparse: Sparse) -> list[Tensor]:
        """The rows of each feature: pooled [B, D], or of a history [its ids, D], in the order of the batch."""
        bounds, count, shapes = feature_bounds(sparse), sparse.num_samples, self.shapes(sparse)
        blocks = [part.view(shape) for part, shape in zip(flat.split([n * d for n, d in shapes]), shapes, strict=True)]
        found: dict[int, Tensor] = {}
        if self.pooled is not None:
            of_tables = {feature for features in self._features for feature in features}
            others = [feature for feature in range(self.whole.num_features) if feature not in of_tables]
            columns = self.pooled.columns
            widths = [last - first for first, last in itertools.pairwise(columns)]
            found |= dict(zip(others, blocks.pop(0).split(widths, dim=1), strict=True))
        for features, block in zip(self._features, blocks, strict=True):
            sizes = [self._num_bags(feature, bounds, count) for feature in features]
            found |= dict(zip(features, block.split(sizes), strict=True))
        return [found[feature] for feature in range(self.whole.num_features)]

    def offsets(self, feature: int, sparse: Sparse) -> Tensor:
        """Where each example's ids of a feature begin among the feature's, [B + 1]."""
        count = sparse.num_samples
        own = sparse.offsets[feature * count : (feature + 1) * count + 1]
        return own - own[:1]

    def _num_bags(self, feature: int, bounds: Sequence[int], num_samples: int) -> int:
        return bounds[feature + 1] - bounds[feature] if self.whole.is_history[feature] else num_samples


def _one_feature(layout: Layout, index: int) -> Layout:
    """The layout of one table that is read by one feature."""
    table = dataclasses.replace(layout.tables[index], features=(0,))
    return Layout(tables=(table,), table_of=(0,), columns=(0, table.width), is_mean=(False,))


class HistoryStore(JoinedStore):
    """An EmbeddingStore of a layout with histories; `stores` have the very layouts `layout.stores`, for which its parts are marked as checked.

    `lookup` and the gradient of `update` are flat: see this module.
    """

    def __init__(self, layout: HistoryLayout, stores: Sequence[EmbeddingStore], *, check: bool = True) -> None:
        super().__init__(layout.whole, stores, check=check)
        self._parts_layout = layout

    @property
    def device(self) -> torch.device | None:
        return self._each()[0].device

    @property
    def runs_in_background(self) -> bool:  # type: ignore[override]
        return any(store.runs_in_background for store in self._each())

    @property
    def can_share_between_threads(self) -> bool:
        return all(store.can_share_between_threads for store in self._each())

    @property
    def moves_with_module(self) -> bool:  # type: ignore[override]
        return all(store.moves_with_module for store in self._each())

    def lookup(self, sparse: Sparse) -> Tensor:
        return self.start_lookup(sparse)()

    def start_lookup(self, sparse: Sparse) -> Callable[[], Tensor]:
        stores, parts = self._each(), self._parts_of(sparse)
        waits = {index: stores[index].start_lookup(parts[index]) for index in self._start_order}

        def wait() -> Tensor:
            found = {index: finish() for index, finish in waits.items()}
            return torch.cat([found[index].flatten() for index in range(len(stores))])

        return wait

    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        self.start_update(sparse, grad)(lr, step)

    @torch.no_grad()
    def start_update(self, sparse: Sparse, grad: Tensor) -> Callable[[float, int], None]:
        stores, parts, shapes = self._each(), self._parts_of(sparse), self._parts_layout.shapes(sparse)
        own = [part.view(shape) for part, shape in zip(grad.split([n * d for n, d in shapes]), shapes, strict=True)]
        applies = [stores[index].start_update(parts[index], own[index]) for index in self._start_order]
        if self.training:
            self._current = None

        def apply(lr: float, step: int) -> None:
            for one in applies:
                one(lr, step)

        return apply

    def state(self) -> dict[str, Tensor]:
        """As for any store; where tables are sharded, all processes call it together."""
        order = {table.name: index for index, table in enumerate(self.tables)}
        found = [item for store in self._each() for item in store.state().items()]
        return dict(sorted(found, key=lambda item: order[item[0].rpartition(".")[0]]))

    def _split_checked(self, sparse: Sparse) -> list[Sparse]:
        return self._parts_layout.split(sparse)
