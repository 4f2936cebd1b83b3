"""A log's statistics as tables and as one self-contained HTML page. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rowstead.report.charts_tables import FeatureSizes, draw_lengths, draw_sizes
from rowstead.report.html import Section, page_of
from rowstead.report.theme import Chart, TextTable, axis, label, layout, lines, log_axis
from rowstead.spec.statistics import QUANTILES, LogStatistics, SparseStatistics

MAX_CURVES = 40
"""Maximum number of curves; of more sparse features, those with the most accesses are drawn."""
BESIDE = {"orientation": "v"}
"""A legend beside the chart, where many curves fit."""

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


def charts(statistics: LogStatistics) -> list[Chart]:
    """The charts for a log's sparse features; empty if it has none."""
    if not statistics.sparse:
        return []
    made = (_sizes(statistics), _mean_lengths(statistics), _lengths(statistics), _skew(statistics))
    return [chart for chart in made if chart is not None]


def _feature_sizes(statistics: LogStatistics, sizes: Sequence[int]) -> FeatureSizes:
    return FeatureSizes(
        names=tuple(one.name for one in statistics.sparse),
        num_rows=tuple(sizes),
        ids=tuple(one.length_mean for one in statistics.sparse),
    )


def _sizes(statistics: LogStatistics) -> Chart | None:
    """Distinct ids and hash size against mean length (the paper's Fig. 6); one hash size for all is a line."""
    shown = [("distinct ids", _feature_sizes(statistics, [max(one.num_distinct, 1) for one in statistics.sparse]))]
    rows = [one.num_rows for one in statistics.sparse if one.num_rows is not None]
    if len(set(rows)) > 1 and len(rows) == len(statistics.sparse):
        shown.append(("hash size", _feature_sizes(statistics, rows)))
    return draw_sizes(
        shown,
        title="Size against mean length",
        words="Each point is a sparse feature: its number of distinct ids and its mean ids per example.",
        limit=rows[0] if len(set(rows)) == 1 else None,
        size_title="ids",
    )


def _mean_lengths(statistics: LogStatistics) -> Chart | None:
    """Mean lengths over features (the paper's Fig. 7)."""
    sizes = _feature_sizes(statistics, [one.num_distinct for one in statistics.sparse])
    return draw_lengths([("mean length", sizes)], title="Mean length over features")


def _lengths(statistics: LogStatistics) -> Chart | None:
    """The distribution of ids per example of each feature; None if no feature has more than one id."""
    many = [one for one in statistics.sparse if one.length_max > 1]
    chosen = _most_accessed(many)
    if not chosen:
        return None
    traces = []
    for index, one in enumerate(chosen):
        remaining = [max(sum(one.length_shares[i:]), 0.0) for i in range(len(one.length_bins))]
        left = {low: rest for low, rest in zip(one.length_bins, remaining, strict=True) if low > 0 and rest > 0}
        hover = "%{fullData.name}<br>%{y:.2%} have %{x} ids or more<extra></extra>"
        traces.append(lines(label(one.name), list(left), list(left.values()), index, hovertemplate=hover))
    across = log_axis("ids per example, at least", [1, *(one.length_max for one in chosen)])
    up = log_axis("share of examples", [1, *(y for trace in traces for y in trace["y"])], tickformat="~p")
    words = "For each feature, the share of examples with at least this many ids." + _note_omitted(len(many))
    if len(many) < len(statistics.sparse):
        words += f" Features with at most one id per example ({len(statistics.sparse) - len(many)}) are not drawn."
    return Chart(
        key="lengths", title="Length distribution", words=words, traces=traces, layout=layout(across, up, legend=BESIDE)
    )


def _skew(statistics: LogStatistics) -> Chart:
    """Share of accesses to the most accessed ids."""
    hover = "%{fullData.name}<br>top %{x:.3~p} of the ids<br>%{y:.1%} of the accesses<extra></extra>"
    traces = [
        lines(label(one.name), one.skew_top, one.skew_accesses, index, hovertemplate=hover)
        for index, one in enumerate(_most_accessed([one for one in statistics.sparse if one.skew_top]))
    ]
    tops = [top for one in statistics.sparse for top in one.skew_top]
    across = log_axis("share of the ids, most accessed first", tops, tickformat="~p")
    words = "Share of all accesses to the most accessed ids: the higher on the left, the better a small cache works."
    return Chart(
        key="skew",
        title="Access skew",
        words=words + _note_omitted(len(statistics.sparse)),
        traces=traces,
        layout=layout(across, axis("share of the accesses", tickformat=".0%", range=[0, 1.02]), legend=BESIDE),
    )


def _most_accessed(sparse: Sequence[SparseStatistics]) -> list[SparseStatistics]:
    chosen = {one.name for one in sorted(sparse, key=lambda one: -one.num_accesses)[:MAX_CURVES]}
    return [one for one in sparse if one.name in chosen]


def _note_omitted(num_features: int) -> str:
    return f" Only the {MAX_CURVES} features with the most accesses are drawn." if num_features > MAX_CURVES else ""


def page(statistics: LogStatistics, *, title: str = "The log") -> str:
    """The statistics as one HTML page that works offline."""
    is_sampled = statistics.dense and statistics.num_rows_sampled < statistics.num_rows
    note = f"Quantiles of dense features are from a sample of {statistics.num_rows_sampled:,} rows." if is_sampled else ""
    sections = [Section(key="features", title="Features", words=note, tables=tables(statistics))]
    if drawn := charts(statistics):
        sections.insert(0, Section(key="charts", title="Sparse features", charts=drawn))
    return page_of(title, headline(statistics) + ".", sections, foot="This page makes no network requests.")
