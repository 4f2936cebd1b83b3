"""The best set-up of a run on a machine: all placements are tried, with more servers while those pay; remedies if nothing fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rowstead.plan.predict import Prediction, predict
from rowstead.plan.setup import USABLE_SHARE, CachedTable, Setup, dense_held_bytes, held
from rowstead.plan.setups import FRACTIONS, SetupBuilder, fewest_servers
from rowstead.plan.work import StepWork, step_work, table_bytes, with_16_bit_rows, with_lean_optimizer
from rowstead.spec.machine import Machine
from rowstead.spec.row_optimizers import LEAN_OPTIMIZER
from rowstead.spec.run import RunSpec
from rowstead.spec.sizes import format_bytes
from rowstead.spec.software import Software
from rowstead.spec.stores import PlannedStore

MAX_SERVERS = 4096
"""Upper limit on the servers of one kind."""
SATURATED_GAIN = 1.05
"""Speed-up that doubling the parameter servers of a kind must give to be worth it."""
KEPT_SPEED = 0.99
"""Share of the speed that must remain when servers are removed again."""

SERVER_KINDS = ("num_sparse_servers", "num_dense_servers")

Prefer = Literal["efficiency", "speed"]
"""What the best set-up maximises: samples per joule (per server where some power is unknown), or samples per second."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best set-up of a run on one machine."""

    machine: Machine
    best: Prediction | None
    """None if the model does not fit one such server, with or without parameter servers."""
    others: tuple[Prediction, ...] = ()
    """The best set-ups of the other placements, best first; those that do not fit come last."""
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
        spec=spec,
        work=step_work(spec),
        machine=machine,
        server=server,
        software=software,
        prefer=prefer,
        samples_per_s=samples_per_s,
    )
    found = []
    for placement in chooser.placements:
        if placement in ("cached", "ssd") and not software.has_caches:
            continue
        of_placement = [
            one for batch_size in batch_sizes or (spec.train.batch_size,) for one in chooser.candidates(placement, batch_size)
        ]
        if of_placement:
            found.append(min(of_placement, key=chooser.rank))
    fitting = sorted((one for one in found if one.fits), key=chooser.rank)
    failing = [one for one in found if not one.fits]
    if not fitting:
        smallest = min(batch_sizes, default=spec.train.batch_size)
        helping = remedies(spec, machine, server, batch_size=smallest)
        return Choice(machine=machine, best=None, others=tuple(failing), remedies=helping)
    return Choice(machine=machine, best=fitting[0], others=(*fitting[1:], *failing))


