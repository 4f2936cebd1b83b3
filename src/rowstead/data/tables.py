"""Logs that Python code gives: tables in memory, which are written to Parquet once, or files; and recipes that read them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rowstead.data.columns import arrow_column
from rowstead.data.files import choose_file_log
from rowstead.records.temporary import temporary_folder
from rowstead.spec.data import FILE_LOGS, LOG_KINDS
from rowstead.spec.errors import DataError, RowsteadError
from rowstead.spec.run import RunSpec, load_recipe

FILE_KINDS = tuple(kind.kind for kind in FILE_LOGS)
FOLDER = "tables"
"""Of tables that were given as such, under the root of runs."""
ROWS_PER_GROUP = 65_536


def list_files(data: Any) -> tuple[str, ...] | None:
    """The paths in `data`: a file, folder, glob or URL, or several; None if it is a table."""
    if isinstance(data, (str, os.PathLike)):
        return (os.fspath(data),)
    if isinstance(data, (list, tuple)):
        if data and all(isinstance(path, (str, os.PathLike)) for path in data):
            return tuple(os.fspath(path) for path in data)
        raise DataError("a list as data must be one of paths; give rows as a DataFrame, an Arrow table or a dict of columns")
    return None


def arrow_table(data: Any) -> pa.Table:
    """A table in memory as an Arrow table; of a DataFrame's index only named levels are columns."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of pandas, about names of columns that are no text
            if isinstance(data, pa.RecordBatch):
                return pa.Table.from_batches([data])
            if isinstance(data, Mapping):
                data = {name: arrow_column(values, name) for name, values in data.items()}
            table = data if isinstance(data, pa.Table) else pa.table(data)
    except DataError:
        raise
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"the table cannot be read: {reason}. Give a DataFrame, an Arrow table or a dict of columns, each of one type"
        ) from None
    kept = [name for name in table.schema.names if not name.startswith("__index_level_")]
    return table if len(kept) == table.num_columns else table.select(kept)


def keep_table(data: Any, folder: Path) -> Path:
    """Write a table to `folder` as Parquet, under a name that follows from its content, unless it is there; returns its path."""
    table = arrow_table(data)
    if not table.num_rows:
        raise DataError("the table has no rows")
    unfinished = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, unfinished, row_group_size=ROWS_PER_GROUP, write_page_checksum=True)
        digest = hashlib.sha256()
        with open(unfinished, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            os.fsync(file.fileno())
        path = folder / f"{digest.hexdigest()[:16]}.parquet"
        if not path.exists():  # a run may be reading it
            os.replace(unfinished, path)
    except pa.ArrowException as error:
        raise DataError(f"the table cannot be written as Parquet: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise DataError(f"cannot write the table to {folder}: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return path


@contextlib.contextmanager
def as_files(data: Any) -> Iterator[tuple[str, ...] | None]:
    """The paths in `data`, or that of a temporary file with its table; None for None."""
    if data is None or (paths := list_files(data)) is not None:
        yield None if data is None else paths
        return
    with temporary_folder() as folder:
        yield (str(keep_table(data, folder)),)


def read_given(
    spec: RunSpec | Mapping[str, Any] | str | os.PathLike[str] | None, data: Any, eval_data: Any, folder: Path
) -> RunSpec:
    """The recipe that `train` was given, with `data` in place of its own log; tables are kept under `folder`."""
    if spec is None:
        if data is None:
            raise RowsteadError("give a recipe: a RunSpec, a dict, a path, or the name of a shipped one such as `quickstart`")
        raise RowsteadError(
            "data without a recipe: write one (`rowstead init LOG`), or let `rowstead.first_recipe(data, label=...)` guess, and train "
            "what it returns"
        )
    if data is None and eval_data is not None:
        raise RowsteadError("`eval_data` needs `data`, the rows to train on")
    paths = None if data is None else given_files(data, folder)
    if isinstance(spec, Mapping):
        spec = RunSpec.from_dict(spec if paths is None else _with_files(spec, paths))
    elif not isinstance(spec, RunSpec):
        spec = load_recipe(os.fspath(spec))
    if paths is None:
        return spec
    return replace_log(spec, paths, () if eval_data is None else given_files(eval_data, folder))


def replace_log(spec: RunSpec, train: tuple[str, ...], eval: tuple[str, ...] = ()) -> RunSpec:
    """A recipe that trains on other files, read with the settings of its own log; it evaluates on `eval`, or on its split of them."""
    like = spec.data.files
    log = choose_file_log(train, like=like)
    if like is not None:
        split = dataclasses.replace(like.split, eval_from=None) if eval else like.split
        log = dataclasses.replace(log, split=split, test_fraction=like.test_fraction)
    log = dataclasses.replace(log, eval=eval)
    kinds = dict.fromkeys(LOG_KINDS) | {log.kind: log}
    return dataclasses.replace(spec, data=dataclasses.replace(spec.data, **kinds))  # type: ignore[arg-type]


def given_files(data: Any, folder: Path) -> tuple[str, ...]:
    """The paths in `data`, or that of its table, which is kept under `folder`."""
    paths = list_files(data)
    return (str(keep_table(data, folder / FOLDER)),) if paths is None else paths


def _with_files(plain: Mapping[str, Any], paths: tuple[str, ...]) -> Mapping[str, Any]:
    """A recipe's content with a log of these files, where it has none or does not say which files."""
    data = plain.get("data", None if "base" in plain else {})
    if not isinstance(data, Mapping):
        return plain
    if not set(LOG_KINDS) & set(data):
        data = {**data, choose_file_log(paths).kind: {}}
    files = {
        kind: {**log, "train": list(paths)} for kind, log in data.items() if kind in FILE_KINDS and isinstance(log, Mapping)
    }
    return {**plain, "data": {**data, **files}}
