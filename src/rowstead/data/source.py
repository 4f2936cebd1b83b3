"""The contracts of a log: `LogSplit`, raw rows of one split, and `Source`, batches in an order that its seed fixes."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING

from rowstead.data.batch import Batch, StagedBatch, check_batch
from rowstead.data.block import LogPiece, RawBlock
from rowstead.data.footers import Fingerprint
from rowstead.data.row_order import Cursor, RowOrder
from rowstead.kernels.layout import Layout

if TYPE_CHECKING:
    from rowstead.data.encode import Encoder
    from rowstead.data.file_log import FileLog

Batches = Generator[tuple[Batch, Cursor], None, None]
"""Batches, each with the cursor that continues right after it. `close()` stops the threads that read ahead."""
StagedBatches = Generator[tuple[StagedBatch, Cursor], None, None]


class LogSplit(ABC):
    """One split of a log, before encoding. Every kind of log has one, which its spec names (`LogSpec.split_class`).

    The constructor takes the kind's spec, the features, `train`, `eval` or `test`, the id kinds of the model's training, if known, and
    of a model with several labels its tasks.
    """

    id_kinds: dict[str, str]
    """Whether each sparse column has `text` or `integers`."""

    @abstractmethod
    def raw_blocks(self, max_rows: int | None = None) -> Iterator[RawBlock]:
        """Raw rows, bad ones included: all, or about `max_rows`."""

    @abstractmethod
    def dense_blocks(self, max_rows: int) -> Iterator[RawBlock]:
        """As `raw_blocks`, with only dense columns: dense transforms are learned from them."""

    @abstractmethod
    def pieces(self) -> Iterator[Callable[[], LogPiece]]:
        """All rows in order, for packing; several threads may call the functions, each of which makes a piece."""

    @property
    def fingerprints(self) -> Mapping[str, Fingerprint]:
        """What identifies the content of each file of the log, by path; empty for a log without files."""
        return {}

    @abstractmethod
    def source(self, encoder: Encoder, *, seed: int) -> Source:
        """Batches of this split; a training split may be shuffled by `seed`."""


class Source(ABC):
    """Batches of one split of a log.

    The sequence of batches depends only on the source, its seed, `batch_size`, `epoch`, `rank` and `world_size`, never on
    threads or timing. Over all ranks, each example of an epoch is read exactly once; the ranks' shares differ by at most one.

    `map`, `local_share` and `pin_memory` return another source and leave this one as it was.
    """

    num_samples: int
    """Examples in the split, bad rows included."""

    @abstractmethod
    def batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1, cursor: Cursor | None = None
    ) -> Batches:
        """Batches of one epoch, from `cursor` on; the last batch may be short."""

    def staged_batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1, cursor: Cursor | None = None
    ) -> StagedBatches:
        """As `batches`, for training on a GPU: until `to(device)` makes it a `Batch` there, each may have the layout that is cheapest to copy."""
        return self.batches(batch_size, epoch=epoch, rank=rank, world_size=world_size, cursor=cursor)

    @property
    def row_order(self) -> RowOrder | None:
        """The order of the rows in batches; None for what is not a whole split of a log."""
        return None

    @property
    def num_skipped(self) -> int | None:
        """Bad rows skipped so far, over all iterators; None for a log that cannot have any."""
        return None

    @property
    def background_cpu_s_per_sample(self) -> float:
        """CPU seconds per sample of threads other than the one that iterates."""
        return 0.0

    @property
    def file_log(self) -> FileLog | None:
        """The files that the rows come from, to copy other columns of; None if there are none."""
        return None

    def map(self, function: Callable[[Batch], Batch]) -> Source:
        """This source with `function` applied to each batch; several threads may call it at once."""
        return MappedSource(self, function)

    def check_ids(self, layout: Layout) -> Source:
        """This source with each batch checked against the tables of `layout`, and marked, by the threads that make batches."""

        def check(batch: Batch) -> Batch:
            sparse = check_batch(batch.sparse, layout)
            return batch if sparse is batch.sparse else dataclasses.replace(batch, sparse=sparse)

        return self.map(check)

    def local_share(self, rank: int, world_size: int) -> Source:
        """This source reduced to one process's share of each batch.

        Each process reads the whole batch and keeps its part, so that all have the same cursor and end together. The last share may be empty.
        """
        return self.map(lambda batch: batch.local_share(rank, world_size))

    def pin_memory(self) -> Source:
        """This source with its batches in pinned memory."""
        return self.map(Batch.pin_memory)


class MappedSource(Source):
    """A source with a function applied to each batch, in the thread that iterates."""

    def __init__(self, source: Source, function: Callable[[Batch], Batch]) -> None:
        self._source, self._function = source, function
        self.num_samples = source.num_samples

    def batches(
        self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1, cursor: Cursor | None = None
    ) -> Batches:
        batches = self._source.batches(batch_size, epoch=epoch, rank=rank, world_size=world_size, cursor=cursor)
        try:
            for batch, after in batches:
                yield self._function(batch), after
        finally:
            batches.close()

    @property
    def num_skipped(self) -> int | None:
        return self._source.num_skipped

    @property
    def background_cpu_s_per_sample(self) -> float:
        return self._source.background_cpu_s_per_sample

    @property
    def file_log(self) -> FileLog | None:
        return self._source.file_log
