"""Charts of features and tables: sizes, lengths, and placement by memory and traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rowstead.plan.traffic import mean_ids
from rowstead.plan.work import step_work
from rowstead.report.inputs import RunView
from rowstead.report.terminal import count
from rowstead.report.theme import (
    Chart,
    TextTable,
    bare,
    figure_text,
    label,
    labels,
    layout,
    limit_line,
    lines,
    log_axis,
    points,
    thinned,
)
from rowstead.spec.run import RunSpec
from rowstead.spec.sizes import format_bytes
from rowstead.spec.stores import STORES

MAX_TABLES = 400
"""Maximum number of boxes of a treemap; smaller tables are merged."""
MIN_LENGTH = 1e-3
"""Shorter means are drawn here, as log axes have no zero."""


@dataclass(frozen=True, kw_only=True)
class FeatureSizes:
    """The sparse features of a recipe or a log."""

    names: tuple[str, ...]
    num_rows: tuple[int, ...]
    """Hash size of each feature's table, or its distinct ids in a log."""
    ids: tuple[float, ...]
    """Mean ids per example, after truncation."""


def feature_sizes(spec: RunSpec, ids: Sequence[float] | None = None) -> FeatureSizes:
    """Hash size and mean length of each feature of a recipe; `ids` are the mean lengths of its log, if it is not synthetic."""
    rows = {index: table.num_rows for table in spec.tables for index in table.features}
    features = spec.features.expanded_sparse()
    return FeatureSizes(
        names=tuple(feature.name for feature in features),
        num_rows=tuple(rows[index] for index in range(len(features))),
        ids=mean_ids(spec) if ids is None else tuple(ids),
    )


def draw_sizes(
    found: Sequence[tuple[str, FeatureSizes]],
    *,
    title: str = "Hash size against mean length",
    words: str = "Each point is a sparse feature: rows of its table, and its mean ids per example. Table size and traffic need not be correlated.",
    limit: int | None = None,
    size_title: str = "hash size",
) -> Chart | None:
    """Hash size against mean length, by recipe; `limit` is a hash size that all share, drawn as a line."""
    found = [(name, sizes) for name, sizes in found if sizes.names]
    if not found:
        return None
    traces, rows = [], []
    for index, (name, sizes) in enumerate(found):
        lengths = [max(length, MIN_LENGTH) for length in sizes.ids]
        shown = thinned(list(zip(lengths, sizes.num_rows, sizes.names, strict=True)), MAX_TABLES)
        x, y, names = zip(*shown, strict=True)
        hover = "%{text}<br>%{x:.3~g} ids per example<br>%{y:,}<extra>" + label(name) + "</extra>"
        traces.append(points(label(name), x, y, index, text=[label(one) for one in names], hovertemplate=hover))
        rows += [(one, name, figure_text(length), f"{size:,}") for length, size, one in shown[:100]]
    heights = [float(size) for trace in traces for size in trace["y"]] + ([] if limit is None else [float(limit)])
    shapes = [] if limit is None else [limit_line(limit, f"hash size {limit:,}", yanchor="top")]
    across = log_axis("mean ids per example", [length for trace in traces for length in trace["x"]])
    return Chart(
        key="feature-sizes",
        title=title,
        words=words,
        traces=traces,
        layout=layout(across, log_axis(size_title, heights), shapes=shapes),
        table=TextTable("Features", ("feature", "of", "mean ids", size_title), tuple(rows)),
    )


