"""A whole row group of a local Parquet file as a `RawBlock`: plain columns by our own decoder, the others by pyarrow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowstead.data import chunks
from rowstead.data.block import RawBlock
from rowstead.data.buffer_pool import BufferPool
from rowstead.data.chunks import TILE
from rowstead.data.columns import Bags, ColumnReader, bags_of, floats_of, interleave
from rowstead.data.pages import CODECS, decode_bags, decode_floats

DECODED_BYTES = 512 << 20
"""What up to SHARING_THREADS threads together may hold of row groups being decoded at once; larger ones are streamed."""
SHARING_THREADS = 8
"""More threads hold as much each as these do: machines with many cores have more memory, and streaming takes twice the time."""

_CODES = {name: code for code, name in enumerate(CODECS)}
"""Numbers of codecs in a plan, in the order of CODECS: the first two are those that `chunks` unpacks."""
assert _CODES["UNCOMPRESSED"] == chunks.PLAIN and _CODES["SNAPPY"] == chunks.SNAPPY  # noqa: PT018


@dataclass(frozen=True)
class Leaf:
    """The one Parquet column behind a column of the log, of a kind that we decode ourselves."""

    index: int
    max_def: int
    max_rep: int


def plain_leaves(columns: ColumnReader, schema: pq.ParquetSchema) -> dict[str, Leaf]:
    """Those of `columns` that are float32, int64 or lists of int64 in files of this schema."""
    arrow = schema.to_arrow_schema()
    types = dict(zip(arrow.names, arrow.types, strict=True))
    floats = {*columns.dense, *filter(None, (columns.label, columns.weight, columns.true_p))}
    leaves = {}
    for index in range(len(schema)):
        leaf = schema.column(index)
        name = leaf.path if leaf.max_repetition_level == 0 else leaf.path.rsplit(".", 2)[0]  # NAME.list.element
        kind = types.get(name)
        if name in floats:
            fits = kind == pa.float32() and leaf.path == name and name not in columns.sparse
        else:
            value = kind.value_type if kind is not None and pa.types.is_list(kind) else kind
            fits = name in columns.sparse and value in (pa.int64(), pa.uint64()) and leaf.max_repetition_level <= 1
        if fits:
            leaves[name] = Leaf(index, leaf.max_definition_level, leaf.max_repetition_level)
    return leaves


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Where the columns of a row group are in its file: all that is needed to read it again and again, without its footer."""

    group: int
    num_rows: int
    total_bytes: int
    """Of all its columns, unpacked."""
    floats: NDArray[np.int64]
    """As `chunks.read_floats` wants them: dense columns, then label, weight and probability where they are asked for."""
    bags: NDArray[np.int64]
    """As `chunks.read_bags` wants them."""
    others: tuple[str, ...]
    """ColumnReader that are not ours to decode."""


def plan_group(columns: ColumnReader, metadata: pq.FileMetaData, group: int, leaves: dict[str, Leaf]) -> GroupPlan | None:
    """The plan of one row group of a file with this footer; None where it has no column that is ours to decode."""
    found = metadata.row_group(group)
    rows = {name: row for name, leaf in leaves.items() if (row := _chunk_row(found.column(leaf.index), leaf)) is not None}
    if not rows:
        return None
    nothing = (0,) * chunks.NUM_FIELDS

    def table(names: Iterable[str]) -> NDArray[np.int64]:
        return np.array([rows.get(name, nothing) for name in names], np.int64).reshape(-1, chunks.NUM_FIELDS)

    return GroupPlan(
        group=group,
        num_rows=found.num_rows,
        total_bytes=found.total_byte_size,
        floats=table([*columns.dense, *columns.scalars]),
        bags=table(columns.sparse),
        others=tuple(name for name in columns.names if name not in rows),
    )


def _chunk_row(chunk: pq.ColumnChunkMetaData, leaf: Leaf) -> tuple[int, ...] | None:
    """The fields of a column chunk in the order of `chunks`; None where its codec or its place is none that we know."""
    start, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    if dictionary is not None and chunk.has_dictionary_page:
        start = min(start, dictionary)
    size, num_values, codec = chunk.total_compressed_size, chunk.num_values, _CODES.get(chunk.compression)
    if codec is None or min(start, size, num_values) < 0:
        return None
    return (start, size, leaf.max_def, leaf.max_rep, num_values, codec)


