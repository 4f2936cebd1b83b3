"""CRC-32 against zlib's."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowstead.data.checksum import crc32, extend_by_tables


@given(st.binary(max_size=600), st.integers(0, 20))
def test_the_checksum_is_that_of_zlib(data, start):
    found = np.frombuffer(data, np.uint8)[start:]  # not aligned
    assert crc32(found) == zlib.crc32(found)


def test_the_tables_alone_give_the_checksum_of_zlib():
    data = np.random.default_rng(0).integers(0, 256, 1001, dtype=np.uint8)
    for size in (0, 1, 7, 8, 127, 128, 1001):
        assert ~extend_by_tables(np.uint32(2**32 - 1), data[:size]) & (2**32 - 1) == zlib.crc32(data[:size])


@pytest.mark.parametrize("size", [127, 128, 129, 191, 192, 4096, 1_000_003])
def test_folding_gives_the_checksum_of_zlib(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert crc32(data) == zlib.crc32(data)
