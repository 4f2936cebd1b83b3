"""Is the placement that `placement: auto` chooses the fastest of those that fit, when all of them are measured?

Random models get less memory than their tables take. Every placement that `auto` weighs for one is trained, with caches as they are late
in a run. They take turns, a few steps each, since a machine's pace drifts; those that may still be the fastest take more turns than others.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.harness import OtherLoad
from benchmarks.timing import give_back_gpu_memory
from rowstead.measure.cache_part import steady_s
from rowstead.measure.settled import Drawn, settled, turn_s
from rowstead.measure.steps import Shape, Steps
from rowstead.placing import mean_ids_of, memories_of
from rowstead.plan.auto import choice, fitting
from rowstead.plan.foretell import foretold
from rowstead.spec.machine import Machine
from rowstead.spec.placement import Placement

NUM_CASES, NUM_QUICK = {"cpu": 20, "cuda": 12}, 2
SHARES = (0.25, 0.7)
"""Of what its tables take, the memory that a model gets."""
MOST_DRAWN = 20
"""Models that are drawn for each that counts: some fit in no way, or in one."""
TURNS = {"cpu": (5, 7), "cuda": (3, 21)}
"""Of each placement, and of those besides that may be the fastest."""
MAYBE_FASTEST = 1.15
"""How much slower than the fastest so far a placement may be to take more turns."""
STEPS_A_TURN, SECONDS_A_TURN, WARM_S = 12, 0.25, 0.2
"""On a CPU, and on a GPU, and for how long a GPU steps before the first turn."""
OTHER_CORES, MOST_TRIES = 0.3, 5
"""Cores that others may use during a turn, and how often it is taken while they use more."""
NEAR = 1.05
"""How much slower than the fastest the chosen placement may be."""

Tell = Callable[[str], Any]


def _quicker(turns_s: Sequence[float]) -> float:
    """The lower quartile."""
    return float(np.quantile(turns_s, 0.25))


def placement_shape(device: str, draw: random.Random) -> Shape:
    """A model of which rows decide the speed, with tables that are quickly made."""
    more_examples, more_rows = (1, 1) if device == "cpu" else (32, 4)
    return Shape(
        num_dense=64,
        num_sparse=draw.randint(4, 12),
        batch_size=draw.choice((128, 256, 512)) * more_examples,
        num_rows=round(math.exp(draw.uniform(math.log(1.5e4), math.log(6e4)))) * more_rows,
        width=draw.choice((16, 32, 64)),
        mean_ids=draw.randint(1, 8),
        skew=round(draw.uniform(0.3, 1.4), 2),
        bottom=(64,),
        top=(128,),
        precision="tf32" if device == "cuda" else "fp32",
    )


@dataclass
class Placed:
    """One placement of a model."""

    name: str
    predicted_s: float
    steps: Steps
    turns_s: list[float] = field(default_factory=list)
    other_cores: float = 0.0
    """That others used, in the turn in which they used most."""

    @property
    def step_s(self) -> float:
        """Of its quicker turns: what others on the machine take is added to some and never taken off."""
        return _quicker(self.turns_s)

    def take_turn(self) -> None:
        """Measure some steps; on a CPU again, if others used it meanwhile."""
        if self.steps.device.type == "cuda":
            self.turns_s.append(steady_s(self.steps, SECONDS_A_TURN, warm_s=0.0 if self.turns_s else WARM_S))
            return
        for _ in range(MOST_TRIES):
            with OtherLoad() as others:
                seconds = turn_s(self.steps, STEPS_A_TURN)
            if others.cores <= OTHER_CORES:
                break
        self.turns_s.append(seconds)
        self.other_cores = max(self.other_cores, others.cores)


@dataclass(frozen=True)
class Case:
    """A model whose tables may take a share of their bytes."""

    shape: Shape
    share: float
    device: torch.device
    folder: str

    @property
    def memory(self) -> dict[str, Any]:
        """The limit, and where rows may go that it leaves no room for."""
        limited = "device" if self.device.type == "cuda" else "host"
        return {limited: int(self.share * self.shape.table_bytes), "folder": self.folder}

    def foretold(self, machine: Machine) -> dict[str, tuple[Placement, float]]:
        """Every placement that fits, with the predicted time of a step."""
        spec = self.shape.spec(self.device.type, memory=self.memory)
        tried = fitting(spec, memories_of(spec, self.device), mean_ids=mean_ids_of(spec))
        known = {name: (placement, foretold(spec, placement, machine)) for name, placement in tried.items()}
        return {name: (placement, found.step_s) for name, (placement, found) in known.items() if found is not None}

    @contextlib.contextmanager
    def placed(self, tried: Mapping[str, tuple[Placement, float]]) -> Iterator[list[Placed]]:
        """The model under each of some placements, ready to be measured."""
        found: list[Placed] = []
        drawn = Drawn.of(self.shape, self.device)
        try:
            for name, (placement, predicted_s) in tried.items():
                shares = {one.name: one.cache_fraction for one in placement.tables if one.cache_fraction}
                rules = {
                    one.name: {"where": one.where, **({"cache_fraction": shares[one.name]} if one.name in shares else {})}
                    for one in placement.tables
                }
                kept = max(shares.values(), default=0.0)
                steps = settled(self.shape, self.device, placement=rules, kept_share=kept, folder=self.folder, drawn=drawn)
                found.append(Placed(name, predicted_s, steps))
            yield found
        finally:
            for one in found:
                one.steps.close()
            found.clear()
            give_back_gpu_memory()


def measure(tried: Sequence[Placed], chosen: Placed, num_all: int, num_more: int) -> None:
    """Let placements take turns: all of them, then those that may be the fastest, and the chosen one."""
    for _ in range(num_all):
        for one in tried:
            one.take_turn()
    least_s = min(one.step_s for one in tried)
    nearest = [one for one in tried if one is chosen or one.step_s <= MAYBE_FASTEST * least_s]
    for _ in range(num_more):
        for one in nearest:
            one.take_turn()


def placement_rows(case: Case, machine: Machine, turns: tuple[int, int]) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """What was chosen for a model, and each placement that fits; nothing where those are fewer than two."""
    shape, known = case.shape, case.foretold(machine)
    if len(known) < 2:
        return None, []
    name = choice({one: predicted_s for one, (_, predicted_s) in known.items()})
    with case.placed(known) as ready:
        tried = list(ready)
        chosen = next(one for one in tried if one.name == name)
        measure(tried, chosen, *turns)
    best = min(tried, key=lambda one: one.step_s)
    half = [_quicker(chosen.turns_s[first::2]) for first in (0, 1)]
    ratios = [one.predicted_s / one.step_s for one in tried]
    row = {
        "tables_gb": shape.table_bytes / 1e9,
        "limit_share": case.share,
        "skew": shape.skew,
        "num_placements": len(tried),
        "chosen": chosen.name,
        "chosen_over_best": chosen.step_s / best.step_s,
        "best": best.name,
        "best_ms": 1e3 * best.step_s,
        "worst_over_best": max(one.step_s for one in tried) / best.step_s,
        "predicted_error_pct": 100 * (math.exp(statistics.fmean(abs(math.log(ratio)) for ratio in ratios)) - 1),
        "chosen_again": max(half) / min(half),
        **({"cores_used_by_others": max(one.other_cores for one in tried)} if case.device.type == "cpu" else {}),
    }
    return row, [
        {
            "of_tables_gb": shape.table_bytes / 1e9,
            "placement": one.name,
            "predicted_ms": 1e3 * one.predicted_s,
            "measured_ms": 1e3 * one.step_s,
        }
        for one in tried
    ]


def placed_models(
    machine: Machine, device: torch.device, *, seed: int, is_quick: bool, tell: Tell
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Random models with several placements that fit: one row for each, and one for each placement."""
    draw, cases, rows = random.Random(seed), list[dict[str, Any]](), list[dict[str, Any]]()
    wanted = NUM_QUICK if is_quick else NUM_CASES[device.type]
    for _ in range(MOST_DRAWN * wanted):
        if len(cases) == wanted:
            break
        with tempfile.TemporaryDirectory(prefix="rowstead-rows-") as folder:
            case = Case(placement_shape(device.type, draw), draw.uniform(*SHARES), device, folder)
            row, of_case = placement_rows(case, machine, (2, 0) if is_quick else TURNS[device.type])
        if row is not None:
            cases.append(row)
            rows += of_case
            tell(f"{len(cases)} of {wanted} models placed, this one {row['chosen_over_best']:.2f} of its fastest")
    return cases, rows


def placement_summary(cases: list[dict[str, Any]]) -> dict[str, float]:
    """How often the chosen placement is the fastest or near it."""
    if not cases:
        return {}
    return {
        "num_placed": float(len(cases)),
        "best_placement_hit_share": sum(case["chosen_over_best"] <= NEAR for case in cases) / len(cases),
        "chosen_over_best_max": max(case["chosen_over_best"] for case in cases),
        "chosen_again_geomean_pct": 100 * (math.exp(statistics.fmean(math.log(case["chosen_again"]) for case in cases)) - 1),
    }
