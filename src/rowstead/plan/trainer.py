"""The step of one training server as tasks on its resources, for every placement of the tables."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rowstead.plan import cache_tasks, cost, links, remote
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
            *cache_tasks.find_slots(self),
            *self.lookup_tasks(),
            *self.forward_tasks(),
            *self.backward_tasks(),
            *self.dense_update_tasks(),
        ]
        return [*in_step, *cache_tasks.transfers(self, in_step)]

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
            tasks.append(Task("receive batch", Phase.DATA, "network in", seconds, hidden=True))
        if not self.has_devices:
            seconds = self.assemble_batch_s + self.cpu_operators_s
            return [*tasks, Task("dispatch", Phase.DATA, "host cores", seconds)]
        # the ids of tables in other memories stay on the host
        copied_bytes = setup.batch_size * work.input_bytes_with(self.on_devices) if setup.has_input else 0.0
        num_copies = 1 + self.copies_per_table * len(self.on_devices) / self.num_sharing
        copied = self.on_link("copy batch", Phase.DATA, copied_bytes, after=("assemble batch",), num_copies=num_copies)
        ahead = software.runs_ahead  # the device never waits for the host as long as the host keeps up
        return [
            *tasks,
            Task("assemble batch", Phase.DATA, "dispatch", self.assemble_batch_s, hidden=ahead),
            Task("dispatch", Phase.DATA, "dispatch", self.launches_s, after=("assemble batch",), hidden=ahead),
            replace(copied, hidden=software.overlap_input),
        ]

    def overhead_tasks(self) -> list[Task]:
        """What a measured step takes besides its parts."""
        if self.processor.timings is None:
            return []
        seconds = self.processor.timings.dense.fixed_s + cost.fill_s(self.processor, self.work, self.setup.batch_size)
        return [self.compute_task("step overhead", Phase.DATA, seconds, after=self.ready)] if seconds else []

    # rows

    def lookup_tasks(self) -> list[Task]:
        """Rows are read and pooled where they live, and the pooled vectors are sent to the devices."""
        tasks = self.grouping_tasks()
        if self.on_devices:
            tasks.append(self.compute_task("look up", Phase.LOOKUP, self.on_devices_s(update=False), after=self.ready))
            tasks += links.exchange(self, "pooled", after="look up")
        if self.off_devices and self.setup.placement == "remote":
            tasks += remote.request(self, after=self.ready)
        elif self.off_devices:
            tasks.append(Task("host look up", Phase.LOOKUP, "host memory", self.in_host_s(update=False), after=self.ready))
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
            Task("group ids", Phase.LOOKUP, side, seconds, after=self.ready),
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
            sent = ("copy gradients", "send host gradients")
            tasks.append(Task("host update", Phase.ROW_UPDATE, "host memory", self.in_host_s(update=True), after=sent))
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

    def bottom_s(self, *, passes: int) -> float:
        """Seconds of the bottom MLP: one pass forward, two backward."""
        work, processor, batch_size = self.work, self.processor, self.setup.batch_size
        return cost.layers_s(processor, work, work.bottom, batch_size, self.precision, passes=passes)

    def top_s(self, *, passes: int) -> float:
        """Seconds of interaction and top MLP: one pass forward, two backward."""
        work, processor, batch_size, precision = self.work, self.processor, self.setup.batch_size, self.precision
        layers_s = cost.layers_s(processor, work, work.top, batch_size, precision, passes=passes)
        return layers_s + cost.interaction_s(processor, work, batch_size, precision, passes=passes)
