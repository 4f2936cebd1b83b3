"""A whole row group of a local Parquet file as a `RawBlock`: plain columns by our own decoder, the others by pyarrow."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowstead.data.block import RawBlock
from rowstead.data.columns import Bags, Columns, bags_of, floats_of
from rowstead.data.pages import CODECS, decode_bags, decode_floats

DECODED_BYTES = 512 << 20
"""What up to SHARING_THREADS threads together may hold of row groups being decoded at once; larger ones are streamed."""
SHARING_THREADS = 8
"""More threads hold as much each as these do: machines with many cores have more memory, and streaming takes twice the time."""


@dataclass(frozen=True)
class Leaf:
    """The one Parquet column behind a column of the log, of a kind that we decode ourselves."""

    index: int
    max_def: int
    max_rep: int


def plain_leaves(columns: Columns, metadata: pq.FileMetaData) -> dict[str, Leaf]:
    """Those of `columns` that are float32, int64 or lists of int64 in a file with this footer."""
    schema = metadata.schema
    types = dict(zip(schema.to_arrow_schema().names, schema.to_arrow_schema().types, strict=True))
    floats = {*columns.dense, *filter(None, (columns.label, columns.weight, columns.true_p))}
    leaves = {}
    for index in range(metadata.num_columns):
        leaf = schema.column(index)
        name = leaf.path if leaf.max_repetition_level == 0 else leaf.path.rsplit(".", 2)[0]  # NAME.list.element
        kind = types.get(name)
        if name in floats:
            fits = kind == pa.float32() and leaf.path == name and name not in columns.sparse
        else:
            value = kind.value_type if kind is not None and pa.types.is_list(kind) else kind
            fits = name in columns.sparse and value in (pa.int64(), pa.uint64()) and leaf.max_repetition_level <= 1
        if fits and _known_codec(metadata, index):
            leaves[name] = Leaf(index, leaf.max_definition_level, leaf.max_repetition_level)
    return leaves


def _known_codec(metadata: pq.FileMetaData, index: int) -> bool:
    """Whether we can unpack a column; files use one codec a column throughout, so the first row group tells."""
    return metadata.num_row_groups == 0 or metadata.row_group(0).column(index).compression in CODECS


def read_row_group(
    path: str, metadata: pq.FileMetaData, group: int, columns: Columns, leaves: dict[str, Leaf], *, max_bytes: int
) -> RawBlock | None:
    """The rows of one row group; None when it would take more than `max_bytes`, and so has to be streamed."""
    chunks = metadata.row_group(group)
    num_rows = chunks.num_rows
    if num_rows * (4 * len(columns.dense) + 8 * len(columns.sparse)) > max_bytes:
        return None
    counts = [chunks.column(leaves[name].index).num_values if name in leaves else 0 for name in columns.sparse]
    others = [name for name in columns.names if name not in leaves]
    if 8 * sum(counts) > max_bytes or (others and chunks.total_byte_size > max_bytes):
        return None
    # One array for all: the system hands out large ones in large pages, which are quicker to come by.
    ids = np.empty(sum(counts), np.int64)
    room = dict(zip(columns.sparse, np.split(ids, np.cumsum(counts)[:-1]), strict=True)) if counts else {}

    def by_pyarrow(names: list[str]) -> pa.Table:
        with pq.ParquetFile(path, metadata=metadata) as parquet:
            return parquet.read_row_group(group, columns=names, use_threads=False)

    table = by_pyarrow(others) if others else None
    with open(path, "rb", buffering=0) as file:
        scratch = np.empty(1 << 20, np.uint8)

        def chunk_of(leaf: Leaf) -> tuple[pq.ColumnChunkMetaData, NDArray[np.uint8]] | None:
            nonlocal scratch
            chunk = chunks.column(leaf.index)
            size, start = chunk.total_compressed_size, chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
                start = min(start, chunk.dictionary_page_offset)
            if chunk.compression not in CODECS or size < 0:
                return None
            if size > len(scratch):
                scratch = np.empty(2 * size, np.uint8)
            found = os.preadv(file.fileno(), [scratch[:size].data], start)
            return (chunk, scratch[:size]) if found == size else None

        def column(name: str) -> pa.ChunkedArray:
            return (by_pyarrow([name]) if table is None or name in leaves else table).column(name)

        def floats(name: str) -> NDArray[np.float32]:
            found = chunk_of(leaves[name]) if name in leaves else None
            values = decode_floats(found[1], CODECS[found[0].compression], leaves[name].max_def, num_rows) if found else None
            return floats_of(column(name), name) if values is None else values

        def bags(name: str) -> Bags:
            found = chunk_of(leaves[name]) if name in leaves else None
            if found:
                chunk, data = found
                leaf = leaves[name]
                decoded = decode_bags(data, CODECS[chunk.compression], leaf.max_def, leaf.max_rep, num_rows, room[name])
                if decoded is not None:
                    return decoded
            return bags_of(column(name), name)

        return columns.assemble(num_rows, floats=floats, bags=bags)
