"""EmbeddingBags trains like nn.EmbeddingBag under torch.optim, and stands in for TorchRec's EmbeddingBagCollection.

Tests against TorchRec itself are skipped where it is not installed.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rowstead
from rowstead.contracts.batch import Sparse, kjt_from_sparse, sparse_from_kjt
from rowstead.embedding_bags import BagTable, EmbeddingBags, PooledFeatures
from rowstead.kernels.layout import layout_of
from rowstead.spec.errors import CheckpointError, DataError, RowsteadError, SpecError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, tables_of
from rowstead.spec.train import SparseOptimizerSpec
from rowstead.stores.device import DeviceStore

TABLES = (
    BagTable(name="users", num_embeddings=40, embedding_dim=8, feature_names=("user", "friend")),
    BagTable(name="tags", num_embeddings=15, embedding_dim=4, feature_names=("tag",), pooling="mean"),
    BagTable(name="again", num_embeddings=40, embedding_dim=12, feature_names=("user",)),
)
FEATURES = ("user", "friend", "tag")
ROWS = {"user": 40, "friend": 40, "tag": 15}
NUM_SAMPLES = 6

needs_torchrec = pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="TorchRec is not installed")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))]


def batch(
    random: torch.Generator, *, weighted: bool = False, dtype: torch.dtype = torch.int64, features: tuple[str, ...] = FEATURES
) -> Sparse:
    """Random bags, many of them empty, and ids that repeat."""
    lengths = torch.randint(0, 5, (len(features), NUM_SAMPLES), generator=random)
    lengths[:, 0] = 0
    ids = [
        torch.randint(0, ROWS[name], (int(own.sum()),), generator=random) for name, own in zip(features, lengths, strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
    weights = torch.rand(int(offsets[-1]), generator=random) if weighted else None
    return Sparse(ids=torch.cat(ids).to(dtype), offsets=offsets, num_features=len(features), weights=weights)


class Plain(nn.Module):
    """The same tables, one nn.EmbeddingBag each."""

    def __init__(self, bags: EmbeddingBags, *, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                table.name: nn.EmbeddingBag(
                    table.num_embeddings, table.embedding_dim, mode=table.pooling, include_last_offset=True, sparse=sparse
                )
                for table in TABLES
            }
        )
        for name, weight in bags.state_dict().items():
            self.tables[name.split(".")[1]].weight.data.copy_(weight)

    def forward(self, sparse: Sparse, features: tuple[str, ...] = FEATURES) -> Tensor:
        pooled = []
        for table in TABLES:
            for feature in table.feature_names:
                place = features.index(feature)
                own = sparse.offsets[place * NUM_SAMPLES : (place + 1) * NUM_SAMPLES + 1]
                part = slice(int(own[0]), int(own[-1]))
                weights = None if sparse.weights is None else sparse.weights[part]
                if weights is not None and table.pooling == "mean":
                    raise AssertionError("nn.EmbeddingBag has no weighted mean")
                pooled.append(self.tables[table.name](sparse.ids[part].long(), own - own[0], weights))
        return torch.cat(pooled, dim=1)


def loss_of(pooled: Tensor, target: Tensor) -> Tensor:
    return (pooled.sin() - target).square().sum()


def assert_same_rows(bags: EmbeddingBags, plain: Plain, tolerance: float = 1e-5) -> None:
    for name, weight in bags.state_dict().items():
        torch.testing.assert_close(weight.cpu(), plain.tables[name.split(".")[1]].weight.data, rtol=tolerance, atol=tolerance)


def optimizer_of(kind: str, plain: Plain, lr: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(plain.parameters(), lr=lr)
    if kind == "adagrad":
        return torch.optim.Adagrad(plain.parameters(), lr=lr, eps=1e-8)
    return torch.optim.SparseAdam(list(plain.parameters()), lr=lr, eps=1e-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_20_steps_end_where_torch_optim_ends(kind: Any, dtype: torch.dtype, device: str) -> None:
    bags = EmbeddingBags(TABLES, optimizer=kind, lr=0.05, device=device)
    plain = Plain(bags, sparse=kind == "adam")
    optimizer = optimizer_of(kind, plain, 0.05)
    random = torch.Generator().manual_seed(3)
    for step in range(20):
        if step == 10:  # a schedule
            bags.lr = 0.01
            optimizer.param_groups[0]["lr"] = 0.01
        sparse = batch(random, dtype=dtype)
        target = torch.randn(NUM_SAMPLES, 32, generator=random)
        ours = bags(sparse.to(device)).values()
        theirs = plain(sparse)
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)
        loss_of(ours, target.to(device)).backward()
        optimizer.zero_grad()
        loss_of(theirs, target).backward()
        optimizer.step()
    assert_same_rows(bags, plain)


def test_rowwise_adagrad_divides_by_the_mean_square_of_each_row() -> None:
    bags = EmbeddingBags(TABLES, optimizer="rowwise_adagrad", lr=0.05)
    plain = Plain(bags)
    sums = {name: torch.zeros(table.weight.shape[0], 1) for name, table in plain.tables.items()}
    random = torch.Generator().manual_seed(4)
    for _ in range(20):
        sparse, target = batch(random), torch.randn(NUM_SAMPLES, 32, generator=random)
        loss_of(bags(sparse).values(), target).backward()
        plain.zero_grad()
        loss_of(plain(sparse), target).backward()
        for name, table in plain.tables.items():
            grad = table.weight.grad
            sums[name] += grad.square().mean(dim=1, keepdim=True)
            table.weight.data -= 0.05 * grad / (sums[name].sqrt() + 1e-8)
    assert_same_rows(bags, plain)


def test_without_an_optimizer_tables_have_ordinary_gradients() -> None:
    bags = EmbeddingBags(TABLES)
    plain = Plain(bags)
    ours, theirs = torch.optim.Adam(bags.parameters(), lr=0.01), torch.optim.Adam(plain.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(5)
    for _ in range(20):
        sparse, target = batch(random), torch.randn(NUM_SAMPLES, 32, generator=random)
        for model, optimizer in ((lambda s: bags(s).values(), ours), (plain, theirs)):
            optimizer.zero_grad()
            loss_of(model(sparse), target).backward()
            optimizer.step()
    assert_same_rows(bags, plain)


def test_several_look_ups_before_one_backward_each_send_their_gradient() -> None:
    bags = EmbeddingBags(TABLES, optimizer="sgd", lr=0.1)
    plain = Plain(bags)
    random = torch.Generator().manual_seed(6)
    one, two = batch(random), batch(random)
    target = torch.randn(NUM_SAMPLES, 32, generator=random)
    (loss_of(bags(one).values(), target) + loss_of(bags(two).values(), target)).backward()
    (loss_of(plain(one), target) + loss_of(plain(two), target)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_rows(bags, plain)
    assert int(bags.optimizer_state()["num_updates"]) == 2


def test_a_look_up_under_no_grad_or_never_sent_back_changes_nothing() -> None:
    bags = EmbeddingBags(TABLES, optimizer="adagrad", lr=0.1)
    before = copy.deepcopy(bags.state_dict())
    sparse = batch(torch.Generator().manual_seed(7))
    with torch.no_grad():
        assert not bags(sparse).values().requires_grad
    assert bags(sparse).values().requires_grad
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())


def test_a_second_backward_through_one_look_up_is_refused() -> None:
    bags = EmbeddingBags(TABLES, optimizer="sgd", lr=0.1)
    pooled = bags(batch(torch.Generator().manual_seed(8))).values()
    pooled.backward(torch.ones_like(pooled))
    with pytest.raises(RuntimeError, match="second time"):
        pooled.backward(torch.ones_like(pooled))


def test_ids_that_change_before_the_backward_pass_are_noticed() -> None:
    bags = EmbeddingBags(TABLES[:2], optimizer="sgd", lr=0.1)
    sparse = batch(torch.Generator().manual_seed(8))
    pooled = bags(sparse).values()
    sparse.ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pooled.sum().backward()


@pytest.mark.parametrize("optimizer", ["sgd", None])
def test_weights_of_ids_scale_rows_and_have_gradients(optimizer: Any) -> None:
    tables = TABLES[:1]
    bags = EmbeddingBags(tables, is_weighted=True, optimizer=optimizer)
    rows = bags.embedding_bags["users"].weight.detach().clone()
    random = torch.Generator().manual_seed(9)
    sparse = batch(random, weighted=True, features=("user", "friend"))
    assert sparse.weights is not None
    sparse.weights.requires_grad_()
    pooled = bags(sparse).values()
    grad = torch.randn(NUM_SAMPLES, 16, generator=random)
    pooled.backward(grad)
    bag_of = torch.repeat_interleave(torch.arange(2 * NUM_SAMPLES), sparse.offsets.diff())
    of_bags = grad.view(NUM_SAMPLES, 2, 8).transpose(0, 1).reshape(-1, 8)
    wanted = torch.zeros(2 * NUM_SAMPLES, 8).index_add(0, bag_of, rows[sparse.ids] * sparse.weights.detach()[:, None])
    torch.testing.assert_close(pooled.detach(), wanted.view(2, NUM_SAMPLES, 8).transpose(0, 1).reshape(NUM_SAMPLES, 16))
    torch.testing.assert_close(sparse.weights.grad, (rows[sparse.ids] * of_bags[bag_of]).sum(1))


def test_weights_are_ignored_or_wanted_as_the_module_says() -> None:
    random = torch.Generator().manual_seed(9)
    weighted = batch(random, weighted=True)
    bags = EmbeddingBags(TABLES, optimizer="sgd")
    without = Sparse(ids=weighted.ids, offsets=weighted.offsets, num_features=3)
    assert torch.equal(bags(weighted).values(), bags(without).values())
    with pytest.raises(DataError, match="the batch has no weights"):
        EmbeddingBags(TABLES, is_weighted=True)(without)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", None])
def test_rows_of_half_the_width_give_float32_vectors(dtype: torch.dtype, optimizer: Any) -> None:
    bags = EmbeddingBags(TABLES, dtype=dtype, optimizer=optimizer)
    assert {weight.dtype for weight in bags.state_dict().values()} == {dtype}
    sparse = batch(torch.Generator().manual_seed(10))
    pooled = bags(sparse).values()
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled.detach(), Plain(bags)(sparse).detach(), rtol=0.02, atol=0.02)
    before = bags.embedding_bags["users"].weight.detach().clone()
    pooled.square().sum().backward()
    if optimizer is None:
        assert bags.embedding_bags["users"].weight.grad is not None
    else:
        assert not torch.equal(bags.embedding_bags["users"].weight, before)


def train(bags: EmbeddingBags, seed: int, steps: int = 3) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        bags(batch(random)).values().square().sum().backward()


def test_a_copy_and_a_reloaded_module_go_on_the_same_and_leave_the_first_alone() -> None:
    bags = EmbeddingBags(TABLES, optimizer="adam", lr=0.05)
    train(bags, seed=1)
    copied = copy.deepcopy(bags)
    file = io.BytesIO()
    torch.save(bags, file)
    file.seek(0)
    unpickled = torch.load(file, weights_only=False)
    reloaded = EmbeddingBags(TABLES, optimizer="adam", lr=0.05, seed=2)
    reloaded.load_state_dict(bags.state_dict())
    reloaded.load_optimizer_state(bags.optimizer_state())
    assigned = EmbeddingBags(TABLES, optimizer="adam", lr=0.05, seed=2)
    assigned.load_state_dict(copy.deepcopy(bags.state_dict()), assign=True)
    assigned.load_optimizer_state(bags.optimizer_state())
    before = copy.deepcopy(bags.state_dict())
    for other in (copied, unpickled, reloaded, assigned):
        train(other, seed=2)
    assert all(torch.equal(value, before[name]) for name, value in bags.state_dict().items())
    train(bags, seed=2)
    for other in (copied, unpickled, reloaded, assigned):
        for name, value in bags.state_dict().items():
            assert torch.equal(value, other.state_dict()[name])
        for name, value in bags.optimizer_state().items():
            assert torch.equal(value, other.optimizer_state()[name])


def test_to_takes_rows_and_the_optimizer_along() -> None:
    bags = EmbeddingBags(TABLES, optimizer="adagrad", lr=0.05)
    train(bags, seed=1)
    sums = bags.optimizer_state()["users.sum"].double()
    bags.to(torch.float64)
    assert {value.dtype for value in bags.state_dict().values()} == {torch.float64}
    assert torch.equal(bags.optimizer_state()["users.sum"], sums)
    train(bags, seed=2)
    assert not torch.equal(bags.optimizer_state()["users.sum"], sums)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_module_that_is_moved_to_the_gpu_trains_there() -> None:
    here = EmbeddingBags(TABLES, optimizer="adagrad", lr=0.05)
    train(here, seed=1)
    there = copy.deepcopy(here).cuda()
    assert there.kernel == "gpu"
    sparse = batch(torch.Generator().manual_seed(2))
    for bags, moved in ((here, sparse), (there, sparse.to("cuda"))):
        bags(moved).values().square().sum().backward()
    for name, value in here.state_dict().items():
        torch.testing.assert_close(there.state_dict()[name].cpu(), value, rtol=1e-5, atol=1e-5)


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


class Keyed:
    """A batch with the methods of TorchRec's KeyedJaggedTensor that we use."""

    def __init__(self, keys: list[str], sparse: Sparse) -> None:
        self._keys, self._sparse = keys, sparse

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._sparse.ids

    def offsets(self) -> Tensor:
        return self._sparse.offsets

    def weights_or_none(self) -> Tensor | None:
        return self._sparse.weights


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


