"""Launches of Triton kernels that take the host a few microseconds.

Triton looks at every argument of every launch in Python, which takes longer than small kernels run. What it finds depends on little:
dtypes, whether addresses and numbers are multiples of 16, which numbers are 1, and compile-time constants.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

_LARGEST_INT32 = 2**31 - 1


def quick_launch(kernel: Any) -> Any:
    """Put above `triton.jit`: the kernel, called in the same way. Compile-time constants follow all other arguments, by keyword."""
    return _QuickKernel(kernel) if isinstance(kernel, triton.JITFunction) else kernel  # in the interpreter it is another


class _QuickKernel:
    """A kernel and its compiled variants, by what they depend on."""

    def __init__(self, kernel: triton.JITFunction[Any]) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Tensor | int, **constants: Any) -> None:
        key = (
            torch.cuda.current_device(),
            *[
                (value == 1, value % 16 == 0, value > _LARGEST_INT32)
                if type(value) is int
                else (value.dtype, value.data_ptr() % 16 == 0)  # type: ignore[union-attr]
                for value in args
            ],
            *constants.items(),
        )
        known = self._compiled.get(key)
        if known is None:
            compiled = self._kernel[grid](*args, **constants)
            names = self._kernel.arg_names[len(args) :]
            self._compiled[key] = compiled, tuple(constants[name] for name in names)
        else:
            compiled, values = known
            compiled[(*grid, 1, 1)[:3]](*args, *values)
