"""Linear layers on a CPU by oneDNN's matrix products, which torch includes but uses for BF16 only.

For small batches and many weights they are faster than torch's FP32 products: on a fourth-generation EPYC by 5 to 20 %, with thousands
of inputs by a quarter. ReLU is torch's: oneDNN's turns NaN into 0, which would hide that a model has diverged.

Letters: B examples.
"""

from __future__ import annotations

import functools
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

FEW_WEIGHTS, MANY_WEIGHTS = 1 << 18, 1 << 21
"""Layers below the first number of weights use torch, since a oneDNN call has more overhead; weight gradients use oneDNN from the second
number on, below which torch is as fast or faster."""


def takes(layer: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    """Whether `linear` applies to this layer and x: the layer is large, and has no hooks or overrides that expect torch's own product."""
    if type(layer) is not nn.Linear or layer.in_features * layer.out_features < FEW_WEIGHTS:
        return False
    if not has_product() or not pays() or not torch.backends.mkldnn.enabled or torch.is_autocast_enabled("cpu"):
        return False
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]  # public, and left out of its __all__
    if torch.compiler.is_compiling() or is_traced or torch._C._are_functorch_transforms_active():
        return False
    fits = x.dim() == 2 and x.shape[0] > 0 and x.shape[1] == layer.in_features
    return fits and _is_plain(x) and _is_plain(layer.weight) and not _has_hooks(layer)


@functools.cache
def has_product() -> bool:
    """Whether this torch includes oneDNN's product."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def pays() -> bool:
    """Whether oneDNN's products are faster than torch's: they are on an EPYC with AVX-512, and are not on one with AVX2."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a plain dense FP32 CPU tensor, not a subclass with its own products."""
    is_known = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_known and tensor.is_cpu and tensor.dtype == torch.float32


def _has_hooks(layer: nn.Linear) -> bool:
    """Whether calling the layer does more than its product."""
    of_forward = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    return bool(of_forward or layer._backward_hooks or layer._backward_pre_hooks or _has_any_global_hook())


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Apply a layer to x [B, in width]; only where `takes` is true."""
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
        if torch.is_grad_enabled():  # second derivatives: torch's products have them
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
    """a [n, k] times b [m, k] transposed, plus a bias [m] if given."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b, bias, "none", [], "")
    return found
