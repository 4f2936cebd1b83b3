"""What an earlier part of a run, whose coordinator has exited or was killed, has left: roles, a checkpoint, batches that are done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from rowstead.fleet.batch_assignments import parse_log
from rowstead.fleet.build import fleet_of, read_reader_progress
from rowstead.fleet.manual_launch import stop_earlier_roles
from rowstead.fleet.roster import create_roles_folder, hold_role
from rowstead.records.run_folder import RunFolder
from rowstead.spec.errors import CheckpointError
from rowstead.spec.fleet import FleetSpec
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.checkpoint_fits import check_fits


def stop_earlier_run(folder: Path, fleet: FleetSpec) -> None:
    """Wait until no role of an earlier coordinator runs any more: what it still writes would be taken for ours."""
    if fleet.start == "manual":
        stop_earlier_roles(folder, fleet.roles())
    create_roles_folder(folder)
    for kind, number in fleet.roles():
        with hold_role(folder, kind, number):
            pass


def check_resumable(spec: RunSpec, saved: checkpoint.Checkpoint, folder: RunFolder, on_message: Callable[[str], None]) -> None:
    """Refuse a checkpoint that the trainers and readers of a fleet cannot continue from."""
    check_fits(spec, saved, on_message, with_optimizer=True)
    texts, num_readers = saved.facts.get("readers"), fleet_of(spec).num_readers
    problem = None
    if not isinstance(texts, list) or len(texts) != num_readers or not all(isinstance(text, str) for text in texts):
        problem = f"was not saved by a fleet of {num_readers} readers"
    else:
        try:
            for text in filter(None, texts):
                parse_log(text.encode())
        except ValueError as error:
            problem = f"was saved by another version of rowstead, or is damaged: `facts.readers` {error}"
    if problem is not None:
        raise CheckpointError(
            f"{saved.path} {problem}, so the readers do not know where to continue. Start a new run with its weights: "
            f"`rowstead train {folder.spec_file} --init-from {folder.path}`"
        )


def count_done_batches(spec: RunSpec, folder: Path) -> int:
    """Count the batches that the assignment logs in a run's folder call done; a log that cannot be read counts as none."""
    num_done = 0
    for text in read_reader_progress(spec, folder):
        with contextlib.suppress(ValueError):
            num_done += parse_log(text.encode())[1].num_done
    return num_done


def describe_resume(path: Path, saved: checkpoint.Checkpoint | None, num_lost_steps: int) -> str:
    """Say where a run continues, and what was lost with its last coordinator."""
    start = (
        f"resuming {path} after step {saved.step:,}"
        if saved is not None
        else f"{path} has no checkpoint yet: starting at the first step"
    )
    if not num_lost_steps:
        return start
    steps = "1 step was" if num_lost_steps == 1 else f"{num_lost_steps:,} steps were"
    return f"{start}. {steps} trained after it and lost with the last coordinator, and will be trained again; `train.checkpoint_every` loses less"
