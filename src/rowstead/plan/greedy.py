"""Where each table goes: the fastest memory is filled with what is read most per byte, then the next.

All tables that a recipe leaves to `auto` begin in the slowest memory there is. Then, in the order of reads per byte, each is
raised to a faster one if it fits there beside all the others: what those need as caches is never taken away from them.

No torch and no I/O: the memories are given as numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rowstead.plan.work import ELEMENT_BYTES
from rowstead.spec.caching import FILE_SPARE, GROWTH, SETS_IN_FLIGHT
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import Table
from rowstead.spec.placement import CACHE_FRACTION, PlacedShard, Placement, TablePlacement, TablePlacementSpec, rules_for
from rowstead.spec.row_optimizers import LEAN_OPTIMIZER, ROW_OPTIMIZERS
from rowstead.spec.run import RunSpec
from rowstead.spec.sizes import format_bytes
from rowstead.spec.stores import STORES, RecipeStore

Memory = Literal["device", "host", "disk"]

SMALLER_FRACTIONS = (0.05, 0.02, 0.01)
"""What `auto` tries in turn where caches of the usual size do not fit."""
MAP_BYTES = 5
"""A row of a table behind a cache, for its place and how often it was used."""
STATE_BYTES = 4
"""The same row in the memory of a GPU besides, where its optimizer keeps one number a row."""
RECORD_BYTES = 4
"""A row on disk besides, for where its record is."""
DISK_MARGIN = 1.2
"""What a disk should have free over what its files need: some of it is left free."""
SEGMENTS_BYTES, SEGMENTS_SHARE = 27 << 20, 0.42
"""What those take: this much, and of a small file at most this share of its records."""
PLACE_BYTES, GPU_PLACE_BYTES = 20, 22
"""A place, besides its row: which row it holds, and when that was used; on a GPU also how often."""


@dataclass(frozen=True, kw_only=True)
class Memories:
    """What the tables of one process may take of each memory of its machine."""

    device_bytes: int
    """Without a GPU the same memory as the host's, and the lesser of the two counts."""
    host_bytes: int
    disk_bytes: int = 0
    folder: str | None = None
    """For the files of tables on `ssd`; without it there is no such place."""
    has_gpu: bool = False
    are_limits: frozenset[str] = frozenset()
    """Memories whose number is set in the recipe; the others are what is free."""

    @property
    def kinds(self) -> tuple[Memory, ...]:
        """Those that are memories of their own."""
        return ("device", "host", "disk") if self.has_gpu else ("host", "disk")

    def free_bytes(self, memory: Memory) -> int:
        if memory == "disk":
            return self.disk_bytes if self.folder is not None else 0
        if not self.has_gpu:
            return min(self.device_bytes, self.host_bytes)
        return self.device_bytes if memory == "device" else self.host_bytes

    def called(self, memory: Memory) -> str:
        """A memory as a user would say it."""
        if memory == "disk":
            return "the disk"
        return "GPU memory" if memory == "device" and self.has_gpu else "system memory"

    def shown(self, memory: Memory) -> str:
        """Its size, and where that comes from."""
        given = ("device", "host") if memory != "disk" and not self.has_gpu else (memory,)
        limits = [f"memory.{name}" for name in given if name in self.are_limits]
        what = f"a limit of {format_bytes(self.free_bytes(memory))} ({' and '.join(limits)})" if limits else ""
        return what or f"{format_bytes(self.free_bytes(memory))} for tables"


@dataclass(frozen=True)
class Sizes:
    """What one table takes of each memory."""

    device: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(self.device + other.device, self.host + other.host, self.disk + other.disk)

    def __sub__(self, other: Sizes) -> Sizes:
        return Sizes(self.device - other.device, self.host - other.host, self.disk - other.disk)

    def of(self, memory: Memory, memories: Memories) -> int:
        """What is taken of one memory; without a GPU those of device and host are one."""
        if memory == "disk":
            return self.disk
        if not memories.has_gpu:
            return self.device + self.host
        return self.device if memory == "device" else self.host

    def too_much_for(self, memories: Memories) -> list[Memory]:
        """The memories that have not the room."""
        return [memory for memory in memories.kinds if self.of(memory, memories) > memories.free_bytes(memory)]

    def fit(self, memories: Memories) -> bool:
        return not self.too_much_for(memories)

    def excess(self, memories: Memories) -> int:
        """Bytes above what the memories have."""
        return sum(max(0, self.of(memory, memories) - memories.free_bytes(memory)) for memory in memories.kinds)


