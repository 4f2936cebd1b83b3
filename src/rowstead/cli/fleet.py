"""The command that starts one role of a fleet, and what `train --fleet` runs."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from rowstead.spec.errors import RowsteadError, did_you_mean
from rowstead.spec.fleet import KINDS, fleet_from
from rowstead.spec.run import RunSpec


def role(
    kind: Annotated[str, typer.Argument(help="sparse, dense, reader or trainer.")],
    run: Annotated[Path, typer.Argument(help="Folder of the run that the fleet trains into.")],
    number: Annotated[int, typer.Argument(min=0, help="Which of the roles of this kind, from 0.")] = 0,
    address: Annotated[
        str, typer.Option("--address", help="Where a server listens; other machines need the keys of the run.")
    ] = "tcp://127.0.0.1:0",
    incarnation: Annotated[int, typer.Option("--incarnation", min=0, help="How often this role was started before.")] = 0,
) -> None:
    """Be one role of a fleet, by hand; `train --fleet` starts them by itself."""
    if kind not in KINDS:
        raise RowsteadError(f"no role `{kind}`: {did_you_mean(kind, KINDS)}")
    _check_zeromq()
    from rowstead.fleet.roles import run_role

    raise typer.Exit(run_role(kind, run, number, incarnation, address=address))


def has_fleet(spec: RunSpec | None, fleet: str | None, resume: str | None, runs: Path) -> bool:
    """Whether `train` is about a fleet: by its option, its recipe, or the run that it goes on with."""
    if resume is not None:
        from rowstead.records.run_folder import RunFolder

        return RunFolder.open(resume, runs).read_spec().fleet is not None
    return fleet is not None or (spec is not None and spec.fleet is not None)


def train(
    spec: RunSpec | None, fleet: str | None, *, resume: str | None, init_from: str | None, out: Path | None, runs: Path
) -> None:
    """What `train` does with a fleet."""
    if spec is not None:
        spec = spec if fleet is None else dataclasses.replace(spec, fleet=fleet_from(fleet, spec.fleet))

    _check_zeromq()

    from rowstead.cli.console import as_typed, command_name, summary
    from rowstead.cli.fleet_console import fleet_callback
    from rowstead.fleet.coordinator import resume_fleet, train_fleet
    from rowstead.report.terminal import terminal

    console = terminal()
    with fleet_callback(console) as callback:
        if spec is None:
            assert resume is not None
            result = resume_fleet(resume, root=runs, callback=callback)
        else:
            result = train_fleet(spec, root=runs, out=out, init_from=init_from, callback=callback)
    if result.outcome.ending == "interrupted":
        step = result.outcome.position.step
        ended = f"stopped after step {step:,}; the checkpoint is saved." if step else "stopped before the first step."
        console.print(ended)
        console.print(f"go on with: {command_name()} train --resume {as_typed(result.folder)}", soft_wrap=True)
        raise typer.Exit(130)
    console.print(summary(result))


def _check_zeromq() -> None:
    if importlib.util.find_spec("zmq") is None:
        raise RowsteadError("the roles of a fleet talk over ZeroMQ, which is not installed here: `pip install pyzmq`")
