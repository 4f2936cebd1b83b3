"""`rowstead plan`: where a model would train fastest, before it runs. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from rowstead.spec.errors import RowsteadError

if TYPE_CHECKING:
    from rowstead.plan.choose import Choice, Requirements
    from rowstead.plan.predict import Prediction
    from rowstead.spec.machine import Machine
    from rowstead.spec.run import RunSpec

NAMES = {"device": "GPU memory", "host": "system memory", "remote": "sparse servers", "mixed": "GPU + system memory"}


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
            help="Whose overheads to use: a shipped name, or a file. [default: as measured with the machine, else rowstead]",
        ),
    ] = None,
    server: Annotated[str, typer.Option("--server", metavar="NAME", help="What parameter servers and readers are.")] = "cpu-2s",
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="N,N", help="Batches a device to try. [default: the recipe's]")
    ] = None,
    prefer: Annotated[
        str, typer.Option("--prefer", metavar="efficiency|speed", help="Best by samples a joule, or by samples a second.")
    ] = "efficiency",
    samples_per_s: Annotated[
        float | None, typer.Option("--samples-per-s", metavar="N", help="Find the servers that reach this speed.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="KEY=CHANGE", help="Change machines: machine.network.bandwidth=4x. Repeatable."),
    ] = None,
    requirements: Annotated[
        bool, typer.Option("--requirements", help="What a machine needs at least for this model at this speed.")
    ] = False,
    tables: Annotated[bool, typer.Option("--tables", help="Also say where each table goes.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Also draw one step's tasks over time.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="Draw one step's tasks over time into an .html or .svg file."),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="RUNS", help="Also add the predictions to the run store in this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Predict where a model trains fastest: placement, servers, speed, energy and bottleneck on each machine."""
    from rowstead.plan.choose import choose, num_readers
    from rowstead.plan.choose import requirements as requirements_of
    from rowstead.plan.work import step_work
    from rowstead.spec.catalogue import load_machine, load_software, machine_names
    from rowstead.spec.run import load_recipe

    if samples_per_s is not None and not samples_per_s > 0:
        raise RowsteadError(f"--samples-per-s must be above 0, got {samples_per_s:g}")
    if prefer not in ("efficiency", "speed"):
        raise RowsteadError(f"--prefer is `efficiency` or `speed`, got `{prefer}`")
    spec = load_recipe(recipe, set_ or [])
    names = [name.strip() for name in on.split(",") if name.strip()] if on is not None else machine_names()
    if not names:
        raise RowsteadError("--on names no machine")
    program, helper = load_software(software or "rowstead"), load_machine(server)
    machines = [load_machine(name, _applicable(name, what_if or [], on is not None)) for name in names]
    batches = _batches(batch)
    choices = [
        choose(
            spec,
            machine,
            program if software is not None else machine.software or program,
            server=helper,
            batch_sizes=batches,
            samples_per_s=samples_per_s,
            prefer="speed" if prefer == "speed" else "efficiency",
        )
        for machine in machines
    ]
    speeds = [one.best.samples_per_s for one in choices if one.best is not None]
    needs = requirements_of(spec, samples_per_s or max(speeds, default=1e6)) if requirements else None
    work = step_work(spec)
    readers = {
        one.machine.name: num_readers(work, program, helper, min(one.best.samples_per_s, samples_per_s or 1e99))
        for one in choices
        if one.best is not None
    }
    if keep is not None:
        _keep(keep, spec, choices)
    if picture is not None:
        from rowstead.report.timeline import write_timeline

        write_timeline(picture, [one.best for one in choices if one.best is not None], title=spec.name)
    if as_json:
        print(json.dumps(_plain(spec.name, program.name, choices, readers, needs)))
        return
    console = Console()
    shown = _table(spec.name, choices, readers, samples_per_s)
    wanted = Measurement.get(Console(width=400), Console(width=400).options, shown).maximum
    Console(width=max(console.width, wanted)).print(shown)  # lines that are too long are wrapped by the terminal, not shortened
    _print_remedies(console, choices)
    for one in choices:
        if one.best is not None and tables:
            _print_tables(console, one.best)
        if one.best is not None and timeline:
            _print_timeline(console, one.best)
    if needs is not None:
        _print_requirements(console, needs)
    if spec.data.parquet is not None:
        console.print(
            "the log's own lengths and law of ids are not known here: one id a feature, drawn evenly", highlight=False
        )


