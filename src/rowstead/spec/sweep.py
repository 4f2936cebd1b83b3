"""A sweep: which recipe, which keys of it over which values, and on which machines to predict."""

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
    """Points drawn at random from the axes, instead of all combinations."""

    num_points: int
    """How many."""
    seed: int = 1
    """Same seed, same points; a longer population begins with the shorter one."""

    def __post_init__(self) -> None:
        require(self.num_points >= 1, "num_points", f"must be at least 1, got {self.num_points}")


@dataclass(frozen=True, kw_only=True)
class OnSpec:
    """A machine to predict on, and how a run is set up there; what is left out is chosen as `rowstead plan` does."""

    machine: str
    """Name in the catalogue, or a file."""
    name: str | None = None
    """What to call it, where one machine is used in several ways; the machine's name when left out."""
    change: tuple[str, ...] = ()
    """What-if changes to the machine, such as `network.bandwidth=4x`."""
    software: str = "rowstead"
    """Whose overheads count."""
    server: str = "cpu-2s"
    """What parameter servers are."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the recipe there, such as another batch."""
    place: Literal["device", "host", "remote", "mixed"] | None = None
    """Where the tables are."""
    num_devices: int | None = None
    """Accelerators used; with `place: device` as few as hold the tables, which then share the batch."""
    num_trainers: int = 1
    """Servers that train."""
    num_sparse_servers: int | None = None
    """With `place: remote`; as few as hold the tables when left out."""
    num_dense_servers: int = 0
    """Servers against which trainers average."""
    in_flight: int = 1
    """Steps that a trainer works on at once."""

    @property
    def title(self) -> str:
        return self.name or self.machine


@dataclass(frozen=True, kw_only=True)
class QuickSpec:
    """What makes a sweep small enough for two cores."""

    set: Mapping[str, Any] = field(default_factory=dict)
    """Further changes to the recipe."""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Other values, by name of the axis; names of options for an axis that has them."""
    num_points: int | None = None
    """Of a population."""


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """Every combination of the values of some axes, or a population drawn from them, each as one run of a recipe."""

    name: str
    """Name of the study under which its records are kept."""
    recipe: str
    """A recipe file, or the name of a shipped one."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the recipe that all points have in common, by dotted key."""
    grid: tuple[AxisSpec, ...] = ()
    """The axes; the last one changes fastest."""
    population: PopulationSpec | None = None
    """Draw points at random rather than all combinations."""
    machines: tuple[OnSpec, ...] = ()
    """Where else to predict each point."""
    samples_per_s: float | None = None
    """In predictions, find the servers that reach this speed."""
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
        for place, axis in enumerate(self.grid):
            drawn = axis.low is None or self.population is not None
            require(drawn, f"grid[{place}]", "a range has no values to go through: give `values`, or a `population`")
        for name in self.quick.values:
            titles = [axis.title for axis in self.grid]
            require(name in titles, f"quick.values.{name}", f"no such axis: {did_you_mean(name, titles)}")
        require(self.limit_s is None or self.limit_s > 0, "limit_s", "must be above 0")

    def made_quick(self) -> SweepSpec:
        """The same sweep in its small size, under a name of its own."""
        quick = self.quick
        population = self.population
        if population is not None and quick.num_points is not None:
            population = dataclasses.replace(population, num_points=quick.num_points)
        return dataclasses.replace(
            self,
            name=f"{self.name}-quick",
            set={**self.set, **quick.set},
            grid=tuple(_with_values(axis, quick.values.get(axis.title)) for axis in self.grid),
            population=population,
            quick=QuickSpec(),
        )


def _with_values(axis: AxisSpec, values: tuple[Any, ...] | None) -> AxisSpec:
    if values is None:
        return axis
    if axis.options:
        for name in values:
            require(name in axis.options, f"quick.values.{axis.title}", f"{did_you_mean(str(name), axis.options)}")
        return dataclasses.replace(axis, options={name: axis.options[name] for name in values})
    return dataclasses.replace(axis, values=values, low=None, high=None, log=False, whole=False)


def sweep_names() -> list[str]:
    """Names of the sweeps that are shipped."""
    return sorted(path.stem for path in SWEEPS.glob("*.yaml"))


def load_sweep(name_or_path: str, *, grid: Iterable[AxisSpec] = (), changes: Mapping[str, Any] | None = None) -> SweepSpec:
    """A sweep by path or shipped name; or a run's recipe, with axes given beside it."""
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
                f"is a recipe of one run: say what to sweep with --grid, or take one of {', '.join(sweep_names())}",
            )
            plain = {"name": f"{plain.get('name', path.stem)}-sweep", "recipe": name_or_path}
            spec = parse(SweepSpec, {**plain, "grid": [dataclasses.asdict(axis) for axis in axes]})
        else:
            spec = parse(SweepSpec, plain)
            spec = dataclasses.replace(spec, recipe=_beside(spec.recipe, path), grid=_joined(spec.grid, axes))
    except SpecError as error:
        raise SpecError("", f"{path.name}: {error}") from None
    return dataclasses.replace(spec, set={**spec.set, **(changes or {})})


def _joined(grid: tuple[AxisSpec, ...], axes: tuple[AxisSpec, ...]) -> tuple[AxisSpec, ...]:
    """A sweep's axes with those of the command line, which take the place of the ones that set the same keys."""
    taken = {key for axis in axes for key in axis.all_keys}
    return (*(axis for axis in grid if not taken & set(axis.all_keys)), *axes)


def _beside(recipe: str, path: Path) -> str:
    """The recipe that a file names: beside it, if there is one of that name, as it stays when the folder is moved."""
    near = path.parent / recipe
    return str(near) if near.is_file() and path.parent != SWEEPS else recipe
