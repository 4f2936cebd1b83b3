"""A quality study: the effect of settings on NE, one at a time, over several seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rowstead.spec.axis import AxisSpec
from rowstead.spec.errors import RowsteadError, SpecError, did_you_mean, require
from rowstead.spec.parse import parse, read_yaml
from rowstead.spec.run import RunSpec, find_recipe, load_recipe, recipe_names
from rowstead.spec.sweep import SWEEPS

QUALITY = SWEEPS / "quality"


@dataclass(frozen=True, kw_only=True)
class QualitySpec:
    """A baseline recipe and axes to vary one at a time; each run is compared with the baseline of the same seed."""

    name: str
    """Name of the study in the run store."""
    recipe: str
    """A recipe file, or the name of a shipped one: the baseline."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Recipe changes common to all runs."""
    vary: tuple[AxisSpec, ...] = ()
    """The axes. Default: batch size, trainers, arithmetic precision, row format, and hash size."""
    num_seeds: int = 5
    """Runs per setting."""
    first_seed: int = 1
    """The first of consecutive seeds; a seed decides the initial weights, and a synthetic log."""
    tolerance: float = 0.001
    """A larger relative increase of NE is a regression."""
    confidence: float = 0.95
    """Confidence level of the intervals."""
    quick: Mapping[str, Any] = field(default_factory=dict)
    """With `--quick`: further recipe changes."""
    quick_seeds: int = 3
    """With `--quick`: runs per setting."""

    def __post_init__(self) -> None:
        good = bool(self.name) and self.name[0].isalnum() and all(c.isalnum() or c in "-_." for c in self.name)
        require(
            good and self.name.isascii(), "name", "use letters, digits, `-`, `_` and `.` only, and start with a letter or digit"
        )
        for name in ("num_seeds", "quick_seeds"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require(self.tolerance >= 0, "tolerance", "must not be negative")
        require(0 < self.confidence < 1, "confidence", "must be between 0 and 1")
        for index, axis in enumerate(self.vary):
            require(bool(axis.labels), f"vary[{index}]", "a range has no values to enumerate: give `values` or `options`")

    def made_quick(self) -> QualitySpec:
        """Return the small variant of the study, named `…-quick`."""
        return dataclasses.replace(
            self, name=f"{self.name}-quick", set={**self.set, **self.quick}, num_seeds=self.quick_seeds, quick={}
        )


def default_axes(run: RunSpec) -> tuple[AxisSpec, ...]:
    """Return the axes that are varied by default."""
    batch = run.train.batch_size
    return (
        AxisSpec(name="batch size", keys=("train.batch_size",), values=(batch * 2, batch * 8)),
        AxisSpec(name="trainers", keys=("run.processes",), values=(2,)),
        AxisSpec(name="arithmetic", keys=("train.precision",), values=("bf16",)),
        AxisSpec(name="rows", keys=("model.row_format",), values=("bf16", "fp16")),
        AxisSpec(name="hash size, times", keys=("scale",), values=(run.scale / 2, run.scale / 8)),
    )


def load_quality(name_or_path: str, *, vary: Iterable[AxisSpec] = ()) -> QualitySpec:
    """Load a study by path or shipped name, or build one around a run's recipe."""
    path, axes = Path(name_or_path), tuple(vary)
    names = sorted(path.stem for path in QUALITY.glob("*.yaml"))
    if not path.is_file() and name_or_path in names:
        path = QUALITY / f"{name_or_path}.yaml"
    if not path.is_file():
        if name_or_path not in recipe_names():
            known = did_you_mean(name_or_path, [*names, *recipe_names()])
            raise RowsteadError(f"no study or recipe `{name_or_path}`, shipped or as a file: {known}")
        path = find_recipe(name_or_path)
    plain = read_yaml(path)
    try:
        if isinstance(plain, Mapping) and "features" in plain:
            spec = QualitySpec(name=f"{plain.get('name', path.stem)}-quality", recipe=name_or_path)
        else:
            spec = parse(QualitySpec, plain)
            near = path.parent / spec.recipe
            spec = dataclasses.replace(spec, recipe=str(near)) if near.is_file() else spec
    except SpecError as error:
        raise SpecError("", f"{path.name}: {error}") from None
    if axes:
        spec = dataclasses.replace(spec, vary=axes)
    return spec if spec.vary else dataclasses.replace(spec, vary=default_axes(load_recipe(spec.recipe)))
