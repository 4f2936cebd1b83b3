"""Writes checkpoints beside training: a thread writes a snapshot of the store while steps go on."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rowstead.distributed.process_group import ProcessGroup
from rowstead.records.usage import usable_cores
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.snapshot import Snapshot
from rowstead.stores.state import StatePart
from rowstead.training import checkpoint
from rowstead.training.checkpoint_increment import Increment

MAX_THREADS = 4
CORES_PER_THREAD = 4
"""A thread that writes is busy with digests: most cores stay with those that train and read."""

MAX_WAIT_S = 1.0
"""Seconds that steps may wait for a checkpoint without a word."""


class WriteCancelledError(Exception):
    """The run was interrupted, and what is being written is not wanted any more."""


@dataclass(frozen=True, kw_only=True)
class WrittenCheckpoint:
    """A checkpoint that is complete."""

    path: Path
    step: int
    increment: Increment | None
    write_s: float
    """From the snapshot to the end of writing."""
    waited_s: float
    """How long steps waited for memory in which rows are kept for the snapshot."""

    @property
    def warning(self) -> str | None:
        """What to say if steps waited for long."""
        if self.waited_s <= MAX_WAIT_S:
            return None
        return (
            f"steps waited {self.waited_s:.1f} s while the checkpoint of step {self.step:,} was written: they changed more rows than "
            "are kept in memory until they are written. A faster disk would shorten it, or incremental checkpoints "
            "(train.full_checkpoint_every)"
        )


@dataclass
class _Write:
    step: int
    done: Future[WrittenCheckpoint]
    is_cancelled: threading.Event = field(default_factory=threading.Event)


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread if the store has snapshots, else at once.

    All processes of a job call `start` and `finish` at the same steps.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        self._group = process_group
        self._thread_group: ProcessGroup | None = None
        """For the collectives of the thread that writes."""
        self._write: _Write | None = None

    def too_slow_for(self, step: int) -> str | None:
        """What to say if a checkpoint is due while that of an earlier step is still being written."""
        if self._write is None or self._write.done.done() or self._write.step == step:
            return None
        return (
            f"the checkpoint of step {self._write.step:,} is still being written: training waits for it, and then saves step {step:,}. "
            "Raise train.checkpoint_every"
        )

    def is_saved(self) -> bool:
        """Whether a checkpoint waits for `finish` that is complete."""
        return self._write is not None and self._write.done.done() and self._write.done.exception() is None

    def has_failed(self) -> bool:
        """Whether a checkpoint waits for `finish`, which will raise."""
        return self._write is not None and self._write.done.done() and self._write.done.exception() is not None

    def start(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: dict[str, Any],
        *,
        keep: int,
        store: EmbeddingStore,
        increment: Increment | None = None,
    ) -> None:
        """Start to write what `checkpoint.save` would write now; `tensors` may change afterwards. Raises what is known at once."""
        assert self._write is None, "finish the one before"
        started, snapshot = time.perf_counter(), store.snapshot()
        is_beside = all(self._group.gather(snapshot is not None))
        if snapshot is not None and not is_beside:
            snapshot.close()
        if snapshot is None or not is_beside:
            snapshot = Snapshot(parts=store.parts())
        write = _Write(step, Future())
        num_threads = max(1, min(MAX_THREADS, usable_cores() // (CORES_PER_THREAD * self._group.world_size)))

        def save() -> None:
            try:
                path = checkpoint.save(
                    folder,
                    step,
                    tensors,
                    facts,
                    keep,
                    parts=[_cancellable(part, write.is_cancelled) for part in snapshot.parts],
                    increment=increment,
                    process_group=group,
                    threads=num_threads if is_beside else 1,
                )
            except BaseException as error:  # noqa: BLE001, RUF100 - `finish` raises it
                snapshot.close()
                write.done.set_exception(error)
            else:
                snapshot.close()
                spent_s, waited_s = time.perf_counter() - started, snapshot.waited_s()
                write.done.set_result(
                    WrittenCheckpoint(path=path, step=step, increment=increment, write_s=spent_s, waited_s=waited_s)
                )

        self._write, group = write, self._group
        if is_beside:
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            group = self._thread_group = self._thread_group or self._group.for_other_thread()
            threading.Thread(target=save, name="checkpoint", daemon=True).start()
        else:
            save()
            write.done.result()

    def finish(self) -> WrittenCheckpoint | None:
        """Wait for the checkpoint that was started; raises if it failed, and returns None if there is none."""
        if self._write is None:
            return None
        written = self._write.done.result()
        self._write = None
        return written

    def close(self, *, cancel: bool = False) -> None:
        """Wait for the checkpoint that was started, whether it fails or not; with `cancel` give it up."""
        write, self._write = self._write, None
        if write is not None:
            if cancel:
                write.is_cancelled.set()
            write.done.exception()


def _cancellable(part: StatePart, is_cancelled: threading.Event) -> StatePart:
    def check(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def checked(*rows: Any) -> Tensor:
            if is_cancelled.is_set():
                raise WriteCancelledError
            return read(*rows)

        return checked

    return dataclasses.replace(part, read=check(part.read), take=check(part.take))
