"""The head of a fleet: makes the run's folder, keeps the roles at work, shows how they do, and gathers what they have learned."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from rowstead.fleet.by_hand import ByHand
from rowstead.fleet.client import ServerGone
from rowstead.fleet.crew import LOOK_EVERY_S, Crew, Post, RoleError
from rowstead.fleet.keys import Keys
from rowstead.fleet.local import environment
from rowstead.fleet.nursery import Nursery
from rowstead.fleet.ray_roles import Needs, RayRoles
from rowstead.fleet.roster import ROLES_FOLDER
from rowstead.fleet.sparse_server import SNAPSHOTS_FOLDER
from rowstead.fleet_run.background import InBackground
from rowstead.fleet_run.console import FleetWatcher, SilentFleet
from rowstead.fleet_run.figures import FleetFigures
from rowstead.fleet_run.gather import GatheredModel, TrainersModel
from rowstead.fleet_run.parts import KEYS_FILE, fleet_of, put_progress, readers_progress, settled, shared_facts, told_keys
from rowstead.parts import Sources, open_sources
from rowstead.records.events import EventLog
from rowstead.records.run_folder import DEFAULT_ROOT, RunFolder
from rowstead.records.tensorboard import ScalarWriter
from rowstead.records.usage import UsageSampler, usable_cores
from rowstead.run import Result, record_of, stop_on_signal
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import KINDS
from rowstead.spec.job import is_one_of_many
from rowstead.spec.run import RunSpec
from rowstead.trained import check_same_model, transforms_in
from rowstead.training import checkpoint
from rowstead.training.loop import Ending, Outcome, Position
from rowstead.training.metrics import Quality

SHOW_EVERY_S = 0.5
SNAPSHOT_S = 3600.0
LET_GO_S = 5.0
STOP_S = 60.0
"""How long trainers may take to finish their batch and hand over."""

ROLES_MODULE = "rowstead.fleet_run.roles"

T = TypeVar("T")


def train_fleet(
    spec: RunSpec,
    *,
    root: Path | str = DEFAULT_ROOT,
    out: Path | str | None = None,
    init_from: str | None = None,
    watcher: FleetWatcher | None = None,
    dtype: torch.dtype = torch.float32,
) -> Result:
    """Train a spec that has a `fleet` with processes of this machine, into a new folder under `root` or at `out`.

    `init_from` names an earlier run whose weights are taken over. `dtype` is float64 where arithmetic is to be checked.
    """
    _check_alone()
    spec = settled(spec)
    watcher = watcher or SilentFleet()
    if out is not None:
        RunFolder.check_free(out)
    initial = None
    if init_from is not None:
        initial = checkpoint.load_latest(RunFolder.open(init_from, root).checkpoints, watcher.on_message)
        check_same_model(spec, initial)
    sources = open_sources(spec, id_kinds=initial.facts["id_kinds"] if initial is not None else None)
    folder = RunFolder.create(root, spec.name) if out is None else RunFolder.create_at(out)
    with folder.lock():
        folder.write_spec(spec)
        return Head(spec, folder, sources, watcher, dtype=dtype).run(initial=initial)


def resume_fleet(run: str, *, root: Path | str = DEFAULT_ROOT, watcher: FleetWatcher | None = None) -> Result:
    """Go on with a fleet's run from its newest good checkpoint; what was under way then is trained on again."""
    _check_alone()
    watcher = watcher or SilentFleet()
    folder = RunFolder.open(run, root)
    spec = folder.read_spec()
    fleet_of(spec)
    with folder.lock():
        saved = None
        if checkpoint.checkpoints_in(folder.checkpoints):
            saved = checkpoint.load_latest(folder.checkpoints, watcher.on_message)
            check_same_model(spec, saved)
            if "readers" not in saved.facts:
                raise RowsteadError(
                    f"{saved.path} was not saved by a fleet, so it does not say how far its readers had come: begin a new run "
                    f"with its weights (`--init-from {folder.path}`)"
                )
        sources = open_sources(spec, *((transforms_in(saved), saved.facts["id_kinds"]) if saved is not None else ()))
        return Head(spec, folder, sources, watcher).run(saved=saved)


def _check_alone() -> None:
    if is_one_of_many():
        raise RowsteadError("torchrun has started this process as one of several: a fleet starts its own processes")


