"""EmbeddingBags stand in for TorchRec's EmbeddingBagCollection.

Tests against TorchRec itself are skipped where it is not installed.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import sys
from typing import Any

import pytest
import torch
from torch import nn

import rowstead
from rowstead.data.batch import kjt_from_sparse, sparse_from_kjt
from rowstead.nn.bag_tables import PooledFeatures
from rowstead.nn.embedding_bags import EmbeddingBags
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
    monkeypatch.setattr(bags._store, "lookup", lambda given, tables: seen.append(given) or lookup(given, tables))  # type: ignore[func-returns-value]
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
    with pytest.raises(DataError, match="differ in batch size"):
        bags(uneven)


# What TorchRec promises of its collections, checked of theirs and of ours.


def config(name: str, dim: int, *features: str, **more: Any) -> Any:
    from torchrec import EmbeddingBagConfig

    return EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=10, feature_names=list(features), **more)


def keyed(**lengths_and_ids: tuple[list[int], list[int]]) -> Any:
    """A KeyedJaggedTensor of each feature's lengths and ids."""
    from torchrec import KeyedJaggedTensor

    lengths = [length for own, _ in lengths_and_ids.values() for length in own]
    ids = [row for _, own in lengths_and_ids.values() for row in own]
    weights = torch.linspace(0.5, 2.0, len(ids))
    return KeyedJaggedTensor(
        keys=list(lengths_and_ids), values=torch.tensor(ids), lengths=torch.tensor(lengths), weights=weights
    )


def batch_of_three() -> Any:
    return keyed(f1=([2, 0, 1], [0, 1, 2]), f2=([1, 1, 3], [3, 4, 5, 6, 7]))


def collection(whose: str, tables: list[Any], **more: Any) -> Any:
    import torchrec

    torch.manual_seed(0)
    made = torchrec.EmbeddingBagCollection if whose == "theirs" else EmbeddingBags
    return made(tables=tables, **more)


def fused(whose: str, tables: list[Any], kind: str = "sgd", **more: Any) -> Any:
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad

    classes = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
    if whose == "theirs":
        kwargs = {"lr": 0.1} if kind == "sgd" else {"lr": 0.1, "eps": 1e-8}
        device = torch.device("cpu")
        return FusedEmbeddingBagCollection(tables, classes[kind], kwargs, device=device, **more)
    return EmbeddingBags(tables, optimizer=kind, lr=0.1, **more)  # type: ignore[arg-type]


def expected(bags: Any, batch: Any, *, weighted: bool = False) -> dict[str, torch.Tensor]:
    """Pooled vectors by feature and table, summed one id after the other."""
    tables = {name.split(".")[1]: rows.detach() for name, rows in bags.state_dict().items()}
    found = {}
    for table in bags.embedding_bag_configs():
        for feature in table.feature_names:
            own = batch[feature]
            bounds, vectors = own.offsets().tolist(), []
            for start, stop in itertools.pairwise(bounds):
                rows = tables[table.name][own.values()[start:stop]]
                vectors.append((rows * own.weights()[start:stop, None] if weighted else rows).sum(0))
            found[f"{feature}@{table.name}"] = torch.stack(vectors)
    return found


def assert_pools(bags: Any, batch: Any, keys: list[str], *, weighted: bool = False) -> None:
    pooled = bags(batch)
    assert pooled.keys() == keys
    for (name, vectors), key in zip(expected(bags, batch, weighted=weighted).items(), keys, strict=True):
        assert key in (name, name.split("@")[0])
        torch.testing.assert_close(pooled[key], vectors)
    widths = [table.embedding_dim for table in bags.embedding_bag_configs() for _ in table.feature_names]
    assert list(pooled.offset_per_key()) == [0, *itertools.accumulate(widths)]


both = pytest.mark.parametrize("whose", ["theirs", "ours"])
makers = pytest.mark.parametrize("make", [collection, fused], ids=["unfused", "fused"])
SHAPES = {
    "unweighted": ([("t1", 4, "f1"), ("t2", 8, "f2")], ["f1", "f2"]),
    "shared tables": ([("t1", 4, "f1", "f2")], ["f1", "f2"]),
    "shared features": ([("t1", 4, "f1"), ("t2", 4, "f1")], ["f1@t1", "f1@t2"]),
    "both": ([("t1", 4, "f1", "f2"), ("t2", 4, "f1")], ["f1@t1", "f2", "f1@t2"]),
    "single": ([("t1", 4, "f1")], ["f1"]),
}


@needs_torchrec
@both
@makers
@pytest.mark.parametrize("shape", SHAPES)
def test_pooled_vectors_have_the_sums_of_rows_and_the_keys(make: Any, whose: str, shape: str) -> None:
    tables, keys = SHAPES[shape]
    bags = make(whose, [config(*table) for table in tables])
    assert_pools(bags, batch_of_three(), keys)
    assert_pools(bags, keyed(f1=([2], [1, 9]), f2=([1], [3])), keys)  # a batch of one example


@needs_torchrec
@both
@makers
def test_weighted_rows_are_summed(make: Any, whose: str) -> None:
    bags = make(whose, [config("t1", 4, "f1"), config("t2", 4, "f1", "f2")], is_weighted=True)
    assert bags.is_weighted()
    assert_pools(bags, batch_of_three(), ["f1@t1", "f1@t2", "f2"], weighted=True)


@needs_torchrec
@both
def test_a_look_up_on_the_meta_device_has_shapes(whose: str) -> None:
    bags = collection(whose, [config("t1", 4, "f1"), config("t2", 8, "f2")], device=torch.device("meta"))
    pooled = bags(batch_of_three().to(torch.device("meta")))
    assert pooled.values().is_meta
    assert pooled.values().shape == (3, 12)


