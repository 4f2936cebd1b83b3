"""The interactions of a DLRM: one registry that specs, planner, what-if page, docs and `nn/` read.

A new interaction is an entry in `INTERACTIONS`, a module in `nn/layers.py` and a test. Its options are fields of `InteractionSpec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from rowstead.spec.errors import require

InteractionKind = Literal["dot", "concat", "cross"]


@dataclass(frozen=True, kw_only=True)
class InteractionSpec:
    """How the projected dense vector and the pooled sparse vectors are combined."""

    kind: InteractionKind = "dot"
    """Which interaction."""
    cross_layers: int = 3
    """Layers of the cross network."""
    cross_rank: int = 512
    """Rank of each cross layer."""

    def __post_init__(self) -> None:
        require(self.cross_layers >= 1, "cross_layers", f"must be at least 1, got {self.cross_layers}")
        require(self.cross_rank >= 1, "cross_rank", f"must be at least 1, got {self.cross_rank}")


@dataclass(frozen=True, kw_only=True)
class InteractionInputs:
    """Widths of the vectors that interact."""

    width: int
    """model.width: the width of the dense vector, and of a table that has none of its own."""
    dense_width: int
    """Width of the projected dense vector; 0 without dense features."""
    pooled_width: int
    """Sum of the widths of the pooled vectors."""

    @property
    def total_width(self) -> int:
        return self.dense_width + self.pooled_width

    @property
    def num_pairs(self) -> int:
        """Pairs among vectors of `width`."""
        num_vectors = self.total_width // self.width
        return num_vectors * (num_vectors - 1) // 2


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """One interaction: what it is called, where its module is, and what it costs."""

    title: str
    """Name on the what-if page."""
    description: str
    """One line for the docs."""
    layer: str
    """Its class in `nn/layers.py`, which is built with (InteractionInputs, InteractionSpec)."""
    out_width: Callable[[InteractionInputs, InteractionSpec], int]
    """Width of its output."""
    flops: Callable[[InteractionInputs, InteractionSpec], float] = lambda inputs, spec: 0.0
    """Forward floating-point operations per example outside of `layers`. On a calibrated machine they take the time of pairwise dot products."""
    layers: Callable[[InteractionInputs, InteractionSpec], tuple[tuple[int, int], ...]] = lambda inputs, spec: ()
    """Linear layers inside, as (inputs, outputs)."""
    needs_equal_widths: bool = False
    """Whether every table must be as wide as model.width, and there must be two vectors or more."""


INTERACTIONS: dict[InteractionKind, Interaction] = {
    "dot": Interaction(
        title="dot products",
        description="all pairwise dot products",
        layer="Dot",
        out_width=lambda inputs, spec: inputs.dense_width + inputs.num_pairs,
        flops=lambda inputs, spec: 2.0 * inputs.num_pairs * inputs.width,
        needs_equal_widths=True,
    ),
    "concat": Interaction(
        title="concatenation",
        description="all vectors side by side",
        layer="Concat",
        out_width=lambda inputs, spec: inputs.total_width,
    ),
    "cross": Interaction(
        title="cross network",
        description="the low-rank cross network of DCNv2",
        layer="Cross",
        out_width=lambda inputs, spec: inputs.total_width,
        layers=lambda inputs, spec: (
            ((inputs.total_width, spec.cross_rank), (spec.cross_rank, inputs.total_width)) * spec.cross_layers
        ),
    ),
}
assert tuple(INTERACTIONS) == get_args(InteractionKind)
