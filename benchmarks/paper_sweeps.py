"""The sweeps of the HPCA 2021 study (its Figs. 10 to 14), each with ours beside it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper import (
    DENSE,
    FIG10,
    NUM_CPU_SERVERS,
    SPARSE,
    cell,
    error,
    on_big_basin,
    on_cpu,
    placements,
    suite_model,
    suite_work,
)
from benchmarks.paper_item import (
    Checks,
    Compared,
    Item,
    item_of,
    line,
    measured_of,
    predicted_lines,
    renamed,
    size_of,
    thousands,
)
from rowstead.plan.work import step_work
from rowstead.records.store import Contents
from rowstead.report import charts_studies
from rowstead.report.charts_studies import MEASURED, Study
from rowstead.report.theme import Chart, TextTable, axis, heat_map, layout
from rowstead.spec.software import Software

Table = Mapping[int, Mapping[int, float]]
"""A figure by dense features, then by sparse ones."""
BIG_BASIN_UNITS = 7.3
"""What Big Basin's nameplate power is worth in CPU servers."""
SAME = "For the same machines and sizes, software of 2020; the table below has the row of 256 dense features, too."
CPU, GPU = "predicted: CPU server with parameter servers", "predicted: Big Basin"


def _heat(key: str, title: str, words: str, table: Table, *, form: str = ".2f", **options: Any) -> Chart:
    """A heat map of the cells that the study prints, so that two of them show the same ones; the table below has all."""
    rows = [row for row in table if row in FIG10]
    values = [[table[row].get(column) for column in SPARSE] for row in rows]
    texts = [["" if value is None else _text(value, form) for value in row] for row in values]
    down, across = [f"{row:,}" for row in rows], [str(column) for column in SPARSE]
    hover = f"%{{y}} dense, %{{x}} sparse: %{{z:{form}}}<extra></extra>"
    cells = tuple((f"{row:,}", *(_text(of[column], form) for column in SPARSE)) for row, of in table.items())
    return Chart(
        key=key,
        title=title,
        words=words,
        traces=[heat_map(across, down, values, texts, **{"zmin": 0, "zmax": 6, "hovertemplate": hover, **options})],
        layout=layout(axis("sparse features", type="category"), axis("dense features", type="category")),
        table=TextTable("Ratio", ("dense features", *across), cells),
        height_rem=17,
    )


def _predicted(software: Software, key: str) -> dict[int, dict[int, float]]:
    """One figure of every cell of the sweep over features."""
    return {dense: {sparse: cell(dense, sparse, software)[key] for sparse in SPARSE} for dense in DENSE}


def _text(value: float, form: str) -> str:
    return format(value, form).replace("-", "−")


def _over_study(key: str, ours: Table, theirs: Table) -> Chart:
    """The prediction against the study, cell by cell."""
    change = {dense: {sparse: ours[dense][sparse] / row[sparse] - 1 for sparse in SPARSE} for dense, row in theirs.items()}
    words = "The prediction over the study's figure, less 1. Blue is above the study, orange below it."
    return _heat(key, "Predicted against the study", words, change, form="+.0%", colorscale="@against", zmin=-0.6, zmax=0.6)


def _off(ours: Table, theirs: Table) -> tuple[float, str]:
    """The mean error over the study's cells, and where it is largest in words."""
    errors = {(d, s): error([ours[d][s] / theirs[d][s]]) for d in theirs for s in SPARSE}
    (dense, sparse), most = max(errors.items(), key=lambda one: one[1])
    mean = error(ours[d][s] / theirs[d][s] for d in theirs for s in SPARSE)
    return mean, f"within {mean:.0%} on average, at worst {most:.0%} ({dense:,} dense, {sparse} sparse)"


