"""Is the placement that `placement: auto` chooses the fastest of those that fit, when all of them are measured?

Random models get less memory than their tables take. Every placement that `auto` weighs for one is trained, with caches as they are late
in a run. They take turns, a few steps each, since a machine's speed drifts; those that may still be the fastest take more turns than others.
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
from numpy.typing import NDArray

from benchmarks.harness import OtherLoad
from benchmarks.timing import give_back_gpu_memory
from rowstead.plan.auto import choose_fastest, predict_steps
from rowstead.spec.machine import Machine
from rowstead.spec.placement import Placement
from rowstead.stores.build import mean_ids_of, measure_memories
from rowstead.study.calibration.caches import steady_step_s
from rowstead.study.calibration.steady_state import SampledBatches, mean_step_s, run_to_steady_state
from rowstead.study.calibration.steps import Shape, Steps

NUM_CASES, NUM_QUICK = {"cpu": 20, "cuda": 12}, 2
SHARES = (0.25, 0.7)
"""Of what its tables take, the memory that a model gets."""
MOST_DRAWN = 20
"""Models that are drawn for each that counts: some fit in no way, or in one."""
MOST_BATCHES, MOST_IDS = 1024, 1 << 27
"""Of a model, so that few come again: caches as large as what some batches name lack no row of these, where a log goes on to name others."""
TURNS = {"cpu": (10, 40), "cuda": (5, 16)}
"""Of each placement, and of those besides that may be the fastest."""
MAYBE_FASTEST = 1.15
"""How much slower than the fastest so far a placement may be to take more turns."""
STEPS_A_TURN, SECONDS_A_TURN, WARM_S = 12, 0.25, 0.2
"""On a CPU, and on a GPU, and for how long a GPU steps before the first turn."""
OTHER_CORES, MOST_TRIES = 0.3, 2
"""Cores that others may use during a turn, and how often it is taken while they use more."""
CUT_SHARE = 0.2
"""Of a placement's rounds, as many of the quickest and of the slowest do not count."""
NEAR = 1.05
"""How much slower than the fastest the chosen placement may be."""

Tell = Callable[[str], Any]


def typical_s(rounds_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """[rounds, placements] to [placements]: how much slower than its round each placement usually is, at the speed of the median round.

    Quantiles of a placement's own turns do not do on a shared machine: four models that were alike came out 11 to 24 % apart by 12 turns.
    """
    logs = np.log(rounds_s)
    speeds = logs.mean(axis=1, keepdims=True)
    slower = np.sort(logs - speeds, axis=0)
    cut = int(CUT_SHARE * len(slower))
    return np.asarray(np.exp(slower[cut : len(slower) - cut].mean(axis=0) + np.median(speeds)))


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


@dataclass(eq=False)
class Placed:
    """One placement of a model."""

    name: str
    predicted_s: float
    steps: Steps
    turns_s: list[float] = field(default_factory=list)
    step_s: float = math.inf
    """By all its turns, beside those that others took in the same rounds."""
    other_cores: float = 0.0
    """That others used, in the turn in which they used most."""

    def take_turn(self) -> None:
        """Measure some steps; on a CPU again, if others used it meanwhile."""
        if self.steps.device.type == "cuda":
            self.turns_s.append(steady_step_s(self.steps, SECONDS_A_TURN, warm_s=0.0 if self.turns_s else WARM_S))
            return
        tries: list[tuple[float, float]] = []
        while len(tries) < MOST_TRIES and (not tries or tries[-1][0] > OTHER_CORES):
            with OtherLoad() as others:
                seconds = mean_step_s(self.steps, STEPS_A_TURN)
            tries.append((others.cores, seconds))
        cores, seconds = min(tries)
        self.turns_s.append(seconds)
        self.other_cores = max(self.other_cores, cores)


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
        return predict_steps(spec, measure_memories(spec, self.device), machine, mean_ids=mean_ids_of(spec))

    @contextlib.contextmanager
    def placed(self, tried: Mapping[str, tuple[Placement, float]]) -> Iterator[list[Placed]]:
        """The model under each of some placements, ready to be measured."""
        found: list[Placed] = []
        drawn = SampledBatches.of(self.shape, self.device, most_batches=MOST_BATCHES, most_ids=MOST_IDS)
        try:
            for name, (placement, predicted_s) in tried.items():
                shares = {one.name: one.cache_fraction for one in placement.tables if one.cache_fraction}
                rules = {
                    one.name: {"where": one.where, **({"cache_fraction": shares[one.name]} if one.name in shares else {})}
                    for one in placement.tables
                }
                kept = max(shares.values(), default=0.0)
                steps = run_to_steady_state(
                    self.shape, self.device, placement=rules, kept_share=kept, folder=self.folder, drawn=drawn
                )
                found.append(Placed(name, predicted_s, steps))
            yield found
        finally:
            for one in found:
                one.steps.close()
            found.clear()
            give_back_gpu_memory()


def measure(tried: Sequence[Placed], chosen: Placed, num_all: int, num_more: int) -> list[Placed]:
    """Let placements take turns: all of them, then those that may be the fastest, and the chosen one, which are returned."""
    _take_rounds(tried, num_all)
    least_s = min(one.step_s for one in tried)
    nearest = [one for one in tried if one is chosen or one.step_s <= MAYBE_FASTEST * least_s]
    _take_rounds(nearest, num_more)
    return nearest


def _take_rounds(some: Sequence[Placed], count: int) -> None:
    """Every placement takes a turn in each round, in an order by chance: what one leaves behind shall not always meet the same other."""
    order = random.Random(count)
    for _ in range(count):
        for one in order.sample(some, len(some)):
            one.take_turn()
    for one, seconds in zip(some, typical_s(rounds_of(some)), strict=True):
        one.step_s = float(seconds)


def rounds_of(some: Sequence[Placed]) -> NDArray[np.float64]:
    """[rounds, placements]: the turns of placements that have taken as many."""
    return np.array([one.turns_s for one in some]).T


def placement_rows(case: Case, machine: Machine, turns: tuple[int, int]) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """What was chosen for a model, and each placement that fits; nothing where those are fewer than two."""
    shape, known = case.shape, case.foretold(machine)
    if len(known) < 2:
        return None, []
    name = choose_fastest(known)
    with case.placed(known) as ready:
        tried = list(ready)
        chosen = next(one for one in tried if one.name == name)
        nearest = measure(tried, chosen, *turns)
    best = min(nearest, key=lambda one: one.step_s)
    even_s, odd_s = (typical_s(rounds_of(nearest)[first::2]) for first in (0, 1))
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
        "near_share": sum(one.step_s <= NEAR * best.step_s for one in tried) / len(tried),
        "predicted_error_pct": 100 * (math.exp(statistics.fmean(abs(math.log(ratio)) for ratio in ratios)) - 1),
        "again": float(np.exp(np.abs(np.log(even_s / odd_s)).mean())),
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
        "hit_share_by_chance": statistics.fmean(case["near_share"] for case in cases),
        "chosen_over_best_max": max(case["chosen_over_best"] for case in cases),
        "placements_again_geomean_pct": 100 * (math.exp(statistics.fmean(math.log(case["again"]) for case in cases)) - 1),
    }
