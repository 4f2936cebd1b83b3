"""Embeddings return the rows of nn.Embedding and train like it under torch.optim, for sequences of any lengths."""

from __future__ import annotations

import copy
import importlib.util
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import rowstead
from rowstead.data.batch import Sparse
from rowstead.nn.bag_tables import BagTable, EmbeddingTable
from rowstead.nn.embedding_bags import EmbeddingBags
from rowstead.nn.embeddings import Embeddings
from rowstead.spec.errors import DataError, RowsteadError
from tests.small_bags import FEATURES, ROWS, Keyed, batch
from tests.small_sequences import KEYS, SEQUENCE_TABLES, PlainSequences, assert_same_tables, rows_loss

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))]
LENGTHS = st.integers(0, 4).flatmap(
    lambda count: st.lists(st.lists(st.integers(0, 3), min_size=count, max_size=count), min_size=3, max_size=3)
)


def optimizer_of(kind: str, plain: nn.Module, lr: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(plain.parameters(), lr=lr)
    if kind == "adagrad":
        return torch.optim.Adagrad(plain.parameters(), lr=lr, eps=1e-8)
    return torch.optim.SparseAdam(list(plain.parameters()), lr=lr, eps=1e-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "dtype"), [("sgd", torch.int32), ("adagrad", torch.int64), ("adam", torch.int32)])
def test_20_steps_end_where_torch_optim_ends(kind: Any, dtype: torch.dtype, device: str) -> None:
    embeddings = Embeddings(SEQUENCE_TABLES, optimizer=kind, lr=0.05, device=device)
    plain = PlainSequences(embeddings, sparse=kind == "adam")
    optimizer = optimizer_of(kind, plain, 0.05)
    random = torch.Generator().manual_seed(3)
    for step in range(20):
        if step == 10:  # a schedule
            embeddings.lr = 0.01
            optimizer.param_groups[0]["lr"] = 0.01
        sparse = batch(random, dtype=dtype)
        rows_loss(embeddings(sparse.to(device)), step).backward()
        optimizer.zero_grad()
        rows_loss(plain(sparse), step).backward()
        optimizer.step()
    assert_same_tables(embeddings, plain)
    assert int(embeddings.optimizer_state()["num_updates"]) == 20


@pytest.mark.parametrize("optimizer", ["sgd", None])
@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, seed=st.integers(0, 9))
def test_sequences_of_any_lengths_have_their_rows_and_send_them_their_gradients(
    optimizer: Any, lengths: list[list[int]], seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, ROWS[name], (sum(own),), generator=random) for name, own in zip(FEATURES, lengths, strict=True)]
    offsets = torch.tensor([0, *(length for own in lengths for length in own)]).cumsum(0)
    sparse = Sparse(ids=torch.cat(ids), offsets=offsets, num_features=3)
    embeddings = Embeddings(SEQUENCE_TABLES, optimizer=optimizer, lr=0.1 if optimizer else None)
    plain = PlainSequences(embeddings)
    found, wanted = embeddings(sparse), plain(sparse)
    assert list(found) == KEYS
    for key, (own, rows) in wanted.items():
        assert found[key].lengths().tolist() == own
        assert found[key].offsets().tolist() == torch.tensor([0, *own]).cumsum(0).tolist()
        assert torch.equal(found[key].values(), rows)
    rows_loss(found).backward()
    rows_loss(wanted).backward()
    if optimizer is None:
        torch.optim.SGD(embeddings.parameters(), lr=0.1).step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_tables(embeddings, plain)


def test_rows_that_the_loss_leaves_out_are_updated_with_a_gradient_of_zero() -> None:
    embeddings = Embeddings(SEQUENCE_TABLES, optimizer="adam", lr=0.1)
    before = copy.deepcopy(embeddings.state_dict())
    random = torch.Generator().manual_seed(1)
    sparse = batch(random)
    embeddings(sparse)["tag"].values().sum().backward()
    changed = {name for name, rows in embeddings.state_dict().items() if not torch.equal(rows, before[name])}
    assert changed == {"embeddings.tags.weight"}
    rows_loss(embeddings(sparse)).backward()
    middle = embeddings.embeddings["users"].weight.detach().clone()
    embeddings(sparse)["tag"].values().sum().backward()
    assert not torch.equal(embeddings.embeddings["users"].weight, middle)  # by Adam's momentum, as EmbeddingBags do


