"""Options of the built-in networks, and what each network computes for one example, for the planner.

Letters: Fd dense features, F sparse features, M = Fd + F fields, D width of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from rowstead.spec.bounds import MAX_LAYER, MAX_LAYERS, AboveZero, AtLeastOne, Layers, Spec, up_to
from rowstead.spec.errors import SpecError, did_you_mean, require
from rowstead.spec.interactions import INTERACTIONS, InteractionInputs, InteractionSpec

Structure = Literal["parallel", "stacked"]
SomeLayers = Annotated[AtLeastOne, up_to(MAX_LAYERS)]
LayerWidth = Annotated[AtLeastOne, up_to(MAX_LAYER)]
TOUCHES = 3.0
"""Numbers that an element-wise operation reads and writes for one that it writes: two inputs and the output."""


@dataclass(frozen=True, kw_only=True)
class NetworkShape:
    """What a network is built over: its features, and the keys of `model` that it reads."""

    num_dense: int
    sparse: tuple[str, ...]
    """Names of the sparse features."""
    widths: tuple[int, ...]
    """Of the pooled vector of each of them."""
    width: int
    """`model.width`."""
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    interaction: InteractionSpec

    @property
    def pooled_width(self) -> int:
        return sum(self.widths)

    @property
    def input_width(self) -> int:
        """Dense features and pooled rows side by side."""
        return self.num_dense + self.pooled_width

    @property
    def num_fields(self) -> int:
        return self.num_dense + len(self.widths)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer."""

    inputs: int
    outputs: int
    has_bias: bool = True

    @property
    def num_parameters(self) -> int:
        return (self.inputs + self.has_bias) * self.outputs

    @property
    def forward_flops(self) -> int:
        """Of one example."""
        return 2 * self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class NetworkWork:
    """What a network computes for one example in the forward pass."""

    bottom: tuple[Layer, ...] = ()
    """Linear layers that need no rows."""
    top: tuple[Layer, ...]
    """The other linear layers."""
    num_vectors: int = 0
    """Vectors that are multiplied in pairs, which has kernels of its own."""
    pair_flops: float = 0.0
    """Of their dot products."""
    product_flops: float = 0.0
    """Of matrix products that are neither."""
    written: float = 0.0
    """Numbers that everything else writes: concatenations, element-wise operations, normalisations."""
    touches: float = TOUCHES
    """Numbers that it reads and writes for each of them."""
    operators: int = 1
    """Its operators."""
    other_parameters: int = 0
    """Parameters outside of `bottom` and `top`."""


@dataclass(frozen=True, kw_only=True)
class NetworkSpec(Spec):
    """Options of a built-in network: the keys of `model.options`."""

    def check(self, width: int, top: tuple[int, ...]) -> None:
        """Refuse what does not go with `model.width` or `model.top`."""

    def check_features(self, sparse: Sequence[str]) -> None:
        """Refuse what does not go with the recipe's sparse features."""

    def work(self, shape: NetworkShape) -> NetworkWork:
        """What the network computes."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DLRMSpec(NetworkSpec):
    """A DLRM has no options."""

    def work(self, shape: NetworkShape) -> NetworkWork:
        options, dense_width = shape.interaction, shape.interaction.num_dense_vectors * shape.width if shape.num_dense else 0
        interaction = INTERACTIONS[options.kind]
        inputs = InteractionInputs(width=shape.width, dense_width=dense_width, pooled_width=shape.pooled_width)
        out_width = interaction.out_width(inputs, options)
        inside = (Layer(inputs=before, outputs=after) for before, after in interaction.layers(inputs, options))
        return NetworkWork(
            bottom=mlp_layers(shape.num_dense, (*shape.bottom, dense_width)) if shape.num_dense else (),
            top=(*inside, *mlp_layers(out_width, (*shape.top, 1))),
            num_vectors=len(shape.widths) + dense_width // shape.width,
            pair_flops=interaction.flops(inputs, options),
            written=inputs.total_width + out_width,
            touches=1.0,
        )


@dataclass(frozen=True, kw_only=True)
class WideDeepSpec(NetworkSpec):
    """Wide & deep has no options."""

    def check_features(self, sparse: Sequence[str]) -> None:
        require(bool(sparse), "network", "`wide_deep` needs a sparse feature, and there is none")

    def work(self, shape: NetworkShape) -> NetworkWork:
        width = shape.input_width - len(shape.widths)
        wide = (Layer(inputs=shape.num_dense, outputs=1, has_bias=False),) if shape.num_dense else ()
        return NetworkWork(top=(*wide, *mlp_layers(width, (*shape.top, 1))), written=2 * width + len(shape.widths), operators=6)


@dataclass(frozen=True, kw_only=True)
class DeepFMSpec(NetworkSpec):
    """DeepFM has no options."""

    def work(self, shape: NetworkShape) -> NetworkWork:
        width = shape.num_fields * (shape.width - 1)
        return NetworkWork(
            top=mlp_layers(width, (*shape.top, 1)),
            written=_fields_written(shape) + 2 * width,
            operators=12,
            other_parameters=shape.num_dense * shape.width,
        )


@dataclass(frozen=True, kw_only=True)
class XDeepFMSpec(NetworkSpec):
    """Options of xDeepFM."""

    cin: Layers = (16, 16)
    """Feature maps of each layer of the compressed interaction network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.cin), "cin", "give the feature maps of at least one layer, such as [16, 16]")

    def work(self, shape: NetworkShape) -> NetworkWork:
        fields, width = shape.num_fields, shape.width - 1
        weights = [fields * before * maps for before, maps in zip((fields, *self.cin), self.cin, strict=False)]
        products = [fields * before for before in (fields, *self.cin[:-1])]
        return NetworkWork(
            top=(*mlp_layers(sum(self.cin), (1,), has_bias=False), *mlp_layers(fields * width, (*shape.top, 1))),
            product_flops=2.0 * width * sum(weights),
            written=_fields_written(shape) + width * (fields + sum(products) + sum(self.cin)),
            operators=6 + 4 * len(self.cin),
            other_parameters=shape.num_dense * shape.width + sum(weights),
        )


