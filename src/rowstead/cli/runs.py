"""`rowstead runs`: records of runs, sweeps, searches and predictions. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rowstead.report.terminal import print_wide, printable, terminal
from rowstead.spec.errors import RowsteadError

if TYPE_CHECKING:
    from rowstead.records.store import Contents, StoreEntry

app = typer.Typer(
    help="List, compare and export the records of runs, sweeps, searches and predictions.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

Root = Annotated[Path, typer.Option("--runs", help="Folder of the runs.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="KEY=VALUE",
        help="Filter: source=sweep, study=fig10, kind=measured, ne<0.8, train.batch_size>=512, machine.cpu~xeon. Repeatable.",
    ),
]
RUNS = Path("runs")
FIGURES = ("samples_per_s", "ne", "ne_expected")
"""Default columns of a list."""
MAX_WIDTH = 48
"""Characters of a cell in a list; longer text is cut."""
MAX_NAMES = 8
"""Unfinished runs that a note names."""


@app.callback()
def runs(
    context: typer.Context,
    where: Where = None,
    figures: Annotated[
        str | None, typer.Option("--figures", metavar="NAME,NAME", help="Keys to show. [default: samples_per_s,ne,ne_expected]")
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="KEY", help="Sort key, ascending; with a leading -, descending.")
    ] = "date",
    last: Annotated[int | None, typer.Option("--last", min=1, metavar="N", help="Only the last N.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead of a table.")] = False,
    root: Root = RUNS,
) -> None:
    """List records; with a command, compare two or export them."""
    if context.invoked_subcommand is not None:
        return
    from rowstead.records.select import ordered, value_of
    from rowstead.records.store import line_of

    contents, chosen = _selected(root, where)
    chosen = ordered(chosen, sort.removeprefix("-"))
    if sort.startswith("-"):
        chosen.reverse()
    chosen = chosen[-last:] if last is not None else chosen
    console, notes = terminal(), terminal(stderr=True)
    if as_json:
        for entry in chosen:
            print(json.dumps({"id": entry.id, **json.loads(line_of(entry))}))
    else:
        keys = [key.strip() for key in figures.split(",") if key.strip()] if figures is not None else list(FIGURES)
        table = _table(["id", "date", "kind", "what", "point", *keys, "failed"])
        for entry in chosen:
            what = f"{entry.source} {entry.study or entry.record.name}"
            axes = ", ".join(f"{name}={_shown(value)}" for name, value in entry.axes.items())
            cells = [entry.id, entry.record.date[:16], _kind(entry), what, axes]
            cells += [_shown(value_of(entry, key)) for key in keys]
            table.add_row(*(Text(_cut(cell)) for cell in [*cells, entry.failure or ""]))
        print_wide(console, table)
        console.print(f"{len(chosen):,} of {len(contents.entries):,} records")
    _print_problems(notes, contents)


@app.command()
def compare(
    one: Annotated[str, typer.Argument(help="A record: its id or the beginning of one, a run's name or folder, or `last`.")],
    other: Annotated[str, typer.Argument(help="Another.")],
    root: Root = RUNS,
) -> None:
    """Show two records side by side: what they differ in, and their figures."""
    from rowstead.records.select import compare as compared
    from rowstead.records.select import find
    from rowstead.records.store import RunStore

    contents = RunStore(root).read()
    left, right = find(contents.entries, one), find(contents.entries, other)
    found = compared(left, right)
    console = terminal()
    for title, rows in (("differ in", found.facts), ("figures", found.figures)):
        table = _table([title, left.id, right.id, *(["ratio"] if title == "figures" else [])])
        for row in rows:
            ratio = [] if title != "figures" else ["" if row.ratio is None else f"{row.ratio:.4g}"]
            table.add_row(*(Text(_cut(cell)) for cell in [row.name, _shown(row.one), _shown(row.other), *ratio]))
        if rows:
            print_wide(console, table)
    if not found.facts:
        console.print("same recipe, machine and versions")
    _print_problems(terminal(stderr=True), contents)


@app.command()
def export(
    out: Annotated[Path, typer.Argument(help="Parquet file to write.")],
    where: Where = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    root: Root = RUNS,
) -> None:
    """Write records to a Parquet file, one row per record."""
    from rowstead.records.select import export_parquet

    contents, chosen = _selected(root, where)
    if out.exists() and not overwrite:
        raise RowsteadError(f"{out} exists: choose another name, or use --overwrite")
    try:
        num_columns = export_parquet(chosen, out)
    except OSError as error:
        raise RowsteadError(f"cannot write {out}: {error.strerror or error}") from error
    terminal().print(f"{len(chosen):,} records with {num_columns:,} columns in {out}", soft_wrap=True)
    _print_problems(terminal(stderr=True), contents)


def _selected(root: Path, where: list[str] | None) -> tuple[Contents, list[StoreEntry]]:
    from rowstead.records.select import condition, selected
    from rowstead.records.store import RunStore

    wishes = [condition(text) for text in where or []]
    contents = RunStore(root).read()
    return contents, selected(contents.entries, wishes)


def _print_problems(notes: Console, contents: Contents) -> None:
    if contents.num_bad_lines:
        lines = "line" if contents.num_bad_lines == 1 else "lines"
        notes.print(f"skipped {contents.num_bad_lines:,} unreadable {lines}")
    if contents.unfinished:
        runs, shown = f"{len(contents.unfinished):,} run", ", ".join(Path(one).name for one in contents.unfinished[:MAX_NAMES])
        plural, more = "s" if len(contents.unfinished) > 1 else "", ", …" if len(contents.unfinished) > MAX_NAMES else ""
        notes.print(f"{runs}{plural} failed or unfinished: {printable(shown)}{more}", soft_wrap=True)


def _kind(entry: StoreEntry) -> str:
    machine = entry.record.machine.get("name")
    return f"predicted: {machine}" if not entry.is_measured and machine is not None else entry.record.kind


def _table(headings: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(Text(heading), no_wrap=True)
    return table


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else json.dumps(value)
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}" if abs(value) >= 10 else f"{value:.5g}"


def _cut(text: str) -> str:
    """One line of at most `MAX_WIDTH` characters."""
    plain = printable(text)
    return plain if len(plain) <= MAX_WIDTH else plain[: MAX_WIDTH - 1] + "…"
