"""Converts the official MovieLens archives (ml-100k, ml-1m, ml-latest and similar) to Parquet, in bounded memory.

Columns, the same for every archive, null where an archive does not have them:

| column | type | from |
|---|---|---|
| `label` | int8 | 1 where the rating is at least 4 |
| `rating` | float32 | 0.5 to 5 |
| `timestamp` | int64 | seconds since 1970, UTC |
| `hour`, `weekday` | int8 | of the timestamp, UTC; Monday is 0 |
| `user`, `item` | int64 | ids as the archive gives them |
| `gender`, `occupation`, `zip_prefix` | string | the user; the first three characters of the postal code |
| `age` | int16 | the user: years in ml-100k, the lower end of a range in ml-1m |
| `genres` | list of string | the item |
| `year` | float32 | the item: of its release, from the title |
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowstead.data.lines import (
    CHUNK_BYTES,
    MAX_LINE_BYTES,
    BadLines,
    Chunk,
    check_eval_fraction,
    chunks,
    format_bytes,
    select_by_hash,
)
from rowstead.data.movielens_archive import (
    Archive,
    ArchiveLayout,
    Items,
    Users,
    find_layout,
    open_archive,
    read_items,
    read_users,
)
from rowstead.data.write import (
    DEFAULT_ROWS_PER_FILE,
    DEFAULT_ROWS_PER_GROUP,
    OnBadRow,
    Progress,
    SplitWriter,
    Summary,
    check_splits_not_empty,
)
from rowstead.spec.errors import DataError

SCHEMA = pa.schema(
    [
        pa.field("label", pa.int8(), nullable=False),
        pa.field("rating", pa.float32(), nullable=False),
        pa.field("timestamp", pa.int64(), nullable=False),
        pa.field("hour", pa.int8(), nullable=False),
        pa.field("weekday", pa.int8(), nullable=False),
        pa.field("user", pa.int64(), nullable=False),
        pa.field("item", pa.int64(), nullable=False),
        pa.field("gender", pa.string()),
        pa.field("age", pa.int16()),
        pa.field("occupation", pa.string()),
        pa.field("zip_prefix", pa.string()),
        pa.field("genres", pa.list_(pa.string())),
        pa.field("year", pa.float32()),
    ]
)
POSITIVE_FROM = 4.0
"""Ratings of at least this are positive."""


def convert(
    source: str | os.PathLike[str],
    out_folder: str | os.PathLike[str],
    *,
    split: Literal["hash", "time"] = "hash",
    eval_fraction: float = 0.1,
    on_bad_row: OnBadRow = "error",
    rows_per_file: int = DEFAULT_ROWS_PER_FILE,
    rows_per_group: int = DEFAULT_ROWS_PER_GROUP,
    overwrite: bool = False,
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Summary:
    """Convert a MovieLens zip or its unpacked folder to Parquet files in `out_folder`.

    The evaluation split is a share `eval_fraction` of the ratings (0 for none): chosen by a hash of user and item (`hash`), or the
    latest ones (`time`; ratings of the same second stay together, so the share can be slightly larger).
    """
    check_eval_fraction(eval_fraction)
    with open_archive(source) as archive:
        layout = find_layout(archive)
        bad = BadLines(on_bad_row)
        users, items = read_users(archive, layout, bad), read_items(archive, layout, bad)
        by_time = split == "time" and eval_fraction > 0
        report = _Report(archive.size(layout.ratings) * (2 if by_time else 1), progress)
        with SplitWriter(
            out_folder, SCHEMA, rows_per_file=rows_per_file, rows_per_group=rows_per_group, overwrite=overwrite
        ) as writer:
            cut = _find_cut_time(archive, layout, eval_fraction, chunk_bytes, report) if by_time else None
            for ratings in _ratings(archive, layout, bad, chunk_bytes, report):
                ratings, user_rows, item_rows = _match(ratings, users, items, archive.label(layout.ratings), bad)
                table = _table(ratings, users, items, user_rows, item_rows)
                held = ratings.times >= cut if cut is not None else select_by_hash(ratings.users, ratings.items, eval_fraction)
                writer.write("train", table.filter(pa.array(~held)))
                writer.write("eval", table.filter(pa.array(held)))
            check_splits_not_empty(writer.num_rows(), eval_wanted=eval_fraction > 0)
        return writer.summary(num_bytes_read=archive.num_bytes, skipped=bad.counts, first_skipped=bad.first)


class _Report:
    """Reports progress in bytes of ratings read."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress:
            self._progress(min(self._done, self._total), self._total)


