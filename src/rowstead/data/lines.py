"""What the converters share: text in chunks of whole lines in bounded memory, malformed lines, and the choice of the evaluation split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from rowstead.data.hashing import mix_ids
from rowstead.data.write import OnBadRow, Progress
from rowstead.spec.errors import DataError

CHUNK_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 20
"""A longer line is malformed and never held in memory."""
NUM_SHOWN = 5
"""Skipped lines that a summary shows."""


@dataclass(frozen=True)
class Chunk:
    """Whole lines of a file, each ending in a newline."""

    data: bytes
    first_line: int
    """Number of the first line, from 1."""
    num_lines: int
    too_long: bool = False
    """The chunk is one line longer than MAX_LINE_BYTES, and `data` only its beginning."""


def chunks(stream: BinaryIO, chunk_bytes: int = CHUNK_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Chunk]:
    """Whole lines of `stream`, about `chunk_bytes` at a time; a newline is added to a last line without one."""
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
    """Raises at the first malformed line, or counts malformed lines by reason and keeps the first few."""

    on_bad_row: OnBadRow
    counts: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)

    def add(self, name: str, line: int, reason: str, detail: str) -> None:
        """Report a malformed line of file `name`; lines are counted by `reason`, `detail` is shown."""
        text = f"{name}:line {line}: {reason} ({detail})"
        if self.on_bad_row == "error":
            raise DataError(f"{text}; fix it or pass --on-bad-row skip")
        self.counts[reason] += 1
        if len(self.first) < NUM_SHOWN:
            self.first.append(text)


class LineReader:
    """Reads files in chunks of whole lines and reports progress over all of them."""

    def __init__(self, total_bytes: int, chunk_bytes: int, progress: Progress | None) -> None:
        self._total, self._chunk_bytes, self._progress = total_bytes, chunk_bytes, progress
        self._before = 0

    def read(self, name: str, stream: BinaryIO, bad: BadLines, position: Callable[[], int]) -> Iterator[Chunk]:
        """The chunks of one file; `position` says how many of its bytes were read. Lines that are too long go to `bad` and are empty here."""
        for chunk in chunks(stream, self._chunk_bytes):
            if self._progress:
                self._progress(min(self._before + position(), self._total), self._total)
            if chunk.too_long:
                detail = f"over {MAX_LINE_BYTES} bytes, begins {format_bytes(chunk.data)}"
                bad.add(name, chunk.first_line, "line too long", detail)
                chunk = replace(chunk, data=b"")
            yield chunk
        self._before += position()


def format_bytes(field_bytes: bytes) -> str:
    """Bytes of a field for a message: escaped, and truncated if long."""
    text = repr(field_bytes[:40])[1:]
    return text + ("…" if len(field_bytes) > 40 else "")


def select_by_hash(first: NDArray[np.int64], second: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """True for a share of the pairs, chosen by hash: the same ones on every machine."""
    hashes = mix_ids(mix_ids(first).view(np.int64) ^ second)
    return (hashes >> np.uint64(11)) < np.uint64(share * 2.0**53)


def check_eval_fraction(eval_fraction: float) -> None:
    """Raise a DataError unless `eval_fraction` is in [0, 1)."""
    if not 0 <= eval_fraction < 1:
        raise DataError(f"eval_fraction must be at least 0 and below 1, got {eval_fraction}")
