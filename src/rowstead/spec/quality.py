"""A study of quality: what some settings do to NE, one at a time, over several seeds."""

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
    """A recipe, and axes along which it is changed, one at a time; every run is compared with the recipe's own of the same seed."""

    name: str
    """Name of the study under which its runs are kept."""
    recipe: str
    """A recipe file, or the name of a shipped one: the baseline."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the recipe that all runs have in common."""
    vary: tuple[AxisSpec, ...] = ()
    """What is changed. When left out: batch size, trainers, precision of arithmetic and of rows, and hash size."""
    num_seeds: int = 5
    """Runs of each setting."""
    first_seed: int = 1
    """Seeds go on from this one; they decide initial weights, and on a synthetic log also the log."""
    tolerance: float = 0.001
    """A larger relative rise of NE is a regression."""
    confidence: float = 0.95
    """Of the intervals."""
    quick: Mapping[str, Any] = field(default_factory=dict)
    """With `--quick`: further changes to the recipe."""
    quick_seeds: int = 3
    """With `--quick`: runs of each setting."""

    def __post_init__(self) -> None:
        good = bool(self.name) and self.name[0].isalnum() and all(c.isalnum() or c in "-_." for c in self.name)
        require(
            good and self.name.isascii(), "name", "use letters, digits, `-`, `_` and `.` only, and start with a letter or digit"
        )
        for name in ("num_seeds", "quick_seeds"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require(self.tolerance >= 0, "tolerance", "must not be negative")
        require(0 < self.confidence < 1, "confidence", "must be between 0 and 1")
        for place, axis in enumerate(self.vary):
            require(bool(axis.labels), f"vary[{place}]", "a range has no values to go through: give `values` or `options`")

    def made_quick(self) -> QualitySpec:
        """The same study in its small size, under a name of its own."""
        return dataclasses.replace(
            self, name=f"{self.name}-quick", set={**self.set, **self.quick}, num_seeds=self.quick_seeds, quick={}
        )


def default_axes(run: RunSpec) -> tuple[AxisSpec, ...]:
    """What is worth a look in any recipe."""
    batch = run.train.batch_size
    return (
        AxisSpec(name="batch size", keys=("train.batch_size",), values=(batch * 2, batch * 8)),
        AxisSpec(name="trainers", keys=("run.processes",), values=(2,)),
        AxisSpec(name="arithmetic", keys=("train.precision",), values=("bf16",)),
        AxisSpec(name="rows", keys=("model.row_format",), values=("bf16", "fp16")),
        AxisSpec(name="hash size, times", keys=("scale",), values=(run.scale / 2, run.scale / 8)),
    )


def load_quality(name_or_path: str, *, vary: Iterable[AxisSpec] = ()) -> QualitySpec:
    """A study by path or shipped name; or one around the recipe of a run, by path or shipped name."""
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
