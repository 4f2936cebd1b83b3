"""Options of the built-in networks, and what each network computes for one example, for the planner.

Letters: Fd dense features, F sparse features, M = Fd + F fields, D width of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from rowstead.spec.bounds import MAX_LAYER, MAX_LAYERS, AboveZero, AtLeastOne, Layers, Spec, up_to
from rowstead.spec.errors import SpecError, did_you_mean, require
from rowstead.spec.interactions import INTERACTIONS, InteractionInputs

if TYPE_CHECKING:
    from rowstead.spec.model import ModelSpec

Structure = Literal["parallel", "stacked"]
SomeLayers = Annotated[AtLeastOne, up_to(MAX_LAYERS)]
LayerWidth = Annotated[AtLeastOne, up_to(MAX_LAYER)]
TOUCHES = 3.0
"""Numbers that an element-wise operation reads and writes for one that it writes: two inputs and the output."""


@dataclass(frozen=True, kw_only=True)
class NetworkShape:
    """What a network is built over."""

    num_dense: int
    sparse: tuple[str, ...]
    """Names of the sparse features."""
    widths: tuple[int, ...]
    """Of the pooled vector of each of them."""
    model: ModelSpec

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

    def deep(self, inputs: int, widths: tuple[int, ...] | None = None) -> tuple[Layer, ...]:
        """The layers of a deep part with the network's outputs: an MLP with the hidden layers of `model.top`, or of these widths."""
        last = _last(inputs, self.model.top if widths is None else widths)
        return (*self.hidden(inputs, widths), *mlp_layers(last, (self.model.num_outputs,)))

    def hidden(self, inputs: int, widths: tuple[int, ...] | None = None) -> tuple[Layer, ...]:
        """The same without its output."""
        model = self.model
        return mlp_layers(inputs, model.top if widths is None else widths, norm=model.top_norm, dropout=model.top_dropout)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer, and what follows it besides ReLU."""

    inputs: int
    outputs: int
    has_bias: bool = True
    has_norm: bool = False
    has_dropout: bool = False

    @property
    def num_parameters(self) -> int:
        return (self.inputs + self.has_bias + 2 * self.has_norm) * self.outputs

    @property
    def num_following(self) -> int:
        """Operators that read and write its outputs once more."""
        return self.has_norm + self.has_dropout

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

    def check(self, model: ModelSpec) -> None:
        """Refuse what does not go with the rest of `model`."""

    def check_features(self, sparse: Sequence[str]) -> None:
        """Refuse what does not go with the recipe's sparse features."""

    def work(self, shape: NetworkShape) -> NetworkWork:
        """What the network computes."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DLRMSpec(NetworkSpec):
    """A DLRM has no options."""

    def work(self, shape: NetworkShape) -> NetworkWork:
        model, options = shape.model, shape.model.interaction
        dense_width, interaction = model.dense_width if shape.num_dense else 0, INTERACTIONS[options.kind]
        inputs = InteractionInputs(width=model.width, dense_width=dense_width, pooled_width=shape.pooled_width)
        out_width = interaction.out_width(inputs, options)
        inside = (Layer(inputs=before, outputs=after) for before, after in interaction.layers(inputs, options))
        hidden = mlp_layers(shape.num_dense, model.bottom, norm=model.bottom_norm, dropout=model.bottom_dropout)
        projection = mlp_layers(_last(shape.num_dense, model.bottom), (dense_width,))
        return NetworkWork(
            bottom=(*hidden, *projection) if shape.num_dense else (),
            top=(*inside, *shape.deep(out_width)),
            num_vectors=len(shape.widths) + dense_width // model.width,
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
        return NetworkWork(top=(*wide, *shape.deep(width)), written=2 * width + len(shape.widths), operators=6)


@dataclass(frozen=True, kw_only=True)
class DeepFMSpec(NetworkSpec):
    """DeepFM has no options."""

    def work(self, shape: NetworkShape) -> NetworkWork:
        width = shape.num_fields * (shape.model.width - 1)
        return NetworkWork(
            top=shape.deep(width),
            written=_fields_written(shape) + 2 * width,
            operators=12,
            other_parameters=shape.num_dense * shape.model.width,
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
        fields, width = shape.num_fields, shape.model.width - 1
        weights = [fields * before * maps for before, maps in zip((fields, *self.cin), self.cin, strict=False)]
        products = [before * min(fields, maps) for before, maps in zip((fields, *self.cin), self.cin, strict=False)]
        return NetworkWork(
            top=(*mlp_layers(sum(self.cin), (1,), has_bias=False), *shape.deep(fields * width)),
            product_flops=2.0 * width * sum(weights),
            written=_fields_written(shape) + width * (fields + sum(products) + sum(self.cin)),
            operators=6 + 4 * len(self.cin),
            other_parameters=shape.num_dense * shape.model.width + sum(weights),
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
        fields, width, out = shape.num_fields, shape.model.width, self.heads * self.head_width
        weights = 4 * out * (width + (self.layers - 1) * out)
        deep = shape.deep(fields * width) if self.deep else ()
        return NetworkWork(
            top=(*mlp_layers(fields * out, (shape.model.num_outputs,)), *deep),
            product_flops=2.0 * fields * weights + self.layers * 4.0 * fields**2 * out,
            written=_fields_written(shape) + self.layers * (11 * fields * out + 2 * self.heads * fields**2),
            operators=3 + 14 * self.layers,
            other_parameters=shape.num_dense * width + weights,
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

    def check(self, model: ModelSpec) -> None:
        _require_hidden(self.structure == "stacked" or bool(model.top), "a `parallel` structure")

    def work(self, shape: NetworkShape) -> NetworkWork:
        width, layers, experts = shape.input_width, self.cross_layers, self.experts
        rank = (self.rank or 0) * experts
        cross = mlp_layers(width, (width,)) if self.rank is None else low_rank_layers(width, rank, has_bias=experts == 1)
        gates = mlp_layers(width, (experts,), has_bias=False) if experts > 1 else ()
        mixed = rank * (self.rank or 0) if experts > 1 else 0
        is_stacked = self.structure == "stacked"
        deep = (
            shape.deep(width)
            if is_stacked
            else (*shape.hidden(width), *mlp_layers(width + shape.model.top[-1], (shape.model.num_outputs,)))
        )
        return NetworkWork(
            top=(*cross * layers, *gates, *deep),
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
        width, out, is_stacked = shape.num_fields * shape.model.width, self.block_width, self.structure == "stacked"
        inputs = [out if is_stacked and index else width for index in range(self.blocks)]
        blocks = [
            (*mlp_layers(width, (max(1, int(self.reduction * one)), one)), *mlp_layers(one, (out,), has_bias=False))
            for one in inputs
        ]
        return NetworkWork(
            top=(*itertools.chain(*blocks), *shape.deep(out * (1 if is_stacked else self.blocks))),
            written=_fields_written(shape) + 3 * width + sum(inputs) + 3 * self.blocks * out,
            operators=6 + 3 * self.blocks,
            other_parameters=shape.num_dense * shape.model.width + 2 * width + 2 * self.blocks * out,
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

    def check(self, model: ModelSpec) -> None:
        top, second = model.top, model.top if self.second is None else self.second
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
        width, first = shape.input_width, shape.model.top
        second = first if self.second is None else self.second
        bilinear = first[-1] * second[-1] // self.heads
        gates, constants = list[Layer](), 0
        for context in (self.first_context, self.second_context) if self.gate is not None else ():
            width_of = dict(zip(shape.sparse, shape.widths, strict=True))
            layers = mlp_layers(sum(width_of[one] for one in context) or shape.model.width, (*(self.gate or ()), width))
            if context:
                gates += layers
            else:  # computed once for the whole batch
                constants += shape.model.width + sum(layer.num_parameters for layer in layers)
        fusion = (*mlp_layers(first[-1], (1,)), *mlp_layers(second[-1], (1,), has_bias=False))
        return NetworkWork(
            top=(*gates, *shape.hidden(width, first), *shape.hidden(width, second), *fusion),
            product_flops=2.0 * bilinear,
            written=width + (3 * 2 * width if self.gate is not None else 0) + 2 * second[-1],
            operators=5 + (6 if self.gate is not None else 0),
            other_parameters=bilinear + constants,
        )


def mlp_layers(
    inputs: int, widths: tuple[int, ...], *, has_bias: bool = True, norm: str = "none", dropout: float = 0.0
) -> tuple[Layer, ...]:
    """The layers of an MLP."""
    pairs = zip((inputs, *widths), widths, strict=False)
    has_norm, has_dropout = norm != "none", dropout > 0
    return tuple(
        Layer(inputs=before, outputs=after, has_bias=has_bias, has_norm=has_norm, has_dropout=has_dropout)
        for before, after in pairs
    )


def _last(inputs: int, widths: tuple[int, ...]) -> int:
    """The width of an MLP's output."""
    return (inputs, *widths)[-1]


def low_rank_layers(width: int, rank: int, *, has_bias: bool) -> tuple[Layer, ...]:
    """A square matrix of low rank as two layers; the second one may have a bias."""
    return Layer(inputs=width, outputs=rank, has_bias=False), Layer(inputs=rank, outputs=width, has_bias=has_bias)


def _fields_written(shape: NetworkShape) -> int:
    """Numbers written to make one vector of each field; without dense features there is nothing to do."""
    return (shape.num_dense + shape.num_fields) * shape.model.width if shape.num_dense else 0


def _require_hidden(has_hidden: bool, what: str) -> None:
    require(has_hidden, "top", f"{what} needs a hidden layer here: set such as [64, 32]")
