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
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from rowstead.data.lines import CHUNK_BYTES, BadLines, LineReader, check_eval_fraction, format_bytes, select_by_hash
from rowstead.data.movielens_archive import Archive, ArchiveLayout, Entities, find_layout, open_archive, read_items, read_users
from rowstead.data.write import DEFAULT_ROWS_PER_FILE, DEFAULT_ROWS_PER_GROUP, OnBadRow, Progress, SplitWriter, Summary
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
SHUFFLE_SEED = 1
"""The archives are sorted by user, which no window of training's own shuffling makes up for: rows are written in random order."""
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
    latest ones (`time`; ratings of the same second stay together, so the share can be slightly larger). The rows of a split are in random order.
    """
    check_eval_fraction(eval_fraction)
    with open_archive(source) as archive:
        layout = find_layout(archive)
        bad = BadLines(on_bad_row)
        users, items = read_users(archive, layout, bad), read_items(archive, layout, bad)
        by_time = split == "time" and eval_fraction > 0
        reader = LineReader(archive.size(layout.ratings) * (2 if by_time else 1), chunk_bytes, progress)
        with SplitWriter(
            out_folder,
            SCHEMA,
            rows_per_file=rows_per_file,
            rows_per_group=rows_per_group,
            overwrite=overwrite,
            shuffle_seed=SHUFFLE_SEED,
        ) as writer:
            cut = _find_cut_time(archive, layout, eval_fraction, reader) if by_time else None
            for ratings in _ratings(archive, layout, bad, reader):
                ratings, user_rows, item_rows = _match(ratings, users, items, archive.label(layout.ratings), bad)
                held = ratings.times >= cut if cut is not None else select_by_hash(ratings.users, ratings.items, eval_fraction)
                writer.write_by_mask(_table(ratings, users, items, user_rows, item_rows), held)
            writer.check_not_empty(eval_wanted=eval_fraction > 0)
        return writer.summary(num_bytes_read=archive.num_bytes, skipped=bad.counts, first_skipped=bad.first)


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


def _ratings(archive: Archive, layout: ArchiveLayout, bad: BadLines, reader: LineReader) -> Iterator[_Ratings]:
    """The ratings of an archive, chunk by chunk; malformed lines go to `bad`."""
    name = archive.label(layout.ratings)
    with archive.open(layout.ratings) as stream:
        for chunk in reader.read(name, stream, bad, stream.tell):
            data, first = chunk.data, chunk.first_line
            if layout.ratings_header and first == 1:
                header, _, data = data.partition(b"\n")
                first = 2
                if header.rstrip(b"\r").removeprefix(b"\xef\xbb\xbf") != layout.ratings_header:
                    expected = layout.ratings_header.decode()
                    raise DataError(f"{name}:line 1: expected the header {expected}, found {format_bytes(header)}")
            yield _parse_ratings(data, first, layout.separator, name, bad)


def _parse_ratings(data: bytes, first_line: int, separator: bytes, name: str, bad: BadLines) -> _Ratings:
    """Parse lines of `user SEP item SEP rating SEP time`."""
    is_rating = re.compile(rb"(?m)^\d{1,18}SEP\d{1,18}SEP\d{1,18}(?:\.\d+)?SEP\d{1,18}\r?$".replace(b"SEP", separator))
    lines = np.arange(first_line, first_line + data.count(b"\n"))
    good = is_rating.findall(data)
    if len(good) < lines.size:
        texts = data.split(b"\n")[:-1]
        keep = np.array([is_rating.fullmatch(text) is not None for text in texts])
        for i in np.flatnonzero(~keep).tolist():
            text = texts[i].removesuffix(b"\r")
            reason = "not four numbers" if text.count(separator) == 3 else "wrong number of fields, expected 4"
            bad.add(name, int(lines[i]), reason, format_bytes(text))
        lines = lines[keep]
    if not good:
        nothing = np.empty(0, np.int64)
        return _Ratings(nothing, nothing, nothing.astype(np.float32), nothing, nothing)
    table = csv.read_csv(
        pa.BufferReader(b"\n".join(good).replace(separator, b"\t")),
        read_options=csv.ReadOptions(column_names=["user", "item", "rating", "time"], use_threads=False),
        parse_options=csv.ParseOptions(delimiter="\t"),
        convert_options=csv.ConvertOptions(
            column_types={"user": pa.int64(), "item": pa.int64(), "rating": pa.float32(), "time": pa.int64()}
        ),
    )
    users, items, values, times = (column.to_numpy() for column in table.columns)
    ratings = _Ratings(users, items, values, times, lines)
    keep = (ratings.values >= 0.5) & (ratings.values <= 5.0) & (ratings.times < 1 << 32)
    for i in np.flatnonzero(~keep).tolist():
        reason = "rating outside 0.5 to 5, or time after the year 2106"
        bad.add(name, int(ratings.lines[i]), reason, format_bytes(good[i].removesuffix(b"\r")))
    return ratings.where(keep)


def _match(
    ratings: _Ratings, users: Entities | None, items: Entities, name: str, bad: BadLines
) -> tuple[_Ratings, NDArray[np.int64], NDArray[np.int64]]:
    """The ratings whose user and item are in the archive, and the rows of both."""
    item_rows = items.find(ratings.items)
    user_rows = np.zeros_like(item_rows) if users is None else users.find(ratings.users)
    keep = np.ones(item_rows.size, np.bool_)
    for what, file, ids, rows in (("item", "movies", ratings.items, item_rows), ("user", "users", ratings.users, user_rows)):
        for i in np.flatnonzero(keep & (rows < 0)).tolist():
            bad.add(name, int(ratings.lines[i]), f"unknown {what}", f"{ids[i]} is not in the {file} file")
        keep &= rows >= 0
    return ratings.where(keep), user_rows[keep], item_rows[keep]


def _table(
    ratings: _Ratings, users: Entities | None, items: Entities, user_rows: NDArray[np.int64], item_rows: NDArray[np.int64]
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


def _find_cut_time(archive: Archive, layout: ArchiveLayout, fraction: float, reader: LineReader) -> int:
    """The time from which ratings are held out: the latest `fraction` of them, or slightly more."""
    quiet = BadLines("skip")  # the second pass reports them
    times = [part.times.astype(np.uint32) for part in _ratings(archive, layout, quiet, reader)]
    everything = np.concatenate([np.empty(0, np.uint32), *times])
    cut = everything.size - round(everything.size * fraction)
    if cut >= everything.size:
        return 1 << 32
    everything.partition(cut)
    return int(everything[cut])
