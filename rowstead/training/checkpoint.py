"""Checkpoints: safetensors shards and a JSON manifest with digests, complete or not there at all.

A folder of checkpoints holds one folder each, `step-000000100`, with

    manifest.json     step, facts, the files with their sizes and digests, and where each tensor is
    manifest.sha256   the manifest's own digest, as `sha256sum -c` reads it
    shard-00000.safetensors …

All of it is written and synced under a `.tmp-` name and then renamed, so a crash at any moment leaves every older
checkpoint whole. One process writes to a folder at a time (it holds the run's lock); any number may read meanwhile.
We write the shards ourselves, as the format is a JSON header and raw bytes: rows go from the tables to the file
without a copy, the digest is taken on the way, and a full disk is an `OSError`.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rowstead.records.files import fsync_folder, shown_bytes
from rowstead.spec.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"
CHUNK_BYTES = 16 << 20
"""Bytes that go to the file, or come from the GPU, at a time."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

_NAME = re.compile(r"step-(\d{9,})(?:-(\d+))?")


@dataclass(frozen=True)
class _Piece:
    """Rows `start` to `stop` of a tensor, as they go into one shard; a scalar has one row."""

    name: str
    tensor: Tensor
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * _row_bytes(self.tensor)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte was checked; tensors are read when they are asked for."""

    path: Path
    step: int
    facts: dict[str, Any]
    """What was given to `save`, as JSON keeps it: tuples have become lists."""
    tensors: SavedTensors


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, read from disk at each look-up.

    The files stay open, so reading goes on to work after the run that writes them has pruned the checkpoint.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], device: torch.device | str) -> None:
        self._index: dict[str, dict[str, Any]] = manifest["tensors"]
        self._files: dict[str, Any] = {
            name: safe_open(folder / name, framework="pt", device="cpu") for name in manifest["files"]
        }
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        pieces = self._index[name]["pieces"]
        if len(pieces) == 1:
            tensor: Tensor = self._files[pieces[0][0]].get_tensor(name)
            return tensor.to(self._device)
        return self.rows(name, 0, self.shape(name)[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._index[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor's elements, without reading it."""
        return DTYPES[self._index[name]["dtype"]]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor, [stop - start, …], reading only those."""
        shape = self.shape(name)
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise IndexError(f"rows {start} to {stop} of `{name}`, which has shape {list(shape)}")
        result = torch.empty((stop - start, *shape[1:]), dtype=self.dtype(name), device=self._device)
        for file, first, last in self._index[name]["pieces"]:
            low, high = max(first, start), min(last, stop)
            if low < high:
                result[low - start : high - start] = self._files[file].get_slice(name)[low - first : high - first]
        return result


def save(
    folder: Path, step: int, tensors: Mapping[str, Tensor], facts: dict[str, Any], keep: int, shard_bytes: int = 1 << 30
) -> Path:
    """Write a checkpoint into `folder`, then drop all but the newest `keep`; returns where it is.

    `facts` is whatever JSON can hold. Later steps that lie in the folder are of a history that this run has left
    (it was resumed before them), and go as well. A table above `shard_bytes` is split by rows.
    """
    if keep < 1 or shard_bytes < 1 or step < 0:
        raise ValueError(f"keep {keep} and shard_bytes {shard_bytes} must be at least 1, step {step} at least 0")
    needs_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + (1 << 16)
    temporary = folder / f".tmp-save-{step:09d}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        if needs_bytes > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary.mkdir()
        _write(temporary, step, tensors, facts, shard_bytes)
        final = _unused_name(folder, step)
        os.rename(temporary, final)
        fsync_folder(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_why_not_saved(folder, step, needs_bytes, error)) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _prune(folder, final, keep)
    return final


def load(path: Path, *, device: torch.device | str = "cpu") -> Checkpoint:
    """Open the checkpoint at `path` after checking the digest of every file in it."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        manifest = _checked_manifest(path)
        for name, facts in manifest["files"].items():
            _check_shard(path / name, facts["bytes"], facts["sha256"])
        tensors = SavedTensors(path, manifest, device)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {Path(str(error.filename or error)).name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror or error}: {error.filename}") from error
    return Checkpoint(path=path, step=manifest["step"], facts=manifest["facts"], tensors=tensors)


def load_latest(folder: Path, report: Callable[[str], None], *, device: torch.device | str = "cpu") -> Checkpoint:
    """Open the newest good checkpoint in `folder`; each damaged one that is passed over is named through `report`."""
    failures: dict[Path, str] = {}
    # The folder is listed anew each time: a run that is still training may replace checkpoints while we check them.
    while untried := [path for path in checkpoints_in(folder) if path not in failures]:
        path = untried[-1]
        try:
            checkpoint = load(path, device=device)
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


