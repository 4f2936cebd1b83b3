"""The kinds of memory that a table can live in: recipes, the planner, reports and the what-if page read this list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Memory = Literal["device", "host", "disk", "servers"]
RecipeStore = Literal["device", "host", "cached", "ssd"]
"""What a recipe may name and a run may decide for one table."""
PlannedStore = Literal["device", "cached", "mixed", "host", "ssd", "remote"]
"""What a plan may choose for all tables of a run."""


@dataclass(frozen=True, kw_only=True)
class StoreKind:
    """One kind of memory for tables."""

    name: RecipeStore | PlannedStore
    title: str
    """For tables and pages, on a machine with accelerators."""
    description: str
    """For the docs."""
    rows_in: tuple[Memory, ...]
    """What holds all rows; several where some tables are in one and the others in another."""
    cache_in: Memory | None = None
    """What holds a cache of the hot rows."""

    @property
    def has_cache(self) -> bool:
        return self.cache_in is not None


STORES: dict[str, StoreKind] = {
    one.name: one
    for one in (
        StoreKind(
            name="device",
            title="GPU memory",
            description="memory of the device that trains: a GPU's, or system memory without one",
            rows_in=("device",),
        ),
        StoreKind(
            name="mixed",
            title="GPU + system memory",
            description="as many whole tables as fit in device memory, the others in system memory",
            rows_in=("device", "host"),
        ),
        StoreKind(
            name="host",
            title="system memory",
            description="system memory, accessed by a GPU over its bus",
            rows_in=("host",),
        ),
        StoreKind(
            name="cached",
            title="system memory, cached",
            description="system memory, with hot rows cached in device memory",
            rows_in=("host",),
            cache_in="device",
        ),
        StoreKind(
            name="ssd",
            title="files on SSD",
            description="a file, with hot rows cached in system memory",
            rows_in=("disk",),
            cache_in="host",
        ),
        StoreKind(
            name="remote",
            title="parameter servers",
            description="memory of sparse parameter servers",
            rows_in=("servers",),
        ),
    )
}

IN_RECIPES: tuple[RecipeStore, ...] = get_args(RecipeStore)
IN_PLANS: tuple[PlannedStore, ...] = get_args(PlannedStore)
ROWS_SHARE = 0.75
"""`remote`: distinct rows are sent instead of pooled vectors where they take this share of the bytes or less, both ways.

The trainer then pools bags and sums gradients, which costs more than a few bytes less would save.
"""


def store_title(name: str, *, has_accelerators: bool) -> str:
    """What a kind is called on a machine: without accelerators, the memory of what trains is system memory."""
    return STORES["host" if name == "device" and not has_accelerators else name].title
