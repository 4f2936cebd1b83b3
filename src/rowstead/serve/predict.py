"""Predict a whole log and write the click probabilities to Parquet, beside columns that are copied from the log."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from rowstead.data.column_values import to_floats
from rowstead.data.file_log import FileLog, open_file_log
from rowstead.data.files import choose_file_log
from rowstead.records.files import fsync_folder
from rowstead.records.run_folder import DEFAULT_ROOT
from rowstead.serve.exported import Exported, is_exported
from rowstead.spec.data import list_paths
from rowstead.spec.errors import DataError, did_you_mean
from rowstead.training.device import choose_device
from rowstead.training.evaluate import EVAL_BATCH, predict_logits
from rowstead.training.progress import Callback
from rowstead.training.trained import open_run

Scores = Generator[tuple[NDArray[np.float64], NDArray[np.float32] | None], None, None]
"""Predictions [B], or [B, T] of T tasks, batch by batch, and labels likewise where the reader provides them."""


@dataclass(frozen=True, kw_only=True)
class PredictSummary:
    """What `predict` wrote."""

    num_rows: int
    num_skipped: int
    """Bad rows of the log that the recipe says to skip; they have no prediction."""


@dataclass(frozen=True, kw_only=True)
class _Scoring:
    """A model applied to a log."""

    scores: Scores
    log: FileLog | None
    """None for a synthetic log."""
    predictions: tuple[str, ...]
    """Names of the columns of predictions."""
    labels: dict[str, str]
    """Columns of labels that are written, and the columns of the log that they are."""
    copied: tuple[str, ...]
    """Those of them that must be copied from the files, since the reader provides no labels."""
    num_samples: int
    """Rows of the log, including bad ones."""
    num_skipped: Callable[[], int]
    """Bad rows skipped so far."""


def predict(
    run: Path | str,
    out: Path | str,
    *,
    data: str | Sequence[str] | None = None,
    keep: Sequence[str] = (),
    overwrite: bool = False,
    root: Path | str = DEFAULT_ROOT,
    callback: Callback | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PredictSummary:
    """Write a Parquet file with one row for each row of the log, in its order.

    Columns: `p` (float64), `label` (float32) where the log has one, and the log's own columns that `keep` names; of a model with several
    labels `p_TASK` and `label_TASK` for each. `run` is a run or a folder that `export` wrote. The log is the run's evaluation split, or the Parquet files of `data`. `progress` is called
    with the number of rows done and of all rows.
    """
    out = Path(out)
    if out.is_dir():
        raise DataError(f"{out} is a folder: name a file with --out, such as {out / 'predictions.parquet'}")
    if out.exists() and not overwrite:
        raise DataError(f"{out} exists: choose another --out, or pass --overwrite")
    if not out.parent.is_dir():
        raise DataError(f"there is no folder {out.parent} to write {out.name} into")
    scoring = _open_exported(run, data) if is_exported(run, root) else _open_run(run, data, root, callback)
    if scoring.log is not None and any(file.is_local and _is_same(file.path, out) for file in scoring.log.files):
        raise DataError(f"{out} is a file of the log itself, which the predictions would replace: choose another --out")
    keep = [name for name in keep if scoring.labels.get(name) != name]
    copied = _open_copied(scoring, keep)
    num_rows = 0
    unfinished = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    writer = None
    try:
        with closing(scoring.scores) as scores:
            for p, labels in scores:
                table = _build_table(p, labels, scoring, copied, keep)
                writer = writer or pq.ParquetWriter(unfinished, table.schema, write_page_checksum=True)
                writer.write_table(table)
                num_rows += table.num_rows
                if progress is not None:
                    progress(num_rows, scoring.num_samples)
        if writer is None:
            raise DataError("nothing to predict: the log has no rows")
        writer.close()
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, out)
        fsync_folder(out.parent)
    finally:
        if writer is not None and writer.is_open:
            writer.close()
        unfinished.unlink(missing_ok=True)
    return PredictSummary(num_rows=num_rows, num_skipped=scoring.num_skipped())


def _is_same(one: str, other: Path) -> bool:
    return other.exists() and os.path.samefile(one, other)


def _open_run(run: Path | str, data: str | Sequence[str] | None, root: Path | str, callback: Callback | None) -> _Scoring:
    trained = open_run(run, root=root, callback=callback)
    spec, model = trained.spec, trained.model
    source = trained.source(data, needs_label=False)
    device = choose_device(spec)
    model.to(device)

    def scores() -> Scores:
        for batch, logits in predict_logits(model, source, device=device):
            labels = None if batch.labels is None else batch.labels.numpy()
            # As evaluation computes it: the correction and the prediction are in float64.
            yield model.head.predict(torch.from_numpy(logits).double() + model.log_keep_rate).numpy(), labels

    log, labels = source.file_log, _labels_of([(task.name, str(task.label)) for task in model.tasks], spec.data.log.label)
    columns = () if data is None or log is None else tuple(log.full_schema(0).names)
    return _Scoring(
        scores=scores(),
        log=log,
        predictions=_predictions_of([task.name for task in model.tasks]),
        labels=labels,
        copied=tuple(name for name, column in labels.items() if column in columns),
        num_samples=source.num_samples,
        num_skipped=lambda: source.num_skipped or 0,
    )


def _open_exported(folder: Path | str, data: str | Sequence[str] | None) -> _Scoring:
    if not data:
        raise DataError(f"{folder} is an exported model, which has no evaluation split: name the log with --data")
    model = Exported(folder)
    files = choose_file_log(list_paths(data), label=model.label)
    log = open_file_log(files, model.features, split="all", with_labels=False, id_kinds=model.id_kinds)

    def scores() -> Scores:
        with closing(log.pieces(log.spans, rows_ahead=EVAL_BATCH)) as pieces:
            for piece in pieces:
                model.check_ids(piece.block)
                for start in range(0, piece.block.num_rows, EVAL_BATCH):
                    stop = min(start + EVAL_BATCH, piece.block.num_rows)
                    yield model.predict_block(piece.block, start, stop).astype(np.float64), None

    labels, columns = _labels_of(list(model.tasks.items()), model.label), log.full_schema(0).names
    return _Scoring(
        scores=scores(),
        log=log,
        predictions=_predictions_of(list(model.tasks)),
        labels=labels,
        copied=tuple(name for name, column in labels.items() if column in columns),
        num_samples=log.num_samples,
        num_skipped=lambda: 0,
    )


def _predictions_of(tasks: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"p_{task}" for task in tasks) or ("p",)


def _labels_of(tasks: Sequence[tuple[str, str]], label: str) -> dict[str, str]:
    """The columns of labels that are written, from the tasks' names and label columns, and the label column of a model without tasks."""
    return {f"label_{task}": column for task, column in tasks} or {"label": label}


