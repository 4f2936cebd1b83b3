"""Asynchronous trainers learn what synchronous ones learn from the same samples, evaluated without label noise."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks.synchronisation import BATCH, MODES, Problem, prepare
from rowstead.records.studies import interval

SEEDS = range(1, 11)
NUM_TRAINERS = (2, 4)
MAX_PCT = 0.2


@pytest.fixture(autouse=True)
def _as_trainers() -> Iterator[None]:
    threads, switch_interval_s = torch.get_num_threads(), sys.getswitchinterval()
    prepare()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(switch_interval_s)


@pytest.mark.statistical
@pytest.mark.timeout(2400)
def test_asynchronous_training_is_on_average_within_a_fifth_of_a_percent_of_synchronous() -> None:
    """Protocol: ten seeds, each with the same samples and initial weights for synchronous training and for every asynchronous mode.

    The order in which threads run moves the NE of a single run by some tenths of a percent. So the tight claim is about the mean over all
    modes: the upper end of its 95 % interval over seeds is at most 0.2 %. A single mode fails if the lower end of its interval is above that,
    or its median above twice that.
    """
    by_mode: dict[str, list[float]] = {}
    by_seed: list[float] = []
    for seed in SEEDS:
        problem = Problem(seed)
        differences: dict[str, float] = {}
        for num_trainers in NUM_TRAINERS:
            synchronous = problem.train_alone(BATCH * num_trainers)
            nes = {mode: problem.train_together(num_trainers, sync) for mode, sync in MODES.items() if mode != "allreduce"}
            nes["hogwild"] = problem.train_hogwild(num_trainers)
            differences |= {f"{mode}, {num_trainers} trainers": 100 * (ne / synchronous - 1) for mode, ne in nes.items()}
        by_seed.append(statistics.mean(differences.values()))
        for name, value in differences.items():
            by_mode.setdefault(name, []).append(value)
    for name, values in {**by_mode, "mean of all modes": by_seed}.items():
        low, high = interval(values)
        shown = ", ".join(f"{value:+.2f}" for value in values)
        print(
            f"{name}: NE {statistics.mean(values):+.3f} % above synchronous ({shown}), 95 % interval {low:+.3f} to {high:+.3f}"
        )
    _, high = interval(by_seed)
    assert high is not None
    assert high <= MAX_PCT, by_seed
    for name, values in by_mode.items():
        low, _ = interval(values)
        assert low is not None
        assert low <= MAX_PCT, (name, values)
        assert statistics.median(values) <= 2 * MAX_PCT, (name, values)


def test_every_sync_mode_learns_a_small_problem() -> None:
    problem = Problem(1, num_samples=8_000, num_eval_samples=4_000)
    untrained = problem.score(problem.model())
    nes = {name: problem.train_together(2, sync) for name, sync in MODES.items()}
    nes["hogwild"] = problem.train_hogwild(2)
    assert all(ne < 0.97 * untrained for ne in nes.values()), nes
