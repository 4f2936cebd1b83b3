"""Terminal output: text is printed verbatim, and tables are never truncated."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def terminal(*, stderr: bool = False, quiet: bool = False, width: int | None = None, file: IO[str] | None = None) -> Console:
    """A console without markup, emoji codes and highlighting, so that names are printed verbatim."""
    return Console(stderr=stderr, quiet=quiet, width=width, file=file, markup=False, emoji=False, highlight=False)


def print_wide(console: Console, table: Table) -> None:
    """Print each row on one line regardless of the console's width; the terminal wraps it."""
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    terminal(file=console.file, width=max(console.width, needed)).print(table)


def printable(text: str) -> str:
    """The text with control characters escaped, so that they never reach the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
