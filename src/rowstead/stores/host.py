"""Rows in system memory for a model on a GPU: the CPU pools them with its own kernels and ships pooled vectors.

Over the bus go the batch's ids to the host, pooled vectors to the GPU and their gradients back: 8 bytes an id and 8 bytes a
pooled number for each step, however many rows a bag has. Whatever store keeps the rows behind it, in RAM or on SSD, stays on
the CPU and never sees the GPU.

Letters: B examples, F features, nnz ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rowstead.data.batch import Sparse
from rowstead.kernels.check import check_gradient
from rowstead.kernels.layout import Layout
from rowstead.stores.base import EmbeddingStore, StatePart
from rowstead.stores.checked import check_batch
from rowstead.stores.device import numbered
from rowstead.stores.state import load_parts, whole_state


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


class HostStore(nn.Module):
    """An EmbeddingStore for batches on `device` over one whose rows are the CPU's business.

    One thread does all that `inner` is asked for, in the order in which it was asked. So `update` returns before the rows have
    changed, and whoever looks them up next waits for that. What goes wrong in an update is raised by the next call.
    """

    def __init__(self, inner: EmbeddingStore, device: torch.device | str, *, check: bool = True) -> None:
        super().__init__()
        self.inner = cast("nn.Module", inner)
        self._inner = [inner]
        self.layout: Layout = inner.layout  # type: ignore[attr-defined]
        self.tables = inner.tables
        self._device, self._check = numbered(device), check
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
        """Name of the kernels that run."""
        return str(getattr(self._inner[0], "kernel", "none"))

    # An EmbeddingStore

    def lookup(self, sparse: Sparse) -> Tensor:
        return self.begin_lookup(sparse)()

    def begin_lookup(self, sparse: Sparse) -> Callable[[], Tensor]:
        """`lookup` in the background: what is returned waits for it."""
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
            self._inner[0].update(batch.arrived(), here, lr=lr, step=step)

        self._updating = self._work.submit(work)
        if self._bus is None:
            self._wait()

    @property
    def batches_ahead(self) -> int:
        return max(1, self._inner[0].batches_ahead)

    def prefetch(self, sparse: Sparse) -> None:
        """Begin to copy the batch's ids; the store behind is told as well."""
        if self._check:
            sparse = check_batch(sparse, self.layout, self._device)
        batch = self._copied(sparse)
        self._announced.append(batch)
        self._work.submit(lambda: self._inner[0].prefetch(batch.arrived()))

    def drop_prefetched(self) -> None:
        """Batches that were announced and not looked up are not coming after all."""
        self._wait()
        self._announced.clear()
        self._current = None
        self._work.submit(self._inner[0].drop_prefetched).result()

    def rows(self, table: str, ids: Tensor) -> Tensor:
        self._wait()
        return self._inner[0].rows(table, ids.cpu()).to(ids.device)

    def parts(self) -> list[StatePart]:
        self._wait()
        return self._inner[0].parts()

    def state(self) -> dict[str, Tensor]:
        return whole_state(self.parts())

    def load_state(self, state: Mapping[str, Tensor], *, rows_only: bool = False) -> None:
        load_parts(self.parts(), state, rows_only=rows_only)

    def check_batch(self, sparse: Sparse) -> Sparse:
        """The same batch, known to fit if this store checks batches."""
        return check_batch(sparse, self.layout, self._device) if self._check and self.tables else sparse

    def close(self) -> None:
        """End the thread, and close the store behind; of no use afterwards."""
        self._work.shutdown()
        if hasattr(self._inner[0], "close"):
            self._inner[0].close()

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
        pooled = self._inner[0].lookup(batch.arrived())
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
