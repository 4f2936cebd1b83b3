"""Text in chunks of whole lines, and the record of lines that could not be read.

The converters parse bytes with compiled code; what is here feeds it: a chunk ends with a newline, a line is never cut,
and memory is bounded whatever the file holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numba
import numpy as np
from numpy.typing import NDArray

from rowstead.data.write import OnBadRow
from rowstead.kernels.cpu.mix import mix64
from rowstead.spec.errors import DataError

CHUNK_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 20
"""No line of a known format comes near; one that is longer is malformed and never held in memory."""
NUM_SHOWN = 5
"""Skipped lines that are kept to be shown."""


@dataclass(frozen=True)
class Chunk:
    """Some whole lines of a file, each with a newline at its end."""

    data: bytes
    first_line: int
    """Number of the first line, from 1."""
    num_lines: int
    too_long: bool = False
    """The chunk stands for one line that is longer than MAX_LINE_BYTES, of which `data` is only the beginning."""


def chunks(stream: BinaryIO, chunk_bytes: int = CHUNK_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Chunk]:
    """Whole lines of `stream`, about `chunk_bytes` at a time; a last line without newline gets one."""
    line, rest, skipping = 1, b"", False
    while data := stream.read(chunk_bytes):
        if skipping:
            end = data.find(b"\n") + 1
            if not end:
                continue
            data, skipping, line = data[end:], False, line + 1
        data = rest + data
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        if end:
            whole = data[:end] if rest else data
            num_lines = whole.count(b"\n")
            yield Chunk(whole, line, num_lines)
            line += num_lines
        if len(rest) > max_line_bytes:
            yield Chunk(rest[:max_line_bytes], line, 1, too_long=True)
            rest, skipping = b"", True
    if rest:
        yield Chunk(rest + b"\n", line, 1)


@dataclass
class BadLines:
    """What to do about malformed lines: raises at the first one, or counts them by reason and keeps the first few."""

    on_bad_row: OnBadRow
    counts: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    def add(self, name: str, line: int, reason: str, detail: str) -> None:
        """One malformed line of the file `name`; `reason` is what is counted, `detail` says what was found."""
        text = f"{name}:line {line}: {reason} ({detail})"
        if self.on_bad_row == "error":
            raise DataError(f"{text}; fix it or pass --on-bad-row skip")
        self.counts[reason] += 1
        if len(self.first) < NUM_SHOWN:
            self.first.append(text)

    def count(self, reason: str, number: int) -> None:
        """More lines of a reason of which enough have been shown."""
        if number:
            self.counts[reason] += number


def shown(field_bytes: bytes) -> str:
    """Bytes of a field as they can be printed in a message: escaped where needed, cut where long."""
    text = repr(field_bytes[:40])[1:]
    return text + ("…" if len(field_bytes) > 40 else "")


@numba.njit(nogil=True, cache=True)
def _hash_pairs(first, second, out):  # type: ignore[no-untyped-def]
    for i in range(first.size):
        out[i] = mix64(np.int64(mix64(first[i])) ^ second[i])


def hashed_share(first: NDArray[np.int64], second: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """True for the pairs whose hash lies in the first `share` of all hashes: the same ones on every machine."""
    hashes = np.empty(first.size, np.uint64)
    _hash_pairs(first, second, hashes)
    return (hashes >> np.uint64(11)) < np.uint64(share * 2.0**53)


def check_share(eval_fraction: float) -> None:
    """A DataError unless `eval_fraction` is a share of rows that can be held out."""
    if not 0 <= eval_fraction < 1:
        raise DataError(f"eval_fraction must be at least 0 and below 1, got {eval_fraction}")
