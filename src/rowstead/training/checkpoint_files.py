"""The files of a checkpoint: safetensors shards, written and read a few rows at a time.

A shard is a length, a JSON header and raw bytes. Writing it here keeps memory low (rows go from tables to the file a few
megabytes at a time), computes the digest on the way, and makes a full disk an `OSError`. Reading it here loads no more rows than
were requested.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from rowstead.records.plain_files import MAX_JSON_BYTES, is_count, open_plain, parse_json, shown
from rowstead.spec.errors import CheckpointError
from rowstead.spec.train import CheckpointFormat
from rowstead.stores.state import PIECE_BYTES, StatePart
from rowstead.training.new_file import NewFile

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
SCALE_BYTES = 8
"""FP32 scale and offset, after the bytes of an `int8` row."""


@dataclass(frozen=True, kw_only=True)
class TensorPiece:
    """A tensor to save, or this process's rows and columns of it."""

    name: str
    dtype: torch.dtype
    """The tensor's; the file may hold another, `stored_dtype`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    num_rows: int
    """Of this piece; a scalar has one row."""
    row_shape: tuple[int, ...]
    """Shape of one stored row of this piece."""
    read: Callable[[int, int], Tensor]
    """Stored rows `start` to `stop` of this piece."""
    first_row: int = 0
    columns: tuple[int, int] | None = None
    """First and last column of this piece; None if it has all."""
    stored_dtype: torch.dtype | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """Further entries of the tensor in the manifest."""
    max_rows: int | None = None
    """Rows to read at once; None to choose by their size."""

    @property
    def kept_dtype(self) -> torch.dtype:
        return self.stored_dtype or self.dtype

    @property
    def row_bytes(self) -> int:
        return self.kept_dtype.itemsize * math.prod(self.row_shape)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def entry(self) -> dict[str, Any]:
        """The tensor's entry in the manifest, without pieces."""
        return {"dtype": CODES[self.dtype], "shape": list(self.shape), **self.notes, "pieces": []}

    def location(self, file: str, start: int, stop: int) -> list[Any]:
        """The manifest's entry for rows `start` to `stop` of this piece in a file."""
        rows = [file, self.first_row + start, self.first_row + stop]
        return rows if self.columns is None else [*rows, *self.columns]


def piece_of_tensor(name: str, tensor: Tensor) -> TensorPiece:
    """A whole tensor, of any shape."""
    if tensor.dtype not in CODES or name == "__metadata__":
        raise ValueError(f"cannot save `{name}` of {tensor.dtype}: known types are {', '.join(map(str, CODES))}")
    rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
    return TensorPiece(
        name=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        num_rows=rows.shape[0],
        row_shape=tuple(rows.shape[1:]),
        read=lambda start, stop: rows[start:stop],
    )


def piece_of_part(name: str, part: StatePart, max_rows: int) -> TensorPiece:
    """A part of a store's state under another name; `max_rows` are read at once."""
    return TensorPiece(
        name=name,
        dtype=part.dtype,
        shape=part.shape,
        num_rows=part.num_rows,
        row_shape=(part.num_columns,),
        read=part.read,
        first_row=part.first_row,
        columns=columns_of(part),
        max_rows=max_rows,
    )


def columns_of(part: StatePart) -> tuple[int, int] | None:
    """First and last column of a part; None if it has all."""
    columns = part.first_column, part.first_column + part.num_columns
    return None if columns == (0, part.shape[1]) else columns


@dataclass(frozen=True)
class ShardSlice:
    """Rows `start` to `stop` of a piece, in one shard."""

    piece: TensorPiece
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.piece.row_bytes


