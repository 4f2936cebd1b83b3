"""Set-ups of a run on a machine: the placements that it can have, with what the recipe says about caches, shards, wire and sync."""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rowstead.plan.greedy import Memories, decide
from rowstead.plan.setup import BUFFERED_BATCHES, USABLE_SHARE, CachedTable, Setup, dense_held_bytes, table_sizes
from rowstead.plan.traffic import mean_ids
from rowstead.plan.work import StepWork
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine
from rowstead.spec.placement import Placement, PlacementSpec, TablePlacementSpec, rules_for
from rowstead.spec.run import RunSpec
from rowstead.spec.stores import PlannedStore

FRACTIONS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
"""Cache fractions to try, the largest first."""
NO_LIMIT_BYTES = 1 << 62
FOLDER = "."
"""Stands for the folder of files on the machine that is planned for."""


def possible_placements(machine: Machine) -> tuple[PlannedStore, ...]:
    """Where a machine can have tables; files need a disk, parameter servers a network."""
    local: tuple[PlannedStore, ...] = ("device", "mixed", "host", "cached") if machine.accelerators is not None else ("device",)
    on_disk: tuple[PlannedStore, ...] = ("ssd",) if machine.disk is not None else ()
    return (*local, *on_disk, "remote") if machine.network is not None else (*local, *on_disk)


def fewest_servers(work: StepWork, server: Machine) -> int:
    """The fewest servers that hold the tables."""
    return max(1, math.ceil(work.table_bytes / (server.host.memory.capacity_bytes * USABLE_SHARE)))


def placement_kind(placement: Placement) -> PlannedStore:
    """What a plan calls a decision about single tables: the slowest store in it."""
    stores = {table.where for table in placement.tables}
    if "ssd" in stores:
        return "ssd"
    return "cached" if stores & {"cached", "host"} else "device"


def cached_tables(placement: Placement) -> tuple[CachedTable, ...]:
    """Tables of which only some rows are in the memory of what trains."""
    return tuple(
        CachedTable(table=table.name, cache_fraction=table.cache_fraction or 0.0, where=table.where)
        for table in placement.tables
        if table.where != "device"
    )


