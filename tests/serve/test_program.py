"""The program that is exported gives what the model gives, from raw features, for any spec and any batch."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rowstead.data.block import RawBlock
from rowstead.data.encode import Encoder
from rowstead.data.transforms import DenseTransforms
from rowstead.kernels.layout import layout_of
from rowstead.nn.dlrm import DLRM
from rowstead.serve.exported import arguments_of
from rowstead.serve.program import DenseProgram, FlatRows, ServingProgram, trace_program
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, TableSpec, tables_of
from rowstead.spec.interactions import InteractionSpec
from rowstead.spec.model import ModelSpec
from rowstead.stores.device import DeviceStore

FLOATS = st.floats(-1e6, 1e6, width=32)


class Served:
    """A model with random weights, how training encodes for it, and its serving program."""

    def __init__(self, features: FeaturesSpec, model: ModelSpec, *, int8: bool = False, seed: int = 0) -> None:
        self.features = features
        self.rng = np.random.default_rng(seed)
        tables = tables_of(features, width=model.width)
        layout = layout_of(features, tables)
        transforms = DenseTransforms.learn(features, [self.block(200)])
        store = DeviceStore(layout, None, seed=seed)
        for rows in store.weights:
            nn.init.normal_(rows, std=0.5)
        self.model = DLRM(model, features, store, negative_keep_rate=0.3).eval()
        self.encoder = Encoder(features, tables, transforms)
        self.program = ServingProgram(
            self.model.net,
            list(store.weights),
            layout,
            features.expanded_sparse(),
            transforms,
            head=self.model.head,
            log_keep_rate=self.model.log_keep_rate,
            int8=int8,
        )

    def block(self, num_rows: int, lengths: tuple[int, ...] = (0, 1, 2, 7)) -> RawBlock:
        """Random raw rows, values missing where they may, bags as long as one of `lengths`."""
        dense = self.rng.normal(scale=5, size=(num_rows, len(self.features.expanded_dense()))).astype(np.float32)
        for index, feature in enumerate(self.features.expanded_dense()):
            if feature.missing is not None:
                dense[self.rng.random(num_rows) < 0.2, index] = np.nan
        ids, offsets = [], []
        for feature in self.features.expanded_sparse():
            bounds = np.concatenate([[0], np.cumsum(self.rng.choice(lengths, num_rows))]).astype(np.int64)
            low, high = (0, feature.num_rows or 5) if feature.hash == "none" else (-(2**63), 2**63 - 1)
            ids.append(self.rng.integers(low, high, bounds[-1]))
            offsets.append(bounds)
        return RawBlock(dense=dense, ids=tuple(ids), offsets=tuple(offsets))

    def distance(self, call, block: RawBlock) -> float:
        """The largest difference between `call` and the model's own predictions."""
        with torch.no_grad():
            ours = call(*arguments_of(block))
        theirs = self.model.predict(self.encoder.encode(block))
        assert ours.shape == theirs.shape == (block.num_rows,)
        return (ours - theirs).abs().max().item()


def concat() -> ModelSpec:
    return ModelSpec(width=4, bottom=(8,), top=(8,), interaction=InteractionSpec(kind="concat"))


