"""Which columns of a log a model reads, how each becomes numbers or rows, and the tables the rows are in."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from rowstead.spec.errors import SpecError, did_you_mean, require

Hash = Literal["mix", "modulo", "none"]
Pooling = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class DenseFeatureSpec:
    """One scalar column; the transforms apply in the order clip, log, missing, standardise."""

    name: str
    """Name of the feature; with `repeat`, `{i}` in it becomes 0, 1, 2 …"""
    column: str | None = None
    """Column of the log; the feature's name when left out."""
    repeat: int = 1
    """Stands for this many features that differ only in `{i}`."""
    start: int = 0
    """First value of `{i}`."""
    clip: tuple[float, ...] | None = None
    """`[low, high]`: values outside are set to the nearer bound."""
    log: bool = False
    """Take sign(x) * log(1 + |x|)."""
    missing: float | Literal["mean"] | None = None
    """What stands for a missing value (null or NaN), in the log's own units, or `mean` for the training split's mean. Without it a missing value is an error."""
    standardise: bool = False
    """Subtract the training split's mean and divide by its standard deviation."""

    def __post_init__(self) -> None:
        _check_repeat(self.name, self.repeat)
        if self.clip is not None:
            require(len(self.clip) == 2 and self.clip[0] < self.clip[1], "clip", "must be [low, high] with low < high")
        if isinstance(self.missing, (int, float)):
            require(math.isfinite(self.missing), "missing", f"must be finite, got {self.missing}")

    @property
    def needs_statistics(self) -> bool:
        return self.standardise or self.missing == "mean"


@dataclass(frozen=True, kw_only=True)
class SparseFeatureSpec:
    """One column of ids (integer, text, or a list of either); each id is hashed to a row, the rows are pooled."""

    name: str
    """Name of the feature; with `repeat`, `{i}` in it becomes 0, 1, 2 …"""
    column: str | None = None
    """Column of the log; the feature's name when left out."""
    repeat: int = 1
    """Stands for this many features that differ only in `{i}`."""
    start: int = 0
    """First value of `{i}`."""
    num_rows: int | None = None
    """Hash size: rows of the feature's own table. Leave out when `table` names a shared one."""
    width: int | None = None
    """Width of the feature's own table; `model.width` when left out."""
    table: str | None = None
    """Name of a table under `features.tables`, for features that share one."""
    pooling: Pooling = "sum"
    """How the rows of one example are joined."""
    max_ids: int | None = None
    """Truncation size: only the first so many ids of an example are used."""
    hash: Hash = "mix"
    """How an id becomes a row: `mix` (a stable 64-bit hash, then modulo), `modulo`, or `none` (ids are rows already)."""

    def __post_init__(self) -> None:
        _check_repeat(self.name, self.repeat)
        if self.table is None:
            require(self.num_rows is not None, "num_rows", "give a hash size here, or name a shared `table`")
        else:
            require(self.num_rows is None, "num_rows", "the shared table has its own num_rows: give only one of the two")
            require(self.width is None, "width", "the shared table has its own width: give only one of the two")
        require(self.num_rows is None or self.num_rows >= 1, "num_rows", f"must be at least 1, got {self.num_rows}")
        require(self.width is None or self.width >= 1, "width", f"must be at least 1, got {self.width}")
        require(self.max_ids is None or self.max_ids >= 1, "max_ids", f"must be at least 1, got {self.max_ids}")


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """An embedding table that several features may share."""

    name: str
    """Name by which features refer to it."""
    num_rows: int
    """Hash size."""
    width: int | None = None
    """Numbers in a row; `model.width` when left out."""

    def __post_init__(self) -> None:
        require(bool(self.name), "name", "must not be empty")
        require(self.num_rows >= 1, "num_rows", f"must be at least 1, got {self.num_rows}")
        require(self.width is None or self.width >= 1, "width", f"must be at least 1, got {self.width}")


