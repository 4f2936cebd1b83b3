"""A hyper-parameter search around a recipe."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rowstead.spec.axis import AxisSpec, axis_from, check_combinations, check_names, with_settings
from rowstead.spec.bounds import MAX_POINTS, AboveZero, AtLeastOne, Processes, up_to
from rowstead.spec.errors import RowsteadError, SpecError, require
from rowstead.spec.heads import HEADS
from rowstead.spec.parse import parse
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS
from rowstead.spec.run import RunSpec, read_recipe
from rowstead.spec.study import StudySpec, load_study

Sampler = Literal["grid", "random", "tpe", "gp"]
RATES = ("train.sparse_optimizer.lr", "train.dense_optimizer.lr")
"""Learning rates, the first settings to adapt to another batch size."""
EPS, WARMUP, BETAS = "train.sparse_optimizer.eps", "train.schedule.warmup_steps", ("beta1", "beta2")
BY_STEPS = ("max_steps", "eval_every", "checkpoint_every")
"""Settings of the training loop in steps; they shrink as the batch grows."""
MARGIN = 8.0
"""Default search range around the recipe's value, as a factor up and down."""
GROWTH_MARGIN = 2.0
"""With a larger batch, learning rates range from unchanged to scaled with the batch, with this margin on both ends."""


@dataclass(frozen=True, kw_only=True)
class TuneSpec(StudySpec):
    """Trials of a recipe with settings chosen by a sampler to minimise NE."""

    retune_for: Mapping[str, Any] = field(default_factory=dict)
    """Changes to re-tune the recipe for, such as `train.batch_size: 8192`; the search starts from the recipe's settings."""
    space: tuple[AxisSpec, ...] = ()
    """The search space. Default: learning rates, the sparse optimizer's eps, warm-up and decay around the recipe's values; for a larger
    batch also Adam's betas."""
    sampler: Sampler = "gp"
    """`gp`: Gaussian process; `tpe`: tree-structured Parzen estimator; `random`; `grid`: all combinations of values."""
    trials: Annotated[AtLeastOne, up_to(MAX_POINTS)] | None = 40
    """Stop after this many trials."""
    minutes: AboveZero | None = None
    """Stop once trials have taken this long, including those of earlier sessions."""
    samples_per_s: AboveZero | None = None
    """Minimum throughput: slower settings cannot win."""
    prune: bool = True
    """Stop trials early that are worse half-way than two thirds of those before them."""
    evaluations: AtLeastOne = 4
    """Evaluations per trial for pruning."""
    workers: Processes = 1
    """Number of parallel worker processes."""
    seed: int = 1
    """Seed of the sampler; runs use the recipe's seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.space, "space")
        require(self.trials is not None or self.minutes is not None, "trials", "set `trials` or `minutes`")
        if self.sampler == "grid":
            ranged = next((axis.title for axis in self.space if axis.low is not None), None)
            require(ranged is None, "space", f"`grid` needs values for `{ranged}`, not a range")
            require(bool(self.space), "space", "`grid` needs axes with values")
            check_combinations(self.space, "space")


def plain_recipe(spec: TuneSpec) -> Any:
    """Return the recipe before the changes of `retune_for`."""
    return with_settings(read_recipe(spec.recipe), spec.set)


def base_run(spec: TuneSpec) -> RunSpec:
    """Return the run whose settings the search starts from."""
    run = parse(RunSpec, plain_recipe(spec))
    for task in run.model.tasks[:1]:
        has_ne = HEADS[task.loss].is_probability
        require(
            has_ne,
            "recipe",
            f"a search minimises NE, and `{task.name}`, the first of `model.tasks`, has none: list one with `bce` first",
        )
    return run


def changes_of(spec: TuneSpec) -> dict[str, Any]:
    """Return the recipe changes of all trials: `retune_for`, and settings in steps rescaled to the same number of samples."""
    run, times = base_run(spec), batch_growth(spec)
    kept = {f"train.{name}": getattr(run.train, name) for name in BY_STEPS} if times != 1 else {}
    kept = {key: max(1, round(steps / times)) for key, steps in kept.items() if steps is not None}
    return {**kept, **spec.retune_for}


def trial_run(spec: TuneSpec, settings: Mapping[str, Any] | None = None) -> RunSpec:
    """Return the run of a trial with these settings."""
    return parse(RunSpec, with_settings(plain_recipe(spec), {**changes_of(spec), **(settings or {})}))


def batch_growth(spec: TuneSpec) -> float:
    """Return the new batch size over the old one."""
    now = parse(RunSpec, with_settings(plain_recipe(spec), spec.retune_for))
    return now.train.batch_size / base_run(spec).train.batch_size


def build_space(spec: TuneSpec) -> tuple[AxisSpec, ...]:
    """Return the search space: the spec's, or the settings that matter most to quality around the recipe's values."""
    if spec.space:
        return spec.space
    run, times = base_run(spec), max(1.0, batch_growth(spec))
    sparse, dense = run.train.sparse_optimizer, run.train.dense_optimizer
    low, high = (1 / MARGIN, MARGIN) if times == 1 else (1 / GROWTH_MARGIN, GROWTH_MARGIN * times)
    axes = [
        AxisSpec(name="sparse lr", keys=(RATES[0],), low=sparse.lr * low, high=sparse.lr * high, log=True),
        AxisSpec(name="dense lr", keys=(RATES[1],), low=dense.lr * low, high=dense.lr * high, log=True),
    ]
    sparse_reads = ROW_OPTIMIZERS[sparse.kind].hyper_parameters
    if "eps" in sparse_reads:
        # A row's gradient is a mean over the batch: for rare ids it falls as the batch grows, and eps weighs more.
        axes.append(AxisSpec(name="sparse eps", keys=(EPS,), low=sparse.eps / 10 / times, high=sparse.eps * 10, log=True))
    if times > 1:  # Adam averages over steps: lower betas keep the same window in samples
        dense_reads = BETAS if dense.kind == "adam" else ()
        for which, optimizer, reads in (("sparse", sparse, sparse_reads), ("dense", dense, dense_reads)):
            for name in BETAS:
                beta = getattr(optimizer, name)
                if name in reads and beta > 0:
                    key = f"train.{which}_optimizer.{name}"
                    axes.append(AxisSpec(name=f"{which} {name}", keys=(key,), low=beta**times, high=beta))
    if (num_steps := num_steps_of(trial_run(spec))) is not None and num_steps >= 20:
        most = max(num_steps // 5, run.train.schedule.warmup_steps)
        axes.append(AxisSpec(name="warm-up", keys=(WARMUP,), low=0, high=most, whole=True))
    decays = ("none", "linear", "cosine")
    axes.append(AxisSpec(name="decay", keys=("train.schedule.decay",), values=decays))
    return tuple(axes)


def initial_settings(spec: TuneSpec, space: Iterable[AxisSpec]) -> list[dict[str, Any]]:
    """Return the first settings to try, by axis: the recipe's own, and for a larger batch scaled learning rates.

    With scaled rates, eps falls as the gradients of rare rows do; warm-up and Adam's betas keep their length in samples.
    """
    own = _values_in(trial_run(spec), space)
    times = batch_growth(spec)
    rates = [axis.title for axis in space if set(axis.keys) & set(RATES)]
    title_of = {axis.keys[0]: axis.title for axis in space if len(axis.keys) == 1}
    with_it: dict[str, Any] = {}
    if (eps := title_of.get(EPS)) is not None:
        with_it[eps] = own[eps] / times
    if (warmup := title_of.get(WARMUP)) is not None:
        with_it[warmup] = round(own[warmup] / times)
    with_it |= {title: own[title] ** times for key, title in title_of.items() if key.rpartition(".")[2] in BETAS}
    factors = (math.sqrt(times), times) if times != 1 else ()
    found = [own, *(own | with_it | {title: own[title] * factor for title in rates} for factor in factors)]
    inside = [{name: value for name, value in one.items() if value is not None} for one in found]
    return [_clip(one, space) for one in inside]


def unchanged_settings(spec: TuneSpec, space: Iterable[AxisSpec]) -> dict[str, Any] | None:
    """Return the recipe's own settings by axis; None if they are outside the space."""
    own = {name: value for name, value in _values_in(trial_run(spec), space).items() if value is not None}
    return own if own and _clip(own, space) == own else None


