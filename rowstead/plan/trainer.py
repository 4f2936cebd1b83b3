"""One server that trains, as the tasks of its step on its resources, wherever its tables live."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from rowstead.plan import cost, dispatch
from rowstead.plan.collective import across_servers_s, all_reduce_s, all_to_all_s, fabric_of
from rowstead.plan.cost import Processor, device_processor, host_processor
from rowstead.plan.schedule import Task
from rowstead.plan.search import Assignment, Item, place
from rowstead.plan.setup import USABLE_SHARE, Setup, dense_held_bytes, held
from rowstead.plan.traffic import distinct_beyond
from rowstead.plan.work import ID_BYTES, StepWork, TableWork
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Accelerators, Link, Machine, Precision, Software

NUM_PIECES = 4
"""Pieces in which requests to servers travel, so that one is packed while another is on the wire."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One server that trains, as the tasks of its step; times are of all its devices, which work alike and at once."""

    work: StepWork
    machine: Machine
    software: Software
    setup: Setup
    precision: Precision

    @property
    def has_devices(self) -> bool:
        return self.machine.accelerators is not None

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
    def on_devices(self) -> tuple[TableWork, ...]:
        """Tables in the memory of what trains, those that are read most for their size first in a mixed set-up."""
        if self.setup.place == "device":
            return self.work.tables
        if self.setup.place != "mixed":
            return ()
        room = held(self.work, self.machine, self.setup).device_table_share * self.work.table_bytes
        chosen = []
        for table in sorted(self.work.tables, key=lambda one: one.ids_per_sample / one.num_rows, reverse=True):
            if table.bytes <= room:
                chosen.append(table)
                room -= table.bytes
        return tuple(chosen)

    @functools.cached_property
    def off_devices(self) -> tuple[TableWork, ...]:
        names = {table.name for table in self.on_devices}
        return tuple(table for table in self.work.tables if table.name not in names)

    def tasks(self) -> list[Task]:
        """The step, in the order in which its tasks are issued."""
        return [
            *self.reading(),
            *self.moving(),
            *self.looking_up(),
            *self.dense(),
            *self.going_back(),
            *self.synchronising(),
        ]

    # what comes in

    def reading(self) -> list[Task]:
        """The batch arrives from readers, is handed over, and copied to the devices."""
        work, software, setup = self.work, self.software, self.setup
        batch_bytes = self.server_batch * work.input_bytes
        tasks = []
        if setup.has_input:
            unpacked_s = self.message_s(self.machine, batch_bytes)
            tasks.append(Task(name="unpack batch", resource="host cores", seconds=unpacked_s, hidden=True))
        if setup.has_input and self.machine.network is not None:
            seconds = batch_bytes / self.machine.network.bandwidth_bytes_per_s
            tasks.append(Task(name="receive batch", resource="network in", seconds=seconds, hidden=True))
        hand_over_s = dispatch.hand_over_s(work, software, setup, has_devices=self.has_devices)
        counts = {"num_on_devices": len(self.on_devices), "num_off_devices": len(self.off_devices)}
        if not self.has_devices:
            num_operators = software.operators_fixed + dispatch.table_operators(software, setup, **counts)
            seconds = hand_over_s + software.operator_s * num_operators
            return [*tasks, Task(name="dispatch", resource="host cores", seconds=seconds)]
        launches_s = dispatch.launches_s(work, software, setup, **counts, through_host=self.through_host)
        copied_bytes = setup.batch_size * work.input_bytes if setup.has_input else 0.0
        copied = self.on_link("copy batch", copied_bytes, after=("hand over",))
        ahead = software.runs_ahead  # then nothing waits for the host, as long as it keeps up
        return [
            *tasks,
            Task(name="hand over", resource="dispatch", seconds=hand_over_s, hidden=ahead),
            Task(name="dispatch", resource="dispatch", seconds=launches_s, after=("hand over",), hidden=ahead),
            replace(copied, hidden=software.overlap_input),
        ]

    @property
    def ready(self) -> tuple[str, ...]:
        """What must have ended before anything is computed: on a CPU dispatching takes the cores, on accelerators it goes on meanwhile."""
        return ("hand over", "copy batch") if self.has_devices else ("dispatch",)

    @property
    def accelerators(self) -> Accelerators:
        assert self.machine.accelerators is not None
        return self.machine.accelerators

    @property
    def through_host(self) -> bool:
        """Whether devices have no path of their own to each other."""
        return fabric_of(self.accelerators).topology == "through_host"

    # rows

    def moving(self) -> list[Task]:
        """Rows that caches lack are brought in while steps before are trained on; ids are named by their places."""
        timings, batch_size = self.processor.timings, self.setup.batch_size
        if not self.setup.behind:
            return []
        assert timings is not None, "only measured times say what a cache costs"
        assert timings.move_row is not None
        table_of = {table.name: table for table in self.on_devices}
        placed_s = moved_s = 0.0
        for one in self.setup.behind:
            table = table_of[one.table]
            num_ids = batch_size * table.ids_per_sample
            kept = one.kept_share * table.num_rows + table.distinct_rows(batch_size)  # what is under way stays a while
            num_moved = min(distinct_beyond(table.popularity, kept, num_ids), table.distinct_rows(batch_size))
            placed_s += num_ids * timings.place_id_s
            moved_s += num_moved * timings.move_row.at(table.row_bytes + table.state_bytes)
        return [
            Task(name="find places", resource=self.compute, seconds=placed_s, after=self.ready),
            Task(name="move rows", resource="rows behind caches", seconds=moved_s, hidden=True),
        ]

    def looking_up(self) -> list[Task]:
        """Rows are read and pooled where they live, and the pooled vectors brought to the devices."""
        tasks = self.beside()
        if self.on_devices:
            seconds = self.imbalance * self.of_tables_s(self.processor, self.on_devices, self.setup.batch_size, update=False)
            tasks.append(Task(name="look up", resource=self.compute, seconds=seconds, after=self.ready))
            tasks += self.exchange("pooled", after="look up")
        if self.off_devices and self.setup.place == "remote":
            tasks += self.request(after=self.ready)
        elif self.off_devices:
            seconds = self.of_tables_s(self.host, self.off_devices, self.server_batch, update=False)
            tasks.append(Task(name="host look up", resource="host memory", seconds=seconds, after=self.ready))
            if self.has_devices:
                tasks.append(self.host_copy("copy pooled", after=("host look up",)))
        return tasks

    def beside(self) -> list[Task]:
        """What a step takes besides its parts, and what a device does for the update while it looks up and multiplies."""
        timings, tasks = self.processor.timings, []
        if timings is None:
            return []
        else_s = timings.fixed_s + cost.fill_s(self.processor, self.work, self.setup.batch_size)
        if else_s:
            tasks.append(Task(name="everything else", resource=self.compute, seconds=else_s, after=self.ready))
        if timings.plan is not None and self.on_devices:
            num_ids = self.setup.batch_size * sum(table.ids_per_sample for table in self.on_devices)
            seconds = timings.plan.at(max(1.0, num_ids))
            tasks += [
                Task(name="plan update", resource=f"{self.compute} beside", seconds=seconds, after=self.ready),
                Task(name="slowed by the plan", resource=self.compute, seconds=timings.plan_factor * seconds, after=self.ready),
            ]
        return tasks

    @property
    def compute(self) -> str:
        """The resource that does the arithmetic."""
        return "device" if self.has_devices else "host cores"

    @functools.cached_property
    def imbalance(self) -> float:
        """How much longer the busiest device takes for its tables than the average one."""
        return self.assignment.imbalance if self.assignment is not None else 1.0

    @functools.cached_property
    def assignment(self) -> Assignment | None:
        """Which device holds which table; None where there is one device, or the tables do not fit."""
        setup = self.setup
        num_devices = setup.num_devices * (setup.num_trainers if setup.num_dense_servers == 0 else 1)
        if num_devices == 1 or not self.on_devices:
            return None
        memory = self.accelerators.memory if self.has_devices else self.machine.host.memory
        room = memory.capacity_bytes * USABLE_SHARE - dense_held_bytes(self.work, setup.batch_size)
        if sum(table.bytes for table in self.on_devices) > num_devices * room:
            return None
        accesses = cost.accesses_of(self.on_devices)
        items = [
            Item(
                name=table.name,
                seconds=self.table_s(accesses, table),
                num_bytes=table.bytes,
                num_rows=table.num_rows,
            )
            for table in self.on_devices
        ]
        try:
            return place(items, num_devices, room)
        except RowsteadError:
            return None

    def table_s(self, accesses: float, table: TableWork) -> float:
        """Seconds of one device for a whole table, as the search weighs it."""
        batch_size = self.setup.batch_size
        read_s = cost.table_lookup_s(self.processor, accesses, table, batch_size)
        return read_s + cost.table_update_s(self.processor, accesses, table, batch_size, self.software)

    def of_tables_s(self, processor: Processor, tables: tuple[TableWork, ...], batch: float, *, update: bool) -> float:
        """Seconds of a processor for some tables, with its kernels' least times."""
        calls = len(tables) / self.setup.num_devices * self.software.operators_per_table / 2 * processor.call_s
        if update:
            return calls + cost.update_s(processor, tables, batch, self.software)
        return calls + cost.lookup_s(processor, tables, batch)

    def exchange(self, what: str, *, after: str) -> list[Task]:
        """Pooled vectors (or their gradients) go from the devices that hold tables to those that hold examples."""
        setup = self.setup
        sent = setup.batch_size * sum(table.pooled_bytes for table in self.on_devices)
        tasks = []
        if self.has_devices and setup.num_devices > 1 and self.through_host:
            moved = sent * (setup.num_devices - 1) / setup.num_devices
            tasks += self.by_host(f"exchange {what}", moved, setup.num_devices * moved, after=after)
        elif self.has_devices and setup.num_devices > 1:
            seconds = all_to_all_s(fabric_of(self.accelerators), setup.num_devices, sent)
            tasks.append(Task(name=f"exchange {what}", resource="device links", seconds=seconds, after=(after,)))
        if setup.num_trainers > 1 and setup.num_dense_servers == 0 and self.machine.network is not None:
            tasks += self.to_servers(what, setup.num_devices * sent, self.machine.network, after=after)
        return tasks

    def to_servers(self, what: str, num_bytes: float, network: Link, *, after: str) -> list[Task]:
        """Bytes of this server go to the others; its cores pack and unpack them unless its devices use the network directly."""
        setup, tasks = self.setup, []
        moved = num_bytes * (setup.num_trainers - 1) / setup.num_trainers
        if self.has_devices and not network.direct:
            tasks.append(self.on_link(f"lift {what}", moved / setup.num_devices, after=(after,)))
        if not network.direct:
            seconds = self.message_s(self.machine, 2 * moved)
            tasks.append(Task(name=f"pack {what}", resource="host cores", seconds=seconds, after=(after, f"lift {what}")))
        seconds = across_servers_s(
            network.bandwidth_bytes_per_s, network.latency_s, setup.num_trainers, num_bytes, reduce=False
        )
        tasks.append(Task(name=f"send {what}", resource="network out", seconds=seconds, after=(after, f"pack {what}")))
        if self.has_devices and not network.direct:
            tasks.append(self.on_link(f"lower {what}", moved / setup.num_devices, after=(f"send {what}",)))
        return tasks

    def on_link(self, name: str, num_bytes: float, *, after: tuple[str, ...]) -> Task:
        """Bytes cross the link between a device and its host."""
        link = self.accelerators.host_link
        return Task(
            name=name, resource="host link", seconds=link.latency_s + num_bytes / link.bandwidth_bytes_per_s, after=after
        )

    def by_host(self, name: str, link_bytes: float, core_bytes: float, *, after: str) -> list[Task]:
        """Bytes of each device go up to system memory, are sorted there by the host's cores, and come down."""
        handled = self.message_s(self.machine, core_bytes)
        return [
            self.on_link(f"{name}, up", link_bytes, after=(after,)),
            Task(name=f"{name}, on the host", resource="host cores", seconds=handled, after=(f"{name}, up",)),
            self.on_link(name, link_bytes, after=(f"{name}, on the host",)),
        ]

    def host_copy(self, name: str, *, after: tuple[str, ...]) -> Task:
        """Pooled vectors of tables that are not on devices cross the link between a device and its host."""
        return self.on_link(name, self.setup.batch_size * sum(table.pooled_bytes for table in self.off_devices), after=after)

    # other servers

    def request(self, *, after: tuple[str, ...]) -> list[Task]:
        """Ids go to the sparse servers, which read and pool; pooled vectors come back, in pieces that overlap."""
        ids_bytes = self.server_batch * ID_BYTES * self.work.ids_per_sample
        pooled_bytes = self.server_batch * self.work.pooled_bytes
        serving_s = self.serving_s(ids_bytes + pooled_bytes, update=False)
        tasks = []
        for piece in range(NUM_PIECES):
            tasks += [
                self.own_message(f"pack {piece}", ids_bytes / NUM_PIECES, after=after),
                self.wire(f"request {piece}", "network out", ids_bytes / NUM_PIECES, after=(f"pack {piece}",)),
                self.served(f"serve {piece}", serving_s / NUM_PIECES, after=(f"request {piece}",)),
                self.wire(f"answer {piece}", "network in", pooled_bytes / NUM_PIECES, after=(f"serve {piece}",)),
            ]
        return tasks

    def serving_s(self, message_bytes: float, *, update: bool) -> float:
        """Seconds of each sparse server for its part of this trainer's batch."""
        assert self.setup.server is not None
        processor = host_processor(self.setup.server, self.software)
        if update:
            rows_s = cost.update_s(processor, self.off_devices, self.server_batch, self.software)
        else:
            rows_s = cost.lookup_s(processor, self.off_devices, self.server_batch)
        calls = len(self.off_devices) * self.software.operator_s
        return (rows_s + calls + self.message_s(self.setup.server, message_bytes)) / self.setup.num_sparse_servers

    def served(self, name: str, seconds: float, *, after: tuple[str, ...], hidden: bool = False) -> Task:
        """Something that the sparse servers do for each trainer in turn."""
        busy_s = seconds * self.setup.num_trainers
        return Task(name=name, resource="sparse servers", seconds=seconds, after=after, busy_s=busy_s, hidden=hidden)

    def message_s(self, machine: Machine, num_bytes: float) -> float:
        """Seconds of all cores of a host to pack or unpack messages."""
        return num_bytes / (self.software.message_bytes_per_s_per_core * machine.host.num_cores)

    def own_message(self, name: str, num_bytes: float, *, after: tuple[str, ...]) -> Task:
        rpc_s = self.software.rpc_s / NUM_PIECES
        return Task(name=name, resource="host cores", seconds=rpc_s + self.message_s(self.machine, num_bytes), after=after)

    def wire(self, name: str, direction: str, num_bytes: float, *, after: tuple[str, ...]) -> Task:
        """Bytes between this trainer and the sparse servers, at the speed of the slower end."""
        assert self.machine.network is not None, "a machine without a network has no remote place"
        assert self.setup.server is not None
        assert self.setup.server.network is not None
        own, theirs = self.machine.network, self.setup.server.network
        of_servers = theirs.bandwidth_bytes_per_s * self.setup.num_sparse_servers
        seconds = num_bytes / min(own.bandwidth_bytes_per_s, of_servers)
        at_servers = num_bytes * self.setup.num_trainers / of_servers
        return Task(
            name=name,
            resource=direction,
            seconds=own.latency_s / NUM_PIECES + seconds,
            after=after,
            busy_s=max(seconds, at_servers),
        )

    # the dense part

    def dense(self) -> list[Task]:
        """Bottom MLP, interaction, top MLP and back; the bottom MLP may run while rows are on their way."""
        work, setup, processor, precision = self.work, self.setup, self.processor, self.precision
        tasks = [
            Task(
                name="bottom",
                resource=self.compute,
                seconds=cost.layers_s(processor, work, work.bottom, setup.batch_size, precision, passes=1),
                after=self.ready,
            )
        ]
        if self.off_devices and setup.place == "remote":
            pooled_bytes = self.server_batch * work.pooled_bytes
            tasks += [
                self.own_message(f"unpack {piece}", pooled_bytes / NUM_PIECES, after=(f"answer {piece}",))
                for piece in range(NUM_PIECES)
            ]
            if self.has_devices:
                tasks.append(self.host_copy("copy pooled", after=_names("unpack")))
        arrived = (
            "look up",
            "exchange pooled",
            "send pooled",
            "lower pooled",
            "host look up",
            "copy pooled",
            *_names("unpack"),
        )
        top_s = cost.layers_s(processor, work, work.top, setup.batch_size, precision, passes=3)
        meet_s = cost.interaction_s(processor, work, setup.batch_size, precision, passes=3)
        tasks.append(Task(name="top", resource=self.compute, seconds=top_s + meet_s, after=("bottom", *arrived)))
        return tasks

    # what goes back

    def going_back(self) -> list[Task]:
        """Gradients of pooled vectors go to where rows live; the bottom MLP's backward pass runs meanwhile."""
        work, setup, processor = self.work, self.setup, self.processor
        tasks: list[Task] = []
        if self.on_devices:
            tasks += self.exchange("gradients", after="top")
        if self.off_devices and self.has_devices:
            tasks.append(self.host_copy("copy gradients", after=("top",)))
        bottom_s = cost.layers_s(processor, work, work.bottom, setup.batch_size, self.precision, passes=2)
        tasks.append(Task(name="bottom back", resource=self.compute, seconds=bottom_s, after=("top",)))
        if self.on_devices:
            seconds = self.imbalance * self.of_tables_s(processor, self.on_devices, self.setup.batch_size, update=True)
            came = ("top", "plan update", "exchange gradients", "send gradients", "lower gradients")
            tasks.append(Task(name="update rows", resource=self.compute, seconds=seconds, after=came))
        if self.off_devices and setup.place == "remote":
            tasks += self.push()
        elif self.off_devices:
            seconds = self.of_tables_s(self.host, self.off_devices, self.server_batch, update=True)
            tasks.append(Task(name="host update", resource="host memory", seconds=seconds, after=("top", "copy gradients")))
        return tasks

    def push(self) -> list[Task]:
        """Gradients are sent off; the servers apply them while the next step runs."""
        gradient_bytes = self.server_batch * self.work.pooled_bytes  # the servers still have the ids
        serving_s = self.serving_s(gradient_bytes, update=True)
        send = self.wire("send gradients", "network out", gradient_bytes, after=())
        return [
            self.own_message("pack gradients", gradient_bytes, after=("top", "copy gradients")),
            replace(send, hidden=True),
            self.served("apply gradients", serving_s, after=(), hidden=True),
        ]

    def synchronising(self) -> list[Task]:
        """Dense gradients are summed over devices and servers, or parameters averaged now and then, and the optimizer steps."""
        work, setup, machine = self.work, self.setup, self.machine
        tasks = []
        if self.has_devices and setup.num_devices > 1 and self.through_host:
            num_bytes = work.dense_bytes
            tasks += self.by_host("all-reduce", num_bytes, setup.num_devices * num_bytes, after="bottom back")
        elif self.has_devices and setup.num_devices > 1:
            seconds = all_reduce_s(fabric_of(self.accelerators), setup.num_devices, work.dense_bytes)
            tasks.append(Task(name="all-reduce", resource="device links", seconds=seconds, after=("bottom back",)))
        if setup.num_trainers > 1 and setup.num_dense_servers == 0 and machine.network is not None:
            network = machine.network
            seconds = across_servers_s(
                network.bandwidth_bytes_per_s, network.latency_s, setup.num_trainers, work.dense_bytes, reduce=True
            )
            before = ("bottom back", "all-reduce")
            tasks.append(Task(name="all-reduce servers", resource="network out", seconds=seconds, after=before))
        after = ("bottom back", "all-reduce", "all-reduce servers")
        update_s = cost.dense_update_s(self.processor, work)
        tasks.append(Task(name="dense update", resource=self.compute, seconds=update_s, after=after))
        if setup.num_dense_servers and machine.network is not None and setup.server is not None:
            averaged = work.dense_bytes / setup.sync_every
            packed_s = self.message_s(machine, 2 * averaged)
            sent_s = averaged / machine.network.bandwidth_bytes_per_s
            assert setup.server.network is not None
            theirs_s = averaged * setup.num_trainers / (setup.server.network.bandwidth_bytes_per_s * setup.num_dense_servers)
            tasks += [
                Task(name="pack dense", resource="host cores", seconds=packed_s, after=("dense update",)),
                Task(name="average dense", resource="dense servers", seconds=sent_s, busy_s=theirs_s, after=("pack dense",)),
                Task(name="dense on the wire", resource="network out", seconds=sent_s, hidden=True),
            ]
        return tasks


def _names(stem: str) -> tuple[str, ...]:
    return tuple(f"{stem} {piece}" for piece in range(NUM_PIECES))
