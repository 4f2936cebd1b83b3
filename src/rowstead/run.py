"""Wires one run: spec to sources, store, model and loop, and what it came to."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rowstead.distributed import job
from rowstead.distributed.process_group import ProcessGroup, open_process_group
from rowstead.plan.predict import record_of as predicted_record
from rowstead.plan.predict_run import compared_text, predict_run
from rowstead.records.events import EventLog
from rowstead.records.files import write_atomic
from rowstead.records.run_folder import DEFAULT_ROOT, RunFolder
from rowstead.records.usage import UsageSampler, machine_facts, versions
from rowstead.report.placement import placement_text
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import digest, to_plain
from rowstead.spec.placement import Placement
from rowstead.spec.record import Record, date_now
from rowstead.spec.run import RunSpec, check_moves, load_recipe
from rowstead.stores.build import measured_machine, unused_machine_warning
from rowstead.training import checkpoint
from rowstead.training.build import (
    Sources,
    bf16_fallback,
    build_model,
    check_sources,
    device_of,
    ignored_settings,
    open_sources,
    plan_placement,
    set_threads,
    share_sources,
    shown_kernel,
)
from rowstead.training.checkpoint_changes import CheckpointChanges
from rowstead.training.hogwild import HogwildStepper
from rowstead.training.loop import Loop, Position, TrainOutcome
from rowstead.training.metrics import Quality
from rowstead.training.progress import NoProgress, ProgressCallback
from rowstead.training.step import Stepper, load_model
from rowstead.training.trained import architecture, check_same_model, transforms_in


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `train` returns: where the run is, how it ended and what it measured."""

    folder: Path
    outcome: TrainOutcome
    record: Record | None
    """Absent when the run was interrupted, and in all processes of a job but the first."""

    @property
    def quality(self) -> Quality | None:
        return self.outcome.quality


def train(
    spec: RunSpec | str,
    *,
    root: Path | str = DEFAULT_ROOT,
    out: Path | str | None = None,
    init_from: str | None = None,
    callback: ProgressCallback | None = None,
    profile: bool = False,
) -> Result:
    """Train a model from a spec, a recipe's name or a recipe's path, into a new folder under `root` or at `out`.

    `init_from` names an earlier run whose weights are taken over before the first step. `profile` traces a few steps into
    `trace.json` and tells the watcher where their time went.
    """
    spec = load_recipe(spec) if isinstance(spec, str) else spec
    if spec.fleet is not None:
        raise RowsteadError(
            "this recipe has a fleet: train it with `rowstead train`, or `rowstead.fleet.coordinator.train_fleet`"
        )
    device = device_of(spec)
    with open_process_group(device) as process_group:
        callback = callback if callback is not None and process_group.rank == 0 else NoProgress()
        if (started := job.find_restarted_folder(process_group, spec, root, out)) is not None:
            return _resume(
                started, started.read_spec(), process_group, device, callback, profile=profile, init_from=init_from, root=root
            )
        if out is not None and process_group.rank == 0:
            RunFolder.check_free(out)
        initial = _initial(init_from, root, process_group, callback)
        sources = open_sources(spec, id_kinds=initial.facts["id_kinds"] if initial is not None else None)
        with set_threads(spec):
            stepper, placement = _stepper(spec, sources, device, process_group)
            if initial is not None:
                _take_over(initial, spec, stepper, callback)
                initial = None  # closes its files
            folder = job.agree_on_folder(
                process_group, lambda: RunFolder.create(root, spec.name) if out is None else RunFolder.create_at(out)
            )
            with job.hold_folder(folder, process_group):
                if process_group.rank == 0:
                    folder.write_spec(spec)
                    job.mark_folder(folder)
                return _drive(
                    spec,
                    stepper,
                    sources,
                    folder,
                    device,
                    callback,
                    placement=placement,
                    process_group=process_group,
                    position=None,
                    save_first=init_from is not None,
                    profile=profile,
                )


