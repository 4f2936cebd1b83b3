"""One server that trains, as the tasks of its step on its resources, wherever its tables live."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rowstead.plan import caching, cost, dispatch, links, remote
from rowstead.plan.schedule import Task
from rowstead.plan.trainer_node import TrainerNode


@dataclass(frozen=True, kw_only=True)
class TrainerStep(TrainerNode):
    """One server that trains, as the tasks of its step."""

    def tasks(self) -> list[Task]:
        """The step, in the order in which its tasks are issued."""
        in_step = [
            *self.reading(),
            *self.finding_places(),
            *self.looking_up(),
            *self.dense(),
            *self.going_back(),
            *self.synchronising(),
        ]
        return [*in_step, *self.moving(in_step)]

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
        num_copies = 1 + dispatch.copies_per_table(software) * len(self.on_devices) / self.num_sharing
        copied = self.on_link("copy batch", copied_bytes, after=("hand over",), num_copies=num_copies)
        ahead = software.runs_ahead  # then nothing waits for the host, as long as it keeps up
        return [
            *tasks,
            Task(name="hand over", resource="dispatch", seconds=hand_over_s, hidden=ahead),
            Task(name="dispatch", resource="dispatch", seconds=launches_s, after=("hand over",), hidden=ahead),
            replace(copied, hidden=software.overlap_input),
        ]

    @property
    def ready(self) -> tuple[str, ...]:
        """What must have ended before anything is computed: on a CPU dispatching takes the cores, on accelerators it goes on meanwhile.

        But not where the host has to wait for what they send up before it can go on: then launches and their work take turns.
        """
        if not self.has_devices:
            return ("dispatch",)
        takes_turns = (
            bool(self.off_devices)
            or (self.through_host and self.setup.num_devices > 1)
            or (self.setup.num_in_step > 1 and not self.network.direct)
        )
        return ("hand over", "copy batch", *(("dispatch",) if takes_turns else ()))

    # rows

    def finding_places(self) -> list[Task]:
        """Ids of tables behind caches are named by the places of their rows; where rows are moved by the same cores, that slows a step down."""
        timings = self.processor.timings
        if not self.setup.behind:
            return []
        assert timings is not None, "only measured times say what a cache costs"
        names = {one.table for one in self.setup.behind}
        num_ids = self.setup.batch_size * sum(table.ids_per_sample for table in self.on_devices if table.name in names)
        placed_s, tasks = num_ids * timings.place_id_s, list[Task]()
        if self.has_devices:  # threads of the program that dispatches plan, one at a time since they share its interpreter
            planned_s = sum(timings.place_batch_s + timings.place_set_s / group.set_size for group in self.behind)
            tasks.append(Task(name="plan rows", resource="dispatch", seconds=planned_s, hidden=self.software.runs_ahead))
        else:
            placed_s += timings.place_batch_s
        tasks.append(Task(name="find places", resource=self.compute, seconds=placed_s, after=self.ready))
        if timings.move_share:
            seconds = timings.move_share * self.moved_s
            tasks.append(Task(name="slowed by moving rows", resource=self.compute, seconds=seconds, after=self.ready))
        return tasks

    def moving(self, in_step: Sequence[Task]) -> list[Task]:
        """Rows that caches lack are brought in, and others written back, while steps before are trained on."""
        if not self.setup.behind:
            return []
        timings = self.processor.timings
        assert timings is not None
        own_s = sum(task.seconds for task in in_step if task.resource == self.compute and not task.hidden)
        slowed_s = timings.move_share * (own_s - timings.move_share * self.moved_s)
        return [
            Task(
                name="move rows",
                resource="rows behind caches",
                seconds=self.moved_s,
                hidden=True,
                busy_s=self.moved_s + slowed_s if self.moved_s else 0.0,
            )
        ]

    @functools.cached_property
    def behind(self) -> list[caching.CacheModel]:
        """Tables behind caches, those of one width together."""
        return caching.groups_of(self.on_devices, self.setup, in_sets=self.has_devices)

    @functools.cached_property
    def moved_s(self) -> float:
        """Seconds of whatever moves rows between caches and what is behind them, for one step."""
        timings, is_file = self.processor.timings, not self.has_devices
        assert timings is not None
        assert timings.move_row is not None
        seconds = 0.0
        for group in self.behind:
            num_rows = group.missing_rows
            seconds += num_rows * timings.move_row.at(group.row_bytes)
            seconds += group.num_reads(num_rows) * timings.move_read_s if is_file else 0.0
        return seconds

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
