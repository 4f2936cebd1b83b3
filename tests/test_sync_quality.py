"""Several trainers learn what one process learns from the same samples, evaluated without label noise."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks.synchronisation import MODES, Problem, compare, prepare, spec_of, summary_of

SEEDS = range(1, 6)
MAX_PCT = {2: 0.1, 4: 0.2}
"""NE above one process, by the number of trainers."""


@pytest.fixture(autouse=True)
def _as_trainers() -> Iterator[None]:
    threads, switch_interval_s = torch.get_num_threads(), sys.getswitchinterval()
    prepare()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(switch_interval_s)


@pytest.mark.statistical
@pytest.mark.timeout(3600)
def test_several_trainers_learn_what_one_process_learns() -> None:
    """Protocol: `benchmarks.synchronisation` as it is: the quickstart, five seeds, the same samples and initial weights for one process and
    for every way to train with several trainers or threads. The mean over the seeds is at most 0.1 % above one process with 2, 0.2 % with 4.
    """
    rows = [row for seed in SEEDS for row in compare(Problem(spec_of(seed)), seed)]
    summary = summary_of(rows)
    print(summary)
    for mode, num in {(row["mode"], row["num"]) for row in rows}:
        assert summary[f"{mode.replace(' ', '_')}_{num}_pct"] <= MAX_PCT[num], (mode, num, summary)


def test_every_sync_mode_learns_a_small_problem() -> None:
    sizes = ("data.synth.num_train_samples=40_000", "data.synth.num_eval_samples=4_000", "train.batch_size=256")
    problem = Problem(spec_of(1, *sizes))
    untrained = problem.score(problem.model())
    nes = {name: problem.train_together(2, sync) for name, sync in MODES.items()}
    nes["hogwild"] = problem.train_hogwild(2)
    assert all(ne < 0.97 * untrained for ne in nes.values()), nes
