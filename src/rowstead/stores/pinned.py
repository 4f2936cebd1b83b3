"""System memory as a GPU sees it: pages that stay where they are, and a tensor of the GPU over the same bytes."""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any

import torch
from torch import Tensor

from rowstead.kernels.cpu.memory import prefer_large_pages
from rowstead.spec.errors import RowsteadError

ATTACH_GLOBAL, PREFERRED_LOCATION, ACCESSED_BY, THE_CPU = 1, 3, 5, -1
"""CUDA's numbers for what `_managed` asks of it."""


def seen_by_both(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """New system memory, all zeros, as a tensor of the CPU and as one of a GPU, which reaches it over its bus.

    Memory that CUDA manages, told to stay in the system, is reached through larger pages than memory that was locked later, and
    rows here and there cross about a sixth faster. Where CUDA has none, pages are locked.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes and (address := _managed(device, num_bytes)) is not None:
        raw = (ctypes.c_uint8 * num_bytes).from_address(address)
        weakref.finalize(raw, _driver().cuMemFree_v2, ctypes.c_uint64(address))
        values = torch.frombuffer(raw, dtype=dtype).view(shape).zero_()  # pages are there from the first time the CPU writes
        return values, _seen(device, values)
    values = prefer_large_pages(torch.empty(shape, dtype=dtype)).zero_()
    return values, seen_from(device, values)


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _managed(device: torch.device, num_bytes: int) -> int | None:
    """The address of memory of both, whose pages are in system memory; none where there is no such thing."""
    try:
        driver, address, size = _driver(), ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
        torch.empty(0, device=device)  # CUDA is at work in this thread
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


def seen_from(device: torch.device, values: Tensor) -> Tensor:
    """The same contiguous memory as a tensor of `device`; on a CPU, the tensor itself.

    Pages are locked where they are rather than asked of torch's pool of page-locked memory, which rounds sizes up to powers
    of two. They are released with `values`.
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
            f"the system would not lock {values.nbytes:,} bytes of memory for the GPU (CUDA error {failed}): 1. raise the limit "
            "of `ulimit -l`; 2. place the tables on `cached`, `ssd` or `device`"
        )
    weakref.finalize(values, runtime.cudaHostUnregister, values.data_ptr())
    return _seen(device, values)


def _seen(device: torch.device, values: Tensor) -> Tensor:
    as_numbers = values.view(torch.int16) if values.element_size() == 2 else values
    seen: Tensor = torch.as_tensor(_Memory(as_numbers), device=device).view(values.dtype)
    assert seen.data_ptr() == values.data_ptr(), "the GPU was given a copy"
    return seen


class _Memory:
    """Contiguous memory in the form in which CUDA libraries hand arrays to each other."""

    def __init__(self, values: Tensor) -> None:
        kind = {torch.float32: "<f4", torch.float64: "<f8", torch.int16: "<i2"}[values.dtype]
        self._values = values
        self.__cuda_array_interface__ = {
            "shape": tuple(values.shape),
            "typestr": kind,
            "data": (values.data_ptr(), False),
            "version": 2,
        }
