"""A placement as text: which tables are where, how many bytes that takes, and why."""

from __future__ import annotations

from collections.abc import Iterable

from rowstead.spec.placement import Placement, TablePlacement
from rowstead.spec.sizes import shown_bytes


def placement_text(placement: Placement, *, has_gpu: bool, world_size: int = 1) -> str:
    """One line where all tables are alike, otherwise a table with a line for each kind of decision."""
    groups = grouped(placement)
    if len(groups) == 1 and groups[0][0].where == "device":
        group, memory = groups[0], "GPU memory" if has_gpu else "system memory"
        each = f" in each of {world_size} processes, shared by {group[0].shard}" if world_size > 1 else ""
        return f"tables: {_count(group)}, {shown_bytes(_taken(group, ('device',)))} in {memory}{each} ({group[0].why})"
    columns: dict[str, tuple[str, ...]] = {"GPU": ("device",), "host": ("host",)} if has_gpu else {"memory": ("device", "host")}
    columns["disk"] = ("disk",)
    columns = {name: memories for name, memories in columns.items() if _taken(placement.tables, memories)}
    shard = ["shard"] if world_size > 1 else []
    rows = [["tables", "where", *shard, *columns, "why"]]
    for group in groups:
        taken = [_taken(group, memories) for memories in columns.values()]
        shared = [str(group[0].shard)] if world_size > 1 else []
        shown = [shown_bytes(one) if one else "" for one in taken]
        rows.append([names_of(group, placement), group[0].where, *shared, *shown, group[0].why])
    if len(groups) > 1:
        total = [shown_bytes(_taken(placement.tables, memories)) for memories in columns.values()]
        rows.append(["in all", "", *("" for _ in shard), *total, ""])
    if "disk" in columns:
        rows[-1][-1] += f"{'; ' if rows[-1][-1] else ''}files in {placement.folder}"
    first_number = len(rows[0]) - 1 - len(columns)
    return "\n".join(_aligned(rows, numbers=range(first_number, len(rows[0]) - 1)))


def _taken(tables: Iterable[TablePlacement], memories: tuple[str, ...]) -> int:
    return sum(int(getattr(table, f"{memory}_bytes")) for table in tables for memory in memories)


def grouped(placement: Placement) -> list[list[TablePlacement]]:
    """Tables for which the same was decided for the same reason, in the order of their first."""
    groups: dict[tuple[str, str, str], list[TablePlacement]] = {}
    for table in placement.tables:
        groups.setdefault((table.where, table.shard, table.why), []).append(table)
    return list(groups.values())


def names_of(group: list[TablePlacement], placement: Placement) -> str:
    """A few tables by name; more by first and last if they follow each other, and how many they are."""
    names = [table.name for table in group]
    if len(names) <= 2:
        return ", ".join(names)
    order = [table.name for table in placement.tables]
    follow = order.index(names[-1]) - order.index(names[0]) == len(names) - 1
    return f"{names[0]} … {names[-1]} ({len(names)} tables)" if follow else f"{names[0]}, {names[1]} … ({len(names)} tables)"


def _count(group: list[TablePlacement]) -> str:
    return f"{len(group)} tables" if len(group) > 1 else "1 table"


def _aligned(rows: list[list[str]], numbers: range) -> list[str]:
    """Lines of text with the columns under each other, numbers to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
