"""What do several trainers cost in quality, against one process on the same samples?

The quickstart's log is learned by the quickstart's model as shipped: by one process, by 2 and 4 trainers in every mode and rule of
`train.sync` with its defaults, and by 2 Hogwild threads. All see each sample once. The model that is scored is the one that a run
leaves: of several trainers the shared one after the last exchange.

Trainers are threads of this process. They run the code of a fleet's trainers (steps, policies, rounds), each on batches of its own that
it takes as it gets free; they share the embedding rows, as trainers of a fleet share those on sparse servers, and a dense server in
memory. With `--fleets` every run is a real one: `rowstead train quickstart`, with `--fleet` for several trainers.

All NEs are expectations under the log's teacher, so labels add no noise. Seeds are those of the log and of the initial weights; a
difference is between runs of the same seed. Intervals are Student's, 95 %, over the seeds. `shadow_N_pct` is the worst of its rules.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import publish
from benchmarks.seeds import seed_arguments, seeds_of
from rowstead import run
from rowstead.data.batch import Batch
from rowstead.data.open_log import Sources, open_sources
from rowstead.fleet.coordinator import train_fleet
from rowstead.fleet.dense_server_state import DenseServerState, LocalDenseServer
from rowstead.nn.dlrm import DLRM
from rowstead.records.studies import interval
from rowstead.spec.fleet import FleetSpec
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.spec.sync import SYNC_RULES, SyncSpec
from rowstead.spec.train import TrainSpec
from rowstead.training.build import build_model
from rowstead.training.evaluate import evaluate
from rowstead.training.flat_parameters import flatten_parameters
from rowstead.training.hogwild import Hogwild, replicate_model
from rowstead.training.step import Stepper
from rowstead.training.sync import build_policies

MODES: dict[str, SyncSpec] = {
    "allreduce": SyncSpec(mode="allreduce"),
    "easgd": SyncSpec(mode="easgd"),
    **{f"shadow {rule}": SyncSpec(mode="shadow", rule=rule) for rule in SYNC_RULES},
}
"""By the names of the table's rows."""
NUM_TRAINERS = (2, 4)
HOGWILD_THREADS = 2


def spec_of(seed: int, *changes: str) -> RunSpec:
    """The quickstart on the log of a seed, on a CPU, without evaluations and checkpoints on the way."""
    fixed = (f"seed={seed}", f"data.synth.seed={seed}", "train.eval_every=null", "train.checkpoint_every=null", "device=cpu")
    return load_recipe("quickstart", [*fixed, *changes])


class Problem:
    """The log of one seed, in memory, and models that start with the same weights."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._sources: Sources = open_sources(spec)
        self.batches: list[Batch] = [batch for batch, _ in self._sources.train.batches(spec.train.batch_size)]

    def train_alone(self) -> float:
        """One trainer, one batch after another; the NE."""
        return self.train_hogwild(1)

    def train_hogwild(self, num_threads: int) -> float:
        """Threads that share one model; the NE."""
        feed, sync = Feed(self.batches), dataclasses.replace(self.spec.train.sync, hogwild_threads=num_threads)
        stepper = self.stepper(self.model(), dataclasses.replace(self.spec.train, sync=sync), 1)
        Hogwild(stepper, num_threads).run(lambda _, worker: feed.train(worker))
        return self.score(stepper.model)

    def train_together(self, num_trainers: int, sync: SyncSpec) -> float:
        """Trainers that share rows and a dense server; the NE of the shared model."""
        first, state, feed = self.model(), DenseServerState(), Feed(self.batches)
        train = dataclasses.replace(self.spec.train, sync=sync).resolve_sync(num_trainers)
        models = [first, *(replicate_model(first, first.store) for _ in range(num_trainers - 1))]
        steppers = [self.stepper(model, train, num_trainers) for model in models]
        errors: list[BaseException] = []

        def run_trainer(index: int) -> None:
            try:
                torch.set_num_threads(1)
                server = LocalDenseServer(state, f"trainer-{index}")
                (policy,) = build_policies(
                    train.sync, lambda _: server, num_trainers=num_trainers, total_steps=len(self.batches)
                )
                steppers[index].set_sync_policy(policy)
                feed.train(steppers[index])
                policy.close()
            except BaseException as error:  # noqa: BLE001, RUF100 - raised below
                errors.append(error)
                raise

        threads = [threading.Thread(target=run_trainer, args=(index,)) for index in range(num_trainers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        flatten_parameters(first.net).copy_(state.pull())
        return self.score(first)

    def model(self) -> DLRM:
        return build_model(self.spec, torch.device("cpu"), trains=True)

    def stepper(self, model: DLRM, train: TrainSpec, num_trainers: int) -> Stepper:
        """The stepper of one of so many trainers."""
        total_steps = len(self.batches)
        return Stepper(model, train.resolve_sync(num_trainers).with_warmup(total_steps), total_steps=total_steps)

    def score(self, model: DLRM) -> float:
        """NE in expectation under the teacher."""
        quality = evaluate(model, self._sources.eval, device=torch.device("cpu"))
        assert quality.ne_expected is not None
        return quality.ne_expected


class Feed:
    """Batches that trainers take in turn, as they get free."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._items: Iterator[tuple[int, Batch]] = iter(enumerate(batches, 1))
        self._lock = threading.Lock()

    def train(self, stepper: Stepper) -> None:
        """Train on batches as long as there are some."""
        while (item := self._next()) is not None:
            number, batch = item
            stepper.step(batch, number)

    def _next(self) -> tuple[int, Batch] | None:
        with self._lock:
            return next(self._items, None)