@dataclass(frozen=True)
class _Ratings:
    """Ratings, [R] each."""

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    values: NDArray[np.float32]
    times: NDArray[np.int64]
    lines: NDArray[np.int64]
    """Number of the line in its file, from 1."""

    def where(self, keep: NDArray[np.bool_]) -> _Ratings:
        return _Ratings(self.users[keep], self.items[keep], self.values[keep], self.times[keep], self.lines[keep])


_WRONG_FIELDS, _NOT_A_NUMBER, _OUT_OF_RANGE = 1, 2, 3
_REASONS = {
    _WRONG_FIELDS: "wrong number of fields, expected 4",
    _NOT_A_NUMBER: "not four numbers",
    _OUT_OF_RANGE: "rating outside 0.5 to 5, or time after the year 2106",
}


def _ratings(archive: Archive, layout: ArchiveLayout, bad: BadLines, chunk_bytes: int, report: _Report) -> Iterator[_Ratings]:
    """The ratings of an archive, chunk by chunk; malformed lines go to `bad`."""
    name = archive.label(layout.ratings)
    with archive.open(layout.ratings) as stream:
        for chunk in chunks(stream, chunk_bytes):
            report.advance(len(chunk.data))
            if chunk.too_long:
                bad.add(
                    name, chunk.first_line, "line too long", f"over {MAX_LINE_BYTES} bytes, begins {format_bytes(chunk.data)}"
                )
                continue
            data, first = chunk.data, chunk.first_line
            if layout.ratings_header and first == 1:
                data, first = _strip_header(name, chunk, layout.ratings_header), 2
            num_lines = chunk.num_lines - (first - chunk.first_line)
            yield _parse_ratings(data, first, num_lines, layout.separator, name, bad)


def _strip_header(name: str, chunk: Chunk, header: bytes) -> bytes:
    line, _, rest = chunk.data.partition(b"\n")
    if line.rstrip(b"\r").removeprefix(b"\xef\xbb\xbf") != header:
        raise DataError(f"{name}:line 1: expected the header {header.decode()}, found {format_bytes(line)}")
    return rest


def _parse_ratings(data: bytes, first_line: int, num_lines: int, separator: bytes, name: str, bad: BadLines) -> _Ratings:
    users, items, times, lines = (np.empty(num_lines, np.int64) for _ in range(4))
    values = np.empty(num_lines, np.float32)
    found = np.empty((num_lines, 4), np.int64)
    text = np.frombuffer(data, np.uint8)
    num_rows, num_bad = _parse(text, separator[0], len(separator), users, items, values, times, lines, found)
    for line, reason, start, stop in found[:num_bad].tolist():
        bad.add(name, first_line + line, _REASONS[reason], format_bytes(data[start:stop]))
    return _Ratings(users[:num_rows], items[:num_rows], values[:num_rows], times[:num_rows], first_line + lines[:num_rows])


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _parse(text, separator, width, users, items, values, times, lines, bad):  # type: ignore[no-untyped-def]
    """Fill [lines] arrays with `user SEP item SEP rating SEP time` from `text` uint8 [n], which ends in a newline.

    SEP is `width` times the byte `separator`. `bad` [lines, 4] gets line, reason, begin and end of malformed lines.
    """
    at, line, row, num_bad = 0, 0, 0, 0
    while at < text.size:
        start = at
        while text[at] != 10:
            at += 1
        next_line = at + 1
        stop = at - 1 if at > start and text[at - 1] == 13 else at
        at = start
        reason = 0
        field = 0
        while field < 4 and reason == 0:
            whole = np.int64(0)
            num_digits = 0
            while at < stop and 48 <= text[at] <= 57:
                whole = whole * 10 + (np.int64(text[at]) - 48)
                num_digits += 1
                at += 1
            number = np.float64(whole)
            if field == 2 and at < stop and text[at] == 46:
                at += 1
                scale = 0.1
                while at < stop and 48 <= text[at] <= 57:
                    number += scale * (np.float64(text[at]) - 48)
                    scale *= 0.1
                    at += 1
            if num_digits == 0 or num_digits > 18:
                reason = _NOT_A_NUMBER
            elif field == 0:
                users[row] = whole
            elif field == 1:
                items[row] = whole
            elif field == 2:
                values[row] = number
                if number < 0.5 or number > 5.0:
                    reason = _OUT_OF_RANGE
            else:
                times[row] = whole
                if whole >= 1 << 32:
                    reason = _OUT_OF_RANGE
            field += 1
            if field < 4 and reason == 0:
                for _ in range(width):
                    if at < stop and text[at] == separator:
                        at += 1
                    else:
                        reason = _NOT_A_NUMBER
        if reason == 0 and at != stop:
            reason = _NOT_A_NUMBER
        if reason == 0:
            lines[row] = line
            row += 1
        else:
            num_fields = 1
            at = start
            while at + width <= stop:
                matches = True
                for k in range(width):
                    matches = matches and text[at + k] == separator
                num_fields += matches
                at += width if matches else 1
            bad[num_bad, 0] = line
            bad[num_bad, 1] = reason if num_fields == 4 else _WRONG_FIELDS
            bad[num_bad, 2] = start
            bad[num_bad, 3] = stop
            num_bad += 1
        line += 1
        at = next_line
    return row, num_bad


