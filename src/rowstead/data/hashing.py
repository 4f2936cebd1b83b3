"""Hashing of ids to table rows: text to 64 bits by XXH64, 64 bits to a row by the feature's rule.

The same id gives the same row on every machine and in every version.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from rowstead.kernels.mix import mix64
from rowstead.spec.errors import DataError
from rowstead.spec.features import Hash

HASH_CODES: dict[Hash, int] = {"mix": 0, "modulo": 1, "none": 2}
"""The numbers by which kernels know the rules."""

_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5 = np.uint64(0x27D4EB2F165667C5)

_LOW_63_BITS = np.uint64(0x7FFFFFFFFFFFFFFF)

_RECIPROCAL_ROWS = 2**50

_inline = numba.njit(nogil=True, cache=True, inline="always", error_model="numpy")


@numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def hash_in_place(ids, code, num_rows):  # type: ignore[no-untyped-def]
    """Replace ids int64 [n] of one feature by their rows, by the rule with this code in HASH_CODES.

    Returns -1, or under `none` the index of the first id that is not a row of the table.
    """
    if code == 0 and num_rows <= _RECIPROCAL_ROWS:
        # Multiplying by a reciprocal vectorizes. With x < 2**63 the first quotient is off by at most 1 + 3072 / num_rows, which
        # leaves little enough for the second to be off by at most 1.
        reciprocal = 1.0 / np.float64(num_rows)
        for i in range(len(ids)):
            x = np.int64(mix64(ids[i]) & _LOW_63_BITS)
            x -= np.int64(np.float64(x) * reciprocal) * num_rows
            x -= np.int64(np.float64(x) * reciprocal) * num_rows
            x += num_rows if x < 0 else 0
            ids[i] = x - (num_rows if x >= num_rows else 0)
    elif code == 0:
        for i in range(len(ids)):
            ids[i] = np.int64((mix64(ids[i]) & _LOW_63_BITS) % np.uint64(num_rows))
    elif code == 1:
        for i in range(len(ids)):
            ids[i] %= num_rows  # never negative
    else:
        for i in range(len(ids)):
            if ids[i] < 0 or ids[i] >= num_rows:
                return i
    return -1


def mix_ids(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """`mix64` of each id, in plain NumPy."""
    mixed: NDArray[np.uint64] = mix64.py_func(ids.view(np.uint64))  # the same lines, over an array
    return mixed


def hash_to_rows(ids: NDArray[np.int64], num_rows: int, hash: Hash = "mix", *, feature: str = "") -> NDArray[np.int64]:
    """Rows [n] of the raw 64-bit `ids` [n] in a table of `num_rows` rows; the reference, in plain NumPy."""
    ids = np.asarray(ids, np.int64)
    if hash == "mix":
        return ((mix_ids(ids) & _LOW_63_BITS) % np.uint64(num_rows)).view(np.int64)
    if hash == "modulo":
        return np.mod(ids, np.int64(num_rows))
    outside = (ids < 0) | (ids >= num_rows)
    if outside.any():
        raise id_outside_table(feature, int(ids[outside][0]), num_rows)
    return ids


def id_outside_table(feature: str, id64: int, num_rows: int) -> DataError:
    """The error for an id that is outside the table of a feature with `hash: none`."""
    return DataError(
        f"feature `{feature}`: id {id64} is outside its table, which has rows 0 to {num_rows - 1} (`hash: none`). "
        "Increase num_rows, or use `hash: mix`, which accepts any id"
    )


def hash_texts(offsets: NDArray[Any], data: NDArray[np.uint8]) -> NDArray[np.int64]:
    """XXH64 (seed 0) of n texts, int64 [n]; text i is data[offsets[i] : offsets[i+1]], UTF-8; offsets int32 or int64 [n + 1]."""
    hashes = np.empty(max(len(offsets) - 1, 0), np.int64)
    _hash_texts(offsets, data, hashes)
    return hashes


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _hash_texts(offsets, data, hashes):  # type: ignore[no-untyped-def]
    for i in range(hashes.shape[0]):
        hashes[i] = np.int64(_xxh64(data, np.int64(offsets[i]), np.int64(offsets[i + 1])))


@_inline
def _rotate(x, bits):  # type: ignore[no-untyped-def]
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@_inline
def _word32(data, at):  # type: ignore[no-untyped-def]
    word = np.uint64(0)
    for byte in range(4):
        word |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
    return word


@_inline
def _word64(data, at):  # type: ignore[no-untyped-def]
    return _word32(data, at) | (_word32(data, at + 4) << np.uint64(32))


@_inline
def _round(lane, word):  # type: ignore[no-untyped-def]
    return _rotate(lane + word * _PRIME_2, 31) * _PRIME_1


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _xxh64(data, start, stop):  # type: ignore[no-untyped-def]
    at = start
    if stop - start >= 32:
        one, two, three, four = _PRIME_1 + _PRIME_2, _PRIME_2, np.uint64(0), np.uint64(0) - _PRIME_1
        while at + 32 <= stop:
            one = _round(one, _word64(data, at))
            two = _round(two, _word64(data, at + 8))
            three = _round(three, _word64(data, at + 16))
            four = _round(four, _word64(data, at + 24))
            at += 32
        h = _rotate(one, 1) + _rotate(two, 7) + _rotate(three, 12) + _rotate(four, 18)
        for lane in (one, two, three, four):
            h = (h ^ _round(np.uint64(0), lane)) * _PRIME_1 + _PRIME_4
    else:
        h = _PRIME_5
    h += np.uint64(stop - start)
    while at + 8 <= stop:
        h = _rotate(h ^ _round(np.uint64(0), _word64(data, at)), 27) * _PRIME_1 + _PRIME_4
        at += 8
    if at + 4 <= stop:
        h = _rotate(h ^ (_word32(data, at) * _PRIME_1), 23) * _PRIME_2 + _PRIME_3
        at += 4
    while at < stop:
        h = _rotate(h ^ (np.uint64(data[at]) * _PRIME_5), 11) * _PRIME_1
        at += 1
    h = (h ^ (h >> np.uint64(33))) * _PRIME_2
    h = (h ^ (h >> np.uint64(29))) * _PRIME_3
    return h ^ (h >> np.uint64(32))