@dataclass(frozen=True, kw_only=True)
class SetupBuilder:
    """Builds the set-ups of one run on one machine."""

    spec: RunSpec
    work: StepWork
    machine: Machine
    server: Machine
    """The machine that parameter servers run on."""

    @property
    def placements(self) -> tuple[PlannedStore, ...]:
        """Placements to compare: those that the machine can have, or the recipe's where it names stores."""
        if not self.work.tables:
            return ("device",)
        if self._is_open:
            return possible_placements(self.machine)
        return (placement_kind(self._as_the_recipe_says(self.spec.train.batch_size, 1)),)

    def build(self, placement: PlannedStore, *, batch_size: int, num_trainers: int = 1, **counts: Any) -> Iterator[Setup]:
        """The set-ups of a placement: several where caches can be shared out in several ways."""
        is_remote = placement == "remote"
        if placement not in possible_placements(self.machine) or (is_remote and self.server.network is None):
            return
        sync = self.spec.train.sync
        is_fleet = is_remote and self.machine.accelerators is None
        setup = Setup(
            placement=placement,
            batch_size=batch_size,
            num_trainers=num_trainers,
            wire=self.spec.train.wire,
            shards=tuple((name, rule.shard) for name, rule in self._rules.items() if rule.shard != "auto"),
            sync="easgd" if sync.mode in ("auto", "none") else sync.mode,
            sync_every=sync.period,
            **{
                "num_devices": self.machine.num_devices,
                "num_sparse_servers": fewest_servers(self.work, self.server) if is_remote else 0,
                "num_dense_servers": 1 if is_fleet else 0,
                "server": self.server if is_remote else None,
                "in_flight": sync.hogwild_threads * (1 + sync.staleness) if is_fleet else 1,
                **counts,
            },
        )
        if placement not in ("cached", "ssd"):
            yield setup
            return
        given = None if self._is_open else self._as_the_recipe_says(batch_size, num_trainers)
        if given is not None and placement_kind(given) == placement:
            yield replace(setup, behind=cached_tables(given))
            return
        yield self._with_equal_caches(setup)
        some = self._with_whole_tables(setup)
        if some is not None and placement_kind(some) == placement:
            yield replace(setup, behind=cached_tables(some))

    @functools.cached_property
    def _mean_ids(self) -> tuple[float, ...]:
        return mean_ids(self.spec)

    @functools.cached_property
    def _rules(self) -> dict[str, TablePlacementSpec]:
        return rules_for(self.spec.placement, [table.name for table in self.spec.tables])

    @property
    def _is_open(self) -> bool:
        """Whether the recipe names no store."""
        return all(rule.where == "auto" for rule in self._rules.values())

    def _with_equal_caches(self, setup: Setup) -> Setup:
        """All tables behind caches, with the largest fraction that fits, or the smallest one."""
        where: Any = setup.placement
        num_processes, memories = setup.num_devices * setup.num_trainers, self._memories(setup.batch_size, with_disk=True)
        for fraction in FRACTIONS:
            behind = (CachedTable(table=table.name, cache_fraction=fraction, where=where) for table in self.work.tables)
            setup = replace(setup, behind=tuple(behind))
            sizes = table_sizes(self.work, self.machine, setup)
            if not memories.excess(Counter({name: num_bytes // num_processes for name, num_bytes in sizes.items()})):
                break
        return setup

    def _with_whole_tables(self, setup: Setup) -> Placement | None:
        """Whole tables in fast memory and the others behind the largest caches that fit; None where the smallest do not."""

        @functools.cache
        def decided(index: int) -> Placement | None:
            rules = {"*": TablePlacementSpec(cache_fraction=FRACTIONS[index])}
            return self._decide(rules, setup.batch_size, setup.num_trainers, with_disk=setup.placement == "ssd")

        if decided(len(FRACTIONS) - 1) is None:
            return None
        return decided(bisect.bisect_left(range(len(FRACTIONS)), True, key=lambda index: decided(index) is not None))

    def _as_the_recipe_says(self, batch_size: int, num_trainers: int) -> Placement:
        found = self._decide(self.spec.placement, batch_size, num_trainers, with_disk=True)
        return found or self._decide(self.spec.placement, batch_size, num_trainers, with_disk=True, fits=False)  # type: ignore[return-value]

    def _decide(
        self, rules: PlacementSpec, batch_size: int, num_trainers: int, *, with_disk: bool, fits: bool = True
    ) -> Placement | None:
        """The decision for a process of each device, None where it does not fit; with `fits=False` whether it fits or not."""
        train, memory = replace(self.spec.train, batch_size=batch_size), replace(self.spec.memory, folder=FOLDER)
        spec = replace(self.spec, placement=rules, train=train, memory=memory)
        memories = self._memories(batch_size, with_disk=with_disk)
        if not fits:
            no_limit = NO_LIMIT_BYTES
            memories = replace(memories, device_bytes=no_limit, host_bytes=no_limit, disk_bytes=no_limit, folder=FOLDER)
        try:
            return decide(spec, memories, mean_ids=self._mean_ids, world_size=self.machine.num_devices * num_trainers)
        except RowsteadError:
            return None

    def _memories(self, batch_size: int, *, with_disk: bool) -> Memories:
        """What the tables of a process may take, one process per device."""
        machine, num_devices = self.machine, self.machine.num_devices
        dense = dense_held_bytes(self.work, batch_size)
        in_host = machine.host.memory.capacity_bytes * USABLE_SHARE
        on_device = in_host - dense
        if machine.accelerators is not None:
            on_device = machine.accelerators.memory.capacity_bytes * USABLE_SHARE - dense
            in_host = in_host / num_devices - batch_size * BUFFERED_BATCHES * self.work.input_bytes
        disk, limits = machine.disk if with_disk else None, self.spec.memory.limit_bytes
        on_disk = disk.capacity_bytes * USABLE_SHARE / num_devices if disk and disk.capacity_bytes else NO_LIMIT_BYTES
        return Memories(
            device_bytes=limits("device") or int(on_device),
            host_bytes=limits("host") or int(in_host if machine.accelerators is not None else on_device),
            disk_bytes=limits("disk") or int(on_disk),
            folder=FOLDER if disk is not None else None,
            has_gpu=machine.accelerators is not None,
        )
