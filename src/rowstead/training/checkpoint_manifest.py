"""The manifest of a checkpoint: read, and checked as a whole before anything in it is used.

A manifest may come from anybody, with right digests. What this module has passed holds for all that reads a checkpoint: names are plain
names of files in its folder, numbers are numbers, and the pieces of every tensor cover it exactly once.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rowstead.records.plain_files import check_bounded, is_count, parse_json, read_plain, shown
from rowstead.spec.errors import CheckpointError
from rowstead.training.checkpoint_files import DTYPES, ENCODINGS, SavedPiece, invalid

FORMAT = 2
READABLE = tuple(range(1, FORMAT + 1))
"""Formats that this version reads: the first has neither columns nor increments."""
MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"
STORE = "store."
"""Prefix of the names of a store's tensors."""
TOUCHED = "touched."
"""Prefix of the names of an incremental checkpoint's bitmaps."""
CHECKPOINT_NAME = re.compile(r"step-([0-9]{9,18})(?:-([0-9]{1,9}))?")
MAX_PIECES = 100_000
"""Of one tensor: checking that they cover it takes longer than linear time."""
MAX_BYTES = 1 << 60
"""Of one tensor."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Rectangle = tuple[int, int, int, int]
"""First and last row, first and last column."""


def read_manifest(folder: Path, sha256: str | None = None) -> dict[str, Any]:
    """Read and check a manifest; `sha256` is its expected digest, where that is known."""
    text = read_plain(folder / MANIFEST)
    line = digest_line(text)
    if read_plain(folder / MANIFEST_DIGEST, max_bytes=1 << 16) != line:
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} does not match its digest in {MANIFEST_DIGEST}")
    if sha256 is not None and line.split()[0].decode() != sha256:
        raise CheckpointError(f"checkpoint {folder} is not the expected one: its {MANIFEST} has another digest")
    try:
        manifest = parse_json(text)
    except ValueError as error:
        raise invalid(folder, MANIFEST, f"it cannot be parsed: {error}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if type(found) is not int or found not in READABLE:
        raise CheckpointError(
            f"checkpoint {folder} has format {found if type(found) is int else shown(found)}, and this version of rowstead reads formats "
            f"{', '.join(map(str, READABLE))}: read it with the version that wrote it"
        )
    check_manifest(folder, manifest)
    return dict(manifest)


def digest_line(text: bytes) -> bytes:
    """The content of `manifest.sha256`, as `sha256sum -c` reads it."""
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()


def check_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Refuse a manifest that is not one: every field has its type and bounds, and every tensor is covered once by its pieces."""
    try:
        check_bounded(manifest)
        _require(is_count(manifest.get("step")), "step", "must be a whole number, at least 0", manifest.get("step"))
        named = CHECKPOINT_NAME.fullmatch(folder.name)
        is_named = named is None or int(named[1]) == manifest["step"]
        _require(is_named, "step", f"must be that of the folder, {folder.name}", manifest["step"])
        for key in ("facts", "files", "tensors"):
            _require(isinstance(manifest.get(key), dict), key, "must be a mapping", manifest.get(key))
        for name, entry in manifest["files"].items():
            _check_file(name, entry)
        _check_base(folder, manifest.get("base"))
        for name, entry in manifest["tensors"].items():
            _check_tensor(_field(name), entry, manifest["files"])
        for name, entry in manifest["tensors"].items():
            _check_notes(name, entry, manifest)
    except ValueError as error:
        raise invalid(folder, MANIFEST, str(error)) from None


def saved_pieces(entry: dict[str, Any]) -> list[SavedPiece]:
    """The pieces of a tensor, from its entry in a checked manifest."""
    shape, pieces = tuple(entry["shape"]), []
    width = shape[1] if len(shape) > 1 else 1
    encoding = ENCODINGS[entry.get("encoding", "exact")]
    for file, first, last, *columns in entry["pieces"]:
        left, right = columns or (0, width)
        row_shape = (right - left + encoding.extra_columns,) if len(shape) == 2 else shape[1:]
        pieces.append(
            SavedPiece(
                file=file,
                first_row=first,
                last_row=last,
                first_column=left,
                last_column=right,
                stored_shape=(last - first, *row_shape) if shape else (),
                stored_dtype=encoding.dtype or DTYPES[entry["dtype"]],
            )
        )
    return pieces


def _require(condition: bool, field: str, problem: str, found: object) -> None:
    if not condition:
        raise ValueError(f"`{field}` {problem}, and is {shown(found)}")


def _check_file(name: str, entry: Any) -> None:
    field = f"files.{name}"
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"`files` names {shown(name)}, which is not the plain name of a shard in this folder")
    _require(isinstance(entry, dict), field, "must be a mapping", entry)
    _require(is_count(entry.get("bytes")), f"{field}.bytes", "must be a size in bytes", entry.get("bytes"))
    sha256 = entry.get("sha256")
    _require(isinstance(sha256, str) and bool(_SHA256.fullmatch(sha256)), f"{field}.sha256", "must be 64 hex digits", sha256)


