"""Times whole training steps of models of any shape on batches in memory; calibration is fitted to them.

Letters: B examples, F features, L ids of a bag.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowstead.data.batch import Batch, Sparse, check_batch
from rowstead.spec.parse import parse
from rowstead.spec.phases import Phase
from rowstead.spec.run import RunSpec
from rowstead.study.calibration.clock import quantile
from rowstead.study.calibration.machine_speed import MachineSpeed
from rowstead.training.build import build_model
from rowstead.training.prefetch import prefetch_rows
from rowstead.training.step import Stepper

WARM_STEPS = {"cpu": 3, "cuda": 8}
WARM_GPU_S = 0.3
"""How long a GPU steps before it is timed: the first steps were up to 1.6 times slower."""
LEAST_STEPS = 9
"""Least number of timed steps on a CPU."""
LEAST_ROUNDS = {"cpu": 2, "cuda": 4}
"""Least number of rounds of consecutive steps."""
STEPS_PER_ROUND, STEPS_PER_REFERENCE = 16, 3
MAX_BATCHES, DRAWN_IDS, NUM_DENSE = 512, 4_000_000, 4
"""Number of batches, limited by their ids; enough that rows are not cached from a recent batch. Batches cycle through `NUM_DENSE` dense inputs."""


@dataclass(frozen=True)
class Shape:
    """A model and its batches, by the sizes that decide how long a step takes."""

    num_dense: int
    num_sparse: int
    batch_size: int
    num_rows: int
    """Rows per table."""
    width: int
    mean_ids: int
    """Ids per bag."""
    skew: float
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    precision: str = "fp32"
    network: str = "dlrm"

    @property
    def num_ids(self) -> int:
        """Ids per batch."""
        return self.batch_size * self.num_sparse * self.mean_ids

    @property
    def table_bytes(self) -> int:
        return self.num_sparse * self.num_rows * (4 * self.width + 4)

    def spec(self, device: str, **more: Any) -> RunSpec:
        """Return the run spec of this model."""
        plain = {
            "name": "shape",
            "data": {
                "synth": {
                    "num_dense": self.num_dense,
                    "num_sparse": self.num_sparse,
                    "num_ids": self.num_rows,
                    "mean_ids": self.mean_ids,
                    "skew": self.skew,
                }
            },
            "features": {
                "dense": [{"name": "dense_{i}", "repeat": self.num_dense}],
                "sparse": [{"name": "sparse_{i}", "repeat": self.num_sparse, "num_rows": self.num_rows, "hash": "modulo"}],
            },
            "model": {"network": self.network, "width": self.width, "bottom": list(self.bottom), "top": list(self.top)},
            "train": {"batch_size": self.batch_size, "precision": self.precision},
            "device": device,
            **more,
        }
        return parse(RunSpec, plain)


def sample_batches(
    shape: Shape, device: torch.device, *, seed: int = 1, most_batches: int = MAX_BATCHES, most_ids: int = DRAWN_IDS
) -> list[Batch]:
    """Sample batches with the Zipf distribution of the synthetic log; rows of similar popularity are not neighbours."""
    rng, num_ids = np.random.default_rng(seed), shape.num_ids
    pool = _ids(shape, max(2 * num_ids, min(most_ids, most_batches * num_ids)), device, seed)
    offsets = torch.arange(0, num_ids + 1, shape.mean_ids, device=device)
    dense = [torch.from_numpy(rng.random((shape.batch_size, shape.num_dense), dtype=np.float32)) for _ in range(NUM_DENSE)]
    dense = [one.to(device) for one in dense]
    labels = torch.from_numpy((rng.random(shape.batch_size) < 0.25).astype(np.float32)).to(device)
    return [
        Batch(
            dense=dense[index % NUM_DENSE],
            sparse=Sparse(ids=pool[first : first + num_ids], offsets=offsets, num_features=shape.num_sparse),
            labels=labels,
        )
        for index, first in enumerate(range(0, len(pool) - num_ids + 1, num_ids))
    ]


def _ids(shape: Shape, num_ids: int, device: torch.device, seed: int) -> Tensor:
    """Sample rows by the density x^-skew over ranks, with ranks scattered over the table; int64 [num_ids]."""
    power, most = 1 - shape.skew, shape.num_rows + 1
    drawn = torch.rand(num_ids, dtype=torch.float64, device=device, generator=torch.Generator(device).manual_seed(seed))
    is_log = abs(power) < 1e-9
    ranks = drawn.mul_(math.log(most)).exp_() if is_log else drawn.mul_(most**power - 1).add_(1).pow_(1 / power)
    found = ranks.long().clamp_(max=shape.num_rows).sub_(1)
    return found.mul_(_coprime(shape.num_rows)).remainder_(shape.num_rows)


def _coprime(number: int) -> int:
    return next(factor for factor in (2_654_435_761, 1_000_003, 999_983, 7919, 1) if np.gcd(factor, number) == 1)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Measured time of a step."""

    step_s: float
    """The median."""
    spread: float
    """Half the interquartile range over the median."""
    phases_s: dict[Phase, float]
    """Median of each phase that the trainer times; empty where whole rounds are timed, as on a GPU."""
    slowdown: float = 1.0
    """Slowdown of the machine during the steps relative to its standard speed; 1 if not measured."""

    def at_standard_speed(self) -> StepTime:
        """Return the times normalised to standard machine speed."""
        phases_s = {phase: seconds / self.slowdown for phase, seconds in self.phases_s.items()}
        return dataclasses.replace(self, step_s=self.step_s / self.slowdown, phases_s=phases_s, slowdown=1.0)


