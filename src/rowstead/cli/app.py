"""Registers all commands, and has train, evaluate, predict, export and recipes. Each imports what it needs, so that `rowstead --help` starts fast."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from rowstead import __version__
from rowstead.cli import data, init, plan, report, runs, study
from rowstead.cli import fleet as fleet_commands
from rowstead.cli.options import RUNS, Root, Set, print_shipped
from rowstead.distributed import launch
from rowstead.records.limits import require_address_space
from rowstead.report.terminal import loading, print_wide, terminal, two_columns
from rowstead.spec.errors import RowsteadError
from rowstead.spec.job import is_multi_process

app = typer.Typer(
    help="Train deep learning recommendation models. Every embedding row has a home.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(init.init)
app.add_typer(data.app, name="data")
app.command()(plan.plan)
app.command()(plan.calibrate)
app.command()(fleet_commands.role)
app.command()(study.sweep)
app.command()(study.tune)
app.command()(study.quality)
app.add_typer(runs.app, name="runs")
app.command()(report.report)
app.command()(report.ui)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rowstead {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of the command line itself."""


Run = Annotated[str, typer.Argument(metavar="RUN", help="A run: its name under --runs, its folder, or `last`.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data", metavar="FILES", help="Files, folders, globs or URLs instead of the run's evaluation split. Repeatable."
    ),
]


@app.command()
def train(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe file, or the name of a shipped one. [default: quickstart]")
    ] = None,
    set_: Set = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="auto, cpu or cuda: the same as `--set device=DEVICE`.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Continue a run from its last checkpoint. --set may change only `placement` and `memory`.",
        ),
    ] = None,
    accept_changed_log: Annotated[
        bool,
        typer.Option(
            "--accept-changed-log", help="With --resume: continue even if files of the log are not those of the run any more."
        ),
    ] = False,
    init_from: Annotated[
        str | None, typer.Option("--init-from", metavar="RUN", help="Start from the weights of an earlier run's model.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of this run. [default: the next number under --runs]")
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            "--processes", min=1, metavar="N", help="Share each batch and the tables among N processes of this machine."
        ),
    ] = 1,
    fleet: Annotated[
        str | None,
        typer.Option(
            "--fleet", metavar="ROLES", help="Train with a fleet of processes, such as trainers=2,sparse=2,dense=1,readers=1."
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace 20 steps into the run's trace.json, and print where their time went.")
    ] = False,
    runs: Root = RUNS,
) -> None:
    """Train a model from a recipe, or resume a run."""
    from rowstead.spec.run import check_moves, load_recipe

    set_ = [*(set_ or []), *([f"device={device}"] if device is not None else [])]
    if resume is not None:
        check_moves(set_)
        for value, what in ((recipe, recipe), (init_from, "--init-from"), (out, "--out"), (fleet, "--fleet")):
            if value:
                raise RowsteadError(f"`--resume` uses the run's own recipe and settings; remove `{what}`")
    elif accept_changed_log:
        raise RowsteadError("`--accept-changed-log` applies only to `--resume`; remove it")
    spec = load_recipe(recipe or "quickstart", set_) if resume is None else None
    require_address_space()
    if fleet_commands.has_fleet(spec, fleet, resume, runs):
        for is_given, option in ((processes > 1, "--processes"), (profile, "--profile")):
            if is_given:
                raise RowsteadError(f"`{option}` does not apply to a fleet; remove it")
        if resume is not None and set_:
            raise RowsteadError("`--resume` of a fleet uses the run's own settings; remove `--set`")
        fleet_commands.train(
            spec, fleet, resume=resume, accept_changed_log=accept_changed_log, init_from=init_from, out=out, runs=runs
        )
        return
    if processes > 1:
        _launch(["train", *_given_words(context, without="processes")], processes)

    console = terminal(quiet=int(os.environ.get("RANK", "0")) > 0)
    with loading(console, "PyTorch"):
        from rowstead import run  # after the recipe was parsed, so that mistakes in it show at once
        from rowstead.cli.console import print_ending
        from rowstead.training.progress_bar import progress_callback

    if launch.is_launched():
        launch.exit_with_launcher()
    with progress_callback(console) as callback:
        if resume is not None:
            result = run.resume(
                resume,
                changes=set_,
                root=runs,
                accept_changed_log=accept_changed_log,
                callback=callback,
                progress=False,
                profile=profile,
            )
        else:
            assert spec is not None
            result = run.train(
                spec, root=runs, out=out, init_from=init_from, callback=callback, progress=False, profile=profile
            )
    print_ending(console, result, options=f" --processes {os.environ['WORLD_SIZE']}" if launch.is_launched() else "")


