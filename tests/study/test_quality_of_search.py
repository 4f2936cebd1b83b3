"""What searches are for: a larger batch gets its quality back, and Bayesian search beats random search."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.search import SPACE, race, summary_of
from rowstead.spec.tune import load_tune
from rowstead.study.tune import tune
from tests.study.learnable import BATCH, LARGER, learnable_recipe

NUM_TRIALS = 30
"""Fixed before the search is run."""


@pytest.mark.statistical
@pytest.mark.timeout(1200)
def test_a_batch_of_eight_times_the_size_loses_ne_and_30_trials_of_retuning_bring_it_back(tmp_path: Path) -> None:
    assert LARGER == 8 * BATCH
    spec = dataclasses.replace(
        load_tune(learnable_recipe(tmp_path)), retune_for={"train.batch_size": LARGER}, trials=NUM_TRIALS
    )
    found = tune(spec, root=tmp_path / "runs")
    assert len(found.trials) == NUM_TRIALS
    assert found.before is not None
    assert found.best is not None
    assert found.best.objective is not None
    assert found.unchanged is not None
    assert found.unchanged.objective is not None
    before = found.before.record.figures["ne_expected"]  # under the teacher's true probabilities
    assert found.unchanged.objective / before - 1 > 0.0015
    assert found.best.objective / before - 1 < 0.001


@pytest.mark.statistical
@pytest.mark.timeout(1200)
def test_bayesian_search_beats_random_search_at_equal_trials() -> None:
    assert len(SPACE) >= 4
    rows = race(["random", "gp"], num_seeds=5, num_trials=40)
    found = summary_of(rows)
    assert found["gp_mean_best_ne"] < found["random_mean_best_ne"], rows
    assert found["gp_seeds_below_random"] >= 3, rows
    assert min(row["s_per_trial"] for row in rows) < 2  # on an idle machine
