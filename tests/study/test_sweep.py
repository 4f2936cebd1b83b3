"""A sweep measures every point once: over failures, crashes, and its own death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rowstead.records.store import RunStore
from rowstead.spec.catalogue import MACHINE_VARIABLE, machine_text
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import parse
from rowstead.spec.sweep import SweepSpec
from rowstead.study.predictions import NOT_CALIBRATED
from rowstead.study.sweep import SweepProgress, sweep
from tests.measured_machine import shared_machine
from tests.small_runs import small_plain, wait_until

HOSTILE = "<img src=x onerror=alert(1)> $(touch hacked) \x1b[31m"
FLEET = "trainers=2,sparse=1,dense=1,readers=1"


class Told:
    def __init__(self) -> None:
        self.all: list[SweepProgress] = []

    def __call__(self, progress: SweepProgress) -> None:
        self.all.append(progress)


def sweep_plain(folder: Path, **changes: Any) -> dict[str, Any]:
    recipe = small_plain()
    recipe["train"]["max_steps"] = 5
    recipe["data"]["synth"]["num_eval_samples"] = 200
    folder.mkdir(exist_ok=True)
    (folder / "small.yaml").write_text(yaml.safe_dump(recipe))
    return {"name": "s", "recipe": str(folder / "small.yaml"), **changes}


def test_predictions_need_no_measurement_and_are_not_added_twice(tmp_path: Path) -> None:
    grid = [{"name": "batch", "keys": "train.batch_size", "values": [64, 128]}]
    machines = [{"machine": "cpu-2s", "placement": "remote", "num_sparse_servers": 1, "num_dense_servers": 1}]
    spec = parse(SweepSpec, sweep_plain(tmp_path, grid=grid, machines=machines))
    for _ in range(2):
        finished = sweep(spec, root=tmp_path / "runs", on=["cpu-2s", "zion"], predict_only=True)
    assert finished.measured == ()
    entries = RunStore(tmp_path / "runs").read().entries
    assert len(entries) == 4
    assert {str(entry.record.machine["name"]) for entry in entries} == {"cpu-2s", "zion"}
    assert all(entry.record.kind == "predicted" and entry.record.figures["samples_per_s"] > 0 for entry in entries)
    assert {entry.record.figures["num_sparse_servers"] for entry in entries if entry.record.machine["name"] == "cpu-2s"} == {
        1.0
    }


def test_this_machine_is_predicted_only_after_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = [{"name": "how", "options": {"alone": {}, "processes": {"run.processes": 2}, "fleet": {"run.fleet": FLEET}}}]
    spec = parse(SweepSpec, sweep_plain(tmp_path, grid=grid))
    before = sweep(spec, root=tmp_path / "runs", on=["here"], predict_only=True)
    assert {entry.failure for entry in before.predicted} == {NOT_CALIBRATED}
    assert RunStore(tmp_path / "runs").read().entries == ()
    file = tmp_path / "machine.yaml"
    file.write_text(machine_text(shared_machine(crowding=1.2)))
    monkeypatch.setenv(MACHINE_VARIABLE, str(file))
    found = {
        entry.axes["how"]: entry for entry in sweep(spec, root=tmp_path / "runs", on=["here"], predict_only=True).predicted
    }
    assert {entry.failure for entry in found.values()} == {None}
    speeds = {how: entry.record.figures["samples_per_s"] for how, entry in found.items()}
    assert 0 < speeds["fleet"] < speeds["alone"]  # small batches, dear messages
    assert 0 < speeds["processes"] < speeds["alone"]
    assert [entry.record.figures["num_trainers"] for entry in found.values()] == [1, 2, 2]


def test_a_machine_that_is_none_says_so(tmp_path: Path) -> None:
    spec = parse(SweepSpec, sweep_plain(tmp_path, grid=[{"keys": "seed", "values": [1]}]))
    finished = sweep(spec, root=tmp_path / "runs", on=["bigbasin-33"], predict_only=True)
    assert "bigbasin-32" in str(finished.predicted[0].failure)


@pytest.mark.slow
def test_failures_and_crashes_are_recorded_and_the_sweep_goes_on(tmp_path: Path) -> None:
    options = {
        "good": {},
        "no recipe": {"train.batch_size": 0},
        "no log": {"data": {"parquet": {"train": ["nowhere.parquet"]}}},
        HOSTILE: {"seed": 5},
        "too large": {"features.sparse.0.num_rows": 10**15, "features.sparse.0.repeat": 3, "seed": 7},
    }
    spec = parse(SweepSpec, sweep_plain(tmp_path, grid=[{"name": HOSTILE, "options": options}]))
    told = Told()
    finished = sweep(spec, root=tmp_path / "runs", callback=told)
    failures = {entry.axes[HOSTILE]: entry.failure for entry in finished.measured}
    assert failures["good"] is None
    assert failures[HOSTILE] is None
    assert "batch_size" in str(failures["no recipe"])
    assert "nowhere.parquet" in str(failures["no log"])
    assert failures["too large"]
    assert [progress.num_done for progress in told.all] == [0, 1, 2, 3, 4, 5]
    assert told.all[-1].num_failed == 3
    assert told.all[-1].left_s == 0
    assert not (tmp_path / "hacked").exists()
    predicted = [entry for entry in finished.predicted if entry.axes[HOSTILE] == "good"]
    assert predicted[0].failure == NOT_CALIBRATED
    again = sweep(spec, root=tmp_path / "runs", callback=(second := Told()))
    assert [entry.record.date for entry in again.measured] == [entry.record.date for entry in finished.measured]
    assert second.all[0].num_found == 5
    contents = RunStore(tmp_path / "runs").read()
    assert len(contents.of(kind="measured")) == 5
    leftovers = [path.name for path in (tmp_path / "runs/studies/s/points").iterdir() if path.name != "worker.log"]
    assert leftovers == []
    measured = ["samples_per_s" in entry.record.figures for entry in contents.of(kind="measured")]
    assert measured == [True, False, False, True, False]


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_its_point_alone(tmp_path: Path) -> None:
    grid = [{"name": "seed", "keys": "seed", "values": [1, 2]}]
    plain = sweep_plain(tmp_path, grid=grid, set={"train.max_steps": None, "train.epochs": 10_000}, limit_s=240)
    plain["grid"] = [{"name": "length", "options": {"endless": {}, "short": {"train.max_steps": 3}}}]
    spec = parse(SweepSpec, plain)

    killed: list[int] = []

    class Killer(Told):
        def __call__(self, progress: SweepProgress) -> None:
            super().__call__(progress)
            if not killed:
                import threading

                threading.Thread(target=kill_worker, args=(tmp_path / "runs/studies/s/points", killed)).start()

    finished = sweep(spec, root=tmp_path / "runs", callback=Killer())
    endless, short = finished.measured
    assert killed
    assert "SIGKILL" in str(endless.failure)
    assert short.failure is None


def kill_worker(folder: Path, killed: list[int]) -> None:
    """Kill the process that trains into a study's folder, once it does."""
    found: list[int] = []

    def is_training() -> bool:
        for lock in folder.glob("*/.lock"):
            found[:] = [int(pid) for pid in [lock.read_text().strip()] if pid.isdigit()]
        return bool(found)

    wait_until(is_training, what="a point that trains", deadline_s=60)
    os.kill(found[0], signal.SIGKILL)
    killed.append(found[0])


