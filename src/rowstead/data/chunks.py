"""Column chunks of a row group read and decoded in one call that needs no Python, so that threads do it side by side.

A row group has hundreds of columns. Three calls for each, to read it, to find its pages and to decode them, let go of Python's lock and
take it again some thousands of times; threads that do so all wait for each other, and so does the one that trains. Here the whole
row group is one call, which reads the file by itself. What it cannot do (a codec that pyarrow has to unpack, a damaged page, a read
that fails) it leaves undone and says so, column by column.

Letters: C columns, R rows.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from rowstead.data.page_headers import (
    DATA_PAGE,
    DATA_PAGE_V2,
    DEF_BYTES,
    DICTIONARY_PAGE,
    IS_PACKED,
    PACKED,
    REP_BYTES,
    START,
    TYPE,
    UNPACKED,
    VALUES,
    page_headers,
)
from rowstead.data.pages import bags_of_page, floats_of_page, plain_values
from rowstead.data.snappy import unpack_snappy

AT, SIZE, MAX_DEF, MAX_REP, NUM_VALUES, CODEC, NUM_FIELDS = range(7)
"""Fields of a row of `chunks` [C, 6]: where a column chunk begins in the file, its bytes (0 where it is not ours), its levels, its values
and its codec."""
PLAIN, SNAPPY = range(2)
"""Codecs: none, and Snappy. Others, which have other numbers, are not unpacked here."""
TILE = 16
"""Columns and rows that are laid side by side at a time: as many numbers as a cache line holds."""

_kernel = numba.njit(nogil=True, cache=True, boundscheck=False)


@intrinsic
def _pread(typingctx, file, address, size, at):  # type: ignore[no-untyped-def]
    """`pread` of the C library: up to `size` bytes at `at` of a file, by its number, to an address; how many, or -1."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        int32, int64 = ir.IntType(32), ir.IntType(64)
        kind = ir.FunctionType(int64, [int32, cgutils.voidptr_t, int64, int64])
        function = cgutils.get_or_insert_function(builder.module, kind, "pread")
        number = builder.trunc(args[0], int32)
        return builder.call(function, [number, builder.inttoptr(args[1], cgutils.voidptr_t), args[2], args[3]])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@_kernel
def _read(file, at, size, raw, place):  # type: ignore[no-untyped-def]
    """Read `size` bytes at `at` of the file into raw from `place` on; false when they are not all there."""
    done = 0
    while done < size:
        count = _pread(np.int64(file), np.int64(raw.ctypes.data) + place + done, size - done, at + done)
        if count <= 0:
            return False
        done += count
    return True


