"""The layers of the built-in DLRM: MLPs and the interactions of `spec.interactions.INTERACTIONS`.

Letters: B examples, V vectors that interact (dense ones and one per sparse feature), D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from rowstead.kernels.choose import has_triton
from rowstead.kernels.cpu import linear
from rowstead.kernels.interaction import pairwise_dots
from rowstead.spec.interactions import InteractionInputs, InteractionSpec


class MLP(nn.Sequential):
    """Linear layers with ReLU between them, and after the last one only if `last_relu`."""

    def __init__(self, in_width: int, widths: Sequence[int], *, last_relu: bool) -> None:
        layers: list[nn.Module] = []
        for index, width in enumerate(widths):
            linear = nn.Linear(in_width, width)
            nn.init.normal_(linear.weight, std=(2.0 / (in_width + width)) ** 0.5)
            nn.init.normal_(linear.bias, std=(1.0 / width) ** 0.5)
            layers.append(linear)
            if last_relu or index < len(widths) - 1:
                layers.append(nn.ReLU(inplace=True))  # nothing else reads the output of a linear layer
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
        for index in range(0, len(layers), 2):
            x = fused(x, cast(nn.Linear, layers[index]), relu=index + 1 < len(layers))
        return x


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
