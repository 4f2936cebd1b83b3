"""`rowstead plan` and `rowstead calibrate`. Planning needs no torch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rowstead.spec.errors import RowsteadError

if TYPE_CHECKING:
    from rowstead.plan.choose import Choice
    from rowstead.spec.machine import Machine
    from rowstead.spec.run import RunSpec


def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")] = "quickstart",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the recipe, such as scale=0.1. Repeatable."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on", metavar="NAME,NAME", help="Machines by name or file; `here` is this one, calibrated. [default: all shipped]"
        ),
    ] = None,
    software: Annotated[
        str | None,
        typer.Option(
            "--software",
            metavar="NAME",
            help="Software overheads: a shipped name, or a file. [default: as calibrated with the machine, else rowstead]",
        ),
    ] = None,
    server: Annotated[
        str, typer.Option("--server", metavar="NAME", help="Machine for parameter servers and readers.")
    ] = "cpu-2s",
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="N,N", help="Batch sizes per device to try. [default: the recipe's]")
    ] = None,
    prefer: Annotated[
        str, typer.Option("--prefer", metavar="efficiency|speed", help="Maximise samples per joule, or samples per second.")
    ] = "efficiency",
    samples_per_s: Annotated[
        float | None, typer.Option("--samples-per-s", metavar="N", help="Find the fewest servers that reach this speed.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if", metavar="KEY=CHANGE", help="Change the machines, such as machine.network.bandwidth=4x. Repeatable."
        ),
    ] = None,
    requirements: Annotated[
        bool, typer.Option("--requirements", help="Also print the minimum capacities of a machine for this speed.")
    ] = False,
    tables: Annotated[bool, typer.Option("--tables", help="Also print where each table goes.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Also print a timeline of one step, by phase.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="Write the timeline of one step to an .html or .svg file."),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="RUNS", help="Also add the predictions to the run store in this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Predict where a model trains fastest: placement, servers, speed, energy and bottleneck on each machine."""
    from rowstead.plan.choose import num_readers
    from rowstead.plan.choose import requirements as requirements_of
    from rowstead.plan.recipe_fleet import choose_for_recipe
    from rowstead.plan.work import step_work
    from rowstead.report.plans import PlanReport, network_note, plain_of, print_plan, say
    from rowstead.spec.catalogue import load_machine, load_software
    from rowstead.spec.run import find_gpu_recipe, load_recipe

    if samples_per_s is not None and not 0 < samples_per_s < math.inf:
        raise RowsteadError(f"--samples-per-s must be above 0 and finite, got {samples_per_s:g}")
    if prefer not in ("efficiency", "speed"):
        raise RowsteadError(f"--prefer is `efficiency` or `speed`, got `{prefer}`")
    spec, batches = load_recipe(recipe, set_ or []), _batches(batch)
    program, helper = load_software(software or "rowstead"), load_machine(server)
    if helper.network is None:
        raise RowsteadError(f"--server {server} has no network, which parameter servers and readers need")
    machines, notes = _machines(on, what_if or [], is_measured=software is None)
    if (note := network_note(spec)) is not None:
        notes.append(note)
    on_gpus = spec
    if (paired := find_gpu_recipe(recipe)) is not None and any(machine.accelerators is not None for machine in machines):
        on_gpus = load_recipe(str(paired), set_ or [])
        notes.append(f"Machines with GPUs are planned with the recipe `{on_gpus.name}`, batch {on_gpus.train.batch_size:,}.")
    choices = [
        choose_for_recipe(
            spec if machine.accelerators is None else on_gpus,
            machine,
            program if software is not None else machine.software or program,
            server=helper,
            batch_sizes=batches,
            samples_per_s=samples_per_s,
            prefer="speed" if prefer == "speed" else "efficiency",
        )
        for machine in machines
    ]
    work, fastest = step_work(spec), max((one.best.samples_per_s for one in choices if one.best is not None), default=1e6)
    plan_ = PlanReport(
        name=spec.name,
        choices=choices,
        num_readers={
            one.machine.name: num_readers(work, program, helper, one.best.samples_per_s)
            for one in choices
            if one.best is not None and one.machine.network is not None
        },
        options={"prefer": prefer, "samples_per_s": samples_per_s, "what_if": what_if or None},
        needs=requirements_of(spec, samples_per_s or fastest) if requirements else None,
        notes=notes,
    )
    if keep is not None:
        _keep(keep, spec, choices)
    if picture is not None:
        from rowstead.report.timeline import write_timeline

        write_timeline(picture, plan_.best, title=spec.name)
    if as_json:
        print(json.dumps(plain_of(plan_)))
        return
    print_plan(plan_, tables=tables, timeline=timeline)
    if spec.data.files is not None:
        say("Assuming one uniformly drawn id per feature: a plan does not read the log.")


