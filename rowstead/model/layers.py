"""The parts of a DLRM above its tables: MLPs and the three interactions.

Letters: B examples, V vectors that interact (the dense one and one a sparse feature), D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class MLP(nn.Sequential):
    """Linear layers with ReLU between them, and after the last one only if `last_relu`."""

    def __init__(self, in_width: int, widths: Sequence[int], *, last_relu: bool) -> None:
        layers: list[nn.Module] = []
        for place, width in enumerate(widths):
            linear = nn.Linear(in_width, width)
            nn.init.normal_(linear.weight, std=(2.0 / (in_width + width)) ** 0.5)
            nn.init.normal_(linear.bias, std=(1.0 / width) ** 0.5)
            layers.append(linear)
            if last_relu or place < len(widths) - 1:
                layers.append(nn.ReLU())
            in_width = width
        super().__init__(*layers)


class Concat(nn.Module):
    """Vectors side by side: [B, dense width] and [B, pooled width] to [B, both]."""

    def __init__(self, dense_width: int, pooled_width: int) -> None:
        super().__init__()
        self.out_width = dense_width + pooled_width

    def forward(self, dense: Tensor | None, pooled: Tensor) -> Tensor:
        return pooled if dense is None else torch.cat([dense, pooled], dim=1)


class Dot(nn.Module):
    """The dense vector, then the dot products of all pairs among V vectors of width D."""

    lower: Tensor

    def __init__(self, dense_width: int, pooled_width: int, width: int) -> None:
        super().__init__()
        self.width = width
        num_vectors = (dense_width + pooled_width) // width
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("lower", row * num_vectors + column, persistent=False)
        self.out_width = dense_width + self.lower.numel()

    def forward(self, dense: Tensor | None, pooled: Tensor) -> Tensor:
        side_by_side = pooled if dense is None else torch.cat([dense, pooled], dim=1)
        vectors = side_by_side.unflatten(1, (-1, self.width))
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.lower)
        return products if dense is None else torch.cat([dense, products], dim=1)


class Cross(nn.Module):
    """DCNv2's low-rank cross network: x <- x0 * (W (V x) + b) + x, some layers of it."""

    def __init__(self, dense_width: int, pooled_width: int, *, layers: int, rank: int) -> None:
        super().__init__()
        self.out_width = dense_width + pooled_width
        self.down = nn.ModuleList(nn.Linear(self.out_width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, self.out_width) for _ in range(layers))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.xavier_normal_(parameter)

    def forward(self, dense: Tensor | None, pooled: Tensor) -> Tensor:
        start = pooled if dense is None else torch.cat([dense, pooled], dim=1)
        x = start
        for down, up in zip(self.down, self.up, strict=True):
            x = start * up(down(x)) + x
        return x