def resume(
    run: str,
    *,
    changes: Sequence[str] = (),
    root: Path | str = DEFAULT_ROOT,
    callback: ProgressCallback | None = None,
    profile: bool = False,
) -> Result:
    """Go on with a run from its newest good checkpoint, as if it had never stopped.

    `changes` are `key=value` of its recipe that say where rows are from now on: of `placement` and `memory` alone.
    """
    folder = RunFolder.open(run, root)
    check_moves(changes)
    spec = folder.read_spec(changes)
    if spec.fleet is not None:
        raise RowsteadError(f"{folder.path} is a fleet's run: go on with `rowstead train --resume {folder.path}`")
    device = device_of(spec)
    with open_process_group(device) as process_group:
        callback = callback if callback is not None and process_group.rank == 0 else NoProgress()
        return _resume(folder, spec, process_group, device, callback, profile=profile)


def _resume(
    folder: RunFolder,
    spec: RunSpec,
    process_group: ProcessGroup,
    device: torch.device,
    callback: ProgressCallback,
    *,
    profile: bool,
    init_from: str | None = None,
    root: Path | str = DEFAULT_ROOT,
) -> Result:
    """`init_from` is what the run began with, in case that it has no checkpoint yet."""
    with job.hold_folder(folder, process_group):
        saved = initial = None
        if process_group.gather(bool(checkpoint.checkpoints_in(folder.checkpoints)))[0]:
            saved = checkpoint.load_latest(folder.checkpoints, callback.on_message, process_group=process_group)
            check_same_model(spec, saved, callback.on_message)
        else:
            initial = _initial(init_from, root, process_group, callback)
        learned = (transforms_in(saved), saved.facts["id_kinds"]) if saved is not None else ()
        sources = open_sources(spec, *learned)
        with set_threads(spec):
            stepper, placement = _stepper(spec, sources, device, process_group)
            if initial is not None:
                _take_over(initial, spec, stepper, callback)
            position, changes = None, None
            if saved is None:
                callback.on_message(f"{folder.path} has no checkpoint yet: starting at the first step")
            else:
                stepper.load_state(saved.tensors)
                position = Position(**saved.facts["position"])
                callback.on_message(f"resuming {folder.path} after step {position.step:,}")
                changes = CheckpointChanges(spec.train, stepper.model.store.tables, saved)
                saved = None  # closes its files
            if process_group.rank == 0:
                if spec != folder.read_spec():
                    folder.write_spec(spec)
                with EventLog(folder.events_file) as events:
                    events.resumed(position.step if position else 0)
            return _drive(
                spec,
                stepper,
                sources,
                folder,
                device,
                callback,
                placement=placement,
                process_group=process_group,
                position=position,
                changes=changes,
                save_first=initial is not None,
                profile=profile,
            )


def _initial(
    init_from: str | None, root: Path | str, process_group: ProcessGroup, callback: ProgressCallback
) -> checkpoint.Checkpoint | None:
    """The newest checkpoint of the run to begin with, if there is one."""
    if init_from is None:
        return None
    return checkpoint.load_latest(RunFolder.open(init_from, root).checkpoints, callback.on_message, process_group=process_group)


def _take_over(initial: checkpoint.Checkpoint, spec: RunSpec, stepper: Stepper, callback: ProgressCallback) -> None:
    check_same_model(spec, initial, callback.on_message)
    load_model(stepper.model, initial.tensors, with_optimizer=False)


def _stepper(spec: RunSpec, sources: Sources, device: torch.device, process_group: ProcessGroup) -> tuple[Stepper, Placement]:
    placement = plan_placement(spec, device, process_group=process_group)
    per_epoch = math.ceil(sources.train.num_samples / spec.train.batch_size)
    total_steps = min(spec.train.epochs * per_epoch, spec.train.max_steps or math.inf)
    model = build_model(spec, device, trains=True, process_group=process_group, placement=placement)
    if (num_threads := spec.train.sync.hogwild_threads) > 1:
        if process_group.world_size > 1:
            raise RowsteadError("train.sync.hogwild_threads: processes that step together have one thread each; leave it out")
        return HogwildStepper(model, spec.train, total_steps=int(total_steps), num_threads=num_threads), placement
    return Stepper(model, spec.train, total_steps=int(total_steps), process_group=process_group), placement


