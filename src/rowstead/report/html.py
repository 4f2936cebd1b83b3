"""The HTML page around charts: works offline, responsive, with light, dark and print styles."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rowstead.report.theme import DARK, LIGHT, Chart, TextTable, cut, script_json

MAX_ROWS = 300
"""Maximum number of rows of a table on the page; omitted rows are counted."""
MAX_SHORT = 14
"""Longer values of cards have smaller letters."""
MAX_CELL, MAX_TITLE, MAX_WORDS = 200, 120, 800
"""Maximum number of characters of a cell, a heading and a chart's description."""
MAX_LINE = 28
"""Longer words of a cell wrap."""


@dataclass(frozen=True)
class Verdict:
    """A judgement in a word or two, with the color that goes with it."""

    text: str
    kind: Literal["good", "mixed", "bad", "none"] = "none"

    def html(self) -> str:
        return f'<span class="verdict {self.kind}">{_cell(self.text)}</span>'


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the page with charts and tables."""

    key: str
    title: str
    words: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[TextTable] = ()
    blocks: Sequence[str] = ()
    """Additional HTML before the charts; the caller escapes it."""
    short: str = ""
    """Its title in the links at the top, where that is not the whole one."""
    verdict: Verdict | None = None
    """Shown beside the title."""


def page_of(title: str, lead: str, sections: Sequence[Section], *, foot: str = "") -> str:
    """The whole page; `lead` and `foot` are plain text."""
    charts = [chart for section in sections for chart in section.charts]
    links = "".join(f'<a href="#{_anchor(one.key)}">{_cell(one.short or one.title, MAX_TITLE)}</a>' for one in sections)
    body = "\n".join(_section(section) for section in sections)
    scripts = ""
    if charts:
        from plotly.offline import get_plotlyjs  # slow to import, and only pages with charts need it

        plain = script_json([chart.plain() for chart in charts])
        colors = script_json({"light": LIGHT, "dark": DARK})
        scripts = (
            f'<script type="text/plain" id="plotly">{get_plotlyjs()}</script>\n'
            f"<script>const figures = {plain};\nconst colors = {colors};\n{_SCRIPT}</script>"
        )
    return _PAGE.format(
        title=html.escape(title),
        lead=html.escape(lead),
        style=_STYLE,
        links=links,
        body=body,
        scripts=scripts,
        foot=html.escape(foot),
    )


def _anchor(key: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c == "-") else "-" for c in key)[:80]


def _section(section: Section) -> str:
    verdict = "" if section.verdict is None else " " + section.verdict.html()
    parts = [f'<section id="{_anchor(section.key)}"><h2>{_cell(section.title, MAX_TITLE)}{verdict}</h2>']
    if section.words:
        parts.append(f"<p>{html.escape(section.words)}</p>")
    parts += section.blocks
    if section.charts:
        parts.append('<div class="figures">' + "".join(_chart(chart) for chart in section.charts) + "</div>")
    parts += [f"<h3>{html.escape(table.title)}</h3>{table_html(table)}" for table in section.tables]
    return "\n".join([*parts, "</section>"])


def _chart(chart: Chart) -> str:
    name, words = _cell(chart.title, MAX_TITLE), _cell(chart.words, MAX_WORDS)
    numbers = ""
    if chart.table is not None:
        numbers = f"<details><summary>Data: {html.escape(chart.table.title)}</summary>{table_html(chart.table)}</details>"
    return (
        f'<figure><figcaption><div class="head"><h3>{name}</h3><button type="button" class="save" data-name="{_anchor(chart.key)}" '
        f'aria-label="Save as SVG: {name}">SVG</button></div><p>{words}</p></figcaption>'
        f'<ul class="legend"></ul><div class="figure" style="height:{chart.height_rem:g}rem" data-height="{chart.height_rem:g}" role="img" aria-label="{name}. {words}"></div>{numbers}</figure>'
    )


def table_html(table: TextTable) -> str:
    """A table whose first column is the row headings; text is escaped and truncated."""
    shown = table.rows[:MAX_ROWS]
    kinds = [_kind(column) for column in itertools.zip_longest(*shown, fillvalue="")]
    kinds += [""] * (len(table.headings) - len(kinds))
    head = "".join(f'<th scope="col"{kind}>{_cell(text)}</th>' for text, kind in zip(table.headings, kinds, strict=False))
    rows = "".join(
        f'<tr><th scope="row">{_cell(name)}</th>'
        + "".join(f"<td{kind}>{_cell(text)}</td>" for text, kind in zip(cells, kinds[1:], strict=False))
        + "</tr>"
        for name, *cells in shown
    )
    left = len(table.rows) - MAX_ROWS
    more = f'<p class="note">{left:,} more rows are not shown.</p>' if left > 0 else ""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{_cell(table.title, MAX_TITLE)}"><table aria-label="{_cell(table.title, MAX_TITLE)}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{more}'


def _kind(column: Sequence[str]) -> str:
    """The class of a column's cells: words are left-aligned, long ones wrap; numbers are right-aligned."""
    cells = [cell for cell in column if cell]
    text = "".join(cells)
    if sum(c.isalpha() for c in text) <= 0.5 * len(text):
        return ""
    return ' class="words"' if max(map(len, cells)) > MAX_LINE else ' class="word"'


