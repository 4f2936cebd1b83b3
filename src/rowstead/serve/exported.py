"""Load an exported model: raw columns in, click probabilities out, with the checks of training."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead.data.block import RawBlock
from rowstead.data.columns import ColumnReader
from rowstead.data.hashing import id_outside_table
from rowstead.data.transforms import RowRule
from rowstead.records.plain_files import is_count, open_plain, parse_json, read_plain, shown
from rowstead.spec.errors import RowsteadError, SpecError
from rowstead.spec.features import FeaturesSpec
from rowstead.spec.parse import parse

PROGRAM = "program.pt2"
INPUTS = "inputs.json"
FORMAT = 1
FORMAT_WITH_TASKS = 2
"""Of a model with several labels, whose program has a column of predictions for each."""
MAX_PADDED_IDS = 1 << 20
"""Ids of histories that the program takes at once: it pads each history to `max_ids`."""


class Exported:
    """A model from a folder that `export` wrote; independent of the training run, and safe to share between threads."""

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        plain = _read_inputs(folder)
        try:
            self.features = parse(FeaturesSpec, plain["features"])
        except SpecError as error:
            raise SpecError("", f"{folder / INPUTS}: features: {error}. Export the model again") from None
        _check_inputs(folder / INPUTS, plain, self.features)
        self.label: str = plain["label"]
        """Name of the label column in the training log."""
        self.tasks: dict[str, str] = dict(plain.get("tasks", []))
        """Of a model with several labels: the names of the tasks, in the order of the predictions, and their label columns."""
        sparse = self.features.expanded_sparse()
        self._direct = [
            (index, feature, plain["num_rows"][feature.table_name])
            for index, feature in enumerate(sparse)
            if feature.hash == "none"
        ]
        self.id_kinds: dict[str, str] = plain["id_kinds"]
        padded = sum(feature.max_ids or 0 for feature in sparse if feature.is_history)
        self.rows_at_once = max(1, MAX_PADDED_IDS // padded) if padded else None
        """Most rows that the program takes at once, so that padded histories stay small; None without histories."""
        self._columns = ColumnReader(self.features, id_kinds=self.id_kinds)
        self._rule = RowRule(self.features)
        self.program = _load_program(folder / PROGRAM, plain["sha256"][PROGRAM])
        """The torch.export program itself: dense [B, Fd], ids [nnz] and offsets [F*B + 1] to predictions [B] or [B, T]."""
        self._module = self.program.module()

    def predict(self, rows: Mapping[str, Any] | pa.Table | pa.RecordBatch) -> NDArray[np.float32]:
        """Click probabilities [B] of raw rows, or a prediction for each task [B, T]: column names to lists or arrays, or an Arrow table.

        Other columns are ignored.
        """
        block = self._columns.block(rows)
        self._rule.refuse(block)
        self.check_ids(block)
        return self.predict_block(block, 0, block.num_rows)

    def predict_block(self, block: RawBlock, start: int, stop: int) -> NDArray[np.float32]:
        """Predictions [B] or [B, T] of the rows from `start` to `stop` of a block that has passed the row rule and `check_ids`."""
        if start == stop:
            return np.empty((0, len(self.tasks)) if self.tasks else 0, np.float32)
        step = self.rows_at_once or stop - start
        with torch.no_grad():
            parts: list[Tensor] = [
                self._module(*arguments_of(block, first, min(first + step, stop))) for first in range(start, stop, step)
            ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).numpy()

    def check_ids(self, block: RawBlock) -> None:
        """Refuse ids as training would: under `hash: none` an id must be a row, unless truncation drops it."""
        for index, feature, num_rows in self._direct:
            ids, offsets = block.ids[index], block.offsets[index]
            outside = np.flatnonzero((ids < 0) | (ids >= num_rows))
            if feature.max_ids is not None and len(outside):
                bag = np.searchsorted(offsets, outside, side="right") - 1
                cut = offsets[bag + 1] - 1 - outside if feature.is_history else outside - offsets[bag]
                outside = outside[cut < feature.max_ids]
            if len(outside):
                raise id_outside_table(feature.name, int(ids[outside[0]]), num_rows)


def load_exported(folder: Path | str) -> Exported:
    """Load the exported model in a folder that `export` wrote. Load only what you trust: torch may unpickle parts of a program."""
    return Exported(folder)


def is_exported(name: Path | str, root: Path | str) -> bool:
    """Whether `name` is the folder of an exported model rather than a run, or a run's name under `root`."""
    return (Path(name) / INPUTS).is_file() and not (Path(root) / name / "spec.yaml").is_file()


