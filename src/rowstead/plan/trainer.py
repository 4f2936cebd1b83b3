"""The step of one training server as tasks on its resources, for every placement of the tables."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rowstead.plan import caching, cost, dispatch, links, remote
from rowstead.plan.schedule import Task
from rowstead.plan.trainer_node import TrainerNode
from rowstead.spec.phases import Phase


@dataclass(frozen=True, kw_only=True)
class TrainerStep(TrainerNode):
    """One training server and the tasks of its step."""

    def tasks(self) -> list[Task]:
        """The step, in the order in which its tasks are issued."""
        in_step = [
            *self.input_tasks(),
            *self.overhead_tasks(),
            *self.cache_tasks(),
            *self.lookup_tasks(),
            *self.forward_tasks(),
            *self.backward_tasks(),
            *self.dense_update_tasks(),
        ]
        return [*in_step, *self.cache_transfer_tasks(in_step)]

    # input

    def input_tasks(self) -> list[Task]:
        """The batch arrives from readers, is assembled, and is copied to the devices."""
        work, software, setup = self.work, self.software, self.setup
        batch_bytes = self.server_batch * work.input_bytes
        tasks = []
        if setup.has_input:
            tasks.append(self.on_cores("unpack batch", Phase.DATA, batch_bytes, after=(), hidden=True))
        if setup.has_input and self.machine.network is not None:
            seconds = batch_bytes / self.machine.network.bandwidth_bytes_per_s
            tasks.append(Task(name="receive batch", phase=Phase.DATA, resource="network in", seconds=seconds, hidden=True))
        assemble_s = dispatch.assemble_batch_s(work, software, setup, has_devices=self.has_devices)
        if not self.has_devices:
            seconds = assemble_s + dispatch.cpu_operators_s(software, setup, num_remote=len(self.off_devices))
            return [*tasks, Task(name="dispatch", phase=Phase.DATA, resource="host cores", seconds=seconds)]
        counts = {"num_on_devices": len(self.on_devices), "num_off_devices": len(self.off_devices)}
        launches_s = dispatch.launches_s(work, software, setup, **counts, through_host=self.through_host)
        # the ids of tables in other memories stay on the host
        copied_bytes = setup.batch_size * work.input_bytes_with(self.on_devices) if setup.has_input else 0.0
        num_copies = 1 + dispatch.copies_per_table(software) * len(self.on_devices) / self.num_sharing
        copied = self.on_link("copy batch", Phase.DATA, copied_bytes, after=("assemble batch",), num_copies=num_copies)
        ahead = software.runs_ahead  # the device never waits for the host as long as the host keeps up
        assembled = ("assemble batch",)
        return [
            *tasks,
            Task(name="assemble batch", phase=Phase.DATA, resource="dispatch", seconds=assemble_s, hidden=ahead),
            Task(name="dispatch", phase=Phase.DATA, resource="dispatch", seconds=launches_s, after=assembled, hidden=ahead),
            replace(copied, hidden=software.overlap_input),
        ]

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

    def overhead_tasks(self) -> list[Task]:
        """What a measured step takes besides its parts."""
        if self.processor.timings is None:
            return []
        seconds = self.processor.timings.dense.fixed_s + cost.fill_s(self.processor, self.work, self.setup.batch_size)
        return [self.compute_task("step overhead", Phase.DATA, seconds, after=self.ready)] if seconds else []

    # caches

    def cache_tasks(self) -> list[Task]:
        """Ids of cached tables are mapped to cache slots; where the same cores transfer rows, that slows the step down."""
        timings = self.processor.timings
        if not self.setup.behind:
            return []
        assert timings is not None, "only a measured machine has cached tables"
        names = {one.table for one in self.setup.behind}
        num_ids = self.setup.batch_size * sum(table.ids_per_sample for table in self.on_devices if table.name in names)
        found_s, tasks = num_ids * timings.place_id_s, list[Task]()
        if self.has_devices:  # threads of the dispatching process plan, one at a time since they share its interpreter
            planned_s = sum(timings.place_batch_s + timings.place_set_s / group.set_size for group in self.behind)
            ahead = self.software.runs_ahead
            tasks.append(
                Task(name="plan cache transfers", phase=Phase.PREFETCH, resource="dispatch", seconds=planned_s, hidden=ahead)
            )
        else:
            found_s += timings.place_batch_s
        tasks.append(self.compute_task("find cache slots", Phase.PREFETCH, found_s, after=self.ready))
        if timings.move_share:
            seconds = timings.move_share * self.transfer_s
            tasks.append(self.compute_task("slowed by cache transfers", Phase.PREFETCH, seconds, after=self.ready))
        return tasks

    def cache_transfer_tasks(self, in_step: Sequence[Task]) -> list[Task]:
        """Missing rows are fetched, and evicted ones written back, during earlier steps."""
        if not self.setup.behind:
            return []
        timings = self.processor.timings
        assert timings is not None
        own_s = sum(task.seconds for task in in_step if task.resource == self.compute and not task.hidden)
        slowed_s = timings.move_share * (own_s - timings.move_share * self.transfer_s)
        return [
            Task(
                name="transfer cache rows",
                phase=Phase.PREFETCH,
                resource="cache transfers",
                seconds=self.transfer_s,
                hidden=True,
                busy_s=self.transfer_s + slowed_s if self.transfer_s else 0.0,
            )
        ]

    @functools.cached_property
    def behind(self) -> list[caching.CacheModel]:
        """Cached tables, grouped by width."""
        return caching.build_cache_models(self.on_devices, self.setup, in_sets=self.has_devices)

    @functools.cached_property
    def transfer_s(self) -> float:
        """Seconds per step to transfer rows between the caches and the memory behind them."""
        timings, is_file = self.processor.timings, not self.has_devices
        assert timings is not None
        assert timings.move_row is not None
        seconds = 0.0
        for group in self.behind:
            num_rows = group.missing_rows
            seconds += num_rows * timings.move_row.at(group.row_bytes)
            seconds += group.num_reads(num_rows) * timings.move_read_s if is_file else 0.0
        return seconds

    # rows

    def lookup_tasks(self) -> list[Task]:
        """Rows are read and pooled where they live, and the pooled vectors are sent to the devices."""
        tasks = self.grouping_tasks()
        if self.on_devices:
            seconds = self.on_devices_s(update=False)
            tasks.append(self.compute_task("look up", Phase.LOOKUP, seconds, after=self.ready))
            tasks += links.exchange(self, "pooled", after="look up")
        if self.off_devices and self.setup.placement == "remote":
            tasks += remote.request(self, after=self.ready)
        elif self.off_devices:
            seconds = self.in_host_s(update=False)
            tasks.append(
                Task(name="host look up", phase=Phase.LOOKUP, resource="host memory", seconds=seconds, after=self.ready)
            )
            tasks += links.exchange_from_hosts(self, "pooled", after="host look up")
            tasks.append(self.host_copy("copy pooled", Phase.EXCHANGE, after=("host look up", "send host pooled")))
        return tasks

    def grouping_tasks(self) -> list[Task]:
        """A measured device groups ids by row for the update while it looks up and multiplies, which slows those down."""
        timings = self.processor.timings
        if timings is None or timings.plan is None or not self.on_devices:
            return []
        num_ids = self.setup.batch_size * sum(table.ids_per_sample for table in self.on_devices)
        seconds = timings.plan.at(max(1.0, num_ids))
        side, slowed_s = f"{self.compute} side stream", timings.plan_factor * seconds
        return [
            Task(name="group ids", phase=Phase.LOOKUP, resource=side, seconds=seconds, after=self.ready),
            self.compute_task("slowed by grouping", Phase.LOOKUP, slowed_s, after=self.ready),
        ]

    # forward and backward

    def forward_tasks(self) -> list[Task]:
        """Bottom MLP, interaction and top MLP; the bottom MLP may run while pooled vectors are on their way."""
        tasks = [self.compute_task("bottom MLP forward", Phase.FORWARD, self.bottom_s(passes=1), after=self.ready)]
        if self.off_devices and self.setup.placement == "remote":
            tasks += remote.unpack(self)
        arrived = (
            "look up",
            "exchange pooled",
            "send pooled",
            "copy pooled to device",
            "copy pooled",
            *remote.pieces("unpack"),
        )
        after = ("bottom MLP forward", *arrived)
        return [*tasks, self.compute_task("top MLP forward", Phase.FORWARD, self.top_s(passes=1), after=after)]

    def backward_tasks(self) -> list[Task]:
        """Gradients of pooled vectors go to where rows live; the bottom MLP's backward pass overlaps with that."""
        top = "top MLP backward"
        tasks = [self.compute_task(top, Phase.BACKWARD, self.top_s(passes=2), after=("top MLP forward",))]
        if self.on_devices:
            tasks += links.exchange(self, "gradients", after=top)
        if self.off_devices and self.has_devices:
            tasks.append(self.host_copy("copy gradients", Phase.EXCHANGE, after=(top,)))
        tasks.append(self.compute_task("bottom MLP backward", Phase.BACKWARD, self.bottom_s(passes=2), after=(top,)))
        if self.on_devices:
            arrived = (top, "group ids", "exchange gradients", "send gradients", "copy gradients to device")
            tasks.append(self.compute_task("update rows", Phase.ROW_UPDATE, self.on_devices_s(update=True), after=arrived))
        if self.off_devices and self.setup.placement == "remote":
            tasks += remote.push(self, after=(top, "copy gradients"))
        elif self.off_devices:
            tasks += links.exchange_from_hosts(self, "gradients", after="copy gradients")
            sent, seconds = ("copy gradients", "send host gradients"), self.in_host_s(update=True)
            tasks.append(Task(name="host update", phase=Phase.ROW_UPDATE, resource="host memory", seconds=seconds, after=sent))
        return tasks

    def dense_update_tasks(self) -> list[Task]:
        """Dense gradients are all-reduced and the optimizer steps; or parameters are averaged every few steps."""
        bottom = "bottom MLP backward"
        after = (bottom, "all-reduce", "all-reduce servers", "copy dense gradients to device")
        update_s = cost.dense_update_s(self.processor, self.work)
        return [
            *links.all_reduce(self, after=bottom),
            self.compute_task("dense update", Phase.DENSE_UPDATE, update_s, after=after),
            *(remote.average(self, after="dense update") if self.setup.num_dense_servers else ()),
        ]

    def compute_task(self, name: str, phase: Phase, seconds: float, *, after: tuple[str, ...]) -> Task:
        """A task of what does the arithmetic."""
        return Task(name=name, phase=phase, resource=self.compute, seconds=seconds, after=after)

    def bottom_s(self, *, passes: int) -> float:
        """Seconds of the bottom MLP: one pass forward, two backward."""
        work, processor, batch_size = self.work, self.processor, self.setup.batch_size
        return cost.layers_s(processor, work, work.bottom, batch_size, self.precision, passes=passes)

    def top_s(self, *, passes: int) -> float:
        """Seconds of interaction and top MLP: one pass forward, two backward."""
        work, processor, batch_size, precision = self.work, self.processor, self.setup.batch_size, self.precision
        layers_s = cost.layers_s(processor, work, work.top, batch_size, precision, passes=passes)
        return layers_s + cost.interaction_s(processor, work, batch_size, precision, passes=passes)
