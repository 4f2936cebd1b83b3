"""Checkpoints: safetensors shards and a JSON manifest with digests, written atomically (docs/checkpoints.md says what is in them).

A checkpoint is the folder `step-000000100`, written under a `.tmp-` name and then renamed. One job writes to a folder of checkpoints
at a time (it holds the run's lock); any number may read meanwhile. All processes of a job write: each its pieces of the tables, into its
own files, and the first one also the rest and the manifest.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rowstead.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from rowstead.records.files import fsync_folder, write_atomic
from rowstead.records.plain_files import MAX_JSON_BYTES, NOT_PLAIN
from rowstead.spec.errors import CheckpointError
from rowstead.spec.sizes import format_bytes
from rowstead.stores.state import StatePart, rows_at_once
from rowstead.training.checkpoint_files import (
    TensorPiece,
    invalid,
    piece_of_part,
    piece_of_tensor,
    split_into_shards,
    write_shard,
)
from rowstead.training.checkpoint_increment import Increment, piece_of_touched_rows, touched_bitmaps
from rowstead.training.checkpoint_manifest import (
    CHECKPOINT_NAME,
    FORMAT,
    MANIFEST,
    MANIFEST_DIGEST,
    STORE,
    check_manifest,
    digest_line,
    read_manifest,
)
from rowstead.training.saved_tensors import FolderTensors, IncrementalTensors, SavedTensors

Read = TypeVar("Read")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose digests and structure were verified; tensors are read on access."""

    path: Path
    step: int
    facts: dict[str, Any]
    """The facts given to `save`, through JSON: tuples have become lists."""
    tensors: SavedTensors
    base: str | None = None
    """The name of the full checkpoint that an incremental one needs, in the same folder."""
    number: int = 0
    """Incremental checkpoints since the full one, including this."""


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: dict[str, Any],
    keep: int,
    shard_bytes: int = 1 << 29,
    *,
    parts: Sequence[StatePart] = (),
    increment: Increment | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
    threads: int = 1,
) -> Path:
    """Write a checkpoint into `folder`, then delete all but the newest `keep` and those that they need; returns its path.

    `facts` is anything that JSON can hold. `parts` are this process's pieces of the tables, saved as `store.<name>`; with an
    `increment` only the rows that it names. Later steps in the folder are deleted too: the run was resumed before them. A table above
    `shard_bytes` is split by rows. With a `process_group` all processes of a job call this, with a folder that all of them
    see; `tensors` and `facts` are those of the first. With several `threads`, each writes a file at a time: any thread must be able
    to read the parts.
    """
    if keep < 1 or shard_bytes < 1 or step < 0:
        raise ValueError(f"keep {keep} and shard_bytes {shard_bytes} must be at least 1, step {step} at least 0")
    is_first = process_group.rank == 0
    pieces = _pieces_to_save(tensors if is_first else {}, parts, increment, is_first)
    needs_bytes = sum(process_group.gather(sum(piece.num_bytes for piece in pieces))) + (1 << 16)
    temporary = folder / process_group.gather(f".tmp-save-{step:09d}-{os.getpid()}")[0]
    final = folder
    try:
        with _fail_together(process_group):
            if is_first:
                _prepare_folder(folder, temporary, needs_bytes)
        with _fail_together(process_group):
            prefix = "" if process_group.world_size == 1 else f"{process_group.rank:04d}-"
            written = _write_shards(temporary, pieces, shard_bytes, prefix, threads)
        all_written = process_group.gather(written)
        with _fail_together(process_group):
            if is_first:
                _write_manifest(temporary, step, facts, all_written, increment, folder)
                final = _unused_name(folder, step)
                os.rename(temporary, final)
                fsync_folder(folder)
    except OSError as error:
        why = ""
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            why = _why_not_saved(folder, step, needs_bytes, error)
        raise CheckpointError(process_group.gather(why)[0]) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    final = folder / process_group.gather(final.name)[0]
    if is_first:
        _prune(folder, final, keep)
    return final


def load(path: Path, *, process_group: ProcessGroup = SINGLE_PROCESS) -> Checkpoint:
    """Open the checkpoint at `path` after verifying its files, and those of the full one that it needs.

    Their digests must be right, and their content must be what a checkpoint has: see `checkpoint_manifest.py`. With a `process_group`
    all processes of a job call this: each file is verified by one of them, and all succeed or none.
    """
    manifest, own = _open(path, process_group)
    base = manifest.get("base")
    tensors: SavedTensors = own
    if base is not None:
        full_path = path.parent / base["name"]
        try:
            below, full = _open(full_path, process_group, sha256=base["sha256"])
            if below.get("base") is not None or below["step"] > manifest["step"]:
                raise invalid(
                    path, MANIFEST, f"`base.name` must be a full checkpoint of an earlier step, and is {full_path.name}"
                )
            tensors = _read_by_all(path, process_group, lambda: IncrementalTensors(path, full, own))
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {path} needs the full checkpoint {full_path.name}, and {error}") from error
    return Checkpoint(
        path=path,
        step=manifest["step"],
        facts=manifest["facts"],
        tensors=tensors,
        base=base["name"] if base else None,
        number=base["number"] if base else 0,
    )


