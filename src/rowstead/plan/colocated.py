"""A fleet whose trainers, servers and readers are processes of one machine: each has one thread, and all share the cores.

What crosses a network elsewhere is copied by cores here, so a message is work of both ends. One request goes to each server for a look-up,
and one for an update. With one step in flight a look-up waits until the update before it is done, as without staleness; with more it is
answered while the trainer is at work on another batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rowstead.plan import cost
from rowstead.plan.cost import Processor, host_processor
from rowstead.plan.schedule import Task, busy_s, faster, period_s
from rowstead.plan.trainer import TrainerStep
from rowstead.plan.work import TableWork
from rowstead.spec.sharing import Sharing

SERVERS, DENSE, READERS = "sparse servers", "dense servers", "readers"
SENT_ID_BYTES = 4
"""Of an id that travels."""
ROWS_SHARE = 0.75
"""Distinct rows travel instead of ids and pooled vectors where they take this share of the bytes or less, there and back; then the trainer does
what else the server does."""
NUM_SERVED = 2
"""Requests of a step to each server: while one is waited for, no core is at work."""
SHARPNESS = 4.0
"""How sharply the slower of two limits decides: a step is a little longer than the longer one where they are equal. Of 18 fleets on two cores it
gave 4 % from the processor time that they had used, and the longer one alone 7 %."""


@dataclass(frozen=True, kw_only=True)
class ColocatedTrainer(TrainerStep):
    """One trainer of such a fleet, as the tasks of its step; those of the others are alike."""

    @property
    def compute(self) -> str:
        return "trainer"

    @property
    def sharing(self) -> Sharing:
        """What was measured of such processes."""
        assert self.software.sharing is not None, "predict refuses machines on which it was not measured"
        return self.software.sharing

    @functools.cached_property
    def processor(self) -> Processor:
        """One core."""
        processor, sharing = host_processor(self.machine, self.software), self.sharing
        assert processor.timings is not None, "whoever measures processes that share cores measures the parts of a step"
        phases = {name: getattr(sharing, name) for name in ("dense", "lookup", "update", "dense_optimizer")}
        return replace(processor, timings=dataclasses.replace(processor.timings, layers=(sharing.layers,), **phases))

    @property
    def is_exact(self) -> bool:
        """Whether a look-up waits for the update before it."""
        return self.setup.in_flight == 1

    @property
    def ready(self) -> tuple[str, ...]:
        return ()

    def tasks(self) -> list[Task]:
        """The step, in the order in which its tasks are issued."""
        return self.shared([*self.reading(), *self.looking_up(), *self.dense(), *self.synchronising(), *self.going_back()])

    def reading(self) -> list[Task]:
        """A reader hands over the batch, ready to be trained on, while the batch before is trained on."""
        if not self.setup.has_input:
            return []
        numbers = 4 * self.work.num_dense + 4
        num_bytes = self.server_batch * (numbers + SENT_ID_BYTES * self.work.ids_per_sample)
        seconds = self.sharing.handing.seconds(num_calls=1, num_bytes=num_bytes)
        return [Task(name="receive batch", resource=READERS, seconds=seconds, hidden=True)]

    def looking_up(self) -> list[Task]:
        """Every server is asked, and pools what it has; what comes back is put together."""
        asking, count = self.sharing.asking, self.setup.num_sparse_servers
        return [
            *([] if self.is_exact else [self.cut(after=())]),
            Task(name="ask", resource=self.compute, seconds=asking.seconds(num_calls=count)),
            self.served("serve", update=False, after=("ask",)),
            Task(name="take answers", resource=self.compute, seconds=self.vectors_s, after=("serve",)),
        ]

    def dense(self) -> list[Task]:
        """The dense part begins when all answers are there."""
        work, batch, processor, precision = self.work, self.setup.batch_size, self.processor, self.precision
        layers_s = sum(cost.layers_s(processor, work, layers, batch, precision, passes=3) for layers in (work.bottom, work.top))
        meet_s = cost.interaction_s(processor, work, batch, precision, passes=3)
        after = ("take answers",)
        return [*self.beside(), Task(name="dense", resource=self.compute, seconds=layers_s + meet_s, after=after)]

    def synchronising(self) -> list[Task]:
        """Now and then the dense parameters go to the dense server, and a difference comes back that is added; then the optimizer steps."""
        return [
            *(self.average() if self.setup.num_dense_servers else ()),
            Task(
                name="dense update",
                resource=self.compute,
                seconds=cost.dense_update_s(self.processor, self.work),
                after=("dense", "average dense"),
            ),
        ]

    def average(self) -> list[Task]:
        """An exchange with the centre, of each step its share."""
        seconds = self.sharing.averaging.seconds(num_calls=1, num_bytes=self.work.dense_bytes) / self.setup.sync_every
        busy = seconds * self.setup.num_trainers
        return [Task(name="average dense", resource=DENSE, seconds=seconds, busy_s=busy, after=("dense",))]

    def going_back(self) -> list[Task]:
        """Gradients go to the servers, which apply them while the next batch is cut; an exact look-up waits for that."""
        seconds = self.sharing.asking.seconds(num_calls=self.setup.num_sparse_servers) + self.vectors_s
        applied = self.served("apply gradients", update=True, after=("send gradients",))
        return [
            Task(name="send gradients", resource=self.compute, seconds=seconds, after=("dense update",)),
            replace(applied, hidden=not self.is_exact),
            *([self.cut(after=("send gradients",))] if self.is_exact else []),
        ]

    def cut(self, *, after: tuple[str, ...]) -> Task:
        """The ids of a batch are sorted by servers, and those that repeat are found."""
        asking, answering, batch = self.sharing.asking, self.sharing.answering, self.server_batch
        ids_here = sum(table.ids_per_sample for table in self.pooled_here)
        seconds = asking.seconds(num_ids=batch * self.work.ids_per_sample) + answering.seconds(num_ids=batch * ids_here)
        return Task(name="cut batch", resource=self.compute, seconds=seconds, after=after)

    def served(self, name: str, *, update: bool, after: tuple[str, ...]) -> Task:
        """What each sparse server does for a batch, with the messages; for each trainer in turn."""
        count, tables, processor = self.setup.num_sparse_servers, self.off_devices, self.processor
        batch, there = self.server_batch / count, [table for table in tables if table not in self.pooled_here]
        if update:
            rows_s = cost.update_s(processor, tables, batch, self.software, num_sharing=count)
        else:
            rows_s = cost.lookup_s(processor, tables, batch, num_sharing=count)
        messages_s = self.sharing.answering.seconds(
            num_calls=1,
            num_ids=0.0 if update else batch * sum(table.ids_per_sample for table in there),
            num_bytes=batch * sum(table.pooled_bytes for table in there),
        )
        seconds = rows_s + messages_s + self.sharing.waiting_s
        return Task(name=name, resource=SERVERS, seconds=seconds, busy_s=seconds * self.setup.num_trainers, after=after)

    @property
    def vectors_s(self) -> float:
        """What the trainer does with pooled vectors, or with their gradients."""
        bytes_here = sum(table.pooled_bytes for table in self.pooled_here)
        asked_s = self.sharing.asking.seconds(num_bytes=self.server_batch * self.work.pooled_bytes)
        return asked_s + self.sharing.answering.seconds(num_bytes=self.server_batch * bytes_here)

    @functools.cached_property
    def pooled_here(self) -> tuple[TableWork, ...]:
        """Tables of which rows travel, since many repeat in a batch."""
        return tuple(table for table in self.off_devices if rows_travel(table, self.server_batch))

    def shared(self, tasks: Sequence[Task]) -> list[Task]:
        """The same tasks on cores that are everybody's.

        The more cores are busy the longer each task takes; and all processes together cannot be faster than all cores are. Nor are
        they as fast as the slower of the two: the nearer the time of one step alone is to that of all cores, the more often a thread that
        could go on waits for a core, and a core for a thread.
        """
        setup, cores, crowding = self.setup, self.machine.host.num_cores, self.sharing.crowding
        alone_s = period_s(tasks, in_flight=setup.in_flight)
        of_one = busy_s([replace(task, busy_s=None) for task in tasks])
        of_one[SERVERS] = setup.num_sparse_servers * (of_one[SERVERS] - NUM_SERVED * self.sharing.waiting_s)
        all_s = setup.num_trainers * sum(of_one.values())
        others = min(1.0, max(0.0, all_s / alone_s - 1) / (cores - 1)) if cores > 1 else 0.0
        slowed = faster(tasks, of_one, 1 + (crowding - 1) * others)
        alone_s = period_s(slowed, in_flight=setup.in_flight)
        busiest_s = crowding * all_s / cores if cores > 1 else all_s
        if cores > 1:  # one alone is never idle
            near = min(alone_s, busiest_s) / max(alone_s, busiest_s)
            waiting = (1 + near**SHARPNESS) ** (1 / SHARPNESS)
            if busiest_s < alone_s:
                slowed = faster(slowed, of_one, waiting)
            else:
                busiest_s *= waiting
        return [*slowed, Task(name="all processes", resource="shared cores", seconds=busiest_s, hidden=True)]


def rows_travel(table: TableWork, batch_size: float) -> bool:
    """Whether the different rows of a batch travel, and their gradients back, instead of ids and pooled vectors."""
    rows = table.distinct_rows(batch_size) * (SENT_ID_BYTES + 2 * table.row_bytes)
    pooled = batch_size * (SENT_ID_BYTES * table.ids_per_sample + table.num_features + 2 * table.pooled_bytes)
    return rows <= ROWS_SHARE * pooled
