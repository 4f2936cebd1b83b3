"""Measures the effect of settings on a model's quality: paired seeds, confidence intervals, a verdict against a tolerance."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rowstead.records.files import write_atomic
from rowstead.records.run_folder import DEFAULT_ROOT
from rowstead.records.store import RunStore
from rowstead.records.studies import BASELINE, QUALITY_FILE, Effect, quality_effects
from rowstead.spec.data import GENERATED_KINDS
from rowstead.spec.errors import SpecError
from rowstead.spec.parse import to_yaml
from rowstead.spec.quality import QualitySpec
from rowstead.spec.run import read_recipe
from rowstead.study.points import Point, point_of
from rowstead.study.sweep import SweepCallback, run_sweep


def quality(
    spec: QualitySpec, *, root: Path | str = DEFAULT_ROOT, retry_failed: bool = False, callback: SweepCallback | None = None
) -> list[Effect]:
    """Run the points that are not stored yet, and estimate the effect of each setting on NE."""
    points = points_of(spec)
    folder = RunStore(root).study_folder(spec.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / QUALITY_FILE, to_yaml(spec))
    finished = run_sweep(
        points, study=spec.name, source="quality", root=root, retry_failed=retry_failed, fresh=False, callback=callback
    )
    return quality_effects(finished.measured, tolerance=spec.tolerance, confidence=spec.confidence)


def points_of(spec: QualitySpec) -> list[Point]:
    """The baseline and every value of every axis, with every seed; seed by seed, so that an interrupted study is still paired."""
    recipe = read_recipe(spec.recipe)
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = [({"axis": BASELINE}, {})]
    for axis in spec.vary:
        settings += [({"axis": axis.title, "value": label}, axis.settings(label)) for label in axis.labels]
    data = recipe.get("data") if isinstance(recipe, dict) else None
    generated = [kind for kind in GENERATED_KINDS if isinstance(data, dict) and data.get(kind) is not None]
    points = []
    for seed in range(spec.first_seed, spec.first_seed + spec.num_seeds):
        seeds = {"seed": seed, **{f"data.{kind}.seed": seed for kind in generated}}
        for axes, own in settings:
            point = point_of(recipe, axes, {**own, **seeds}, spec.set)
            points.append(dataclasses.replace(point, seed=seed))
    if points[0].spec is None:
        raise SpecError("", f"the baseline of `{spec.name}` is not a valid recipe: {points[0].problem}")
    return points
