"""AutoInt: Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks", CIKM 2019, arXiv:1810.11921.

Letters: B examples, M fields, H heads, A width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rowstead.nn.fields import Fields
from rowstead.nn.layers import deep_part
from rowstead.nn.network import Network, NetworkInputs
from rowstead.spec.network_options import AutoIntSpec


class AutoInt(Network):
    """Self-attention over the vectors of the fields, and with `deep` an MLP beside it (AutoInt+)."""

    def __init__(self, inputs: NetworkInputs, options: AutoIntSpec) -> None:
        super().__init__(inputs, options)
        self.fields = Fields(inputs)
        num_fields, width, out = inputs.num_dense + len(inputs.sparse), inputs.model.width, options.heads * options.head_width
        self.attention = nn.Sequential(
            *(FieldAttention(out if index else width, options.heads, options.head_width) for index in range(options.layers))
        )
        self.out = nn.Linear(num_fields * out, inputs.num_outputs)
        self.deep = deep_part(num_fields * width, inputs.model) if options.deep else None

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        fields = self.fields(dense, pooled)
        logits = self.out(self.attention(fields).flatten(1))
        if self.deep is not None:
            logits = logits + self.deep(fields.flatten(1))
        return logits.squeeze(1)


class FieldAttention(nn.Module):
    """One interacting layer: each head attends over fields by softmax(<query, key>), and relu(heads + residual) is the result."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        out, self.heads = heads * head_width, heads
        self.query, self.key, self.value, self.residual = (nn.Linear(width, out, bias=False) for _ in range(4))

    def forward(self, fields: Tensor) -> Tensor:
        """Vectors [B, M, D] to [B, M, H A]."""
        query, key, value = (
            layer(fields).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = torch.softmax(query @ key.transpose(2, 3), dim=3) @ value  # [B, H, M, A]
        return torch.relu(attended.transpose(1, 2).flatten(2) + self.residual(fields))
