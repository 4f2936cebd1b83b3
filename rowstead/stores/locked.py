"""System memory as a GPU sees it: page-locked, and a tensor of the GPU over the same bytes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from rowstead.spec.errors import RowsteadError


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
