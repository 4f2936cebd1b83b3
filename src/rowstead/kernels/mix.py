"""The stable 64-bit mix of ids, in torch: the same bits on every device, and traceable for export."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def mix64(ids: Tensor) -> Tensor:
    """SplitMix64's step and finaliser of int64 `ids` [n], as int64 with wrap-around."""
    z = ids + _STEP
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """`z` shifted right as if it were unsigned."""
    return torch.bitwise_and(z >> bits, (1 << (64 - bits)) - 1)


def uniform(counters: Tensor, salt: int) -> Tensor:
    """Float64 numbers in [0, 1) that depend only on int64 `counters` [n] and `salt`."""
    mixed = mix64(mix64(counters) ^ salt)
    return _shifted(mixed, 11).to(torch.float64) * 2.0**-53
