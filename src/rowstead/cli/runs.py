"""`rowstead runs`: records of runs, sweeps, searches and predictions. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rowstead.cli.options import RUNS, Root
from rowstead.report.terminal import build_table, count, print_wide, printable, terminal
from rowstead.report.theme import cut
from rowstead.spec.errors import RowsteadError

if TYPE_CHECKING:
    from rowstead.records.store import Contents, StoreEntry

app = typer.Typer(
    help="List, compare and export the records of runs, sweeps, searches and predictions.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="KEY=VALUE",
        help="Filter: source=sweep, study=fig10, kind=measured, ne<0.8, train.batch_size>=512, machine.cpu~xeon. Repeatable.",
    ),
]
FIGURES = ("samples_per_s", "ne", "ne_expected")
"""Default columns of a list."""
MAX_WIDTH = 48
"""Characters of a cell in a list; longer text is cut."""
MAX_FAILURE = 160
"""Characters of the reason of a failure."""
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
        rows = []
        for entry in chosen:
            what = f"{entry.source} {entry.study or entry.record.name}"
            axes = ", ".join(f"{name}={_shown(value)}" for name, value in entry.axes.items())
            shown = [_shown(value_of(entry, key)) for key in keys]
            rows.append([entry.id, entry.record.date[:16], _kind(entry), what, axes, *shown, entry.failure or ""])
        _print_table(console, ["id", "date", "kind", "what", "point", *keys, "failed"], rows)
        console.print(f"{len(chosen):,} of {count(len(contents.entries), 'record')}")
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
    facts, figures = compared(left, right)
    console = terminal()
    if facts:
        rows = [[row.name, _shown(row.one), _shown(row.other)] for row in facts]
        _print_table(console, ["differ in", left.id, right.id], rows)
    else:
        console.print("same recipe, machine and versions")
    if figures:
        ratios = ["" if row.ratio is None else f"{row.ratio:.4g}" for row in figures]
        rows = [[row.name, _shown(row.one), _shown(row.other), ratio] for row, ratio in zip(figures, ratios, strict=True)]
        _print_table(console, ["figures", left.id, right.id, "ratio"], rows)
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
        notes.print(f"skipped {count(contents.num_bad_lines, 'unreadable line')}")
    if contents.unfinished:
        shown = ", ".join(Path(one).name for one in contents.unfinished[:MAX_NAMES])
        more = ", …" if len(contents.unfinished) > MAX_NAMES else ""
        runs = f"{count(len(contents.unfinished), 'run')} {'is' if len(contents.unfinished) == 1 else 'are'}"
        notes.print(f"{runs} training or unfinished: {printable(shown)}{more}", soft_wrap=True)


def _kind(entry: StoreEntry) -> str:
    machine = entry.record.machine.get("name")
    return f"predicted: {machine}" if not entry.is_measured and machine is not None else entry.record.kind


def _print_table(console: Console, headings: list[str], rows: list[list[str]]) -> None:
    print_wide(
        console,
        build_table(
            headings,
            [
                [cut(cell, MAX_FAILURE if name == "failed" else MAX_WIDTH) for name, cell in zip(headings, row, strict=True)]
                for row in rows
            ],
        ),
    )


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else json.dumps(value)
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}" if abs(value) >= 10 else f"{value:.5g}"
