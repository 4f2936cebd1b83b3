"""The figures and tables of the HPCA 2021 study that have numbers, each with ours beside it: what `benchmarks.paper_html` shows."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from benchmarks.paper import TABLE3, fig1, on_cpu, production
from benchmarks.paper_item import Checks, Compared, Item, line, measured_of, renamed, size_of
from benchmarks.paper_page import PAPER_EFFICIENCY
from benchmarks.paper_sweeps import batch_size, dense_and_sparse, hash_size, mlp, placement_of_tables, power
from rowstead.plan.schedule import busy_s
from rowstead.plan.work import step_work
from rowstead.records.store import Contents, StoreEntry
from rowstead.records.studies import newest, quality_effects
from rowstead.report import charts_populations, charts_searches, charts_studies, charts_tables
from rowstead.report.theme import Chart, TextTable, axis, bars, layout, thinned, violin
from rowstead.spec.catalogue import HERE, load_machine
from rowstead.spec.run import load_recipe
from rowstead.spec.sizes import format_bytes
from rowstead.spec.software import Software
from rowstead.spec.sweep import load_sweep
from rowstead.study.points import points_of


def items(contents: Contents, software: Software) -> list[Item]:
    """All of them, in the order of the study."""
    return [
        platform_throughput(software),
        platforms(),
        models(),
        use(contents, software),
        features(),
        servers(contents),
        dense_and_sparse(contents, software),
        power(software),
        batch_size(contents, software),
        hash_size(contents, software),
        mlp(contents, software),
        placement_of_tables(contents, software),
        production_models(software),
        quality(contents),
    ]


def platform_throughput(software: Software) -> Item:
    """Fig. 1: throughput of the production models on the CPU system, Big Basin and Zion, each with its placement."""
    found = fig1(software)
    checks = Checks()
    for name, speeds in found.items():
        cpu, basin, zion = speeds.values()
        checks.add(
            f"{name.upper()} rises {basin / cpu:.1f}-fold from one CPU trainer to Big Basin and {zion / basin:.2f}-fold from there to Zion",
            cpu < basin < zion,
        )
    gains = {name: speeds["zion-prototype"] / speeds["cpu-2s"] for name, speeds in found.items()}
    shown = ", ".join(f"{name.upper()} {gain:.1f}-fold" for name, gain in gains.items())
    checks.add(f"from CPU to Zion the gain is {shown}", min(gains, key=gains.__getitem__) == "m3")
    names = {"cpu-2s": "CPU server", "bigbasin-32": "Big Basin", "zion-prototype": "Zion prototype"}
    traces = [
        bars(
            title,
            [one.upper() for one in found],
            [speeds[machine] / speeds["cpu-2s"] for speeds in found.values()],
            index,
            hovertemplate="%{x}: %{y:.1f}<extra>" + title + "</extra>",
        )
        for index, (machine, title) in enumerate(names.items())
    ]
    rows = tuple(
        (
            name.upper(),
            *(f"{speeds[machine]:,.0f}" for machine in names),
            f"{speeds['zion-prototype'] / speeds['bigbasin-32']:.2f}",
        )
        for name, speeds in found.items()
    )
    return Item(
        key="fig1",
        title="Fig. 1: relative throughput on three platforms",
        paper="Throughput rises from CPU servers to Big Basin to Zion; by how much depends on the model, and M3 gains least, because of its memory. On Big Basin M1 and M2 are in GPU memory and M3 on remote CPUs; on Zion all three are in system memory. No numbers are printed.",
        differs=checks.words,
        verdict=checks.verdict,
        said=checks.said,
        figures=[
            Chart(
                key="fig1",
                title="Predicted: throughput over one CPU trainer with its parameter servers",
                words="Each model with its placement and the batch of Table III, software of 2020.",
                traces=traces,
                layout=layout(axis("", type="category"), axis("times one CPU trainer", rangemode="tozero"), barmode="group"),
            )
        ],
        tables=[TextTable("Samples per second, predicted", ("model", *names.values(), "Zion over Big Basin"), rows)],
        measured_words="no such machines at hand",
        predicted_words=", ".join(
            f"{name.upper()} {speeds['zion-prototype'] / speeds['bigbasin-32']:.2f} Zion over Big Basin"
            for name, speeds in found.items()
        ),
    )


def platforms() -> Item:
    """The study's table of platforms, and the machines that stand for them."""
    theirs = {
        "cpu-2s": ("2", "256 GB", "", "", "", "25 Gb/s", "1"),
        "bigbasin-32": ("2", "256 GB", "8 V100", "16 or 32 GB, 900 GB/s", "15.7 TFLOP/s", "100 Gb/s", "7.3"),
        "zion-prototype": (
            "8",
            "about 2 TB, 1 TB/s",
            "8 V100, no direct path",
            "32 GB",
            "15.7 TFLOP/s",
            "4 x 100 Gb/s",
            "not given",
        ),
    }
    unit = load_machine("cpu-2s").power
    assert unit is not None
    rows = []
    for name, facts in theirs.items():
        machine = load_machine(name)
        gpus, host = machine.accelerators, machine.host.memory
        assert machine.network is not None
        of_gpus = ("", "", "")
        if gpus is not None:
            direct = "" if gpus.peer_link is not None and gpus.peer_link.bandwidth_bytes_per_s else ", no direct path"
            memory = f"{format_bytes(gpus.memory.capacity_bytes)}, {format_bytes(gpus.memory.bandwidth_bytes_per_s)}/s"
            of_gpus = (f"{gpus.num}{direct}", memory, f"{gpus.compute.fp32_flops_per_s / 1e12:.1f} TFLOP/s")
        ours = (
            str(machine.host.num_sockets), f"{format_bytes(host.capacity_bytes)}, {format_bytes(host.bandwidth_bytes_per_s)}/s", *of_gpus,
            f"{8 * machine.network.bandwidth_bytes_per_s / 1e9:.0f} Gb/s",
            "not given" if machine.power is None else f"{machine.power.nameplate_watts / unit.nameplate_watts:.1f}",
        )  # fmt: skip
        rows += [(f"{name}, the study", *facts), (f"{name}, ours", *ours)]
    headings = ("platform", "sockets", "system memory", "GPUs", "memory of each", "FP32 of each", "network", "power, units")
    return Item(
        key="platforms",
        title="Table I: the platforms",
        paper="A dual-socket CPU server, Big Basin with eight V100 on NVLink, and a Zion prototype with eight sockets and eight V100 that have no direct path to each other.",
        differs="The machines are described by these facts and by data sheets; where neither says anything, as about random access, a share is assumed, and the file says so.",
        verdict="by construction",
        tables=[TextTable("Platforms", headings, tuple(rows))],
        measured_words="not at hand",
        predicted_words="described as machines",
    )


