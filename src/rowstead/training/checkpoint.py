"""Checkpoints: safetensors shards and a JSON manifest with digests, complete or not there at all.

A folder of checkpoints holds one folder each, `step-000000100`, with

    manifest.json     step, facts, the files with their sizes and digests, and where each tensor is
    manifest.sha256   the manifest's own digest, as `sha256sum -c` reads it
    shard-00000.safetensors …

All of it is written and synced under a `.tmp-` name and then renamed, so a crash at any moment leaves every older
checkpoint whole. One job writes to a folder at a time (it holds the run's lock); any number may read meanwhile.

The processes of a job write together: each the pieces of tables that it keeps, into files of its own, and the first of them
the rest and the manifest. What was cut one way is read any other way. An incremental checkpoint has of the tables only the rows
that were touched since a full one, which it names and which stays as long as it does.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from rowstead.distributed.process_group import ProcessGroup, SingleProcess
from rowstead.records.files import fsync_folder
from rowstead.spec.errors import CheckpointError
from rowstead.spec.sizes import format_bytes
from rowstead.stores.state import StatePart, rows_at_once
from rowstead.training.checkpoint_files import Outgoing, check_shard, of_part, of_tensor, shards, write_shard
from rowstead.training.checkpoint_increment import Increment, of_touched, of_touched_rows
from rowstead.training.saved_tensors import STORE, InOneFolder, Restored, SavedTensors

FORMAT = 2
READABLE = (1, 2)
"""Formats that this version reads: the first has neither columns nor increments."""
MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"

Read = TypeVar("Read")
_NAME = re.compile(r"step-(\d{9,})(?:-(\d+))?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte was checked; tensors are read when they are asked for."""

    path: Path
    step: int
    facts: dict[str, Any]
    """What was given to `save`, as JSON keeps it: tuples have become lists."""
    tensors: SavedTensors
    base: str | None = None
    """Of an incremental one, the name of the full one that it needs, in the same folder."""
    number: int = 0
    """How many incremental ones, this included, there were since the full one."""


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: dict[str, Any],
    keep: int,
    shard_bytes: int = 1 << 30,
    *,
    parts: Sequence[StatePart] = (),
    increment: Increment | None = None,
    process_group: ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint into `folder`, then drop all but the newest `keep` and what these need; returns where it is.

    `facts` is whatever JSON can hold. `parts` are what this process keeps of the tables, saved as `store.<name>`, with
    `increment` only the rows that it names. DeferredReply steps that lie in the folder are of a history that this run has left (it was
    resumed before them), and go as well. A table above `shard_bytes` is split by rows. With a `process_group` all processes of a job
    save together, into a folder that all of them see; `tensors` and `facts` are those of the first.
    """
    if keep < 1 or shard_bytes < 1 or step < 0:
        raise ValueError(f"keep {keep} and shard_bytes {shard_bytes} must be at least 1, step {step} at least 0")
    process_group = process_group or SingleProcess()
    is_first = process_group.rank == 0
    outgoing = _outgoing(tensors if is_first else {}, parts, increment, is_first)
    needs_bytes = sum(process_group.gather(sum(one.num_bytes for one in outgoing))) + (1 << 16)
    temporary = folder / process_group.gather(f".tmp-save-{step:09d}-{os.getpid()}")[0]
    final = folder
    try:
        with _together(process_group):
            if is_first:
                _make_room(folder, temporary, needs_bytes)
        with _together(process_group):
            written = _write_shards(
                temporary, outgoing, shard_bytes, "" if process_group.world_size == 1 else f"{process_group.rank:04d}-"
            )
        all_written = process_group.gather(written)
        with _together(process_group):
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


def load(path: Path, *, process_group: ProcessGroup | None = None) -> Checkpoint:
    """Open the checkpoint at `path` after checking the digest of every file in it, and of the full one that it needs.

    With a `process_group` all processes of a job load together: each file is checked by one of them, and all succeed or none.
    """
    process_group = process_group or SingleProcess()
    manifest, own = _opened(path, process_group)
    base = manifest.get("base")
    tensors: SavedTensors = own
    if base is not None:
        below = path.parent / base["name"]
        try:
            found, full = _opened(below, process_group, sha256=base["sha256"])
            assert found.get("base") is None, f"{path} needs {below}, which is itself incremental"
            tensors = Restored(path, full, own)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {path} needs the full checkpoint {below.name}, and {error}") from error
    return Checkpoint(
        path=path,
        step=manifest["step"],
        facts=manifest["facts"],
        tensors=tensors,
        base=base["name"] if base else None,
        number=base["number"] if base else 0,
    )


def _opened(path: Path, process_group: ProcessGroup, *, sha256: str | None = None) -> tuple[dict[str, Any], InOneFolder]:
    """A checkpoint's manifest and tensors, once every process of the job has found its share of the files whole.

    `sha256` is what the manifest's digest must be, if somebody knows.
    """

    def read_manifest() -> dict[str, Any]:
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint at {path}")
        manifest = _checked_manifest(path, sha256)
        for name in sorted(manifest["files"])[process_group.rank :: process_group.world_size]:
            check_shard(path / name, manifest["files"][name]["bytes"], manifest["files"][name]["sha256"])
        return manifest

    manifest = _read_by_all(path, process_group, read_manifest)
    return manifest, _read_by_all(path, process_group, lambda: InOneFolder(path, manifest))


def _read_by_all(path: Path, process_group: ProcessGroup, read: Callable[[], Read]) -> Read:
    """What `read` gives, if it fails in no process of the job; if it does, all raise the same."""
    problem, result = None, None
    try:
        result = read()
    except FileNotFoundError as error:
        problem = f"checkpoint {path} is damaged: {Path(str(error.filename or error)).name} is missing"
    except OSError as error:
        problem = f"checkpoint {path} cannot be read: {error.strerror or error}: {error.filename}"
    except CheckpointError as error:
        problem = str(error)
    for text in process_group.gather(problem):
        if text is not None:
            raise CheckpointError(text)
    assert result is not None
    return result


def load_latest(folder: Path, report: Callable[[str], None], *, process_group: ProcessGroup | None = None) -> Checkpoint:
    """Open the newest good checkpoint in `folder`; each damaged one that is passed over is named through `report`."""
    process_group = process_group or SingleProcess()
    failures: dict[Path, str] = {}
    # The folder is listed anew each time: a run that is still training may replace checkpoints while we check them.
    while untried := [name for name in _names_in(folder, process_group) if folder / name not in failures]:
        path = folder / untried[-1]
        try:
            checkpoint = load(path, process_group=process_group)
        except CheckpointError as error:
            failures[path] = str(error)
            if path.is_dir():
                report(f"{error}; trying the one before")
        else:
            return checkpoint
    if not failures:
        raise CheckpointError(f"there is no checkpoint in {folder}")
    raise CheckpointError(f"no checkpoint in {folder} is usable:\n" + "\n".join(f"- {why}" for why in failures.values()))


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest step first; whether they are good is for `load` to find out."""
    if not folder.is_dir():
        return []
    found = [(_step_and_attempt(path), path) for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return [path for _, path in sorted(found)]


def _names_in(folder: Path, process_group: ProcessGroup) -> list[str]:
    """The names of the checkpoints in a folder as the first process of a job sees them."""
    names: list[str] = process_group.gather([path.name for path in checkpoints_in(folder)])[0]
    return names


def _outgoing(
    tensors: Mapping[str, Tensor], parts: Sequence[StatePart], increment: Increment | None, is_first: bool
) -> list[Outgoing]:
    """All that this process writes, in the order of the manifest."""
    outgoing = [of_tensor(name, tensor) for name, tensor in tensors.items()]
    own = [part for part in parts if not part.is_copy]
    most = rows_at_once(parts)
    if increment is None:
        return outgoing + [of_part(f"{STORE}{part.name}", part, most[part.name]) for part in own]
    if is_first:
        outgoing += of_touched(increment)
    return outgoing + [of_touched_rows(f"{STORE}{part.name}", part, most[part.name], increment) for part in own]


def _make_room(folder: Path, temporary: Path, needs_bytes: int) -> None:
    """An empty folder to write to, on a disk that has room for it all."""
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    if needs_bytes > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    temporary.mkdir()


def _write_shards(folder: Path, outgoing: Sequence[Outgoing], shard_bytes: int, mark: str) -> dict[str, Any]:
    """This process's files, synced: what the manifest is to say of them and of the tensors in them."""
    files: dict[str, dict[str, Any]] = {}
    index: dict[str, dict[str, Any]] = {one.name: one.entry() for one in outgoing}
    for number, pieces in enumerate(shards(outgoing, shard_bytes)):
        file = f"shard-{mark}{number:05d}.safetensors"
        files[file] = write_shard(folder / file, pieces)
        for piece in pieces:
            index[piece.outgoing.name]["pieces"].append(piece.outgoing.place(file, piece.start, piece.stop))
    return {"files": files, "tensors": index}


def _write_manifest(
    folder: Path,
    step: int,
    facts: dict[str, Any],
    written: Sequence[dict[str, Any]],
    increment: Increment | None,
    others: Path,
) -> None:
    """The manifest of what all processes have written, synced, and then the folder that holds it."""
    files: dict[str, Any] = {}
    index: dict[str, dict[str, Any]] = {}
    for one in written:
        files |= one["files"]
        for name, entry in one["tensors"].items():
            known = index.setdefault(name, {**entry, "pieces": []})
            assert {**known, "pieces": []} == {**entry, "pieces": []}, f"processes disagree about `{name}`"
            known["pieces"] += entry["pieces"]
    for name, entry in index.items():
        _check_whole(name, entry)
    manifest = {"format": FORMAT, "step": step, "facts": facts, "files": files, "tensors": index}
    if increment is not None:
        sha256 = hashlib.sha256((others / increment.base / MANIFEST).read_bytes()).hexdigest()
        manifest["base"] = {"name": increment.base, "sha256": sha256, "number": increment.number}
    text = (json.dumps(manifest, indent=1) + "\n").encode()
    for name, content in ((MANIFEST, text), (MANIFEST_DIGEST, _digest_line(text))):
        with open(folder / name, "wb") as file_object:
            file_object.write(content)
            file_object.flush()
            os.fsync(file_object.fileno())
    fsync_folder(folder)


def _check_whole(name: str, entry: dict[str, Any]) -> None:
    """A tensor of which no process had a piece, or two had the same, must not look like one that was saved."""
    shape = entry["shape"] or [1]
    width = shape[1] if len(shape) > 1 else 1
    counts = [(last - first) * (columns[1] - columns[0] if columns else width) for _, first, last, *columns in entry["pieces"]]
    expected = math.prod(shape[:2])
    assert sum(counts) == expected, f"the processes' pieces of `{name}` have {sum(counts)} of its {expected} places"


@contextlib.contextmanager
def _together(process_group: ProcessGroup) -> Iterator[None]:
    """What all processes of a job do at once: if it fails in one, it fails in all, with the same reason."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001, RUF100 - whatever it is, the others wait to hear of it
        if process_group.world_size == 1:
            raise
        failure = error
    told = None
    if failure is not None:
        code = failure.errno if isinstance(failure, OSError) else None
        text = (failure.strerror or str(failure)) if isinstance(failure, OSError) else f"{type(failure).__name__}: {failure}"
        told = [code or errno.EIO, f"{text} (process {process_group.rank})"]
    for other in process_group.gather(told):
        if other is not None:
            raise OSError(*other) from failure


def _checked_manifest(folder: Path, sha256: str | None) -> dict[str, Any]:
    text = (folder / MANIFEST).read_bytes()
    line = _digest_line(text)
    if (folder / MANIFEST_DIGEST).read_bytes() != line:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} does not match its digest in {MANIFEST_DIGEST}")
    if sha256 is not None and line.split()[0].decode() != sha256:
        raise CheckpointError(f"checkpoint {folder} is not the one that was meant: its {MANIFEST} has another digest")
    manifest: dict[str, Any] = json.loads(text)
    if manifest.get("format") not in READABLE:
        raise CheckpointError(
            f"checkpoint {folder} has format {manifest.get('format')}, and this version of rowstead reads formats "
            f"{', '.join(map(str, READABLE))}: read it with the version that wrote it"
        )
    return manifest


def _digest_line(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()


def _step_and_attempt(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _unused_name(folder: Path, step: int) -> Path:
    """`step-N`, or `step-N-2` where an old N must stay until the new one is there: two renames would not be atomic."""
    attempts = [_step_and_attempt(path)[1] for path in checkpoints_in(folder) if _step_and_attempt(path)[0] == step]
    name = f"step-{step:09d}"
    return folder / (f"{name}-{max(attempts) + 1}" if attempts else name)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Drop what the new checkpoint supersedes and none that stays needs; what cannot be dropped stays as well."""
    step = _step_and_attempt(newest)[0]
    others = [path for path in checkpoints_in(folder) if path != newest]
    before = [path for path in others if _step_and_attempt(path)[0] < step]
    kept = before[len(before) - min(keep - 1, len(before)) :]
    needed = {_base_of(path) for path in (*kept, newest)}
    for path in reversed(others):  # a full one goes after those that need it
        if path in kept or path.name in needed:
            continue
        # Renamed first, so that one that is half deleted when we are killed does not look like a damaged one.
        doomed = folder / f".tmp-drop-{path.name}"
        with contextlib.suppress(OSError):
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _base_of(path: Path) -> str | None:
    """The name of the full checkpoint that an incremental one needs; none if it needs none, or nobody can tell."""
    try:
        base = json.loads((path / MANIFEST).read_bytes()).get("base")
        return str(base["name"]) if base else None
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None


def _remove_leftovers(folder: Path) -> None:
    """Remove what earlier processes were killed over."""
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


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
        return f"{problem}; there is no good checkpoint before it"
    return f"{problem}; the last good checkpoint is {last.path}"
