"""The synthetic click log: any rows, generated on demand from the spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from rowstead.data import draws
from rowstead.data.block import LogPiece, RawBlock
from rowstead.data.population import Population
from rowstead.data.row_order import Cursor, FileOrder, RowOrder
from rowstead.data.source import Batches, LogSplit, Source
from rowstead.data.teacher import ConversionTeacher, Teacher
from rowstead.data.write import DEFAULT_ROWS_PER_FILE, DEFAULT_ROWS_PER_GROUP, Progress, SplitWriter, Summary
from rowstead.spec.data import SplitName, SynthSpec
from rowstead.spec.errors import DataError, did_you_mean
from rowstead.spec.features import FeaturesSpec
from rowstead.spec.heads import TaskSpec

if TYPE_CHECKING:
    from rowstead.data.columns import IdKinds
    from rowstead.data.encode import Encoder

_LABELS, _CONVERSIONS = 200, 201
_GENERATE_BYTES = 16 << 20
"""Rows are drawn in pieces of about this size, which bounds memory for any number of ids."""
_DENSE_ROWS = 8192
"""Rows per block of only dense values."""


class SynthLog:
    """A log of `num_rows` examples, the training split first. Rows do not depend on which rows were read before.

    Letters: R rows, F sparse and Fd dense columns of the log, K latent numbers.
    """

    def __init__(self, spec: SynthSpec) -> None:
        self.spec = spec
        self.population = Population(spec)
        self.teacher = Teacher(self.population)
        self.dense_columns = tuple(f"dense_{i}" for i in range(spec.num_dense))
        self.sparse_columns = tuple(f"sparse_{i}" for i in range(spec.num_sparse))
        self.num_rows = spec.num_train_samples + spec.num_eval_samples + spec.num_test_samples
        self._label_key = draws.key_of(spec.seed, _LABELS)
        self._conversion_key = draws.key_of(spec.seed, _CONVERSIONS)
        self._conversions = None if spec.conversion is None else ConversionTeacher(self.teacher, spec.conversion)

    @property
    def rows_per_piece(self) -> int:
        """Rows to draw at once: large enough to be fast, small enough to bound memory."""
        row_bytes = 8 * self.population.mean_ids.sum() + 8 * self.spec.latent * self.spec.num_sparse + 8 * self.spec.num_dense
        return int(np.clip(_GENERATE_BYTES // max(row_bytes, 1), 64, 16_384))

    def split(self, name: SplitName) -> range:
        """The rows of one split."""
        first_eval = self.spec.num_train_samples
        first_test = first_eval + self.spec.num_eval_samples
        return {"train": range(first_eval), "eval": range(first_eval, first_test), "test": range(first_test, self.num_rows)}[
            name
        ]

    def rows(
        self,
        start: int,
        stop: int,
        *,
        dense: Sequence[str] | None = None,
        sparse: Sequence[str] | None = None,
        labels: Sequence[str] = (),
    ) -> RawBlock:
        """Rows `start` to `stop` with these columns in this order, by default all; the teacher always uses all.

        With `labels` the block has these labels and their true probabilities side by side, else the click alone.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise DataError(f"rows {start} to {stop} are out of range for a log of {self.num_rows} rows")
        num_rows, spec = stop - start, self.spec
        shown = self._column_indices(self.dense_columns if dense is None else dense, self.dense_columns)
        picked = self._column_indices(self.sparse_columns if sparse is None else sparse, self.sparse_columns)
        turn = self.teacher.turn(start, num_rows)
        pooled = np.empty((spec.num_sparse, num_rows, spec.latent))
        ids: dict[int, NDArray[np.int64]] = {}
        offsets: dict[int, NDArray[np.int64]] = {}
        wanted = set(picked)
        for f in range(spec.num_sparse):
            bounds = self.population.offsets(f, start, num_rows)
            ranks = self.population.ranks(f, start, bounds)
            self.teacher.pool(f, ranks, bounds, turn, pooled[f])
            if f in wanted:
                ids[f], offsets[f] = self.population.ids(f, ranks), bounds
        hidden = self.population.hidden_dense(start, num_rows)
        true_p = self.teacher.click_probability(pooled, hidden, turn)
        clicks = np.empty(num_rows, np.float32)
        draw_labels(self._label_key, start, true_p, clicks)
        found = clicks
        if labels:
            drawn = {"label": (clicks, true_p)}
            if self._conversions is not None:
                conversion_p = self._conversions.probability(pooled, hidden, turn)
                conversions = np.empty(num_rows, np.float32)
                draw_labels(self._conversion_key, start, conversion_p, conversions)
                drawn["conversion"] = np.where(clicks > 0, conversions, np.float32(np.nan)), conversion_p
            found, true_p = (np.stack([drawn[label][part] for label in labels], axis=1) for part in (0, 1))
        values = self.population.shown_dense(hidden)
        everything = shown == list(range(spec.num_dense))
        return RawBlock(
            dense=values if everything else np.ascontiguousarray(values[:, shown]),
            ids=tuple(ids[f] for f in picked),
            offsets=tuple(offsets[f] for f in picked),
            labels=found,
            true_p=true_p,
        )

    def dense_blocks(
        self, columns: Sequence[str], split: SplitName = "train", max_rows: int | None = None
    ) -> Iterator[RawBlock]:
        """The first rows of a split with only these dense columns, which is much faster; transforms are learned from them."""
        indices = self._column_indices(columns, self.dense_columns)
        rows = self.split(split)[:max_rows]
        for start in range(rows.start, rows.stop, _DENSE_ROWS):
            num_rows = min(_DENSE_ROWS, rows.stop - start)
            values = self.population.shown_dense(self.population.hidden_dense(start, num_rows))
            yield RawBlock(dense=np.ascontiguousarray(values[:, indices]), ids=(), offsets=())

    @staticmethod
    def _column_indices(names: Sequence[str], known: tuple[str, ...]) -> list[int]:
        indices = {name: i for i, name in enumerate(known)}
        for name in names:
            if name not in indices:
                raise DataError(f"the synthetic log has no column `{name}`: {did_you_mean(name, known)}")
        return [indices[name] for name in names]