def _machines(on: str | None, changes: list[str], *, is_measured: bool) -> tuple[list[Machine], list[str]]:
    """The machines of `--on`, or all shipped ones, with the changes applied; and remarks about them.

    Without `--on`, a machine that a change contradicts is left out, unless it contradicts them all.
    """
    from rowstead.spec.catalogue import load_machine, machine_names

    names = list(dict.fromkeys(name.strip() for name in on.split(",") if name.strip())) if on is not None else machine_names()
    if not names:
        raise RowsteadError("--on: name at least one machine")
    found: dict[str, Machine] = {}
    notes, dimmed, unused, refused = list[str](), list[str](), set(changes), list[RowsteadError]()
    for name in names:
        try:
            made = changes if on is not None else _applicable(name, changes)
            machine = load_machine(name, made)
        except RowsteadError as error:
            if on is not None:
                raise
            refused.append(error)
            notes.append(f"{name} is left out: {error}")
            continue
        unused -= set(made)
        if machine.name in found:
            raise RowsteadError(f"--on: two machines are named `{machine.name}`: change `name` in the file `{name}`")
        described = load_machine(name) if made else machine
        if is_measured and made:
            _check_changes_matter(described, machine, made)
        if any(getattr(described, what) and not getattr(machine, what) for what in ("power", "meter", "price")):
            dimmed.append(machine.name)
        found[machine.name] = machine
    if dimmed:
        notes.append(
            f"{', '.join(dimmed)}: power and price are unknown with another number of accelerators or sockets, so energy and cost "
            "are left out; set them too, such as --what-if power.nameplate=2x"
        )
    if refused and (unused or not found):
        raise refused[0]
    if unused:
        raise RowsteadError(f"--what-if {min(unused)}: none of the machines has such a part")
    return list(found.values()), notes


def _applicable(name: str, changes: list[str]) -> list[str]:
    """The changes to parts that the machine has."""
    from rowstead.spec.catalogue import load_machine

    kept = []
    for change in changes:
        try:
            load_machine(name, [change])
        except RowsteadError as error:
            if "has no such part" in str(error):
                continue  # other errors may be resolved by another change
        kept.append(change)
    return kept


def _check_changes_matter(before: Machine, after: Machine, changes: list[str]) -> None:
    """Raise an error about changed rates of a calibrated machine, whose predictions use measured times."""
    if before.software is None or (before.software.cpu_timings is None and before.software.device_timings is None):
        return

    def rates(machine: Machine) -> tuple[object, ...]:
        part = machine.accelerators or machine.host
        return replace(part.memory, capacity_bytes=1.0, cache_bytes=0.0), part.memory.cache_bytes, part.compute

    if rates(before) != rates(after):
        raise RowsteadError(
            f"--what-if {' '.join(changes)}: the measured times of `{before.name}` do not depend on its rates: "
            "add `--software rowstead` to predict from rates instead"
        )


