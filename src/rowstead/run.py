"""One run, from its spec to its record: `_run` is the whole of it, in order."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rowstead.data.log_files import check_log_files, write_log_files
from rowstead.data.open_log import open_sources
from rowstead.data.tables import read_given
from rowstead.distributed import job
from rowstead.distributed.launch import is_launched
from rowstead.distributed.process_group import ProcessGroup, open_process_group
from rowstead.distributed.stop import stop_on_signal
from rowstead.kernels.cpu.traffic import kernel_traffic_bytes
from rowstead.nn.dlrm import DLRM
from rowstead.plan.predict import build_predicted_record, comparison_text, predict_run
from rowstead.plan.work import step_work
from rowstead.records.files import write_atomic
from rowstead.records.run_folder import DEFAULT_ROOT, RunFolder
from rowstead.records.temporary import remove_abandoned
from rowstead.records.usage import KERNELS, PERF, UsageSampler, machine_facts, perf_traffic_bytes, versions
from rowstead.report.placement import placement_text
from rowstead.spec.catalogue import calibrated_machine
from rowstead.spec.errors import RowsteadError
from rowstead.spec.networks import NETWORKS
from rowstead.spec.parse import digest, to_plain
from rowstead.spec.placement import Placement
from rowstead.spec.record import Record, date_now
from rowstead.spec.run import RunSpec, check_moves
from rowstead.stores.build import measured_machine, unused_machine_warning
from rowstead.training.advice import closing_advice
from rowstead.training.build import build_model, ignored_settings, plan_placement
from rowstead.training.checkpoint import Checkpoint, checkpoints_in, load_latest
from rowstead.training.checkpoint_fits import check_fits, id_kinds_in, position_in, transforms_in
from rowstead.training.checkpoint_increment import CheckpointChanges
from rowstead.training.compile import KernelCompiler
from rowstead.training.device import bf16_fallback, choose_device, kernel_text, set_threads
from rowstead.training.hogwild import HogwildStepper
from rowstead.training.loop import Loop, TrainOutcome
from rowstead.training.metrics import Quality
from rowstead.training.progress import Callback, CallbackList, Position, RunReporter
from rowstead.training.progress_bar import shown_progress
from rowstead.training.step import Stepper
from rowstead.training.trained import checkpoint_facts, load


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `train` returns: the run's folder, how it ended and what it measured."""

    folder: Path
    outcome: TrainOutcome
    record: Record | None
    """None if the run was interrupted, and in all processes of a job but the first."""
    stopped_by: int | None = None
    """The signal that interrupted the run, where this process got it."""

    @property
    def quality(self) -> Quality | None:
        """The last evaluation: NE, AUC, calibration and more."""
        return self.outcome.quality

    def load(self) -> DLRM:
        """The trained model, as `rowstead.load` returns it."""
        return load(self.folder)


def train(
    spec: RunSpec | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    data: Any = None,
    eval_data: Any = None,
    root: Path | str = DEFAULT_ROOT,
    out: Path | str | None = None,
    init_from: str | None = None,
    callback: Callback | Sequence[Callback] | None = None,
    progress: bool | None = None,
    profile: bool = False,
) -> Result:
    """Train a model into a new folder under `root`, or at `out`.

    `spec` is a RunSpec, a dict with a recipe's content, a recipe's path, or the name of a shipped one. `data` replaces its log: a
    DataFrame, an Arrow table, a dict of columns, or paths (a file, folder, glob or URL, or a list of them). The evaluation split is
    `eval_data`, or cut from `data` as the recipe says. A table is written once to `tables/` beside the run, so that the run can be
    evaluated and resumed.

    `callback` is a `Callback`, or several, that follow the run. `progress` shows a bar on standard error where that is a terminal or a
    notebook; False never does, True prints lines where there is no bar. `init_from` names an earlier run whose weights the model starts
    with. `profile` traces a few steps into `trace.json` and reports where their time went.

    Ctrl-C saves a checkpoint and returns: `outcome.ending` of the result is `interrupted` then, and `resume` continues the run.
    """
    spec = read_given(spec, data, eval_data, Path(root) if out is None else Path(out).parent)
    if spec.fleet is not None:
        raise RowsteadError(
            "this recipe has a fleet: train it with `rowstead train`, or `rowstead.fleet.coordinator.train_fleet`"
        )
    with _follow(callback, progress) as all_callbacks:
        return _run(spec, None, root=root, out=out, init_from=init_from, callback=all_callbacks, profile=profile)


