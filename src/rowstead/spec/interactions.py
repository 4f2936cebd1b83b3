"""The interactions of a DLRM: one registry that specs, planner, what-if page, docs and `nn/` read.

A new interaction is an entry in `INTERACTIONS`, a module in `nn/layers.py` and a test. Its options are fields of `InteractionSpec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from rowstead.spec.bounds import MAX_LAYER, MAX_LAYERS, AtLeastOne, Spec, up_to

InteractionKind = Literal["dot", "concat", "cross"]
Pairs = Literal["both", "dense_sparse", "sparse_sparse"]


@dataclass(frozen=True, kw_only=True)
class InteractionSpec(Spec):
    """How the bottom MLP's output and the pooled sparse vectors are combined."""

    kind: InteractionKind = "dot"
    """Which interaction."""
    num_dense_vectors: Annotated[AtLeastOne, up_to(10_000)] = 1
    """Vectors of `model.width` to which the bottom MLP projects the dense features."""
    pairs: Pairs = "both"
    """Which products `dot` takes: of dense with sparse vectors, of sparse with sparse vectors, or both. Dense ones are not paired."""
    cross_layers: Annotated[AtLeastOne, up_to(MAX_LAYERS)] = 3
    """Layers of the cross network."""
    cross_rank: Annotated[AtLeastOne, up_to(MAX_LAYER)] = 512
    """Rank of each cross layer."""


@dataclass(frozen=True, kw_only=True)
class InteractionInputs:
    """Widths of the vectors that interact."""

    width: int
    """model.width: the width of a dense vector, and of a table that has none of its own."""
    dense_width: int
    """Sum of the widths of the dense vectors; 0 without dense features."""
    pooled_width: int
    """Sum of the widths of the pooled vectors."""

    @property
    def total_width(self) -> int:
        return self.dense_width + self.pooled_width

    def num_pairs(self, pairs: Pairs) -> int:
        """Pairs among vectors of `width`."""
        return count_pairs(pairs, self.dense_width // self.width, self.total_width // self.width)


def partner_range(pairs: Pairs, num_dense: int, num_vectors: int) -> tuple[int, int]:
    """Which vectors a sparse one is multiplied with: those before it from the first number to below the second.

    Vectors are numbered, dense ones first.
    """
    return num_dense if pairs == "sparse_sparse" else 0, num_dense if pairs == "dense_sparse" else num_vectors


def count_pairs(pairs: Pairs, num_dense: int, num_vectors: int) -> int:
    """Products of `num_vectors` vectors of which the first `num_dense` are dense."""
    low, high = partner_range(pairs, num_dense, num_vectors)
    return sum(min(vector, high) - low for vector in range(num_dense, num_vectors))


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
    """Whether every table must be as wide as model.width, and there must be a pair."""


INTERACTIONS: dict[InteractionKind, Interaction] = {
    "dot": Interaction(
        title="dot products",
        description="dot products of pairs of vectors",
        layer="Dot",
        out_width=lambda inputs, spec: inputs.dense_width + inputs.num_pairs(spec.pairs),
        flops=lambda inputs, spec: 2.0 * inputs.num_pairs(spec.pairs) * inputs.width,
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
