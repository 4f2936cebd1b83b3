"""Linear layers on a CUDA GPU, whose backward pass reads each activation once, and in which weights can wait for their gradients.

Plain torch reads the gradient of a layer with ReLU twice more: once to set it to zero where ReLU did, and once to sum it for the
bias. And it makes the gradient of a layer's weights before it goes on to the layer below, where rows wait for theirs.

Letters: B examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rowstead.kernels.gpu.dense_programs import relu_backward

_ROWS, _COLUMNS = 16, 128
"""Of a block that is read at a time."""
_PARTS = 128
"""Into about how many parts the examples are split for the sum of the bias's gradient."""

DeferredReply = list[Callable[[], None]]
"""What is left of backward passes: each call gives the weights of one layer their gradients."""
_later: ContextVar[DeferredReply | None] = ContextVar("_later", default=None)


@contextlib.contextmanager
def weights_later() -> Iterator[DeferredReply]:
    """Layers whose forward pass is in this context leave the gradients of their weights to whoever calls what is in the list.

    That fills as the backward pass goes on. Until the calls have ended on the GPU, it has to be kept.
    """
    later: DeferredReply = []
    token = _later.set(later)
    try:
        yield later
    finally:
        _later.reset(token)


def linear(x: Tensor, layer: nn.Linear, *, relu: bool) -> Tensor:
    """What a layer makes of x [B, in width], and of that ReLU; in autocast's type where that is on.

    x may be wider, with zeros in the columns that are too many.
    """
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    with torch.autocast("cuda", enabled=False):
        out: Tensor = _GpuLinear.apply(x, layer.weight, layer.bias, relu, _later.get())
    return out


class _GpuLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool, later: DeferredReply | None) -> Tensor:
        too_many = x.shape[1] - weight.shape[1]
        wide = (functional.pad(weight, (0, too_many)) if too_many else weight).to(x.dtype)
        given = bias.to(x.dtype)
        out = torch._addmm_activation(given, x, wide.t()) if relu else torch.addmm(given, x, wide.t())
        ctx.save_for_backward(x, wide, out if relu else None)
        ctx.parameters, ctx.later = (weight, bias), later
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
        x = x.detach()  # else what is left for later would keep the layer below, and that what is left

        def of_weights() -> tuple[Tensor, Tensor]:
            of_weight = (masked.t() @ x)[:, : weight.shape[1]].contiguous()
            return of_weight.to(weight.dtype), parts.sum(0).to(bias.dtype)

        def give() -> None:
            weight.grad, bias.grad = of_weights()

        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = masked * wide if len(wide) == 1 else masked @ wide
        if ctx.later is None:
            return of_x, *of_weights(), None, None
        if ctx.needs_input_grad[1]:
            ctx.later.append(give)
        return of_x, None, None, None, None


def masked_gradient(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """`grad` [B, out] where ReLU let something through, and its sums over parts of the examples [parts, out]."""
    num_samples, width = out.shape
    masked = torch.empty_like(grad)
    rows_a_part = max(_ROWS, triton.cdiv(triton.cdiv(num_samples, _PARTS), _ROWS) * _ROWS)
    num_parts = max(1, triton.cdiv(num_samples, rows_a_part))
    sums = torch.zeros(num_parts, width, dtype=torch.float32, device=grad.device)
    relu_backward[(num_parts, triton.cdiv(width, _COLUMNS))](
        grad, out, masked, sums, num_samples, width, rows_a_part, R=_ROWS, C=_COLUMNS, num_warps=4
    )
    return masked, sums
