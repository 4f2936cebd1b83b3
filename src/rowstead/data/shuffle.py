"""`RowShuffler`: rows in random order, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

NUM_BUCKETS = 64
MAX_ROWS_IN_MEMORY = 1_000_000
"""Rows that are shuffled without a file; of more, a 64th is in memory at a time."""


class RowShuffler:
    """Collects tables and gives their rows back in random order: each row goes to a random bucket, and buckets are shuffled one by one.

    Few rows stay in memory; more go to temporary files `START-shuffle-00.parquet.tmp` and so on, in Arrow's IPC format. The order is
    uniformly random, and the same for the same seed and rows, whatever the tables they come in.
    """

    def __init__(self, start: Path, schema: pa.Schema, seed: int, *, max_rows_in_memory: int = MAX_ROWS_IN_MEMORY) -> None:
        self._start, self._schema, self._max_rows = start, schema, max_rows_in_memory
        self._buckets, self._random = np.random.default_rng((seed, 0)), np.random.default_rng((seed, 1))
        self._kept: list[tuple[pa.Table, NDArray[np.uint8]]] = []
        self._num_kept = 0
        self._writers: list[pa.RecordBatchFileWriter] = []

    @property
    def _paths(self) -> list[Path]:
        return [Path(f"{self._start}-shuffle-{bucket:02d}.parquet.tmp") for bucket in range(NUM_BUCKETS)]

    def add(self, rows: pa.Table) -> None:
        """Add rows; they may go to a file."""
        buckets = (
            self._buckets.random(rows.num_rows) * NUM_BUCKETS
        )  # one draw each: the same however the rows are cut into tables
        self._kept.append((rows, buckets.astype(np.uint8)))
        self._num_kept += rows.num_rows
        if self._num_kept > self._max_rows:
            self._spill()

    def shuffled(self) -> Iterator[pa.Table]:
        """All rows, in tables of random rows; called once, at the end."""
        if self._writers:
            self._spill()
            for writer in self._writers:
                writer.close()
        for bucket, path in enumerate(self._paths):
            if self._writers:
                with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as opened:
                    rows = opened.read_all()
                path.unlink()
            else:
                rows = self._bucket(bucket)
            yield rows.take(pa.array(self._random.permutation(rows.num_rows)))

    def discard(self) -> None:
        """Remove the temporary files."""
        for writer in self._writers:
            with suppress(OSError, ValueError):
                writer.close()
        for path in self._paths if self._writers else ():
            with suppress(OSError):
                path.unlink()

    def _bucket(self, bucket: int) -> pa.Table:
        parts = [table.filter(pa.array(buckets == bucket)) for table, buckets in self._kept]
        return pa.concat_tables([self._schema.empty_table(), *parts])

    def _spill(self) -> None:
        if not self._writers:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            self._writers = [pa.ipc.new_file(str(path), self._schema, options=options) for path in self._paths]
        for bucket, writer in enumerate(self._writers):
            writer.write_table(self._bucket(bucket))
        self._kept, self._num_kept = [], 0