def calibrate(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write the machine. [default: where `train` finds it]")
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What to call it.")] = "here",
    device: Annotated[
        str, typer.Option("--device", metavar="auto|cpu|cuda", help="What trains: a GPU where there is one, or the processors.")
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="CPU threads. [default: as `train` takes]")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--folder", metavar="FOLDER", help="A folder on the disk that tables may go to.")
    ] = Path(),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, for a first look: predictions are worse.")] = False,
) -> None:
    """Measure this machine, in two minutes or less, so that speeds can be predicted on it."""
    import time

    import torch

    from rowstead.measure.calibrate import calibrate as measured
    from rowstead.parts import granted_cores
    from rowstead.records.files import write_atomic
    from rowstead.spec.catalogue import calibrated_path, machine_text

    if device not in ("auto", "cpu", "cuda"):
        raise RowsteadError(f"--device is `auto`, `cpu` or `cuda`, got `{device}`")
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise RowsteadError("--device cuda, but torch sees no CUDA GPU here: use `--device cpu`")
    if threads is not None and threads < 1:
        raise RowsteadError(f"--threads must be at least 1, got {threads}")
    if not folder.is_dir():
        raise RowsteadError(f"--folder: there is no folder `{folder}`")
    kind = "cuda" if device == "cuda" or (device == "auto" and has_gpu) else "cpu"
    before = torch.get_num_threads()
    torch.set_num_threads(threads or min(before, granted_cores() or before))
    start, console = time.perf_counter(), Console()
    try:
        machine = measured(
            torch.device(kind),
            name=name,
            folder=folder,
            is_short=quick,
            tell=lambda line: console.print(f"{time.perf_counter() - start:5.0f} s  {line}", highlight=False),
        )
    finally:
        torch.set_num_threads(before)
    path = out if out is not None else calibrated_path(kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, machine_text(machine))
    console.print(f"{time.perf_counter() - start:5.0f} s  written to {path}", highlight=False, soft_wrap=True)
    for line in _shown_machine(machine):
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    console.print(f"`rowstead plan RECIPE --on {'here' if out is None else path}` predicts with it", highlight=False)


def _shown_machine(machine: Machine) -> list[str]:
    """The most telling figures of a machine, a line each."""
    host, accelerators, disk, meter = machine.host, machine.accelerators, machine.disk, machine.meter
    parts = [("processors", host.memory, host.compute)]
    if accelerators is not None:
        parts.append(("GPU", accelerators.memory, accelerators.compute))
    lines = [machine.title]
    for what, memory, compute in parts:
        at_random = ", ".join(f"{rate.bytes_per_s / 1e9:.3g} GB/s in pieces of {rate.piece_bytes}" for rate in memory.random)
        lines.append(f"{what}: memory {memory.bandwidth_bytes_per_s / 1e9:.3g} GB/s in order, at random {at_random}")
        rates = {"FP32": compute.fp32_flops_per_s, "TF32": compute.tf32_flops_per_s, "BF16": compute.bf16_flops_per_s}
        lines.append(f"{what}: " + ", ".join(f"{rate / 1e12:.3g} TFLOP/s {name}" for name, rate in rates.items() if rate))
    if accelerators is not None:
        link = accelerators.host_link
        lines.append(f"link to the host: {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s, {link.latency_s * 1e6:.3g} us")
    if disk is not None:
        lines.append(
            f"disk: reads {disk.read_bytes_per_s / 1e9:.3g} GB/s, writes {disk.write_bytes_per_s / 1e9:.3g} GB/s, "
            f"{disk.random_reads_per_s:,.0f} reads at random a second"
        )
    if meter is not None:
        lines.append(f"power of {meter.of}: {meter.idle_watts:.0f} W idle, {meter.loaded_watts:.0f} W loaded")
    return lines


def _keep(root: Path, spec: RunSpec, choices: list[Choice]) -> None:
    """Add what was predicted to a run store, a machine that is too small with the reason."""
    import datetime

    from rowstead.plan.predict import record_of
    from rowstead.records.store import Entry, RunStore
    from rowstead.spec.parse import digest
    from rowstead.spec.record import Record

    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    for one in choices:
        facts: dict[str, str | int | float] = {"name": one.machine.name}
        record = Record(kind="predicted", name=spec.name, spec_digest=digest(spec), date=date, machine=facts)
        if one.best is not None:
            record = record_of(one.best, spec, date=date)
        failure = None if one.best is not None else "does not fit"
        RunStore(root).add(Entry(record=record, source="plan", axes={"machine": one.machine.name}, failure=failure))


def _applicable(name: str, changes: list[str], asked_for: bool) -> list[str]:
    """Changes for one machine; of all machines, those that have no such part stay as they are."""
    from rowstead.spec.catalogue import load_machine

    if asked_for:
        return changes
    kept = []
    for change in changes:
        try:
            load_machine(name, [change])
        except RowsteadError as error:
            if "has no such part" not in str(error):
                raise
        else:
            kept.append(change)
    return kept


def _batches(text: str | None) -> list[int]:
    try:
        batches = [int(number) for number in text.split(",")] if text else []
    except ValueError:
        raise RowsteadError(f"cannot read `--batch {text}`: give whole numbers with commas between them") from None
    if any(one < 1 for one in batches):
        raise RowsteadError("--batch must be at least 1")
    return batches


