"""NE and calibration of parts of an evaluated set, such as countries: one per value of a column."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_SEGMENTS = 20
"""Segments that are shown, those of the highest weight; the rest are one."""
MAX_COUNTED = 10_000
"""Values that are counted, 40 bytes each; one that first appears after so many others counts among the rest."""
OTHER = "(other)"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The measures of the examples with one value of a column."""

    name: str
    """The value, as the log has it."""
    weight: float
    """Total weight: the number of examples unless they are weighted."""
    mean_label: float
    mean_prediction: float
    log_loss: float
    ne: float | None
    """Log loss over the log loss of the segment's own mean label; None if all its labels are equal."""
    calibration: float | None
    """Mean prediction over mean label; None if no label is above 0."""


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The most frequent values of a column, in order of their weight, and what is left of the others."""

    column: str
    rows: tuple[Segment, ...]
    num_values: int
    """Values that were counted, those among the others included."""
    codes: tuple[int, ...] = ()
    """The raw 64-bit id of each row but that of the others."""

    def with_names(self, names: Mapping[int, str]) -> Segments:
        """The same with the values' names, as far as they are known."""
        named = [
            dataclasses.replace(row, name=names.get(code, row.name)) for code, row in zip(self.codes, self.rows, strict=False)
        ]
        return dataclasses.replace(self, rows=(*named, *self.rows[len(named) :]))

    def figures(self) -> dict[str, float]:
        """NE and calibration of each row, such as `ne(country=FR)`."""
        named = {f"({self.column}={row.name})": row for row in self.rows}
        found = {f"{key}{name}": getattr(row, key) for name, row in named.items() for key in ("ne", "calibration")}
        return {key: value for key, value in found.items() if value is not None}

    def to_plain(self) -> dict[str, Any]:
        """As an event has it."""
        rows = [{key: value for key, value in vars(row).items() if value is not None} for row in self.rows]
        return {"column": self.column, "num_values": self.num_values, "rows": rows}


class SegmentSums:
    """Sums by the value of a column, added batch by batch, in bounded memory."""

    def __init__(self, max_counted: int = MAX_COUNTED) -> None:
        self._max_counted = max_counted
        self._codes = np.empty(0, np.int64)
        """The values so far, sorted."""
        self._sums = np.zeros((1, 4))
        """[values + 1, 4]: weight, label, prediction and log loss of each value; the last row is that of the others."""

    def add(self, codes: NDArray[np.int64], weight: Floats, label: Floats, prediction: Floats, log_loss: Floats) -> None:
        """Add a batch [B]; all but the codes are sums already, that is, weighted."""
        distinct, first, index = np.unique(codes, return_index=True, return_inverse=True)
        new = np.flatnonzero(~np.isin(distinct, self._codes, assume_unique=True))
        free = self._max_counted - len(self._codes)
        new = distinct[new[np.argsort(first[new], kind="stable")[:free]]]
        if len(new):
            merged = np.sort(np.concatenate([self._codes, new]))
            sums = np.zeros((len(merged) + 1, 4))
            sums[np.append(np.searchsorted(merged, self._codes), len(merged))] = self._sums
            self._codes, self._sums = merged, sums
        at = np.searchsorted(self._codes, distinct)
        is_known = np.isin(distinct, self._codes, assume_unique=True)
        row = np.where(is_known, at, len(self._codes))[index]
        for column, values in enumerate((weight, label, prediction, log_loss)):
            self._sums[:, column] += np.bincount(row, weights=values, minlength=len(self._sums))

    def measure(self, column: str, max_rows: int = MAX_SEGMENTS) -> Segments | None:
        """The segments so far, named by their ids; None if there are none."""
        counted = np.flatnonzero(self._sums[:-1, 0] > 0)
        shown = counted[np.lexsort((self._codes[counted], -self._sums[counted, 0]))]
        if len(shown) > max_rows:
            shown = shown[: max_rows - 1]
        rest = np.delete(self._sums, shown, axis=0).sum(axis=0)
        rows = [_segment(str(self._codes[i]), self._sums[i]) for i in shown]
        rows += [_segment(OTHER, rest)] if rest[0] > 0 else []
        codes = tuple(self._codes[shown].tolist())
        return Segments(column=column, rows=tuple(rows), num_values=len(counted), codes=codes) if rows else None


def _segment(name: str, sums: Floats) -> Segment:
    weight, label, prediction, log_loss = sums.tolist()
    mean = label / weight
    base = -(mean * np.log(mean) + (1 - mean) * np.log1p(-mean)) if 0 < mean < 1 else 0.0
    return Segment(
        name=name,
        weight=weight,
        mean_label=mean,
        mean_prediction=prediction / weight,
        log_loss=log_loss / weight,
        ne=float(log_loss / weight / base) if base > 0 else None,
        calibration=prediction / label if label > 0 else None,
    )
