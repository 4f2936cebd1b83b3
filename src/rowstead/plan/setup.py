"""A set-up: placement of the tables, number of servers and batch size; and the memory that each process needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rowstead.plan.greedy import TableSizes
from rowstead.plan.work import StepWork, TableWork, WireFormat
from rowstead.spec.errors import require
from rowstead.spec.machine import Machine
from rowstead.spec.placement import PlacedShard
from rowstead.spec.sizes import format_bytes
from rowstead.spec.software import Software
from rowstead.spec.stores import PlannedStore, RecipeStore
from rowstead.spec.sync import SyncMode

USABLE_SHARE = 0.9
"""Share of a memory that a run may fill; the rest is for the system, the framework and its workspaces."""
BUFFERED_BATCHES = 3
"""Batches that a trainer holds at once: the current one, the next, and one being read."""


@dataclass(frozen=True, kw_only=True)
class CachedTable:
    """A table of which only some rows are in the memory of what trains."""

    table: str
    cache_fraction: float
    """Share of its rows that fit in the cache."""
    where: RecipeStore = "cached"
    """What is behind the cache: `cached` or `host` for system memory behind an accelerator's, `ssd` for a file behind system memory."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a run is spread over machines of one kind, with parameter servers beside them where tables are remote."""

    placement: PlannedStore
    """Where the tables live, one of `spec.stores`."""
    batch_size: int
    """Examples per step of one device, or of one CPU trainer."""
    num_devices: int = 1
    """Accelerators used in each server; 1 on a CPU server."""
    num_trainers: int = 1
    """Servers that train."""
    num_sparse_servers: int = 0
    """Servers that hold tables."""
    num_dense_servers: int = 0
    """Servers with which trainers average their dense parameters; with 0, training is synchronous."""
    in_flight: int = 1
    """Concurrent steps of one trainer, by Hogwild threads or prefetching."""
    sync: SyncMode = "easgd"
    """With dense servers: `easgd` averages between steps, `shadow` in the background, `allreduce` gradients in every step."""
    sync_every: int = 30
    """Steps between two averagings with the dense servers."""
    wire: WireFormat = "fp32"
    """Number format of what the processes of a synchronous step exchange: pooled vectors, their gradients and dense gradients."""
    shards: tuple[tuple[str, PlacedShard], ...] = ()
    """How tables are sharded over processes; the balancer decides about the others."""
    server: Machine | None = None
    """The machine that parameter servers run on."""
    has_input: bool = True
    """Whether batches come from readers over the network; else they are local already."""
    behind: tuple[CachedTable, ...] = ()
    """With `device`, `cached` and `ssd`: tables of which only some rows are in the memory of what trains."""
    on_one_machine: bool = False
    """Whether trainers, servers and readers are processes that share the cores of one machine; with `device`, synchronous processes."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_devices", "num_trainers", "in_flight", "sync_every"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        for name in ("num_sparse_servers", "num_dense_servers"):
            require(getattr(self, name) >= 0, name, f"must not be negative, got {getattr(self, name)}")
        needs = (self.placement == "remote") == (self.num_sparse_servers > 0)
        require(needs, "num_sparse_servers", "must be above 0 with `remote`, and 0 otherwise")
        cached = not self.behind or self.placement in ("device", "cached", "ssd")
        require(cached, "behind", f"tables in `{self.placement}` have no cache: use `device`, `cached` or `ssd`")
        several = self.placement == "remote" or (self.placement == "device" and self.num_trainers > 1)
        shared = not self.on_one_machine or (several and self.num_devices == 1)
        require(
            shared,
            "on_one_machine",
            "needs several processes without accelerators: `remote` tables, or trainers that share them",
        )
        served = self.on_one_machine or self.num_servers == 0 or self.server is not None
        require(served, "server", "name the machine that parameter servers run on")
        is_valid = self.placement == "remote" or self.num_trainers == 1 or self.num_dense_servers == 0
        require(is_valid, "num_dense_servers", "trainers that shard the tables are synchronous: use 0, or `remote` tables")

    @property
    def num_samples(self) -> int:
        """Examples in one step of all trainers."""
        return self.batch_size * self.num_devices * self.num_trainers

    @property
    def num_servers(self) -> int:
        """Parameter servers of both kinds."""
        return self.num_sparse_servers + self.num_dense_servers

    @property
    def num_in_step(self) -> int:
        """Servers that train synchronously, with the tables sharded over them unless those are remote."""
        return self.num_trainers if self.num_dense_servers == 0 else 1


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that the largest process of each kind holds."""

    device_bytes: float
    """On each accelerator; 0 where there is none."""
    host_bytes: float
    """In the system memory of each server that trains."""
    server_bytes: float
    """On each sparse parameter server."""
    disk_bytes: float = 0.0
    """On the disk of each server that trains."""


def dense_held_bytes(work: StepWork, batch_size: int) -> float:
    """What a trainer holds besides tables: parameters, gradients, state, activations with gradients, and batches."""
    parameters = work.dense_bytes * (2 + work.dense_state_per_parameter)
    sample_bytes = 2 * (work.activation_bytes + work.pooled_bytes)
    return parameters + batch_size * (sample_bytes + BUFFERED_BATCHES * work.input_bytes)


