"""Trained runs: load their model and transforms, and evaluate them on any log."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rowstead.data.columns import IdKinds
from rowstead.data.encode import Encoder
from rowstead.data.file_log import open_file_log
from rowstead.data.file_source import FileSource
from rowstead.data.open_log import files_like, open_split
from rowstead.data.row_encoder import RowEncoder
from rowstead.data.source import Source
from rowstead.data.tables import as_files
from rowstead.data.transforms import DenseTransforms
from rowstead.nn.dlrm import DLRM
from rowstead.records.run_folder import DEFAULT_ROOT, RunFolder
from rowstead.records.usage import versions
from rowstead.spec.data import SplitName
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import digest
from rowstead.spec.placement import MemorySpec
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.build import build_model
from rowstead.training.checkpoint_fits import architecture, check_fits, id_kinds_in, position_in, transforms_in
from rowstead.training.device import choose_device, set_threads
from rowstead.training.evaluate import evaluate as evaluate_model
from rowstead.training.metrics import Quality
from rowstead.training.progress import Callback
from rowstead.training.step import load_model


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run's newest valid checkpoint, loaded: everything needed to score a log as training would."""

    spec: RunSpec
    model: DLRM
    """On the CPU, in evaluation mode."""
    transforms: DenseTransforms
    id_kinds: IdKinds
    """Whether each sparse column held text or integers in training."""
    train_rate: float | None
    """The mean label of the examples that it was trained on, if it is known."""

    def source(
        self,
        data: str | Sequence[str] | None = None,
        *,
        split: SplitName = "eval",
        needs_label: bool = True,
        group: str | None = None,
        segment: str | None = None,
    ) -> Source:
        """A split of the run's log, or the files of `data` read the same way, in the order of the log.

        `group` and `segment` name other columns than the recipe's.
        """
        encoder = Encoder(self.spec.features, self.spec.tables, self.transforms)
        if group is not None or segment is not None:
            spec = with_group_columns(self.spec, group, segment)
            return dataclasses.replace(self, spec=spec).source(data, split=split, needs_label=needs_label)
        if data is None:
            if split == "test" and not self.spec.data.log.has_test:
                raise RowsteadError("this run's log has no test split: set `test` or `test_fraction` of its log")
            return open_split(self.spec, split, self.id_kinds).source(encoder, seed=self.spec.seed)
        files = files_like(self.spec, data)
        log = open_file_log(
            files,
            self.spec.features,
            split="all",
            with_labels=needs_label,
            id_kinds=self.id_kinds,
            tasks=self.spec.model.tasks,
        )
        return FileSource(log, encoder, shuffle=False)


def open_run(
    run: Path | str, *, root: Path | str = DEFAULT_ROOT, callback: Callback | None = None, in_memory: bool = False
) -> TrainedRun:
    """Open a run by its name under `root`, its folder, or `last`; `callback` gets a message about a damaged checkpoint.

    With `in_memory` all tables are in system memory, whatever the recipe's placement; else some may be on SSD.
    """
    folder = RunFolder.open(run, root)
    spec = folder.read_spec()
    on_message = (callback or Callback()).on_message

    def check(saved: checkpoint.Checkpoint) -> None:
        check_fits(spec, saved, on_message, with_optimizer=False)

    saved = checkpoint.load_latest(folder.checkpoints, on_message, check=check)
    transforms, id_kinds = transforms_in(spec, saved), id_kinds_in(spec, saved)
    placed = dataclasses.replace(spec, placement="auto", memory=MemorySpec()) if in_memory else spec
    model = build_model(
        placed, torch.device("cpu"), trains=False, encoder=RowEncoder(spec.features, spec.tables, transforms, id_kinds)
    )
    load_model(model, saved.tensors, with_optimizer=False)
    rate = position_in(saved).train_rate(spec.data.negative_keep_rate)
    return TrainedRun(spec=spec, model=model.eval(), transforms=transforms, id_kinds=id_kinds, train_rate=rate)


def load(run: Path | str, *, root: Path | str = DEFAULT_ROOT, callback: Callback | None = None) -> DLRM:
    """Load the trained model of a run: its folder, its name under `root`, or `last`. A torch module on the CPU."""
    return open_run(run, root=root, callback=callback).model


def evaluate(
    run: Path | str,
    *,
    data: Any = None,
    split: SplitName = "eval",
    source: Source | None = None,
    group: str | None = None,
    segment: str | None = None,
    top_k: Sequence[int] | None = None,
    root: Path | str = DEFAULT_ROOT,
    callback: Callback | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Quality:
    """Evaluate a run's model on a split of its log, or on other `data`: a DataFrame, an Arrow table, a dict of columns, or paths.

    `source` is one that was encoded for the model. `group`, `segment` and `top_k` replace those of the recipe: the column within whose groups
    examples are ranked, the column for whose values NE and calibration are shown, and the k of recall and NDCG. `progress` is called with
    the number of examples done and of all examples.
    """
    with as_files(data) as files:
        for k in top_k or ():
            if not isinstance(k, int) or k < 1:
                raise RowsteadError(f"top_k: {k!r} is not a length of rankings; give whole numbers from 1 on, such as (5, 10)")
        trained = open_run(run, root=root, callback=callback)
        source = source or trained.source(files, split=split, group=group, segment=segment)
        return _evaluate(trained, source, callback, progress, top_k)


def _evaluate(
    trained: TrainedRun,
    source: Source,
    callback: Callback | None,
    progress: Callable[[int, int], None] | None,
    top_k: Sequence[int] | None,
) -> Quality:
    device = choose_device(trained.spec)
    if not trained.model.store.moves_with_module:
        device = torch.device("cpu")  # tables that do not fit in GPU memory stay where they are
    with set_threads(trained.spec.threads):
        quality = evaluate_model(
            trained.model.to(device),
            source,
            device=device,
            negative_keep_rate=trained.spec.data.negative_keep_rate,
            progress=progress,
            train_rate=trained.train_rate,
            top_k=trained.spec.train.eval_top_k if top_k is None else top_k,
        )
    if callback is not None and (num_skipped := source.num_skipped):
        callback.on_message(f"skipped {num_skipped:,} bad rows (on_bad_row: skip)")
    return quality


def with_group_columns(spec: RunSpec, group: str | None, segment: str | None) -> RunSpec:
    """The spec with these columns of its log instead of those that the recipe names, and read from the files themselves."""
    files = spec.data.files
    if files is None:
        raise RowsteadError(
            "a synthetic log has no columns to group by: evaluate on files, or write the log with `rowstead data synth`"
        )
    changes: dict[str, Any] = {key: name for key, name in (("group", group), ("segment", segment)) if name is not None}
    kinds: dict[str, Any] = {files.kind: dataclasses.replace(files, **changes)}
    data = dataclasses.replace(spec.data, **kinds, cache=None)
    return dataclasses.replace(spec, data=data)


def checkpoint_facts(spec: RunSpec, transforms: Any, id_kinds: IdKinds) -> dict[str, Any]:
    """What every checkpoint of a run holds besides tensors and position."""
    return {
        "architecture": architecture(spec),
        "spec_digest": digest(spec),
        "transforms": transforms,
        "id_kinds": id_kinds,
        "versions": versions(),
    }
