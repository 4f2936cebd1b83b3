"""Linear layers on a CUDA GPU whose backward pass reads each activation once, and can defer the gradients of weights.

Plain torch reads the gradient of a layer with ReLU twice more: once to mask it, and once to sum it for the bias. And it computes
the gradient of a layer's weights before it continues to the layer below, which delays the gradients of embedding rows.

Letters: B examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_ROWS, _COLUMNS = 16, 128
"""Size of the block that is read at a time."""
_PARTS = 128
"""Approximate number of parts into which examples are split to sum the bias's gradient."""

DeferredGradients = list[Callable[[], None]]
"""The deferred part of backward passes: each call computes the weight gradients of one layer."""
_deferred: ContextVar[DeferredGradients | None] = ContextVar("_deferred", default=None)


@contextlib.contextmanager
def defer_weight_gradients() -> Iterator[DeferredGradients]:
    """Layers whose forward pass runs in this context defer their weight gradients to the functions in the list.

    The backward pass fills the list. Keep it until these calls have finished on the GPU.
    """
    deferred: DeferredGradients = []
    token = _deferred.set(deferred)
    try:
        yield deferred
    finally:
        _deferred.reset(token)


def current_deferred() -> DeferredGradients | None:
    """The list of the innermost `defer_weight_gradients`; None outside of any."""
    return _deferred.get()


def add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Give parameters their gradients; a layer may be applied twice."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def linear(x: Tensor, layer: nn.Linear, *, relu: bool) -> Tensor:
    """Apply a layer, and ReLU if asked, to x [B, in width]; in autocast's dtype where autocast is on.

    x may have extra columns of zeros.
    """
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    with torch.autocast("cuda", enabled=False):
        out: Tensor = _GpuLinear.apply(x, layer.weight, layer.bias, relu, current_deferred())
    return out


class _GpuLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool, deferred: DeferredGradients | None) -> Tensor:
        num_extra = x.shape[1] - weight.shape[1]
        wide = (functional.pad(weight, (0, num_extra)) if num_extra else weight).to(x.dtype)
        given = bias.to(x.dtype)
        out = torch._addmm_activation(given, x, wide.t()) if relu else torch.addmm(given, x, wide.t())
        ctx.save_for_backward(x, wide, out if relu else None)
        ctx.parameters, ctx.deferred = (weight, bias), deferred
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, wide, out = ctx.saved_tensors
        weight, bias = ctx.parameters
        if out is None:
            masked = parts = grad.contiguous()
        else:
            masked, parts = masked_gradient(grad.contiguous(), out)
        x = x.detach()  # else the deferred function would keep the graph of the layer below alive, and vice versa

        def weight_gradients() -> tuple[Tensor, Tensor]:
            of_weight = (masked.t() @ x)[:, : weight.shape[1]].contiguous()
            return of_weight.to(weight.dtype), parts.sum(0).to(bias.dtype)

        def set_gradients() -> None:
            add_gradients((weight, bias), weight_gradients())

        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = masked * wide if len(wide) == 1 else masked @ wide
        if ctx.deferred is None:
            return of_x, *weight_gradients(), None, None
        if ctx.needs_input_grad[1]:
            ctx.deferred.append(set_gradients)
        return of_x, None, None, None, None


def masked_gradient(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """`grad` [B, out] masked by ReLU, and its sums over parts of the examples [parts, out]."""
    num_samples, width = out.shape
    masked = torch.empty_like(grad)
    num_parts, rows_per_part = parts_of(num_samples, _ROWS)
    sums = torch.zeros(num_parts, width, dtype=torch.float32, device=grad.device)
    _relu_backward[(num_parts, triton.cdiv(width, _COLUMNS))](
        grad, out, masked, sums, num_samples, width, rows_per_part, R=_ROWS, C=_COLUMNS, num_warps=4
    )
    return masked, sums


def parts_of(num_samples: int, rows_at_a_time: int) -> tuple[int, int]:
    """How many parts examples are split into for sums over them, and the examples of each."""
    rows_per_part = max(rows_at_a_time, triton.cdiv(triton.cdiv(num_samples, _PARTS), rows_at_a_time) * rows_at_a_time)
    return max(1, triton.cdiv(num_samples, rows_per_part)), rows_per_part


@triton.jit
def _relu_backward(  # type: ignore[no-untyped-def]
    grad, out, masked, sums, num_samples, width, rows_a_part, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
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
