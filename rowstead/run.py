"""Wires one run: spec to sources, store, model and loop; and everything one does with a run afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from rowstead.contracts.batch import Batch
from rowstead.contracts.source import Source
from rowstead.data.block import RawBlock
from rowstead.data.columns import Columns
from rowstead.data.encode import Encoder
from rowstead.data.parquet import ParquetLog, ParquetSource
from rowstead.data.synth import SynthLog, SynthSource
from rowstead.data.transforms import DenseTransforms
from rowstead.kernels.layout import layout_of
from rowstead.model.dlrm import DLRM
from rowstead.records.events import EventLog
from rowstead.records.files import shown_bytes
from rowstead.records.run_folder import RunFolder
from rowstead.records.usage import UsageSampler, machine_facts, versions
from rowstead.spec.data import ParquetSpec
from rowstead.spec.errors import CheckpointError, RowsteadError
from rowstead.spec.parse import digest, to_plain
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.stores.device import DeviceStore
from rowstead.training import checkpoint
from rowstead.training.evaluate import evaluate as evaluate_model
from rowstead.training.loop import Loop, Outcome, Position
from rowstead.training.metrics import Quality
from rowstead.training.progress import Silent, Watcher
from rowstead.training.step import Stepper, load_model

DEFAULT_ROOT = "runs"


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


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The two splits of a log, ready to be read for one model."""

    train: Source
    eval: Source
    encoder: Encoder


def train(
    spec: RunSpec | str,
    *,
    root: Path | str = DEFAULT_ROOT,
    out: Path | str | None = None,
    init_from: str | None = None,
    watcher: Watcher | None = None,
) -> Result:
    """Train a model from a spec, a recipe's name or a recipe's path, into a new folder under `root` or at `out`.

    `init_from` names an earlier run whose weights are taken over before the first step.
    """
    spec = load_recipe(spec) if isinstance(spec, str) else spec
    watcher = watcher or Silent()
    device = device_of(spec)
    initial = _checkpoint_of(init_from, root, watcher) if init_from is not None else None
    sources = open_sources(spec)
    with _threads(spec):
        stepper = _stepper(spec, sources, device)
        if initial is not None:
            _same_architecture(spec, initial)
            load_model(stepper.model, initial.tensors, with_optimizer=False)
        folder = RunFolder.create(root, spec.name) if out is None else RunFolder.create_at(out)
        with folder.lock():
            folder.write_spec(spec)
            return _drive(spec, stepper, sources, folder, device, watcher, position=None)


def resume(run: str, *, root: Path | str = DEFAULT_ROOT, watcher: Watcher | None = None) -> Result:
    """Go on with a run from its newest good checkpoint, as if it had never stopped."""
    watcher = watcher or Silent()
    folder = RunFolder.open(run, root)
    spec = folder.read_spec()
    device = device_of(spec)
    with folder.lock():
        saved = None
        if checkpoint.checkpoints_in(folder.checkpoints):
            saved = checkpoint.load_latest(folder.checkpoints, watcher.on_message)
            _same_architecture(spec, saved)
        sources = open_sources(spec, transforms=_transforms(saved) if saved else None)
        with _threads(spec):
            stepper = _stepper(spec, sources, device)
            position = None
            if saved is None:
                watcher.on_message(f"{folder.path} has no checkpoint yet: starting at the first step")
            else:
                stepper.load_state(saved.tensors)
                position = Position(**saved.facts["position"])
                watcher.on_message(f"resuming {folder.path} after step {position.step:,}")
            with EventLog(folder.events_file) as events:
                events.resumed(position.step if position else 0)
            return _drive(spec, stepper, sources, folder, device, watcher, position=position)


def load(run: str, *, root: Path | str = DEFAULT_ROOT, watcher: Watcher | None = None) -> DLRM:
    """The trained model of a run, as an ordinary torch module on the CPU that can also `predict` and `encode`."""
    saved = _checkpoint_of(run, root, watcher or Silent())
    spec = RunFolder.open(run, root).read_spec()
    _same_architecture(spec, saved)
    encoder = Encoder(spec.features, spec.tables, _transforms(saved))
    columns = Columns(spec.features)

    def encode(raw: Mapping[str, Any]) -> Batch:
        return encoder.encode(columns.block(raw))

    model = _model(spec, torch.device("cpu"), trains=False, encode=encode)
    load_model(model, saved.tensors, with_optimizer=False)
    return model.eval()