def _check_base(folder: Path, base: Any) -> None:
    if base is None:
        return
    _require(isinstance(base, dict), "base", "must be a mapping", base)
    name, sha256 = base.get("name"), base.get("sha256")
    is_name = isinstance(name, str) and bool(CHECKPOINT_NAME.fullmatch(name))
    _require(is_name, "base.name", "must be the name of a checkpoint in the same folder", name)
    _require(name != folder.name, "base.name", "must be another checkpoint", name)
    _require(isinstance(sha256, str) and bool(_SHA256.fullmatch(sha256)), "base.sha256", "must be 64 hex digits", sha256)
    number = base.get("number")
    _require(is_count(number, at_least=1), "base.number", "must be a whole number, at least 1", number)


def _field(name: str) -> str:
    return f"tensors.{shown(name)[1:-1]}"


def _check_tensor(field: str, entry: Any, known_files: dict[str, Any]) -> None:
    _require(isinstance(entry, dict), field, "must be a mapping", entry)
    dtype, shape, pieces = entry.get("dtype"), entry.get("shape"), entry.get("pieces")
    _require(isinstance(dtype, str) and dtype in DTYPES, f"{field}.dtype", f"must be one of {', '.join(DTYPES)}", dtype)
    is_shape = isinstance(shape, list) and len(shape) <= 8 and all(map(is_count, shape))
    _require(is_shape, f"{field}.shape", "must be at most 8 whole numbers", shape)
    num_bytes = DTYPES[dtype].itemsize * math.prod(max(1, size) for size in shape)
    _require(num_bytes <= MAX_BYTES, f"{field}.shape", f"is of more than {MAX_BYTES} bytes", shape)
    is_list = isinstance(pieces, list) and len(pieces) <= MAX_PIECES
    _require(is_list, f"{field}.pieces", f"must be a list of at most {MAX_PIECES}", type(pieces).__name__)
    rectangles, files = [], set[str]()
    for index, piece in enumerate(pieces):
        rectangles.append(_check_piece(f"{field}.pieces[{index}]", piece, shape, known_files))
        _require(piece[0] not in files, f"{field}.pieces[{index}]", "names a file that has another piece of it", piece[0])
        files.add(piece[0])
    if problem := _cover_problem(rectangles, shape):
        raise ValueError(f"the pieces of `{field}` {problem}")


def _check_piece(field: str, piece: Any, shape: Sequence[int], files: dict[str, Any]) -> Rectangle:
    """A piece's rows and columns, which are within the shape."""
    is_list = isinstance(piece, list) and len(piece) in (3, 5) and all(map(is_count, piece[1:]))
    _require(is_list, field, "must be [file, first row, last row], or these and [first column, last column]", piece)
    file, first, last, *columns = piece
    _require(isinstance(file, str) and file in files, field, "must name one of `files`", file)
    _require(not columns or len(shape) == 2, field, f"has columns of a tensor with {len(shape)} dimensions", piece)
    num_rows, width = shape[0] if shape else 1, shape[1] if len(shape) > 1 else 1
    left, right = columns or (0, width)
    _require(first <= last <= num_rows and left <= right <= width, field, f"must lie within the shape {list(shape)}", piece)
    return first, last, left, right


def _cover_problem(rectangles: Sequence[Rectangle], shape: Sequence[int]) -> str | None:
    """What is wrong with pieces that do not cover a tensor exactly once; None if they do."""
    num_rows, width = shape[0] if shape else 1, shape[1] if len(shape) > 1 else 1
    found = [one for one in rectangles if one[0] < one[1] and one[2] < one[3]]
    area = sum((last - first) * (right - left) for first, last, left, right in found)
    if area != num_rows * width:
        return f"have {area} of its {num_rows * width} elements"
    # Go down the rows: of the pieces that cross a row, none may reach into the next. With the area right, there are no gaps then.
    events = [(first, 1, left, right) for first, _, left, right in found]
    events += [(last, 0, left, right) for _, last, left, right in found]
    crossing: list[tuple[int, int]] = []
    for row, is_first, left, right in sorted(events):
        index = bisect.bisect_left(crossing, (left, right))
        if not is_first:
            del crossing[index]
            continue
        if (index > 0 and crossing[index - 1][1] > left) or (index < len(crossing) and crossing[index][0] < right):
            return f"overlap at row {row}"
        crossing.insert(index, (left, right))
    return None


def _check_notes(name: str, entry: dict[str, Any], manifest: dict[str, Any]) -> None:
    """Check what only the tensors of incremental checkpoints have: which rows they are of, and how these are encoded."""
    field = _field(name)
    touched, encoding = entry.get("touched"), entry.get("encoding", "exact")
    _require(isinstance(encoding, str) and encoding in ENCODINGS, f"{field}.encoding", "is unknown", encoding)
    if manifest.get("base") is None or not name.startswith(STORE):
        _require(touched is None and encoding == "exact", field, "must be whole and exact", [touched, encoding])
        return
    wanted = f"{TOUCHED}{name.removeprefix(STORE).rpartition('.')[0]}"
    _require(touched == wanted, f"{field}.touched", f"must be {shown(wanted)}", touched)
    bitmap = manifest["tensors"].get(wanted)
    is_bitmap = bitmap is not None and bitmap["dtype"] == "U8" and len(bitmap["shape"]) == 1
    _require(is_bitmap, f"tensors.{wanted}", "must be a bitmap, one row of bytes", bitmap)
    is_matrix = len(entry["shape"]) == 2 and DTYPES[entry["dtype"]].is_floating_point
    _require(is_matrix, f"{field}.shape", "must be rows and columns of floating-point numbers", entry["shape"])
