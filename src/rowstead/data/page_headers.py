"""Parses Parquet page headers (Thrift compact protocol) into an array."""

from __future__ import annotations

import numba
import numpy as np

TYPE, UNPACKED, PACKED, START, VALUES, ENCODING, DEF_BYTES, REP_BYTES, IS_PACKED = range(9)
"""Fields of a page header in a row of the array that `page_headers` returns."""
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 0, 2, 3
"""Page types."""

_kernel = numba.njit(nogil=True, cache=True, boundscheck=False)


@_kernel
def varint(data, at, stop):  # type: ignore[no-untyped-def]
    """An unsigned LEB128 number and the offset after it, which is -1 if the bytes end early."""
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
def little_endian(data, at, stop):  # type: ignore[no-untyped-def]
    """Up to 8 bytes from `at` as uint64, none from `stop` on."""
    word = np.uint64(0)
    for byte in range(min(stop - at, 8)):
        word |= np.uint64(data[at + byte]) << np.uint64(8 * byte)
    return word


@_kernel
def page_headers(chunk):  # type: ignore[no-untyped-def]
    """One row per page, with the fields above; ends with a row of type -1 if a header is unreadable."""
    headers = np.zeros((8, 9), np.int64)
    count, at, stop = 0, 0, len(chunk)
    while at < stop:
        if count == len(headers):
            headers = np.concatenate((headers, np.zeros_like(headers)))
        header = headers[count]
        count += 1
        at = _page_header(chunk, at, stop, header)
        if at < 0 or header[PACKED] < 0 or header[PACKED] > stop - at or header[UNPACKED] < 0 or header[VALUES] < 0:
            header[TYPE] = -1
            break
        if header[DEF_BYTES] < 0 or header[REP_BYTES] < 0 or header[DEF_BYTES] + header[REP_BYTES] > header[PACKED]:
            header[TYPE] = -1
            break
        header[START] = at
        at += header[PACKED]
    return headers[:count]


@_kernel
def _page_header(data, at, stop, header):  # type: ignore[no-untyped-def]
    """Read one page header into `header` [9]; returns the offset after it, or -1."""
    header[TYPE] = -1
    header[IS_PACKED] = 1
    last = np.zeros(4, np.int64)  # the last field id at each nesting depth
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
            number, at = varint(data, at, stop)
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
            number, at = varint(data, at, stop)
            value = (number >> 1) ^ -(number & 1)
        elif kind == 8:
            size, at = varint(data, at, stop)
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
                header[VALUES] = value
            elif last[1] == (4 if is_v2 else 2):
                header[ENCODING] = value
            elif is_v2 and last[1] == 5:
                header[DEF_BYTES] = value
            elif is_v2 and last[1] == 6:
                header[REP_BYTES] = value
            elif is_v2 and last[1] == 7:
                header[IS_PACKED] = value
