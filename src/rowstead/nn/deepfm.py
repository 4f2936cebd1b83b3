"""DeepFM: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017, arXiv:1703.04247."""

from __future__ import annotations

from torch import Tensor

from rowstead.nn.fields import Fields
from rowstead.nn.layers import deep_part
from rowstead.nn.network import Network, NetworkInputs
from rowstead.spec.network_options import DeepFMSpec


class DeepFM(Network):
    """A factorization machine and an MLP over the same vectors: logit = sum of w + sum over pairs of <v, v'> + MLP(v)."""

    def __init__(self, inputs: NetworkInputs, options: DeepFMSpec) -> None:
        super().__init__(inputs, options)
        self.fields = Fields(inputs)
        num_fields = inputs.num_dense + len(inputs.sparse)
        self.deep = deep_part(num_fields * (inputs.model.width - 1), inputs.model)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        fields = self.fields(dense, pooled)
        weights, vectors = fields[:, :, -1], fields[:, :, :-1]
        logits: Tensor = weights.sum(dim=1) + pair_products(vectors) + self.deep(vectors.flatten(1)).squeeze(1)
        return logits


def pair_products(vectors: Tensor) -> Tensor:
    """The sum of the dot products of all pairs of vectors [B, M, D]: half of (sum v)^2 - sum v^2; [B]."""
    return 0.5 * (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1)
