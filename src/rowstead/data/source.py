"""`Source`: a log that yields batches in an order fixed by its seed, from any place, for any share of the readers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Any, Protocol

from rowstead.data.batch import Batch

Cursor = dict[str, int]
"""Where a reader stands after a batch: small, JSON-able, opaque to everybody but the source that made it."""


class Source(Protocol):
    """One split of a log.

    The sequence of batches depends only on the source, its seed, `batch_size`, `epoch`, `rank` and `world_size`: never on
    threads or timing. Over all ranks each example of an epoch is read exactly once; ranks' shares differ by at most one.
    """

    num_samples: int
    """Examples in the split, bad rows included."""

    def batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1, cursor: Cursor | None = None
    ) -> Iterator[tuple[Batch, Cursor]]:
        """Batches of one epoch, each with the cursor that continues right after it; the last batch may be short."""
        ...


class SourceWrapper(ABC):
    """A Source over another: its batches, each changed in one way, and whatever else it knows."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.num_samples = source.num_samples

    @abstractmethod
    def _changed(self, batch: Batch) -> Batch: ...

    def batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1, cursor: Cursor | None = None
    ) -> Iterator[tuple[Batch, Cursor]]:
        batches = self._source.batches(batch_size, epoch=epoch, rank=rank, world_size=world_size, cursor=cursor)
        try:
            for batch, after in batches:
                yield self._changed(batch), after
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def __getattr__(self, name: str) -> Any:
        """What some sources know besides, such as `num_skipped`."""
        return getattr(self._source, name)
