"""Decodes Parquet pages of the simplest columns, float32 and list<int64>, directly into the arrays of a `RawBlock`.

A general reader spends most of its time on nesting levels and per-column set-up. Logs have hundreds of columns of just two kinds,
so those are decoded here: PLAIN or dictionary values, data pages of both versions. Any other page fails, and the caller uses pyarrow.
Bytes are checked as they are read: a damaged page also fails, and never leads to an access out of bounds. A page must match its checksum,
if it has one, and levels and values must take exactly the bytes that its header gives them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowstead.data.checksum import crc32
from rowstead.data.page_headers import (
    CRC,
    DATA_PAGE,
    DATA_PAGE_V2,
    DEF_BYTES,
    DICTIONARY_PAGE,
    ENCODING,
    HAS_CRC,
    IS_PACKED,
    PACKED,
    REP_BYTES,
    START,
    TYPE,
    UNPACKED,
    VALUES,
    little_endian,
    page_headers,
    varint,
)
from rowstead.kernels.cpu.memory import lowest_bit, word_at

Bytes = NDArray[np.uint8]

PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8
"""Encodings of data pages that are decoded here."""
MAX_PAGE_BYTES = 256 << 20
"""Pages that declare to be larger when decompressed are refused; writers make them of about 1 MB."""
_LONGEST = 1 << 40
"""A longer run is damaged; arithmetic on it could overflow."""

_GZIP = 16 + zlib.MAX_WBITS
"""The format with gzip's header."""

CODECS = {"UNCOMPRESSED": None, "SNAPPY": "snappy", "ZSTD": "zstd", "GZIP": "gzip", "BROTLI": "brotli", "LZ4": "lz4_raw"}
"""pyarrow's name for each supported codec."""


def decode_floats(chunk: Bytes, codec: str | None, max_def: int, values: NDArray[np.float32]) -> bool:
    """Fill values [R] from a flat FLOAT column chunk, NaN where null; false on failure."""
    at = 0
    for header, page, dictionary in _data_pages(chunk, codec, values.dtype):
        at = -1 if page is None else decode_float_page(page, header, max_def, dictionary, values, at)
        if at < 0:
            return False
    return at == len(values)


def decode_bags(
    chunk: Bytes, codec: str | None, max_def: int, max_rep: int, ids: NDArray[np.int64], offsets: NDArray[np.int64]
) -> int:
    """Fill ids [V] and offsets [R + 1] from an INT64 column chunk of V values, flat or a list; returns the number of ids, -1 on failure."""
    done = np.zeros(2, np.int64)  # ids and rows so far
    num_values = 0
    offsets[:] = 0
    for header, page, dictionary in _data_pages(chunk, codec, ids.dtype):
        if page is None or not decode_bag_page(page, header, max_def, max_rep, dictionary, ids, offsets, done):
            return -1
        num_values += header[VALUES]
    if done[1] != len(offsets) - 1 or offsets[0] != 0 or num_values != len(ids):
        return -1
    offsets[-1] = done[0]
    return int(done[0])


def _data_pages(
    chunk: Bytes, codec: str | None, dtype: np.dtype[Any]
) -> Iterator[tuple[NDArray[np.int64], Bytes | None, NDArray[Any]]]:
    """Header and bytes of each data page, decompressed by pyarrow, with the dictionary before it; no bytes if it is unreadable."""
    dictionary = np.empty(0, dtype)
    for header in page_headers(chunk):
        page = _decompress(chunk, header, codec)
        if page is None or header[TYPE] != DICTIONARY_PAGE:
            yield header, page, dictionary
        elif header[VALUES] * dtype.itemsize == len(page):
            dictionary = page.view(dtype)
        else:
            yield header, None, dictionary


