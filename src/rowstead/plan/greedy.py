"""Greedy placement: fill the fastest memory with the tables that are read most per byte, then the next memory.

All `auto` tables start in the slowest memory. Then, in descending order of reads per byte, each moves to a faster memory if it fits
there together with the caches of all other tables.

Does not import torch and does no I/O: the sizes of the memories are arguments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rowstead.plan.work import record_bytes, table_bytes, with_16_bit_rows, with_lean_optimizer
from rowstead.spec.caching import FILE_SPARE, GROWTH, SETS_IN_FLIGHT
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import Table
from rowstead.spec.placement import CACHE_FRACTION, PlacedShard, Placement, TablePlacement, TablePlacementSpec, rules_for
from rowstead.spec.row_optimizers import LEAN_OPTIMIZER, ROW_OPTIMIZERS
from rowstead.spec.run import RunSpec
from rowstead.spec.sizes import format_bytes
from rowstead.spec.stores import STORES, RecipeStore

Memory = Literal["device", "host", "disk"]
Sizes = Counter[str]
"""Bytes that tables need in each memory."""

SMALLER_FRACTIONS = (0.05, 0.02, 0.01)
"""Cache fractions that `auto` tries, in order, if caches of the default size do not fit."""
MAP_BYTES = 5
"""Bytes per row of a cached table for its slot and use count."""
STATE_BYTES = 4
"""Additional bytes per row in GPU memory, for a row-wise optimizer state."""
RECORD_BYTES = 4
"""Additional bytes of host memory per row of a table on disk, for the offset of its record."""
DISK_MARGIN = 1.2
"""Free disk space to ask for, as a multiple of the size of the files."""
SEGMENTS_BYTES, SEGMENTS_SHARE = 27 << 20, 0.42
"""Size of the segments being written or cleaned; for a small file at most this share of its records."""
SLOT_BYTES, GPU_SLOT_BYTES = 20, 22
"""Metadata of a cache slot: its row id and last use; on a GPU also the use count."""


@dataclass(frozen=True, kw_only=True)
class Memories:
    """Capacity of each memory that is available to the tables of one process."""

    device_bytes: int
    """Without a GPU this is the same memory as the host's; the smaller of the two applies."""
    host_bytes: int
    disk_bytes: int = 0
    folder: str | None = None
    """Folder for the files of `ssd` tables; None rules out `ssd`."""
    has_gpu: bool = False
    are_limits: frozenset[str] = frozenset()
    """Memories whose capacity is a limit set in the recipe; for the others it is the free memory."""

    @property
    def kinds(self) -> tuple[Memory, ...]:
        """The distinct memories."""
        return ("device", "host", "disk") if self.has_gpu else ("host", "disk")

    def free_bytes(self, memory: Memory) -> int:
        if memory == "disk":
            return self.disk_bytes if self.folder is not None else 0
        if not self.has_gpu:
            return min(self.device_bytes, self.host_bytes)
        return self.device_bytes if memory == "device" else self.host_bytes

    def used_bytes(self, sizes: Sizes, memory: Memory) -> int:
        """Bytes that tables of these sizes take in one memory; without a GPU, device and host are one memory."""
        return sizes["device"] + sizes["host"] if memory == "host" and not self.has_gpu else sizes[memory]

    def excess(self, sizes: Sizes) -> dict[Memory, int]:
        """Bytes above the capacity of each memory that is too small."""
        over = {memory: self.used_bytes(sizes, memory) - self.free_bytes(memory) for memory in self.kinds}
        return {memory: num_bytes for memory, num_bytes in over.items() if num_bytes > 0}

    def name(self, memory: Memory) -> str:
        """User-facing name of a memory."""
        if memory == "disk":
            return "disk space" if self.folder is None else f"disk space in {self.folder}"
        return "GPU memory" if memory == "device" and self.has_gpu else "system memory"

    def describe(self, memory: Memory) -> str:
        """Capacity of a memory and the recipe's limits that set it."""
        given = ("device", "host") if memory != "disk" and not self.has_gpu else (memory,)
        limits = [f"memory.{name}" for name in given if name in self.are_limits]
        limited = f" (limit: {' and '.join(limits)})" if limits else ""
        return f"{format_bytes(self.free_bytes(memory))} of {self.name(memory)}{limited}"


