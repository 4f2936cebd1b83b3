"""`rowstead init`: look at a log and write a first recipe for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rowstead.report.terminal import build_table, print_wide, terminal
from rowstead.spec.errors import RowsteadError

MAX_ROWS = 10_000_000


def init(
    log: Annotated[
        list[str], typer.Argument(metavar="LOG", help="Parquet, CSV or TSV files (.gz, .zst), folders, globs or URLs.")
    ],
    label: Annotated[str, typer.Option("--label", help="Label column: numbers from 0 to 1.")] = "label",
    out: Annotated[Path, typer.Option("--out", help="Recipe to write.")] = Path("recipe.yaml"),
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=1, help="Count ids in about this many rows, spread over the log.")
    ] = MAX_ROWS,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the recipe if it exists.")] = False,
) -> None:
    """Look at a log and write a recipe for it, which trains as it is."""
    from rowstead.cli.console import doing
    from rowstead.data.files import choose_file_log
    from rowstead.data.first_recipe import look_at, write_recipe

    if out.exists() and not overwrite:
        raise RowsteadError(f"{out} exists: choose another --out, or pass --overwrite")
    if not out.parent.is_dir():
        raise RowsteadError(f"there is no folder {out.parent} to write {out.name} into")
    console = terminal()
    spec = choose_file_log(tuple(log), label=label)
    with doing(terminal(stderr=True), "rows") as advance:
        found, statistics = look_at(spec, max_rows=max_rows, progress=lambda rows: advance(rows, 0))
    out.write_text(write_recipe(spec, found, statistics), encoding="utf-8")
    rows = [(plan.name, str(plan.type), _use(plan.use), plan.why) for plan in found.columns]
    print_wide(console, build_table(("column", "type", "used as", ""), rows, title=f"{found.num_rows:,} rows"))
    console.print(f"recipe: {out}", soft_wrap=True)
    console.print(f"next: rowstead train {out}", soft_wrap=True)


def _use(use: str) -> str:
    return "hour and weekday, split" if use == "time" else use
