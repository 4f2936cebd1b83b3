"""One process's share of the batches that all processes of a job train on together."""

from __future__ import annotations

from rowstead.data.batch import Batch
from rowstead.data.source import Source, SourceWrapper


class LocalShareSource(SourceWrapper):
    """A Source of which process `rank` of `world_size` gets its share of each batch: together they have what one alone would read.

    Every process reads the whole batch and keeps its part, so all stand at the same cursor and come to the same end; a source
    that can make shares itself need not make the rest. With few examples left a share may be empty.
    """

    def __init__(self, source: Source, rank: int, world_size: int) -> None:
        super().__init__(source.shared(rank, world_size) if hasattr(source, "shared") else source)
        self._makes_shares = hasattr(source, "shared")
        self._rank, self._world = rank, world_size

    def _changed(self, batch: Batch) -> Batch:
        return batch if self._makes_shares else batch.share(self._rank, self._world)
