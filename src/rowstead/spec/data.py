"""Where examples come from: a synthetic click log with a known teacher, or Parquet files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from rowstead.spec.bounds import (
    MAX_FEATURES,
    MAX_ROWS,
    AboveZero,
    AtLeastOne,
    Count,
    InsideZeroToOne,
    NotNegative,
    Processes,
    Seed,
    Share,
    Spec,
    ZeroToOne,
    at_most,
    each_between,
    up_to,
)
from rowstead.spec.errors import require

MAX_TRAIN_SAMPLES = 10**15
MAX_EVAL_SAMPLES = 10**9
"""The last evaluation reads all of them."""
MAX_FILES = 100_000


@dataclass(frozen=True, kw_only=True)
class LogSpec(Spec):
    """Base of the kinds of logs. A new kind is a subclass, a field of `DataSpec`, and a module with its `LogSplit`."""

    split_class: ClassVar[str]
    """`module:class` of the `LogSplit` that opens this kind of log."""
    cursor_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the cursors of its sources, which checkpoints keep; without them they are not checked."""
    label = "label"
    """Label column."""


@dataclass(frozen=True, kw_only=True)
class SynthSpec(LogSpec):
    """A click log drawn from a hidden teacher; columns `dense_0 …`, `sparse_0 …`, `label` and `true_p`."""

    split_class: ClassVar[str] = "rowstead.data.synth:SynthSplit"
    cursor_keys: ClassVar[tuple[str, ...]] = ("row",)

    num_train_samples: Annotated[AtLeastOne, up_to(MAX_TRAIN_SAMPLES)] = 1_000_000
    """Examples in the training split."""
    num_eval_samples: Annotated[AtLeastOne, up_to(MAX_EVAL_SAMPLES)] = 100_000
    """Examples in the evaluation split, drawn after the training split in time."""
    seed: Seed = 1
    """Same seed, same log, on every machine."""
    num_dense: Annotated[Count, up_to(MAX_FEATURES)] = 13
    """Dense columns in the log."""
    num_skewed_dense: int = 0
    """The first `num_skewed_dense` dense columns are positive with a long tail, like counts; `log: true` makes them bell-shaped again."""
    num_sparse: Annotated[Count, up_to(MAX_FEATURES)] = 26
    """Sparse columns in the log."""
    num_ids: Annotated[int | tuple[int, ...], each_between(1, MAX_ROWS)] = 100_000
    """Distinct ids per feature (one number for all, or a list)."""
    mean_ids: float | tuple[float, ...] = 1.0
    """Mean ids per example and feature (one number for all, or a list)."""
    length_power: Annotated[NotNegative, up_to(20)] = 0.0
    """With one `mean_ids` for all: exponent of the power law of mean lengths over features; 0 makes them equal."""
    lengths: Literal["fixed", "poisson"] = "fixed"
    """Ids per example: always the mean (rounded), or Poisson around it, empty bags included."""
    max_ids: Annotated[AtLeastOne, up_to(100_000)] = 200
    """Maximum ids per example and feature."""
    skew: Annotated[NotNegative, up_to(20)] = 1.05
    """Exponent of the Zipf distribution of ids: 0 is uniform, larger is more skewed."""
    click_rate: InsideZeroToOne = 0.25
    """Mean label."""
    signal: AboveZero = 2.0
    """Standard deviation of the teacher's log-odds: the larger, the lower the best possible NE."""
    interaction_share: ZeroToOne = 0.5
    """Share of the log-odds' variance due to products of features, which a linear model cannot learn."""
    latent: Annotated[AtLeastOne, up_to(1024)] = 4
    """Dimension of the teacher's vector for each id."""
    drift: ZeroToOne = 0.0
    """How far the teacher changes from the first example to the last: 0 not at all, 1 to an unrelated teacher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_dense + self.num_sparse >= 1, "num_sparse", "the log needs at least one feature")
        bound = f"must be from 0 to num_dense, {self.num_dense}"
        require(0 <= self.num_skewed_dense <= self.num_dense, "num_skewed_dense", bound)
        for name in ("num_ids", "mean_ids"):
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            if isinstance(value, tuple):
                require(len(value) == self.num_sparse, name, f"has {len(value)} values for {self.num_sparse} sparse features")
            require(all(0 < v < math.inf for v in values), name, "must be above 0 and finite")
            fits = name == "num_ids" or max(values) <= self.max_ids
            require(fits, name, f"must not be above max_ids, which is {self.max_ids}")


def list_paths(paths: str | Iterable[str]) -> tuple[str, ...]:
    """One path or several, as a tuple."""
    return (paths,) if isinstance(paths, str) else tuple(paths)


@dataclass(frozen=True, kw_only=True)
class ParquetSpec(LogSpec):
    """Examples from Parquet files: local paths, globs, or URLs such as `s3://bucket/*.parquet`."""

    split_class: ClassVar[str] = "rowstead.data.parquet_source:ParquetSplit"
    cursor_keys: ClassVar[tuple[str, ...]] = ("window", "row", "of")

    train: Annotated[tuple[str, ...], at_most(MAX_FILES)]
    """Files of the training split."""
    eval: Annotated[tuple[str, ...], at_most(MAX_FILES)] = ()
    """Files of the evaluation split. Default: the last `eval_fraction` of the training files' rows."""
    eval_fraction: InsideZeroToOne = 0.1
    """Share of the rows (the last ones in file order) held out without `eval`."""
    label: str = "label"
    """Label column, a number from 0 to 1."""
    weight: str | None = None
    """Column of example weights."""
    true_p: str | None = None
    """Column of the true click probability, for synthetic logs."""
    shuffle_rows: Annotated[Count, up_to(10**9)] = 65_536
    """Size of the shuffle window in rows (row groups are shuffled too); 0 keeps file order."""
    decode_threads: Processes | None = None
    """Threads that decode; at most as many make batches. Default: one per core."""
    on_bad_row: Literal["error", "skip"] = "error"
    """For a missing or non-finite dense value or a label outside [0, 1]: stop with an error, or skip the row and count it."""

    def __post_init__(self) -> None:
        for name in ("train", "eval"):
            object.__setattr__(self, name, list_paths(getattr(self, name)))
        super().__post_init__()
        require(bool(self.train), "train", "give at least one file")


@dataclass(frozen=True, kw_only=True)
class DataSpec(Spec):
    """The log: exactly one of `synth` and `parquet`."""

    synth: SynthSpec | None = None
    """Generate the log from a hidden teacher during training."""
    parquet: ParquetSpec | None = None
    """Read the log from Parquet files."""
    negative_keep_rate: Share = 1.0
    """Share of the negatives that the log kept. Predictions are corrected for it; evaluation weights negatives by its inverse."""
    statistics_rows: AtLeastOne = 1_000_000
    """Training rows from which means and standard deviations of dense features are computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name, value in vars(self).items() if isinstance(value, LogSpec)]
        require(len(given) == 1, "", f"give exactly one of `synth` and `parquet`, got {' and '.join(given) or 'neither'}")
        kept_all = self.synth is None or self.negative_keep_rate == 1
        require(kept_all, "negative_keep_rate", "must be 1 with `synth`, which keeps all negatives")

    @property
    def log(self) -> LogSpec:
        """The spec of the log, of whichever kind."""
        return next(value for value in vars(self).values() if isinstance(value, LogSpec))
