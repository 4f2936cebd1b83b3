"""Linear layers on a CPU, by oneDNN's products, which torch brings along and takes for BF16 alone.

Products of few examples with many weights are faster by it than by what torch takes for FP32, on AMD's processors by up to a tenth,
with thousands of inputs by a quarter. ReLU is torch's: oneDNN's makes 0 of what is no number, and nobody would see that a model is lost.

Letters: B examples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW_WEIGHTS, MANY_WEIGHTS = 1 << 18, 1 << 21
"""Layers with fewer weights are torch's, since a call of oneDNN takes longer to begin; from how many weights on their gradient is
oneDNN's product too: below, torch's is as fast or faster."""


def takes(x: Tensor) -> bool:
    """Whether layers of x [B, in width] can be taken here."""
    is_known = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return is_known and x.numel() > 0 and _has_product() and not torch.compiler.is_compiling()


def _has_product() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, layer: nn.Linear, *, relu: bool) -> Tensor:
    """What a layer makes of x [B, in width], and of that ReLU."""
    weight, bias = layer.weight, layer.bias
    if weight.numel() < FEW_WEIGHTS:
        out = functional.linear(x, weight, bias)
        return out.relu_() if relu else out  # nobody else reads what a linear layer gives
    found: Tensor = _Linear.apply(x, weight, bias, relu)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        out = _product(x, weight, bias)
        if relu:
            out.relu_()
        ctx.save_for_backward(x, weight, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        if out is not None:
            grad = torch.ops.aten.threshold_backward.default(grad, out, 0)
        of_x = _product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        of_weight = _product(grad.t(), x.t()) if weight.numel() >= MANY_WEIGHTS else grad.t() @ x
        return of_x, of_weight, grad.sum(0), None


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [n, k] times b [m, k] transposed, and a bias [m] if there is one."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b, bias, "none", [], "")
    return found
