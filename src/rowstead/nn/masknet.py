"""MaskNet: Wang et al., "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by Instance-Guided Mask", DLP-KDD 2021,
arXiv:2102.07619.

Letters: B examples, M fields, D width of their vectors, Z width of a block's input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rowstead.nn.fields import Fields
from rowstead.nn.layers import LayerNorm, deep_part
from rowstead.nn.network import Network, NetworkInputs
from rowstead.spec.network_options import MaskNetSpec


class MaskNet(Network):
    """Mask blocks side by side over the fields (parallel), or each on the one before (stacked, the paper's serial model), and an MLP."""

    def __init__(self, inputs: NetworkInputs, options: MaskNetSpec) -> None:
        super().__init__(inputs, options)
        num_fields, width = inputs.num_dense + len(inputs.sparse), inputs.model.width
        self.is_stacked, out = options.structure == "stacked", options.block_width
        self.fields = Fields(inputs)
        self.norm = FieldNorm(num_fields, width)
        self.blocks = nn.ModuleList(
            MaskBlock(num_fields * width, out if self.is_stacked and index else num_fields * width, out, options.reduction)
            for index in range(options.blocks)
        )
        self.top = deep_part(out if self.is_stacked else out * options.blocks, inputs.model)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        fields = self.fields(dense, pooled)
        x, normed = fields.flatten(1), self.norm(fields).flatten(1)
        if self.is_stacked:
            hidden = normed
            for block in self.blocks:
                hidden = block(x, hidden)
        else:
            hidden = torch.cat([block(x, normed) for block in self.blocks], dim=1)
        logits: Tensor = self.top(hidden)
        return logits.squeeze(1)


class FieldNorm(nn.Module):
    """Layer normalisation of the vector of each field, with a gain and a bias of its own: [B, M, D] to [B, M, D]."""

    def __init__(self, num_fields: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.gain = nn.Parameter(torch.ones(num_fields, width))
        self.bias = nn.Parameter(torch.zeros(num_fields, width))

    def forward(self, fields: Tensor) -> Tensor:
        return self.norm(fields) * self.gain + self.bias


class MaskBlock(nn.Module):
    """relu(LN(W (mask * x))), where mask = W2 relu(W1 e + b1) + b2 of all fields e; its hidden layer is `reduction` times as wide as x."""

    def __init__(self, fields_width: int, in_width: int, out_width: int, reduction: float) -> None:
        super().__init__()
        aggregated = max(1, int(reduction * in_width))
        self.mask = nn.Sequential(nn.Linear(fields_width, aggregated), nn.ReLU(), nn.Linear(aggregated, in_width))
        self.hidden = nn.Sequential(nn.Linear(in_width, out_width, bias=False), LayerNorm(out_width), nn.ReLU())

    def forward(self, fields: Tensor, x: Tensor) -> Tensor:
        """Fields [B, M D] and x [B, Z] to [B, out width]."""
        out: Tensor = self.hidden(self.mask(fields) * x)
        return out
