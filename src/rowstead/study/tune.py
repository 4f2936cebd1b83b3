"""A search from start to end: starts workers, runs the unchanged recipe for comparison, writes the best recipe."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rowstead.records.files import write_atomic
from rowstead.records.run_folder import DEFAULT_ROOT
from rowstead.records.store import RunStore, StoreEntry
from rowstead.records.studies import Trial, best_trial, pareto_front
from rowstead.records.usage import usable_cores
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import difference, to_plain
from rowstead.spec.tune import TuneSpec, base_run, build_space, plain_recipe, unchanged_settings
from rowstead.study.points import point_of
from rowstead.study.run_points import PointRunner, lock_study, why_it_ended
from rowstead.study.search import Search, best_recipe, read_spec, repair_journal, write_spec
from rowstead.study.trial import run_trial, run_trial_in_processes, with_evaluations

MAX_RESTARTS = 3
LOOK_EVERY_S = 0.2
BEFORE = "before the change"
"""Name of the run of the unchanged recipe."""
FREE = ("trials", "minutes", "workers", "prune", "evaluations", "sampler", "seed")
"""Settings that may change when a search continues; with others its trials would not be comparable."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    spec: TuneSpec
    trials: tuple[Trial, ...]
    best: Trial | None
    """None if no trial finished."""
    before: StoreEntry | None
    """With `retune_for`: the run of the unchanged recipe."""
    importance: Mapping[str, float]
    recipe: Path | None
    """File of the best settings."""
    importance_spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """What 90 % of resamples of the trials say of each importance; empty where that is unknown."""

    @property
    def pareto(self) -> list[Trial]:
        return pareto_front(self.trials)

    @property
    def unchanged(self) -> Trial | None:
        """With `retune_for`: the trial of the recipe's own settings."""
        if not self.spec.retune_for:
            return None
        good = unchanged_settings(self.spec, build_space(self.spec))
        same = (t for t in self.trials if good and all(t.parameters.get(name) == value for name, value in good.items()))
        return next(same, None)


def tune(
    spec: TuneSpec,
    *,
    root: Path | str = DEFAULT_ROOT,
    out: Path | None = None,
    callback: Callable[[list[Trial]], None] | None = None,
) -> SearchResult:
    """Search until the budget is spent; a search of the same name is continued.

    `callback` gets the trials so far after each one. The best recipe is written to `out`, and to the study's folder.
    """
    base_run(spec)  # a mistake in the recipe shows before anything starts
    store = RunStore(root)
    folder = store.study_folder(spec.name)
    with lock_study(folder) as lock:
        _check_same(folder, spec)
        write_spec(folder, spec)
        repair_journal(folder / "trials.journal")
        search = Search(spec, root, held=(lock,))
        search.begin()
        before = _run_before(search) if spec.retune_for else None
        if spec.workers == 1:
            search.run(lambda: callback(search.trials()) if callback is not None else None)
        else:
            _run_workers(search, Path(root), callback)
        trials, importance, spread = search.trials(), search.importance(), search.importance_spread()
        best = best_trial(trials)
        write_atomic(folder / "importance.json", json.dumps(importance, indent=2) + "\n")
        write_atomic(folder / "importance_spread.json", json.dumps(spread, indent=2) + "\n")
        recipe = None
        if best is not None:
            text = best_recipe(spec, best)
            recipe = out or folder / "best.yaml"
            for path in dict.fromkeys((folder / "best.yaml", recipe)):
                write_atomic(path, text)
    return SearchResult(
        spec=spec,
        trials=tuple(trials),
        best=best,
        before=before,
        importance=importance,
        importance_spread=spread,
        recipe=recipe,
    )


def _check_same(folder: Path, spec: TuneSpec) -> None:
    """Refuse to continue a search with other settings under the same name: its trials would not be comparable."""
    if not (folder / "trials.journal").exists():
        return
    old, new = (to_plain(dataclasses.replace(one, **_free(one))) for one in (read_spec(folder), spec))
    if (found := difference(old, new)) is not None:
        key, before, now = found
        raise RowsteadError(f"search `{spec.name}` was started with {key} {before}, not {now}: use another --name")


def _free(spec: TuneSpec) -> dict[str, Any]:
    """Defaults for the settings that may change; a grid cannot continue another sampler's search, nor the reverse."""
    free = {f.name: f.default for f in dataclasses.fields(TuneSpec) if f.name in FREE}
    return free | ({"sampler": "grid"} if spec.sampler == "grid" else {})


def _run_before(search: Search) -> StoreEntry:
    """The run of the unchanged recipe, from the store if it is there."""
    spec = search.spec
    for entry in search.store.read().of(study=spec.name, source="trial"):
        if entry.axes.get("run") == BEFORE and entry.failure is None:
            return entry
    point = point_of(plain_recipe(spec), {"run": BEFORE}, {}, spec.set)
    run = with_evaluations(base_run(spec), 1)
    if point.is_single_process:
        outcome = run_trial(run, search.folder / "before", is_bad=lambda number, ne: False)
    else:  # with the processes or the fleet that trials have
        with PointRunner(search.folder / "before", fresh=False, held=search.held) as runner:
            outcome = run_trial_in_processes(run, point, runner)
    if outcome.record is None or outcome.objective is None:
        raise RowsteadError(f"the unchanged recipe fails: {outcome.failure}")
    figures = {**outcome.record.figures, "objective": outcome.objective, "trial_s": outcome.spent_s}
    entry = StoreEntry(
        record=dataclasses.replace(outcome.record, figures=figures),
        source="trial",
        study=spec.name,
        axes={"run": BEFORE},
        settings=dict(spec.set),
    )
    search.store.add(entry)
    return entry


def _run_workers(search: Search, root: Path, callback: Callable[[list[Trial]], None] | None) -> None:
    """Run worker processes; one that dies is restarted, and its trial is recorded as failed."""
    num = search.spec.workers
    environment = {"OMP_NUM_THREADS": str(max(1, usable_cores() // num)), **os.environ}
    restarts, size_seen = 0, -1

    def start(number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rowstead.study.search", str(root), search.spec.name, str(number)]
        with open(search.folder / f"worker-{number}.log", "ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=search.held,  # the study stays locked until they have exited, even if this process is killed
            )

    workers = {number: start(number) for number in range(num)}
    try:
        while workers:
            for number, worker in list(workers.items()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = worker.wait(timeout=LOOK_EVERY_S / len(workers))
                    del workers[number]
                    if code != 0:
                        search.recover_worker(worker.pid, why_it_ended(code, search.folder / f"worker-{number}.log"))
                        restarts += 1
                        if restarts > MAX_RESTARTS * num:
                            raise RowsteadError(f"workers died {restarts} times, see {search.folder}/worker-*.log; stopping")
                        workers[number] = start(number)
            file = search.store.file
            if callback is not None and (size := file.stat().st_size if file.exists() else 0) != size_seen:
                size_seen = size
                callback(search.trials())
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