def models() -> Item:
    """The study's table of models, and the recipes that stand for them."""
    theirs = {
        "m1": ("30", "800", "28", "5.7 million", "512", "512-512-512", "tens of GB"),
        "m2": ("13", "504", "17", "7.3 million", "1024", "1024-1024-512", "tens of GB"),
        "m3": ("127", "809", "49", "3.7 million", "512", "512-256-512-256-512", "hundreds of GB"),
    }
    rows = []
    for name, facts in theirs.items():
        work = step_work(load_recipe(name))
        model = load_recipe(name).model
        ours = (
            str(len(work.tables)), f"{work.num_dense:,}", f"{work.ids_per_sample / len(work.tables):.0f}",
            f"{statistics.fmean(table.num_rows for table in work.tables) / 1e6:.1f} million", "-".join(map(str, model.bottom)),
            "-".join(map(str, model.top)), format_bytes(work.table_bytes),
        )  # fmt: skip
        rows += [(f"{name.upper()}, the study", *facts), (f"{name.upper()}, recipe {name}", *ours)]
    headings = (
        "model",
        "sparse features",
        "dense features",
        "look-ups per table",
        "mean hash size",
        "bottom MLP",
        "top MLP",
        "tables",
    )
    return Item(
        key="models",
        title="Table II: the three production models",
        paper="Three models that differ in features, look-ups and MLPs, with tables of tens to hundreds of GB.",
        differs="The study does not give the width of rows, nor the hash size of each table: the recipes take 64 (M3: 128) and sizes from 30 to 20 million with the means of the study, drawn once.",
        verdict="by construction",
        tables=[TextTable("Models", headings, tuple(rows))],
        measured_words="shipped as recipes",
        predicted_words="",
    )


