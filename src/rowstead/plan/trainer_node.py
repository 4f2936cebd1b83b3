"""One training server: its processors, the tables that it holds and the others, and the time its links and cores take for bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from rowstead.plan import cost, dispatch
from rowstead.plan.balance import Assignment, Item, balance
from rowstead.plan.collective import Fabric, fabric_of
from rowstead.plan.cost import Processor, device_processor, host_processor
from rowstead.plan.schedule import Task
from rowstead.plan.setup import USABLE_SHARE, Setup, dense_held_bytes, tables_on_devices
from rowstead.plan.work import StepWork, TableWork
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Accelerators, Link, Machine, Precision
from rowstead.spec.phases import Phase
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

    @property
    def num_sharing(self) -> int:
        """Devices of all servers over which the tables of `on_devices` are sharded."""
        return self.setup.num_devices * self.setup.num_in_step

    @functools.cached_property
    def imbalance(self) -> float:
        """How much longer the busiest device takes for its tables than the average one."""
        return self.assignment.imbalance if self.assignment is not None else 1.0

    @functools.cached_property
    def assignment(self) -> Assignment | None:
        """Which device holds which table; None for one device, or if the tables do not fit."""
        num_devices = self.num_sharing
        if num_devices == 1 or not self.on_devices:
            return None
        memory = self.accelerators.memory if self.has_devices else self.machine.host.memory
        free_bytes = memory.capacity_bytes * USABLE_SHARE - dense_held_bytes(self.work, self.setup.batch_size)
        if sum(table.bytes for table in self.on_devices) > num_devices * free_bytes:
            return None
        accesses = cost.accesses_of(self.on_devices) / num_devices
        items = [
            Item(
                name=table.name,
                costs=(self._table_s(accesses, table),),
                num_bytes=table.bytes,
                num_rows=table.num_rows,
            )
            for table in self.on_devices
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
        batch_size, num_sharing = self.setup.batch_size, self.num_sharing
        each = self.software.operators_per_table / 2
        calls_s = len(self.on_devices) / num_sharing * each * self.processor.call_s
        if update:
            rows_s = cost.update_s(self.processor, self.on_devices, batch_size, self.software, num_sharing=num_sharing)
        else:
            rows_s = cost.lookup_s(self.processor, self.on_devices, batch_size, num_sharing=num_sharing)
        return self.imbalance * (calls_s + rows_s)

    def in_host_s(self, *, update: bool) -> float:
        """Seconds of an accelerator's host for the tables in its memory, which it reads for each device; operators run on all cores."""
        num_sharing, num_operators = self.setup.num_in_step, self.software.operators_per_table / 2 * len(self.off_devices)
        calls_s = self.setup.num_devices * num_operators * self.host.call_s / self.machine.host.num_cores
        if update:
            return calls_s + cost.update_s(
                self.host, self.off_devices, self.server_batch, self.software, num_sharing=num_sharing
            )
        return calls_s + cost.lookup_s(self.host, self.off_devices, self.server_batch, num_sharing=num_sharing)

    # bytes

    def on_link(self, name: str, phase: Phase, num_bytes: float, *, after: tuple[str, ...], num_copies: float = 1.0) -> Task:
        """A copy over the link between a device and its host."""
        bytes_per_s = self.accelerators.host_bytes_per_s(self.setup.num_devices)
        seconds = num_copies * self.accelerators.host_link.latency_s + num_bytes / bytes_per_s
        return Task(name=name, phase=phase, resource="host link", seconds=seconds, after=after)

    def host_copy(self, name: str, phase: Phase, *, after: tuple[str, ...]) -> Task:
        """A copy of the pooled vectors of tables that are not on devices, between a device and its host."""
        num_bytes = self.setup.batch_size * sum(table.pooled_bytes for table in self.off_devices)
        num_copies = max(1.0, dispatch.copies_per_table(self.software) / 2 * len(self.off_devices))
        return self.on_link(name, phase, num_bytes, after=after, num_copies=num_copies)

    def message_s(self, machine: Machine, num_bytes: float) -> float:
        """Seconds of all cores of a host to pack or unpack messages."""
        return num_bytes / (self.software.message_bytes_per_s_per_core * machine.host.num_cores)

    def on_cores(self, name: str, phase: Phase, num_bytes: float, *, after: tuple[str, ...], hidden: bool = False) -> Task:
        """The cores of this server pack or unpack bytes."""
        seconds = self.message_s(self.machine, num_bytes)
        return Task(name=name, phase=phase, resource="host cores", seconds=seconds, after=after, hidden=hidden)
