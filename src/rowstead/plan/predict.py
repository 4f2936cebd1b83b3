"""The prediction of a run on a machine: the schedule of a step, and from it throughput, memory, energy and cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rowstead.plan.colocated import ColocatedProcess, ColocatedTrainer
from rowstead.plan.schedule import Bottleneck, Slot, Task, bottlenecks, lay_out, overlapped, period_s
from rowstead.plan.setup import Held, Setup, held, process_bytes, shortfalls, table_sizes
from rowstead.plan.setups import cached_tables, placement_kind
from rowstead.plan.trainer import TrainerStep
from rowstead.plan.work import StepWork, step_work
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine, Precision
from rowstead.spec.networks import NETWORKS
from rowstead.spec.parse import digest
from rowstead.spec.phases import STEP, Phase
from rowstead.spec.placement import Placement
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec
from rowstead.spec.sizes import format_bytes
from rowstead.spec.software import Software
from rowstead.spec.stores import STORES


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The figures of a set-up; one that the machine file does not determine is None."""

    machine: Machine
    software: Software
    setup: Setup
    tasks: tuple[Task, ...]
    step_s: float
    """From one step to the next."""
    samples_per_s: float
    """Of all trainers together."""
    held: Held
    shortfalls: tuple[str, ...]
    """Why it does not fit; empty when it does."""
    trainer: TrainerStep
    """The model that the tasks were derived from."""

    @property
    def fits(self) -> bool:
        return not self.shortfalls

    @functools.cached_property
    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        return bottlenecks(self.tasks, in_flight=self.setup.in_flight)

    def figures(self) -> dict[str, Any]:
        """The prediction as plain numbers and names; unknown figures are absent."""
        setup, needs = self.setup, self.held
        found: dict[str, Any] = {
            "placement": setup.placement,
            "batch_size": setup.batch_size,
            "num_devices": setup.num_devices,
            "num_trainers": setup.num_trainers,
            "num_sparse_servers": setup.num_sparse_servers,
            "num_dense_servers": setup.num_dense_servers,
            "samples_per_s": self.samples_per_s,
            "step_s": self.step_s,
            "host_bytes": needs.host_bytes,
        }
        optional = {
            "device_bytes": needs.device_bytes if self.machine.accelerators is not None else None,
            "server_bytes": needs.server_bytes if setup.num_sparse_servers else None,
            "process_bytes": self.process_bytes,
            "nameplate_watts": self.watts,
            "samples_per_j": self.samples_per_j,
            "metered_watts": self.metered_watts,
            "samples_per_metered_j": self.samples_per_metered_j,
            "usd_per_billion_samples": self.usd_per_billion_samples,
        }
        found |= {name: value for name, value in optional.items() if value is not None}
        found["bottlenecks"] = [{"resource": b.resource, "saved_share": b.saved_share} for b in self.bottlenecks[:2]]
        found["phases"] = {phase.value: seconds for phase, seconds in self.phases.items()}
        found["timeline"] = self.timeline
        return found

    @property
    def phases(self) -> dict[Phase, float]:
        """Seconds of each phase of a step, without overlapped tasks; resources work in parallel, so the sum may exceed the step."""
        seconds = {phase: sum(task.seconds for task in self.tasks if task.phase is phase and not task.hidden) for phase in STEP}
        return {phase: taken for phase, taken in seconds.items() if taken}

    @property
    def timeline(self) -> list[dict[str, Any]]:
        """One step's tasks as plain numbers and names, and the overlapped tasks that limit it."""
        return [
            {
                "task": slot.task.name,
                "phase": slot.task.phase.value,
                "resource": slot.task.resource,
                "start_s": slot.start_s,
                "end_s": slot.end_s,
                "is_overlapped": slot.task.hidden,
            }
            for slot in (*self.slots, *self.overlapped)
        ]

    def where(self) -> dict[str, str]:
        """Where each table goes, as text."""
        trainer, assignment = self.trainer, self.trainer.assignment
        parts: dict[str, list[str]] = {}
        for part in assignment.slices if assignment is not None else ():
            text = self._device_text(part.device) + ("" if part.share == 1 else f" ({part.share:.0%} of its rows)")
            parts.setdefault(part.table, []).append(text)
        found = {table.name: ", ".join(parts.get(table.name, [self._device_text(0)])) for table in trainer.on_devices}
        behind = {one.table: one for one in self.setup.behind}
        other = STORES["remote" if self.setup.placement == "remote" else "host"].title
        shards = dict(self.setup.shards) if trainer.num_sharing > 1 else {}
        texts = {}
        for table in trainer.work.tables:
            text = found.get(table.name, other)
            if table.name in behind:
                text = f"{STORES[behind[table.name].where].title}, cache of {behind[table.name].cache_fraction:.0%}"
            texts[table.name] = f"{text} (sharded: {shards[table.name]})" if table.name in shards else text
        return texts

    def _device_text(self, number: int) -> str:
        """One device of all servers, or the memory of a server without devices."""
        server, device = divmod(number, self.setup.num_devices)
        memory = STORES["host"].title if self.machine.accelerators is None else f"device {device}"
        return memory if self.setup.num_trainers == 1 else f"server {server}, {memory}"

    @property
    def slots(self) -> list[Slot]:
        """One step's timeline."""
        return lay_out(self.tasks)

    @property
    def overlapped(self) -> list[Slot]:
        """Tasks that overlap with the step and limit it, such as reading input; empty where the step's own path is longer."""
        return overlapped(self.tasks, in_flight=self.setup.in_flight)

    def _all_servers(self, figure: Callable[[Machine], float | None]) -> float | None:
        """A figure summed over trainers and parameter servers, without readers; None where it is unknown."""
        setup, num_servers = self.setup, self.setup.num_servers
        own, theirs = figure(self.machine), figure(setup.server) if setup.server is not None else None
        if own is None or (num_servers and theirs is None):
            return None
        return setup.num_trainers * own + num_servers * (theirs or 0.0)

    @property
    def watts(self) -> float | None:
        """Nameplate power of trainers and parameter servers."""
        return self._all_servers(lambda one: one.power.nameplate_watts if one.power is not None else None)

    @property
    def process_bytes(self) -> float | None:
        """Peak memory of a CPU trainer's process, the program included; None where that was not measured."""
        setup, known = self.setup, self.software.base_bytes > 0 and self.machine.accelerators is None
        if not known or setup.placement == "remote" or setup.num_trainers > 1:
            return None
        sizes, work = table_sizes(self.trainer.work, self.machine, setup), self.trainer.work
        return process_bytes(work, self.software, setup.batch_size) - work.table_bytes + sizes["device"] + sizes["host"]

    @property
    def metered_watts(self) -> float | None:
        """What the meters of all trainers read under load; None if any server or device has no meter."""
        setup = self.setup
        if self.machine.meter is None or setup.num_devices > 1 or setup.num_servers:
            return None
        return setup.num_trainers * self.machine.meter.loaded_watts

    @property
    def samples_per_metered_j(self) -> float | None:
        return None if self.metered_watts is None else self.samples_per_s / self.metered_watts

    @property
    def samples_per_j(self) -> float | None:
        return None if self.watts is None else self.samples_per_s / self.watts

    @property
    def usd_per_billion_samples(self) -> float | None:
        usd_per_hour = self._all_servers(lambda one: one.price.usd_per_hour if one.price is not None else None)
        return None if usd_per_hour is None else usd_per_hour / 3600 / self.samples_per_s * 1e9


