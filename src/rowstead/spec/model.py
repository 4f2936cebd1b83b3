"""The architecture of a DLRM: widths of its MLPs and how features interact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rowstead.spec.errors import require


@dataclass(frozen=True, kw_only=True)
class InteractionSpec:
    """How the projected dense vector and the pooled sparse vectors meet."""

    kind: Literal["dot", "concat", "cross"] = "dot"
    """`dot`: all pairwise dot products; `concat`: side by side; `cross`: the low-rank cross network of DCNv2."""
    cross_layers: int = 3
    """Layers of the cross network."""
    cross_rank: int = 512
    """Rank of each cross layer."""

    def __post_init__(self) -> None:
        require(self.cross_layers >= 1, "cross_layers", f"must be at least 1, got {self.cross_layers}")
        require(self.cross_rank >= 1, "cross_rank", f"must be at least 1, got {self.cross_rank}")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Bottom MLP over dense features, tables over sparse ones, interaction, top MLP to one log-odds."""

    width: int = 16
    """Width of the embedding rows and of the bottom MLP's output."""
    bottom: tuple[int, ...] = (64,)
    """Hidden layers of the bottom MLP; a last layer of `width` is added."""
    top: tuple[int, ...] = (64, 32)
    """Hidden layers of the top MLP; a last layer of 1 is added."""
    interaction: InteractionSpec = InteractionSpec()
    """How features interact."""
    row_format: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format in which embedding rows are kept; their optimizer's state stays FP32 and updates are rounded stochastically."""

    def __post_init__(self) -> None:
        require(self.width >= 1, "width", f"must be at least 1, got {self.width}")
        for name in ("bottom", "top"):
            require(all(w >= 1 for w in getattr(self, name)), name, "layer widths must be at least 1")
