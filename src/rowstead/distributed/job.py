"""The run folder of a job with several processes: how they agree on it, lock it, and find it again after a restart."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rowstead.distributed.process_group import ProcessGroup
from rowstead.records.files import write_atomic
from rowstead.records.run_folder import RunFolder, runs_in
from rowstead.spec.job import RESTARTS
from rowstead.spec.parse import digest
from rowstead.spec.run import RunSpec

JOB_FILE = ".job"
"""In a run's folder: the name of the job that trains it."""


def create_folder(process_group: ProcessGroup, root: Path | str, name: str, out: Path | str | None) -> RunFolder:
    """Create a new run's folder in the first process, and return it in all of them."""
    path = None
    if process_group.rank == 0:
        path = str((RunFolder.create(root, name) if out is None else RunFolder.create_at(out)).path)
    return RunFolder(Path(process_group.gather(path)[0]))


@contextlib.contextmanager
def hold_folder(folder: RunFolder, process_group: ProcessGroup) -> Iterator[None]:
    """The folder's lock; the first process holds it for all."""
    with folder.lock() if process_group.rank == 0 else contextlib.nullcontext():
        process_group.barrier()
        yield


def mark_folder(folder: RunFolder) -> None:
    """Write this job's name into the folder, so that the job finds it after a restart."""
    if RESTARTS in os.environ:
        write_atomic(folder.path / JOB_FILE, _job_name())


def find_restarted_folder(
    process_group: ProcessGroup, spec: RunSpec, root: Path | str, out: Path | str | None
) -> RunFolder | None:
    """The folder that this job had before it was restarted; None on its first start, or if it had none yet."""
    if int(os.environ.get(RESTARTS, "0")) == 0:
        return None
    found = None
    if process_group.rank == 0:
        candidates = reversed(runs_in(root)) if out is None else [RunFolder(Path(out))]
        found = next((str(folder.path) for folder in candidates if _is_ours(folder, spec)), None)
    path = process_group.gather(found)[0]
    return None if path is None else RunFolder(Path(path))


def _is_ours(folder: RunFolder, spec: RunSpec) -> bool:
    job = folder.path / JOB_FILE
    if not folder.spec_file.is_file() or not job.is_file() or job.read_text() != _job_name():
        return False
    return digest(folder.read_spec()) == digest(spec)


def _job_name() -> str:
    """A name that all starts of one job share: torchrun's run id, and on one machine also the launcher's process id."""
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.getppid() if is_one_machine else ''}\n"