@pytest.mark.parametrize("order", [("tag", "friend", "user"), ("friend", "other", "user", "tag")])
def test_features_in_another_order_or_too_many_give_the_same_rows(order: tuple[str, ...]) -> None:
    embeddings = Embeddings(SEQUENCE_TABLES, optimizer="sgd", lr=0.1)
    plain = PlainSequences(embeddings)
    counts = {"other": 15, **ROWS}
    lengths = torch.randint(0, 4, (len(order), 5), generator=torch.Generator().manual_seed(2))
    ids = [torch.randint(0, counts[name], (int(own.sum()),)) for name, own in zip(order, lengths, strict=True)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    sparse = Sparse(ids=torch.cat(ids), offsets=offsets, num_features=len(order), weights=torch.rand(int(offsets[-1])))
    found, wanted = embeddings(Keyed(list(order), sparse)), plain(sparse, order)
    for key, (own, rows) in wanted.items():
        assert found[key].lengths().tolist() == own
        assert torch.equal(found[key].values(), rows)
    rows_loss(found).backward()
    rows_loss(wanted).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_tables(embeddings, plain)


def test_ids_in_the_tables_order_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, seen = Embeddings(SEQUENCE_TABLES[:2], optimizer="sgd"), []
    for store in embeddings._stores:
        lookup = store.lookup
        monkeypatch.setattr(store, "lookup", lambda part, own, lookup=lookup: seen.append(part.ids) or lookup(part, own))
    sparse = batch(torch.Generator().manual_seed(13))
    embeddings(sparse)
    assert [len(ids) for ids in seen] == [int(sparse.offsets[12]), int(sparse.offsets[18] - sparse.offsets[12])]
    assert {ids.untyped_storage().data_ptr() for ids in seen} == {sparse.ids.untyped_storage().data_ptr()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", None])
def test_rows_of_half_the_width_are_returned_in_float32(dtype: torch.dtype, optimizer: Any) -> None:
    embeddings = Embeddings(SEQUENCE_TABLES, dtype=dtype, optimizer=optimizer)
    sparse = batch(torch.Generator().manual_seed(10))
    wanted = torch.float32 if dtype == torch.bfloat16 else dtype
    before = copy.deepcopy(embeddings.state_dict())
    found = embeddings(sparse)
    ids = sparse.ids[: len(found["user@users"].values())]
    assert torch.equal(found["user@users"].values(), before["embeddings.users.weight"][ids].to(wanted))
    rows_loss(found).backward()
    for name, rows in embeddings.named_parameters():
        assert rows.grad is not None if optimizer is None else not torch.equal(rows, before[name])


def train(embeddings: nn.Module, seed: int, steps: int = 3) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows_loss(embeddings(batch(random))).backward()


def test_copies_and_reloaded_modules_go_on_the_same_and_leave_the_first_alone() -> None:
    embeddings = Embeddings(SEQUENCE_TABLES, optimizer="adam", lr=0.05)
    train(embeddings, seed=1)
    file = io.BytesIO()
    torch.save(embeddings, file)
    file.seek(0)
    loaded, on_meta = (
        Embeddings(SEQUENCE_TABLES, optimizer="adam", lr=0.05, seed=2, device=device) for device in ("cpu", "meta")
    )
    loaded.load_state_dict(embeddings.state_dict())
    loaded.load_optimizer_state(embeddings.optimizer_state())
    on_meta.load_state_dict(copy.deepcopy(embeddings.state_dict()), assign=True)
    on_meta.fused_optimizer().load_state_dict(embeddings.fused_optimizer().state_dict())
    others = [copy.deepcopy(embeddings), torch.load(file, weights_only=False), loaded, on_meta]
    assert list(embeddings.state_dict()) == [f"embeddings.{table.name}.weight" for table in SEQUENCE_TABLES]
    before = copy.deepcopy(embeddings.state_dict())
    for other in others:
        train(other, seed=2)
    assert all(torch.equal(value, before[name]) for name, value in embeddings.state_dict().items())
    train(embeddings, seed=2)
    for other in others:
        for name, value in embeddings.state_dict().items():
            assert torch.equal(value, other.state_dict()[name])
        for name, value in embeddings.optimizer_state().items():
            assert torch.equal(value, other.optimizer_state()[name])


def test_a_replaced_table_is_read_and_trained_and_one_that_is_gone_is_refused() -> None:
    embeddings = Embeddings(SEQUENCE_TABLES, optimizer="adagrad", lr=0.1).double()
    sparse = batch(torch.Generator().manual_seed(2))
    given = {name: torch.ones_like(rows) for name, rows in embeddings.named_parameters()}
    with torch.no_grad():
        assert bool((functional_call(embeddings, given, (sparse,))["tag"].values() == 1).all())
    before = copy.deepcopy(embeddings.state_dict())
    loss = rows_loss(functional_call(embeddings, given, (sparse,)))
    with pytest.raises(RowsteadError, match="no longer those that the look-up read"):
        loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in embeddings.state_dict().items())
    replaced = nn.Parameter(torch.ones(15, 4, dtype=torch.float64), requires_grad=False)
    embeddings.embeddings["tags"].weight = replaced
    rows_loss(embeddings(sparse)).backward()
    ids = sparse.ids[sparse.offsets[12] :].unique()
    assert (replaced != 1).any(dim=1).nonzero().flatten().tolist() == ids.tolist()
    embeddings.embeddings["tags"].weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    with pytest.raises(RowsteadError, match=r"table `tags` is .* must be contiguous"):
        embeddings(sparse)


def test_a_second_backward_and_ids_that_change_before_the_first_are_refused() -> None:
    embeddings = Embeddings(SEQUENCE_TABLES[:2], optimizer="sgd", lr=0.1)
    sparse = batch(torch.Generator().manual_seed(8))
    loss = embeddings(sparse)["tag"].values().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = embeddings(sparse)["tag"].values().sum()
    sparse.ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_does_not_fit_is_named() -> None:
    embeddings = Embeddings(SEQUENCE_TABLES, optimizer="sgd")
    sparse = batch(torch.Generator().manual_seed(14))
    ids = sparse.ids.clone()
    ids[-1] = 15
    with pytest.raises(DataError, match=r"id 15 of example \d, feature \d \(table `tags`\)"):
        embeddings(Sparse(ids=ids, offsets=sparse.offsets, num_features=3))
    with pytest.raises(DataError, match="offsets must"):
        Embeddings(SEQUENCE_TABLES[:2])(Sparse(ids=sparse.ids[1:], offsets=sparse.offsets, num_features=3))
    with pytest.raises(DataError, match="no feature `friend`, which a table reads"):
        embeddings(Keyed(["user", "freind", "tag"], sparse))
    config = SimpleNamespace(name="t", num_embeddings=9, embedding_dim=4, feature_names=[], pooling="SUM")
    for table in (BagTable(name="t", num_embeddings=9, embedding_dim=4), config):
        with pytest.raises(RowsteadError, match="table `t` has a `pooling`, but Embeddings keep the rows of ids apart"):
            Embeddings([table])
    with pytest.raises(RowsteadError, match="EmbeddingTable, which has no `pooling`: give a BagTable"):
        EmbeddingBags(SEQUENCE_TABLES)
    with pytest.raises(RowsteadError, match="give Embeddings an `optimizer`"):
        Embeddings(SEQUENCE_TABLES).fused_optimizer()
    with pytest.raises(RowsteadError, match="on the meta device have no rows"):
        Embeddings(SEQUENCE_TABLES, device="meta")(sparse.to("meta"))


def test_what_depends_on_the_values_of_offsets_is_not_traced() -> None:
    embeddings = Embeddings(SEQUENCE_TABLES)
    sparse = batch(torch.Generator().manual_seed(14))
    with pytest.raises(RowsteadError, match="Embeddings cannot be traced"):
        torch.fx.symbolic_trace(embeddings)
    with pytest.raises(RowsteadError, match="Embeddings cannot be traced"):
        torch.export.export(embeddings, (sparse,), strict=False)
    with pytest.raises(RowsteadError, match=r"torch\.jit\.script cannot compile Embeddings"):
        torch.jit.script(embeddings)
    with pytest.raises(Exception, match=r"how many rows rowstead\.Embeddings return"):
        torch.compile(embeddings, backend="eager", fullgraph=True)(sparse)


@pytest.mark.slow
def test_a_compiled_model_breaks_its_graph_at_the_look_up_and_trains_the_same() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = Embeddings(SEQUENCE_TABLES, optimizer="adagrad", lr=0.1)
            self.top = nn.Linear(8, 1, dtype=torch.float32)

        def forward(self, sparse: Sparse) -> Tensor:
            rows = self.embeddings(sparse)
            out: Tensor = self.top(rows["friend"].values()).square().sum() + rows["tag"].values().sin().sum()
            return out * rows["tag"].lengths().sum()

    eager = Model()
    model = copy.deepcopy(eager)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    random = torch.Generator().manual_seed(17)
    for _ in range(3):
        sparse = batch(random)
        compiled(sparse).backward()
        eager(sparse).backward()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_fusing_an_optimizer_replaces_embeddings_and_keeps_rows_and_names() -> None:
    embeddings = Embeddings(SEQUENCE_TABLES, dtype=torch.bfloat16)
    model = nn.ModuleDict({"clicked": embeddings, "top": nn.Linear(2, 2)}).eval()
    names, rows = list(model.state_dict()), copy.deepcopy(embeddings.state_dict())
    rowstead.fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1})
    fused = model["clicked"]
    assert isinstance(fused, Embeddings)
    assert fused is not embeddings
    assert not fused.training
    assert fused.lr == 0.1
    assert list(model.state_dict()) == names
    assert all(torch.equal(value, rows[name]) for name, value in fused.state_dict().items())
    assert list(fused.fused_optimizer().params) == list(rows)


