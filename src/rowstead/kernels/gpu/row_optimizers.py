"""Rules of the row optimizers on a GPU, in Triton; `spec/row_optimizers.py` says which scalars and state tensors each has."""

from __future__ import annotations

import triton
import triton.language as tl

from rowstead.spec.row_optimizers import ROW_OPTIMIZERS

_SGD = tl.constexpr(ROW_OPTIMIZERS["sgd"].code)
_ADAGRAD = tl.constexpr(ROW_OPTIMIZERS["adagrad"].code)
_ROWWISE_ADAGRAD = tl.constexpr(ROW_OPTIMIZERS["rowwise_adagrad"].code)
_ADAM = tl.constexpr(ROW_OPTIMIZERS["adam"].code)
_ROWWISE_ADAM = tl.constexpr(ROW_OPTIMIZERS["rowwise_adam"].code)


@triton.jit
def row_change(grad, first_at, second_at, width, d, live, on, scalars, KIND: tl.constexpr):
    """What the optimizer with code KIND subtracts from rows whose summed gradients are `grad` [R, S, D]; their state is updated.

    first_at, second_at [R, S, 1]: pointers to the state of each row. width [R, S, 1] or [1, 1, 1]; d [1, 1, D]. Rows `live`
    [R, S, 1], elements `on` [R, S, D]. scalars: what `step_scalars` gives.
    """
    lr = tl.load(scalars)
    if KIND == _SGD:
        change = lr * grad
    elif KIND == _ADAGRAD:
        eps = tl.load(scalars + 1)
        total = tl.load(first_at + d, mask=on, other=0.0) + grad * grad
        tl.store(first_at + d, total, mask=on)
        change = lr * grad / (tl.sqrt(total) + eps)
    elif KIND == _ROWWISE_ADAGRAD:
        eps = tl.load(scalars + 1)
        before = tl.load(first_at, mask=live, other=0.0)
        total = before + tl.sum(tl.where(on, grad * grad, 0.0), axis=2, keep_dims=True) / width.to(grad.dtype)
        tl.store(first_at, total, mask=live)
        change = grad * (lr / (tl.sqrt(total) + eps))
    elif KIND == _ADAM:
        eps = tl.load(scalars + 1)
        one = tl.load(first_at + d, mask=on, other=0.0)
        two = tl.load(second_at + d, mask=on, other=0.0)
        new1, new2, correction = tl.load(scalars + 2), tl.load(scalars + 3), tl.load(scalars + 4)
        one += new1 * (grad - one)
        two += new2 * (grad * grad - two)
        tl.store(first_at + d, one, mask=on)
        tl.store(second_at + d, two, mask=on)
        change = (lr * correction) * one / (tl.sqrt(two) + eps)
    elif KIND == _ROWWISE_ADAM:
        eps, new1, new2 = tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
        one = tl.load(first_at + d, mask=on, other=0.0)
        two = tl.load(second_at, mask=live, other=0.0)
        one += new1 * (grad - one)
        two += new2 * (tl.sum(tl.where(on, grad * grad, 0.0), axis=2, keep_dims=True) / width.to(grad.dtype) - two)
        tl.store(first_at + d, one, mask=on)
        tl.store(second_at, two, mask=live)
        change = one * (lr * tl.load(scalars + 4) / (tl.sqrt(two) + eps))
    else:  # SGD with momentum
        velocity = tl.load(scalars + 1) * tl.load(first_at + d, mask=on, other=0.0) + grad
        tl.store(first_at + d, velocity, mask=on)
        change = lr * velocity
    return change
