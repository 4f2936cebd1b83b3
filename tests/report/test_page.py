"""The report: complete, offline, small, and safe with any name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from rowstead.records.events import EventLog
from rowstead.records.run_folder import RunFolder
from rowstead.records.store import RunStore, StoreEntry
from rowstead.report.html import table_html
from rowstead.report.inputs import gather
from rowstead.report.page import page_from, report_page, sections_of
from rowstead.report.theme import TextTable
from rowstead.spec.errors import RowsteadError
from rowstead.spec.record import Record
from rowstead.spec.run import load_recipe
from tests.report.test_describe import Reader

EVIL = (
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    '"><svg/onload=window.hacked=1>',
    "' onmouseover='window.hacked=1",
    '<a href="javascript:window.hacked=1">x</a>',
    "%{customdata}<b>bold</b>{{7*7}}${window.hacked=1}",
    "x" * 20_000,
    "\u2028\u2029\u202eright to left \U0001f9e8 ½ नमस्ते",
    "@0",
    "__proto__",
)


def a_store(root: Path, names: Sequence[str] = EVIL) -> Path:
    """A store with runs, a sweep with predictions, a search and a quality study, all with hostile names."""
    store = RunStore(root)
    folder = RunFolder.create(root, "plain")
    folder.write_spec(load_recipe("quickstart"))
    folder.write_record(_record("plain", 5e4))
    for index, name in enumerate(names):
        study = name
        for x in (1, 2, 3):
            for y in (1, 2, 3):
                axes = {name: x, "b" + name: y}
                store.add(
                    StoreEntry(record=_record(name, 1000.0 * x * y), source="sweep", study=study, point=f"{x}-{y}", axes=axes),
                    StoreEntry(
                        record=_record(name, 900.0 * x * y, "predicted", "here"),
                        source="sweep", study=study, point=f"{x}-{y}", axes=axes,
                    ),
                    StoreEntry(
                        record=_record(name, 99.0 * x, "predicted", name), source="sweep", study=study, point=f"{x}-{y}", axes=axes
                    ),
                )  # fmt: skip
        for number in range(4):
            axes = {name: index + number}
            failure = name if number == 3 else None
            store.add(
                StoreEntry(
                    record=_record(name, 1.0 + number, trial=number),
                    source="trial",
                    study="t" + study,
                    axes=axes,
                    failure=failure,
                )
            )
        for axes in ({"axis": "baseline", "value": None}, {"axis": name, "value": name}):
            for seed in (1, 2):
                store.add(StoreEntry(record=_record(name, 1.0), source="quality", study="q" + study, axes=axes, seed=seed))
    return root


def _record(name: str, speed: float, kind: str = "measured", machine: str | None = None, *, trial: int = 0) -> Record:
    figures = {"samples_per_s": speed, "ne": 0.7, "objective": 0.7, "nameplate_watts": 500.0, "num_steps": 10, "forward_s": 1.0}
    figures["trial_number"] = trial
    facts: dict[str, str | int | float] = {} if machine is None else {"name": machine}
    return Record(
        kind=kind,  # type: ignore[arg-type]
        name=name,
        spec_digest="d",
        date="2026-11-15T12:00:00+00:00",
        machine=facts,
        figures=figures,
    )


def test_hostile_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    text = report_page([a_store(tmp_path)], title=EVIL[0])
    found = Reader(text)
    assert not [tag for tag, _ in found.tags if tag in ("img", "svg", "iframe", "object", "link", "base")]
    assert [tag for tag, _ in found.tags].count("script") == 2
    for _, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert str(attributes.get("href") or "#").startswith("#")
    assert EVIL[1] in " ".join(found.words)
    assert len(text) < 20e6


def test_every_section_is_there_and_every_figure_has_data(tmp_path: Path) -> None:
    sections = sections_of(gather([a_store(tmp_path)]))
    titles = [section.title for section in sections]
    for wanted in ("Overview", "Steps and time", "Predicted against measured", "Features and tables", "Efficiency per watt"):
        assert wanted in titles
    figures = [figure for section in sections for figure in section.charts]
    assert len(figures) > 50
    for figure in figures:
        assert figure.traces, figure.title
        assert figure.words, figure.title
        json.dumps(figure.plain(), allow_nan=False)


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    found = Reader(report_page([a_store(tmp_path)]))
    policy = next(str(a["content"]) for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert not [tag for tag, attributes in found.tags if "src" in attributes]


def test_broken_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    a_store(tmp_path)
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'{"kind": "measured", "name": "torn\n\xff\xfe\n[]\n{"kind": "measured"')
    text = report_page([tmp_path])
    assert "4 lines could not be read" in text


def test_a_run_by_folder_by_name_and_in_its_store_is_the_same_run(tmp_path: Path) -> None:
    a_store(tmp_path)
    by_folder, by_name = gather([tmp_path / "plain-001"]), gather(["plain-001"], root=tmp_path)
    assert by_folder.runs[0].figures == by_name.runs[0].figures != {}
    assert len(gather([tmp_path, tmp_path / "plain-001"]).runs) == 1
    of_file = gather([tmp_path / "records.jsonl"])
    assert not of_file.runs
    assert of_file.entries


def test_runs_of_the_same_name_under_two_roots_are_both_counted(tmp_path: Path) -> None:
    for root, speed in (("a", 1.0), ("b", 2.0)):
        run = RunFolder.create(tmp_path / root, "plain")
        run.write_spec(load_recipe("quickstart"))
        run.write_record(_record("plain", speed))
    inputs = gather([tmp_path / "a", tmp_path / "b"])
    assert len(inputs.runs) == len(inputs.entries) == 2
    assert "2 runs, 2 measured" in page_from(inputs)


def test_a_quality_study_is_judged_by_the_tolerance_that_it_was_run_with(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for seed in (1, 2, 3):
        for axes, ne in (({"axis": "baseline"}, 0.7), ({"axis": "rows", "value": "bf16"}, 0.7 * (1.004 + seed * 1e-5))):
            record = dataclasses.replace(_record("q", 1.0), figures={"ne": ne})
            store.add(StoreEntry(record=record, source="quality", study="q", point=f"{axes}{seed}", axes=axes, seed=seed))

    def verdict() -> str:
        (figure,) = next(section.charts for section in sections_of(gather([tmp_path])) if section.key == "quality-q")
        assert figure.table is not None
        return figure.words + figure.table.rows[0][-1]

    assert "95 % confidence intervals" in verdict()
    assert verdict().endswith("worse than tolerated")
    store.study_folder("q").mkdir(parents=True)
    (store.study_folder("q") / "quality.yaml").write_text("tolerance: 0.01\nconfidence: 0.9\n")
    assert "90 % confidence intervals" in verdict()
    assert verdict().endswith("within tolerance")


def test_failures_are_listed_unless_a_later_run_succeeded(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    where = {"source": "sweep", "study": "s", "point": "p", "axes": {"x": 1}}
    store.add(StoreEntry(record=_record("s", 0.0), failure="no memory", **where))  # type: ignore[arg-type]
    store.add(
        StoreEntry(record=_record("q", 0.0), source="quality", study="q", axes={"axis": "a", "value": 7}, failure="no disk")
    )
    store.add(StoreEntry(record=_record("t", 0.0), source="trial", study="t", axes={"lr": 1}, failure="no patience"))
    store.add(
        StoreEntry(record=_record("t", 0.0, trial=1), source="trial", study="t", axes={"lr": 2}, failure="pruned at step 3")
    )
    text = report_page([tmp_path])
    assert all(why in text for why in ("no memory", "no disk", "no patience"))
    assert "pruned at step" not in text
    store.add(StoreEntry(record=_record("s", 5.0), **where))  # type: ignore[arg-type]
    text = report_page([tmp_path])
    assert "no memory" not in text
    assert "2 failed" in text


def test_a_thousand_studies_are_reported_in_seconds(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.add(
        *(
            StoreEntry(
                record=_record(f"s{n}", 1.0 + x, kind, None if kind == "measured" else "here"),
                source="sweep",
                study=f"s{n}",
                point=str(x),
                axes={"x": x},
            )
            for n in range(1000)
            for x in range(5)
            for kind in ("measured", "predicted")
        )
    )
    started = time.process_time()
    text = report_page([tmp_path])
    assert time.process_time() - started < 15  # going through all records for each study took minutes
    assert len(text.encode()) < 20e6


def test_two_grids_under_one_name_are_both_drawn(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for axis, values in (("batch", (1, 2)), ("width", (8, 16, 32))):
        store.add(
            *(
                StoreEntry(
                    record=_record("s", 1.0 * v), source="sweep", study="s", point=f"{axis}{v}", axes={axis: v, "common": 7}
                )
                for v in values
            )
        )
    figures = next(section.charts for section in sections_of(gather([tmp_path])) if section.key == "study-s")
    drawn = {figure.title.rpartition(" over ")[2]: figure.traces[0]["x"] for figure in figures if "samples/s" in figure.title}
    assert drawn == {"batch": [1, 2], "width": [8, 16, 32]}
    assert (
        len({figure.key for figure in figures}) == len(figures) == 4
    )  # speed and NE, which a log without a teacher has as well


def runs_with_curves(root: Path, ends: Sequence[float]) -> None:
    """A run for each NE, one after the other."""
    for index, ne in enumerate(ends):
        run = RunFolder.create(root, "plain")
        run.write_spec(load_recipe("quickstart"))
        with closing(EventLog(run.events_file)) as events:
            events.write("train", step=10, ne=ne, samples_per_s=1e4)
            events.write("train", step=20, ne=ne, samples_per_s=1e4)
            events.write("evaluation", step=20, ne=ne)
            events.write("features", step=20, mean_ids=[3.51] * 8)
        record = dataclasses.replace(_record("plain", 5e4), date=f"2026-11-15T12:{index:02d}:00+00:00")
        run.write_record(dataclasses.replace(record, figures={**record.figures, "ne": ne}))


def test_the_best_run_is_first_and_drawn_however_old_it_is(tmp_path: Path) -> None:
    runs_with_curves(tmp_path, [0.8, 0.7, *(0.75 + 0.01 * index for index in range(9))])
    sections = {section.key: section for section in sections_of(gather([tmp_path]))}
    assert '<div class="value">plain-002</div>' in sections["overview"].blocks[0]
    assert "−12.50 % against plain-001" in sections["overview"].blocks[0]
    rows = [dict(zip(sections["overview"].tables[0].headings, row, strict=True)) for row in sections["overview"].tables[0].rows]
    assert [(row["run"], row["NE"], row["NE against the best"]) for row in rows[:2]] == [
        ("plain-002", "0.7000", "best"),
        ("plain-003", "0.7500", "+7.14 %"),
    ]
    (chart,) = [chart for chart in sections["quality"].charts if chart.key == "ne"]
    in_legend = [trace["name"] for trace in chart.traces if trace["showlegend"]]
    assert in_legend == [f"plain-{number:03d}" for number in (11, 10, 9, 8, 7, 6, 5, 2)]  # each run once


def test_lengths_of_bags_are_those_that_the_run_saw(tmp_path: Path) -> None:
    runs_with_curves(tmp_path, [0.8])
    tables = next(section for section in sections_of(gather([tmp_path])) if section.key == "tables")
    charts = {chart.key: chart for chart in tables.charts}
    assert charts["feature-lengths"].traces[0]["y"] == [3.51] * 8
    assert charts["feature-sizes"].table is not None
    assert {row[2] for row in charts["feature-sizes"].table.rows} == {"3.51"}


def test_columns_of_words_wrap_and_columns_of_numbers_are_right_aligned() -> None:
    table = TextTable("T", ("name", "NE", "why"), (("a", "0.7", "the loss is not finite after the third step"), ("b", "", "")))
    text = table_html(table)
    assert '<td>0.7</td><td class="words">the loss' in text
    assert '<th scope="col">NE</th><th scope="col" class="words">why</th>' in text


def test_an_unfinished_run_is_shown_as_such(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "half").write_spec(load_recipe("quickstart"))
    assert "unfinished" in report_page([tmp_path])


def test_nothing_to_report_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RowsteadError, match="rowstead train"):
        report_page([tmp_path])
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(RowsteadError, match="not a record file"):
        report_page([tmp_path / "notes.txt"])
    with pytest.raises(RowsteadError, match="no run"):
        report_page(["missing"], root=tmp_path)


def test_ten_thousand_records_make_a_page_of_less_than_20_megabytes(tmp_path: Path) -> None:
    entries = []
    for number in range(10_000):
        kind, machine = ("measured", None) if number % 2 else ("predicted", "here")
        axes = {"a": number // 2 % 101, "b": number // 2 % 97}
        record = _record("many", 100.0 + number % 977, kind, machine)
        entries.append(StoreEntry(record=record, source="sweep", study="many", point=str(number // 2), axes=axes))
    RunStore(tmp_path).add(*entries)
    inputs = gather([tmp_path])
    assert len(inputs.entries) >= 9_000  # entries that are equal line by line are one
    text = page_from(inputs)
    assert len(text.encode()) < 20e6


def test_the_command_writes_the_page_and_refuses_what_it_cannot(tmp_path: Path) -> None:
    a_store(tmp_path / "runs")
    command = [sys.executable, "-m", "rowstead", "report", "--runs", str(tmp_path / "runs"), "--out"]
    done = subprocess.run([*command, str(tmp_path / "out" / "r.html")], capture_output=True, text=True, check=True)
    assert "r.html" in done.stdout
    assert (tmp_path / "out" / "r.html").read_text().startswith("<!doctype html>")
    failed = subprocess.run([*command, "/proc/nowhere/r.html"], capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "cannot write" in failed.stderr


def test_no_torch_is_needed() -> None:
    program = "import sys, rowstead.report.page, rowstead.ui.server; assert not {'torch', 'numba', 'plotly'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
