"""A scenario: the sliders of the page as a model and a fleet, and the recipe that follows from them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rowstead.plan.traffic import mean_ids, popularities
from rowstead.spec.bounds import Bound, Spec
from rowstead.spec.data import DataSpec, SynthSpec
from rowstead.spec.errors import SpecError, require
from rowstead.spec.features import DenseFeatureSpec, FeaturesSpec, SparseFeatureSpec
from rowstead.spec.interactions import InteractionKind, InteractionSpec
from rowstead.spec.model import ModelSpec
from rowstead.spec.parse import parse
from rowstead.spec.row_optimizers import RowOptimizerName, SparseOptimizerSpec
from rowstead.spec.run import RunSpec
from rowstead.spec.stores import PlannedStore
from rowstead.spec.train import TrainSpec

MAX_DENSE, MAX_SPARSE = 20_000, 2_000
"""Limits on features: the page has to answer while a slider moves."""


def _between(least: float, most: float) -> Bound:
    return Bound(lambda value: least <= value <= most, f"must be from {least:g} to {most:g}, got {{:g}}")


Layers = Annotated[
    tuple[int, ...],
    Bound(
        lambda widths: len(widths) <= 32 and all(1 <= one <= 100_000 for one in widths), "give up to 32 widths below 100,000"
    ),
]


@dataclass(frozen=True, kw_only=True)
class Scenario(Spec):
    """The positions of the sliders."""

    num_dense: Annotated[int, _between(0, MAX_DENSE)] = 256
    """Dense features."""
    num_sparse: Annotated[int, _between(0, MAX_SPARSE)] = 32
    """Sparse features."""
    ids: Annotated[float, _between(0.01, 10_000)] = 16.0
    """Mean ids per feature and example."""
    num_rows: Annotated[int, _between(1, 10**12)] = 1_000_000
    """Mean hash size of the tables."""
    width: Annotated[int, _between(1, 8192)] = 64
    """Width of rows and of the bottom MLP's output."""
    bottom: Layers = (512,)
    """Hidden layers of the bottom MLP."""
    top: Layers = (512, 512, 512)
    """Hidden layers of the top MLP."""
    batch_size: Annotated[int, _between(1, 10**7)] = 1024
    """Examples per step of each GPU, or of each CPU trainer."""
    interaction: InteractionKind = "dot"
    """How features interact."""
    row_format: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of rows."""
    optimizer: RowOptimizerName = SparseOptimizerSpec().kind
    """Row optimizer, which determines the state stored with each row."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Number format of the dense arithmetic."""
    machine: str = "dgx-h100"
    """The servers that train."""
    placement: Literal["auto"] | PlannedStore = "auto"
    """Where the tables live."""
    num_trainers: Annotated[int, _between(1, 4096)] = 1
    """Servers that train."""
    num_servers: Annotated[int, _between(0, 4096)] = 0
    """Sparse parameter servers, with `remote` tables; 0 chooses as many as pay off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_dense + self.num_sparse > 0, "num_sparse", "a model needs at least one feature")


def scenario_of(spec: RunSpec, fleet: Scenario | None = None) -> Scenario:
    """Where the sliders stand for a recipe; machine and fleet as they were."""
    fleet = fleet or Scenario()
    tables = spec.tables
    lengths = mean_ids(spec)
    return dataclasses.replace(
        fleet,
        num_dense=len(spec.features.expanded_dense()),
        num_sparse=len(lengths),
        ids=float(f"{statistics.fmean(lengths):.3g}") if lengths else fleet.ids,
        num_rows=_rounded(statistics.fmean(table.num_rows for table in tables)) if tables else fleet.num_rows,
        width=spec.model.width,
        bottom=spec.model.bottom,
        top=spec.model.top,
        batch_size=spec.train.batch_size,
        interaction=spec.model.interaction.kind,
        row_format=spec.model.row_format,
        optimizer=spec.train.sparse_optimizer.kind,
        precision=spec.train.precision,
    )


def spec_of(scenario: Scenario, base: RunSpec | None = None) -> RunSpec:
    """The recipe that a scenario comes to.

    What was not moved stays as the base recipe has it. Where hash size or ids were moved, all tables grow or shrink alike; where the
    number of features was, the base's features are taken in turn, and the log becomes a synthetic one that has so many; tasks then read
    its label.
    """
    before = scenario_of(base, scenario) if base is not None else None
    model, train = base.model if base else ModelSpec(), base.train if base else TrainSpec()
    model = dataclasses.replace(
        model,
        width=scenario.width,
        bottom=scenario.bottom,
        top=scenario.top,
        row_format=scenario.row_format,
        interaction=dataclasses.replace(model.interaction if base else InteractionSpec(), kind=scenario.interaction),
    )
    optimizer = dataclasses.replace(train.sparse_optimizer if base else SparseOptimizerSpec(), kind=scenario.optimizer)
    train = dataclasses.replace(train, batch_size=scenario.batch_size, precision=scenario.precision, sparse_optimizer=optimizer)
    shape = ("num_dense", "num_sparse", "ids", "num_rows")
    if base is not None and before is not None and all(getattr(before, one) == getattr(scenario, one) for one in shape):
        features = _of_width(base.features, base.model.width, scenario.width)
        return dataclasses.replace(base, model=model, train=train, features=features)
    data, features = _log_and_features(scenario, base)
    if base is not None and base.data.synth is None:
        model, train = _on_synthetic(model, data.log.label), _without_groups(train)
    if base is None:
        return RunSpec(name="what-if", data=data, features=features, model=model, train=train)
    return dataclasses.replace(base, data=data, features=features, model=model, train=train, scale=1.0, placement="auto")


def _on_synthetic(model: ModelSpec, label: str) -> ModelSpec:
    """The same model, whose tasks all read the one label of a synthetic log: a plan depends on their number alone."""
    return dataclasses.replace(model, tasks=tuple(dataclasses.replace(task, label=label) for task in model.tasks))


def _without_groups(train: TrainSpec) -> TrainSpec:
    """The same training, which stops by the default measure where it did by one of groups, which a synthetic log does not have."""
    stop = train.early_stop
    if stop is None or stop.monitor != "gauc":
        return train
    return dataclasses.replace(train, early_stop=dataclasses.replace(stop, monitor=None))


def _of_width(features: FeaturesSpec, before: int, after: int) -> FeaturesSpec:
    """The same features; tables that have the model's own width follow it."""
    if before == after:
        return features
    sparse = tuple(dataclasses.replace(one, width=None) if one.width == before else one for one in features.sparse)
    tables = tuple(dataclasses.replace(one, width=None) if one.width == before else one for one in features.tables)
    return dataclasses.replace(features, sparse=sparse, tables=tables)


