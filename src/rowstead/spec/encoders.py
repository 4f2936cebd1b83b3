"""History encoders: the registry of what makes one vector of the rows of a history, in the order of its ids.

A new encoder is an entry in `ENCODERS`, a class in `nn/encoders.py` and a plain version in `tests/nn/plain_encoders.py`. Its options are
fields of `EncoderSpec`.

Letters: D width of a row, L ids of a history.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from rowstead.spec.bounds import AtLeastOne, Layers, NotEmpty, Spec, up_to
from rowstead.spec.errors import require
from rowstead.spec.network_options import mlp_layers

EncoderKind = Literal["din", "attention"]


@dataclass(frozen=True, kw_only=True)
class EncoderSpec(Spec):
    """How a history becomes one vector as wide as a row."""

    kind: EncoderKind = "din"
    """Which encoder."""
    target: NotEmpty | None = None
    """Of `din`: the sparse feature, such as the item to be scored, that each id of the history is compared with; `{i}` in it is that of the name."""
    hidden: Layers = (64,)
    """Of `din`: hidden layers of the activation unit."""
    softmax: bool = False
    """Of `din`: turn the weights of a history into shares of 1 by a softmax; the paper does not."""
    positions: bool = True
    """Add a learned vector for each position, counted from the most recent id, to what the encoder compares; DIN's paper has none."""
    layers: Annotated[AtLeastOne, up_to(100)] = 1
    """Of `attention`: layers of self-attention."""
    heads: Annotated[AtLeastOne, up_to(1000)] = 1
    """Of `attention`: heads of each layer; they must divide the width of a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        entry = ENCODERS[self.kind]
        require(
            entry.needs_target == (self.target is not None),
            "target",
            f"`{self.kind}` needs a target: name a sparse feature"
            if entry.needs_target
            else f"`{self.kind}` compares the history with nothing else: remove it",
        )
        for field in dataclasses.fields(self):
            is_default = field.name in ("kind", "target") or getattr(self, field.name) == field.default
            require(is_default or field.name in entry.reads, field.name, f"does not apply to `{self.kind}`: remove it")

    def check_width(self, width: int) -> None:
        """Refuse what does not go with rows of this width."""
        divides = self.kind != "attention" or width % self.heads == 0
        require(divides, "heads", f"{self.heads} heads do not divide {width}, the width of the table")


@dataclass(frozen=True, kw_only=True)
class EncoderWork:
    """What an encoder computes for one example in the forward pass."""

    flops: float
    """Of matrix products."""
    written: float
    """Numbers that everything else writes."""
    num_parameters: int
    operators: int


@dataclass(frozen=True, kw_only=True)
class BuiltinEncoder:
    """One encoder: what it is, where its module is, and what it costs."""

    title: str
    """Its name as its authors write it."""
    description: str
    """One line for the docs."""
    paper: str
    """Where it is from."""
    module: str
    """Its class in `nn/encoders.py`, which is built with (D, the largest L, EncoderSpec)."""
    reads: tuple[str, ...]
    """Keys of `EncoderSpec` that shape it, besides `kind` and `target`."""
    needs_target: bool
    """Whether it compares the history with another feature."""
    work: Callable[[EncoderSpec, int, int, float], EncoderWork]
    """What it computes, from its options, D, the largest L and the mean L."""


def _din_work(spec: EncoderSpec, width: int, max_ids: int, mean_ids: float) -> EncoderWork:
    layers = mlp_layers(3 * width, (*spec.hidden, 1))
    of_target = 2.0 * width * layers[0].outputs  # the target's third of the first layer, once for each example
    of_id = sum(layer.forward_flops for layer in mlp_layers(2 * width, (*spec.hidden, 1)))
    return EncoderWork(
        flops=of_target + mean_ids * of_id,
        written=mean_ids * (3 * width + 2 * sum(layer.outputs for layer in layers)) + width,
        num_parameters=sum(layer.num_parameters for layer in layers)
        + len(spec.hidden)
        + (max_ids * width if spec.positions else 0),
        operators=10 + 2 * len(layers),
    )


def _attention_work(spec: EncoderSpec, width: int, max_ids: int, mean_ids: float) -> EncoderWork:
    square, before = width * width, spec.layers - 1
    of_id = 12.0 * square * before + 4.0 * square  # the last layer computes keys and values of all ids, the rest only of one
    pairs = before * mean_ids**2 + mean_ids
    return EncoderWork(
        flops=mean_ids * of_id + 8.0 * square + 4.0 * width * pairs,
        written=mean_ids * width * (6 + 12 * before) + 10 * width + spec.heads * pairs,
        num_parameters=spec.layers * (6 * square + 10 * width) + 2 * width + (max_ids * width if spec.positions else 0),
        operators=5 + 12 * spec.layers,
    )


ENCODERS: dict[EncoderKind, BuiltinEncoder] = {
    "din": BuiltinEncoder(
        title="DIN",
        description="target attention: an MLP weighs each id by itself and the target, and the weighted rows are summed",
        paper="Zhou et al. 2018, arXiv:1706.06978",
        module="DINEncoder",
        reads=("hidden", "softmax", "positions"),
        needs_target=True,
        work=_din_work,
    ),
    "attention": BuiltinEncoder(
        title="Self-attention",
        description="layers of self-attention over the history; the vector of the most recent id is taken",
        paper="Kang and McAuley 2018, arXiv:1808.09781",
        module="AttentionEncoder",
        reads=("positions", "layers", "heads"),
        needs_target=False,
        work=_attention_work,
    ),
}
assert set(ENCODERS) == set(get_args(EncoderKind))
