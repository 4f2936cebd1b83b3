"""How sure a search is of what mattered."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import optuna
import pytest

from rowstead.records.studies import importance_spread_in
from rowstead.study.search import resample_importance


def study_of(num_trials: int, noise: float) -> optuna.Study:
    """Trials whose objective depends on `lr` only, and on chance."""
    random = np.random.default_rng(1)
    ranges = {name: optuna.distributions.FloatDistribution(0, 1) for name in ("lr", "eps")}
    study = optuna.create_study()
    for lr, eps in random.random((num_trials, 2)):
        value = (lr - 0.3) ** 2 + noise * random.normal()
        study.add_trial(optuna.create_trial(params={"lr": lr, "eps": eps}, distributions=ranges, value=value))
    return study


def test_what_decides_the_objective_is_sure_to_matter_more() -> None:
    spread = resample_importance(study_of(120, 0.001), seed=1)
    assert spread["lr"][0] > spread["eps"][1]
    assert all(0 <= low <= high <= 1 for low, high in spread.values())
    assert spread == resample_importance(study_of(120, 0.001), seed=1)


def test_few_noisy_trials_leave_wide_ranges_that_overlap() -> None:
    spread = resample_importance(study_of(12, 1.0), seed=1)
    assert spread["lr"][0] < spread["eps"][1]
    assert spread["eps"][0] < spread["lr"][1]
    assert spread["lr"][1] - spread["lr"][0] > 0.3


@pytest.mark.parametrize("num_trials", [0, 1])
def test_too_few_trials_have_no_spread(num_trials: int) -> None:
    assert resample_importance(study_of(num_trials, 0.1), seed=1) == {}


def test_a_stored_spread_is_checked(tmp_path: Path) -> None:
    assert importance_spread_in(tmp_path) == {}
    (tmp_path / "importance_spread.json").write_text(json.dumps({"lr": [0.1, 0.5], "x": [1], "y": "z", "w": [0.1, None]}))
    assert importance_spread_in(tmp_path) == {"lr": (0.1, 0.5)}
    (tmp_path / "importance_spread.json").write_text("[1]")
    assert importance_spread_in(tmp_path) == {}
