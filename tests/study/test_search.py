"""A search finds, keeps, goes on, and ends with a recipe; what fails or dies on the way is recorded."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from optuna.trial import TrialState
from rich.console import Console

from rowstead import run
from rowstead.cli.study import TrialLines
from rowstead.records.store import RunStore, StoreEntry
from rowstead.records.studies import importance_in, trial_history
from rowstead.spec.errors import RowsteadError
from rowstead.spec.record import Record
from rowstead.spec.run import load_recipe
from rowstead.spec.tune import TuneSpec, build_space, initial_settings, load_tune, space_axis_from
from rowstead.study.run_points import lock_study
from rowstead.study.search import Search, _suggest, repair_journal, write_spec
from rowstead.study.tune import SearchResult, tune
from tests.small_runs import wait_until
from tests.study.learnable import LARGER, learnable_recipe

HOSTILE = "<script>alert(1)</script> \x1b[31m 猫"


def search(folder: Path, **changes: Any) -> TuneSpec:
    spec = load_tune(learnable_recipe(folder, num_samples=2_000))
    return dataclasses.replace(spec, **{"name": "t", "trials": 4, **changes})


def test_a_search_ends_with_a_recipe_and_goes_on_when_asked_again(tmp_path: Path) -> None:
    spec = search(tmp_path, trials=3, sampler="random")
    found = tune(spec, root=tmp_path / "runs", out=tmp_path / "best.yaml")
    assert [trial.number for trial in found.trials] == [0, 1, 2]
    assert found.best is not None
    assert found.best.objective == min(trial.objective for trial in found.trials if trial.counts and trial.objective)
    best = load_recipe(str(tmp_path / "best.yaml"))
    assert best.train.dense_optimizer.lr == pytest.approx(found.best.parameters["dense lr"])
    assert best.train.checkpoint_every is None
    quality = run.train(best, out=tmp_path / "run").quality
    assert quality is not None
    assert quality.ne_expected == pytest.approx(found.best.objective)
    again = tune(dataclasses.replace(spec, trials=5), root=tmp_path / "runs")
    assert [trial.entry.id for trial in again.trials[:3]] == [trial.entry.id for trial in found.trials]
    assert len(again.trials) == 5
    assert len({str(trial.parameters) for trial in again.trials}) == 5
    assert importance_in(tmp_path / "runs/studies/t") == pytest.approx(dict(again.importance))
    with pytest.raises(RowsteadError, match="another --name"):
        tune(dataclasses.replace(spec, set={"seed": 2}), root=tmp_path / "runs")


def test_a_search_continues_with_another_sampler_but_not_with_a_grid(tmp_path: Path) -> None:
    values = (space_axis_from("train.dense_optimizer.lr=0.001,0.01"), space_axis_from("seed=1,2"))
    spec = search(tmp_path, trials=1, sampler="random", space=values, prune=False)
    tune(spec, root=tmp_path / "runs")
    assert len(tune(dataclasses.replace(spec, sampler="tpe", trials=2), root=tmp_path / "runs").trials) == 2
    with pytest.raises(RowsteadError, match="another --name"):
        tune(dataclasses.replace(spec, sampler="grid"), root=tmp_path / "runs")


def test_settings_that_were_lined_up_are_not_lost_with_the_process_that_took_them(tmp_path: Path) -> None:
    spec = search(tmp_path, retune_for={"train.batch_size": LARGER})
    search_ = Search(spec, tmp_path / "runs")
    search_.begin()
    lined_up = [trial.system_attrs["fixed_params"] for trial in search_.study.get_trials(deepcopy=False)]
    search_.study.ask()  # and there it is killed, before any setting is drawn
    again = Search(spec, tmp_path / "runs")
    again.begin()
    waiting = again.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    assert sorted(map(str, lined_up)) == sorted(str(trial.system_attrs["fixed_params"]) for trial in waiting)


def test_the_unchanged_settings_are_known_by_what_they_are(tmp_path: Path) -> None:
    spec = search(tmp_path, retune_for={"train.batch_size": LARGER})
    same, *grown = initial_settings(spec, build_space(spec))
    record = Record(kind="measured", name="n", spec_digest="d", date="2026-01-01")

    def of(number: int, axes: dict[str, Any], objective: float) -> StoreEntry:
        figures = {"trial_number": number, "objective": objective}
        return StoreEntry(record=dataclasses.replace(record, figures=figures), source="trial", axes=axes)

    trials = trial_history([of(1, grown[0], 0.7), of(2, grown[1], 0.8), of(5, same, 0.9)])  # number 0 was interrupted
    found = SearchResult(spec=spec, trials=tuple(trials), best=trials[0], before=None, importance={}, recipe=None)
    assert found.unchanged is not None
    assert found.unchanged.number == 5


def test_each_trial_is_told_of_once_whatever_the_order_in_which_they_end(tmp_path: Path) -> None:
    record = Record(kind="measured", name="n", spec_digest="d", date="2026-01-01")
    entries = [
        StoreEntry(record=dataclasses.replace(record, figures={"trial_number": number, "objective": objective}), source="trial")
        for number, objective in ((1, 0.8), (2, 0.7), (0, 0.9))
    ]
    told = io.StringIO()
    teller = TrialLines(Console(file=told, width=200), 3)
    for place in range(len(entries)):
        teller.update(trial_history(entries[: place + 1]))
        teller.update(trial_history(entries[: place + 1]))
    assert told.getvalue().splitlines() == [
        "trial 1 of 3 complete: NE 0.80000 · best 0.80000",
        "trial 2 of 3 complete: NE 0.70000 · best 0.70000",
        "trial 3 of 3 complete: NE 0.90000 · best 0.70000",
    ]


def test_a_grid_goes_through_all_combinations_and_hostile_names_are_data(tmp_path: Path) -> None:
    axes = (
        dataclasses.replace(space_axis_from("train.dense_optimizer.lr=0.001,0.01"), name=HOSTILE),
        space_axis_from("model.top=[[4], [8, 4]]"),
    )
    found = tune(search(tmp_path, space=axes, sampler="grid", trials=40, prune=False), root=tmp_path / "runs")
    seen = {(trial.parameters[HOSTILE], tuple(trial.parameters["model.top"])) for trial in found.trials}
    assert seen == {(0.001, (4,)), (0.001, (8, 4)), (0.01, (4,)), (0.01, (8, 4))}
    assert len(found.trials) == 4
    assert found.recipe is not None
    assert load_recipe(str(found.recipe)).name == "learnable"


def test_trials_that_make_no_recipe_or_go_astray_are_recorded_and_the_search_goes_on(tmp_path: Path) -> None:
    axes = (
        space_axis_from("train.batch_size=0,64"),
        space_axis_from("train.dense_optimizer.kind=sgd,adam"),
        space_axis_from("train.dense_optimizer.lr=0.01,1e30"),
    )
    found = tune(search(tmp_path, space=axes, sampler="grid", trials=8, prune=False), root=tmp_path / "runs")
    assert len(found.trials) == 8
    by_state = {trial.state for trial in found.trials}
    assert by_state == {"complete", "failed"}
    failures = [str(trial.entry.failure) for trial in found.trials if trial.state == "failed"]
    assert sum("batch_size" in text for text in failures) == 4
    astray = [trial for trial in found.trials if trial.state == "failed" and "batch_size" not in str(trial.entry.failure)]
    assert astray
    assert all(trial.objective == 1.0 and not trial.counts for trial in astray)
    assert found.best is not None
    assert found.best.parameters["train.dense_optimizer.lr"] == 0.01


@pytest.mark.slow
def test_slower_settings_do_not_count_below_a_floor(tmp_path: Path) -> None:
    found = tune(search(tmp_path, trials=3, samples_per_s=1e12), root=tmp_path / "runs")
    assert found.best is None
    assert found.recipe is None
    assert found.pareto
    assert all(not trial.counts for trial in found.trials)


def test_minutes_end_a_search(tmp_path: Path) -> None:
    found = tune(search(tmp_path, trials=None, minutes=0.001), root=tmp_path / "runs")
    assert 1 <= len(found.trials) <= 3


@pytest.mark.slow
def test_a_torn_line_is_cut_off_the_journal(tmp_path: Path) -> None:
    spec = search(tmp_path, trials=1)
    tune(spec, root=tmp_path / "runs")
    journal = tmp_path / "runs/studies/t/trials.journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 4, "wor')
    repair_journal(journal)
    assert journal.read_bytes() == whole
    repair_journal(tmp_path / "none")
    journal.write_bytes(whole + b'{"op_code": 4, "wor')
    assert len(tune(dataclasses.replace(spec, trials=2), root=tmp_path / "runs").trials) == 2


RUN = (
    "import sys; from pathlib import Path; from rowstead.study.search import read_spec; from rowstead.study.tune import tune\n"
)
RUN += "tune(read_spec(Path(sys.argv[1])), root=sys.argv[2])"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_search_that_is_killed_goes_on_where_it_was(tmp_path: Path, workers: int) -> None:
    spec = search(tmp_path, trials=8, workers=workers)
    store = RunStore(tmp_path / "runs")
    write_spec(tmp_path / "given", spec)
    command = [sys.executable, "-c", RUN, str(tmp_path / "given"), str(tmp_path / "runs")]
    process = subprocess.Popen(command)
    wait_until(lambda: len(store.read().of(source="trial")) >= 3, what="three trials")
    process.kill()
    process.wait()
    before = [entry.id for entry in store.read().of(source="trial")]
    assert subprocess.run(command, timeout=300, check=False).returncode == 0
    entries = store.read().of(source="trial")
    trials = trial_history(entries)
    assert [entry.id for entry in entries[: len(before)]] == before
    assert len(entries) == len(trials) == 8
    assert all(trial.state in ("complete", "pruned") for trial in trials)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_search_that_is_killed_is_not_free_before_its_workers_have_gone(tmp_path: Path) -> None:
    write_spec(tmp_path / "given", search(tmp_path, trials=1000, workers=2))
    store = RunStore(tmp_path / "runs")
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path / "given"), str(tmp_path / "runs")])
    wait_until(lambda: len(store.read().of(source="trial")) >= 1, what="a trial")
    workers = psutil.Process(process.pid).children()
    for worker in workers:
        worker.suspend()  # as if deep in arithmetic: they have not seen yet that they are alone
    process.kill()
    process.wait()
    try:
        with pytest.raises(RowsteadError, match="is running in process"), lock_study(store.study_folder("t"), deadline_s=0.2):
            pass
    finally:
        for worker in workers:
            worker.resume()
    with lock_study(store.study_folder("t")):
        num_trials = len(store.read().of(source="trial"))
        psutil.wait_procs(workers, timeout=60)
        assert len(store.read().of(source="trial")) == num_trials


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_that_is_killed_is_replaced_and_its_trial_recorded(tmp_path: Path) -> None:
    spec = search(tmp_path, trials=10, workers=2)
    killed: list[int] = []

    def kill_one(trials: list[Any]) -> None:
        if not killed and len(trials) >= 2:
            workers = [p.pid for p in psutil.Process().children() if "rowstead.study.search" in p.cmdline()]
            os.kill(workers[0], signal.SIGKILL)
            killed.append(workers[0])

    found = tune(spec, root=tmp_path / "runs", callback=kill_one)
    assert killed
    assert len(found.trials) == 10
    failed = [trial for trial in found.trials if trial.state == "failed"]
    assert len(failed) <= 1
    assert all("SIGKILL" in str(trial.entry.failure) for trial in failed)


def grid(folder: Path) -> Search:
    axes = (space_axis_from("train.dense_optimizer.lr=0.001,0.01"), space_axis_from("seed=1,2"))
    search_ = Search(search(folder, trials=None, minutes=60, space=axes, sampler="grid", prune=False), folder / "runs")
    search_.begin()
    return search_


@pytest.mark.parametrize("num_drawn", [0, 1])
@pytest.mark.parametrize("said_whose_it_is", [False, True])
def test_all_points_of_a_grid_are_tried_although_a_worker_was_killed_right_after_it_asked(
    tmp_path: Path, num_drawn: int, said_whose_it_is: bool
) -> None:
    search_ = grid(tmp_path)
    asked = search_.study.ask()
    if said_whose_it_is:
        asked.set_user_attr("worker", 1)
    for axis in search_.space[:num_drawn]:
        _suggest(asked, axis)
    search_.recover_worker(1, "killed")
    search_.run()
    tried = [tuple(trial.parameters.values()) for trial in search_.trials()]
    assert sorted(tried) == [(0.001, 1), (0.001, 2), (0.01, 1), (0.01, 2)]
    assert all(trial.state == "complete" for trial in search_.trials())


def all_points(search_: Search) -> list[tuple[object, ...]]:
    search_.run()
    return sorted(tuple(trial.parameters.values()) for trial in search_.trials())  # type: ignore[type-var]


def test_all_points_of_a_grid_are_tried_although_it_was_killed_while_they_were_lined_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = optuna.study.Study.enqueue_trial, [None, None]

    def enqueue(*args: Any, **named: Any) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        real(*args, **named)

    with monkeypatch.context() as killed:
        killed.setattr(optuna.study.Study, "enqueue_trial", enqueue)
        with pytest.raises(KeyboardInterrupt):
            grid(tmp_path)
    assert all_points(grid(tmp_path)) == [(0.001, 1), (0.001, 2), (0.01, 1), (0.01, 2)]


def test_a_point_that_is_put_back_in_line_twice_takes_nobodys_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search_ = grid(tmp_path)
    for _ in range(2):  # settings that were being tried when the search was killed
        asked = search_.study.ask()
        for axis in search_.space:
            _suggest(asked, axis)

    def tell(*args: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(optuna.study.Study, "tell", tell)
        with pytest.raises(KeyboardInterrupt):
            grid(tmp_path)
    assert all_points(grid(tmp_path)) == [(0.001, 1), (0.001, 2), (0.01, 1), (0.01, 2)]


def test_settings_that_a_worker_was_trying_when_it_died_are_recorded_as_failed_and_not_tried_again(tmp_path: Path) -> None:
    search_ = grid(tmp_path)
    asked = search_.study.ask()
    asked.set_user_attr("worker", 1)
    labels = {axis.title: _suggest(asked, axis) for axis in search_.space}
    search_.recover_worker(1, "killed")
    assert [(trial.parameters, trial.state, trial.entry.failure) for trial in search_.trials()] == [
        (labels, "failed", "killed")
    ]
    waiting = search_.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    assert len(waiting) == 3
    assert asked.params not in [trial.system_attrs["fixed_params"] for trial in waiting]


def test_a_search_has_as_many_trials_as_wanted_although_workers_were_killed_right_after_they_asked(tmp_path: Path) -> None:
    search_ = Search(search(tmp_path, trials=3), tmp_path / "runs")
    search_.begin()
    search_.study.ask()
    other = search_.study.ask()
    other.set_user_attr("worker", 2)
    search_.recover_worker(1, "killed")
    assert [t.number for t in search_.study.get_trials(states=(TrialState.RUNNING,))] == [other.number]  # its worker lives
    search_.recover_worker(2, "killed")
    search_.run()
    assert [trial.state for trial in search_.trials()] == ["complete"] * 3


def test_nobody_is_given_a_trial_while_another_is_put_back_in_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search_ = grid(tmp_path)
    search_.study.ask()
    put_back: list[Any] = []

    def enqueue(chosen: dict[str, Any]) -> None:
        with open(search_.folder / ".ask-lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        put_back.append(chosen)

    monkeypatch.setattr(search_.study, "enqueue_trial", enqueue)
    search_.recover_worker(1, "killed")
    assert len(put_back) == 1


@pytest.mark.slow
def test_all_processes_of_a_trial_have_its_settings(tmp_path: Path) -> None:
    axes = (space_axis_from("train.dense_optimizer.lr=0.003,0.03"),)
    nes = {}
    for processes in (1, 2):
        started = {"run.processes": processes}
        spec = search(tmp_path, name=f"t{processes}", space=axes, sampler="grid", prune=False, set=started)
        found = tune(dataclasses.replace(spec, retune_for={"train.log_every": 7}), root=tmp_path / "runs")
        assert found.before is not None
        assert found.before.record.machine.get("num_processes") == (2 if processes == 2 else None)  # as the trials
        assert [trial.state for trial in found.trials] == ["complete", "complete"]
        nes[processes] = {trial.parameters["train.dense_optimizer.lr"]: trial.objective for trial in found.trials}
        facts = {trial.entry.record.machine.get("num_processes") for trial in found.trials}
        assert facts == ({2} if processes == 2 else {None})
    for rate, ne in nes[1].items():
        assert nes[2][rate] == pytest.approx(ne, rel=1e-3)  # synchronous training is the same, however many share a batch
    assert nes[1][0.003] != pytest.approx(nes[1][0.03], rel=1e-2)


@pytest.mark.slow
def test_the_command_searches_and_says_what_it_found(tmp_path: Path) -> None:
    recipe = learnable_recipe(tmp_path, num_samples=2_000)
    command = [sys.executable, "-m", "rowstead", "tune", recipe, "--retune-for", f"train.batch_size={LARGER}", "--trials", "4"]
    command += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "best.yaml"), "--samples-per-s", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "before the change" in done.stdout
    assert "trial 4 of 4" in done.stdout
    assert load_recipe(str(tmp_path / "best.yaml")).train.batch_size == LARGER
