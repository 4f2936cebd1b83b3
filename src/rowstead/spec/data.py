"""Where examples come from: a synthetic click log with a known teacher, or files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, ClassVar, Literal, get_args, get_type_hints

from rowstead.spec.bounds import (
    MAX_FEATURES,
    MAX_NAME,
    MAX_ROWS,
    AboveZero,
    AtLeastOne,
    BelowOne,
    Count,
    FolderPath,
    InsideZeroToOne,
    NotNegative,
    Processes,
    Seed,
    Share,
    Spec,
    ZeroToOne,
    at_most,
    between,
    each_between,
    up_to,
)
from rowstead.spec.errors import require

SplitName = Literal["train", "eval", "test"]
MAX_TRAIN_SAMPLES = 10**15
MAX_EVAL_SAMPLES = 10**9
"""The last evaluation reads all of them."""
MAX_FILES = 100_000


@dataclass(frozen=True, kw_only=True)
class LogSpec(Spec):
    """Base of the kinds of logs. A new kind is a subclass, a field of `DataSpec`, and a module with its `LogSplit`; a new kind of file is a `FileLogSpec`."""

    split_class: ClassVar[str]
    """`module:class` of the `LogSplit` that opens this kind of log."""
    cursor_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the cursors of its sources, which checkpoints keep; without them they are not checked."""
    reading_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that say how the log is read and not what is in it, beside its files: a packed log does not depend on them."""
    label = "label"
    """Label column."""

    @property
    def num_train_samples(self) -> int | None:
        """Examples of the training split; None where only the files say."""
        return None

    @property
    def has_test(self) -> bool:
        """Whether there is a test split, on which a run reports at its end."""
        return False


@dataclass(frozen=True, kw_only=True)
class ConversionSpec(Spec):
    """A second label of a synthetic log, `conversion`: whether a click led to a conversion; missing where there was no click."""

    rate: InsideZeroToOne = 0.1
    """Mean probability that an example converts if it is clicked, over all examples."""
    correlation: Annotated[float, between(-1, 1)] = 0.5
    """Correlation of its log-odds with those of the click, over all examples."""


@dataclass(frozen=True, kw_only=True)
class SynthSpec(LogSpec):
    """A click log drawn from a hidden teacher; columns `dense_0 …`, `sparse_0 …`, `label` and `true_p`, and those of `conversion`."""

    split_class: ClassVar[str] = "rowstead.data.synth:SynthSplit"
    cursor_keys: ClassVar[tuple[str, ...]] = ("row",)

    num_train_samples: Annotated[AtLeastOne, up_to(MAX_TRAIN_SAMPLES)] = 1_000_000
    """Examples in the training split."""
    num_eval_samples: Annotated[AtLeastOne, up_to(MAX_EVAL_SAMPLES)] = 100_000
    """Examples in the evaluation split, drawn after the training split in time."""
    num_test_samples: Annotated[Count, up_to(MAX_EVAL_SAMPLES)] = 0
    """Examples in the test split, drawn after the evaluation split."""
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
    conversion: ConversionSpec | None = None
    """Add a second label, `conversion`, for `model.tasks`. Default: only the click, `label`."""

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

    @property
    def has_test(self) -> bool:
        return self.num_test_samples > 0

    @property
    def labels(self) -> tuple[str, ...]:
        """The label columns of the log."""
        return (self.label,) if self.conversion is None else (self.label, "conversion")


@dataclass(frozen=True, kw_only=True)
class InterestsSpec(LogSpec):
    """A log of histories whose interests drift, with a known best NE; columns `item`, `history`, `label` and `true_p`. See [Histories](histories.md)."""

    split_class: ClassVar[str] = "rowstead.data.interests:InterestsSplit"
    cursor_keys: ClassVar[tuple[str, ...]] = ("row",)

    num_train_samples: Annotated[AtLeastOne, up_to(MAX_TRAIN_SAMPLES)] = 300_000
    """Examples in the training split."""
    num_eval_samples: Annotated[AtLeastOne, up_to(MAX_EVAL_SAMPLES)] = 50_000
    """Examples in the evaluation split."""
    num_test_samples: Annotated[Count, up_to(MAX_EVAL_SAMPLES)] = 0
    """Examples in the test split."""
    seed: Seed = 1
    """Same seed, same log, on every machine."""
    num_items: Annotated[AtLeastOne, up_to(MAX_ROWS)] = 1000
    """Items, the same number of each topic."""
    num_topics: Annotated[int, up_to(1_000_000)] = 20
    """Topics."""
    max_history: Annotated[AtLeastOne, up_to(100_000)] = 50
    """Most items of a history. Lengths from 1 to this are drawn by a power law with exponent 1: few histories are long."""
    empty_share: ZeroToOne = 0.05
    """Share of the examples without a history."""
    click_rates: tuple[float, ...] = (0.6, 0.1, 0.3)
    """Click rate of an item of the most recent topic of the history, of its earlier topic, and of another one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_topics >= 3, "num_topics", f"must be at least 3, got {self.num_topics}")
        require(self.num_items % self.num_topics == 0, "num_items", f"must be a multiple of num_topics, {self.num_topics}")
        fits = len(self.click_rates) == 3 and all(0 < rate < 1 for rate in self.click_rates)
        require(fits, "click_rates", "must be three numbers between 0 and 1")

    def mean_ids(self, column: str, max_ids: int | None = None) -> float:
        """Mean ids per example of a column after truncation."""
        if column != "history":
            return 1.0
        # The sum over n from 1 to `most` of the probability of n or more items, 1 - log(n) / log(max_history + 1).
        most = min(max_ids or self.max_history, self.max_history)
        return (1 - self.empty_share) * (most - math.lgamma(most + 1) / math.log(self.max_history + 1))

    @property
    def has_test(self) -> bool:
        return self.num_test_samples > 0


