"""A sweep: a recipe, the axes to vary, and the machines to predict on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rowstead.spec.axis import AxisSpec, check_names
from rowstead.spec.errors import RowsteadError, SpecError, did_you_mean, require
from rowstead.spec.parse import parse, read_yaml
from rowstead.spec.run import find_recipe, recipe_names

SWEEPS = Path(__file__).parent.parent / "sweeps"


@dataclass(frozen=True, kw_only=True)
class PopulationSpec:
    """Points sampled at random from the axes, instead of all combinations."""

    num_points: int
    """Number of points."""
    seed: int = 1
    """The same seed gives the same points; a longer population starts with the shorter one."""

    def __post_init__(self) -> None:
        require(self.num_points >= 1, "num_points", f"must be at least 1, got {self.num_points}")


@dataclass(frozen=True, kw_only=True)
class OnSpec:
    """A machine to predict on and the setup of the run there; defaults are chosen as in `rowstead plan`."""

    machine: str
    """Name in the catalogue, or a path."""
    name: str | None = None
    """A label, if one machine is used with several setups. Default: the machine's name."""
    change: tuple[str, ...] = ()
    """What-if changes to the machine, such as `network.bandwidth=4x`."""
    software: str = "rowstead"
    """The software description whose overheads apply."""
    server: str = "cpu-2s"
    """The machine of the parameter servers."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Recipe changes on this machine, such as another batch size."""
    place: Literal["device", "host", "remote", "mixed"] | None = None
    """Where the tables live."""
    num_devices: int | None = None
    """Number of accelerators. Default with `place: device`: as few as hold the tables; they share the batch."""
    num_trainers: int = 1
    """Number of trainers."""
    num_sparse_servers: int | None = None
    """With `place: remote`. Default: as few as hold the tables."""
    num_dense_servers: int = 0
    """Number of dense servers that average the trainers' parameters."""
    in_flight: int = 1
    """Number of steps in flight per trainer."""

    @property
    def title(self) -> str:
        return self.name or self.machine


@dataclass(frozen=True, kw_only=True)
class QuickSpec:
    """Changes that make a sweep small enough for two cores."""

    set: Mapping[str, Any] = field(default_factory=dict)
    """Further recipe changes."""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Replacement values by axis name; option names for an axis with options."""
    num_points: int | None = None
    """Number of points of a population."""


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """One run of a recipe for every combination of axis values, or for a population sampled from the axes."""

    name: str
    """Name of the study in the run store."""
    recipe: str
    """A recipe file, or the name of a shipped one."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Recipe changes common to all points, by dotted key."""
    grid: tuple[AxisSpec, ...] = ()
    """The axes; the last one changes fastest."""
    population: PopulationSpec | None = None
    """Sample points at random instead of all combinations."""
    machines: tuple[OnSpec, ...] = ()
    """Further machines to predict each point on."""
    samples_per_s: float | None = None
    """In predictions, choose the number of servers that reaches this throughput."""
    limit_s: float | None = None
    """A point that takes longer is stopped and recorded as failed."""
    quick: QuickSpec = QuickSpec()
    """What `--quick` changes."""

    def __post_init__(self) -> None:
        good = bool(self.name) and self.name[0].isalnum() and all(c.isalnum() or c in "-_." for c in self.name)
        require(
            good and self.name.isascii(), "name", "use letters, digits, `-`, `_` and `.` only, and start with a letter or digit"
        )
        require(bool(self.grid), "grid", "name at least one axis")
        check_names(self.grid, "grid")
        for index, axis in enumerate(self.grid):
            drawn = axis.low is None or self.population is not None
            require(drawn, f"grid[{index}]", "a range has no values to enumerate: give `values`, or a `population`")
        for name in self.quick.values:
            titles = [axis.title for axis in self.grid]
            require(name in titles, f"quick.values.{name}", f"no such axis: {did_you_mean(name, titles)}")
        require(self.limit_s is None or self.limit_s > 0, "limit_s", "must be above 0")

    def made_quick(self) -> SweepSpec:
        """Return the small variant of the sweep, named `…-quick`."""
        quick = self.quick
        population = self.population
        if population is not None and quick.num_points is not None:
            population = dataclasses.replace(population, num_points=quick.num_points)
        return dataclasses.replace(
            self,
            name=f"{self.name}-quick",
            set={**self.set, **quick.set},
            grid=tuple(_replace_values(axis, quick.values.get(axis.title)) for axis in self.grid),
            population=population,
            quick=QuickSpec(),
        )


def _replace_values(axis: AxisSpec, values: tuple[Any, ...] | None) -> AxisSpec:
    if values is None:
        return axis
    if axis.options:
        for name in values:
            require(name in axis.options, f"quick.values.{axis.title}", f"{did_you_mean(str(name), axis.options)}")
        return dataclasses.replace(axis, options={name: axis.options[name] for name in values})
    return dataclasses.replace(axis, values=values, low=None, high=None, log=False, whole=False)


def sweep_names() -> list[str]:
    """Return the names of the shipped sweeps."""
    return sorted(path.stem for path in SWEEPS.glob("*.yaml"))


def load_sweep(name_or_path: str, *, grid: Iterable[AxisSpec] = (), changes: Mapping[str, Any] | None = None) -> SweepSpec:
    """Load a sweep by path or shipped name, or build one from a run's recipe and `grid`."""
    path, axes = Path(name_or_path), tuple(grid)
    if not path.is_file() and name_or_path in sweep_names():
        path = SWEEPS / f"{name_or_path}.yaml"
    if not path.is_file():
        if name_or_path not in recipe_names():
            known = [*sweep_names(), *recipe_names()]
            raise RowsteadError(
                f"no sweep or recipe `{name_or_path}`, shipped or as a file: {did_you_mean(name_or_path, known)}"
            )
        path = find_recipe(name_or_path)
    plain = read_yaml(path)
    try:
        if isinstance(plain, Mapping) and "features" in plain:  # a run's recipe
            require(
                bool(axes),
                "",
                f"is the recipe of a single run: add axes with --grid, or use one of {', '.join(sweep_names())}",
            )
            plain = {"name": f"{plain.get('name', path.stem)}-sweep", "recipe": name_or_path}
            spec = parse(SweepSpec, {**plain, "grid": [dataclasses.asdict(axis) for axis in axes]})
        else:
            spec = parse(SweepSpec, plain)
            spec = dataclasses.replace(spec, recipe=_resolve_recipe(spec.recipe, path), grid=_merge_axes(spec.grid, axes))
    except SpecError as error:
        raise SpecError("", f"{path.name}: {error}") from None
    return dataclasses.replace(spec, set={**spec.set, **(changes or {})})


def _merge_axes(grid: tuple[AxisSpec, ...], axes: tuple[AxisSpec, ...]) -> tuple[AxisSpec, ...]:
    """Combine a sweep's axes with those of the command line, which replace axes that set the same keys."""
    taken = {key for axis in axes for key in axis.all_keys}
    return (*(axis for axis in grid if not taken & set(axis.all_keys)), *axes)


def _resolve_recipe(recipe: str, path: Path) -> str:
    """Resolve a recipe relative to the sweep's file if it exists there, so that the folder can be moved."""
    near = path.parent / recipe
    return str(near) if near.is_file() and path.parent != SWEEPS else recipe
