"""Rows that a cache lacks are as many as the real cache lacks, and come by as many reads as the real file makes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rowstead.kernels.cpu.disk import cut_reads
from rowstead.plan import caching
from rowstead.plan.caching import Draws, build_cache_models, missing_rows
from rowstead.plan.setup import CachedTable, Setup
from rowstead.plan.traffic import Popularity, distinct_ids
from rowstead.plan.work import step_work
from rowstead.spec.caching import GAP_BYTES, GROWTH, MAX_SET, READ_BYTES, SETS_AHEAD
from rowstead.stores import cached
from rowstead.stores.cache_slots import CpuCacheSlots
from rowstead.study.calibration.steps import Shape, sample_batches
from tests.stores.reference_cache_slots import ReferenceCacheSlots


def shape_of(*, skew: float, mean_ids: int = 4, num_rows: int = 8000) -> Shape:
    return Shape(
        num_dense=4,
        num_sparse=2,
        batch_size=64,
        num_rows=num_rows,
        width=16,
        mean_ids=mean_ids,
        skew=skew,
        bottom=(4,),
        top=(4,),
    )


@pytest.mark.parametrize("share", [0.4, 0.15, 0.05, 0.001])
@pytest.mark.parametrize("skew", [0.2, 0.8, 1.3])
def test_a_cache_lacks_as_many_rows_as_the_real_one(skew: float, share: float) -> None:
    shape = shape_of(skew=skew)
    cache = CpuCacheSlots(2 * shape.num_rows, 2 * math.ceil(share * shape.num_rows))
    firsts, lacked = torch.tensor([[0], [shape.num_rows]]), []
    for number, batch in enumerate(sample_batches(shape, torch.device("cpu"))):
        rows = (batch.sparse.ids.view(2, -1) + firsts).flatten()
        lacked.append(cache.plan(rows, number, oldest=max(0, number - SETS_AHEAD)).in_rows.numel())
    draws = [Draws(Popularity(shape.num_rows, skew), shape.batch_size * shape.mean_ids)] * 2
    assert missing_rows(draws, cache.num_slots) == pytest.approx(np.mean(lacked[len(lacked) // 2 :]), rel=0.12)


@pytest.mark.parametrize(
    ("skew", "share", "size"), [(0.2, 0.9, 8), (0.8, 0.5, 8), (1.3, 0.1, 4), (0.2, 0.1, 2), (0.8, 0.001, 1), (1.6, 0.001, 4)]
)
def test_a_gpu_brings_in_as_many_batches_and_rows_at_once_as_is_predicted(skew: float, share: float, size: int) -> None:
    shape = shape_of(skew=skew, mean_ids=2)
    work = step_work(shape.spec("cpu"))
    behind = tuple(CachedTable(table=table.name, cache_fraction=share) for table in work.tables)
    (group,) = build_cache_models(
        work.tables, Setup(placement="device", batch_size=shape.batch_size, behind=behind), in_sets=True
    )
    cache = ReferenceCacheSlots(2 * shape.num_rows, group.num_slots)
    firsts, lacked, number = torch.tensor([[0], [shape.num_rows]]), [], 0
    batches = [batch.sparse for batch in sample_batches(shape, torch.device("cpu"))]
    rows = [(sparse.ids.view(2, -1) + firsts).flatten() for sparse in batches]
    # A store's own rule, for slots that a GPU plans just so.
    names = SimpleNamespace(rows=lambda sparse: (sparse.ids.view(2, -1) + firsts).flatten(), split_by_group=lambda rows: [rows])
    store: Any = SimpleNamespace(_slots=[cache], _mapper=names, _max_set=MAX_SET)
    count, ahead = cached.CachedStore._choose_set_size(store, batches[0])
    while number + MAX_SET <= len(rows):
        oldest = max(0, number - ahead * count)
        moves = cache.plan(torch.cat(rows[number : number + count]), number + count - 1, oldest=oldest)
        lacked += [moves.in_rows.numel() / count] * count
        number += count
    assert (group.set_size, group.sets_kept) == (count, ahead + 1)
    assert count == size
    assert cache.capacity <= GROWTH * cached.max_capacity(group.num_slots, shape.num_ids)
    assert group.missing_rows == pytest.approx(np.mean(lacked[len(lacked) // 2 :]), rel=0.12)


laws = st.builds(Popularity, st.integers(100, 5000), st.floats(0, 1.5))


@given(law=laws, num_draws=st.integers(1, 2000), num_slots=st.integers(1, 6000))
def test_fewer_rows_are_missing_the_more_slots_there_are(law: Popularity, num_draws: int, num_slots: int) -> None:
    assume(num_slots >= GROWTH * distinct_ids(law, caching.SETS_KEPT * num_draws))  # else there are more than were asked for
    some, more = (missing_rows([Draws(law, num_draws)], count) for count in (num_slots, 2 * num_slots))
    assert 0 <= more <= some * (1 + 1e-6) + 1e-6
    assert some <= distinct_ids(law, num_draws) + 1e-6
    assert missing_rows([Draws(law, num_draws)], law.num_ids) == 0


@given(law=laws, num_draws=st.integers(1, 2000), num_slots=st.integers(1, 3000))
def test_tables_that_are_alike_share_slots_evenly(law: Popularity, num_draws: int, num_slots: int) -> None:
    one, three = (missing_rows([Draws(law, num_draws)] * count, count * num_slots) for count in (1, 3))
    assert three == pytest.approx(3 * one, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("num_rows", [20, 400, 2000, 6000])
def test_a_file_is_read_in_as_many_pieces_as_the_real_one(num_rows: int) -> None:
    work = step_work(shape_of(skew=0.5, num_rows=20_000).spec("cpu"))
    behind = tuple(CachedTable(table=table.name, cache_fraction=0.1) for table in work.tables)
    (group,) = build_cache_models(work.tables, Setup(placement="device", batch_size=64, behind=behind))
    record_bytes = 80  # a row of 16, its state and its number
    starts = np.sort(np.random.default_rng(1).choice(40_000, num_rows, replace=False)) * record_bytes
    reads, _ = cut_reads(starts, record_bytes, caching.SECTOR_BYTES, GAP_BYTES, READ_BYTES)
    assert group.num_reads(num_rows) == pytest.approx(len(reads), rel=0.15)
