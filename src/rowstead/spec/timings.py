"""Measured times of the parts of a training step on one machine, in isolation and within a step."""

from __future__ import annotations

from dataclasses import dataclass

from rowstead.spec.bounds import AboveZero, NotNegative, Spec
from rowstead.spec.curve import Curve
from rowstead.spec.errors import require


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """A linear layer with its activation, by examples, inputs and outputs."""

    precision: str
    """Number format of the products."""
    forward: Curve
    """Forward pass."""
    back: Curve
    """Backward pass, with the gradients of input and parameters."""
    back_first: Curve
    """Backward pass without the gradient of the input, as in a first layer."""


@dataclass(frozen=True, kw_only=True)
class InStep(Spec):
    """Time of a phase within a step, from its parts measured in isolation: `fixed_s + factor * parts + byte_s * bytes`."""

    fixed_s: NotNegative = 0.0
    """Fixed time: waking threads, and Python."""
    factor: AboveZero = 1.0
    """Factor on the time of its parts."""
    byte_s: NotNegative = 0.0
    """Seconds per byte exchanged with other phases: within a step it is not in the CPU caches."""

    def seconds(self, parts_s: float, num_bytes: float = 0.0) -> float:
        """Time without the fixed part, so that parts of a phase can be summed."""
        return self.factor * parts_s + self.byte_s * num_bytes


@dataclass(frozen=True, kw_only=True)
class Timings(Spec):
    """Times of the parts of a step. Rows were trained by row-wise Adagrad."""

    layers: tuple[LayerTimes, ...]
    """One per measured number format."""
    interaction_forward: Curve
    """Products of all pairs, by examples, vectors and width."""
    interaction_back: Curve
    """Their gradients."""
    fp32_interaction_factor: AboveZero = 1.0
    """FP32 time relative to the measured time, if a faster format was measured."""
    dense_update: Curve
    """The dense optimizer, Adagrad, by parameters."""
    read_row: Curve
    """One random row read and added to its bag, by bytes of the working set and bytes per row."""
    bag: Curve
    """Overhead per pooled vector, by bytes per row."""
    lookup_call_s: NotNegative
    """Fixed time of a look-up."""
    update_row: Curve
    """One distinct row updated, by bytes of the working set and bytes per row."""
    update_id: Curve
    """Overhead per id of an update (sorting, adding its gradient), by bytes per row."""
    update_call_s: NotNegative
    """Fixed time of an update."""
    plan: Curve | None = None
    """Preparation of an update that an accelerator overlaps with look-up and network, by ids; None if nothing is overlapped."""
    fills_batch: bool = False
    """Whether each batch is copied to a static buffer of the accelerator before its step."""
    cache_batch_s: NotNegative = 0.0
    """Fixed time per step with cached tables, to make and pass on its plan. With an accelerator this is host time, per table width."""
    cache_set_s: NotNegative = 0.0
    """Additional host time per plan of an accelerator, per table width; a plan covers one batch or a set of small ones."""
    cache_id_s: NotNegative = 0.0
    """Time per id of a cached table, to look up its cache slot."""
    move_row: Curve | None = None
    """One cache miss: a row is fetched and another written back while other steps run, by bytes of a row with its state. From SSD for a
    CPU, from system memory for a GPU; None if not measured."""
    move_read_s: NotNegative = 0.0
    """Fixed time per file read; one read fetches rows that are close to each other."""
    move_share: NotNegative = 0.0
    """Share by which moving rows slows down an overlapped step, and a step slows down moving rows: both use the same cores."""
    fresh_from_bytes: float = 32 * 2**20
    """Tensors of at least this size are newly allocated by the operating system in every step."""
    fresh_byte_s: NotNegative = 0.0
    """Seconds per newly allocated byte."""
    reference_s: NotNegative = 0.0
    """Seconds of the reference work of `study/calibration/machine_speed.py` at the machine speed that these times are normalised to; 0 if not recorded."""
    dense: InStep = InStep()
    """Layers and interaction, by bytes of their inputs and outputs; the fixed time includes what no other phase covers."""
    lookup: InStep = InStep()
    """Look-ups, by the bytes of pooled vectors."""
    update: InStep = InStep()
    """Updates of rows, by the bytes of the pooled vectors' gradients."""
    dense_optimizer: InStep = InStep()
    """The dense optimizer."""
    plan_factor: NotNegative = 0.0
    """Share of `plan` by which it slows down the work it overlaps with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.layers), "layers", "give at least one number format")

    def fresh_s(self, num_bytes: float) -> float:
        """Time to allocate a new tensor."""
        return num_bytes * self.fresh_byte_s if num_bytes >= self.fresh_from_bytes else 0.0

    def of_layers(self, precision: str) -> LayerTimes:
        """The times of a number format, or of the first measured one."""
        return next((one for one in self.layers if one.precision == precision), self.layers[0])
