"""`SplitWriter`: writes a log as Parquet files of bounded size, all of them or none.

Files are written under names that end in `.tmp` and renamed when everything is written, so a run that is killed or runs out of disk
never leaves a truncated file, nor (except during renaming) an incomplete set of files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rowstead.data.shuffle import RowShuffler
from rowstead.spec.errors import DataError

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the total."""
OnBadRow = Literal["error", "skip"]
"""A malformed line: stop there, or skip it and count it."""

SPLITS = ("train", "eval", "test")
DEFAULT_ROWS_PER_FILE = 4_000_000
DEFAULT_ROWS_PER_GROUP = 65_536


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a conversion wrote and skipped."""

    folder: Path
    """Folder of the files."""
    num_rows: Mapping[str, int]
    """Rows written to each split."""
    files: Mapping[str, tuple[Path, ...]]
    """Files of each split."""
    num_bytes_read: int
    """Size of the inputs on disk."""
    num_bytes_written: int
    """Size of the files."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Skipped lines by reason."""
    first_skipped: tuple[str, ...] = ()
    """The first few skipped lines, with file and line number."""

    @property
    def num_skipped(self) -> int:
        """Total number of skipped lines."""
        return sum(self.skipped.values())


class SplitWriter:
    """Appends Arrow tables to `train-00000.parquet`, `eval-00000.parquet` and so on in one folder.

    Use it in a `with` block: leaving the block gives the files their final names; an exception removes them all. Only one writer may
    use a folder at a time. Leftovers of a killed writer are removed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        schema: pa.Schema,
        *,
        rows_per_file: int = DEFAULT_ROWS_PER_FILE,
        rows_per_group: int = DEFAULT_ROWS_PER_GROUP,
        overwrite: bool = False,
        compression: str = "zstd",
        dictionary_columns: Sequence[str] | bool = True,
        shuffle_seed: int | None = None,
    ) -> None:
        """With `shuffle_seed` the rows of each split are written in random order."""
        for name, value in (("rows_per_file", rows_per_file), ("rows_per_group", rows_per_group)):
            if value < 1:
                raise DataError(f"{name} must be at least 1, got {value}")
        self.folder = Path(folder)
        self._old = _earlier_files(self.folder, overwrite)
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for split in SPLITS:
                for left in self.folder.glob(f"{split}-*.parquet.tmp"):
                    left.unlink()
        options = {
            "schema": schema,
            "compression": compression,
            "use_dictionary": dictionary_columns,
            "write_page_checksum": True,
        }
        self._splits = {
            split: _SplitFile(self.folder / split, options, rows_per_file, min(rows_per_group, rows_per_file))
            for split in SPLITS
        }
        self._shufflers = {
            split: RowShuffler(self.folder / split, schema, shuffle_seed) for split in SPLITS if shuffle_seed is not None
        }
        self._num_rows = dict.fromkeys(SPLITS, 0)

    def write(self, split: str, rows: pa.Table) -> None:
        """Append rows to a split; they may be buffered until a row group is full."""
        self._num_rows[split] += rows.num_rows
        with disk_errors(self.folder):
            if split in self._shufflers:
                self._shufflers[split].add(rows)
            else:
                self._splits[split].append(rows)

    def write_by_mask(self, rows: pa.Table, held_out: NDArray[np.bool_]) -> None:
        """Append the rows that are `held_out` to the evaluation split and the others to the training split."""
        self.write("train", rows.filter(pa.array(~held_out)) if held_out.any() else rows)
        if held_out.any():
            self.write("eval", rows.filter(pa.array(held_out)))

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._finish()
        except BaseException:
            self._discard()
            raise

    def _finish(self) -> None:
        """Write the buffered rows and give all files their final names, replacing earlier files."""
        with disk_errors(self.folder):
            for name, shuffler in self._shufflers.items():
                for rows in shuffler.shuffled():
                    self._splits[name].append(rows)
            for split in self._splits.values():
                split.finish()
            made = {path for split in self._splits.values() for path in split.paths}
            for old in self._old:
                if old not in made:
                    old.unlink(missing_ok=True)
            for path in sorted(made):
                os.replace(f"{path}.tmp", path)

    def _discard(self) -> None:
        """Remove everything that was written; earlier files in the folder are unchanged."""
        for shuffler in self._shufflers.values():
            shuffler.discard()
        for split in self._splits.values():
            split.discard()

    def num_rows(self) -> dict[str, int]:
        """Rows of each split so far; the test split only if there is one."""
        return {name: num_rows for name, num_rows in self._num_rows.items() if num_rows or name != "test"}

    def check_not_empty(self, eval_wanted: bool) -> None:
        """Raise a DataError if a wanted split has no rows."""
        if not self._num_rows["train"]:
            raise DataError("the training split has no rows; nothing was written")
        if eval_wanted and not self._num_rows["eval"]:
            raise DataError("the evaluation split has no rows; nothing was written. Increase --eval-fraction")

    def summary(
        self, *, num_bytes_read: int, skipped: Mapping[str, int] | None = None, first_skipped: Sequence[str] = ()
    ) -> Summary:
        """The summary of a finished conversion."""
        files = {name: tuple(self._splits[name].paths) for name in self.num_rows()}
        return Summary(
            folder=self.folder,
            num_rows=self.num_rows(),
            files=files,
            num_bytes_read=num_bytes_read,
            num_bytes_written=sum(path.stat().st_size for paths in files.values() for path in paths),
            skipped=dict(skipped or {}),
            first_skipped=tuple(first_skipped),
        )


class _SplitFile:
    """The files of one split; buffers rows until a row group is full."""

    def __init__(self, start: Path, options: Mapping[str, Any], rows_per_file: int, rows_per_group: int) -> None:
        self._start, self._options = start, options
        self._rows_per_file, self._rows_per_group = rows_per_file, rows_per_group
        self._buffered: list[pa.Table] = []
        self._num_buffered = self._num_in_file = 0
        self._file: pq.ParquetWriter | None = None
        self.paths: list[Path] = []
        """The final names; until the end `.tmp` follows."""

    def append(self, table: pa.Table) -> None:
        self._buffered.append(table)
        self._num_buffered += table.num_rows
        while self._num_buffered >= (full := min(self._rows_per_group, self._rows_per_file - self._num_in_file)):
            self._flush(full)

    def finish(self) -> None:
        if self._num_buffered:
            self._flush(self._num_buffered)
        self._close_file()

    def discard(self) -> None:
        if self._file is not None:
            with suppress(OSError, ValueError):
                self._file.close()
        for path in self.paths:
            with suppress(OSError):
                os.unlink(f"{path}.tmp")

    def _flush(self, num_rows: int) -> None:
        """Write the first `num_rows` buffered rows as one row group."""
        buffered = pa.concat_tables(self._buffered)
        if self._file is None:
            self.paths.append(Path(f"{self._start}-{len(self.paths):05d}.parquet"))
            self._file = pq.ParquetWriter(f"{self.paths[-1]}.tmp", **self._options)
        self._file.write_table(buffered.slice(0, num_rows), row_group_size=num_rows)
        self._num_buffered -= num_rows
        self._buffered = [buffered.slice(num_rows)] if self._num_buffered else []
        self._num_in_file += num_rows
        if self._num_in_file >= self._rows_per_file:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._file = None
        self._num_in_file = 0
        with open(f"{self.paths[-1]}.tmp", "rb") as written:
            os.fsync(written.fileno())


def _earlier_files(folder: Path, overwrite: bool) -> list[Path]:
    """The files of an earlier conversion in `folder`; raises a DataError if there are some and `overwrite` is false."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; give a folder to write to")
    old = sorted(path for split in SPLITS for path in folder.glob(f"{split}-*.parquet"))
    if old and not overwrite:
        named = ", ".join(path.name for path in old[:3]) + (f" and {len(old) - 3} more" if len(old) > 3 else "")
        raise DataError(f"{folder} already has {named}; choose another folder, or pass --overwrite to replace them")
    return old


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn OSErrors while writing into a DataError that names the folder and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = "free some space, or choose a folder on another disk"
        if error.errno == errno.ENOSPC or "No space left" in str(error):
            raise DataError(f"the disk is full while writing to {folder}; {remedy}") from error
        if error.errno == errno.EDQUOT:
            raise DataError(f"the disk quota is exceeded while writing to {folder}; {remedy}") from error
        raise DataError(f"cannot write to {folder}: {error}") from error