def process_bytes(work: StepWork, software: Software, batch_size: int) -> float:
    """Peak memory of a process that trains on a host's cores and holds all tables.

    Layer outputs are kept for the backward pass, which adds the gradients of two adjacent layers; pooled vectors and their gradients are
    held together. Writing a checkpoint holds a second copy of parameters and state.
    """
    outputs = [layer.outputs for layer in work.layers]
    interacted = work.top[0].inputs if work.network.pair_flops else 0
    between = interacted if work.network.pair_flops else work.network.written
    numbers = sum(outputs) + between + 2 * max([*outputs, interacted])
    parameters = work.dense_bytes * (3 + 2 * work.dense_state_per_parameter)
    sample_bytes = 4 * numbers + 2 * work.pooled_bytes + software.buffered_batches * work.input_bytes
    return software.base_bytes + work.table_bytes + parameters + batch_size * sample_bytes


def held(work: StepWork, machine: Machine, setup: Setup) -> Held:
    """What each process holds under a set-up."""
    dense, num_trainers = dense_held_bytes(work, setup.batch_size), setup.num_trainers
    server = work.table_bytes / setup.num_sparse_servers if setup.num_sparse_servers else 0.0
    sizes = table_sizes(work, machine, setup)
    if machine.accelerators is None:
        in_host = (sizes["device"] + sizes["host"]) / num_trainers
        return Held(device_bytes=0.0, host_bytes=in_host + dense, server_bytes=server, disk_bytes=sizes["disk"] / num_trainers)
    batches = setup.num_devices * setup.batch_size * BUFFERED_BATCHES * work.input_bytes
    return Held(
        device_bytes=sizes["device"] / (setup.num_devices * num_trainers) + dense,
        host_bytes=sizes["host"] / num_trainers + batches,
        server_bytes=server,
        disk_bytes=sizes["disk"] / num_trainers,
    )


def table_sizes(work: StepWork, machine: Machine, setup: Setup) -> Counter[str]:
    """Bytes of the tables in the memories of all servers that train."""
    if setup.placement == "remote":
        return Counter()
    whole = {table.name for table in tables_on_devices(work, machine, setup)}
    behind, shards = {one.table: one for one in setup.behind}, dict(setup.shards)
    num_processes = setup.num_devices * setup.num_trainers
    total: Counter[str] = Counter()
    for table in work.tables:
        copies = num_processes if shards.get(table.name) == "replicate" else 1
        if table.name not in behind:
            total["device" if table.name in whole else "host"] += copies * table.bytes
            continue
        sizes = TableSizes(
            num_rows=table.num_rows,
            record_bytes=table.row_bytes + table.state_bytes,
            ids_per_step=setup.num_samples * table.ids_per_sample,
            num_tables=len(work.tables),
            fraction=behind[table.name].cache_fraction,
        ).sizes(behind[table.name].where)
        total += Counter({memory: copies * num_bytes for memory, num_bytes in sizes.items()})
    return total


def tables_on_devices(work: StepWork, machine: Machine, setup: Setup) -> tuple[TableWork, ...]:
    """Tables in the memory of the devices that train; with `mixed`, as many whole ones as fit, most reads per byte first."""
    if setup.placement in ("device", "cached", "ssd"):
        pooled_by_host = {one.table for one in setup.behind if one.where == "ssd" and machine.accelerators is not None}
        return tuple(table for table in work.tables if table.name not in pooled_by_host)
    if setup.placement != "mixed" or machine.accelerators is None:
        return ()
    free = machine.accelerators.memory.capacity_bytes * USABLE_SHARE - dense_held_bytes(work, setup.batch_size)
    left = free * setup.num_devices * setup.num_trainers
    chosen = []
    for table in sorted(work.tables, key=lambda one: one.ids_per_sample * one.row_bytes / one.bytes, reverse=True):
        if table.bytes <= left:
            chosen.append(table)
            left -= table.bytes
    return tuple(chosen)


def shortfalls(work: StepWork, machine: Machine, setup: Setup, needs: Held | None = None) -> list[str]:
    """What does not fit, with sizes; empty when everything does. `needs` is what is held, if known already."""
    needs = needs or held(work, machine, setup)
    found = []
    memories = [("system memory", needs.host_bytes, machine.host.memory.capacity_bytes)]
    if machine.accelerators is not None:
        memories.append(("each accelerator", needs.device_bytes, machine.accelerators.memory.capacity_bytes))
    if setup.server is not None and setup.num_sparse_servers:
        memories.append(("each sparse server", needs.server_bytes, setup.server.host.memory.capacity_bytes))
    if machine.disk is not None and machine.disk.capacity_bytes is not None:
        memories.append(("the disk", needs.disk_bytes, machine.disk.capacity_bytes))
    for name, needed, capacity in memories:
        if needed > capacity * USABLE_SHARE:
            found.append(
                f"{name} would need {format_bytes(needed)}, but {format_bytes(capacity * USABLE_SHARE)} of its {format_bytes(capacity)} are usable"
            )
    return found


def fewest_devices(work: StepWork, machine: Machine, batch_size: int) -> int | None:
    """The fewest accelerators of a server that hold the tables, a power of two or all; None if all are too few."""
    powers = [1 << power for power in range(machine.num_devices.bit_length())]
    for num_devices in dict.fromkeys((*powers, machine.num_devices)):
        setup = Setup(placement="device", batch_size=max(1, batch_size // num_devices), num_devices=num_devices)
        if not shortfalls(work, machine, setup):
            return num_devices
    return None
