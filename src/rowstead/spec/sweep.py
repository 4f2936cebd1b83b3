"""A sweep: a recipe, the axes to vary, and the machines to predict on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from rowstead.spec.axis import AxisSpec, check_combinations, check_names
from rowstead.spec.bounds import MAX_POINTS, AboveZero, AnyProcesses, AtLeastOne, Processes, Spec, up_to
from rowstead.spec.errors import did_you_mean, require
from rowstead.spec.parse import shipped_names
from rowstead.spec.stores import PlannedStore
from rowstead.spec.study import SWEEPS, StudySpec, load_study


@dataclass(frozen=True, kw_only=True)
class PopulationSpec(Spec):
    """Points sampled at random from the axes, instead of all combinations."""

    num_points: Annotated[AtLeastOne, up_to(MAX_POINTS)]
    """Number of points."""
    seed: int = 1
    """The same seed gives the same points; a longer population starts with the shorter one."""


@dataclass(frozen=True, kw_only=True)
class OnSpec(Spec):
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
    placement: PlannedStore | None = None
    """Where the tables live."""
    num_devices: Processes | None = None
    """Number of accelerators. Default with `placement: device`: as few as hold the tables; they share the batch."""
    num_trainers: Processes = 1
    """Number of trainers."""
    num_sparse_servers: AnyProcesses | None = None
    """With `placement: remote`. Default: as few as hold the tables."""
    num_dense_servers: AnyProcesses = 0
    """Number of dense servers that average the trainers' parameters."""
    in_flight: Processes = 1
    """Number of steps in flight per trainer."""

    @property
    def title(self) -> str:
        return self.name or self.machine


@dataclass(frozen=True, kw_only=True)
class QuickSpec(Spec):
    """Changes that make a sweep small enough for two cores."""

    set: Mapping[str, Any] = field(default_factory=dict)
    """Further recipe changes."""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Replacement values by axis name; option names for an axis with options."""
    num_points: Annotated[AtLeastOne, up_to(MAX_POINTS)] | None = None
    """Number of points of a population."""


@dataclass(frozen=True, kw_only=True)
class SweepSpec(StudySpec):
    """One run of a recipe for every combination of axis values, or for a population sampled from the axes."""

    grid: tuple[AxisSpec, ...] = ()
    """The axes; the last one changes fastest."""
    population: PopulationSpec | None = None
    """Sample points at random instead of all combinations."""
    machines: tuple[OnSpec, ...] = ()
    """Further machines to predict each point on."""
    samples_per_s: AboveZero | None = None
    """In predictions, choose the number of servers that reaches this throughput."""
    limit_s: AboveZero | None = None
    """A point that takes longer is stopped and recorded as failed."""
    quick: QuickSpec = QuickSpec()
    """What `--quick` changes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.grid), "grid", f"name at least one axis: add --grid, or use one of {', '.join(sweep_names())}")
        check_names(self.grid, "grid")
        if self.population is None:
            check_combinations(self.grid, "grid")
        for index, axis in enumerate(self.grid):
            drawn = axis.low is None or self.population is not None
            require(drawn, f"grid[{index}]", "a range has no values to enumerate: give `values`, or a `population`")
        for name in self.quick.values:
            titles = [axis.title for axis in self.grid]
            require(name in titles, f"quick.values.{name}", f"no such axis: {did_you_mean(name, titles)}")

    def made_quick(self) -> SweepSpec:
        """Return the small variant of the sweep, named `…-quick`."""
        quick, population = self.quick, self.population
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
    return shipped_names(SWEEPS)


def load_sweep(name_or_path: str, *, grid: Iterable[AxisSpec] = ()) -> SweepSpec:
    """Load a sweep by path or shipped name, or build one around a run's recipe; axes of `grid` replace those that set the same keys."""
    axes = tuple(grid)
    spec = load_study(SweepSpec, name_or_path, "sweep", SWEEPS, grid=[dataclasses.asdict(axis) for axis in axes])
    taken = {key for axis in axes for key in axis.all_keys}
    kept = (axis for axis in spec.grid if not taken & set(axis.all_keys))
    return dataclasses.replace(spec, grid=(*kept, *axes))