@dataclass(frozen=True, kw_only=True)
class Chooser(SetupBuilder):
    """Tries set-ups of one run on one machine."""

    software: Software
    prefer: Prefer
    samples_per_s: float | None
    """The target speed; None for the best use of one server."""

    def candidates(self, placement: PlannedStore, batch_size: int) -> Iterator[Prediction]:
        """The set-ups of one placement to compare: the fewest servers, and more of them as far as needed."""
        tried = [self.with_enough_servers(setup) for setup in self.build(placement, batch_size=batch_size)]
        if not tried:
            return
        now = min(tried, key=self.rank)
        if placement == "mixed" and len(now.trainer.on_devices) in (0, len(self.work.tables)):
            return  # same as another placement
        yield now
        if self.samples_per_s is not None and self.machine.network is not None and (now.fits or placement != "remote"):
            yield from self.larger(now)
        else:
            yield self.with_fewest_servers(now)

    def larger(self, now: Prediction) -> Iterator[Prediction]:
        """Add trainers until the target speed is reached or more do not help; then find the fewest that reach it."""
        assert self.samples_per_s is not None
        too_few = 0
        while not self.is_enough(now) and now.setup.num_trainers < MAX_SERVERS:
            missing = self.samples_per_s / now.samples_per_s if now.fits else 2.0
            wanted = math.ceil(min(now.setup.num_trainers * missing, MAX_SERVERS))
            before = now
            now = self.with_enough_servers(replace(now.setup, num_trainers=max(now.setup.num_trainers + 1, wanted)))
            too_few = before.setup.num_trainers
            yield now
            if before.fits and now.samples_per_s < before.samples_per_s * 1.001:
                return
        if self.is_enough(now):
            now = fewest(now, "num_trainers", self.with_enough_servers, self.is_enough, too_few=too_few)
        yield self.with_fewest(now)

    def is_enough(self, one: Prediction) -> bool:
        """Whether a set-up fits and reaches the target speed."""
        return one.fits and one.samples_per_s >= (self.samples_per_s or 0.0)

    def with_fewest(self, now: Prediction) -> Prediction:
        """The fewest servers of every kind that reach the target speed, then the fewest trainers with those."""
        while True:
            before = now = self.with_fewest_servers(now)
            while now.setup.num_trainers > 1:
                tried = self.predict(replace(now.setup, num_trainers=now.setup.num_trainers - 1))
                if not self.is_enough(tried):
                    break
                now = tried
            if now is before:
                return now

    def with_enough_servers(self, setup: Setup) -> Prediction:
        """A prediction with enough parameter servers of each kind that doubling them is not worth it."""
        now, before = self.predict(setup), None
        while now is not before:
            before = now
            for kind in SERVER_KINDS:
                now = self.with_twice_the_servers(now, kind)
        return now

    def with_twice_the_servers(self, now: Prediction, kind: str) -> Prediction:
        """Double the servers of one kind for as long as it is worth it."""
        while 0 < (count := getattr(now.setup, kind)) < MAX_SERVERS:
            after = self.predict(with_count(now.setup, kind, 2 * count))
            gain = after.samples_per_s / now.samples_per_s
            slow = self.samples_per_s is not None and not self.is_enough(now)
            worth = SATURATED_GAIN if slow or self.prefer == "speed" else self.cost(after) / self.cost(now)
            if gain < max(worth, SATURATED_GAIN):
                break
            now = after
        return now

    def with_fewest_servers(self, now: Prediction) -> Prediction:
        """Bisect for the fewest parameter servers that keep the speed, or the target speed, since doubling overshoots."""
        least_speed = KEPT_SPEED * now.samples_per_s
        if self.samples_per_s is not None and self.is_enough(now):
            least_speed = self.samples_per_s
        fits = now.fits

        def keeps_up(tried: Prediction) -> bool:
            return (tried.fits or not fits) and tried.samples_per_s >= least_speed

        for kind in SERVER_KINDS:
            now = fewest(now, kind, self.predict, keeps_up)
        return now

    def predict(self, setup: Setup) -> Prediction:
        return predict(self.work, self.machine, self.software, setup, precision=self.spec.train.precision)

    def cost(self, one: Prediction) -> float:
        """Nameplate watts, or the number of servers where some power is unknown."""
        setup = one.setup
        known = self.machine.power is not None and self.server.power is not None
        return one.watts if known and one.watts is not None else float(setup.num_trainers + setup.num_servers)

    def rank(self, one: Prediction) -> tuple[float, ...]:
        """Sort key: what fits first; then what is fast enough, the cheapest first; then the best by what is preferred."""
        if self.samples_per_s is not None:
            enough = self.is_enough(one)
            return not one.fits, not enough, self.cost(one) if enough else -one.samples_per_s
        return not one.fits, -one.samples_per_s / (self.cost(one) if self.prefer == "efficiency" else 1.0), self.cost(one)


def with_count(setup: Setup, count: str, number: int) -> Setup:
    """A set-up with another number of trainers, or of servers of one kind."""
    changes: dict[str, Any] = {count: number}
    return replace(setup, **changes)