def build_predicted_record(prediction: Prediction, spec: RunSpec, *, date: str) -> Record:
    """The prediction as a Record, so that it can be compared with a measured run; unknown figures are absent."""
    figures = {name: float(value) for name, value in prediction.figures().items() if isinstance(value, (int, float))}
    return Record(
        kind="predicted",
        name=spec.name,
        spec_digest=digest(spec),
        date=date,
        machine={
            "name": prediction.machine.name,
            "software": prediction.software.name,
            "placement": prediction.setup.placement,
        },
        figures=figures,
    )


def predict(work: StepWork, machine: Machine, software: Software, setup: Setup, *, precision: Precision = "fp32") -> Prediction:
    """Predict how fast a set-up trains."""
    _check_setup(machine, software, setup)
    kind: type[TrainerStep] = TrainerStep
    if setup.on_one_machine:
        kind = ColocatedTrainer if setup.placement == "remote" else ColocatedProcess
    trainer = kind(work=work, machine=machine, software=software, setup=setup, precision=precision)
    tasks = tuple(trainer.tasks())
    step_s, needs = period_s(tasks, in_flight=setup.in_flight), held(work, machine, setup)
    return Prediction(
        machine=machine,
        software=software,
        setup=setup,
        tasks=tasks,
        step_s=step_s,
        samples_per_s=setup.num_samples / step_s,
        held=needs,
        shortfalls=tuple(shortfalls(work, machine, setup, needs)),
        trainer=trainer,
    )


