"""Whether searches that learn from their trials beat drawing at random: the best NE after equal trials, over several seeds.

The problem is small, a trial takes under 2 s: a DLRM on a synthetic log, with learning rates, eps, weight decay and warm-up to be
found, all from ranges of decades. Every search starts from nothing. NE is without label noise, scored against the teacher.

python -m benchmarks.search --trials 40 --seeds 5 --json
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import arguments, publish
from rowstead.spec.axis import AxisSpec
from rowstead.spec.tune import Sampler, TuneSpec
from rowstead.study.tune import tune

SPACE = (
    AxisSpec(name="sparse lr", keys=("train.sparse_optimizer.lr",), low=1e-4, high=10.0, log=True),
    AxisSpec(name="dense lr", keys=("train.dense_optimizer.lr",), low=1e-5, high=1.0, log=True),
    AxisSpec(name="sparse eps", keys=("train.sparse_optimizer.eps",), low=1e-6, high=10.0, log=True),
    AxisSpec(name="weight decay", keys=("train.dense_optimizer.weight_decay",), low=1e-6, high=0.1, log=True),
    AxisSpec(name="warm-up", keys=("train.schedule.warmup_steps",), low=0, high=50, whole=True),
)


def problem() -> dict[str, Any]:
    """A log of 4,000 examples and a model of a few thousand parameters; its own settings are poor, as nobody has looked yet."""
    return {
        "name": "searched",
        "data": {
            "synth": {
                "num_train_samples": 4_000,
                "num_eval_samples": 4_000,
                "num_dense": 4,
                "num_sparse": 3,
                "num_ids": [5, 10, 20],
                "signal": 1.7,
                "interaction_share": 0.0,
                "latent": 2,
            }
        },
        "features": {
            "dense": [{"name": "dense_{i}", "repeat": 4}],
            "sparse": [{"name": "sparse_{i}", "repeat": 3, "num_rows": 20, "hash": "modulo"}],
        },
        "model": {"width": 4, "bottom": [16], "top": [32, 16]},
        "train": {
            "batch_size": 64,
            "sparse_optimizer": {"kind": "rowwise_adagrad", "lr": 0.0001, "eps": 1.0},
            "dense_optimizer": {"kind": "adam", "lr": 0.00001, "weight_decay": 0.1},
            "schedule": {"decay": "linear"},
        },
        "threads": 1,
    }


def race(samplers: Sequence[Sampler], *, num_seeds: int, num_trials: int) -> list[dict[str, Any]]:
    """The best NE of each sampler's search, seed by seed, and what a trial took."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "searched.yaml"
        recipe.write_text(yaml.safe_dump(problem()))
        for seed in range(1, num_seeds + 1):
            for sampler in samplers:
                spec = TuneSpec(
                    name=f"{sampler}-{seed}",
                    recipe=str(recipe),
                    space=SPACE,
                    sampler=sampler,
                    trials=num_trials,
                    prune=False,
                    seed=seed,
                )
                started = time.perf_counter()
                found = tune(spec, root=folder)
                assert found.best is not None
                rows.append(
                    {
                        "sampler": sampler,
                        "seed": seed,
                        "best_ne": found.best.objective,
                        "num_trials": len(found.trials),
                        "s_per_trial": (time.perf_counter() - started) / num_trials,
                    }
                )
    return rows


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean best NE of each sampler, and in how many seeds each is below random search."""
    best = {(row["sampler"], row["seed"]): row["best_ne"] for row in rows}
    samplers = list(dict.fromkeys(row["sampler"] for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    summary: dict[str, Any] = {f"{s}_mean_best_ne": statistics.fmean(best[s, seed] for seed in seeds) for s in samplers}
    for sampler in samplers:
        if sampler != "random" and "random" in samplers:
            summary[f"{sampler}_seeds_below_random"] = sum(best[sampler, seed] < best["random", seed] for seed in seeds)
    return summary | {"num_seeds": len(seeds)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samplers", default="random,tpe,gp")
    options = parser.parse_args()
    samplers = options.samplers.split(",")
    num_seeds, num_trials = (2, 12) if options.quick else (options.seeds, options.trials)
    rows = race(samplers, num_seeds=num_seeds, num_trials=num_trials)
    publish("search", rows, summary_of(rows), options, packages=("optuna",))


if __name__ == "__main__":
    main()
