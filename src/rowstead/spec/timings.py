"""Measured times of the parts of a training step on one machine, in isolation and within a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rowstead.spec.bounds import require_not_negative
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
class InStep:
    """Time of a phase within a step, from its parts measured in isolation: `fixed_s + factor * parts + byte_s * bytes`."""

    fixed_s: float = 0.0
    """Fixed time: waking threads, and Python."""
    factor: float = 1.0
    """Factor on the time of its parts."""
    byte_s: float = 0.0
    """Seconds per byte exchanged with other phases, which within a step is not in the caches."""

    def __post_init__(self) -> None:
        require_not_negative(self, "fixed_s", "byte_s")
        require(0 < self.factor < math.inf, "factor", f"must be above 0 and finite, got {self.factor}")

    def seconds(self, parts_s: float, num_bytes: float = 0.0) -> float:
        """Without the fixed time, so that parts of a phase can be added."""
        return self.factor * parts_s + self.byte_s * num_bytes


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Times of the parts of a step. Rows were trained by row-wise Adagrad."""

    layers: tuple[LayerTimes, ...]
    """One for each number format that was measured."""
    interaction_forward: Curve
    """Products of all pairs, by examples, vectors and width."""
    interaction_back: Curve
    """Their gradients."""
    fp32_interaction_factor: float = 1.0
    """What both take in FP32 over what was measured, where that was in a faster format."""
    dense_update: Curve
    """The dense optimizer, Adagrad, by parameters."""
    read_row: Curve
    """One row read at random and added to its bag, by the bytes within which rows are, and by the bytes of a row."""
    bag: Curve
    """One pooled vector besides its rows, by the bytes of a row."""
    lookup_call_s: float
    """Fixed time of a look-up."""
    update_row: Curve
    """One distinct row updated, by the bytes within which rows are, and by the bytes of a row."""
    update_id: Curve
    """One id of an update besides its row, by the bytes of a row: it is sorted, and its gradient added."""
    update_call_s: float
    """Fixed time of an update."""
    plan: Curve | None = None
    """What an accelerator does for an update beside look-up and network, by ids; absent where nothing is done beside them."""
    fills_batch: bool = False
    """Whether each batch is copied to fixed memory of the accelerator before its step."""
    place_batch_s: float = 0.0
    """A step whose rows are behind a cache, whatever it reads: its plan is made and passed on. On an accelerator it is time of the host, for
    tables of one width."""
    place_set_s: float = 0.0
    """Time of an accelerator's host for each plan besides, which is of a set of small batches or of one batch; for tables of one width."""
    place_id_s: float = 0.0
    """One id of a batch whose rows are behind a cache: its cache slot is looked up."""
    move_row: Curve | None = None
    """One row that a cache lacks, brought in and another written back while other steps run, by the bytes of a row with its state: from SSD
    for a CPU, from system memory for a GPU; absent where it was not measured."""
    move_read_s: float = 0.0
    """One read of a file besides the rows in it, of which it brings those that are near each other."""
    move_share: float = 0.0
    """Share of the time of moved rows by which a step gets longer that does not wait for them, and of a step's by which they do: both want the
    same cores."""
    fresh_from_bytes: float = 32 * 2**20
    """Tensors of so many bytes or more are memory that the system gives anew at every step."""
    fresh_byte_s: float = 0.0
    """Seconds of each byte of it."""
    pace_s: float = 0.0
    """Seconds of the reference work of `study/calibration/machine_speed.py` at the machine speed that these times are normalised to; 0 if not recorded."""
    dense: InStep = InStep()
    """Layers and interaction in a step, by the bytes of their inputs and outputs; its fixed time is all that no other phase has."""
    lookup: InStep = InStep()
    """Look-ups, by the bytes of pooled vectors."""
    update: InStep = InStep()
    """Updates of rows, by the bytes of the pooled vectors' gradients."""
    dense_optimizer: InStep = InStep()
    """The dense optimizer."""
    plan_factor: float = 0.0
    """Share of `plan` by which it slows down what it runs beside."""

    def __post_init__(self) -> None:
        require(bool(self.layers), "layers", "give at least one number format")
        factor = self.fp32_interaction_factor
        require(0 < factor < math.inf, "fp32_interaction_factor", f"must be above 0 and finite, got {factor}")
        not_negative = (
            "lookup_call_s",
            "update_call_s",
            "place_batch_s",
            "place_set_s",
            "place_id_s",
            "move_read_s",
            "move_share",
        )
        require_not_negative(self, *not_negative, "fresh_byte_s", "pace_s", "plan_factor")

    def fresh_s(self, num_bytes: float) -> float:
        """What the memory of a new tensor takes besides what is done with it."""
        return num_bytes * self.fresh_byte_s if num_bytes >= self.fresh_from_bytes else 0.0

    def of_layers(self, precision: str) -> LayerTimes:
        """The times of a number format, or of the first that was measured."""
        return next((one for one in self.layers if one.precision == precision), self.layers[0])
