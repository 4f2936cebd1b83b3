"""One server that trains, as the tasks of its step on its resources, wherever its tables live."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rowstead.plan import cost, dispatch, links, remote
from rowstead.plan.schedule import Task
from rowstead.plan.site import Site


@dataclass(frozen=True, kw_only=True)
class Trainer(Site):
    """One server that trains, as the tasks of its step."""

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
            tasks.append(self.on_cores("unpack batch", batch_bytes, after=(), hidden=True))
        if setup.has_input and self.machine.network is not None:
            seconds = batch_bytes / self.machine.network.bandwidth_bytes_per_s
            tasks.append(Task(name="receive batch", resource="network in", seconds=seconds, hidden=True))
        hand_over_s = dispatch.hand_over_s(work, software, setup, has_devices=self.has_devices)
        if not self.has_devices:
            seconds = hand_over_s + dispatch.cpu_operators_s(software, setup, num_remote=len(self.off_devices))
            return [*tasks, Task(name="dispatch", resource="host cores", seconds=seconds)]
        counts = {"num_on_devices": len(self.on_devices), "num_off_devices": len(self.off_devices)}
        launches_s = dispatch.launches_s(work, software, setup, **counts, through_host=self.through_host)
        # ids of tables that are elsewhere stay on the host
        copied_bytes = setup.batch_size * work.input_bytes_with(self.on_devices) if setup.has_input else 0.0
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

    # rows

    def moving(self) -> list[Task]:
        """Rows that caches lack are brought in while steps before are trained on; ids are named by their places."""
        timings, batch_size = self.processor.timings, self.setup.batch_size
        if not self.setup.behind:
            return []
        assert timings is not None, "only measured times say what a cache costs"
        assert timings.move_row is not None
        table_of = {table.name: table for table in self.on_devices}
        placed_s, moved_s = timings.place_batch_s, 0.0
        for one in self.setup.behind:
            table = table_of[one.table]
            kept = one.kept_share * table.num_rows + table.distinct_rows(batch_size)  # what is under way stays a while
            num_moved = min(table.distinct_beyond(kept, batch_size), table.distinct_rows(batch_size))
            placed_s += batch_size * table.ids_per_sample * timings.place_id_s
            moved_s += num_moved * timings.move_row.at(table.row_bytes + table.state_bytes)
        return [
            Task(name="find places", resource=self.compute, seconds=placed_s, after=self.ready),
            Task(name="move rows", resource="rows behind caches", seconds=moved_s, hidden=True),
        ]

    def looking_up(self) -> list[Task]:
        """Rows are read and pooled where they live, and the pooled vectors brought to the devices."""
        tasks = self.beside()
        if self.on_devices:
            seconds = self.on_devices_s(update=False)
            tasks.append(Task(name="look up", resource=self.compute, seconds=seconds, after=self.ready))
            tasks += links.exchange(self, "pooled", after="look up")
        if self.off_devices and self.setup.place == "remote":
            tasks += remote.request(self, after=self.ready)
        elif self.off_devices:
            seconds = self.in_host_s(update=False)
            tasks.append(Task(name="host look up", resource="host memory", seconds=seconds, after=self.ready))
            tasks += links.exchange_from_hosts(self, "pooled", after="host look up")
            tasks.append(self.host_copy("copy pooled", after=("host look up", "send host pooled")))
        return tasks

    def beside(self) -> list[Task]:
        """What a step takes besides its parts, and what a device does for the update while it looks up and multiplies."""
        timings, tasks = self.processor.timings, []
        if timings is None:
            return []
        else_s = timings.dense.fixed_s + cost.fill_s(self.processor, self.work, self.setup.batch_size)
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

    # the dense part

    def dense(self) -> list[Task]:
        """Bottom MLP, interaction, top MLP and back; the bottom MLP may run while rows are on their way."""
        work, setup, processor, precision = self.work, self.setup, self.processor, self.precision
        bottom_s = cost.layers_s(processor, work, work.bottom, setup.batch_size, precision, passes=1)
        tasks = [Task(name="bottom", resource=self.compute, seconds=bottom_s, after=self.ready)]
        if self.off_devices and setup.place == "remote":
            tasks += remote.unpack(self)
        arrived = (
            "look up",
            "exchange pooled",
            "send pooled",
            "lower pooled",
            "copy pooled",
            *remote.pieces("unpack"),
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
            tasks += links.exchange(self, "gradients", after="top")
        if self.off_devices and self.has_devices:
            tasks.append(self.host_copy("copy gradients", after=("top",)))
        bottom_s = cost.layers_s(processor, work, work.bottom, setup.batch_size, self.precision, passes=2)
        tasks.append(Task(name="bottom back", resource=self.compute, seconds=bottom_s, after=("top",)))
        if self.on_devices:
            exchanged = ("top", "plan update", "exchange gradients", "send gradients", "lower gradients")
            seconds = self.on_devices_s(update=True)
            tasks.append(Task(name="update rows", resource=self.compute, seconds=seconds, after=exchanged))
        if self.off_devices and setup.place == "remote":
            tasks += remote.push(self)
        elif self.off_devices:
            tasks += links.exchange_from_hosts(self, "gradients", after="copy gradients")
            came = ("copy gradients", "send host gradients")
            tasks.append(Task(name="host update", resource="host memory", seconds=self.in_host_s(update=True), after=came))
        return tasks

    def synchronising(self) -> list[Task]:
        """Dense gradients are summed over devices and servers, or parameters averaged now and then, and the optimizer steps."""
        after = ("bottom back", "all-reduce", "all-reduce servers", "lower sums")
        update_s = cost.dense_update_s(self.processor, self.work)
        return [
            *links.all_reduce(self, after="bottom back"),
            Task(name="dense update", resource=self.compute, seconds=update_s, after=after),
            *(remote.average(self, after="dense update") if self.setup.num_dense_servers else ()),
        ]
