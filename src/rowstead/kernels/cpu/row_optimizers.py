"""Rules of the row optimizers on the CPU, in Numba; `spec/row_optimizers.py` says which scalars and state tensors each has.

A row is updated in blocks, as in `embedding_kernels.py`, which also explains `rows`, `real` and the letters.
"""

from __future__ import annotations

import numba
import numpy as np

from rowstead.kernels.cpu.vectors import broadcast, bytes_of, cast, load, sqrt, store, sum_lanes, zeros
from rowstead.kernels.rounding import round_lanes, row_noise
from rowstead.kernels.row_state import NUM_SCALARS
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS

_jit = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
_inlined = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy", forceinline=True)


_ADAGRAD = ROW_OPTIMIZERS["adagrad"].code
_ROWWISE_ADAGRAD = ROW_OPTIMIZERS["rowwise_adagrad"].code
_ADAM = ROW_OPTIMIZERS["adam"].code
_MOMENTUM = ROW_OPTIMIZERS["momentum"].code
_ROWWISE_ADAM = ROW_OPTIMIZERS["rowwise_adam"].code
_L2, _DECAY = NUM_SCALARS - 2, NUM_SCALARS - 1


@_inlined
def scalars_tuple(scalars):  # type: ignore[no-untyped-def]
    """The array that `step_scalars` fills as a tuple."""
    return scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], scalars[5], scalars[6]


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


@_jit
def _row_squares(source, target, width, rows, like, l2):  # type: ignore[no-untyped-def]
    """The sum of the squares of a row's gradient [D] with the L2 penalty; the row is at the address `target`."""
    summed, factor = zeros(like, 16), broadcast(l2, zeros(like, 16))
    d = 0
    while d < width:
        count = min(width - d, 16)
        row = load(target + d * bytes_of(rows), rows, summed, count)
        values = load(source + d * bytes_of(like), like, summed, count) + factor * row
        summed = summed + values * values
        d += 16
    return sum_lanes(summed)


@_inlined
def apply_row(  # type: ignore[no-untyped-def]
    table, row, address, first, second, first_bytes, second_bytes, gradient, width, rows, real, kind, scalars, step
):
    """The rule of the optimizer with code `kind` for one row with its gradient [D] at an address.

    address, first, second: of a table's rows and of its state tensors, with so many bytes per row.
    """
    one, two = first + row * first_bytes, second + row * second_bytes
    factor, target = scalars[0], address + row * width * bytes_of(rows)
    if kind == _ROWWISE_ADAGRAD or kind == _ROWWISE_ADAM:  # noqa: SIM109 - Numba compiles away a comparison, not a tuple
        single = zeros(real, 1)
        if scalars[_L2] == 0:
            mean = squares(gradient, width, real) / cast(width, real)
        else:
            mean = _row_squares(gradient, target, width, rows, real, scalars[_L2]) / cast(width, real)
        if kind == _ROWWISE_ADAGRAD:
            mean = sum_lanes(load(one, real, single, None)) + mean
            store(broadcast(mean, single), one, real, None)
            factor = scalars[0] / (np.sqrt(mean) + scalars[1])
        else:
            before = sum_lanes(load(two, real, single, None))
            mean = before + scalars[3] * (mean - before)
            store(broadcast(mean, single), two, real, None)
            factor = scalars[0] * scalars[4] / (np.sqrt(mean) + scalars[1])
    noise = row_noise(table, row, step)
    rule = (target, gradient, one, two, noise, rows, real, kind, factor, scalars)
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
    values = load(target, rows, shape, count)
    g = load(gradient + here, real, shape, count) + broadcast(scalars[_L2], shape) * values
    if kind == _ADAGRAD:
        lr, eps = scalars[0], scalars[1]
        summed = load(one + here, real, shape, count) + g * g
        store(summed, one + here, real, count)
        change = broadcast(lr, shape) * g / (sqrt(summed) + broadcast(eps, shape))
    elif kind == _ADAM:
        lr, eps, new1, new2, correction = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
        moment1, moment2 = load(one + here, real, shape, count), load(two + here, real, shape, count)
        moment1 = moment1 + broadcast(new1, shape) * (g - moment1)
        moment2 = moment2 + broadcast(new2, shape) * (g * g - moment2)
        store(moment1, one + here, real, count)
        store(moment2, two + here, real, count)
        change = broadcast(lr * correction, shape) * moment1 / (sqrt(moment2) + broadcast(eps, shape))
    elif kind == _ROWWISE_ADAM:
        moment1 = load(one + here, real, shape, count)
        moment1 = moment1 + broadcast(scalars[2], shape) * (g - moment1)
        store(moment1, one + here, real, count)
        change = broadcast(factor, shape) * moment1
    elif kind == _MOMENTUM:
        velocity = broadcast(scalars[1], shape) * load(one + here, real, shape, count) + g
        store(velocity, one + here, real, count)
        change = broadcast(scalars[0], shape) * velocity
    else:  # SGD, and row-wise Adagrad, whose factor is known
        change = broadcast(factor, shape) * g
    change = change + broadcast(scalars[_DECAY], shape) * values
    store(round_lanes(values - change, noise, d, rows), target, rows, count)
