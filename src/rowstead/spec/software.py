"""A training program as data: its overheads on a machine, described or measured."""

from __future__ import annotations

from dataclasses import dataclass

from rowstead.spec.bounds import require_above_zero, require_not_negative, require_source
from rowstead.spec.curve import Curve
from rowstead.spec.errors import require
from rowstead.spec.sharing import Sharing
from rowstead.spec.timings import Timings


@dataclass(frozen=True, kw_only=True)
class Software:
    """Overheads of a training program: dispatch times, and the shares of peak rates that it reaches."""

    name: str
    """Name on the command line."""
    title: str
    """One line about it."""
    operator_s: float
    """Host time to dispatch one operator, on the CPU or as the launch of a kernel."""
    operators_per_layer: float
    """Operators of a linear layer in one step: forward, backward and optimizer."""
    operators_per_table: float
    """Operators of a table in one step: copy its ids, look up, gradient, update."""
    operators_fixed: float
    """Operators of a step that are not counted by layer or by table: loss, interaction, exchange."""
    operators_per_exchange: float = 0.0
    """Operators that take one table's pooled vectors to one other accelerator, or their gradients back."""
    operators_per_column: float = 0.0
    """Operators that bring one dense feature of a batch, a column of the log, into the input tensor."""
    device_step_s: float
    """Host time of a step on an accelerator that is not overlapped: assembling the batch and waiting for the last kernel."""
    host_step_s: float = 0.0
    """The same on a CPU."""
    one_dispatcher: bool
    """Whether one process dispatches for all accelerators of a server; else each has its own process."""
    cpu_gemm_share: float
    """Share of the peak arithmetic rate that matrix products on a CPU reach."""
    device_gemm_share: float
    """The same on an accelerator."""
    one_core_activations: bool = False
    """Whether on a CPU a single core does the work between matrix products: bias, ReLU, and their gradients."""
    kernel_s: float = 5e-6
    """Shortest time of a kernel on an accelerator."""
    cpu_random_share: float = 1.0
    """Share of the random bandwidth of system memory that look-ups and updates reach."""
    device_random_share: float = 1.0
    """The same on an accelerator."""
    sparse_updates_all_ids: bool
    """Whether the optimizer touches a row once for every id; else once for every distinct row."""
    grouping_bytes_per_id: float = 0.0
    """Bytes that an update moves for each id beside gradients and rows: ids are sorted and repeated ones grouped."""
    message_bytes_per_s_per_core: float = 1e9
    """Bytes of messages to and from other servers that one core packs, copies and unpacks in a second."""
    rpc_s: float = 50e-6
    """Host time of one request to another server and its answer."""
    overlap_input: bool = True
    """Whether the next batch is read and copied to the accelerator during a step."""
    runs_ahead: bool = False
    """Whether the host launches later steps while an accelerator is busy with earlier ones."""
    base_bytes: float = 0.0
    """Memory of a training process with a tiny model; 0 if not measured."""
    buffered_batches: int = 11
    """Batches that a process holds at once on a host, being assembled or prefetched."""
    exchange: Curve | None = None
    """An all-to-all between two processes of one machine, by the bytes that each sends, as measured."""
    cpu_timings: Timings | None = None
    """Measured times of the parts of a step on this machine's cores; without them, peak rates and shares are used."""
    device_timings: Timings | None = None
    """The same on one of its accelerators."""
    sharing: Sharing | None = None
    """Measured costs of processes that share this machine's cores; absent if not measured."""
    source: str
    """Where these numbers come from."""

    def __post_init__(self) -> None:
        counts = (
            "operator_s",
            "operators_per_layer",
            "operators_per_table",
            "operators_per_exchange",
            "operators_per_column",
            "operators_fixed",
        )
        times = ("device_step_s", "host_step_s", "kernel_s", "rpc_s")
        require_not_negative(self, *counts, "grouping_bytes_per_id", *times)
        for name in ("cpu_gemm_share", "device_gemm_share", "cpu_random_share", "device_random_share"):
            value = getattr(self, name)
            require(0 < value <= 1, name, f"must be above 0 and at most 1, got {value}")
        require_above_zero(self, "message_bytes_per_s_per_core")
        require_source(self)
