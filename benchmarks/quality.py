"""How close does the quickstart come to the best possible NE, and how far behind is logistic regression on the same log?

For each seed (of the log, and of the initial weights with it) the quickstart recipe is trained as it is shipped. The peer is plain
torch: one weight an id (nn.EmbeddingBag), one a dense column, trained by Adam with a linear decay on the same batches in the same
order; three learning rates are tried and the one that ends best on the evaluation split counts, which favours the peer. All NEs
are expectations under the log's teacher, so labels add no noise. Intervals are Student's, 95 %, over the seeds. `cpu_s` is the
processor time of our training on all threads, the drawing of the log and the last evaluation included.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import publish
from benchmarks.seeds import over_seeds, seed_arguments, seeds_of
from rowstead import run
from rowstead.data.batch import Batch
from rowstead.data.open_log import open_sources
from rowstead.data.prefetch import Prefetch
from rowstead.data.source import Source
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.training.evaluate import EVAL_BATCH
from rowstead.training.metrics import Evaluation, Quality

RATES = (0.003, 0.01, 0.03)
"""Learning rates that are tried for logistic regression."""


class LogisticRegression(nn.Module):
    """log-odds = bias + <weights, dense> + the sum of one weight for each id of the example."""

    def __init__(self, num_dense: int, num_rows: Sequence[int]) -> None:
        super().__init__()
        self.dense = nn.Linear(num_dense, 1)
        self.ids = nn.EmbeddingBag(sum(num_rows), 1, mode="sum", include_last_offset=True)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)
        nn.init.zeros_(self.ids.weight)
        self.register_buffer("first_row", torch.tensor([0, *num_rows]).cumsum(0)[:-1])

    def forward(self, batch: Batch) -> Tensor:
        """Log-odds [B]."""
        sparse, size = batch.sparse, batch.num_samples
        ids_of_feature = sparse.offsets[:: max(size, 1)].diff()
        rows = sparse.ids + torch.repeat_interleave(self.first_row, ids_of_feature)  # type: ignore[arg-type]
        of_ids = self.ids(rows, sparse.offsets).view(sparse.num_features, size).sum(0)
        total: Tensor = self.dense(batch.dense).squeeze(1) + of_ids
        return total


def train_logistic_regression(spec: RunSpec, rates: Sequence[float] = RATES) -> tuple[Quality, float]:
    """The best of some logistic regressions on the log and the batches of `spec`, and its learning rate; in one torch thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model only loses by more
    try:
        return _train_logistic_regression(spec, rates)
    finally:
        torch.set_num_threads(threads)


def _train_logistic_regression(spec: RunSpec, rates: Sequence[float]) -> tuple[Quality, float]:
    sources = open_sources(spec)
    num_dense, num_rows = len(spec.features.expanded_dense()), [table.num_rows for table in spec.tables]
    assert all(len(table.features) == 1 for table in spec.tables), "the peer gives every feature weights of its own"
    models = [LogisticRegression(num_dense, num_rows) for _ in rates]
    optimizers = [torch.optim.Adam(model.parameters(), lr=rate) for model, rate in zip(models, rates, strict=True)]
    total_steps = math.ceil(sources.train.num_samples / spec.train.batch_size)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=total_steps) for o in optimizers]
    with Prefetch(sources.train.batches(spec.train.batch_size), depth=4) as batches:
        for batch, _ in batches:
            assert batch.labels is not None
            for model, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
                optimizer.zero_grad(set_to_none=True)
                functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    scored = zip((_quality(model, sources.eval) for model in models), rates, strict=True)
    return min(scored, key=lambda one: one[0].ne_expected or math.inf)


@torch.no_grad()
def _quality(model: LogisticRegression, source: Source) -> Quality:
    evaluation = Evaluation()
    for batch, _ in source.batches(EVAL_BATCH):
        assert batch.labels is not None
        assert batch.true_p is not None
        evaluation.add(model(batch).numpy(), batch.labels.numpy(), None, batch.true_p.numpy())
    return evaluation.quality()


def quickstart(seed: int) -> RunSpec:
    """The shipped quickstart on the log of another seed."""
    return load_recipe("quickstart", [f"seed={seed}", f"data.synth.seed={seed}", "train.eval_every=null"])


def compare(seed: int) -> dict[str, Any]:
    """One row: our model and logistic regression on the log of one seed."""
    spec = quickstart(seed)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        ours = run.train(spec, root=folder).quality
    cpu_s = time.process_time() - start
    peer, rate = train_logistic_regression(spec)
    assert ours is not None
    assert ours.ne_expected
    assert ours.ne_best
    assert peer.ne_expected
    return {
        "seed": seed,
        "ne_best": ours.ne_best,
        "ne": ours.ne_expected,
        "ne_logistic_regression": peer.ne_expected,
        "above_best_pct": 100 * (ours.ne_expected / ours.ne_best - 1),
        "logistic_regression_above_ours_pct": 100 * (peer.ne_expected / ours.ne_expected - 1),
        "logistic_regression_lr": rate,
        "calibration": ours.calibration,
        "cpu_s": cpu_s,
    }


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means, worst cases and intervals over the seeds."""
    summary = {"ne_best_max": max(row["ne_best"] for row in rows)}
    for key, worst in (("above_best_pct", np.max), ("logistic_regression_above_ours_pct", np.min)):
        values = [row[key] for row in rows]
        summary |= over_seeds(key, values) | {f"{key}_worst": float(worst(values))}
    return summary


def main() -> None:
    options = seed_arguments(__doc__).parse_args()
    rows = [compare(seed) for seed in seeds_of(options)]
    publish("quality", rows, summary_of(rows), options)


if __name__ == "__main__":
    main()
