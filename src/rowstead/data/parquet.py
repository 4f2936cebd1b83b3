"""`ParquetLog`: one split of a log in Parquet files, decoded to raw rows by threads, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial

import pyarrow as pa
import pyarrow.parquet as pq

from rowstead.data import fetch, rowgroup
from rowstead.data.block import LogPiece, RawBlock
from rowstead.data.buffer_pool import BufferPool
from rowstead.data.column_values import ColumnError
from rowstead.data.columns import ColumnReader
from rowstead.data.fetch import RowGroupFetcher, plan_requests
from rowstead.data.file_log import FileLog, Streams
from rowstead.data.files import LogFile
from rowstead.data.footers import Fingerprint, Footers, Range, first_line
from rowstead.data.page_checks import DamagedColumnError
from rowstead.data.row_order import Span
from rowstead.data.rowgroup import (
    GroupPlan,
    check_page_headers,
    chunk_start,
    column_name,
    find_chunks,
    find_leaves,
    plan_group,
    read_row_group,
)
from rowstead.spec.data import ParquetSpec
from rowstead.spec.errors import DataError
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec

PIECE_BYTES = 32 << 20
"""About this much is decoded at a time by one thread: large enough that the cost of a call is small."""
BUFFER_BYTES = 64 << 10
"""Read of a local column at a time, so that a row group does not have to fit in memory."""
STREAMED_BYTES = 64 << 20
"""Read of all columns of a remote row group at a time, where it is streamed."""
MAX_ROWS = 1 << 48
"""A footer that says more is damaged."""
PLANS = 1024
"""Row groups whose decoding plans are cached: some 40 kB each with 800 columns."""
COPY_ROWS = 8192
"""Rows that are copied at a time."""


class ParquetLog(FileLog):
    """One split of a log in Parquet files, as raw rows."""

    @classmethod
    def read_file_schema(cls, spec: ParquetSpec, file: LogFile) -> pa.Schema:
        return Footers().read_metadata(file).schema.to_arrow_schema()

    def _open_files(self) -> None:
        self._names = frozenset(self.columns.names)
        self._footers = Footers()
        self._metadata = lru_cache(maxsize=16)(lambda file: self._footers.read_metadata(self.files[file]))
        self._leaves = lru_cache(maxsize=16)(lambda file: find_leaves(self.columns, self._metadata(file).schema))
        self._plan = lru_cache(maxsize=PLANS)(self._plan_group)
        self._requests = lru_cache(maxsize=PLANS)(self._plan_requests)

    @property
    def fingerprints(self) -> dict[str, Fingerprint]:
        found = self._footers.fingerprints  # in the order in which threads opened the files
        return {file.path: found[file.path] for file in self.files if file.path in found}

    def _streams(self, spans: Sequence[Span], check: bool) -> tuple[Streams, Callable[[], None]]:
        # With fewer row groups than threads, the columns of a group are decoded in parallel instead.
        split_columns = self.threads > 1 and len(spans) < self.threads
        buffers = BufferPool()
        fetcher = RowGroupFetcher([partial(self._wanted, span) for span in spans])
        streams: Streams = [
            partial(self._decode, span, self._local_copy(span, number, fetcher), split_columns, check, buffers)
            for number, span in enumerate(spans)
        ]
        return streams, fetcher.close

    def _local_copy(self, span: Span, number: int, fetcher: RowGroupFetcher) -> AbstractContextManager[str | None]:
        """Path of a local file with the columns of a row group; None if there is none."""
        file = self.files[span.file]
        return nullcontext(file.path) if file.is_local else fetcher.fetched(number)

    def _wanted(self, span: Span) -> tuple[LogFile, Sequence[Range]] | None:
        """What to fetch of a remote row group before it is decoded; None if it is better streamed."""
        requests = self._requests(span.file, span.group) if self._is_most_of_group(self._covering(span)) else None
        return None if requests is None else (self.files[span.file], requests)

    def _is_most_of_group(self, span: Span) -> bool:
        return 2 * span.num_rows >= self._group_rows[span.file][span.group]

    def _plan_requests(self, file: int, group: int) -> Sequence[Range] | None:
        if self.files[file].is_local:
            return None
        metadata = self._metadata(file)
        names = [column_name(metadata.schema.column(i)) for i in range(len(metadata.schema))]
        chunks = [metadata.row_group(group).column(i) for i, name in enumerate(names) if name in self._names]
        ranges = [(start := chunk_start(chunk), start + chunk.total_compressed_size) for chunk in chunks]
        size = self.files[file].size
        if not self._names.issubset([*names, *self.partitions[file]]) or any(
            not 0 <= start <= stop <= size for start, stop in ranges
        ):
            return None
        requests = plan_requests(ranges)
        return requests if sum(stop - start for start, stop in requests) <= fetch.FETCHED_BYTES // 2 else None

    def _decode(
        self, span: Span, local_copy: AbstractContextManager[str | None], split_columns: bool, check: bool, buffers: BufferPool
    ) -> Iterator[LogPiece]:
        file = self.files[span.file]
        first_row = sum(self._group_rows[span.file][: span.group])
        chosen, span = self._rows_of(span), self._covering(span)
        try:
            with local_copy as path:
                self._footers.check_unchanged(file)
                try:
                    whole = None if path is None else self._whole_group(path, span, buffers)
                    if whole is None:
                        for at, block in self._stream(path, span, split_columns):
                            yield self._piece(block, file, first_row, at, chosen, check)
                except (pa.ArrowException, OSError, MemoryError) as error:
                    self._footers.check_unchanged(file)
                    raise self._find_damage(path, span, error) from None
                self._footers.check_unchanged(file)
        except ColumnError as error:
            raise DataError(f"`{file.path}`: {error}") from None
        except DamagedColumnError as error:
            raise DataError(
                f"`{file.path}`: row group {span.group} cannot be read: {error}. Copy the file again, or write it anew"
            ) from None
        if whole is not None:
            yield self._piece(whole.slice(span.start, span.stop), file, first_row, span.start, chosen, check)

    def _find_damage(self, path: str | None, span: Span, error: Exception) -> DamagedColumnError:
        """Which column of a row group pyarrow could not read, given its error for some of them."""
        for name in self._names - self.constants(span.file).keys():
            try:
                with self._open_streamed(path, span) as parquet:
                    for batch in parquet.iter_batches(
                        self._piece_rows, row_groups=[span.group], columns=[name], use_threads=False
                    ):
                        batch.validate(full=True)
            except (pa.ArrowException, OSError, MemoryError) as own:
                return DamagedColumnError(name, first_line(own))
        return DamagedColumnError(None, first_line(error))

    def _stream(self, path: str | None, span: Span, split_columns: bool) -> Iterator[tuple[int, RawBlock]]:
        """The rows of a span by pyarrow, some at a time, with the row of its group that each block begins at."""
        file, at = self.files[span.file], 0
        chunks = find_chunks(self._metadata(span.file), span.group, self._leaves(span.file))
        if path is not None:
            check_page_headers(path, chunks)
        num_rows = min(self._piece_rows, self._rows_per_piece(span))
        with self._open_streamed(path, span) as parquet:
            constants = self.constants(span.file)
            names = [name for name in self.columns.names if name not in constants]
            for batch in parquet.iter_batches(num_rows, row_groups=[span.group], columns=names, use_threads=split_columns):
                start, stop = max(span.start - at, 0), min(span.stop - at, batch.num_rows)
                if start < stop:
                    yield at + start, self.columns.block(_append(batch.slice(start, stop - start), constants))
                at += batch.num_rows
                if at >= span.stop:
                    return
        raise DataError(f"`{file.path}`: row group {span.group} has {at} rows, but its footer says {span.stop} or more")

    def _open_streamed(self, path: str | None, span: Span) -> pq.ParquetFile:
        file = self.files[span.file] if path is None else LogFile(path)
        return _open(file, self._metadata(span.file), len(self.columns.names))

    def _whole_group(self, path: str, span: Span, buffers: BufferPool) -> RawBlock | None:
        """A row group decoded in one call; None if it has to be streamed by pyarrow."""
        plan = self._plan(span.file, span.group) if self._is_most_of_group(span) else None
        if plan is None:
            return None
        share = rowgroup.DECODED_BYTES // min(self.threads, rowgroup.SHARING_THREADS)
        footer = partial(self._metadata, span.file)
        with self.cpu_slots:
            constants = self.constants(span.file)
            return read_row_group(path, plan, self.columns, footer, constants=constants, max_bytes=share, buffers=buffers)

    def _plan_group(self, file: int, group: int) -> GroupPlan | None:
        """Plan for decoding a row group in one call; None if it has no column for our own decoder."""
        return plan_group(self.columns, self._metadata(file), group, self._leaves(file))

    def _inspect_file(self, file: int) -> tuple[list[int], pa.Schema]:
        metadata, path = self._metadata(file), self.files[file].path
        num_rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        if min(num_rows, default=0) < 0 or sum(num_rows) > MAX_ROWS:
            raise DataError(f"`{path}` has a damaged footer: it says {sum(num_rows):,} rows. Copy the file again")
        try:
            schema = metadata.schema.to_arrow_schema()
            _ = schema.names  # an error if they are not UTF-8
            return num_rows, schema
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"`{path}` cannot be read: {first_line(error)}") from None

    def _file_tables(self, span: Span, names: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        file, at = self.files[span.file], 0
        try:
            with _open(file, self._metadata(span.file), len(names)) as parquet:
                for batch in parquet.iter_batches(COPY_ROWS, row_groups=[span.group], columns=list(names)):
                    start, stop = max(span.start - at, 0), min(span.stop - at, batch.num_rows)
                    if start < stop:
                        yield at + start, pa.Table.from_batches([batch.slice(start, stop - start)])
                    at += batch.num_rows
                    if at >= span.stop:
                        break
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"`{file.path}`: row group {span.group} cannot be read: {error}") from None

    def _read_file_column(self, file: int, group: int, name: str) -> pa.Array:
        where, found = self.files[file], self._metadata(file)
        columns = ColumnReader(FeaturesSpec(sparse=(SparseFeatureSpec(name=name, num_rows=1),)))
        try:
            leaves = find_leaves(columns, found.schema)
            if where.is_local:
                check_page_headers(where.path, find_chunks(found, group, leaves))
            with _open(where, found, 1) as parquet:
                batches = [
                    batch.column(0) for batch in parquet.iter_batches(row_groups=[group], columns=[name], use_threads=False)
                ]
            column = pa.chunked_array(batches, batches[0].type if batches else pa.null()).combine_chunks()
            column.validate(full=True)
        except (pa.ArrowException, OSError, DamagedColumnError) as error:
            raise DataError(
                f"`{where.path}`: row group {group} cannot be read: {first_line(error)}. Copy the file again, or write it anew"
            ) from None
        if len(column) != found.row_group(group).num_rows:
            raise DataError(f"`{where.path}`: column `{name}` of row group {group} has {len(column)} rows. Copy the file again")
        return column

    def _rows_per_piece(self, span: Span) -> int:
        """Rows of a span's row group to decode at a time, by their mean size."""
        group = self._metadata(span.file).row_group(span.group)
        size = sum(group.column(leaf.index).total_uncompressed_size for leaf in self._leaves(span.file).values())
        return min(max(PIECE_BYTES * group.num_rows // max(size, 1), 1), 16_384)


def _append(rows: pa.RecordBatch, constants: Mapping[str, pa.Scalar]) -> pa.RecordBatch:
    """Rows with a column for each of `constants`."""
    columns = [pa.repeat(value, rows.num_rows) for value in constants.values()]
    return pa.RecordBatch.from_arrays([*rows.columns, *columns], [*rows.schema.names, *constants]) if constants else rows


def _open(file: LogFile, metadata: pq.FileMetaData, num_columns: int) -> pq.ParquetFile:
    buffer_bytes = BUFFER_BYTES if file.is_local else max(BUFFER_BYTES, STREAMED_BYTES // max(num_columns, 1))
    source = file.path if file.is_local else file.ranges()
    return pq.ParquetFile(
        source, metadata=metadata, buffer_size=buffer_bytes, pre_buffer=False, page_checksum_verification=True
    )
