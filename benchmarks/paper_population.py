"""Those figures and tables of the HPCA 2021 study that describe its models and runs: features, tables, use of machines, numbers of servers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.paper import on_cpu
from benchmarks.paper_item import Checks, Item
from rowstead.plan.schedule import busy_s
from rowstead.plan.work import step_work
from rowstead.records.store import Contents, StoreEntry
from rowstead.records.studies import newest
from rowstead.report import charts_populations, charts_tables
from rowstead.report.theme import Chart, TextTable, axis, layout, violin
from rowstead.spec.catalogue import HERE
from rowstead.spec.run import load_recipe
from rowstead.spec.sizes import format_bytes
from rowstead.spec.software import Software
from rowstead.spec.sweep import load_sweep
from rowstead.study.points import points_of


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
