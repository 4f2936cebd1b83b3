"""The head of a fleet: makes the run's folder, keeps the roles at work, shows how they do, and gathers what they have learned."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from rowstead.data.open_log import Sources, open_sources
from rowstead.fleet.background import InBackground
from rowstead.fleet.build import KEYS_FILE, fleet_of, put_progress, resolve_fleet, shared_facts, told_keys
from rowstead.fleet.evaluate_and_save import EvaluateAndSave
from rowstead.fleet.fleet_figures import FleetFigures
from rowstead.fleet.fork_server import ForkServer
from rowstead.fleet.gathered_model import GatheredModel, TrainersModel
from rowstead.fleet.keys import Keys
from rowstead.fleet.local_process import environment
from rowstead.fleet.manual_launch import ManualLauncher, ask_former
from rowstead.fleet.ray_launch import Needs, RayRoles
from rowstead.fleet.reader_server import batches_per_reader
from rowstead.fleet.role_lock import sole_holder
from rowstead.fleet.role_table import FleetCallback, NoFleetProgress
from rowstead.fleet.roster import ROLES_FOLDER, ROSTER_FILE
from rowstead.fleet.sparse_server import SNAPSHOTS_FOLDER
from rowstead.fleet.supervisor import LOOK_EVERY_S, RoleError, RoleHandle, Supervisor
from rowstead.fleet.update_accounts import Accounts
from rowstead.records.events import EventLog
from rowstead.records.run_folder import DEFAULT_ROOT, RunFolder
from rowstead.records.tensorboard import ScalarWriter
from rowstead.records.usage import UsageSampler, usable_cores
from rowstead.run import Result, build_record, stop_on_signal
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import KINDS, FleetSpec
from rowstead.spec.job import is_one_of_many
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.build import ignored_settings
from rowstead.training.device import bf16_fallback, choose_device
from rowstead.training.loop import Ending, TrainOutcome
from rowstead.training.progress import Position
from rowstead.training.trained import check_same_model, transforms_in

SHOW_EVERY_S = 0.5
LET_GO_S = 5.0
STOP_S = 60.0
"""How long trainers may take to finish their batch and hand over."""

ROLES_MODULE = "rowstead.fleet.roles"

T = TypeVar("T")


def train_fleet(
    spec: RunSpec,
    *,
    root: Path | str = DEFAULT_ROOT,
    out: Path | str | None = None,
    init_from: str | None = None,
    callback: FleetCallback | None = None,
    dtype: torch.dtype = torch.float32,
) -> Result:
    """Train a spec that has a `fleet` with processes of this machine, into a new folder under `root` or at `out`.

    `init_from` names an earlier run whose weights are taken over. `dtype` is float64 where arithmetic is to be checked.
    """
    _check_alone()
    spec = resolve_fleet(spec)
    callback = callback or NoFleetProgress()
    if out is not None:
        RunFolder.check_free(out)
    initial = None
    if init_from is not None:
        initial = checkpoint.load_latest(RunFolder.open(init_from, root).checkpoints, callback.on_message)
        check_same_model(spec, initial, callback.on_message)
    sources = open_sources(spec, id_kinds=initial.facts["id_kinds"] if initial is not None else None)
    folder = RunFolder.create(root, spec.name) if out is None else RunFolder.create_at(out)
    with folder.lock():
        folder.write_spec(spec)
        return Coordinator(spec, folder, sources, callback, dtype=dtype).run(initial=initial)


def resume_fleet(run: str, *, root: Path | str = DEFAULT_ROOT, callback: FleetCallback | None = None) -> Result:
    """Go on with a fleet's run from its newest good checkpoint; what was under way then is trained on again."""
    _check_alone()
    callback = callback or NoFleetProgress()
    folder = RunFolder.open(run, root)
    spec = folder.read_spec()
    with folder.lock():
        _end_former(folder.path, fleet_of(spec))
        saved = None
        if checkpoint.checkpoints_in(folder.checkpoints):
            saved = checkpoint.load_latest(folder.checkpoints, callback.on_message)
            check_same_model(spec, saved, callback.on_message)
            if "readers" not in saved.facts:
                raise RowsteadError(
                    f"{saved.path} was not saved by a fleet, so it does not say how far its readers had come: begin a new run "
                    f"with its weights (`--init-from {folder.path}`)"
                )
        sources = open_sources(spec, *((transforms_in(saved), saved.facts["id_kinds"]) if saved is not None else ()))
        return Coordinator(spec, folder, sources, callback).run(saved=saved)


def _check_alone() -> None:
    if is_one_of_many():
        raise RowsteadError("torchrun has started this process as one of several: a fleet starts its own processes")


