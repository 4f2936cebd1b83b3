"""The stable 64-bit mix of ids, SplitMix64: the same bits in Numba, and in torch on every device and traceable for export."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SIGNED = [int(constant.view(np.int64)) for constant in (_STEP, _FIRST, _SECOND)]


@numba.njit(nogil=True, cache=True, inline="always", error_model="numpy")
def mix64(id64):  # type: ignore[no-untyped-def]
    """SplitMix64's step and finaliser of one id, as uint64."""
    z = np.uint64(id64) + _STEP
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def mix64_tensor(ids: Tensor) -> Tensor:
    """`mix64` of int64 `ids` [n], as int64 with wrap-around."""
    step, first, second = _SIGNED
    z = ids + step
    z = (z ^ _shifted(z, 30)) * first
    z = (z ^ _shifted(z, 27)) * second
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """`z` shifted right as if it were unsigned."""
    return torch.bitwise_and(z >> bits, (1 << (64 - bits)) - 1)


def uniform(counters: Tensor, salt: int) -> Tensor:
    """Float64 numbers in [0, 1) that depend only on int64 `counters` [n] and `salt`."""
    mixed = mix64_tensor(mix64_tensor(counters) ^ salt)
    return _shifted(mixed, 11).to(torch.float64) * 2.0**-53
