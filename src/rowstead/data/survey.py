"""What each column of an unknown log can be: `survey` looks at a sample of its rows, `refine` at statistics of all of them.

Both are heuristics for a first recipe: what they choose is written down with the reason, to be changed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowstead.data.column_values import DAY_S, id_type, is_list, is_quantity, is_text, is_time, to_bags, to_floats
from rowstead.data.file_log import open_file_log, read_schema
from rowstead.spec.data import FileLogSpec
from rowstead.spec.errors import DataError, did_you_mean
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec
from rowstead.spec.statistics import QUANTILES, DenseStatistics, LogStatistics, SparseStatistics

SAMPLE_ROWS = 100_000
"""Rows that `survey` looks at, spread over the log."""
FEW_VALUES, MANY_VALUES = 16, 1000
"""Whole numbers with fewer or more distinct values than these are ids, unless their name says otherwise."""
MAX_NAME = 200
"""Characters of the name of a column that a recipe uses; YAML has no keys above 1,024."""
LEAK = 0.999
"""A column that ranks the labels with an AUC above this was made from them."""
_LEAST_ROWS = 50
"""In a shorter sample nothing is said of columns with another value in every row."""
_NUMBER_NAME = re.compile(
    r"(^|_)(n|num|count|counts|price|cost|amount|age|duration|seconds|secs|ms|score|rate|len|length|size|total|sum|avg|mean|min|max"
    r"|days|hours|views|impressions|clicks|bid|budget|distance|width|height|rank)(_|$)"
)
_ID_NAME = re.compile(r"(^|_)(id|ids|uid|uuid|gid|code|zip|user|item|ad|advertiser|campaign|category|cat|type|kind|class)(_|$)")

Use = Literal["label", "dense", "sparse", "time", "left out"]
Feature = DenseFeatureSpec | SparseFeatureSpec


@dataclass(frozen=True, kw_only=True)
class ColumnPlan:
    """What a recipe makes of a column."""

    name: str
    type: pa.DataType
    use: Use
    why: str = ""
    features: tuple[Feature, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The columns of a log."""

    num_rows: int
    num_sampled: int
    label: str
    columns: tuple[ColumnPlan, ...]
    path_columns: frozenset[str] = frozenset()
    """Columns that the paths of the files give, not the files themselves."""

    @property
    def time_column(self) -> str | None:
        """The column by whose time the log is split; None if there is none."""
        return next((plan.name for plan in self.columns if plan.use == "time"), None)

    @property
    def features(self) -> FeaturesSpec:
        found = [feature for plan in self.columns for feature in plan.features]
        if not found:
            reasons = "; ".join(f"`{plan.name}`: {plan.why}" for plan in self.columns if plan.use == "left out")
            raise DataError(f"no column of the log can be a feature: {reasons or 'it has no other than the label'}")
        return FeaturesSpec(
            dense=tuple(f for f in found if isinstance(f, DenseFeatureSpec)),
            sparse=tuple(f for f in found if isinstance(f, SparseFeatureSpec)),
        )


def survey(spec: FileLogSpec) -> Survey:
    """Look at a sample of a log's rows."""
    schema, label = read_schema(spec), spec.label
    if label not in schema.names:
        raise DataError(
            f"the log has no column `{label}`: {did_you_mean(label, schema.names)} Name its label column with --label"
        )
    if len(label) > MAX_NAME:
        raise DataError(f"the name of the label column has more than {MAX_NAME} characters; rename it")
    log = open_file_log(spec, FeaturesSpec(dense=(DenseFeatureSpec(name=label),)), split="all", with_labels=False)
    sample = pa.concat_tables(log.tables(schema.names, SAMPLE_ROWS)) if len(set(schema.names)) == len(schema.names) else None
    if sample is None:
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise DataError(f"two columns are named `{twice}`; rename one of them")
    labels = to_floats(sample.column(label), label)
    _check_labels(labels, label)
    plans: list[ColumnPlan] = []
    for field in sample.schema:
        plan = (
            ColumnPlan(name=field.name, type=field.type, use="label") if field.name == label else _plan(sample, field, labels)
        )
        has_time = any(other.use == "time" for other in plans)
        plans.append(dataclasses.replace(plan, use="sparse") if plan.use == "time" and has_time else plan)
    return Survey(
        num_rows=log.num_samples,
        num_sampled=sample.num_rows,
        label=label,
        columns=tuple(plans),
        path_columns=frozenset(log.constants(0)),
    )


