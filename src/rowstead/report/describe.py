"""A log's statistics as tables and as one self-contained HTML page. Does not import torch.

The page includes plotly.js and a content security policy that forbids all requests, so it works offline. Column names come from the
log and are escaped.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rowstead.spec.statistics import QUANTILES, LogStatistics, SparseStatistics

MAX_CURVES = 40
"""Maximum number of curves; of more sparse features, those with the most accesses are drawn."""


@dataclass(frozen=True)
class TextTable:
    """A table of text for a terminal or a page; the first column is a name, the others are numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_SPARSE_HEADINGS = (
    *("feature", "distinct ids", "ids/example", "p50", "p90", "p99", "max", "empty"),
    *("top 1 %", "top 10 %", "hash size", "collisions", "expected"),
)
_DENSE_HEADINGS = ("feature", "mean", "std", "min", "p1", "p50", "p99", "max", "missing", "infinite")


def tables(statistics: LogStatistics) -> tuple[TextTable, ...]:
    """The statistics as tables: sparse features, then dense features, if there are any."""
    made = []
    if statistics.sparse:
        made.append(TextTable("Sparse features", _SPARSE_HEADINGS, tuple(_sparse_row(one) for one in statistics.sparse)))
    if statistics.dense:
        shown = [QUANTILES.index(q) for q in (0.01, 0.5, 0.99)]
        rows = []
        for one in statistics.dense:
            quantiles = [one.quantiles[i] if one.quantiles else None for i in shown]
            numbers = (one.mean, one.std, one.min, *quantiles, one.max)
            shares = (share(one.missing_share), share(one.infinite_share))
            rows.append((one.name, *(number(value) for value in numbers), *shares))
        made.append(TextTable("Dense features", _DENSE_HEADINGS, tuple(rows)))
    return tuple(made)


def _sparse_row(one: SparseStatistics) -> tuple[str, ...]:
    return (
        one.name,
        f"{one.num_distinct:,}" if one.exact else f"~{number(one.num_distinct)} ± {100 * one.distinct_error:.1f} %",
        number(one.length_mean),
        *(f"{length:,}" for length in (one.length_p50, one.length_p90, one.length_p99, one.length_max)),
        *(share(value) for value in (one.empty_share, one.top_1_percent_share, one.top_10_percent_share)),
        "" if one.num_rows is None else f"{one.num_rows:,}",
        share(one.actual_collisions),
        share(one.expected_collisions),
    )


def headline(statistics: LogStatistics) -> str:
    """One line about the log."""
    parts = [f"{statistics.num_rows:,} rows", f"{len(statistics.dense)} dense and {len(statistics.sparse)} sparse features"]
    if statistics.sparse:
        parts.append(f"{number(sum(one.length_mean for one in statistics.sparse))} ids per example")
    if statistics.label_mean is not None:
        parts.append(f"mean label {number(statistics.label_mean)}")
    if statistics.num_labels_missing:
        parts.append(f"{statistics.num_labels_missing:,} labels missing")
    return ", ".join(parts)


def share(value: float | None) -> str:
    """A share as a percentage; empty if unknown."""
    if value is None:
        return ""
    percent = 100 * value
    return "0 %" if percent == 0 else "<0.1 %" if percent < 0.1 else f"{percent:.1f} %"


def number(value: float | None) -> str:
    """A number with four significant digits; empty if unknown."""
    if value is None:
        return ""
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3e}"
    if value == int(value):
        return f"{int(value):,}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


@dataclass(frozen=True)
class Drawing:
    """One chart of the page: a description and the figure as plotly's JSON."""

    title: str
    words: str
    figure: dict[str, Any]


def drawings(statistics: LogStatistics) -> tuple[Drawing, ...]:
    """The charts for a log's sparse features; empty if it has none."""
    if not statistics.sparse:
        return ()
    made = (_sizes(statistics), _mean_lengths(statistics), _lengths(statistics), _skew(statistics))
    return tuple(drawing for drawing in made if drawing is not None)


def _name(one: SparseStatistics) -> str:
    return html.escape(one.name)