class SynthSplit(LogSplit):
    """One split of a synthetic log with the columns that `features` select."""

    log_class: type[SynthLog] = SynthLog

    def __init__(
        self,
        spec: SynthSpec,
        features: FeaturesSpec,
        split: SplitName,
        id_kinds: IdKinds | None = None,
        tasks: Sequence[TaskSpec] = (),
    ) -> None:
        self._log, self._split = self.log_class(spec), split
        self._labels = tuple(str(task.label) for task in tasks)
        self._dense, self._sparse = _select_columns(features)
        self.id_kinds = dict.fromkeys(self._sparse, "integers")

    def raw_blocks(self, max_rows: int | None = None) -> Iterator[RawBlock]:
        """The first `max_rows` rows of the split, or all."""
        for start, stop in self._bounds(max_rows):
            yield self._log.rows(start, stop, dense=self._dense, sparse=self._sparse, labels=self._labels)

    def pieces(self) -> Iterator[Callable[[], LogPiece]]:
        for start, stop in self._bounds(None):
            yield partial(self._piece, start, stop)

    def _piece(self, start: int, stop: int) -> LogPiece:
        return LogPiece(self._log.rows(start, stop, dense=self._dense, sparse=self._sparse, labels=self._labels), None)

    def _bounds(self, max_rows: int | None) -> Iterator[tuple[int, int]]:
        """First row and end of each piece of the split's first `max_rows` rows."""
        rows, step = self._log.split(self._split)[:max_rows], self._log.rows_per_piece
        for start in range(rows.start, rows.stop, step):
            yield start, min(start + step, rows.stop)

    def dense_blocks(self, max_rows: int) -> Iterator[RawBlock]:
        return self._log.dense_blocks(self._dense, self._split, max_rows)

    def source(self, encoder: Encoder, *, seed: int) -> SynthSource:
        return SynthSource(self._log, encoder, self._split, self._labels)


class SynthSource(Source):
    """Batches of one split of a synthetic log, in its order, the same in every epoch.

    Ranks read contiguous ranges. Any number of threads may iterate at the same time; the kernels release the GIL.
    """

    def __init__(self, log: SynthLog, encoder: Encoder, split: SplitName, labels: Sequence[str] = ()) -> None:
        self.log, self._labels = log, labels
        self.encoder = encoder
        self._rows = self.log.split(split)
        self.num_samples = len(self._rows)
        self._dense, self._sparse = _select_columns(encoder.features)
        for names, known in ((self._dense, self.log.dense_columns), (self._sparse, self.log.sparse_columns)):
            self.log._column_indices(names, known)

    def batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1, cursor: Cursor | None = None
    ) -> Batches:
        order = self.row_order.batches(batch_size, np.arange, epoch=epoch, rank=rank, world_size=world_size, cursor=cursor)
        for rows, after in order:
            first, last = self._rows[rows[0]], self._rows[rows[-1]]
            block = self.log.rows(first, last + 1, dense=self._dense, sparse=self._sparse, labels=self._labels)
            yield self.encoder.encode(block), after

    @property
    def row_order(self) -> RowOrder:
        return FileOrder(self.num_samples)


