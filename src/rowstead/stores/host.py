"""Rows in system memory for a model on a GPU: the CPU pools them with its own kernels and ships pooled vectors.

Over the bus go the batch's ids to the host, pooled vectors to the GPU and their gradients back: 8 bytes an id and 8 bytes a
pooled number for each step, however many rows a bag has. Whatever store keeps the rows behind it, in RAM or on SSD, stays on
the CPU and never sees the GPU.

Letters: B examples, F features, nnz ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.check import check_gradient
from rowstead.stores.base import EmbeddingStore
from rowstead.stores.checked import check_batch
from rowstead.stores.device import numbered
from rowstead.stores.state import StatePart


@dataclass
class _HostBatch:
    """A batch that was announced or looked up, with its copy in system memory."""

    ids: Tensor
    """As they were given; by them a batch is known again."""
    here: Sparse
    copied: Any = None
    """CUDA's event after which `here` holds the batch."""

    def arrived(self) -> Sparse:
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        return self.here


class HostStore(EmbeddingStore):
    """An EmbeddingStore for batches on `device` over one whose rows are the CPU's business.

    One thread does all that `inner` is asked for, in the order in which it was asked. So `update` returns before the rows have
    changed, and whoever looks them up next waits for that. What goes wrong in an update is raised by the next call.
    """

    def __init__(self, inner: EmbeddingStore, device: torch.device | str, *, check: bool = True) -> None:
        super().__init__(inner.layout, check=check)
        self.inner = inner
        self._device = numbered(device)
        self._bus = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        """Where copies are queued, so that they wait for nothing but what they copy."""
        self._work = ThreadPoolExecutor(1, thread_name_prefix="host-rows")
        self._updating: Future[None] | None = None
        self._announced: deque[_HostBatch] = deque()
        self._current: _HostBatch | None = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> HostStore:
        """Rows stay where they are when the model around them is moved."""
        return self

    @property
    def kernel(self) -> str:
        return self.inner.kernel

    @property
    def device(self) -> torch.device:
        return self._device

    # An EmbeddingStore

    runs_in_background = True

    def lookup(self, sparse: Sparse) -> Tensor:
        return self.start_lookup(sparse)()

    def start_lookup(self, sparse: Sparse) -> Callable[[], Tensor]:
        if self._check:
            sparse = check_batch(sparse, self.layout, self._device)
        self._raise_what_failed()
        pooling = self._work.submit(self._pool, self._batch(sparse))

        def pooled() -> Tensor:
            result, shipped = pooling.result()
            self._raise_what_failed()
            if shipped is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(shipped)
                result.record_stream(current)
            return result

        return pooled

    @torch.no_grad()
    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        if self._check:
            sparse = check_batch(sparse, self.layout, self._device)
            check_gradient(self.layout, sparse.offsets, grad)
        self._raise_what_failed()
        batch, self._current = self._batch(sparse), None
        here, fetched = self._fetched(grad.detach())

        def work() -> None:
            if fetched is not None:
                fetched.synchronize()
            self.inner.update(batch.arrived(), here, lr=lr, step=step)

        self._updating = self._work.submit(work)
        if self._bus is None:
            self._wait()

    @property
    def batches_ahead(self) -> int:
        return max(1, self.inner.batches_ahead)

    def prefetch(self, sparse: Sparse) -> None:
        """Begin to copy the batch's ids; the store behind is told as well."""
        if self._check:
            sparse = check_batch(sparse, self.layout, self._device)
        batch = self._copied(sparse)
        self._announced.append(batch)
        self._work.submit(lambda: self.inner.prefetch(batch.arrived()))

    def drop_prefetched(self) -> None:
        """Batches that were announced and not looked up are not coming after all."""
        self._wait()
        self._announced.clear()
        self._current = None
        self._work.submit(self.inner.drop_prefetched).result()

    def rows(self, table: str, ids: Tensor) -> Tensor:
        self._wait()
        return self.inner.rows(table, ids.cpu()).to(ids.device)

    def parts(self) -> list[StatePart]:
        self._wait()
        return self.inner.parts()

    def limit_prefetch(self, num_batches: int) -> None:
        self.inner.limit_prefetch(num_batches)

    def copy_for_thread(self) -> HostStore:
        return HostStore(self.inner.copy_for_thread(), self._device, check=self._check)

    def flush(self) -> None:
        self._wait()
        self._work.submit(self.inner.flush).result()

    def figures(self) -> dict[str, float]:
        return self.inner.figures()

    def close(self) -> None:
        self._work.shutdown()
        self.inner.close()

    # Copies

    def _batch(self, sparse: Sparse) -> _HostBatch:
        """The batch in system memory, or on its way there."""
        if not self.training:  # the batch that is trained on may not have been updated yet
            return self._copied(sparse)
        if self._current is None or self._current.ids is not sparse.ids:
            is_next = self._announced and self._announced[0].ids is sparse.ids
            self._current = self._announced.popleft() if is_next else self._copied(sparse)
        return self._current

    def _copied(self, sparse: Sparse) -> _HostBatch:
        if self._bus is None:
            return _HostBatch(sparse.ids, sparse)
        with self._aside():
            here = Sparse(
                ids=_to_host(sparse.ids, self._bus),
                offsets=_to_host(sparse.offsets, self._bus),
                num_features=sparse.num_features,
                weights=None if sparse.weights is None else _to_host(sparse.weights, self._bus),
                checked_for=sparse.checked_for,
            )
            return _HostBatch(sparse.ids, here, _recorded(self._bus))

    def _fetched(self, grad: Tensor) -> tuple[Tensor, Any]:
        """A gradient in system memory, and the event after which it is there."""
        if self._bus is None:
            return grad, None
        with self._aside():
            return _to_host(grad, self._bus), _recorded(self._bus)

    @torch.no_grad()
    def _pool(self, batch: _HostBatch) -> tuple[Tensor, Any]:
        """Pooled vectors on the device, and the event after which they are there."""
        pooled = self.inner.lookup(batch.arrived())
        if self._bus is None:
            return pooled, None
        pinned = torch.empty(pooled.shape, dtype=pooled.dtype, pin_memory=True).copy_(pooled)
        with torch.cuda.stream(self._bus):
            return pinned.to(self._device, non_blocking=True), _recorded(self._bus)

    def _aside(self) -> Any:
        """On the stream of copies, after what was queued on the current one."""
        assert self._bus is not None
        self._bus.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._bus)

    def _wait(self) -> None:
        """Until no update is under way."""
        if self._updating is not None:
            updating, self._updating = self._updating, None
            updating.result()

    def _raise_what_failed(self) -> None:
        if self._updating is not None and self._updating.done():
            self._wait()


def _to_host(tensor: Tensor, stream: Any) -> Tensor:
    """A copy in page-locked memory, queued on `stream`, which is the current one."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    return copy


def _recorded(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event
