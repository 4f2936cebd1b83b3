"""The layers of the built-in DLRM: MLPs and the interactions of `spec.interactions.INTERACTIONS`.

Letters: B examples, V vectors that interact (dense ones and one per sparse feature), D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from rowstead.kernels.choose import has_triton
from rowstead.kernels.cpu import linear
from rowstead.kernels.interaction import pairwise_dots
from rowstead.spec.interactions import InteractionInputs, InteractionSpec
from rowstead.spec.model import ModelSpec, Norm


class MLP(nn.Sequential):
    """Linear layers; hidden ones are followed by norm, ReLU and dropout. The last one is hidden if `last_hidden`, else ReLU if `last_relu`."""

    def __init__(
        self,
        in_width: int,
        widths: Sequence[int],
        *,
        last_relu: bool,
        last_hidden: bool = False,
        norm: Norm = "none",
        dropout: float = 0.0,
    ) -> None:
        layers: list[nn.Module] = []
        for index, width in enumerate(widths):
            linear = nn.Linear(in_width, width)
            nn.init.normal_(linear.weight, std=(2.0 / (in_width + width)) ** 0.5)
            nn.init.normal_(linear.bias, std=(1.0 / width) ** 0.5)
            layers.append(linear)
            is_hidden = last_hidden or index < len(widths) - 1
            if is_hidden and norm != "none":
                layers.append(_NORMS[norm](width))
            if last_relu or is_hidden:
                layers.append(nn.ReLU(inplace=True))  # nothing else reads the output of a linear layer or of a norm
            if is_hidden and dropout:
                layers.append(nn.Dropout(dropout))
            in_width = width
        super().__init__(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers to x [B, in width]; x may have extra columns of zeros."""
        layers = list(self)
        is_compiling = torch.compiler.is_compiling()
        fused = None if is_compiling else _fused_layer(x)
        if fused is None:
            x = x[:, : cast(nn.Linear, layers[0]).in_features]
            for layer in layers:
                x = linear.linear(x, layer) if not is_compiling and linear.takes(layer, x) else layer(x)
            return x
        is_done = False
        for layer, after in zip(layers, [*layers[1:], None], strict=True):
            if isinstance(layer, nn.Linear):
                is_done = isinstance(after, nn.ReLU)  # the kernel does it
                x = fused(x, layer, relu=is_done)
            elif is_done:
                is_done = False
            else:
                x = layer(x)
        return x


def deep_part(in_width: int, model: ModelSpec, *, hidden: Sequence[int] | None = None) -> MLP:
    """An MLP with the network's outputs and with hidden layers, norm and dropout as `model.top` has them; or of these hidden layers, without outputs."""
    widths, has_output = (*model.top, model.num_outputs) if hidden is None else hidden, hidden is None
    return MLP(in_width, widths, last_relu=False, last_hidden=not has_output, norm=model.top_norm, dropout=model.top_dropout)


class BatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` over the whole batch, also where several processes have a share of it each; in FP32 whatever the type of x.

    `all_reduce` sums a tensor in place over those processes; every one of them has to call the module equally often.
    """

    all_reduce: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the columns of x [B, D]."""
        values, weight, bias = _at_least_fp32(x, self.weight, self.bias)
        if not self.training or self.all_reduce is None:
            normed = self._of_one_process(values, weight, bias)
        else:
            normed = _SharedBatchNorm.apply(values, weight, bias, self)
        return normed.to(x.dtype)

    def _of_one_process(self, values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.training and len(values) == 1:  # a variance of one example is 0, and torch refuses it
            return bias + 0.0 * values
        if self.training:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
        return functional.batch_norm(
            values, self.running_mean, self.running_var, weight, bias, self.training, self.momentum or 0.0, self.eps
        )

    @torch.no_grad()
    def observe(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running mean and the running variance, which is unbiased, towards those of a batch of `count` examples."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum or 0.0)
        self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), self.momentum or 0.0)


class _SharedBatchNorm(torch.autograd.Function):
    """Batch norm with the mean and variance of all processes' examples: x [B of this process, D], weight [D], bias [D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: BatchNorm) -> Tensor:
        assert norm.all_reduce is not None
        summed = torch.cat([x.sum(0), x.new_tensor([len(x)])])
        norm.all_reduce(summed)
        count = summed[-1].clamp(min=1)
        mean = summed[:-1] / count
        squares = (x - mean).square().sum(0)  # in a second exchange: a difference of two large sums would lose digits
        norm.all_reduce(squares)
        variance = squares / count
        norm.observe(mean, variance, count)
        scale = torch.rsqrt(variance + norm.eps)
        normed = (x - mean) * scale
        ctx.save_for_backward(normed, weight, scale, count)
        ctx.all_reduce = norm.all_reduce
        return normed * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normed, weight, scale, count = ctx.saved_tensors
        own = torch.stack([grad.sum(0), (grad * normed).sum(0)])  # of bias and weight: the dense exchange sums those
        total = own.clone()
        ctx.all_reduce(total)
        of_x = weight * scale * (grad - (total[0] + normed * total[1]) / count)
        return of_x, own[1], own[0], None


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in FP32, whatever the type of x."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the rows of x [B, D]."""
        values, weight, bias = _at_least_fp32(x, self.weight, self.bias)
        return functional.layer_norm(values, self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def _at_least_fp32(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


_NORMS: dict[Norm, Callable[[int], nn.Module]] = {"batch": BatchNorm, "layer": LayerNorm}


def _fused_layer(x: Tensor) -> Callable[..., Tensor] | None:
    """The fused GPU kernel of a linear layer and its ReLU; None where it does not apply to x."""
    if not _has_gpu_kernels(x):
        return None
    from rowstead.kernels.gpu.linear import linear

    return linear


def _has_gpu_kernels(x: Tensor) -> bool:
    """Whether the GPU kernels of layers apply to x."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.shape[0] > 0 and has_triton()


class Concat(nn.Module):
    """Vectors side by side: [B, dense width] and [B, pooled width] to [B, total width]."""

    def __init__(self, inputs: InteractionInputs, spec: InteractionSpec) -> None:
        super().__init__()

    def forward(self, dense: Tensor | None, pooled: Tensor) -> Tensor:
        return pooled if dense is None else torch.cat([dense, pooled], dim=1)


class Dot(nn.Module):
    """The dense vectors, then the dot products of the chosen pairs among V vectors of width D; on a GPU padded with zeros."""

    def __init__(self, inputs: InteractionInputs, spec: InteractionSpec) -> None:
        super().__init__()
        self.width, self.pairs = inputs.width, spec.pairs

    def forward(self, dense: Tensor | None, pooled: Tensor) -> Tensor:
        return pairwise_dots(dense, pooled, self.width, self.pairs)


class Cross(nn.Module):
    """DCNv2's low-rank cross network: x <- x0 * (W (V x) + b) + x in each layer."""

    def __init__(self, inputs: InteractionInputs, spec: InteractionSpec) -> None:
        super().__init__()
        width, rank = inputs.total_width, spec.cross_rank
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(spec.cross_layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(spec.cross_layers))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.xavier_normal_(parameter)

    def forward(self, dense: Tensor | None, pooled: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and _has_gpu_kernels(pooled):
            from rowstead.kernels.gpu.cross import cross

            return cross(dense, pooled, cast(Sequence[nn.Linear], self.down), cast(Sequence[nn.Linear], self.up))
        x = start = pooled if dense is None else torch.cat([dense, pooled], dim=1)
        for down, up in zip(self.down, self.up, strict=True):
            x = start * up(down(x)) + x
        return x
