"""What the parts of a training step take on one machine, each measured alone, and what they take more in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rowstead.spec.curve import Curve
from rowstead.spec.errors import require


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """A linear layer with its activation, by examples, inputs and outputs."""

    precision: str
    """Number format of the products."""
    forward: Curve
    """Forward."""
    back: Curve
    """Backward, with the gradients of input and parameters."""
    back_first: Curve
    """Backward without the gradient of the input, as in a first layer."""


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Times of the parts of a step. Rows were trained by row-wise Adagrad."""

    layers: tuple[LayerTimes, ...]
    """One for each number format that was measured."""
    interaction_forward: Curve
    """Products of all pairs, by examples, vectors and width."""
    interaction_back: Curve
    """Their gradients."""
    dense_update: Curve
    """The dense optimizer, Adagrad, by parameters."""
    read_row: Curve
    """One row read at random and added to its bag, by the bytes within which rows are, and by the bytes of a row."""
    bag: Curve
    """One pooled vector besides its rows, by the bytes of a row."""
    lookup_call_s: float
    """A look-up, however small."""
    update_row: Curve
    """One distinct row updated, by the bytes within which rows are, and by the bytes of a row."""
    update_id: Curve
    """One id of an update besides its row, by the bytes of a row: it is sorted, and its gradient added."""
    update_call_s: float
    """An update, however small."""
    plan: Curve | None = None
    """What an accelerator does for an update beside look-up and network, by ids; absent where nothing is done beside them."""
    fills_batch: bool = False
    """Whether each batch is copied to fixed memory of the accelerator before its step."""
    place_id_s: float = 0.0
    """One id of a batch whose rows are behind a cache: its row's place is looked for."""
    move_row: Curve | None = None
    """One row that a cache lacks, brought in and another written back while other steps run, by the bytes of a row with its state: from SSD
    for a CPU, from system memory for a GPU; absent where it was not measured."""
    fresh_from_bytes: float = 32 * 2**20
    """Tensors of so many bytes or more are memory that the system gives anew at every step."""
    fresh_byte_s: float = 0.0
    """Seconds of each byte of it."""
    fixed_s: float = 0.0
    """What a step takes besides its parts, on the processor that computes."""
    dense_factor: float = 1.0
    """What the dense part takes in a step over what its parts take alone, where nothing else has been in the caches."""
    lookup_factor: float = 1.0
    """The same for look-ups."""
    update_factor: float = 1.0
    """The same for updates."""
    plan_factor: float = 0.0
    """Share of `plan` by which it slows down what it runs beside."""

    def __post_init__(self) -> None:
        require(bool(self.layers), "layers", "give at least one number format")
        for name in ("lookup_call_s", "update_call_s", "place_id_s", "fresh_byte_s", "fixed_s", "plan_factor"):
            value = getattr(self, name)
            require(0 <= value < math.inf, name, f"must be finite and not negative, got {value}")
        for name in ("dense_factor", "lookup_factor", "update_factor"):
            value = getattr(self, name)
            require(0 < value < math.inf, name, f"must be above 0 and finite, got {value}")

    def fresh_s(self, num_bytes: float) -> float:
        """What the memory of a new tensor takes besides what is done with it."""
        return num_bytes * self.fresh_byte_s if num_bytes >= self.fresh_from_bytes else 0.0

    def of_layers(self, precision: str) -> LayerTimes:
        """The times of a number format, or of the first that was measured."""
        return next((one for one in self.layers if one.precision == precision), self.layers[0])