def split_into_shards(pieces: Iterable[TensorPiece], shard_bytes: int) -> Iterator[list[ShardSlice]]:
    """Slices for each file, in the order of the pieces; a file holds at most one slice of a tensor, under its name."""
    shard: list[ShardSlice] = []
    names: set[str] = set()
    used = 0
    for piece in pieces:
        rows_each = max(1, shard_bytes // max(1, piece.row_bytes))
        for start in range(0, max(1, piece.num_rows), rows_each):
            one = ShardSlice(piece, start, min(start + rows_each, piece.num_rows))
            if shard and (used + one.num_bytes > shard_bytes or piece.name in names):
                yield shard
                shard, names, used = [], set(), 0
            shard.append(one)
            names.add(piece.name)
            used += one.num_bytes
    if shard:
        yield shard


def write_shard(path: Path, slices: list[ShardSlice]) -> dict[str, Any]:
    """Write one safetensors file; returns its size and digest."""
    slices = sorted(slices, key=lambda one: -one.piece.kept_dtype.itemsize)  # so that every element is aligned
    header: dict[str, Any] = {}
    end = 0
    for one in slices:
        piece = one.piece
        shape = [one.stop - one.start, *piece.row_shape] if piece.shape else []
        offsets = [end, end + one.num_bytes]
        header[piece.name] = {"dtype": CODES[piece.kept_dtype], "shape": shape, "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with NewFile(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for one in slices:
            for view in _chunks(one):
                file.write(view)
    assert file.num_bytes == 8 + len(text) + end
    return {"bytes": file.num_bytes, "sha256": file.sha256}


def _chunks(one: ShardSlice) -> Iterator[memoryview]:
    """The bytes of a slice, a few megabytes at a time; contiguous rows on the CPU are not copied."""
    piece = one.piece
    rows_each = piece.max_rows or max(1, PIECE_BYTES // max(1, piece.row_bytes))
    for start in range(one.start, one.stop, rows_each):
        stop = min(start + rows_each, one.stop)
        part = piece.read(start, stop).detach().cpu().contiguous()
        given, wanted = (tuple(part.shape), part.dtype), ((stop - start, *piece.row_shape), piece.kept_dtype)
        assert given == wanted, f"`{piece.name}` read {given} instead of {wanted}"
        if part.numel():
            # One element is contiguous whatever its stride, and torch does not view it as bytes then.
            yield part.as_strided((part.numel(),), (1,)).view(torch.uint8).numpy().data


def invalid(folder: Path, file: str, problem: str) -> CheckpointError:
    """The error about a file of a checkpoint whose digest is right and whose content is not."""
    return CheckpointError(
        f"checkpoint {folder} is not valid: {file}: {problem}. Get it again from where it was saved, or delete it to use an older one"
    )


@dataclass(frozen=True, kw_only=True)
class SavedPiece:
    """Rows and columns of a tensor in one file of a checkpoint, as its manifest says."""

    file: str
    first_row: int
    last_row: int
    first_column: int
    last_column: int
    stored_shape: tuple[int, ...]
    stored_dtype: torch.dtype


class ShardFile:
    """A shard open for reading; closed when it is garbage collected.

    `check_size`, `check_digest` and `read_header` come before any rows are read, which rely on what these have passed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_plain(path)
        weakref.finalize(self, os.close, self._file)
        self._num_bytes = os.fstat(self._file).st_size
        self._entries: dict[str, tuple[int, int]] = {}
        """Offset in the file and bytes per row of each tensor."""

    def check_size(self, num_bytes: int) -> None:
        """Refuse a file that does not have this size."""
        if self._num_bytes != num_bytes:
            what = "truncated" if self._num_bytes < num_bytes else "too long"
            raise CheckpointError(
                f"checkpoint {self._path.parent} is damaged: {self._path.name} is {what}: expected {num_bytes} bytes, got "
                f"{self._num_bytes}"
            )

    def check_digest(self, sha256: str) -> None:
        """Refuse a file that does not have this digest."""
        digest, chunk, done = hashlib.sha256(), memoryview(bytearray(1 << 20)), 0
        while done < self._num_bytes:
            some = chunk[: self._num_bytes - done]
            self._read(done, some)
            digest.update(some)
            done += len(some)
        if digest.hexdigest() != sha256:
            raise CheckpointError(f"checkpoint {self._path.parent} is damaged: {self._path.name} does not match its digest")

    def read_header(self, expected: Mapping[str, SavedPiece]) -> None:
        """Read which tensors the file holds; refuse it unless they are those expected, one after the other, and nothing else."""
        length = int.from_bytes(self._bytes(0, min(8, self._num_bytes)), "little")
        num_data_bytes = self._num_bytes - 8 - length
        if num_data_bytes < 0 or length > MAX_JSON_BYTES:
            raise invalid(self._path.parent, self._path.name, f"its header would have {length} bytes")
        content = self._bytes(8, length)
        try:
            offsets = check_header(parse_json(content), expected, num_data_bytes)
        except ValueError as error:
            raise invalid(self._path.parent, self._path.name, str(error)) from None
        for name, piece in expected.items():
            row_bytes = piece.stored_dtype.itemsize * math.prod(piece.stored_shape[1:])
            self._entries[name] = 8 + length + offsets[name], row_bytes

    def row_bytes(self, name: str) -> int:
        """Bytes of one row of a tensor in this file."""
        return self._entries[name][1]

    def fill(self, rows: Tensor, name: str, start: int) -> None:
        """Read the rows of a tensor from `start` on into `rows`, which is contiguous and of the type in this file."""
        if rows.numel():
            offset, row_bytes = self._entries[name]
            self._read(offset + start * row_bytes, rows.as_strided((rows.numel(),), (1,)).view(torch.uint8).numpy().data)

    def _bytes(self, start: int, count: int) -> bytes:
        content = bytearray(count)
        self._read(start, memoryview(content))
        return bytes(content)

    def _read(self, start: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            got = os.preadv(self._file, [into[done : done + (1 << 30)]], start + done)
            if got == 0:
                raise CheckpointError(f"checkpoint {self._path.parent} is damaged: {self._path.name} ends too soon")
            done += got


def check_header(header: Any, expected: Mapping[str, SavedPiece], num_bytes: int) -> dict[str, int]:
    """The offset of each tensor in the data of a shard; a ValueError unless its header is what safetensors and the manifest ask for.

    The tensors fill the `num_bytes` of data one after the other. safetensors' own loader refuses the same, but opens files by
    name and tells no offsets.
    """
    if not isinstance(header, dict):
        raise ValueError("its header is not a mapping")
    ends: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        what = f"tensor {shown(name)} in its header"
        if name not in expected:
            raise ValueError(f"{what} is not in the manifest")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{what} must have `dtype`, `shape` and `data_offsets`")
        piece = expected[name]
        dtype, shape, offsets = CODES[piece.stored_dtype], list(piece.stored_shape), entry["data_offsets"]
        if entry["dtype"] != dtype:
            raise ValueError(f"{what} has `dtype` {shown(entry['dtype'])}, expected `{dtype}`")
        if not _are_counts(entry["shape"]) or entry["shape"] != shape:
            raise ValueError(f"{what} has `shape` {shown(entry['shape'])}, expected {shape}")
        if not _are_counts(offsets) or len(offsets) != 2:
            raise ValueError(f"{what} has `data_offsets` {shown(offsets)}")
        if offsets[1] - offsets[0] != piece.stored_dtype.itemsize * math.prod(shape):
            raise ValueError(f"{what} has `data_offsets` {shown(offsets)}, which do not fit its shape {shape} of `{dtype}`")
        ends.append((*offsets, name))
    if missing := set(expected) - set(header):
        raise ValueError(f"its header has no tensor {shown(min(missing))}")
    end = 0
    for first, last, name in sorted(ends):
        if first != end:
            raise ValueError(f"tensor {shown(name)} in its header has `data_offsets` from {first} on, expected {end}")
        end = last
    if end != num_bytes:
        raise ValueError(f"its tensors have {end} bytes, and the file has {num_bytes} for them")
    return {name: first for first, _, name in ends}


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_count, values))


@dataclass(frozen=True)
class Encoding:
    """How rows [n, D] of an incremental checkpoint are stored."""

    encode: Callable[[Tensor], Tensor] = lambda rows: rows
    decode: Callable[[Tensor], Tensor] = lambda stored: stored
    """What was encoded, in any dtype."""
    dtype: torch.dtype | None = None
    """Of stored rows; None for that of the tensor."""
    extra_columns: int = 0
    """Stored after those of a row."""

    def saves_bytes(self, dtype: torch.dtype, num_columns: int) -> bool:
        """Whether it makes rows smaller: `int8` does not for narrow rows, nor `fp16` for 16-bit ones."""
        return (self.dtype or dtype).itemsize * (num_columns + self.extra_columns) < dtype.itemsize * num_columns


def _encode_fp16(rows: Tensor) -> Tensor:
    limit = torch.finfo(torch.float16).max
    return rows.clamp(-limit, limit).to(torch.float16)


def _encode_int8(rows: Tensor) -> Tensor:
    """Bytes, then the FP32 scale and offset of the row."""
    rows = rows.float()
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = (high / 255 - low / 255).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = ((rows - low) / scale).round_().clamp_(0, 255).to(torch.uint8)
    return torch.cat([codes, torch.cat([scale, low], 1).view(torch.uint8)], 1)


def _decode_int8(stored: Tensor) -> Tensor:
    tails = stored[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    scale, low = tails.view(torch.float32).split(1, dim=1)
    return stored[:, :-SCALE_BYTES].float() * scale + low


ENCODINGS: dict[CheckpointFormat, Encoding] = {
    "exact": Encoding(),
    "fp16": Encoding(_encode_fp16, dtype=torch.float16),
    "int8": Encoding(_encode_int8, _decode_int8, torch.uint8, SCALE_BYTES),
}
assert set(ENCODINGS) == set(get_args(CheckpointFormat)), "every format has an encoding"
