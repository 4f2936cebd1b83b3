"""One training server: its processors, the tables that it holds and the others, and the time its links and cores take for bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from rowstead.plan import cost
from rowstead.plan.balance import Assignment, Item, balance
from rowstead.plan.caching import Caches, build_caches
from rowstead.plan.collective import Fabric, fabric_of
from rowstead.plan.cost import Processor, device_processor, host_processor
from rowstead.plan.schedule import Task
from rowstead.plan.setup import USABLE_SHARE, Setup, dense_held_bytes, tables_on_devices
from rowstead.plan.work import ELEMENT_BYTES, StepWork, TableWork
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Accelerators, Link, Machine, Precision
from rowstead.spec.phases import Phase
from rowstead.spec.placement import PlacedShard
from rowstead.spec.software import Software


@dataclass(frozen=True, kw_only=True)
class TrainerNode:
    """One training server; its devices do equal work at the same time."""

    work: StepWork
    machine: Machine
    software: Software
    setup: Setup
    precision: Precision

    @property
    def has_devices(self) -> bool:
        return self.machine.accelerators is not None

    @property
    def accelerators(self) -> Accelerators:
        assert self.machine.accelerators is not None
        return self.machine.accelerators

    @property
    def network(self) -> Link:
        assert self.machine.network is not None, "predict rejects set-ups of several servers without a network"
        return self.machine.network

    @property
    def compute(self) -> str:
        """The resource that does the arithmetic."""
        return "device" if self.has_devices else "host cores"

    @property
    def server_batch(self) -> int:
        """Examples in one step of this server."""
        return self.setup.batch_size * self.setup.num_devices

    @functools.cached_property
    def processor(self) -> Processor:
        return device_processor(self.machine, self.software)

    @functools.cached_property
    def host(self) -> Processor:
        return host_processor(self.machine, self.software)

    @functools.cached_property
    def fabric(self) -> Fabric:
        """The links between the devices that are used."""
        return fabric_of(self.accelerators, self.setup.num_devices)

    @property
    def through_host(self) -> bool:
        """Whether devices have no direct links to each other."""
        return self.fabric.topology == "through_host"

    # tables

    @functools.cached_property
    def on_devices(self) -> tuple[TableWork, ...]:
        """Tables in the memory of the devices that train."""
        return tables_on_devices(self.work, self.machine, self.setup)

    @functools.cached_property
    def off_devices(self) -> tuple[TableWork, ...]:
        names = {table.name for table in self.on_devices}
        return tuple(table for table in self.work.tables if table.name not in names)

    @functools.cached_property
    def caches(self) -> Caches:
        """Caches of tables of which only some rows are in the memory of what trains."""
        return build_caches(self.work.tables, self.setup, has_devices=self.has_devices, num_sharing=self.num_sharing)

    @property
    def num_sharing(self) -> int:
        """Devices of all servers over which the tables of `on_devices` are sharded."""
        return self.setup.num_devices * self.setup.num_in_step

    @functools.cached_property
    def shards(self) -> dict[str, PlacedShard]:
        """How tables are sharded where the balancer does not decide."""
        return dict(self.setup.shards) if self.num_sharing > 1 else {}

    def sharded(self, *shards: PlacedShard) -> tuple[TableWork, ...]:
        """Tables on devices that are sharded in one of these ways."""
        return tuple(table for table in self.on_devices if self.shards.get(table.name) in shards)

    @functools.cached_property
    def partitioned(self) -> tuple[TableWork, ...]:
        """Tables on devices of which each row is on one device."""
        return tuple(table for table in self.on_devices if self.shards.get(table.name) not in ("column", "replicate"))

    @property
    def imbalance(self) -> float:
        """How much longer the busiest device takes for its tables than the average one."""
        return self.assignment.imbalance if self.assignment is not None else 1.0

    @functools.cached_property
    def assignment(self) -> Assignment | None:
        """Which device holds which table; None for one device, or if the tables do not fit."""
        num_devices = self.num_sharing
        if num_devices == 1 or not self.partitioned:
            return None
        memory = self.accelerators.memory if self.has_devices else self.machine.host.memory
        free_bytes = memory.capacity_bytes * USABLE_SHARE - dense_held_bytes(self.work, self.setup.batch_size)
        kept = {one.table: one.cache_fraction for one in self.setup.behind}
        sizes = {table.name: table.bytes * kept.get(table.name, 1.0) for table in self.partitioned}
        if sum(sizes.values()) > num_devices * free_bytes:
            return None
        accesses = cost.accesses_of(self.on_devices) / num_devices
        items = [
            Item(
                name=table.name,
                costs=(self._table_s(accesses, table),),
                num_bytes=sizes[table.name],
                num_rows=1 if self.shards.get(table.name) == "table" else table.num_rows,
            )
            for table in self.partitioned
        ]
        try:
            return balance(items, num_devices, free_bytes)
        except RowsteadError:
            return None

    def _table_s(self, accesses: float, table: TableWork) -> float:
        """Seconds of one device for a whole table: the cost that the search balances."""
        batch_size = self.setup.batch_size
        read_s = cost.table_lookup_s(self.processor, accesses, table, batch_size)
        return read_s + cost.table_update_s(
            self.processor, accesses, table, batch_size, self.software, num_sharing=self.num_sharing
        )

    def on_devices_s(self, *, update: bool) -> float:
        """Seconds of the busiest device for its tables, its operators' call overhead included."""
        batch_size, num_sharing, processor = self.setup.batch_size, self.num_sharing, self.processor
        calls_s = len(self.on_devices) / num_sharing * self.software.operators_per_table / 2 * processor.call_s
        rows_s = self.rows_s(processor, self.partitioned, batch_size, num_sharing, update=update)
        slices = tuple(table.columns(num_sharing) for table in self.sharded("column"))
        sliced_s = self.rows_s(processor, slices, num_sharing * batch_size, 1, update=update)
        copied_s = self.rows_s(processor, self.sharded("replicate"), batch_size, 1, update=update)
        return self.imbalance * (calls_s + rows_s) + sliced_s + copied_s

    def in_host_s(self, *, update: bool) -> float:
        """Seconds of an accelerator's host for the tables in its memory, which it reads for each device; operators run on all cores."""
        num_operators = self.software.operators_per_table / 2 * len(self.off_devices)
        calls_s = self.setup.num_devices * num_operators * self.host.call_s / self.machine.host.num_cores
        return calls_s + self.rows_s(self.host, self.off_devices, self.server_batch, self.setup.num_in_step, update=update)

    def rows_s(
        self, processor: Processor, tables: tuple[TableWork, ...], batch_size: float, num_sharing: int, *, update: bool
    ) -> float:
        """Seconds of one of `num_sharing` processors to look up or update its part of the rows of a batch."""
        if update:
            return cost.update_s(processor, tables, batch_size, self.software, num_sharing=num_sharing)
        return cost.lookup_s(processor, tables, batch_size, num_sharing=num_sharing)

    @property
    def ready(self) -> tuple[str, ...]:
        """What must end before any computation: on a CPU dispatch takes the cores, on accelerators it overlaps.

        It does not overlap where the host has to wait for what the devices send up: then launches and device work alternate.
        """
        if not self.has_devices:
            return ("dispatch",)
        alternates = (
            bool(self.off_devices)
            or (self.through_host and self.setup.num_devices > 1)
            or (self.setup.num_in_step > 1 and not self.network.direct)
        )
        return ("assemble batch", "copy batch", *(("dispatch",) if alternates else ()))

    @property
    def exchanged_bytes(self) -> float:
        """Bytes of pooled vectors that an example gets from the devices with its rows, itself included.

        Each device that has rows of a bag sends a partial sum: of a table that is split evenly by rows, several. Of a history each id's
        row is sent.
        """
        count, found = self.num_sharing, 0.0
        for table in self.on_devices:
            shard = self.shards.get(table.name)
            vectors = [
                count * (1 - (1 - 1 / count) ** ids) if shard == "row" and read not in table.histories else table.vectors[read]
                for read, (ids, _) in enumerate(table.reads)
            ]
            found += 0.0 if shard == "replicate" else sum(vectors) * table.width * self.wire_bytes
        return found

    @property
    def reduced_bytes(self) -> float:
        """Bytes that a synchronous step all-reduces: dense gradients, those of replicated tables, and squares of sliced rows."""
        found = float(self.work.num_parameters * self.wire_bytes)
        found += sum(4 * table.num_rows * table.width for table in self.sharded("replicate"))
        row_wise = [table for table in self.sharded("column") if 0 < table.state_bytes < 4 * table.width]
        return found + sum(4 * table.distinct_rows(self.num_sharing * self.setup.batch_size) for table in row_wise)

    @property
    def wire_bytes(self) -> int:
        """Bytes of a number that processes exchange."""
        return ELEMENT_BYTES[self.setup.wire]

    # host time before any arithmetic

    @property
    def assemble_batch_s(self) -> float:
        """Host time to assemble batches, one per device of the process, column by column; the sockets share the columns."""
        software = self.software
        fixed = software.device_step_s if self.has_devices else software.host_step_s
        num_batches = self.setup.num_devices if software.one_dispatcher else 1
        columns_s = num_batches * software.operator_s * software.operators_per_column * self.work.num_dense
        return fixed + columns_s / self.machine.host.num_sockets

    @property
    def copies_per_table(self) -> float:
        """Copies between host and device per table: ids and lengths, or pooled vectors and their gradients; 0 where tables share one."""
        return min(2.0, self.software.operators_per_table)

    @property
    def far_operators(self) -> float:
        """Operators that a process launches per step and device for a table that is not on its devices.

        Two copy pooled vectors to the device and gradients back; for a remote table two more send ids and gradients. Those that read
        and update rows run on the host's cores.
        """
        return self.copies_per_table * (self.has_devices + (self.setup.placement == "remote"))

    @property
    def cpu_operators_s(self) -> float:
        """Time of a CPU's cores for operators that are not counted with their work; those of layers and local tables are."""
        return self.software.operator_s * (self.software.operators_fixed + self.far_operators * len(self.off_devices))

    @property
    def launches_s(self) -> float:
        """Host time to launch the kernels of a step: of all devices where one process launches, else of one device."""
        software, num_devices, num_here = self.software, self.setup.num_devices, len(self.on_devices) / self.setup.num_in_step
        of_dense = len(self.work.layers) * software.operators_per_layer + software.operators_fixed
        far = self.far_operators * len(self.off_devices) * num_devices
        crossings = 2 if self.through_host else 1  # to the host and back
        exchanged = 2 * crossings * num_here * (self.num_sharing - 1) * software.operators_per_exchange
        launches = num_devices * of_dense + software.operators_per_table * num_here + far + exchanged
        return software.operator_s * (launches if software.one_dispatcher else launches / num_devices)

    # bytes

    def compute_task(self, name: str, phase: Phase, seconds: float, *, after: tuple[str, ...]) -> Task:
        """A task of what does the arithmetic."""
        return Task(name, phase, self.compute, seconds, after=after)

    def on_link(self, name: str, phase: Phase, num_bytes: float, *, after: tuple[str, ...], num_copies: float = 1.0) -> Task:
        """A copy over the link between a device and its host."""
        bytes_per_s = self.accelerators.host_bytes_per_s(self.setup.num_devices)
        seconds = num_copies * self.accelerators.host_link.latency_s + num_bytes / bytes_per_s
        return Task(name, phase, "host link", seconds, after=after)

    def host_copy(self, name: str, phase: Phase, *, after: tuple[str, ...]) -> Task:
        """A copy of the pooled vectors of tables that are not on devices, between a device and its host."""
        num_bytes = self.setup.batch_size * sum(table.pooled_bytes for table in self.off_devices)
        num_copies = max(1.0, self.copies_per_table / 2 * len(self.off_devices))
        return self.on_link(name, phase, num_bytes, after=after, num_copies=num_copies)

    def message_s(self, machine: Machine, num_bytes: float) -> float:
        """Seconds of all cores of a host to pack or unpack messages."""
        return num_bytes / (self.software.message_bytes_per_s_per_core * machine.host.num_cores)

    def on_cores(self, name: str, phase: Phase, num_bytes: float, *, after: tuple[str, ...], hidden: bool = False) -> Task:
        """The cores of this server pack or unpack bytes."""
        seconds = self.message_s(self.machine, num_bytes)
        return Task(name, phase, "host cores", seconds, after=after, hidden=hidden)
