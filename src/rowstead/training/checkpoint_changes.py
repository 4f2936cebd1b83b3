"""What a run has changed since its last full checkpoint, and so what the next one has to hold."""

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
from rowstead.training.saved_tensors import Restored
from rowstead.training.touched import Touched


class CheckpointChanges:
    """The rows that were touched since the last full checkpoint of a run.

    Nothing is kept where every checkpoint is full. `saved` is the checkpoint of this run, in its own folder, that it goes on from.
    """

    def __init__(self, spec: TrainSpec, tables: Sequence[Table], saved: Checkpoint | None = None) -> None:
        self._spec = spec
        self._touched = Touched(tables) if spec.full_checkpoint_every > 1 else None
        self._base: str | None = None
        self._number = 0
        if saved is None or self._touched is None:
            return
        self._base, self._number = saved.base or saved.path.name, saved.number
        if isinstance(saved.tensors, Restored):
            for table in tables:
                torch.from_numpy(self._touched.bits(table)).copy_(saved.tensors.touched(table.name))

    def mark(self, sparse: Sparse) -> None:
        """A step is about to change the rows of this batch, which is in the CPU's memory."""
        if self._touched is not None:
            self._touched.mark(sparse)

    def forget(self) -> None:
        """Any row may have changed: the next checkpoint is full."""
        self._base = None

    def next(self, folder: Path, process_group: ProcessGroup) -> Increment | None:
        """What the next checkpoint in `folder` is to hold; none if it is to be full. All processes of a job ask at once."""
        if self._touched is None or self._base is None or self._number + 1 >= self._spec.full_checkpoint_every:
            return None
        if not process_group.gather((folder / self._base / MANIFEST).is_file())[0]:
            return None  # somebody has taken it away
        self._touched.agree(process_group)
        return Increment(
            base=self._base,
            number=self._number + 1,
            touched={table.name: self._touched.rows_of(table) for table in self._touched.tables},
            encoding=self._spec.checkpoint_format,
        )

    def saved(self, path: Path, increment: Increment | None) -> None:
        """The next checkpoint, as `next` gave it, is at `path`."""
        if increment is not None:
            self._number = increment.number
        elif self._touched is not None:
            self._touched.clear()
            self._base, self._number = path.name, 0
