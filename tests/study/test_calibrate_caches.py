"""The fit recovers the costs of cached rows from synthetic steps, and caches are measured in their steady state."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from rowstead.plan.caching import build_cache_models
from rowstead.plan.setup import CachedTable, Setup
from rowstead.plan.work import step_work
from rowstead.stores.cached import CachedStore
from rowstead.study.calibration.caches import (
    LEAST_ROUNDS,
    STEPS_PER_ROUND,
    CacheMeasurement,
    cpu_shapes,
    fit_cache_costs,
    gpu_shapes,
    measure_cache,
    split_plan_cost,
    steady_step_s,
)
from rowstead.study.calibration.steady_state import SampledBatches, mean_step_s, run_to_steady_state
from rowstead.study.calibration.steps import Shape
from tests.measured_machine import timings

SMALL = Shape(num_dense=4, num_sparse=3, batch_size=32, num_rows=3000, width=16, mean_ids=3, skew=0.9, bottom=(4,), top=(4,))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_fit_recovers_cache_costs_on_a_cpu(share: float) -> None:
    batch_s, id_s, row_s, byte_s, read_s = 5e-4, 2e-8, 5e-7, 2e-9, 4e-6
    models = []
    for in_memory_s, num_ids, num_rows, num_reads, row_bytes in [
        (2e-3, 1e3, 10, 10, 68),
        (4e-3, 4e4, 100, 90, 68),
        (2e-3, 4e3, 5e3, 500, 68),
        (3e-3, 4e3, 4e3, 3e3, 516),
        (2e-3, 1e3, 1e3, 900, 68),
        (9e-3, 2e3, 1e3, 200, 516),
        (9e-3, 3e3, 800, 700, 132),
        (1e-2, 8e3, 3e3, 500, 68),
    ]:
        moved_s, placed_s = num_rows * (row_s + byte_s * row_bytes) + num_reads * read_s, batch_s + id_s * num_ids
        step_s = max(in_memory_s + placed_s + share * moved_s, moved_s + share * (in_memory_s + placed_s))
        models.append(
            CacheMeasurement(
                in_memory_s=in_memory_s,
                step_s=step_s,
                num_ids=num_ids,
                num_rows=num_rows,
                num_reads=num_reads,
                row_bytes=row_bytes,
            )
        )
    found = fit_cache_costs(timings(), models)
    assert found.move_share == pytest.approx(share, abs=0.051)
    assert found.move_read_s == pytest.approx(read_s, rel=0.1)
    assert found.cache_batch_s == pytest.approx(batch_s, rel=0.1)
    assert found.move_row is not None
    assert found.move_row.at(132) == pytest.approx(row_s + 132 * byte_s, rel=0.1)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_fit_recovers_cache_costs_on_a_gpu(share: float) -> None:
    id_s, row_s, byte_s = 2e-10, 1e-9, 3e-11
    models = []
    for shape, kept in gpu_shapes(is_short=False):
        work = step_work(shape.spec("cpu"))
        behind = tuple(CachedTable(table=table.name, cache_fraction=kept) for table in work.tables)
        setup = Setup(placement="device", batch_size=shape.batch_size, behind=behind)
        (group,) = build_cache_models(work.tables, setup, in_sets=True)
        in_memory_s = 6e-3 if len(shape.top) > 1 else 1e-3
        moved_s, placed_s = group.missing_rows * (row_s + byte_s * group.row_bytes), id_s * shape.num_ids
        models.append(
            CacheMeasurement(
                in_memory_s=in_memory_s,
                step_s=max(in_memory_s + placed_s + share * moved_s, moved_s + share * (in_memory_s + placed_s)),
                num_ids=shape.num_ids,
                num_rows=group.missing_rows,
                num_reads=0.0,
                row_bytes=group.row_bytes,
                num_plans=0.0,
            )
        )
    found = fit_cache_costs(timings(), models)
    assert found.move_share == pytest.approx(share, abs=0.051)
    assert found.cache_id_s == pytest.approx(id_s, rel=0.2)
    assert found.move_row is not None
    for record in (68, 260, 516):
        assert found.move_row.at(record) == pytest.approx(row_s + record * byte_s, rel=0.15)


def test_the_time_of_a_plan_is_shared_by_the_batches_of_its_set() -> None:
    in_memory_s, set_s, batch_s = 1.5e-4, 1.4e-3, 2e-4
    one_by_one_s, in_sets_s = (in_memory_s + batch_s + set_s / size for size in (1, 8))
    assert split_plan_cost(in_memory_s, in_sets_s, one_by_one_s, 8) == pytest.approx((set_s, batch_s))
    assert split_plan_cost(in_memory_s, in_memory_s, in_memory_s, 8) == (0, 0)


def test_a_steady_step_is_timed_among_many_prefetched_ones(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    rule = {"*": {"where": "ssd", "cache_fraction": 0.5}}
    steps = run_to_steady_state(
        SMALL, cpu, placement=rule, kept_share=0.5, folder=tmp_path, drawn=SampledBatches.of(SMALL, cpu)
    )
    try:
        before, start = steps.number, time.perf_counter()
        step_s = steady_step_s(steps, 0.01)
        assert 0 < step_s * LEAST_ROUNDS * STEPS_PER_ROUND < time.perf_counter() - start
        assert steps.number - before >= (1 + LEAST_ROUNDS) * STEPS_PER_ROUND
    finally:
        steps.close()


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_a_steady_state_cache_misses_as_many_rows_as_predicted(share: float, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    rule = {"*": {"where": "ssd", "cache_fraction": share}}
    steps = run_to_steady_state(
        SMALL, cpu, placement=rule, kept_share=share, folder=tmp_path, drawn=SampledBatches.of(SMALL, cpu)
    )
    try:
        store = steps.stepper.model.store
        assert isinstance(store, CachedStore)
        before, count = store.num_rows_in, 40
        for _ in steps.take(count):
            pass
        missed = (store.num_rows_in - before) / count
        assert mean_step_s(steps, 3) > 0
    finally:
        steps.close()
    work = step_work(SMALL.spec("cpu"))
    behind = tuple(CachedTable(table=table.name, cache_fraction=share) for table in work.tables)
    (group,) = build_cache_models(work.tables, Setup(placement="device", batch_size=SMALL.batch_size, behind=behind))
    assert missed == pytest.approx(group.missing_rows, rel=0.2)


def test_a_model_is_trained_with_and_without_a_cache(tmp_path: Path) -> None:
    found = measure_cache(SMALL, 0.1, tmp_path, None, num_turns=1)
    assert 0 < found.in_memory_s < 10
    assert 0 < found.step_s < 10
    assert 0 < found.num_reads <= found.num_rows <= found.num_ids
    assert not list(tmp_path.iterdir())


def test_cached_models_differ_in_every_fitted_cost() -> None:
    shapes = [shape for shape, _ in cpu_shapes(is_short=False)]
    assert len({shape.width for shape in shapes}) > 1
    assert len({shape.num_ids for shape in shapes}) > 4
    assert len({dataclasses.replace(shape, skew=0.0) for shape in shapes}) == len(shapes)