def _cell(text: str, most: int = MAX_CELL) -> str:
    return html.escape(cut(text, most))


def cards_html(cards: Sequence[tuple[str, str, str]]) -> str:
    """A row of cards: label, value and note."""
    made = "".join(
        f'<div class="card"><div class="what">{_cell(what)}</div><div class="value{" long" if len(value) > MAX_SHORT else ""}">{_cell(value)}</div><div class="more">{_cell(more)}</div></div>'
        for what, value, more in cards
    )
    return f'<div class="cards">{made}</div>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title><style>{style}</style></head>
<body>
<header><div class="inner"><h1>{title}</h1><p>{lead}</p><nav aria-label="Sections">{links}</nav></div></header>
<main>
{body}
</main>
<footer><p>{foot}</p></footer>
{scripts}</body></html>
"""
"""The content security policy forbids all requests."""

_STYLE = """
:root { --back: #f4f6f9; --card: #ffffff; --text: #1b2129; --quiet: #5a6573; --line: #dde2e9; --well: #edf0f4; --a: #2457c5; --good: #1a7f56; --bad: #b3261e; --mixed: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --back: #0f1318; --card: #171c23; --text: #e7eaee; --quiet: #9ba6b3; --line: #2c343e; --well: #232a33; --a: #82abff; --good: #5fd0a8; --bad: #ff8a80; --mixed: #e6c04d; } }
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.55 system-ui, "Segoe UI", sans-serif; }
header { background: var(--card); border-bottom: 1px solid var(--line); } .inner, main, footer { max-width: 82rem; margin: 0 auto; padding: 1.1rem 1.25rem; }
h1 { font-size: 1.55rem; letter-spacing: -.02em; margin: .3rem 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; letter-spacing: -.012em; margin: 0 0 .25rem; } h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere; }
p { margin: .2rem 0 .4rem; color: var(--quiet); max-width: 52rem; overflow-wrap: anywhere; } .note { font-size: .85rem; }
a { color: var(--a); } nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin-top: .5rem; font-size: .92rem; } nav a, h2 { overflow-wrap: anywhere; min-width: 0; }
.verdict { display: inline-block; font-size: .82rem; font-weight: 650; line-height: 1.5; letter-spacing: 0; padding: 0 .6rem; border: 1px solid currentcolor; border-radius: 99px; color: var(--quiet); white-space: nowrap; } h2 .verdict { vertical-align: .12rem; margin-left: .3rem; }
.verdict.good { color: var(--good); } .verdict.bad { color: var(--bad); } .verdict.mixed { color: var(--mixed); } .verdict.good::before { content: "✓ "; } .verdict.bad::before { content: "✕ "; } .verdict.mixed::before { content: "≈ "; }
a.card { color: var(--text); text-decoration: none; } a.card:hover { border-color: var(--a); } a.card .what { display: block; margin-bottom: .3rem; } a.card .name { font-weight: 650; display: block; } .headline { color: var(--text); max-width: none; }
main { display: grid; gap: 1.5rem; } main > section { min-width: 0; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); margin: .6rem 0; }
@media (min-width: 70rem) { figure:last-child:nth-child(odd) { grid-column: 1 / -1; } }
figure { display: flex; flex-direction: column; margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: .9rem 1rem; min-width: 0; break-inside: avoid; }
.head { display: flex; justify-content: space-between; align-items: start; gap: .75rem; } .save { font: inherit; font-size: .72rem; color: var(--quiet); background: none; border: 1px solid var(--line); border-radius: 6px; padding: 0 .45rem; cursor: pointer; }
figcaption p { font-size: .88rem; margin-bottom: .3rem; } .figure { width: 100%; min-width: 0; flex: 1 0 auto; } figure > * { min-width: 0; } figure > details { flex: none; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; list-style: none; margin: 0 0 .3rem; padding: 0; } .legend button { font: inherit; font-size: .84rem; line-height: 1.6; color: var(--text); background: none; border: 0; padding: 0; cursor: pointer; text-align: left; overflow-wrap: anywhere; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px; margin-right: .4rem; vertical-align: -.08rem; } .legend i.dashed { height: .18rem; vertical-align: .22rem; } .legend [aria-pressed="false"] { opacity: .45; text-decoration: line-through; }
section > h3 { margin: 1rem 0 .35rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .75rem; margin: .6rem 0 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: .7rem .95rem; } .card .what, .card .more { color: var(--quiet); font-size: .84rem; }
.card .value { font-size: 1.5rem; font-weight: 650; letter-spacing: -.02em; line-height: 1.3; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.card .value.long { font-size: 1.1rem; line-height: 1.45; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 12px; max-height: 30rem; overflow-y: auto; }
figure .wide { border-radius: 8px; margin-top: .4rem; max-height: 20rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .34rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; max-width: 26rem; overflow: hidden; text-overflow: ellipsis; }
th.word, td.word, th.words, td.words { text-align: left; } tr > th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); } tbody tr:last-child > * { border-bottom: 0; }
thead th { color: var(--quiet); font-weight: 600; position: sticky; top: 0; background: var(--card); }
td.words { white-space: normal; min-width: 14rem; max-width: 34rem; overflow-wrap: anywhere; }
details { margin-top: .5rem; font-size: .9rem; } summary { cursor: pointer; color: var(--quiet); } :focus-visible { outline: 2.5px solid var(--a); outline-offset: 2px; }
footer p { font-size: .85rem; }
@media (max-width: 40rem) { .inner, main, footer { padding: .8rem; } figure { padding: .7rem .6rem; border-radius: 10px; } nav { flex-wrap: nowrap; overflow-x: auto; padding: .25rem; margin-inline: -.25rem; } nav a { white-space: nowrap; flex: none; }
  .cards.verdicts { grid-template-columns: 1fr; gap: .3rem; } .verdicts a.card { display: grid; grid-template-columns: 4.4rem minmax(0, 1fr) auto; gap: .5rem; align-items: center; padding: .3rem .6rem; border-radius: 10px; } .verdicts .what { margin: 0; line-height: 1.3; }
  tr > th:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; max-width: 9rem; } th, td { padding: .3rem .5rem; } td.words { min-width: 11rem; } .cards { gap: .5rem; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); } }