def _end_former(folder: Path, fleet: FleetSpec) -> None:
    """Wait until no role of an earlier head is at work any more: what it still wrote would be taken for ours."""
    if fleet.start == "by_hand":
        ask_former(folder, fleet.roles())
    (folder / ROLES_FOLDER).mkdir(exist_ok=True)
    for kind, number in fleet.roles():
        with sole_holder(folder, kind, number):
            pass


class Coordinator:
    """One run of a fleet, seen from the process that starts and watches the others."""

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        sources: Sources,
        callback: FleetCallback,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._spec, self._fleet, self._folder, self._watcher = spec, fleet_of(spec), folder, callback
        self._sources, self._dtype = sources, dtype
        train = spec.train
        batches = batches_per_reader(
            sources.train.num_samples,
            self._fleet.num_readers,
            batch_size=train.batch_size,
            epochs=train.epochs,
            max_steps=train.max_steps,
        )
        self._total_steps = sum(batches)
        self._num_places = self._fleet.num_readers * max(batches)
        """Of batches in the run, where readers take turns: what the learning rate is scheduled over."""
        self._position = Position()
        self._shown_s, self._logged_step = 0.0, 0
        self._background: InBackground[Any] | None = None
        """What was begun last, of what is waited for."""
        self._gathered: GatheredModel | TrainersModel | None = None
        self._milestones: EvaluateAndSave | None = None

    def run(self, *, initial: checkpoint.Checkpoint | None = None, saved: checkpoint.Checkpoint | None = None) -> Result:
        """Train to the end; on a request to stop, save and return early."""
        spec, folder, callback = self._spec, self._folder, self._watcher
        self._clear(saved)
        facts = shared_facts(spec, self._sources, dtype=self._dtype, total_steps=self._num_places)
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
            for warning in (bf16_fallback(spec, self._device()[0]), ignored_settings(spec)):
                if warning is not None:
                    callback.on_message(warning)
            if step is not None:
                self._events.resumed(step)
                callback.on_message(f"resuming {folder.path} after step {step:,}")
            crew = self._crew = Supervisor(
                folder.path,
                self._fleet,
                launcher,
                facts,
                say=callback.on_message,
                keys=told_keys(folder.path),
            )
            crew.on_event = self._note
            before = (self._position.step, self._position.num_samples)
            self._figures = FleetFigures(spec, folder.path, crew, total_steps=self._total_steps, before=before)
            accounts = self._accounts = Accounts(crew, self._position, callback.on_message)
            try:
                outcome = self._train(crew, asked.is_set, begin_with, with_optimizer=saved is not None)
                statuses = {} if outcome.ending == "interrupted" else accounts.last()
                crew.stop(*KINDS)  # asked, not killed: each has its last figures in its file then
            finally:
                self._let_go()
                self._scalars.close()
                crew.close()
        record = None
        if outcome.ending != "interrupted":
            device, kernel = self._device()
            record = build_record(spec, outcome, device, kernel, usage.figures(), num_processes=1 + len(crew.posts))
            of_roles = self._figures.for_record(statuses, record.figures.get("cpu_s", 0.0))
            record = dataclasses.replace(record, figures={**record.figures, **of_roles})
            folder.write_record(record)
        return Result(folder=folder.path, outcome=outcome, record=record)

    def _launcher(self, cores: int) -> ForkServer | ManualLauncher | RayRoles:
        """Who starts the roles. Those that may be on other machines speak with keys."""
        path = self._folder.path
        if self._fleet.start == "here":
            return ForkServer(path, ROLES_MODULE, environ=environment(cores))
        if not (path / KEYS_FILE).exists():
            Keys.generate().save(path / KEYS_FILE)
        if self._fleet.start == "by_hand":
            return ManualLauncher(path, self._watcher.on_message)
        needs = dict.fromkeys(KINDS, Needs(num_cpus=self._fleet.ray_cpus))
        num_gpus = 1.0 if self._spec.device == "cuda" else 0.0
        threads = self._spec.train.sync.hogwild_threads
        needs["trainer"] = Needs(num_cpus=threads * self._fleet.ray_cpus, num_gpus=num_gpus)
        return RayRoles(path, self._fleet, needs)

    def _device(self) -> tuple[torch.device, str]:
        """What trainers train on, as far as it can be known here, and the kernels that train rows."""
        device = choose_device(self._spec) if self._fleet.start == "here" else torch.device("cpu")
        return device, "gpu" if device.type == "cuda" and self._fleet.tables == "local" else "cpu"

    # From the first process to the last

    def _train(
        self, crew: Supervisor, asked: Callable[[], bool], begin_with: checkpoint.Checkpoint | None, *, with_optimizer: bool
    ) -> TrainOutcome:
        crew.start("sparse", "dense", "reader")
        crew.wait_ready(asked)
        self._figures.follow()
        if asked():
            return TrainOutcome("interrupted", self._position, None, None)
        model = self._gathered = self._meanwhile(self._model)
        if begin_with is not None:
            self._meanwhile(lambda: model.put(begin_with, with_optimizer=with_optimizer))
        if asked():
            return TrainOutcome("interrupted", self._position, None, None)
        milestones = self._milestones = EvaluateAndSave(
            self._spec,
            self._folder,
            self._sources,
            model,
            self._position,
            total_steps=self._total_steps,
            keep=self._record,
            callback=self._watcher,
            is_saved=begin_with is not None and with_optimizer,
        )
        crew.start("trainer")
        self._figures.follow()
        started = time.monotonic()
        try:
            ending = self._watch(crew, milestones, asked)
        except RoleError as error:
            raise self._rescued(crew, model, milestones, error) from None
        if ending != "finished":
            crew.stop("trainer", grace_s=STOP_S)
        while not milestones.wait(LOOK_EVERY_S):
            crew.look()
        self._position.train_s += time.monotonic() - started
        self._show(at_once=True)
        crew.wait_ready()  # a server that is just coming back has its say too
        self._accounts.settle()
        if ending == "stopped early":
            self._meanwhile(milestones.take_back_best)
        else:
            self._meanwhile(model.take)
        self._meanwhile(lambda: milestones.save(is_changed=ending == "stopped early"))
        quality = None if ending == "interrupted" else self._meanwhile(milestones.evaluate)
        num_skipped = self._accounts.num_skipped
        return TrainOutcome(ending, self._position, quality, self._figures.samples_per_s, num_skipped=num_skipped)

    def _rescued(
        self, crew: Supervisor, model: GatheredModel | TrainersModel, milestones: EvaluateAndSave, error: RoleError
    ) -> RowsteadError:
        """The error to end with, after what can still be gathered was saved.

        A trainer that says itself what is wrong speaks of its model, which is then not worth saving, unless a reader told it. One
        that keeps the tables has saved what there is.
        """
        if error.post.kind in ("sparse", "dense"):
            return error
        crew.stop("trainer", grace_s=STOP_S)
        if self._fleet.tables == "local" or self._position.step == 0:
            return error
        try:
            has_bad_log = self._accounts.rescue()
            if error.post.kind == "trainer" and error.is_mistake and not has_bad_log:
                return error
            if not milestones.wait(STOP_S):
                return error  # what runs in the background has the model to itself
            model.take()
            milestones.save()
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
        is_idle = self._milestones is None or self._milestones.is_idle(LET_GO_S)
        if self._gathered is not None and is_idle and (self._background is None or self._background.is_done):
            self._gathered.close()

    def _model(self) -> GatheredModel | TrainersModel:
        path = self._folder.path
        return TrainersModel(path) if self._fleet.tables == "local" else GatheredModel(self._spec, path, told_keys(path))

    def _watch(self, crew: Supervisor, milestones: EvaluateAndSave, asked: Callable[[], bool]) -> Ending:
        """Keep everybody at work until there is nothing left to train on, or somebody wants to stop."""
        while crew.is_training:
            if asked():
                return "interrupted"
            crew.look()
            self._show()
            if milestones.look():
                return "stopped early"
            time.sleep(LOOK_EVERY_S)
        return "finished"

    def _meanwhile(self, work: Callable[[], T]) -> T:
        """Do something with the model while the roles are looked after."""
        job = self._background = InBackground(work)
        while not job.is_done:
            self._crew.look()
            job.wait(LOOK_EVERY_S)
        return job.result()

    def _clear(self, saved: checkpoint.Checkpoint | None) -> None:
        """Leave of an earlier part of the run what was printed and sampled; roles begin anew, readers where the checkpoint says."""
        path = self._folder.path
        (path / ROSTER_FILE).unlink(missing_ok=True)  # first: a role that comes too early must not go by what it says
        roles = path / ROLES_FOLDER
        roles.mkdir(exist_ok=True)
        for file in roles.iterdir():
            if file.suffix not in (".jsonl", ".log", ".lock"):
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        shutil.rmtree(path / SNAPSHOTS_FOLDER, ignore_errors=True)
        if saved is not None:
            self._position = Position(**saved.facts["position"])
            self._logged_step = self._position.step
            put_progress(path, saved.facts["readers"])

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
        self._position.step, self._position.num_samples = progress.step, progress.num_samples
        self._watcher.on_step(progress)
        if progress.step >= self._logged_step + self._spec.train.log_every:
            self._logged_step = progress.step
            figures = {name: value for name, value in vars(progress).items() if value is not None}
            self._record("train", progress.step, {k: v for k, v in figures.items() if k not in ("step", "total_steps")})

    def _record(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        self._events.write(kind, step=step, **figures)
        scalars = {f"{kind}/{name}": value for name, value in figures.items() if isinstance(value, (int, float))}
        if scalars:
            self._scalars.write(step, scalars)

    def _note(self, what: str, post: RoleHandle, why: str) -> None:
        self._events.write(what, step=self._position.step, role=post.name, why=why)
