"""FinalMLP: Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", AAAI 2023, arXiv:2304.00902.

Letters: B examples, W width of dense features and pooled rows side by side, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rowstead.nn.layers import MLP, deep_part
from rowstead.nn.network import Network, NetworkInputs
from rowstead.spec.network_options import FinalMLPSpec


class FinalMLP(Network):
    """Two MLPs over the same inputs, each through a gate of its own, and a bilinear product of their outputs."""

    def __init__(self, inputs: NetworkInputs, options: FinalMLPSpec) -> None:
        super().__init__(inputs, options)
        width, first, second = inputs.num_dense + inputs.pooled_width, inputs.model.top, options.second or inputs.model.top
        self.has_gates = options.gate is not None
        if options.gate is not None:
            self.first_gate = FeatureGate(inputs, options.first_context, options.gate)
            self.second_gate = FeatureGate(inputs, options.second_context, options.gate)
        self.first, self.second = (deep_part(width, inputs.model, hidden=hidden) for hidden in (first, second))
        self.fusion = BilinearFusion(first[-1], second[-1], options.heads)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        x = torch.cat([dense, pooled], dim=1)
        first, second = x, x
        if self.has_gates:
            rows = self.by_feature(pooled)
            first, second = self.first_gate(x, rows), self.second_gate(x, rows)
        logits: Tensor = self.fusion(self.first(first), self.second(second))
        return logits


class FeatureGate(nn.Module):
    """2 sigmoid(MLP(context)) * x, where the context is the rows of some features, or a trained vector where none is named."""

    def __init__(self, inputs: NetworkInputs, context: Sequence[str], hidden: Sequence[int]) -> None:
        super().__init__()
        self.context, width_of = tuple(context), dict(zip(inputs.sparse, inputs.widths, strict=True))
        width = sum(width_of[name] for name in context) if context else inputs.model.width
        self.constant = None if context else nn.Parameter(torch.zeros(width))
        self.gate = MLP(width, (*hidden, inputs.num_dense + inputs.pooled_width), last_relu=False)

    def forward(self, x: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """x [B, W] and the rows of each feature to [B, W]."""
        context = (
            self.constant.unsqueeze(0) if self.constant is not None else torch.cat([rows[name] for name in self.context], 1)
        )
        return 2 * torch.sigmoid(self.gate(context)) * x


class BilinearFusion(nn.Module):
    """The sum over heads of b + w1 a + w2 c + a W3 c, where a and c are one head's share of the two inputs."""

    def __init__(self, first: int, second: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.Linear(first, 1), nn.Linear(second, 1, bias=False)
        self.product = nn.Parameter(torch.empty(heads, first // heads, second // heads))
        nn.init.normal_(self.product, std=(2 / (first // heads + second // heads)) ** 0.5)

    def forward(self, a: Tensor, c: Tensor) -> Tensor:
        """[B, first] and [B, second] to logits [B]."""
        heads = torch.einsum("bhi,hij->bhj", a.unflatten(1, (self.heads, -1)), self.product)
        return (self.first(a) + self.second(c)).squeeze(1) + (heads.flatten(1) * c).sum(dim=1)
