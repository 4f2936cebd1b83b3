"""What searches are for: a larger batch gets its quality back, and a search that learns beats one that draws at random."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.search import SPACE, race, summary_of
from rowstead.spec.tune import load_tune
from rowstead.study.tune import tune
from tests.study.learnable import BATCH, LARGER, learnable_recipe


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_batch_of_eight_times_the_size_loses_ne_and_retuning_brings_it_back(tmp_path: Path) -> None:
    assert LARGER == 8 * BATCH
    spec = dataclasses.replace(load_tune(learnable_recipe(tmp_path)), retune_for={"train.batch_size": LARGER})
    for num_trials in (10, 20, 30, 40):  # goes on where it was, until it is there
        found = tune(dataclasses.replace(spec, trials=num_trials), root=tmp_path / "runs")
        assert len(found.trials) == num_trials
        assert found.before is not None
        assert found.best is not None
        assert found.best.objective is not None
        assert found.unchanged is not None
        assert found.unchanged.objective is not None
        before = found.before.record.figures["ne_expected"]  # under the teacher's true probabilities
        assert found.unchanged.objective / before - 1 > 0.0015
        if found.best.objective / before - 1 < 0.001:
            return
    pytest.fail(f"after {num_trials} trials {found.best.objective / before - 1:+.3%} from before")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_search_that_learns_beats_random_search_at_equal_trials() -> None:
    assert len(SPACE) >= 4
    rows = race(["random", "gp"], num_seeds=5, num_trials=40)
    found = summary_of(rows)
    assert found["gp_mean_best_ne"] < found["random_mean_best_ne"], rows
    assert found["gp_seeds_below_random"] >= 3, rows
    assert min(row["s_per_trial"] for row in rows) < 2  # where nothing else runs; other tests may, beside some of them
