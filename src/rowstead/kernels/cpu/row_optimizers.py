"""Rules of the row optimizers on the CPU, in Numba; `spec/row_optimizers.py` says which scalars and state tensors each has.

A row is updated in blocks, as in `embedding_kernels.py`, which also explains `rows`, `real` and the letters.
"""

from __future__ import annotations

import numba
import numpy as np

from rowstead.kernels.cpu.vectors import broadcast, bytes_of, cast, load, sqrt, store, sum_lanes, zeros
from rowstead.kernels.rounding import round_lanes, row_noise
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS

_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
_inlined = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy", forceinline=True)


_ADAGRAD = ROW_OPTIMIZERS["adagrad"].code
_ROWWISE_ADAGRAD = ROW_OPTIMIZERS["rowwise_adagrad"].code
_ADAM = ROW_OPTIMIZERS["adam"].code
_MOMENTUM = ROW_OPTIMIZERS["momentum"].code


@_inlined
def scalars_tuple(scalars):  # type: ignore[no-untyped-def]
    """The array that `step_scalars` fills as a tuple."""
    return scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]


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
    return sum_lanes(summed)


@_inlined
def apply_row(  # type: ignore[no-untyped-def]
    table, row, address, first, second, first_bytes, second_bytes, gradient, width, rows, real, kind, scalars, step
):
    """The rule of the optimizer with code `kind` for one row with its gradient [D] at an address.

    address, first, second: of a table's rows and of its state tensors, with so many bytes per row.
    """
    one, two = first + row * first_bytes, second + row * second_bytes
    factor = scalars[0]
    if kind == _ROWWISE_ADAGRAD:
        single = zeros(real, 1)
        mean = sum_lanes(load(one, real, single, None)) + squares(gradient, width, real) / cast(width, real)
        store(broadcast(mean, single), one, real, None)
        factor = scalars[0] / (np.sqrt(mean) + scalars[1])
    noise = row_noise(table, row, step)
    rule = (address + row * width * bytes_of(rows), gradient, one, two, noise, rows, real, kind, factor, scalars)
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
    shape, count, d, address, gradient, one, two, noise, rows, real, kind, factor, scalars
):
    """The optimizer's rule for one block of a row, from element `d`."""
    here, target = d * bytes_of(real), address + d * bytes_of(rows)
    g = load(gradient + here, real, shape, count)
    if kind == _ADAGRAD:
        lr, eps = scalars[0], scalars[1]
        summed = load(one + here, real, shape, count) + g * g
        store(summed, one + here, real, count)
        change = broadcast(lr, shape) * g / (sqrt(summed) + broadcast(eps, shape))
    elif kind == _ADAM:
        lr, eps, new1, new2, correction = scalars
        moment1, moment2 = load(one + here, real, shape, count), load(two + here, real, shape, count)
        moment1 = moment1 + broadcast(new1, shape) * (g - moment1)
        moment2 = moment2 + broadcast(new2, shape) * (g * g - moment2)
        store(moment1, one + here, real, count)
        store(moment2, two + here, real, count)
        change = broadcast(lr * correction, shape) * moment1 / (sqrt(moment2) + broadcast(eps, shape))
    elif kind == _MOMENTUM:
        velocity = broadcast(scalars[1], shape) * load(one + here, real, shape, count) + g
        store(velocity, one + here, real, count)
        change = broadcast(scalars[0], shape) * velocity
    else:  # SGD, and row-wise Adagrad, whose factor is known
        change = broadcast(factor, shape) * g
    values = load(target, rows, shape, count) - change
    store(round_lanes(values, noise, d, rows), target, rows, count)
