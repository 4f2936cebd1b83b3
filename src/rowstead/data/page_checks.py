"""Looks for damage in the pages of a column chunk, from their headers alone or with their bytes.

Parquet has checksums for the bytes of pages only. What headers say is compared with the footer, so that a page whose header was damaged is
refused as well where its file has checksums; without them only sizes are checked, since a reader would take memory for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rowstead.data import chunks
from rowstead.data.page_headers import (
    DATA_PAGE,
    DATA_PAGE_V2,
    ENCODING,
    HAS_CRC,
    IS_PACKED,
    PACKED,
    TYPE,
    UNPACKED,
    VALUES,
)
from rowstead.data.pages import MAX_PAGE_BYTES, PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY, Bytes, is_intact

SLACK_BYTES = 16 << 20
"""Pages may have so many bytes whatever the footer says: it is wrong in files of some writers, and so little does no harm."""
ChunkFields = Sequence[int] | NDArray[np.int64]
"""What is known of a column chunk, in the order of `chunks`."""
MAX_PAGE_IDS = MAX_PAGE_BYTES // 8
"""Ids of lists in one page: runs of equal ids take hardly any bytes."""
_ENCODINGS = {
    "PLAIN": PLAIN,
    "PLAIN_DICTIONARY": PLAIN_DICTIONARY,
    "RLE": 3,
    "DELTA_BINARY_PACKED": 5,
    "DELTA_LENGTH_BYTE_ARRAY": 6,
    "DELTA_BYTE_ARRAY": 7,
    "RLE_DICTIONARY": RLE_DICTIONARY,
    "BYTE_STREAM_SPLIT": 9,
}
_DICTIONARY_BITS = 1 << PLAIN_DICTIONARY | 1 << RLE_DICTIONARY
_OWN_BITS = 1 << PLAIN | _DICTIONARY_BITS


class DamagedColumnError(Exception):
    """A column chunk that cannot be read; the text names the column, if it is known, and says what is wrong with it."""

    def __init__(self, column: str | None, problem: str) -> None:
        super().__init__(problem if column is None else f"column `{column}`: {problem}")


@lru_cache
def encoding_bits(names: tuple[str, ...]) -> int:
    """The encodings of a column chunk in its footer, one bit each; both names of dictionary indices are one."""
    bits = sum(1 << _ENCODINGS[name] for name in set(names) & _ENCODINGS.keys())
    return bits | _DICTIONARY_BITS if bits & _DICTIONARY_BITS else bits


def find_problem(headers: NDArray[np.int64], row: ChunkFields, data: Bytes | None = None) -> str | None:
    """What is wrong with pages of these headers, of the column chunk `row`; None if nothing is.

    `data` are the bytes of a chunk that our decoder could not read.
    """
    if data is not None and len(data) < row[chunks.SIZE]:
        return "the file ends before its pages do"
    unpacked, limit = 0, int(row[chunks.UNPACKED_SIZE])
    for number, header in enumerate(headers):
        page = f"page {number}"
        if header[TYPE] < 0:
            return f"{page} has an unreadable header"
        unpacked += int(header[UNPACKED])
        if header[UNPACKED] > MAX_PAGE_BYTES:
            return f"{page} has {header[UNPACKED]:,} bytes when decompressed, and the limit is {MAX_PAGE_BYTES:,}; write smaller pages"
        if row[chunks.MAX_REP] > 0 and header[VALUES] > MAX_PAGE_IDS:
            return f"{page} has {header[VALUES]:,} ids, and the limit is {MAX_PAGE_IDS:,}; write smaller pages"
        if unpacked > max(limit, SLACK_BYTES):
            return f"its pages have {unpacked:,} bytes or more when decompressed, but the file's footer says {limit:,}"
        if (row[chunks.CODEC] == chunks.PLAIN or not header[IS_PACKED]) and header[PACKED] != header[UNPACKED]:
            return f"{page} is not compressed, but its header has two sizes"
        if data is not None and not is_intact(data, header):
            return f"{page} does not match its checksum"
    if not headers[:, HAS_CRC].any():
        return None
    if not headers[:, HAS_CRC].all():
        return f"page {np.flatnonzero(headers[:, HAS_CRC] == 0)[0]} has lost its checksum"
    values = headers[np.isin(headers[:, TYPE], (DATA_PAGE, DATA_PAGE_V2))]
    if values[:, VALUES].sum() != row[chunks.NUM_VALUES]:
        return f"its pages have {values[:, VALUES].sum():,} values, but the file's footer says {row[chunks.NUM_VALUES]:,}"
    bits = 0
    for encoding in set(values[:, ENCODING].tolist()):
        bits |= 1 << min(max(encoding, 0), 62)
    if bits & ~row[chunks.ENCODINGS]:
        return "a page has an encoding that the file's footer does not list"
    if data is not None and not bits & ~_OWN_BITS:
        return "its pages match their checksums, but not their headers"
    return None