@dataclass(frozen=True, kw_only=True)
class Busy:
    """How busy trainers and sparse servers are, over a population of models, as predicted."""

    trainers: tuple[float, ...]
    servers: tuple[float, ...]


def busy(software: Software, most: int = 100) -> Busy:
    """Shares of a step for which each kind of server works, over the whole population of the sweep `fig5`."""
    trainers, servers = [], []
    for point in points_of(load_sweep("fig5"))[:most]:
        if point.spec is None:
            continue
        predicted = on_cpu(step_work(point.spec), software)
        used = busy_s(predicted.tasks)
        trainers.append(min(1.0, used.get("host cores", 0.0) / predicted.step_s))
        servers.append(min(1.0, used.get("sparse servers", 0.0) / predicted.step_s))
    return Busy(trainers=tuple(trainers), servers=tuple(servers))


def use(contents: Contents, software: Software) -> Item:
    """Fig. 5: how much of their machines runs use."""
    found = busy(software)
    entries = [entry for name in ("fig5", "fig5-quick") for entry in newest(contents.of(study=name, kind="measured"))]
    measured = charts_populations.uses(entries)
    figures = charts_populations.draw_uses("Measured here", measured)
    shares = {"trainers' cores": found.trainers, "sparse servers": found.servers}
    traces = [
        violin(name, values, index, hovertemplate="%{y:.0%}<extra>" + name + "</extra>")
        for index, (name, values) in enumerate(shares.items())
    ]
    figures.append(
        Chart(
            key="fig5-predicted",
            title="Predicted for the study's machines",
            words="Share of a step for which a CPU trainer's cores and its sparse server work, over a population of models.",
            traces=traces,
            layout=layout(axis("", type="category"), axis("busy", tickformat=".0%", rangemode="tozero"), showlegend=False),
        )
    )
    checks = Checks()
    mean_t, mean_s = statistics.fmean(found.trainers), statistics.fmean(found.servers)
    spread_t, spread_s = statistics.stdev(found.trainers) / mean_t, statistics.stdev(found.servers) / mean_s
    checks.add(
        f"in the prediction trainers are busy for {mean_t:.0%} of a step, sparse servers for {mean_s:.0%}", mean_t > mean_s
    )
    checks.add(
        f"over the population that is spread by {spread_t:.0%} of its mean for trainers and by {spread_s:.0%} for servers",
        spread_s > spread_t,
    )
    here, note = "not measured", ""
    of_role = {one.role: one.amounts for one in measured if one.resource is charts_populations.CPU}
    if "trainers" in of_role and "sparse servers" in of_role:
        real_t, real_s = statistics.fmean(of_role["trainers"]), statistics.fmean(of_role["sparse servers"])
        checks.add(f"here trainers use {real_t:.0%} of a core and sparse servers {real_s:.0%}", real_t > real_s)
        here = f"{len(of_role['trainers'])} fleets: trainers {real_t:.0%} of a core, servers {real_s:.0%}"
        note = " Here all roles share one small machine, and start-up counts, so that levels say little."
    elif measured:
        here = ", ".join(f"{role} {statistics.fmean(cores):.0%} of a core" for role, cores in of_role.items())
    return Item(
        key="fig5",
        title="Fig. 5: use of trainers and parameter servers",
        paper="Over runs of one model type, trainers show high CPU and memory-bandwidth use with little spread; parameter servers a lower mean and a wide, long-tailed spread.",
        differs=checks.words + note,
        verdict=checks.verdict,
        said=checks.said,
        figures=figures,
        measured_words=here,
        predicted_words=f"trainers {mean_t:.0%}, servers {mean_s:.0%}",
    )


