"""DCNv2: Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021, arXiv:2008.13535.

Letters: B examples, W width of dense features and pooled rows side by side, R rank, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rowstead.nn.layers import Cross, deep_part
from rowstead.nn.network import Network, NetworkInputs
from rowstead.spec.interactions import InteractionInputs, InteractionSpec
from rowstead.spec.network_options import DCNv2Spec


class DCNv2(Network):
    """A cross network and an MLP: the MLP on top of it (stacked), or beside it under one linear layer (parallel)."""

    def __init__(self, inputs: NetworkInputs, options: DCNv2Spec) -> None:
        super().__init__(inputs, options)
        width, top = inputs.num_dense + inputs.pooled_width, inputs.model.top
        self.cross = _cross_network(width, options)
        self.is_stacked = options.structure == "stacked"
        self.deep = deep_part(width, inputs.model, hidden=None if self.is_stacked else top)
        self.out = None if self.is_stacked else nn.Linear(width + top[-1], inputs.num_outputs)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        x = torch.cat([dense, pooled], dim=1)
        crossed = self.cross(None, x)
        logits = self.deep(crossed) if self.out is None else self.out(torch.cat([crossed, self.deep(x)], dim=1))
        return logits.squeeze(1)


def _cross_network(width: int, options: DCNv2Spec) -> nn.Module:
    if options.rank is None:
        return FullCross(width, options.cross_layers)
    if options.experts > 1:
        return CrossExperts(width, options.cross_layers, options.rank, options.experts)
    spec = InteractionSpec(kind="cross", cross_layers=options.cross_layers, cross_rank=options.rank)
    return Cross(InteractionInputs(width=1, dense_width=0, pooled_width=width), spec)


class FullCross(nn.Module):
    """Cross layers of full rank: x <- x0 * (W x + b) + x."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.xavier_normal_(parameter)

    def forward(self, dense: None, start: Tensor) -> Tensor:
        x = start
        for layer in self.layers:
            x = start * layer(x) + x
        return x


class CrossExperts(nn.Module):
    """Cross layers that are mixtures of E low-rank experts: x <- sum over e of g_e(x) x0 * (U_e tanh(C_e tanh(V_e x)) + b) + x.

    The gates g are a softmax over linear functions of x, which all layers share.
    """

    def __init__(self, width: int, num_layers: int, rank: int, experts: int) -> None:
        super().__init__()
        self.shape = (experts, rank)
        self.v = nn.ModuleList(nn.Linear(width, experts * rank, bias=False) for _ in range(num_layers))
        self.c = nn.ParameterList(nn.Parameter(torch.empty(experts, rank, rank)) for _ in range(num_layers))
        self.u = nn.ModuleList(nn.Linear(experts * rank, width, bias=False) for _ in range(num_layers))
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(num_layers))
        self.gate = nn.Linear(width, experts, bias=False)
        for weight in (*self.v.parameters(), *self.u.parameters()):
            nn.init.normal_(weight, std=(2 / (width + rank)) ** 0.5)
        for weight in self.c:
            nn.init.normal_(weight, std=(1 / rank) ** 0.5)

    def forward(self, dense: None, start: Tensor) -> Tensor:
        x = start
        for v, c, u, bias in zip(self.v, self.c, self.u, self.bias, strict=True):
            gates = torch.softmax(self.gate(x), dim=1)  # [B, E]; they sum to 1, so that b is added once
            hidden = torch.tanh(v(x)).unflatten(1, self.shape)  # [B, E, R]
            hidden = torch.tanh(torch.einsum("ber,eqr->beq", hidden, c)) * gates.unsqueeze(2)
            x = start * (u(hidden.flatten(1)) + bias) + x
        return x
