"""A machine as data: memories, arithmetic, links, power and price, each with its source."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from rowstead.spec.bounds import (
    MAX_PROCESSES,
    AboveZero,
    AtLeastOne,
    NotNegative,
    Origin,
    PlainName,
    Processes,
    Share,
    Spec,
    up_to,
)
from rowstead.spec.errors import require
from rowstead.spec.software import Software

Precision = Literal["fp32", "tf32", "bf16"]
Topology = Literal["ring", "fully_connected", "hybrid_cube_mesh", "switched", "through_host"]


@dataclass(frozen=True, kw_only=True)
class RandomRate(Spec):
    """Random-access bandwidth for accesses of one size, many in flight."""

    piece_bytes: AtLeastOne
    """Size of an access, such as an embedding row."""
    bytes_per_s: AboveZero
    """Bytes per second, counting whole memory lines."""


@dataclass(frozen=True, kw_only=True)
class Memory(Spec):
    """One memory, as large and as fast as all of its channels together."""

    capacity_bytes: AboveZero
    """Size."""
    bandwidth_bytes_per_s: AboveZero
    """Sequential bandwidth, reading and writing together."""
    random: tuple[RandomRate, ...]
    """Random-access bandwidth by access size, smallest first, interpolated in between."""
    line_bytes: AtLeastOne = 64
    """Smallest transfer: a cache line of a CPU, a 32-byte sector of a GPU."""
    cache_bytes: float = 0.0
    """The last cache in front of it, all of its parts together; 0 if unknown."""
    cache_bandwidth_bytes_per_s: AboveZero | None = None
    """Bandwidth of that cache."""
    source: Origin
    """Where these numbers come from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = 0 <= self.cache_bytes <= self.capacity_bytes
        require(fits, "cache_bytes", f"must not be negative, nor above capacity_bytes, got {self.cache_bytes:g}")
        require(bool(self.random), "random", "give at least one size with its bandwidth")
        sizes = [rate.piece_bytes for rate in self.random]
        require(sizes == sorted(set(sizes)), "random", "give each size once, the smallest first")
        for index, rate in enumerate(self.random):
            bound = f"random access cannot be faster than sequential, {self.bandwidth_bytes_per_s:g}"
            require(rate.bytes_per_s <= self.bandwidth_bytes_per_s, f"random[{index}].bytes_per_s", bound)
        if self.cache_bandwidth_bytes_per_s is not None:
            faster = self.cache_bandwidth_bytes_per_s >= self.bandwidth_bytes_per_s
            require(faster, "cache_bandwidth_bytes_per_s", "a cache cannot be slower than the memory behind it")

    def random_bytes_per_s(self, piece_bytes: float) -> float:
        """Random-access bandwidth for a size: interpolated between the given sizes, constant outside."""
        sizes = [rate.piece_bytes for rate in self.random]
        right = bisect.bisect_left(sizes, piece_bytes)
        if right == 0:
            return self.random[0].bytes_per_s
        if right == len(sizes):
            return self.random[-1].bytes_per_s
        low, high = self.random[right - 1], self.random[right]
        share = math.log(piece_bytes / low.piece_bytes) / math.log(high.piece_bytes / low.piece_bytes)
        return math.exp((1 - share) * math.log(low.bytes_per_s) + share * math.log(high.bytes_per_s))

    def lines(self, piece_bytes: float) -> float:
        """Bytes that an access transfers: whole lines."""
        return math.ceil(piece_bytes / self.line_bytes) * self.line_bytes


@dataclass(frozen=True, kw_only=True)
class Compute(Spec):
    """Peak arithmetic rates."""

    fp32_flops_per_s: AboveZero
    """FP32, a multiplication and an addition counted as two."""
    tf32_flops_per_s: AboveZero | None = None
    """FP32 numbers rounded to TF32 by matrix units; absent without them; FP32 is used instead."""
    bf16_flops_per_s: AboveZero | None = None
    """BF16 by matrix units, not sparse; absent without them; FP32 is used instead."""
    source: Origin
    """Where these numbers come from."""

    def flops_per_s(self, precision: Precision) -> float:
        """Peak rate of a number format, FP32's where the machine has nothing faster for it."""
        faster = {"fp32": None, "tf32": self.tf32_flops_per_s, "bf16": self.bf16_flops_per_s}[precision]
        return faster or self.fp32_flops_per_s


@dataclass(frozen=True, kw_only=True)
class Link(Spec):
    """A link between two parts."""

    bandwidth_bytes_per_s: AboveZero
    """Bandwidth of one direction."""
    latency_s: NotNegative
    """Time until the first byte arrives."""
    direct: bool = False
    """Of a network: whether accelerators send over it without the host's cores, by remote direct memory access."""
    source: Origin
    """Where these numbers come from."""


