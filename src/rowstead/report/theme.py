"""Shared parts of all charts: the Chart and TextTable classes, palettes, axes, traces, and numbers and labels as text."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_LABEL = 48
"""Maximum number of characters of a name in a chart; tables show more."""
NUM_COLORS = 16
MAX_SPREAD = 1_000
"""Maximum number of points of a violin."""

LIGHT = {
    **{f"@{index}": color for index, color in enumerate(
        ("#2457c5", "#c2541b", "#1a7f5f", "#8446bd", "#9a7400", "#b02c68", "#0f7d91", "#636a73",
         "#4f7a00", "#7a4a2a", "#5b3f8c", "#00695c", "#a0303a", "#3c5a7a", "#7d6b00", "#84566f")
    )},
    "@text": "#1b2129", "@quiet": "#5a6573", "@line": "#dde2e9", "@card": "#ffffff", "@good": "#1a7f56", "@bad": "#b3261e",
    "@scale": [[0, "#eef3fb"], [0.25, "#b9cdf1"], [0.5, "#7ba0e3"], [0.75, "#3f6fd0"], [1, "#173a8a"]],
    "@against": [[0, "#a8410f"], [0.25, "#e6a27c"], [0.5, "#f3f4f6"], [0.75, "#8fb0ec"], [1, "#1c49ab"]],
}  # fmt: skip
"""Light palette. Charts use color tokens; the page replaces them by the viewer's color scheme."""
DARK = {
    **{f"@{index}": color for index, color in enumerate(
        ("#82abff", "#ff9f6a", "#5fd0a8", "#c79bff", "#e6c04d", "#ff86b8", "#5fcbe0", "#aab2bc",
         "#b0d860", "#d9a98a", "#a493d6", "#79e0d0", "#ff9d9d", "#9dbcdc", "#d8cf70", "#d8a8c4")
    )},
    "@text": "#e7eaee", "@quiet": "#9ba6b3", "@line": "#2c343e", "@card": "#171c23", "@good": "#5fd0a8", "@bad": "#ff8a80",
    "@scale": [[0, "#1c2532"], [0.25, "#27406f"], [0.5, "#3c66b8"], [0.75, "#6f9af0"], [1, "#cfe0ff"]],
    "@against": [[0, "#ff9f6a"], [0.25, "#8f5434"], [0.5, "#242b34"], [0.75, "#3a5ca3"], [1, "#9dbeff"]],
}  # fmt: skip


