"""A training program as data: its overheads on a machine, described or measured."""

from __future__ import annotations

from dataclasses import dataclass

from rowstead.spec.bounds import AboveZero, Count, NotNegative, Origin, Share, Spec
from rowstead.spec.curve import Curve
from rowstead.spec.sharing import Sharing
from rowstead.spec.timings import Timings


@dataclass(frozen=True, kw_only=True)
class Software(Spec):
    """Overheads of a training program: dispatch times, and the shares of peak rates that it reaches."""

    name: str
    """Name on the command line."""
    title: str
    """One line about it."""
    operator_s: NotNegative
    """Host time to dispatch one operator, on the CPU or as the launch of a kernel."""
    operators_per_layer: NotNegative
    """Operators of a linear layer in one step: forward, backward and optimizer."""
    operators_per_table: NotNegative
    """Operators of a table in one step: copy its ids, look up, gradient, update."""
    operators_fixed: NotNegative
    """Operators of a step that are not counted by layer or by table: loss, interaction, exchange."""
    operators_per_exchange: NotNegative = 0.0
    """Operators that take one table's pooled vectors to one other accelerator, or their gradients back."""
    operators_per_column: NotNegative = 0.0
    """Operators that bring one dense feature of a batch, a column of the log, into the input tensor; the sockets of a host share them."""
    device_step_s: NotNegative
    """Host time of a step on an accelerator that is not overlapped: assembling the batch and waiting for the last kernel."""
    host_step_s: NotNegative = 0.0
    """The same on a CPU."""
    one_dispatcher: bool
    """Whether one process dispatches for all accelerators of a server; else each has its own process."""
    cpu_gemm_share: Share
    """Share of the peak arithmetic rate that matrix products on a CPU reach."""
    device_gemm_share: Share
    """The same on an accelerator."""
    one_core_activations: bool = False
    """Whether on a CPU a single core does the work between matrix products: bias, ReLU, and their gradients."""
    kernel_s: NotNegative = 5e-6
    """Shortest time of a kernel on an accelerator."""
    cpu_random_share: Share = 1.0
    """Share of the random bandwidth of system memory that look-ups and updates reach."""
    device_random_share: Share = 1.0
    """The same on an accelerator."""
    sparse_updates_all_ids: bool
    """Whether the optimizer touches a row once for every id; else once for every distinct row."""
    grouping_bytes_per_id: NotNegative = 0.0
    """Bytes that an update moves for each id beside gradients and rows: ids are sorted and repeated ones grouped."""
    message_bytes_per_s_per_core: AboveZero = 1e9
    """Bytes of messages to and from other servers that one core packs, copies and unpacks in a second."""
    rpc_s: NotNegative = 50e-6
    """Host time of one request to another server and its answer."""
    overlap_input: bool = True
    """Whether the next batch is read and copied to the accelerator during a step."""
    has_caches: bool = True
    """Whether it trains tables of which only some rows are in fast memory, the others in system memory or in files."""
    runs_ahead: bool = False
    """Whether the host launches later steps while an accelerator is busy with earlier ones."""
    base_bytes: NotNegative = 0.0
    """Memory of a training process with a tiny model; 0 if not measured."""
    buffered_batches: Count = 11
    """Batches that a process holds at once on a host, being assembled or prefetched."""
    exchange: Curve | None = None
    """An all-to-all between two processes of one machine, by the bytes that each sends, as measured."""
    cpu_timings: Timings | None = None
    """Measured times of the parts of a step on this machine's cores; without them, peak rates and shares are used."""
    device_timings: Timings | None = None
    """The same on one of its accelerators."""
    sharing: Sharing | None = None
    """Measured costs of processes that share this machine's cores; absent if not measured."""
    source: Origin
    """Where these numbers come from."""