def _open_copied(scoring: _Scoring, keep: Sequence[str]) -> CopiedColumns | None:
    for name in (*scoring.predictions, *scoring.labels):
        if name in keep:
            raise DataError(f"the output has its own column `{name}`: the log's cannot be kept under that name")
    if scoring.log is None:
        if keep:
            raise DataError("--keep copies columns of files, but this run's log is synthetic: name files with --data")
        return None
    names = [*keep, *(scoring.labels[name] for name in scoring.copied)]
    return CopiedColumns(scoring.log, names) if names else None


def _build_table(
    p: NDArray[np.float64],
    labels: NDArray[np.float32] | None,
    scoring: _Scoring,
    copied: CopiedColumns | None,
    keep: Sequence[str],
) -> pa.Table:
    columns: dict[str, pa.Array | pa.ChunkedArray] = dict(zip(scoring.predictions, _columns_of(p), strict=True))
    if labels is not None:
        columns |= dict(zip(scoring.labels, _columns_of(labels), strict=True))
    if copied is not None:
        rows = copied.take(len(p))
        for name in scoring.copied:
            column = scoring.labels[name]
            columns[name] = pa.array(to_floats(rows.column(column), column), from_pandas=True)
        columns |= {name: rows.column(name) for name in keep}
    return pa.table(columns)


def _columns_of(values: NDArray[Any]) -> list[pa.Array]:
    """Values [B] as one column, or [B, T] as T; NaN is a missing label."""
    return [pa.array(column, from_pandas=True) for column in values.reshape(len(values), -1).T]


class CopiedColumns:
    """Some columns of a log's split, in file order, without the bad rows that the log skips."""

    def __init__(self, log: FileLog, names: Sequence[str]) -> None:
        self._log = log
        self.names = tuple(dict.fromkeys(names))
        self._check()
        self._tables = self._good_tables()
        self._rest: list[pa.Table] = []

    def take(self, num_rows: int) -> pa.Table:
        """The next `num_rows` rows, which must exist."""
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
        for number, file in enumerate(self._log.files):
            schema = self._log.full_schema(number)
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
            yield from self._log.tables(self.names)
            return
        masks = self._masks()
        mask = np.empty(0, np.bool_)
        for table in self._log.tables(self.names):
            while len(mask) < table.num_rows:
                mask = np.concatenate([mask, next(masks)])
            yield table.filter(pa.array(mask[: table.num_rows]))
            mask = mask[table.num_rows :]

    def _masks(self) -> Iterator[NDArray[np.bool_]]:
        """Masks of good rows. They take a second read of the log, but only where bad rows are skipped."""
        for piece in self._log.pieces(self._log.spans, rows_ahead=0):
            yield np.ones(piece.block.num_rows, np.bool_) if piece.good is None else piece.good