def list_paths(paths: str | Iterable[str]) -> tuple[str, ...]:
    """One path or several, as a tuple."""
    return (paths,) if isinstance(paths, str) else tuple(paths)


@dataclass(frozen=True, kw_only=True)
class SplitSpec(Spec):
    """How the rows of the training files are split, where the log names no files for evaluation or for the test."""

    by: Literal["order", "hash", "time"] = "order"
    """`order`: the last rows in file order are held out. `hash`: random ones, chosen by a hash. `time`: those with the latest times."""
    column: Annotated[str, at_most(MAX_NAME)] | None = None
    """With `hash`: rows with the same value of this column, such as a user, go to the same split; default: each row by itself.
    With `time`: the column of the time, which is a number, a date or a timestamp."""
    eval_from: float | str | None = None
    """With `time`: the first time of the evaluation split, a number or `2000-11-20`. Default: the one that holds out `eval_fraction`."""
    test_from: float | str | None = None
    """With `time`: the first time of the test split. Default: the one that holds out `test_fraction`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by == "order":
            require(self.column is None, "column", "applies only to `by: hash` and `by: time`")
        if self.by == "time":
            require(self.column is not None, "column", "name the column of the time")
        for name in ("eval_from", "test_from"):
            bound = getattr(self, name)
            require(bound is None or self.by == "time", name, "applies only to `by: time`")
            if isinstance(bound, str):
                try:
                    datetime.fromisoformat(bound)
                except ValueError:
                    require(False, name, f"`{bound}` is neither a number nor a date such as 2000-11-20 or 2000-11-20T18:30")


@dataclass(frozen=True, kw_only=True)
class FileLogSpec(LogSpec):
    """Examples from files. A folder stands for all files of the kind in it and below it; folders such as `date=2026-11-01` give a column."""

    split_class: ClassVar[str] = "rowstead.data.file_source:FileSplit"
    cursor_keys: ClassVar[tuple[str, ...]] = ("window", "row", "of")
    log_class: ClassVar[str]
    """`module:class` of the `FileLog` that decodes the files."""
    kind: ClassVar[str]
    """The key of these logs in `data`."""
    suffixes: ClassVar[tuple[str, ...]]
    """How names of such files end."""
    reading_keys: ClassVar[tuple[str, ...]] = ("train", "eval", "test", "shuffle_rows", "decode_threads")

    train: Annotated[tuple[str, ...], at_most(MAX_FILES)]
    """Files of the training split: local paths, folders, globs, or URLs such as `s3://bucket/log/`."""
    eval: Annotated[tuple[str, ...], at_most(MAX_FILES)] = ()
    """Files of the evaluation split. Default: `eval_fraction` of the training files' rows, chosen by `split`."""
    test: Annotated[tuple[str, ...], at_most(MAX_FILES)] = ()
    """Files of the test split, on which a run reports once, at its end. Default: `test_fraction` of the training files' rows."""
    eval_fraction: InsideZeroToOne = 0.1
    """Share of the rows held out for evaluation without `eval`."""
    test_fraction: BelowOne = 0.0
    """Share of the rows held out for the test without `test`."""
    split: SplitSpec = SplitSpec()
    """Which rows are held out: the last ones in file order, random ones, or the latest."""
    label: str = "label"
    """Label column, a number from 0 to 1."""
    weight: str | None = None
    """Column of example weights."""
    true_p: str | None = None
    """Column of the true click probability, for synthetic logs."""
    group: str | None = None
    """Column of integers or text whose values group rows, such as the user: evaluations report GAUC, recall and NDCG, means over groups."""
    segment: str | None = None
    """Column of integers or text, such as the country: evaluations report NE and calibration for each of its most frequent values."""
    shuffle_rows: Annotated[Count, up_to(10**9)] = 65_536
    """Size of the shuffle window in rows (row groups are shuffled too); 0 keeps file order."""
    decode_threads: Processes | None = None
    """Threads that decode; at most as many make batches. Default: one per core."""
    on_bad_row: Literal["error", "skip"] = "error"
    """For a missing or non-finite dense value, a label outside [0, 1] or a row that cannot be read: stop with an error, or skip the row and count it."""

    def __post_init__(self) -> None:
        for name in ("train", "eval", "test"):
            object.__setattr__(self, name, list_paths(getattr(self, name)))
        super().__post_init__()
        require(bool(self.train), "train", "give at least one file")
        for name in ("eval", "test"):
            unused = f"does not apply: the {name} split has files of its own, `{name}`"
            require(not getattr(self, name) or getattr(self.split, f"{name}_from") is None, f"split.{name}_from", unused)
        require(not self.test or not self.test_fraction, "test_fraction", "does not apply: `test` names files")
        held_out = self.held_out("eval") + self.held_out("test")
        require(held_out < 1, "test_fraction", "leaves no rows to train on: lower it, or `eval_fraction`")

    def held_out(self, split: str) -> float:
        """The share of the training files' rows that is held out for `eval` or `test`; 0 if it has files of its own."""
        share: float = 0.0 if getattr(self, split) else getattr(self, f"{split}_fraction")
        return share

    @property
    def group_columns(self) -> tuple[str, ...]:
        """The columns of `Batch.groups`: `group` and `segment`, once if they are the same."""
        return tuple(dict.fromkeys(name for name in (self.group, self.segment) if name is not None))

    @property
    def has_test(self) -> bool:
        return bool(self.test) or self.test_fraction > 0 or self.split.test_from is not None