def power(software: Software) -> Item:
    """Fig. 10 in power: what GPUs give over CPUs for their power, by dense and sparse features."""
    theirs = {
        dense: {sparse: one * NUM_CPU_SERVERS / BIG_BASIN_UNITS for sparse, one in row.items()} for dense, row in FIG10.items()
    }
    ours = _predicted(software, "gpu_over_cpu_efficiency")
    off, words = _off(ours, theirs)
    checks = Checks()
    checks.add(f"predicted ratios are {words}", off < 0.25)

    def below(table: Table) -> list[tuple[int, int]]:
        return [(d, s) for d in theirs for s in SPARSE if table[d][s] < 1]

    def named(cells: Sequence[tuple[int, int]]) -> str:
        return ", ".join(f"{d}/{s}" for d, s in cells) or "none"

    checks.add(
        f"CPUs give more for their power at {named(below(ours))} dense/sparse features of those that the study has, there at {named(below(theirs))}",
        below(ours) == below(theirs),
    )
    best = max(((value, d, s) for d, row in ours.items() for s, value in row.items()))
    checks.add(
        f"GPUs are furthest ahead, {best[0]:.1f}-fold, with {best[1]:,} dense and {best[2]} sparse features", best[1] >= 1024
    )
    around_one = {"colorscale": "@against", "zmin": 0, "zmax": 2}
    words_of_study = (
        f"Its ratio of throughput times {NUM_CPU_SERVERS} CPU servers over the {BIG_BASIN_UNITS} that Big Basin's power is worth: "
        "its own matrix to 0.006. Blue is where the GPUs are ahead."
    )
    words_of_ours = "For the same machines and sizes, software of 2020; colors as in the study's."
    return Item(
        key="fig10-power",
        title="Fig. 10: power efficiency of GPUs over CPUs",
        paper="Whether GPUs are worth their power depends on the model: with 64 dense and few sparse features CPUs give more for it, with many dense features the GPUs do by far.",
        differs=checks.words
        + " This machine has no GPU, so nothing of it can be measured here; power is that of nameplates, in the study as in ours, and no joule was measured.",
        verdict=checks.verdict,
        said=checks.said,
        figures=[
            _heat("fig10-power-paper", "The study", words_of_study, theirs, **around_one),
            _heat("fig10-power-predicted", "Predicted: ratio of samples per joule", words_of_ours, ours, **around_one),
        ],
        measured_words="no GPU at hand",
        predicted_words=f"ratios off by {off:.0%}",
    )


def dense_and_sparse(contents: Contents, software: Software) -> Item:
    """Fig. 10: throughput of GPUs over CPUs by dense and sparse features."""
    ours = _predicted(software, "gpu_over_cpu_throughput")
    measured = measured_of(contents, "fig10")
    figures = [
        _heat(
            "fig10-paper", "The study", "Throughput of one Big Basin over one CPU trainer with two parameter servers.", FIG10
        ),
        _heat("fig10-predicted", "Predicted: the same ratio", SAME, ours),
        _over_study("fig10-change", ours, FIG10),
    ]
    off, words = _off(ours, FIG10)
    checks = Checks()
    checks.add(f"predicted ratios are {words}", off < 0.25)
    faster = [value > 1 for row in ours.values() for value in row.values()]
    checks.add(f"the GPUs are faster in {sum(faster)} of {len(faster)} predicted cells", all(faster))
    for kind in ("cpu", "gpu"):
        speeds = _predicted(software, f"{kind}_samples_per_s")
        rows = [list(row.values()) for row in speeds.values()]
        lines = _falling([*rows, *zip(*rows, strict=True)])
        checks.add(f"predicted {kind.upper()} throughput falls along {sum(lines)} of {len(lines)} rows and columns", all(lines))
    if measured is not None and len(measured.axes) == 2:
        figures.append(renamed(charts_studies.draw_heat(measured)[0], "fig10-measured", "Measured here: samples/s"))
        table = measured.table(MEASURED)
        corner = (table[0][0], table[-1][-1])
        falls = corner[0] is not None and corner[1] is not None and corner[1] < corner[0]
        most, fewest = thousands(corner[1]), thousands(corner[0])
        checks.add(f"with the most features of both kinds this machine does {most} samples/s, with the fewest {fewest}", falls)
        for name, lines in (("sparse", _falling(table)), ("dense", _falling(list(zip(*table, strict=True))))):
            checks.add(f"here throughput falls along {name} features in {sum(lines)} of {len(lines)} rows", all(lines))
    return Item(
        key="fig10",
        title="Fig. 10: throughput over dense and sparse features",
        paper="Throughput falls as dense or sparse features are added, on CPU and on GPU. The GPUs are faster in every cell.",
        differs=checks.words,
        verdict=checks.verdict,
        said=checks.said,
        compared=[
            Compared(kind="Fig. 10: GPU over CPU", what=f"{d:,} dense, {s} sparse features", study=one, ours=ours[d][s])
            for d, row in FIG10.items()
            for s, one in row.items()
        ],
        figures=figures,
        measured_words=size_of(measured),
        predicted_words=f"ratios off by {off:.0%}",
    )


def _falling(table: Sequence[Sequence[float | None]]) -> list[bool]:
    rows = [[value for value in row if value is not None] for row in table]
    return [row == sorted(row, reverse=True) for row in rows]


