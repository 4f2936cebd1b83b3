"""The defaults of `EmbeddingStore`, which a store with the four abstract methods alone gets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import Layout, layout_of
from rowstead.spec.errors import DataError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.state import StatePart, part_of

SPEC = FeaturesSpec(sparse=(SparseFeatureSpec(name="a", num_rows=4),))
LAYOUT = layout_of(SPEC, tables_of(SPEC, width=2))
BATCH = Sparse(ids=torch.tensor([1, 1]), offsets=torch.tensor([0, 2]), num_features=1)


class MinimalStore(EmbeddingStore):
    """One table, sum pooling, SGD."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.values = torch.arange(8.0).view(4, 2)

    def lookup(self, sparse: Sparse) -> Tensor:
        return self.values[sparse.ids].sum(0, keepdim=True)

    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        self.values.index_add_(0, sparse.ids, grad.expand(2, -1), alpha=-lr)

    def rows(self, table: str, ids: Tensor) -> Tensor:
        return self.values[ids]

    def parts(self) -> list[StatePart]:
        return [part_of("a.rows", self.values)]


def test_a_store_without_the_four_methods_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        EmbeddingStore(LAYOUT)  # type: ignore[abstract]


def test_started_work_is_done_by_the_plain_methods() -> None:
    store = MinimalStore(LAYOUT)
    pooled = store.start_lookup(BATCH)()
    assert pooled.tolist() == [[4.0, 6.0]]
    apply = store.start_update(BATCH, torch.ones(1, 2))
    assert store.rows("a", torch.tensor([1])).tolist() == [[2.0, 3.0]]
    apply(0.5, 1)
    assert store.rows("a", torch.tensor([1])).tolist() == [[1.0, 2.0]]


def test_state_and_load_state_follow_from_the_parts() -> None:
    first, second = MinimalStore(LAYOUT), MinimalStore(LAYOUT)
    first.update(BATCH, torch.ones(1, 2), lr=1.0, step=1)
    second.load_state(first.state())
    assert torch.equal(second.values, first.values)


def test_a_batch_that_does_not_fit_the_layout_is_refused() -> None:
    wrong = Sparse(ids=torch.tensor([1, 4]), offsets=torch.tensor([0, 2]), num_features=1)
    with pytest.raises(DataError, match="id 4"):
        MinimalStore(LAYOUT).check_batch(wrong)


def test_whatever_a_store_does_not_say_it_does_not_offer() -> None:
    store = MinimalStore(LAYOUT)
    assert (store.kernel, store.device, store.batches_ahead) == ("none", None, 0)
    assert not store.runs_in_background
    assert not store.moves_with_module
    assert not store.can_share_between_threads
    assert store.graph_rows() is None
    assert store.copy_for_thread() is store
    assert list(store.backings) == []
    assert store.figures() == {}
    store.prefetch(BATCH)
    store.drop_prefetched()
    store.limit_prefetch(1)
    store.flush()
    store.close()
