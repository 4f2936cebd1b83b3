"""Reads and decodes the column chunks of a row group in one compiled call without the GIL, so that threads run in parallel.

A row group has hundreds of columns. With three calls per column (read, find pages, decode), threads would release and take the GIL
thousands of times and wait for each other, and so would the training thread. Here the whole row group is one call, which reads the
file itself. It reports the columns that it could not decode (another codec, a damaged page, a failed read).

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
    HEADER_FIELDS,
    IS_PACKED,
    MAX_PAGES,
    PACKED,
    REP_BYTES,
    START,
    TYPE,
    UNPACKED,
    VALUES,
    page_headers,
    read_header,
)
from rowstead.data.pages import MAX_PAGE_BYTES, decode_bag_page, decode_float_page, decode_plain, is_intact
from rowstead.data.snappy import unpack_snappy

AT, SIZE, MAX_DEF, MAX_REP, NUM_VALUES, CODEC, UNPACKED_SIZE, ENCODINGS, NUM_FIELDS = range(9)
"""Fields of a row of `chunks` [C, 8]: offset of a column chunk in the file, size in bytes (0 if not for us), maximum levels, number of
values, codec, size when decompressed, encodings (a bit for each)."""
PLAIN, SNAPPY = range(2)
"""Codecs that are decompressed here: none, and Snappy."""
FIRST_READ, LAST_READ = 1 << 10, 1 << 20
"""Bytes to read for a page header: most are below 100, but some have long texts as statistics."""
TILE = 16
"""Columns and rows that are transposed at a time: the numbers in a cache line."""

_kernel = numba.njit(nogil=True, cache=True, boundscheck=False)


@intrinsic
def _pread(typingctx, file, address, size, at):  # type: ignore[no-untyped-def]
    """C's `pread`: read up to `size` bytes at offset `at` of a file descriptor to an address; returns how many, or -1."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        int32, int64 = ir.IntType(32), ir.IntType(64)
        kind = ir.FunctionType(int64, [int32, cgutils.voidptr_t, int64, int64])
        function = cgutils.get_or_insert_function(builder.module, kind, "pread")
        number = builder.trunc(args[0], int32)
        return builder.call(function, [number, builder.inttoptr(args[1], cgutils.voidptr_t), args[2], args[3]])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@_kernel
def _read(file, at, size, raw, start):  # type: ignore[no-untyped-def]
    """Read `size` bytes at offset `at` of the file into raw[start:]; false if the file ends first."""
    done = 0
    while done < size:
        count = _pread(np.int64(file), np.int64(raw.ctypes.data) + start + done, size - done, at + done)
        if count <= 0:
            return False
        done += count
    return True


