"""The search itself: Optuna proposes settings, a trial says what they are worth, the run store keeps both.

A study's folder has `tune.yaml` (what is searched), `trials.journal` (Optuna's own memory, JSON lines), and at the end
`best.yaml` and `importance.json`. Several workers share the journal; a worker asks for a trial under a lock, so a budget of
trials is kept to the number. A trial's record is added to the run store before Optuna is told: after a crash in between, the
record is what counts, and a trial without one is tried again.
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
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rowstead.records.files import write_atomic
from rowstead.records.run_folder import DEFAULT_ROOT
from rowstead.records.store import RunStore, StoreEntry
from rowstead.records.studies import SEARCH_FILE, Trial, trial_history
from rowstead.records.usage import machine_facts, versions
from rowstead.spec.axis import AxisSpec
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import digest, parse, read_yaml, to_plain
from rowstead.spec.record import Record, date_now
from rowstead.spec.tune import TuneSpec, changed, changes_of, known_good, plain_recipe, space_of, starts_of
from rowstead.study.points import point_of
from rowstead.study.run_points import PointRunner
from rowstead.study.trial import CONSTANT_NE, TrialOutcome, run_trial, run_trial_in_processes, watch_trial

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState
except ImportError as error:
    raise RowsteadError("a search needs Optuna: pip install 'rowstead[tune]'") from error

optuna.logging.set_verbosity(logging.ERROR)
WORST_OVER_BEST = 1.2
KEPT_PERCENT = 66.0
"""Of trials so far: one that is worse half-way than so many of them is ended."""
STARTUP_TRIALS = 8
"""Settings drawn at random before a sampler's model begins to choose, those that we start from included."""


