"""The best set-up of a run on a machine: places tried in turn, servers added where they hold it up, remedies where nothing fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rowstead.plan.predict import Prediction, predict
from rowstead.plan.setup import USABLE_SHARE, Place, Setup
from rowstead.plan.work import StepWork, step_work
from rowstead.spec.machine import Machine, Precision, Software
from rowstead.spec.run import RunSpec
from rowstead.spec.sizes import shown_bytes

MAX_SERVERS = 4096
"""Servers of one kind beyond which we give up."""
SATURATED_GAIN = 1.05
"""Twice the sparse servers must give so much more, or they are not worth it."""

Prefer = Literal["efficiency", "speed"]
"""What the best set-up is best at: samples a joule (or a server, where some machine's power is not known), or samples a second."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a run would do best on one machine."""

    machine: Machine
    best: Prediction | None
    """None where the model does not fit one such server, with or without parameter servers."""
    others: tuple[Prediction, ...] = ()
    """The best set-ups of the other places, fastest first; those that do not fit are among them, last."""
    remedies: tuple[str, ...] = ()
    """What would make it fit, with sizes."""


def choose(
    spec: RunSpec,
    machine: Machine,
    software: Software,
    *,
    server: Machine,
    batch_sizes: Sequence[int] = (),
    samples_per_s: float | None = None,
    prefer: Prefer = "efficiency",
) -> Choice:
    """The best set-up on one server of a kind, or the cheapest that reaches `samples_per_s`."""
    chooser = Chooser(
        work=step_work(spec),
        machine=machine,
        software=software,
        server=server,
        precision=spec.train.precision,
        prefer=prefer,
        samples_per_s=samples_per_s,
    )
    found = []
    for place in places_of(machine) if chooser.work.tables else ("device",):
        of_place = [
            one for batch_size in batch_sizes or (spec.train.batch_size,) for one in chooser.candidates(place, batch_size)
        ]
        if of_place:
            found.append(min(of_place, key=chooser.rank))
    fitting = sorted((one for one in found if one.fits), key=chooser.rank)
    failing = [one for one in found if not one.fits]
    if not fitting:
        return Choice(machine=machine, best=None, others=tuple(failing), remedies=remedies(spec, machine, server))
    return Choice(machine=machine, best=fitting[0], others=(*fitting[1:], *failing))


def places_of(machine: Machine) -> tuple[Place, ...]:
    """Where a machine can have tables; other servers only where it has a network."""
    near: tuple[Place, ...] = ("device", "mixed", "host") if machine.accelerators is not None else ("device",)
    return (*near, "remote") if machine.network is not None else near


@dataclass(frozen=True, kw_only=True)
class Chooser:
    """Tries set-ups of one run on one machine."""

    work: StepWork
    machine: Machine
    software: Software
    server: Machine
    precision: Precision
    prefer: Prefer
    samples_per_s: float | None
    """The speed that is wanted; without it one server is used as well as it can be."""

    def candidates(self, place: Place, batch_size: int) -> Iterator[Prediction]:
        """The set-ups of one place that are worth a look: the fewest servers, and more of them as far as needed."""
        machine, server = self.machine, self.server
        if place == "remote" and server.network is None:
            return
        setup = Setup(
            place=place,
            batch_size=batch_size,
            num_devices=machine.num_devices,
            server=server if place == "remote" else None,
            num_sparse_servers=fewest_servers(self.work, server) if place == "remote" else 0,
            num_dense_servers=1 if place == "remote" and machine.accelerators is None else 0,
        )
        now = self.with_enough_servers(setup)
        yield now
        wanted = self.samples_per_s
        if wanted is None or machine.network is None or not (now.fits or place == "device"):
            return
        while (now.samples_per_s < wanted or not now.fits) and now.setup.num_trainers < MAX_SERVERS:
            missing = wanted / now.samples_per_s if now.fits else 2.0
            num_trainers = max(now.setup.num_trainers + 1, min(math.ceil(now.setup.num_trainers * missing), MAX_SERVERS))
            before, now = now, self.with_enough_servers(dataclasses.replace(now.setup, num_trainers=num_trainers))
            yield now
            if before.fits and now.samples_per_s < before.samples_per_s * 1.001:
                return

    def with_enough_servers(self, setup: Setup) -> Prediction:
        """A prediction with so many sparse servers that twice as many are not worth it."""
        now = self.predicted(setup)
        while now.setup.num_sparse_servers and now.setup.num_sparse_servers < MAX_SERVERS:
            doubled = dataclasses.replace(now.setup, num_sparse_servers=2 * now.setup.num_sparse_servers)
            after = self.predicted(doubled)
            gain = after.samples_per_s / now.samples_per_s
            slow = self.samples_per_s is not None and now.samples_per_s < self.samples_per_s
            worth = SATURATED_GAIN if slow or self.prefer == "speed" else self.cost(after) / self.cost(now)
            if gain < max(worth, SATURATED_GAIN):
                break
            now = after
        return now

    def predicted(self, setup: Setup) -> Prediction:
        return predict(self.work, self.machine, self.software, setup, precision=self.precision)

    def cost(self, one: Prediction) -> float:
        """Nameplate watts, or servers where the power of some is not known."""
        setup = one.setup
        num_servers = setup.num_trainers + setup.num_sparse_servers + setup.num_dense_servers
        known = self.machine.power is not None and self.server.power is not None
        return one.watts if known and one.watts is not None else float(num_servers)

    def rank(self, one: Prediction) -> tuple[float, ...]:
        """What fits comes first; then what is fast enough, the cheapest first; then the best at what is preferred."""
        if self.samples_per_s is not None:
            enough = one.fits and one.samples_per_s >= self.samples_per_s
            return not one.fits, not enough, self.cost(one) if enough else -one.samples_per_s
        return not one.fits, -one.samples_per_s / (self.cost(one) if self.prefer == "efficiency" else 1.0)


def fewest_servers(work: StepWork, server: Machine) -> int:
    """As few servers as hold the tables."""
    return max(1, math.ceil(work.table_bytes / (server.host.memory.capacity_bytes * USABLE_SHARE)))


def num_readers(work: StepWork, software: Software, server: Machine, samples_per_s: float) -> int:
    """Reader servers that keep up with a speed: they pack messages, and send them over their network."""
    a_second = samples_per_s * work.input_bytes
    cores = a_second / (software.message_bytes_per_s_per_core * server.host.num_cores)
    wire = a_second / server.network.bandwidth_bytes_per_s if server.network is not None else 0.0
    return max(1, math.ceil(max(cores, wire)))


def remedies(spec: RunSpec, machine: Machine, server: Machine) -> tuple[str, ...]:
    """What would make a model fit, each with its sizes."""
    work = step_work(spec)
    memory = machine.accelerators.memory if machine.accelerators is not None else machine.host.memory
    room = memory.capacity_bytes * machine.num_devices * USABLE_SHARE
    host_room = machine.host.memory.capacity_bytes * USABLE_SHARE
    where = "GPU memory" if machine.accelerators is not None else "system memory"
    found = []
    if machine.network is not None:
        many = math.ceil(work.table_bytes / room)
        found.append(
            f"use {many} such servers: their {where} of {shown_bytes(many * room)} holds the tables' {shown_bytes(work.table_bytes)}"
        )
        servers = fewest_servers(work, server)
        found.append(f"put the tables on {servers} sparse parameter servers ({server.name})")
    for change, text in (
        ({"sparse": "rowwise_adagrad"}, "train.sparse_optimizer.kind=rowwise_adagrad"),
        ({"row_format": "bf16"}, "model.row_format=bf16"),
    ):
        smaller = step_work(_changed(spec, change))
        if smaller.table_bytes < work.table_bytes:
            found.append(f"set {text}: {shown_bytes(work.table_bytes)} become {shown_bytes(smaller.table_bytes)}")
    scale = max(room, host_room) / work.table_bytes
    if scale < 1:
        found.append(
            f"set scale={spec.scale * scale * 0.95:.2g}, so that tables shrink to {shown_bytes(max(room, host_room) * 0.95)}"
        )
    return tuple(found)


def _changed(spec: RunSpec, change: dict[str, str]) -> RunSpec:
    if "sparse" in change:
        optimizer = dataclasses.replace(spec.train.sparse_optimizer, kind=change["sparse"])  # type: ignore[arg-type]
        return dataclasses.replace(spec, train=dataclasses.replace(spec.train, sparse_optimizer=optimizer))
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, row_format=change["row_format"]))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a machine needs at least to train a model at a speed, were it used perfectly."""

    samples_per_s: float
    memory_bytes: float
    """Tables with their optimizer's state, and the dense part."""
    memory_bytes_per_s: float
    """Rows read and updated, whole 64-byte lines, and activations."""
    flops_per_s: float
    """FP32 arithmetic of the dense part."""
    exchange_bytes_per_s: float
    """Pooled vectors and their gradients between where rows live and where examples are, each direction."""
    input_bytes_per_s: float
    """Batches from readers."""


def requirements(spec: RunSpec, samples_per_s: float) -> Requirements:
    """The capacities that a future machine needs for this model at this speed."""
    work = step_work(spec)
    rows = sum(
        table.ids_per_sample * (3 * math.ceil(table.row_bytes / 64) * 64 + 2 * math.ceil(table.state_bytes / 64) * 64)
        for table in work.tables
    )
    return Requirements(
        samples_per_s=samples_per_s,
        memory_bytes=float(work.table_bytes + work.dense_bytes * (2 + work.dense_state_per_parameter)),
        memory_bytes_per_s=samples_per_s * (rows + 6 * work.activation_bytes),
        flops_per_s=samples_per_s * work.flops,
        exchange_bytes_per_s=samples_per_s * work.pooled_bytes,
        input_bytes_per_s=samples_per_s * work.input_bytes,
    )