@dataclass(kw_only=True)
class TableSizes:
    """What determines the bytes of one table in each store."""

    num_rows: int
    """Rows that this process stores."""
    record_bytes: int
    """Bytes of a row and its optimizer state."""
    ids_per_step: float
    num_tables: int
    """Tables of the model; those of equal width share a file."""
    fraction: float = CACHE_FRACTION
    """Share of its rows that fit in a cache."""

    @property
    def table_bytes(self) -> int:
        return self.num_rows * self.record_bytes

    @property
    def num_slots(self) -> int:
        return min(self.num_rows, max(1, math.ceil(self.fraction * self.num_rows)))

    @property
    def rows_in_flight(self) -> int:
        """Rows that the batches in flight need if all their ids differ, times the growth factor of a cache."""
        return min(self.num_rows, math.ceil(GROWTH * SETS_IN_FLIGHT * self.ids_per_step))

    @property
    def file_bytes(self) -> int:
        """Size of its file: records with their row ids, spare space for new records, and segments being written or cleaned."""
        records = self.num_rows * (-(-(self.record_bytes + 8) // 8) * 8)
        return int(FILE_SPARE * records + min(SEGMENTS_BYTES / self.num_tables, SEGMENTS_SHARE * records))

    def sizes(self, where: RecipeStore) -> Sizes:
        """Bytes that it needs in a store; a cache holds at least the rows in flight."""
        if where == "device":
            return Counter(device=self.table_bytes)
        num_slots = self.rows_in_flight if where == "host" else max(self.num_slots, self.rows_in_flight)
        if where == "ssd":
            slots = num_slots * (self.record_bytes + SLOT_BYTES)
            return Counter(host=slots + self.num_rows * (MAP_BYTES + RECORD_BYTES), disk=self.file_bytes)
        slots = num_slots * (self.record_bytes + GPU_SLOT_BYTES)
        return Counter(device=slots + self.num_rows * (MAP_BYTES + STATE_BYTES), host=self.table_bytes)


@dataclass(kw_only=True)
class _Draft(TableSizes):
    """One table whose placement is being decided."""

    table: Table
    rule: TablePlacementSpec
    shard: PlacedShard
    reads: float
    """Ids per example."""
    where: RecipeStore = "device"
    why: str = "as the recipe says"

    @property
    def is_auto(self) -> bool:
        return self.rule.where == "auto"

    @property
    def reads_per_byte(self) -> float:
        return self.reads / (self.table.num_rows * self.record_bytes)

    def to_placement(self) -> TablePlacement:
        sizes = self.sizes(self.where)
        return TablePlacement(
            name=self.table.name,
            where=self.where,
            shard=self.shard,
            why=self.why,
            cache_fraction=self.fraction if STORES[self.where].has_cache else None,
            device_bytes=sizes["device"],
            host_bytes=sizes["host"],
            disk_bytes=sizes["disk"],
        )


def decide(
    spec: RunSpec,
    memories: Memories,
    *,
    mean_ids: Sequence[float] | None = None,
    trains: bool = True,
    world_size: int = 1,
    shards: Mapping[str, PlacedShard] | None = None,
) -> Placement:
    """Choose a placement for every table, or raise a RowsteadError with sizes and possible solutions.

    `mean_ids` is the mean number of ids per example of each sparse feature; it defaults to the feature's `max_ids`, or 1. With
    `trains=False` there is no optimizer state. `world_size` processes shard the tables as in `shards`, evenly except for
    replicated tables; sizes are per process.
    """
    reads = list(mean_ids) if mean_ids is not None else [float(f.max_ids or 1) for f in spec.features.expanded_sparse()]
    drafts = _drafts(spec, memories, reads, shards or {}, trains=trains, world_size=world_size)
    autos = sorted((draft for draft in drafts if draft.is_auto), key=lambda draft: -draft.reads_per_byte)
    fixed = sum((draft.sizes(draft.where) for draft in drafts if not draft.is_auto), Counter())
    if memories.excess(fixed):
        raise RowsteadError(_explain_misfit(spec, memories, drafts, world_size, "the placement in the recipe does not fit"))
    tiers = _tiers(memories)
    taken = _place_in_slowest(autos, fixed, tiers, memories)
    if taken is None:
        raise RowsteadError(_explain_misfit(spec, memories, drafts, world_size, "no placement fits"))
    # Twice: a table that leaves a memory may free enough of it for one that did not fit before.
    for tier in [*reversed(tiers[:-1])] * 2:
        for draft in autos:
            if tiers.index(tier) < tiers.index(draft.where):
                raised = taken - draft.sizes(draft.where) + draft.sizes(tier)
                if not memories.excess(raised):
                    taken, draft.where = raised, tier
    _explain(autos, memories)
    return Placement(tables=tuple(draft.to_placement() for draft in drafts), folder=memories.folder)


def _drafts(
    spec: RunSpec,
    memories: Memories,
    reads: Sequence[float],
    shards: Mapping[str, PlacedShard],
    *,
    trains: bool,
    world_size: int,
) -> list[_Draft]:
    tables = spec.tables
    rules = rules_for(spec.placement, [table.name for table in tables])
    drafts = []
    for table in tables:
        rule = rules[table.name]
        shard = shards.get(table.name, "table") if rule.shard == "auto" else rule.shard
        num_local_rows = table.num_rows if shard == "replicate" else math.ceil(table.num_rows / world_size)
        table_reads = sum(reads[feature] for feature in table.features)
        draft = _Draft(
            table=table,
            rule=rule,
            shard=shard,
            record_bytes=record_bytes(spec, table.width, trains=trains),
            num_rows=num_local_rows,
            reads=table_reads,
            ids_per_step=spec.train.batch_size * table_reads,
            num_tables=len(tables),
            fraction=rule.cache_fraction or CACHE_FRACTION,
        )
        if rule.where == "host" and not memories.has_gpu:
            draft.where, draft.why = "device", "no GPU: device memory is host memory"
        elif rule.where != "auto":
            draft.where = rule.where
        drafts.append(draft)
    return drafts


def _tiers(memories: Memories) -> list[RecipeStore]:
    """The stores that `auto` chooses from, fastest first."""
    tiers: list[RecipeStore] = ["device", "cached"] if memories.has_gpu else ["device"]
    return [*tiers, "ssd"] if memories.folder is not None else tiers


def _place_in_slowest(autos: list[_Draft], fixed: Sizes, tiers: list[RecipeStore], memories: Memories) -> Sizes | None:
    """Place all tables in the slowest store, with smaller caches if necessary; return the bytes used, or None if they do not fit.

    If a memory is full, tables move to a faster store that has capacity left.
    """
    are_given = all(draft.rule.cache_fraction for draft in autos)
    for fraction in (CACHE_FRACTION,) if are_given else (CACHE_FRACTION, *SMALLER_FRACTIONS):
        for draft in autos:
            draft.where = tiers[-1]
            draft.fraction = draft.rule.cache_fraction or fraction
        taken = fixed + sum((draft.sizes(draft.where) for draft in autos), Counter())
        for draft in autos if memories.excess(taken) else ():
            for tier in reversed(tiers[:-1]):
                raised = taken - draft.sizes(draft.where) + draft.sizes(tier)
                if sum(memories.excess(raised).values()) < sum(memories.excess(taken).values()):
                    taken, draft.where = raised, tier
        if not memories.excess(taken):
            return taken
    return None


def _explain(autos: list[_Draft], memories: Memories) -> None:
    all_fit = all(draft.where == "device" for draft in autos)
    fewer = any(draft.where != autos[0].where for draft in autos)
    for draft in autos:
        if draft.where == "device":
            draft.why = "all fit" if all_fit else "read most per byte"
            continue
        cache = memories.name("device" if STORES[draft.where].cache_in == "device" else "host")
        as_fit = ", as many as fit" if draft.fraction < CACHE_FRACTION and draft.rule.cache_fraction is None else ""
        less = "read less per byte" if fewer else f"does not fit in {cache}"
        draft.why = f"{less}; {draft.fraction:.0%} of the rows are cached {'in ' + cache if fewer else 'there'}{as_fit}"


# The error when nothing fits


def _explain_misfit(spec: RunSpec, memories: Memories, drafts: list[_Draft], world_size: int, what: str) -> str:
    """Describe why no placement fits: sizes, and numbered possible solutions."""
    needs = sum(draft.table_bytes for draft in drafts)
    largest = max(drafts, key=lambda draft: draft.table_bytes)
    each = " in each process" if world_size > 1 else ""
    tables = f"{len(drafts)} tables with optimizer state need" if len(drafts) > 1 else "1 table with optimizer state needs"
    available = ", ".join(
        memories.describe(memory) for memory in memories.kinds if memory != "disk" or memories.folder is not None
    )
    message = (
        f"{what}: {tables} {format_bytes(needs)}{each} (largest: `{largest.table.name}`, {format_bytes(largest.table_bytes)}), "
        f"available: {available}."
    )
    fixed = sum((draft.sizes(draft.where) for draft in drafts if not draft.is_auto), Counter())
    for memory in memories.excess(fixed):
        taken = memories.used_bytes(fixed, memory)
        message += f" Tables with a fixed placement need {format_bytes(taken)} of {memories.name(memory)}."
    remedies = enumerate(_remedies(spec, memories, drafts, needs, each), start=1)
    return "\n".join([f"{message} Possible solutions:", *(f"  {number}. {remedy}" for number, remedy in remedies)])


def _remedies(spec: RunSpec, memories: Memories, drafts: list[_Draft], needs: int, each: str) -> list[str]:
    """List possible solutions; `each` is appended to sizes per process."""
    remedies = []
    local_share = needs / table_bytes(spec)  # share of the tables that a process stores
    memory_names = ["device", "host"] if memories.has_gpu else ["host", "device"]
    limits = [f"memory.{name}" for name in (*memory_names, "disk") if name in memories.are_limits]
    if limits:
        remedies.append(f"raise {' or '.join(limits)}")
    on_disk = sum(draft.file_bytes for draft in drafts)
    disk_space = format_bytes(DISK_MARGIN * on_disk)
    if memories.folder is None:
        remedies.append(f"place tables on disk: `--set memory.folder=…`, a folder with {disk_space} free{each}")
    elif on_disk > memories.disk_bytes:
        remedies.append(f"set memory.folder to a folder with {disk_space} free{each}")
    if any(not draft.is_auto for draft in drafts):
        remedies.append("use `where: auto` for more tables")
    if any(draft.rule.cache_fraction is not None for draft in drafts):
        remedies.append("lower cache_fraction")
    if len(_tiers(memories)) > 1 and any(draft.rows_in_flight > draft.num_slots for draft in drafts):
        remedies.append("lower train.batch_size: a cache must hold all rows of the batches in flight")
    capacity = sum(memories.free_bytes(memory) for memory in memories.kinds if memory != "disk")
    share = 0.9 * spec.scale * capacity / needs
    if share < spec.scale and share > 0:
        remedies.append(f"reduce all tables: `--set scale={_round_down(share):g}` or less, or lower model.width")
    if ROW_OPTIMIZERS[spec.train.sparse_optimizer.kind].has_element_state:
        lean_bytes = local_share * table_bytes(with_lean_optimizer(spec))
        remedies.append(
            f"reduce optimizer state: train.sparse_optimizer.kind={LEAN_OPTIMIZER} needs {format_bytes(lean_bytes)}{each}"
        )
    if spec.model.row_format == "fp32":
        halved_bytes = local_share * table_bytes(with_16_bit_rows(spec))
        remedies.append(f"store rows in 16 bits: model.row_format=bf16 needs {format_bytes(halved_bytes)}{each}")
    remedies.append("increase the number of processes: each stores a shard of the tables")
    return remedies


def _round_down(value: float) -> float:
    """Round a positive number down to its first digit."""
    unit = 10.0 ** math.floor(math.log10(value))
    return round(math.floor(value / unit) * unit, 12)
