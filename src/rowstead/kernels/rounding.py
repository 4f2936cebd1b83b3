"""Stochastic rounding of rows to BF16 and FP16: the same bits from plain torch and from compiled kernels.

A value between two representable ones becomes the upper one with the probability that keeps its expected value, so that updates
much smaller than a row still arrive on average. The random bits are a hash of table, row, step and element.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import overload
from torch import Tensor

from rowstead.kernels.cpu.vectors import absolute, as_bits, as_floats, broadcast, floor, lane_indices, select, to_floats

ROUNDED = (torch.bfloat16, torch.float16)
"""Row formats that are rounded stochastically."""

_WORD = 0xFFFFFFFF
_FACTOR1, _FACTOR2 = 0x7FEB352D, 0x846CA68B
_OF_STEP, _OF_TABLE, _OF_ELEMENT = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
_SMALLEST_NORMAL, _LARGEST = 2.0**-14, 65504.0
"""Of FP16."""


# In plain torch


def mix32(x: Tensor) -> Tensor:
    """A hash of each 32-bit number in int64 `x`, as another such number."""
    x = x ^ (x >> 16)
    x = (x * _FACTOR1) & _WORD
    x = x ^ (x >> 15)
    x = (x * _FACTOR2) & _WORD
    return x ^ (x >> 16)


def noise(table: int, rows: Tensor, width: int, step: int) -> Tensor:
    """Uniform integers from 0 to 65535 for each element of the rows [U] of the table with index `table`: int64 [U, D]."""
    base = mix32((rows.long() + _OF_STEP * (step & _WORD) + _OF_TABLE * table) & _WORD)
    elements = torch.arange(width, dtype=torch.int64, device=rows.device)
    return mix32((base.unsqueeze(1) + _OF_ELEMENT * elements) & _WORD) & 0xFFFF


def round_to(values: Tensor, chance: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `values` as BF16 or FP16, rounded up where `chance` (0 to 65535) is high enough; values that are not finite stay."""
    bits = values.contiguous().view(torch.int32).long()
    if dtype == torch.bfloat16:
        near = _real((bits + chance) & 0xFFFF0000)
    else:
        normal = _real((bits + (chance >> 3)) & 0xFFFFE000).clamp(-_LARGEST, _LARGEST)
        scaled = values * 2.0**24
        below = scaled.floor()
        # The fraction is compared on its own: added to the whole number, it would be rounded before it is cut off.
        small = (below + (scaled - below + chance.float() / 65536 >= 1).float()) * 2.0**-24
        near = torch.where(values.abs() < _SMALLEST_NORMAL, small, normal)
    return torch.where(values.isfinite(), near, values).to(dtype)


def _real(bits: Tensor) -> Tensor:
    """The low 32 bits of int64 numbers as float32."""
    low = bits & _WORD
    return torch.where(low > 0x7FFFFFFF, low - 2**32, low).to(torch.int32).view(torch.float32)


# On Numba's vectors

_inlined = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy", forceinline=True)


@_inlined
def row_noise(table, row, step):  # type: ignore[no-untyped-def]
    """The seed of a row's noise, uint32."""
    x = np.uint32(np.uint32(row) + np.uint32(_OF_STEP) * np.uint32(step) + np.uint32(_OF_TABLE) * np.uint32(table))
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * np.uint32(_FACTOR1))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(_FACTOR2))
    return np.uint32(x ^ (x >> np.uint32(16)))


@_inlined
def _mixed(x):  # type: ignore[no-untyped-def]
    """`mix32` of each lane."""
    sixteen, fifteen = broadcast(np.uint32(16), x), broadcast(np.uint32(15), x)
    x = x ^ (x >> sixteen)
    x = x * broadcast(np.uint32(_FACTOR1), x)
    x = x ^ (x >> fifteen)
    x = x * broadcast(np.uint32(_FACTOR2), x)
    return x ^ (x >> sixteen)


@_inlined
def _lane_noise(values, base, d):  # type: ignore[no-untyped-def]
    """Noise of the elements from `d` on, one per lane."""
    elements = lane_indices(values) + broadcast(np.uint32(d), values)
    mixed = _mixed(broadcast(base, values) + elements * broadcast(np.uint32(_OF_ELEMENT), values))
    return mixed & broadcast(np.uint32(0xFFFF), values)


@_inlined
def _where_finite(values, near):  # type: ignore[no-untyped-def]
    return select(absolute(values) < broadcast(np.float32(np.inf), values), near, values)


@_inlined
def _bf16(values, base, d):  # type: ignore[no-untyped-def]
    near = as_bits(values) + _lane_noise(values, base, d)
    return _where_finite(values, as_floats(near & broadcast(np.uint32(0xFFFF0000), values)))


@_inlined
def _fp16(values, base, d):  # type: ignore[no-untyped-def]
    chance = _lane_noise(values, base, d)
    bits = as_bits(values) + (chance >> broadcast(np.uint32(3), values))
    normal = as_floats(bits & broadcast(np.uint32(0xFFFFE000), values))
    largest, lowest = broadcast(np.float32(_LARGEST), values), broadcast(np.float32(-_LARGEST), values)
    normal = select(normal < lowest, lowest, select(largest < normal, largest, normal))
    scaled = values * broadcast(np.float32(2.0**24), values)
    below = floor(scaled)
    one, zero = broadcast(np.float32(1), values), broadcast(np.float32(0), values)
    share = to_floats(chance) * broadcast(np.float32(2.0**-16), values)
    small = (below + select(scaled - below + share >= one, one, zero)) * broadcast(np.float32(2.0**-24), values)
    near = select(absolute(values) < broadcast(np.float32(_SMALLEST_NORMAL), values), small, normal)
    return _where_finite(values, near)


def round_lanes(values, base, d, rows):  # type: ignore[no-untyped-def]
    """Elements of one row from `d` on, rounded to the format of `rows`; `base` is the row's `row_noise`."""
    raise NotImplementedError("compiled code only")


@overload(round_lanes)
def _rounded(values, base, d, rows):  # type: ignore[no-untyped-def]
    if rows == types.uint16:
        return lambda values, base, d, rows: _bf16(values, base, d)
    if rows == types.int16:
        return lambda values, base, d, rows: _fp16(values, base, d)
    return lambda values, base, d, rows: values
