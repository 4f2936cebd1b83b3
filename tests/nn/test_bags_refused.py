"""What EmbeddingBags cannot look up or train is refused with its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import layout_of
from rowstead.nn.bag_tables import BagTable
from rowstead.nn.embedding_bags import EmbeddingBags
from rowstead.spec.errors import CheckpointError, DataError, RowsteadError, SpecError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.row_optimizers import SparseOptimizerSpec
from rowstead.stores.device import DeviceStore
from tests.small_bags import TABLES, Keyed, batch, one_example, two_tables


def test_what_does_not_fit_is_named() -> None:
    bags = EmbeddingBags(TABLES, optimizer="sgd")
    sparse = batch(torch.Generator().manual_seed(14))
    with pytest.raises(DataError, match="no feature `friend`, which a table reads: did you mean `freind`"):
        bags(Keyed(["user", "freind", "tag"], sparse))
    with pytest.raises(DataError, match="the batch has 2 features, but the tables read 3: user, friend, tag"):
        bags(Sparse(ids=sparse.ids, offsets=sparse.offsets, num_features=2))
    with pytest.raises(TypeError, match=r"give a rowstead\.Sparse or a KeyedJaggedTensor, not dict"):
        bags({"user": sparse.ids})
    bad = sparse.ids.clone()
    bad[-1] = 15
    with pytest.raises(DataError, match=r"id 15 of example \d, feature 2 \(table `tags`\)"):
        bags(Sparse(ids=bad, offsets=sparse.offsets, num_features=3))
    with pytest.raises(DataError, match="offsets must rise from 0"):
        bags(Keyed(["tag", "user", "friend"], Sparse(ids=sparse.ids[1:], offsets=sparse.offsets, num_features=3)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tables": []}, "give at least one"),
        ({"tables": [TABLES[0], TABLES[0]]}, "`users` is named twice"),
        ({"lr": 0.1}, "lr without an optimizer"),
        ({"optimizer": "sgd", "lr": -1.0}, "lr: must be above 0"),
        (
            {"tables": [SimpleNamespace(name="t", num_embeddings=0, embedding_dim=4, feature_names=[], pooling="sum")]},
            "table `t`",
        ),
        (
            {"tables": [SimpleNamespace(name="t", num_embeddings=9, embedding_dim=4, feature_names=[], pooling="NONE")]},
            "sum or mean",
        ),
    ],
)
def test_a_mistake_in_the_configuration_is_named(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(RowsteadError, match=says):
        EmbeddingBags(**{"tables": TABLES, **arguments})


def test_small_mistakes_are_refused() -> None:
    with pytest.raises(SpecError, match="`a` is named twice"):
        BagTable(name="t", num_embeddings=1, embedding_dim=1, feature_names=("a", "a"))
    assert BagTable(name="t", num_embeddings=1, embedding_dim=1).feature_names == ("t",)
    bags = EmbeddingBags(TABLES, optimizer=SparseOptimizerSpec(kind="adam", lr=0.2))
    assert bags.lr == 0.2
    with pytest.raises(ValueError, match="at least 0"):
        bags.lr = float("nan")
    with pytest.raises(CheckpointError, match="num_updates"):
        bags.load_optimizer_state({})


def test_tables_that_kernels_would_misread_are_refused() -> None:
    strided, half, small = two_tables(), two_tables(), two_tables()
    strided.embedding_bags["a"].weight.data = torch.arange(80.0).view(10, 8)[:, :4]
    half.embedding_bags["b"].half()
    small.embedding_bags["a"].weight.data = torch.ones(2, 4)
    for bags in (strided, half, small):
        with pytest.raises(RowsteadError, match="must be contiguous"):
            bags(one_example())


def test_a_store_whose_state_was_left_behind_is_not_trained() -> None:
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f", num_rows=10),))
    store = DeviceStore(layout_of(features, tables_of(features, width=4)), SparseOptimizerSpec(kind="adagrad")).double()
    sparse = Sparse(ids=torch.tensor([1]), offsets=torch.tensor([0, 1]), num_features=1)
    with pytest.raises(RowsteadError, match="convert the store before training"):
        store.update(sparse, torch.ones(1, 4, dtype=torch.float64), lr=0.1, step=1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kernel": "cppu"}, "kernel='cppu'"),
        ({"optimizer": "adagad"}, "optimizer='adagad'"),
        ({"dtype": torch.int64}, "dtype="),
    ],
)
def test_what_is_not_known_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(RowsteadError, match=says):
        two_tables(**wrong)
