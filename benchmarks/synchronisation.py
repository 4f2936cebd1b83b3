"""What do asynchronous trainers cost in quality, against synchronous training on the same samples?

A synthetic log with a known teacher is learned by 2 and 4 trainers, each on batches of its own that it takes as it gets free, by
every mode of `train.sync` with its defaults, and by 2 and 4 Hogwild threads of one trainer. Trainers are threads of this process:
they share the embedding rows, as trainers of a fleet share those on sparse servers, and meet at a centre in memory. Their peers
on the same samples: "synchronous", one trainer with batches as many times as large as there are trainers, which is what
synchronous data parallelism computes; and "one trainer", with batches of the same size one after another.

The model is a cross network without hidden layers; its learning rates are the best of six pairs for the synchronous peer of 4 trainers
on seed 1. Small MLPs were tried first: there EASGD with 4 trainers ended further behind, in single runs. These figures do not speak for
them.

All NEs are expectations under the log's teacher, so labels add no noise. The model that is scored is the centre's (Hogwild: the shared
one). Seeds are those of the log and of the initial weights; a difference is between runs of the same seed. Intervals are Student's,
95 %, over the seeds.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import publish
from benchmarks.seeds import over_seeds, seed_arguments, seeds_of
from rowstead.data.batch import Batch
from rowstead.data.open_log import Sources, open_sources
from rowstead.fleet.dense_server_state import DenseServerState, LocalDenseServer
from rowstead.nn.dlrm import DLRM
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.spec.sync import SyncSpec
from rowstead.training.build import build_model
from rowstead.training.evaluate import evaluate
from rowstead.training.flat_parameters import flatten_parameters
from rowstead.training.hogwild import Hogwild, replicate_model
from rowstead.training.step import Stepper
from rowstead.training.sync import build_policies

MODES: dict[str, SyncSpec] = {
    "allreduce": SyncSpec(mode="allreduce"),
    "easgd": SyncSpec(mode="easgd"),
    "shadow easgd": SyncSpec(mode="shadow", rule="easgd"),
    "shadow average": SyncSpec(mode="shadow", rule="average"),
    "shadow bmuf": SyncSpec(mode="shadow", rule="bmuf"),
}
"""By the names of the table's rows."""
NUM_TRAINERS = (2, 4)
BATCH, NUM_SAMPLES, NUM_EVAL_SAMPLES = 128, 300_000, 40_000


def spec_of(seed: int, *, num_samples: int = NUM_SAMPLES, num_eval_samples: int = NUM_EVAL_SAMPLES) -> RunSpec:
    """A log that a small model learns in seconds, and that model."""
    changes = [
        f"seed={seed}",
        f"data.synth.seed={seed}",
        f"data.synth.num_train_samples={num_samples}",
        f"data.synth.num_eval_samples={num_eval_samples}",
        "data.synth.num_dense=4",
        "data.synth.num_sparse=3",
        "data.synth.num_ids=[10, 20, 40]",
        "data.synth.mean_ids=[1, 1, 2]",
        "features.dense=[{name: 'dense_{i}', repeat: 4}]",
        "features.sparse=[{name: 'sparse_{i}', repeat: 3, num_rows: 40, hash: modulo}]",
        "model.width=8",
        "model.bottom=[]",
        "model.top=[]",
        "model.interaction={kind: cross, cross_layers: 1, cross_rank: 8}",
        f"train.batch_size={BATCH}",
        "train.dense_optimizer.lr=0.02",
        "threads=1",
        "device=cpu",
    ]
    return load_recipe("quickstart", changes)


