"""System memory that a GPU accesses over its bus: a CPU tensor and a GPU tensor over the same bytes."""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any

import torch
from torch import Tensor

from rowstead.kernels.cpu.memory import advise_huge_pages
from rowstead.spec.errors import RowsteadError

ATTACH_GLOBAL, PREFERRED_LOCATION, ACCESSED_BY, THE_CPU = 1, 3, 5, -1
"""Constants of the CUDA driver API."""


def allocate_mapped(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate zeroed system memory, as a CPU tensor and as a GPU tensor.

    CUDA managed memory that prefers the CPU is mapped in larger pages than pinned memory: random rows cross the bus about a sixth
    faster. Falls back to pinned memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes and (address := _managed(device, num_bytes)) is not None:
        raw = (ctypes.c_uint8 * num_bytes).from_address(address)
        weakref.finalize(raw, _driver().cuMemFree_v2, ctypes.c_uint64(address))
        values = torch.frombuffer(raw, dtype=dtype).view(shape).zero_()  # the CPU's first write commits the pages
        return values, _map_to_device(device, values)
    values = advise_huge_pages(torch.empty(shape, dtype=dtype)).zero_()
    return values, pin_in_place(device, values)


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _managed(device: torch.device, num_bytes: int) -> int | None:
    """Address of managed memory whose pages stay in system memory, or None where CUDA has none."""
    try:
        driver, address, size = _driver(), ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
        torch.empty(0, device=device)  # initialises CUDA in this thread
        with torch.cuda.device(device):
            if driver.cuMemAllocManaged(ctypes.byref(address), size, ATTACH_GLOBAL):
                return None
            if driver.cuMemAdvise(address, size, PREFERRED_LOCATION, THE_CPU) or driver.cuMemAdvise(
                address, size, ACCESSED_BY, device.index
            ):
                driver.cuMemFree_v2(address)
                return None
    except (OSError, AttributeError):
        return None
    return address.value


def pin_in_place(device: torch.device, values: Tensor) -> Tensor:
    """Pin contiguous memory and return it as a tensor of `device`; on a CPU, the tensor itself.

    Registers the pages in place: torch's pool of pinned memory rounds sizes up to powers of two. They are unpinned with `values`.
    """
    if device.type == "cpu":
        return values
    if not values.numel():
        return values.to(device)
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        failed = int(runtime.cudaHostRegister(values.data_ptr(), values.nbytes, 0))
    if failed:
        raise RowsteadError(
            f"cannot pin {values.nbytes:,} bytes of memory for the GPU (CUDA error {failed}): 1. raise the limit "
            "of `ulimit -l`; 2. place the tables on `cached`, `ssd` or `device`"
        )
    weakref.finalize(values, runtime.cudaHostUnregister, values.data_ptr())
    return _map_to_device(device, values)


def _map_to_device(device: torch.device, values: Tensor) -> Tensor:
    typed = values.view(torch.int16) if values.element_size() == 2 else values
    mapped: Tensor = torch.as_tensor(_Memory(typed), device=device).view(values.dtype)
    assert mapped.data_ptr() == values.data_ptr(), "the GPU was given a copy"
    return mapped


class _Memory:
    """Contiguous memory with the CUDA array interface."""

    def __init__(self, values: Tensor) -> None:
        kind = {torch.float32: "<f4", torch.float64: "<f8", torch.int16: "<i2"}[values.dtype]
        self._values = values
        self.__cuda_array_interface__ = {
            "shape": tuple(values.shape),
            "typestr": kind,
            "data": (values.data_ptr(), False),
            "version": 2,
        }
