"""The shares of all processes are the batches that one would read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rowstead.data.batch import Batch
from rowstead.data.share import LocalShareSource
from rowstead.data.source import Source
from rowstead.data.synth import write_parquet
from rowstead.spec.data import SynthSpec
from rowstead.training.build import open_sources
from tests.small_runs import parquet_spec, small_spec


def synth() -> Source:
    return open_sources(small_spec("data.synth.num_train_samples=500")).train


def parquet(folder: Path) -> Source:
    """With weights, shuffled in small windows."""
    write_parquet(SynthSpec(num_train_samples=500, num_eval_samples=50, num_dense=4, num_sparse=3, num_ids=50), folder)
    for file in folder.glob("*.parquet"):
        table = pq.read_table(file)
        weights = pa.array([0.25 * (row % 5) for row in range(table.num_rows)], pa.float32())
        pq.write_table(table.append_column("weight", weights), file)
    return open_sources(parquet_spec(folder, "data.parquet.weight=weight", "data.parquet.shuffle_rows=150")).train


def joined(shares: list[Batch]) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Tensors of one number an example, and the bags of all features, of batches laid end to end."""
    plain = [[batch.dense, batch.labels, batch.weights] for batch in shares]
    tensors = [torch.cat(list(each)) for each in zip(*plain, strict=True) if each[0] is not None]  # type: ignore[arg-type]
    bags = []
    for feature in range(shares[0].sparse.num_features):
        for batch in shares:
            offsets, count = batch.sparse.offsets, batch.num_samples
            places = range(feature * count, (feature + 1) * count)
            bags += [batch.sparse.ids[offsets[place] : offsets[place + 1]].tolist() for place in places]
    return tensors, bags


@pytest.mark.parametrize("kind", ["synth", "parquet"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shares_make_up_the_batches_of_one_process(kind: str, world_size: int, tmp_path: Path) -> None:
    source = synth() if kind == "synth" else parquet(tmp_path)
    expected = list(source.batches(64, epoch=1))
    shares = [list(LocalShareSource(source, rank, world_size).batches(64, epoch=1)) for rank in range(world_size)]
    assert all(len(own) == len(expected) for own in shares)
    for place, (batch, cursor) in enumerate(expected):
        own = [share[place] for share in shares]
        assert all(after == cursor for _, after in own)
        found, bags = joined([part for part, _ in own])
        wanted, wanted_bags = joined([batch])
        assert bags == wanted_bags
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        for part, _ in own:
            assert dataclasses.astuple(part.whole) == pytest.approx(dataclasses.astuple(batch.whole))


def test_shares_go_on_where_the_cursor_of_one_process_stands(tmp_path: Path) -> None:
    source = parquet(tmp_path)
    _, cursor = list(source.batches(64))[2]
    batch, _ = next(iter(source.batches(64, cursor=cursor)))
    part, _ = next(iter(LocalShareSource(source, 1, 2).batches(64, cursor=cursor)))
    assert torch.equal(part.dense, batch.dense[32:])


def test_a_share_may_be_empty() -> None:
    last = list(LocalShareSource(synth(), 0, 4).batches(166))[-1][0]  # 166, 166, 166 and 2 examples
    assert (last.num_samples, last.whole.num_samples) == (0, 2)
    assert last.sparse.num_samples == 0
