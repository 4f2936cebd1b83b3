"""Rows on the CPU for a model on a GPU: the CPU pools rows with its own kernels and sends pooled vectors.

Per step the batch's ids go to the host, pooled vectors to the GPU and their gradients back: 8 bytes per id and 8 bytes per pooled
number, however many rows a bag has. The inner store, in RAM or on SSD, runs on the CPU and never sees the GPU.

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
from rowstead.stores.device import resolve_device
from rowstead.stores.state import StatePart


@dataclass
class _HostBatch:
    """A batch that was prefetched or looked up, with its copy in system memory."""

    ids: Tensor
    """The original tensor, which identifies the batch."""
    here: Sparse
    copied: Any = None
    """CUDA event after which `here` holds the batch."""

    def wait(self) -> Sparse:
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        return self.here


class HostStore(EmbeddingStore):
    """An EmbeddingStore for batches on `device` over an inner store on the CPU.

    One thread makes all calls to `inner`, in order. So `update` returns before the rows have changed, and the next look-up waits for
    it. An error in an update is raised by the next call.
    """

    def __init__(self, inner: EmbeddingStore, device: torch.device | str, *, check: bool = True) -> None:
        super().__init__(inner.layout, check=check)
        self.inner = inner
        self._device = resolve_device(device)
        self._bus = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        """Stream of the copies, so that they wait only for what they copy."""
        self._work = ThreadPoolExecutor(1, thread_name_prefix="host-rows")
        self._updating: Future[None] | None = None
        self._prefetched: deque[_HostBatch] = deque()
        self._current: _HostBatch | None = None

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
        sparse = self.check_batch(sparse)
        self._raise_failed_update()
        pooling = self._work.submit(self._pool, self._batch(sparse))

        def pooled() -> Tensor:
            result, sent = pooling.result()
            self._raise_failed_update()
            if sent is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(sent)
                result.record_stream(current)
            return result

        return pooled

    @torch.no_grad()
    def update(self, sparse: Sparse, grad: Tensor, *, lr: float, step: int) -> None:
        sparse = self.check_batch(sparse)
        if self._check and not self.layout.is_history:  # the flat gradients of histories are for `inner` to check
            check_gradient(self.layout, sparse.offsets, grad)
        self._raise_failed_update()
        batch, self._current = self._batch(sparse), None
        here, fetched = self._copy_gradient(grad.detach())

        def work() -> None:
            if fetched is not None:
                fetched.synchronize()
            self.inner.update(batch.wait(), here, lr=lr, step=step)

        self._updating = self._work.submit(work)
        if self._bus is None:
            self._wait()

    @property
    def batches_ahead(self) -> int:
        return max(1, self.inner.batches_ahead)

    def prefetch(self, sparse: Sparse) -> None:
        """Start to copy the batch's ids, and prefetch it in the inner store."""
        sparse = self.check_batch(sparse)
        batch = self._copy_batch(sparse)
        self._prefetched.append(batch)
        self._work.submit(lambda: self.inner.prefetch(batch.wait()))

    def drop_prefetched(self) -> None:
        self._wait()
        self._prefetched.clear()
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
        """The batch in system memory, or its pending copy."""
        if not self.training:  # the batch that is trained on may not be updated yet
            return self._copy_batch(sparse)
        if self._current is None or self._current.ids is not sparse.ids:
            is_next = self._prefetched and self._prefetched[0].ids is sparse.ids
            self._current = self._prefetched.popleft() if is_next else self._copy_batch(sparse)
        return self._current

    def _copy_batch(self, sparse: Sparse) -> _HostBatch:
        if self._bus is None:
            return _HostBatch(sparse.ids, sparse)
        with self._on_bus():
            here = Sparse(
                ids=_to_host(sparse.ids, self._bus),
                offsets=_to_host(sparse.offsets, self._bus),
                num_features=sparse.num_features,
                weights=None if sparse.weights is None else _to_host(sparse.weights, self._bus),
                checked_for=sparse.checked_for,
            )
            return _HostBatch(sparse.ids, here, _record_event(self._bus))

    def _copy_gradient(self, grad: Tensor) -> tuple[Tensor, Any]:
        """A copy of the gradient in system memory, and the event after which it is complete."""
        if self._bus is None:
            return grad, None
        with self._on_bus():
            return _to_host(grad, self._bus), _record_event(self._bus)

    @torch.no_grad()
    def _pool(self, batch: _HostBatch) -> tuple[Tensor, Any]:
        """Look up on the CPU; returns pooled vectors on the device, and the event after which they are complete."""
        pooled = self.inner.lookup(batch.wait())
        if self._bus is None:
            return pooled, None
        pinned = torch.empty(pooled.shape, dtype=pooled.dtype, pin_memory=True).copy_(pooled)
        with torch.cuda.stream(self._bus):
            return pinned.to(self._device, non_blocking=True), _record_event(self._bus)

    def _on_bus(self) -> Any:
        """On the stream of copies, after what was queued on the current one."""
        assert self._bus is not None
        self._bus.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._bus)

    def _wait(self) -> None:
        """Wait for the pending update."""
        if self._updating is not None:
            updating, self._updating = self._updating, None
            updating.result()

    def _raise_failed_update(self) -> None:
        if self._updating is not None and self._updating.done():
            self._wait()


def _to_host(tensor: Tensor, stream: Any) -> Tensor:
    """A copy in pinned memory, queued on `stream`, which is the current one."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    return copy


def _record_event(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event