def fewest(
    now: Prediction,
    count: str,
    predicted: Callable[[Setup], Prediction],
    is_enough: Callable[[Prediction], bool],
    *,
    too_few: int = 0,
) -> Prediction:
    """Bisect for the lowest count with which a prediction is still enough, as `now` is."""
    while (number := getattr(now.setup, count)) - too_few > 1:
        tried = predicted(with_count(now.setup, count, (too_few + number) // 2))
        if is_enough(tried):
            now = tried
        else:
            too_few = getattr(tried.setup, count)
    return now


def num_readers(work: StepWork, software: Software, server: Machine, samples_per_s: float) -> int:
    """Reader servers needed for a speed: they pack messages and send them over their network."""
    input_bytes_per_s = samples_per_s * work.input_bytes
    cores = input_bytes_per_s / (software.message_bytes_per_s_per_core * server.host.num_cores)
    wire = input_bytes_per_s / server.network.bandwidth_bytes_per_s if server.network is not None else 0.0
    return max(1, math.ceil(max(cores, wire)))


def remedies(spec: RunSpec, machine: Machine, server: Machine, *, batch_size: int | None = None) -> tuple[str, ...]:
    """What would make a model fit, with sizes."""
    work, batch_size = step_work(spec), batch_size or spec.train.batch_size
    has_devices = machine.accelerators is not None
    memory = machine.accelerators.memory if machine.accelerators is not None else machine.host.memory
    where = "GPU memory" if has_devices else "system memory"
    usable, dense = memory.capacity_bytes * USABLE_SHARE, dense_held_bytes(work, batch_size)
    if dense > usable:  # tables or not
        return (_smaller_dense_part(work, usable, batch_size, where),)
    free_bytes = (usable - dense) * machine.num_devices
    host_bytes = machine.host.memory.capacity_bytes * USABLE_SHARE if has_devices else 0.0
    found = []
    if machine.network is not None and work.table_bytes > free_bytes:
        many = math.ceil(work.table_bytes / free_bytes)
        found.append(
            f"use {many} such servers: their {where} has {format_bytes(many * free_bytes)} for tables of {format_bytes(work.table_bytes)}"
        )
    if machine.network is not None and server.network is not None:
        count = fewest_servers(work, server)
        found.append(f"put the tables on {count} sparse parameter server{'s' if count > 1 else ''} ({server.name})")
    found += _with_caches(work, machine, batch_size)
    found += _smaller_rows(spec, max(free_bytes, host_bytes))
    scale = max(free_bytes, host_bytes) / work.table_bytes if work.table_bytes else 1.0
    if scale < 1:
        found.append(
            f"set scale={spec.scale * scale * 0.95:.2g}, which shrinks tables to {format_bytes(max(free_bytes, host_bytes) * 0.95)}"
        )
    return tuple(found)


def _with_caches(work: StepWork, machine: Machine, batch_size: int) -> list[str]:
    """What caches of the smallest size need, over system memory and over files."""
    fraction, found = FRACTIONS[-1], []
    kinds: list[tuple[Literal["cached", "ssd"], str]] = [("cached", "in system memory"), ("ssd", "in files on SSD")]
    for where, behind in kinds if machine.accelerators is not None else kinds[1:]:
        tables = tuple(CachedTable(table=one.name, cache_fraction=fraction, where=where) for one in work.tables)
        setup = Setup(placement=where, batch_size=batch_size, num_devices=machine.num_devices, behind=tables)
        needs = held(work, machine, setup)
        sizes = {"SSD": needs.disk_bytes, "system memory": needs.host_bytes, "each GPU's memory": needs.device_bytes}
        needed = " and ".join(f"{format_bytes(size / USABLE_SHARE)} of {name}" for name, size in sizes.items() if size)
        found.append(f"keep all rows {behind} and {fraction:.0%} of them in a cache (placement `{where}`): needs {needed}")
    return found


def _smaller_dense_part(work: StepWork, usable_bytes: float, batch_size: int, where: str) -> str:
    """The remedy for activations and parameters that do not fit even without tables."""
    fixed = dense_held_bytes(work, 0)
    largest = int((usable_bytes - fixed) / (dense_held_bytes(work, 1) - fixed))
    if largest < 1:
        return f"make the MLPs smaller: parameters, gradients and state take {format_bytes(fixed)} of {where} without tables"
    held = dense_held_bytes(work, batch_size)
    return f"use a batch of {largest:,} or less (train.batch_size, --batch): with {batch_size:,} the dense part takes {format_bytes(held)} of {where} without tables"


def _smaller_rows(spec: RunSpec, free_bytes: float) -> list[str]:
    """Settings that make rows smaller, each by itself, and both together unless one is enough."""
    less_state = with_lean_optimizer(spec)
    needed, found, is_enough = table_bytes(spec), list[str](), False
    for text, changed in (
        (f"train.sparse_optimizer.kind={LEAN_OPTIMIZER}", less_state),
        ("model.row_format=bf16", with_16_bit_rows(spec)),
        ("both", with_16_bit_rows(less_state)),
    ):
        smaller = table_bytes(changed)
        if smaller < needed and (text != "both" or (len(found) == 2 and not is_enough)):
            is_enough = is_enough or smaller <= free_bytes
            short = "" if smaller <= free_bytes else ", not enough by itself"
            found.append(f"set {text}: shrinks tables from {format_bytes(needed)} to {format_bytes(smaller)}{short}")
    return found


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Minimum capacities of a machine that trains a model at a speed, at full utilisation."""

    samples_per_s: float
    memory_bytes: float
    """Tables with their optimizer state, and the dense part."""
    memory_bytes_per_s: float
    """Rows read and updated, in whole 64-byte lines, and activations."""
    flops_per_s: float
    """FP32 arithmetic of the dense part."""
    exchange_bytes_per_s: float
    """Pooled vectors and their gradients between tables and examples, in each direction."""
    input_bytes_per_s: float
    """Batches from readers."""


def requirements(spec: RunSpec, samples_per_s: float) -> Requirements:
    """The capacities that a machine needs for this model at this speed."""
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
