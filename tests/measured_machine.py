"""A machine file as `rowstead calibrate` writes it, with times that are easy to reckon with."""

from __future__ import annotations

import dataclasses

from rowstead.spec.catalogue import load_machine, load_software
from rowstead.spec.curve import Curve, CurveAxis
from rowstead.spec.machine import Machine
from rowstead.spec.sharing import MessageCost, Sharing
from rowstead.spec.timings import InStep, LayerTimes, Timings


def curve(per_unit_s: float, *names: str, grows: bool = True) -> Curve:
    """Seconds in proportion to all sizes; those within which rows are cost twice as much when they are a thousand times more."""
    if not grows:
        within = CurveAxis(name="within_bytes", sizes=(1e6, 1e9), grows=False)
        rows = CurveAxis(name="row_bytes", sizes=(64.0, 512.0))
        return Curve(axes=(within, rows), seconds=tuple(per_unit_s * f * b for f in (1, 2) for b in (64, 512)))
    return Curve(axes=tuple(CurveAxis(name=name, sizes=(1.0,)) for name in names), seconds=(per_unit_s,))


def timings(*, has_plan: bool = False) -> Timings:
    product = ("examples", "inputs", "outputs")
    layers = LayerTimes(
        precision="fp32", forward=curve(2e-11, *product), back=curve(4e-11, *product), back_first=curve(2e-11, *product)
    )
    return Timings(
        layers=(layers,),
        interaction_forward=curve(1e-10, "examples", "vectors", "width"),
        interaction_back=curve(2e-10, "examples", "vectors", "width"),
        dense_update=curve(1e-9, "parameters"),
        read_row=curve(1e-10, grows=False),
        bag=curve(1e-10, "row_bytes"),
        lookup_call_s=2e-5,
        update_row=curve(2e-10, grows=False),
        update_id=curve(1e-10, "row_bytes"),
        update_call_s=3e-5,
        plan=curve(1e-9, "ids") if has_plan else None,
        plan_factor=0.5 if has_plan else 0.0,
        cache_id_s=1e-8,
        move_row=curve(1e-8, "record_bytes"),
        dense=InStep(fixed_s=2e-4),
    )


def measured_machine(kind: str = "cpu", *, num_cores: int = 1) -> Machine:
    """A laptop, or an H200, whose trainer was measured."""
    software = load_software("rowstead")
    plain = {"operator_s": 0.0, "operators_per_layer": 0.0, "operators_fixed": 0.0, "device_step_s": 1e-5, "kernel_s": 0.0}
    software = dataclasses.replace(software, **plain, base_bytes=5e8, runs_ahead=kind == "cuda")
    if kind == "cuda":
        machine = load_machine("h200")
        return dataclasses.replace(machine, software=dataclasses.replace(software, device_timings=timings(has_plan=True)))
    machine = load_machine("laptop")
    host = dataclasses.replace(machine.host, num_cores=num_cores)
    return dataclasses.replace(machine, host=host, software=dataclasses.replace(software, cpu_timings=timings()))


def sharing(*, crowding: float = 1.0) -> Sharing:
    """Processes of one thread, which take twice as long as all threads, and what they say to each other."""
    twice = InStep(factor=2.0)
    return Sharing(
        layers=timings().layers[0],
        dense=twice,
        lookup=twice,
        update=twice,
        dense_optimizer=twice,
        crowding=crowding,
        asking=MessageCost(call_s=1e-4, id_s=1e-8, byte_s=1e-10),
        answering=MessageCost(call_s=2e-4, id_s=2e-9, byte_s=5e-10),
        waiting_s=0.0,
        handing=MessageCost(call_s=1e-4, byte_s=4e-10),
        averaging=MessageCost(call_s=2e-4, byte_s=2e-9),
    )


def shared_machine(*, crowding: float = 1.0, num_cores: int = 2) -> Machine:
    """A measured laptop whose cores processes share."""
    machine = measured_machine("cpu", num_cores=num_cores)
    assert machine.software is not None
    return dataclasses.replace(machine, software=dataclasses.replace(machine.software, sharing=sharing(crowding=crowding)))
