"""Where each table lives and how it is sharded over processes: what a recipe asks for, and the decision."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rowstead.spec.bounds import Share, Spec
from rowstead.spec.errors import SpecError, did_you_mean, require
from rowstead.spec.sizes import parse_bytes
from rowstead.spec.stores import STORES, RecipeStore

Where = Literal["auto", RecipeStore]
Shard = Literal["auto", "table", "row", "column", "replicate"]
PlacedShard = Literal["table", "row", "column", "replicate"]
"""What `auto` becomes."""

MAX_MATCHES = 1_000_000
"""Patterns times tables."""
CACHE_FRACTION = 0.1
"""Default share of a table's rows that fit in its cache."""


@dataclass(frozen=True, kw_only=True)
class TablePlacementSpec(Spec):
    """Where some tables live. `user_*: cached` is short for a mapping with `where: cached`."""

    where: Where = "auto"
    """Which memory; `auto` takes the fastest that the table fits in."""
    cache_fraction: Share | None = None
    """Share of the rows that fit in the cache, with `cached` and `ssd`; 0.1 when left out, or less where `auto` needs it."""
    shard: Shard = "auto"
    """How the table is sharded over processes: whole (`table`), by `row`, by `column`, or `replicate` with a copy in each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        has_cache = self.where == "auto" or STORES[self.where].has_cache
        useless = f"a table with `where: {self.where}` has no cache: remove it, or use `cached` or `ssd`"
        require(self.cache_fraction is None or has_cache, "cache_fraction", useless)


PlacementSpec = Where | Mapping[str, Where | TablePlacementSpec]
"""One store for all tables, or rules by table name or pattern."""


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """Limits on the memory of one process's tables. Sizes are numbers of bytes, or text such as `20GB` or `512MiB`."""

    device: int | str | None = None
    """Limit on device memory; without a GPU the smaller of `device` and `host` is the limit on system memory. Default: 90 % of what is free."""
    host: int | str | None = None
    """Limit on system memory. Default: 90 % of what is free."""
    disk: int | str | None = None
    """Limit on the disk of `folder`. Default: 90 % of what is free."""
    folder: str | None = None
    """Folder on a fast local disk for the files of tables on `ssd`. `ssd` without it uses the working folder; `auto` uses no disk without it."""

    def __post_init__(self) -> None:
        for name in ("device", "host", "disk"):
            size = getattr(self, name)
            try:
                require(size is None or parse_bytes(size) > 0, "", f"must be above 0, got {size}")
            except SpecError as error:
                raise error.within(name) from None

    def limit_bytes(self, memory: Literal["device", "host", "disk"]) -> int | None:
        """The limit on one memory in bytes; None if the recipe sets none."""
        size: int | str | None = getattr(self, memory)
        return None if size is None else parse_bytes(size)


def rules_for(placement: PlacementSpec, tables: Sequence[str]) -> dict[str, TablePlacementSpec]:
    """The rule of a recipe's `placement` for each table.

    A table's name takes precedence over patterns, and a longer pattern over a shorter one; rules are not merged.
    """
    if isinstance(placement, str):
        return dict.fromkeys(tables, _expand(placement))
    known = frozenset(tables)
    given = {key: _expand(rule) for key, rule in placement.items()}
    patterns = [name for name in given if name not in known]
    if len(patterns) * len(tables) > MAX_MATCHES:
        most = MAX_MATCHES // len(tables)
        raise SpecError("", f"has {len(patterns):,} patterns, and at most {most:,} are allowed with {len(tables):,} tables")
    for pattern in patterns:
        if not any(_fits(table, pattern) for table in tables):
            raise SpecError(pattern, f"matches no table: {did_you_mean(pattern.strip('*?'), tables)}")
    return {table: given[table] if table in given else _rule_for(table, patterns, given) for table in tables}


def _rule_for(table: str, patterns: Sequence[str], given: Mapping[str, TablePlacementSpec]) -> TablePlacementSpec:
    """The rule of the longest pattern that fits."""
    fitting = [pattern for pattern in patterns if _fits(table, pattern)]
    longest = max(map(len, fitting), default=0)
    first, *others = [pattern for pattern in fitting if len(pattern) == longest] or [""]
    for other in others:
        require(
            given[other] == given[first],
            other,
            f"table `{table}` also matches `{first}`, which has the same length and another rule: add a rule for the table's name",
        )
    return given[first] if first else TablePlacementSpec()


def _fits(table: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(table, pattern)


def _expand(rule: Where | TablePlacementSpec) -> TablePlacementSpec:
    return TablePlacementSpec(where=rule) if isinstance(rule, str) else rule


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Where one table goes, the memory that it takes in a process, and why."""

    name: str
    where: RecipeStore
    shard: PlacedShard
    why: str
    """One clause."""
    cache_fraction: float | None = None
    """Share of the rows that fit in the cache, with `cached` and `ssd`."""
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A decision: where every table goes."""

    tables: tuple[TablePlacement, ...]
    """In the order of the model's tables."""
    folder: str | None = None
    """Folder of the files of tables on `ssd`."""

    def of(self, name: str) -> TablePlacement:
        """The decision about one table."""
        return next(table for table in self.tables if table.name == name)

    def names(self, *stores: str) -> list[str]:
        """The tables in one of these stores."""
        return [table.name for table in self.tables if table.where in stores]

    def total_bytes(self, memory: Literal["device", "host", "disk"]) -> int:
        return sum(getattr(table, f"{memory}_bytes") for table in self.tables)