def batch_size(contents: Contents, software: Software) -> Item:
    """Fig. 11: throughput over batch size."""
    batches = (100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 51200)
    work = suite_work(64, 4)
    cpu = {batch: on_cpu(work, software, batch_size=batch).samples_per_s for batch in batches}
    gpu = {batch: on_big_basin(work, software, batch_size=batch).samples_per_s for batch in batches}
    measured = measured_of(contents, "fig11")
    predicted = predicted_lines("fig11", "batch size", {CPU: cpu, GPU: gpu})
    checks = Checks()
    speeds = list(gpu.values())
    checks.add(
        f"predicted GPU throughput rises {speeds[3] / speeds[0]:.1f}-fold from batch 100 to 800", speeds[3] / speeds[0] > 4
    )
    checks.add(f"there the last doubling of the batch gives {speeds[-1] / speeds[-2] - 1:+.0%}", speeds[-1] / speeds[-2] < 1.3)
    best = max(cpu, key=cpu.__getitem__)
    checks.add(
        f"predicted CPU throughput is best at batch {best:,} and {1 - cpu[batches[-1]] / cpu[best]:.0%} lower at {batches[-1]:,}",
        best < batches[-1],
    )
    checks.add(
        f"the best batch is {best:,} on CPUs and {max(gpu, key=gpu.__getitem__):,} on GPUs",
        best != max(gpu, key=gpu.__getitem__),
    )
    if measured is not None:
        for name, values in _rows(measured, "batch size"):
            top = max(values, key=lambda one: one[1])
            rises = top[1] / values[0][1]
            checks.add(f"here, {name}, throughput rises {rises:.1f}-fold from batch {values[0][0]} to {top[0]}", rises > 1)
    return item_of(
        "fig11",
        "Fig. 11: batch size",
        "GPU throughput rises about linearly with the batch, then saturates; CPU throughput can get worse with large batches; the best batch differs between CPU and GPU and with the model.",
        checks,
        measured,
        predicted,
        in_short=f"CPU best at {best:,}",
    )


def _rows(study: Study, along: str) -> list[tuple[str, list[tuple[object, float]]]]:
    """The measured values along one axis, for each combination of the others, in words."""
    index = next((number for number, one in enumerate(study.axes) if one.name == along), None)
    if index is None:
        return []
    rows: dict[tuple[int, ...], list[tuple[object, float]]] = {}
    for one in sorted(study.series.get(MEASURED, ()), key=lambda one: one.position):
        others = tuple(where for number, where in enumerate(one.position) if number != index)
        rows.setdefault(others, []).append((charts_studies.words_of(study.axes[index].values[one.position[index]]), one.value))
    rest = [one for number, one in enumerate(study.axes) if number != index]
    return [
        (
            ", ".join(
                f"{one.name} {charts_studies.words_of(one.values[where])}" for one, where in zip(rest, others, strict=True)
            )
            or "for this model",
            values,
        )
        for others, values in rows.items()
        if len(values) > 1
    ]


def hash_size(contents: Contents, software: Software) -> Item:
    """Fig. 12: throughput over hash size."""
    sizes = (100_000, 1_000_000, 3_000_000, 5_000_000)
    works = {size: step_work(suite_model(1024, 64, num_rows=size)) for size in sizes}
    cpu = {size: on_cpu(work, software).samples_per_s for size, work in works.items()}
    on_gpus = {size: on_big_basin(work, software) for size, work in works.items()}
    gpu = {size: one.samples_per_s for size, one in on_gpus.items()}
    measured = measured_of(contents, "fig12")
    predicted = predicted_lines("fig12", "hash size", {CPU: cpu, GPU: gpu})
    checks = Checks()
    flat = max(cpu.values()) / min(cpu.values())
    checks.add(f"the largest predicted CPU throughput is {flat:.2f} times the least", flat < 1.1)
    counts = [one.setup.num_devices for one in on_gpus.values()]
    speeds = list(gpu.values())
    drops = all(after < before for before, after in itertools.pairwise(speeds))
    shown = ", ".join(
        f"{count} GPU{'s' if count > 1 else ''} {thousands(speed)}" for count, speed in zip(counts, speeds, strict=True)
    )
    checks.add(f"predicted throughput as the tables spread over GPUs is {shown}", drops)
    if measured is not None:
        values = line(measured)
        here = max(values) / min(values)
        checks.add(f"the largest throughput of this machine is {here:.2f} times the least", here < 1.3)
    return item_of(
        "fig12",
        "Fig. 12: hash size",
        "Throughput is flat on CPU; on the GPUs it drops as tables spread over more GPUs.",
        checks,
        measured,
        predicted,
        in_short=f"CPU flat within {flat - 1:.0%}",
    )


