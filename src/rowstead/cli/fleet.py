"""The command `role`, and what `train --fleet` runs."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from rowstead.spec.errors import RowsteadError, did_you_mean
from rowstead.spec.fleet import KINDS, parse_fleet
from rowstead.spec.run import RunSpec


def role(
    kind: Annotated[str, typer.Argument(help="sparse, dense, reader or trainer.")],
    run: Annotated[Path, typer.Argument(help="Folder of the run that the fleet trains into.")],
    number: Annotated[int, typer.Argument(min=0, help="Number of the role among those of its kind, from 0.")] = 0,
    address: Annotated[
        str,
        typer.Option("--address", help="Address that a server listens on, protected by the keys of the run."),
    ] = "tcp://127.0.0.1:0",
    incarnation: Annotated[int, typer.Option("--incarnation", min=0, help="Number of earlier starts of this role.")] = 0,
) -> None:
    """Run one role of a fleet that was started with `train --fleet manual`."""
    if kind not in KINDS:
        raise RowsteadError(f"unknown role `{kind}`: {did_you_mean(kind, KINDS)}")
    _check_zeromq()
    from rowstead.fleet.roles import run_role

    raise typer.Exit(run_role(kind, run, number, incarnation, address=address))


def has_fleet(spec: RunSpec | None, fleet: str | None, resume: str | None, runs: Path) -> bool:
    """Whether `train` runs a fleet: by its option, its recipe, or the run that it resumes."""
    if resume is not None:
        from rowstead.records.run_folder import RunFolder

        return RunFolder.open(resume, runs).read_spec().fleet is not None
    return fleet is not None or (spec is not None and spec.fleet is not None)


def train(
    spec: RunSpec | None,
    fleet: str | None,
    *,
    resume: str | None,
    accept_changed_log: bool,
    init_from: str | None,
    out: Path | None,
    runs: Path,
) -> None:
    """Run `train` with a fleet."""
    if spec is not None and fleet is not None:
        spec = dataclasses.replace(spec, fleet=parse_fleet(fleet, spec.scaled_fleet))
    _check_zeromq()
    from rowstead.cli.console import print_ending
    from rowstead.cli.fleet_console import fleet_callback
    from rowstead.fleet.coordinator import resume_fleet, train_fleet
    from rowstead.report.terminal import terminal

    console = terminal()
    with fleet_callback(console) as callback:
        if spec is None:
            assert resume is not None
            result = resume_fleet(resume, root=runs, accept_changed_log=accept_changed_log, callback=callback)
        else:
            result = train_fleet(spec, root=runs, out=out, init_from=init_from, callback=callback)
    print_ending(console, result)


def _check_zeromq() -> None:
    if importlib.util.find_spec("zmq") is None:
        raise RowsteadError("a fleet needs ZeroMQ, which is not installed: `pip install pyzmq`")