@dataclass(frozen=True, kw_only=True)
class FeaturesSpec:
    """The model's selection from the log: columns that are not named here are never read."""

    dense: tuple[DenseFeatureSpec, ...] = ()
    """Scalar features."""
    sparse: tuple[SparseFeatureSpec, ...] = ()
    """Features of ids."""
    tables: tuple[TableSpec, ...] = ()
    """Tables that features share; a feature without `table` has one of its own, of the same name."""

    def __post_init__(self) -> None:
        require(bool(self.dense or self.sparse), "", "name at least one dense or sparse feature")
        names = [f.name for f in self.expanded_dense()] + [f.name for f in self.expanded_sparse()]
        shared = [t.name for t in self.tables]
        for what, given in (("feature", names), ("table", shared)):
            twice = next((name for name, count in Counter(given).items() if count > 1), None)
            require(twice is None, "", f"{what} `{twice}` is named twice")
        for place, feature in enumerate(self.sparse):
            if feature.table is not None and feature.table not in shared:
                raise SpecError(f"sparse[{place}].table", f"no table `{feature.table}`: {did_you_mean(feature.table, shared)}")
        used = {f.table for f in self.sparse}
        for table in self.tables:
            require(table.name in used, "tables", f"table `{table.name}` is used by no feature")
        own = {f.name for f in self.expanded_sparse() if f.table is None}
        clash = own & set(shared)
        require(not clash, "tables", f"`{next(iter(clash), '')}` is a shared table and also a feature with its own table")

    def expanded_dense(self) -> tuple[DenseFeatureSpec, ...]:
        """One spec a dense feature, `repeat` written out and `column` filled in."""
        return self._expanded_dense

    def expanded_sparse(self) -> tuple[SparseFeatureSpec, ...]:
        """One spec a sparse feature, `repeat` written out and `column` filled in."""
        return self._expanded_sparse

    @cached_property
    def _expanded_dense(self) -> tuple[DenseFeatureSpec, ...]:
        return tuple(one for feature in self.dense for one in _expanded(feature))

    @cached_property
    def _expanded_sparse(self) -> tuple[SparseFeatureSpec, ...]:
        return tuple(one for feature in self.sparse for one in _expanded(feature))


@dataclass(frozen=True, kw_only=True)
class Table:
    """An embedding table as it will be allocated, and the features that read it."""

    name: str
    num_rows: int
    width: int
    features: tuple[int, ...]
    """Places of its features in the batch."""
    first_row: int = 0
    """Where this table begins in the whole that it is a piece of; a table that is no piece is its own whole."""
    first_column: int = 0
    whole: tuple[int, int] | None = None
    """Rows and columns of the whole, for a piece of one."""

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.width

    @property
    def whole_shape(self) -> tuple[int, int]:
        """Rows and columns of the table that this is, or is a piece of."""
        return self.whole or (self.num_rows, self.width)


def tables_of(features: FeaturesSpec, *, width: int, scale: float = 1.0) -> tuple[Table, ...]:
    """The tables that `features` need, in order of first use, hash sizes multiplied by `scale`."""
    shared = {t.name: t for t in features.tables}
    rows: dict[str, int] = {}
    widths: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for place, feature in enumerate(features.expanded_sparse()):
        source = shared[feature.table] if feature.table is not None else feature
        assert source.num_rows is not None
        rows[source.name] = max(1, round(source.num_rows * scale))
        widths[source.name] = source.width or width
        readers.setdefault(source.name, []).append(place)
    return tuple(
        Table(name=name, num_rows=rows[name], width=widths[name], features=tuple(places)) for name, places in readers.items()
    )


Feature = TypeVar("Feature", DenseFeatureSpec, SparseFeatureSpec)


def _expanded(feature: Feature) -> list[Feature]:
    column = feature.column or feature.name
    return [
        dataclasses.replace(feature, name=_numbered(feature.name, i), column=_numbered(column, i), repeat=1, start=0)
        for i in range(feature.start, feature.start + feature.repeat)
    ]


def _numbered(template: str, i: int) -> str:
    return template.replace("{i}", str(i))


def _check_repeat(name: str, repeat: int) -> None:
    require(bool(name), "name", "must not be empty")
    require(repeat >= 1, "repeat", f"must be at least 1, got {repeat}")
    require(repeat == 1 or "{i}" in name, "name", f"with repeat: {repeat} the name needs `{{i}}`, such as `{name}_{{i}}`")
