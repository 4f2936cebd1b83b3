"""The recipe that the bench of faults trains, and its sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.fault_schedules import Mode, Schedule

BATCH_SIZE = 96
NUM_STEPS: dict[Mode, int] = {"single": 1000, "processes": 200, "fleet": 1000}
CHECKPOINT_EVERY: dict[Mode, int] = {"single": 100, "processes": 25, "fleet": 200}


def recipe(schedule: Schedule, folder: Path) -> dict[str, Any]:
    """A recipe that is learned well within seconds, as YAML would give it."""
    mode = schedule.mode
    num_train_samples = NUM_STEPS[mode] * BATCH_SIZE
    synth = {
        "num_train_samples": num_train_samples,
        "num_eval_samples": 10_000 if mode == "fleet" else 1000,
        "num_dense": 4,
        "num_sparse": 3,
    }
    synth |= {"num_ids": 50, "lengths": "poisson", "mean_ids": 1.5, "signal": 1.0, "interaction_share": 0.0}
    train: dict[str, Any] = {"batch_size": BATCH_SIZE, "log_every": 10, "checkpoint_every": CHECKPOINT_EVERY[mode]}
    train |= {"schedule": {"decay": "linear"}, "sparse_optimizer": {"lr": 0.1}, "dense_optimizer": {"lr": 0.02}}
    plain: dict[str, Any] = {
        "name": "faults",
        "data": {"synth": synth},
        "features": {
            "dense": [{"name": "dense_{i}", "repeat": 4}],
            "sparse": [{"name": "sparse_{i}", "repeat": 3, "num_rows": 50}],
        },
        "model": {"width": 8, "bottom": [64], "top": [64]},
        "train": train,
        "threads": 1,
    }
    if mode == "fleet":
        train["sync"] = {"period": 4}
    if schedule.training == "increments":
        train["full_checkpoint_every"] = 4
    if schedule.training == "ssd":
        plain |= {"placement": {"*": "ssd"}, "memory": {"folder": str(folder)}}
    return plain
