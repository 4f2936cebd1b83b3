"""Parquet pages of the plainest columns, float32 and lists of int64, decoded straight into what a `RawBlock` needs.

A general reader spends most of its time on levels of nesting and on each column's own set-up. Logs are hundreds of columns of
just two kinds, so those two are decoded here: PLAIN or dictionary values, data pages of both versions. Whatever else a
column chunk may be, `decode_floats` and `decode_bags` return None for it, and the caller reads it with pyarrow. Bytes are
checked as they are read: a damaged page also ends in None, never outside of an array.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowstead.data.memory import lowest_bit, word_at

Bytes = NDArray[np.uint8]

_TYPE, _UNPACKED, _PACKED, _START, _VALUES, _ENCODING, _DEF_BYTES, _REP_BYTES, _IS_PACKED = range(9)
"""Fields of a page header in a row of the array that `_page_headers` returns."""
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_PLAIN, _PLAIN_DICTIONARY, _RLE_DICTIONARY = 0, 2, 8

CODECS = {"UNCOMPRESSED": None, "SNAPPY": "snappy", "ZSTD": "zstd", "GZIP": "gzip", "BROTLI": "brotli"}
"""pyarrow's name of each compression that may be met here."""


def decode_floats(chunk: Bytes, codec: str | None, max_def: int, num_rows: int) -> NDArray[np.float32] | None:
    """The values [R] of a flat FLOAT column chunk, NaN where null."""
    values = np.empty(num_rows, np.float32)
    at = 0
    dictionary = np.empty(0, np.float32)
    for header in _page_headers(chunk):
        page = _unpacked(chunk, header, codec)
        if page is None:
            return None
        if header[_TYPE] == _DICTIONARY_PAGE:
            if len(page) < 4 * header[_VALUES]:
                return None
            dictionary = page[: 4 * header[_VALUES]].view(np.float32)
            continue
        at = _floats_of_page(page, header, max_def, dictionary, values, at)
        if at < 0:
            return None
    return values if at == num_rows else None