def _sizes(statistics: LogStatistics) -> Drawing:
    """Distinct ids and hash size against mean length (the paper's Fig. 6)."""
    sparse = statistics.sparse
    lengths = [max(one.length_mean, 1e-3) for one in sparse]
    names = [_name(one) for one in sparse]
    hover = "%{text}<br>%{x:.3~g} ids per example<br>%{y:,} "
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "distinct ids",
            "x": lengths,
            "y": [max(one.num_distinct, 1) for one in sparse],
            "text": names,
            "hovertemplate": hover + "distinct ids<extra></extra>",
            "marker": {"size": 9, "opacity": 0.8},
        }
    ]
    sizes = [one.num_rows for one in sparse]
    shapes: list[dict[str, Any]] = []
    if None not in sizes and len(set(sizes)) > 1:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "hash size",
                "x": lengths,
                "y": sizes,
                "text": names,
                "hovertemplate": hover + "rows<extra></extra>",
                "marker": {"size": 9, "symbol": "diamond-open"},
            }
        )
    elif sizes[0] is not None:
        shapes.append(
            {
                "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": sizes[0], "y1": sizes[0],
                "line": {"dash": "dot", "width": 1.5, "color": "#888"},
                "label": {"text": f"hash size {sizes[0]:,}", "textposition": "end", "yanchor": "top", "font": {"color": "#888"}},
            }
        )  # fmt: skip
    heights = [*(max(one.num_distinct, 1) for one in sparse), *(size for size in sizes if size is not None)]
    layout = _layout(_log_axis("mean ids per example", lengths), _log_axis("ids, rows", heights))
    words = "Each point is a sparse feature: its number of distinct ids and its mean ids per example."
    return Drawing("Size against mean length", words, {"data": traces, "layout": {**layout, "shapes": shapes}})


def _mean_lengths(statistics: LogStatistics) -> Drawing:
    """Mean lengths over features (the paper's Fig. 7): a power law is a straight line."""
    falling = sorted(statistics.sparse, key=lambda one: -one.length_mean)
    means = [max(one.length_mean, 1e-3) for one in falling]
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(range(1, len(falling) + 1)),
        "y": means,
        "text": [_name(one) for one in falling],
        "hovertemplate": "%{text}<br>%{y:.3~g} ids per example<extra></extra>",
        "marker": {"size": 7},
        "line": {"width": 1.5},
    }
    layout = _layout(_log_axis("rank of the feature", [1, len(falling)]), _log_axis("mean ids per example", means))
    words = "Features in order of their mean ids per example, on log scales. A straight line is a power law."
    return Drawing("Mean length over features", words, {"data": [trace], "layout": layout})


def _lengths(statistics: LogStatistics) -> Drawing | None:
    """The distribution of ids per example of each feature; None if no feature has more than one id."""
    many = [one for one in statistics.sparse if one.length_max > 1]
    chosen = _most_accessed(many)
    if not chosen:
        return None
    traces: list[dict[str, Any]] = []
    for one in chosen:
        remaining = [max(sum(one.length_shares[i:]), 0.0) for i in range(len(one.length_bins))]
        points = [(low, left) for low, left in zip(one.length_bins, remaining, strict=True) if low > 0 and left > 0]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": _name(one),
                "x": [low for low, _ in points],
                "y": [left for _, left in points],
                "hovertemplate": "%{fullData.name}<br>%{y:.2%} have %{x} ids or more<extra></extra>",
                "marker": {"size": 4},
                "line": {"width": 1.5},
            }
        )
    across = _log_axis("ids per example, at least", [1, *(one.length_max for one in chosen)])
    up = {**_log_axis("share of examples", [1, *(y for trace in traces for y in trace["y"])]), "tickformat": "~p"}
    layout = _layout(across, up)
    words = "For each feature, the share of examples with at least this many ids." + _note_omitted(len(many))
    if len(many) < len(statistics.sparse):
        words += f" Features with at most one id per example ({len(statistics.sparse) - len(many)}) are not drawn."
    return Drawing("Length distribution", words, {"data": traces, "layout": layout})


def _skew(statistics: LogStatistics) -> Drawing:
    """Share of accesses to the most accessed ids."""
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": _name(one),
            "x": list(one.skew_top),
            "y": list(one.skew_accesses),
            "hovertemplate": "%{fullData.name}<br>top %{x:.3~p} of the ids<br>%{y:.1%} of the accesses<extra></extra>",
            "marker": {"size": 4},
            "line": {"width": 1.5},
        }
        for one in _most_accessed(statistics.sparse)
        if one.skew_top
    ]
    tops = [top for one in statistics.sparse for top in one.skew_top]
    across = {**_log_axis("share of the ids, most accessed first", tops), "tickformat": "~p"}
    layout = _layout(across, {"title": {"text": "share of the accesses"}, "tickformat": ".0%", "range": [0, 1.02]})
    words = (
        "Share of all accesses to the most accessed ids: the higher on the left, the better a small cache works."
        + _note_omitted(len(statistics.sparse))
    )
    return Drawing("Access skew", words, {"data": traces, "layout": layout})


def _most_accessed(sparse: Sequence[SparseStatistics]) -> list[SparseStatistics]:
    chosen = {one.name for one in sorted(sparse, key=lambda one: -one.num_accesses)[:MAX_CURVES]}
    return [one for one in sparse if one.name in chosen]