def draw_lengths(found: Sequence[tuple[str, FeatureSizes]], *, title: str = "Mean lengths over features") -> Chart | None:
    """Mean lengths in descending order, by recipe: a power law is a straight line."""
    found = [(name, sizes) for name, sizes in found if len(sizes.names) > 1]
    if not found:
        return None
    traces = []
    rows: list[tuple[str, ...]] = []
    for index, (name, sizes) in enumerate(found):
        falling = sorted(zip(sizes.ids, sizes.names, strict=True), key=lambda one: -one[0])
        ranks, shown = zip(*thinned(list(enumerate(falling, start=1)), MAX_TABLES), strict=True)
        trace = lines(label(name), ranks, [max(length, MIN_LENGTH) for length, _ in shown], index)
        hover = "%{text}<br>rank %{x}<br>%{y:.3~g} ids per example<extra></extra>"
        traces.append(trace | {"text": [label(feature) for _, feature in shown], "hovertemplate": hover})
        rows += [
            (feature, name, str(rank), figure_text(length))
            for rank, (length, feature) in list(zip(ranks, shown, strict=True))[:100]
        ]
    lengths = [length for trace in traces for length in trace["y"]]
    return Chart(
        key="feature-lengths",
        title=title,
        words="Features in order of their mean ids per example, on log scales. A straight line is a power law.",
        traces=traces,
        layout=layout(
            log_axis("rank of the feature", [rank for trace in traces for rank in trace["x"]]),
            log_axis("mean ids per example", lengths),
        ),
        table=TextTable("Lengths", ("feature", "of", "rank", "mean ids"), tuple(rows)),
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
    """The tables of a run with their placement; on the device if the run saved none. Unknown lengths count as one id."""
    spec = run.spec
    if spec is None:
        return []
    ids = run.mean_ids or mean_ids(spec)
    where = {str(table["name"]): str(table.get("where", "device")) for table in run.placement}
    facts = {} if run.entry is None else run.entry.record.machine
    on_cpu = "cpu" in facts and "gpu" not in facts  # there the memory of what trains is system memory
    return [
        PlacedTable(
            name=table.name,
            where=_store(where.get(table.name, "device"), on_cpu=on_cpu),
            num_bytes=float(table.bytes),
            read_bytes=sum(ids[feature] for feature in features.features) * table.row_bytes,
        )
        for table, features in zip(step_work(spec).tables, spec.tables, strict=True)
    ]


def _store(name: str, *, on_cpu: bool) -> str:
    return "host" if name == "device" and on_cpu else name


def draw_placement(run_name: str, tables: Sequence[PlacedTable], *, by: str = "memory") -> Chart | None:
    """Tables as a treemap: area is memory and color is traffic, or vice versa."""
    if not tables:
        return None
    memory = by == "memory"

    def area_and_color(table: PlacedTable) -> tuple[float, float]:
        return (table.num_bytes, table.read_bytes) if memory else (table.read_bytes, table.num_bytes)

    falling = sorted(tables, key=area_and_color, reverse=True)
    shown, rest = falling[:MAX_TABLES], falling[MAX_TABLES:]
    for where in dict.fromkeys(table.where for table in rest):
        mine = [table for table in rest if table.where == where]
        held, read = sum(table.num_bytes for table in mine), sum(table.read_bytes for table in mine)
        shown.append(PlacedTable(name=f"{len(mine):,} smaller tables", where=where, num_bytes=held, read_bytes=read))
    parents = {where: f"store-{index}" for index, where in enumerate(dict.fromkeys(table.where for table in shown))}
    # A parent's area is the sum of its children: 0 of its own, so that rounding errors cannot exceed it.
    boxes = [
        (parent, label(STORES[where].title), "", 0.0, 0.0, f"{sum(table.where == where for table in shown)} tables")
        for where, parent in parents.items()
    ]
    for index, (table, name) in enumerate(zip(shown, labels(table.name for table in shown), strict=True)):
        text = f"{format_bytes(table.num_bytes)}<br>{format_bytes(table.read_bytes)} read per example"
        boxes.append((f"table-{index}", name, parents[table.where], *area_and_color(table), text))
    ids, names, owners, areas, colors, texts = (list(column) for column in zip(*boxes, strict=True))
    trace = {
        "type": "treemap", "ids": ids, "labels": names, "parents": owners, "values": areas,
        "text": texts, "textinfo": "label+text", "hovertemplate": "%{label}<br>%{text}<extra></extra>",
        "marker": {
            "colors": colors, "colorscale": "@scale", "cmin": 0, "cmax": max(colors) or 1.0, "line": {"color": "@card", "width": 1},
            "colorbar": {"title": {"text": "bytes read per example" if memory else "bytes of memory", "side": "top"}, "thickness": 10, "exponentformat": "SI", "orientation": "h", "y": 0, "yanchor": "top"},
        },
        "tiling": {"pad": 2}, "pathbar": {"visible": False},
    }  # fmt: skip
    what = ("its memory", "the bytes read per example") if memory else ("the bytes read per example", "its memory")
    total = sum(table.num_bytes for table in tables)
    rows = tuple((one.name, one.where, format_bytes(one.num_bytes), format_bytes(one.read_bytes)) for one in falling[:100])
    return Chart(
        key=f"placement-by-{by}",
        title=f"Placement by {by}",
        words=f"{count(len(tables), 'table')} of {run_name} ({format_bytes(total)}), by store. "
        f"Each box is a table: area is {what[0]}, color {what[1]}.",
        traces=[trace],
        layout=bare(margin={"l": 2, "r": 2, "t": 2, "b": 2}),
        table=TextTable("Tables", ("table", "where", "memory", "read per example"), rows) if memory else None,
        height_rem=28,
    )
