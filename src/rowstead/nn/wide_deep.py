"""Wide & deep: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016, arXiv:1606.07792."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rowstead.nn.fields import split_first_order
from rowstead.nn.layers import deep_part
from rowstead.nn.network import Network, NetworkInputs
from rowstead.spec.network_options import WideDeepSpec


class WideDeep(Network):
    """A linear model and an MLP, trained together: logit = w x + MLP(x, vectors).

    The wide part has a weight for each dense feature, and for each id the last element of its row. The paper's crossed columns are left
    to the log.
    """

    def __init__(self, inputs: NetworkInputs, options: WideDeepSpec) -> None:
        super().__init__(inputs, options)
        width = inputs.num_dense + inputs.pooled_width - len(inputs.widths)
        self.wide = nn.Linear(inputs.num_dense, 1, bias=False) if inputs.num_dense else None
        self.deep = deep_part(width, inputs.model)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        vectors, weights = split_first_order(pooled, self.inputs.widths)
        wide = weights.sum(dim=1, keepdim=True)
        if self.wide is not None:
            wide = wide + self.wide(dense)
        return (wide + self.deep(torch.cat([dense, vectors], dim=1))).squeeze(1)