def transforms_of(run: str, *, root: Path | str = DEFAULT_ROOT) -> DenseTransforms:
    """The dense transforms that a run learned on its training split."""
    return _transforms(_checkpoint_of(run, root, Silent()))


def evaluate(
    run: str,
    *,
    data: list[str] | None = None,
    root: Path | str = DEFAULT_ROOT,
    watcher: Watcher | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Quality:
    """The quality of a run's model on its evaluation split, or on other Parquet files."""
    spec = RunFolder.open(run, root).read_spec()
    model = load(run, root=root, watcher=watcher)
    source = source_for(spec, transforms_of(run, root=root), data=data, needs_label=True)
    device = device_of(spec)
    with _threads(spec):
        quality = evaluate_model(
            model.to(device), source, device=device, negative_keep_rate=spec.data.negative_keep_rate, progress=progress
        )
    if watcher is not None and (num_skipped := getattr(source, "num_skipped", 0)):
        watcher.on_message(f"left out {num_skipped:,} bad rows (on_bad_row: skip)")
    return quality


def source_for(spec: RunSpec, transforms: DenseTransforms, *, data: list[str] | None, needs_label: bool) -> Source:
    """The evaluation split of a run, or the Parquet files of `data` read the same way; in the order of the log."""
    encoder = Encoder(spec.features, spec.tables, transforms)
    if data is None:
        return _Log(spec, "eval").source(encoder)
    like = spec.data.parquet or ParquetSpec(train=("any",))
    log = ParquetLog(dataclasses.replace(like, train=tuple(data)), spec.features, split="all", with_labels=needs_label)
    return ParquetSource(log, encoder, shuffle=False)


def device_of(spec: RunSpec) -> torch.device:
    """The device that a spec asks for."""
    has_gpu = torch.cuda.is_available()
    if spec.device == "cuda" and not has_gpu:
        raise RowsteadError("device: cuda, but torch sees no CUDA GPU here: use `--set device=cpu`, or `auto`")
    return torch.device("cuda" if spec.device != "cpu" and has_gpu else "cpu")


def open_sources(spec: RunSpec, transforms: DenseTransforms | None = None) -> Sources:
    """Both splits of a spec's log; dense transforms are learned on the training split unless they are given."""
    train_log, eval_log = _Log(spec, "train"), _Log(spec, "eval")
    if transforms is None:
        transforms = DenseTransforms.learn(spec.features, train_log.dense_blocks(spec.data.statistics_rows))
    encoder = Encoder(spec.features, spec.tables, transforms)
    return Sources(train=train_log.source(encoder), eval=eval_log.source(encoder), encoder=encoder)


def raw_blocks(spec: RunSpec, data: list[str] | None = None, max_rows: int | None = None) -> Iterator[RawBlock]:
    """Rows of a spec's training split as they were written, or of other Parquet files with its features."""
    if data is not None or spec.data.parquet is not None:
        like = spec.data.parquet or ParquetSpec(train=("any",))
        files = like if data is None else dataclasses.replace(like, train=tuple(data))
        return ParquetLog(files, spec.features, split="train" if data is None else "all").raw_blocks(max_rows)
    assert spec.data.synth is not None
    untouched = Encoder(spec.features, spec.tables, DenseTransforms.learn(spec.features, []))
    return SynthSource(SynthLog(spec.data.synth), untouched, "train").raw_blocks(max_rows)


class _Log:
    """One split of a spec's log, synthetic or in files."""

    def __init__(self, spec: RunSpec, split: Literal["train", "eval"]) -> None:
        self._spec, self._split = spec, split
        self._synth = SynthLog(spec.data.synth) if spec.data.synth is not None else None
        self._parquet = ParquetLog(spec.data.parquet, spec.features, split=split) if spec.data.parquet is not None else None

    def dense_blocks(self, max_rows: int) -> Iterator[RawBlock]:
        """Rows to learn dense transforms from."""
        if self._parquet is not None:
            return self._parquet.raw_blocks(max_rows)
        assert self._synth is not None
        columns = [str(feature.column) for feature in self._spec.features.expanded_dense()]
        return self._synth.dense_blocks(columns, self._split, max_rows)

    def source(self, encoder: Encoder) -> Source:
        if self._parquet is not None:
            return ParquetSource(self._parquet, encoder, seed=self._spec.seed, shuffle=self._split == "train")
        assert self._synth is not None
        return SynthSource(self._synth, encoder, self._split)


def _model(
    spec: RunSpec, device: torch.device, *, trains: bool, encode: Callable[[Mapping[str, Any]], Batch] | None = None
) -> DLRM:
    """A model with the initial weights of the spec's seed, without touching anybody's random state."""
    optimizer = spec.train.sparse_optimizer if trains else None
    store = DeviceStore(layout_of(spec.features, spec.tables), optimizer, seed=spec.seed, device=device, kernel=spec.kernel)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = DLRM(spec.model, spec.features, store, negative_keep_rate=spec.data.negative_keep_rate, encode=encode)
    return model.to(device)


def _check_memory(spec: RunSpec, device: torch.device) -> None:
    """Refuse tables that cannot fit, rather than have the system kill us while they are filled."""
    copies = {"sgd": 1.0, "rowwise_adagrad": 1.0, "adagrad": 2.0, "adam": 3.0}[spec.train.sparse_optimizer.kind]
    needs_bytes = int(4 * copies * sum(table.num_elements for table in spec.tables))
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
    else:
        free_bytes = psutil.virtual_memory().available + psutil.swap_memory().free
    if needs_bytes > free_bytes:
        raise RowsteadError(
            f"the tables and their optimizer need {shown_bytes(needs_bytes)}, and {device.type} memory has "
            f"{shown_bytes(free_bytes)} free: shrink every table with `--set scale=…` (at most "
            f"{0.9 * spec.scale * free_bytes / needs_bytes:.1g}), lower model.width, or use rowwise_adagrad"
        )


def _stepper(spec: RunSpec, sources: Sources, device: torch.device) -> Stepper:
    _check_memory(spec, device)
    per_epoch = math.ceil(sources.train.num_samples / spec.train.batch_size)
    total_steps = min(spec.train.epochs * per_epoch, spec.train.max_steps or math.inf)
    return Stepper(_model(spec, device, trains=True), spec.train, total_steps=int(total_steps))


def _drive(
    spec: RunSpec,
    stepper: Stepper,
    sources: Sources,
    folder: RunFolder,
    device: torch.device,
    watcher: Watcher,
    *,
    position: Position | None,
) -> Result:
    """Run the loop to its end and keep what it came to."""
    facts = {
        "architecture": _architecture(spec),
        "spec_digest": digest(spec),
        "transforms": sources.encoder.transforms.to_plain(),
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
        )
        outcome = loop.run()
    record = None
    if outcome.ending != "interrupted":
        record = _record(spec, outcome, device, usage.figures())
        folder.write_record(record)
    return Result(folder=folder.path, outcome=outcome, record=record)


def _record(spec: RunSpec, outcome: Outcome, device: torch.device, used: dict[str, float]) -> Record:
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
        machine=machine_facts(gpu),
        versions=versions(),
        figures=figures,
    )


def _architecture(spec: RunSpec) -> str:
    """A digest of what decides the shapes of a model's tensors and the meaning of its rows."""
    features = to_plain(spec.features)
    return digest({"features": features, "model": to_plain(spec.model), "scale": spec.scale})


def _same_architecture(spec: RunSpec, saved: checkpoint.Checkpoint) -> None:
    if saved.facts.get("architecture") != _architecture(spec):
        raise CheckpointError(
            f"{saved.path} is a checkpoint of another model: its features, tables or layers differ from this recipe's. "
            "Use the recipe that it was trained with (spec.yaml in its run's folder)"
        )


def _checkpoint_of(run: str, root: Path | str, watcher: Watcher) -> checkpoint.Checkpoint:
    return checkpoint.load_latest(RunFolder.open(run, root).checkpoints, watcher.on_message)


def _transforms(saved: checkpoint.Checkpoint) -> DenseTransforms:
    return DenseTransforms.from_plain(saved.facts["transforms"])


@contextlib.contextmanager
def _threads(spec: RunSpec) -> Iterator[None]:
    """Torch's CPU threads as the spec asks, for as long as the run lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(spec.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """An event that is set by the first Ctrl-C or SIGTERM; a second Ctrl-C interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