def write_parquet(
    spec: SynthSpec,
    folder: str | Path,
    *,
    rows_per_file: int = DEFAULT_ROWS_PER_FILE,
    rows_per_group: int = DEFAULT_ROWS_PER_GROUP,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write the splits of a log to `folder` as `train-00000.parquet` …, `eval-00000.parquet` …, in bounded memory.

    Columns: `dense_i` float32, `sparse_i` list<int64> (int64 where every bag has one id), `label` and `true_p` float32, and
    with `conversion` also `conversion`, null without a click, and `true_conversion_p`.
    `progress` is called with the rows written so far and the total.
    """
    log = SynthLog(spec)
    step = log.rows_per_piece
    row_bytes = 8 * (log.population.mean_ids.sum() + spec.num_dense)
    rows_per_group = int(min(rows_per_group, max(1024, 4 * _GENERATE_BYTES // max(row_bytes, 1))))
    splits: tuple[SplitName, ...] = ("train", "eval", "test") if spec.has_test else ("train", "eval")
    schema = _schema(log)
    id_columns = [f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in schema if f.type != pa.float32()]
    with SplitWriter(
        folder,
        schema,
        rows_per_file=rows_per_file,
        rows_per_group=rows_per_group,
        overwrite=overwrite,
        # Fast to read: random floats do not compress, and a dictionary alone compresses skewed ids.
        compression="none",
        dictionary_columns=id_columns,
    ) as writer:
        for split in splits:
            rows = log.split(split)
            for start in range(rows.start, rows.stop, step):
                stop = min(start + step, rows.stop)
                writer.write(split, _to_arrow(schema, log.rows(start, stop, labels=spec.labels)))
                if progress is not None:
                    progress(stop, log.num_rows)
    return writer.summary(num_bytes_read=0)


def _select_columns(features: FeaturesSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dense and sparse columns of `features`, in order."""
    dense = tuple(str(f.column) for f in features.expanded_dense())
    return dense, tuple(str(f.column) for f in features.expanded_sparse())


def _schema(log: SynthLog) -> pa.Schema:
    dense = [(name, pa.float32()) for name in log.dense_columns]
    is_single = (log.population.mean_ids == 1.0) & (log.spec.lengths == "fixed")
    sparse = [
        (name, pa.int64() if single else pa.list_(pa.int64()))
        for name, single in zip(log.sparse_columns, is_single, strict=True)
    ]
    labels = [(name, pa.float32()) for pair in _LABEL_COLUMNS[: len(log.spec.labels)] for name in pair]
    return pa.schema([*dense, *sparse, *labels])


_LABEL_COLUMNS = (("label", "true_p"), ("conversion", "true_conversion_p"))
"""Each label, and its true probability."""


def _to_arrow(schema: pa.Schema, block: RawBlock) -> pa.Table:
    """A block with all columns as an Arrow table."""
    columns = [pa.array(column) for column in np.ascontiguousarray(block.dense.T)]
    for ids, offsets in zip(block.ids, block.offsets, strict=True):
        is_list = pa.types.is_list(schema.types[len(columns)])
        columns.append(
            pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids)) if is_list else pa.array(ids)
        )
    assert block.labels is not None
    assert block.true_p is not None
    for label, true_p in zip(block.labels.T, block.true_p.T, strict=True):
        columns += [pa.array(label, from_pandas=True), pa.array(true_p)]
    return pa.Table.from_arrays(columns, schema=schema)


@njit(nogil=True, cache=True)
def draw_labels(key, start, true_p, labels):  # type: ignore[no-untyped-def]
    """Fill labels float32 [R] with 1 where a uniform draw is below true_p [R], else 0."""
    for r in range(true_p.size):
        labels[r] = 1.0 if draws.unit(draws.at(key, start + r)) < true_p[r] else 0.0
