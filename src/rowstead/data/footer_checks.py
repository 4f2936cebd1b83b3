"""Checks what a Parquet footer (Thrift compact protocol) says of column chunks.

pyarrow ends the process over some values that it finds only when it is asked for a column chunk: an unknown codec, histograms of another
length than the column has levels, columns that are missing. So they are looked for before.
"""

from __future__ import annotations

import numba
import numpy as np
import pyarrow.parquet as pq

from rowstead.data.page_headers import varint

_BOOLS, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = (1, 2), 3, 7, 8, 9, 10, 12
_INT32, _INT64 = 5, 6
_CODEC, _REP_HISTOGRAM, _DEF_HISTOGRAM, _HAS_TEXT_BYTES, _NUM_FIELDS = range(5)
_NUM_CODECS = 8
_MAX_DEPTH = 16

_kernel = numba.njit(nogil=True, cache=True, boundscheck=False)


def find_footer_problem(footer: bytes, metadata: pq.FileMetaData) -> str | None:
    """What pyarrow would end the process over, in a footer that it has read; None if nothing."""
    ok, num_groups, found = read_chunk_facts(np.frombuffer(footer, np.uint8)[:-8])
    schema = metadata.schema
    leaves = [schema.column(i) for i in range(len(schema))]
    if not ok or num_groups != metadata.num_row_groups or len(found) != num_groups * len(leaves):
        return "it does not describe every column of every row group"
    if not len(found):
        return None
    if ((found[:, _CODEC] < 0) | (found[:, _CODEC] >= _NUM_CODECS)).any():
        return "it has an unknown codec"
    by_leaf = found.reshape(num_groups, len(leaves), _NUM_FIELDS)
    levels = np.array([(leaf.max_repetition_level + 1, leaf.max_definition_level + 1) for leaf in leaves], np.int64)
    histograms = by_leaf[:, :, [_REP_HISTOGRAM, _DEF_HISTOGRAM]]
    if ((histograms != 0) & (histograms != levels)).any():
        return "it has a histogram of levels that do not exist"
    is_text = np.array([leaf.physical_type == "BYTE_ARRAY" for leaf in leaves], np.bool_)
    if (by_leaf[:, :, _HAS_TEXT_BYTES] > is_text).any():
        return "it has sizes of texts for a column of numbers"
    return None


@_kernel
def _next_field(data, at, stop, last):  # type: ignore[no-untyped-def]
    """Offset after a field's header, the field's type (0 at the end of its struct, -1 on bad bytes) and number, given the last number."""
    if at < 0 or at >= stop:
        return -1, -1, last
    byte = np.int64(data[at])
    at += 1
    if byte & 15 == 0 or byte >> 4:
        return at, byte & 15, last + (byte >> 4)
    number, at = varint(data, at, stop)
    return at, (byte & 15) if at >= 0 else -1, (number >> 1) ^ -(number & 1)


@_kernel
def _list_header(data, at, stop):  # type: ignore[no-untyped-def]
    """Offset after a list's header (-1 on bad bytes), number of its elements, and their type."""
    if at >= stop:
        return -1, 0, 0
    byte = np.int64(data[at])
    size, at = byte >> 4, at + 1
    if size == 15:
        size, at = varint(data, at, stop)
    return (at, size, byte & 15) if at >= 0 and size <= stop - at else (-1, 0, 0)


