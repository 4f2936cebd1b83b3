"""One process's share of the batches that all processes of a job train on together."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from rowstead.contracts.batch import Batch
from rowstead.contracts.source import Cursor, Source


class SharedSource:
    """A Source of which process `rank` of `world` gets its share of each batch: together they have what one alone would read.

    Every process reads the whole batch and keeps its part, so all stand at the same cursor and come to the same end; a source
    that can make shares itself need not make the rest. With few examples left a share may be empty.
    """

    def __init__(self, source: Source, rank: int, world: int) -> None:
        self._makes_shares = hasattr(source, "shared")
        self._source = source.shared(rank, world) if hasattr(source, "shared") else source
        self._rank, self._world = rank, world
        self.num_samples = source.num_samples

    def batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world: int = 1, cursor: Cursor | None = None
    ) -> Iterator[tuple[Batch, Cursor]]:
        batches = self._source.batches(batch_size, epoch=epoch, rank=rank, world=world, cursor=cursor)
        try:
            for batch, after in batches:
                yield batch if self._makes_shares else batch.share(self._rank, self._world), after
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def __getattr__(self, name: str) -> Any:
        """What some sources know besides, such as `num_skipped`."""
        return getattr(self._source, name)
