"""EmbeddingBags stand in for TorchRec's EmbeddingBagCollection.

Tests against TorchRec itself are skipped where it is not installed.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import nn

from rowstead.data.batch import kjt_from_sparse, sparse_from_kjt
from rowstead.nn.embedding_bags import EmbeddingBags, PooledFeatures
from rowstead.spec.errors import DataError, RowsteadError
from tests.small_bags import FEATURES, NUM_SAMPLES, TABLES, Keyed, Plain, assert_same_rows, batch, loss_of

needs_torchrec = pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="TorchRec is not installed")


def test_inside_another_model_names_and_parameters_are_as_in_torchrec() -> None:
    model = nn.ModuleDict({"sparse": EmbeddingBags(TABLES, optimizer="sgd"), "dense": nn.Linear(2, 2)})
    names = [f"sparse.embedding_bags.{table.name}.weight" for table in TABLES]
    assert [name for name in model.state_dict() if name.startswith("sparse")] == names
    assert [name for name, _ in model.named_parameters() if name.startswith("sparse")] == names
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["dense.weight", "dense.bias"]


def test_pooled_features_answer_by_name() -> None:
    bags = EmbeddingBags(TABLES, optimizer="sgd")
    pooled = bags(batch(torch.Generator().manual_seed(11)))
    assert isinstance(pooled, PooledFeatures)
    assert pooled.keys() == ["user@users", "friend", "tag", "user@again"]
    assert pooled.length_per_key() == [8, 8, 4, 12]
    assert pooled.offset_per_key() == [0, 8, 16, 20, 32]
    for name, value in pooled.to_dict().items():
        assert torch.equal(value, pooled[name])
    assert torch.equal(pooled["tag"], pooled.values()[:, 16:20])
    with pytest.raises(KeyError, match="did you mean `friend`"):
        pooled["freind"]


def test_features_in_another_order_or_too_many_give_the_same_vectors() -> None:
    bags = EmbeddingBags(TABLES, optimizer="sgd", lr=0.1)
    plain = Plain(bags)
    random = torch.Generator().manual_seed(12)
    order = ("tag", "friend", "user")
    sparse = batch(random, features=order)
    ours = bags(Keyed(list(order), sparse)).values()
    torch.testing.assert_close(ours, plain(sparse, order), rtol=1e-6, atol=1e-6)
    target = torch.randn(NUM_SAMPLES, 32, generator=random)
    loss_of(ours, target).backward()
    loss_of(plain(sparse, order), target).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_rows(bags, plain)
    few = EmbeddingBags(TABLES[1:2], optimizer="sgd")
    assert few(Keyed(list(order), sparse)).keys() == ["tag"]


def test_ids_in_the_tables_order_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    bags = EmbeddingBags(TABLES[:2], optimizer="sgd")
    sparse = batch(torch.Generator().manual_seed(13))
    seen = []
    lookup = bags._store.lookup
    monkeypatch.setattr(bags._store, "lookup", lambda given: seen.append(given) or lookup(given))  # type: ignore[func-returns-value]
    for features in (sparse, Keyed(list(FEATURES), sparse)):
        bags(features)
    assert [given.ids.data_ptr() for given in seen] == [sparse.ids.data_ptr()] * 2
    assert [given.offsets.data_ptr() for given in seen] == [sparse.offsets.data_ptr()] * 2


def test_without_torchrec_a_conversion_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)  # as if it were not installed
    with pytest.raises(RowsteadError, match="needs TorchRec"):
        kjt_from_sparse(batch(torch.Generator().manual_seed(1)), FEATURES)


@needs_torchrec
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_conversion_from_and_to_a_keyed_jagged_tensor_shares_memory(dtype: torch.dtype, weighted: bool) -> None:
    sparse = batch(torch.Generator().manual_seed(15), dtype=dtype, weighted=weighted)
    keyed = kjt_from_sparse(sparse, FEATURES)
    back = sparse_from_kjt(keyed)
    assert keyed.keys() == list(FEATURES)
    assert keyed.stride() == NUM_SAMPLES
    for given in (keyed.values(), back.ids):
        assert given.data_ptr() == sparse.ids.data_ptr()
        assert given.dtype == dtype
    assert keyed.offsets().data_ptr() == back.offsets.data_ptr() == sparse.offsets.data_ptr()
    assert (back.weights is None) == (sparse.weights is None)
    if sparse.weights is not None and back.weights is not None:
        assert back.weights.data_ptr() == sparse.weights.data_ptr()
    assert back.num_samples == NUM_SAMPLES
    with pytest.raises(DataError, match="2 keys for 3 features"):
        kjt_from_sparse(sparse, ("a", "b"))


@needs_torchrec
@pytest.mark.parametrize("lengths_dtype", [torch.int64, torch.int32])
def test_it_stands_in_for_an_embedding_bag_collection(lengths_dtype: torch.dtype) -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor, PoolingType

    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=list(table.feature_names),
            pooling=PoolingType[table.pooling.upper()],
        )
        for table in TABLES
    ]
    theirs = EmbeddingBagCollection(tables=configs)
    ours, fused = EmbeddingBags(configs), EmbeddingBags(configs, optimizer="sgd", lr=0.1)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    fused.load_state_dict(theirs.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, ours)]
    random = torch.Generator().manual_seed(16)
    order = ("tag", "user", "friend")
    for _ in range(5):
        sparse = batch(random, features=order)
        lengths = sparse.offsets.diff().to(lengths_dtype)
        keyed = KeyedJaggedTensor(keys=list(order), values=sparse.ids, lengths=lengths)
        target = torch.randn(NUM_SAMPLES, 32, generator=random)
        wanted = theirs(keyed)
        for model in (theirs, ours, fused):
            pooled = model(keyed)
            assert isinstance(pooled, KeyedTensor)
            assert pooled.keys() == wanted.keys()
            torch.testing.assert_close(pooled.values(), wanted.values(), rtol=1e-5, atol=1e-5)
            assert torch.equal(pooled["tag"], pooled.to_dict()["tag"])
            loss_of(pooled.values(), target).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    theirs.load_state_dict(fused.state_dict())
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], value, rtol=1e-5, atol=1e-5)


@needs_torchrec
def test_a_torchrec_configuration_says_type_and_initial_rows() -> None:
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.embedding_configs import DataType

    config = EmbeddingBagConfig(
        name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"], data_type=DataType.FP16, init_fn=nn.init.ones_
    )
    bags = EmbeddingBags([config], optimizer="sgd")
    assert bags.embedding_bags["t"].weight.dtype == torch.float16
    assert torch.equal(bags.embedding_bags["t"].weight, torch.ones(5, 4, dtype=torch.float16))
    uneven = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(DataError, match="different numbers of examples"):
        bags(uneven)
