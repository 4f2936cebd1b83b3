"""Read the tensors of a checkpoint: any rows and columns, however they were split when they were saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowstead.spec.train import CheckpointFormat
from rowstead.stores.state import PIECE_BYTES, SavedState
from rowstead.training.checkpoint_files import DTYPES, ENCODINGS, SavedPiece, ShardFile, invalid
from rowstead.training.checkpoint_manifest import MANIFEST, STORE, TOUCHED, saved_pieces
from rowstead.training.touched import RowBitmap, num_bytes


class SavedTensors(Mapping[str, Tensor]):
    """Tensors by name, read from disk on each access; also a `SavedState`.

    The files stay open, so that reading still works after the run that wrote them has deleted the checkpoint.
    """

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor, without reading it."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int, first_column: int = 0, last_column: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor, [stop - start, …], and of a table only some columns; reads only those rows."""

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.rows(name, 0, shape[0] if shape else 1).reshape(shape)


class FolderTensors(SavedTensors):
    """The tensors in one checkpoint's own files, of a checked manifest.

    Each process of a job calls `check_digests` with its share of the files; once all have, `read_headers` comes before any tensor is read.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self._index: dict[str, dict[str, Any]] = manifest["tensors"]
        self._listed: dict[str, dict[str, Any]] = manifest["files"]
        self._pieces = {name: saved_pieces(entry) for name, entry in self._index.items()}
        self._files = {name: ShardFile(folder / name) for name in self._listed}
        for name, file in self._files.items():
            file.check_size(self._listed[name]["bytes"])

    def check_digests(self, rank: int, world_size: int) -> None:
        """Verify every `world_size`-th file, from number `rank` on."""
        for name in sorted(self._files)[rank::world_size]:
            self._files[name].check_digest(self._listed[name]["sha256"])

    def read_headers(self) -> None:
        """Check that the files hold what the manifest says, and find out where."""
        expected: dict[str, dict[str, SavedPiece]] = {name: {} for name in self._files}
        for name, pieces in self._pieces.items():
            for piece in pieces:
                expected[piece.file][name] = piece
        for file, pieces_in_it in expected.items():
            self._files[file].read_header(pieces_in_it)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def note(self, name: str, key: str) -> Any:
        """A further entry of a tensor in the manifest, or None."""
        return self._index[name].get(key)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._index[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._index[name]["dtype"]]

    def rows(self, name: str, start: int, stop: int, first_column: int = 0, last_column: int | None = None) -> Tensor:
        shape = self.shape(name) or (1,)
        width = shape[1] if len(shape) > 1 else 1
        last_column = width if last_column is None else last_column
        if not 0 <= start <= stop <= shape[0] or not 0 <= first_column <= last_column <= width:
            requested = f"rows {start} to {stop}, columns {first_column} to {last_column}"
            raise IndexError(f"{requested} of `{name}`, which has shape {list(shape)}")
        row_shape = shape[1:] if (first_column, last_column) == (0, width) else (last_column - first_column,)
        result = torch.empty((stop - start, *row_shape), dtype=self.dtype(name))
        for piece in self._pieces[name]:  # they cover every element once
            low, high = max(piece.first_row, start), min(piece.last_row, stop)
            west, east = max(piece.first_column, first_column), min(piece.last_column, last_column)
            if low >= high or west >= east:
                continue
            into = result[low - start : high - start]
            into = into if (west, east) == (first_column, last_column) else into[:, west - first_column : east - first_column]
            is_whole = (west, east) == (piece.first_column, piece.last_column)
            chosen = None if is_whole else slice(west - piece.first_column, east - piece.first_column)
            self._fill(into, name, piece, low - piece.first_row, chosen)
        return result

    def _fill(self, into: Tensor, name: str, piece: SavedPiece, start: int, columns: slice | None) -> None:
        """Read the rows of a piece from `start` on into `into`, a few megabytes at a time."""
        shard = self._files[piece.file]
        encoding: CheckpointFormat = self.note(name, "encoding") or "exact"
        if encoding == "exact" and columns is None and into.is_contiguous():
            shard.fill(into, name, start)
            return
        rows_each = max(1, PIECE_BYTES // max(1, shard.row_bytes(name)))
        for done in range(0, len(into), rows_each):
            some = into[done : done + rows_each]
            stored = torch.empty(len(some), *piece.stored_shape[1:], dtype=piece.stored_dtype)
            shard.fill(stored, name, start + done)
            found = ENCODINGS[encoding].decode(stored)
            some.copy_((found if columns is None else found[:, columns]).reshape(some.shape))


class IncrementalTensors(SavedTensors):
    """An incremental checkpoint over the full one that it needs: touched rows are its own, all others those of the full one."""

    def __init__(self, folder: Path, base: FolderTensors, increment: FolderTensors) -> None:
        self._base, self._increment = base, increment
        self._bits: dict[str, RowBitmap] = {}
        for name in self:
            key = increment.note(name, "touched")
            if key is None:
                continue
            is_same = name in base and base.dtype(name) == increment.dtype(name) and len(base.shape(name)) == 2
            if not is_same or base.shape(name)[1] != increment.shape(name)[1]:
                raise invalid(folder, MANIFEST, f"the full checkpoint has no `{name}` of this dtype and width")
            num_rows = base.shape(name)[0]
            if increment.shape(key) != (num_bytes(num_rows),):
                raise invalid(folder, MANIFEST, f"`{key}` is not a bitmap of the {num_rows} rows of `{name}`")
            self._bits[name] = RowBitmap(num_rows, increment[key].numpy())
            if self._bits[name].count != increment.shape(name)[0] or self._bits[name].has_rows_beyond:
                raise invalid(folder, MANIFEST, f"`{key}` does not match the rows of `{name}`")

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._increment if not name.startswith(TOUCHED))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._increment and not str(name).startswith(TOUCHED)

    def shape(self, name: str) -> tuple[int, ...]:
        return (self._base if name in self._bits else self._increment).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._increment.dtype(name)

    def rows(self, name: str, start: int, stop: int, first_column: int = 0, last_column: int | None = None) -> Tensor:
        bits = self._bits.get(name)
        if bits is None:
            return self._increment.rows(name, start, stop, first_column, last_column)
        result = self._base.rows(name, start, stop, first_column, last_column)
        first, last = bits.position(start), bits.position(stop)
        if first < last:
            result[bits.between(start, stop) - start] = self._increment.rows(name, first, last, first_column, last_column)
        return result

    def touched(self, table: str) -> Tensor:
        """The bitmap of a table's touched rows, uint8."""
        return self._increment[f"{TOUCHED}{table}"]


class StoreTensors:
    """The store's tensors of a checkpoint, or of a Stepper's state, by the store's own names: a `SavedState`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: object) -> bool:
        return f"{STORE}{name}" in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        tensors, name = self._tensors, f"{STORE}{name}"
        return tensors.shape(name) if isinstance(tensors, SavedState) else tuple(tensors[name].shape)

    def rows(self, name: str, start: int, stop: int, first_column: int = 0, last_column: int | None = None) -> Tensor:
        tensors, name = self._tensors, f"{STORE}{name}"
        if isinstance(tensors, SavedState):
            return tensors.rows(name, start, stop, first_column, last_column)
        return tensors[name][start:stop, first_column:last_column]
