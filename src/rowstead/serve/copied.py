"""Copy columns of a Parquet log unchanged, aligned with the rows that are predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowstead.data.files import LogFile
from rowstead.data.parquet import ParquetLog
from rowstead.spec.errors import DataError, did_you_mean

BATCH_ROWS = 8192


class CopiedColumns:
    """Some columns of a log's split, in file order, without the bad rows that the log skips."""

    def __init__(self, log: ParquetLog, names: Sequence[str]) -> None:
        self._log = log
        self.names = tuple(dict.fromkeys(names))
        self._check()
        self._tables = self._good_tables()
        self._rest: list[pa.Table] = []

    def take(self, num_rows: int) -> pa.Table:
        """Take the next `num_rows` rows, which must exist."""
        found, missing = [], num_rows
        while missing:
            table = self._rest.pop() if self._rest else next(self._tables)
            found.append(table.slice(0, missing))
            if table.num_rows > missing:
                self._rest.append(table.slice(missing))
            missing -= found[-1].num_rows
        return pa.concat_tables(found)

    def _check(self) -> None:
        types: dict[str, tuple[pa.DataType, str]] = {}
        for file in self._log.files:
            with _open(file) as parquet:
                schema = parquet.schema_arrow
            for name in self.names:
                if name not in schema.names:
                    raise DataError(f"`{file.path}` has no column `{name}` to copy: {did_you_mean(name, schema.names)}")
                kind, first = types.setdefault(name, (schema.field(name).type, file.path))
                if schema.field(name).type != kind:
                    raise DataError(
                        f"column `{name}` has type {kind} in `{first}` but {schema.field(name).type} in `{file.path}`: "
                        "convert one of them to copy it"
                    )

    def _good_tables(self) -> Iterator[pa.Table]:
        if self._log.spec.on_bad_row == "error":
            yield from self._all_tables()
            return
        masks = self._masks()
        mask = np.empty(0, np.bool_)
        for table in self._all_tables():
            while len(mask) < table.num_rows:
                mask = np.concatenate([mask, next(masks)])
            yield table.filter(pa.array(mask[: table.num_rows]))
            mask = mask[table.num_rows :]

    def _masks(self) -> Iterator[NDArray[np.bool_]]:
        """Masks of good rows. They take a second read of the log, but only where bad rows are skipped."""
        for piece in self._log.pieces(self._log.spans, rows_ahead=0):
            yield np.ones(piece.block.num_rows, np.bool_) if piece.good is None else piece.good

    def _all_tables(self) -> Iterator[pa.Table]:
        for span in self._log.spans:
            file = self._log.files[span.file]
            at = 0
            try:
                with _open(file) as parquet:
                    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[span.group], columns=list(self.names)):
                        start, stop = max(span.start - at, 0), min(span.stop - at, batch.num_rows)
                        if start < stop:
                            yield pa.Table.from_batches([batch.slice(start, stop - start)]).select(list(self.names))
                        at += batch.num_rows
                        if at >= span.stop:
                            break
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"`{file.path}`: row group {span.group} cannot be read: {error}") from None


def schema_of(log: ParquetLog) -> pa.Schema:
    """The schema of the log's first file."""
    with _open(log.files[0]) as parquet:
        return parquet.schema_arrow


def _open(file: LogFile) -> pq.ParquetFile:
    return pq.ParquetFile(file.path if file.is_local else file.ranges(), pre_buffer=not file.is_local)