def arguments_of(block: RawBlock, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The program's arguments for the rows from `start` to `stop`: dense [B, Fd], ids [nnz], offsets [F*B + 1]."""
    stop = block.num_rows if stop is None else stop
    ids, offsets, total = [np.empty(0, np.int64)], [], 0
    for own_ids, bounds in zip(block.ids, block.offsets, strict=True):
        first, last = int(bounds[start]), int(bounds[stop])
        ids.append(own_ids[first:last])
        offsets.append(bounds[start:stop] + (total - first))
        total += last - first
    whole = np.concatenate([*offsets, np.array([total])]).astype(np.int64, copy=False)
    dense = np.ascontiguousarray(block.dense[start:stop])
    return torch.from_numpy(dense), torch.from_numpy(np.concatenate(ids)), torch.from_numpy(whole)


def sha256_of(file: BinaryIO) -> str:
    """The SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _read_inputs(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise RowsteadError(f"there is no folder {folder}: `rowstead export RUN --to {folder}` makes one")
    for name in (INPUTS, PROGRAM):
        if not (folder / name).is_file():
            raise RowsteadError(f"{folder} is not an exported model: it has no {name}")
    file = folder / INPUTS
    try:
        plain = parse_json(read_plain(file))
    except (ValueError, OSError) as error:
        raise RowsteadError(f"{file} cannot be read: {error}. Export the model again") from None
    found = plain.get("format") if isinstance(plain, dict) else None
    if found not in (FORMAT, FORMAT_WITH_TASKS):
        raise RowsteadError(f"{file} has format {found}, this version of rowstead reads {FORMAT}: export the model again")
    needed = {"features", "num_rows", "label", "id_kinds", "sha256"}
    if needed - set(plain):
        raise RowsteadError(f"{file} is damaged: it has no `{min(needed - set(plain))}`. Export the model again")
    return dict(plain)


def _check_inputs(file: Path, plain: dict[str, Any], features: FeaturesSpec) -> None:
    """Refuse a description whose fields are not what `export` writes."""
    sparse = features.expanded_sparse()
    num_rows, kinds, digests = plain["num_rows"], plain["id_kinds"], plain["sha256"]
    names = {feature.table or feature.name for feature in sparse}
    tasks = plain.get("tasks", [])
    is_valid = {
        "tasks": isinstance(tasks, list)
        and bool(tasks) == (plain["format"] == FORMAT_WITH_TASKS)
        and all(isinstance(task, list) and len(task) == 2 and all(isinstance(text, str) for text in task) for task in tasks)
        and len({task[0] for task in tasks}) == len(tasks),
        "num_rows": isinstance(num_rows, dict) and all(is_count(num_rows.get(name), at_least=1) for name in names),
        "label": isinstance(plain["label"], str),
        "id_kinds": isinstance(kinds, dict) and all(kind in ("text", "integers") for kind in kinds.values()),
        "sha256": isinstance(digests, dict) and isinstance(digests.get(PROGRAM), str),
    }
    for key, holds in is_valid.items():
        if not holds:
            raise RowsteadError(f"{file} is damaged: `{key}` is {shown(plain.get(key))}. Export the model again")


def _load_program(file: Path, sha256: str) -> torch.export.ExportedProgram:
    try:
        opened = open(open_plain(file), "rb")  # noqa: SIM115 - closed by the `with` below
    except OSError as error:
        raise RowsteadError(f"{file} cannot be read: {error.strerror or error}") from None
    with opened:
        return _load_opened(file, opened, sha256)


def _load_opened(file: Path, opened: BinaryIO, sha256: str) -> torch.export.ExportedProgram:
    if sha256_of(opened) != sha256:
        raise RowsteadError(f"{file} is damaged: its checksum is not the one in {INPUTS}. Copy it again, or export again")
    opened.seek(0)
    try:
        return torch.export.load(opened)
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise RowsteadError(f"{file} cannot be loaded by torch {torch.__version__}: {why}") from error
