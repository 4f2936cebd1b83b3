"""`rowstead data …`: make, convert and describe logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rowstead.report.terminal import build_table, count, print_wide, terminal, two_columns
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
DESCRIBE_REMEDY = "shuffle the rows, or set `shuffle_rows` of the recipe's log to their number"
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
def pack(
    recipe: Annotated[str, typer.Argument(help="A recipe, by name or path.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the packed log, for `data.cache`.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the recipe. Repeatable.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the packed log that is there.")] = False,
) -> None:
    """Write a recipe's log as the model reads it, so that training reads it many times faster."""
    from rowstead.data.open_log import open_to_pack
    from rowstead.data.pack import open_pack, pack_log
    from rowstead.spec.run import load_recipe

    log, folder = open_to_pack(load_recipe(recipe, set_ or [])), out.expanduser()
    with _progress("rows") as advance:
        pack_log(log, folder, overwrite=overwrite, progress=advance)
    packed = open_pack(log, folder)
    rows = [(name, count(split.reader.num_rows, "row")) for name, split in packed.splits.items()]
    if num_bad := sum(len(split.bad_rows) for split in packed.splits.values()):
        rows.append(("skipped", count(num_bad, "bad row")))
    rows += [("folder", str(out)), ("size", f"{packed.num_bytes:,} bytes")]
    terminal().print(two_columns("packed", rows))


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

    files = eval_file or ()
    chosen = partial(convert, inputs, out, eval_fraction=eval_fraction, eval_files=files, overwrite=overwrite)
    _convert(chosen, split, on_bad_row)


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

    share = 0.1 if eval_fraction is None else eval_fraction
    _convert(partial(convert, source, out, eval_fraction=share, overwrite=overwrite), split, on_bad_row)


@app.command()
def describe(
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Parquet, CSV or TSV files, folders, globs or URLs. [default: the recipe's training split]"),
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
    from rowstead.data.describe import describe as describe_blocks
    from rowstead.data.order_test import order_warning
    from rowstead.report.describe import headline, page, tables
    from rowstead.spec.parse import to_plain

    console = terminal()
    features, left_out, blocks = _log_to_describe(files, recipe, label, max_rows)
    with _progress("rows") as advance:
        statistics = describe_blocks(blocks, features, num_rows=hash_size, progress=lambda rows: advance(rows, 0))
    if as_json:
        typer.echo(json.dumps({**to_plain(statistics), "left_out": left_out}))
    else:
        console.print(headline(statistics))
        for table in tables(statistics):
            print_wide(console, build_table(table.headings, table.rows, title=table.title, numbers=table.headings[1:]))
        if statistics.clustered:
            console.print(order_warning(statistics.clustered, DESCRIBE_REMEDY), soft_wrap=True)
        if left_out:
            print_wide(console, build_table(("column", "why"), left_out.items(), title="Left out"))
    if picture is not None:
        picture.write_text(page(statistics, title=", ".join(files or [recipe or "log"])))
        console.print(f"charts: {picture}", soft_wrap=True)


def _log_to_describe(
    files: list[str] | None, recipe: str | None, label: str, max_rows: int | None
) -> tuple[FeaturesSpec, dict[str, str], Iterator[RawBlock]]:
    """The features to describe, why other columns are left out, and the rows."""
    from rowstead.data.describe import infer_features
    from rowstead.data.file_log import open_file_log, read_schema
    from rowstead.data.files import choose_file_log
    from rowstead.data.open_log import read_raw_blocks
    from rowstead.spec.run import load_recipe

    if recipe is not None:
        spec = load_recipe(recipe)
        return spec.features, {}, read_raw_blocks(spec, files, max_rows)
    if not files:
        raise RowsteadError("give the files to describe, or a recipe with --recipe")
    log = choose_file_log(tuple(files), label=label)
    features, left_out = infer_features(read_schema(log), label=label)
    return features, left_out, open_file_log(log, features, split="all").raw_blocks(max_rows)


def _convert(convert: Callable[..., Summary], split: str, on_bad_row: str) -> None:
    """Convert a log with a progress bar, and say what was written."""
    given = {
        "split": _choice("--split", split, "time", "hash"),
        "on_bad_row": _choice("--on-bad-row", on_bad_row, "error", "skip"),
    }
    with _progress("bytes") as advance:
        summary = convert(**given, progress=advance)
    _print_summary(summary)


def _choice(option: str, given: str, *known: str) -> str:
    if given not in known:
        raise RowsteadError(f"{option} must be {' or '.join(known)}, got `{given}`")
    return given


def _progress(unit: str) -> AbstractContextManager[Callable[[int, int], None]]:
    from rowstead.cli.console import doing

    return doing(terminal(stderr=True), unit)


def _print_summary(summary: Summary) -> None:
    rows = [
        (split, f"{count(num_rows, 'row')} in {count(len(summary.files[split]), 'file')}")
        for split, num_rows in summary.num_rows.items()
    ]
    rows.append(("folder", str(summary.folder)))
    rows.append(("size", f"{summary.num_bytes_written:,} bytes"))
    if summary.num_skipped:
        rows.append(("skipped", ", ".join(f"{number:,} {reason}" for reason, number in summary.skipped.items())))
        rows.append(("first skipped", "\n".join(summary.first_skipped)))
    terminal().print(two_columns("written", rows))