def mlp(contents: Contents, software: Software) -> Item:
    """Fig. 13: throughput over the size of the MLPs."""
    sizes = ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (1024,) * 3, (2048,) * 3)
    works = {size: step_work(suite_model(1024, 16, mlp=size)) for size in sizes}
    cpu = {name: on_cpu(work, software).samples_per_s for name, work in works.items()}
    gpu = {name: on_big_basin(work, software).samples_per_s for name, work in works.items()}
    measured = measured_of(contents, "fig13")
    predicted = predicted_lines("fig13", "MLP", {CPU: cpu, GPU: gpu})
    checks = Checks()
    for name, speeds in (("CPU", list(cpu.values())), ("GPU", list(gpu.values()))):
        checks.add(
            f"predicted {name} throughput at 256^3 is {speeds[2] / speeds[0]:.0%} of that at 64^2", speeds[2] / speeds[0] > 0.8
        )
    beyond = {name: list(of.values())[-1] / list(of.values())[2] for name, of in (("CPU", cpu), ("GPU", gpu))}
    checks.add(f"from 256^3 to 2048^3 CPU keeps {beyond['CPU']:.0%} and GPU {beyond['GPU']:.0%}", beyond["CPU"] < beyond["GPU"])
    if measured is not None:
        values = line(measured)
        checks.add(
            f"this machine keeps {values[-1] / values[0]:.0%} of its throughput from the smallest MLP to the largest",
            values[-1] < values[0],
        )
    return item_of(
        "fig13",
        "Fig. 13: MLP dimensions",
        "No significant drop up to 256^3; beyond it CPU drops more than GPU.",
        checks,
        measured,
        predicted,
        in_short=f"at 2048^3: CPU {beyond['CPU']:.0%}, GPU {beyond['GPU']:.0%} of 256^3",
    )


def placement_of_tables(contents: Contents, software: Software) -> Item:
    """Fig. 14: M2 with its tables in different memories."""
    names = {"device": "GPU memory", "host": "system memory", "remote": "remote servers"}
    found = placements(software)
    series = {
        f"predicted: {title}": {names[store]: speed for store, speed in found[machine].items()}
        for machine, title in (("bigbasin-32", "Big Basin"), ("zion-prototype", "Zion prototype"))
    }
    measured = measured_of(contents, "fig14")
    predicted = predicted_lines("fig14", "tables in", series)
    basin, zion = found["bigbasin-32"], found["zion-prototype"]
    checks = Checks()
    best = {name: max(of, key=of.__getitem__) for name, of in found.items()}
    checks.add(f"best on Big Basin is {names[best['bigbasin-32']]}", best["bigbasin-32"] == "device")
    lower = zion["device"] / basin["device"]
    checks.add(f"in GPU memory Zion has {lower:.0%} of its throughput (the study: far less)", lower < 0.5)
    ahead = zion["host"] / basin["host"]
    checks.add(
        f"best on Zion is {names[best['zion-prototype']]}, in which it has {ahead:.1f} times Big Basin's speed",
        best["zion-prototype"] == "host" and ahead > 1,
    )
    below = basin["device"] / basin["host"]
    checks.add(f"on Big Basin GPU memory is {below:.1f} times as fast as system memory (the study: 4)", 3 < below < 5.3)
    shares = [of["remote"] / max(of.values()) for of in (basin, zion)]
    checks.add(
        f"remote memory reaches {shares[0]:.0%} of the best on Big Basin and {shares[1]:.0%} on Zion, where it is {zion['remote'] / basin['remote']:.1f} times as fast",
        max(shares) < 1 and zion["remote"] > basin["remote"],
    )
    note = ""
    if measured is not None:
        order = sorted(
            (
                (one.value, charts_studies.words_of(measured.axes[0].values[one.position[0]]))
                for one in measured.series[MEASURED]
            ),
            reverse=True,
        )
        note = (
            " This machine has no GPU: measured here are the same placements with a CPU, "
            + ", ".join(f"{name} {thousands(value)}" for value, name in order)
            + " samples/s."
        )
    return item_of(
        "fig14",
        "Fig. 14: placement of M2's tables",
        "In GPU memory Big Basin is best and Zion far lower, as its GPUs have no direct path; in system memory Zion is best, and Big Basin 4 times below its own GPU-memory figure; remote memory beats neither on either, with Zion slightly ahead.",
        checks,
        measured,
        predicted,
        in_short=f"GPU memory {below:.1f} times system memory on Big Basin",
        note=note,
        compared=[Compared(kind="Fig. 14: placement", what="Big Basin, GPU over system memory", study=4.0, ours=below)],
    )
