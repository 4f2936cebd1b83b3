"""Rows of histories, and their updates, are those of plain padded torch over whole tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rowstead.data.batch import Sparse
from rowstead.kernels.layout import Layout, layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.nn.histories import HistoryNetwork
from rowstead.spec.encoders import EncoderSpec
from rowstead.spec.errors import DataError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec, TableSpec, tables_of
from rowstead.spec.model import ModelSpec
from rowstead.spec.parse import parse
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS, SparseOptimizerSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.device import DeviceStore
from rowstead.stores.histories import HistoryLayout, HistoryStore

WIDTH, NUM_ROWS, LONGEST = 4, 7, 5
FEATURES = FeaturesSpec(
    sparse=(
        SparseFeatureSpec(name="user", num_rows=NUM_ROWS, pooling="mean"),
        SparseFeatureSpec(
            name="clicked", table="items", pooling="none", max_ids=LONGEST, encoder=EncoderSpec(target="item", hidden=(5,))
        ),
        SparseFeatureSpec(name="item", table="items"),
        SparseFeatureSpec(
            name="bought", table="items", pooling="none", max_ids=LONGEST, encoder=EncoderSpec(target="item", softmax=True)
        ),
        SparseFeatureSpec(
            name="shops", num_rows=NUM_ROWS, pooling="none", max_ids=LONGEST, encoder=EncoderSpec(kind="attention", heads=2)
        ),
    ),
    tables=(TableSpec(name="items", num_rows=NUM_ROWS),),
)
LAYOUT = layout_of(FEATURES, tables_of(FEATURES, width=WIDTH))
MODEL = parse(ModelSpec, {"width": WIDTH, "top": [6], "interaction": {"kind": "concat"}})


def store_of(optimizer: SparseOptimizerSpec, layout: Layout = LAYOUT) -> HistoryStore:
    parts = HistoryLayout(layout)
    return HistoryStore(parts, [DeviceStore(one, optimizer, dtype=torch.float64) for one in parts.stores])


def model_of(store: EmbeddingStore) -> DLRM:
    torch.manual_seed(1)
    model = DLRM(MODEL, FEATURES, store)
    model.net.double()
    for parameter in model.net.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


@st.composite
def batches(draw: st.DrawFn) -> Sparse:
    """Bags of any lengths, empty ones among them."""
    num_samples = draw(st.integers(0, 5))
    bags = [draw(st.lists(st.integers(0, NUM_ROWS - 1), max_size=LONGEST)) for _ in range(num_samples * len(FEATURES.sparse))]
    lengths = torch.tensor([0, *(len(bag) for bag in bags)])
    ids = torch.tensor([one for bag in bags for one in bag], dtype=torch.int64)
    return Sparse(ids=ids, offsets=lengths.cumsum(0), num_features=len(FEATURES.sparse))


def plain_logits(model: DLRM, tables: dict[str, Tensor], sparse: Sparse) -> Tensor:
    """The model's logits from whole tables, histories padded to the longest that there may be."""
    assert isinstance(model.net, HistoryNetwork)
    encoders = {FEATURES.sparse[index].name: one for index, one in zip(model.net.histories, model.net.encoders, strict=True)}
    count, vectors = sparse.num_samples, dict[str, Tensor]()
    histories = dict[str, tuple[Tensor, Tensor]]()
    for index, feature in enumerate(FEATURES.sparse):
        padded = torch.zeros(count, LONGEST, WIDTH, dtype=torch.float64)
        is_id = torch.zeros(count, LONGEST, dtype=torch.bool)
        for example in range(count):
            first, last = sparse.offsets[index * count + example : index * count + example + 2].tolist()
            if last > first:
                padded[example, LONGEST - (last - first) :] = tables[feature.table_name][sparse.ids[first:last]]
                is_id[example, LONGEST - (last - first) :] = True
        lengths = is_id.sum(dim=1, keepdim=True).clamp(min=1) if feature.pooling == "mean" else 1
        vectors[feature.name] = padded.sum(dim=1) / lengths
        histories[feature.name] = padded, is_id
    for name, encoder in encoders.items():
        target = next(feature.encoder.target for feature in FEATURES.sparse if feature.name == name and feature.encoder)
        vectors[name] = encoder.padded(*histories[name], None if target is None else vectors[target])
    pooled = torch.cat([vectors[feature.name] for feature in FEATURES.sparse], dim=1)
    return model.net(torch.zeros(count, 0, dtype=torch.float64), pooled)