@media print { :root { --back: #fff; --card: #fff; --text: #000; --quiet: #444; --line: #ccc; --a: #000; } nav, details, .save { display: none !important; } .figures { grid-template-columns: 1fr; }
  .wide { max-height: none; overflow: visible; border: 0; } body { font-size: 11pt; } thead th, tr > th:first-child { position: static; } }
"""

_SCRIPT = """
const dark = matchMedia('(prefers-color-scheme: dark)'), narrow = matchMedia('(max-width: 40rem)');
const plots = [...document.querySelectorAll('div.figure')], drawn = new Set();
const paper = 660; // width of a printed page in pixels
let printing = false;
function colored(value, scheme) {
  if (typeof value === 'string') return value[0] === '@' && value in scheme ? scheme[value] : value;
  if (Array.isArray(value)) return typeof value[0] === 'number' && typeof value.at(-1) === 'number' ? value : value.map((one) => colored(one, scheme));
  if (value && typeof value === 'object') return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, colored(one, scheme)]));
  return value;
}
function draw(index) {
  const scheme = dark.matches && !printing ? colors.dark : colors.light;
  const { data, layout } = colored(figures[index], scheme);
  if (layout.showlegend === undefined) layout.showlegend = data.length > 1;
  if (printing) layout.width = paper;
  else if (narrow.matches) {
    layout.font.size = 11;
    const rows = layout.yaxis?.type === 'category' ? [...new Set(data.flatMap((trace) => trace.y ?? []))] : [];
    if (rows.some((name) => String(name).length > 16)) { // numbers of runs are at their ends
      Object.assign(layout.yaxis, { tickmode: 'array', tickvals: rows, ticktext: rows.map((name) => (String(name).length > 16 ? '…' + String(name).slice(-14) : name)) });
    }
    if (layout.xaxis?.type === 'category') { // words one below the other
      const names = [...new Set(data.flatMap((trace) => trace.x ?? []))].map(String);
      if (names.length > 2 && names.some((name) => name.includes(' '))) Object.assign(layout.xaxis, { tickmode: 'array', tickvals: names, ticktext: names.map((name) => name.replaceAll(' ', '<br>')) });
    }
  }
  if (!printing) layout.showlegend = false; // it is beside the figure as text, which wraps
  drawn.add(index);
  Plotly.react(plots[index], data, layout, { responsive: true, displayModeBar: false });
  plots[index].dataset.drawn = 'yes';
  if (drawn.size === 1) performance.mark('first-figure');
}
function list(index) {
  const { data, layout } = colored(figures[index], dark.matches ? colors.dark : colors.light);
  const traces = (layout.showlegend ?? data.length > 1) ? data : [];
  const parts = traces.flatMap((trace, number) => {
    if (trace.showlegend === false || !trace.name) return [];
    const group = traces.flatMap((one, i) => (i === number || (trace.legendgroup && one.legendgroup === trace.legendgroup) ? [i] : []));
    const item = document.createElement('li'), button = document.createElement('button'), mark = document.createElement('i');
    const ink = [trace.mode === 'lines' && trace.line?.color, trace.marker?.color, trace.line?.color, trace.colorscale?.[0]?.[1]].find((one) => typeof one === 'string');
    mark.style.background = ink ?? colors.light['@quiet'];
    mark.style.opacity = trace.opacity ?? 1;
    if (trace.line?.dash) mark.className = 'dashed';
    button.type = 'button';
    button.setAttribute('aria-pressed', 'true');
    button.append(mark, new DOMParser().parseFromString(trace.name, 'text/html').body.textContent);
    button.addEventListener('click', () => {
      const shown = button.getAttribute('aria-pressed') !== 'true';
      button.setAttribute('aria-pressed', String(shown));
      Plotly.restyle(plots[index], { visible: shown }, group);
    });
    item.append(button);
    return [item];
  });
  plots[index].parentElement.querySelector('.legend').replaceChildren(...parts);
}
function begin() {
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); draw(plots.indexOf(entry.target)); }
}, { rootMargin: '300px' });
plots.forEach((_, index) => list(index)); // before any is drawn: legends take part of the height
if (plots.length) draw(0);
plots.forEach((plot) => seen.observe(plot));
const again = () => { plots.forEach((_, index) => list(index)); for (const index of drawn) draw(index); };
dark.addEventListener('change', again);
narrow.addEventListener('change', again);
addEventListener('beforeprint', () => { printing = true; plots.forEach((_, index) => draw(index)); });
addEventListener('afterprint', () => { printing = false; again(); });
document.querySelectorAll('button.save').forEach((button, index) => button.addEventListener('click', () => {
  if (!drawn.has(index)) draw(index);
  const { data, layout } = plots[index];
  Plotly.downloadImage({ data, layout: { ...layout, showlegend: figures[index].layout.showlegend ?? data.length > 1 } }, { format: 'svg', filename: button.dataset.name, width: 900, height: plots[index].clientHeight });
}));
}
// Show text and tables first; load plotly after that.
requestAnimationFrame(() => setTimeout(() => {
  const script = document.createElement('script');
  script.textContent = document.getElementById('plotly').textContent;
  document.head.append(script);
  begin();
}));
"""
