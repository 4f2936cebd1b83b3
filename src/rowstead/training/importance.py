"""What mattered: how much worse the predictions are when the values of one feature are permuted among the evaluated examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rowstead.data.batch import Batch, Sparse
from rowstead.data.source import Source
from rowstead.data.tables import as_files
from rowstead.nn.dlrm import DLRM
from rowstead.records.run_folder import DEFAULT_ROOT
from rowstead.spec.data import SplitName
from rowstead.spec.errors import DataError, RowsteadError
from rowstead.training.device import choose_device, set_threads
from rowstead.training.evaluate import EVAL_BATCH
from rowstead.training.progress import Callback
from rowstead.training.trained import open_run

Floats = NDArray[np.float64]
Bags = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ids [nnz] and offsets [n + 1] of one feature."""

MAX_SAMPLES = 50_000
"""Examples that are kept in memory, evenly spaced over the evaluated set."""
PERMUTATIONS = 5
_NORMAL_95 = 1.959964


@dataclass(frozen=True, kw_only=True)
class Importance:
    """How much NE rises when a feature is permuted."""

    name: str
    kind: Literal["sparse", "dense"]
    ne_increase: float
    """The mean over the permutations."""
    low: float
    """The lower end of the 95 % interval."""
    high: float


@dataclass(frozen=True, kw_only=True)
class Importances:
    """The features of a model, the one that matters most first."""

    num_samples: int
    permutations: int
    ne: float
    """Of the same examples with nothing permuted."""
    features: tuple[Importance, ...]


