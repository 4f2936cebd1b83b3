"""Tracks what a run has changed since its last full checkpoint, which is what the next incremental one holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rowstead.data.batch import Sparse
from rowstead.distributed.process_group import ProcessGroup
from rowstead.spec.features import Table
from rowstead.spec.train import TrainSpec
from rowstead.training.checkpoint import MANIFEST, Checkpoint
from rowstead.training.checkpoint_increment import Increment
from rowstead.training.saved_tensors import IncrementalTensors
from rowstead.training.touched import TouchedRows


class CheckpointChanges:
    """The rows that were touched since the last full checkpoint of a run.

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

    def mark(self, sparse: Sparse) -> None:
        """Mark the rows of a batch in CPU memory, which a step is about to change."""
        if self._touched is not None:
            self._touched.mark(sparse)

    def forget(self) -> None:
        """Make the next checkpoint a full one: any row may have changed."""
        self._base = None

    def next(self, folder: Path, process_group: ProcessGroup) -> Increment | None:
        """The content of the next checkpoint in `folder`; None for a full one. All processes of a job call this."""
        if self._touched is None or self._base is None or self._number + 1 >= self._spec.full_checkpoint_every:
            return None
        if not process_group.gather((folder / self._base / MANIFEST).is_file())[0]:
            return None  # it was deleted
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
            self._touched.clear()
            self._base, self._number = path.name, 0