class Head:
    """One run of a fleet, seen from the process that starts and watches the others."""

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        sources: Sources,
        watcher: FleetWatcher,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._spec, self._fleet, self._folder, self._watcher = spec, fleet_of(spec), folder, watcher
        self._sources, self._dtype = sources, dtype
        per_epoch = math.ceil(sources.train.num_samples / spec.train.batch_size)
        self._total_steps = int(min(spec.train.epochs * per_epoch, spec.train.max_steps or math.inf))
        self._position = Position()
        self._shown_s, self._logged_step = 0.0, 0
        self._job: InBackground[Any] | None = None
        self._background: InBackground[Any] | None = None
        """What was begun last."""
        self._gathered: GatheredModel | TrainersModel | None = None
        self._due = {"evaluation": spec.train.eval_every, "checkpoint": spec.train.checkpoint_every}
        self._saved_step = -1
        self._num_skipped: int | None = None
        """Bad rows that readers have left out; absent for a log that cannot have any."""

    def run(self, *, initial: checkpoint.Checkpoint | None = None, saved: checkpoint.Checkpoint | None = None) -> Result:
        """Train to the end; on a request to stop, save and return early."""
        spec, folder, watcher = self._spec, self._folder, self._watcher
        self._clear(saved)
        facts = shared_facts(spec, self._sources, dtype=self._dtype, total_steps=self._total_steps)
        if (begin_with := saved or initial) is not None:
            facts["begin_with"] = {"path": str(begin_with.path.resolve()), "with_optimizer": saved is not None}
        cores = max(1, usable_cores() // len(self._fleet.roles()))
        step = self._position.step if saved is not None else None
        with (
            stop_on_signal() as asked,
            UsageSampler() as usage,
            EventLog(folder.events_file) as self._events,
            self._launcher(cores) as launcher,
        ):
            self._scalars = ScalarWriter(folder.tensorboard, resumed_step=step)
            if step is not None:
                self._events.resumed(step)
                watcher.on_message(f"resuming {folder.path} after step {step:,}")
            crew = self._crew = Crew(
                folder.path,
                self._fleet,
                launcher,
                facts,
                say=watcher.on_message,
                keys=told_keys(folder.path),
            )
            crew.on_event = self._note
            before = (self._position.step, self._position.num_samples)
            self._figures = FleetFigures(spec, folder.path, crew, total_steps=self._total_steps, before=before)
            try:
                outcome = self._train(crew, asked.is_set, begin_with, with_optimizer=saved is not None)
                statuses = self._statuses(crew)
                crew.stop(*KINDS)  # asked, not killed: each has its last figures in its file then
            finally:
                self._let_go()
                self._scalars.close()
                crew.close()
        record = None
        if outcome.ending != "interrupted":
            record = record_of(spec, outcome, torch.device("cpu"), "cpu", usage.figures(), num_processes=1 + len(crew.posts))
            of_roles = self._figures.for_record(statuses, record.figures.get("cpu_s", 0.0))
            record = dataclasses.replace(record, figures={**record.figures, **of_roles})
            folder.write_record(record)
        return Result(folder=folder.path, outcome=outcome, record=record)

    def _launcher(self, cores: int) -> Nursery | ByHand | RayRoles:
        """Who starts the roles. Those that may be on other machines speak with keys."""
        path = self._folder.path
        if self._fleet.start == "here":
            return Nursery(path, ROLES_MODULE, environ=environment(cores))
        if not (path / KEYS_FILE).exists():
            Keys.make().save(path / KEYS_FILE)
        if self._fleet.start == "by_hand":
            return ByHand(path, self._watcher.on_message)
        needs = dict.fromkeys(KINDS, Needs(num_cpus=self._fleet.ray_cpus))
        num_gpus = 1.0 if self._spec.device == "cuda" else 0.0
        threads = self._spec.train.sync.hogwild_threads
        needs["trainer"] = Needs(num_cpus=threads * self._fleet.ray_cpus, num_gpus=num_gpus)
        return RayRoles(path, self._fleet, needs)

    # From the first process to the last

    def _train(
        self, crew: Crew, asked: Callable[[], bool], begin_with: checkpoint.Checkpoint | None, *, with_optimizer: bool
    ) -> Outcome:
        crew.start("sparse", "dense", "reader")
        crew.wait_ready(asked)
        self._figures.follow()
        model = self._gathered = self._meanwhile(self._model)
        if begin_with is not None:
            self._meanwhile(lambda: model.put(begin_with, with_optimizer=with_optimizer))
            for post in crew.of("sparse"):  # a server that is killed early comes back with these rows
                crew.call(post, "snapshot", deadline_s=SNAPSHOT_S)
        if asked():
            return Outcome("interrupted", self._position, None, None)
        crew.start("trainer")
        self._figures.follow()
        started = time.monotonic()
        try:
            ending = self._watch(crew, model, asked)
        except RoleError as error:
            raise self._rescued(crew, model, error) from None
        if ending != "finished":
            crew.stop("trainer", grace_s=STOP_S)
        self._wait_for_job()
        self._position.train_s += time.monotonic() - started
        self._show(at_once=True)
        crew.wait_ready()  # a server that is just coming back has its say too
        self._count(crew)
        if ending == "stopped early":
            self._take_back_best(model)
        else:
            self._meanwhile(model.take)
        self._save(model)
        quality = None if ending == "interrupted" else self._evaluate(model, None)
        return Outcome(ending, self._position, quality, self._figures.samples_per_s, num_skipped=self._num_skipped)

    def _rescued(self, crew: Crew, model: GatheredModel | TrainersModel, error: RoleError) -> RowsteadError:
        """The error to end with, after what can still be gathered was saved.

        A trainer that says itself what is wrong speaks of its model, which is then not worth saving, unless a reader told it.
        """
        crew.stop("trainer", grace_s=STOP_S)
        readers = self._statuses(crew, "reader").values()
        is_spoilt = error.post.kind == "trainer" and error.is_mistake and not any("error" in status for status in readers)
        if is_spoilt or error.post.kind in ("sparse", "dense") or self._position.step == 0:
            return error
        try:
            self._count(crew)
            progress = readers_progress(self._spec, self._folder.path)
            model.take()
            self._write(model, self._position, progress)
        except RowsteadError:
            return error
        saved = (
            f"The model after step {self._position.step:,} is saved: go on with `rowstead train --resume {self._folder.path}`"
        )
        return RowsteadError(f"{error}\n{saved}")

    def _let_go(self) -> None:
        """Close the connections of the model, once nobody uses them any more."""
        if self._background is not None:
            self._background.wait(LET_GO_S)
        if self._gathered is not None and (self._background is None or self._background.is_done):
            self._gathered.close()

    def _model(self) -> GatheredModel | TrainersModel:
        path = self._folder.path
        return TrainersModel(path) if self._fleet.tables == "local" else GatheredModel(self._spec, path, told_keys(path))

    def _watch(self, crew: Crew, model: GatheredModel | TrainersModel, asked: Callable[[], bool]) -> Ending:
        """Keep everybody at work until there is nothing left to train on, or somebody wants to stop."""
        while crew.is_training:
            if asked():
                return "interrupted"
            crew.look()
            self._show()
            if self._between(model):
                return "stopped early"
            time.sleep(LOOK_EVERY_S)
        return "finished"

    def _between(self, model: GatheredModel | TrainersModel) -> bool:
        """Evaluate and save when it is time, in the background; true when training should stop early."""
        if self._job is not None:
            if not self._job.is_done:
                return False
            job, self._job = self._job, None
            return bool(job.result())
        step = self._position.step
        for what, every in (("evaluation", self._spec.train.eval_every), ("checkpoint", self._spec.train.checkpoint_every)):
            due = self._due[what]
            if every is not None and due is not None and due <= step < self._total_steps:
                self._due[what] = (step // every + 1) * every
                self._job = InBackground(lambda what=what: self._intermediate(model, what))  # type: ignore[misc]
                self._background = self._job
                return False
        return False

    def _intermediate(self, model: GatheredModel | TrainersModel, what: str) -> bool:
        position = dataclasses.replace(self._position)
        progress = readers_progress(self._spec, self._folder.path)  # before the rows: what is newer in them is trained on again
        model.take()
        if what == "checkpoint":
            self._write(model, position, progress)
            return False
        quality = model.evaluate(self._sources.eval, self._spec.train.eval_samples)
        self._tell_quality(position.step, quality)
        return self._lost_patience(model, quality, position, progress)

    def _lost_patience(
        self, model: GatheredModel | TrainersModel, quality: Quality, position: Position, progress: list[str]
    ) -> bool:
        spec = self._spec.train.early_stop
        if spec is None:
            return False
        measure = quality.mse if self._spec.train.loss == "mse" or quality.ne is None else quality.ne
        if self._position.best is None or measure < self._position.best - spec.min_delta:
            self._position.best, self._position.evaluations_since_best = measure, 0
            model.save(self._folder.path / "best", position, keep=1, progress=progress)
        else:
            self._position.evaluations_since_best += 1
        return self._position.evaluations_since_best >= spec.patience

    def _take_back_best(self, model: GatheredModel | TrainersModel) -> None:
        best = checkpoint.load_latest(self._folder.path / "best", self._watcher.on_message)
        self._meanwhile(lambda: model.put(best, with_optimizer=True))
        self._watcher.on_message(f"no better evaluation for a while: took back the weights of step {best.step}")

    def _save(self, model: GatheredModel | TrainersModel) -> None:
        if self._position.step != self._saved_step:
            progress = readers_progress(self._spec, self._folder.path)
            self._meanwhile(lambda: self._write(model, self._position, progress))

    def _write(self, model: GatheredModel | TrainersModel, position: Position, progress: list[str]) -> None:
        model.save(self._folder.checkpoints, position, keep=self._spec.train.keep_checkpoints, progress=progress)
        self._saved_step = position.step
        self._events.write("checkpoint", step=position.step)

    def _evaluate(self, model: GatheredModel | TrainersModel, max_samples: int | None) -> Quality:
        quality = self._meanwhile(lambda: model.evaluate(self._sources.eval, max_samples))
        self._tell_quality(self._position.step, quality)
        return quality

    def _tell_quality(self, step: int, quality: Quality) -> None:
        self._record("evaluation", step, quality.figures())
        self._watcher.on_evaluation(step, quality)

    def _meanwhile(self, work: Callable[[], T]) -> T:
        """Do something with the model while the roles are looked after."""
        job = self._background = InBackground(work)
        while not job.is_done:
            self._crew.look()
            job.wait(LOOK_EVERY_S)
        return job.result()

    def _wait_for_job(self) -> None:
        if self._job is not None:
            job, self._job = self._job, None
            self._meanwhile(job.result)

    def _clear(self, saved: checkpoint.Checkpoint | None) -> None:
        """Leave of an earlier part of the run what was printed and sampled; roles begin anew, readers where the checkpoint says."""
        roles = self._folder.path / ROLES_FOLDER
        roles.mkdir(exist_ok=True)
        for path in roles.iterdir():
            if path.suffix not in (".jsonl", ".log"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(self._folder.path / SNAPSHOTS_FOLDER, ignore_errors=True)
        if saved is not None:
            self._position = Position(**saved.facts["position"])
            self._logged_step = self._saved_step = self._position.step
            for what, every in self._due.items():
                self._due[what] = None if every is None else (self._position.step // every + 1) * every
            put_progress(self._spec, self._folder.path, saved.facts["readers"])

    # What is shown and kept

    def _show(self, *, at_once: bool = False) -> None:
        """Read what the roles have sampled, and tell the watcher and the event file."""
        now = time.monotonic()
        if now - self._shown_s < SHOW_EVERY_S and not at_once:
            return
        self._shown_s = now
        self._figures.read()
        rows = self._figures.rows()
        self._watcher.on_roles(rows)
        progress = self._figures.progress(rows)
        if progress is None:
            return
        self._position.step = progress.step
        self._watcher.on_step(progress)
        if progress.step >= self._logged_step + self._spec.train.log_every:
            self._logged_step = progress.step
            figures = {name: value for name, value in vars(progress).items() if value is not None}
            self._record("train", progress.step, {k: v for k, v in figures.items() if k not in ("step", "total_steps")})

    def _record(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        self._events.write(kind, step=step, **figures)
        self._scalars.write(
            step, {f"{kind}/{name}": value for name, value in figures.items() if isinstance(value, (int, float))}
        )

    def _note(self, what: str, post: Post, why: str) -> None:
        self._events.write(what, step=self._position.step, role=post.name, why=why)

    def _count(self, crew: Crew) -> None:
        """How far the run has come by the readers' books: every batch that is done, once."""
        found = [status for name, status in self._statuses(crew, "reader").items() if status]
        if found:
            self._position.step = sum(int(status["num_done"]) for status in found)
            handed_out = sum(int(status["num_batches"]) for status in found)
            samples = sum(int(status["num_samples"]) for status in found)
            self._position.num_samples = round(samples * self._position.step / handed_out) if handed_out else 0
            self._position.epoch = max(int(status["epoch"]) for status in found)
            skipped = [int(status["num_skipped"]) for status in found if "num_skipped" in status]
            self._num_skipped = sum(skipped) if skipped else None

    def _statuses(self, crew: Crew, *kinds: str) -> dict[str, dict[str, Any]]:
        """What the servers say of themselves."""
        found = {}
        for post in crew.posts:
            if post.state == "ready" and post.kind != "trainer" and (not kinds or post.kind in kinds):
                try:
                    found[post.name] = crew.call(post, "status", deadline_s=10.0).facts
                except ServerGone:
                    found[post.name] = {}
        return found