def _values_in(run: RunSpec, space: Iterable[AxisSpec]) -> dict[str, Any]:
    found = {}
    for axis in space:
        if not axis.keys:
            continue  # a recipe does not record which option it has
        value: Any = run
        for part in axis.keys[0].split("."):
            value = value[int(part)] if part.isdigit() and isinstance(value, tuple) else getattr(value, part, None)
        found[axis.title] = list(value) if isinstance(value, tuple) else value
    return found


def _clip(values: dict[str, Any], space: Iterable[AxisSpec]) -> dict[str, Any]:
    """Clip values to their ranges; a value that an axis does not have is left to the sampler."""
    kept = {}
    for axis in space:
        value = values.get(axis.title)
        if value is None:
            continue
        if axis.low is not None and axis.high is not None:
            kept[axis.title] = min(max(value, axis.low), axis.high)
            if axis.whole:
                kept[axis.title] = round(kept[axis.title])
        elif value in axis.labels:
            kept[axis.title] = value
    return kept


def num_steps_of(run: RunSpec) -> int | None:
    """Return the number of steps of a run if its spec determines it, else None."""
    if (num_samples := run.data.log.num_train_samples) is None:
        return run.train.max_steps
    of_log = run.train.epochs * math.ceil(num_samples / run.train.batch_size)
    return min(of_log, run.train.max_steps or of_log)


_RANGE = re.compile(r"^\s*(\S+?)\s*\.\.\s*(\S+?)\s*$")


def space_axis_from(text: str) -> AxisSpec:
    """Parse an axis of the command line: `KEY=LOW..HIGH` or `KEY=A,B,C`. A range of a factor of 10 or more uses a log scale."""
    key, _, values = text.partition("=")
    found = _RANGE.match(values)
    if found is None:
        return axis_from(text)
    try:
        low, high = (float(end) for end in found.groups())
    except ValueError:
        raise RowsteadError(f"cannot read `{text}`: write a range as key.path=0.001..0.1") from None
    whole = all(re.fullmatch(r"[+-]?[\d_]+", end) for end in found.groups())
    try:
        return AxisSpec(keys=(key.strip(),), low=low, high=high, log=low > 0 and high / low >= 10, whole=whole)
    except SpecError as error:
        raise RowsteadError(f"`{text}`: {error}") from None


def load_tune(name_or_path: str) -> TuneSpec:
    """Load a search by path, or build one around a run's recipe, by path or shipped name."""
    return load_study(TuneSpec, name_or_path, "tune")
