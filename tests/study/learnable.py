"""A log that is learned in a second or two, and the recipe of a small batch that was found good on it by hand."""

from __future__ import annotations

from pathlib import Path

import yaml

from benchmarks.search import problem
from rowstead.spec.parse import override

BATCH, LARGER = 64, 512


def learnable_recipe(folder: Path, num_samples: int = 200_000) -> str:
    """The problem of the benchmark of searches as a file in a folder, with more examples and settings that are good already.

    The learning rates are the best of sparse 0.1, 0.3 by dense 0.003, 0.01 at this batch.
    """
    changes = [
        "name=learnable",
        f"data.synth.num_train_samples={num_samples}",
        "data.synth.num_eval_samples=10_000",
        "data.synth.skew=1.2",
        f"train.batch_size={BATCH}",
        "train.sparse_optimizer={kind: rowwise_adagrad, lr: 0.1, eps: 0.01}",
        "train.dense_optimizer={kind: adam, lr: 0.01}",
    ]
    path = folder / "learnable.yaml"
    path.write_text(yaml.safe_dump(override(problem(), changes)))
    return str(path)
