"""Opens a run's log: both splits, with the transforms and id kinds that the training split determines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rowstead.data.block import RawBlock
from rowstead.data.columns import IdKinds
from rowstead.data.encode import Encoder
from rowstead.data.parquet import ParquetLog
from rowstead.data.parquet_source import ParquetSource
from rowstead.data.source import Source
from rowstead.data.synth import SynthLog, SynthSource
from rowstead.data.transforms import DenseTransforms
from rowstead.spec.data import ParquetSpec
from rowstead.spec.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Both splits of a log, encoded for one model."""

    train: Source
    eval: Source
    encoder: Encoder
    id_kinds: dict[str, str]
    """Whether each sparse column holds text or integers."""

    def share(self, rank: int, world_size: int) -> Sources:
        """The same splits; of each training batch only the local share of process `rank`."""
        return self if world_size == 1 else dataclasses.replace(self, train=self.train.local_share(rank, world_size))


def open_sources(spec: RunSpec, transforms: DenseTransforms | None = None, id_kinds: IdKinds | None = None) -> Sources:
    """Open both splits of a spec's log; dense transforms are learned from the training split unless they are given.

    `id_kinds` are those of an earlier run whose model is trained further: a log of other kinds is refused.
    """
    train_log = LogSplit(spec, "train", id_kinds)
    eval_log = LogSplit(spec, "eval", train_log.id_kinds)
    if transforms is None:
        transforms = DenseTransforms.learn(spec.features, train_log.dense_blocks(spec.data.statistics_rows))
    encoder = Encoder(spec.features, spec.tables, transforms)
    sources = (log.source(encoder) for log in (train_log, eval_log))
    return Sources(train=next(sources), eval=next(sources), encoder=encoder, id_kinds=train_log.id_kinds)


def read_raw_blocks(spec: RunSpec, data: list[str] | None = None, max_rows: int | None = None) -> Iterator[RawBlock]:
    """Raw rows of a spec's training split, or of other Parquet files with the same features."""
    if data is not None:
        return ParquetLog(parquet_files_like(spec, data), spec.features, split="all").raw_blocks(max_rows)
    if spec.data.parquet is not None:
        return ParquetLog(spec.data.parquet, spec.features, split="train").raw_blocks(max_rows)
    assert spec.data.synth is not None
    encoder = Encoder(spec.features, spec.tables, DenseTransforms.learn(spec.features, []))
    return SynthSource(SynthLog(spec.data.synth), encoder, "train").raw_blocks(max_rows)


def parquet_files_like(spec: RunSpec, data: Sequence[str]) -> ParquetSpec:
    """Other Parquet files, read with the settings of a spec's own."""
    if spec.data.parquet is None:
        return ParquetSpec(train=tuple(data))
    return dataclasses.replace(spec.data.parquet, train=tuple(data))


class LogSplit:
    """One split of a spec's log, synthetic or in files."""

    def __init__(self, spec: RunSpec, split: Literal["train", "eval"], id_kinds: IdKinds | None = None) -> None:
        self._spec, self._split = spec, split
        self._synth = SynthLog(spec.data.synth) if spec.data.synth is not None else None
        self._parquet = None
        self.id_kinds = {str(feature.column): "integers" for feature in spec.features.expanded_sparse()}
        if spec.data.parquet is not None:
            self._parquet = ParquetLog(spec.data.parquet, spec.features, split=split, id_kinds=id_kinds)
            self.id_kinds = {**(id_kinds or {}), **self._parquet.id_kinds}

    def dense_blocks(self, max_rows: int) -> Iterator[RawBlock]:
        """Rows to learn dense transforms from."""
        features = self._spec.features
        if not any(feature.needs_statistics for feature in features.expanded_dense()):
            return iter(())
        if self._spec.data.parquet is not None:
            dense_only = dataclasses.replace(features, sparse=(), tables=())
            log = ParquetLog(self._spec.data.parquet, dense_only, split=self._split, with_labels=False)
            return log.raw_blocks(max_rows)
        assert self._synth is not None
        columns = [str(feature.column) for feature in features.expanded_dense()]
        return self._synth.dense_blocks(columns, self._split, max_rows)

    def source(self, encoder: Encoder) -> Source:
        if self._parquet is not None:
            return ParquetSource(self._parquet, encoder, seed=self._spec.seed, shuffle=self._split == "train")
        assert self._synth is not None
        return SynthSource(self._synth, encoder, self._split)
