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

Out = Annotated[Path, typer.Option("--out", help="Output folder for train-*.parquet and eval-*.parquet.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]
OnBadRow = Annotated[
    str, typer.Option("--on-bad-row", metavar="error|skip", help="Stop at a malformed line, or skip and count it.")
]
SplitBy = Annotated[
    str, typer.Option("--split", metavar="time|hash", help="Evaluation split: the latest examples, or chosen by hash.")
]
EvalFraction = Annotated[
    float | None, typer.Option("--eval-fraction", help="Share of examples in the evaluation split. [default: 0.1]")
]


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
    """Write a synthetic click log with known click probabilities to Parquet."""
    from rowstead.data.synth import write_parquet
    from rowstead.spec.run import load_recipe

    spec = load_recipe(recipe, set_ or [])
    if spec.data.synth is None:
        raise RowsteadError(f"recipe `{recipe}` has no data.synth; choose a recipe with a synthetic log")
    with _progress("rows") as advance:
        summary = write_parquet(spec.data.synth, out, overwrite=overwrite, progress=advance)
    _print_summary(summary)


@app.command()
def criteo(
    inputs: Annotated[list[Path], typer.Argument(help="Kaggle's train.txt, or Terabyte's day_0 …; plain or .gz.")],
    out: Out,
    split: SplitBy = "time",
    eval_fraction: EvalFraction = None,
    eval_file: Annotated[
        list[Path] | None, typer.Option("--eval-file", help="Use a whole file for evaluation, such as day_23. Repeatable.")
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
        Path, typer.Argument(help="ml-1m.zip, ml-100k.zip, ml-latest.zip or ml-latest-small.zip, or its unpacked folder.")
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
        str | None, typer.Option("--recipe", help="Use the features of this recipe instead of guessing them.")
    ] = None,
    label: Annotated[str, typer.Option("--label", help="Label column, without --recipe.")] = "label",
    hash_size: Annotated[int | None, typer.Option("--hash-size", min=1, help="Count collisions at this hash size.")] = None,
    max_rows: Annotated[int | None, typer.Option("--max-rows", min=1, help="Read only about this many rows.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Write charts to this HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show statistics of a log: distinct ids, ids per example, skew, collisions."""
    from rowstead.cli.console import print_text_table
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
            print_text_table(console, table)
    if picture is not None:
        picture.write_text(page(statistics, title=", ".join(files or [recipe or "log"])))
        console.print(f"charts: {picture}", soft_wrap=True)


def _log_to_describe(
    files: list[str] | None, recipe: str | None, label: str, max_rows: int | None
) -> tuple[FeaturesSpec, Iterator[RawBlock]]:
    from rowstead.data.describe import infer_features
    from rowstead.data.files import find_files
    from rowstead.data.open_log import read_raw_blocks
    from rowstead.data.parquet import ParquetLog, read_schema
    from rowstead.spec.data import ParquetSpec
    from rowstead.spec.run import load_recipe

    if recipe is not None:
        spec = load_recipe(recipe)
        return spec.features, read_raw_blocks(spec, files, max_rows)
    if not files:
        raise RowsteadError("give the files to describe, or a recipe with --recipe")
    parquet = ParquetSpec(train=tuple(files), label=label)
    features = infer_features(read_schema(find_files(files)[0]), label=label)
    return features, ParquetLog(parquet, features, split="all").raw_blocks(max_rows)


def _choice(option: str, given: str, *known: str) -> str:
    if given not in known:
        raise RowsteadError(f"{option} must be {' or '.join(known)}, got `{given}`")
    return given


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Progress bar; silent if output is not a terminal."""
    from rowstead.cli.console import doing

    with doing(terminal(stderr=True), unit) as advance:
        yield advance


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _print_summary(summary: Summary) -> None:
    from rowstead.cli.console import two_columns

    rows = [
        (split, f"{_count(count, 'row')} in {_count(len(summary.files[split]), 'file')}")
        for split, count in summary.num_rows.items()
    ]
    rows.append(("folder", str(summary.folder)))
    rows.append(("size", f"{summary.num_bytes_written:,} bytes"))
    if summary.num_skipped:
        rows.append(("skipped", ", ".join(f"{count:,} {reason}" for reason, count in summary.skipped.items())))
        rows.append(("first skipped", "\n".join(summary.first_skipped)))
    terminal().print(two_columns("written", rows))
