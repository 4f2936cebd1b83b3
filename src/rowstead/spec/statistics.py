"""What is known about a log after reading it through: the numbers, apart from how they are counted and drawn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DenseStatistics:
    """One dense feature; a figure that no value gives is None."""

    name: str
    missing_share: float
    """Share of the rows in which it is null or NaN."""
    infinite_share: float
    """Share of the rows in which it is infinite; these count in no other figure."""
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    quantiles: tuple[float, ...] = ()
    """At `QUANTILES`, from a sample of rows; exact where the log is no larger than the sample."""


@dataclass(frozen=True, kw_only=True)
class SparseStatistics:
    """One sparse feature; an access is one id of one example."""

    name: str
    num_accesses: int
    num_distinct: int
    """Distinct ids."""
    distinct_error: float
    """Standard error of `num_distinct` as a share of it; 0 where the ids were all counted."""
    empty_share: float
    """Share of the examples that have no id."""
    length_mean: float
    """Ids per example, empty ones included."""
    length_p50: int
    length_p90: int
    length_p99: int
    length_max: int
    length_bins: tuple[int, ...] = ()
    """Lower ends of bins of ids per example: 0, 1, 2, 3 … and wider ones from 16 on; the last bin has no upper end."""
    length_shares: tuple[float, ...] = ()
    """Share of the examples in each of the bins."""
    top_1_percent_share: float | None = None
    """Share of the accesses that go to the most accessed 1 % of the ids (at least one id); None without any id."""
    top_10_percent_share: float | None = None
    skew_top: tuple[float, ...] = ()
    """Shares of the ids, the most accessed first, rising to 1."""
    skew_accesses: tuple[float, ...] = ()
    """Share of the accesses that go to each of `skew_top`."""
    num_rows: int | None = None
    """Hash size at which collisions are given."""
    expected_collisions: float | None = None
    """Share of the distinct ids that share a row with another one when ids fall on rows evenly."""
    actual_collisions: float | None = None
    """The same share as the feature's hash makes it; None where the ids were too many to keep, or are no rows under `hash: none`."""

    @property
    def exact(self) -> bool:
        """Whether every id was counted."""
        return self.distinct_error == 0.0


@dataclass(frozen=True, kw_only=True)
class LogStatistics:
    """A log, or the rows of it that were read."""

    num_rows: int
    label_mean: float | None
    """None for a log without labels."""
    num_labels_missing: int = 0
    """Rows whose label is null or NaN; the mean leaves them out."""
    num_rows_sampled: int
    """Rows from which the quantiles of dense features come."""
    dense: tuple[DenseStatistics, ...] = ()
    sparse: tuple[SparseStatistics, ...] = ()


QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""Where the quantiles of dense features are taken."""