class Problem:
    """The log of one seed, in memory, and models that begin with the same weights."""

    def __init__(self, seed: int, *, num_samples: int = NUM_SAMPLES, num_eval_samples: int = NUM_EVAL_SAMPLES) -> None:
        self.spec = spec_of(seed, num_samples=num_samples, num_eval_samples=num_eval_samples)
        self._sources: Sources = open_sources(self.spec)
        self._batches: dict[int, list[Batch]] = {}

    def batches(self, size: int) -> list[Batch]:
        """All samples in the order of the log, so many a batch."""
        if size not in self._batches:
            self._batches[size] = [batch for batch, _ in self._sources.train.batches(size)]
        return self._batches[size]

    def model(self) -> DLRM:
        return build_model(self.spec, torch.device("cpu"), trains=True)

    def stepper(self, model: DLRM, total_steps: int) -> Stepper:
        return Stepper(model, self.spec.train, total_steps=total_steps)

    def score(self, model: DLRM) -> float:
        """NE in expectation under the teacher."""
        quality = evaluate(model, self._sources.eval, device=torch.device("cpu"))
        assert quality.ne_expected is not None
        return quality.ne_expected

    def train_alone(self, batch_size: int) -> float:
        """One trainer, one batch after another."""
        batches = self.batches(batch_size)
        stepper = self.stepper(self.model(), len(batches))
        for number, batch in enumerate(batches, 1):
            stepper.step(batch, number)
        return self.score(stepper.model)

    def train_hogwild(self, num_threads: int) -> float:
        """Threads of one trainer."""
        batches = self.batches(BATCH)
        stepper = self.stepper(self.model(), len(batches))
        hogwild, feed = Hogwild(stepper, num_threads), Feed(batches)
        hogwild.run(lambda _, worker: _train(worker, feed))
        return self.score(stepper.model)

    def train_together(self, num_trainers: int, sync: SyncSpec) -> float:
        """Trainers that share rows and meet at a centre."""
        batches = self.batches(BATCH)
        first, state, feed = self.model(), DenseServerState(), Feed(batches)
        models = [first, *(replicate_model(first, first.store) for _ in range(num_trainers - 1))]
        steppers = [self.stepper(model, len(batches)) for model in models]
        errors: list[BaseException] = []

        def trainer(place: int) -> None:
            try:
                centre = LocalDenseServer(state, f"trainer-{place}")
                (policy,) = build_policies(sync, lambda _: centre, num_trainers=num_trainers)
                steppers[place].set_sync_policy(policy)
                _train(steppers[place], feed)
                policy.close()
            except BaseException as error:  # noqa: BLE001, RUF100 - raised below
                errors.append(error)
                raise

        threads = [threading.Thread(target=trainer, args=(place,)) for place in range(num_trainers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        flatten_parameters(first.net).copy_(state.pull())
        return self.score(first)


class Feed:
    """Batches that trainers take in turn, as they get free."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._items = iter(enumerate(batches, 1))
        self._lock = threading.Lock()

    def next(self) -> tuple[int, Batch] | None:
        with self._lock:
            return next(self._items, None)


def _train(stepper: Stepper, feed: Feed) -> None:
    while (item := feed.next()) is not None:
        number, batch = item
        stepper.step(batch, number)


def prepare() -> None:
    """One torch thread a trainer, and turns of Python's threads that are short against a step, as if trainers were processes."""
    torch.set_num_threads(1)
    sys.setswitchinterval(5e-4)


def compare(problem: Problem, seed: int, num_trainers: int, modes: dict[str, SyncSpec]) -> list[dict[str, Any]]:
    """A row for each way to train with so many trainers on the log of one seed."""
    synchronous, one = problem.train_alone(BATCH * num_trainers), problem.train_alone(BATCH)
    found = {name: problem.train_together(num_trainers, sync) for name, sync in modes.items()}
    found["hogwild"] = problem.train_hogwild(num_trainers)
    return [
        {
            "mode": name,
            "num_trainers": num_trainers,
            "seed": seed,
            "ne": ne,
            "ne_synchronous": synchronous,
            "ne_one_trainer": one,
            "above_synchronous_pct": 100 * (ne / synchronous - 1),
            "above_one_trainer_pct": 100 * (ne / one - 1),
        }
        for name, ne in found.items()
    ]


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean and interval over the seeds of each way to train."""
    summary: dict[str, float] = {}
    for mode, num_trainers in dict.fromkeys((row["mode"], row["num_trainers"]) for row in rows):
        chosen = [row for row in rows if (row["mode"], row["num_trainers"]) == (mode, num_trainers)]
        for peer in ("synchronous", "one_trainer"):
            key = f"{mode.replace(' ', '_')}_{num_trainers}_above_{peer}_pct"
            summary |= over_seeds(key, [row[f"above_{peer}_pct"] for row in chosen])
    return summary


def main() -> None:
    options = seed_arguments(__doc__).parse_args()
    prepare()
    rows = []
    for seed in seeds_of(options):
        problem = Problem(seed, num_samples=40_000 if options.quick else NUM_SAMPLES)
        for num_trainers in NUM_TRAINERS:
            rows += compare(problem, seed, num_trainers, MODES)
    publish("synchronisation", rows, summary_of(rows), options)


if __name__ == "__main__":
    main()
