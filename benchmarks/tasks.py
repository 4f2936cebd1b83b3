"""Is one model of two labels as good as two models of one, and is ESMM's conversion rate right where naive training's is not?

The log is synthetic: a click, and a conversion that is known only of clicks, with log-odds that correlate. For each seed (of the log, and of
the initial weights with it) four models of the same tables, network and head are trained on the same batches: MMoE with both labels, each
label alone (conversions then only on clicks, as is naive), and ESMM. The teacher is known, so NEs are expectations
under it, without label noise: of clicks over all examples, of conversions over those that were clicked. The bias is the mean of
p(conversion if clicked) over all impressions, clicked or not, against the teacher's mean, minus 1. Intervals are Student's, 95 %, over the seeds.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import numpy as np
import torch

from benchmarks.harness import publish
from benchmarks.seeds import over_seeds, seed_arguments, seeds_of
from rowstead import run
from rowstead.spec.parse import parse
from rowstead.spec.run import RunSpec
from rowstead.training import trained
from rowstead.training.evaluate import predict_logits

NUM_IDS = (20, 50, 100, 200, 500, 1000)
CLICK, CONVERSION = {"name": "click", "label": "label"}, {"name": "conversion", "weight": 0.5}
MODELS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "mmoe": ("mmoe", [CLICK, CONVERSION]),
    "click alone": ("mmoe", [CLICK]),
    "conversion alone": ("mmoe", [CONVERSION]),
    "esmm": ("esmm", [CLICK, CONVERSION]),
}
"""Of each model its head and its tasks."""


def spec_of(model: str, seed: int, num_samples: int) -> RunSpec:
    """The recipe of one of the models."""
    head, tasks = MODELS[model]
    return parse(
        RunSpec,
        {
            "name": "tasks",
            "data": {
                "synth": {
                    "seed": seed,
                    "num_train_samples": num_samples,
                    "num_eval_samples": max(20_000, num_samples // 8),
                    "num_dense": 4,
                    "num_sparse": len(NUM_IDS),
                    "num_ids": list(NUM_IDS),
                    "click_rate": 0.2,
                    "signal": 1.7,
                    "interaction_share": 0.2,
                    "latent": 2,
                    "conversion": {"rate": 0.1, "correlation": 0.6},
                }
            },
            "features": {
                "dense": [{"name": "dense_{i}", "repeat": 4}],
                "sparse": [{"name": f"sparse_{i}", "num_rows": count, "hash": "modulo"} for i, count in enumerate(NUM_IDS)],
            },
            "model": {
                "width": 8,
                "bottom": [16],
                "top": [64],
                "tasks": tasks,
                "task_head": {"kind": head, "width": 32, "experts": 4, "expert": [32], "tower": [16]},
            },
            "train": {
                "batch_size": 1024,
                "sparse_optimizer": {"kind": "rowwise_adagrad", "lr": 0.2, "eps": 0.01},
                "dense_optimizer": {"kind": "adam", "lr": 0.003},
                "schedule": {"decay": "linear"},
            },
            "seed": seed,
            "threads": 1,
            "device": "cpu",
        },
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """One task of a model on the evaluation split, under the teacher."""

    ne: float
    ne_best: float
    bias: float
    """Mean prediction over the teacher's, over all impressions, minus 1."""


def score(logits: np.ndarray, true_p: np.ndarray, counted: np.ndarray) -> Scores:
    """Of logits [n] and true probabilities [n], NE over the examples that are counted."""
    z, p = logits.astype(np.float64), np.clip(true_p.astype(np.float64), 1e-12, 1 - 1e-12)

    def entropy(q: Any) -> Any:
        return -(q * np.log(q) + (1 - q) * np.log1p(-q))

    base = entropy(p[counted].mean())
    loss = (p * np.logaddexp(0, -z) + (1 - p) * np.logaddexp(0, z))[counted].mean()
    return Scores(
        ne=loss / base, ne_best=entropy(p[counted]).mean() / base, bias=float((1 / (1 + np.exp(-z))).mean() / p.mean() - 1)
    )


def train_and_score(model: str, seed: int, num_samples: int) -> dict[str, Scores]:
    """The scores of each of a model's tasks."""
    spec = spec_of(model, seed, num_samples)
    with tempfile.TemporaryDirectory() as folder:
        result = run.train(spec, out=f"{folder}/run")
        opened = trained.open_run(str(result.folder))
    both = dataclasses.replace(spec, model=spec_of("mmoe", seed, num_samples).model)  # to know which examples were clicked
    source = trained.TrainedRun(
        spec=both, model=opened.model, transforms=opened.transforms, id_kinds=opened.id_kinds, train_rate=None
    ).source()
    parts = [
        (logits, batch.true_p.numpy(), batch.labels.numpy())
        for batch, logits in predict_logits(opened.model, source, device=torch.device("cpu"))
        if batch.true_p is not None and batch.labels is not None
    ]
    logits, true_p, labels = (np.concatenate(values) for values in zip(*parts, strict=True))
    found = {}
    for index, task in enumerate(task.name for task in spec.model.tasks):
        column = ("click", "conversion").index(task)
        found[task] = score(logits[:, index], true_p[:, column], ~np.isnan(labels[:, column]))
    return found


def main() -> None:
    options = seed_arguments(__doc__).parse_args()
    num_samples = 100_000 if options.quick else 800_000
    seeds = seeds_of(options)
    found = {(model, seed): train_and_score(model, seed, num_samples) for seed in seeds for model in MODELS}
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        for task in found[model, seeds[0]]:
            scores = [found[model, seed][task] for seed in seeds]
            row: dict[str, Any] = {"model": model, "task": task}
            for key in ("ne", "ne_best", "bias"):
                row |= over_seeds(key, [getattr(one, key) for one in scores])
            rows.append(row)
    summary: dict[str, float] = {}
    for task in ("click", "conversion"):
        alone, shared = ([found[model, seed][task].ne for seed in seeds] for model in (f"{task} alone", "mmoe"))
        summary |= over_seeds(f"mmoe_over_alone_{task}", [b / a for a, b in zip(alone, shared, strict=True)])
    for name, model in (("naive", "conversion alone"), ("esmm", "esmm")):
        summary |= over_seeds(f"{name}_bias", [found[model, seed]["conversion"].bias for seed in seeds])
    publish("tasks", rows, summary, options)


if __name__ == "__main__":
    main()
