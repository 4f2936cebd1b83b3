"""`ParquetLog`: one split of a log in Parquet files, decoded to raw rows by threads, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowstead.data import fetch, rowgroup
from rowstead.data.block import LogPiece, RawBlock
from rowstead.data.buffer_pool import BufferPool
from rowstead.data.columns import ColumnReader, IdKinds, check_id_kinds
from rowstead.data.fetch import RowGroupFetcher, plan_requests
from rowstead.data.files import LogFile, find_files
from rowstead.data.footers import Fingerprint, Footers, Range, first_line
from rowstead.data.page_checks import DamagedColumnError
from rowstead.data.prefetch import chain_ahead
from rowstead.data.row_order import Span, cut
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
from rowstead.data.splits import HELD_OUT, GroupRows, choose_rows
from rowstead.data.transforms import RowRule
from rowstead.records.cost import Cost
from rowstead.records.usage import usable_cores
from rowstead.spec.data import ParquetSpec
from rowstead.spec.errors import DataError, did_you_mean
from rowstead.spec.features import FeaturesSpec, SparseFeatureSpec

Split = Literal["train", "eval", "test", "all"]

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
SAMPLED_GROUPS = 64
"""A sample of a long log is spread over this many row groups."""


class ParquetLog:
    """One split of a log in Parquet files, as raw rows."""

    def __init__(
        self,
        spec: ParquetSpec,
        features: FeaturesSpec,
        *,
        split: Split = "train",
        with_labels: bool = True,
        id_kinds: IdKinds | None = None,
    ) -> None:
        """`all` is every row of `spec.train`. Without labels (for prediction) only feature columns are read.

        `id_kinds` are those of the model's training; files of other kinds are refused.
        """
        self.spec = spec
        self.threads = spec.decode_threads or usable_cores()
        self.cpu_slots = threading.Semaphore(choose_num_busy(spec.decode_threads, usable_cores()))
        """Held by a thread while it decodes or makes a batch. With more busy threads than cores, one would now and then be preempted while
        it holds the GIL, and all others would wait for it."""
        named = {"label": spec.label, "weight": spec.weight, "true_p": spec.true_p} if with_labels else {}
        group = spec.group if with_labels and split != "train" else None  # training has no use for it
        self.columns = ColumnReader(features, **named, group=group, id_kinds=id_kinds)
        self._names = frozenset(self.columns.names)
        self.id_kinds: dict[str, str] = {}
        """Whether each sparse column holds text or integers."""
        self._rule = RowRule(features, label=named.get("label"), weight=named.get("weight"))
        own_files = {"eval": spec.eval, "test": spec.test}.get(split, ())
        patterns = own_files or spec.train
        self.files: list[LogFile] = find_files(patterns)
        self._footers = Footers()
        self._metadata = lru_cache(maxsize=16)(lambda file: self._footers.read_metadata(self.files[file]))
        self._leaves = lru_cache(maxsize=16)(lambda file: find_leaves(self.columns, self._metadata(file).schema))
        self._plan = lru_cache(maxsize=PLANS)(self._plan_group)
        self._requests = lru_cache(maxsize=PLANS)(self._plan_requests)
        self._group_rows = self._inspect()
        check_id_kinds(features, self.id_kinds)
        self._chosen: list[list[GroupRows]] | None = None
        """Which rows of each row group belong to the split; None if all of its spans do."""
        self.spans = self._split("all" if own_files else split)
        """Row groups of the split, in file order, without empty ones."""
        self.num_samples = sum(span.num_rows for span in self.spans)
        if not self.num_samples:
            what = "no rows" if split == "all" else f"no rows for the {split} split"
            raise DataError(f"{what} in {', '.join(f'`{p}`' for p in patterns)}")
        self._piece_rows = self._rows_per_piece(self.spans[0])
        self.decoding = Cost()
        """CPU cost per row of the decoding threads; threads of pyarrow's own are not counted."""

    @property
    def fingerprints(self) -> dict[str, Fingerprint]:
        """What identifies the content of each file, as it was opened."""
        return self._footers.fingerprints

    def raw_blocks(self, max_rows: int | None = None) -> Iterator[RawBlock]:
        """Raw rows, bad ones included: all, or about `max_rows` spread evenly over the split."""
        spans: Sequence[Span] = self.spans
        if max_rows is not None and max_rows < self.num_samples:
            count = min(len(spans), SAMPLED_GROUPS, max_rows)
            chosen = np.linspace(0, len(spans) - 1, count).round().astype(int)
            spans = [spans[i].slice(0, -(-max_rows // count)) for i in chosen]
        for piece in self.pieces(spans, rows_ahead=0, check=False):
            yield piece.block

    def pieces(self, spans: Sequence[Span], *, rows_ahead: int, check: bool = True) -> Generator[LogPiece, None, None]:
        """The rows of `spans` in order, decoded by threads about `rows_ahead` rows ahead."""
        # With fewer row groups than threads, the columns of a group are decoded in parallel instead.
        split_columns = self.threads > 1 and len(spans) < self.threads
        buffers = BufferPool()
        fetcher = RowGroupFetcher([partial(self._wanted, span) for span in spans])
        streams: list[Callable[[], Iterator[LogPiece]]] = [
            partial(self._decode, span, self._local_copy(span, number, fetcher), split_columns, check, buffers)
            for number, span in enumerate(spans)
        ]
        pieces = chain_ahead(
            streams,
            threads=self.threads,
            size=lambda piece: piece.block.num_rows,
            max_size=max(rows_ahead, self._piece_rows * min(self.threads, len(streams))),
            cost=self.decoding,
        )
        try:
            yield from pieces
        finally:
            fetcher.close()
            pieces.close()

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
        if not self._names.issubset(names) or any(not 0 <= start <= stop <= size for start, stop in ranges):
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
        except DamagedColumnError as error:
            raise DataError(
                f"`{file.path}`: row group {span.group} cannot be read: {error}. Copy the file again, or write it anew"
            ) from None
        if whole is not None:
            yield self._piece(whole.slice(span.start, span.stop), file, first_row, span.start, chosen, check)

    def _find_damage(self, path: str | None, span: Span, error: Exception) -> DamagedColumnError:
        """Which column of a row group pyarrow could not read, given its error for some of them."""
        for name in self.columns.names:
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
            batches = parquet.iter_batches(
                num_rows, row_groups=[span.group], columns=list(self.columns.names), use_threads=split_columns
            )
            for batch in batches:
                start, stop = max(span.start - at, 0), min(span.stop - at, batch.num_rows)
                if start < stop:
                    yield at + start, self.columns.block(batch.slice(start, stop - start))
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
            return read_row_group(path, plan, self.columns, footer, max_bytes=share, buffers=buffers)

    def _plan_group(self, file: int, group: int) -> GroupPlan | None:
        """Plan for decoding a row group in one call; None if it has no column for our own decoder."""
        return plan_group(self.columns, self._metadata(file), group, self._leaves(file))

    def _piece(
        self, block: RawBlock, file: LogFile, first_row: int, at: int, chosen: NDArray[np.int64] | None, check: bool
    ) -> LogPiece:
        """Rows of a row group from its row `at` on; of them only the `chosen` ones. `first_row` is that of the group in its file."""
        rows = None
        if chosen is not None:
            rows = chosen[np.searchsorted(chosen, at) : np.searchsorted(chosen, at + block.num_rows)] - at
            block = block.take(rows)
        bad = self._rule.check(block) if check else None
        if bad is None:
            return LogPiece(block, None)
        if self.spec.on_bad_row == "error":
            row = first_row + at + (bad.row if rows is None else int(rows[bad.row]))
            raise DataError(
                f"`{file.path}`, row {row} (from 0): {bad.problem}. "
                "To skip and count bad rows, set data.parquet.on_bad_row: skip"
            )
        return LogPiece(block, ~bad.mask)

    def _inspect(self) -> list[list[int]]:
        """Rows of each row group of each file; checks that every file has the needed columns in supported types."""

        def inspect(index: int) -> tuple[list[int], pa.Schema]:
            metadata = self._metadata(index)
            num_rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
            if min(num_rows, default=0) < 0 or sum(num_rows) > MAX_ROWS:
                raise DataError(
                    f"`{self.files[index].path}` has a damaged footer: it says {sum(num_rows):,} rows. Copy the file again"
                )
            try:
                schema = metadata.schema.to_arrow_schema()
                _ = schema.names  # an error if they are not UTF-8
                return num_rows, schema
            except (pa.ArrowException, UnicodeDecodeError) as error:
                raise DataError(f"`{self.files[index].path}` cannot be read: {first_line(error)}") from None

        with ThreadPoolExecutor(self.threads) as pool:
            found = list(pool.map(inspect, range(len(self.files))))
        for file, (_, schema) in zip(self.files, found, strict=True):
            try:
                self.columns.check(schema)
            except DataError as error:
                raise DataError(f"`{file.path}`: {error}") from None
            for name, kind in self.columns.id_kinds(schema).items():
                if self.id_kinds.setdefault(name, kind) != kind:
                    raise DataError(
                        f"column `{name}` is {self.id_kinds[name]} in `{self.files[0].path}` but {kind} in `{file.path}`; "
                        "convert one of them, since the same id would get different rows"
                    )
        return [rows for rows, _ in found]

    def _split(self, split: Split) -> list[Span]:
        rule, held_out = self.spec.split, {name: self.spec.held_out(name) for name in HELD_OUT}
        counts = self._group_rows
        if split != "all" and rule.by != "order" and (any(held_out.values()) or rule.test_from is not None):
            self._chosen = choose_rows(self.spec, split, counts, self._read_column, threads=self.threads)
            counts = [[group.num_rows for group in groups] for groups in self._chosen]
        spans = [Span(file, group, 0, rows) for file, groups in enumerate(counts) for group, rows in enumerate(groups) if rows]
        if split == "all" or self._chosen is not None:
            return spans
        total = sum(span.num_rows for span in spans)
        sizes = {name: max(round(total * share), 1) if share else 0 for name, share in held_out.items()}
        first_test = max(total - sizes["test"], 0)
        first_eval = max(first_test - sizes["eval"], 0)
        bounds = {"train": (0, first_eval), "eval": (first_eval, first_test), "test": (first_test, total)}
        return cut(spans, *bounds[split])

    def _read_column(self, file: int, group: int, name: str) -> pa.Array:
        """A column of one row group, which need not be one of the model's."""
        where, found = self.files[file], self._metadata(file)
        columns = ColumnReader(FeaturesSpec(sparse=(SparseFeatureSpec(name=name, num_rows=1),)))
        try:
            leaves = find_leaves(columns, found.schema)
            if not leaves:
                known = did_you_mean(name, found.schema.to_arrow_schema().names)
                raise DataError(f"data.parquet.split.column: `{where.path}` has no column `{name}`: {known}")
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
        if len(column) != self._group_rows[file][group]:
            raise DataError(f"`{where.path}`: column `{name}` of row group {group} has {len(column)} rows. Copy the file again")
        return column

    def _covering(self, span: Span) -> Span:
        """The rows of the row group from a span's first to its last."""
        rows = self._rows_of(span)
        return span if rows is None else Span(span.file, span.group, int(rows[0]), int(rows[-1]) + 1)

    def _rows_of(self, span: Span) -> NDArray[np.int64] | None:
        """Indices of a span's rows in its row group; None if they are `start` to `stop`."""
        return None if self._chosen is None else self._chosen[span.file][span.group].locate(span.start, span.stop)

    def _rows_per_piece(self, span: Span) -> int:
        """Rows of a span's row group to decode at a time, by their mean size."""
        group = self._metadata(span.file).row_group(span.group)
        size = sum(group.column(leaf.index).total_uncompressed_size for leaf in self._leaves(span.file).values())
        return min(max(PIECE_BYTES * group.num_rows // max(size, 1), 1), 16_384)


def choose_num_busy(decode_threads: int | None, num_cores: int) -> int:
    """How many threads may decode or make batches at a time: one per core, unless `decode_threads` is set.

    More threads than cores are set for slow files, and most of them wait for I/O.
    """
    return num_cores if decode_threads is None else max(decode_threads, min(2 * decode_threads, num_cores))


def read_schema(file: LogFile) -> pa.Schema:
    """The columns of a Parquet file and their types."""
    return Footers().read_metadata(file).schema.to_arrow_schema()


def _open(file: LogFile, metadata: pq.FileMetaData, num_columns: int) -> pq.ParquetFile:
    buffer_bytes = BUFFER_BYTES if file.is_local else max(BUFFER_BYTES, STREAMED_BYTES // num_columns)
    source = file.path if file.is_local else file.ranges()
    return pq.ParquetFile(
        source, metadata=metadata, buffer_size=buffer_bytes, pre_buffer=False, page_checksum_verification=True
    )