def _check_labels(labels: NDArray[np.float32], name: str) -> None:
    known = labels[~np.isnan(labels)]
    if not len(known):
        raise DataError(f"the label column `{name}` is empty")
    low, high = float(known.min()), float(known.max())
    if low < 0 or high > 1:
        raise DataError(
            f"the label column `{name}` has values from {low:g} to {high:g}; labels must be between 0 and 1, such as clicked or not"
        )
    if low == high:
        raise DataError(f"the label column `{name}` is {low:g} in every row that was looked at: there is nothing to learn")


def _plan(sample: pa.Table, field: pa.Field, labels: NDArray[np.float32]) -> ColumnPlan:
    """What to make of one column."""

    def left_out(why: str) -> ColumnPlan:
        return ColumnPlan(name=name, type=kind, use="left out", why=why)

    def use(use: Use, *features: Feature, why: str = "") -> ColumnPlan:
        return ColumnPlan(name=name, type=kind, use=use, why=why, features=features)

    name, kind, column = field.name, field.type, sample.column(field.name)
    value = id_type(kind)
    if not name:
        return left_out("it has no name")
    if "{i}" in name:
        return left_out("`{i}` in a name stands for a number in recipes; rename it")
    if len(name) > MAX_NAME:
        return left_out(f"its name has more than {MAX_NAME} characters")
    if not (is_quantity(value) or is_text(value)):
        return left_out(f"type {kind} is not supported")
    if column.null_count == len(column):
        return left_out("it is empty")
    if is_list(kind):
        return _plan_lists(name, kind, column)
    codes = _codes(column)
    distinct = len(np.unique(codes))
    if distinct == 1:
        return left_out("it has the same value in every row")
    if _tells_labels(column, codes, labels):
        return left_out("it says what the label is")
    num_known = len(column) - column.null_count
    known = len(np.unique(codes[np.asarray(column.is_valid())]))
    if is_time(kind):
        parts: tuple[Literal["hour", "weekday"], ...] = ("weekday",) if _is_whole_days(column) else ("hour", "weekday")
        features = [
            SparseFeatureSpec(name=f"{name}_{p}", column=name, part=p, num_rows={"hour": 24, "weekday": 7}[p], hash="none")
            for p in parts
        ]
        return use("time", *features)
    sparse = SparseFeatureSpec(name=name, num_rows=1)
    dense = DenseFeatureSpec(name=name, missing="mean")
    if is_text(value):
        if num_known >= _LEAST_ROWS and known > 0.9 * num_known:
            return left_out("nearly every row has a value of its own")
        return use("sparse", sparse)
    if pa.types.is_boolean(value):
        return use("sparse", sparse)
    numbers = to_floats(column, name).astype(np.float64)
    whole = numbers[np.isfinite(numbers)]
    if pa.types.is_floating(value) or pa.types.is_decimal(value):
        if not (whole == np.floor(whole)).all() or np.isinf(numbers).any():
            return use("dense", dense)
        if not pa.types.is_integer(value) and not _fits_ids(column, name):
            return use("dense", dense)
    if num_known >= _LEAST_ROWS and known == num_known:
        return left_out("every row has a value of its own")
    lower = name.lower()
    is_number = bool(_NUMBER_NAME.search(lower)) and not _ID_NAME.search(lower)
    if is_number or (FEW_VALUES <= known <= MANY_VALUES and not _ID_NAME.search(lower)):
        return use("dense", dense, why="whole numbers, taken for a quantity; if they are ids, list it under sparse")
    return use("sparse", sparse, why="whole numbers, taken for ids; if they are a quantity, list it under dense")


def _fits_ids(column: pa.ChunkedArray, name: str) -> bool:
    try:
        to_bags(column, name)
    except DataError:
        return False
    return True


def _plan_lists(name: str, kind: pa.DataType, column: pa.ChunkedArray) -> ColumnPlan:
    value = kind.value_type
    if not (pa.types.is_floating(value) or pa.types.is_decimal(value)):
        return ColumnPlan(
            name=name, type=kind, use="sparse", features=(SparseFeatureSpec(name=name, num_rows=1, pooling="mean"),)
        )
    lengths = {len(row) for row in column.to_pylist() if row is not None}
    if len(lengths) != 1 or 0 in lengths:
        why = "its lists of numbers differ in length"
        return ColumnPlan(name=name, type=kind, use="left out", why=why)
    feature = DenseFeatureSpec(name=name, length=lengths.pop(), missing="mean")
    return ColumnPlan(name=name, type=kind, use="dense", features=(feature,))


