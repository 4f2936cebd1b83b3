"""Dense transforms (clip, log, missing, standardise), and the rule for which rows are bad."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from rowstead.data.block import RawBlock
from rowstead.records.files import is_figure
from rowstead.records.plain_files import shown
from rowstead.spec.errors import DataError
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec
from rowstead.spec.heads import HEADS, LABEL_RANGE, TaskSpec

Vector = NDArray[np.float32]
MAX_IDS = 1 << 20
"""Ids of one feature in one row that are used: a training step takes about 250 bytes for each. A feature's `max_ids` cuts off longer ones."""


@dataclass(frozen=True, kw_only=True)
class DenseTransforms:
    """The transforms of Fd dense features, applied in this order; every vector has one number per feature.

    y = clip(x, low, high); y = sign(y) * log(1 + |y|) where `log`; y = fill where x was NaN; y = (y - shift) * scale.
    Infinite bounds, a NaN fill, shift 0 and scale 1 change nothing.
    """

    names: tuple[str, ...]
    """The features, in the order of the batch."""
    low: Vector
    high: Vector
    log: NDArray[np.bool_]
    fill: Vector
    """Replaces a missing value, already clipped and logged; NaN where missing values are errors."""
    shift: Vector
    scale: Vector

    @functools.cached_property
    def is_identity(self) -> bool:
        """Whether `apply` changes nothing."""
        bounded = np.isfinite(self.low) | np.isfinite(self.high)
        return not (
            bounded.any() or self.log.any() or (~np.isnan(self.fill)).any() or self.shift.any() or (self.scale != 1).any()
        )

    def apply(self, dense: NDArray[np.float32], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Transform dense [R, Fd] into `out` or a new array; returns `dense` itself when there is nothing to do and no `out`."""
        if dense.shape[1] != len(self.names):
            raise DataError(f"got {dense.shape[1]} dense columns, but the model has {len(self.names)}")
        if self.is_identity and out is None:
            return dense
        out = np.empty_like(dense) if out is None else out
        _apply(dense, self.low, self.high, self.log, self.fill, self.shift, self.scale, out)
        return out

    def to_plain(self) -> dict[str, Any]:
        """JSON-able form: lists, null for an infinite bound and for no fill."""
        plain: dict[str, Any] = {"names": list(self.names), "log": self.log.tolist()}
        for name in ("low", "high", "fill", "shift", "scale"):
            plain[name] = [float(x) if np.isfinite(x) else None for x in getattr(self, name)]
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> DenseTransforms:
        """The inverse of `to_plain`."""
        nothing = {"low": -np.inf, "high": np.inf, "fill": np.nan}
        vectors = {
            name: np.array([nothing[name] if x is None else x for x in plain[name]], np.float32)
            for name in ("low", "high", "fill", "shift", "scale")
        }
        return cls(names=tuple(plain["names"]), log=np.array(plain["log"], np.bool_), **vectors)

    @classmethod
    def from_untrusted(cls, plain: Any, names: Sequence[str]) -> DenseTransforms:
        """As `from_plain`, for the transforms of these features from a file that somebody else may have written; a ValueError says what is wrong."""
        if not isinstance(plain, dict) or plain.get("names") != list(names):
            found = plain.get("names") if isinstance(plain, dict) else plain
            raise ValueError(f"`transforms.names` is {shown(found)}; the features are {shown(list(names))}")
        largest = float(np.finfo(np.float32).max)
        for key in ("low", "high", "fill", "shift", "scale", "log"):
            values = plain.get(key)
            if not isinstance(values, list) or len(values) != len(names):
                raise ValueError(
                    f"`transforms.{key}` is {shown(values)}; one value for each of {len(names)} features is needed"
                )
            for value in values:
                may_miss = value is None and key in ("low", "high", "fill")
                if not (isinstance(value, bool) if key == "log" else may_miss or (is_figure(value) and abs(value) <= largest)):
                    raise ValueError(f"`transforms.{key}` is {shown(value)}")
        return cls.from_plain(plain)

    @classmethod
    def learn(cls, features: FeaturesSpec, blocks: Iterable[RawBlock] = ()) -> DenseTransforms:
        """The transforms of `features`, with mean and standard deviation of the finite values of `blocks`.

        Reads no block when no feature needs statistics. A constant or absent column gets standard deviation 1.
        """
        specs = features.expanded_dense()
        low, high, log = _bounds_and_log(specs)
        mean, spread, count = np.zeros(len(specs)), np.zeros(len(specs)), np.zeros(len(specs), np.int64)
        for block in blocks if any(s.needs_statistics for s in specs) else ():
            accumulate_moments(_clip_and_log(block.dense, low, high, log), count, mean, spread)
        std = np.sqrt(spread / np.maximum(count, 1))
        # Rounding leaves a constant column with a spread of about 1e-16 of its mean, not exactly 0. A spread below the smallest
        # normal float32 counts as constant too, since its inverse would not be finite.
        std[(std <= 1e-12 * np.abs(mean)) | (std < np.finfo(np.float32).tiny)] = 1.0
        raw = [s.missing if isinstance(s.missing, (int, float)) else np.nan for s in specs]
        fill = _clip_and_log(np.array([raw], np.float32), low, high, log)[0]
        shift, scale = np.zeros_like(fill), np.ones_like(fill)
        for i, spec in enumerate(specs):
            if spec.missing == "mean":
                fill[i] = mean[i]
            if spec.standardise:
                shift[i], scale[i] = mean[i], 1.0 / std[i]
        return cls(names=tuple(s.name for s in specs), low=low, high=high, log=log, fill=fill, shift=shift, scale=scale)


@dataclass(frozen=True, kw_only=True)
class BadRows:
    """Rows that cannot be trained on, and the first of them."""

    mask: NDArray[np.bool_]
    """[R], true where the row is bad."""
    row: int
    """The first bad row."""
    problem: str
    """What is wrong with that row, and how to fix it."""


class RowRule:
    """Finds bad rows: a missing or infinite dense value, too many ids, a label out of range, a negative or non-finite weight.

    The labels of tasks may be missing.
    """

    def __init__(
        self,
        features: FeaturesSpec,
        *,
        label: str | None = None,
        weight: str | None = None,
        tasks: Sequence[TaskSpec] = (),
    ) -> None:
        specs = features.expanded_dense()
        self._columns = tuple(str(s.column) for s in specs)
        self._may_miss = np.array([s.missing is not None for s in specs], np.bool_)
        # After clipping, an infinite value is finite where its side has a finite bound.
        self._low, self._high, _ = _bounds_and_log(specs)
        self._weight = weight or "weight"
        self._may_miss_label = bool(tasks)
        self._labels = tuple((str(task.label), HEADS[task.loss].label_range) for task in tasks) or (
            (label or "label", LABEL_RANGE),
        )
        """The column and the smallest and largest label of each task."""
        sparse = features.expanded_sparse()
        self._unlimited = tuple((i, str(s.column)) for i, s in enumerate(sparse) if (s.max_ids or MAX_IDS + 1) > MAX_IDS)
        """Sparse features that `max_ids` does not cut off in time, and their columns."""

    def check(self, block: RawBlock, problems: Mapping[int, str] = MappingProxyType({})) -> BadRows | None:
        """The bad rows of `block`; None if there are none. `problems` are of rows that could not be read."""
        mask = np.zeros(block.num_rows, np.bool_)
        mask[list(problems)] = True
        _mark_bad(block.dense, self._may_miss, self._low, self._high, mask)
        if block.labels is not None:
            mask |= ~self._has_good_labels(block.labels).all(axis=1)
        if block.weights is not None:
            mask |= ~((block.weights >= 0) & np.isfinite(block.weights))
        if block.true_p is not None:
            mask |= ~((block.true_p >= 0) & (block.true_p <= 1))
        for i, _ in self._unlimited:
            if len(block.ids[i]) > MAX_IDS:
                mask |= np.diff(block.offsets[i]) > MAX_IDS
        if not mask.any():
            return None
        row = int(mask.argmax())
        return BadRows(mask=mask, row=row, problem=problems.get(row) or self._explain(block, row))

    def _has_good_labels(self, labels: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Whether each label of labels [R] or [R, T] is in its range, [R, T]."""
        labels = labels.reshape(len(labels), len(self._labels))
        low, high = np.array([bounds for _, bounds in self._labels], np.float32).T
        good = (labels >= low) & (labels <= high)
        return good | np.isnan(labels) if self._may_miss_label else good

    def refuse(self, block: RawBlock) -> None:
        """Raise a DataError if a row of `block` is bad."""
        bad = self.check(block)
        if bad is not None:
            raise DataError(f"row {bad.row} (from 0): {bad.problem}")

    def _explain(self, block: RawBlock, row: int) -> str:
        """The first problem of a bad row."""
        for i, column in enumerate(self._columns):
            value = block.dense[row, i]
            if np.isnan(value) and not self._may_miss[i]:
                return f"dense column `{column}` has a missing value; set the feature's `missing` to a number or to `mean`"
            if np.isinf(np.clip(value, self._low[i], self._high[i])):
                return f"dense column `{column}` contains {value}; set the feature's `clip: [low, high]`"
        for i, column in self._unlimited:
            num_ids = int(block.offsets[i][row + 1] - block.offsets[i][row])
            if num_ids > MAX_IDS:
                limit = f"the limit for one row is {MAX_IDS:,}"
                return f"sparse column `{column}` has {num_ids:,} ids, and {limit}; set the feature's `max_ids`"
        good = None if block.labels is None else self._has_good_labels(block.labels[row : row + 1])[0]
        if block.labels is not None and good is not None and not good.all():
            column, bounds = self._labels[int(good.argmin())]
            value = block.labels[row] if block.labels.ndim == 1 else block.labels[row, int(good.argmin())]
            return f"label column `{column}` contains {value}; labels must be between {bounds[0]:g} and {bounds[1]:g}"
        if block.true_p is not None and not 0 <= block.true_p[row] <= 1:
            return f"column `true_p` contains {block.true_p[row]}; probabilities must be between 0 and 1"
        assert block.weights is not None
        return f"weight column `{self._weight}` contains {block.weights[row]}; weights must be finite and not negative"


def _bounds_and_log(specs: Sequence[DenseFeatureSpec]) -> tuple[Vector, Vector, NDArray[np.bool_]]:
    """`low`, `high` and `log` of the features [Fd]."""
    low, high = np.array([s.clip or (-np.inf, np.inf) for s in specs], np.float32).reshape(-1, 2).T.copy()
    return low, high, np.array([s.log for s in specs], np.bool_)


def _clip_and_log(dense: NDArray[np.float32], low: Vector, high: Vector, log: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Only the first two transforms, NaN unchanged: [R, Fd]."""
    out = np.empty_like(dense)
    _apply(dense, low, high, log, np.full_like(low, np.nan), np.zeros_like(low), np.ones_like(low), out)
    return out


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _apply(dense, low, high, log, fill, shift, scale, out):  # type: ignore[no-untyped-def]
    """Apply all transforms to dense [R, Fd], into out [R, Fd]; the other arguments are [Fd]."""
    num_rows, num_columns = dense.shape
    any_log = log.any()
    for r in range(num_rows):
        for c in range(num_columns):
            x = dense[r, c]
            # Comparisons with NaN are false, so NaN passes through.
            x = low[c] if x < low[c] else x
            out[r, c] = high[c] if x > high[c] else x
        if any_log:
            for c in range(num_columns):
                if log[c]:
                    x = out[r, c]
                    out[r, c] = np.copysign(np.float32(np.log1p(np.abs(np.float64(x)))), x)
        for c in range(num_columns):
            x = out[r, c]
            out[r, c] = ((fill[c] if x != x else x) - shift[c]) * scale[c]


@numba.njit(nogil=True, cache=True, boundscheck=False)
def accumulate_moments(values, count, mean, spread):  # type: ignore[no-untyped-def]
    """Update count, mean and sum of squared distances [Fd] by the finite values of [R, Fd] (Welford)."""
    num_rows, num_columns = values.shape
    for r in range(num_rows):
        for c in range(num_columns):
            x = np.float64(values[r, c])
            if np.isfinite(x):
                count[c] += 1
                distance = x - mean[c]
                mean[c] += distance / count[c]
                spread[c] += distance * (x - mean[c])


@numba.njit(nogil=True, cache=True, boundscheck=False)
def _mark_bad(dense, may_miss, low, high, mask):  # type: ignore[no-untyped-def]
    """Set mask [R] where dense [R, Fd] has NaN in a column that may not miss, or an infinity that no bound [Fd] catches."""
    num_rows, num_columns = dense.shape
    largest = np.float32(3.4028235e38)
    for r in range(num_rows):
        suspects = 0
        for c in range(num_columns):
            suspects += not (abs(dense[r, c]) <= largest)
        if suspects:
            for c in range(num_columns):
                x = dense[r, c]
                if x != x:
                    mask[r] |= not may_miss[c]
                else:
                    mask[r] |= not (abs(min(max(x, low[c]), high[c])) <= largest)