@_kernel
def _read_chunks(file, chunks, raw, places):  # type: ignore[no-untyped-def]
    """Read `chunks` [n, 6] at once where they are neighbours in the file, else one by one.

    Returns the bytes, in `raw` if that has room; places [n] says where each chunk begins in them, -1 where it was not read.
    """
    first, last, total = np.int64(1) << 62, np.int64(0), np.int64(0)
    for c in range(len(chunks)):
        if chunks[c, SIZE] > 0:
            first, last = min(first, chunks[c, AT]), max(last, chunks[c, AT] + chunks[c, SIZE])
            total += chunks[c, SIZE]
    together = last - first <= total + total // 4
    wanted = last - first if together else total
    if wanted > len(raw):
        raw = np.empty(wanted + wanted // 4, np.uint8)
    together = total > 0 and together and _read(file, first, last - first, raw, 0)
    end = 0
    for c in range(len(chunks)):
        places[c] = -1
        if chunks[c, SIZE] <= 0:
            continue
        if together:
            places[c] = chunks[c, AT] - first
        elif end + chunks[c, SIZE] <= len(raw) and _read(file, chunks[c, AT], chunks[c, SIZE], raw, end):
            places[c] = end
            end += chunks[c, SIZE]
    return raw


@_kernel
def _page(chunk, header, codec, room):  # type: ignore[no-untyped-def]
    """The bytes of one page, levels first, unpacked into `room` or new memory; whether they are right; and the room for the next."""
    start, stop = header[START], header[START] + header[PACKED]
    if codec == PLAIN or not header[IS_PACKED]:
        return chunk[start:stop], True, room
    levels = header[DEF_BYTES] + header[REP_BYTES] if header[TYPE] == DATA_PAGE_V2 else 0
    if codec != SNAPPY or header[UNPACKED] < levels or header[UNPACKED] - levels > 64 * header[PACKED]:
        return chunk[:0], False, room
    if header[UNPACKED] > len(room):
        room = np.empty(header[UNPACKED] + header[UNPACKED] // 4, np.uint8)
    for i in range(levels):
        room[i] = chunk[start + i]
    page = room[: header[UNPACKED]]
    return page, unpack_snappy(chunk[start + levels : stop], page[levels:]), room


@_kernel
def _dictionary(chunk, header, codec, room, words):  # type: ignore[no-untyped-def]
    """The words of a dictionary page, in `words` or new memory; whether they are right; and the room for the next page."""
    count = header[VALUES]
    if count > header[UNPACKED] // words.itemsize or header[UNPACKED] > 64 * header[PACKED]:
        return words[:0], False, room
    if count > len(words):
        words = np.empty(count + count // 4, words.dtype)
    found = words[:count]
    if codec == SNAPPY and header[IS_PACKED] and header[UNPACKED] == found.nbytes:
        start = header[START]
        return found, unpack_snappy(chunk[start : start + header[PACKED]], found.view(np.uint8)), room
    page, ok, room = _page(chunk, header, codec, room)
    return found, ok and plain_values(page, 0, found), room


@_kernel
def _next_page(chunk, header, codec, room, words, dictionary):  # type: ignore[no-untyped-def]
    """A page: the bytes of one with values, or the dictionary that one has; whether it is right; and memory for the one after it."""
    if header[TYPE] == DICTIONARY_PAGE:
        dictionary, ok, room = _dictionary(chunk, header, codec, room, words)
        return chunk[:0], ok, dictionary, room, dictionary if ok and len(dictionary) > len(words) else words
    if header[TYPE] != DATA_PAGE and header[TYPE] != DATA_PAGE_V2:
        return chunk[:0], False, dictionary, room, words
    page, ok, room = _page(chunk, header, codec, room)
    return page, ok, dictionary, room, words


@_kernel
def floats_of_chunk(chunk, max_def, codec, values, room, words):  # type: ignore[no-untyped-def]
    """Fill values [R] from a flat FLOAT column chunk, NaN where null; false when that cannot be done.

    Returns `room` (bytes) and `words` (float32) too, memory for pages and dictionaries that may have grown, for the next chunk.
    """
    at = 0
    dictionary = words[:0]
    headers = page_headers(chunk)
    for p in range(len(headers)):
        header = headers[p]
        page, ok, dictionary, room, words = _next_page(chunk, header, codec, room, words, dictionary)
        if ok and header[TYPE] != DICTIONARY_PAGE:
            at = floats_of_page(page, header, max_def, dictionary, values, at)
        if not ok or at < 0:
            return False, room, words
    return at == len(values), room, words


@_kernel
def bags_of_chunk(chunk, max_def, max_rep, codec, ids, offsets, room, words):  # type: ignore[no-untyped-def]
    """Fill ids [nnz] and offsets [R + 1] from an INT64 column chunk; how many ids, -1 when that cannot be done.

    Returns `room` (bytes) and `words` (int64) too, memory for pages and dictionaries that may have grown, for the next chunk.
    """
    place = np.zeros(2, np.int64)  # Ids and rows so far.
    dictionary = words[:0]
    offsets[:] = 0
    headers = page_headers(chunk)
    for p in range(len(headers)):
        header = headers[p]
        page, ok, dictionary, room, words = _next_page(chunk, header, codec, room, words, dictionary)
        if ok and header[TYPE] != DICTIONARY_PAGE:
            ok = bags_of_page(page, header, max_def, max_rep, dictionary, ids, offsets, place)
        if not ok:
            return -1, room, words
    if place[1] != len(offsets) - 1:
        return -1, room, words
    offsets[place[1]] = place[0]
    return place[0], room, words


@_kernel
def read_floats(file, chunks, dense, scalars, done):  # type: ignore[no-untyped-def]
    """Read FLOAT columns: the first Fd of `chunks` [C, 6] side by side into dense [R, Fd], the others into scalars [C - Fd, R].

    `file` is its number. done [C] says which were read; the others are to be read in another way.
    """
    num_rows, num_dense = dense.shape
    columns = np.empty((TILE, num_rows), np.float32)
    raw, room, words = np.empty(0, np.uint8), np.empty(0, np.uint8), np.empty(0, np.float32)
    places = np.empty(TILE, np.int64)
    for first in range(0, len(chunks), TILE):
        count = min(TILE, len(chunks) - first)
        raw = _read_chunks(file, chunks[first : first + count], raw, places)
        for c in range(count):
            chunk = chunks[first + c]
            done[first + c] = False
            if places[c] >= 0 and chunk[CODEC] <= SNAPPY:
                data = raw[places[c] : places[c] + chunk[SIZE]]
                values = columns[c] if first + c < num_dense else scalars[first + c - num_dense]
                ok, room, words = floats_of_chunk(data, chunk[MAX_DEF], chunk[CODEC], values, room, words)
                done[first + c] = ok
        # While the columns are still in the cache.
        count = min(count, num_dense - first)
        for row in range(0, num_rows, TILE):
            stop = min(row + TILE, num_rows)
            for c in range(count):
                for r in range(row, stop):
                    dense[r, first + c] = columns[c, r]


@_kernel
def read_bags(file, chunks, firsts, ids, offsets, counts):  # type: ignore[no-untyped-def]
    """Read columns of ids, each to its own place from firsts [C + 1] on in ids [nnz], and their offsets [C, R + 1].

    `file` is its number. counts [C] says how many ids each has, -1 where it is to be read in another way.
    """
    raw, room, words = np.empty(0, np.uint8), np.empty(0, np.uint8), np.empty(0, np.int64)
    places = np.empty(1, np.int64)
    for c in range(len(chunks)):
        chunk = chunks[c]
        counts[c] = -1
        raw = _read_chunks(file, chunks[c : c + 1], raw, places)
        if places[0] >= 0 and chunk[CODEC] <= SNAPPY:
            data, own = raw[: chunk[SIZE]], ids[firsts[c] : firsts[c + 1]]
            levels = (chunk[MAX_DEF], chunk[MAX_REP])
            counts[c], room, words = bags_of_chunk(data, levels[0], levels[1], chunk[CODEC], own, offsets[c], room, words)
