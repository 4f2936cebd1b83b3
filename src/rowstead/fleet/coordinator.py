"""The coordinator of a fleet: creates the run's folder, supervises the roles, reports progress, evaluates and saves the model."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from rowstead.data.log_files import check_log_files, write_log_files
from rowstead.data.open_log import Sources, open_sources
from rowstead.distributed.stop import stop_on_signal
from rowstead.fleet.build import (
    build_shared_facts,
    create_keys,
    fleet_of,
    load_keys,
    resolve_fleet,
    restore_reader_progress,
)
from rowstead.fleet.earlier_part import check_resumable, count_done_batches, describe_resume, stop_earlier_run
from rowstead.fleet.evaluate_and_save import EvaluateAndSave, run_in_background, wait_for
from rowstead.fleet.fleet_figures import FleetCallback, FleetFigures
from rowstead.fleet.fork_server import ForkServer
from rowstead.fleet.gathered_model import GatheredModel, LocalTablesModel
from rowstead.fleet.local_process import POLL_INTERVAL_S, role_environment
from rowstead.fleet.local_sockets import open_socket_folder
from rowstead.fleet.manual_launch import ManualLauncher
from rowstead.fleet.ray_launch import RayRoles, RoleResources
from rowstead.fleet.reader_server import plan_readers
from rowstead.fleet.roster import ROLES_FOLDER, ROSTER_FILE, SOCKETS, create_roles_folder
from rowstead.fleet.sparse_server import SNAPSHOTS_FOLDER
from rowstead.fleet.supervisor import RoleError, RoleHandle, Supervisor
from rowstead.fleet.work_counts import WorkCounts, describe_losses
from rowstead.records.limits import require_open_files
from rowstead.records.run_folder import DEFAULT_ROOT, RunFolder
from rowstead.records.usage import UsageSampler, usable_cores
from rowstead.run import Result, build_record
from rowstead.spec.errors import RowsteadError
from rowstead.spec.fleet import KINDS, FleetSpec
from rowstead.spec.job import is_multi_process
from rowstead.spec.run import RunSpec
from rowstead.training import checkpoint
from rowstead.training.advice import closing_advice
from rowstead.training.build import ignored_settings
from rowstead.training.checkpoint_fits import check_fits, id_kinds_in, position_in, transforms_in
from rowstead.training.device import bf16_fallback, choose_device
from rowstead.training.loop import Ending, TrainOutcome
from rowstead.training.progress import Position, RunReporter

REPORT_INTERVAL_S, CLOSE_TIMEOUT_S = 0.5, 5.0
FILES_PER_PROCESS, FILES_PER_ROLE = 32, 12
"""Open files of the coordinator, at most: those of any process, and of its sockets to each role."""
TRAINER_GRACE_S = 60.0
"""Time for trainers to finish their batch and save."""

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
    """Train a spec that has a `fleet`, into a new folder under `root` or at `out`.

    `init_from` names an earlier run whose weights to start with. `dtype` is float64 in tests of exactness.
    """
    spec = resolve_fleet(spec)
    _check_process(fleet_of(spec))
    callback = callback or FleetCallback()
    if out is not None:
        RunFolder.check_free(out)
    initial = None
    if init_from is not None:
        on_message = callback.on_message
        initial = checkpoint.load_latest(
            RunFolder.open(init_from, root).checkpoints,
            on_message,
            check=lambda found: check_fits(spec, found, on_message, with_optimizer=False),
        )
    sources = open_sources(spec, id_kinds=id_kinds_in(spec, initial) if initial is not None else None)
    folder = RunFolder.create(root, spec.name) if out is None else RunFolder.create_at(out)
    with folder.lock():
        folder.write_spec(spec)
        write_log_files(folder.path, sources)
        return Coordinator(spec, folder, sources, callback, dtype=dtype).run(initial=initial)


def resume_fleet(
    run: str,
    *,
    root: Path | str = DEFAULT_ROOT,
    accept_changed_log: bool = False,
    callback: FleetCallback | None = None,
) -> Result:
    """Resume a fleet's run from its newest valid checkpoint; batches in flight at that time are trained on again.

    A log whose files have changed is refused unless `accept_changed_log`.
    """
    callback = callback or FleetCallback()
    folder = RunFolder.open(run, root)  # may be its `best`
    spec = folder.read_spec()
    _check_process(fleet_of(spec))
    with folder.lock():
        stop_earlier_run(folder.path, fleet_of(spec))
        saved = None
        if checkpoint.checkpoints_in(folder.checkpoints):
            on_message = callback.on_message
            saved = checkpoint.load_latest(
                folder.checkpoints, on_message, check=lambda found: check_resumable(spec, found, folder, on_message)
            )
        known = (transforms_in(spec, saved), id_kinds_in(spec, saved)) if saved is not None else ()
        sources = open_sources(spec, *known)
        check_log_files(folder.path, sources, accept_changes=accept_changed_log, on_message=callback.on_message)
        write_log_files(folder.path, sources)
        return Coordinator(spec, RunFolder(folder.path), sources, callback).run(saved=saved, is_resumed=True)


def _check_process(fleet: FleetSpec) -> None:
    """Raise unless this process can coordinate a fleet: ZeroMQ would abort it, or a role, without files for sockets."""
    if is_multi_process():
        raise RowsteadError(
            "torchrun started this process as one of several, but a fleet starts its own processes: run `rowstead train` without torchrun"
        )
    num_roles = len(fleet.roles())
    require_open_files(FILES_PER_PROCESS + FILES_PER_ROLE * num_roles, f"a fleet of {num_roles} roles")


class Coordinator:
    """One run of a fleet, in the process that starts and supervises the roles."""

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        sources: Sources,
        callback: FleetCallback,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._spec, self._fleet, self._folder, self._callback = spec, fleet_of(spec), folder, callback
        self._sources, self._dtype = sources, dtype
        train = spec.train
        self._plans = plan_readers(
            sources.train.num_samples,
            self._fleet.num_readers,
            batch_size=train.batch_size,
            epochs=train.epochs,
            max_steps=train.max_steps,
        )
        batches = [plan.num_batches for plan in self._plans]
        self._total_steps = sum(batches)
        self._schedule_steps = self._fleet.num_readers * max(batches)
        """Steps that the learning rate is scheduled over: readers number their batches round-robin."""
        self._position = Position()
        self._reported_s = 0.0
        self._background: Future[Any] | None = None
        """The work that was started last."""
        self._gathered: GatheredModel | LocalTablesModel | None = None
        self._evaluate_and_save: EvaluateAndSave | None = None

    def run(
        self,
        *,
        initial: checkpoint.Checkpoint | None = None,
        saved: checkpoint.Checkpoint | None = None,
        is_resumed: bool = False,
    ) -> Result:
        """Train to the end; on a stop request, save and return early.

        `initial` has the weights that a new run starts with, `saved` the state that a resumed one continues from, if it has any.
        """
        spec, folder, callback = self._spec, self._folder, self._callback
        num_lost_steps = self._prepare_folder(saved)
        facts = build_shared_facts(spec, self._sources, dtype=self._dtype, total_steps=self._schedule_steps)
        if (start := saved or initial) is not None:
            facts["initial_checkpoint"] = {"path": str(start.path.resolve()), "with_optimizer": saved is not None}
        cores = max(1, usable_cores() // len(self._fleet.roles()))
        resumed_step = self._position.step if is_resumed else None
        with (
            stop_on_signal() as stop_requested,
            UsageSampler() as usage,
            folder.keep_failure(lambda: self._position.step, keeps_empty=True),  # its roles' logs say more
            contextlib.closing(
                RunReporter(folder.path, callback, log_every=spec.train.log_every, resumed_step=resumed_step)
            ) as self._reporter,
            open_socket_folder() as sockets,
            self._build_launcher(cores) as launcher,
        ):
            if self._fleet.start == "here":
                facts[SOCKETS] = str(sockets)
            for warning in (bf16_fallback(spec, self._device()[0]), ignored_settings(spec)):
                if warning is not None:
                    callback.on_message(warning)
            if is_resumed:
                callback.on_message(describe_resume(folder.path, saved, num_lost_steps))
            supervisor = self._supervisor = Supervisor(
                folder.path,
                self._fleet,
                launcher,
                facts,
                on_message=callback.on_message,
                keys=load_keys(folder.path),
            )
            supervisor.on_event = self._record_role_event
            before = dataclasses.replace(self._position)
            self._figures = FleetFigures(spec, folder.path, supervisor, total_steps=self._total_steps, before=before)
            counts = self._counts = WorkCounts(supervisor, self._position, callback.on_message)
            try:
                outcome = self._train(supervisor, stop_requested.is_set, start, with_optimizer=saved is not None)
                statuses = {} if outcome.ending == "interrupted" else counts.read_final_statuses(self._figures.num_updates_sent)
                supervisor.stop(*KINDS)  # stopped, not killed, so that each writes its last usage sample
            finally:
                self._close_model()
                supervisor.close()
        record = None
        if outcome.ending != "interrupted":
            record = build_record(spec, outcome, *self._device(), usage.figures(), num_processes=1 + len(supervisor.handles))
            role_figures = self._figures.for_record(statuses, record.figures.get("cpu_s", 0.0))
            record = dataclasses.replace(record, figures={**record.figures, **role_figures})
            folder.write_record(record)
            for text in closing_advice(spec.train, self._position.step, outcome.quality):
                callback.on_message(text)
        for text in describe_losses(record.figures if record else self._figures.lost_work()):
            callback.on_message(text)
        return Result(folder=folder.path, outcome=outcome, record=record, stopped_by=stop_requested.signal)

    def _build_launcher(self, cores: int) -> ForkServer | ManualLauncher | RayRoles:
        """Build the launcher of the roles. Those that may be on other machines authenticate with keys; those here use Unix sockets."""
        path = self._folder.path
        if self._fleet.start == "here":
            environ, on_message = role_environment(cores), self._callback.on_message
            return ForkServer(path, ROLES_MODULE, environ=environ, on_message=on_message, start_s=self._fleet.start_s)
        create_keys(path)
        if self._fleet.start == "manual":
            return ManualLauncher(path, self._callback.on_message)
        resources = dict.fromkeys(KINDS, RoleResources(num_cpus=self._fleet.ray_cpus))
        threads, num_gpus = self._spec.train.sync.hogwild_threads, float(self._spec.device == "cuda")
        resources["trainer"] = RoleResources(num_cpus=threads * self._fleet.ray_cpus, num_gpus=num_gpus)
        return RayRoles(path, self._fleet, resources)

    def _device(self) -> tuple[torch.device, str]:
        """The device of the trainers, as far as it is known here, and the kernels that update rows."""
        device = choose_device(self._spec) if self._fleet.start == "here" else torch.device("cpu")
        return device, "gpu" if device.type == "cuda" and self._fleet.tables == "local" else "cpu"

    # One run, from the first process to the last

    def _train(
        self,
        supervisor: Supervisor,
        stop_requested: Callable[[], bool],
        start: checkpoint.Checkpoint | None,
        *,
        with_optimizer: bool,
    ) -> TrainOutcome:
        supervisor.start("sparse", "dense", "reader")
        supervisor.wait_ready(stop_requested)
        self._figures.follow()
        if stop_requested():
            return TrainOutcome("interrupted", self._position, None, None)
        model = self._gathered = self._run_supervised(self._build_model)
        if start is not None:
            self._run_supervised(lambda: model.load(start, with_optimizer=with_optimizer))
        if stop_requested():
            return TrainOutcome("interrupted", self._position, None, None)
        evaluate_and_save = self._evaluate_and_save = EvaluateAndSave(
            self._spec,
            self._folder,
            self._sources,
            model,
            self._position,
            total_steps=self._total_steps,
            reporter=self._reporter,
            is_saved=start is not None and with_optimizer,
        )
        supervisor.start("trainer")
        self._figures.follow()
        try:
            ending = self._supervise(supervisor, evaluate_and_save, stop_requested)
        except RoleError as error:
            raise self._save_after(supervisor, model, evaluate_and_save, error) from None
        if ending != "finished":
            supervisor.stop("trainer", grace_s=TRAINER_GRACE_S)
        while not evaluate_and_save.wait(POLL_INTERVAL_S):
            supervisor.poll()
        self._report(at_once=True)
        supervisor.wait_ready()  # a server that is being restarted counts too
        self._counts.count()
        unfinished = self._counts.unfinished(self._plans) if ending == "finished" else None
        if ending != "stopped early":
            self._run_supervised(model.gather)
        takes_best = unfinished is None and self._run_supervised(lambda: evaluate_and_save.take_best(ending))
        self._run_supervised(lambda: evaluate_and_save.save(is_changed=takes_best))
        if unfinished is not None:
            raise RowsteadError(
                f"all trainers have exited after step {self._position.step:,} of {self._total_steps:,}, but nobody asked them to stop: "
                f"{unfinished}. The model is saved: see the logs under {self._folder.path / ROLES_FOLDER}, and continue with "
                f"`rowstead train --resume {self._folder.path}`"
            )
        quality, test = (None, None) if ending == "interrupted" else self._run_supervised(evaluate_and_save.evaluate)
        speed, num_skipped = self._figures.samples_per_s, self._counts.num_skipped
        return TrainOutcome(ending, self._position, quality, speed, num_skipped=num_skipped, test=test)

    def _save_after(
        self,
        supervisor: Supervisor,
        model: GatheredModel | LocalTablesModel,
        evaluate_and_save: EvaluateAndSave,
        error: RoleError,
    ) -> RowsteadError:
        """Save the model if it can still be gathered, and return the error to raise.

        A user error of a trainer, such as a loss that is not finite, means that the model is not worth saving, unless a reader caused it.
        With `tables: local` the trainer has saved what there is.
        """
        if error.handle.kind in ("sparse", "dense"):
            return error
        supervisor.stop("trainer", grace_s=TRAINER_GRACE_S)
        if self._fleet.tables == "local" or self._position.step == 0:
            return error
        try:
            is_log_bad = self._counts.count_after_failure()
            if error.handle.kind == "trainer" and error.is_user_error and not is_log_bad:
                return error
            if not evaluate_and_save.wait(TRAINER_GRACE_S):
                return error  # the background task has exclusive use of the model
            model.gather()
            evaluate_and_save.save()
        except RowsteadError:
            return error
        saved = f"The model after step {self._position.step:,} is saved: continue with `rowstead train --resume {self._folder.path}`"
        return RowsteadError(f"{error}\n{saved}")

    def _close_model(self) -> None:
        """Close the connections of the model once they are no longer in use."""
        if self._background is not None:
            wait_for(self._background, CLOSE_TIMEOUT_S)
        is_idle = self._evaluate_and_save is None or self._evaluate_and_save.is_idle(CLOSE_TIMEOUT_S)
        if self._gathered is not None and is_idle and (self._background is None or self._background.done()):
            self._gathered.close()

    def _build_model(self) -> GatheredModel | LocalTablesModel:
        path = self._folder.path
        return LocalTablesModel(path) if self._fleet.tables == "local" else GatheredModel(self._spec, path, load_keys(path))

    def _supervise(
        self, supervisor: Supervisor, evaluate_and_save: EvaluateAndSave, stop_requested: Callable[[], bool]
    ) -> Ending:
        """Supervise the roles until the log is finished, or training should stop."""
        while supervisor.is_training:
            if stop_requested():
                return "interrupted"
            supervisor.poll()
            self._report()
            if evaluate_and_save.poll():
                return "stopped early"
            time.sleep(POLL_INTERVAL_S)
        return "finished"

    def _run_supervised(self, work: Callable[[], T]) -> T:
        """Run work on the model in the background while the roles are supervised."""
        future = self._background = run_in_background(work)
        while not wait_for(future, POLL_INTERVAL_S):
            self._supervisor.poll()
        return future.result()

    def _prepare_folder(self, saved: checkpoint.Checkpoint | None) -> int:
        """Remove the files of an earlier part of the run but logs and usage samples, and restore the readers' position from the checkpoint.

        Returns the steps of that part that are in no checkpoint.
        """
        path = self._folder.path
        num_done = count_done_batches(self._spec, path)
        (path / ROSTER_FILE).unlink(missing_ok=True)  # first: a role that starts too early must not read the old one
        for file in create_roles_folder(path).iterdir():
            if file.suffix not in (".jsonl", ".log", ".lock"):
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        shutil.rmtree(path / SNAPSHOTS_FOLDER, ignore_errors=True)
        if saved is not None:
            self._position = position_in(saved)
            restore_reader_progress(path, saved.facts["readers"])
        num_lost_steps = max(0, num_done - self._position.step)
        self._position.num_lost_steps += num_lost_steps
        return num_lost_steps

    # Reporting

    def _report(self, *, at_once: bool = False) -> None:
        """Read the roles' usage samples and report them, at most every `REPORT_INTERVAL_S`."""
        now = time.monotonic()
        if now - self._reported_s < REPORT_INTERVAL_S and not at_once:
            return
        self._reported_s = now
        self._figures.read()
        rows = self._figures.rows()
        self._callback.on_roles(rows)
        progress = self._figures.progress(rows)
        if progress is None:
            return
        position, figures = self._position, self._figures
        position.step, position.num_samples = progress.step, progress.num_samples
        position.train_s, position.num_lost_updates = figures.train_s, figures.num_lost_updates
        self._reporter.on_step(progress)

    def _record_role_event(self, event: str, handle: RoleHandle, reason: str) -> None:
        self._reporter.write(event, self._position.step, {"role": handle.name, "why": reason})
