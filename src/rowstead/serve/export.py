"""Export a trained model as a folder: a torch.export program over raw features, and a description of its inputs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rowstead.kernels.layout import layout_of
from rowstead.records.run_folder import DEFAULT_ROOT
from rowstead.records.usage import versions
from rowstead.serve.exported import FORMAT, FORMAT_WITH_TASKS, INPUTS, PROGRAM, sha256_of
from rowstead.serve.program import ServingProgram, trace_program
from rowstead.spec.errors import RowsteadError
from rowstead.spec.heads import TaskSpec
from rowstead.spec.networks import NETWORKS
from rowstead.spec.parse import to_plain
from rowstead.spec.sizes import format_bytes
from rowstead.training.progress import Callback
from rowstead.training.trained import open_run

ARGUMENTS = {
    "dense": "float32 [B, dense features], raw values, NaN where missing",
    "ids": "int64 [nnz], raw ids feature by feature: integers as they are, text as XXH64 (seed 0) of its UTF-8",
    "offsets": "int64 [sparse features * B + 1]: feature f of example b owns ids[offsets[f*B+b]:offsets[f*B+b+1]]",
}


@dataclass(frozen=True, kw_only=True)
class ExportSummary:
    """What `export` wrote."""

    folder: Path
    num_bytes: int
    int8: bool

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for a table."""
        return [
            ("folder", str(self.folder)),
            ("size", f"{format_bytes(self.num_bytes)}, rows {'as int8' if self.int8 else 'in FP32'}"),
            ("serve it", f'rowstead.load_exported("{self.folder}").predict({{"column": [values], …}})'),
        ]


def _describe_result(tasks: Sequence[TaskSpec]) -> str:
    names = ", ".join(task.name for task in tasks)
    return f"float32 [B, {len(tasks)}], predictions of {names}" if tasks else "float32 [B], click probabilities"


def export(
    run: Path | str, to: Path | str, *, int8: bool = False, root: Path | str = DEFAULT_ROOT, callback: Callback | None = None
) -> ExportSummary:
    """Write a run's model into the new folder `to`: `program.pt2` and `inputs.json`, both or nothing."""
    to = Path(to)
    if os.path.lexists(to):
        raise RowsteadError(f"{to} exists: choose another folder with --to")
    trained = open_run(run, root=root, callback=callback, in_memory=True)
    spec, model, transforms = trained.spec, trained.model, trained.transforms
    tables = model.store.state()
    program = ServingProgram(
        model.net,
        [tables[f"{table.name}.rows"] for table in model.store.tables],
        layout_of(spec.features, spec.tables),
        spec.features.expanded_sparse(),
        transforms,
        head=model.head,
        log_keep_rate=model.log_keep_rate,
        int8=int8,
    )
    inputs = {
        "format": FORMAT_WITH_TASKS if model.tasks else FORMAT,
        "arguments": ARGUMENTS,
        "result": _describe_result(model.tasks),
        "features": to_plain(spec.features),
        "num_rows": {table.name: table.num_rows for table in spec.tables},
        "transforms": transforms.to_plain(),
        "id_kinds": dict(trained.id_kinds),
        "label": spec.data.log.label,
        "int8": int8,
        "versions": versions(),
    }
    if model.tasks:
        inputs["tasks"] = [[task.name, str(task.label)] for task in model.tasks]
    try:
        traced = trace_program(program)
    except Exception as error:
        if spec.model.network in NETWORKS:
            raise
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RowsteadError(
            f"torch.export cannot trace `{spec.model.network}`: {why}. Avoid branches on the values of tensors, and sizes that "
            "fix the number of examples, in `forward`"
        ) from error
    unfinished = to.with_name(f".{to.name}.tmp-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        torch.export.save(traced, unfinished / PROGRAM)
        with open(unfinished / PROGRAM, "rb") as file:
            inputs["sha256"] = {PROGRAM: sha256_of(file)}
        (unfinished / INPUTS).write_text(json.dumps(inputs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.rename(unfinished, to)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return ExportSummary(folder=to, num_bytes=sum(file.stat().st_size for file in to.iterdir()), int8=int8)
