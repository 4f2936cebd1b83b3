"""Parses Parquet page headers (Thrift compact protocol) into an array."""

from __future__ import annotations

import numba
import numpy as np

TYPE, UNPACKED, PACKED, CRC, START, VALUES, ENCODING, DEF_BYTES, REP_BYTES, IS_PACKED, HAS_CRC, HEADER_FIELDS = range(12)
"""Fields of a page header in a row of the array that `page_headers` returns."""
DATA_PAGE, INDEX_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = range(4)
"""Page types."""
_FIRST_STRUCT = 5
"""Field of a page header with what only pages of type 0 have; those of the other types follow."""
MAX_PAGES = 1 << 20
"""A column chunk with more pages is not for us: tiny pages could take much more memory as headers than as bytes."""

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
    headers = np.zeros((8, HEADER_FIELDS), np.int64)
    count, at, stop = 0, 0, len(chunk)
    while at < stop:
        if count == len(headers):
            headers = np.concatenate((headers, np.zeros_like(headers)))
        header = headers[count]
        count += 1
        start = read_header(chunk, at, stop, header)
        if start < 0 or header[PACKED] > stop - start or count > MAX_PAGES:
            header[TYPE] = -1
            break
        header[START] = start
        at = start + header[PACKED]
    return headers[:count]


@_kernel
def read_header(data, at, stop, header):  # type: ignore[no-untyped-def]
    """Read one page header into `header` [HEADER_FIELDS]; returns the offset after it, or -1 if it is not one."""
    header[:] = 0
    header[TYPE] = -1
    header[IS_PACKED] = 1
    after, struct = _read_fields(data, at, stop, header)
    kind = header[TYPE]
    if after < 0 or kind < 0 or kind > DATA_PAGE_V2 or (kind != INDEX_PAGE and struct != _FIRST_STRUCT + kind):
        return -1
    if min(header[PACKED], header[UNPACKED], header[VALUES], header[DEF_BYTES], header[REP_BYTES]) < 0:
        return -1
    if header[DEF_BYTES] > header[PACKED] or header[REP_BYTES] > header[PACKED] - header[DEF_BYTES]:
        return -1
    header[CRC] &= 0xFFFFFFFF
    return after


@_kernel
def _read_fields(data, at, stop, header):  # type: ignore[no-untyped-def]
    """Read the fields of a page header; returns the offset after it, or -1, and which of its nested structs it has."""
    struct = np.int64(0)
    last = np.zeros(4, np.int64)  # the last field id at each nesting depth
    depth = 0
    while True:
        if at >= stop:
            return -1, struct
        byte = np.int64(data[at])
        at += 1
        kind, step = byte & 15, byte >> 4
        if kind == 0:
            if depth == 0:
                return at, struct
            depth -= 1
            continue
        if step == 0:
            number, at = varint(data, at, stop)
            if at < 0:
                return -1, struct
            last[depth] = (number >> 1) ^ -(number & 1)
        else:
            last[depth] += step
        if kind == 12:
            if depth == 3:
                return -1, struct
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
            return -1, struct
        if at < 0:
            return -1, struct
        field = -1
        if depth == 0 and 1 <= last[0] <= 4:
            field = last[0] - 1
            if field == CRC:
                header[HAS_CRC] = 1
        elif depth == 1 and _FIRST_STRUCT <= last[0] <= _FIRST_STRUCT + DATA_PAGE_V2:
            if struct != 0 and struct != last[0]:
                return -1, struct
            struct = last[0]
            is_v2 = struct == _FIRST_STRUCT + DATA_PAGE_V2
            if last[1] == 1:
                field = VALUES
            elif last[1] == (4 if is_v2 else 2):
                field = ENCODING
            elif is_v2 and last[1] == 5:
                field = DEF_BYTES
            elif is_v2 and last[1] == 6:
                field = REP_BYTES
            elif is_v2 and last[1] == 7:
                field = IS_PACKED
        if field >= 0:
            if not (kind == 5 or (field == IS_PACKED and kind <= 2)):
                return -1, struct  # other readers would skip a field of another type
            header[field] = value
