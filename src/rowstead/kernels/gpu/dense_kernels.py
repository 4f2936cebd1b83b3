"""The Triton kernels behind `dense_optimizer.py` and `linear.py`, which launch them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _floats_at(address):
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def step_dense(
    weights, grads, firsts, seconds, owners, starts, sizes, numbers, guard, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of one parameter per program.

    numbers: learning rate, eps, 1 - beta1, 1 - beta2, 1 - beta1 ** step, the root of 1 - beta2 ** step, weight decay.
    """
    owner = tl.load(owners + tl.program_id(0))
    at = tl.load(starts + tl.program_id(0)) + tl.arange(0, BLOCK)
    loss = tl.load(guard)
    on = at < tl.where(loss - loss == 0.0, tl.load(sizes + owner), 0)
    param_at = _floats_at(tl.load(weights + owner)) + at
    param = tl.load(param_at, mask=on, other=0.0)
    lr, eps = tl.load(numbers), tl.load(numbers + 1)
    grad = tl.load(_floats_at(tl.load(grads + owner)) + at, mask=on, other=0.0) + tl.load(numbers + 6) * param
    if KIND == 0:
        change = lr * grad
    else:
        first_at = _floats_at(tl.load(firsts + owner)) + at
        first = tl.load(first_at, mask=on, other=0.0)
        if KIND == 1:
            first += grad * grad
            change = lr * grad / (tl.sqrt(first) + eps)
        else:
            second_at = _floats_at(tl.load(seconds + owner)) + at
            second = tl.load(second_at, mask=on, other=0.0)
            first += tl.load(numbers + 2) * (grad - first)
            second += tl.load(numbers + 3) * (grad * grad - second)
            tl.store(second_at, second, mask=on)
            change = lr / tl.load(numbers + 4) * first / (tl.sqrt(second) / tl.load(numbers + 5) + eps)
        tl.store(first_at, first, mask=on)
    tl.store(param_at, param - change, mask=on)


@triton.jit
def relu_backward(grad, out, masked, sums, num_samples, width, rows_a_part, R: tl.constexpr, C: tl.constexpr):
    """A part of the examples and C columns per program: the gradient where `out` is above 0, and its sum over that part."""
    part = tl.program_id(0)
    column = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    stop = tl.minimum((part + 1) * rows_a_part, num_samples)
    total = tl.zeros([R, C], tl.float32)
    for start in range(part * rows_a_part, stop, R):
        row = start + tl.arange(0, R)[:, None]
        on = (row < stop) & (column < width)
        at = row.to(tl.int64) * width + column
        values = tl.where(tl.load(out + at, mask=on, other=0.0) > 0, tl.load(grad + at, mask=on, other=0.0), 0.0)
        tl.store(masked + at, values, mask=on)
        total += values.to(tl.float32)
    tl.store(sums + part * width + column, tl.sum(total, axis=0, keep_dims=True), mask=column < width)