def importance(
    run: Path | str,
    *,
    data: Any = None,
    split: SplitName = "eval",
    permutations: int = PERMUTATIONS,
    max_samples: int = MAX_SAMPLES,
    seed: int = 1,
    root: Path | str = DEFAULT_ROOT,
    callback: Callback | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Importances:
    """How much each feature of a run's model matters on a split of its log, or on other `data`, by permutation.

    The values of one feature are permuted among `max_samples` examples, evenly spaced over the set, while all others stay, `permutations`
    times. NE then rises by as much as the model relies on the feature: one whose information is in other features too matters less
    than it would alone. Intervals are of 95 %, over examples and permutations. `progress` is called with the predictions done and
    all of them.
    """
    if permutations < 2:
        raise RowsteadError(f"permutations must be at least 2, got {permutations}")
    with as_files(data) as files:
        trained = open_run(run, root=root, callback=callback)
        if trained.model.tasks:
            raise RowsteadError("permutation importance is of models with one label, and this one has several tasks")
        device = choose_device(trained.spec)
        if not trained.model.store.moves_with_module:
            device = torch.device("cpu")
        sample = Sample.read(trained.source(files, split=split), max_samples)
        dense = [(f.name if f.element is None else f.name.split("[")[0]) for f in trained.spec.features.expanded_dense()]
        sparse = [feature.name for feature in trained.spec.features.expanded_sparse()]
        with set_threads(trained.spec.threads):
            return measure(
                trained.model.to(device),
                sample,
                dense,
                sparse,
                keep_rate=trained.spec.data.negative_keep_rate,
                permutations=permutations,
                seed=seed,
                progress=progress,
            )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Examples in system memory, with the ids of each feature by themselves."""

    dense: NDArray[np.float32]
    """[n, Fd]."""
    bags: tuple[Bags, ...]
    """Of each sparse feature."""
    labels: Floats
    weights: Floats

    @classmethod
    def read(cls, source: Source, max_samples: int) -> Sample:
        """Every so many examples of a source, at most about `max_samples`."""
        every = max(1, -(-source.num_samples // max(1, max_samples)))
        dense, labels, weights, num_seen = [], [], [], 0
        bags: list[list[Bags]] = []
        for batch, _ in source.batches(EVAL_BATCH):
            if batch.labels is None:
                raise DataError("the log to evaluate on has no label column")
            rows = np.arange(-num_seen % every, batch.num_samples, every)
            num_seen += batch.num_samples
            offsets, ids = batch.sparse.offsets.numpy(), batch.sparse.ids.numpy().astype(np.int64, copy=False)
            starts = range(0, batch.sparse.num_features * batch.num_samples, batch.num_samples)
            bags.append([take_bags((ids, offsets[s : s + batch.num_samples + 1]), rows) for s in starts])
            dense.append(batch.dense.numpy()[rows])
            labels.append(batch.labels.numpy()[rows].astype(np.float64))
            weights.append(np.ones(len(rows)) if batch.weights is None else batch.weights.numpy()[rows].astype(np.float64))
        if not labels:
            raise DataError("there is nothing to evaluate: the split has no examples")
        joined = tuple(_join(parts) for parts in zip(*bags, strict=True))
        return cls(dense=np.concatenate(dense), bags=joined, labels=np.concatenate(labels), weights=np.concatenate(weights))

    def batch(self, start: int, stop: int, dense: NDArray[np.float32], bags: tuple[Bags, ...]) -> Batch:
        """Examples `start` to `stop`, with these values."""
        parts = [take_bags(bag, np.arange(start, stop)) for bag in bags]
        lengths = [np.diff(offsets) for _, offsets in parts]
        ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))
        ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in parts)])
        sparse = Sparse(ids=torch.from_numpy(ids), offsets=torch.from_numpy(ends), num_features=len(bags))
        return Batch(dense=torch.from_numpy(np.ascontiguousarray(dense[start:stop])), sparse=sparse)


def take_bags(bags: Bags, rows: NDArray[np.int64]) -> Bags:
    """The bags of some rows, in their order."""
    ids, offsets = bags
    lengths = np.diff(offsets)[rows]
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return ids[np.repeat(offsets[:-1][rows] - ends[:-1], lengths) + np.arange(ends[-1])], ends


def _join(parts: tuple[Bags, ...]) -> Bags:
    lengths = np.concatenate([np.diff(offsets) for _, offsets in parts])
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def measure(
    model: DLRM,
    sample: Sample,
    dense: list[str],
    sparse: list[str],
    *,
    keep_rate: float = 1.0,
    permutations: int = PERMUTATIONS,
    seed: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Importances:
    """Measure the features of a model; dense columns with the same name are permuted together.

    An interval is the mean ± 1.96 √(variance over examples / n + variance over permutations / R): the mean over examples of what a
    permutation adds to their losses varies with the examples and with the permutation.
    """
    n = len(sample.labels)
    random = np.random.default_rng(seed)
    features: list[tuple[str, Literal["sparse", "dense"], list[int]]] = [(name, "sparse", [i]) for i, name in enumerate(sparse)]
    features += [(name, "dense", [i for i, other in enumerate(dense) if other == name]) for name in dict.fromkeys(dense)]
    num_passes, num_done = 1 + len(features) * permutations, 0

    def losses(values: NDArray[np.float32], bags: tuple[Bags, ...]) -> Floats:
        nonlocal num_done
        found = _losses(model, sample, values, bags, keep_rate)
        num_done += n
        if progress is not None:
            progress(num_done, num_passes * n)
        return found

    weights = sample.weights * (sample.labels + (1 - sample.labels) / keep_rate)
    total = float(weights.sum())
    mean_label = float((sample.weights * sample.labels).sum()) / total if total > 0 else 0.0
    if not 0 < mean_label < 1:
        raise DataError("all labels of the evaluated examples are equal, so that there is no NE")
    base = -(mean_label * math.log(mean_label) + (1 - mean_label) * math.log1p(-mean_label)) * total
    before = losses(sample.dense, sample.bags)
    found = []
    for name, kind, columns in features:
        added, means = np.zeros(n), []
        for _ in range(permutations):
            order = random.permutation(n)
            values, bags = sample.dense, sample.bags
            if kind == "dense":
                values = values.copy()
                values[:, columns] = sample.dense[order][:, columns]
            else:
                bags = (*bags[: columns[0]], take_bags(bags[columns[0]], order), *bags[columns[0] + 1 :])
            more = losses(values, bags) - before
            added += more / permutations
            means.append(float(more.sum()) / base)
        mean = float(np.mean(means))
        of_examples = float(((added - weights * added.sum() / total) ** 2).sum()) / base**2
        half = _NORMAL_95 * math.sqrt(of_examples + float(np.var(means, ddof=1)) / permutations)
        found.append(Importance(name=name, kind=kind, ne_increase=mean, low=mean - half, high=mean + half))
    found.sort(key=lambda one: -one.ne_increase)
    return Importances(num_samples=n, permutations=permutations, ne=float(before.sum()) / base, features=tuple(found))


def _losses(model: DLRM, sample: Sample, dense: NDArray[np.float32], bags: tuple[Bags, ...], keep_rate: float) -> Floats:
    """The weighted log loss of each example [n]."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    n = len(sample.labels)
    with torch.no_grad():
        batches = (sample.batch(start, min(start + EVAL_BATCH, n), dense, bags) for start in range(0, n, EVAL_BATCH))
        logits = np.concatenate([model(batch.to(device)).float().cpu().numpy() for batch in batches])
    z = logits.astype(np.float64) + math.log(keep_rate)
    labels = sample.labels
    loss: Floats = sample.weights * (labels * np.logaddexp(0, -z) + (1 - labels) / keep_rate * np.logaddexp(0, z))
    return loss
