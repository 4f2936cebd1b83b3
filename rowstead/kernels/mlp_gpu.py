"""A linear layer with ReLU on a CUDA GPU, whose backward pass reads each activation once.

Plain torch reads the gradient twice more: once to set it to zero where ReLU did, and once to sum it for the bias.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from rowstead.kernels.gpu_programs import relu_backward

_ROWS, _COLUMNS = 16, 128
"""Of a block that is read at a time."""
_PARTS = 128
"""Into about how many parts the examples are split for the sum of the bias's gradient."""


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x @ weight.T + bias): x [B, in], weight [out, in], bias [out]; in autocast's type where that is on."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    with torch.autocast("cuda", enabled=False):
        out: Tensor = _LinearRelu.apply(x, weight, bias)
    return out


class _LinearRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = torch._addmm_activation(bias, x, weight.t())
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight, out = ctx.saved_tensors
        masked, of_bias = masked_gradient(grad.contiguous(), out)
        of_x = masked @ weight if ctx.needs_input_grad[0] else None
        return of_x, masked.t() @ x, of_bias


def masked_gradient(grad: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """`grad` [B, out] where ReLU let something through, and its sum over examples [out]."""
    num_samples, width = out.shape
    masked = torch.empty_like(grad)
    rows_a_part = max(_ROWS, triton.cdiv(triton.cdiv(num_samples, _PARTS), _ROWS) * _ROWS)
    num_parts = max(1, triton.cdiv(num_samples, rows_a_part))
    sums = torch.zeros(num_parts, width, dtype=torch.float32, device=grad.device)
    relu_backward[(num_parts, triton.cdiv(width, _COLUMNS))](
        grad, out, masked, sums, num_samples, width, rows_a_part, R=_ROWS, C=_COLUMNS, num_warps=4
    )
    return masked, sums.sum(0).to(grad.dtype)
