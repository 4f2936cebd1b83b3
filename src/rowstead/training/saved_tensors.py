"""Read the tensors of a checkpoint: any rows and columns, however they were split when they were saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowstead.spec.errors import CheckpointError
from rowstead.spec.train import CheckpointFormat
from rowstead.stores.state import PIECE_BYTES, SavedState
from rowstead.training.checkpoint_files import DTYPES, ENCODINGS, ShardFile
from rowstead.training.touched import RowBitmap

STORE = "store."
"""Prefix of the names of a store's tensors."""
TOUCHED = "touched."
"""Prefix of the names of an incremental checkpoint's bitmaps."""


class SavedTensors(Mapping[str, Tensor]):
    """Tensors by name, read from disk on each access; also a `SavedState`.

    The files stay open, so that reading still works after the run that wrote them has deleted the checkpoint.
    """

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    @abstractmethod
    def rows(self, name: str, start: int, stop: int, first_column: int = 0, last_column: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor, [stop - start, …], and of a table only some columns; reads only those rows."""

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.rows(name, 0, shape[0] if shape else 1).reshape(shape)


class FolderTensors(SavedTensors):
    """The tensors in one checkpoint's own files."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self._folder = folder
        self._index: dict[str, dict[str, Any]] = manifest["tensors"]
        self._files = {name: ShardFile(folder / name) for name in manifest["files"]}

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

    def rows(self, name: str, start: int, stop: int, first_column: int = 0, last_column: int | None = None) -> Tensor:
        shape = self.shape(name) or (1,)
        width = shape[1] if len(shape) > 1 else 1
        last_column = width if last_column is None else last_column
        if not 0 <= start <= stop <= shape[0] or not 0 <= first_column <= last_column <= width:
            requested = f"rows {start} to {stop}, columns {first_column} to {last_column}"
            raise IndexError(f"{requested} of `{name}`, which has shape {list(shape)}")
        row_shape = shape[1:] if (first_column, last_column) == (0, width) else (last_column - first_column,)
        result = torch.empty((stop - start, *row_shape), dtype=DTYPES[self._index[name]["dtype"]])
        missing = (stop - start) * (last_column - first_column)
        for file, first, last, *columns in self._index[name]["pieces"]:
            left, right = columns or (0, width)
            low, high = max(first, start), min(last, stop)
            west, east = max(left, first_column), min(right, last_column)
            if low >= high or west >= east:
                continue
            missing -= (high - low) * (east - west)
            into = result[low - start : high - start]
            into = into if (west, east) == (first_column, last_column) else into[:, west - first_column : east - first_column]
            chosen = None if (west, east) == (left, right) else slice(west - left, east - left)
            self._fill(into, name, file, low - first, chosen)
        if missing:
            raise CheckpointError(
                f"checkpoint {self._folder} is damaged: {missing} elements are missing in rows {start} to {stop} of `{name}`"
            )
        return result

    def _fill(self, into: Tensor, name: str, file: str, start: int, columns: slice | None) -> None:
        """Read the rows of a piece from `start` on into `into`, a few megabytes at a time."""
        shard = self._files[file]
        encoding: CheckpointFormat = self.note(name, "encoding") or "exact"
        if encoding == "exact" and columns is None and into.is_contiguous():
            shard.fill(into, name, start)
            return
        rows_each = max(1, PIECE_BYTES // max(1, shard.row_bytes(name)))
        for done in range(0, len(into), rows_each):
            some = into[done : done + rows_each]
            found = ENCODINGS[encoding].decode(shard.rows(name, start + done, start + done + len(some)))
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
            if name not in base or base.shape(name)[1:] != increment.shape(name)[1:]:
                raise CheckpointError(f"checkpoint {folder} is damaged: its full checkpoint has no matching `{name}`")
            self._bits[name] = RowBitmap(base.shape(name)[0], increment[key].numpy())
            if self._bits[name].count != increment.shape(name)[0]:
                raise CheckpointError(f"checkpoint {folder} is damaged: `{key}` does not match the rows of `{name}`")

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._increment if not name.startswith(TOUCHED))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._increment and not str(name).startswith(TOUCHED)

    def shape(self, name: str) -> tuple[int, ...]:
        return (self._base if name in self._bits else self._increment).shape(name)

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