def _note_omitted(num_features: int) -> str:
    return f" Only the {MAX_CURVES} features with the most accesses are drawn." if num_features > MAX_CURVES else ""


def _log_axis(title: str, values: Iterable[float]) -> dict[str, Any]:
    """A log axis between the powers of ten around the values, with at least two ticks."""
    positive = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(positive)) + 1e-9)
    high = max(math.ceil(math.log10(max(positive)) - 1e-9), low + 1)
    ticks = "D2" if high - low <= 2 else 1  # D2: also at 2 and 5
    return {
        "type": "log",
        "title": {"text": title},
        "range": [low - 0.15, high + 0.15],
        "dtick": ticks,
        "exponentformat": "power",
        "minor": {"showgrid": False},
    }


def _layout(xaxis: dict[str, Any], yaxis: dict[str, Any]) -> dict[str, Any]:
    axis = {"automargin": True, "zeroline": False}
    return {
        "xaxis": {**axis, **xaxis},
        "yaxis": {**axis, **yaxis},
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "hovermode": "closest",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "legend": {"orientation": "v"},
    }


def page(statistics: LogStatistics, *, title: str = "The log") -> str:
    """The statistics as one HTML page that works offline."""
    from plotly.offline import get_plotlyjs  # slow to import, and only pages need it

    figures = drawings(statistics)
    body = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(headline(statistics))}.</p>"]
    for i, drawing in enumerate(figures):
        body.append(f"<section><h2>{drawing.title}</h2><p>{drawing.words}</p>")
        body.append(f'<div class="figure" id="figure-{i}" role="img" aria-label="{drawing.title}"></div></section>')
    body += [_html_table(table) for table in tables(statistics)]
    if statistics.dense and statistics.num_rows_sampled < statistics.num_rows:
        body.append(f"<p>Quantiles of dense features are from a sample of {statistics.num_rows_sampled:,} rows.</p>")
    # A `<` could end the script; its JSON escape cannot.
    plain = json.dumps([drawing.figure for drawing in figures]).replace("<", "\\u003c")
    scripts = f"<script>{get_plotlyjs()}</script><script>const figures = {plain};{_SCRIPT}</script>" if figures else ""
    return _PAGE.format(title=html.escape(title), style=_STYLE, body="\n".join(body), scripts=scripts)


def _html_table(table: TextTable) -> str:
    headings = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in table.headings)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>' + "".join(f"<td>{html.escape(text)}</td>" for text in cells) + "</tr>"
        for name, *cells in table.rows
    )
    return f'<section><h2>{table.title}</h2><div class="wide"><table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table></div></section>'


HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title><style>{style}</style></head>
"""
"""Start of a page whose content security policy forbids all requests."""

_PAGE = (
    HEAD
    + """<body><main>
{body}
</main>{scripts}</body></html>
"""
)

_STYLE = """
:root { --text: #1f2328; --quiet: #59636e; --line: #d5dae0; --back: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --quiet: #9aa4af; --line: #39414a; --back: #14181d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: .5rem 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .25rem; }
p { margin: .25rem 0; color: var(--quiet); max-width: 46rem; }
.figure { height: 26rem; width: 100%; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--back); }
thead th { color: var(--quiet); font-weight: 600; }
@media (max-width: 40rem) { .figure { height: 22rem; } }
"""

_SCRIPT = """
const dark = matchMedia('(prefers-color-scheme: dark)');
const narrow = matchMedia('(max-width: 40rem)');
const light_colors = ['#3264c8', '#c2541b', '#1d7f5f', '#8a4fbf', '#a67c00', '#b3306b', '#0f7f93', '#6b6f76'];
const dark_colors = ['#7aa5ff', '#ff9b63', '#5fd0a8', '#c79bff', '#e6c04d', '#ff86b8', '#5fcbe0', '#b6bcc4'];
function draw() {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue('--text'), line = style.getPropertyValue('--line');
  figures.forEach((figure, index) => {
    const layout = structuredClone(figure.layout);
    layout.font.color = text;
    layout.colorway = dark.matches ? dark_colors : light_colors;
    for (const axis of [layout.xaxis, layout.yaxis]) { axis.gridcolor = line; axis.linecolor = line; }
    layout.showlegend = figure.data.length > 1 && !(narrow.matches && figure.data.length > 4);
    if (narrow.matches) layout.legend = { orientation: 'h', y: 1.02, yanchor: 'bottom' };
    Plotly.react('figure-' + index, structuredClone(figure.data), layout, { responsive: true, displaylogo: false, displayModeBar: false });
  });
}
draw();
dark.addEventListener('change', draw);
narrow.addEventListener('change', draw);
"""