def _open(path: Path, process_group: ProcessGroup, *, sha256: str | None = None) -> tuple[dict[str, Any], FolderTensors]:
    """A checkpoint's manifest and tensors, once every process of the job has verified its share of the files.

    `sha256` is the expected digest of the manifest, where that is known.
    """

    def open_files() -> tuple[dict[str, Any], FolderTensors]:
        if path.is_symlink() or not path.is_dir():
            raise CheckpointError(f"there is no checkpoint at {path}")
        manifest = read_manifest(path, sha256)
        tensors = FolderTensors(path, manifest)
        tensors.check_digests(process_group.rank, process_group.world_size)
        return manifest, tensors

    manifest, tensors = _read_by_all(path, process_group, open_files)
    _read_by_all(path, process_group, tensors.read_headers)
    return manifest, tensors


def _read_by_all(path: Path, process_group: ProcessGroup, read: Callable[[], Read]) -> Read:
    """Return `read()` if it fails in no process of the job; otherwise all raise the same error."""
    problem, result = None, list[Read]()
    try:
        result.append(read())
    except FileNotFoundError as error:
        problem = f"checkpoint {path} is damaged: {Path(str(error.filename or error)).name} is missing"
    except OSError as error:
        file = Path(str(error.filename or path)).name
        problem = f"checkpoint {path} cannot be read: {file}: {error.strerror or error}"
        if error.errno in NOT_PLAIN:
            problem = str(invalid(path, file, str(error.strerror)))
    except CheckpointError as error:
        problem = str(error)
    for text in process_group.gather(problem):
        if text is not None:
            raise CheckpointError(text)
    return result[0]


def load_latest(
    folder: Path,
    report: Callable[[str], None],
    *,
    check: Callable[[Checkpoint], None] = lambda found: None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Checkpoint:
    """Open the newest valid checkpoint in `folder`; others are skipped and reported.

    `check` raises a CheckpointError if a checkpoint does not fit what it is loaded for.
    """
    failures: dict[Path, str] = {}
    # List the folder again each time: a run that is still training may replace checkpoints meanwhile.
    while untried := [path for path in _seen_by_first(folder, process_group) if path not in failures]:
        path = untried[-1]
        try:
            checkpoint = load(path, process_group=process_group)
            _read_by_all(path, process_group, functools.partial(check, checkpoint))
        except CheckpointError as error:
            failures[path] = str(error)
            if os.path.lexists(path):
                report(f"{error}; trying the previous one")
        else:
            return checkpoint
    if not failures:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    raise CheckpointError(f"no checkpoint in {folder} is usable:\n" + "\n".join(f"- {why}" for why in failures.values()))


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder by rising step; `load` finds out whether they are valid."""
    if not folder.is_dir():
        return []
    found = [(_step_and_attempt(path), path) for path in folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)]
    return [path for _, path in sorted(found)]


def _seen_by_first(folder: Path, process_group: ProcessGroup) -> list[Path]:
    """The checkpoints in a folder, as seen by the first process of a job."""
    return [folder / name for name in process_group.gather([path.name for path in checkpoints_in(folder)])[0]]


def _pieces_to_save(
    tensors: Mapping[str, Tensor], parts: Sequence[StatePart], increment: Increment | None, is_first: bool
) -> list[TensorPiece]:
    """Everything that this process writes, in the order of the manifest."""
    pieces = [piece_of_tensor(name, tensor) for name, tensor in tensors.items()]
    own = [part for part in parts if not part.is_copy]
    max_rows = rows_at_once(parts)
    if increment is None:
        return pieces + [piece_of_part(f"{STORE}{part.name}", part, max_rows[part.name]) for part in own]
    if is_first:
        pieces += touched_bitmaps(increment)
    return pieces + [piece_of_touched_rows(f"{STORE}{part.name}", part, max_rows[part.name], increment) for part in own]


def _prepare_folder(folder: Path, temporary: Path, needs_bytes: int) -> None:
    """Create the empty folder to write to; raises if the disk is too full."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".tmp-*"):  # of processes that were killed
        shutil.rmtree(leftover, ignore_errors=True)
    if needs_bytes > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    temporary.mkdir()


def _write_shards(folder: Path, pieces: Sequence[TensorPiece], shard_bytes: int, prefix: str, threads: int) -> dict[str, Any]:
    """Write and sync this process's files; returns the manifest's entries for them and for their tensors."""
    shards = {
        f"shard-{prefix}{number:05d}.safetensors": slices
        for number, slices in enumerate(split_into_shards(pieces, shard_bytes))
    }
    index: dict[str, dict[str, Any]] = {piece.name: piece.entry() for piece in pieces}
    for file, slices in shards.items():
        for one in slices:
            index[one.piece.name]["pieces"].append(one.piece.location(file, one.start, one.stop))
    if threads == 1:
        return {"files": {file: write_shard(folder / file, slices) for file, slices in shards.items()}, "tensors": index}
    with ThreadPoolExecutor(threads, "checkpoint") as pool:
        written = [pool.submit(write_shard, folder / file, slices) for file, slices in shards.items()]
        try:
            for each in written:
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {"files": {file: each.result() for file, each in zip(shards, written, strict=True)}, "tensors": index}


def _write_manifest(
    folder: Path,
    step: int,
    facts: dict[str, Any],
    written: Sequence[dict[str, Any]],
    increment: Increment | None,
    checkpoints: Path,
) -> None:
    """Write and sync the manifest of all processes' files, and sync the folder."""
    files: dict[str, Any] = {}
    index: dict[str, dict[str, Any]] = {}
    for one in written:
        files |= one["files"]
        for name, entry in one["tensors"].items():
            known = index.setdefault(name, {**entry, "pieces": []})
            assert {**known, "pieces": []} == {**entry, "pieces": []}, f"processes disagree about `{name}`"
            known["pieces"] += entry["pieces"]
    manifest = {"format": FORMAT, "step": step, "facts": facts, "files": files, "tensors": index}
    if increment is not None:
        sha256 = hashlib.sha256((checkpoints / increment.base / MANIFEST).read_bytes()).hexdigest()
        manifest["base"] = {"name": increment.base, "sha256": sha256, "number": increment.number}
    check_manifest(folder, manifest)
    text = (json.dumps(manifest, indent=1) + "\n").encode()
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"the manifest of step {step} would have {format_bytes(len(text))}, too many to be read again")
    write_atomic(folder / MANIFEST, text)
    write_atomic(folder / MANIFEST_DIGEST, digest_line(text))


