"""A quality study: the effect of settings on NE, one at a time, over several seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from rowstead.spec.axis import AxisSpec
from rowstead.spec.bounds import MAX_ENTRIES, AtLeastOne, InsideZeroToOne, NotNegative, up_to
from rowstead.spec.errors import require
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.spec.study import SWEEPS, StudySpec, load_study


@dataclass(frozen=True, kw_only=True)
class QualitySpec(StudySpec):
    """A recipe as the baseline, and axes to vary one at a time; each run is compared with the baseline of the same seed."""

    vary: tuple[AxisSpec, ...] = ()
    """The axes. Default: batch size, trainers, arithmetic precision, row format, and hash size."""
    num_seeds: Annotated[AtLeastOne, up_to(MAX_ENTRIES)] = 5
    """Runs per setting."""
    first_seed: int = 1
    """The first of consecutive seeds; a seed decides the initial weights, and a synthetic log."""
    tolerance: NotNegative = 0.001
    """A larger relative increase of NE is a regression."""
    confidence: InsideZeroToOne = 0.95
    """Confidence level of the intervals."""
    quick: Mapping[str, Any] = field(default_factory=dict)
    """With `--quick`: further recipe changes."""
    quick_seeds: Annotated[AtLeastOne, up_to(MAX_ENTRIES)] = 3
    """With `--quick`: runs per setting."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
    spec = load_study(QualitySpec, name_or_path, "quality", SWEEPS / "quality")
    return dataclasses.replace(spec, vary=tuple(vary) or spec.vary or default_axes(load_recipe(spec.recipe)))