def test_what_does_not_fit_is_named() -> None:
    bags = EmbeddingBags(TABLES, optimizer="sgd")
    sparse = batch(torch.Generator().manual_seed(14))
    with pytest.raises(DataError, match="no feature `friend`, which a table reads: did you mean `freind`"):
        bags(Keyed(["user", "freind", "tag"], sparse))
    with pytest.raises(DataError, match="the batch has 2 features, and the tables want user, friend, tag"):
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


def test_a_batch_of_no_examples_has_no_vectors() -> None:
    bags = EmbeddingBags(TABLES[:2], optimizer="sgd")
    empty = Sparse(ids=torch.empty(0, dtype=torch.int64), offsets=torch.zeros(1, dtype=torch.int64), num_features=3)
    pooled = bags(empty).values()
    assert pooled.shape == (0, 20)
    pooled.sum().backward()
    mixed = EmbeddingBags(TABLES, optimizer="sgd")
    assert mixed(empty).values().shape == (0, 32)


def test_inside_a_compiled_model_it_trains_the_same() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags, self.top = EmbeddingBags(TABLES, optimizer="adagrad", lr=0.1), nn.Linear(32, 1)

        def forward(self, sparse: Sparse) -> Tensor:
            return self.top(self.bags(sparse).values().relu())

    model = Model()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    sparse = batch(torch.Generator().manual_seed(17))
    for _ in range(2):
        compiled(sparse).square().sum().backward()
        plain(sparse).square().sum().backward()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_what_its_page_shows_runs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "embedding_bags.md").read_text()
    shown = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(shown, names)
    assert names["pooled"].keys() == ["user", "friend", "tag"]
    assert names["bags"].optimizer_state()["num_updates"] == 1


