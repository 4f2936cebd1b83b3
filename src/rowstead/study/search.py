"""The search: Optuna proposes settings, a trial evaluates them, the run store keeps both.

A study's folder has `tune.yaml` (the spec), `trials.journal` (Optuna's storage, JSON lines), and at the end `best.yaml` and
`importance.json`. Several workers (`python -m rowstead.study.search ROOT STUDY NUMBER`) share the journal; a worker asks for a
trial under a lock, so that a budget of trials is exact. A trial's record is added to the run store before Optuna gets its value: after a crash in between the record counts, and a trial
without a record is repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rowstead.records.files import write_atomic
from rowstead.records.run_folder import DEFAULT_ROOT
from rowstead.records.store import RunStore, StoreEntry
from rowstead.records.studies import SEARCH_FILE, Trial, trial_history
from rowstead.report.terminal import printable
from rowstead.spec.axis import AxisSpec
from rowstead.spec.errors import RowsteadError, install_command
from rowstead.spec.parse import digest, parse, to_yaml
from rowstead.spec.tune import TuneSpec, base_run, build_space, changes_of, initial_settings, plain_recipe, trial_run
from rowstead.spec.yaml_text import read_yaml
from rowstead.study.points import point_of, settings_of
from rowstead.study.run_points import PointRunner, build_failed_record
from rowstead.study.trial import CONSTANT_NE, TrialOutcome, run_trial, run_trial_in_processes, with_evaluations

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState
except ImportError as error:
    raise RowsteadError(f"a search needs Optuna: {install_command('tune')}") from error

optuna.logging.set_verbosity(logging.ERROR)
JOURNAL = "trials.journal"
WORST_OVER_BEST = 1.2
KEPT_PERCENT = 66.0
"""A trial that is worse than this share of the others half-way is pruned."""
STARTUP_TRIALS = 8
"""Random trials before the sampler's model proposes settings, including the initial ones."""
RESAMPLES = 50
"""Samples of the trials by which the spread of importances is known."""


