"""The trainer of a fleet: batches from the readers, rows from the sparse servers, and its own copy of the dense parameters.

Its threads share one copy of the dense parameters (Hogwild) and one stream of batches; each has its own connections to the sparse
servers. A sync policy synchronises it with the other trainers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rowstead.data.batch import Batch
from rowstead.fleet.build import (
    Connections,
    build_fleet_model,
    build_remote_store,
    cast_batch,
    dense_file,
    fleet_dtype,
    fleet_of,
    is_dense_requested,
    read_dense,
    read_reader_progress,
    save_checkpoint,
    wrap_for_device,
    write_dense,
)
from rowstead.fleet.dense_client import DenseServerClient
from rowstead.fleet.keys import Keys
from rowstead.fleet.remote_batches import RemoteBatches, Ticket
from rowstead.fleet.roster import Roster
from rowstead.fleet.snapshot import GrowingInterval
from rowstead.records.run_folder import RunFolder
from rowstead.spec.errors import TrainingError
from rowstead.spec.phases import Phase
from rowstead.spec.run import RunSpec
from rowstead.spec.train import TrainSpec
from rowstead.stores.base import EmbeddingStore
from rowstead.training import checkpoint
from rowstead.training.build import build_store
from rowstead.training.checkpoint_fits import position_in
from rowstead.training.device import choose_device, set_threads
from rowstead.training.hogwild import Hogwild
from rowstead.training.prefetch import copy_ahead, prefetch_rows
from rowstead.training.progress import MovingLoss, Position
from rowstead.training.step import Stepper
from rowstead.training.sync import build_policies
from rowstead.training.sync_base import SyncPolicy
from rowstead.training.throughput import Throughput

_log = logging.getLogger("rowstead.fleet")
LOOK_EVERY_S = 0.02
"""How often a trainer looks whether it is asked to save its dense parameters."""
RETRY_SAVE_S = 5.0
"""How long a trainer that could not save does not look."""
DEADLINE_S = 120.0
"""How long a trainer waits for a server before it gives up; enough to restart the server."""


class FleetTrainer:
    """One trainer, from its first batch to its last. `run` is called once; `figures` from any thread."""

    def __init__(self, spec: RunSpec, folder: Path, number: int, *, incarnation: int = 0, keys: Keys | None = None) -> None:
        self._spec, self._folder, self._number, self._incarnation = spec, folder, number, incarnation
        self._fleet, self._sync = fleet_of(spec), spec.train.sync
        self._roster = Roster(folder)
        self._dtype = fleet_dtype(self._roster)
        self.name = f"trainer-{number}"
        self._connections = Connections(
            self._roster, self.name, keys, deadline_s=DEADLINE_S, max_in_flight=max(8, 2 * self._sync.staleness + 2)
        )
        self._device = _device_of(spec, number)
        self._lock = threading.Lock()
        self._moving_loss = MovingLoss()
        self._num_steps = self._num_samples = self._saved_steps = 0
        self._position = Position()
        """Position of the checkpoint that was resumed, with `tables: local`."""
        self._looked_s = 0.0
        """When this trainer last looked whether it is asked to save."""
        self._saved_s, self._save_interval = time.monotonic(), GrowingInterval(self._fleet.snapshot_every_s)
        self._remote_batches: RemoteBatches | None = None
        self._workers: list[Stepper] = []
        self._stores: list[EmbeddingStore] = []
        """One per thread."""
        self._phase_s: dict[int, dict[Phase, float]] = {}
        """Time per phase, by thread; a copy, because timers belong to their thread."""
        self._throughputs = [Throughput() for _ in range(self._sync.hogwild_threads)]
        """One per thread."""
        is_remote = self._fleet.tables == "remote"
        self._max_unacknowledged = max(1, self._sync.staleness) + (self._device.type == "cuda") if is_remote else 0
        """Maximum number of updates of one thread that servers have not acknowledged after a step; one more on a GPU, where a background
        thread sends them."""
        self._policies: list[SyncPolicy] = []
        self._dense_clients: list[DenseServerClient] = []

    def run(self, *, until: Callable[[], bool], ready: Callable[[], None]) -> bool:
        """Train until the readers have no more batches, or `until` holds; then save the dense parameters.

        Returns whether the log is finished, by this trainer or others.
        """
        spec, num_threads = self._spec, self._sync.hogwild_threads
        stores = [self._build_store()]
        stores += [stores[0].copy_for_thread() for _ in range(1, num_threads)]
        self._stores = stores
        model = build_fleet_model(spec, self._device, stores[0], self._dtype)
        total_steps = int(self._roster.facts["total_steps"])
        stepper = Stepper(model, self._train_spec(total_steps), total_steps=total_steps)
        self._load_initial(stepper)
        hogwild = Hogwild(stepper, num_threads, store_of=None if self._fleet.tables == "local" else stores.__getitem__)
        self._workers = hogwild.workers
        policies = self._policies = self._build_policies(num_threads, total_steps)
        readers = [partial(self._connections.to, "reader", number) for number in range(self._fleet.num_readers)]
        layout = stores[0].layout  # the same object that the store checks batches against
        ids = torch.int64 if self._device.type == "cuda" else None

        def should_stop() -> bool:
            return until() or hogwild.stops.is_set()

        def work(thread: int, worker: Stepper) -> None:
            self._work(thread, worker, should_stop)

        remote_batches = self._remote_batches = RemoteBatches(
            readers, name=self.name, layout=layout, ids=ids, until=should_stop
        )
        is_idle = False
        try:
            for worker, policy in zip(hogwild.workers, policies, strict=False):
                worker.set_sync_policy(policy)
            ready()
            if num_threads > 1:
                hogwild.run(work)
            else:
                with set_threads(spec.threads):
                    work(0, stepper)
            is_idle = True
            for policy in policies:
                policy.close()
        finally:
            remote_batches.close(is_idle=is_idle)
        for store in stores:
            store.flush()
        self._save()
        for store in stores:
            store.close()
        self._connections.close()
        return remote_batches.is_over

    def figures(self) -> dict[str, Any]:
        """Return totals so far, and the loss over the last steps."""
        figures: dict[str, Any] = {} if self._remote_batches is None else {**self._remote_batches.figures()}
        with self._lock:
            figures |= {"num_steps": self._num_steps, "num_samples": self._num_samples}
            figures["num_unsaved_steps"] = self._num_steps - self._saved_steps
            figures["train_s"] = max(each.train_s for each in self._throughputs)
            figures["timed_s"] = max(each.spent_s for each in self._throughputs)
            figures["num_timed_samples"] = sum(each.num_samples for each in self._throughputs)
            if self._moving_loss.has_steps:
                figures |= {"loss": self._moving_loss.loss, "ne": self._moving_loss.ne}
            for phase_s in self._phase_s.values():
                for phase, seconds in phase_s.items():
                    figures[phase.key] = figures.get(phase.key, 0.0) + seconds
        figures |= self._connections.figures()
        if self._policies:
            figures["num_exchanges"] = sum(policy.num_exchanges for policy in self._policies)
            num_missed = sum(policy.num_missed for policy in self._policies)
            figures["num_missed"] = num_missed + sum(client.num_partial for client in self._dense_clients)
        early = "num_lookups_early"
        if counts := [counted[early] for store in self._stores if early in (counted := store.figures())]:
            figures[early] = sum(counts)
        return figures

    def _work(self, thread: int, worker: Stepper, should_stop: Callable[[], bool]) -> None:
        remote_batches, store = self._remote_batches, worker.model.store
        assert remote_batches is not None
        trained: deque[Ticket] = deque()
        """Batches whose updates may not be acknowledged yet: if this process were killed now, others would train on them again."""
        started_s = time.perf_counter()
        while not should_stop() and remote_batches.more():
            with contextlib.closing(prefetch_rows(self._batches(remote_batches), store)) as items:
                for batch, device_batch, ticket in items:
                    self._step(thread, worker, batch, device_batch, ticket, started_s)
                    trained.append(ticket)
                    while len(trained) > self._max_unacknowledged:
                        remote_batches.acknowledge(trained.popleft())
                    if thread == 0:
                        self._save_if_due()
                    started_s = time.perf_counter()
                    if should_stop():
                        break
            if trained:
                store.flush()
            while trained:
                remote_batches.acknowledge(trained.popleft())
            if self._policies:
                self._policies[thread].pause()

    def _step(self, thread: int, worker: Stepper, batch: Batch, device_batch: Batch, ticket: Ticket, started_s: float) -> None:
        """Train on a batch; `started_s` is when this thread began to wait for it."""
        try:
            loss = worker.step(device_batch, ticket.step + 1)
        except TrainingError as error:
            raise TrainingError(f"{error} (epoch {ticket.epoch}, batch {ticket.step} of the run, {self.name})") from None
        totals, phase_s = batch.totals, worker.timers.totals_s()
        with self._lock:
            self._phase_s[thread] = phase_s
            self._throughputs[thread].add(totals.num_samples, time.perf_counter() - started_s)
            self._num_steps += 1
            self._num_samples += totals.num_samples
            self._moving_loss.add(totals.weight, loss, totals.mean_label)

    def _batches(self, remote_batches: RemoteBatches) -> Iterator[tuple[Batch, Batch, Ticket]]:
        """Yield each batch on the host, the same on the device, and its ticket."""
        batches = ((cast_batch(batch, self._dtype), ticket) for batch, ticket in remote_batches)
        if self._device.type == "cuda":
            return copy_ahead(((batch.pin_memory(), ticket) for batch, ticket in batches), self._device)
        return ((batch, batch, ticket) for batch, ticket in batches)

    def _build_store(self) -> EmbeddingStore:
        if self._fleet.tables == "local":
            return build_store(self._spec, self._device, trains=True)
        remote = build_remote_store(self._spec, self._roster, self._connections, staleness=self._sync.staleness)
        return wrap_for_device(remote, self._device)

    def _build_policies(self, num_threads: int, total_steps: int) -> list[SyncPolicy]:
        """Build one policy per thread; none without a dense server."""
        num_dense = self._fleet.num_dense
        if not num_dense:
            return []

        def connect(thread: int) -> DenseServerClient:
            clients = [self._connections.to("dense", number, f"{self.name}.{thread}") for number in range(num_dense)]
            self._dense_clients.append(DenseServerClient(clients))
            return self._dense_clients[-1]

        num_trainers = self._fleet.num_trainers
        return build_policies(self._sync, connect, num_trainers=num_trainers, num_threads=num_threads, total_steps=total_steps)

    def _train_spec(self, total_steps: int) -> TrainSpec:
        """Return the spec of its steps: without CUDA graphs where a sync policy runs between their parts."""
        train = self._spec.train.with_warmup(total_steps)
        return dataclasses.replace(train, cuda_graphs=False) if self._fleet.num_dense else train

    def _load_initial(self, stepper: Stepper) -> None:
        """Load what this trainer saved before it was killed, or the initial parameters if they are not the seed's."""
        if self._fleet.tables == "local":
            if (given := self._roster.facts.get("initial_checkpoint")) is not None:
                saved = checkpoint.load(Path(given["path"]))
                if given["with_optimizer"]:
                    stepper.load_state(saved.tensors)
                    self._position = position_in(saved)
                else:
                    stepper.load_weights(saved.tensors)
            return
        dense = read_dense(self._folder, self._number) if self._incarnation > 0 else None
        dense = dense or read_dense(self._folder)
        if dense is not None:
            stepper.load_dense_state(dense)

    def _save_if_due(self) -> None:
        """Save, from the first thread: by time and when the coordinator asks if the rows are in servers, else by steps."""
        if self._fleet.tables == "remote":
            is_due = time.monotonic() >= self._saved_s + self._save_interval.seconds
            is_asked = not is_due and self._is_asked_to_save()
        else:
            every = self._spec.train.checkpoint_every
            is_due, is_asked = every is not None and self._num_steps // every > self._saved_steps // every, False
        if is_due or is_asked:
            try:
                self._save()
            except OSError as error:
                if self._fleet.tables == "local":
                    raise
                _log.warning("%s could not save its dense parameters, and tries again later: %s", self.name, error)
                self._looked_s = time.monotonic() + RETRY_SAVE_S
            if is_due:
                self._save_interval.grow()

    def _is_asked_to_save(self) -> bool:
        if (now_s := time.monotonic()) < self._looked_s + LOOK_EVERY_S:
            return False
        self._looked_s = now_s
        return is_dense_requested(self._folder, self._number)

    def _save(self) -> None:
        num_steps, stepper = self._num_steps, self._workers[0]
        self._saved_s = time.monotonic()
        if self._fleet.tables == "remote":
            write_dense(dense_file(self._folder, self._number), stepper.dense_state())
            self._saved_steps = num_steps
            return
        progress = read_reader_progress(self._spec, self._folder)
        position = dataclasses.replace(self._position)
        position.step, position.num_samples = position.step + self._num_steps, position.num_samples + self._num_samples
        parts, keep = stepper.model.store.parts(), self._spec.train.keep_checkpoints
        folder = RunFolder(self._folder).checkpoints
        save_checkpoint(self._spec, self._roster, folder, position, stepper.dense_state(), parts, keep, progress)
        self._saved_steps = num_steps


def _device_of(spec: RunSpec, number: int) -> torch.device:
    """The device of a trainer: trainers of one machine use its GPUs round-robin."""
    device = choose_device(spec)
    return device if device.type == "cpu" else torch.device("cuda", number % torch.cuda.device_count())
