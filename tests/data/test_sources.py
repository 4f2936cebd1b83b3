"""Every source keeps the contract."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rowstead.data.encode import Encoder
from rowstead.data.open_log import open_sources
from rowstead.data.source import Source
from rowstead.data.synth import SynthSplit, write_parquet
from rowstead.spec.data import DataSpec, SynthSpec
from tests.data.source_contract import NUM_SAMPLES, SourceContract
from tests.small_runs import parquet_spec, small_spec


def synth_source() -> Source:
    return open_sources(small_spec(f"data.synth.num_train_samples={NUM_SAMPLES}")).train


class TestSynthSource(SourceContract):
    @pytest.fixture
    def source(self) -> Source:
        return synth_source()


class TestParquetSource(SourceContract):
    """With weights, shuffled in small windows, by several threads."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        log = SynthSpec(num_train_samples=NUM_SAMPLES, num_eval_samples=50, num_dense=4, num_sparse=3, num_ids=50)
        write_parquet(log, tmp_path)
        for file in tmp_path.glob("*.parquet"):
            table = pq.read_table(file)
            weights = pa.array([0.25 * (row % 5) for row in range(table.num_rows)], pa.float32())
            pq.write_table(table.append_column("weight", weights), file, row_group_size=120)
        changes = ("data.parquet.weight=weight", "data.parquet.shuffle_rows=150", "data.parquet.decode_threads=3")
        return open_sources(parquet_spec(tmp_path, *changes)).train


class TestMappedSource(SourceContract):
    @pytest.fixture
    def source(self) -> Source:
        return synth_source().map(lambda batch: dataclasses.replace(batch, dense=2 * batch.dense))


@dataclass(frozen=True, kw_only=True)
class ShiftedSpec(SynthSpec):
    """A kind of log of a test's own."""

    split_class: ClassVar[str] = "tests.data.test_sources:ShiftedSplit"


class ShiftedSplit(SynthSplit):
    def source(self, encoder: Encoder, *, seed: int) -> Source:  # type: ignore[override]
        return super().source(encoder, seed=seed).map(lambda batch: dataclasses.replace(batch, dense=batch.dense + 1))


def test_a_kind_of_log_is_opened_by_the_class_that_its_spec_names() -> None:
    spec = small_spec()
    assert spec.data.synth is not None
    shifted = dataclasses.replace(spec, data=DataSpec(synth=ShiftedSpec(**vars(spec.data.synth))))
    batch, _ = next(open_sources(spec).train.batches(64))
    found, _ = next(open_sources(shifted).train.batches(64))
    assert torch.equal(found.dense, batch.dense + 1)