def _write(folder: Path, step: int, tensors: Mapping[str, Tensor], facts: dict[str, Any], shard_bytes: int) -> None:
    """All files of a checkpoint, synced, and then the folder that holds them."""
    files: dict[str, dict[str, Any]] = {}
    index: dict[str, dict[str, Any]] = {
        name: {"dtype": _code(name, tensor), "shape": list(tensor.shape), "pieces": []} for name, tensor in tensors.items()
    }
    for number, pieces in enumerate(_shards(tensors, shard_bytes)):
        file = f"shard-{number:05d}.safetensors"
        files[file] = _write_shard(folder / file, pieces)
        for piece in pieces:
            index[piece.name]["pieces"].append([file, piece.start, piece.stop])
    manifest = {"format": FORMAT, "step": step, "facts": facts, "files": files, "tensors": index}
    text = (json.dumps(manifest, indent=1) + "\n").encode()
    for name, content in ((MANIFEST, text), (MANIFEST_DIGEST, _digest_line(text))):
        with open(folder / name, "wb") as file_object:
            file_object.write(content)
            file_object.flush()
            os.fsync(file_object.fileno())
    fsync_folder(folder)


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> Iterator[list[_Piece]]:
    """Pieces file by file, in the order of the tensors; a file holds at most one piece of a tensor, under its name."""
    shard: list[_Piece] = []
    used = 0
    for name, tensor in tensors.items():
        num_rows = tensor.shape[0] if tensor.dim() else 1
        rows_each = max(1, shard_bytes // max(1, _row_bytes(tensor)))
        for start in range(0, max(1, num_rows), rows_each):
            piece = _Piece(name, tensor, start, min(start + rows_each, num_rows))
            if shard and (used + piece.num_bytes > shard_bytes or shard[-1].name == name):
                yield shard
                shard, used = [], 0
            shard.append(piece)
            used += piece.num_bytes
    if shard:
        yield shard


def _write_shard(path: Path, pieces: list[_Piece]) -> dict[str, Any]:
    """One safetensors file; returns its size and digest."""
    pieces = sorted(pieces, key=lambda piece: -piece.tensor.element_size())  # so that every element is aligned
    header: dict[str, Any] = {}
    place = 0
    for piece in pieces:
        shape = [piece.stop - piece.start, *piece.tensor.shape[1:]] if piece.tensor.dim() else []
        offsets = [place, place + piece.num_bytes]
        header[piece.name] = {"dtype": CODES[piece.tensor.dtype], "shape": shape, "data_offsets": offsets}
        place = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text):
            digest.update(chunk)
            file.write(chunk)
        for piece in pieces:
            for view in _chunks(piece):
                digest.update(view)
                file.write(view)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + place, "sha256": digest.hexdigest()}


def _chunks(piece: _Piece) -> Iterator[memoryview]:
    """The bytes of a piece, a few megabytes at a time; nothing is copied that is contiguous and on the CPU."""
    rows = piece.tensor.detach() if piece.tensor.dim() else piece.tensor.detach().reshape(1)
    rows_each = max(1, CHUNK_BYTES // max(1, _row_bytes(piece.tensor)))
    for start in range(piece.start, piece.stop, rows_each):
        part = rows[start : min(start + rows_each, piece.stop)].cpu().contiguous()
        if part.numel():
            # One element is contiguous whatever its stride, and torch does not view it as bytes then.
            yield part.as_strided((part.numel(),), (1,)).view(torch.uint8).numpy().data


def _checked_manifest(folder: Path) -> dict[str, Any]:
    text = (folder / MANIFEST).read_bytes()
    if (folder / MANIFEST_DIGEST).read_bytes() != _digest_line(text):
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} does not match its digest in {MANIFEST_DIGEST}")
    manifest: dict[str, Any] = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {manifest.get('format')}, and this version of rowstead reads format {FORMAT} only: "
            "read it with the version that wrote it"
        )
    return manifest


def _check_shard(path: Path, num_bytes: int, sha256: str) -> None:
    with open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != num_bytes:
            what = "truncated" if found < num_bytes else "too long"
            raise CheckpointError(
                f"checkpoint {path.parent} is damaged: {path.name} is {what}: expected {num_bytes} bytes, got {found}"
            )
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise CheckpointError(f"checkpoint {path.parent} is damaged: {path.name} does not match its digest")


def _digest_line(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()


def _row_bytes(tensor: Tensor) -> int:
    return tensor.element_size() * math.prod(tensor.shape[1:])


def _code(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in CODES or name == "__metadata__":
        raise ValueError(f"cannot save `{name}` of {tensor.dtype}: known types are {', '.join(map(str, CODES))}")
    return CODES[tensor.dtype]


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
    """Drop what the new checkpoint supersedes; what cannot be dropped stays, as the save itself has succeeded."""
    step = _step_and_attempt(newest)[0]
    others = [path for path in checkpoints_in(folder) if path != newest]
    before = [path for path in others if _step_and_attempt(path)[0] < step]
    kept = before[len(before) - min(keep - 1, len(before)) :]
    for path in others:
        if path in kept:
            continue
        # Renamed first, so that one that is half deleted when we are killed does not look like a damaged one.
        doomed = folder / f".tmp-drop-{path.name}"
        with contextlib.suppress(OSError):
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what earlier processes were killed over."""
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def _why_not_saved(folder: Path, step: int, needs_bytes: int, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shown_bytes(shutil.disk_usage(there).free)
        problem = f"disk full while saving step {step} in {folder}: needs {shown_bytes(needs_bytes)}, free {free}"
    else:
        problem = f"cannot save step {step} in {folder}: {error.strerror or error}"
    try:
        last = load_latest(folder, lambda _: None)
    except CheckpointError:
        return f"{problem}; there is no good checkpoint before it"
    return f"{problem}; the last good checkpoint is {last.path}"