@pytest.mark.slow
def test_a_point_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    plain = sweep_plain(tmp_path, grid=[{"keys": "seed", "values": [1]}], limit_s=0.5)
    finished = sweep(parse(SweepSpec, plain), root=tmp_path / "runs")
    assert "limit" in str(finished.measured[0].failure)
    again = sweep(parse(SweepSpec, plain | {"limit_s": 300}), root=tmp_path / "runs", retry_failed=True)
    assert again.measured[0].failure is None


def kill_sweep(command: list[str], store: RunStore, num_wanted: int) -> None:
    """Start a sweep, and kill it in the middle of the point after so many."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    points = store.study_folder("s") / "points"
    wait_until(lambda: len(store.read().of(kind="measured")) >= num_wanted, what=f"{num_wanted} points")
    wait_until(lambda: any(points.glob("*/.lock")) or process.poll() is not None, what="the next point to train")
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_that_is_killed_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated = tmp_path / "machine.yaml"
    calibrated.write_text(machine_text(shared_machine(crowding=1.2)))
    monkeypatch.setenv(MACHINE_VARIABLE, str(calibrated))
    values = [1, 2, 3, 4]
    plain = sweep_plain(tmp_path, grid=[{"name": "seed", "keys": "seed", "values": values}])
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(plain))
    store = RunStore(tmp_path / "runs")
    command = [sys.executable, "-m", "rowstead", "sweep", str(tmp_path / "sweep.yaml"), "--runs", str(tmp_path / "runs")]
    before: list[Any] = []
    for num_wanted in (1, 3):
        kill_sweep(command, store, num_wanted)
        now = store.read().of(kind="measured")
        assert num_wanted <= len(now) <= 4
        assert [entry.id for entry in now[: len(before)]] == before
        before = [entry.id for entry in now]
    last = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert last.returncode == 0, last.stderr
    contents = store.read()
    measured = contents.of(kind="measured")
    assert [entry.id for entry in measured[: len(before)]] == before
    assert sorted(entry.axes["seed"] for entry in measured) == values
    assert len({entry.point for entry in measured}) == 4
    assert len(contents.of(kind="predicted")) == 4
    assert contents.num_bad_lines == 0


@pytest.mark.slow
def test_a_sweep_that_is_stopped_leaves_no_process_and_says_how_to_continue(tmp_path: Path) -> None:
    plain = sweep_plain(tmp_path, grid=[{"keys": "seed", "values": [1]}], set={"train.max_steps": None, "train.epochs": 10_000})
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(plain))
    command = [sys.executable, "-m", "rowstead", "sweep", str(tmp_path / "sweep.yaml"), "--runs", str(tmp_path / "runs")]
    points = tmp_path / "runs/studies/s/points"
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_until(lambda: any(lock.read_text().strip() for lock in points.glob("*/.lock")), what="a point that trains")
        (lock,) = points.glob("*/.lock")
        worker = int(lock.read_text())
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "run the same command again to continue" in said
    wait_until(lambda: not psutil.pid_exists(worker), what="the worker to end")


@pytest.mark.slow
def test_a_point_that_had_finished_is_taken_from_its_folder(tmp_path: Path) -> None:
    spec = parse(SweepSpec, sweep_plain(tmp_path, grid=[{"keys": "seed", "values": [1]}]))
    (first,) = sweep(spec, root=tmp_path / "one").measured
    folder = RunStore(tmp_path / "two").study_folder("s") / "points" / str(first.point)
    folder.mkdir(parents=True)
    figures = {**first.record.figures, "samples_per_s": 123.0}
    (folder / "record.json").write_text(json.dumps({**vars(first.record), "figures": figures}))
    (found,) = sweep(spec, root=tmp_path / "two").measured
    assert found.record.figures["samples_per_s"] == 123.0
    assert not folder.exists()


def test_a_study_under_way_is_refused_to_a_second_process(tmp_path: Path) -> None:
    spec = parse(SweepSpec, sweep_plain(tmp_path, grid=[{"keys": "seed", "values": [1]}]))
    folder = RunStore(tmp_path / "runs").study_folder("s")
    code = (
        "import sys, pathlib; from rowstead.study.run_points import lock_study\n"
        f"with lock_study(pathlib.Path({str(folder)!r})): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RowsteadError, match="is running in process"):
            sweep(spec, root=tmp_path / "runs", predict_only=True)
        holder.kill()
    assert sweep(spec, root=tmp_path / "runs", predict_only=True).predicted


@pytest.mark.slow
def test_points_of_several_processes_are_measured(tmp_path: Path) -> None:
    grid = [{"name": "processes", "keys": "run.processes", "values": [2]}]
    (entry,) = sweep(parse(SweepSpec, sweep_plain(tmp_path, grid=grid)), root=tmp_path / "runs").measured
    assert entry.failure is None
    assert entry.record.machine["num_processes"] == 2


def test_the_command_lists_the_sweeps_and_says_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rowstead", "sweep"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "fig10" in listed.stdout
    wrong = subprocess.run(
        [*command, "fig100", "--runs", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert wrong.returncode == 2
    assert "fig10" in wrong.stderr
    right = [*command, "fig12", "--predict-only", "--on", "bigbasin-32", "--runs", str(tmp_path)]
    predicted = subprocess.run(right, capture_output=True, text=True, timeout=60, check=False)
    assert predicted.returncode == 0, predicted.stderr
    assert "predicted: bigbasin-32" in predicted.stdout
    here = subprocess.run([*right, "--on", "here"], capture_output=True, text=True, timeout=60, check=False)
    assert "not calibrated" in here.stdout
    assert "run `rowstead calibrate`, then this command again" in " ".join(here.stdout.split())
