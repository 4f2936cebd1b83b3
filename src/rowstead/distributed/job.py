"""What the processes of one job agree on about the folder of their run, and how they find it again after a restart."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rowstead.distributed.process_group import ProcessGroup
from rowstead.records.files import write_atomic
from rowstead.records.run_folder import RunFolder, runs_in
from rowstead.spec.job import RESTARTS
from rowstead.spec.parse import digest
from rowstead.spec.run import RunSpec

JOB_FILE = ".job"
"""In a run's folder, the job that trains it."""


def agree_on_folder(process_group: ProcessGroup, make: Callable[[], RunFolder]) -> RunFolder:
    """The folder that the first process makes, in all of them."""
    told = process_group.gather(str(make().path) if process_group.rank == 0 else None)
    return RunFolder(Path(told[0]))


@contextlib.contextmanager
def hold_folder(folder: RunFolder, process_group: ProcessGroup) -> Iterator[None]:
    """The folder's lock, which the first process holds for all."""
    with folder.lock() if process_group.rank == 0 else contextlib.nullcontext():
        process_group.barrier()
        yield


def mark_folder(folder: RunFolder) -> None:
    """Note that this job trains into the folder, so that it finds it again."""
    if RESTARTS in os.environ:
        write_atomic(folder.path / JOB_FILE, _name())


def find_restarted_folder(
    process_group: ProcessGroup, spec: RunSpec, root: Path | str, out: Path | str | None
) -> RunFolder | None:
    """The folder that this job had before it was started again; none on the first start, or where it had none yet."""
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
    if not folder.spec_file.is_file() or not job.is_file() or job.read_text() != _name():
        return False
    return digest(folder.read_spec()) == digest(spec)


def _name() -> str:
    """A name that all starts of one job share, and no other job: torchrun's, and on one machine whoever starts the processes."""
    is_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.getppid() if is_one_machine else ''}\n"
