"""What is behind a cache: whole tables in memory that is larger and slower than where rows are trained."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rowstead.kernels.cpu.memory import advise_huge_pages
from rowstead.kernels.initial import fill_initial_rows
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import Table
from rowstead.stores.cache_slots import Moves
from rowstead.stores.device import resolve_device
from rowstead.stores.groups import CacheGroup
from rowstead.stores.state import StatePart


class Backing(Protocol):
    """The records of one group of tables: a row and its optimizer states. One thread at a time reads and writes."""

    def read(self, rows: Tensor, into: Sequence[Tensor], slots: Tensor | None = None) -> None:
        """Read the records of `rows` int64 [n] into tensors in system memory, [n, columns] each.

        With `slots` int64 [n] the tensors are longer, and the records go to these indices.
        """

    def write(self, rows: Tensor, values: Sequence[Tensor], slots: Tensor | None = None) -> None:
        """Write the records of distinct `rows`; with `slots` int64 [n] the tensors are longer, and the records are at these indices."""

    def close(self) -> None:
        """Release memory and files; the backing cannot be used afterwards."""


def move_rows(parts: Sequence[Tensor], moves: Moves, backing: Backing) -> None:
    """Write back `moves.out_slots` of rows and states [P, ...] in system memory, then fill `moves.in_slots` from the backing."""
    backing.write(moves.out_rows, parts, moves.out_slots)
    backing.read(moves.in_rows, parts, moves.in_slots)


def move_rows_over_bus(parts: Sequence[Tensor], moves: Moves, backing: Backing) -> None:
    """`move_rows` for slots in GPU memory: queued on the current stream, without waiting."""
    from rowstead.kernels.gpu.cache import swap_rows

    assert isinstance(backing, RamRows), "a GPU reads rows in system memory only"
    for part, (behind, over_bus) in zip(parts, backing.on_device, strict=True):
        swap_rows(part, behind, moves.in_rows, moves.in_slots, moves.out_rows, moves.out_slots, over_bus=over_bus)


class RamRows:
    """Rows in system memory.

    Optimizer states with one number per row stay in the memory of `device`: over the bus each would take half as long as a row.
    """

    def __init__(self, group: CacheGroup, *, seed: int, device: torch.device | str = "cpu") -> None:
        """Filled with initial rows, which `device` draws."""
        device = resolve_device(device)
        self._parts: list[Tensor] = []
        self._on_device: list[Tensor] = []
        for index, (kind, width) in enumerate(group.columns):
            shape = group.num_rows, width
            if device.type == "cpu":
                part = seen = advise_huge_pages(torch.empty(shape, dtype=kind))
            elif index and width == 1:
                part = seen = torch.empty(shape, dtype=kind, device=device)
            else:
                part, seen = _allocate_mapped(device, shape, kind)
            self._parts.append(part)
            self._on_device.append(seen)
        rows, *states = self._parts
        for state in states:
            state.zero_()
        for table, first in group.tables:
            fill_initial_rows(rows[first : first + table.num_rows], table, seed=seed, device=device)

    def read(self, rows: Tensor, into: Sequence[Tensor], slots: Tensor | None = None) -> None:
        for part, values in zip(self._parts, into, strict=True):
            if part.is_cuda:
                values[slice(None) if slots is None else slots] = part[rows.to(part.device)].cpu()
            elif slots is None:
                torch.index_select(part, 0, rows, out=values)
            else:
                values.index_copy_(0, slots, part.index_select(0, rows))

    def write(self, rows: Tensor, values: Sequence[Tensor], slots: Tensor | None = None) -> None:
        for part, some in zip(self._parts, values, strict=True):
            given = some if slots is None else some.index_select(0, slots)
            part.index_copy_(0, rows.to(part.device), given.to(part.device))
            if part.is_cuda:
                torch.cuda.synchronize(part.device)  # writes to system memory are done on return, too

    @property
    def on_device(self) -> list[tuple[Tensor, bool]]:
        """The same memory as tensors of `device`, and whether a GPU accesses it over the bus."""
        return [(seen, not part.is_cuda) for seen, part in zip(self._on_device, self._parts, strict=True)]

    def close(self) -> None:
        self._parts = self._on_device = [part.new_empty(0, part.shape[1]) for part in self._parts]


def parts_behind(
    table: Table, first: int, group: CacheGroup, backing: Backing, *, before_write: Callable[[], None]
) -> Iterator[StatePart]:
    """The state parts of a table whose records start at row `first` of its group. `before_write` is called before each write."""

    def values(rows: Tensor) -> list[Tensor]:
        into = [torch.empty(rows.numel(), width, dtype=dtype) for dtype, width in group.columns]
        backing.read(rows + first, into)
        return into

    for column, name in enumerate(["rows", *group.state_names]):
        dtype, width = group.columns[column]

        def read(start: int, stop: int, column: int = column) -> Tensor:
            return values(torch.arange(start, stop))[column]

        def take(rows: Tensor, column: int = column) -> Tensor:
            return values(rows.cpu())[column]

        def write(start: int, given: Tensor, column: int = column) -> None:
            before_write()
            rows = torch.arange(start, start + len(given))
            now = values(rows)
            now[column].copy_(given)
            backing.write(rows + first, now)

        yield StatePart(
            name=f"{table.name}.{name}",
            shape=(table.num_rows, width),
            dtype=dtype,
            num_rows=table.num_rows,
            num_columns=width,
            read=read,
            write=write,
            take=take,
        )


# System memory that a GPU accesses over its bus

_ATTACH_GLOBAL, _PREFERRED_LOCATION, _ACCESSED_BY, _THE_CPU = 1, 3, 5, -1
"""Constants of the CUDA driver API."""


def _allocate_mapped(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate zeroed system memory, as a CPU tensor and as a GPU tensor over the same bytes.

    CUDA managed memory that prefers the CPU is mapped in larger pages than pinned memory: random rows cross the bus about a sixth
    faster. Falls back to memory that is pinned in place: torch's pool of pinned memory rounds sizes up to powers of two.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if (address := _managed(device, num_bytes)) is not None:
        raw = (ctypes.c_uint8 * num_bytes).from_address(address)
        weakref.finalize(raw, _driver().cuMemFree_v2, ctypes.c_uint64(address))
        values = torch.frombuffer(raw, dtype=dtype).view(shape).zero_()  # the CPU's first write commits the pages
        return values, _map_to_device(device, values)
    values = advise_huge_pages(torch.empty(shape, dtype=dtype)).zero_()
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        failed = int(runtime.cudaHostRegister(values.data_ptr(), values.nbytes, 0))
    if failed:
        raise RowsteadError(
            f"cannot pin {values.nbytes:,} bytes of memory for the GPU (CUDA error {failed}): 1. raise the limit "
            "of `ulimit -l`; 2. place the tables on `cached`, `ssd` or `device`"
        )
    weakref.finalize(values, runtime.cudaHostUnregister, values.data_ptr())
    return values, _map_to_device(device, values)


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _managed(device: torch.device, num_bytes: int) -> int | None:
    """Address of managed memory whose pages stay in system memory, or None where CUDA has none."""
    try:
        driver, address, size = _driver(), ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
        torch.empty(0, device=device)  # initialises CUDA in this thread
        with torch.cuda.device(device):
            if driver.cuMemAllocManaged(ctypes.byref(address), size, _ATTACH_GLOBAL):
                return None
            if driver.cuMemAdvise(address, size, _PREFERRED_LOCATION, _THE_CPU) or driver.cuMemAdvise(
                address, size, _ACCESSED_BY, device.index
            ):
                driver.cuMemFree_v2(address)
                return None
    except (OSError, AttributeError):
        return None
    return address.value


def _map_to_device(device: torch.device, values: Tensor) -> Tensor:
    typed = values.view(torch.int16) if values.element_size() == 2 else values
    mapped: Tensor = torch.as_tensor(_CudaArray(typed), device=device).view(values.dtype)
    assert mapped.data_ptr() == values.data_ptr(), "the GPU was given a copy"
    return mapped


class _CudaArray:
    """Contiguous memory with the CUDA array interface."""

    def __init__(self, values: Tensor) -> None:
        kind = {torch.float32: "<f4", torch.float64: "<f8", torch.int16: "<i2"}[values.dtype]
        self._values = values
        data = (values.data_ptr(), False)
        self.__cuda_array_interface__ = {"shape": tuple(values.shape), "typestr": kind, "data": data, "version": 2}