def _decompress(chunk: Bytes, header: NDArray[np.int64], codec: str | None) -> Bytes | None:
    """The decompressed bytes of one page, levels first; None for an unknown header or damaged bytes."""
    if header[TYPE] not in (DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2) or not is_intact(chunk, header):
        return None
    start, stop = int(header[START]), int(header[START] + header[PACKED])
    if codec is None or not header[IS_PACKED]:
        return chunk[start:stop] if header[PACKED] == header[UNPACKED] else None
    levels = int(header[DEF_BYTES] + header[REP_BYTES]) if header[TYPE] == DATA_PAGE_V2 else 0
    if not levels <= header[UNPACKED] <= MAX_PAGE_BYTES:
        return None
    page = _unpack_exactly(chunk[start + levels : stop], codec, int(header[UNPACKED]) - levels)
    return page if page is None or not levels else np.concatenate([chunk[start : start + levels], page])


def _unpack_exactly(packed: Bytes, codec: str, size: int) -> Bytes | None:
    """The `size` bytes that were compressed; None if they are damaged or another number.

    pyarrow takes bytes of whatever memory it finds for those that are missing, except with Zstandard.
    """
    try:
        if codec == "gzip":
            body = zlib.decompressobj(_GZIP).decompress(packed.data, size + 1)
            return np.frombuffer(body, np.uint8) if len(body) == size else None
        if codec == "snappy" and varint(packed, 0, len(packed))[0] != size:
            return None
        data = pa.py_buffer(packed)
        if codec in ("brotli", "lz4_raw") and size > 0 and _fits(data, codec, size - 1):
            return None
        return np.frombuffer(pa.Codec(codec).decompress(data, size), np.uint8)
    except (pa.ArrowException, OSError, ValueError, zlib.error):
        return None


def _fits(data: pa.Buffer, codec: str, size: int) -> bool:
    """Whether `size` bytes are enough for what was compressed."""
    try:
        pa.Codec(codec).decompress(data, size)
    except (pa.ArrowException, OSError):
        return False
    return True


_kernel = numba.njit(nogil=True, cache=True, boundscheck=False)


@_kernel
def is_intact(chunk, header):  # type: ignore[no-untyped-def]
    """Whether a page matches its checksum, or has none."""
    return header[HAS_CRC] == 0 or crc32(chunk[header[START] : header[START] + header[PACKED]]) == header[CRC]


