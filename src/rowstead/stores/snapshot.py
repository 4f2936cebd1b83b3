"""A store's state as of one moment, for another thread to read while training goes on.

Rows in system memory are copied on write: before a step changes rows that were not read yet, it keeps them aside. So little memory is
needed, and training does not stand still while gigabytes are copied. Tensors in GPU memory are copied as a whole: that takes
milliseconds.

Letters: B examples, F features, N rows, nnz ids, K tensors.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.data.batch import Sparse
from rowstead.kernels.cpu.memory import AHEAD, address_of, bytes_at, prefetch, take
from rowstead.kernels.cpu.thread_team import run_on_threads
from rowstead.kernels.layout import Layout
from rowstead.records.usage import free_host_bytes
from rowstead.spec.features import Table
from rowstead.stores.state import StatePart, in_order_of, part_of

KEPT_SHARE = 0.125
"""Memory for rows that are kept aside, over that of all tables."""
MIN_KEPT_BYTES = 64 << 20
NARROW_BYTES = 8
"""A tensor with up to this many bytes per row is copied: finding its rows again would take as much memory."""
SPARE_SHARE = 0.1
"""Share of a GPU's memory, and of the free system memory, that copies leave free."""
IDS_PER_THREAD = 1 << 14
"""Ids of a batch for which another thread is worth waking."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A store's state as of one moment. Any threads read its parts, each row once; `close` it when they are done."""

    parts: Sequence[StatePart]
    close: Callable[[], None] = lambda: None
    """Release memory; also lets steps continue that wait for memory."""
    waited_s: Callable[[], float] = lambda: 0.0
    """How long steps have waited for memory to keep rows in."""


class HasSnapshot(Protocol):
    """What has a state, such as a store."""

    def snapshot(self) -> Snapshot | None:
        """Its state as of now; None if it cannot."""


def join_snapshots(tables: Sequence[Table], stores: Iterable[HasSnapshot]) -> Snapshot | None:
    """The snapshot of a store of these tables that consists of others, or None if one of them has none."""
    found: list[Snapshot] = []

    def close() -> None:
        for each in found:
            each.close()

    for store in stores:
        snapshot = store.snapshot()
        if snapshot is None:
            close()
            return None
        found.append(snapshot)
    parts = in_order_of(tables, (part for each in found for part in each.parts))
    return Snapshot(parts=parts, close=close, waited_s=lambda: sum(each.waited_s() for each in found))


# Tables in GPU memory


@torch.no_grad()
def copy_tensors(tensors: Mapping[str, Tensor]) -> Snapshot | None:
    """Copies of tensors on one device: there while it has spare memory, else in system memory; None if that is too small as well."""
    copies: dict[str, Tensor] = {}
    devices = {tensor.device for tensor in tensors.values()}
    assert len(devices) <= 1
    host_bytes = int((1 - SPARE_SHARE) * free_host_bytes())
    gpu_bytes = sum(_spare_gpu_bytes(device) for device in devices if device.type == "cuda")
    try:
        for name, tensor in tensors.items():
            if tensor.is_cuda and tensor.nbytes <= gpu_bytes:
                gpu_bytes -= tensor.nbytes
                copies[name] = tensor.detach().clone()
            elif tensor.nbytes <= host_bytes:
                host_bytes -= tensor.nbytes
                copies[name] = tensor.detach().to("cpu", copy=True)
            else:
                return None
    except (torch.OutOfMemoryError, MemoryError):
        return None
    stream: Any = None
    for device in devices if any(copy.is_cuda for copy in copies.values()) else ():
        stream = _copy_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))

    def part(name: str, copy: Tensor) -> StatePart:
        whole = part_of(name, copy)
        if not copy.is_cuda:
            return whole
        return dataclasses.replace(
            whole,
            read=lambda start, stop: _copy_to_host(copy, slice(start, stop), stream),
            take=lambda rows: _copy_to_host(copy, rows, stream),
        )

    return Snapshot(parts=[part(name, copy) for name, copy in copies.items()])


@lru_cache
def _copy_stream(device: torch.device) -> Any:
    """One stream per GPU: torch has few, and gives them to others again."""
    return torch.cuda.Stream(device)


