"""What people read on a terminal is printed here: text as it is, whatever names it has in it."""

from __future__ import annotations

from typing import IO

from rich.console import Console


def terminal(*, stderr: bool = False, quiet: bool = False, width: int | None = None, file: IO[str] | None = None) -> Console:
    """A console that takes nothing in a text for markup or an emoji and colours no numbers: names are their owners'."""
    return Console(stderr=stderr, quiet=quiet, width=width, file=file, markup=False, emoji=False, highlight=False)