def calibrate(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Machine file to write. [default: where `train` finds it]")
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the machine.")] = "here",
    device: Annotated[
        str,
        typer.Option("--device", metavar="auto|cpu|cuda", help="Device to calibrate for: a GPU if there is one, or the CPU."),
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="CPU threads. [default: as `train` uses]")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--folder", metavar="FOLDER", help="A folder on the disk for tables on `ssd`.")
    ] = Path(),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes; predictions are less accurate.")] = False,
) -> None:
    """Measure this machine in two minutes or less, for predictions on it."""
    import tempfile
    import time

    import torch

    from rowstead.records.files import write_atomic
    from rowstead.report.plans import say
    from rowstead.spec.bounds import PLAIN_NAME
    from rowstead.spec.catalogue import calibrated_path, machine_text
    from rowstead.study.calibration.calibrate import calibrate as measure_machine
    from rowstead.training.device import set_threads

    if device not in ("auto", "cpu", "cuda"):
        raise RowsteadError(f"--device is `auto`, `cpu` or `cuda`, got `{device}`")
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise RowsteadError("--device cuda, but torch finds no CUDA GPU: use `--device cpu`")
    if threads is not None and threads < 1:
        raise RowsteadError(f"--threads must be at least 1, got {threads}")
    if not folder.is_dir():
        raise RowsteadError(f"--folder: there is no folder `{folder}`")
    PLAIN_NAME.check("name", name)
    kind = "cuda" if device == "cuda" or (device == "auto" and has_gpu) else "cpu"
    path = out if out is not None else calibrated_path(kind)
    try:
        if path.is_dir():
            raise RowsteadError(f"--out: `{path}` is a folder: name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.tmp-"):
            pass
    except OSError as error:  # fail before measuring
        raise RowsteadError(f"cannot write {path}: {error.strerror or error}: name another file with --out") from None
    start = time.perf_counter()

    def report(line: str) -> None:
        say(f"{time.perf_counter() - start:5.0f} s  {line}")

    with set_threads(threads):
        machine = measure_machine(torch.device(kind), name=name, folder=folder, is_short=quick, on_message=report)
    write_atomic(path, machine_text(machine))
    report(f"written to {path}")
    for line in _shown_machine(machine):
        say(f"  {line}")
    say(f"Use it with `rowstead plan RECIPE --on {'here' if out is None else path}`.")


def _shown_machine(machine: Machine) -> list[str]:
    """Key figures of a machine, one line each."""
    host, accelerators, disk, meter = machine.host, machine.accelerators, machine.disk, machine.meter
    parts = [("processors", host.memory, host.compute)]
    if accelerators is not None:
        parts.append(("GPU", accelerators.memory, accelerators.compute))
    lines = [machine.title]
    for what, memory, compute in parts:
        at_random = ", ".join(f"{rate.bytes_per_s / 1e9:.3g} GB/s in accesses of {rate.piece_bytes}" for rate in memory.random)
        lines.append(f"{what}: memory {memory.bandwidth_bytes_per_s / 1e9:.3g} GB/s sequential, random {at_random}")
        rates = {"FP32": compute.fp32_flops_per_s, "TF32": compute.tf32_flops_per_s, "BF16": compute.bf16_flops_per_s}
        lines.append(f"{what}: " + ", ".join(f"{rate / 1e12:.3g} TFLOP/s {name}" for name, rate in rates.items() if rate))
    if accelerators is not None:
        link = accelerators.host_link
        lines.append(f"link to the host: {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s, {link.latency_s * 1e6:.3g} us")
    if disk is not None:
        lines.append(
            f"disk: reads {disk.read_bytes_per_s / 1e9:.3g} GB/s, writes {disk.write_bytes_per_s / 1e9:.3g} GB/s, "
            f"{disk.random_reads_per_s:,.0f} random reads per second"
        )
    if meter is not None:
        lines.append(f"power of {meter.of}: {meter.idle_watts:.0f} W idle, {meter.loaded_watts:.0f} W loaded")
    return lines


def _keep(root: Path, spec: RunSpec, choices: list[Choice]) -> None:
    """Add the predictions to a run store; where the model does not fit, with that as the failure."""
    from rowstead.plan.predict import build_predicted_record
    from rowstead.records.store import RunStore, StoreEntry
    from rowstead.spec.parse import digest
    from rowstead.spec.record import Record, date_now

    date = date_now()
    for one in choices:
        facts: dict[str, str | int | float] = {"name": one.machine.name}
        record = Record(kind="predicted", name=spec.name, spec_digest=digest(spec), date=date, machine=facts)
        if one.best is not None:
            record = build_predicted_record(one.best, spec, date=date)
        failure = None if one.best is not None else "does not fit"
        RunStore(root).add(StoreEntry(record=record, source="plan", axes={"machine": one.machine.name}, failure=failure))


def _batches(text: str | None) -> list[int]:
    try:
        batches = [int(number) for number in text.split(",")] if text else []
    except ValueError:
        raise RowsteadError(f"cannot read `--batch {text}`: give integers separated by commas") from None
    if any(one < 1 for one in batches):
        raise RowsteadError("--batch must be at least 1")
    return batches