@dataclass
class Steps:
    """A model and its batches, ready to step."""

    shape: Shape
    device: torch.device
    stepper: Stepper
    batches: list[Batch]
    number: int = 0
    speed: MachineSpeed | None = None

    @classmethod
    def of(cls, shape: Shape, device: torch.device, *, speed: MachineSpeed | None = None, **more: Any) -> Steps:
        """Build a model of this shape and its batches; `more` are further recipe keys, such as `placement`."""
        spec = shape.spec(device.type, **more)
        model = build_model(spec, device, trains=True)
        stepper = Stepper(model, spec.train, total_steps=1_000_000)
        batches = sample_batches(shape, device)
        if device.type == "cpu":  # in a run the reader thread checks them
            batches = [dataclasses.replace(one, sparse=check_batch(one.sparse, model.store.layout, device)) for one in batches]
        return cls(shape, device, stepper, batches, speed=speed)

    def take(self, count: int) -> Iterator[Callable[[], float]]:
        """Take steps on the next batches, prefetched as early as in a run; yields a function that waits for the loss."""
        items = ((batch, batch, None) for batch in (self.batches[(self.number + k) % len(self.batches)] for k in range(count)))
        for _, batch, _ in prefetch_rows(items, self.stepper.model.store):
            self.number += 1
            yield self.stepper.start(batch, self.number)

    def measure(self, seconds: float) -> StepTime:
        """Take steps for this long and return the time of one."""
        if self.device.type == "cuda":
            return self._on_gpu(seconds)
        if self.speed is None:
            return self._on_cpu(seconds, lambda: None)
        references_s: list[float] = []
        time = self._on_cpu(seconds, lambda: references_s.append(self.speed.time_reference()))  # type: ignore[union-attr]
        return dataclasses.replace(time, slowdown=self.speed.slowdown(references_s))

    def _on_cpu(self, seconds: float, between: Callable[[], Any]) -> StepTime:
        """`between` is called every few steps."""
        timers = self.stepper.timers
        for _ in self.take(WARM_STEPS["cpu"]):
            pass
        if self.stepper.model.store.batches_ahead:
            return self._rounds(seconds, lambda: None, between)
        taken: list[float] = []
        phases: list[dict[Phase, float]] = []
        end = time.perf_counter() + seconds
        while len(taken) < LEAST_STEPS or time.perf_counter() < end:
            timers.reset()
            for _ in self.take(1):
                taken.append(sum(timers.totals_s().values()))
                phases.append(timers.totals_s())
            if len(taken) % STEPS_PER_REFERENCE == 0:
                between()
        return StepTime(
            step_s=quantile(taken),
            spread=_spread(taken),
            phases_s={phase: quantile([one[phase] for one in phases]) for phase in phases[0]},
        )

    def _on_gpu(self, seconds: float) -> StepTime:
        end = time.perf_counter() + WARM_GPU_S
        while time.perf_counter() < end:
            for _ in self.take(WARM_STEPS["cuda"]):
                pass
            torch.cuda.synchronize(self.device)
        return self._rounds(seconds, lambda: torch.cuda.synchronize(self.device), lambda: None)

    def _rounds(self, seconds: float, wait: Callable[[], Any], between: Callable[[], Any]) -> StepTime:
        """Time rounds of consecutive steps, with nothing in flight before and after; `between` is called between rounds."""
        count = STEPS_PER_ROUND * (4 if self.stepper.model.store.batches_ahead else 1)  # the first batches were not prefetched
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while len(taken) < LEAST_ROUNDS[self.device.type] or time.perf_counter() < end:
            wait()
            start = time.perf_counter()
            for _ in self.take(count):
                pass
            wait()
            taken.append((time.perf_counter() - start) / count)
            between()
        return StepTime(step_s=quantile(taken), spread=_spread(taken), phases_s={})

    def close(self) -> None:
        """Close the store."""
        self.stepper.model.store.close()


def _spread(values: list[float]) -> float:
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle
