"""The stable 64-bit mix of ids, in Numba: the bits of `mix.py`, one number at a time."""

from __future__ import annotations

import numba
import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


@numba.njit(nogil=True, cache=True, inline="always", error_model="numpy")
def mix64(id64):  # type: ignore[no-untyped-def]
    """SplitMix64's step and finaliser of one id, as uint64."""
    z = np.uint64(id64) + _STEP
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
