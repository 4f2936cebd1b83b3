"""The Criteo line format as a compiled state machine over bytes.

A line is a label (0 or 1), 13 integers and 26 hexadecimal ids, separated by tabs; any of the 39 may be empty. A carriage
return before the newline is ignored. Letters: R rows; V the 39 values of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

NUM_INTEGERS = 13
NUM_IDS = 26
NUM_FIELDS = 1 + NUM_INTEGERS + NUM_IDS
MAX_DIGITS = 18
MAX_HEX_DIGITS = 16
MIN_LINE_BYTES = NUM_FIELDS + 1
"""A label, 39 tabs and a newline: shorter lines are malformed."""

WRONG_FIELDS, BAD_LABEL, BAD_INTEGER, BAD_ID = 1, 2, 3, 4
REASONS = {
    WRONG_FIELDS: f"wrong number of fields, expected {NUM_FIELDS}",
    BAD_LABEL: "label is not 0 or 1",
    BAD_INTEGER: "not an integer",
    BAD_ID: "not a hexadecimal id",
}

_TAB, _NEWLINE, _RETURN, _MINUS = 9, 10, 13, 45


@dataclass(frozen=True)
class Parsed:
    """The good rows of a chunk, and where the bad lines are."""

    labels: NDArray[np.int8]
    """[R]."""
    integers: NDArray[np.float32]
    """[13, R]."""
    ids: NDArray[np.int64]
    """[26, R]: 16 digits fill the sign bit too."""
    present: NDArray[np.bool_]
    """[39, R]: false where a field is empty."""
    lines: NDArray[np.int64]
    """[R]: which line of the chunk a row came from, from 0."""
    bad: NDArray[np.int64]
    """[bad lines, 5]: line of the chunk from 0, reason, field from 0 (how many fields there are for WRONG_FIELDS), and
    where the field (the line for WRONG_FIELDS) begins and ends in the chunk."""


def parse_lines(data: bytes, num_lines: int) -> Parsed:
    """Parse `num_lines` whole lines, each ending in a newline."""
    text = np.frombuffer(data, np.uint8)
    capacity = min(len(data) // MIN_LINE_BYTES + 1, num_lines)  # one more row always fits at a line's start
    labels = np.empty(capacity, np.int8)
    integers = np.empty((NUM_INTEGERS, capacity), np.float32)
    ids = np.empty((NUM_IDS, capacity), np.int64)
    present = np.empty((NUM_INTEGERS + NUM_IDS, capacity), np.bool_)
    lines = np.empty(capacity, np.int64)
    bad = np.empty((64, 5), np.int64)
    num_rows, num_bad = _parse(text, labels, integers, ids, present, lines, bad)
    if num_bad > len(bad):  # rare: parse again with space for all of them
        bad = np.empty((num_bad, 5), np.int64)
        num_rows, num_bad = _parse(text, labels, integers, ids, present, lines, bad)
    return Parsed(
        labels[:num_rows], integers[:, :num_rows], ids[:, :num_rows], present[:, :num_rows], lines[:num_rows], bad[:num_bad]
    )


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _parse(text, labels, integers, ids, present, lines, bad):  # type: ignore[no-untyped-def]
    """Fill the arrays from `text` uint8 [n]; returns the number of good rows and of bad lines."""
    hex_value = np.full(256, 255, np.uint8)
    for number in range(10):
        hex_value[48 + number] = number
    for number in range(10, 16):
        hex_value[55 + number] = number
        hex_value[87 + number] = number
    size = text.size
    at, line, row, num_bad = 0, 0, 0, 0
    while at < size:
        start = at
        reason = 0
        where = at
        field = 0
        # The label.
        byte = text[at]
        if byte in (48, 49) and text[at + 1] == _TAB:
            labels[row] = byte - 48
            at += 1
        else:
            reason = BAD_LABEL
        # The integers: `at` is the tab before the field.
        while reason == 0 and field < NUM_INTEGERS and text[at] == _TAB:
            at += 1
            where = at
            negative = text[at] == _MINUS
            if negative:
                at += 1
            first = at
            value = np.int64(0)
            digit = np.int64(text[at]) - 48
            while 0 <= digit <= 9:
                value = value * 10 + digit
                at += 1
                digit = np.int64(text[at]) - 48
            num_digits = at - first
            byte = text[at]
            ends = byte in (_TAB, _NEWLINE) or (byte == _RETURN and text[at + 1] == _NEWLINE)
            if not ends or num_digits > MAX_DIGITS or (negative and num_digits == 0):
                reason = BAD_INTEGER
            else:
                present[field, row] = num_digits > 0
                integers[field, row] = -value if negative else value
                field += 1
        while reason == 0 and NUM_INTEGERS <= field < NUM_INTEGERS + NUM_IDS and text[at] == _TAB:
            at += 1
            where = at
            code = np.uint64(0)
            digit_code = hex_value[text[at]]
            while digit_code != 255:
                code = (code << np.uint64(4)) | np.uint64(digit_code)
                at += 1
                digit_code = hex_value[text[at]]
            num_digits = at - where
            byte = text[at]
            ends = byte in (_TAB, _NEWLINE) or (byte == _RETURN and text[at + 1] == _NEWLINE)
            if not ends or num_digits > MAX_HEX_DIGITS:
                reason = BAD_ID
            else:
                present[field, row] = num_digits > 0
                ids[field - NUM_INTEGERS, row] = np.int64(code)
                field += 1
        if reason == 0 and field == NUM_INTEGERS + NUM_IDS:
            if text[at] == _RETURN and text[at + 1] == _NEWLINE:
                at += 1
            if text[at] == _NEWLINE:
                lines[row] = line
                row += 1
                line += 1
                at += 1
                continue
        # Malformed. The number of fields decides first, then the first field that is wrong.
        num_fields = 1
        at = start
        while text[at] != _NEWLINE:
            if text[at] == _TAB:
                num_fields += 1
            at += 1
        end = at
        if end > start and text[end - 1] == _RETURN:
            end -= 1
        if num_bad < bad.shape[0]:
            bad[num_bad, 0] = line
            if num_fields != NUM_FIELDS:
                bad[num_bad, 1] = WRONG_FIELDS
                bad[num_bad, 2] = num_fields
                bad[num_bad, 3] = start
                bad[num_bad, 4] = end
            else:
                stop = where
                while stop < end and text[stop] != _TAB:
                    stop += 1
                bad[num_bad, 1] = reason
                bad[num_bad, 2] = 0 if reason == BAD_LABEL else field + 1
                bad[num_bad, 3] = where
                bad[num_bad, 4] = stop
        num_bad += 1
        line += 1
        at += 1
    return row, num_bad