def resume(
    run: Path | str,
    *,
    changes: Sequence[str] = (),
    root: Path | str = DEFAULT_ROOT,
    accept_changed_log: bool = False,
    callback: Callback | Sequence[Callback] | None = None,
    progress: bool | None = None,
    profile: bool = False,
) -> Result:
    """Continue a run from its newest valid checkpoint, as if it had never stopped.

    `run` is its folder, its name under `root`, or `last`. `changes` are `key=value` settings that move its tables: only those of
    `placement` and `memory`. A log whose files have changed is refused unless `accept_changed_log`. `callback`, `progress` and `profile`
    are as for `train`.
    """
    folder = RunFolder.open(run, root)
    check_moves(changes)
    spec = folder.read_spec(changes)
    if spec.fleet is not None:
        raise RowsteadError(f"{folder.path} is a fleet's run: resume it with `rowstead train --resume {folder.path}`")
    with _follow(callback, progress) as all_callbacks:
        return _run(spec, folder, root=root, accept_changed_log=accept_changed_log, callback=all_callbacks, profile=profile)


@contextlib.contextmanager
def _follow(callback: Callback | Sequence[Callback] | None, progress: bool | None) -> Iterator[Callback]:
    """The user's callbacks, and the progress bar."""
    given = () if callback is None else tuple(callback) if isinstance(callback, Sequence) else (callback,)
    for one in given:
        if not isinstance(one, Callback):
            raise RowsteadError(f"callback: a {type(one).__name__} is not one; derive it from `rowstead.Callback`")
    with shown_progress(progress) as shown:
        yield CallbackList([*given, shown])


