"""`rowstead data …`: make, convert and describe logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rowstead.report.terminal import terminal
from rowstead.spec.errors import RowsteadError

if TYPE_CHECKING:
    from rowstead.data.block import RawBlock
    from rowstead.data.write import Summary
    from rowstead.spec.features import FeaturesSpec

app = typer.Typer(help="Make, convert and describe logs.", no_args_is_help=True, rich_markup_mode=None)

Out = Annotated[Path, typer.Option("--out", help="Folder for train-*.parquet and eval-*.parquet.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace such files in the folder.")]
OnBadRow = Annotated[
    str, typer.Option("--on-bad-row", metavar="error|skip", help="A malformed line: stop there, or skip and count it.")
]
SplitBy = Annotated[
    str, typer.Option("--split", metavar="time|hash", help="Evaluate on the last examples, or on some chosen by hash.")
]
EvalFraction = Annotated[float | None, typer.Option("--eval-fraction", help="Share of the evaluation split. [default: 0.1]")]


@app.command()
def synth(
    out: Out,
    recipe: Annotated[str, typer.Argument(help="A recipe with data.synth.")] = "quickstart",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change one key, such as data.synth.num_train_samples=1e8. Repeatable."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a synthetic click log, whose true click probabilities are known, to Parquet."""
    from rowstead.data.synth import write_parquet
    from rowstead.spec.run import load_recipe

    spec = load_recipe(recipe, set_ or [])
    if spec.data.synth is None:
        raise RowsteadError(f"recipe `{recipe}` reads Parquet files and has no data.synth")
    with _progress("rows") as advance:
        summary = write_parquet(spec.data.synth, out, overwrite=overwrite, progress=advance)
    _print_summary(summary)


@app.command()
def criteo(
    inputs: Annotated[list[Path], typer.Argument(help="train.txt of Kaggle, or day_0 … of Terabyte; plain or .gz.")],
    out: Out,
    split: SplitBy = "time",
    eval_fraction: EvalFraction = None,
    eval_file: Annotated[
        list[Path] | None, typer.Option("--eval-file", help="A whole file for evaluation, such as day_23. Repeatable.")
    ] = None,
    on_bad_row: OnBadRow = "error",
    overwrite: Overwrite = False,
) -> None:
    """Convert Criteo's TSV files to Parquet."""
    from rowstead.data.criteo import convert

    with _progress("bytes") as advance:
        summary = convert(
            inputs,
            out,
            split=_choice("--split", split, "time", "hash"),  # type: ignore[arg-type]
            eval_fraction=eval_fraction,
            eval_files=eval_file or (),
            on_bad_row=_choice("--on-bad-row", on_bad_row, "error", "skip"),  # type: ignore[arg-type]
            overwrite=overwrite,
            progress=advance,
        )
    _print_summary(summary)


@app.command()
def movielens(
    source: Annotated[
        Path, typer.Argument(help="ml-1m.zip, ml-100k.zip, ml-latest.zip or ml-latest-small.zip, or the folder inside.")
    ],
    out: Out,
    split: SplitBy = "hash",
    eval_fraction: EvalFraction = None,
    on_bad_row: OnBadRow = "error",
    overwrite: Overwrite = False,
) -> None:
    """Convert a MovieLens archive to Parquet: label 1 where the rating is 4 or more."""
    from rowstead.data.movielens import convert

    with _progress("bytes") as advance:
        summary = convert(
            source,
            out,
            split=_choice("--split", split, "time", "hash"),  # type: ignore[arg-type]
            eval_fraction=0.1 if eval_fraction is None else eval_fraction,
            on_bad_row=_choice("--on-bad-row", on_bad_row, "error", "skip"),  # type: ignore[arg-type]
            overwrite=overwrite,
            progress=advance,
        )
    _print_summary(summary)


@app.command()
def describe(
    files: Annotated[
        list[str] | None, typer.Argument(help="Parquet files, globs or URLs. [default: the recipe's training split]")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Take the features from this recipe instead of guessing them.")
    ] = None,
    label: Annotated[str, typer.Option("--label", help="Column of the label, when no recipe is given.")] = "label",
    hash_size: Annotated[int | None, typer.Option("--hash-size", min=1, help="Count collisions at this hash size.")] = None,
    max_rows: Annotated[int | None, typer.Option("--max-rows", min=1, help="Look at about so many rows only.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw the figures into this HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what is in a log: distinct ids, ids per example, skew, collisions."""
    from rowstead.cli.console import print_wide
    from rowstead.data.describe import describe as count
    from rowstead.report.describe import headline, page, tables
    from rowstead.spec.parse import to_plain

    console = terminal()
    features, blocks = _log_to_describe(files, recipe, label, max_rows)
    with _progress("rows") as advance:
        statistics = count(blocks, features, num_rows=hash_size, progress=lambda rows: advance(rows, 0))
    if as_json:
        typer.echo(json.dumps(to_plain(statistics)))
    else:
        console.print(headline(statistics))
        for table in tables(statistics):
            print_wide(console, table)
    if picture is not None:
        picture.write_text(page(statistics, title=", ".join(files or [recipe or "log"])))
        console.print(f"figures in {picture}", soft_wrap=True)


def _log_to_describe(
    files: list[str] | None, recipe: str | None, label: str, max_rows: int | None
) -> tuple[FeaturesSpec, Iterator[RawBlock]]:
    from rowstead.data.describe import infer_features
    from rowstead.data.files import find_files
    from rowstead.data.open_log import read_raw_blocks
    from rowstead.data.parquet import ParquetLog, schema_of
    from rowstead.spec.data import ParquetSpec
    from rowstead.spec.run import load_recipe

    if recipe is not None:
        spec = load_recipe(recipe)
        return spec.features, read_raw_blocks(spec, files, max_rows)
    if not files:
        raise RowsteadError("name the files to describe, or a recipe with --recipe")
    parquet = ParquetSpec(train=tuple(files), label=label)
    features = infer_features(schema_of(find_files(files)[0]), label=label)
    return features, ParquetLog(parquet, features, split="all").raw_blocks(max_rows)


def _choice(option: str, given: str, *known: str) -> str:
    if given not in known:
        raise RowsteadError(f"{option} is {' or '.join(known)}, not `{given}`")
    return given


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Shows how much is done of how much; silent where output is no terminal."""
    from rowstead.cli.console import doing

    with doing(terminal(stderr=True), unit) as advance:
        yield advance


def _print_summary(summary: Summary) -> None:
    from rowstead.cli.console import two_columns

    rows = [(split, f"{count:,} rows in {len(summary.files[split])} files") for split, count in summary.num_rows.items()]
    rows.append(("folder", str(summary.folder)))
    rows.append(("size", f"{summary.num_bytes_written:,} bytes"))
    if summary.num_skipped:
        rows.append(("skipped", ", ".join(f"{count:,} {reason}" for reason, count in summary.skipped.items())))
        rows.append(("first skipped", "\n".join(summary.first_skipped)))
    terminal().print(two_columns("written", rows))