@dataclass
class _Draft:
    """One table while it is decided upon."""

    table: Table
    rule: TablePlacementSpec
    shard: PlacedShard
    record_bytes: int
    """A row and what its optimizer keeps."""
    num_rows: int
    """That this process keeps."""
    reads: float
    """Ids of one example."""
    batch_size: int
    num_tables: int
    """Of the model, which share a file if they are equally wide."""
    where: RecipeStore = "device"
    fraction: float = CACHE_FRACTION
    why: str = "as the recipe says"
    is_auto: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_auto = self.rule.where == "auto"
        self.fraction = self.rule.cache_fraction or CACHE_FRACTION

    @property
    def whole_bytes(self) -> int:
        return self.num_rows * self.record_bytes

    @property
    def reads_per_byte(self) -> float:
        return self.reads / (self.table.num_rows * self.record_bytes)

    @property
    def num_places(self) -> int:
        return min(self.num_rows, max(1, math.ceil(self.fraction * self.num_rows)))

    @property
    def rows_under_way(self) -> int:
        """That the batches under way may need, if all their ids differ, and some more: room is made in steps."""
        return min(self.num_rows, math.ceil(GROWTH * SETS_IN_FLIGHT * self.batch_size * self.reads))

    @property
    def file_bytes(self) -> int:
        """Of its records on disk, each with its row's number, room to write new ones, and segments that are written or cleaned."""
        records = self.num_rows * (-(-(self.record_bytes + 8) // 8) * 8)
        return int(FILE_SPARE * records + min(SEGMENTS_BYTES / self.num_tables, SEGMENTS_SHARE * records))

    def sizes(self, where: RecipeStore) -> Sizes:
        """What it takes there; a cache at least what a batch may need of it."""
        if where == "device":
            return Sizes(device=self.whole_bytes)
        if where == "host":
            under_way = self.rows_under_way * (self.record_bytes + GPU_PLACE_BYTES)
            return Sizes(device=under_way + self.num_rows * (MAP_BYTES + STATE_BYTES), host=self.whole_bytes)
        num_places = max(self.num_places, self.rows_under_way)
        if where == "cached":
            places = num_places * (self.record_bytes + GPU_PLACE_BYTES)
            return Sizes(device=places + self.num_rows * (MAP_BYTES + STATE_BYTES), host=self.whole_bytes)
        places = num_places * (self.record_bytes + PLACE_BYTES)
        return Sizes(host=places + self.num_rows * (MAP_BYTES + RECORD_BYTES), disk=self.file_bytes)

    def decided(self) -> TablePlacement:
        sizes = self.sizes(self.where)
        return TablePlacement(
            name=self.table.name,
            where=self.where,
            shard=self.shard,
            why=self.why,
            cache_fraction=self.fraction if STORES[self.where].has_cache else None,
            device_bytes=sizes.device,
            host_bytes=sizes.host,
            disk_bytes=sizes.disk,
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
    """A place for every table, or a RowsteadError that says what is missing and what can be done.

    `mean_ids` is how many ids an example has of each sparse feature, where the log is known; otherwise a feature's `max_ids`
    stands for it, or 1. A model that only predicts keeps no optimizer state. `world_size` processes share each table by `shards`,
    and each keeps as much as the others of all but copies: sizes are those of one process.
    """
    reads = list(mean_ids) if mean_ids is not None else [float(f.max_ids or 1) for f in spec.features.expanded_sparse()]
    drafts = _drafts(spec, memories, reads, shards or {}, trains=trains, world_size=world_size)
    autos = sorted((draft for draft in drafts if draft.is_auto), key=lambda draft: -draft.reads_per_byte)
    fixed = _sum([draft.sizes(draft.where) for draft in drafts if not draft.is_auto])
    if not fixed.fit(memories):
        raise RowsteadError(_no_room(spec, memories, drafts, world_size, "as the recipe places them, the tables do not fit"))
    tiers = _tiers(memories)
    taken = _begin(autos, fixed, tiers, memories)
    if taken is None:
        raise RowsteadError(_no_room(spec, memories, drafts, world_size, "no placement fits"))
    # Twice, since a table that leaves a memory may make room there for one that did not fit before.
    for tier in [*reversed(tiers[:-1])] * 2:
        for draft in autos:
            if tiers.index(tier) < tiers.index(draft.where):
                raised = taken - draft.sizes(draft.where) + draft.sizes(tier)
                if raised.fit(memories):
                    taken, draft.where = raised, tier
    _explain(autos, memories)
    return Placement(tables=tuple(draft.decided() for draft in drafts), folder=memories.folder)


def record_bytes(spec: RunSpec, width: int, *, trains: bool = True) -> int:
    """Bytes of a row and of its optimizer's state."""
    state_bytes = ROW_OPTIMIZERS[spec.train.sparse_optimizer.kind].state_bytes(width) if trains else 0
    return width * ELEMENT_BYTES[spec.model.row_format] + state_bytes


def _drafts(
    spec: RunSpec,
    memories: Memories,
    reads: Sequence[float],
    shards: Mapping[str, PlacedShard],
    *,
    trains: bool,
    world_size: int,
) -> list[_Draft]:
    rules = rules_for(spec.placement, [table.name for table in spec.tables])
    drafts = []
    for table in spec.tables:
        rule = rules[table.name]
        shard = shards.get(table.name, "table") if rule.shard == "auto" else rule.shard
        kept = table.num_rows if shard == "replicate" else math.ceil(table.num_rows / world_size)
        draft = _Draft(
            table=table,
            rule=rule,
            shard=shard,
            record_bytes=record_bytes(spec, table.width, trains=trains),
            num_rows=kept,
            reads=sum(reads[feature] for feature in table.features),
            batch_size=spec.train.batch_size,
            num_tables=len(spec.tables),
        )
        if rule.where != "auto":
            draft.where = rule.where
            if rule.where == "host" and not memories.has_gpu:
                draft.where, draft.why = "device", "there is no GPU: the host's memory is the device's"
        drafts.append(draft)
    return drafts


def _tiers(memories: Memories) -> list[RecipeStore]:
    """Where `auto` may put tables, the fastest first."""
    tiers: list[RecipeStore] = ["device", "cached"] if memories.has_gpu else ["device"]
    return [*tiers, "ssd"] if memories.folder is not None else tiers


def _begin(autos: list[_Draft], fixed: Sizes, tiers: list[RecipeStore], memories: Memories) -> Sizes | None:
    """All tables in the slowest place, with smaller caches if need be; what that takes, or none if it does not fit.

    Where one memory has too little room for that, tables are raised to others that have some.
    """
    for fraction in (CACHE_FRACTION, *SMALLER_FRACTIONS):
        for draft in autos:
            draft.where = tiers[-1]
            draft.fraction = draft.rule.cache_fraction or fraction
        taken = fixed + _sum([draft.sizes(draft.where) for draft in autos])
        for draft in autos:
            for tier in reversed(tiers[:-1]):
                raised = taken - draft.sizes(draft.where) + draft.sizes(tier)
                if raised.excess(memories) < taken.excess(memories):
                    taken, draft.where = raised, tier
        if taken.fit(memories):
            return taken
    return None


def _explain(autos: list[_Draft], memories: Memories) -> None:
    all_fit = all(draft.where == "device" for draft in autos)
    fewer = any(draft.where != autos[0].where for draft in autos)
    for draft in autos:
        if draft.where == "device":
            draft.why = "all fit" if all_fit else "read most per byte"
            continue
        cache = memories.called("device" if STORES[draft.where].cache_in == "device" else "host")
        as_fit = ", as many as fit" if draft.fraction < CACHE_FRACTION and draft.rule.cache_fraction is None else ""
        less = "read less per byte" if fewer else f"no room for all of it in {cache}"
        draft.why = f"{less}; {draft.fraction:.0%} of the rows are cached {'in ' + cache if fewer else 'there'}{as_fit}"


def _sum(sizes: Sequence[Sizes]) -> Sizes:
    total = Sizes()
    for one in sizes:
        total += one
    return total


# What to say when nothing fits


def _no_room(spec: RunSpec, memories: Memories, drafts: list[_Draft], world_size: int, what: str) -> str:
    """The message of a placement that is impossible: sizes, and what can be done, numbered."""
    needs = sum(draft.whole_bytes for draft in drafts)
    largest = max(drafts, key=lambda draft: draft.whole_bytes)
    each = " in each process" if world_size > 1 else ""
    lines = [
        f"{what}: {len(drafts)} table{'s' if len(drafts) > 1 else ''} with optimizer state need {format_bytes(needs)}{each}, the "
        f"largest, `{largest.table.name}`, {format_bytes(largest.whole_bytes)}; {_there_is(memories)}"
    ]
    fixed = _sum([draft.sizes(draft.where) for draft in drafts if not draft.is_auto])
    for memory in fixed.too_much_for(memories):
        taken = fixed.of(memory, memories)
        lines[0] += f". Those with a place of their own take {format_bytes(taken)} of {memories.called(memory)}"
    for number, remedy in enumerate(_remedies(spec, memories, drafts, needs, each), start=1):
        lines.append(f"  {number}. {remedy}")
    return "\n".join(lines)


def _there_is(memories: Memories) -> str:
    shown = [f"{memories.called(memory)} has {memories.shown(memory)}" for memory in memories.kinds if memory != "disk"]
    if memories.folder is not None:
        shown.append(f"the disk of {memories.folder} has {memories.shown('disk')}")
    return ", ".join(shown)


def _remedies(spec: RunSpec, memories: Memories, drafts: list[_Draft], needs: int, each: str) -> list[str]:
    """What can be done; `each` follows sizes that are those of one of several processes."""
    remedies = []
    of_whole = needs / _whole(spec)  # that a process keeps
    memory_names = ["device", "host"] if memories.has_gpu else ["host", "device"]
    limits = [f"memory.{name}" for name in (*memory_names, "disk") if name in memories.are_limits]
    if limits:
        remedies.append(f"raise {' or '.join(limits)}")
    on_disk = sum(draft.file_bytes for draft in drafts)
    roomy = format_bytes(DISK_MARGIN * on_disk)
    if memories.folder is None:
        remedies.append(f"let tables go to disk: `--set memory.folder=…`, a folder with {roomy} free{each}")
    elif on_disk > memories.disk_bytes:
        remedies.append(f"use a memory.folder with {roomy} free{each}")
    if any(not draft.is_auto for draft in drafts):
        remedies.append("leave more tables to `where: auto`")
    if any(draft.rule.cache_fraction is not None for draft in drafts):
        remedies.append("lower cache_fraction")
    if len(_tiers(memories)) > 1 and any(draft.rows_under_way > draft.num_places for draft in drafts):
        remedies.append("lower train.batch_size: a cache has room for all rows of the batches under way")
    room = sum(memories.free_bytes(memory) for memory in memories.kinds if memory != "disk")
    share = 0.9 * spec.scale * room / needs
    if share < spec.scale and share > 0:
        remedies.append(f"shrink every table: `--set scale={_rounded_down(share):g}` or less, or lower model.width")
    if ROW_OPTIMIZERS[spec.train.sparse_optimizer.kind].has_element_state:
        optimizer = dataclasses.replace(spec.train.sparse_optimizer, kind=LEAN_OPTIMIZER)
        lean = dataclasses.replace(spec, train=dataclasses.replace(spec.train, sparse_optimizer=optimizer))
        lean_bytes = of_whole * _whole(lean)
        remedies.append(
            f"keep less state: train.sparse_optimizer.kind={LEAN_OPTIMIZER} makes it {format_bytes(lean_bytes)}{each}"
        )
    if spec.model.row_format == "fp32":
        halved = dataclasses.replace(spec, model=dataclasses.replace(spec.model, row_format="bf16"))
        halved_bytes = of_whole * _whole(halved)
        remedies.append(f"keep rows in 16 bits: model.row_format=bf16 makes it {format_bytes(halved_bytes)}{each}")
    remedies.append("train with more processes, each of which keeps a share of the tables")
    return remedies


def _whole(spec: RunSpec) -> int:
    return sum(table.num_rows * record_bytes(spec, table.width) for table in spec.tables)


def _rounded_down(value: float) -> float:
    """A positive number down to its first digit."""
    unit = 10.0 ** math.floor(math.log10(value))
    return round(math.floor(value / unit) * unit, 12)
