"""The optimizers' rules for one row on the CPU, in Numba; `kernels/row_optimizer.py` says what their numbers are.

A row is worked on in blocks, as in `cpu_programs.py`, whose letters and types of `rows` and `real` these are.
"""

from __future__ import annotations

import numba
import numpy as np

from rowstead.kernels.cpu.vectors import bytes_of, cast, load, root, spread, store, total, zeros
from rowstead.kernels.rounding import rounded, row_noise

_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
_inlined = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy", forceinline=True)


@_inlined
def numbers_tuple(numbers):  # type: ignore[no-untyped-def]
    """An array of `numbers_of` as a tuple."""
    return numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]


@_jit
def squares(source, width, like):  # type: ignore[no-untyped-def]
    """The sum of the squares of [D] numbers at an address."""
    summed = zeros(like, 16)
    d = 0
    while d + 16 <= width:
        values = load(source + d * bytes_of(like), like, summed, None)
        summed = summed + values * values
        d += 16
    if d < width:
        values = load(source + d * bytes_of(like), like, summed, width - d)
        summed = summed + values * values
    return total(summed)


@_inlined
def apply_row(  # type: ignore[no-untyped-def]
    table, row, address, first, second, gradient, width, rows, real, kind, numbers, step
):
    """The optimizer's rule for one row with its gradient [D] at an address."""
    state = (row if kind == 2 else row * width) * bytes_of(real)
    one, two = first + state, second + state
    factor = numbers[0]
    if kind == 2:
        single = zeros(real, 1)
        mean = total(load(one, real, single, None)) + squares(gradient, width, real) / cast(width, real)
        store(spread(mean, single), one, real, None)
        factor = numbers[0] / (np.sqrt(mean) + numbers[1])
    noise = row_noise(table, row, step)
    rule = (address + row * width * bytes_of(rows), gradient, one, two, noise, rows, real, kind, factor, numbers)
    d = 0
    while d + 64 <= width:
        _apply_block(zeros(real, 64), None, d, *rule)
        d += 64
    if d + 32 <= width:
        _apply_block(zeros(real, 32), None, d, *rule)
        d += 32
    if d + 16 <= width:
        _apply_block(zeros(real, 16), None, d, *rule)
        d += 16
    if d < width:
        _apply_block(zeros(real, 16), width - d, d, *rule)


@_inlined
def _apply_block(  # type: ignore[no-untyped-def]
    shape, count, d, address, gradient, one, two, noise, rows, real, kind, factor, numbers
):
    """The optimizer's rule for one block of a row, from element `d`."""
    lr, eps, new1, new2, correction = numbers
    here, target = d * bytes_of(real), address + d * bytes_of(rows)
    g = load(gradient + here, real, shape, count)
    if kind == 0 or kind == 2:
        change = spread(factor, shape) * g
    elif kind == 1:
        summed = load(one + here, real, shape, count) + g * g
        store(summed, one + here, real, count)
        change = spread(lr, shape) * g / (root(summed) + spread(eps, shape))
    else:
        moment1, moment2 = load(one + here, real, shape, count), load(two + here, real, shape, count)
        moment1 = moment1 + spread(new1, shape) * (g - moment1)
        moment2 = moment2 + spread(new2, shape) * (g * g - moment2)
        store(moment1, one + here, real, count)
        store(moment2, two + here, real, count)
        change = spread(lr * correction, shape) * moment1 / (root(moment2) + spread(eps, shape))
    values = load(target, rows, shape, count) - change
    store(rounded(values, noise, d, rows), target, rows, count)
