"""The prediction of a run on a machine: the schedule of a step, and from it throughput, memory, energy and cost."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from rowstead.plan.colocated import ColocatedTrainer
from rowstead.plan.schedule import Bottleneck, Slot, Task, bottlenecks, lay_out, overlapped, period_s
from rowstead.plan.setup import Held, Setup, held, process_bytes, shortfalls
from rowstead.plan.trainer import TrainerStep
from rowstead.plan.work import StepWork
from rowstead.spec.errors import RowsteadError
from rowstead.spec.machine import Machine, Precision
from rowstead.spec.parse import digest
from rowstead.spec.phases import STEP, Phase
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec
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
        if self.machine.accelerators is not None:
            found["device_bytes"] = needs.device_bytes
        if setup.num_sparse_servers:
            found["server_bytes"] = needs.server_bytes
        if self.process_bytes is not None:
            found["process_bytes"] = self.process_bytes
        if self.watts is not None:
            found |= {"nameplate_watts": self.watts, "samples_per_j": self.samples_per_j}
        if self.metered_watts is not None:
            found |= {"metered_watts": self.metered_watts, "samples_per_metered_j": self.samples_per_metered_j}
        if self.usd_per_billion_samples is not None:
            found["usd_per_billion_samples"] = self.usd_per_billion_samples
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
        other = STORES["remote" if self.setup.placement == "remote" else "host"].title
        return {table.name: found.get(table.name, other) for table in trainer.work.tables}

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

    @property
    def watts(self) -> float | None:
        """Nameplate power of trainers and parameter servers, without readers."""
        setup = self.setup
        num_servers = setup.num_sparse_servers + setup.num_dense_servers
        if self.machine.power is None or (num_servers and (setup.server is None or setup.server.power is None)):
            return None
        of_servers = num_servers * setup.server.power.nameplate_watts if setup.server and setup.server.power else 0.0
        return setup.num_trainers * self.machine.power.nameplate_watts + of_servers

    @property
    def process_bytes(self) -> float | None:
        """Peak memory of a CPU trainer's process, the program included; None where that was not measured."""
        setup, known = self.setup, self.software.base_bytes > 0 and self.machine.accelerators is None
        if not known or setup.placement != "device" or setup.num_trainers > 1:
            return None
        return process_bytes(self.trainer.work, self.software, setup.batch_size)

    @property
    def metered_watts(self) -> float | None:
        """What the meters of all trainers read under load; None if any server or device has no meter."""
        setup = self.setup
        if self.machine.meter is None or setup.num_devices > 1 or setup.num_sparse_servers + setup.num_dense_servers:
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
        setup = self.setup
        num_servers = setup.num_sparse_servers + setup.num_dense_servers
        if self.machine.price is None or (num_servers and (setup.server is None or setup.server.price is None)):
            return None
        of_servers = num_servers * setup.server.price.usd_per_hour if setup.server and setup.server.price else 0.0
        usd_per_hour = setup.num_trainers * self.machine.price.usd_per_hour + of_servers
        return usd_per_hour / 3600 / self.samples_per_s * 1e9


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
    kind = ColocatedTrainer if setup.on_one_machine else TrainerStep
    trainer = kind(work=work, machine=machine, software=software, setup=setup, precision=precision)
    tasks = tuple(trainer.tasks())
    step_s = period_s(tasks, in_flight=setup.in_flight)
    return Prediction(
        machine=machine,
        software=software,
        setup=setup,
        tasks=tasks,
        step_s=step_s,
        samples_per_s=setup.num_samples / step_s,
        held=held(work, machine, setup),
        shortfalls=tuple(shortfalls(work, machine, setup)),
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
    for one in (machine, setup.server) if setup.num_sparse_servers + setup.num_dense_servers else ():
        if one is not None and one.network is None:
            raise RowsteadError(f"`{one.name}` has no network: it cannot use or be a parameter server")
    if setup.num_devices > machine.num_devices:
        raise RowsteadError(f"`{machine.name}` has {machine.num_devices} devices, not {setup.num_devices}")
    if setup.placement in ("host", "mixed") and machine.accelerators is None:
        raise RowsteadError(
            f"`{machine.name}` has no accelerators: use `device`, which is its system memory, instead of `{setup.placement}`"
        )
