"""Ids become the same rows everywhere: XXH64 against its reference, row rules against Python integers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from rowstead.data.hashing import HASH_CODES, hash_in_place, hash_texts, hash_to_rows
from rowstead.spec.errors import DataError

INT64 = st.integers(-(2**63), 2**63 - 1)
NUM_ROWS = st.one_of(st.integers(1, 100), st.integers(1, 2**40))


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def hash_text(text: str) -> int:
    data = np.frombuffer(text.encode(), np.uint8)
    return int(hash_texts(np.array([0, len(data)]), data)[0])


def mix_in_python(id64: int) -> int:
    mask = 2**64 - 1
    z = (id64 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=100)), st.sampled_from([pa.string(), pa.large_string()])
)
def test_text_hash_is_xxh64_with_seed_0(texts, kind):
    array = pa.array(texts, kind)
    dtype = np.int32 if kind == pa.string() else np.int64
    offsets = np.frombuffer(array.buffers()[1], dtype)[: len(texts) + 1] if texts else np.zeros(1, dtype)
    data = np.frombuffer(array.buffers()[2] or b"", np.uint8)
    assert hash_texts(offsets, data).tolist() == [signed(xxhash.xxh64_intdigest(t.encode())) for t in texts]


@pytest.mark.parametrize("length", [*range(70), 255, 1000])
def test_text_hash_at_every_length_class(length):
    text = "".join(chr(33 + i % 90) for i in range(length))
    assert hash_text(text) == signed(xxhash.xxh64_intdigest(text.encode()))


def test_text_hash_is_pinned():
    assert [hash_text(""), hash_text("rowstead")] == [
        signed(0xEF46DB3751D8E999),
        signed(xxhash.xxh64_intdigest(b"rowstead")),
    ]


@given(st.lists(INT64), NUM_ROWS)
def test_mix_is_the_splitmix64_finaliser_modulo_rows(ids, num_rows):
    expected = [(mix_in_python(i % 2**64) & (2**63 - 1)) % num_rows for i in ids]
    assert hash_to_rows(np.array(ids, np.int64), num_rows, "mix").tolist() == expected


@given(st.lists(INT64), NUM_ROWS)
def test_modulo_is_never_negative(ids, num_rows):
    assert hash_to_rows(np.array(ids, np.int64), num_rows, "modulo").tolist() == [i % num_rows for i in ids]


@given(st.integers(0, 2**32), st.one_of(NUM_ROWS, st.integers(2**49, 2**62)), st.sampled_from(["mix", "modulo"]))
def test_hashing_in_place_agrees_with_the_definition(seed, num_rows, rule):
    ids = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, 2000)
    expected = hash_to_rows(ids, num_rows, rule)
    assert hash_in_place(ids, HASH_CODES[rule], num_rows) == -1
    np.testing.assert_array_equal(ids, expected)


def test_without_hash_ids_are_rows_and_others_are_named():
    assert hash_to_rows(np.array([0, 9]), 10, "none").tolist() == [0, 9]
    with pytest.raises(DataError, match=r"feature `city`: id 10 .* rows 0 to 9"):
        hash_to_rows(np.array([0, 10]), 10, "none", feature="city")
    with pytest.raises(DataError, match="id -1"):
        hash_to_rows(np.array([-1]), 10, "none", feature="city")
