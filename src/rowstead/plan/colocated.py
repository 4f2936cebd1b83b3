"""A fleet whose trainers, servers and readers are single-threaded processes that share the cores of one machine.

Messages are copied by cores instead of a network, so a message is work for both ends. Each server gets one request per look-up and one
per update. With one step in flight a look-up waits for the previous update (no staleness); with more it is answered while the trainer
works on another batch.
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
from rowstead.spec.phases import STEP, Phase
from rowstead.spec.sharing import Sharing
from rowstead.spec.stores import ROWS_SHARE
from rowstead.spec.sync import SYNC_MODES

SERVERS, DENSE, READERS = "sparse servers", "dense servers", "readers"
SENT_ID_BYTES = 4
"""Bytes of an id in a message."""
NUM_SERVED = 2
"""Requests per step to each server; no core works during the waiting time of one."""
SHARPNESS = 4.0
"""Exponent of the smooth maximum of two limits: where they are equal, a step takes a little longer than either. On 18 fleets with two cores
the error was 4 % with it and 7 % with the plain maximum, given the processor time that they had used."""


@dataclass(frozen=True, kw_only=True)
class ColocatedTrainer(TrainerStep):
    """One trainer of such a fleet and the tasks of its step; all trainers are alike."""

    @property
    def compute(self) -> str:
        return "trainer"

    @property
    def sharing(self) -> Sharing:
        """Measured times of such processes."""
        assert self.software.sharing is not None, "predict rejects machines without these measurements"
        return self.software.sharing

    @functools.cached_property
    def processor(self) -> Processor:
        """One core."""
        processor, sharing = host_processor(self.machine, self.software), self.sharing
        assert processor.timings is not None, "calibration measures `sharing` together with `timings`"
        phases = {name: getattr(sharing, name) for name in ("dense", "lookup", "update", "dense_optimizer")}
        return replace(processor, timings=dataclasses.replace(processor.timings, layers=(sharing.layers,), **phases))

    @property
    def is_exact(self) -> bool:
        """Whether a look-up waits for the previous update."""
        return self.setup.in_flight == 1

    @property
    def ready(self) -> tuple[str, ...]:
        return ()

    def tasks(self) -> list[Task]:
        """The step, in the order in which its tasks are issued."""
        in_step = [
            *self.input_tasks(),
            *self.overhead_tasks(),
            *self.lookup_tasks(),
            *self.grouping_tasks(),
            *self.dense_tasks(),
            *self.dense_update_tasks(),
            *self.row_update_tasks(),
        ]
        return self.on_shared_cores(in_step)

    def input_tasks(self) -> list[Task]:
        """A reader sends the next batch during the current step."""
        if not self.setup.has_input:
            return []
        numbers = 4 * self.work.num_dense + 4
        num_bytes = self.server_batch * (numbers + SENT_ID_BYTES * self.work.ids_per_sample)
        seconds = self.sharing.handing.seconds(num_calls=1, num_bytes=num_bytes)
        return [Task("receive batch", Phase.DATA, READERS, seconds, hidden=True)]

    def lookup_tasks(self) -> list[Task]:
        """Every server gets a request and pools its rows; the trainer merges the replies."""
        asking, count = self.sharing.asking, self.setup.num_sparse_servers
        return [
            *([] if self.is_exact else [self.partition_ids(Phase.LOOKUP, after=())]),
            self.compute_task("send requests", Phase.LOOKUP, asking.seconds(num_calls=count), after=()),
            self.served("serve", Phase.LOOKUP, update=False, after=("send requests",)),
            self.compute_task("merge replies", Phase.LOOKUP, self.vectors_s, after=("serve",)),
        ]

    def dense_tasks(self) -> list[Task]:
        """Forward and backward pass of the dense part, once all replies have arrived."""
        forward_s, backward_s = (self.bottom_s(passes=passes) + self.top_s(passes=passes) for passes in (1, 2))
        return [
            self.compute_task("dense forward", Phase.FORWARD, forward_s, after=("merge replies",)),
            self.compute_task("dense backward", Phase.BACKWARD, backward_s, after=("dense forward",)),
        ]

    def dense_update_tasks(self) -> list[Task]:
        """Every `sync_every` steps dense parameters are averaged with the dense server; then the optimizer steps."""
        seconds, after = cost.dense_update_s(self.processor, self.work), ("dense backward", "average dense")
        return [
            *(self.average() if self.setup.num_dense_servers else ()),
            self.compute_task("dense update", Phase.DENSE_UPDATE, seconds, after=after),
        ]

    def average(self) -> list[Task]:
        """Averaging with the dense server; each step is charged its share."""
        mode = SYNC_MODES[self.setup.sync]
        period = 1 if mode.every_step else self.setup.sync_every
        seconds = self.sharing.averaging.seconds(num_calls=1, num_bytes=self.work.dense_bytes) / period
        busy, hidden = seconds * self.setup.num_trainers, mode.in_background
        return [Task("average dense", Phase.SYNC, DENSE, seconds, busy_s=busy, after=("dense backward",), hidden=hidden)]

    def row_update_tasks(self) -> list[Task]:
        """Gradients go to the servers, which apply them while the next batch is partitioned; an exact look-up waits for that."""
        seconds = self.sharing.asking.seconds(num_calls=self.setup.num_sparse_servers) + self.vectors_s
        applied = self.served("apply gradients", Phase.ROW_UPDATE, update=True, after=("send gradients",))
        return [
            self.compute_task("send gradients", Phase.ROW_UPDATE, seconds, after=("dense update",)),
            replace(applied, hidden=not self.is_exact),
            *([self.partition_ids(Phase.ROW_UPDATE, after=("send gradients",))] if self.is_exact else []),
        ]

    def partition_ids(self, phase: Phase, *, after: tuple[str, ...]) -> Task:
        """The ids of a batch are partitioned by server and deduplicated; an exact look-up does that for the next batch."""
        asking, answering, batch = self.sharing.asking, self.sharing.answering, self.server_batch
        ids_here = sum(table.ids_per_sample for table in self.pooled_here)
        seconds = asking.seconds(num_ids=batch * self.work.ids_per_sample) + answering.seconds(num_ids=batch * ids_here)
        return self.compute_task("partition ids", phase, seconds, after=after)

    def served(self, name: str, phase: Phase, *, update: bool, after: tuple[str, ...]) -> Task:
        """What each sparse server does for a batch, messages included, for one trainer after the other."""
        count, tables = self.setup.num_sparse_servers, self.off_devices
        batch, pooled = self.server_batch / count, [table for table in tables if table not in self.pooled_here]
        rows_s = self.rows_s(self.processor, tables, batch, count, update=update)
        messages_s = self.sharing.answering.seconds(
            num_calls=1,
            num_ids=0.0 if update else batch * sum(table.ids_per_sample for table in pooled),
            num_bytes=batch * sum(table.pooled_bytes for table in pooled),
        )
        seconds = rows_s + messages_s + self.sharing.waiting_s
        busy = seconds * self.setup.num_trainers
        return Task(name, phase, SERVERS, seconds, busy_s=busy, after=after)

    @property
    def vectors_s(self) -> float:
        """Seconds of the trainer to read pooled vectors from messages, or to write their gradients."""
        bytes_here = sum(table.pooled_bytes for table in self.pooled_here)
        merged_s = self.sharing.asking.seconds(num_bytes=self.server_batch * self.work.pooled_bytes)
        return merged_s + self.sharing.answering.seconds(num_bytes=self.server_batch * bytes_here)

    @functools.cached_property
    def pooled_here(self) -> tuple[TableWork, ...]:
        """Tables that the trainer pools from rows, since many ids repeat in a batch."""
        return tuple(table for table in self.off_devices if sends_rows(table, self.server_batch))

    def on_shared_cores(self, tasks: Sequence[Task]) -> list[Task]:
        """The same tasks on cores that all processes share.

        The more cores are busy, the longer each task takes; and all processes together are limited by the number of cores. The closer
        these two limits are, the more often a runnable thread waits for a core, or a core for a thread.
        """
        setup, cores, crowding = self.setup, self.machine.host.num_cores, self.sharing.crowding
        single_s = period_s(tasks, in_flight=setup.in_flight)
        of_one = busy_s([replace(task, busy_s=None) for task in tasks])
        of_one[SERVERS] = setup.num_sparse_servers * (of_one[SERVERS] - NUM_SERVED * self.sharing.waiting_s)
        all_s = setup.num_trainers * sum(of_one.values())
        others = min(1.0, max(0.0, all_s / single_s - 1) / (cores - 1)) if cores > 1 else 0.0
        slowed = faster(tasks, of_one, 1 + (crowding - 1) * others)
        single_s = period_s(slowed, in_flight=setup.in_flight)
        busiest_s = crowding * all_s / cores if cores > 1 else all_s
        if cores > 1:  # a single core is never idle
            closeness = min(single_s, busiest_s) / max(single_s, busiest_s)
            waiting = (1 + closeness**SHARPNESS) ** (1 / SHARPNESS)
            if busiest_s < single_s:
                slowed = faster(slowed, of_one, waiting)
            else:
                busiest_s *= waiting
        by_phase = {phase: sum(task.seconds for task in tasks if task.phase is phase) for phase in STEP}
        whole_s = sum(by_phase.values())
        shares = {phase: seconds / whole_s for phase, seconds in by_phase.items() if seconds}
        return [
            *slowed,
            *(
                Task(f"all processes, {one.value}", one, "shared cores", busiest_s * share, hidden=True)
                for one, share in shares.items()
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class ColocatedProcess(ColocatedTrainer):
    """One of several synchronous processes of one machine, with an even share of each batch, of the tables and of the cores.

    All processes do the same at the same time, so that their parts of a step add up. What they exchange is copied by cores.
    """

    @property
    def compute(self) -> str:
        return "processes"

    @functools.cached_property
    def processor(self) -> Processor:
        """One core, as fleets have it; with several cores per process, those of the machine, of which it has a share."""
        return host_processor(self.machine, self.software) if self.num_threads > 1 else super().processor

    @property
    def num_threads(self) -> int:
        return max(1, self.machine.host.num_cores // self.setup.num_trainers)

    @property
    def slowdown(self) -> float:
        """How many times as long work takes while all processes are busy."""
        count = self.setup.num_trainers
        return count if self.num_threads > 1 else self.sharing.crowding * max(1.0, count / self.machine.host.num_cores)

    def tasks(self) -> list[Task]:
        """The parts of a step, one after the other."""
        count, work = self.setup.num_trainers, self.work
        sent = (count - 1) / count  # of what is spread evenly over all processes
        ids_bytes = self.server_batch * (SENT_ID_BYTES * work.ids_per_sample + sum(table.num_features for table in work.tables))
        vectors_bytes = self.server_batch * self.exchanged_bytes
        rows_s = {
            update: self.rows_s(self.processor, work.tables, self.server_batch, count, update=update)
            for update in (False, True)
        }
        forward_s, backward_s = (self.bottom_s(passes=passes) + self.top_s(passes=passes) for passes in (1, 2))
        parts = (
            ("exchange ids", Phase.PREFETCH, self.exchange_s(sent * ids_bytes)),
            ("pool rows", Phase.LOOKUP, rows_s[False]),
            ("exchange vectors", Phase.EXCHANGE, self.exchange_s(sent * vectors_bytes)),
            ("dense forward", Phase.FORWARD, forward_s),
            ("dense backward", Phase.BACKWARD, backward_s),
            ("exchange gradients of vectors", Phase.EXCHANGE, self.exchange_s(sent * vectors_bytes)),
            ("all-reduce dense gradients", Phase.EXCHANGE, 2 * self.exchange_s(sent * self.reduced_bytes)),
            ("dense update", Phase.DENSE_UPDATE, cost.dense_update_s(self.processor, work)),
            ("update rows", Phase.ROW_UPDATE, rows_s[True]),
        )
        tasks: list[Task] = list(self.overhead_tasks())
        for name, phase, seconds in parts:
            tasks.append(self.compute_task(name, phase, seconds, after=(tasks[-1].name,) if tasks else ()))
        return [replace(task, seconds=self.slowdown * task.seconds) for task in tasks]

    def exchange_s(self, num_bytes: float) -> float:
        """Seconds of a process to send bytes to all others and to receive as many."""
        return self.sharing.handing.seconds(num_calls=self.setup.num_trainers - 1, num_bytes=num_bytes)


def sends_rows(table: TableWork, batch_size: float) -> bool:
    """Whether the distinct rows of a batch are sent, and their gradients back, instead of pooled vectors: always where histories read them."""
    if table.histories:
        return True
    rows = table.distinct_rows(batch_size) * (SENT_ID_BYTES + 2 * table.row_bytes)
    pooled = batch_size * (SENT_ID_BYTES * table.ids_per_sample + table.num_features + 2 * table.pooled_bytes)
    return rows <= ROWS_SHARE * pooled