def features() -> Item:
    """Figs. 6 and 7: hash sizes and lengths of features."""
    sizes = [(name, charts_tables.feature_sizes(load_recipe(name))) for name in ("m1", "m2", "m3")]
    criteo = ("mlperf", charts_tables.feature_sizes(load_recipe("mlperf")))
    figures = [
        one
        for one in (charts_tables.draw_sizes([*sizes, criteo]), charts_tables.draw_lengths([*sizes, criteo]))
        if one is not None
    ]
    spread = {name: max(one.ids) / min(one.ids) for name, one in sizes}
    return Item(
        key="fig6-7",
        title="Figs. 6 and 7: hash sizes and lengths",
        paper="Hash sizes from 30 to 20 million, with means of 5.7, 7.3 and 3.7 million; mean look-ups follow a power law over features; the most read tables are often small, so size and traffic go together badly.",
        differs="The recipes of M1 to M3 have hash sizes and lengths that were drawn once, independently, from such distributions (the longest mean length over the shortest: "
        + ", ".join(f"{name.upper()} {ratio:.1f}" for name, ratio in spread.items())
        + "). The public MLPerf model, shown beside them, has sizes from 3 to 40 million rows as the study describes.",
        verdict="by construction",
        figures=figures,
        measured_words="drawn from recipes",
        predicted_words="",
    )


def servers(contents: Contents) -> Item:
    """Fig. 9: how many servers runs ask for."""
    entries = [
        entry
        for name in ("fig9", "fig9-quick")
        for entry in newest(contents.of(study=name, kind="predicted"))
        if entry.record.machine.get("name") != HERE and entry.failure is None
    ]
    whole = [entry for entry in entries if entry.study == "fig9"]
    chosen: list[StoreEntry] = whole or entries
    counts = {one.kind: one for one in charts_populations.server_counts(chosen)}
    figure = charts_populations.draw_counts("fig9", list(counts.values()))
    checks = Checks()
    trainers, sparse = counts.get("trainers"), counts.get("sparse parameter servers")
    if trainers is not None:
        checks.add(f"{trainers.largest_share:.0%} of the models take the same number of trainers", trainers.largest_share > 0.4)
    if trainers is not None and sparse is not None:
        wider = len(sparse.counts) > len(trainers.counts)
        checks.add(
            f"{len(trainers.counts)} different numbers of trainers occur, and {len(sparse.counts)} of sparse servers",
            wider,
        )
    elif trainers is not None:
        checks.add("no model takes sparse servers: the tables fit the trainers themselves", False)
    return Item(
        key="fig9",
        title="Fig. 9: numbers of servers",
        paper="Over a month, more than 40 % of the workflows use the same number of trainers, while numbers of parameter servers vary widely, since memory changes as engineers try features.",
        differs=checks.words if checks.said else "The population was not predicted: run the sweep fig9.",
        verdict=checks.verdict if checks.said else "not measured",
        said=checks.said,
        figures=[figure] if figure is not None else [],
        measured_words="a fleet of this size is not at hand",
        predicted_words=f"{len(chosen):,} models" if chosen else "",
    )