@_kernel
def _read_chunks(file, chunks, raw, starts):  # type: ignore[no-untyped-def]
    """Read `chunks` [n, 8], in one call if they are neighbours in the file.

    Returns the bytes, in `raw` if it is large enough; starts [n] gets the offset of each chunk in them, -1 if it was not read.
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
        starts[c] = -1
        if chunks[c, SIZE] <= 0:
            continue
        if together:
            starts[c] = chunks[c, AT] - first
        elif end + chunks[c, SIZE] <= len(raw) and _read(file, chunks[c, AT], chunks[c, SIZE], raw, end):
            starts[c] = end
            end += chunks[c, SIZE]
    return raw


@_kernel
def read_page_headers(file, at, size):  # type: ignore[no-untyped-def]
    """As `page_headers`, of a column chunk in a file, without reading its pages."""
    headers = np.zeros((8, HEADER_FIELDS), np.int64)
    count, done, window = 0, np.int64(0), np.empty(FIRST_READ, np.uint8)
    while done < size:
        if count == len(headers):
            headers = np.concatenate((headers, np.zeros_like(headers)))
        header = headers[count]
        count += 1
        length = min(len(window), size - done)
        start = read_header(window, 0, length, header) if _read(file, at + done, length, window, 0) else -1
        if start < 0 and length == len(window) < LAST_READ:
            window = np.empty(LAST_READ, np.uint8)
            count -= 1
            continue
        if start < 0 or header[PACKED] > size - done - start or count > MAX_PAGES:
            header[TYPE] = -1
            break
        header[START] = done + start
        done += start + header[PACKED]
    return headers[:count]


@_kernel
def _page(chunk, header, codec, buffer):  # type: ignore[no-untyped-def]
    """Decompress one page, levels first, into `buffer` or new memory; returns the bytes, success, and the buffer for the next page."""
    start, stop = header[START], header[START] + header[PACKED]
    if codec == PLAIN or not header[IS_PACKED]:
        return chunk[start:stop], header[PACKED] == header[UNPACKED], buffer
    levels = header[DEF_BYTES] + header[REP_BYTES] if header[TYPE] == DATA_PAGE_V2 else 0
    if codec != SNAPPY or header[UNPACKED] < levels or header[UNPACKED] - levels > 64 * header[PACKED]:
        return chunk[:0], False, buffer
    if header[UNPACKED] > len(buffer):
        buffer = np.empty(header[UNPACKED] + header[UNPACKED] // 4, np.uint8)
    for i in range(levels):
        buffer[i] = chunk[start + i]
    page = buffer[: header[UNPACKED]]
    return page, unpack_snappy(chunk[start + levels : stop], page[levels:]), buffer


@_kernel
def _dictionary(chunk, header, codec, buffer, words):  # type: ignore[no-untyped-def]
    """Decode a dictionary page into `words` or new memory; returns the words, success, and the buffer for the next page."""
    count = header[VALUES]
    if count * words.itemsize != header[UNPACKED] or header[UNPACKED] > 64 * header[PACKED]:
        return words[:0], False, buffer
    if count > len(words):
        words = np.empty(count + count // 4, words.dtype)
    found = words[:count]
    if codec == SNAPPY and header[IS_PACKED]:
        start = header[START]
        return found, unpack_snappy(chunk[start : start + header[PACKED]], found.view(np.uint8)), buffer
    page, ok, buffer = _page(chunk, header, codec, buffer)
    return found, ok and decode_plain(page, 0, found), buffer


@_kernel
def _next_page(chunk, header, codec, buffer, words, dictionary):  # type: ignore[no-untyped-def]
    """Read a page: the bytes of a data page or the new dictionary; success; and memory for the next page."""
    if header[TYPE] < 0 or header[UNPACKED] > MAX_PAGE_BYTES or not is_intact(chunk, header):
        return chunk[:0], False, dictionary, buffer, words
    if header[TYPE] == DICTIONARY_PAGE:
        dictionary, ok, buffer = _dictionary(chunk, header, codec, buffer, words)
        return chunk[:0], ok, dictionary, buffer, dictionary if ok and len(dictionary) > len(words) else words
    if header[TYPE] != DATA_PAGE and header[TYPE] != DATA_PAGE_V2:
        return chunk[:0], False, dictionary, buffer, words
    page, ok, buffer = _page(chunk, header, codec, buffer)
    return page, ok, dictionary, buffer, words


@_kernel
def decode_float_chunk(chunk, max_def, codec, values, buffer, words):  # type: ignore[no-untyped-def]
    """Fill values [R] from a flat FLOAT column chunk, NaN where null; false on failure.

    Also returns `buffer` (bytes) and `words` (float32), memory for pages and dictionaries that may have grown, for the next chunk.
    """
    at = 0
    dictionary = words[:0]
    headers = page_headers(chunk)
    for p in range(len(headers)):
        header = headers[p]
        page, ok, dictionary, buffer, words = _next_page(chunk, header, codec, buffer, words, dictionary)
        if ok and header[TYPE] != DICTIONARY_PAGE:
            at = decode_float_page(page, header, max_def, dictionary, values, at)
        if not ok or at < 0:
            return False, buffer, words
    return at == len(values), buffer, words


@_kernel
def decode_bag_chunk(chunk, max_def, max_rep, codec, ids, offsets, buffer, words):  # type: ignore[no-untyped-def]
    """Fill ids [V] and offsets [R + 1] from an INT64 column chunk of V values; returns the number of ids, -1 on failure.

    Also returns `buffer` (bytes) and `words` (int64), memory for pages and dictionaries that may have grown, for the next chunk.
    """
    done = np.zeros(2, np.int64)  # ids and rows so far
    num_values = 0
    dictionary = words[:0]
    offsets[:] = 0
    headers = page_headers(chunk)
    for p in range(len(headers)):
        header = headers[p]
        page, ok, dictionary, buffer, words = _next_page(chunk, header, codec, buffer, words, dictionary)
        if ok and header[TYPE] != DICTIONARY_PAGE:
            ok = decode_bag_page(page, header, max_def, max_rep, dictionary, ids, offsets, done)
            num_values += header[VALUES]
        if not ok:
            return -1, buffer, words
    if done[1] != len(offsets) - 1 or offsets[0] != 0 or num_values != len(ids):
        return -1, buffer, words
    offsets[done[1]] = done[0]
    return done[0], buffer, words


@_kernel
def read_floats(file, chunks, dense, scalars, done):  # type: ignore[no-untyped-def]
    """Read FLOAT columns: the first Fd of `chunks` [C, 8] into the columns of dense [R, Fd], the others into scalars [C - Fd, R].

    `file` is a descriptor. done [C] is set to whether each column was read.
    """
    num_rows, num_dense = dense.shape
    columns = np.empty((TILE, num_rows), np.float32)
    raw, buffer, words = np.empty(0, np.uint8), np.empty(0, np.uint8), np.empty(0, np.float32)
    starts = np.empty(TILE, np.int64)
    for first in range(0, len(chunks), TILE):
        count = min(TILE, len(chunks) - first)
        raw = _read_chunks(file, chunks[first : first + count], raw, starts)
        for c in range(count):
            chunk = chunks[first + c]
            done[first + c] = False
            if starts[c] >= 0 and chunk[CODEC] <= SNAPPY:
                data = raw[starts[c] : starts[c] + chunk[SIZE]]
                values = columns[c] if first + c < num_dense else scalars[first + c - num_dense]
                ok, buffer, words = decode_float_chunk(data, chunk[MAX_DEF], chunk[CODEC], values, buffer, words)
                done[first + c] = ok
        # transpose while the columns are still in the cache
        count = min(count, num_dense - first)
        for row in range(0, num_rows, TILE):
            stop = min(row + TILE, num_rows)
            for c in range(count):
                for r in range(row, stop):
                    dense[r, first + c] = columns[c, r]


@_kernel
def read_bags(file, chunks, firsts, ids, offsets, counts):  # type: ignore[no-untyped-def]
    """Read columns of ids: column c into ids [nnz] from firsts[c] on, and its offsets into offsets [C, R + 1].

    `file` is a descriptor. counts [C] is set to the number of ids of each column, -1 if it was not read.
    """
    raw, buffer, words = np.empty(0, np.uint8), np.empty(0, np.uint8), np.empty(0, np.int64)
    starts = np.empty(1, np.int64)
    for c in range(len(chunks)):
        chunk = chunks[c]
        counts[c] = -1
        raw = _read_chunks(file, chunks[c : c + 1], raw, starts)
        if starts[0] >= 0 and chunk[CODEC] <= SNAPPY:
            data, own = raw[: chunk[SIZE]], ids[firsts[c] : firsts[c + 1]]
            levels = (chunk[MAX_DEF], chunk[MAX_REP])
            counts[c], buffer, words = decode_bag_chunk(
                data, levels[0], levels[1], chunk[CODEC], own, offsets[c], buffer, words
            )