@pytest.mark.parametrize("kind", ROW_OPTIMIZERS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_training_is_that_of_plain_padded_torch(kind: str, data: st.DataObject) -> None:
    optimizer = parse(SparseOptimizerSpec, {"kind": kind, "l2": 0.01})
    model = model_of(store_of(optimizer))
    plain = DeviceStore(_one_by_one(), optimizer, dtype=torch.float64)
    plain.load_state(model.store.state())
    for step in (1, 2):
        sparse = data.draw(batches())
        rows = model.store.lookup(sparse).requires_grad_()
        dense = torch.zeros(sparse.num_samples, 0, dtype=torch.float64)
        logits = model.net(dense, model.pool(rows, sparse))
        tables = {t.name: plain.state()[f"{t.name}.rows"].clone().requires_grad_() for t in plain.tables}
        expected = plain_logits(model, tables, sparse)
        torch.testing.assert_close(logits, expected)
        weights = torch.randn(sparse.num_samples, dtype=torch.float64)
        (rows_grad,) = torch.autograd.grad((logits * weights).sum() + 0 * rows.sum(), [rows])
        gradients = torch.autograd.grad(
            (expected * weights).sum() + sum(0 * t.sum() for t in tables.values()), list(tables.values())
        )
        model.store.update(sparse, rows_grad, lr=0.1, step=step)
        _update_whole(plain, sparse, dict(zip(tables, gradients, strict=True)), step)
        for name, value in plain.state().items():
            torch.testing.assert_close(model.store.state()[name], value, msg=lambda text, name=name: f"{name}: {text}")


def _one_by_one() -> Layout:
    """Each table read by one feature of one id."""
    features = FeaturesSpec(sparse=tuple(SparseFeatureSpec(name=t.name, num_rows=t.num_rows) for t in LAYOUT.tables))
    return layout_of(features, tables_of(features, width=WIDTH))


def _update_whole(plain: DeviceStore, sparse: Sparse, gradients: dict[str, Tensor], step: int) -> None:
    """Update each row that the batch reads once, with its whole gradient."""
    count = sparse.num_samples
    read = {name: list[Tensor]() for name in gradients}
    for index, feature in enumerate(FEATURES.sparse):
        first, last = sparse.offsets[index * count], sparse.offsets[(index + 1) * count]
        read[feature.table_name].append(sparse.ids[first:last])
    rows = [torch.cat(read[table.name]).unique() for table in plain.tables]
    longest = max(len(one) for one in rows)
    offsets, grad, start = [0], torch.zeros(longest, WIDTH * len(rows), dtype=torch.float64), 0
    for index, (table, own) in enumerate(zip(plain.tables, rows, strict=True)):
        offsets += [start + min(bag, len(own)) for bag in range(1, longest + 1)]
        grad[: len(own), index * WIDTH : (index + 1) * WIDTH] = gradients[table.name][own]
        start += len(own)
    plain.update(Sparse(ids=torch.cat(rows), offsets=torch.tensor(offsets), num_features=len(rows)), grad, lr=0.1, step=step)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    store = store_of(SparseOptimizerSpec())
    offsets = torch.tensor([0, 0, 1, 1, 1, 1])
    with pytest.raises(DataError):
        store.lookup(Sparse(ids=torch.tensor([NUM_ROWS]), offsets=offsets, num_features=5))


def test_a_batch_is_split_once_from_its_prefetch_to_its_update() -> None:
    store = store_of(SparseOptimizerSpec())
    first, second = (
        Sparse(ids=torch.tensor([1, 2]), offsets=torch.tensor([0, 0, 1, 2, 2, 2]), num_features=5) for _ in range(2)
    )
    store.prefetch(first)
    store.prefetch(second)
    for sparse in (first, second):
        rows = store.lookup(sparse)
        assert rows.numel() == WIDTH * 3
        store.eval()
        store.lookup(second)
        store.train()
        store.update(sparse, torch.ones_like(rows), lr=0.1, step=1)
    assert not store._prefetched