def _table(name: str, choices: list[Choice], readers: dict[str, int], samples_per_s: float | None) -> Table:
    title = f"{name}: predicted" + (f", for {samples_per_s:,.0f} samples/s" if samples_per_s else "")
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    has_price = any(one.best is not None and one.best.usd_per_billion_samples is not None for one in choices)
    priced = ("$/billion",) if has_price else ()
    for column in ("machine", "tables in", "servers", "batch", "samples/s", "samples/J", *priced, "held up by", "then by"):
        is_number = column in ("batch", "samples/s", "samples/J", "$/billion")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    order = sorted(choices, key=lambda one: -one.best.samples_per_s if one.best is not None else 1.0)
    for one in order:
        if one.best is None:
            table.add_row(one.machine.name, "does not fit", *[""] * (6 + len(priced)))
            continue
        best = one.best
        first, second = ([*(b.resource for b in best.bottlenecks), "", ""])[:2]
        enough = samples_per_s is None or best.samples_per_s >= samples_per_s
        per_j = "" if best.samples_per_j is None else _figure(best.samples_per_j)
        table.add_row(
            one.machine.name,
            NAMES[best.setup.place] if best.machine.accelerators is not None else _cpu_place(best),
            _servers(best, readers[one.machine.name]),
            f"{best.setup.batch_size:,}" + (f" x {best.setup.num_devices}" if best.setup.num_devices > 1 else ""),
            f"{best.samples_per_s:,.0f}" + ("" if enough else " (at most)"),
            per_j,
            *[_figure(best.usd_per_billion_samples) if best.usd_per_billion_samples is not None else "" for _ in priced],
            first,
            second,
        )
    return table


def _figure(number: float) -> str:
    """Three digits at least."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _cpu_place(best: Prediction) -> str:
    return "sparse servers" if best.setup.place == "remote" else "system memory"


def _servers(best: Prediction, num_readers: int) -> str:
    setup = best.setup
    parts = [f"{setup.num_trainers} trainer" + ("s" if setup.num_trainers > 1 else "")]
    parts += [f"{setup.num_sparse_servers} sparse"] if setup.num_sparse_servers else []
    parts += [f"{setup.num_dense_servers} dense"] if setup.num_dense_servers else []
    return " + ".join([*parts, f"{num_readers} reader" + ("s" if num_readers > 1 else "")])


def _print_remedies(console: Console, choices: list[Choice]) -> None:
    for one in choices:
        if one.best is None:
            why = one.others[0].shortfalls[0] if one.others else "it has no place for tables"
            console.print(f"{one.machine.name} does not fit: {why}. What would help:", highlight=False, soft_wrap=True)
            for number, remedy in enumerate(one.remedies, 1):
                console.print(f"  {number}. {remedy}", highlight=False, soft_wrap=True)


def _print_tables(console: Console, best: Prediction) -> None:
    console.print(f"{best.machine.name}, table by table:", highlight=False)
    for name, where in best.where().items():
        console.print(f"  {name}: {where}", highlight=False, soft_wrap=True)


WIDTH = 48
"""Characters of the timeline."""


def _print_timeline(console: Console, best: Prediction) -> None:
    slots = best.slots
    whole = max(slot.end_s for slot in slots)
    console.print(f"{best.machine.name}, one step of {whole * 1e3:.3g} ms:", highlight=False)
    for slot in slots:
        start, end = round(slot.start_s / whole * WIDTH), max(round(slot.end_s / whole * WIDTH), 0)
        bar = " " * start + "█" * max(1, end - start)
        console.print(
            f"  {slot.task.resource:<15} {bar:<{WIDTH + 1}} {slot.task.name}", highlight=False, markup=False, soft_wrap=True
        )


def _print_requirements(console: Console, needs: Requirements) -> None:
    from rowstead.spec.sizes import shown_bytes

    console.print(f"a machine needs for {needs.samples_per_s:,.0f} samples/s, were it used perfectly:", highlight=False)
    for what, figure in (
        ("memory", shown_bytes(needs.memory_bytes)),
        ("memory bandwidth", f"{shown_bytes(needs.memory_bytes_per_s)}/s"),
        ("arithmetic", f"{needs.flops_per_s / 1e12:.3g} TFLOP/s"),
        ("exchange, each direction", f"{shown_bytes(needs.exchange_bytes_per_s)}/s"),
        ("input", f"{shown_bytes(needs.input_bytes_per_s)}/s"),
    ):
        console.print(f"  {what}: {figure}", highlight=False)


def _plain(
    name: str, software: str, choices: list[Choice], readers: dict[str, int], needs: Requirements | None
) -> dict[str, Any]:
    from rowstead.spec.parse import to_plain

    machines = []
    for one in choices:
        plain: dict[str, Any] = {"machine": one.machine.name, "fits": one.best is not None}
        if one.best is not None:
            plain |= {**one.best.figures(), "num_readers": readers[one.machine.name], "tables": one.best.where()}
        else:
            plain["remedies"] = list(one.remedies)
        plain["others"] = [
            {"place": other.setup.place, "fits": other.fits}
            | ({"samples_per_s": other.samples_per_s} if other.fits else {"shortfalls": list(other.shortfalls)})
            for other in one.others
        ]
        machines.append(plain)
    result: dict[str, Any] = {"recipe": name, "kind": "predicted", "software": software, "machines": machines}
    if needs is not None:
        result["requirements"] = to_plain(needs)
    return result