def _spare_gpu_bytes(device: torch.device) -> int:
    """Memory that copies may take; torch gives back what it only keeps for later."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + kept - SPARE_SHARE * total)


def _copy_to_host(tensor: Tensor, rows: slice | Tensor, stream: Any) -> Tensor:
    """Some rows in pinned memory, copied beside what runs on other streams."""
    with torch.cuda.device(tensor.device), torch.cuda.stream(stream):
        some = tensor[rows] if isinstance(rows, slice) else tensor[rows.to(tensor.device)]
        here = torch.empty(some.shape, dtype=some.dtype, pin_memory=True).copy_(some, non_blocking=True)
        stream.synchronize()
    return here


# Tables in system memory


class CopyOnWrite:
    """Tensors [N, columns] in system memory as they were when this was made, although updates change their rows.

    `keep` is called before each update: it copies the batch's rows that were neither read nor kept yet. A reader copies rows as they
    are now, and then puts those that were kept in their place, so that it does not matter what an update changes meanwhile. Where no
    memory is left for more rows, `keep` waits for readers. Any threads call `keep` and read.

    Memory: an int32 per row and tensor (-1: was read; 0: neither read nor kept; else the slot that it is kept in, plus 1), and slots
    that are filled as needed.
    """

    def __init__(self, layout: Layout, tensors: Sequence[Mapping[str, Tensor]], *, max_kept_bytes: int | None = None) -> None:
        """tensors: of each table by name, `<table>.<name>`."""
        self._parts: list[StatePart] = []
        self._wide: list[Tensor] = []
        features: list[tuple[int, int]] = []
        for table, own in zip(layout.tables, tensors, strict=True):
            for name, tensor in own.items():
                if tensor.shape[1] * tensor.element_size() <= NARROW_BYTES:
                    self._parts.append(part_of(name, tensor.detach().clone()))
                    continue
                assert tensor.is_contiguous()
                features += [(len(self._wide), feature) for feature in table.features]
                self._parts.append(self._part(name, len(self._wide), tensor.detach()))
                self._wide.append(tensor.detach())
        self._row_bytes = np.array([tensor.shape[1] * tensor.element_size() for tensor in self._wide], np.int64)
        self._num_rows = np.array([len(tensor) for tensor in self._wide], np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._num_rows)])
        self._addresses = np.array([tensor.data_ptr() for tensor in self._wide], np.int64)
        self._features = np.array(features, np.int64).reshape(-1, 2)
        self._slot_of = np.zeros(int(self._starts[-1]), np.int32)
        slot_bytes = int(self._row_bytes.max(initial=1))
        if max_kept_bytes is None:
            max_kept_bytes = max(MIN_KEPT_BYTES, int(KEPT_SHARE * sum(tensor.nbytes for tensor in self._wide)))
        num_slots = max(1, min(max_kept_bytes // slot_bytes, len(self._slot_of)))
        self._slots = np.empty((num_slots, slot_bytes), np.uint8)
        self._free = np.arange(num_slots, dtype=np.int32)
        self._num_used = np.zeros(1, np.int64)
        """The slots that are used are the first in `_free`."""
        self._changed = threading.Condition()
        self._is_closed = False
        self.waited_s = 0.0

    def snapshot(self, on_close: Callable[[], None]) -> Snapshot:
        def close() -> None:
            on_close()
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()

        return Snapshot(parts=self._parts, close=close, waited_s=lambda: self.waited_s)

    def keep(self, sparse: Sparse) -> None:
        """Keep the rows of a batch in CPU memory, which an update is about to change."""
        if not len(self._wide):
            return
        ids, offsets = sparse.ids.contiguous().numpy(), sparse.offsets.contiguous().numpy()
        threads = max(1, min(torch.get_num_threads(), ids.size // IDS_PER_THREAD))
        with self._changed:
            while not self._is_closed and not self._keep_now(ids, offsets, sparse.num_samples, threads):
                started = time.perf_counter()
                self._changed.wait()
                self.waited_s += time.perf_counter() - started

    def _keep_now(self, ids: NDArray[Any], offsets: NDArray[np.int64], num_samples: int, threads: int) -> bool:
        """Keep rows until no slot is free; whether all of the batch's are kept now."""
        turn = np.zeros(1, np.int64)

        def work() -> bool:
            return bool(
                _keep_rows(
                    turn, threads, ids, offsets, num_samples, self._features, self._addresses, self._row_bytes, self._num_rows,
                    self._starts, self._slot_of, address_of(self._slot_of), self._slots, self._free, self._num_used,
                )
            )  # fmt: skip

        is_done = all(run_on_threads(work, threads)) and turn[0] >= threads
        self._num_used[0] = min(self._num_used[0], len(self._free))
        return is_done

    def _part(self, name: str, index: int, tensor: Tensor) -> StatePart:
        # Copied by NumPy, which starts no threads: torch's would take the cores from those that train.
        content = tensor.view(torch.uint8).numpy()

        def restore(values: NDArray[np.uint8], rows: NDArray[np.int64]) -> Tensor:
            self._restore(index, values, rows)
            return torch.from_numpy(values.reshape(-1)).view(tensor.dtype).view(len(rows), tensor.shape[1])

        return dataclasses.replace(
            part_of(name, tensor),
            read=lambda start, stop: restore(content[start:stop].copy(), np.arange(start, stop)),
            take=lambda rows: restore(np.take(content, rows.numpy(), axis=0), rows.numpy()),
        )

    def _restore(self, index: int, values: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
        """Put kept rows in the place of `values`, copies of the rows as they are now; frees their slots."""
        first, last = self._starts[index], self._starts[index + 1]
        with self._changed:
            if _restore_rows(rows, self._slot_of[first:last], self._slots, self._free, self._num_used, values):
                self._changed.notify_all()


@numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def _keep_rows(  # type: ignore[no-untyped-def]
    turn, num_parts, ids, offsets, num_samples, features, addresses, row_bytes, num_rows, starts, slot_of, slot_of_address, slots,
    free, num_used,
):  # fmt: skip
    """Copy rows of a batch to free slots, those that are not kept and were not read; false if there are too few slots.

    turn int64 [1] counts the threads, each of which keeps one of `num_parts` parts of the rows; ids [nnz]; offsets [F·B + 1]; features
    int64 [pairs, 2] pairs of a tensor and a feature that reads it; addresses, row_bytes, num_rows int64 [K] and starts [K + 1] of the
    tensors; slot_of int32 [sum of N]; slots uint8 [slots, bytes]; free int32 [slots], from num_used int64 [1] on.
    """
    while True:
        part = take(turn)
        if part >= num_parts:
            return True
        for pair in range(len(features)):
            tensor, feature = features[pair]
            limit, start, width = np.uint64(num_rows[tensor]), starts[tensor], row_bytes[tensor]
            first, last = offsets[feature * num_samples], offsets[(feature + 1) * num_samples]
            for index in range(first, last):
                if index + AHEAD < last:
                    prefetch(slot_of_address + 4 * (start + np.int64(ids[index + AHEAD])))
                row = np.uint64(ids[index])  # those out of range are refused elsewhere
                if row >= limit or np.uint32(row) % np.uint32(num_parts) != part:
                    continue
                here = start + np.int64(row)
                if slot_of[here] != 0:
                    continue
                used = take(num_used)
                if used >= len(free):
                    return False
                slot = free[used]
                slots[slot, :width] = bytes_at(addresses[tensor] + np.int64(row) * width, width)
                slot_of[here] = slot + 1


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _restore_rows(rows, slot_of, slots, free, num_used, into):  # type: ignore[no-untyped-def]
    """Copy kept rows into their place in `into` uint8 [n, bytes], and mark all `rows` int64 [n] as read; the number of slots freed."""
    num_freed = 0
    for index in range(len(rows)):
        slot = slot_of[rows[index]] - 1
        slot_of[rows[index]] = -1
        if slot >= 0:
            into[index] = slots[slot, : into.shape[1]]
            num_used[0] -= 1
            free[num_used[0]] = slot
            num_freed += 1
    return num_freed