@_kernel
def _unpack(data, at, stop, width, meaning, out):  # type: ignore[no-untyped-def]
    """Decode RLE and bit-packed runs of `width`-bit numbers into out [n], as meaning[number].

    False if the bytes from `at` to `stop` end early or late, are malformed, or contain a number out of range.
    """
    if width < 0 or width > 32 or len(meaning) == 0:
        return False
    done, count = 0, len(out)
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    largest, seen = np.uint64(len(meaning) - 1), np.uint64(0)
    while done < count:
        run, at = varint(data, at, stop)
        if at < 0 or run < 0 or run > _LONGEST:
            return False
        size = min((run >> 1) * 8 if run & 1 else run >> 1, count - done)
        if size <= 0:
            return False
        if run & 1:
            if (size * width + 7) // 8 > stop - at:
                return False
            target = out[done : done + size]
            base = np.int64(data.ctypes.data) + at
            # the first numbers can be read 8 bytes at a time; a width of 0 has no bytes
            num_safe = min(size, max(8 * (stop - at) - 64, 0) // max(width, 1))
            for i in range(num_safe):
                bit = i * width
                number = (word_at(base + (bit >> 3)) >> np.uint64(bit & 7)) & mask
                seen = max(seen, number)
                target[i] = meaning[min(number, largest)]
            for i in range(num_safe, size):
                bit = i * width
                number = (little_endian(data, at + (bit >> 3), stop) >> np.uint64(bit & 7)) & mask
                seen = max(seen, number)
                target[i] = meaning[min(number, largest)]
            at += (run >> 1) * width
        else:
            num_bytes = (width + 7) // 8
            if num_bytes > stop - at:
                return False
            number = little_endian(data, at, at + num_bytes)
            seen = max(seen, number)
            out[done : done + size] = meaning[min(number, largest)]
            at += num_bytes
        done += size
    return seen <= largest and at >= stop  # the last run may be cut off where nobody reads it


@_kernel
def _has_right_levels(header, max_def, max_rep):  # type: ignore[no-untyped-def]
    """Whether a page has bytes only for levels that its column has; version 1 pages do not say."""
    return (max_def > 0 or header[DEF_BYTES] == 0) and (max_rep > 0 or header[REP_BYTES] == 0)


@_kernel
def _level_bounds(page, at, num_bytes):  # type: ignore[no-untyped-def]
    """Start and stop of the levels: after a 4-byte length in version 1 pages, `num_bytes` long in version 2; -1 if too long."""
    if num_bytes < 0:
        if at + 4 > len(page):
            return -1, -1
        num_bytes = np.int64(little_endian(page, at, at + 4))
        at += 4
    return (at, at + num_bytes) if num_bytes <= len(page) - at else (-1, -1)


@_kernel
def _levels(page, at, num_bytes, max_level, count):  # type: ignore[no-untyped-def]
    """`count` levels (empty if all are `max_level`) and the offset after them, -1 if they cannot be read."""
    nothing = np.empty(0, np.uint8)
    if max_level == 0:
        return nothing, at
    start, stop = _level_bounds(page, at, num_bytes)
    if start < 0:
        return nothing, -1
    width = 1 if max_level == 1 else 2
    run, after = varint(page, start, stop)
    if after >= 0 and after + 1 == stop and not run & 1 and run >> 1 >= count and page[after] == max_level:
        return nothing, stop
    levels = np.empty(count, np.uint8)
    return (
        (levels, stop)
        if _unpack(page, start, stop, width, np.arange(max_level + 1).astype(np.uint8), levels)
        else (nothing, -1)
    )


@_kernel
def _dictionary_values(page, at, dictionary, values):  # type: ignore[no-untyped-def]
    """Fill values [n] from dictionary indices at `at`; false if one is out of range."""
    if len(values) == 0:
        return True
    if at >= len(page):
        return False
    return _unpack(page, at + 1, len(page), np.int64(page[at]), dictionary, values)


@_kernel
def decode_plain(page, at, values):  # type: ignore[no-untyped-def]
    """Fill values [n] from the bytes from `at` on; false if those are more or fewer."""
    size = values.nbytes
    if size != len(page) - at:
        return False
    words, base = values.view(np.uint8), np.int64(page.ctypes.data) + at
    whole = words[: size & ~7].view(np.uint64)
    for i in range(len(whole)):
        whole[i] = word_at(base + 8 * i)
    for i in range(size & ~7, size):
        words[i] = page[at + i]
    return True


@_kernel
def _page_values(page, at, encoding, dictionary, values):  # type: ignore[no-untyped-def]
    if encoding == PLAIN:
        return decode_plain(page, at, values)
    if encoding in (RLE_DICTIONARY, PLAIN_DICTIONARY):
        return _dictionary_values(page, at, dictionary, values)
    return False


@_kernel
def decode_float_page(page, header, max_def, dictionary, values, at):  # type: ignore[no-untyped-def]
    """Write one data page's values into values [R] from `at` on; returns the index after them, -1 on failure."""
    count = header[VALUES]
    if count < 0 or count > len(values) - at:
        return -1
    if not _has_right_levels(header, max_def, 0):
        return -1
    levels, start = _levels(page, 0, header[DEF_BYTES] if header[TYPE] == DATA_PAGE_V2 else -1, max_def, count)
    if start < 0:
        return -1
    if len(levels) == 0:
        ok = _page_values(page, start, header[ENCODING], dictionary, values[at : at + count])
        return at + count if ok else -1
    present = np.empty(np.sum(levels == max_def), values.dtype)
    if not _page_values(page, start, header[ENCODING], dictionary, present):
        return -1
    taken = 0
    for i in range(count):
        if levels[i] == max_def:
            values[at + i] = present[taken]
            taken += 1
        else:
            values[at + i] = np.nan
    return at + count


@_kernel
def decode_bag_page(page, header, max_def, max_rep, dictionary, ids, offsets, done):  # type: ignore[no-untyped-def]
    """Append one data page's ids to ids [nnz] and its row starts to offsets [R + 1]; done [2]: ids and rows so far."""
    count, is_v2 = header[VALUES], header[TYPE] == DATA_PAGE_V2
    if count < 0 or count > len(ids) or not _has_right_levels(header, max_def, max_rep):
        return False
    if max_rep == 1:
        start, rep_stop = _level_bounds(page, 0, header[REP_BYTES] if is_v2 else -1)
        if rep_stop < 0:
            return False
        defs, at = _levels(page, rep_stop, header[DEF_BYTES] if is_v2 else -1, max_def, count)
        if at >= 0 and len(defs) == 0:
            return _decode_full_bag_page(page, header, start, rep_stop, at, dictionary, ids, offsets, done)
    reps, at = _levels(page, 0, header[REP_BYTES] if is_v2 else -1, max_rep, count)
    if at < 0:
        return False
    defs, at = _levels(page, at, header[DEF_BYTES] if is_v2 else -1, max_def, count)
    if at < 0:
        return False
    if max_rep > 0 and len(reps) == 0:
        reps = np.ones(count, np.uint8)
    num_new_rows = count if max_rep == 0 else count - np.int64(np.sum(reps))
    num_new_ids = count if len(defs) == 0 else np.int64(np.sum(defs == max_def))
    if done[1] + num_new_rows > len(offsets) - 1 or done[1] + num_new_rows == 0 or done[0] + num_new_ids > len(ids):
        return False
    num_ids, row = done[0], done[1]
    # Writing the start again for every value is cheaper than an unpredictable branch.
    for i in range(count):
        offsets[row] = num_ids
        row += 1 - np.int64(reps[i]) if len(reps) else 1
        num_ids += 1 if len(defs) == 0 else defs[i] == max_def
    ok = _page_values(page, at, header[ENCODING], dictionary, ids[done[0] : done[0] + num_new_ids])
    done[0] += num_new_ids
    done[1] += num_new_rows
    return ok


@_kernel
def _decode_full_bag_page(page, header, start, stop, at, dictionary, ids, offsets, done):  # type: ignore[no-untyped-def]
    """`decode_bag_page` for lists without nulls and empty lists, directly from the bits of the repetition levels, `start` to `stop`."""
    count = header[VALUES]
    if done[0] + count > len(ids):
        return False
    num_rows = _row_starts(page[:stop], start, count, done[0], offsets[: len(offsets) - 1], done[1])
    if num_rows <= 0:
        return False
    ok = _page_values(page, at, header[ENCODING], dictionary, ids[done[0] : done[0] + count])
    done[0] += count
    done[1] = num_rows
    return ok


@_kernel
def _row_starts(page, at, count, first_id, starts, num_rows):  # type: ignore[no-untyped-def]
    """Write to starts [R], from `num_rows` on, the index of each level 0 among `count`; returns the new number of rows, -1 on bad bytes."""
    stop = len(page)
    done = 0
    while done < count:
        run, at = varint(page, at, stop)
        if at < 0 or run < 0 or run > _LONGEST:
            return -1
        size = min((run >> 1) * 8 if run & 1 else run >> 1, count - done)
        if size <= 0 or ((size + 7) // 8 if run & 1 else 1) > stop - at or (not run & 1 and page[at] > 1):
            return -1
        for i in range(0, size, 64):
            word = little_endian(page, at + (i >> 3), stop) if run & 1 else np.uint64(page[at]) * np.uint64(0xFFFFFFFFFFFFFFFF)
            zeros = ~word
            if size - i < 64:
                zeros &= (np.uint64(1) << np.uint64(size - i)) - np.uint64(1)
            while zeros != 0:
                if num_rows >= len(starts):
                    return -1
                starts[num_rows] = first_id + done + i + lowest_bit(zeros)
                num_rows += 1
                zeros &= zeros - np.uint64(1)
        at += (run >> 1) if run & 1 else 1
        done += size
    return num_rows if at >= stop else -1
