"""One axis of a study: recipe keys and the values they take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rowstead.spec.bounds import MAX_POINTS
from rowstead.spec.errors import RowsteadError, SpecError, require
from rowstead.spec.parse import assign
from rowstead.spec.yaml_text import read_text

RUN_KEYS = ("run.processes", "run.fleet")
"""Launch settings outside the recipe: processes on this machine, or the roles of a fleet."""
PLAN_KEYS = (
    "plan.placement",
    "plan.batch_size",
    "plan.num_devices",
    "plan.num_trainers",
    "plan.num_sparse_servers",
    "plan.num_dense_servers",
    "plan.in_flight",
    "plan.samples_per_s",
)
"""Keys that only affect predictions."""


@dataclass(frozen=True, kw_only=True)
class AxisSpec:
    """One axis: `keys` with `values` or a range, or `options` that set several keys each.

    Besides recipe keys, `run.processes` and `run.fleet` are allowed, and `plan.…` keys, which only affect predictions.
    """

    name: str = ""
    """The label in charts. Default: the first key."""
    keys: tuple[str, ...] = ()
    """Dotted keys, all set to the same value."""
    values: tuple[Any, ...] = ()
    """The values, in order."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Instead of keys and values: the settings of each named option."""
    low: float | None = None
    """Instead of values: the lower bound of a range to sample from."""
    high: float | None = None
    """The upper bound of the range."""
    log: bool = False
    """Sample uniformly on a log scale."""
    whole: bool = False
    """Sample integers."""

    def __post_init__(self) -> None:
        has_range = self.low is not None or self.high is not None
        given = [bool(self.values), bool(self.options), has_range]
        require(sum(given) == 1, "", "set exactly one of `values`, `options`, or `low` with `high`")
        if self.options:
            require(not self.keys, "keys", "not allowed with `options`, which name their own keys")
            require(bool(self.name), "name", "an axis with options needs a name")
        else:
            require(bool(self.keys), "keys", "name at least one recipe key")
        if has_range:
            low, high = self.low, self.high
            both = low is not None and high is not None and -math.inf < low < high < math.inf
            require(both, "low", f"`low` must be below `high` and both finite, got {low} and {high}")
            require(not self.log or (low is not None and low > 0), "low", "must be above 0 with `log`")
        for key in self.all_keys:
            reserved = key.split(".")[0] in ("run", "plan")
            require(
                not reserved or key in RUN_KEYS + PLAN_KEYS,
                "keys",
                f"unknown key `{key}`: use one of {', '.join(RUN_KEYS + PLAN_KEYS)}",
            )

    @property
    def title(self) -> str:
        return self.name or self.keys[0]

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Every key that any value of the axis sets."""
        return self.keys or tuple(dict.fromkeys(key for option in self.options.values() for key in option))

    @property
    def labels(self) -> tuple[Any, ...]:
        """The values as charts show them; empty for a range."""
        return tuple(self.options) or self.values

    def settings(self, label: Any) -> dict[str, Any]:
        """Return the keys and values that one label sets."""
        if self.options:
            return dict(self.options[label])
        return dict.fromkeys(self.keys, label)


def axis_from(text: str) -> AxisSpec:
    """Parse an axis of the command line: `train.batch_size=256,512`, or `model.top=[[64], [128, 64]]`."""
    key, separator, values = text.partition("=")
    if not separator or not key.strip() or not values.strip():
        raise RowsteadError(f"cannot read `{text}`: write it as key.path=value,value")
    given = values.strip()
    try:
        plain = read_text(given if given.startswith("[") else f"[{given}]", what=f"`{text}`")
    except SpecError as error:
        raise RowsteadError(str(error)) from None
    if not isinstance(plain, list) or not plain:
        raise RowsteadError(f"cannot read `{text}`: write it as key.path=value,value")
    return AxisSpec(keys=(key.strip(),), values=tuple(plain))


def with_settings(plain: Any, settings: Mapping[str, Any]) -> Any:
    """Return a plain recipe with settings applied; `run.` and `plan.` keys are skipped, as they are not part of a recipe."""
    return assign(plain, {key: value for key, value in settings.items() if key.split(".")[0] not in ("run", "plan")})


def check_combinations(axes: Iterable[AxisSpec], where: str) -> None:
    """Raise unless the combinations of all values are few enough to list."""
    num_points = math.prod(max(1, len(axis.labels)) for axis in axes)
    require(
        num_points <= MAX_POINTS, where, f"has {num_points:,} combinations of values, and at most {MAX_POINTS:,} are allowed"
    )


def check_names(axes: Iterable[AxisSpec], where: str) -> None:
    """Refuse duplicate axis names, and keys set by more than one axis."""
    titles: list[str] = []
    keys: list[str] = []
    for index, axis in enumerate(axes):
        require(axis.title not in titles, f"{where}[{index}]", f"another axis is called `{axis.title}`: give it a `name`")
        duplicate = next((key for key in axis.all_keys if key in keys), None)
        require(duplicate is None, f"{where}[{index}]", f"`{duplicate}` is set by another axis")
        titles.append(axis.title)
        keys += axis.all_keys
