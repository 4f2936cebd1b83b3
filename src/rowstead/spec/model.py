"""The architecture of a model: its network, and the widths and the interaction of the built-in DLRM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rowstead.spec.bounds import BelowOne, Layers, Spec, Width
from rowstead.spec.errors import require
from rowstead.spec.interactions import InteractionSpec
from rowstead.spec.networks import NETWORKS, make_absolute, parse_network

Norm = Literal["none", "batch", "layer"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    """Embedding tables over sparse features, and a network from dense features and pooled rows to one logit."""

    width: Width = 16
    """Width of the embedding rows, and of the vectors to which the bottom MLP projects the dense features."""
    bottom: Layers = (64,)
    """Hidden layers of the bottom MLP; a last layer of `interaction.num_dense_vectors` times `width` is added."""
    top: Layers = (64, 32)
    """Hidden layers of the top MLP; a last layer of 1 is added."""
    bottom_norm: Norm = "none"
    """Normalisation after each hidden linear layer of the bottom MLP, before its ReLU: over the batch or over the layer's outputs."""
    top_norm: Norm = "none"
    """Normalisation after each hidden linear layer of the top MLP, before its ReLU."""
    bottom_dropout: BelowOne = 0.0
    """In training, the probability that an output of a hidden layer of the bottom MLP is set to 0; the others are scaled up."""
    top_dropout: BelowOne = 0.0
    """In training, the probability that an output of a hidden layer of the top MLP is set to 0; the others are scaled up."""
    interaction: InteractionSpec = InteractionSpec()
    """How features interact."""
    row_format: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format in which embedding rows are kept; their optimizer's state stays FP32 and updates are rounded stochastically."""
    network: str = "dlrm"
    """A built-in network, or a class of yours: `package.module:Class` or `path/to/file.py:Class`. The run executes that code.
    See [Networks](networks.md)."""
    options: Mapping[str, Any] | None = None
    """Options of a network of yours, given to its constructor."""

    @property
    def dense_width(self) -> int:
        """Width of the bottom MLP's output: that of all dense vectors."""
        return self.interaction.num_dense_vectors * self.width

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "network", make_absolute(self.network))
        parse_network(self.network)
        unused = f"`{self.network}` has no options: set `bottom`, `top` and `interaction`"
        require(not self.options or self.network not in NETWORKS, "options", unused)
