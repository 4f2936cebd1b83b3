"""One axis of a study: keys of a recipe, and the values that they take."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rowstead.spec.errors import RowsteadError, SpecError, require
from rowstead.spec.parse import override, read_text, to_plain

RUN_KEYS = ("run.processes", "run.fleet")
"""What a run is started with, rather than its recipe: processes of this machine, or the roles of a fleet."""
PLAN_KEYS = (
    "plan.place",
    "plan.batch_size",
    "plan.num_devices",
    "plan.num_trainers",
    "plan.num_sparse_servers",
    "plan.num_dense_servers",
    "plan.in_flight",
    "plan.samples_per_s",
)
"""What only predictions look at."""


@dataclass(frozen=True, kw_only=True)
class AxisSpec:
    """One axis: `keys` with `values` or with a range, or `options` that set several keys each.

    Besides the keys of a recipe there are `run.processes`, `run.fleet`, and for predictions alone `plan.place` and its like.
    """

    name: str = ""
    """What pictures call it; the first key when left out."""
    keys: tuple[str, ...] = ()
    """Dotted keys that get the value, all of them the same."""
    values: tuple[Any, ...] = ()
    """The values, one after the other."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Instead of keys and values: by name of the option, the keys that it sets and their values."""
    low: float | None = None
    """Instead of values: the least of a range, for what draws from it."""
    high: float | None = None
    """The greatest of the range."""
    log: bool = False
    """Draw evenly over the logarithm of the range."""
    whole: bool = False
    """Draw whole numbers."""

    def __post_init__(self) -> None:
        has_range = self.low is not None or self.high is not None
        given = [bool(self.values), bool(self.options), has_range]
        require(sum(given) == 1, "", "give one of `values`, `options`, and `low` with `high`")
        if self.options:
            require(not self.keys, "keys", "options name their own keys: leave it out")
            require(bool(self.name), "name", "an axis with options needs a name")
        else:
            require(bool(self.keys), "keys", "name at least one key of the recipe")
        if has_range:
            low, high = self.low, self.high
            both = low is not None and high is not None and -math.inf < low < high < math.inf
            require(both, "low", f"give `low` and `high`, with low < high, got {low} and {high}")
            require(not self.log or (low is not None and low > 0), "low", "must be above 0 with `log`")
        for key in self.all_keys:
            reserved = key.split(".")[0] in ("run", "plan")
            require(
                not reserved or key in RUN_KEYS + PLAN_KEYS, "keys", f"no `{key}`: known are {', '.join(RUN_KEYS + PLAN_KEYS)}"
            )

    @property
    def title(self) -> str:
        return self.name or self.keys[0]

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Every key that some value of the axis sets."""
        return self.keys or tuple(dict.fromkeys(key for option in self.options.values() for key in option))

    @property
    def labels(self) -> tuple[Any, ...]:
        """Its values as pictures show them; none for a range."""
        return tuple(self.options) or self.values

    def settings(self, label: Any) -> dict[str, Any]:
        """The keys that one of its values sets."""
        if self.options:
            return dict(self.options[label])
        return dict.fromkeys(self.keys, label)


def axis_from(text: str) -> AxisSpec:
    """An axis as the command line has it: `train.batch_size=256,512`, or `model.top=[[64], [128, 64]]`."""
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


def settings_from(assignments: Iterable[str]) -> dict[str, Any]:
    """`key.path=value` of the command line as keys and values, read as YAML."""
    found = {}
    for text in assignments:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise RowsteadError(f"cannot read `{text}`: write it as key.path=value")
        found[key.strip()] = read_text(value, what=f"the value in `{text}`")
    return found


def with_settings(plain: Any, settings: Mapping[str, Any]) -> Any:
    """A plain recipe with keys set to values; `run.` and `plan.` keys are not the recipe's."""
    own = {key: value for key, value in settings.items() if key.split(".")[0] not in ("run", "plan")}
    return override(plain, [f"{key}={json.dumps(to_plain(value), ensure_ascii=False)}" for key, value in own.items()])


def check_names(axes: Iterable[AxisSpec], where: str) -> None:
    """Refuse two axes of one name, and two that set the same key."""
    titles: list[str] = []
    keys: list[str] = []
    for place, axis in enumerate(axes):
        require(axis.title not in titles, f"{where}[{place}]", f"another axis is called `{axis.title}`: give it a `name`")
        twice = next((key for key in axis.all_keys if key in keys), None)
        require(twice is None, f"{where}[{place}]", f"`{twice}` is set by another axis")
        titles.append(axis.title)
        keys += axis.all_keys
