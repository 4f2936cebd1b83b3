"""A quality study runs every setting with the same seeds, and marks what is worse than tolerated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rowstead.records.store import RunStore
from rowstead.records.studies import BASELINE, quality_effects
from rowstead.spec.errors import RowsteadError, SpecError
from rowstead.spec.parse import parse, shipped_names
from rowstead.spec.quality import QualitySpec, load_quality
from rowstead.spec.study import SWEEPS
from rowstead.study.quality import points_of, quality
from tests.small_runs import small_plain
from tests.study.learnable import learnable_recipe


def study(folder: Path, **changes: Any) -> QualitySpec:
    recipe = folder / "small.yaml"
    recipe.write_text(yaml.safe_dump(small_plain()))
    vary = [
        {"name": "batch", "keys": "train.batch_size", "values": [128, 256]},
        {"name": "rows", "keys": "model.row_format", "values": ["bf16"]},
    ]
    return parse(QualitySpec, {"name": "q", "recipe": str(recipe), "vary": vary, "num_seeds": 3} | changes)


def test_every_setting_has_every_seed_and_differs_from_the_baseline_in_nothing_else(tmp_path: Path) -> None:
    points = points_of(study(tmp_path))
    assert len(points) == 3 * 4
    assert len({point.key for point in points}) == 12
    for seed in (1, 2, 3):
        base, *others = (point for point in points if point.seed == seed)
        assert base.axes == {"axis": BASELINE}
        assert base.spec is not None
        assert base.spec.seed == seed
        assert base.spec.data.synth is not None
        assert base.spec.data.synth.seed == seed
        for other in others:
            assert set(other.own) - {"seed", "data.synth.seed"} in ({"train.batch_size"}, {"model.row_format"})


def test_a_study_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="range"):
        study(tmp_path, vary=[{"keys": "train.batch_size", "low": 1, "high": 2}])
    with pytest.raises(SpecError, match="seeds"):
        study(tmp_path, num_seeds=0)
    with pytest.raises(SpecError, match="baseline"):
        points_of(study(tmp_path, set={"train.batch_size": 0}))
    with pytest.raises(RowsteadError, match="quickstart"):
        load_quality("quickstrat")


@pytest.mark.parametrize("name", shipped_names(SWEEPS / "quality"))
def test_every_shipped_study_makes_recipes_in_both_sizes(name: str) -> None:
    spec = load_quality(name)
    assert spec.name == name
    for one in (spec, spec.made_quick()):
        assert [point.problem for point in points_of(one) if point.problem is not None] == []


def test_any_recipe_has_axes_worth_a_look() -> None:
    spec = load_quality("quickstart")
    assert {axis.title for axis in spec.vary} == {"batch size", "trainers", "arithmetic", "rows", "hash size, times"}
    assert spec.tolerance == 0.001


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_larger_batch_is_a_regression_and_the_same_settings_are_none(tmp_path: Path) -> None:
    recipe = learnable_recipe(tmp_path, num_samples=20_000)
    vary = [
        {"name": "batch", "keys": "train.batch_size", "values": [512]},
        {"name": "logging", "keys": "train.log_every", "values": [7]},
    ]
    spec = parse(QualitySpec, {"name": "q", "recipe": recipe, "vary": vary, "num_seeds": 5})
    found = quality(spec, root=tmp_path / "runs")
    verdicts = {effect.axis: effect.verdict for effect in found}
    assert verdicts == {BASELINE: "baseline", "batch": "regression", "logging": "within"}
    (logging,) = (effect for effect in found if effect.axis == "logging")
    assert logging.change == 0.0
    entries = RunStore(tmp_path / "runs").read().of(study="q", source="quality")
    assert len(entries) == 15
    assert quality_effects(entries) == found
    command = [
        sys.executable,
        "-m",
        "rowstead",
        "quality",
        recipe,
        "--vary",
        "train.batch_size=512",
        "--name",
        "q",
        "--seeds",
        "5",
    ]
    command += ["--runs", str(tmp_path / "runs")]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "regression" in shown.stdout
    assert len(RunStore(tmp_path / "runs").read().of(study="q")) == 15


def test_the_seed_of_a_log_of_histories_differs_too(tmp_path: Path) -> None:
    points = points_of(study(tmp_path, recipe="din"))
    assert {(point.seed, point.spec and point.spec.data.interests and point.spec.data.interests.seed) for point in points} == {
        (seed, seed) for seed in (1, 2, 3)
    }