def _match(
    ratings: _Ratings, users: Users | None, items: Items, name: str, bad: BadLines
) -> tuple[_Ratings, NDArray[np.int64], NDArray[np.int64]]:
    """The ratings whose user and item are in the archive, and the rows of both."""
    item_rows, keep = _find(items.ids, ratings.items)
    for i in np.flatnonzero(~keep).tolist():
        bad.add(name, int(ratings.lines[i]), "unknown item", f"{ratings.items[i]} is not in the movies file")
    user_rows = np.zeros(ratings.users.size, np.int64)
    if users is not None:
        user_rows, known = _find(users.ids, ratings.users)
        for i in np.flatnonzero(keep & ~known).tolist():
            bad.add(name, int(ratings.lines[i]), "unknown user", f"{ratings.users[i]} is not in the users file")
        keep &= known
    return ratings.where(keep), user_rows[keep], item_rows[keep]


def _find(ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Indices of `wanted` in the sorted `ids`, and whether each is present."""
    rows = np.minimum(np.searchsorted(ids, wanted), max(len(ids) - 1, 0))
    if not len(ids):
        return rows, np.zeros(wanted.size, np.bool_)
    return rows, ids[rows] == wanted


def _table(
    ratings: _Ratings, users: Users | None, items: Items, user_rows: NDArray[np.int64], item_rows: NDArray[np.int64]
) -> pa.Table:
    nothing = pa.nulls(ratings.users.size)
    person = users.fields.take(pa.array(user_rows)) if users is not None else None
    movie = items.fields.take(pa.array(item_rows))
    columns = {
        "label": (ratings.values >= POSITIVE_FROM).astype(np.int8),
        "rating": ratings.values,
        "timestamp": ratings.times,
        "hour": (ratings.times // 3600 % 24).astype(np.int8),
        "weekday": ((ratings.times // 86400 + 3) % 7).astype(np.int8),  # 1 January 1970 was a Thursday
        "user": ratings.users,
        "item": ratings.items,
        **{name: person[name] if person is not None else nothing for name in ("gender", "age", "occupation", "zip_prefix")},
        "genres": movie["genres"],
        "year": movie["year"],
    }
    return pa.table(columns).cast(SCHEMA)


def _find_cut_time(archive: Archive, layout: ArchiveLayout, fraction: float, chunk_bytes: int, report: _Report) -> int:
    """The time from which ratings are held out: the latest `fraction` of them, or slightly more."""
    quiet = BadLines("skip")  # the second pass reports them
    times = [part.times.astype(np.uint32) for part in _ratings(archive, layout, quiet, chunk_bytes, report)]
    everything = np.concatenate(times) if times else np.empty(0, np.uint32)
    del times
    cut = everything.size - round(everything.size * fraction)
    if cut >= everything.size:
        return 1 << 32
    everything.partition(cut)
    return int(everything[cut])
