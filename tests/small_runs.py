"""Runs small enough for tests: a log that is learned in a second, and how to wait for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rowstead.spec.parse import override, parse
from rowstead.spec.run import RunSpec


def small_plain() -> dict[str, Any]:
    """A valid recipe as YAML would give it."""
    return {
        "name": "small",
        "data": {
            "synth": {
                "num_train_samples": 6400,
                "num_eval_samples": 2000,
                "num_dense": 4,
                "num_sparse": 3,
                "num_ids": 50,
                "lengths": "poisson",
                "mean_ids": 1.5,
            }
        },
        "features": {
            "dense": [{"name": "dense_{i}", "repeat": 4}],
            "sparse": [{"name": "sparse_{i}", "repeat": 3, "num_rows": 50}],
        },
        "model": {"width": 8, "bottom": [16], "top": [16]},
        "train": {"batch_size": 64},
        "threads": 1,  # so small a model is only slower with more, much so where other tests run beside it
    }


def small_spec(*overrides: str) -> RunSpec:
    """The small recipe with `key.path=value` changes."""
    return parse(RunSpec, override(small_plain(), overrides))


def parquet_spec(log: Path, *overrides: str) -> RunSpec:
    """The small recipe reading Parquet: the files that `write_parquet` left in `log`."""
    plain = small_plain()
    plain["data"] = {
        "parquet": {"train": [f"{log}/train-*.parquet"], "eval": [f"{log}/eval-*.parquet"], "true_p": "true_p"},
    }
    return parse(RunSpec, override(plain, overrides))


def wait_until(condition: Callable[[], bool], *, what: str, deadline_s: float = 120.0) -> None:
    """Return as soon as `condition` holds; fail with `what` if it does not in time."""
    ends = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends, f"waited {deadline_s} s in vain for {what}"
        time.sleep(0.002)