def test_the_package_has_it() -> None:
    assert rowstead.EmbeddingBags is EmbeddingBags
    assert rowstead.sparse_from_kjt is sparse_from_kjt


# TorchRec itself


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


def _two_tables(**more: Any) -> EmbeddingBags:
    tables = [BagTable(name=name, num_embeddings=10, embedding_dim=4) for name in ("a", "b")]
    return EmbeddingBags(tables, **more)


def _one_example(weights: Tensor | None = None) -> Sparse:
    return Sparse(ids=torch.tensor([1, 2]), offsets=torch.tensor([0, 1, 2]), num_features=2, weights=weights)


def test_tables_that_kernels_would_misread_are_refused() -> None:
    strided, half, small = _two_tables(), _two_tables(), _two_tables()
    strided.embedding_bags["a"].weight.data = torch.arange(80.0).view(10, 8)[:, :4]
    half.embedding_bags["b"].half()
    small.embedding_bags["a"].weight.data = torch.ones(2, 4)
    for bags in (strided, half, small):
        with pytest.raises(RowsteadError, match="must be contiguous"):
            bags(_one_example())


def test_a_store_whose_state_was_left_behind_is_not_trained() -> None:
    features = FeaturesSpec(sparse=(SparseFeatureSpec(name="f", num_rows=10),))
    store = DeviceStore(layout_of(features, tables_of(features, width=4)), SparseOptimizerSpec(kind="adagrad")).double()
    sparse = Sparse(ids=torch.tensor([1]), offsets=torch.tensor([0, 1]), num_features=1)
    with pytest.raises(RowsteadError, match="convert the store before training it"):
        store.update(sparse, torch.ones(1, 4, dtype=torch.float64), lr=0.1, step=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_weights_get_gradients_whatever_their_type_and_though_tables_are_frozen(
    optimizer: str | None, dtype: torch.dtype
) -> None:
    bags = _two_tables(is_weighted=True, optimizer=optimizer, dtype=dtype).requires_grad_(False)
    weights = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    rows = [bags.embedding_bags[name].weight.detach().float().clone() for name in ("a", "b")]
    bags(_one_example(weights)).values().sum().backward()
    assert weights.grad is not None
    expected = torch.stack([rows[0][1].sum(), rows[1][2].sum()])
    torch.testing.assert_close(weights.grad.float(), expected, rtol=1e-2, atol=1e-2)


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
        _two_tables(**wrong)