def _log_and_features(scenario: Scenario, base: RunSpec | None) -> tuple[DataSpec, FeaturesSpec]:
    """A synthetic log with so many features, their sizes in the proportions of the base's."""
    rows = [scenario.num_rows] * scenario.num_sparse
    lengths = [scenario.ids] * scenario.num_sparse
    distinct, synth = list(rows), SynthSpec(lengths="poisson")
    if base is not None and base.features.sparse:
        of_feature = {index: table.num_rows for table in base.tables for index in table.features}
        own_rows = _in_turn([of_feature[index] for index in range(len(of_feature))], scenario.num_sparse)
        own_lengths = _in_turn(mean_ids(base), scenario.num_sparse)
        own_distinct = _in_turn([law.num_ids for law in popularities(base)], scenario.num_sparse)
        larger, longer = _ratio(scenario.num_rows, own_rows), _ratio(scenario.ids, own_lengths)
        rows = [_rounded(max(1, one * larger)) for one in own_rows]
        lengths = [float(f"{max(0.001, one * longer):.6g}") for one in own_lengths]
        distinct = [_rounded(max(1, one * larger)) for one in own_distinct]
        synth = base.data.synth or synth
    data = DataSpec(
        synth=dataclasses.replace(
            synth,
            num_dense=scenario.num_dense,
            num_sparse=scenario.num_sparse,
            num_skewed_dense=min(synth.num_skewed_dense, scenario.num_dense),
            num_ids=_alike(distinct, 100_000),
            mean_ids=_alike(lengths, 1.0),
            length_power=0.0,
            max_ids=max(synth.max_ids, round(4 * max(lengths, default=1)) + 8),
        )
    )
    dense = (DenseFeatureSpec(name="dense_{i}", repeat=scenario.num_dense),) if scenario.num_dense > 1 else ()
    if scenario.num_dense == 1:
        dense = (DenseFeatureSpec(name="dense_0"),)
    return data, FeaturesSpec(dense=dense, sparse=tuple(_sparse(rows)))


def _sparse(rows: Sequence[int]) -> list[SparseFeatureSpec]:
    """One spec for each stretch of features of one hash size."""
    made: list[SparseFeatureSpec] = []
    start = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index] != rows[start]:
            several = index - start > 1
            name = "sparse_{i}" if several else f"sparse_{start}"
            first = start if several else 0
            made.append(SparseFeatureSpec(name=name, num_rows=rows[start], repeat=index - start, start=first))
            start = index
    return made


def _in_turn(values: Sequence[Any], count: int) -> list[Any]:
    return [values[index % len(values)] for index in range(count)]


def _ratio(wanted: float, values: Sequence[float]) -> float:
    return wanted / statistics.fmean(values) if values else 1.0


def _alike(values: Sequence[Any], otherwise: Any) -> Any:
    """One number where all are alike, else all of them."""
    return (values[0] if values else otherwise) if len(set(values)) <= 1 else tuple(values)


def _rounded(number: float) -> int:
    """Four digits: sliders need no more, and files stay readable."""
    return int(float(f"{number:.4g}"))


def checked_base(plain: Any) -> RunSpec | None:
    """A recipe that came with a request, refused before it is written out where it has more features than the page can take."""
    if plain is None:
        return None
    features = plain.get("features") if isinstance(plain, dict) else None
    for kind, most in (("dense", MAX_DENSE), ("sparse", MAX_SPARSE)):
        given = features.get(kind) if isinstance(features, dict) else None
        repeats = [one.get("repeat", 1) for one in given or [] if isinstance(one, dict)] if isinstance(given, list) else []
        total = sum(one for one in repeats if isinstance(one, (int, float)))
        if total > most:
            raise SpecError(f"features.{kind}", f"the page takes up to {most:,} of them, got {total:,}")
    return parse(RunSpec, plain)