def _run(
    spec: RunSpec,
    folder: RunFolder | None,
    *,
    root: Path | str,
    out: Path | str | None = None,
    init_from: str | None = None,
    accept_changed_log: bool = False,
    callback: Callback,
    profile: bool,
) -> Result:
    """Train in a new folder, or continue the run in `folder`."""
    device = choose_device(spec)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(open_process_group(device))
        callback = callback if group.rank == 0 else Callback()
        remove_abandoned()

        # The folder to resume: the one that was given, or that of this job before torchrun or the launcher restarted it.
        folder = folder or job.find_restarted_folder(group, spec, root, out)
        is_resumed = folder is not None
        if folder is not None:
            stack.enter_context(job.hold_folder(folder, group))
        elif out is not None and group.rank == 0:
            RunFolder.check_free(out)

        # What to start from: the run's own checkpoint, else the weights of another run, else the seed's.
        saved = initial = None
        if folder is not None and group.gather(bool(checkpoints_in(folder.checkpoints)))[0]:
            saved = _load_checkpoint(spec, folder, group, callback, with_optimizer=True)
        elif init_from is not None:
            initial = _load_checkpoint(spec, RunFolder.open(init_from, root), group, callback, with_optimizer=False)
        start = saved or initial

        # The log.
        is_alone_on_cpu = device.type == "cpu" and group.world_size == 1 and spec.kernel in ("auto", "cpu")
        compiler = stack.enter_context(KernelCompiler(spec, callback.on_message)) if is_alone_on_cpu else None
        learned = transforms_in(spec, saved) if saved else None
        sources = open_sources(spec, learned, id_kinds_in(spec, start) if start else None, on_message=callback.on_message)
        if folder is not None:
            check_log_files(folder.path, sources, accept_changes=accept_changed_log, on_message=callback.on_message)

        # The model, its tables and its optimizers.
        stack.enter_context(set_threads(spec.threads))
        placement = plan_placement(spec, device, process_group=group)
        model = build_model(spec, device, trains=True, process_group=group, placement=placement)
        stepper = _build_stepper(spec, model, sources.train.num_samples, group)
        position = changes = None
        from_best = saved is not None and folder is not None and folder.is_best
        if saved is not None:
            stepper.load_state(saved.tensors)
            position = position_in(saved)
            changes = None if from_best else CheckpointChanges(spec.train, model.store.tables, saved)
        elif initial is not None:
            stepper.load_weights(initial.tensors)
        save_first = initial is not None or from_best  # weights that the seed, or the newest checkpoint, cannot restore
        saved = initial = start = None  # closes their files

        # The folder of a new run: only now, so that a run that cannot start leaves none behind.
        if folder is None:
            folder = job.create_folder(group, root, spec.name, out)
            stack.enter_context(job.hold_folder(folder, group))
            if group.rank == 0:
                job.mark_folder(folder)
        if group.rank == 0 and (not is_resumed or spec != folder.read_spec()):
            folder.write_spec(spec)
        if group.rank == 0:
            write_log_files(folder.path, sources)
        _report_start(spec, folder, model, placement, device, group, callback, position, is_resumed=is_resumed)

        # Training.
        sources = sources.share(group.rank, group.world_size)
        if spec.check_ids:
            sources = sources.map(lambda source: source.check_ids(model.store.layout))  # the reading thread checks each batch
        resumed_step = (position.step if position is not None else 0) if is_resumed else None
        events = folder.path if group.rank == 0 else None
        reporter = RunReporter(events, callback, log_every=spec.train.log_every, resumed_step=resumed_step)
        traffic_before = kernel_traffic_bytes()
        with stop_on_signal(ignored_afterwards=is_launched()) as stop, UsageSampler() as usage, contextlib.closing(reporter):
            loop = Loop(
                spec,
                stepper,
                sources,
                device=device,
                folder=folder.path,
                facts=checkpoint_facts(spec, sources.encoder.transforms.to_plain(), sources.id_kinds),
                reporter=reporter,
                position=position,
                stop_requested=stop.is_set,
                profile=profile,
                changes=changes,
                is_saved=not from_best,
                process_group=group,
            )
            if save_first:
                loop.save()
            if compiler is not None:
                compiler.run()
            with _keep_failure(folder, group, loop, is_resumed=is_resumed):
                callback.on_start(spec, folder.path)
                outcome = loop.run()

        # The record.
        record = None
        if outcome.ending != "interrupted" and group.rank == 0:
            used = usage.figures()
            if not is_resumed:
                steps = outcome.position.step / group.world_size  # of whole batches
                used = {**_count_traffic(spec, device, steps, kernel_traffic_bytes() - traffic_before), **used}
            record = build_record(spec, outcome, device, model.store.kernel, used, num_processes=group.world_size)
            folder.write_record(record)
            num_steps, quality = outcome.position.step, outcome.quality
            for sentence in closing_advice(stepper.spec, num_steps, quality, outcome.train_ne):
                callback.on_message(sentence)
            if group.world_size == 1:
                _compare_with_prediction(spec, placement, device, folder, record, callback)
        model.store.close()
        callback.on_end(record)
        return Result(folder=folder.path, outcome=outcome, record=record, stopped_by=stop.signal)


def _keep_failure(
    folder: RunFolder, group: ProcessGroup, loop: Loop, *, is_resumed: bool
) -> contextlib.AbstractContextManager[None]:
    """Of several processes the first keeps why the run failed."""
    if group.rank > 0:
        return contextlib.nullcontext()
    return folder.keep_failure(lambda: loop.position.step, keeps_empty=is_resumed)


def _load_checkpoint(
    spec: RunSpec, folder: RunFolder, group: ProcessGroup, callback: Callback, *, with_optimizer: bool
) -> Checkpoint:
    """The newest valid checkpoint of a run that fits the model of `spec`."""

    def check(saved: Checkpoint) -> None:
        check_fits(spec, saved, callback.on_message, with_optimizer=with_optimizer)

    return load_latest(folder.checkpoints, callback.on_message, check=check, process_group=group)


def _build_stepper(spec: RunSpec, model: DLRM, num_samples: int, group: ProcessGroup) -> Stepper:
    steps_per_epoch = math.ceil(num_samples / spec.train.batch_size)
    total_steps = int(min(spec.train.epochs * steps_per_epoch, spec.train.max_steps or math.inf))
    num_threads = spec.train.sync.hogwild_threads
    if num_threads == 1:
        return Stepper(model, spec.train, total_steps=total_steps, process_group=group)
    if group.world_size > 1:
        raise RowsteadError("train.sync.hogwild_threads: a job of several processes has one thread in each; remove it")
    train = spec.train.resolve_sync(1).with_warmup(total_steps)
    return HogwildStepper(model, train, total_steps=total_steps, num_threads=num_threads)


