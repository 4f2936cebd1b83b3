"""xDeepFM: Lian et al., "xDeepFM: Combining Explicit and Implicit Feature Interactions", KDD 2018, arXiv:1803.05170.

Letters: B examples, M fields, D width of their vectors, H feature maps of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

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
        num_fields, shape = vectors.shape[1], (vectors.shape[2], vectors.shape[0])
        # [M, D B]: the long dimension is last, since loops over M are too short to vectorise.
        start = vectors.permute(1, 2, 0).flatten(1)
        maps, sums = start, []
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            if layer.out_features < num_fields:  # sum over j first, which makes fewer numbers than all products do
                of_maps = (layer.weight.view(-1, num_fields) @ start).unflatten(0, (-1, maps.shape[0]))
                maps = (of_maps * maps).sum(dim=1)  # [H, D B]
            else:
                maps = layer.weight @ (maps.unsqueeze(1) * start).flatten(0, 1)
            sums.append(maps.unflatten(1, shape).sum(dim=1))
        return torch.cat(sums).t()