def production_models(software: Software) -> Item:
    """Table III: the production models on CPU fleets and on one Big Basin."""
    rows, ratios, efficiencies = [], {}, {}
    for name, paper in TABLE3.items():
        cpu, gpu = production(name, software)
        assert cpu.watts is not None
        assert gpu.watts is not None
        ratios[name] = gpu.samples_per_s / cpu.samples_per_s
        efficiencies[name] = ratios[name] * cpu.watts / gpu.watts
        rows.append(
            (
                name.upper(), f"{ratios[name]:.2f}", f"{paper}", f"{efficiencies[name]:.2f}", f"{PAPER_EFFICIENCY[name]}",
                cpu.bottlenecks[0].resource, gpu.bottlenecks[0].resource,
            )
        )  # fmt: skip
    shown = [name.upper() for name in TABLE3]
    pairs = (
        ("throughput, the study", list(TABLE3.values()), 7), ("throughput, predicted", list(ratios.values()), 0),
        ("efficiency, the study", list(PAPER_EFFICIENCY.values()), 4), ("efficiency, predicted", list(efficiencies.values()), 1),
    )  # fmt: skip
    traces = [
        bars(name, shown, values, index, hovertemplate="%{x}: %{y:.2f}<extra>" + name + "</extra>")
        for name, values, index in pairs
    ]
    figure = Chart(
        key="table3",
        title="One Big Basin over the CPU fleet",
        words="Throughput and power efficiency; above 1 the GPUs are ahead.",
        traces=traces,
        layout=layout(axis("", type="category"), axis("ratio", rangemode="tozero"), barmode="group"),
    )
    headings = (
        "model",
        "ratio, ours",
        "the study",
        "efficiency, ours",
        "the study",
        "bottleneck of the CPU fleet",
        "of Big Basin",
    )
    checks = Checks()
    for name, paper in TABLE3.items():
        close = abs(ratios[name] / paper - 1) < 0.15
        same = (ratios[name] > 1) == (paper > 1)
        checks.add(
            f"{name.upper()} at {ratios[name]:.2f} (the study: {paper})" + ("" if same else ", on the other side of 1"),
            close and same,
        )
    return Item(
        key="table3",
        title="Table III: the production models",
        paper="One Big Basin against the CPU fleet of each model: 2.25 times its throughput for M1, 0.85 for M2, 0.67 for M3, whose tables do not fit GPU memory; in power efficiency 4.3, 2.8 and 0.43.",
        differs=checks.words + " The study's efficiency of M2 does not follow from its 36 servers, which give 4.2.",
        verdict=checks.verdict,
        compared=[
            Compared(kind=f"Table III: {what}", what=name.upper(), study=theirs[name], ours=ours[name])
            for what, theirs, ours in (("throughput", TABLE3, ratios), ("efficiency", PAPER_EFFICIENCY, efficiencies))
            for name in TABLE3
        ],
        said=checks.said,
        figures=[figure],
        tables=[TextTable("Production models", headings, tuple(rows))],
        measured_words="no such fleet at hand",
        predicted_words=", ".join(f"{name.upper()} {ratio:.2f}" for name, ratio in ratios.items()),
    )


def quality(contents: Contents) -> Item:
    """Fig. 15 and the study of quality: what batch size and other settings do to NE."""
    measured = measured_of(contents, "fig15", "ne_expected") or measured_of(contents, "fig15", "ne")
    figures: list[Chart] = []
    checks = Checks()
    if measured is not None:
        figures.append(renamed(charts_studies.draw_study(measured)[0], "fig15-measured", "Measured here: NE over batch size"))
        values = line(measured)
        gaps = [100 * (value / values[0] - 1) for value in values]
        names = [charts_studies.words_of(value) for value in measured.axes[0].values]
        checks.add(
            "with settings unchanged NE against the smallest batch is "
            + ", ".join(f"{gap:+.2f} % at {name}" for gap, name in zip(gaps[1:], names[1:], strict=True)),
            gaps[-1] > 0.1,
        )
        grows = [after > before for before, after in itertools.pairwise(gaps)]
        checks.add(f"the gap grows in {sum(grows)} of {len(grows)} steps to a larger batch", all(grows))
    words = []
    for name, source in contents.studies.items():
        if source != "quality":
            continue
        entries = contents.of(study=name, source="quality")
        figure = charts_searches.draw_effects(name, entries)
        figures += [figure] if figure is not None else []
        effects = [one for one in quality_effects(entries) if one.verdict in ("regression", "better", "within")]
        words += [
            f"{one.axis} {charts_studies.words_of(one.value)} {100 * (one.change or 0):+.2f} % ({charts_searches.WORDS[one.verdict]})"
            for one in thinned(effects, 12)
        ]
    study = f" In the quality study over paired seeds: {'; '.join(words)}." if words else ""
    return Item(
        key="fig15",
        title="Fig. 15: quality over batch size",
        paper="With manual tuning the loss gap against the CPU run grows with the batch, 0.1 to 0.2 %; a regression of 0.1 % is not tolerable. After automatic re-tuning the GPU set-ups were better than CPU, by 0.2 % (M1) and 0.1 % (M2).",
        differs=(checks.words if checks.said else "Not measured: run the sweep fig15.")
        + study
        + " Here the log is synthetic and small, so that gaps are larger; re-tuning is `rowstead tune --retune-for`, and no part of this page.",
        verdict=checks.verdict if checks.said else "not measured",
        said=checks.said,
        figures=figures,
        measured_words=size_of(measured),
        predicted_words="quality is not predicted",
    )