def _report_start(
    spec: RunSpec,
    folder: RunFolder,
    model: DLRM,
    placement: Placement,
    device: torch.device,
    group: ProcessGroup,
    callback: Callback,
    position: Position | None,
    *,
    is_resumed: bool,
) -> None:
    """Say what is about to run and where its tables are; keep the placement in the folder."""
    store = model.store
    if position is not None:
        callback.on_message(f"resuming {folder.path} after step {position.step:,}")
    elif is_resumed:
        callback.on_message(f"{folder.path} has no checkpoint yet: starting at the first step")
    if group.world_size > 1:
        callback.on_message(f"{group.world_size} processes, each with its share of every batch")
    if group.processes_per_gpu > 1:
        callback.on_message(
            f"{group.processes_per_gpu} processes share a GPU: they take turns on it, divide its memory and exchange data through host "
            "memory. This trains the same weights, but is slower than one process per GPU"
        )
    if store.tables:
        callback.on_message(f"kernels: {kernel_text(store.kernel, device)}")
        callback.on_message(placement_text(placement, has_gpu=device.type == "cuda", world_size=group.world_size))
        if group.rank == 0:
            write_atomic(folder.path / "placement.json", json.dumps(to_plain(placement), indent=2) + "\n")
    unused = unused_machine_warning(device) if group.world_size == 1 else None  # several processes are not predicted
    for warning in (bf16_fallback(spec, device), ignored_settings(spec, world_size=group.world_size), unused):
        if warning is not None:
            callback.on_message(warning)


def build_record(
    spec: RunSpec, outcome: TrainOutcome, device: torch.device, kernel: str, used: dict[str, float], *, num_processes: int
) -> Record:
    """The record of a run that has ended; `used` is what a `UsageSampler` measured."""
    figures: dict[str, float] = {"num_steps": outcome.position.step, "num_samples": outcome.position.num_samples}
    figures["train_s"] = outcome.position.train_s
    if outcome.samples_per_s is not None:
        figures["samples_per_s"] = outcome.samples_per_s
    if outcome.reading is not None:
        figures |= outcome.reading.figures()
    figures |= {phase.key: seconds for phase, seconds in outcome.phase_s.items()}
    figures |= used
    if outcome.num_skipped is not None:
        figures["num_rows_skipped"] = outcome.num_skipped
    if outcome.quality is not None:
        quality = outcome.quality.record_figures()
        figures |= {"num_eval_samples": quality.pop("num_samples"), **quality}
    if outcome.test is not None:
        figures |= {f"test_{name}": value for name, value in outcome.test.figures().items()}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    machine = {**machine_facts(gpu), "kernel": kernel, "num_threads": torch.get_num_threads()}
    if num_processes > 1:
        machine["num_processes"] = num_processes
    machine["memory_traffic_by"] = KERNELS if perf_traffic_bytes() is None else PERF
    with contextlib.suppress(RowsteadError):  # a machine file of another version
        if (calibrated := calibrated_machine("cpu")) is not None:
            machine["memory_bytes_per_s"] = calibrated.host.memory.bandwidth_bytes_per_s
    return Record(
        kind="measured",
        name=spec.name,
        spec_digest=digest(spec),
        date=date_now(),
        machine=machine,
        versions=versions(),
        figures=figures,
    )


def _count_traffic(spec: RunSpec, device: torch.device, num_steps: float, row_bytes: int) -> dict[str, float]:
    """Bytes to and from memory where perf does not count them: rows as the kernels counted them, layers by their sizes."""
    if device.type != "cpu" or spec.model.network not in NETWORKS:
        return {}
    layer_bytes = step_work(spec).dense_traffic_bytes(spec.train.batch_size)
    return {"memory_traffic_bytes": row_bytes + num_steps * layer_bytes}


def _compare_with_prediction(
    spec: RunSpec, placement: Placement, device: torch.device, folder: RunFolder, record: Record, callback: Callback
) -> None:
    """Keep and report what was predicted for this run, where this machine was measured with as many threads."""
    machine = measured_machine(device)
    if machine is None:
        return
    prediction = predict_run(spec, placement, machine)
    if prediction is None or (line := comparison_text(prediction, record)) is None:
        return
    callback.on_message(line)
    predicted = build_predicted_record(prediction, spec, date=record.date)
    write_atomic(folder.predicted_file, json.dumps(to_plain(predicted)) + "\n")