class Search:
    """One worker's view of a search."""

    def __init__(self, spec: TuneSpec, root: Path | str = DEFAULT_ROOT, *, worker: int = 0, held: tuple[int, ...] = ()) -> None:
        """`held` are file descriptors that child processes keep open, such as the lock of the study."""
        self.spec = spec
        self.held = held
        self.store = RunStore(root)
        self.folder = self.store.study_folder(spec.name)
        self.space = build_space(spec)
        self.worker = worker
        self._recipe = plain_recipe(spec)
        self._changes = changes_of(spec)
        self.folder.mkdir(parents=True, exist_ok=True)
        lock: Any = _Lock(self.folder / ".journal-lock")
        self._storage = optuna.storages.JournalStorage(JournalFileBackend(str(self.folder / JOURNAL), lock_obj=lock))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experimental samplers
            self.study = optuna.create_study(
                storage=self._storage,
                study_name=spec.name,
                direction="minimize",
                load_if_exists=True,
                pruner=self._pruner(),
            )
            self.study.sampler = self._sampler()

    def begin(self) -> None:
        """Call once before any worker, while holding the study: recover what a killed search left, and enqueue the initial settings."""
        self._recover(self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
        if self.spec.sampler != "grid" and self.study.get_trials(deepcopy=False):
            return
        if self.spec.sampler == "grid":  # all points, also if a search was killed before all were enqueued
            titles = [axis.title for axis in self.space]
            starts = [dict(zip(titles, labels, strict=True)) for labels in itertools.product(*(a.labels for a in self.space))]
        else:
            starts = initial_settings(self.spec, self.space)
        for start in starts:
            encoded = {axis.title: _encode(axis, start[axis.title]) for axis in self.space if axis.title in start}
            self.study.enqueue_trial(encoded, skip_if_exists=True)

    def trials(self) -> list[Trial]:
        """The trials so far, by number."""
        entries = self.store.read().of(study=self.spec.name, source="trial")
        return trial_history(entries, samples_per_s=self.spec.samples_per_s)

    def run(self, callback: Callable[[], None] = lambda: None) -> None:
        """Run trials until the budget is spent; `callback` is called after each."""
        with PointRunner(self.folder / f"worker-{self.worker}", fresh=False, held=self.held) as runner:
            while (trial := self._next()) is not None:
                self._try(trial, runner)
                callback()

    def _next(self) -> optuna.Trial | None:
        with _Lock(self.folder / ".ask-lock"):
            states = [one.state for one in self.study.get_trials(deepcopy=False) if "interrupted" not in one.user_attrs]
            num_started = sum(state != TrialState.WAITING for state in states)
            if self.spec.trials is not None and num_started >= self.spec.trials:
                return None
            if self.spec.minutes is not None and self._spent_s() >= 60 * self.spec.minutes:
                return None
            if self.spec.sampler == "grid" and num_started >= math.prod(len(axis.labels) for axis in self.space):
                return None
            trial = self.study.ask()
            trial.set_user_attr("worker", os.getpid())
            return trial

    def _spent_s(self) -> float:
        seconds = [t.entry.record.figures.get("trial_s", 0.0) for t in self.trials()]
        return sum(seconds) / self.spec.workers

    def _try(self, trial: optuna.Trial, runner: PointRunner) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            labels = {axis.title: _suggest(trial, axis) for axis in self.space}
        own = settings_of(self.space, labels)
        point = point_of(self._recipe, labels, own, {**self.spec.set, **self._changes})
        if point.spec is None:
            outcome = TrialOutcome(record=None, objective=None, failure=point.problem, spent_s=0.0)
        elif not point.is_single_process:
            outcome = run_trial_in_processes(with_evaluations(point.spec, 1), point, runner)
        else:

            def is_bad(number: int, ne: float) -> bool:
                trial.report(ne, number)
                return self.spec.prune and bool(trial.should_prune())

            spec = with_evaluations(point.spec, self.spec.evaluations if self.spec.prune else 1)
            outcome = run_trial(spec, runner.folder / f"trial-{trial.number}", is_bad=is_bad)
        entry = self._entry(outcome, trial.number, labels)
        self.store.add(entry)
        self._tell(trial.number, entry)

    def _tell(self, number: int, entry: StoreEntry) -> None:
        """Report the stored result of a trial to Optuna."""
        objective, speed = entry.record.figures.get("objective"), entry.record.figures.get("samples_per_s")
        if self.spec.samples_per_s is not None and speed is not None:
            self._note(number, "missing_speed", self.spec.samples_per_s / speed - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if entry.is_pruned and self.spec.sampler != "gp":  # GP ignores pruned trials, and would propose the same again
                self.study.tell(number, state=TrialState.PRUNED)
            elif objective is None:
                self.study.tell(number, state=TrialState.FAIL)
            else:
                self.study.tell(number, min(objective, self._worst()))

    def _worst(self) -> float:
        """The worst objective that the sampler sees: how far a run diverged says nothing about where to search next."""
        known = [t.value for t in self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) if t.value is not None]
        return max(CONSTANT_NE, WORST_OVER_BEST * min(known, default=CONSTANT_NE))

    def _entry(self, outcome: TrialOutcome, number: int, labels: Mapping[str, Any]) -> StoreEntry:
        own = settings_of(self.space, labels)
        record = outcome.record or build_failed_record(base_run(self.spec).name, digest(own))
        figures = {**record.figures, "trial_number": number, "trial_s": outcome.spent_s}
        if outcome.objective is not None:
            figures["objective"] = outcome.objective
        return StoreEntry(
            record=dataclasses.replace(record, figures=figures),
            source="trial",
            study=self.spec.name,
            point=digest(own),
            axes=dict(labels),
            settings={**self.spec.set, **self._changes, **own},
            failure=outcome.failure,
        )

    def recover_worker(self, pid: int, reason: str) -> None:
        """Recover the trial that a worker was running when it died."""
        # Under the lock, the trials of live workers have their pid: one without a pid was the dead worker's. And no worker asks
        # for other settings before these are enqueued again.
        with _Lock(self.folder / ".ask-lock"):
            running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            self._recover([trial for trial in running if trial.user_attrs.get("worker", pid) == pid], reason)

    def _recover(self, left: list[optuna.trial.FrozenTrial], reason: str | None = None) -> None:
        """Trials whose process has exited: report their stored result, or else enqueue them again.

        With a `reason`, the settings of a fully drawn trial may be the cause: it is recorded as failed and not repeated.
        """
        known = {trial.number: trial.entry for trial in self.trials()}
        for trial in left:
            entry = known.get(trial.number)
            is_drawn = len(trial.params) == len(self.space)
            if entry is None and is_drawn and reason is not None:
                labels = {axis.title: _decode(axis, trial.params[axis.title]) for axis in self.space}
                outcome = TrialOutcome(record=None, objective=None, failure=reason, spent_s=0.0)
                entry = self._entry(outcome, trial.number, labels)
                self.store.add(entry)
            if entry is not None:
                self._tell(trial.number, entry)
                continue
            self._note(trial.number, "interrupted", True)
            # A trial that was killed before all its settings were drawn may have been enqueued with some of them.
            chosen = trial.params if is_drawn else trial.system_attrs.get("fixed_params", {})
            waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if chosen and all(other.system_attrs.get("fixed_params") != chosen for other in waiting):
                self.study.enqueue_trial(chosen)
            self.study.tell(
                trial.number, state=TrialState.FAIL
            )  # last: if killed before this line, the trial is recovered again

    def _note(self, number: int, name: str, value: Any) -> None:
        """Store a user attribute of a running trial."""
        study = self._storage.get_study_id_from_name(self.spec.name)
        self._storage.set_trial_user_attr(self._storage.get_trial_id_from_study_id_trial_number(study, number), name, value)

    def importance(self) -> dict[str, float]:
        """The importance of each parameter by PED-ANOVA; empty if there are too few trials."""
        return _importance(self.study)

    def importance_spread(self) -> dict[str, tuple[float, float]]:
        """How sure the importances are, see `resample_importance`."""
        return resample_importance(self.study, self.spec.seed)

    def _pruner(self) -> optuna.pruners.BasePruner:
        """Prunes from the middle of a trial on, so that a slow start, such as a long warm-up, does not count."""
        if not self.spec.prune:
            return optuna.pruners.NopPruner()
        half = max(1, self.spec.evaluations // 2)
        return optuna.pruners.PercentilePruner(KEPT_PERCENT, n_startup_trials=STARTUP_TRIALS, n_warmup_steps=half)

    def _sampler(self) -> optuna.samplers.BaseSampler:
        spec = self.spec
        seed = spec.seed + 7919 * self.worker + 104_729 * len(self.study.get_trials(deepcopy=False))  # no sequence is repeated
        floor = _missing_speed if spec.samples_per_s is not None else None
        if spec.sampler in ("grid", "random"):  # the points of a grid are all enqueued
            return optuna.samplers.RandomSampler(seed=seed)
        if spec.sampler == "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS, constraints_func=floor)
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True, constant_liar=True, constraints_func=floor
        )


def resample_importance(study: optuna.Study, seed: int) -> dict[str, tuple[float, float]]:
    """From the 5 % to the 95 % quantile of the importances of `RESAMPLES` samples of the trials, drawn with replacement.

    Samples without an importance, such as those of too few distinct trials, are left out; empty if fewer than half are left.
    """
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    random = np.random.default_rng(seed)
    found: list[dict[str, float]] = []
    for _ in range(RESAMPLES if len(trials) > 1 else 0):
        resampled = optuna.create_study(direction=study.direction)
        resampled.add_trials([trials[i] for i in random.integers(len(trials), size=len(trials))])
        found += [shares] if (shares := _importance(resampled)) else []
    if not found or 2 * len(found) < RESAMPLES:
        return {}
    drawn = {name: np.quantile([shares.get(name, 0.0) for shares in found], (0.05, 0.95)) for name in found[0]}
    return {name: (float(low), float(high)) for name, (low, high) in drawn.items()}


def _importance(study: optuna.Study) -> dict[str, float]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except (RuntimeError, ValueError):
        return {}
    return {name: float(share) for name, share in found.items() if math.isfinite(share)}


def _missing_speed(trial: optuna.trial.FrozenTrial) -> tuple[float]:
    """At most 0 for a trial that reached the required speed, or whose speed is unknown."""
    return (float(trial.user_attrs.get("missing_speed", 0.0)),)


def _suggest(trial: optuna.Trial, axis: AxisSpec) -> Any:
    if axis.labels:
        return _decode(axis, trial.suggest_categorical(axis.title, [_encode(axis, label) for label in axis.labels]))
    assert axis.low is not None
    assert axis.high is not None
    if axis.whole:
        return trial.suggest_int(axis.title, math.ceil(axis.low), math.floor(axis.high), log=axis.log)
    return trial.suggest_float(axis.title, axis.low, axis.high, log=axis.log)


def _encode(axis: AxisSpec, label: Any) -> Any:
    """A value as Optuna stores it: choices as JSON, since they may be lists."""
    return json.dumps(label) if axis.labels else label


def _decode(axis: AxisSpec, value: Any) -> Any:
    return json.loads(value) if axis.labels and value is not None else value


class _Lock:
    """A file lock, released when its process exits."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def acquire(self) -> bool:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def repair_journal(path: Path) -> None:
    """Remove a partial last line that a killed process left: Optuna could not read the journal."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            file.truncate(whole)


def write_spec(folder: Path, spec: TuneSpec) -> Path:
    """Write the spec of a search to its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SEARCH_FILE
    write_atomic(path, to_yaml(spec))
    return path


def read_spec(folder: Path) -> TuneSpec:
    """Read the spec of a search from its folder."""
    return parse(TuneSpec, read_yaml(folder / SEARCH_FILE))


def best_recipe(spec: TuneSpec, trial: Trial) -> str:
    """The recipe with the settings of a trial, as a file that `rowstead train` takes."""
    found = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in trial.parameters.items()
    )
    about = printable(f"# The best of search `{spec.name}`, trial {trial.number + 1}: NE {trial.objective:.5f} with {found}.")
    started = {key: value for key, value in spec.set.items() if key.startswith("run.")}
    note = "".join("\n" + printable(f"# Trials ran with {key} = {value}.") for key, value in started.items())
    return f"{about}{note}\n" + to_yaml(trial_run(spec, settings_of(build_space(spec), trial.parameters)))


def main(root: str, study: str, number: str) -> None:
    """A worker process: try settings until the budget is spent, or standard input ends because the parent has exited."""
    threading.Thread(target=_exit_with_input, name="exit with input", daemon=True).start()
    Search(read_spec(RunStore(root).study_folder(study)), root, worker=int(number)).run()


def _exit_with_input() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
