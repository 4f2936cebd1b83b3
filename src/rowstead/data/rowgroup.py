"""Decodes a whole row group of a local Parquet file: plain columns by our own decoder, the others by pyarrow.

Both check the checksums of pages, and the headers of pages are checked before pyarrow reads them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowstead.data import chunks
from rowstead.data.block import RawBlock
from rowstead.data.buffer_pool import BufferPool
from rowstead.data.chunks import TILE
from rowstead.data.column_values import Bags, Column
from rowstead.data.columns import ColumnReader, ColumnValues, interleave
from rowstead.data.page_checks import DamagedColumnError, encoding_bits, find_problem
from rowstead.data.page_headers import page_headers
from rowstead.data.pages import CODECS, Bytes, decode_bags, decode_floats

DECODED_BYTES = 512 << 20
"""Memory for row groups being decoded, shared by up to SHARING_THREADS threads; larger row groups are streamed."""
MAX_DEF = 3
"""The largest definition level of a list: null, empty, with a null, with a value."""
SHARING_THREADS = 8
"""More threads do not reduce each thread's share: machines with many cores have more memory, and streaming takes twice the time."""

MAX_OFFSET = 1 << 48
"""No file is larger; arithmetic on larger numbers could overflow."""
_CODES = {name: code for code, name in enumerate(CODECS)}
"""Codec numbers in a plan, in the order of CODECS; `chunks` decompresses the first two."""
assert _CODES["UNCOMPRESSED"] == chunks.PLAIN and _CODES["SNAPPY"] == chunks.SNAPPY  # noqa: PT018


@dataclass(frozen=True)
class Leaf:
    """The Parquet leaf of a column."""

    index: int
    max_def: int
    max_rep: int
    physical_type: str
    is_plain: bool
    """Whether our decoder supports it."""


def column_name(leaf: pq.ColumnSchema) -> str:
    """The column that a Parquet leaf belongs to; the leaf of a list is `NAME.list.element`."""
    path: str = leaf.path
    return path if leaf.max_repetition_level == 0 else path.rsplit(".", 2)[0]