@dataclass(frozen=True)
class TextTable:
    """A table of text for a terminal or a page; the first column is a name, the others are numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: description, traces and layout as plotly's JSON, and its data as a table."""

    key: str
    """Name of its file and of its anchor on the page."""
    title: str
    words: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    table: TextTable | None = None
    height_rem: float = 24.0

    def plain(self, colors: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The chart as plotly's JSON, with color tokens, or with the colors of a palette."""
        plain = {"data": [short(trace) for trace in self.traces], "layout": short(self.layout)}
        return plain if colors is None else _colored(plain, colors)


def _colored(value: Any, colors: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith("@"):
        return colors.get(value, value)
    if isinstance(value, Mapping):
        return {key: _colored(item, colors) for key, item in value.items()}
    return [_colored(item, colors) for item in value] if isinstance(value, list) else value


def color(index: int) -> str:
    """The color token of a series by its index."""
    return f"@{index % NUM_COLORS}"


def cut(text: object, most: int) -> str:
    """Text of at most `most` characters, without control characters."""
    plain = "".join(c if c.isprintable() else "�" for c in str(text))
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def label(text: object) -> str:
    """Escape a name so that plotly never reads it as markup or as a color token."""
    plain = cut(text, MAX_LABEL)
    return html.escape("\N{ZERO WIDTH SPACE}" + plain if plain.startswith("@") else plain)


def labels(names: Iterable[object]) -> list[str]:
    """Names as distinct labels: equal ones after truncation are numbered."""
    found: dict[str, int] = {}
    made = []
    for name in names:
        text = label(name)
        found[text] = found.get(text, 0) + 1
        made.append(text if found[text] == 1 else f"{text} ({found[text]})")
    return made


def short(value: Any) -> Any:
    """Round numbers to six digits for a small page; numbers that are not finite become None."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): short(item) for key, item in value.items()}
    return [short(item) for item in value]


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False)  # ASCII: Unicode line separators are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def axis(title: str, **options: Any) -> dict[str, Any]:
    """A plain axis."""
    plain = {"automargin": True, "zeroline": False, "gridcolor": "@line", "linecolor": "@line"}
    return {"title": {"text": title, "standoff": 8}, **plain, **options}


def log_axis(title: str, values: Iterable[float], **options: Any) -> dict[str, Any]:
    """A log axis with a margin around the values, whose ticks are whole numbers as they are: 20k and not the 2 of 20,000."""
    positive = [value for value in values if value is not None and value > 0] or [1.0]
    low, high = math.log10(min(positive)), math.log10(max(positive))
    margin = max(0.06 * (high - low), 0.04)
    ticks = log_ticks(10 ** (low - margin), 10 ** (high + margin))
    texts = {} if "tickformat" in options else {"ticktext": [tick_text(value) for value in ticks]}
    span = {"type": "log", "range": [low - margin, high + margin], "tickmode": "array", "tickvals": ticks, **texts}
    return axis(title, **{**span, **options})


MAX_TICKS = 7


def log_ticks(low: float, high: float) -> list[float]:
    """Up to `MAX_TICKS` round numbers from `low` to `high` for a log axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [float(f"{factor}e{power}") for power in decades for factor in factors]
        found = [value for value in found if low <= value <= high]
        if 3 <= len(found) <= MAX_TICKS:
            return found
    if len(found) > MAX_TICKS:
        return found[:: math.ceil(len(found) / MAX_TICKS)]
    power = math.floor(math.log10((high - low) / 3))  # less than a decade: equal steps
    step = next(step for factor in (1, 2, 5, 10) if (high - low) / (step := float(f"{factor}e{power}")) <= MAX_TICKS - 1)
    return [float(f"{step * number:.12g}") for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def tick_text(value: float) -> str:
    """A round number, from 1,000 on with a prefix: 20k, 1.5M."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.6g}{prefix}"
    return f"{value:.6g}"


def layout(xaxis: Mapping[str, Any], yaxis: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """A chart's layout with two axes."""
    return {"xaxis": dict(xaxis), "yaxis": dict(yaxis), **bare(**options)}


def bare(**options: Any) -> dict[str, Any]:
    """A chart's layout without axes."""
    return {
        "margin": {"l": 8, "r": 22, "t": 8, "b": 8},
        "hovermode": "closest",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "@text"},
        "hoverlabel": {"bgcolor": "@card", "bordercolor": "@line", "font": {"color": "@text"}},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        **options,
    }


def lines(name: str, x: Sequence[Any], y: Sequence[Any], index: int, **options: Any) -> dict[str, Any]:
    """A line with points."""
    return {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": list(x), "y": list(y),
        "line": {"color": color(index), "width": 2}, "marker": {"color": color(index), "size": 6}, **options,
    }  # fmt: skip


def points(name: str, x: Sequence[Any], y: Sequence[Any], index: int, **options: Any) -> dict[str, Any]:
    """Points without a line."""
    return lines(name, x, y, index, mode="markers", marker={"color": color(index), "size": 8, "opacity": 0.75}, **options)


def bars(name: str, x: Sequence[Any], y: Sequence[Any], index: int, **options: Any) -> dict[str, Any]:
    """Bars of one series."""
    return {"type": "bar", "name": name, "x": list(x), "y": list(y), "marker": {"color": color(index)}, **options}


def horizontal_bars(name: str, x: Sequence[Any], y: Sequence[Any], index: int, **options: Any) -> dict[str, Any]:
    """Horizontal bars, separated by a line."""
    edge = {"color": color(index), "line": {"color": "@card", "width": 1}}
    return bars(name, x, y, index, orientation="h", **{"marker": edge, **options})


def row_per_name(across: Mapping[str, Any], num_rows: int, **options: Any) -> dict[str, Any]:
    """Layout and height of a chart with one row per name, from top to bottom."""
    down = axis("", autorange="reversed", type="category")
    return {"layout": layout(across, down, **options), "height_rem": max(11.0, 6 + 2.2 * num_rows)}


def violin(name: str, values: Sequence[float], index: int, **options: Any) -> dict[str, Any]:
    """The distribution of values with their points, evenly thinned to `MAX_SPREAD`."""
    return {
        "type": "violin", "name": name, "y": thinned(sorted(values), MAX_SPREAD), "box": {"visible": True}, "points": "all", "jitter": 0.3,
        "line": {"color": color(index)}, "marker": {"size": 4, "opacity": 0.6}, "spanmode": "hard", **options,
    }  # fmt: skip


def heat_map(
    x: Sequence[str], y: Sequence[str], z: Sequence[Sequence[float | None]], text: Sequence[Sequence[str]], **options: Any
) -> dict[str, Any]:
    """A heat map with a number in each cell."""
    return {
        "type": "heatmap", "x": list(x), "y": list(y), "z": z, "text": text, "texttemplate": "%{text}", "colorscale": "@scale",
        "showscale": False, "xgap": 2, "ygap": 2, **options,
    }  # fmt: skip


def diagonal(name: str, low: float, high: float) -> dict[str, Any]:
    """The line y = x."""
    line = {"color": "@quiet", "dash": "dot", "width": 1.5}
    return lines(name, [low, high], [low, high], 0, mode="lines", line=line, hoverinfo="skip")


def limit_line(at: float, text: str, *, is_vertical: bool = False, ink: str = "@quiet", **options: Any) -> dict[str, Any]:
    """A dotted line over the whole chart, at one value of the y axis, or of the x axis if it is vertical."""
    along, across = "yx" if is_vertical else "xy"
    return {
        "type": "line", f"{along}ref": "paper", f"{along}0": 0, f"{along}1": 1, f"{across}0": at, f"{across}1": at,
        "line": {"dash": "dot", "width": 1.5, "color": ink},
        "label": {"text": text, "textposition": "end", "font": {"color": "@quiet"}, **options},
    }  # fmt: skip


def figure_text(value: float | None) -> str:
    """Format a number of any magnitude."""
    if value is None or not math.isfinite(value):
        return ""
    if abs(value) >= 1e6:
        power = min(4, int(math.log10(abs(value)) // 3))
        return f"{value / 1000**power:.3g} {' kMGT'[power]}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def words_of(value: Any) -> str:
    """A value of a setting or an axis as text; equal layers are written `512^3`."""
    if isinstance(value, (list, tuple)) and value:
        if len(set(map(str, value))) == 1 and len(value) > 1:
            return f"{value[0]}^{len(value)}"
        return "-".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else json.dumps(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most or most < 2:
        return list(items[:most])
    step = (len(items) - 1) / (most - 1)
    return [items[round(index * step)] for index in range(most)]
