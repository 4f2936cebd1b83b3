"""The columns that a model reads from a log, how they are transformed or hashed, and the embedding tables."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from rowstead.spec.bounds import (
    MAX_ENTRIES,
    MAX_FEATURES,
    MAX_NAME,
    MAX_ROWS,
    AtLeastOne,
    Count,
    NotEmpty,
    Rows,
    Spec,
    Width,
    at_most,
    each_between,
    up_to,
)
from rowstead.spec.encoders import EncoderSpec
from rowstead.spec.errors import SpecError, did_you_mean, require

Hash = Literal["mix", "modulo", "none"]
Pooling = Literal["sum", "mean", "none"]
TimePart = Literal["hour", "weekday", "day"]
MAX_HISTORY = 100_000
"""Ids of one history."""


@dataclass(frozen=True, kw_only=True)
class FeatureSpec(Spec):
    """A column of the log, or several that differ in a number."""

    name: NotEmpty
    """Name of the feature; with `repeat`, `{i}` in it becomes 0, 1, 2 …"""
    column: Annotated[str, at_most(MAX_NAME)] | None = None
    """Column of the log. Default: the feature's name."""
    repeat: Annotated[AtLeastOne, up_to(MAX_FEATURES)] = 1
    """Expands to this many features that differ only in `{i}`."""
    start: int = 0
    """First value of `{i}`."""
    part: TimePart | None = None
    """Of a timestamp or date: the `hour` (0 to 23), the `weekday` (Monday is 0) or the `day` since 1970. Default: see [Data](data.md#timestamps-dates-and-booleans)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.repeat == 1 or "{i}" in self.name
        require(named, "name", f"with repeat: {self.repeat} the name needs `{{i}}`, such as `{self.name}_{{i}}`")

    @property
    def num_features(self) -> int:
        """Features that this expands to."""
        return self.repeat

    def fields_at(self, index: int) -> dict[str, Any]:
        """What differs in feature `index` of those that this expands to."""
        column = self.column or self.name
        filled = {name: text.replace("{i}", str(index)) for name, text in (("name", self.name), ("column", column))}
        return {**filled, "repeat": 1, "start": 0}


@dataclass(frozen=True, kw_only=True)
class DenseFeatureSpec(FeatureSpec):
    """One scalar column; the transforms apply in the order clip, log, missing, standardise."""

    clip: tuple[float, ...] | None = None
    """`[low, high]`: values outside are set to the nearer bound."""
    log: bool = False
    """Take sign(x) * log(1 + |x|)."""
    missing: float | Literal["mean"] | None = None
    """Replaces a missing value (null or NaN): a number in the log's units, or `mean` for the training split's mean. Without it a missing value is an error."""
    standardise: bool = False
    """Subtract the training split's mean and divide by its standard deviation."""
    length: Annotated[AtLeastOne, up_to(MAX_FEATURES)] | None = None
    """For a column of lists with this many numbers each, such as an embedding: every number is a feature `name[0]`, `name[1]` …"""
    element: Count | None = None
    """With `length`: only the number at this position of the list, from 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.element is not None:
            require(self.length is not None, "element", "set `length`, too: how many numbers each list has")
            require(self.element < (self.length or 0), "element", f"must be below `length`, which is {self.length}")
        require(self.length is None or self.part is None, "part", "lists of numbers have none; remove `part` or `length`")
        if self.clip is not None:
            require(len(self.clip) == 2 and self.clip[0] < self.clip[1], "clip", "must be [low, high] with low < high")
        if isinstance(self.missing, (int, float)):
            require(math.isfinite(self.missing), "missing", f"must be finite, got {self.missing}")

    @property
    def num_features(self) -> int:
        return self.repeat * (self.length if self.length is not None and self.element is None else 1)

    @property
    def needs_statistics(self) -> bool:
        return self.standardise or self.missing == "mean"


@dataclass(frozen=True, kw_only=True)
class SparseFeatureSpec(FeatureSpec):
    """One column of ids (integer, text, or a list of either); each id is hashed to a table row, and the rows are pooled."""

    num_rows: Rows | None = None
    """Hash size: rows of the feature's own table. Omit it if `table` names a shared table."""
    hash_sizes: Annotated[tuple[int, ...], each_between(1, MAX_ROWS)] = ()
    """With `repeat`, instead of `num_rows`: the hash size of each feature."""
    width: Width | None = None
    """Embedding width of the feature's own table. Default: `model.width`."""
    table: str | None = None
    """Name of a table under `features.tables`, for features that share one."""
    pooling: Pooling = "sum"
    """How the rows of one example are pooled; `none` keeps them in order, for `encoder`. See [Histories](histories.md)."""
    max_ids: AtLeastOne | None = None
    """Truncation size: only the first `max_ids` ids of an example are used; with `pooling: none` the last ones, which are the most recent."""
    encoder: EncoderSpec | None = None
    """With `pooling: none`: what makes one vector of the rows."""
    hash: Hash = "mix"
    """How an id becomes a row: `mix` (a stable 64-bit hash, then modulo), `modulo`, or `none` (ids are row numbers)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hash_sizes:
            each = len(self.hash_sizes) == self.repeat
            require(each, "hash_sizes", f"must be {self.repeat} numbers, one per feature, got {len(self.hash_sizes)}")
            require(self.num_rows is None, "num_rows", "`hash_sizes` has the rows of each feature; set only one of the two")
        if self.table is None:
            given = self.num_rows is not None or bool(self.hash_sizes)
            require(given, "num_rows", "set a hash size, or name a shared `table`")
        else:
            require(
                self.num_rows is None and not self.hash_sizes,
                "num_rows",
                "the shared table has its own num_rows; set only one of the two",
            )
            require(self.width is None, "width", "the shared table has its own width; set only one of the two")
        if self.is_history:
            require(self.encoder is not None, "encoder", "`pooling: none` needs an encoder, such as {kind: din, target: item}")
            require(self.max_ids is not None, "max_ids", "`pooling: none` needs it: how many of the most recent ids are used")
            fits = (self.max_ids or 0) <= MAX_HISTORY
            require(fits, "max_ids", f"of a history must be at most {MAX_HISTORY:,}, got {self.max_ids:,}")
        else:
            require(self.encoder is None, "encoder", "needs the rows in order: set `pooling: none`, too")

    @property
    def is_history(self) -> bool:
        """Whether its rows are kept in order."""
        return self.pooling == "none"

    @property
    def table_name(self) -> str:
        """Name of the table that it reads."""
        return self.table or self.name

    def fields_at(self, index: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if self.hash_sizes:
            own = {"num_rows": self.hash_sizes[index - self.start], "hash_sizes": ()}
        if self.encoder is not None and self.encoder.target is not None:
            target = self.encoder.target.replace("{i}", str(index))
            own["encoder"] = dataclasses.replace(self.encoder, target=target)
        return {**super().fields_at(index), **own}


@dataclass(frozen=True, kw_only=True)
class TableSpec(Spec):
    """An embedding table that several features may share."""

    name: NotEmpty
    """Name that features refer to."""
    num_rows: Rows
    """Hash size."""
    width: Width | None = None
    """Embedding width. Default: `model.width`."""


@dataclass(frozen=True, kw_only=True)
class FeaturesSpec:
    """The features of the model; columns of the log that are not listed are never read."""

    dense: tuple[DenseFeatureSpec, ...] = ()
    """Scalar features."""
    sparse: tuple[SparseFeatureSpec, ...] = ()
    """Id features."""
    tables: tuple[TableSpec, ...] = ()
    """Tables shared by features; a feature without `table` has its own table of the same name."""

    def __post_init__(self) -> None:
        require(bool(self.dense or self.sparse), "", "list at least one dense or sparse feature")
        num_entries = len(self.dense) + len(self.sparse) + len(self.tables)
        fewer = (
            f"has {num_entries:,} entries, and at most {MAX_ENTRIES:,} are allowed: write alike features as one with `repeat`"
        )
        require(num_entries <= MAX_ENTRIES, "", fewer)
        for name in ("dense", "sparse"):
            num_features = sum(feature.num_features for feature in getattr(self, name))
            require(num_features <= MAX_FEATURES, name, f"at most {MAX_FEATURES:,} features are allowed, got {num_features:,}")
        names = [f.name for f in self.expanded_dense()] + [f.name for f in self.expanded_sparse()]
        shared = [t.name for t in self.tables]
        for what, given in (("feature", names), ("table", shared)):
            twice = next((name for name, count in Counter(given).items() if count > 1), None)
            require(twice is None, "", f"{what} `{twice}` is listed twice")
        for i, feature in enumerate(self.sparse):
            if feature.table is not None and feature.table not in shared:
                raise SpecError(f"sparse[{i}].table", f"no table `{feature.table}`: {did_you_mean(feature.table, shared)}")
        used = {f.table for f in self.sparse}
        for table in self.tables:
            require(table.name in used, "tables", f"table `{table.name}` is not used by any feature")
        own = {f.name for f in self.expanded_sparse() if f.table is None}
        clash = own & set(shared)
        require(not clash, "tables", f"`{next(iter(clash), '')}` is a shared table and also a feature with its own table")
        self._check_histories()

    def _check_histories(self) -> None:
        if not self.has_histories:
            return
        sparse = {feature.name: feature for feature in self.expanded_sparse()}
        histories = {feature.table_name: feature.name for feature in sparse.values() if feature.is_history}
        for i, entry in enumerate(self.sparse):
            shared = histories.get(entry.table_name)
            remedy = f"`mean` cannot share a table with the history `{shared}`: use `sum`, or a table of its own"
            require(entry.pooling != "mean" or shared is None, f"sparse[{i}].pooling", remedy)
            if entry.encoder is None or entry.encoder.target is None:
                continue
            key = f"sparse[{i}].encoder.target"
            for target in dict.fromkeys(str(one.encoder.target) for one in _expand(entry) if one.encoder is not None):
                if target not in sparse:
                    raise SpecError(key, f"no sparse feature `{target}`: {did_you_mean(target, sparse)}")
                require(not sparse[target].is_history, key, f"`{target}` is a history itself: name a feature that is pooled")

    @property
    def has_histories(self) -> bool:
        """Whether rows of a feature are kept in order."""
        return any(feature.is_history for feature in self.sparse)

    def expanded_dense(self) -> tuple[DenseFeatureSpec, ...]:
        """One spec per dense feature, with `repeat` expanded and `column` set."""
        return self._expanded_dense

    def expanded_sparse(self) -> tuple[SparseFeatureSpec, ...]:
        """One spec per sparse feature, with `repeat` expanded and `column` set."""
        return self._expanded_sparse

    @cached_property
    def _expanded_dense(self) -> tuple[DenseFeatureSpec, ...]:
        repeated = (one for feature in self.dense for one in _expand(feature))
        return tuple(one for feature in repeated for one in _expand_list(feature))

    @cached_property
    def _expanded_sparse(self) -> tuple[SparseFeatureSpec, ...]:
        return tuple(one for feature in self.sparse for one in _expand(feature))


@dataclass(frozen=True, kw_only=True)
class Table:
    """An embedding table, or a shard of one, and the features that read it."""

    name: str
    num_rows: int
    width: int
    features: tuple[int, ...]
    """Indices of its features in the batch."""
    first_row: int = 0
    """First row of this shard in the whole table; 0 for a whole table."""
    first_column: int = 0
    whole: tuple[int, int] | None = None
    """Rows and columns of the whole table, for a shard."""

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.width

    @property
    def whole_shape(self) -> tuple[int, int]:
        """Rows and columns of the whole table."""
        return self.whole or (self.num_rows, self.width)


def tables_of(features: FeaturesSpec, *, width: int, scale: float = 1.0) -> tuple[Table, ...]:
    """The tables of `features`, in order of first use, with hash sizes multiplied by `scale`."""
    shared = {t.name: t for t in features.tables}
    rows: dict[str, int] = {}
    widths: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for i, feature in enumerate(features.expanded_sparse()):
        source = shared[feature.table] if feature.table is not None else feature
        assert source.num_rows is not None
        num_rows = source.num_rows * scale
        require(
            num_rows <= MAX_ROWS,
            "scale",
            f"makes table `{source.name}` {num_rows:,.0f} rows large, and at most {MAX_ROWS:,} are allowed",
        )
        rows[source.name] = max(1, round(num_rows))
        widths[source.name] = source.width or width
        readers.setdefault(source.name, []).append(i)
    _check_encoders(features, widths)
    return tuple(
        Table(name=name, num_rows=rows[name], width=widths[name], features=tuple(indices)) for name, indices in readers.items()
    )


def _check_encoders(features: FeaturesSpec, widths: dict[str, int]) -> None:
    """Refuse histories whose encoder does not go with the width of their table; `widths` is by table."""
    table_of = {feature.name: feature.table_name for feature in features.expanded_sparse()}
    for feature in features.expanded_sparse():
        if feature.encoder is None:
            continue
        width, target = widths[feature.table_name], feature.encoder.target
        try:
            feature.encoder.check_width(width)
            require(
                target is None or widths[table_of[target]] == width,
                "target",
                f"rows of `{target}` have width {widths[table_of[target]] if target else 0} and those of the history {width}: "
                "give both the same width, or the same table",
            )
        except SpecError as error:
            raise error.within("encoder").within(f"features.sparse `{feature.name}`") from None


Feature = TypeVar("Feature", DenseFeatureSpec, SparseFeatureSpec)


def _expand(feature: Feature) -> list[Feature]:
    indices = range(feature.start, feature.start + feature.repeat)
    return [dataclasses.replace(feature, **feature.fields_at(index)) for index in indices]


def _expand_list(feature: DenseFeatureSpec) -> list[DenseFeatureSpec]:
    """One spec per number of a column of lists."""
    if feature.length is None or feature.element is not None:
        return [feature]
    return [dataclasses.replace(feature, name=f"{feature.name}[{i}]", element=i) for i in range(feature.length)]
