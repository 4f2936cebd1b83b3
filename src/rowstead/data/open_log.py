"""Opens a run's log: its splits, with the transforms and id kinds that the training split determines."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rowstead.data.block import RawBlock
from rowstead.data.columns import IdKinds
from rowstead.data.encode import Encoder
from rowstead.data.file_log import open_file_log
from rowstead.data.files import choose_file_log
from rowstead.data.pack import Log, fill_cache, open_pack
from rowstead.data.packed_source import PackedSource
from rowstead.data.source import LogSplit, Source
from rowstead.data.transforms import DenseTransforms
from rowstead.spec.data import FileLogSpec, SplitName, list_paths
from rowstead.spec.errors import DataError
from rowstead.spec.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The splits of a log, encoded for one model."""

    train: Source
    eval: Source
    test: Source | None = None
    """For one evaluation at the end of a run."""
    encoder: Encoder
    id_kinds: dict[str, str]
    """Whether each sparse column has `text` or `integers`."""

    def share(self, rank: int, world_size: int) -> Sources:
        """The same splits; of each training batch only the local share of process `rank`."""
        return self if world_size == 1 else dataclasses.replace(self, train=self.train.local_share(rank, world_size))

    def map(self, function: Callable[[Source], Source]) -> Sources:
        """The same splits with `function` applied to the source of each."""
        test = None if self.test is None else function(self.test)
        return dataclasses.replace(self, train=function(self.train), eval=function(self.eval), test=test)


def open_sources(
    spec: RunSpec,
    transforms: DenseTransforms | None = None,
    id_kinds: IdKinds | None = None,
    *,
    on_message: Callable[[str], None] = lambda text: None,
) -> Sources:
    """Open the splits of a spec's log; dense transforms are learned from the training split unless they are given.

    `id_kinds` are those of an earlier run whose model is trained further: a log of other kinds is refused. With `data.cache` the rows
    come from the packed log there, which is packed first if there is none.
    """
    log = open_to_pack(spec, transforms, id_kinds)
    pack = None
    if spec.data.cache is not None:
        folder = Path(spec.data.cache).expanduser()
        fill_cache(log, folder, on_message)
        pack = open_pack(log, folder)
        if transforms is not None and transforms.to_plain() != pack.transforms.to_plain():
            raise DataError(
                f"{folder} was packed with other dense transforms than this run has learned: set data.cache to another folder"
            )
    encoder = Encoder(spec.features, spec.tables, log.learn() if pack is None else pack.transforms)
    sources = {name: split.source(encoder, seed=spec.seed) for name, split in log.splits.items()}
    if pack is not None:
        sources = {name: PackedSource(source, pack.splits[name]) for name, source in sources.items()}
    return Sources(
        train=sources["train"],
        eval=sources["eval"],
        test=sources.get("test"),
        encoder=encoder,
        id_kinds=log.splits["train"].id_kinds,
    )


def open_to_pack(spec: RunSpec, transforms: DenseTransforms | None = None, id_kinds: IdKinds | None = None) -> Log:
    """Open the splits of a spec's log as they are."""
    train = open_split(spec, "train", id_kinds)
    splits = {"train": train, "eval": open_split(spec, "eval", train.id_kinds)}
    if spec.data.log.has_test:
        splits["test"] = open_split(spec, "test", train.id_kinds)

    def learn() -> DenseTransforms:
        if transforms is not None:
            return transforms
        needed = any(feature.needs_statistics for feature in spec.features.expanded_dense())
        return DenseTransforms.learn(spec.features, train.dense_blocks(spec.data.statistics_rows) if needed else ())

    return Log(spec=spec, splits=splits, learn=learn)


def open_split(spec: RunSpec, split: SplitName, id_kinds: IdKinds | None = None) -> LogSplit:
    """Open one split of a spec's log, of whichever kind."""
    log = spec.data.log
    module, name = log.split_class.split(":")
    tasks = {"tasks": spec.model.tasks} if spec.model.tasks else {}
    opened: LogSplit = getattr(importlib.import_module(module), name)(log, spec.features, split, id_kinds, **tasks)
    return opened


def read_raw_blocks(spec: RunSpec, data: list[str] | None = None, max_rows: int | None = None) -> Iterator[RawBlock]:
    """Raw rows of a spec's training split, or of other files with the same features."""
    if data is not None:
        tasks = spec.model.tasks
        return open_file_log(files_like(spec, data), spec.features, split="all", tasks=tasks).raw_blocks(max_rows)
    return open_split(spec, "train").raw_blocks(max_rows)


def files_like(spec: RunSpec, data: str | Sequence[str]) -> FileLogSpec:
    """Other files, read with the settings of a spec's own if they are of the same kind."""
    return choose_file_log(list_paths(data), like=spec.data.files)