@dataclass(frozen=True, kw_only=True)
class AutoIntSpec(NetworkSpec):
    """Options of AutoInt."""

    layers: SomeLayers = 3
    """Layers of self-attention."""
    heads: Annotated[AtLeastOne, up_to(1000)] = 2
    """Heads of each layer."""
    head_width: LayerWidth = 16
    """Width of a head."""
    deep: bool = True
    """Add an MLP over the same vectors, with the hidden layers of `model.top`."""

    def work(self, shape: NetworkShape) -> NetworkWork:
        fields, out = shape.num_fields, self.heads * self.head_width
        weights = 4 * out * (shape.width + (self.layers - 1) * out)
        deep = mlp_layers(fields * shape.width, (*shape.top, 1)) if self.deep else ()
        return NetworkWork(
            top=(*mlp_layers(fields * out, (1,)), *deep),
            product_flops=2.0 * fields * weights + self.layers * 4.0 * fields**2 * out,
            written=_fields_written(shape) + self.layers * (11 * fields * out + 2 * self.heads * fields**2),
            operators=3 + 14 * self.layers,
            other_parameters=shape.num_dense * shape.width + weights,
        )


@dataclass(frozen=True, kw_only=True)
class DCNv2Spec(NetworkSpec):
    """Options of DCNv2."""

    structure: Structure = "parallel"
    """Where the MLP is: `parallel`, beside the cross network, or `stacked`, on top of it."""
    cross_layers: SomeLayers = 3
    """Layers of the cross network."""
    rank: LayerWidth | None = None
    """Rank of the matrix of each cross layer; null for full rank."""
    experts: Annotated[AtLeastOne, up_to(1000)] = 1
    """Low-rank matrices of each cross layer, mixed by gates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.experts == 1 or self.rank is not None, "experts", "experts are of low rank: set `rank`, too")

    def check(self, width: int, top: tuple[int, ...]) -> None:
        _require_hidden(self.structure == "stacked" or bool(top), "a `parallel` structure")

    def work(self, shape: NetworkShape) -> NetworkWork:
        width, layers, experts = shape.input_width, self.cross_layers, self.experts
        rank = (self.rank or 0) * experts
        cross = mlp_layers(width, (width,)) if self.rank is None else low_rank_layers(width, rank, has_bias=experts == 1)
        gates = mlp_layers(width, (experts,), has_bias=False) if experts > 1 else ()
        mixed = rank * (self.rank or 0) if experts > 1 else 0
        is_stacked = self.structure == "stacked"
        deep = mlp_layers(width, (*shape.top, 1) if is_stacked else shape.top)
        return NetworkWork(
            top=(*cross * layers, *gates, *deep, *(() if is_stacked else mlp_layers(width + shape.top[-1], (1,)))),
            product_flops=layers * 2.0 * mixed + 2.0 * (layers - 1) * width * len(gates) * experts,
            written=width * (2 if is_stacked else 3) + layers * (2 * width + len(gates) * (width + 4 * rank)),
            operators=2 + layers * (8 if gates else 2),
            other_parameters=layers * (mixed + len(gates) * width),
        )


@dataclass(frozen=True, kw_only=True)
class MaskNetSpec(NetworkSpec):
    """Options of MaskNet."""

    structure: Structure = "parallel"
    """How the blocks stand: `parallel`, all over the fields, or `stacked`, each on the one before (the paper calls it serial)."""
    blocks: SomeLayers = 3
    """Mask blocks."""
    block_width: LayerWidth = 64
    """Width of the output of each."""
    reduction: Annotated[AboveZero, up_to(100)] = 2.0
    """Width of the hidden layer that computes a mask, over the width of the mask."""

    def work(self, shape: NetworkShape) -> NetworkWork:
        width, out, is_stacked = shape.num_fields * shape.width, self.block_width, self.structure == "stacked"
        inputs = [out if is_stacked and index else width for index in range(self.blocks)]
        blocks = [
            (*mlp_layers(width, (max(1, int(self.reduction * one)), one)), *mlp_layers(one, (out,), has_bias=False))
            for one in inputs
        ]
        return NetworkWork(
            top=(*itertools.chain(*blocks), *mlp_layers(out * (1 if is_stacked else self.blocks), (*shape.top, 1))),
            written=_fields_written(shape) + 3 * width + sum(inputs) + 3 * self.blocks * out,
            operators=6 + 3 * self.blocks,
            other_parameters=shape.num_dense * shape.width + 2 * width + 2 * self.blocks * out,
        )


@dataclass(frozen=True, kw_only=True)
class FinalMLPSpec(NetworkSpec):
    """Options of FinalMLP. The first MLP has the hidden layers of `model.top`."""

    second: Layers | None = None
    """Hidden layers of the second MLP; null for those of the first."""
    heads: Annotated[AtLeastOne, up_to(1000)] = 1
    """Heads of the bilinear product; they must divide the last widths of both MLPs."""
    gate: Layers | None = (64,)
    """Hidden layers of the gates before the MLPs; null for no gates."""
    first_context: tuple[str, ...] = ()
    """Sparse features from which the first gate is computed; none for a constant gate."""
    second_context: tuple[str, ...] = ()
    """Those of the second gate."""

    def check(self, width: int, top: tuple[int, ...]) -> None:
        second = top if self.second is None else self.second
        _require_hidden(bool(top), "`finalmlp`")
        require(bool(second), "options.second", "the second MLP needs a hidden layer: set such as [64, 32]")
        for key, last in (("top", top[-1]), ("options.second", second[-1])):
            require(
                last % self.heads == 0, "options.heads", f"{self.heads} heads do not divide {last}, the last width of `{key}`"
            )

    def check_features(self, sparse: Sequence[str]) -> None:
        for key in ("first_context", "second_context"):
            for name in getattr(self, key):
                if name not in sparse:
                    raise SpecError(f"options.{key}", f"no sparse feature `{name}`: {did_you_mean(name, sparse)}")

    def work(self, shape: NetworkShape) -> NetworkWork:
        width, first, second = shape.input_width, shape.top, shape.top if self.second is None else self.second
        bilinear = first[-1] * second[-1] // self.heads
        gates, constants = list[Layer](), 0
        for context in (self.first_context, self.second_context) if self.gate is not None else ():
            width_of = dict(zip(shape.sparse, shape.widths, strict=True))
            layers = mlp_layers(sum(width_of[one] for one in context) or shape.width, (*(self.gate or ()), width))
            if context:
                gates += layers
            else:  # computed once for the whole batch
                constants += shape.width + sum(layer.num_parameters for layer in layers)
        fusion = (*mlp_layers(first[-1], (1,)), *mlp_layers(second[-1], (1,), has_bias=False))
        return NetworkWork(
            top=(*gates, *mlp_layers(width, first), *mlp_layers(width, second), *fusion),
            product_flops=2.0 * bilinear,
            written=width + (3 * 2 * width if self.gate is not None else 0) + 2 * second[-1],
            operators=5 + (6 if self.gate is not None else 0),
            other_parameters=bilinear + constants,
        )


def mlp_layers(inputs: int, widths: tuple[int, ...], *, has_bias: bool = True) -> tuple[Layer, ...]:
    """The layers of an MLP."""
    pairs = zip((inputs, *widths), widths, strict=False)
    return tuple(Layer(inputs=before, outputs=after, has_bias=has_bias) for before, after in pairs)


def low_rank_layers(width: int, rank: int, *, has_bias: bool) -> tuple[Layer, ...]:
    """A square matrix of low rank as two layers; the second one may have a bias."""
    return Layer(inputs=width, outputs=rank, has_bias=False), Layer(inputs=rank, outputs=width, has_bias=has_bias)


def _fields_written(shape: NetworkShape) -> int:
    """Numbers written to make one vector of each field; without dense features there is nothing to do."""
    return (shape.num_dense + shape.num_fields) * shape.width if shape.num_dense else 0


def _require_hidden(has_hidden: bool, what: str) -> None:
    require(has_hidden, "top", f"{what} needs a hidden layer here: set such as [64, 32]")