def _codes(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """A number for each distinct value of a column [R], -1 where it is null."""
    encoded = (
        column.combine_chunks().dictionary_encode() if not pa.types.is_dictionary(column.type) else column.combine_chunks()
    )
    array = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
    return np.asarray(array.indices.fill_null(-1), np.int64)


def _is_whole_days(column: pa.ChunkedArray) -> bool:
    if pa.types.is_date(column.type):
        return True
    seconds = to_bags(column, "")[0]
    return bool((seconds % DAY_S == 0).all())


def _tells_labels(column: pa.ChunkedArray, codes: NDArray[np.int64], labels: NDArray[np.float32]) -> bool:
    """Whether a column was made from the label: each of few values has one label, only labelled rows have it, or it ranks them."""
    known = ~np.isnan(labels)
    codes, labels = codes[known], labels[known]
    for groups in (codes, (codes >= 0).astype(np.int64)):
        _, index = np.unique(groups, return_inverse=True)
        num = int(index.max()) + 1 if len(index) else 0
        if 1 < num <= max(2, len(labels) // 20):
            count = np.bincount(index)
            mean = np.bincount(index, labels) / count
            spread = np.bincount(index, (labels - mean[index]) ** 2)
            if spread.sum() <= (1 - LEAK) * ((labels - labels.mean()) ** 2).sum():
                return True
    if is_text(id_type(column.type)):
        return False
    values = to_floats(column, "")[known].astype(np.float64)
    present = np.isfinite(values)
    return bool(present.sum() > _LEAST_ROWS) and abs(_auc(values[present], labels[present]) - 0.5) > LEAK - 0.5


def _auc(scores: NDArray[np.float64], labels: NDArray[np.float32]) -> float:
    positive = labels > 0.5
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return 0.5
    _, index, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[index]
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def refine(found: Survey, statistics: LogStatistics) -> Survey:
    """The same columns with hash sizes, truncation and transforms from statistics of the log."""
    dense = {one.name: one for one in statistics.dense}
    sparse = {one.name: one for one in statistics.sparse}

    def better(feature: Feature) -> Feature:
        if isinstance(feature, DenseFeatureSpec):
            names = [feature.name] if feature.length is None else [f"{feature.name}[{i}]" for i in range(feature.length)]
            return _transform(feature, [dense[name] for name in names])
        return feature if feature.part is not None else _size(feature, sparse[feature.name])

    plans = [dataclasses.replace(plan, features=tuple(map(better, plan.features))) for plan in found.columns]
    return dataclasses.replace(found, columns=tuple(plans))


def _transform(feature: DenseFeatureSpec, statistics: Sequence[DenseStatistics]) -> DenseFeatureSpec:
    """Clip what is infinite, take the logarithm of heavy tails, standardise what is not near 0 and 1."""
    changes: dict[str, object] = {}
    known = [one for one in statistics if one.mean is not None and one.quantiles]
    if any(one.infinite_share for one in known):
        low, high = min(float(one.min or 0) for one in known), max(float(one.max or 0) for one in known)
        changes["clip"] = (low, high if high > low else low + 1)
    if any(is_heavy_tailed(one) for one in known):
        changes |= {"log": True, "standardise": True}
    if any(not (abs(one.mean or 0) <= 1 and 0.3 <= (one.std or 0) <= 2) for one in known):
        changes["standardise"] = True
    return dataclasses.replace(feature, **changes)  # type: ignore[arg-type]


def is_heavy_tailed(one: DenseStatistics) -> bool:
    """Whether the distance from the median to the 99 % quantile is many times that to the 1 % quantile, or many times the median."""
    low, middle, high = (one.quantiles[QUANTILES.index(q)] for q in (0.01, 0.5, 0.99))
    above, below = high - middle, middle - low
    return (one.min or 0) >= 0 and high > 10 and above > 6 * max(below, 0.1 * abs(middle), 1e-6)


def _size(feature: SparseFeatureSpec, one: SparseStatistics) -> SparseFeatureSpec:
    changes: dict[str, object] = {"num_rows": choose_num_rows(one.num_distinct)}
    if one.length_max > 1:
        changes["max_ids"] = max(1, min(one.length_max, 2 * one.length_p99))
    return dataclasses.replace(feature, **changes)  # type: ignore[arg-type]


def choose_num_rows(num_distinct: int) -> int:
    """A hash size: ten rows for each of a few ids, so that few share one, down to two rows for each of many; two digits."""
    num_rows = max(100, num_distinct * min(10, max(2, round(1e6 / max(num_distinct, 1)))))
    digits = 10 ** max(0, math.floor(math.log10(num_rows)) - 1)
    return -(-num_rows // digits) * digits