@needs_torchrec
@both
@pytest.mark.parametrize("weighted", [False, True])
def test_torch_fx_traces_it_and_torch_script_compiles_the_trace(whose: str, weighted: bool) -> None:
    from torchrec.fx import symbolic_trace

    tables = [config("t1", 4, "f1"), config("t2", 4, "f1", "f2")]
    bags = collection(whose, tables, is_weighted=weighted)
    wanted = bags(batch_of_three())
    traced = symbolic_trace(bags)
    for module in (traced, torch.jit.script(traced), torch.jit.script(bags)):
        pooled = module(batch_of_three())
        assert pooled.keys() == wanted.keys()
        torch.testing.assert_close(pooled.values(), wanted.values())
    assert list(traced.state_dict()) == list(bags.state_dict())


@needs_torchrec
def test_a_trace_that_would_not_train_rows_is_refused() -> None:
    from torchrec.fx import symbolic_trace

    bags = fused("ours", [config("t1", 4, "f1")])
    with pytest.raises(RowsteadError, match="a traced look-up does not update rows"):
        symbolic_trace(bags)
    with pytest.raises(RowsteadError, match="script EmbeddingBags without `optimizer`"):
        torch.jit.script(bags)
    pooled = symbolic_trace(bags.eval())(batch_of_three())
    torch.testing.assert_close(pooled.values(), bags(batch_of_three()).values())


@needs_torchrec
@both
def test_two_tables_of_one_name_are_a_value_error(whose: str) -> None:
    with pytest.raises(ValueError, match="t1"):
        collection(whose, [config("t1", 4, "f1"), config("t1", 4, "f2")])


@needs_torchrec
@both
def test_the_device_is_the_argument_that_of_the_context_or_the_cpu(whose: str) -> None:
    tables = [config("t1", 4, "f1")]
    assert torch.device(collection(whose, tables, device=torch.device("meta")).device).type == "meta"
    with torch.device("meta"):
        assert collection(whose, tables).device.type == "meta"
    assert collection(whose, tables).device.type == "cpu"


@needs_torchrec
@both
def test_rows_of_a_fused_collection_are_saved_loaded_and_set_by_name(whose: str) -> None:
    tables = [config("t1", 4, "f1"), config("t2", 4, "f2")]
    one, two = fused(whose, tables), fused(whose, tables)
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(batch_of_three()).values(), two(batch_of_three()).values())
    assert list(one.state_dict()) == ["embedding_bags.t1.weight", "embedding_bags.t2.weight"]
    assert [name for name, _ in one.named_parameters()] == list(one.state_dict())
    for value in one.state_dict().values():
        value.fill_(1.5)
    assert torch.equal(one(batch_of_three())["f1"], torch.tensor([[3.0], [0.0], [1.5]]).expand(3, 4))


@needs_torchrec
@both
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_a_fused_optimizer_ends_where_the_plain_one_ends_and_its_state_is_saved(whose: str, kind: str) -> None:
    from torchrec import EmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad

    tables = [config("t1", 4, "f1", "f2"), config("t2", 4, "f1")]
    bags, again, plain = fused(whose, tables, kind), fused(whose, tables, kind), EmbeddingBagCollection(tables=tables)
    plain.load_state_dict(bags.state_dict())
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    if kind != "sgd":
        optimizer = (torch.optim.Adagrad if kind == "adagrad" else RowWiseAdagrad)(plain.parameters(), lr=0.1, eps=1e-8)

    def train(model: Any, step: Any) -> None:
        step.zero_grad()
        model(batch_of_three()).values().square().sum().backward()
        step.step()

    for _ in range(2):
        train(bags, bags.fused_optimizer())
        train(plain, optimizer)
    for name, rows in plain.state_dict().items():
        torch.testing.assert_close(bags.state_dict()[name], rows)
    again.load_state_dict(bags.state_dict())
    again.fused_optimizer().load_state_dict(copy.deepcopy(bags.fused_optimizer().state_dict()))
    for each in (bags, again):
        train(each, each.fused_optimizer())
    for name, rows in bags.state_dict().items():
        assert torch.equal(again.state_dict()[name], rows)


@needs_torchrec
@pytest.mark.parametrize("whose", ["theirs", "ours"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "SGD"])
def test_fusing_an_optimizer_replaces_collections_and_keeps_rows_and_names(whose: str, inside: bool, optimizer: str) -> None:
    bags = collection(whose, [config("t1", 4, "f1"), config("t2", 4, "f2")])
    model = nn.ModuleDict({"sparse": nn.ModuleDict({"bags": bags}), "again": bags, "top": nn.Linear(8, 1)}) if inside else bags
    names = [
        list(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_buffers()],
    ]
    modules = [name for name, _ in model.named_modules()]
    wanted = bags(batch_of_three()).values().detach()
    if optimizer == "SGD":  # the arguments of TorchRec's function
        model = rowstead.fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1}, torch.device("cpu"))
    else:
        model = rowstead.fuse_embedding_optimizer(model, optimizer, lr=0.1)
    replaced = model["sparse"]["bags"] if inside else model
    assert isinstance(replaced, EmbeddingBags)
    assert replaced.lr == 0.1
    assert replaced.optimizer is not None
    assert replaced.optimizer.kind == ("sgd" if optimizer == "SGD" else optimizer)
    assert not inside or model["again"] is replaced
    assert names == [
        list(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_buffers()],
    ]
    assert [name for name, _ in model.named_modules()] == modules
    pooled = replaced(batch_of_three()).values()
    torch.testing.assert_close(pooled, wanted)
    pooled.sum().backward()
    assert not torch.equal(replaced(batch_of_three()).values(), wanted)
    assert rowstead.fuse_embedding_optimizer(model, "adam") is model
    assert replaced.optimizer.kind != "adam"
