"""Statistics of a log. `data/describe.py` counts them, `report/describe.py` shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DenseStatistics:
    """One dense feature; a figure is None if no value is finite."""

    name: str
    missing_share: float
    """Share of the rows where it is null or NaN."""
    infinite_share: float
    """Share of the rows where it is infinite; other figures exclude these."""
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    quantiles: tuple[float, ...] = ()
    """At `QUANTILES`, from a sample of rows; exact if the log is not larger than the sample."""


@dataclass(frozen=True, kw_only=True)
class SparseStatistics:
    """One sparse feature; an access is one id of one example."""

    name: str
    num_accesses: int
    num_distinct: int
    """Distinct ids."""
    distinct_error: float
    """Relative standard error of `num_distinct`; 0 if all ids were counted."""
    empty_share: float
    """Share of the examples without ids."""
    length_mean: float
    """Ids per example, empty ones included."""
    length_p50: int
    length_p90: int
    length_p99: int
    length_max: int
    length_bins: tuple[int, ...] = ()
    """Lower bounds of bins of ids per example: 0, 1, 2, 3 …, wider from 16 on; the last bin is unbounded."""
    length_shares: tuple[float, ...] = ()
    """Share of the examples in each of the bins."""
    top_1_percent_share: float | None = None
    """Share of the accesses to the most accessed 1 % of the ids (at least one id); None without ids."""
    top_10_percent_share: float | None = None
    skew_top: tuple[float, ...] = ()
    """Shares of the ids, most accessed first, increasing to 1."""
    skew_accesses: tuple[float, ...] = ()
    """Share of the accesses to each of `skew_top`."""
    num_rows: int | None = None
    """Hash size at which collisions are counted."""
    expected_collisions: float | None = None
    """Expected share of the distinct ids that share a row with another id, if ids are uniform over rows."""
    actual_collisions: float | None = None
    """The actual share under the feature's hash; None if there were too many ids to keep, or ids outside the table with `hash: none`."""

    @property
    def exact(self) -> bool:
        """Whether every id was counted."""
        return self.distinct_error == 0.0


@dataclass(frozen=True, kw_only=True)
class ClusteredColumn:
    """A column whose equal values stand together, such as that by which a log is sorted."""

    name: str
    clustering: float
    """0: as in random order; 1: sorted."""
    likelier: float
    """How many times as often as in random order two rows with the same value are in the same sixteenth of the log."""


@dataclass(frozen=True, kw_only=True)
class LogStatistics:
    """A log, or the rows of it that were read."""

    num_rows: int
    label_mean: float | None
    """None for a log without labels."""
    num_labels_missing: int = 0
    """Rows whose label is null or NaN; the mean excludes them."""
    num_rows_sampled: int
    """Size of the sample for quantiles of dense features."""
    dense: tuple[DenseStatistics, ...] = ()
    sparse: tuple[SparseStatistics, ...] = ()
    clustered: tuple[ClusteredColumn, ...] = ()
    """The label and sparse features whose rows are not in random order, the most clustered first; see `data/order_test.py`."""


QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""Quantiles of dense features."""