@dataclass(frozen=True, kw_only=True)
class ParquetSpec(FileLogSpec):
    """Examples from Parquet files."""

    log_class: ClassVar[str] = "rowstead.data.parquet:ParquetLog"
    kind: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")


CellType = Literal[
    "int64", "uint64", "float64", "string", "bool", "date", "timestamp", "list<int64>", "list<string>", "list<float64>"
]


@dataclass(frozen=True, kw_only=True)
class CsvSpec(FileLogSpec):
    """Examples from text files with a row per line, such as CSV and TSV; plain, or compressed by gzip or Zstandard."""

    log_class: ClassVar[str] = "rowstead.data.csv_log:CsvLog"
    kind: ClassVar[str] = "csv"
    suffixes: ClassVar[tuple[str, ...]] = tuple(
        f".{name}{packed}" for name in ("csv", "tsv", "txt") for packed in ("", ".gz", ".zst")
    )

    separator: str | None = None
    """One character between cells, such as `,` or `"\\t"`. Default: the one of these and `;` and `|` that the first line has most of."""
    columns: Annotated[tuple[str, ...], at_most(MAX_FEATURES)] = ()
    """Names of the columns, for files without a header. Default: the first line of each file."""
    types: Mapping[str, CellType] = field(default_factory=dict)
    """Types of columns by name. Default: the first type that fits the first rows, in the order int64, uint64, float64, bool, date, timestamp, string."""
    list_separator: str = "|"
    """One character between the values of a list."""
    quotes: bool = True
    """Whether cells may stand in double quotes, which may have separators and line breaks in them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("separator", "list_separator"):
            value = getattr(self, name)
            fits = value is None or (len(value) == 1 and value.isascii() and value not in '"\r\n')
            require(fits, name, f"must be one ASCII character, and no quote or line break, got {value!r}")
        require(len(set(self.columns)) == len(self.columns), "columns", "a name is given twice")
        require(len(self.types) <= MAX_FEATURES, "types", f"at most {MAX_FEATURES:,} are allowed")


@dataclass(frozen=True, kw_only=True)
class DataSpec(Spec):
    """The log: exactly one of `synth`, `interests`, `parquet` and `csv`."""

    synth: SynthSpec | None = None
    """Generate the log from a hidden teacher during training."""
    interests: InterestsSpec | None = None
    """Generate a log of histories during training."""
    parquet: ParquetSpec | None = None
    """Read the log from Parquet files."""
    csv: CsvSpec | None = None
    """Read the log from CSV, TSV and the like."""
    cache: FolderPath | None = None
    """Folder of the packed log (`rowstead data pack`), which is read instead; packed before training where it is empty or missing."""
    negative_keep_rate: Share = 1.0
    """Share of the negatives that the log kept. Predictions are corrected for it; evaluation weights negatives by its inverse."""
    statistics_rows: AtLeastOne = 1_000_000
    """Training rows from which means and standard deviations of dense features are computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name, value in vars(self).items() if isinstance(value, LogSpec)]
        require(
            len(given) == 1,
            "",
            f"give exactly one of `synth`, `interests`, `parquet` and `csv`, got {' and '.join(given) or 'none'}",
        )
        kept_all = self.files is not None or self.negative_keep_rate == 1
        require(kept_all, "negative_keep_rate", "must be 1 with a synthetic log, which keeps all negatives")

    @property
    def log(self) -> LogSpec:
        """The spec of the log, of whichever kind."""
        return next(value for value in vars(self).values() if isinstance(value, LogSpec))

    @property
    def files(self) -> FileLogSpec | None:
        """The spec of a log in files, of whichever kind; None for another log."""
        return self.log if isinstance(self.log, FileLogSpec) else None


FILE_LOGS: tuple[type[FileLogSpec], ...] = (ParquetSpec, CsvSpec)
"""The kinds of logs in files."""

LOG_KINDS: tuple[str, ...] = tuple(
    name
    for name, hint in get_type_hints(DataSpec).items()
    if any(isinstance(kind, type) and issubclass(kind, LogSpec) for kind in get_args(hint))
)
"""The keys of `data` that give a log, each of another kind."""
GENERATED_KINDS: tuple[str, ...] = tuple(name for name in LOG_KINDS if name not in {kind.kind for kind in FILE_LOGS})
"""Those of logs that are generated from a seed."""