@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="TorchRec is not installed")
@pytest.mark.parametrize("lengths_dtype", [torch.int64, torch.int32])
def test_it_stands_in_for_an_embedding_collection(lengths_dtype: torch.dtype) -> None:
    from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

    configs = [
        EmbeddingConfig(name=table.name, num_embeddings=40, embedding_dim=8, feature_names=list(table.feature_names))
        for table in SEQUENCE_TABLES
    ]
    theirs = EmbeddingCollection(tables=configs)
    ours, fused = Embeddings(configs), Embeddings(configs, optimizer="sgd", lr=0.1)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for model in (ours, fused):
        model.load_state_dict(theirs.state_dict())
    replaced = rowstead.fuse_embedding_optimizer(copy.deepcopy(theirs), "sgd", lr=0.1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (theirs, ours)]
    random = torch.Generator().manual_seed(16)
    order = ("tag", "user", "friend")
    for step in range(5):
        sparse = batch(random, features=order)
        keyed = KeyedJaggedTensor(keys=list(order), values=sparse.ids, lengths=sparse.offsets.diff().to(lengths_dtype))
        wanted = theirs(keyed)
        for model in (theirs, ours, fused, replaced):
            found = model(keyed)
            assert list(found) == list(wanted)
            for key, jagged in found.items():
                assert isinstance(jagged, JaggedTensor)
                assert jagged.lengths().dtype == lengths_dtype
                assert torch.equal(jagged.lengths(), wanted[key].lengths())
                torch.testing.assert_close(jagged.values(), wanted[key].values(), rtol=1e-5, atol=1e-5)
            rows_loss(found, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model in (ours, fused, replaced):
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-5)
    with pytest.raises(RowsteadError, match="without `need_indices`"):
        rowstead.fuse_embedding_optimizer(EmbeddingCollection(tables=configs, need_indices=True), "sgd", lr=0.1)


def test_what_its_page_shows_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "embedding_bags.md").read_text().split("\n## Embeddings")[1]
    shown = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(shown, names)
    assert names["viewed"].lengths().tolist() == [3, 0, 1]
    assert names["padded"].shape == (3, 3, 32)
    assert names["items"].optimizer_state()["num_updates"] == 1


def test_the_package_has_it() -> None:
    assert rowstead.Embeddings is Embeddings
    assert rowstead.EmbeddingTable is EmbeddingTable
