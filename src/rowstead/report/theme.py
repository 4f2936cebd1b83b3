"""Shared parts of all charts: the Figure class, palettes, axes, traces and escaped labels."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rowstead.report.describe import TextTable

MAX_LABEL = 48
"""Maximum number of characters of a name in a figure; tables show more."""
NUM_COLORS = 8
MAX_SPREAD = 1_000
"""Maximum number of points of a violin."""

LIGHT = {
    **{f"@{index}": color for index, color in enumerate(
        ("#2457c5", "#c2541b", "#1a7f5f", "#8446bd", "#9a7400", "#b02c68", "#0f7d91", "#636a73")
    )},
    "@text": "#1b2129", "@quiet": "#5a6573", "@line": "#dde2e9", "@card": "#ffffff", "@good": "#1a7f56", "@bad": "#b3261e",
    "@scale": [[0, "#eef3fb"], [0.25, "#b9cdf1"], [0.5, "#7ba0e3"], [0.75, "#3f6fd0"], [1, "#173a8a"]],
    "@against": [[0, "#a8410f"], [0.25, "#e6a27c"], [0.5, "#f3f4f6"], [0.75, "#8fb0ec"], [1, "#1c49ab"]],
}  # fmt: skip
"""Light palette. Figures use color tokens; the page replaces them by the viewer's color scheme."""
DARK = {
    **{f"@{index}": color for index, color in enumerate(
        ("#82abff", "#ff9f6a", "#5fd0a8", "#c79bff", "#e6c04d", "#ff86b8", "#5fcbe0", "#aab2bc")
    )},
    "@text": "#e7eaee", "@quiet": "#9ba6b3", "@line": "#2c343e", "@card": "#171c23", "@good": "#5fd0a8", "@bad": "#ff8a80",
    "@scale": [[0, "#1c2532"], [0.25, "#27406f"], [0.5, "#3c66b8"], [0.75, "#6f9af0"], [1, "#cfe0ff"]],
    "@against": [[0, "#ff9f6a"], [0.25, "#8f5434"], [0.5, "#242b34"], [0.75, "#3a5ca3"], [1, "#9dbeff"]],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure: description, traces and layout as plotly's JSON, and its data as a table."""

    key: str
    """Name of its file and of its anchor on the page."""
    title: str
    words: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    table: TextTable | None = None
    height_rem: float = 24.0

    def plain(self, colors: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The figure as plotly's JSON, with color tokens, or with the colors of a palette."""
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


def label(text: object, most: int = MAX_LABEL) -> str:
    """Escape a name so that plotly never reads it as markup or as a color token."""
    plain = "".join(c if c.isprintable() else "�" for c in str(text))
    plain = plain if len(plain) <= most else plain[: most - 1] + "…"
    return html.escape("\N{ZERO WIDTH SPACE}" + plain if plain.startswith("@") else plain)


def labels(names: Iterable[object], most: int = MAX_LABEL) -> list[str]:
    """Names as distinct labels: equal ones after truncation are numbered."""
    found: dict[str, int] = {}
    made = []
    for name in names:
        text = label(name, most)
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
    return {
        "title": {"text": title},
        "automargin": True,
        "zeroline": False,
        "gridcolor": "@line",
        "linecolor": "@line",
        **options,
    }


def log_axis(title: str, values: Iterable[float], **options: Any) -> dict[str, Any]:
    """A log axis with a margin around the values; a short one has ticks at 1, 2 and 5."""
    positive = [value for value in values if value is not None and value > 0] or [1.0]
    low, high = math.log10(min(positive)), math.log10(max(positive))
    margin = max(0.06 * (high - low), 0.04)
    ticks: Any = "D2" if high - low < 2.5 else 1
    span = {"type": "log", "range": [low - margin, high + margin], "dtick": ticks, "exponentformat": "SI"}
    return axis(title, **{**span, **options})


def layout(xaxis: Mapping[str, Any], yaxis: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """A figure's layout with two axes."""
    return {"xaxis": dict(xaxis), "yaxis": dict(yaxis), **bare(**options)}


def bare(**options: Any) -> dict[str, Any]:
    """A figure's layout without axes."""
    return {
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
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


def bars(name: str, x: Sequence[Any], y: Sequence[Any], index: int, **options: Any) -> dict[str, Any]:
    """Bars of one series."""
    return {"type": "bar", "name": name, "x": list(x), "y": list(y), "marker": {"color": color(index)}, **options}


def horizontal_bars(name: str, x: Sequence[Any], y: Sequence[Any], index: int, **options: Any) -> dict[str, Any]:
    """Horizontal bars, separated by a line."""
    edge = {"color": color(index), "line": {"color": "@card", "width": 1}}
    return bars(name, x, y, index, orientation="h", **{"marker": edge, **options})


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
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [low, high],
        "y": [low, high],
        "line": line,
        "hoverinfo": "skip",
    }


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


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most or most < 2:
        return list(items[:most])
    step = (len(items) - 1) / (most - 1)
    return [items[round(index * step)] for index in range(most)]
