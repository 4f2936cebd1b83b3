"""A placement as text: where each table lives, how many bytes it takes, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rowstead.spec.placement import Placement, TablePlacement
from rowstead.spec.sizes import format_bytes
from rowstead.spec.stores import store_title


def placement_text(placement: Placement, *, has_gpu: bool, world_size: int = 1) -> str:
    """One line where all tables are alike, otherwise a table with one line per decision."""
    groups = grouped(placement)
    if len(groups) == 1 and groups[0][0].where == "device":
        group, memory = groups[0], store_title("device", has_accelerators=has_gpu)
        each = f" in each of {world_size} processes, sharded by {group[0].shard}" if world_size > 1 else ""
        return f"tables: {_count(group)}, {format_bytes(_taken(group, ('device',)))} in {memory}{each} ({group[0].why})"
    columns: dict[str, tuple[str, ...]] = {"GPU": ("device",), "host": ("host",)} if has_gpu else {"memory": ("device", "host")}
    columns["disk"] = ("disk",)
    columns = {name: memories for name, memories in columns.items() if _taken(placement.tables, memories)}
    shard = ["shard"] if world_size > 1 else []
    rows = [["tables", "where", *shard, *columns, "why"]]
    for group in groups:
        taken = [_taken(group, memories) for memories in columns.values()]
        shared = [str(group[0].shard)] if world_size > 1 else []
        shown = [format_bytes(one) if one else "" for one in taken]
        rows.append([names_of(group, placement), group[0].where, *shared, *shown, group[0].why])
    if len(groups) > 1:
        total = [format_bytes(_taken(placement.tables, memories)) for memories in columns.values()]
        rows.append(["total", "", *("" for _ in shard), *total, ""])
    if "disk" in columns:
        rows[-1][-1] += f"{'; ' if rows[-1][-1] else ''}files in {placement.folder}"
    first_number = len(rows[0]) - 1 - len(columns)
    return "\n".join(align_columns(rows, numbers=range(first_number, len(rows[0]) - 1)))


def _taken(tables: Iterable[TablePlacement], memories: tuple[str, ...]) -> int:
    return sum(int(getattr(table, f"{memory}_bytes")) for table in tables for memory in memories)


def grouped(placement: Placement) -> list[list[TablePlacement]]:
    """Tables with the same decision and reason, in the order of the first of each group."""
    groups: dict[tuple[str, str, str], list[TablePlacement]] = {}
    for table in placement.tables:
        groups.setdefault((table.where, table.shard, table.why), []).append(table)
    return list(groups.values())


def names_of(group: list[TablePlacement], placement: Placement) -> str:
    """Up to two names; else the first and last where they are consecutive, and the count."""
    names = [table.name for table in group]
    if len(names) <= 2:
        return ", ".join(names)
    order = [table.name for table in placement.tables]
    are_consecutive = order.index(names[-1]) - order.index(names[0]) == len(names) - 1
    return (
        f"{names[0]} … {names[-1]} ({len(names)} tables)"
        if are_consecutive
        else f"{names[0]}, {names[1]} … ({len(names)} tables)"
    )


def _count(group: list[TablePlacement]) -> str:
    return f"{len(group)} tables" if len(group) > 1 else "1 table"


def align_columns(rows: Sequence[Sequence[str]], numbers: range) -> list[str]:
    """Lines of text with aligned columns, numbers right-aligned."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
