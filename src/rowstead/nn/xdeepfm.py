"""xDeepFM: Lian et al., "xDeepFM: Combining Explicit and Implicit Feature Interactions", KDD 2018, arXiv:1803.05170.

Letters: B examples, M fields, D width of their vectors, H feature maps of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rowstead.nn.fields import Fields
from rowstead.nn.layers import deep_part
from rowstead.nn.network import Network, NetworkInputs
from rowstead.spec.network_options import XDeepFMSpec


class XDeepFM(Network):
    """A linear model, a compressed interaction network and an MLP over the same vectors: logit = sum of w + CIN(v) + MLP(v)."""

    def __init__(self, inputs: NetworkInputs, options: XDeepFMSpec) -> None:
        super().__init__(inputs, options)
        self.fields = Fields(inputs)
        num_fields = inputs.num_dense + len(inputs.sparse)
        self.cin = CompressedInteraction(num_fields, options.cin)
        self.out = nn.Linear(sum(options.cin), 1, bias=False)
        self.deep = deep_part(num_fields * (inputs.model.width - 1), inputs.model)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        fields = self.fields(dense, pooled)
        weights, vectors = fields[:, :, -1], fields[:, :, :-1].contiguous()
        logits = self.out(self.cin(vectors)) + self.deep(vectors.flatten(1))
        return weights.sum(dim=1) + logits.squeeze(1)


class CompressedInteraction(nn.Module):
    """Layer k has the feature maps X_k[h] = sum over i, j of W_k[h, i, j] (X_{k-1}[i] * X_0[j]), each of width D; X_0 are the fields."""

    def __init__(self, num_fields: int, num_maps: Sequence[int]) -> None:
        super().__init__()
        before = (num_fields, *num_maps)
        self.layers = nn.ModuleList(
            nn.Linear(last * num_fields, maps, bias=False) for last, maps in zip(before, num_maps, strict=False)
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """Vectors [B, M, D] to the sums of all feature maps over D: [B, sum of H]."""
        start = vectors.transpose(1, 2)  # [B, D, M]
        maps, sums = start, []
        for layer in self.layers:
            if layer.out_features < start.shape[2]:  # sum over j first, which makes fewer numbers than all products do
                of_maps = functional.linear(start, layer.weight.view(-1, start.shape[2])).unflatten(2, (-1, maps.shape[2]))
                maps = (of_maps * maps.unsqueeze(2)).sum(dim=3)  # [B, D, H]
            else:
                maps = layer((maps.unsqueeze(3) * start.unsqueeze(2)).flatten(2))
            sums.append(maps.sum(dim=1))
        return torch.cat(sums, dim=1)
