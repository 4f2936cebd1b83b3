"""The files of a checkpoint: safetensors shards, written and read some rows at a time.

A shard is a length, a JSON header and raw bytes. We write it ourselves, so that rows go from the tables to the file a few
megabytes at a time, the digest is taken on the way, and a full disk is an `OSError`. We read it ourselves, so that of a table
no more is in memory than the rows that were asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowstead.spec.errors import CheckpointError
from rowstead.stores.state import PIECE_BYTES, StatePart

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


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A tensor on its way into a checkpoint, or the rows and columns of it that this process has."""

    name: str
    dtype: torch.dtype
    """Of the tensor; what is stored may have another, if `stored_dtype` says so."""
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
    """First and last column of this piece; none if it has all."""
    stored_dtype: torch.dtype | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """What the manifest says of the tensor besides."""
    most_rows: int | None = None
    """That may be read at once; none if its own bytes are all that counts."""

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
        """What the manifest says of the tensor before it has pieces."""
        return {"dtype": CODES[self.dtype], "shape": list(self.shape), **self.notes, "pieces": []}

    def place(self, file: str, start: int, stop: int) -> list[Any]:
        """Where the manifest says that rows `start` to `stop` of this piece are."""
        rows = [file, self.first_row + start, self.first_row + stop]
        return rows if self.columns is None else [*rows, *self.columns]


def of_tensor(name: str, tensor: Tensor) -> Outgoing:
    """A whole tensor, of any shape."""
    if tensor.dtype not in CODES or name == "__metadata__":
        raise ValueError(f"cannot save `{name}` of {tensor.dtype}: known types are {', '.join(map(str, CODES))}")
    rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
    return Outgoing(
        name=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        num_rows=rows.shape[0],
        row_shape=tuple(rows.shape[1:]),
        read=lambda start, stop: rows[start:stop],
    )


def of_part(name: str, part: StatePart, most_rows: int) -> Outgoing:
    """What a store keeps of one of its tensors, under another name; so many rows are read at once."""
    columns = part.first_column, part.first_column + part.num_columns
    return Outgoing(
        name=name,
        dtype=part.dtype,
        shape=part.shape,
        num_rows=part.num_rows,
        row_shape=(part.num_columns,),
        read=part.read,
        first_row=part.first_row,
        columns=None if columns == (0, part.shape[1]) else columns,
        most_rows=most_rows,
    )


@dataclass(frozen=True)
class ShardSlice:
    """Rows `start` to `stop` of what goes out, as they go into one shard."""

    outgoing: Outgoing
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.outgoing.row_bytes


def shards(outgoing: Iterable[Outgoing], shard_bytes: int) -> Iterator[list[ShardSlice]]:
    """Pieces file by file, in the order given; a file holds at most one piece of a tensor, under its name."""
    shard: list[ShardSlice] = []
    names: set[str] = set()
    used = 0
    for one in outgoing:
        rows_each = max(1, shard_bytes // max(1, one.row_bytes))
        for start in range(0, max(1, one.num_rows), rows_each):
            piece = ShardSlice(one, start, min(start + rows_each, one.num_rows))
            if shard and (used + piece.num_bytes > shard_bytes or one.name in names):
                yield shard
                shard, names, used = [], set(), 0
            shard.append(piece)
            names.add(one.name)
            used += piece.num_bytes
    if shard:
        yield shard


def write_shard(path: Path, pieces: list[ShardSlice]) -> dict[str, Any]:
    """One safetensors file; returns its size and digest."""
    pieces = sorted(pieces, key=lambda piece: -piece.outgoing.kept_dtype.itemsize)  # so that every element is aligned
    header: dict[str, Any] = {}
    place = 0
    for piece in pieces:
        one = piece.outgoing
        shape = [piece.stop - piece.start, *one.row_shape] if one.shape else []
        offsets = [place, place + piece.num_bytes]
        header[one.name] = {"dtype": CODES[one.kept_dtype], "shape": shape, "data_offsets": offsets}
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


def _chunks(piece: ShardSlice) -> Iterator[memoryview]:
    """The bytes of a piece, a few megabytes at a time; nothing is copied that is contiguous and on the CPU."""
    one = piece.outgoing
    rows_each = one.most_rows or max(1, PIECE_BYTES // max(1, one.row_bytes))
    for start in range(piece.start, piece.stop, rows_each):
        stop = min(start + rows_each, piece.stop)
        part = one.read(start, stop).detach().cpu().contiguous()
        given, wanted = (tuple(part.shape), part.dtype), ((stop - start, *one.row_shape), one.kept_dtype)
        assert given == wanted, f"`{one.name}` gave {given} for {wanted}"
        if part.numel():
            # One element is contiguous whatever its stride, and torch does not view it as bytes then.
            yield part.as_strided((part.numel(),), (1,)).view(torch.uint8).numpy().data


def check_shard(path: Path, num_bytes: int, sha256: str) -> None:
    """Refuse a file that is not the one whose size and digest these are."""
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


class ShardFile:
    """A shard that is open for reading, until nobody holds it any longer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._file)
        length = int.from_bytes(self._bytes(0, 8), "little")
        self._header: dict[str, Any] = json.loads(self._bytes(8, length))
        self._data = 8 + length

    def row_bytes(self, name: str) -> int:
        """Bytes of one row of a tensor in this file."""
        entry = self._header[name]
        return DTYPES[entry["dtype"]].itemsize * math.prod(entry["shape"][1:])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a tensor as they are in this file, in memory of their own."""
        entry = self._header[name]
        rows = torch.empty(stop - start, *entry["shape"][1:], dtype=DTYPES[entry["dtype"]])
        self.fill(rows, name, start)
        return rows

    def fill(self, rows: Tensor, name: str, start: int) -> None:
        """Read the rows of a tensor from `start` on into `rows`, which is contiguous and of the type in this file."""
        if rows.numel():
            place = self._data + self._header[name]["data_offsets"][0] + start * self.row_bytes(name)
            self._read(place, rows.as_strided((rows.numel(),), (1,)).view(torch.uint8).numpy().data)

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