def decode_bags(
    chunk: Bytes, codec: str | None, max_def: int, max_rep: int, num_rows: int, ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Ids [nnz] and offsets [R + 1] of an INT64 column chunk, flat or a list; what is null is left out.

    `ids` is where to put them; it has room for as many values as the chunk has.
    """
    offsets = np.zeros(num_rows + 1, np.int64)
    place = np.zeros(2, np.int64)  # Ids and rows so far.
    dictionary = np.empty(0, np.int64)
    for header in _page_headers(chunk):
        page = _unpacked(chunk, header, codec)
        if page is None:
            return None
        if header[_TYPE] == _DICTIONARY_PAGE:
            if len(page) < 8 * header[_VALUES]:
                return None
            dictionary = page[: 8 * header[_VALUES]].view(np.int64)
        elif not _bags_of_page(page, header, max_def, max_rep, dictionary, ids, offsets, place):
            return None
    if place[1] != num_rows:
        return None
    offsets[num_rows] = place[0]
    return ids[: place[0]], offsets


def _unpacked(chunk: Bytes, header: NDArray[np.int64], codec: str | None) -> Bytes | None:
    """The bytes of one page, levels first, decompressed; None when the header is not one that we know."""
    if header[_TYPE] not in (_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2):
        return None
    start, stop = int(header[_START]), int(header[_START] + header[_PACKED])
    if codec is None or not header[_IS_PACKED]:
        return chunk[start:stop]
    levels = int(header[_DEF_BYTES] + header[_REP_BYTES]) if header[_TYPE] == _DATA_PAGE_V2 else 0
    try:
        body = _codec(codec).decompress(pa.py_buffer(chunk[start + levels : stop]), int(header[_UNPACKED]) - levels)
    except (pa.ArrowException, OSError, ValueError):
        return None
    page = np.frombuffer(body, np.uint8)
    return np.concatenate([chunk[start : start + levels], page]) if levels else page


def _codec(name: str) -> Any:
    return pa.Codec(name)


_kernel = numba.njit(nogil=True, cache=True, boundscheck=False)


@_kernel
def _varint(data, at, stop):  # type: ignore[no-untyped-def]
    """An unsigned LEB128 number and the place after it; the place is -1 when the bytes end first."""
    value = np.int64(0)
    for shift in range(0, 63, 7):
        if at >= stop:
            return value, -1
        byte = np.int64(data[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    return value, -1


@_kernel
def _page_headers(chunk):  # type: ignore[no-untyped-def]
    """One row a page: its header, in Thrift's compact protocol, as the fields above; a last row of type -1 when it is unreadable."""
    headers = np.zeros((8, 9), np.int64)
    count, at, stop = 0, 0, len(chunk)
    while at < stop:
        if count == len(headers):
            headers = np.concatenate((headers, np.zeros_like(headers)))
        header = headers[count]
        count += 1
        at = _page_header(chunk, at, stop, header)
        if at < 0 or header[_PACKED] < 0 or header[_PACKED] > stop - at or header[_UNPACKED] < 0 or header[_VALUES] < 0:
            header[_TYPE] = -1
            break
        if header[_DEF_BYTES] < 0 or header[_REP_BYTES] < 0 or header[_DEF_BYTES] + header[_REP_BYTES] > header[_PACKED]:
            header[_TYPE] = -1
            break
        header[_START] = at
        at += header[_PACKED]
    return headers[:count]


@_kernel
def _page_header(data, at, stop, header):  # type: ignore[no-untyped-def]
    """Read one page header into `header` [9]; the place after it, or -1."""
    header[_TYPE] = -1
    header[_IS_PACKED] = 1
    last = np.zeros(4, np.int64)  # The last field's number at each depth of structs.
    depth = 0
    while True:
        if at >= stop:
            return -1
        byte = np.int64(data[at])
        at += 1
        kind, step = byte & 15, byte >> 4
        if kind == 0:
            if depth == 0:
                return at
            depth -= 1
            continue
        if step == 0:
            number, at = _varint(data, at, stop)
            if at < 0:
                return -1
            last[depth] = (number >> 1) ^ -(number & 1)
        else:
            last[depth] += step
        if kind == 12:
            if depth == 3:
                return -1
            depth += 1
            last[depth] = 0
            continue
        value = np.int64(0)
        if kind == 1 or kind == 2:
            value = np.int64(kind == 1)
        elif kind == 3:
            at += 1
        elif kind == 7:
            at += 8
        elif 4 <= kind <= 6:
            number, at = _varint(data, at, stop)
            value = (number >> 1) ^ -(number & 1)
        elif kind == 8:
            size, at = _varint(data, at, stop)
            if at >= 0:
                at = at + size if size <= stop - at else -1
        else:
            return -1
        if at < 0:
            return -1
        if depth == 0 and 1 <= last[0] <= 3:
            header[last[0] - 1] = value
        elif depth == 1:
            is_v2 = last[0] == 8
            if last[1] == 1:
                header[_VALUES] = value
            elif last[1] == (4 if is_v2 else 2):
                header[_ENCODING] = value
            elif is_v2 and last[1] == 5:
                header[_DEF_BYTES] = value
            elif is_v2 and last[1] == 6:
                header[_REP_BYTES] = value
            elif is_v2 and last[1] == 7:
                header[_IS_PACKED] = value


@_kernel
def _word(data, at, stop):  # type: ignore[no-untyped-def]
    """Up to 8 bytes from `at`, little-endian, zeros after `stop`."""
    word = np.uint64(0)
    for byte in range(min(stop - at, 8)):
        word |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
    return word


@_kernel
def _unpack(data, at, stop, width, out):  # type: ignore[no-untyped-def]
    """Fill out [n] from runs of equal and of bit-packed numbers of `width` bits; false when the bytes end first or are odd."""
    if width < 0 or width > 32:
        return False
    done, count = 0, len(out)
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    while done < count:
        run, at = _varint(data, at, stop)
        if at < 0:
            return False
        size = min((run >> 1) * 8 if run & 1 else run >> 1, count - done)
        if size <= 0:
            return False
        if run & 1:
            if (size * width + 7) // 8 > stop - at:
                return False
            target = out[done : done + size]
            base = np.int64(data.ctypes.data) + at
            # The first numbers lie in 8 bytes that are surely there; a width of 0 has no bytes.
            num_safe = min(size, max(8 * (stop - at) - 64, 0) // max(width, 1))
            for i in range(num_safe):
                bit = i * width
                target[i] = (word_at(base + (bit >> 3)) >> np.uint64(bit & 7)) & mask  # type: ignore[call-arg]
            for i in range(num_safe, size):
                bit = i * width
                target[i] = (_word(data, at + (bit >> 3), stop) >> np.uint64(bit & 7)) & mask
            at += (run >> 1) * width
        else:
            num_bytes = (width + 7) // 8
            if num_bytes > stop - at:
                return False
            out[done : done + size] = _word(data, at, at + num_bytes)
            at += num_bytes
        done += size
    return True


@_kernel
def _level_bounds(page, at, num_bytes):  # type: ignore[no-untyped-def]
    """Where levels start and stop: after a length of 4 bytes in pages of version 1, `num_bytes` long in version 2; -1 if too long."""
    if num_bytes < 0:
        if at + 4 > len(page):
            return -1, -1
        num_bytes = np.int64(_word(page, at, at + 4))
        at += 4
    return (at, at + num_bytes) if num_bytes <= len(page) - at else (-1, -1)


@_kernel
def _levels(page, at, num_bytes, max_level, count):  # type: ignore[no-untyped-def]
    """`count` levels, none at all where every one is `max_level`; the place after them, -1 when they cannot be read."""
    nothing = np.empty(0, np.uint8)
    if max_level == 0:
        return nothing, at
    start, stop = _level_bounds(page, at, num_bytes)
    if start < 0:
        return nothing, -1
    width = 1 if max_level == 1 else 2
    run, after = _varint(page, start, stop)
    if after >= 0 and after < stop and not run & 1 and run >> 1 >= count and page[after] == max_level:
        return nothing, stop
    levels = np.empty(count, np.uint8)
    return (levels, stop) if _unpack(page, start, stop, width, levels) else (nothing, -1)


@_kernel
def _dictionary_values(page, at, dictionary, values):  # type: ignore[no-untyped-def]
    """Fill values [n] from dictionary indices at `at`; false when one is outside."""
    if len(values) == 0:
        return True
    if at >= len(page):
        return False
    places = np.empty(len(values), np.uint32)
    if not _unpack(page, at + 1, len(page), np.int64(page[at]), places):
        return False
    size = len(dictionary)
    worst = np.uint32(0)
    for i in range(len(places)):
        worst = max(worst, places[i])
    if worst >= size:
        return False
    for i in range(len(places)):
        values[i] = dictionary[places[i]]
    return True


@_kernel
def _plain_values(page, at, values):  # type: ignore[no-untyped-def]
    """Fill values [n] from bytes at `at`; false when they end first."""
    size = values.nbytes
    if size > len(page) - at:
        return False
    values.view(np.uint8)[:] = page[at : at + size]
    return True


@_kernel
def _page_values(page, at, encoding, dictionary, values):  # type: ignore[no-untyped-def]
    if encoding == _PLAIN:
        return _plain_values(page, at, values)
    if encoding == _RLE_DICTIONARY or encoding == _PLAIN_DICTIONARY:
        return _dictionary_values(page, at, dictionary, values)
    return False


@_kernel
def _floats_of_page(page, header, max_def, dictionary, values, at):  # type: ignore[no-untyped-def]
    """Write one data page's values into values [R] from `at` on; the place after them, -1 when it cannot be read."""
    count = header[_VALUES]
    if count > len(values) - at:
        return -1
    level_bytes = header[_DEF_BYTES] if header[_TYPE] == _DATA_PAGE_V2 else -1
    levels, start = _levels(page, header[_REP_BYTES], level_bytes, max_def, count)
    if start < 0:
        return -1
    if len(levels) == 0:
        ok = _page_values(page, start, header[_ENCODING], dictionary, values[at : at + count])
        return at + count if ok else -1
    present = np.empty(np.sum(levels == max_def), values.dtype)
    if not _page_values(page, start, header[_ENCODING], dictionary, present):
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
def _bags_of_page(page, header, max_def, max_rep, dictionary, ids, offsets, place):  # type: ignore[no-untyped-def]
    """Append one data page's ids to ids [nnz] and the starts of its rows to offsets [R + 1]; place [2]: ids and rows so far."""
    count, is_v2 = header[_VALUES], header[_TYPE] == _DATA_PAGE_V2
    if max_rep == 1:
        start, at = _level_bounds(page, 0, header[_REP_BYTES] if is_v2 else -1)
        if at < 0:
            return False
        defs, at = _levels(page, at, header[_DEF_BYTES] if is_v2 else -1, max_def, count)
        if at >= 0 and len(defs) == 0:
            return _full_bags_of_page(page, header, start, at, dictionary, ids, offsets, place)
    reps, at = _levels(page, 0, header[_REP_BYTES] if is_v2 else -1, max_rep, count)
    if at < 0:
        return False
    defs, at = _levels(page, at, header[_DEF_BYTES] if is_v2 else -1, max_def, count)
    if at < 0:
        return False
    if max_rep > 0 and len(reps) == 0:
        reps = np.ones(count, np.uint8)
    num_new_rows = count if max_rep == 0 else count - np.int64(np.sum(reps))
    num_new_ids = count if len(defs) == 0 else np.int64(np.sum(defs == max_def))
    if place[1] + num_new_rows > len(offsets) - 1 or place[1] + num_new_rows == 0 or place[0] + num_new_ids > len(ids):
        return False
    num_ids, row = place[0], place[1]
    # Each start is written until the next row begins, which costs less than a branch that nobody can foretell.
    for i in range(count):
        offsets[row] = num_ids
        row += 1 - np.int64(reps[i]) if len(reps) else 1
        num_ids += 1 if len(defs) == 0 else defs[i] == max_def
    ok = _page_values(page, at, header[_ENCODING], dictionary, ids[place[0] : place[0] + num_new_ids])
    place[0] += num_new_ids
    place[1] += num_new_rows
    return ok


@_kernel
def _full_bags_of_page(page, header, start, at, dictionary, ids, offsets, place):  # type: ignore[no-untyped-def]
    """`_bags_of_page` for lists without a null or an empty one, straight from the bits of the repetition levels at `start`."""
    count = header[_VALUES]
    if place[0] + count > len(ids):
        return False
    num_rows = _row_starts(page, start, count, place[0], offsets[: len(offsets) - 1], place[1])
    if num_rows <= 0:
        return False
    ok = _page_values(page, at, header[_ENCODING], dictionary, ids[place[0] : place[0] + count])
    place[0] += count
    place[1] = num_rows
    return ok


@_kernel
def _row_starts(page, at, count, first_id, starts, num_rows):  # type: ignore[no-untyped-def]
    """Write to starts [R], from `num_rows` on, the place of each level 0 among `count`; the rows after that, -1 on bad bytes."""
    stop = len(page)
    done = 0
    while done < count:
        run, at = _varint(page, at, stop)
        if at < 0:
            return -1
        size = min((run >> 1) * 8 if run & 1 else run >> 1, count - done)
        if size <= 0 or ((size + 7) // 8 if run & 1 else 1) > stop - at:
            return -1
        for i in range(0, size, 64):
            word = _word(page, at + (i >> 3), stop) if run & 1 else np.uint64(page[at]) * np.uint64(0xFFFFFFFFFFFFFFFF)
            zeros = ~word
            if size - i < 64:
                zeros &= (np.uint64(1) << np.uint64(size - i)) - np.uint64(1)
            while zeros != 0:
                if num_rows >= len(starts):
                    return -1
                starts[num_rows] = first_id + done + i + lowest_bit(zeros)  # type: ignore[call-arg]
                num_rows += 1
                zeros &= zeros - np.uint64(1)
        at += (run >> 1) if run & 1 else 1
        done += size
    return num_rows
