"""The Criteo line format as a compiled state machine over bytes.

A line is a label (0 or 1), 13 integers and 26 hexadecimal ids, separated by tabs; any of the 39 may be empty. A carriage
return before the newline is ignored. Letters: R rows; V the 39 values of a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from rowstead.data.lines import format_bytes

NUM_INTEGERS = 13
NUM_IDS = 26
NUM_FIELDS = 1 + NUM_INTEGERS + NUM_IDS
MAX_DIGITS = 18
MAX_HEX_DIGITS = 16
MIN_LINE_BYTES = NUM_FIELDS + 1
"""A label, 39 tabs and a newline: shorter lines are malformed."""

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
    """[bad lines, 3]: line of the chunk from 0, and where it begins and ends in the chunk."""


def parse_lines(data: bytes, num_lines: int) -> Parsed:
    """Parse `num_lines` whole lines, each ending in a newline."""
    text = np.frombuffer(data, np.uint8)
    capacity = min(len(data) // MIN_LINE_BYTES + 1, num_lines)  # one more row always fits at a line's start
    labels = np.empty(capacity, np.int8)
    integers = np.empty((NUM_INTEGERS, capacity), np.float32)
    ids = np.empty((NUM_IDS, capacity), np.int64)
    present = np.empty((NUM_INTEGERS + NUM_IDS, capacity), np.bool_)
    lines = np.empty(capacity, np.int64)
    bad = np.empty((num_lines, 3), np.int64)
    num_rows, num_bad = _parse(text, labels, integers, ids, present, lines, bad)
    return Parsed(
        labels[:num_rows], integers[:, :num_rows], ids[:, :num_rows], present[:, :num_rows], lines[:num_rows], bad[:num_bad]
    )


def explain(line: bytes) -> tuple[str, str]:
    """Why a line is bad, in general and in detail. The number of fields decides first, then the first field that is wrong."""
    line = line.removesuffix(b"\r")
    fields = line.split(b"\t")
    if len(fields) != NUM_FIELDS:
        detail = f"{len(fields)} in the line {format_bytes(line)}" if line else "the line is empty"
        return f"wrong number of fields, expected {NUM_FIELDS}", detail
    if fields[0] not in (b"0", b"1"):
        return "label is not 0 or 1", f"label is {format_bytes(fields[0])}"
    for i, field in enumerate(fields[1 : 1 + NUM_INTEGERS], 1):
        if not re.fullmatch(rb"(-?\d{1,%d})?" % MAX_DIGITS, field):
            return "not an integer", f"I{i} is {format_bytes(field)}"
    is_id = re.compile(rb"[\da-fA-F]{0,%d}" % MAX_HEX_DIGITS).fullmatch
    i, field = next((i, f) for i, f in enumerate(fields[1 + NUM_INTEGERS :], 1) if not is_id(f))
    hint = f", over {MAX_HEX_DIGITS} digits" if len(field) > MAX_HEX_DIGITS else ""
    return "not a hexadecimal id", f"C{i} is {format_bytes(field)}{hint}"


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
        field = 0
        # The label.
        byte = text[at]
        good = byte in (48, 49) and text[at + 1] == _TAB
        if good:
            labels[row] = byte - 48
            at += 1
        # The integers: `at` is the tab before the field.
        while good and field < NUM_INTEGERS and text[at] == _TAB:
            at += 1
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
            good = ends and num_digits <= MAX_DIGITS and not (negative and num_digits == 0)
            if good:
                present[field, row] = num_digits > 0
                integers[field, row] = -value if negative else value
                field += 1
        while good and NUM_INTEGERS <= field < NUM_INTEGERS + NUM_IDS and text[at] == _TAB:
            at += 1
            first = at
            code = np.uint64(0)
            digit_code = hex_value[text[at]]
            while digit_code != 255:
                code = (code << np.uint64(4)) | np.uint64(digit_code)
                at += 1
                digit_code = hex_value[text[at]]
            num_digits = at - first
            byte = text[at]
            ends = byte in (_TAB, _NEWLINE) or (byte == _RETURN and text[at + 1] == _NEWLINE)
            good = ends and num_digits <= MAX_HEX_DIGITS
            if good:
                present[field, row] = num_digits > 0
                ids[field - NUM_INTEGERS, row] = np.int64(code)
                field += 1
        if good and field == NUM_INTEGERS + NUM_IDS:
            if text[at] == _RETURN and text[at + 1] == _NEWLINE:
                at += 1
            good = text[at] == _NEWLINE
        else:
            good = False
        if good:
            lines[row] = line
            row += 1
        else:
            at = start
            while text[at] != _NEWLINE:
                at += 1
            bad[num_bad, 0], bad[num_bad, 1], bad[num_bad, 2] = line, start, at
            num_bad += 1
        line += 1
        at += 1
    return row, num_bad
