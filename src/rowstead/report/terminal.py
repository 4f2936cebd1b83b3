"""Terminal output: text is printed verbatim, and tables are never truncated."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import IO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


def terminal(*, stderr: bool = False, quiet: bool = False, width: int | None = None, file: IO[str] | None = None) -> Console:
    """A console without markup, emoji codes and highlighting, so that names are printed verbatim."""
    return Console(stderr=stderr, quiet=quiet, width=width, file=file, markup=False, emoji=False, highlight=False)


def build_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", numbers: Collection[str] = ()
) -> Table:
    """A table with one line per row; the columns in `numbers` are right-aligned."""
    table = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(Text(printable(heading)), justify="right" if heading in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def print_wide(console: Console, table: Table) -> None:
    """Print each row on one line regardless of the console's width; the terminal wraps it."""
    if console.quiet:
        return
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    terminal(file=console.file, width=max(console.width, needed)).print(table)


def loading(console: Console, what: str) -> AbstractContextManager[object]:
    """Say on a terminal that something is loading, for as long as it does."""
    return console.status(f"loading {what}") if console.is_terminal and not console.quiet else contextlib.nullcontext()


def two_columns(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values, which may have several lines."""
    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(printable(name)), Text("\n".join(map(printable, value.split("\n")))))
    return table


def count(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """The text with control characters escaped, so that they never reach the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
