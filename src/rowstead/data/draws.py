"""Counter-based random numbers: every draw of the synthetic log is a pure function of (seed, stream, row, index).

So any row can be drawn on its own, in any order and on any machine, without generator state. The kernels use only integer
arithmetic and +, -, *, /, which IEEE 754 defines to the last bit; math library functions, which differ between machines, only fill
tables that are then rounded to FP32.

Letters: R rows, Fd dense columns, nnz ids of one feature in those rows.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, uint64
from numpy.typing import NDArray

from rowstead.kernels.mix import mix64

KNOTS = 4096
"""Intervals of equal probability in the table of the id distribution."""

_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_TO_UNIT = 1.0 / (1 << 53)


def key_of(seed: int, *path: int) -> np.uint64:
    """A 64-bit key for one stream of draws, such as (seed, purpose, feature)."""
    key = _mix(seed)
    for part in path:
        key = _mix(key + (part + 1) * _GOLDEN)
    return np.uint64(key)


def uniforms(key: np.uint64, count: int) -> NDArray[np.float64]:
    """The first `count` numbers in [0, 1) of a stream, for constants such as weights."""
    words = [_mix(int(key) + (i + 1) * _GOLDEN) for i in range(count)]
    return np.array([(word >> 11) * _TO_UNIT for word in words])


def permutation(key: np.uint64, count: int) -> NDArray[np.int64]:
    """A permutation of 0 … count - 1, determined by the key."""
    return np.argsort(uniforms(key, count), kind="stable").astype(np.int64)


def zipf_knots(num_ids: int, skew: float) -> NDArray[np.float64]:
    """Quantiles [KNOTS + 1] of the density x^-skew on [1, num_ids + 1), which is taken as uniform between two of them."""
    u = np.arange(KNOTS + 1) / KNOTS
    top = math.log(num_ids + 1.0)
    power = 1.0 - skew
    logs = u * top if abs(power) < 1e-9 else np.log1p(u * math.expm1(power * top)) / power
    knots = np.exp(logs).astype(np.float32).astype(np.float64)
    knots[0], knots[-1] = 1.0, num_ids + 1.0
    return np.asarray(knots)


def poisson_thresholds(mean: float, cap: int) -> NDArray[np.float64]:
    """Cumulative probabilities [cap]: the length of a bag is how many of them lie at or below a uniform number."""
    k = np.arange(cap)
    log_p = k * math.log(mean) - mean - np.array([math.lgamma(i + 1.0) for i in k])
    return np.cumsum(np.exp(log_p)).astype(np.float32).astype(np.float64)


def scrambling(key: np.uint64, num_ids: int) -> tuple[int, int]:
    """Factor and shift of the bijection rank -> (rank * factor + shift) mod num_ids, without overflow."""
    word = int(key)
    factor = 1 + word % max(1, min(num_ids, (1 << 62) // num_ids) - 1)
    while math.gcd(factor, num_ids) != 1:
        factor += 1
    return factor, _mix(word) % num_ids


@njit(inline="always")
def mix(x):  # type: ignore[no-untyped-def]
    """SplitMix64's finaliser: uint64 -> uint64, every output bit depends on every input bit."""
    return mix64(uint64(x) - uint64(_GOLDEN))  # without the step that `mix64` adds


@njit(inline="always")
def at(key, counter):  # type: ignore[no-untyped-def]
    """The draw of stream `key` at `counter`."""
    return mix(uint64(key) + (uint64(counter) + uint64(1)) * uint64(_GOLDEN))


@njit(inline="always")
def unit(word):  # type: ignore[no-untyped-def]
    """A random word as a number in [0, 1)."""
    return np.float64(word >> uint64(11)) * _TO_UNIT


@njit(nogil=True, cache=True)
def exponential(x):  # type: ignore[no-untyped-def]
    """e^x for |x| <= 40, to about 1e-14, from basic arithmetic only."""
    whole = np.floor(x * 1.4426950408889634 + 0.5)
    rest = x - whole * 0.6931471805599453
    total = 1.0
    for k in range(13, 0, -1):
        total = 1.0 + total * rest / k
    half = np.int64(whole)
    return total * np.float64(uint64(1) << uint64(half)) if half >= 0 else total / np.float64(uint64(1) << uint64(-half))


@njit(nogil=True, cache=True)
def draw_lengths(key, start, thresholds, offsets):  # type: ignore[no-untyped-def]
    """Fill offsets int64 [R + 1] with the running sum of lengths drawn against `thresholds` [cap]."""
    offsets[0] = 0
    for r in range(offsets.size - 1):
        u = unit(at(key, start + r))
        low, high = 0, thresholds.size
        while low < high:
            middle = (low + high) // 2
            if thresholds[middle] <= u:
                low = middle + 1
            else:
                high = middle
        offsets[r + 1] = offsets[r] + low


@njit(nogil=True, cache=True)
def draw_ranks(key, start, knots, offsets, ranks):  # type: ignore[no-untyped-def]
    """Fill ranks int64 [nnz] with popularity ranks, 0 the most popular, for rows from `start` on."""
    last = np.int64(knots[KNOTS]) - 2
    for r in range(offsets.size - 1):
        row_key = at(key, start + r)
        for i in range(offsets[r], offsets[r + 1]):
            word = mix(row_key + uint64(i - offsets[r]) * uint64(_GOLDEN))
            knot = np.int64(word >> uint64(52))
            share = np.float64(word & uint64((1 << 52) - 1)) * (1.0 / (1 << 52))
            x = knots[knot] + share * (knots[knot + 1] - knots[knot])
            ranks[i] = min(np.int64(x) - 1, last)


@njit(nogil=True, cache=True)
def scramble(ranks, factor, shift, num_ids, ids):  # type: ignore[no-untyped-def]
    """Fill ids int64 [nnz] with the ids in [0, num_ids) that have these ranks."""
    for i in range(ranks.size):
        ids[i] = (ranks[i] * factor + shift) % num_ids


@njit(nogil=True, cache=True)
def draw_dense(key, start, values):  # type: ignore[no-untyped-def]
    """Fill values float32 [R, Fd] with bell-shaped numbers of mean 0 and deviation 1: four 16-bit draws summed."""
    num_rows, num_dense = values.shape
    deviation = math.sqrt(4 * (65536.0**2 - 1) / 12)
    mask = uint64(0xFFFF)
    for r in range(num_rows):
        row_key = at(key, start + r)
        for j in range(num_dense):
            word = mix(row_key + uint64(j) * uint64(_GOLDEN))
            total = (word & mask) + ((word >> uint64(16)) & mask) + ((word >> uint64(32)) & mask) + (word >> uint64(48))
            values[r, j] = (np.float64(total) - 131070.0) / deviation


@njit(nogil=True, cache=True)
def skew_dense(values, count, out):  # type: ignore[no-untyped-def]
    """Fill the first `count` columns of out [R, Fd] with exp((x + 4) / 2) - 1 of `values`: positive, with a long tail."""
    for r in range(values.shape[0]):
        for j in range(count):
            out[r, j] = exponential((np.float64(values[r, j]) + 4.0) * 0.5) - 1.0


def _mix(x: int) -> int:
    """`mix` in Python's own integers."""
    x &= _U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
    return x ^ (x >> 31)
