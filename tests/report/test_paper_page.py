"""The page of the study: every item has text and figures that agree, with and without measurements."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

from benchmarks.paper_html import commands, page, study_against_prediction
from benchmarks.paper_item import Checks, Item
from benchmarks.paper_items import items
from rowstead.records.store import Contents, RunStore, StoreEntry
from rowstead.spec.catalogue import load_software
from rowstead.spec.record import Record
from tests.report.test_describe import Reader

NOTHING = Contents(entries=(), num_bad_lines=0)


def entry(study: str, axes: dict[str, object], **figures: float) -> StoreEntry:
    record = Record(
        kind="measured",
        name="suite",
        spec_digest="d",
        date="2026-11-15",
        machine={"cpu": "Some CPU", "num_cores": 2},
        figures=figures,
    )
    return StoreEntry(record=record, source="sweep", study=study, point=str(axes), axes=axes)


def measured(root: Path) -> Contents:
    """A store in which this machine behaves as in the study, except for hash sizes."""
    store = RunStore(root)
    store.add(
        *(
            entry("fig10-quick", {"dense features": d, "sparse features": s}, samples_per_s=1e6 / d / s)
            for d in (16, 64, 256)
            for s in (2, 8, 32)
        )
    )
    store.add(
        *(
            entry("fig11-quick", {"dense features": d, "batch size": b}, samples_per_s=1e3 * b / (b + 100))
            for d in (16, 64)
            for b in (64, 256, 1024)
        )
    )
    store.add(*(entry("fig12-quick", {"hash size": h}, samples_per_s=1e9 / h) for h in (1000, 10_000)))
    store.add(*(entry("fig13-quick", {"MLP": [w, w]}, samples_per_s=1e5 / w) for w in (16, 64)))
    store.add(
        *(
            entry("fig14-quick", {"tables in": memory}, samples_per_s=float(len(memory)))
            for memory in ("device memory", "files on SSD")
        )
    )
    store.add(
        *(
            entry("fig15-quick", {"batch size": b, "seed": s}, ne_expected=0.7 + b / 1e6 + s / 1e5)
            for b in (256, 4096, 16384)
            for s in (1, 2, 3)
        )
    )
    store.add(
        *(
            entry(
                "fig5-quick",
                {"a": i, "b": -i},
                samples_per_s=1.0,
                train_s=10.0,
                trainer_cpu_s=5.0,
                sparse_cpu_s=2.0,
                cpu_share_mean=0.01,
            )
            for i in range(6)
        )
    )
    return store.read()


@pytest.fixture(scope="module")
def of_nothing() -> list[Item]:
    return items(NOTHING, load_software("operators-2020"))


def test_every_item_has_text_and_figures_without_measurements(of_nothing: list[Item]) -> None:
    assert [item.key for item in of_nothing] == [
        "fig1", "platforms", "models", "fig5", "fig6-7", "fig9", "fig10", "fig10-power", "fig11", "fig12", "fig13", "fig14", "table3", "fig15",
    ]  # fmt: skip
    for item in of_nothing:
        assert item.paper, item.key
        assert item.differs, item.key
        assert item.figures or item.tables or "not measured" in (item.verdict, item.measured_words), item.key
    assert {item.key for item in of_nothing if item.verdict == "not measured"} == {"fig9", "fig15"}


def test_the_power_of_gpus_is_set_beside_the_studys(of_nothing: list[Item]) -> None:
    item = next(item for item in of_nothing if item.key == "fig10-power")
    theirs, ours = (figure.traces[0]["z"] for figure in item.figures)
    assert theirs[0] == pytest.approx([0.79, 0.99, 1.47, 1.04], abs=0.006)
    assert [len(theirs), len(ours)] == [3, 3]  # the same cells
    assert (item.figures[0].traces[0]["zmin"], item.figures[0].traces[0]["zmax"]) == (0, 2)
    assert item.figures[1].table is not None
    assert len(item.figures[1].table.rows) == 4  # with the row that the study's figures leave out
    assert "64/4" in item.differs
    assert "no joule was measured" in item.differs


def test_the_platforms_are_those_of_the_study(of_nothing: list[Item]) -> None:
    (table,) = next(item for item in of_nothing if item.key == "platforms").tables
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["bigbasin-32, ours"][-2:] == rows["bigbasin-32, the study"][-2:] == ("100 Gb/s", "7.3")
    assert "no direct path" in rows["zion-prototype, ours"][2]


def test_measurements_are_on_the_page_and_judged(tmp_path: Path) -> None:
    found = {item.key: item for item in items(measured(tmp_path), load_software("operators-2020"))}
    assert found["fig10"].measured_words == "9 points"
    assert "falls along sparse features in 3 of 3 rows" in found["fig10"].differs
    assert "10.00 times the least" in found["fig12"].differs
    assert found["fig12"].differs.startswith("Not as in the study")
    assert "+2.30 % at 16,384" in found["fig15"].differs
    assert "trainers 50% of a core, servers 20%" in found["fig5"].measured_words
    assert "files on SSD" in found["fig14"].differs


def test_an_agreement_is_claimed_only_where_it_holds() -> None:
    checks = Checks()
    checks.add("this holds", True)
    checks.add("that does not", False)
    assert checks.verdict == "partly: 1 of 2"
    assert checks.words == "Not as in the study: that does not. As in the study: this holds."


def test_the_page_is_complete_and_fetches_nothing(tmp_path: Path) -> None:
    text = page(measured(tmp_path))
    found = Reader(text)
    assert "2 cores of Some CPU" in text
    assert not [tag for tag, attributes in found.tags if "src" in attributes]
    assert len(text) < 20e6
    assert text.count("<figure>") > 15


def test_parts_can_be_run_separately(tmp_path: Path) -> None:
    assert [one.words[:3] for one in commands(["fig10"], tmp_path)][1:] == [("sweep", "fig10", "--quick")]
    assert [one.words[-3:-2] for one in commands(["fig9"], tmp_path)][1:] == [("--quick",), ("--predict-only",)]
    assert commands(["quality"], tmp_path)[0].words[0] == "quality"
    assert commands(["fig10"], tmp_path)[0].words == ("calibrate", "--out", str(tmp_path / "here.yaml"))
    (tmp_path / "here.yaml").touch()
    assert [one.name for one in commands(["fig10"], tmp_path)] == ["fig10"]


def test_fig1_is_the_throughput_of_three_models_on_three_platforms(of_nothing: list[Item]) -> None:
    item = next(item for item in of_nothing if item.key == "fig1")
    assert "relative throughput" in item.title
    assert [trace["name"] for trace in item.figures[0].traces] == ["CPU server", "Big Basin", "Zion prototype"]
    assert [row[0] for row in item.tables[0].rows] == ["M1", "M2", "M3"]


def test_titles_number_each_figure_and_table_as_the_study_does(of_nothing: list[Item]) -> None:
    titles = [item.title.partition(":")[0] for item in of_nothing]
    assert titles == [
        "Fig. 1", "Table I", "Table II", "Fig. 5", "Figs. 6 and 7", "Fig. 9", "Fig. 10", "Fig. 10", "Fig. 11", "Fig. 12", "Fig. 13",
        "Fig. 14", "Table III", "Fig. 15",
    ]  # fmt: skip


def test_the_page_counts_what_holds_and_lists_what_does_not(of_nothing: list[Item]) -> None:
    said = [holds for item in of_nothing for _, holds in item.said]
    assert said
    text = page(NOTHING)
    assert (
        f"Of {len(said)} statements of the study that can be checked, {sum(said)} hold of our figures and {len(said) - sum(said)} do not."
        in text
    )
    for item in of_nothing:
        for statement, holds in item.said:
            assert holds or html.escape(statement) in text, statement


def test_each_figure_has_a_badge_with_its_verdict(tmp_path: Path) -> None:
    text = page(measured(tmp_path))
    found = {item.key: item.verdict for item in items(measured(tmp_path), load_software("operators-2020"))}
    kinds = {"yes": "good", "no": "bad", "by construction": "none", "not measured": "none"}
    for key, verdict in found.items():
        badge = f'<span class="verdict {kinds.get(verdict, "mixed")}">'
        assert badge in text.partition(f'<a class="card" href="#{key}">')[2].partition("</a>")[0], key
        assert badge in text.partition(f'<section id="{key}">')[2].partition("</h2>")[0], key


def test_the_first_chart_sets_every_printed_figure_against_its_prediction(of_nothing: list[Item]) -> None:
    compared = [one for item in of_nothing for one in item.compared]
    assert len(compared) == 12 + 1 + 3 + 3  # Fig. 10, Fig. 14, and Table III twice
    chart = study_against_prediction(of_nothing)
    drawn = [(x, y) for trace in chart.traces[1:] for x, y in zip(trace["x"], trace["y"], strict=True)]
    assert sorted(drawn) == sorted((one.study, one.ours) for one in compared)
    assert chart.table is not None
    assert len(chart.table.rows) == len(compared)


def test_a_measured_grid_is_drawn_over_the_axis_of_the_prediction(tmp_path: Path) -> None:
    item = next(one for one in items(measured(tmp_path), load_software("operators-2020")) if one.key == "fig11")
    here, predicted = item.figures
    assert here.layout["xaxis"]["title"]["text"] == predicted.layout["xaxis"]["title"]["text"] == "batch size"
    assert [trace["name"] for trace in here.traces] == ["measured here, dense features 16", "measured here, dense features 64"]
    assert here.traces[0]["x"] == [64, 256, 1024]
