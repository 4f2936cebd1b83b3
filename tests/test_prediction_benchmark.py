"""The benchmark of predictions draws what it says, reckons right, and runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fit_steps import measured_steps
from benchmarks.fleet_models import in_quiet_windows, predicted_fleet, random_fleets
from benchmarks.placements import typical_s
from benchmarks.prediction import error, network_shapes, predicted, random_shapes, rank_correlation, summary_of
from rowstead.spec.catalogue import load_software, machine_text
from rowstead.spec.networks import NETWORKS
from tests.measured_machine import measured_machine, shared_machine


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_models_are_drawn_from_the_whole_range(device: str) -> None:
    shapes = random_shapes(device, 60, seed=1)
    assert shapes == random_shapes(device, 60, seed=1)
    for name, low, high in (("num_dense", 64, 4096), ("num_sparse", 4, 128)):
        values = [getattr(shape, name) for shape in shapes]
        assert low <= min(values) < 2 * low
        assert high / 2 < max(values) <= high
    assert len({shape.width for shape in shapes}) == 4
    assert len({shape.batch_size for shape in shapes}) > 3


def test_errors_and_ranks_are_what_they_say() -> None:
    assert error([1.1, 1 / 1.1]) == pytest.approx(0.1)
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)


def test_a_summary_has_the_promised_keys() -> None:
    rows = [
        {"ratio": 1.1, "measured_ms": 1.0, "predicted_ms": 1.1, "again": 1.0, "pace": 1.0},
        {"ratio": 0.9, "measured_ms": 2.0, "predicted_ms": 1.8, "again": 1.01, "pace": 1.2},
    ]
    found = summary_of([{**row, "ratio_at_pace": row["ratio"], "again_at_pace": row["again"]} for row in rows])
    assert {"error_geomean_pct", "error_max_pct", "rank_correlation", "repeatability_geomean_pct"} <= set(found)
    assert found["error_max_pct"] == pytest.approx(100 * (1 / 0.9 - 1))


def test_placements_are_compared_within_rounds() -> None:
    """A machine that halves its pace between rounds, and a turn that took ten times as long, change nothing."""
    paces = np.repeat([1.0, 2.0], [12, 8])[:, None]
    rounds_s = 1e-3 * paces * np.array([[1.0, 1.1, 1.3]])
    rounds_s[4, 0] *= 10
    found = typical_s(rounds_s)
    assert found / found[0] == pytest.approx([1, 1.1, 1.3])
    assert found[0] == pytest.approx(1e-3)


def test_every_model_has_a_prediction() -> None:
    machine = measured_machine()
    steps = [predicted(shape, machine).step_s for shape in random_shapes("cpu", 10, seed=2)]
    assert all(0 < step_s < 10 for step_s in steps)


def test_every_built_in_network_is_among_the_models_and_has_a_prediction() -> None:
    machine, shapes = measured_machine(), network_shapes("cpu", len(NETWORKS) - 1, seed=2)
    assert {shape.network for shape in shapes} == NETWORKS.keys() - {"dlrm"}
    assert all(0 < predicted(shape, machine).step_s < 10 for shape in shapes)


def test_every_fleet_has_a_prediction_and_both_numbers_of_trainers_are_among_them() -> None:
    fleets = random_fleets(6, seed=3)
    assert fleets == random_fleets(6, seed=3)
    assert {fleet.num_trainers for fleet in fleets} == {1, 2}
    assert all(0 < predicted_fleet(fleet, shared_machine()).step_s < 10 for fleet in fleets)


def test_a_fleet_is_measured_while_others_leave_it_the_cores() -> None:
    """10 s of which the host takes a core away for 4: steps and processor time are those of quiet windows."""
    times = [0.5 * k for k in range(25)]
    steps, cpu_s, busy_s = [0.0], [0.0], [0.0]
    for at in times[1:]:
        is_quiet = not 3 < at <= 7
        steps.append(steps[-1] + (50 if is_quiet else 20))
        cpu_s.append(cpu_s[-1] + 0.4)
        busy_s.append(busy_s[-1] + 0.4 + (0.0 if is_quiet else 0.5))
    samples = [{"time_s": at, "num_steps": count, "cpu_s": used} for at, count, used in zip(times, steps, cpu_s, strict=True)]
    found = in_quiet_windows(1.0, 11.0, {"trainer-0": ("trainer", samples)}, list(zip(times, busy_s, strict=True)))
    assert found.num_steps / found.wall_s == pytest.approx(100)
    assert found.cpu_s["trainer"] / found.wall_s == pytest.approx(0.8)
    assert found.other_cores == pytest.approx(0)


@pytest.mark.parametrize(("device", "count", "most"), [("cuda", 6, 7 / 6), ("cpu", 3, 1.6)])
def test_shipped_overheads_come_near_the_steps_that_were_measured(device: str, count: int, most: float) -> None:
    software = load_software("rowstead")
    ratios = {step.name: step.ratio(software) for step in measured_steps(device)}
    assert len(ratios) == count
    assert all(1 / most <= ratio <= most for ratio in ratios.values()), ratios


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(machine_text(shared_machine()))
    words = ["--quick", "--models", "2", "--machine", str(file), "--json"]
    done = subprocess.run([sys.executable, "-m", "benchmarks.prediction", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["summary"]["num_models"] == 2 + 2
    assert [row["by"] for row in found["rows"] if "by" in row] == [*3 * ["process"], "fleet"]
    assert found["summary"]["num_network_models"] == 2
    assert found["summary"]["num_fleet_models"] == 1
    assert found["summary"]["fleet_error_geomean_pct"] > 0
    assert "best_placement_hit_share" in found["summary"]