def _check_setup(machine: Machine, software: Software, setup: Setup) -> None:
    """Raise an error if the machine cannot run the set-up."""
    if setup.on_one_machine:
        if machine.accelerators is not None or software.sharing is None:
            raise RowsteadError(
                f"`{machine.name}` has no measurements of processes that share its cores: run `rowstead calibrate` on a CPU machine"
            )
        return
    if setup.num_trainers > 1 and machine.network is None:
        raise RowsteadError(f"`{machine.name}` has no network: {setup.num_trainers} servers cannot train together")
    for one in (machine, setup.server) if setup.num_servers else ():
        if one is not None and one.network is None:
            raise RowsteadError(f"`{one.name}` has no network: it cannot use or be a parameter server")
    if setup.num_devices > machine.num_devices:
        raise RowsteadError(f"`{machine.name}` has {machine.num_devices} devices, not {setup.num_devices}")
    timings = software.cpu_timings
    has_files = any(one.where == "ssd" for one in setup.behind)
    if has_files and machine.disk is None and (machine.accelerators is not None or timings is None or timings.move_row is None):
        raise RowsteadError(f"`{machine.name}` has no disk for tables on SSD: add `disk` to its file, or use another placement")
    if setup.placement in ("host", "mixed", "cached") and machine.accelerators is None:
        raise RowsteadError(
            f"`{machine.name}` has no accelerators: use `device`, which is its system memory, instead of `{setup.placement}`"
        )


def predict_run(spec: RunSpec, placement: Placement, machine: Machine) -> Prediction | None:
    """Predict one process of a run on a measured machine; None where its measurements do not cover the run."""
    software = machine.software
    if spec.train.sync.hogwild_threads > 1 or software is None or spec.model.network not in NETWORKS:
        return None
    timings = software.cpu_timings if machine.accelerators is None else software.device_timings
    kind, behind = placement_kind(placement), cached_tables(placement)
    on_cpu = machine.accelerators is None
    as_measured = [one for one in behind if on_cpu or one.where != "ssd"]
    if timings is None or (as_measured and timings.move_row is None) or (on_cpu and kind == "cached"):
        return None
    if kind == "ssd" and not on_cpu and machine.disk is None:
        return None
    setup = Setup(placement=kind, batch_size=spec.train.batch_size, behind=behind, has_input=False)
    return predict(step_work(spec), machine, software, setup, precision=spec.train.precision)


def comparison_text(prediction: Prediction, measured: Record) -> str | None:
    """One line with predicted and measured throughput; None where nothing was measured."""
    samples_per_s = measured.figures.get("samples_per_s")
    if samples_per_s is None:
        return None
    ratio = prediction.samples_per_s / samples_per_s
    text = f"predicted {prediction.samples_per_s:,.0f} samples/s, measured {samples_per_s:,.0f}: {ratio - 1:+.0%}"
    waited = measured.figures.get("reading_held_up_share", 0.0)
    without = measured.figures.get("alone_samples_per_s")
    if waited > 0.02 and without is not None:
        text += (
            f" (training waited for data {waited:.0%} of the time; without that {prediction.samples_per_s / without - 1:+.0%})"
        )
    peak = measured.figures.get("peak_memory_bytes")
    if prediction.process_bytes is not None and peak is not None:
        text += f"; memory {format_bytes(prediction.process_bytes)}, measured {format_bytes(peak)}"
    return f"{text}; predicted bottleneck: {prediction.bottlenecks[0].resource}"
