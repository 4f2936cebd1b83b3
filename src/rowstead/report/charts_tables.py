"""Charts of features and tables: sizes, lengths, and placement by memory and traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rowstead.plan.traffic import mean_ids
from rowstead.plan.work import step_work
from rowstead.report.describe import TextTable
from rowstead.report.inputs import RunView
from rowstead.report.theme import Figure, bare, color, figure_text, label, labels, layout, lines, log_axis, thinned
from rowstead.spec.run import RunSpec
from rowstead.spec.sizes import format_bytes
from rowstead.spec.stores import STORES

MAX_TABLES = 400
"""Maximum number of boxes of a treemap; smaller tables are merged."""


@dataclass(frozen=True, kw_only=True)
class FeatureSizes:
    """The sparse features of a recipe (the paper's Figs. 6 and 7)."""

    names: tuple[str, ...]
    num_rows: tuple[int, ...]
    """Hash size of each feature's table."""
    ids: tuple[float, ...]
    """Mean ids per example, after truncation."""


def feature_sizes(spec: RunSpec) -> FeatureSizes:
    """Hash size and mean length of each feature of a recipe."""
    rows = {index: table.num_rows for table in spec.tables for index in table.features}
    features = spec.features.expanded_sparse()
    return FeatureSizes(
        names=tuple(feature.name for feature in features),
        num_rows=tuple(rows[index] for index in range(len(features))),
        ids=mean_ids(spec),
    )


def draw_sizes(found: Sequence[tuple[str, FeatureSizes]]) -> Figure | None:
    """Hash size against mean length, by recipe."""
    found = [(name, sizes) for name, sizes in found if sizes.names]
    if not found:
        return None
    traces, rows = [], []
    for index, (name, sizes) in enumerate(found):
        points = thinned(list(zip(sizes.ids, sizes.num_rows, sizes.names, strict=True)), MAX_TABLES)
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": label(name), "x": [max(one[0], 1e-3) for one in points],
                "y": [one[1] for one in points], "text": [label(one[2]) for one in points],
                "hovertemplate": "%{text}<br>%{x:.3~g} ids per example<br>%{y:,} rows<extra></extra>",
                "marker": {"color": color(index), "size": 9, "opacity": 0.7},
            }
        )  # fmt: skip
        rows += [(one[2], name, figure_text(one[0]), f"{one[1]:,}") for one in points[:100]]
    lengths = [max(length, 1e-3) for _, sizes in found for length in sizes.ids]
    heights = [float(size) for _, sizes in found for size in sizes.num_rows]
    return Figure(
        key="feature-sizes",
        title="Hash size against mean length (Fig. 6)",
        words="Each point is a sparse feature: rows of its table, and its mean ids per example. Table size and traffic need not be correlated.",
        traces=traces,
        layout=layout(log_axis("mean ids per example", lengths), log_axis("hash size, rows", heights)),
        table=TextTable("Features", ("feature", "recipe", "mean ids", "hash size"), tuple(rows)),
    )


def draw_lengths(found: Sequence[tuple[str, FeatureSizes]]) -> Figure | None:
    """Mean lengths in descending order, by recipe: a power law is a straight line."""
    found = [(name, sizes) for name, sizes in found if len(sizes.names) > 1]
    if not found:
        return None
    traces = []
    for index, (name, sizes) in enumerate(found):
        falling = thinned(
            list(enumerate(sorted((max(length, 1e-3) for length in sizes.ids), reverse=True), start=1)), MAX_TABLES
        )
        hover = "rank %{x}<br>%{y:.3~g} ids per example<extra></extra>"
        traces.append(lines(label(name), [one[0] for one in falling], [one[1] for one in falling], index, hovertemplate=hover))
    lengths = [max(length, 1e-3) for _, sizes in found for length in sizes.ids]
    ranks = [1.0, float(max(len(sizes.names) for _, sizes in found))]
    return Figure(
        key="feature-lengths",
        title="Mean lengths over features (Fig. 7)",
        words="Features in order of their mean ids per example, on log scales. A straight line is a power law.",
        traces=traces,
        layout=layout(log_axis("rank of the feature", ranks), log_axis("mean ids per example", lengths)),
    )


