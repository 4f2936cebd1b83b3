"""Linear layers on a CPU, by oneDNN's products, which torch brings along and takes for BF16 alone.

Products of few examples with many weights are faster by it than by what torch takes for FP32, on an EPYC of the fourth generation by 5 to
20 %, with thousands of inputs by a quarter. ReLU is torch's: oneDNN's makes 0 of what is no number, and nobody would see that a model is lost.

Letters: B examples.
"""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

FEW_WEIGHTS, MANY_WEIGHTS = 1 << 18, 1 << 21
"""Layers with fewer weights are torch's, since a call of oneDNN takes longer to begin; from how many weights on their gradient is
oneDNN's product too: below, torch's is as fast or faster."""


def takes(layer: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    """Whether `linear` is for this layer and x: it is large, and nobody looks into it or replaces what torch does there."""
    if type(layer) is not nn.Linear or layer.in_features * layer.out_features < FEW_WEIGHTS:
        return False
    if not has_product() or not pays() or not torch.backends.mkldnn.enabled or torch.is_autocast_enabled("cpu"):
        return False
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]  # public, and left out of its __all__
    if torch.compiler.is_compiling() or is_traced or torch._C._are_functorch_transforms_active():
        return False
    fits = x.dim() == 2 and x.shape[0] > 0 and x.shape[1] == layer.in_features
    return fits and _is_plain(x) and _is_plain(layer.weight) and not _is_watched(layer)


@functools.cache
def has_product() -> bool:
    """Whether this torch brings oneDNN's product along."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def pays() -> bool:
    """Whether oneDNN's products are faster than those that torch takes: on an EPYC with AVX-512 they are, on one with AVX2 they are not."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is torch's own kind of dense FP32 in memory, no subclass that has products of its own."""
    is_known = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_known and tensor.is_cpu and tensor.dtype == torch.float32


def _is_watched(layer: nn.Linear) -> bool:
    """Whether a call of the layer does more than its product."""
    of_forward = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return bool(of_forward or layer._backward_hooks or layer._backward_pre_hooks or _has_any_global_hook())


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """What a layer makes of x [B, in width]; only for what it `takes`."""
    found: Tensor = _CpuLinear.apply(x, layer.weight, layer.bias)
    return found


class _CpuLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # for whoever asks for gradients of gradients: torch's products have them
            of_x = None if weight is None else grad @ weight
            of_weight = None if x is None else grad.t() @ x
        else:
            of_x = None if weight is None else _product(grad, weight.t())
            of_weight = None if x is None else _weight_gradient(grad, x)
        return of_x, of_weight, grad.sum(0) if ctx.needs_input_grad[2] else None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    is_large = grad.shape[1] * x.shape[1] >= MANY_WEIGHTS
    return _product(grad.t(), x.t()) if is_large else grad.t() @ x


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [n, k] times b [m, k] transposed, and a bias [m] if there is one."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b, bias, "none", [], "")
    return found
