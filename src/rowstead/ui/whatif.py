"""Predictions for a scenario: the chosen fleet in detail, and the best set-up on every platform, as plain numbers for the page."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rowstead.plan.choose import Choice, Chooser, choose, num_readers, remedies
from rowstead.plan.predict import Prediction
from rowstead.plan.setup import USABLE_SHARE
from rowstead.plan.setups import possible_placements
from rowstead.plan.work import StepWork, step_work
from rowstead.report.plans import network_note, placement_title, servers_text
from rowstead.spec.catalogue import HERE, calibrated_path, load_machine, load_software, machine_names
from rowstead.spec.errors import RowsteadError, did_you_mean
from rowstead.spec.machine import Machine
from rowstead.spec.run import RunSpec
from rowstead.spec.software import Software
from rowstead.spec.stores import STORES, PlannedStore
from rowstead.ui.scenario import Scenario, spec_of

SERVER = "cpu-2s"
"""The machine that parameter servers and readers run on."""


def known_machines() -> list[str]:
    """Names of the machines on the page: the shipped ones, and this one if it was calibrated."""
    return [HERE, *machine_names()] if _measured_file() is not None and trouble_here() is None else machine_names()


def trouble_here() -> str | None:
    """Why this machine is left out though it was calibrated; None if it is not left out."""
    file = _measured_file()
    return None if file is None else _trouble(str(file), file.stat().st_mtime_ns)


def _measured_file() -> Path | None:
    return next((path for kind in ("cuda", "cpu") if (path := calibrated_path(kind)).is_file()), None)


@functools.lru_cache(maxsize=8)
def _trouble(path: str, changed_ns: int) -> str | None:
    """The error in a machine file of this modification time, if any."""
    try:
        load_machine(path)
    except RowsteadError as error:
        return str(error)
    return None


@functools.cache
def known(name: str) -> Machine:
    """A machine by name; paths are not accepted here."""
    if name not in known_machines():
        raise RowsteadError(f"unknown machine `{name}`: {did_you_mean(name, known_machines())}")
    return dataclasses.replace(load_machine(name), name=name)


@functools.cache
def software() -> Software:
    return load_software("rowstead")


def answers(scenario: Scenario, base: RunSpec | None) -> Iterator[dict[str, Any]]:
    """First the model and the chosen fleet, then each platform, so that the page can show them as they arrive."""
    spec = spec_of(scenario, base)
    work = step_work(spec)
    note = network_note(spec)
    yield {"model": model_facts(work), "fleet": fleet_facts(scenario, spec, work), "notes": [] if note is None else [note]}
    others = [name for name in known_machines() if name != scenario.machine]
    for name in (scenario.machine, *others):
        choice = choose(spec, known(name), software(), server=known(SERVER))
        yield {"platform": platform_facts(choice, work)}


def model_facts(work: StepWork) -> dict[str, float]:
    """Sizes and work of the model."""
    return {
        "table_bytes": work.table_bytes,
        "num_parameters": work.num_parameters + sum(table.num_rows * table.width for table in work.tables),
        "num_dense_parameters": work.num_parameters,
        "ids_per_sample": work.ids_per_sample,
        "flops_per_sample": work.flops,
        "input_bytes": work.input_bytes,
    }


def fleet_facts(scenario: Scenario, spec: RunSpec, work: StepWork) -> dict[str, Any]:
    """The chosen servers, with the chosen placement or the best one."""
    machine, server = known(scenario.machine), known(SERVER)
    possible = possible_placements(machine) if work.tables else ("device",)
    if scenario.placement != "auto" and scenario.placement not in possible:
        return {
            "machine": machine.name,
            "fits": False,
            "why": [f"{machine.name} cannot have tables in {STORES[scenario.placement].title}"],
            "remedies": [],
        }
    placements: tuple[PlannedStore, ...] = possible if scenario.placement == "auto" else (scenario.placement,)
    if scenario.num_trainers > 1 and machine.network is None:
        why = f"{machine.name} has no network, so several of them cannot train together"
        return {"machine": machine.name, "fits": False, "why": [why], "remedies": []}
    tried = [one for placement in placements for one in _best_of(scenario, spec, work, machine, placement)]
    fitting = [one for one in tried if one.fits]
    if not fitting:
        return {
            "machine": machine.name,
            "fits": False,
            "why": list(tried[0].shortfalls),
            "memories": memories(tried[0]),
            "remedies": list(remedies(spec, machine, server)),
        }
    best = max(fitting, key=lambda one: (one.samples_per_j or one.samples_per_s, one.samples_per_s))
    shown = facts(best)
    shown["others"] = [
        {"placement": placement_title(one), "samples_per_s": one.samples_per_s} for one in fitting if one is not best
    ]
    shown |= _readers(best, work)
    shown["timeline"] = [slot for slot in best.timeline if slot["end_s"] > slot["start_s"]]
    return shown


def _readers(best: Prediction, work: StepWork) -> dict[str, int]:
    """The number of readers that a set-up needs; absent without a network."""
    if best.machine.network is None:
        return {}
    return {"num_readers": num_readers(work, software(), known(SERVER), best.samples_per_s)}


def _best_of(scenario: Scenario, spec: RunSpec, work: StepWork, machine: Machine, placement: PlannedStore) -> list[Prediction]:
    """One placement on the chosen fleet, with the chosen number of sparse servers, or with as many as pay off; empty if it is another."""
    chooser = Chooser(
        spec=spec,
        work=work,
        machine=machine,
        server=known(SERVER),
        software=software(),
        prefer="efficiency",
        samples_per_s=None,
    )
    counts = {"num_sparse_servers": scenario.num_servers} if scenario.num_servers and placement == "remote" else {}
    setups = chooser.build(placement, batch_size=scenario.batch_size, num_trainers=scenario.num_trainers, **counts)
    predicted = [chooser.predict(one) if counts else chooser.with_enough_servers(one) for one in setups]
    return [min(predicted, key=chooser.rank)] if predicted else []


def platform_facts(choice: Choice, work: StepWork) -> dict[str, Any]:
    """The best set-up on one platform, or why there is none."""
    machine = choice.machine
    found: dict[str, Any] = {"machine": machine.name, "title": machine.title, "fits": choice.best is not None}
    if choice.best is None:
        return found | {"why": [s for one in choice.others[:1] for s in one.shortfalls], "remedies": list(choice.remedies)}
    return found | facts(choice.best) | _readers(choice.best, work)


def facts(one: Prediction) -> dict[str, Any]:
    """A prediction as the page shows it; unknown figures are absent."""
    found: dict[str, Any] = {
        "machine": one.machine.name,
        "fits": one.fits,
        "placement": placement_title(one),
        "samples_per_s": one.samples_per_s,
        "step_s": one.step_s,
        "servers": servers_text(one.setup),
        "bottlenecks": [{"resource": b.resource, "saved_share": b.saved_share} for b in one.bottlenecks[:3]],
        "memories": memories(one),
    }
    if one.watts is not None:
        found |= {"watts": one.watts, "samples_per_j": one.samples_per_j}
    if one.usd_per_billion_samples is not None:
        found["usd_per_billion_samples"] = one.usd_per_billion_samples
    return found


def memories(one: Prediction) -> list[dict[str, Any]]:
    """Needed and usable bytes of each memory of a set-up."""
    machine, needs, server = one.machine, one.held, one.setup.server
    rows = []
    if machine.accelerators is not None:
        rows.append(("each GPU", needs.device_bytes, machine.accelerators.memory.capacity_bytes))
    rows.append(("system memory", needs.host_bytes, machine.host.memory.capacity_bytes))
    if machine.disk is not None and machine.disk.capacity_bytes is not None and needs.disk_bytes:
        rows.append(("the disk", needs.disk_bytes, machine.disk.capacity_bytes))
    if server is not None and one.setup.num_sparse_servers:
        rows.append(("each parameter server", needs.server_bytes, server.host.memory.capacity_bytes))
    return [{"what": what, "needed_bytes": need, "usable_bytes": capacity * USABLE_SHARE} for what, need, capacity in rows]
