"""Batches on the wire: the same content in fewer bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rowstead.data.batch import Batch, Sparse
from rowstead.fleet.packing import pack, unpack
from rowstead.fleet.wire import REQUEST, Limits, Message, WireError, decode, decode_header, encode
from rowstead.kernels.layout import layout_of
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec, tables_of

FEATURES = FeaturesSpec(dense=(DenseFeatureSpec(name="d"),), sparse=(SparseFeatureSpec(name="s", num_rows=100),))
LAYOUT = layout_of(FEATURES, tables_of(FEATURES, width=4))


@st.composite
def batches(draw):
    num_samples, num_features = draw(st.integers(0, 6)), draw(st.integers(0, 3))
    longest = draw(st.sampled_from([0, 1, 3, 300, 40_000]))
    same = draw(st.booleans())
    num_bags = num_features * num_samples
    lengths = [longest] * num_bags if same else draw(st.lists(st.integers(0, longest), min_size=num_bags, max_size=num_bags))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    num_ids = int(offsets[-1])
    highest = draw(st.sampled_from([1, 2**31 - 1, 2**31, 2**40]))
    ids = torch.randint(0, highest, (num_ids,))
    if draw(st.booleans()) and highest < 2**31:
        ids = ids.to(torch.int32)
    weights = torch.rand(num_ids) if draw(st.booleans()) and num_features else None
    optional = {name: torch.rand(num_samples) for name in draw(st.sets(st.sampled_from(["labels", "weights", "true_p"])))}
    sparse = Sparse(ids=ids, offsets=offsets, num_features=num_features, weights=weights)
    return Batch(dense=torch.rand(num_samples, draw(st.integers(0, 3))), sparse=sparse, **optional)


def over_the_wire(packed):
    frames = encode(Message("batches", packed.facts, packed.tensors), role=REQUEST, number=1, sender=2, name="reader")
    first, *rest = [bytearray(frame) for frame in frames]
    return decode(decode_header(bytes(first), Limits()), bytes(first), rest)


@settings(max_examples=60, deadline=None)
@given(batches())
def test_a_packed_batch_unpacks_to_the_same(batch):
    message = over_the_wire(pack(batch))
    got = unpack(message.facts, message.tensors, ids=torch.int64)
    assert got.num_samples == batch.num_samples
    assert got.sparse.num_features == batch.sparse.num_features
    for name in ("dense", "labels", "weights", "true_p"):
        was, now = getattr(batch, name), getattr(got, name)
        assert (was is None and now is None) or (was.dtype == now.dtype and torch.equal(was, now)), name
    if batch.sparse.num_features:
        assert torch.equal(got.sparse.ids, batch.sparse.ids.to(torch.int64))
        assert (got.sparse.weights is None) == (batch.sparse.weights is None)
    assert torch.equal(got.sparse.offsets, batch.sparse.offsets)
    assert got.sparse.offsets.dtype == torch.int64


def test_ids_and_lengths_take_as_few_bytes_as_they_need():
    offsets = torch.tensor([0, 1, 3, 3])
    sparse = Sparse(ids=torch.tensor([5, 6, 7]), offsets=offsets, num_features=1)
    packed = pack(Batch(dense=torch.zeros(3, 2), sparse=sparse))
    assert [(tensor.dtype, tensor.numel()) for tensor in packed.tensors[1:]] == [(torch.int32, 3), (torch.uint8, 3)]
    even = Sparse(ids=torch.tensor([5, 6, 7]), offsets=torch.arange(4), num_features=1)
    assert len(pack(Batch(dense=torch.zeros(3, 2), sparse=even)).tensors) == 2


def test_received_tensors_are_not_copied():
    sparse = Sparse(ids=torch.arange(1000), offsets=torch.arange(1001), num_features=1)
    packed = pack(Batch(dense=torch.rand(1000, 2), sparse=sparse))
    batch = unpack(packed.facts, packed.tensors)
    assert batch.dense.data_ptr() == packed.tensors[0].data_ptr()
    assert batch.sparse.ids.data_ptr() == packed.tensors[1].data_ptr()


def test_only_a_batch_that_the_reader_has_checked_is_marked_as_checked():
    for mark in (None, LAYOUT):
        sparse = Sparse(ids=torch.arange(3), offsets=torch.arange(4), num_features=1, checked_for=mark)
        packed = pack(Batch(dense=torch.zeros(3, 1), sparse=sparse))
        mine = layout_of(FEATURES, tables_of(FEATURES, width=4))
        assert unpack(packed.facts, packed.tensors, layout=mine).sparse.checked_for is (None if mark is None else mine)
        assert unpack(packed.facts, packed.tensors).sparse.checked_for is None


@pytest.mark.parametrize(
    ("change", "tensors"),
    [
        ({"features": 2}, None),
        ({"features": "x"}, None),
        ({"length": 7}, None),
        ({"has": ["labels"]}, None),
        ({}, 1),
        ({"features": None}, None),
    ],
)
def test_a_batch_with_inconsistent_parts_is_refused(change, tensors):
    sparse = Sparse(ids=torch.arange(6), offsets=torch.tensor([0, 1, 3, 6]), num_features=1)
    packed = pack(Batch(dense=torch.zeros(3, 1), sparse=sparse))
    with pytest.raises(WireError):
        unpack({**packed.facts, **change}, packed.tensors[:tensors])


def test_negative_lengths_are_refused():
    sparse = Sparse(ids=torch.arange(6), offsets=torch.tensor([0, 1, 3, 6]), num_features=1)
    packed = pack(Batch(dense=torch.zeros(3, 1), sparse=sparse))
    packed.tensors[-1] = torch.tensor([8, -3, 1], dtype=torch.int16)
    with pytest.raises(WireError):
        unpack(packed.facts, packed.tensors)