def _drive(
    spec: RunSpec,
    stepper: Stepper,
    sources: Sources,
    folder: RunFolder,
    device: torch.device,
    callback: ProgressCallback,
    *,
    placement: Placement,
    process_group: ProcessGroup,
    position: Position | None,
    changes: CheckpointChanges | None = None,
    save_first: bool = False,
    profile: bool = False,
) -> Result:
    """Run the loop to its end and keep what it came to; `save_first` keeps weights that no seed could give back."""
    store = stepper.model.store
    sources = share_sources(sources, process_group)
    if spec.check_ids:
        sources = check_sources(sources, store.layout)
    if process_group.world_size > 1:
        callback.on_message(f"{process_group.world_size} processes, each with its share of every batch")
    if store.tables:
        callback.on_message(f"kernels: {shown_kernel(store.kernel, device)}")
        callback.on_message(placement_text(placement, has_gpu=device.type == "cuda", world_size=process_group.world_size))
        if process_group.rank == 0:
            write_atomic(folder.path / "placement.json", json.dumps(to_plain(placement), indent=2) + "\n")
    unused = unused_machine_warning(device) if process_group.world_size == 1 else None  # several processes are not predicted
    for warning in (bf16_fallback(spec, device), ignored_settings(spec, world_size=process_group.world_size), unused):
        if warning is not None:
            callback.on_message(warning)
    facts = {
        "architecture": architecture(spec),
        "spec_digest": digest(spec),
        "transforms": sources.encoder.transforms.to_plain(),
        "id_kinds": sources.id_kinds,
        "versions": versions(),
    }
    with stop_on_signal() as stop_asked, UsageSampler() as usage:
        loop = Loop(
            spec,
            stepper,
            sources.train,
            sources.eval,
            device=device,
            folder=folder.path,
            facts=facts,
            callback=callback,
            position=position,
            stop_requested=stop_asked.is_set,
            profile=profile,
            changes=changes,
            process_group=process_group,
        )
        if save_first:
            loop.save()
        outcome = loop.run()
    record = None
    if outcome.ending != "interrupted" and process_group.rank == 0:
        record = record_of(spec, outcome, device, store.kernel, usage.figures(), num_processes=process_group.world_size)
        folder.write_record(record)
        if process_group.world_size == 1:
            _compare(spec, placement, device, folder, record, callback)
    store.close()
    return Result(folder=folder.path, outcome=outcome, record=record)


def _compare(
    spec: RunSpec, placement: Placement, device: torch.device, folder: RunFolder, record: Record, callback: ProgressCallback
) -> None:
    """Keep and tell what was predicted for this run, where this machine was measured with as many threads."""
    machine = measured_machine(device)
    if machine is None:
        return
    prediction = predict_run(spec, placement, machine)
    if prediction is None or (line := compared_text(prediction, record)) is None:
        return
    callback.on_message(line)
    predicted = predicted_record(prediction, spec, date=record.date)
    write_atomic(folder.path / "predicted.json", json.dumps(to_plain(predicted)) + "\n")


def record_of(
    spec: RunSpec, outcome: TrainOutcome, device: torch.device, kernel: str, used: dict[str, float], *, num_processes: int
) -> Record:
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
        quality = outcome.quality.figures()
        figures |= {"num_eval_samples": quality.pop("num_samples"), **quality}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return Record(
        kind="measured",
        name=spec.name,
        spec_digest=digest(spec),
        date=date_now(),
        machine={
            **machine_facts(gpu),
            "kernel": kernel,
            "num_threads": torch.get_num_threads(),
            **({"num_processes": num_processes} if num_processes > 1 else {}),
        },
        versions=versions(),
        figures=figures,
    )


@contextlib.contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that is set by the first Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
