"""Where each table lives and how it is cut over processes: what a recipe may ask for, and what was decided."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rowstead.spec.errors import SpecError, did_you_mean, require
from rowstead.spec.sizes import bytes_of

Where = Literal["auto", "device", "host", "cached", "ssd"]
Shard = Literal["auto", "table", "row", "column", "replicate"]
PlacedShard = Literal["table", "row", "column", "replicate"]
"""What `auto` becomes."""

CACHE_FRACTION = 0.1
"""Share of a table's rows that have a place in the faster memory unless a recipe says otherwise."""


@dataclass(frozen=True, kw_only=True)
class TablePlacementSpec:
    """Where some tables shall live. Instead of a mapping, `where` alone will do: `user_*: cached`."""

    where: Where = "auto"
    """`device`: memory of the device that trains. `host`: system memory, used by a GPU over its bus. `cached`: system memory, with hot rows in device memory. `ssd`: a file, with hot rows in system memory. `auto`: the fastest of them that has room."""
    cache_fraction: float | None = None
    """Share of the rows that have a place in the faster memory, with `cached` and `ssd`; 0.1 when left out, less where `auto` has not the room."""
    shard: Shard = "auto"
    """How several processes share the table: each `table` in one of them, by `row`, by `column`, or `replicate`, a copy in each."""

    def __post_init__(self) -> None:
        if self.cache_fraction is not None:
            require(0 < self.cache_fraction <= 1, "cache_fraction", f"must be above 0 and at most 1, got {self.cache_fraction}")
            require(
                self.where not in ("device", "host"),
                "cache_fraction",
                f"a table with `where: {self.where}` has no cache: leave it out, or use `cached` or `ssd`",
            )


PlacementSpec = Literal["auto"] | Mapping[str, Where | TablePlacementSpec]
"""`auto`, or what to do with tables by name or pattern."""


@dataclass(frozen=True, kw_only=True)
class MemorySpec:
    """What the tables of one process may take. Sizes are numbers of bytes, or text such as `20GB` or `512MiB`."""

    device: int | str | None = None
    """Of the memory of the device that trains. Without a GPU that is system memory, and the lesser of `device` and `host` counts. When left out: what is free, less a tenth."""
    host: int | str | None = None
    """Of system memory. When left out: what is free, less a tenth."""
    disk: int | str | None = None
    """Of the disk that `folder` is on. When left out: what is free, less a tenth."""
    folder: str | None = None
    """Folder for the files of tables on `ssd`: on a fast local disk. Without it no table goes to `ssd`."""

    def __post_init__(self) -> None:
        for name in ("device", "host", "disk"):
            size = getattr(self, name)
            try:
                require(size is None or bytes_of(size) > 0, "", f"must be above 0, got {size}")
            except SpecError as error:
                raise error.within(name) from None

    def limit_bytes(self, memory: Literal["device", "host", "disk"]) -> int | None:
        """The limit on one memory in bytes; none when the recipe sets none."""
        size: int | str | None = getattr(self, memory)
        return None if size is None else bytes_of(size)


def rules_for(placement: PlacementSpec, tables: Sequence[str]) -> dict[str, TablePlacementSpec]:
    """For each table what a recipe's `placement` says of it.

    A table's own name counts before patterns, a longer pattern before a shorter one; one rule counts alone.
    """
    given = {} if isinstance(placement, str) else {key: _written_out(rule) for key, rule in placement.items()}
    for pattern in given:
        if not any(_fits(table, pattern) for table in tables):
            raise SpecError(pattern, f"matches no table: {did_you_mean(pattern.strip('*?'), tables)}")
    return {table: _rule_for(table, given) for table in tables}


def _rule_for(table: str, given: Mapping[str, TablePlacementSpec]) -> TablePlacementSpec:
    if table in given:
        return given[table]
    fitting = [pattern for pattern in given if _fits(table, pattern)]
    longest = max(map(len, fitting), default=0)
    first, *others = [pattern for pattern in fitting if len(pattern) == longest] or [""]
    for other in others:
        require(
            given[other] == given[first],
            other,
            f"table `{table}` fits `{first}` as well, which is as long and says something else: name the table itself",
        )
    return given[first] if first else TablePlacementSpec()


def _fits(table: str, pattern: str) -> bool:
    return table == pattern or fnmatch.fnmatchcase(table, pattern)


def _written_out(rule: Where | TablePlacementSpec) -> TablePlacementSpec:
    return TablePlacementSpec(where=rule) if isinstance(rule, str) else rule


@dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Where one table goes, what that takes of each memory of a process, and why."""

    name: str
    where: Literal["device", "host", "cached", "ssd"]
    shard: PlacedShard
    why: str
    """One clause."""
    cache_fraction: float | None = None
    """Share of the rows that have a place in the faster memory, with `cached` and `ssd`."""
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A decision: where every table goes."""

    tables: tuple[TablePlacement, ...]
    """In the order of the model's tables."""
    folder: str | None = None
    """Of the files of tables on `ssd`."""

    def of(self, name: str) -> TablePlacement:
        """The decision about one table."""
        return next(table for table in self.tables if table.name == name)

    def names(self, *places: str) -> list[str]:
        """The tables that are in one of these places."""
        return [table.name for table in self.tables if table.where in places]

    def total_bytes(self, memory: Literal["device", "host", "disk"]) -> int:
        return sum(getattr(table, f"{memory}_bytes") for table in self.tables)