class Search:
    """One worker's view of a search."""

    def __init__(self, spec: TuneSpec, root: Path | str = DEFAULT_ROOT, *, worker: int = 0, held: tuple[int, ...] = ()) -> None:
        """`held` are descriptors that processes of ours keep open as long as they live, such as the lock of the study."""
        self.spec = spec
        self.held = held
        self.store = RunStore(root)
        self.folder = self.store.study_folder(spec.name)
        self.space = space_of(spec)
        self.worker = worker
        self._recipe = plain_recipe(spec)
        self._changes = changes_of(spec)
        self._machine = machine_facts()
        self.folder.mkdir(parents=True, exist_ok=True)
        lock: Any = _Lock(self.folder / ".journal-lock")
        self._storage = optuna.storages.JournalStorage(JournalFileBackend(str(self.journal), lock_obj=lock))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that samplers are new to Optuna is not the user's concern
            self.study = optuna.create_study(
                storage=self._storage,
                study_name=spec.name,
                direction="minimize",
                load_if_exists=True,
                pruner=self._pruner(),
            )
            self.study.sampler = self._sampler()

    @property
    def journal(self) -> Path:
        return self.folder / "trials.journal"

    def begin(self) -> None:
        """Once, before any worker, by whoever holds the study: settle what a killed search left, and line up what to try first."""
        self._settle(self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
        if self.spec.sampler != "grid" and self.study.get_trials(deepcopy=False):
            return
        if self.spec.sampler == "grid":  # all points, also where a search was killed before all were in line
            titles = [axis.title for axis in self.space]
            starts = [dict(zip(titles, labels, strict=True)) for labels in itertools.product(*(a.labels for a in self.space))]
        else:
            starts = starts_of(self.spec, self.space)
        for start in starts:
            encoded = {axis.title: _encoded(axis, start[axis.title]) for axis in self.space if axis.title in start}
            self.study.enqueue_trial(encoded, skip_if_exists=True)

    def trials(self) -> list[Trial]:
        """What was tried so far, by number."""
        entries = self.store.read().of(study=self.spec.name, source="trial")
        return trial_history(entries, samples_per_s=self.spec.samples_per_s)

    def run(self, tell: Callable[[], None] = lambda: None) -> None:
        """Try settings until the budget is spent; `tell` is called after each trial."""
        with PointRunner(self.folder / f"worker-{self.worker}", fresh=False, held=self.held) as performer:
            while (trial := self._next()) is not None:
                self._try(trial, performer)
                tell()

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

    def _try(self, trial: optuna.Trial, performer: PointRunner) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            labels = {axis.title: _suggested(trial, axis) for axis in self.space}
        own = {key: value for axis in self.space for key, value in axis.settings(labels[axis.title]).items()}
        point = point_of(self._recipe, labels, own, {**self.spec.set, **self._changes})
        if point.spec is None:
            outcome = TrialOutcome(record=None, objective=None, failure=point.problem, spent_s=0.0)
        elif not point.is_alone:
            outcome = run_trial_in_processes(watch_trial(point.spec, 1), point, performer)
        else:

            def is_bad(number: int, ne: float) -> bool:
                trial.report(ne, number)
                return self.spec.prune and bool(trial.should_prune())

            spec = watch_trial(point.spec, self.spec.evaluations if self.spec.prune else 1)
            outcome = run_trial(spec, performer.folder / f"trial-{trial.number}", is_bad=is_bad)
        entry = self._entry(outcome, trial.number, labels, own)
        self.store.add(entry)
        self._tell(trial.number, entry)

    def _tell(self, number: int, entry: StoreEntry) -> None:
        """Let Optuna know what the store knows of a trial."""
        objective, speed = entry.record.figures.get("objective"), entry.record.figures.get("samples_per_s")
        if self.spec.samples_per_s is not None and speed is not None:
            self._note(number, "missing_speed", self.spec.samples_per_s / speed - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if entry.is_pruned and self.spec.sampler != "gp":  # which would pass over it, and go there again
                self.study.tell(number, state=TrialState.PRUNED)
            elif objective is None:
                self.study.tell(number, state=TrialState.FAIL)
            else:
                self.study.tell(number, min(objective, self._worst()))

    def _worst(self) -> float:
        """As bad as a trial can be to the sampler: how far one went astray says nothing of where to look next."""
        known = [t.value for t in self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) if t.value is not None]
        return max(CONSTANT_NE, WORST_OVER_BEST * min(known, default=CONSTANT_NE))

    def _entry(self, outcome: TrialOutcome, number: int, labels: Mapping[str, Any], own: Mapping[str, Any]) -> StoreEntry:
        record = outcome.record
        if record is None:
            run = known_good(self.spec)
            record = Record(
                kind="measured",
                name=run.name,
                spec_digest=digest(dict(own)),
                date=date_now(),
                machine=self._machine,
                versions=versions(),
            )
        figures = {**record.figures, "trial_number": number, "trial_s": outcome.spent_s}
        if outcome.objective is not None:
            figures["objective"] = outcome.objective
        return StoreEntry(
            record=dataclasses.replace(record, figures=figures),
            source="trial",
            study=self.spec.name,
            point=digest(dict(own)),
            axes=dict(labels),
            settings={**self.spec.set, **self._changes, **own},
            failure=outcome.failure,
        )

    def settle_worker(self, pid: int, reason: str) -> None:
        """See to what a worker was doing when it died, so that nobody waits for it."""
        # While the lock is ours, all trials of workers that live say whose they are: one that does not was the dead one's.
        # And nobody draws other settings in place of those that are put back in line.
        with _Lock(self.folder / ".ask-lock"):
            running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            self._settle([trial for trial in running if trial.user_attrs.get("worker", pid) == pid], reason)

    def _settle(self, left: list[optuna.trial.FrozenTrial], reason: str | None = None) -> None:
        """Trials whose process has gone: told what the store has of them, or else put back in line.

        With a `reason`, settings that were all drawn may have caused it: these are not tried again, but recorded as failed.
        """
        known = {trial.number: trial.entry for trial in self.trials()}
        for trial in left:
            entry = known.get(trial.number)
            is_drawn = len(trial.params) == len(self.space)
            if entry is None and is_drawn and reason is not None:
                labels = {axis.title: _decoded(axis, trial.params[axis.title]) for axis in self.space}
                own = {key: value for axis in self.space for key, value in axis.settings(labels[axis.title]).items()}
                outcome = TrialOutcome(record=None, objective=None, failure=reason, spent_s=0.0)
                entry = self._entry(outcome, trial.number, labels, own)
                self.store.add(entry)
            if entry is not None:
                self._tell(trial.number, entry)
                continue
            self._note(trial.number, "interrupted", True)
            # One that was killed before all its settings were drawn may still have been lined up with some.
            chosen = trial.params if is_drawn else trial.system_attrs.get("fixed_params", {})
            waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if chosen and all(other.system_attrs.get("fixed_params") != chosen for other in waiting):
                self.study.enqueue_trial(chosen)
            self.study.tell(trial.number, state=TrialState.FAIL)  # last: killed before it, we see to this trial once more

    def _note(self, number: int, name: str, value: Any) -> None:
        """Keep a fact of a running trial in Optuna's memory."""
        study = self._storage.get_study_id_from_name(self.spec.name)
        self._storage.set_trial_user_attr(self._storage.get_trial_id_from_study_id_trial_number(study, number), name, value)

    def importance(self) -> dict[str, float]:
        """How much of the spread between good and other trials each parameter explains; empty where trials are too few."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                evaluator = optuna.importance.PedAnovaImportanceEvaluator()
                found = optuna.importance.get_param_importances(self.study, evaluator=evaluator)
        except (RuntimeError, ValueError):
            return {}
        return {name: float(share) for name, share in found.items() if math.isfinite(share)}

    def _pruner(self) -> optuna.pruners.BasePruner:
        """From the middle of a trial on; what starts slowly, as with a long warm-up, is not judged by its start."""
        if not self.spec.prune:
            return optuna.pruners.NopPruner()
        half = max(1, self.spec.evaluations // 2)
        return optuna.pruners.PercentilePruner(KEPT_PERCENT, n_startup_trials=STARTUP_TRIALS, n_warmup_steps=half)

    def _sampler(self) -> optuna.samplers.BaseSampler:
        spec = self.spec
        seed = spec.seed + 7919 * self.worker + 104_729 * len(self.study.get_trials(deepcopy=False))  # no draw comes again
        floor = _missing_speed if spec.samples_per_s is not None else None
        if spec.sampler in ("grid", "random"):  # the points of a grid are all in line before the first trial
            return optuna.samplers.RandomSampler(seed=seed)
        if spec.sampler == "gp":
            return optuna.samplers.GPSampler(seed=seed, n_startup_trials=STARTUP_TRIALS, constraints_func=floor)
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True, constant_liar=True, constraints_func=floor
        )


def _missing_speed(trial: optuna.trial.FrozenTrial) -> tuple[float]:
    """At most 0 for a trial that was as fast as asked for, or whose speed is not known."""
    return (float(trial.user_attrs.get("missing_speed", 0.0)),)


def _suggested(trial: optuna.Trial, axis: AxisSpec) -> Any:
    if axis.labels:
        return _decoded(axis, trial.suggest_categorical(axis.title, [_encoded(axis, label) for label in axis.labels]))
    assert axis.low is not None
    assert axis.high is not None
    if axis.whole:
        return trial.suggest_int(axis.title, math.ceil(axis.low), math.floor(axis.high), log=axis.log)
    return trial.suggest_float(axis.title, axis.low, axis.high, log=axis.log)


def _encoded(axis: AxisSpec, label: Any) -> Any:
    """A value as Optuna keeps it: choices as JSON, as they may be lists."""
    return json.dumps(label) if axis.labels else label


def _decoded(axis: AxisSpec, value: Any) -> Any:
    return json.loads(value) if axis.labels and value is not None else value


class _Lock:
    """A lock of the operating system, which goes when its process goes."""

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


def mend_journal(path: Path) -> None:
    """Cut off a line that was torn when a process was killed: Optuna would stumble over it for ever."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            file.truncate(whole)


def write_spec(folder: Path, spec: TuneSpec) -> Path:
    """Keep what is searched, for workers and for readers."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SEARCH_FILE
    write_atomic(path, yaml.safe_dump(to_plain(spec), sort_keys=False, allow_unicode=True))
    return path


def read_spec(folder: Path) -> TuneSpec:
    """What is searched in a study's folder."""
    return parse(TuneSpec, read_yaml(folder / SEARCH_FILE))


def best_recipe(spec: TuneSpec, trial: Trial) -> str:
    """The recipe with the settings of a trial, as a file that `rowstead train` takes."""
    own = {key: value for axis in space_of(spec) for key, value in axis.settings(trial.parameters[axis.title]).items()}
    found = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in trial.parameters.items()
    )
    about = _one_line(f"# The best of search `{spec.name}`, trial {trial.number + 1}: NE {trial.objective:.5f} with {found}.")
    started = {key: value for key, value in spec.set.items() if key.startswith("run.")}
    note = "".join("\n" + _one_line(f"# Trials ran with {key} = {value}.") for key, value in started.items())
    return f"{about}{note}\n" + yaml.safe_dump(to_plain(changed(spec, own)), sort_keys=False, allow_unicode=True)


def _one_line(text: str) -> str:
    """Text for a comment: names in it cannot end the line, nor make the file unreadable."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
