"""The encoder against a slow, obvious one, over random specs, blocks and orders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowstead.data.block import RawBlock
from rowstead.data.encode import Encoder, RawRows
from rowstead.data.hashing import hash_to_rows
from rowstead.data.transforms import DenseTransforms
from rowstead.spec.encoders import EncoderSpec
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, TableSpec, tables_of

HISTORY = {"pooling": "none", "encoder": EncoderSpec(kind="attention")}


@st.composite
def problems(draw):
    """Features, one to three blocks of random rows, and an order."""
    num_dense, num_sparse = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    num_dense = num_dense or int(not num_sparse)
    shared = draw(st.booleans()) and num_sparse > 0
    sparse = [
        SparseFeatureSpec(
            name=f"s{i}",
            num_rows=None if shared and i < 2 else draw(st.integers(1, 50)),
            table="both" if shared and i < 2 else None,
            hash=draw(st.sampled_from(["mix", "modulo"])),
            **draw(st.sampled_from([{}, {"max_ids": 1}, {"max_ids": 4}, {**HISTORY, "max_ids": 1}, {**HISTORY, "max_ids": 4}])),
        )
        for i in range(num_sparse)
    ]
    features = FeaturesSpec(
        dense=tuple(DenseFeatureSpec(name=f"d{i}", log=draw(st.booleans()), missing=0.5) for i in range(num_dense)),
        sparse=tuple(sparse),
        tables=(TableSpec(name="both", num_rows=draw(st.integers(1, 1000))),) if shared else (),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    with_labels, with_weights = draw(st.booleans()), draw(st.booleans())
    blocks = [
        _random_block(rng, rows, num_dense, num_sparse, with_labels, with_weights)
        for rows in draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    ]
    total = sum(block.num_rows for block in blocks)
    order = draw(st.lists(st.integers(0, total - 1), max_size=20)) if total else []
    return features, blocks, np.array(order, np.int64)


def _random_block(rng, num_rows, num_dense, num_sparse, with_labels, with_weights):
    lengths = [rng.integers(0, 7, num_rows) for _ in range(num_sparse)]
    dense = rng.standard_normal((num_rows, num_dense)).astype(np.float32)
    dense[rng.random(dense.shape) < 0.2] = np.nan
    return RawBlock(
        dense=dense,
        ids=tuple(rng.integers(-(2**63), 2**63 - 1, n.sum()) for n in lengths),
        offsets=tuple(np.concatenate([[0], np.cumsum(n)]).astype(np.int64) for n in lengths),
        labels=rng.random(num_rows).astype(np.float32) if with_labels else None,
        weights=rng.random(num_rows).astype(np.float32) if with_weights else None,
    )


@given(problems())
def test_encode_equals_the_obvious_loop(problem):
    features, blocks, order = problem
    tables = tables_of(features, width=4)
    transforms = DenseTransforms.learn(features)
    batch = Encoder(features, tables, transforms).encode(RawRows(blocks), order)

    where = [(block, r) for block in blocks for r in range(block.num_rows)]
    specs = features.expanded_sparse()
    num_rows = {index: table.num_rows for table in tables for index in table.features}
    ids, offsets = [], [0]
    for f, spec in enumerate(specs):
        for i in order:
            block, r = where[i]
            bag = block.ids[f][block.offsets[f][r] : block.offsets[f][r + 1]]
            bag = bag[-spec.max_ids :] if spec.is_history else bag[: spec.max_ids]
            ids += hash_to_rows(bag, num_rows[f], spec.hash).tolist()
            offsets.append(len(ids))
    assert batch.sparse.ids.tolist() == ids
    assert batch.sparse.offsets.tolist() == offsets
    assert batch.sparse.num_features == len(specs)
    assert batch.sparse.ids.dtype == batch.sparse.offsets.dtype == torch.int64

    dense = [where[i][0].dense[where[i][1]] for i in order]
    raw = np.array(dense, np.float32).reshape(len(order), len(features.dense))
    np.testing.assert_array_equal(batch.dense.numpy(), transforms.apply(raw))
    for name in ("labels", "weights"):
        if getattr(blocks[0], name) is None:
            assert getattr(batch, name) is None
        else:
            assert getattr(batch, name).tolist() == [getattr(where[i][0], name)[where[i][1]] for i in order]


def assert_same(one, other):
    assert len(one.tensors()) == len(other.tensors())
    assert all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


@given(problems())
def test_blocks_end_to_end_are_one_long_block(problem):
    features, blocks, order = problem
    encoder = Encoder(features, tables_of(features, width=4), DenseTransforms.learn(features))
    assert_same(
        encoder.encode(RawRows(blocks), order),
        encoder.encode(RawRows.concatenate([RawRows([block]) for block in blocks]), order),
    )


@given(problems(), st.integers(1, 30))
def test_a_batch_made_in_parts_is_the_same_in_any_order(problem, num_parts):
    features, blocks, order = problem
    encoder = Encoder(features, tables_of(features, width=4), DenseTransforms.learn(features))

    def backwards(count, work):
        return [work(number) for number in reversed(range(count))][::-1]

    made = encoder.encode(RawRows(blocks), order, run_parts=backwards, num_parts=num_parts)
    assert_same(made, encoder.encode(RawRows(blocks), order))


ONE = FeaturesSpec(sparse=(SparseFeatureSpec(name="a", num_rows=9), SparseFeatureSpec(name="b", num_rows=5, hash="none")))


def _block_of_ids(a, b):
    offsets = np.arange(len(a) + 1)
    return RawBlock(dense=np.zeros((len(a), 0), np.float32), ids=(np.array(a), np.array(b)), offsets=(offsets, offsets))


def test_an_id_that_is_no_row_is_named_with_its_feature():
    encoder = Encoder(ONE, tables_of(ONE, width=4), DenseTransforms.learn(ONE))
    assert encoder.encode(_block_of_ids([1, 2], [4, 0])).sparse.ids.tolist()[2:] == [4, 0]
    with pytest.raises(DataError, match="feature `b`: id 5 is outside its table"):
        encoder.encode(_block_of_ids([100, 200], [4, 5]))
    for num_parts in (1, 2, 4):
        with pytest.raises(DataError, match="feature `b`: id -3 is outside its table"):
            encoder.encode(_block_of_ids([100, 200], [-3, 5]), num_parts=num_parts)


def test_rows_of_another_shape_are_refused():
    encoder = Encoder(ONE, tables_of(ONE, width=4), DenseTransforms.learn(ONE))
    block = RawBlock(dense=np.zeros((1, 3), np.float32), ids=(), offsets=())
    with pytest.raises(DataError, match="3 dense and 0 sparse features, but the model has 0 and 2"):
        encoder.encode(block)