def read_row_group(
    path: str,
    plan: GroupPlan,
    columns: ColumnReader,
    metadata: Callable[[], pq.FileMetaData],
    *,
    max_bytes: int,
    room: BufferPool,
) -> RawBlock | None:
    """The rows of one row group; None when it would take more than `max_bytes`, and so has to be streamed.

    `metadata` gives the footer, which only columns that are not ours to decode need. The rows' memory is from `room`.
    """
    num_rows, num_dense, num_sparse = plan.num_rows, len(columns.dense), len(columns.sparse)
    num_values = plan.bags[:, chunks.NUM_VALUES]
    if num_rows * (4 * num_dense + 8 * num_sparse) > max_bytes or 8 * num_values.sum() > max_bytes:
        return None
    largest = max(int(table[:, chunks.SIZE].max(initial=0)) for table in (plan.floats, plan.bags))
    if largest > max_bytes or (plan.others and plan.total_bytes > max_bytes):
        return None
    dense = room.empty((num_rows, num_dense), np.float32)
    scalars = room.empty((len(columns.scalars), num_rows), np.float32)
    # One array for all: the system hands out large ones in large pages, which are quicker to come by.
    firsts = np.concatenate([[0], np.cumsum(num_values)])
    ids, offsets = room.empty((int(firsts[-1]),), np.int64), room.empty((num_sparse, num_rows + 1), np.int64)
    done, counts = np.empty(len(plan.floats), np.bool_), np.empty(num_sparse, np.int64)
    with open(path, "rb", buffering=0) as file:
        chunks.read_floats(file.fileno(), plan.floats, dense, scalars, done)
        chunks.read_bags(file.fileno(), plan.bags, firsts, ids, offsets, counts)
        own = [ids[first : first + max(count, 0)] for first, count in zip(firsts.tolist(), counts.tolist(), strict=False)]
        bags = list(zip(own, offsets, strict=True))
        if not done.all() or (counts < 0).any():
            rest = _Rest(file.fileno(), path, plan, metadata)
            names = [*columns.dense, *columns.scalars]
            late = np.flatnonzero(~done[:num_dense])
            for first in range(0, len(late), TILE):
                places = late[first : first + TILE]
                interleave([rest.floats(names[place], place) for place in places.tolist()], dense, places)
            for place in np.flatnonzero(~done[num_dense:]).tolist():
                scalars[place] = rest.floats(columns.scalars[place], num_dense + place)
            for place in np.flatnonzero(counts < 0).tolist():
                bags[place] = rest.bags(columns.sparse[place], place, ids[firsts[place] : firsts[place + 1]])
    named = dict(zip(columns.scalars, scalars, strict=True))
    return RawBlock(
        dense=dense,
        ids=tuple(ids for ids, _ in bags),
        offsets=tuple(offsets for _, offsets in bags),
        labels=None if columns.label is None else named[columns.label],
        weights=None if columns.weight is None else named[columns.weight],
        true_p=None if columns.true_p is None else named[columns.true_p],
    )


class _Rest:
    """ColumnReader that could not be decoded with the others: page by page with pyarrow's codecs, or by pyarrow as a whole."""

    def __init__(self, file: int, path: str, plan: GroupPlan, metadata: Callable[[], pq.FileMetaData]) -> None:
        self._file, self._path, self._plan, self._metadata = file, path, plan, metadata
        self._scratch = np.empty(1 << 20, np.uint8)
        self._table = self._by_pyarrow(list(plan.others)) if plan.others else None

    def floats(self, name: str, place: int) -> NDArray[np.float32]:
        """Values [R] of the column in row `place` of the plan's floats."""
        row = self._plan.floats[place]
        data = self._chunk(row)
        values = None
        if data is not None:
            values = decode_floats(data, _codec_of(row), int(row[chunks.MAX_DEF]), self._plan.num_rows)
        return floats_of(self._column(name), name) if values is None else values

    def bags(self, name: str, place: int, room: NDArray[np.int64]) -> Bags:
        """Ids, in `room` where we decode them, and offsets of the column in row `place` of the plan's bags."""
        row = self._plan.bags[place]
        data = self._chunk(row)
        found = None
        if data is not None:
            levels = (int(row[chunks.MAX_DEF]), int(row[chunks.MAX_REP]))
            found = decode_bags(data, _codec_of(row), *levels, self._plan.num_rows, room)
        return bags_of(self._column(name), name) if found is None else found

    def _chunk(self, row: NDArray[np.int64]) -> NDArray[np.uint8] | None:
        size = int(row[chunks.SIZE])
        if size <= 0:
            return None
        if size > len(self._scratch):
            self._scratch = np.empty(2 * size, np.uint8)
        found = os.preadv(self._file, [self._scratch[:size].data], int(row[chunks.AT]))
        return self._scratch[:size] if found == size else None

    def _column(self, name: str) -> pa.ChunkedArray:
        return (self._table if self._table is not None and name in self._plan.others else self._by_pyarrow([name])).column(name)

    def _by_pyarrow(self, names: list[str]) -> pa.Table:
        with pq.ParquetFile(self._path, metadata=self._metadata()) as parquet:
            table = parquet.read_row_group(self._plan.group, columns=names, use_threads=False)
        if table.num_rows != self._plan.num_rows:
            raise pa.ArrowInvalid(f"{table.num_rows} rows of {', '.join(names)} where the footer says {self._plan.num_rows}")
        return table


def _codec_of(row: NDArray[np.int64]) -> str | None:
    """pyarrow's name of a chunk's codec."""
    return list(CODECS.values())[row[chunks.CODEC]]