def find_leaves(columns: ColumnReader, schema: pq.ParquetSchema) -> dict[str, Leaf]:
    """The columns in files of this schema; those that are float32, int64 or list<int64> are plain."""
    arrow = schema.to_arrow_schema()
    types = dict(zip(arrow.names, arrow.types, strict=True))
    floats, wanted = {*columns.dense, *columns.scalars.values()}, frozenset(columns.names)
    leaves = {}
    for index in range(len(schema)):
        leaf = schema.column(index)
        name = column_name(leaf)
        if name not in wanted:
            continue
        kind = types.get(name)
        if name in floats:
            fits = kind == pa.float32() and leaf.path == name and name not in columns.sparse
        else:
            value = kind.value_type if kind is not None and pa.types.is_list(kind) else kind
            fits = name in columns.sparse and value in (pa.int64(), pa.uint64()) and leaf.max_repetition_level <= 1
        max_def, max_rep = leaf.max_definition_level, leaf.max_repetition_level
        leaves[name] = Leaf(index, max_def, max_rep, leaf.physical_type, is_plain=fits and max_def <= MAX_DEF)
    return leaves


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Where the columns of a row group are in its file, so that it can be read repeatedly without its footer."""

    group: int
    num_rows: int
    floats: NDArray[np.int64]
    """Chunks for `chunks.read_floats`: dense columns, then label, weight and true probability where selected."""
    bags: NDArray[np.int64]
    """Chunks for `chunks.read_bags`."""
    others: dict[str, tuple[int, ...]]
    """Columns for pyarrow, and their chunks."""


def plan_group(columns: ColumnReader, metadata: pq.FileMetaData, group: int, leaves: Mapping[str, Leaf]) -> GroupPlan | None:
    """Plan one row group of a file with this footer; None if it has no column for our decoder.

    A column whose chunk cannot be where the footer says is a DamagedColumnError.
    """
    found = metadata.row_group(group)
    all_chunks = find_chunks(metadata, group, leaves)
    rows = {name: row for name, row in all_chunks.items() if leaves[name].is_plain and row[chunks.CODEC] >= 0}
    if not rows:
        return None
    nothing = (0,) * chunks.NUM_FIELDS

    def table(names: Iterable[str]) -> NDArray[np.int64]:
        return np.array([rows.get(name, nothing) for name in names], np.int64).reshape(-1, chunks.NUM_FIELDS)

    return GroupPlan(
        group=group,
        num_rows=found.num_rows,
        floats=table([*columns.dense, *columns.scalars.values()]),
        bags=table(columns.sparse),
        others={name: row for name, row in all_chunks.items() if name not in rows},
    )


def find_chunks(metadata: pq.FileMetaData, group: int, leaves: Mapping[str, Leaf]) -> dict[str, tuple[int, ...]]:
    """The fields of each column's chunk in the order of `chunks`, with codec -1 if it is not supported.

    A chunk that cannot be as the footer says is a DamagedColumnError.
    """
    found = metadata.row_group(group)
    num_rows = found.num_rows
    rows: dict[str, tuple[int, ...]] = {}
    for name, leaf in leaves.items():
        chunk = found.column(leaf.index)
        start, num_values = chunk_start(chunk), chunk.num_values
        size, unpacked = chunk.total_compressed_size, chunk.total_uncompressed_size
        sizes = (start, size, unpacked, num_values)
        if min(sizes) < 0 or max(sizes) > MAX_OFFSET:
            raise DamagedColumnError(name, "the file's footer has an impossible offset or size")
        if chunk.physical_type != leaf.physical_type:
            raise DamagedColumnError(name, f"the file's footer says {leaf.physical_type} and {chunk.physical_type}")
        if leaf.max_rep == 0 and num_values != num_rows:
            raise DamagedColumnError(name, f"the file's footer says {num_values:,} values and {num_rows:,} rows")
        codec = _CODES.get(chunk.compression, -1)
        encodings = encoding_bits(chunk.encodings)
        rows[name] = (start, size, leaf.max_def, leaf.max_rep, num_values, codec, unpacked, encodings)
    return rows


def check_page_headers(path: str, rows: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a DamagedColumnError for the first of these columns of a local file with pages that pyarrow should not read."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for name, row in rows.items():
            if row[chunks.AT] + row[chunks.SIZE] > size:
                raise DamagedColumnError(name, "the file ends before its pages do")
            problem = find_problem(chunks.read_page_headers(file.fileno(), row[chunks.AT], row[chunks.SIZE]), row)
            if problem is not None:
                raise DamagedColumnError(name, problem)


def chunk_start(chunk: pq.ColumnChunkMetaData) -> int:
    """Where a column chunk begins in its file."""
    start, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
    return min(start, dictionary) if dictionary is not None and chunk.has_dictionary_page else start


def read_row_group(
    path: str,
    plan: GroupPlan,
    columns: ColumnReader,
    metadata: Callable[[], pq.FileMetaData],
    *,
    constants: Mapping[str, pa.Scalar] = MappingProxyType({}),
    max_bytes: int,
    buffers: BufferPool,
) -> RawBlock | None:
    """Decode one row group; None if it needs more than `max_bytes` and has to be streamed.

    `metadata` reads the footer, which only pyarrow's columns need. `constants` are columns that the file does not have, with their
    value in every row. The rows' memory comes from `buffers`.
    """
    num_rows, num_dense, num_sparse = plan.num_rows, len(columns.dense), len(columns.sparse)
    num_values = plan.bags[:, chunks.NUM_VALUES]
    if num_rows * (4 * num_dense + 8 * num_sparse) > max_bytes or 8 * num_values.sum() > max_bytes:
        return None
    # Levels and dictionaries can take as much as the values, not more.
    if any(table[:, chunks.SIZE].sum() > 2 * max_bytes for table in (plan.floats, plan.bags)):
        return None
    if sum(row[chunks.UNPACKED_SIZE] for row in plan.others.values()) > max_bytes:
        return None
    dense = buffers.empty((num_rows, num_dense), np.float32)
    scalars = buffers.empty((len(columns.scalars), num_rows), np.float32)
    # One array for all columns: large allocations get huge pages.
    firsts = np.concatenate([[0], np.cumsum(num_values)])
    ids, offsets = buffers.empty((int(firsts[-1]),), np.int64), buffers.empty((num_sparse, num_rows + 1), np.int64)
    done, counts = np.empty(len(plan.floats), np.bool_), np.empty(num_sparse, np.int64)
    with open(path, "rb", buffering=0) as file:
        chunks.read_floats(file.fileno(), plan.floats, dense, scalars, done)
        chunks.read_bags(file.fileno(), plan.bags, firsts, ids, offsets, counts)
        own = [ids[first : first + max(count, 0)] for first, count in zip(firsts.tolist(), counts.tolist(), strict=False)]
        bags = list(zip(own, offsets, strict=True))
        if not done.all() or (counts < 0).any():
            rest = _OtherColumns(file.fileno(), path, plan, columns, metadata, constants)
            late = np.flatnonzero(~done[:num_dense])
            for first in range(0, len(late), TILE):
                tile = late[first : first + TILE]
                interleave([rest.floats(i) for i in tile.tolist()], dense, tile)
            for i in np.flatnonzero(~done[num_dense:]).tolist():
                scalars[i] = rest.floats(num_dense + i)
            for i in np.flatnonzero(counts < 0).tolist():
                bags[i] = rest.bags(i, ids[firsts[i] : firsts[i + 1]])
    return columns.block_of(dense, bags, dict(zip(columns.scalars, scalars, strict=True)))


class _OtherColumns:
    """Columns that `chunks` did not decode: page by page with pyarrow's codecs, or as a whole by pyarrow."""

    def __init__(
        self,
        file: int,
        path: str,
        plan: GroupPlan,
        columns: ColumnReader,
        metadata: Callable[[], pq.FileMetaData],
        constants: Mapping[str, pa.Scalar],
    ) -> None:
        self._file, self._path, self._plan, self._metadata = file, path, plan, metadata
        self._constants = constants
        self._scratch = np.empty(1 << 20, np.uint8)
        check_page_headers(path, plan.others)
        self._table = self._by_pyarrow(list(plan.others)) if plan.others else None
        self._values = ColumnValues(columns, self._column)
        floats = dict(zip([*columns.dense, *columns.scalars.values()], plan.floats, strict=True))
        self._rows = floats | dict(zip(columns.sparse, plan.bags, strict=True))
        """The chunk of each column."""

    def floats(self, index: int) -> NDArray[np.float32]:
        """Values [R] of the column at `index` of the plan's floats."""
        row, values = self._plan.floats[index], np.empty(self._plan.num_rows, np.float32)
        return (
            values
            if decode_floats(self._chunk(row), _codec_of(row), row[chunks.MAX_DEF], values)
            else self._values.floats(index)
        )

    def bags(self, index: int, ids: NDArray[np.int64]) -> Bags:
        """Ids (in `ids` if our decoder reads them) and offsets of the column at `index` of the plan's bags."""
        row, offsets = self._plan.bags[index], np.empty(self._plan.num_rows + 1, np.int64)
        levels = (row[chunks.MAX_DEF], row[chunks.MAX_REP])
        count = decode_bags(self._chunk(row), _codec_of(row), *levels, ids, offsets)
        return (ids[:count], offsets) if count >= 0 else self._values.bags(index)

    def _chunk(self, row: NDArray[np.int64]) -> Bytes:
        """The bytes of a column chunk, fewer if the file ends before; none for a column that is pyarrow's."""
        size = int(row[chunks.SIZE])
        if size > len(self._scratch):
            self._scratch = np.empty(2 * size, np.uint8)
        found = os.preadv(self._file, [self._scratch[:size].data], int(row[chunks.AT])) if size else 0
        return self._scratch[:found]

    def _column(self, name: str) -> Column:
        """A column by pyarrow; a DamagedColumnError if it is damaged rather than unknown to our decoder."""
        if name in self._constants:
            return pa.repeat(self._constants[name], self._plan.num_rows)
        if self._table is not None and name in self._plan.others:
            return self._table.column(name)
        row = self._rows[name]
        chunk = self._chunk(row)
        problem = find_problem(page_headers(chunk), row, chunk)
        if problem is not None:
            raise DamagedColumnError(name, problem)
        return self._by_pyarrow([name]).column(name)

    def _by_pyarrow(self, names: list[str]) -> pa.Table:
        with pq.ParquetFile(self._path, metadata=self._metadata(), page_checksum_verification=True) as parquet:
            table = parquet.read_row_group(self._plan.group, columns=names, use_threads=False)
        if table.num_rows != self._plan.num_rows:
            raise pa.ArrowInvalid(f"{', '.join(names)}: {table.num_rows} rows, but the footer says {self._plan.num_rows}")
        return table


def _codec_of(row: NDArray[np.int64]) -> str | None:
    """pyarrow's name for a chunk's codec."""
    return list(CODECS.values())[row[chunks.CODEC]]
