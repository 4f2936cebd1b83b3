"""The points of a study: their settings, their run specs, and the keys that identify them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rowstead.spec.axis import AxisSpec, with_settings
from rowstead.spec.errors import SpecError
from rowstead.spec.parse import digest, parse, to_plain
from rowstead.spec.run import RunSpec, read_recipe
from rowstead.spec.sweep import SweepSpec


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a study."""

    axes: Mapping[str, Any]
    """Its coordinates: axis name to value."""
    settings: Mapping[str, Any]
    """All keys that the study sets for it."""
    spec: RunSpec | None
    """None where the settings are not a valid recipe."""
    problem: str | None = None
    """Why there is no spec."""
    seed: int | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    """The settings that differ between points."""

    @property
    def key(self) -> str:
        """Identifies the run: equal for equal runs, in any order, also after fields with defaults were added to specs."""
        started = {name: value for name, value in self.settings.items() if name.startswith(("run.", "plan."))}
        what = to_plain(self.spec, defaults=False) if self.spec is not None else dict(self.settings)
        return digest({"spec": to_plain(what), "started": to_plain(started)})

    @property
    def digest(self) -> str:
        """The digest of its spec; its key where there is none."""
        return digest(self.spec) if self.spec is not None else self.key

    @property
    def num_processes(self) -> int:
        return int(self.settings.get("run.processes") or 1)

    @property
    def fleet(self) -> str | None:
        fleet = self.settings.get("run.fleet")
        return None if fleet is None else str(fleet)

    @property
    def is_single_process(self) -> bool:
        """Whether it runs in one process."""
        return self.num_processes == 1 and self.fleet is None


def settings_of(space: Sequence[AxisSpec], labels: Mapping[str, Any]) -> dict[str, Any]:
    """The keys and values that the labels of some axes set."""
    return {key: value for axis in space for key, value in axis.settings(labels[axis.title]).items()}


def point_of(recipe: Any, axes: Mapping[str, Any], own: Mapping[str, Any], common: Mapping[str, Any] | None = None) -> Point:
    """A point: a plain recipe with settings."""
    settings = {**(common or {}), **own}
    try:
        spec, problem = parse(RunSpec, with_settings(recipe, settings)), None
    except SpecError as error:
        spec, problem = None, str(error)
    seed = spec.seed if spec is not None else None
    return Point(axes=axes, settings=settings, spec=spec, problem=problem, seed=seed, own=own)


def points_of(sweep: SweepSpec) -> list[Point]:
    """All distinct points of a sweep, in order; a SpecError if none is a valid recipe."""
    recipe = read_recipe(sweep.recipe)
    points: dict[str, Point] = {}
    for labels in _grid_points(sweep):
        axes = {axis.title: label for axis, label in zip(sweep.grid, labels, strict=True)}
        point = point_of(recipe, axes, settings_of(sweep.grid, axes), sweep.set)
        points.setdefault(point.key, point)
    found = list(points.values())
    if all(point.spec is None for point in found):
        raise SpecError("", f"no point of `{sweep.name}` is a valid recipe: {found[0].problem}")
    return found


def _grid_points(sweep: SweepSpec) -> Iterator[tuple[Any, ...]]:
    if sweep.population is None:
        yield from itertools.product(*(axis.labels for axis in sweep.grid))
        return
    rng = random.Random(sweep.population.seed)
    for _ in range(sweep.population.num_points):
        yield tuple(_draw_value(axis, rng) for axis in sweep.grid)


def _draw_value(axis: AxisSpec, rng: random.Random) -> Any:
    if axis.labels:
        return axis.labels[rng.randrange(len(axis.labels))]
    assert axis.low is not None
    assert axis.high is not None
    value = math.exp(rng.uniform(math.log(axis.low), math.log(axis.high))) if axis.log else rng.uniform(axis.low, axis.high)
    return min(max(round(value), math.ceil(axis.low)), math.floor(axis.high)) if axis.whole else value