ONE_OF_EACH = FeaturesSpec(
    dense=(
        DenseFeatureSpec(name="d{i}", repeat=3, clip=(-3.0, 4.0), log=True, missing="mean", standardise=True),
        DenseFeatureSpec(name="plain"),
        DenseFeatureSpec(name="filled", missing=2.5, log=True),
    ),
    sparse=(
        SparseFeatureSpec(name="mixed", num_rows=11, width=3, pooling="mean", max_ids=2),
        SparseFeatureSpec(name="left", table="shared", hash="modulo"),
        SparseFeatureSpec(name="right", table="shared", pooling="mean"),
        SparseFeatureSpec(name="direct", num_rows=7, hash="none", max_ids=1),
    ),
    tables=(TableSpec(name="shared", num_rows=13, width=5),),
)
CASES = {
    "one of each, cross": (ONE_OF_EACH, ModelSpec(width=4, interaction=InteractionSpec(kind="cross", cross_rank=3))),
    "one sparse feature": (FeaturesSpec(sparse=(SparseFeatureSpec(name="a", num_rows=10, pooling="mean"),)), concat()),
    "dense only": (FeaturesSpec(dense=(DenseFeatureSpec(name="d{i}", repeat=2, log=True),)), ModelSpec()),
    "dot, nothing to transform": (
        FeaturesSpec(dense=(DenseFeatureSpec(name="d"),), sparse=(SparseFeatureSpec(name="s{i}", repeat=3, num_rows=9),)),
        ModelSpec(width=4),
    ),
    "three dense vectors": (
        FeaturesSpec(dense=(DenseFeatureSpec(name="d"),), sparse=(SparseFeatureSpec(name="s{i}", repeat=3, num_rows=9),)),
        ModelSpec(width=4, interaction=InteractionSpec(num_dense_vectors=3)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_exported_program_agrees_with_the_model_for_any_number_of_examples_and_ids(case):
    served = Served(*CASES[case])
    saved = io.BytesIO()
    torch.export.save(trace_program(served.program), saved)
    saved.seek(0)
    call = torch.export.load(saved).module()
    one_id = served.block(1, lengths=(0,))
    if one_id.ids:
        one_id.offsets[0][1] = 1
        one_id = RawBlock(dense=one_id.dense, ids=(np.array([3]), *one_id.ids[1:]), offsets=one_id.offsets)
    blocks = [one_id, *(served.block(n, lengths) for n in (1, 2, 3, 257, 2000) for lengths in ((0,), (1,), (0, 1, 2, 7)))]
    assert max(served.distance(call, block) for block in blocks) < 1e-6


def test_exported_int8_program_is_the_int8_program_and_near_the_model():
    served = Served(*CASES["one of each, cross"], int8=True)
    call = trace_program(served.program).module()
    for num_rows in (1, 2, 300):
        block = served.block(num_rows)
        with torch.no_grad():
            assert torch.equal(call(*arguments_of(block)), served.program(*arguments_of(block)))
        assert served.distance(call, block) < 0.05


@st.composite
def specs(draw) -> tuple[FeaturesSpec, ModelSpec]:
    kind = draw(st.sampled_from(["dot", "concat", "cross"]))
    width = draw(st.integers(1, 6))
    widths = st.none() if kind == "dot" else st.one_of(st.none(), st.integers(1, 6))
    shared = TableSpec(name="shared", num_rows=draw(st.integers(1, 50)), width=draw(widths))
    num_dense, num_sparse = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    if num_dense + num_sparse < 2:
        num_dense = 2
    dense = [
        DenseFeatureSpec(
            name=f"d{i}",
            clip=draw(st.sampled_from([None, (-2.0, 3.0)])),
            log=draw(st.booleans()),
            missing=draw(st.sampled_from([None, 1.5, "mean"])),
            standardise=draw(st.booleans()),
        )
        for i in range(num_dense)
    ]
    sparse = []
    for i in range(num_sparse):
        own = draw(st.booleans())
        sparse.append(
            SparseFeatureSpec(
                name=f"s{i}",
                num_rows=draw(st.integers(5, 60)) if own else None,
                width=draw(widths) if own else None,
                table=None if own else "shared",
                pooling=draw(st.sampled_from(["sum", "mean"])),
                max_ids=draw(st.sampled_from([None, 1, 3])),
                hash=draw(st.sampled_from(["mix", "modulo", "none"] if own else ["mix", "modulo"])),
            )
        )
    tables = (shared,) if any(feature.table for feature in sparse) else ()
    pairs = draw(st.sampled_from([*["both", "dense_sparse"][: 1 + bool(num_dense)], *["sparse_sparse"][: num_sparse != 1]]))
    count = draw(st.integers(1, 3))
    interaction = InteractionSpec(kind=kind, num_dense_vectors=count, pairs=pairs, cross_layers=2, cross_rank=3)
    if kind == "dot" and bool(num_dense) + num_sparse < 2:
        interaction = InteractionSpec(kind="concat")
    features = FeaturesSpec(dense=tuple(dense), sparse=tuple(sparse), tables=tables)
    return features, ModelSpec(width=width, bottom=(4,), top=(4,), interaction=interaction)


@settings(max_examples=60)
@given(specs(), st.integers(1, 9), st.integers(0, 2**32))
def test_program_equals_the_model_over_random_specs(spec, num_rows, seed):
    served = Served(*spec, seed=seed)
    assert served.distance(served.program, served.block(num_rows)) < 1e-6


@given(
    st.lists(st.tuples(FLOATS, FLOATS.filter(bool), st.booleans(), st.booleans(), FLOATS, FLOATS), min_size=1, max_size=4),
    st.lists(st.one_of(FLOATS, st.just(math.nan)), min_size=1, max_size=20),
)
def test_dense_program_equals_the_transforms_of_training(features, values):
    def column(index: int) -> np.ndarray:
        return np.array([feature[index] for feature in features], np.float32)

    bounded = column(3).astype(bool)
    transforms = DenseTransforms(
        names=tuple(f"d{i}" for i in range(len(features))),
        low=np.where(bounded, np.minimum(column(0), column(4)), -np.inf).astype(np.float32),
        high=np.where(bounded, np.maximum(column(0), column(4)), np.inf).astype(np.float32),
        log=column(2).astype(bool),
        fill=column(5),
        shift=column(0),
        scale=column(1),
    )
    dense = np.repeat(np.array(values, np.float32)[:, None], len(features), axis=1)
    ours = DenseProgram(transforms)(torch.from_numpy(dense)).numpy()
    np.testing.assert_allclose(ours, transforms.apply(dense), rtol=1e-6, atol=1e-30)


@given(st.integers(1, 20), st.integers(1, 9), st.floats(0, 10), st.integers(0, 2**32))
def test_int8_rows_are_off_by_at_most_half_a_step_of_their_row(num_rows, width, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, width, generator=generator) * spread + 3
    flat = FlatRows([rows], int8=True)
    assert flat.rows.dtype == torch.uint8
    back = flat(torch.arange(num_rows), torch.arange(num_rows + 1), None)
    step = (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) / 255
    assert ((back - rows).abs() <= 0.5 * step + 1e-5 * (1 + spread)).all()


def test_int8_reads_only_the_rows_of_the_call(monkeypatch):
    flat = FlatRows([torch.randn(1000, 4)], int8=True)
    seen = []
    original = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: seen.append(self.shape) or original(self))
    flat(torch.tensor([1, 5, 7]), torch.tensor([0, 3]), None)
    assert seen == [(3, 4)]