@contextlib.contextmanager
def _fail_together(process_group: ProcessGroup) -> Iterator[None]:
    """Run a block in all processes of a job: if it fails in one, it fails in all with the same error."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001, RUF100 - the other processes wait for the outcome
        if process_group.world_size == 1:
            raise
        failure = error
    reported = None
    if failure is not None:
        code = failure.errno if isinstance(failure, OSError) else None
        text = (failure.strerror or str(failure)) if isinstance(failure, OSError) else f"{type(failure).__name__}: {failure}"
        reported = [code or errno.EIO, f"{text} (process {process_group.rank})"]
    for other in process_group.gather(reported):
        if other is not None:
            raise OSError(*other) from failure


def _step_and_attempt(path: Path) -> tuple[int, int]:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _unused_name(folder: Path, step: int) -> Path:
    """`step-N`, or `step-N-2` if there is an N already: replacing it takes two renames, which are not atomic."""
    attempts = [_step_and_attempt(path)[1] for path in checkpoints_in(folder) if _step_and_attempt(path)[0] == step]
    name = f"step-{step:09d}"
    return folder / (f"{name}-{max(attempts) + 1}" if attempts else name)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Delete the checkpoints that the new one supersedes, unless a kept one needs them; errors are ignored."""
    step = _step_and_attempt(newest)[0]
    others = [path for path in checkpoints_in(folder) if path != newest]
    before = [path for path in others if _step_and_attempt(path)[0] < step]
    kept = before[len(before) - min(keep - 1, len(before)) :]
    needed = {_base_of(path) for path in (*kept, newest)}
    for path in reversed(others):  # incremental ones before the full one that they need
        if path in kept or path.name in needed:
            continue
        # Rename first, so that a half deleted one does not look damaged if this process is killed.
        deleted = folder / f".tmp-drop-{path.name}"
        with contextlib.suppress(OSError):
            os.rename(path, deleted)
            shutil.rmtree(deleted, ignore_errors=True)


def _base_of(path: Path) -> str | None:
    """The name of the full checkpoint that an incremental one needs; None for a full or unreadable one."""
    try:
        base = read_manifest(path).get("base")
        return str(base["name"]) if base else None
    except (OSError, CheckpointError):
        return None


def _why_not_saved(folder: Path, step: int, needs_bytes: int, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = format_bytes(shutil.disk_usage(there).free)
        problem = f"disk full while saving step {step} in {folder}: needs {format_bytes(needs_bytes)}, free {free}"
    else:
        problem = f"cannot save step {step} in {folder}: {error.strerror or error}"
    try:
        last = load_latest(folder, lambda _: None)
    except CheckpointError:
        return f"{problem}; there is no earlier valid checkpoint"
    return f"{problem}; the last valid checkpoint is {last.path}"
