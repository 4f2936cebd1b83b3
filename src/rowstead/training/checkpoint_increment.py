"""Incremental checkpoints: which rows they hold, and how these are written.

After Check-N-Run (Eisenman et al., 2022): only the rows that were touched since the last full checkpoint are saved. Everything else
that training changes is small, and saved each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.distributed.process_group import ProcessGroup
from rowstead.spec.features import Table
from rowstead.spec.train import CheckpointFormat, TrainSpec
from rowstead.stores.state import StatePart
from rowstead.training.checkpoint_files import ENCODINGS, TensorPiece, columns_of, piece_of_tensor
from rowstead.training.checkpoint_manifest import TOUCHED
from rowstead.training.saved_tensors import IncrementalTensors
from rowstead.training.touched import RowBitmap, TouchedRows

if TYPE_CHECKING:
    from rowstead.training.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Increment:
    """What an incremental checkpoint holds: the rows that differ from a full one in the same folder."""

    base: str
    """Name of the full checkpoint."""
    number: int
    """Incremental checkpoints since the full one, including this."""
    touched: dict[str, RowBitmap]
    """Touched rows by table, the same in all processes of a job."""
    encoding: CheckpointFormat = "exact"


class CheckpointChanges:
    """The rows that were touched since the last full checkpoint of a run, which is what the next incremental one holds.

    Nothing is tracked if every checkpoint is full. `saved` is the run's own checkpoint that it resumes from.
    """

    def __init__(self, spec: TrainSpec, tables: Sequence[Table], saved: Checkpoint | None = None) -> None:
        self._spec = spec
        self._touched = TouchedRows(tables) if spec.full_checkpoint_every > 1 else None
        self._base: str | None = None
        self._number = 0
        if saved is None or self._touched is None:
            return
        self._base, self._number = saved.base or saved.path.name, saved.number
        if isinstance(saved.tensors, IncrementalTensors):
            for table in tables:
                torch.from_numpy(self._touched.bits(table)).copy_(saved.tensors.touched(table.name))

    @property
    def marks_rows(self) -> bool:
        """Whether `mark` does anything; the ids of a batch that is staged for a GPU are not free."""
        return self._touched is not None

    def mark(self, sparse: Sparse) -> None:
        """Mark the rows of a batch in CPU memory, which a step is about to change."""
        if self._touched is not None:
            self._touched.mark(sparse)

    def forget(self) -> None:
        """Make the next checkpoint a full one: any row may have changed."""
        self._base = None

    def next(self, folder: Path, process_group: ProcessGroup) -> Increment | None:
        """The content of the next checkpoint in `folder`; None for a full one. All processes of a job call this.

        Rows that are marked from now on belong to the checkpoint after it.
        """
        if self._touched is None:
            return None
        is_full = self._base is None or self._number + 1 >= self._spec.full_checkpoint_every
        if is_full or not process_group.gather((folder / str(self._base)).is_dir())[0]:  # it may have been deleted
            self._touched.clear()
            self._base = None
            return None
        assert self._base is not None
        self._touched.merge(process_group)
        return Increment(
            base=self._base,
            number=self._number + 1,
            touched={table.name: self._touched.rows_of(table) for table in self._touched.tables},
            encoding=self._spec.checkpoint_format,
        )

    def saved(self, path: Path, increment: Increment | None) -> None:
        """Record that the checkpoint with what `next` returned is at `path`."""
        if increment is not None:
            self._number = increment.number
        elif self._touched is not None:
            self._base, self._number = path.name, 0


def touched_bitmaps(increment: Increment) -> list[TensorPiece]:
    """Bitmaps of the rows of each table that an incremental checkpoint holds."""
    return [piece_of_tensor(f"{TOUCHED}{table}", torch.from_numpy(rows.bits)) for table, rows in increment.touched.items()]


def piece_of_touched_rows(name: str, part: StatePart, max_rows: int, increment: Increment) -> TensorPiece:
    """The touched rows of a part, as a piece of a tensor of all touched rows of the table.

    Optimizer state is always exact: a sum of squares rounded to zero would make the next step far too large.
    """
    table, _, what = part.name.rpartition(".")
    bits = increment.touched[table]
    before, after = bits.position(part.first_row), bits.position(part.first_row + part.num_rows)
    chosen: CheckpointFormat = increment.encoding
    if what != "rows" or not ENCODINGS[chosen].saves_bytes(part.dtype, part.shape[1]):
        chosen = "exact"
    encoding = ENCODINGS[chosen]

    def read(start: int, stop: int) -> Tensor:
        return encoding.encode(part.take(bits.at(before + start, before + stop) - part.first_row).cpu())

    return TensorPiece(
        name=name,
        dtype=part.dtype,
        shape=(bits.count, part.shape[1]),
        num_rows=after - before,
        row_shape=(part.num_columns + encoding.extra_columns,),
        read=read,
        first_row=before,
        columns=columns_of(part),
        stored_dtype=encoding.dtype,
        max_rows=max_rows,
        notes={"touched": f"{TOUCHED}{table}", "encoding": chosen},
    )
