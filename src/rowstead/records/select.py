"""Filtering, sorting, comparing and exporting the entries of a store."""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rowstead.records.files import is_figure
from rowstead.records.run_folder import RunFolder
from rowstead.records.store import StoreEntry
from rowstead.spec.errors import RowsteadError, did_you_mean
from rowstead.spec.parse import to_plain

_CONDITION = re.compile(r"^\s*([^<>=!~]+?)\s*(<=|>=|!=|=|<|>|~)\s*(.*?)\s*$", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One condition, such as `ne<0.8`, `source=sweep`, `train.batch_size>=512`, `machine.cpu~xeon`."""

    key: str
    order: str
    wanted: str

    def holds(self, entry: StoreEntry) -> bool:
        """Whether an entry matches; one without the key does only for `!=`."""
        value = value_of(entry, self.key)
        if value is None:
            return self.order == "!="
        if self.order == "~":
            return self.wanted.lower() in _text(value).lower()
        number = _number(self.wanted)
        if self.order in ("=", "!="):
            same = value == number if number is not None and is_figure(value) else _text(value) == self.wanted
            return same == (self.order == "=")
        return number is not None and is_figure(value) and _ORDERS[self.order](value, number)


def condition(text: str) -> Condition:
    """Parse a condition of the command line."""
    found = _CONDITION.match(text)
    if found is None:
        raise RowsteadError(f"cannot read `--where {text}`: write key=value, with =, !=, <, <=, >, >= or ~ (contains)")
    key, order, wanted = found.groups()
    if order in _ORDERS and _number(wanted) is None:
        raise RowsteadError(f"cannot read `--where {text}`: `{order}` needs a number after it")
    return Condition(key=key, order=order, wanted=wanted)


def value_of(entry: StoreEntry, key: str) -> Any:
    """The value of a key: a field of the entry, a figure, an axis, a setting, or a `machine.` or `versions.` fact."""
    record = entry.record
    own = {
        "id": entry.id,
        "kind": record.kind,
        "name": record.name,
        "date": record.date,
        "source": entry.source,
        "study": entry.study,
        "point": entry.point,
        "seed": entry.seed,
        "failure": entry.failure,
        "folder": entry.folder,
        "digest": record.spec_digest,
    }
    if key in own:
        return own[key]
    for part, prefix in ((record.machine, "machine."), (record.versions, "versions.")):
        if key.startswith(prefix):
            return part.get(key[len(prefix) :])
    return next((values[key] for values in (record.figures, entry.axes, entry.settings) if key in values), None)


def selected(entries: Iterable[StoreEntry], conditions: Sequence[Condition]) -> list[StoreEntry]:
    """The entries for which every condition holds."""
    return [entry for entry in entries if all(one.holds(entry) for one in conditions)]


def ordered(entries: Iterable[StoreEntry], key: str) -> list[StoreEntry]:
    """Entries sorted by a key, ascending; numbers before text, and those without it last."""

    def sort_key(entry: StoreEntry) -> tuple[int, float, str]:
        value = value_of(entry, key)
        if value is None:
            return 2, 0.0, ""
        return (0, float(value), "") if is_figure(value) else (1, 0.0, _text(value))

    return sorted(entries, key=sort_key)


def find(entries: Sequence[StoreEntry], name: str) -> StoreEntry:
    """The entry with this id or prefix of one; `last` is the newest, and a run's folder stands for its run."""
    if not entries:
        raise RowsteadError("the store is empty: `rowstead train`, `sweep`, `tune` and `quality` fill it")
    if name == "last":
        return max(entries, key=lambda entry: (entry.record.date, entry.is_measured))
    for found in (
        [entry for entry in entries if entry.id == name],
        [entry for entry in entries if entry.is_measured and entry.folder is not None and Path(entry.folder) == Path(name)],
        [entry for entry in entries if name and entry.id.startswith(name)],
    ):
        if len({entry.id for entry in found}) > 1:
            raise RowsteadError(f"`{name}` could be {', '.join(f'`{entry.id}`' for entry in found[:5])}: give more of its id")
        if found:
            return found[0]
    raise RowsteadError(f"no record `{name}` in the store: {did_you_mean(name, [entry.id for entry in reversed(entries)])}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a comparison; None for a side without the key."""

    name: str
    one: Any
    other: Any

    @property
    def ratio(self) -> float | None:
        """`other / one` where both are numbers and `one` is not 0."""
        if not (is_figure(self.one) and is_figure(self.other)) or self.one == 0:
            return None
        return float(self.other) / float(self.one)


def compare(one: StoreEntry, other: StoreEntry) -> tuple[list[Row], list[Row]]:
    """Two entries side by side: differences in recipe, machine and versions, and all figures."""
    facts = _rows(_facts(one), _facts(other))
    return [row for row in facts if row.one != row.other], _rows(one.record.figures, other.record.figures)


def _rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Row]:
    return [Row(name=name, one=one.get(name), other=other.get(name)) for name in dict.fromkeys([*one, *other])]


def _facts(entry: StoreEntry) -> dict[str, Any]:
    record = entry.record
    facts: dict[str, Any] = {"kind": record.kind, "name": record.name, "study": entry.study, "seed": entry.seed}
    facts |= {f"recipe {key}": value for key, value in _recipe(entry).items()}
    facts |= {f"machine {key}": value for key, value in record.machine.items()}
    facts |= {f"version {key}": value for key, value in record.versions.items()}
    return facts


def _recipe(entry: StoreEntry) -> dict[str, Any]:
    """The whole recipe of a run whose folder exists, by key; for other entries what their study set."""
    if entry.folder is not None:
        with contextlib.suppress(RowsteadError, OSError):  # the folder may have been removed
            return flat(to_plain(RunFolder(Path(entry.folder)).read_spec()))
    return dict(entry.settings)


def flat(plain: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings and lists as dotted keys, as `--set` takes them."""
    if isinstance(plain, dict):
        items: Iterable[tuple[Any, Any]] = plain.items()
    elif isinstance(plain, (list, tuple)) and any(isinstance(item, (dict, list, tuple)) for item in plain):
        items = enumerate(plain)
    else:
        return {path: plain}
    return {key: value for name, item in items for key, value in flat(item, f"{path}.{name}" if path else str(name)).items()}


def export_parquet(entries: Sequence[StoreEntry], path: Path) -> int:
    """Write entries to a Parquet file, one row per entry, and return the number of columns.

    Figures are columns of numbers named `figures.…`; axes and settings are text in JSON, as their values may be of any kind.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {}
    for name in ("id", "kind", "name", "date", "source", "study", "point", "failure", "folder", "digest"):
        columns[name] = pa.array([_clean(value_of(entry, name)) for entry in entries], pa.string())
    columns["seed"] = pa.array([entry.seed for entry in entries], pa.int64())
    for part in ("figures", "axes", "settings", "machine", "versions"):
        of_entries = [getattr(entry, part, None) or getattr(entry.record, part, {}) for entry in entries]
        for key in sorted({key for values in of_entries for key in values}):
            values = [values.get(key) for values in of_entries]
            if part == "figures":
                array = pa.array([None if value is None else float(value) for value in values], pa.float64())
            else:
                as_json = part in ("axes", "settings")
                texts = [None if v is None else _clean(json.dumps(v) if as_json else str(v)) for v in values]
                array = pa.array(texts, pa.string())
            columns[f"{part}.{_clean(key)}"] = array
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, write_page_checksum=True)
    return len(columns)


def _clean(text: str | None) -> str | None:
    """Text without unpaired surrogates, which UTF-8 cannot encode."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