@dataclass(frozen=True, kw_only=True)
class PeerLink(Spec):
    """The links between the accelerators of one server."""

    topology: Topology
    """`switched`: any to any at full speed; `fully_connected`: one direct link each; `hybrid_cube_mesh`: four of seven others
    are direct; `ring`: two neighbours; `through_host`: no direct links, all traffic goes through host memory."""
    bandwidth_bytes_per_s: AboveZero | None = None
    """What one accelerator sends over all its links together, in one direction; absent with `through_host`."""
    latency_s: NotNegative = 5e-6
    """Time until the first byte arrives."""
    source: Origin
    """Where these numbers come from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topology == "through_host":
            absent = self.bandwidth_bytes_per_s is None
            require(absent, "bandwidth_bytes_per_s", "`through_host` has no links of its own: leave it out, or name a topology")
        else:
            given = self.bandwidth_bytes_per_s is not None
            require(given, "bandwidth_bytes_per_s", f"is required for `{self.topology}`")


@dataclass(frozen=True, kw_only=True)
class Host(Spec):
    """The processors of a server and their memory."""

    num_sockets: Processes = 1
    """Processors."""
    num_cores: Annotated[int, up_to(1_000_000)]
    """Cores of all sockets together."""
    memory: Memory
    """System memory of all sockets together."""
    compute: Compute
    """Of all cores together."""
    core_share: Share = 0.1
    """Share of the bandwidth of memory, and of its cache, that a single core reaches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        enough = f"must be at least one a socket, of which there are {self.num_sockets}, got {self.num_cores}"
        require(self.num_cores >= self.num_sockets, "num_cores", enough)


@dataclass(frozen=True, kw_only=True)
class Accelerators(Spec):
    """Equal accelerators in one server."""

    num: Annotated[int, up_to(MAX_PROCESSES)]
    """How many."""
    memory: Memory
    """Memory of one."""
    compute: Compute
    """Of one."""
    host_link: Link
    """Between one accelerator and the host."""
    num_per_uplink: Processes = 1
    """Accelerators that share one link to the host; the active ones share its bandwidth."""
    peer_link: PeerLink | None = None
    """Between accelerators; required where there are several."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num >= 1, "num", f"must be at least 1, got {self.num}: remove `accelerators` if there are none")
        require(self.num == 1 or self.peer_link is not None, "peer_link", f"is required with {self.num} accelerators")
        meshed = self.peer_link is not None and self.peer_link.topology == "hybrid_cube_mesh"
        require(not meshed or self.num <= 8, "peer_link.topology", f"a hybrid cube mesh joins up to 8, not {self.num}")

    def host_bytes_per_s(self, num_used: int) -> float:
        """Bandwidth between one accelerator and the host when so many are used, neighbours on a link first."""
        return self.host_link.bandwidth_bytes_per_s / min(num_used, self.num_per_uplink)


@dataclass(frozen=True, kw_only=True)
class Disk(Spec):
    """A disk on which tables may have their files."""

    read_bytes_per_s: AboveZero
    """Sequential reads."""
    write_bytes_per_s: AboveZero
    """Sequential writes, until they are on the disk."""
    random_reads_per_s: AboveZero
    """Random reads of 4 KB, several in flight."""
    capacity_bytes: AboveZero | None = None
    """Size; no limit where it is left out."""
    source: Origin
    """Where these numbers come from."""


@dataclass(frozen=True, kw_only=True)
class Meter(Spec):
    """What a meter in a server read; never mixed with nameplate power."""

    idle_watts: AboveZero
    """When nothing runs."""
    loaded_watts: AboveZero
    """When it trains."""
    of: str
    """What the meter counts, such as one GPU."""
    source: Origin
    """Where these numbers come from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        more = f"must not be below idle_watts, {self.idle_watts:g}, got {self.loaded_watts:g}"
        require(self.loaded_watts >= self.idle_watts, "loaded_watts", more)


@dataclass(frozen=True, kw_only=True)
class Power(Spec):
    """Nameplate power of a server."""

    nameplate_watts: AboveZero
    """All of the server at full load."""
    source: Origin
    """Where this number comes from."""


@dataclass(frozen=True, kw_only=True)
class Price(Spec):
    """What a server costs."""

    usd_per_hour: AboveZero
    """Rent, or purchase and upkeep spread over its life."""
    source: Origin
    """Where this number comes from."""


@dataclass(frozen=True, kw_only=True)
class Machine(Spec):
    """One server: everything about it that decides how fast it trains."""

    name: PlainName
    """Name on the command line."""
    title: str
    """One line about it."""
    host: Host
    """Processors and system memory."""
    accelerators: Accelerators | None = None
    """GPUs; absent on a CPU server."""
    network: Link | None = None
    """To other servers, all ports together; absent without one."""
    disk: Disk | None = None
    """For tables in files; absent where that is not known."""
    power: Power | None = None
    """Nameplate power; figures of energy are absent without it."""
    meter: Meter | None = None
    """Measured power; figures of measured energy are absent without it."""
    price: Price | None = None
    """Price; figures of cost are absent without it."""
    software: Software | None = None
    """Measured overheads of the training program on this machine, used instead of the shipped ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power is not None and self.meter is not None:
            possible = self.meter.loaded_watts <= self.power.nameplate_watts
            limit = f"loaded_watts are more than the nameplate's {self.power.nameplate_watts:g}: one of the two is wrong"
            require(possible, "meter", limit)

    @property
    def num_devices(self) -> int:
        """Accelerators, or 1 for a server that trains on its processors."""
        return self.accelerators.num if self.accelerators is not None else 1
