"""Options and listings that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

RUNS = Path("runs")
Root = Annotated[Path, typer.Option("--runs", help="Folder that holds the runs.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the recipe, such as train.batch_size=512. Repeatable."),
]


def print_shipped(folder: Path, names: Sequence[str]) -> None:
    """List shipped YAML files: name, and the comment on the first line."""
    width = max(map(len, names))
    for name in names:
        about = (folder / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        typer.echo(f"{name:<{width}}  {about}")
