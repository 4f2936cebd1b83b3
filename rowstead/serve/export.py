"""A trained model as a folder that serves raw fields: a torch.export program, and what its inputs mean."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowstead import run as runs
from rowstead.data.block import RawBlock
from rowstead.data.columns import Columns
from rowstead.data.hashing import id_outside_table
from rowstead.data.transforms import DenseTransforms
from rowstead.kernels.layout import layout_of
from rowstead.records.run_folder import RunFolder
from rowstead.serve.program import DenseProgram, ServingProgram
from rowstead.spec.errors import RowsteadError
from rowstead.spec.features import FeaturesSpec
from rowstead.spec.parse import parse, to_plain
from rowstead.stores.device import DeviceStore

PROGRAM = "program.pt2"
INPUTS = "inputs.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ExportSummary:
    """What `export` wrote."""

    folder: Path
    num_bytes: int
    int8: bool

    def rows(self) -> list[tuple[str, str]]:
        """As names and values."""
        return [
            ("folder", str(self.folder)),
            ("size", f"{self.num_bytes:,} bytes{', rows as int8' if self.int8 else ''}"),
            ("serve it", f'rowstead.load_exported("{self.folder}").predict({{"column": [values], …}})'),
        ]


def export(run: str, to: Path | str, *, int8: bool = False, root: Path | str = runs.DEFAULT_ROOT) -> ExportSummary:
    """Write a run's model into the new folder `to`: `program.pt2` and `inputs.json`."""
    to = Path(to)
    if to.exists():
        raise RowsteadError(f"{to} exists: choose another folder with --to")
    spec = RunFolder.open(run, root).read_spec()
    model = runs.load(run, root=root)
    transforms = runs.transforms_of(run, root=root)
    assert isinstance(model.store, DeviceStore)
    program = ServingProgram(
        model.net,
        [rows.detach() for rows in model.store.weights],
        layout_of(spec.features, spec.tables),
        spec.features.expanded_sparse(),
        dense_program(transforms),
        log_keep_rate=model.log_keep_rate,
        int8=int8,
    ).eval()
    inputs = {
        "format": FORMAT,
        "features": to_plain(spec.features),
        "num_rows": {table.name: table.num_rows for table in spec.tables},
        "transforms": transforms.to_plain(),
        "arguments": {
            "dense": "float32 [B, dense features], raw values, NaN where missing",
            "ids": "int64 [nnz], raw ids feature by feature: integers as they are, text as XXH64 (seed 0) of its UTF-8",
            "offsets": "int64 [sparse features * B + 1]: feature f of example b owns ids[offsets[f*B+b]:offsets[f*B+b+1]]",
        },
        "result": "float32 [B], click probabilities",
    }
    unfinished = to.with_name(f".{to.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        torch.export.save(exported_program(program), unfinished / PROGRAM)
        (unfinished / INPUTS).write_text(json.dumps(inputs, indent=1) + "\n")
        os.rename(unfinished, to)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return ExportSummary(folder=to, num_bytes=sum(file.stat().st_size for file in to.iterdir()), int8=int8)


def dense_program(transforms: DenseTransforms) -> DenseProgram:
    """The transforms as a module that can be exported."""
    vector = torch.from_numpy
    return DenseProgram(
        low=vector(transforms.low),
        high=vector(transforms.high),
        log=vector(transforms.log),
        fill=vector(transforms.fill),
        mean=vector(transforms.shift),
        scale=vector(transforms.scale),
    )


def exported_program(program: ServingProgram) -> torch.export.ExportedProgram:
    """`program` traced for any number of examples and of ids."""
    features, num_dense = program.num_features, program.dense_transforms.get_buffer("low").numel()
    samples, ids = 3, 4 * features
    offsets = torch.linspace(0, ids, features * samples + 1).long()
    arguments = (torch.zeros(samples, num_dense), torch.zeros(ids, dtype=torch.int64), offsets)
    batch, nnz = torch.export.Dim("batch"), torch.export.Dim("nnz")
    shapes = ({0: batch}, {0: nnz} if features else None, {0: features * batch + 1} if features else None)
    return torch.export.export(program, arguments, dynamic_shapes=shapes)


class Exported:
    """An exported model: raw columns in, click probabilities out. Needs none of the training run."""

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        for name in (PROGRAM, INPUTS):
            if not (folder / name).is_file():
                raise RowsteadError(f"{folder} is no exported model: it has no {name}")
        plain = json.loads((folder / INPUTS).read_text())
        if plain.get("format") != FORMAT:
            raise RowsteadError(f"{folder / INPUTS} has format {plain.get('format')}, this version reads {FORMAT}")
        self.features = parse(FeaturesSpec, plain["features"])
        self._num_rows: dict[str, int] = plain["num_rows"]
        self._columns = Columns(self.features)
        self.program = torch.export.load(folder / PROGRAM)
        self._module = self.program.module()

    def predict(self, raw: Mapping[str, Any]) -> NDArray[np.float32]:
        """Click probabilities [B] of raw columns: names to lists or arrays, or an Arrow table."""
        block = self._columns.block(raw)
        self._check(block)
        with torch.no_grad():
            result: Tensor = self._module(*raw_arguments(block))
        return result.numpy()

    def _check(self, block: RawBlock) -> None:
        for feature, ids in zip(self.features.expanded_sparse(), block.ids, strict=True):
            num_rows = self._num_rows[feature.table or feature.name]
            if feature.hash == "none" and len(ids) and (ids.min() < 0 or ids.max() >= num_rows):
                outside = ids[(ids < 0) | (ids >= num_rows)][0]
                raise id_outside_table(feature.name, int(outside), num_rows)


def load_exported(folder: Path | str) -> Exported:
    """The exported model in a folder that `export` wrote."""
    return Exported(folder)


def raw_arguments(block: RawBlock) -> tuple[Tensor, Tensor, Tensor]:
    """The program's arguments: dense [B, Fd], ids [nnz], offsets [F*B + 1]."""
    starts = np.cumsum([0, *(len(ids) for ids in block.ids)])
    offsets = [own[:-1] + start for own, start in zip(block.offsets, starts, strict=False)]
    ids = np.concatenate([np.empty(0, np.int64), *block.ids])
    whole = np.concatenate([*offsets, starts[-1:]]).astype(np.int64)
    return torch.from_numpy(block.dense), torch.from_numpy(ids), torch.from_numpy(whole)
