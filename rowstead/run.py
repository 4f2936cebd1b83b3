"""Wires one run: spec to sources, store, model and loop, and what it came to."""

from __future__ import annotations

import contextlib
import datetime
import math
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rowstead.parts import (
    Sources,
    build_model,
    check_memory,
    checked_sources,
    device_of,
    open_sources,
    shown_kernel,
    slow_bf16,
    threads_of,
)
from rowstead.records.events import EventLog
from rowstead.records.run_folder import DEFAULT_ROOT, RunFolder
from rowstead.records.usage import UsageSampler, machine_facts, versions
from rowstead.spec.parse import digest
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.stores.device import DeviceStore
from rowstead.trained import architecture, check_same_model, transforms_in
from rowstead.training import checkpoint
from rowstead.training.loop import Loop, Outcome, Position
from rowstead.training.metrics import Quality
from rowstead.training.progress import Silent, Watcher
from rowstead.training.step import Stepper, load_model


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `train` returns: where the run is, how it ended and what it measured."""

    folder: Path
    outcome: Outcome
    record: Record | None
    """Absent when the run was interrupted."""

    @property
    def quality(self) -> Quality | None:
        return self.outcome.quality


def train(
    spec: RunSpec | str,
    *,
    root: Path | str = DEFAULT_ROOT,
    out: Path | str | None = None,
    init_from: str | None = None,
    watcher: Watcher | None = None,
    profile: bool = False,
) -> Result:
    """Train a model from a spec, a recipe's name or a recipe's path, into a new folder under `root` or at `out`.

    `init_from` names an earlier run whose weights are taken over before the first step. `profile` traces a few steps into
    `trace.json` and tells the watcher where their time went.
    """
    spec = load_recipe(spec) if isinstance(spec, str) else spec
    watcher = watcher or Silent()
    device = device_of(spec)
    if out is not None:
        RunFolder.check_free(out)
    initial = (
        checkpoint.load_latest(RunFolder.open(init_from, root).checkpoints, watcher.on_message)
        if init_from is not None
        else None
    )
    sources = open_sources(spec, id_kinds=initial.facts["id_kinds"] if initial is not None else None)
    with threads_of(spec):
        stepper = _stepper(spec, sources, device)
        if initial is not None:
            check_same_model(spec, initial)
            load_model(stepper.model, initial.tensors, with_optimizer=False)
            initial = None  # closes its files
        folder = RunFolder.create(root, spec.name) if out is None else RunFolder.create_at(out)
        with folder.lock():
            folder.write_spec(spec)
            return _drive(
                spec,
                stepper,
                sources,
                folder,
                device,
                watcher,
                position=None,
                save_first=init_from is not None,
                profile=profile,
            )


def resume(run: str, *, root: Path | str = DEFAULT_ROOT, watcher: Watcher | None = None, profile: bool = False) -> Result:
    """Go on with a run from its newest good checkpoint, as if it had never stopped."""
    watcher = watcher or Silent()
    folder = RunFolder.open(run, root)
    spec = folder.read_spec()
    device = device_of(spec)
    with folder.lock():
        saved = None
        if checkpoint.checkpoints_in(folder.checkpoints):
            saved = checkpoint.load_latest(folder.checkpoints, watcher.on_message)
            check_same_model(spec, saved)
        learned = (transforms_in(saved), saved.facts["id_kinds"]) if saved is not None else ()
        sources = open_sources(spec, *learned)
        with threads_of(spec):
            stepper = _stepper(spec, sources, device)
            position = None
            if saved is None:
                watcher.on_message(f"{folder.path} has no checkpoint yet: starting at the first step")
            else:
                stepper.load_state(saved.tensors)
                position = Position(**saved.facts["position"])
                watcher.on_message(f"resuming {folder.path} after step {position.step:,}")
                saved = None  # closes its files
            with EventLog(folder.events_file) as events:
                events.resumed(position.step if position else 0)
            return _drive(spec, stepper, sources, folder, device, watcher, position=position, profile=profile)


def _stepper(spec: RunSpec, sources: Sources, device: torch.device) -> Stepper:
    check_memory(spec, device)
    per_epoch = math.ceil(sources.train.num_samples / spec.train.batch_size)
    total_steps = min(spec.train.epochs * per_epoch, spec.train.max_steps or math.inf)
    return Stepper(build_model(spec, device, trains=True), spec.train, total_steps=int(total_steps))


def _drive(
    spec: RunSpec,
    stepper: Stepper,
    sources: Sources,
    folder: RunFolder,
    device: torch.device,
    watcher: Watcher,
    *,
    position: Position | None,
    save_first: bool = False,
    profile: bool = False,
) -> Result:
    """Run the loop to its end and keep what it came to; `save_first` keeps weights that no seed could give back."""
    store = stepper.model.store
    assert isinstance(store, DeviceStore)
    if spec.check_ids:
        sources = checked_sources(sources, store.layout)
    if store.tables:
        watcher.on_message(f"kernels: {shown_kernel(store.kernel, device)}")
    if warning := slow_bf16(spec, device):
        watcher.on_message(warning)
    facts = {
        "architecture": architecture(spec),
        "spec_digest": digest(spec),
        "transforms": sources.encoder.transforms.to_plain(),
        "id_kinds": sources.id_kinds,
        "versions": versions(),
    }
    with _stop_on_signal() as stop_asked, UsageSampler() as usage:
        loop = Loop(
            spec,
            stepper,
            sources.train,
            sources.eval,
            device=device,
            folder=folder.path,
            facts=facts,
            watcher=watcher,
            position=position,
            should_stop=stop_asked.is_set,
            profile=profile,
        )
        if save_first:
            loop.save()
        outcome = loop.run()
    record = None
    if outcome.ending != "interrupted":
        record = _record(spec, outcome, device, store.kernel, usage.figures())
        folder.write_record(record)
    return Result(folder=folder.path, outcome=outcome, record=record)


def _record(spec: RunSpec, outcome: Outcome, device: torch.device, kernel: str, used: dict[str, float]) -> Record:
    figures: dict[str, float] = {"num_steps": outcome.position.step, "num_samples": outcome.position.num_samples}
    figures["train_s"] = outcome.position.train_s
    if outcome.samples_per_s is not None:
        figures["samples_per_s"] = outcome.samples_per_s
    figures |= {f"{name.replace(' ', '_').replace('-', '_')}_s": value for name, value in outcome.phase_s.items()}
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
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine={**machine_facts(gpu), "kernel": kernel, "num_threads": torch.get_num_threads()},
        versions=versions(),
        figures=figures,
    )


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
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
