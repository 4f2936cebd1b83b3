"""A first recipe for a log, as YAML with comments that say why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from rowstead.data.csv_cells import type_name
from rowstead.data.describe import describe
from rowstead.data.file_log import open_file_log
from rowstead.data.files import choose_file_log
from rowstead.data.survey import ColumnPlan, Survey, refine, survey
from rowstead.data.tables import given_files, list_files
from rowstead.records.run_folder import DEFAULT_ROOT
from rowstead.report.terminal import printable
from rowstead.spec.data import CsvSpec, FileLogSpec
from rowstead.spec.features import DenseFeatureSpec, SparseFeatureSpec
from rowstead.spec.parse import to_plain
from rowstead.spec.run import RunSpec
from rowstead.spec.statistics import DenseStatistics, LogStatistics, SparseStatistics
from rowstead.spec.yaml_text import read_text

MEMORY_BYTES = 256 << 20
"""For counting ids."""
MAX_ROWS = 10_000_000
STEPS_PER_EPOCH = 500
"""The batch size is chosen for about so many steps, within BATCH_SIZES."""
BATCH_SIZES = (64, 4096)


def first_recipe(
    data: Any,
    *,
    label: str = "label",
    name: str | None = None,
    out: Path | str | None = None,
    root: Path | str = DEFAULT_ROOT,
    max_rows: int = MAX_ROWS,
) -> RunSpec:
    """Look at a log and return a recipe for it, which trains as it is: what `rowstead init` writes.

    `data` is a DataFrame, an Arrow table, a dict of columns, or paths (a file, folder, glob or URL, or a list of them); a table is
    written once to `tables/` under `root`. `label` is the label column, `name` that of the runs. Ids are counted in about `max_rows`
    rows. `out` is a file for the recipe as YAML, with comments that say why.
    """
    paths = given_files(data, Path(root))
    log = choose_file_log(paths, label=label)
    found, statistics = look_at(log, max_rows=max_rows)
    if name is None:
        name = recipe_name(log.train) if list_files(data) is not None else "table"
    text = write_recipe(log, found, statistics, name=name)
    if out is not None:
        Path(out).write_text(text, encoding="utf-8")
    return RunSpec.from_dict(read_text(text, what="the recipe"))


def look_at(
    log: FileLogSpec, *, max_rows: int = MAX_ROWS, progress: Callable[[int], None] | None = None
) -> tuple[Survey, LogStatistics]:
    """What each column of a log can be, and its statistics; `progress` is called with the number of rows counted."""
    found = survey(log)
    blocks = open_file_log(log, found.features, split="all").raw_blocks(max_rows)
    statistics = describe(blocks, found.features, memory_bytes=MEMORY_BYTES, progress=progress)
    return refine(found, statistics), statistics


def write_recipe(log: FileLogSpec, found: Survey, statistics: LogStatistics, *, name: str | None = None) -> str:
    """The text of a recipe for what `look_at` has found."""
    return "\n".join(_lines(log, found, statistics, name or recipe_name(log.train))) + "\n"


def recipe_name(paths: Sequence[str]) -> str:
    """A name for runs on these files."""
    stem = PurePath(paths[0].rstrip("/").replace("*", "")).name.split(".")[0] or "log"
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_") or "log"


def choose_batch_size(num_rows: int) -> int:
    """A power of two."""
    wanted = max(num_rows // STEPS_PER_EPOCH, 1)
    return min(max(1 << (wanted.bit_length() - 1), BATCH_SIZES[0]), BATCH_SIZES[1])


def _lines(log: FileLogSpec, found: Survey, statistics: LogStatistics, name: str) -> Iterator[str]:
    rate = statistics.label_mean
    yield f"# Written by `rowstead init` from {found.num_rows:,} rows. Train it with `rowstead train`, and change what you know better."
    if statistics.num_rows < found.num_rows:
        yield f"# Figures are of {statistics.num_rows:,} of them, spread over the log: there may be more ids in all."
    yield f"name: {_flow(name)}"
    yield "data:"
    yield f"  {log.kind}:"
    yield f"    train: {_flow(list(log.train)) if len(log.train) > 1 else _flow(log.train[0])}"
    yield f"    label: {_flow(log.label)}" + (f"  # mean {rate:.4g}" if rate is not None else "")
    if found.time_column is not None:
        yield f"    split: {{by: time, column: {_flow(found.time_column)}}}  # the latest rows are for evaluation"
    else:
        yield "    split: {by: hash}  # random rows are for evaluation: no column has times"
    yield "    eval_fraction: 0.1"
    if statistics.num_labels_missing:
        yield f"    on_bad_row: skip  # {statistics.num_labels_missing:,} rows have no label"
    if isinstance(log, CsvSpec):
        yield from _csv_lines(log, found)
    yield from _feature_lines(found, statistics)
    yield "model:"
    yield "  width: 16  # of the embedding rows"
    if found.features.dense:
        yield "  bottom: [64]"
    yield "  top: [64, 32]"
    if len(found.features.dense) == 0 and len(found.features.sparse) == 1:
        yield "  interaction: {kind: concat}"
    batch_size = choose_batch_size(int(0.9 * found.num_rows))
    yield "train:"
    yield f"  batch_size: {batch_size}  # about {max(1, round(0.9 * found.num_rows / batch_size)):,} steps per epoch"
    yield "  sparse_optimizer: {kind: rowwise_adagrad, lr: 0.1, eps: 0.01}"
    yield "  dense_optimizer: {kind: adam, lr: 0.002}"
    yield "  schedule: {decay: linear}"
    left_out = [plan for plan in found.columns if plan.use == "left out"]
    if left_out:
        yield "# Columns that are left out, and why:"
        yield from (f"#   {printable(plan.name)}: {printable(plan.why)}" for plan in left_out)


def _csv_lines(log: CsvSpec, found: Survey) -> Iterator[str]:
    plain = to_plain(log, defaults=False)
    for name in ("separator", "columns", "list_separator", "quotes"):
        if name in plain:
            yield f"    {name}: {_flow(plain[name])}"
    yield "    types:  # guessed from the first rows"
    for plan in found.columns:
        if plan.use != "left out" and plan.name not in found.path_columns and "=" not in type_name(plan.type):
            yield f"      {_flow(plan.name)}: {type_name(plan.type)}"


def _feature_lines(found: Survey, statistics: LogStatistics) -> Iterator[str]:
    dense = {one.name: one for one in statistics.dense}
    sparse = {one.name: one for one in statistics.sparse}
    yield "features:"
    for key in ("dense", "sparse"):
        kind = DenseFeatureSpec if key == "dense" else SparseFeatureSpec
        entries = [(plan, feature) for plan in found.columns for feature in plan.features if isinstance(feature, kind)]
        if entries:
            yield f"  {key}:"
        for plan, feature in entries:
            about = _about_dense(dense.get(feature.name)) if key == "dense" else _about_sparse(sparse.get(feature.name), plan)
            comment = printable("; ".join(part for part in (about, plan.why) if part))
            yield f"    - {_flow(to_plain(feature, defaults=False))}" + (f"  # {comment}" if comment else "")


def _about_dense(one: DenseStatistics | None) -> str:
    if one is None or one.mean is None:
        return ""
    missing = f", {100 * one.missing_share:.3g} % missing" if one.missing_share else ""
    return f"{one.min:.4g} to {one.max:.4g}, mean {one.mean:.4g}{missing}"


def _about_sparse(one: SparseStatistics | None, plan: ColumnPlan) -> str:
    if one is None:
        return ""
    if plan.use == "time":
        return ""
    count = (
        f"{one.num_distinct:,} ids"
        if one.exact
        else f"about {one.num_distinct:,} ids (estimated, ± {100 * one.distinct_error:.1f} %)"
    )
    lengths = f", {one.length_mean:.3g} per row" if one.length_max > 1 else ""
    return count + lengths


def _flow(value: object) -> str:
    """A value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        is_plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", value) and value.lower() not in _YAML_WORDS
        return value if is_plain else _quote(value)
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return f"{value:_}" if isinstance(value, int) and abs(value) >= 10_000 else repr(value)


def _quote(text: str) -> str:
    """A text in double quotes, on one line whatever it has in it."""
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in text) + '"'


_YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "none")