@app.command()
def evaluate(
    run: Run,
    data: Data = None,
    split: Annotated[
        Literal["eval", "test", "train"], typer.Option("--split", help="Which split of the run's log to score.")
    ] = "eval",
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="COLUMN", help="Measure rankings within the values of this column, such as the user."),
    ] = None,
    segment: Annotated[
        str | None,
        typer.Option("--segment", metavar="COLUMN", help="Show NE and calibration for each value of this column."),
    ] = None,
    top_k: Annotated[
        list[int] | None, typer.Option("--top-k", min=1, max=10_000, metavar="K", help="The k of recall and NDCG. Repeatable.")
    ] = None,
    importance: Annotated[
        bool, typer.Option("--importance", help="Also show how much NE rises when each feature is permuted.")
    ] = False,
    permutations: Annotated[
        int,
        typer.Option("--permutations", min=2, max=1000, metavar="N", help="With --importance: permutations of each feature."),
    ] = 5,
    samples: Annotated[
        int, typer.Option("--samples", min=100, metavar="N", help="With --importance: examples that are looked at, in memory.")
    ] = 50_000,
    runs: Root = RUNS,
) -> None:
    """Score a run's model on its evaluation split, on another one, or on other files."""
    from rowstead.cli.console import doing, quality_rows, segments_table
    from rowstead.training.progress_bar import PlainProgress
    from rowstead.training.trained import evaluate as evaluate_run

    console = terminal()
    with doing(console, "examples") as advance:
        quality = evaluate_run(
            run,
            data=data,
            split=split,
            group=group,
            segment=segment,
            top_k=top_k,
            root=runs,
            callback=PlainProgress(console),
            progress=advance,
        )
    console.print(two_columns(f"on {quality.num_samples:,} examples", quality_rows(quality)))
    if quality.segments is not None:
        print_wide(console, segments_table(quality.segments))
    if importance:
        from rowstead.cli.console import print_importance
        from rowstead.training.importance import importance as importance_of

        with doing(terminal(stderr=True), "predictions") as advance:
            found = importance_of(
                run, data=data, split=split, permutations=permutations, max_samples=samples, root=runs, progress=advance
            )
        print_importance(console, found)


@app.command()
def predict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, as for `evaluate`, or a folder that `export` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="Parquet file to write.")],
    data: Data = None,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="COLUMN", help="Copy this column of the log next to the predictions. Repeatable."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    runs: Root = RUNS,
) -> None:
    """Write click probabilities to Parquet, in the order of the log."""
    from rowstead.cli.console import doing
    from rowstead.serve.predict import predict as write_predictions
    from rowstead.training.progress_bar import PlainProgress

    console = terminal()
    with doing(console, "examples") as advance:
        done = write_predictions(
            run,
            out,
            data=data,
            keep=keep or (),
            overwrite=overwrite,
            root=runs,
            callback=PlainProgress(console),
            progress=advance,
        )
    skipped = f" ({done.num_skipped:,} bad rows skipped)" if done.num_skipped else ""
    console.print(f"{done.num_rows:,} predictions in {out}{skipped}", soft_wrap=True)


@app.command()
def export(
    run: Run,
    to: Annotated[Path, typer.Option("--to", help="New folder to write.")],
    int8: Annotated[
        bool, typer.Option("--int8", help="Store embedding rows as int8 with one scale and offset per row.")
    ] = False,
    runs: Root = RUNS,
) -> None:
    """Write a torch.export program with its hashing and transforms, ready to serve raw fields."""
    from rowstead.serve.export import export as write_program
    from rowstead.training.progress_bar import PlainProgress

    console = terminal()
    exported = write_program(run, to, int8=int8, root=runs, callback=PlainProgress(console))
    console.print(two_columns("exported", exported.rows()))


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe.")] = None,
) -> None:
    """List the shipped recipes, or show one."""
    from rowstead.spec.run import RECIPES, find_recipe, recipe_names

    if name is not None:
        typer.echo(find_recipe(name).read_text(encoding="utf-8", errors="replace"), nl=False)
        return
    print_shipped(RECIPES, recipe_names())


def _given_words(context: typer.Context, *, without: str) -> list[str]:
    """The words of the command line that give a command what `context` has, but for one parameter."""
    words: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name == without or not value:
            continue
        for each in value if isinstance(value, (list, tuple)) else [value]:
            option = parameter.opts[:1] if parameter.param_type_name == "option" else []
            words += [*option, *([] if each is True else [str(each)])]
    return words


def _launch(arguments: list[str], processes: int) -> NoReturn:
    """Run a command in several processes, and exit with their code."""
    if is_multi_process():
        raise RowsteadError("torchrun started this process as one of several; remove `--processes`")
    console = terminal(stderr=True)

    def on_message(text: str) -> None:
        console.print(text, style="bold red", soft_wrap=True)

    raise typer.Exit(launch.launch(arguments, processes, on_message=on_message))
