"""Work ahead of a step: epochs read one after the other, batches copied to a GPU during the step before, and rows prefetched by their store."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from rowstead.data.batch import Batch, StagedBatch
from rowstead.data.row_order import Cursor
from rowstead.data.source import Source
from rowstead.records.timers import Timers
from rowstead.spec.phases import Phase
from rowstead.stores.base import EmbeddingStore

Staged = TypeVar("Staged", bound=StagedBatch)
Item = TypeVar("Item")
Where = TypeVar("Where")
"""What comes with a batch, such as its reader's cursor."""


def read_epochs(
    source: Source, batch_size: int, epochs: Iterable[int], cursor: Cursor | None, device: torch.device
) -> Generator[tuple[StagedBatch, tuple[int, Cursor]], None, None]:
    """The batches of some epochs, each with its epoch and the cursor after it; `cursor` is where the first epoch starts."""
    read = source.staged_batches if device.type == "cuda" else source.batches
    for epoch in epochs:
        with contextlib.closing(read(batch_size, epoch=epoch, cursor=cursor)) as batches:
            for batch, after in batches:
                yield batch, (epoch, after)
        cursor = None


def time_waiting(items: Iterator[Item], timers: Timers) -> Iterator[Item]:
    """The same items; the time for which each is waited for is that of reading."""
    while True:
        with timers.phase(Phase.DATA):
            item = next(items, None)
        if item is None:
            return
        yield item


def move_batches(batches: Iterator[tuple[Staged, Where]], device: torch.device) -> Iterator[tuple[Staged, Batch, Where]]:
    """Each batch as it was read, and on the device that trains."""
    if device.type == "cuda":
        return copy_ahead(batches, device)
    return ((batch, batch.to(device), where) for batch, where in batches)


def copy_ahead(batches: Iterator[tuple[Staged, Where]], device: torch.device) -> Iterator[tuple[Staged, Batch, Where]]:
    """Each batch with its copy on the GPU, started during the step before."""
    stream = torch.cuda.Stream(device)

    def start() -> tuple[Staged, Batch, Where] | None:
        item = next(batches, None)
        if item is None:
            return None
        with torch.cuda.stream(stream):
            return item[0], item[0].to(device, non_blocking=True), item[1]

    ahead = start()
    while ahead is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        ready = ahead
        for tensor in ready[1].tensors():
            tensor.record_stream(current)
        error: Exception | None = None
        try:
            ahead = start()
        except Exception as raised:  # noqa: BLE001, RUF100 - the batch before it comes first
            error = raised
        yield ready
        if error is not None:
            raise error


def prefetch_rows(
    items: Iterator[tuple[Staged, Batch, Where]], store: EmbeddingStore, timers: Timers | None = None
) -> Generator[tuple[Staged, Batch, Where], None, None]:
    """The same items, each a batch as it was read and on the device that trains; `store` prefetches as many ahead as it wants."""
    phase: AbstractContextManager[None] = contextlib.nullcontext()
    if timers is not None and store.batches_ahead:
        phase = timers.phase(Phase.PREFETCH)
    ahead: deque[tuple[Staged, Batch, Where]] = deque()
    error: Exception | None = None
    try:
        while True:
            while error is None and len(ahead) <= store.batches_ahead:
                try:
                    item = next(items, None)
                except Exception as raised:  # noqa: BLE001, RUF100 - the batches before it come first
                    error = raised
                    break
                if item is None:
                    break
                with phase:
                    store.prefetch(item[1].sparse)
                ahead.append(item)
            if not ahead:
                break
            yield ahead.popleft()
        if error is not None:
            raise error
    finally:
        store.drop_prefetched()