@dataclass(frozen=True, kw_only=True)
class PlacedTable:
    """A table with its placement, size and traffic."""

    name: str
    where: str
    num_bytes: float
    """Rows and optimizer state."""
    read_bytes: float
    """Mean bytes read per example."""


def placed_tables(run: RunView) -> list[PlacedTable]:
    """The tables of a run with their placement; on the device if the run saved none."""
    spec = run.spec
    if spec is None:
        return []
    where = {str(table["name"]): str(table.get("where", "device")) for table in run.placement}
    return [
        PlacedTable(
            name=table.name,
            where=where.get(table.name, "device"),
            num_bytes=float(table.bytes),
            read_bytes=table.ids_per_sample * table.row_bytes,
        )
        for table in step_work(spec).tables
    ]


def draw_placement(run_name: str, tables: Sequence[PlacedTable], *, by: str = "memory") -> Figure | None:
    """Tables as a treemap: area is memory and color is traffic, or vice versa."""
    if not tables:
        return None
    memory = by == "memory"

    def area(table: PlacedTable) -> float:
        return table.num_bytes if memory else table.read_bytes

    falling = sorted(tables, key=area, reverse=True)
    shown, rest = falling[:MAX_TABLES], falling[MAX_TABLES:]
    if rest:
        for where in dict.fromkeys(table.where for table in rest):
            mine = [table for table in rest if table.where == where]
            held, read = sum(table.num_bytes for table in mine), sum(table.read_bytes for table in mine)
            shown.append(PlacedTable(name=f"{len(mine):,} smaller tables", where=where, num_bytes=held, read_bytes=read))
    stores = list(dict.fromkeys(table.where for table in shown))
    ids = [f"store-{index}" for index in range(len(stores))]
    # A parent's area is the sum of its children: 0 of its own, so that rounding errors cannot exceed it.
    data: dict[str, list[Any]] = {
        "ids": [*ids, *(f"table-{index}" for index in range(len(shown)))],
        "labels": [*(label(STORES[where].title) for where in stores), *labels(table.name for table in shown)],
        "parents": [*("" for _ in stores), *(ids[stores.index(table.where)] for table in shown)],
        "values": [*(0.0 for _ in stores), *(area(table) for table in shown)],
        "colors": [*(0.0 for _ in stores), *((table.read_bytes if memory else table.num_bytes) for table in shown)],
        "text": [
            *(f"{sum(table.where == where for table in shown)} tables" for where in stores),
            *(f"{format_bytes(table.num_bytes)}<br>{format_bytes(table.read_bytes)} read per example" for table in shown),
        ],
    }
    heat = [value for value in data["colors"][len(stores) :] if isinstance(value, float)]
    trace = {
        "type": "treemap", "ids": data["ids"], "labels": data["labels"], "parents": data["parents"], "values": data["values"],
        "text": data["text"], "textinfo": "label+text", "hovertemplate": "%{label}<br>%{text}<extra></extra>",
        "marker": {
            "colors": data["colors"], "colorscale": "@scale", "cmin": 0, "cmax": max(heat, default=1.0) or 1.0, "line": {"color": "@card", "width": 1},
            "colorbar": {"title": {"text": "bytes read<br>per example" if memory else "bytes"}, "thickness": 12, "exponentformat": "SI", "len": 0.9},
        },
        "tiling": {"pad": 2}, "pathbar": {"visible": False},
    }  # fmt: skip
    what = (
        "area is its memory, color the bytes read per example"
        if memory
        else "area is the bytes read per example, color its memory"
    )
    total = sum(table.num_bytes for table in tables)
    rows = tuple(
        (table.name, table.where, format_bytes(table.num_bytes), format_bytes(table.read_bytes)) for table in falling[:100]
    )
    return Figure(
        key=f"placement-by-{by}",
        title=f"Placement by {by}",
        words=f"{len(tables):,} {'tables' if len(tables) > 1 else 'table'} of {run_name} ({format_bytes(total)}), by store. Each box is a table: {what}.",
        traces=[trace],
        layout=bare(margin={"l": 2, "r": 2, "t": 2, "b": 2}),
        table=TextTable("Tables", ("table", "where", "memory", "read per example"), rows) if memory else None,
        height_rem=28,
    )