@_kernel
def _skip(data, at, stop, kind):  # type: ignore[no-untyped-def]
    """Offset after a value of type `kind`, -1 on bad bytes."""
    element, left = (
        np.zeros(_MAX_DEPTH, np.int64),
        np.zeros(_MAX_DEPTH, np.int64),
    )  # of the lists that the value is in; structs have -1
    depth = 0
    while True:
        if kind in _BOOLS or kind == _BYTE:
            at += kind == _BYTE or (depth > 0 and element[depth - 1] >= 0)  # a field's type is its value
        elif kind == _DOUBLE:
            at += 8
        elif 4 <= kind <= _INT64:
            _, at = varint(data, at, stop)
        elif kind == _BINARY:
            size, at = varint(data, at, stop)
            at = at + size if at >= 0 and size <= stop - at else -1
        elif kind in (_STRUCT, _LIST, _SET):
            if depth == _MAX_DEPTH:
                return -1
            element[depth] = left[depth] = -1
            if kind != _STRUCT:
                at, left[depth], element[depth] = _list_header(data, at, stop)
            depth += 1
        else:
            return -1
        if at < 0 or at > stop:
            return -1
        while depth > 0:  # the next value of what the last one was in
            if element[depth - 1] < 0:
                at, kind, _ = _next_field(data, at, stop, 0)
                if kind < 0:
                    return -1
                if kind > 0:
                    break
            elif left[depth - 1] > 0:
                left[depth - 1] -= 1
                kind = element[depth - 1]
                break
            depth -= 1
        if depth == 0:
            return at


@_kernel
def _read_size_statistics(data, at, stop, row):  # type: ignore[no-untyped-def]
    field = np.int64(0)
    while True:
        at, kind, field = _next_field(data, at, stop, field)
        if kind <= 0:
            return at
        if field == 1 and kind == _INT64:
            row[_HAS_TEXT_BYTES] = 1
        if (field == 2 or field == 3) and kind == _LIST:
            _, size, element = _list_header(data, at, stop)
            if element != _INT64 and size > 0:
                return -1
            row[_REP_HISTOGRAM if field == 2 else _DEF_HISTOGRAM] = size
        at = _skip(data, at, stop, kind)


@_kernel
def _read_chunk_metadata(data, at, stop, row):  # type: ignore[no-untyped-def]
    field = np.int64(0)
    while True:
        at, kind, field = _next_field(data, at, stop, field)
        if kind <= 0:
            return at
        if field == 4 and kind == _INT32:
            number, at = varint(data, at, stop)
            row[_CODEC] = (number >> 1) ^ -(number & 1)
        elif field == 16 and kind == _STRUCT:
            row[_REP_HISTOGRAM:] = 0
            at = _read_size_statistics(data, at, stop, row)
        else:
            at = _skip(data, at, stop, kind)


@_kernel
def _read_chunk(data, at, stop, row):  # type: ignore[no-untyped-def]
    field = np.int64(0)
    while True:
        at, kind, field = _next_field(data, at, stop, field)
        if kind <= 0:
            return at
        if field == 8 or field == 9:  # encrypted
            return -1
        at = _read_chunk_metadata(data, at, stop, row) if field == 3 and kind == _STRUCT else _skip(data, at, stop, kind)


@_kernel
def read_chunk_facts(data):  # type: ignore[no-untyped-def]
    """Whether a footer can be read, its number of row groups, and of each column chunk, group by group, the fields above [n, 4]."""
    found = np.full((64, _NUM_FIELDS), -1, np.int64)
    count, num_groups, at, stop = 0, np.int64(0), np.int64(0), len(data)
    field = np.int64(0)
    while True:
        at, kind, field = _next_field(data, at, stop, field)
        if kind <= 0:
            return kind == 0, num_groups, found[:count]
        if field != 4 or kind != _LIST:
            at = _skip(data, at, stop, kind)
            continue
        at, size, element = _list_header(data, at, stop)
        if at < 0 or element != _STRUCT:
            return False, num_groups, found[:0]
        num_groups += size
        for _ in range(size):
            inner = np.int64(0)
            while True:
                at, kind, inner = _next_field(data, at, stop, inner)
                if kind < 0:
                    return False, num_groups, found[:0]
                if kind == 0:
                    break
                if inner != 1 or kind != _LIST:
                    at = _skip(data, at, stop, kind)
                    continue
                at, num_chunks, element = _list_header(data, at, stop)
                if at < 0 or element != _STRUCT:
                    return False, num_groups, found[:0]
                for _ in range(num_chunks):
                    if count == len(found):
                        found = np.concatenate((found, np.full_like(found, -1)))
                    found[count, _REP_HISTOGRAM:] = 0
                    at = _read_chunk(data, at, stop, found[count])
                    count += 1
                    if at < 0:
                        return False, num_groups, found[:0]