class RealRuns:
    """The same runs as `Problem`, each as a user starts it."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec

    def train_alone(self) -> float:
        return self._train(self.spec)

    def train_hogwild(self, num_threads: int) -> float:
        sync = dataclasses.replace(self.spec.train.sync, hogwild_threads=num_threads)
        return self._train(dataclasses.replace(self.spec, train=dataclasses.replace(self.spec.train, sync=sync)))

    def train_together(self, num_trainers: int, sync: SyncSpec) -> float:
        train = dataclasses.replace(self.spec.train, sync=sync)
        return self._train(dataclasses.replace(self.spec, train=train, fleet=FleetSpec(num_trainers=num_trainers)))

    @staticmethod
    def _train(spec: RunSpec) -> float:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            quality = (run.train(spec, out=out) if spec.fleet is None else train_fleet(spec, out=out)).quality
        assert quality is not None
        assert quality.ne_expected is not None
        return quality.ne_expected


def prepare() -> None:
    """One torch thread per trainer, and turns of Python's threads that are short against a step, as if trainers were processes."""
    torch.set_num_threads(1)
    sys.setswitchinterval(5e-4)


def compare(problem: Problem | RealRuns, seed: int) -> list[dict[str, Any]]:
    """A row for each way to train on the log of one seed."""
    alone = problem.train_alone()
    found = {("hogwild", HOGWILD_THREADS): problem.train_hogwild(HOGWILD_THREADS)}
    for num_trainers in NUM_TRAINERS:
        found |= {(mode, num_trainers): problem.train_together(num_trainers, sync) for mode, sync in MODES.items()}
    return [
        {"mode": mode, "num": num, "seed": seed, "ne": ne, "ne_alone": alone, "pct": 100 * (ne / alone - 1)}
        for (mode, num), ne in found.items()
    ]


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Per cent of NE above one process: mean over seeds and interval of each way to train."""
    summary: dict[str, float] = {}
    for mode, num in dict.fromkeys((row["mode"], row["num"]) for row in rows):
        values = [row["pct"] for row in rows if (row["mode"], row["num"]) == (mode, num)]
        key, (low, high) = f"{mode.replace(' ', '_')}_{num}_pct", interval(values)
        summary[key] = statistics.fmean(values)
        if low is not None and high is not None:
            summary |= {f"{key}_low": low, f"{key}_high": high}
    for num in NUM_TRAINERS:
        summary[f"shadow_{num}_pct"] = max(summary[f"shadow_{rule}_{num}_pct"] for rule in SYNC_RULES)
    return summary


def main() -> None:
    parser = seed_arguments(__doc__)
    parser.add_argument(
        "--fleets", action="store_true", help="real fleets, of several processes, instead of threads of this one"
    )
    options = parser.parse_args()
    prepare()
    rows = []
    for seed in seeds_of(options):
        spec = spec_of(seed, *(["data.synth.num_train_samples=100_000"] if options.quick else []))
        rows += compare(RealRuns(spec) if options.fleets else Problem(spec), seed)
    publish("synchronisation", rows, summary_of(rows), options)


if __name__ == "__main__":
    main()
