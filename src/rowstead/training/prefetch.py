"""Batches copied to a GPU while it is busy with the one before, and announced to stores that bring their rows in."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

import torch

from rowstead.data.batch import Batch
from rowstead.stores.base import EmbeddingStore

Where = TypeVar("Where")
"""What comes with a batch, such as the cursor of its reader."""


def pin_batches(batches: Iterable[tuple[Batch, Where]]) -> Iterator[tuple[Batch, Where]]:
    """The batches in memory from which a GPU copies by itself."""
    for batch, cursor in batches:
        yield batch.pin_memory(), cursor


def copy_ahead(batches: Iterator[tuple[Batch, Where]], device: torch.device) -> Iterator[tuple[Batch, Batch, Where]]:
    """Each batch with its copy on the GPU, which was begun while the batch before was trained on."""
    stream = torch.cuda.Stream(device)

    def begin() -> tuple[Batch, Batch, Where] | None:
        item = next(batches, None)
        if item is None:
            return None
        with torch.cuda.stream(stream):
            return item[0], item[0].to(device, non_blocking=True), item[1]

    ahead = begin()
    while ahead is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        ready = ahead
        for tensor in ready[1].tensors():
            tensor.record_stream(current)
        error: Exception | None = None
        try:
            ahead = begin()
        except Exception as raised:  # noqa: BLE001, RUF100 - whatever it is, the batch before it comes first
            error = raised
        yield ready
        if error is not None:
            raise error


def prefetch_rows(
    items: Iterator[tuple[Batch, Batch, Where]], store: EmbeddingStore
) -> Generator[tuple[Batch, Batch, Where], None, None]:
    """The same items, each a batch as it was read, and on the device that trains; the store hears of each as early as it wants to."""
    ahead: deque[tuple[Batch, Batch, Where]] = deque()
    error: Exception | None = None
    try:
        while True:
            while error is None and len(ahead) <= store.batches_ahead:
                try:
                    item = next(items, None)
                except Exception as raised:  # noqa: BLE001, RUF100 - whatever it is, the batches before it come first
                    error = raised
                    break
                if item is None:
                    break
                store.prefetch(item[1].sparse)
                ahead.append(item)
            if not ahead:
                break
            yield ahead.popleft()
        if error is not None:
            raise error
    finally:
        store.drop_prefetched()
