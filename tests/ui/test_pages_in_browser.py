"""Charts and the live view in a real Chromium: ticks say their values, texts do not overlap, runs under way are followed."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from rowstead.records.events import EventLog
from rowstead.records.run_folder import Failure, RunFolder
from rowstead.records.store import RunStore, StoreEntry
from rowstead.report.page import report_page
from rowstead.spec.phases import STEP
from rowstead.spec.record import Record
from rowstead.spec.run import load_recipe
from rowstead.ui.server import Ui
from tests.ui.browser import chromium, complaints, until
from tests.ui.page_checks import OVERLAPS, WIDTHS, WRONG_TICKS, check_charts, draw_all, resize, show, violations

pytestmark = pytest.mark.slow


def a_root(root: Path) -> Path:
    """Runs on two logs with curves, one that failed, and a sweep over a range of speeds."""
    for index in range(4):
        folder = RunFolder.create(root, "news-feed-ranking-with-a-long-name")
        spec = load_recipe("quickstart", [f"data.synth.seed={index // 2}"])
        folder.write_spec(spec)
        ends = 0.80 - 0.01 * index
        with closing(EventLog(folder.events_file)) as events:
            for step in range(10, 510, 10):
                ne = ends + 0.2 * math.exp(-step / 100)
                events.write("train", step=step, ne=ne, loss=0.6 * ne, samples_per_s=60_000 * (1 - math.exp(-step / 20)))
            events.write("evaluation", step=500, ne=ends, ne_best=0.7 + 0.02 * (index // 2))
            events.write("calibration", step=500, predicted=[0.1, 0.3, 0.6], observed=[0.12, 0.29, 0.63], weight=[100, 80, 20])
            mean_ids = [3.51 * (feature + 1) for feature in range(len(spec.features.expanded_sparse()))]
            events.write("features", step=500, mean_ids=mean_ids)
        phases = {phase.key: 0.1 * (number + 1) for number, phase in enumerate(STEP[:9])}
        figures = {"num_steps": 500, "samples_per_s": 21_000.0 * (index + 1), "ne": ends, "auc": 0.75, **phases}
        date = f"2026-11-15T12:0{index}:00+00:00"
        folder.write_record(Record(kind="measured", name=spec.name, spec_digest="d", date=date, figures=figures))
    failed = RunFolder.create(root, "diverged")
    failed.write_spec(load_recipe("quickstart"))
    failed.write_failure(Failure(date="2026-11-15T13:00:00+00:00", step=7, why="the loss is not finite"))
    for index, size in enumerate((200, 800, 3_200, 12_800)):
        for kind, machine, factor in (("measured", {}, 1.0), ("predicted", {"name": "here"}, 1.1)):
            record = Record(
                kind=kind,  # type: ignore[arg-type]
                name="batches", spec_digest="d", date="2026-11-15T12:00:00+00:00", machine=machine,  # type: ignore[arg-type]
                figures={"samples_per_s": 12_000.0 * factor * 2**index, "ne": 0.8 + 0.01 * index},
            )  # fmt: skip
            RunStore(root).add(
                StoreEntry(record=record, source="sweep", study="batches", point=str(size), axes={"batch size": size})
            )
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_root(tmp_path_factory.mktemp("pages") / "runs")


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as driver:
        yield driver


def report(root: Path) -> str:
    return report_page([root])


def paper(root: Path) -> str:
    from benchmarks.paper_html import page
    from tests.report.test_paper_page import measured

    return page(measured(root.parent / "paper"))


@pytest.mark.parametrize(("made", "num_charts"), [(report, 12), (paper, 20)])
def test_charts_have_data_and_honest_ticks_and_no_text_on_another(
    browser: Chrome, root: Path, tmp_path: Path, made: Callable[[Path], str], num_charts: int
) -> None:
    page = tmp_path / "page.html"
    page.write_text(made(root), encoding="utf-8")
    show(browser, WIDTHS[0], dark=False)
    browser.get(page.as_uri())
    assert draw_all(browser) >= num_charts
    for width in WIDTHS:
        resize(browser, width)
        for dark in (False, True):
            show(browser, width, dark=dark)
            check_charts(browser)
    assert violations(browser) == []  # on a phone in the dark
    show(browser, WIDTHS[0], dark=False)
    assert violations(browser) == []
    assert complaints(browser) == []


def test_the_checks_see_what_is_wrong(browser: Chrome, root: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(report_page([root / "diverged-001", root / "news-feed-ranking-with-a-long-name-001"]), encoding="utf-8")
    show(browser, 1400, dark=False)
    browser.get(page.as_uri())
    draw_all(browser)
    check_charts(browser)
    browser.execute_script(
        "const [one, other] = document.querySelectorAll('#quality .ytick text'); other.setAttribute('y', one.getAttribute('y'));"
        "other.setAttribute('x', one.getAttribute('x')); other.setAttribute('transform', one.getAttribute('transform'));"
        "const image = document.createElement('img'); image.src = 'data:,'; document.querySelector('main').append(image)"
    )
    assert browser.execute_script(WRONG_TICKS)
    assert browser.execute_script(OVERLAPS)
    assert any("image-alt" in one for one in violations(browser))


@pytest.fixture
def ui(root: Path) -> Iterator[Ui]:
    page = Ui(runs=root)
    page.start()
    yield page
    page.close()


def opened(driver: Chrome, ui: Ui, view: str) -> None:
    driver.get("about:blank")  # an address that differs by its fragment alone would not be loaded again
    driver.get(f"{ui.address}#{view}")
    until(lambda: driver.execute_script("return document.querySelectorAll('#platforms tbody tr').length") > 8)
    until(lambda: "…" not in driver.execute_script("return document.getElementById('platforms').textContent"))


def text(driver: Chrome, selector: str) -> str:
    return str(driver.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))


def test_the_live_view_follows_a_run_while_it_trains(browser: Chrome, tmp_path: Path) -> None:
    show(browser, 390, dark=False)
    changes = [
        "train.log_every=5",
        "data.synth.num_train_samples=100_000_000",
        "data.synth.num_eval_samples=2_000",
        "threads=1",
    ]
    ui = Ui(runs=tmp_path / "runs")
    ui.start()
    words = [sys.executable, "-m", "rowstead", "train", "quickstart", "--runs", str(tmp_path / "runs")]
    words += [word for change in changes for word in ("--set", change)]
    with (tmp_path / "printed.txt").open("w") as printed, subprocess.Popen(words, stdout=printed, stderr=printed) as training:
        try:
            step = "return Number(document.querySelector('.live-run .value')?.textContent.replaceAll(',', '') ?? 0)"
            until(lambda: list((tmp_path / "runs").glob("*/events.jsonl")) or training.poll() is not None, 120)
            browser.get(ui.address)  # it opens on the runs, as one is training
            first = until(lambda: browser.execute_script(step), 120)
            until(lambda: browser.execute_script(step) > first, 120)
            until(lambda: browser.execute_script("return document.querySelectorAll('.live-run .sparkline').length") == 3)
            assert "training" in text(browser, "#run-list")
        finally:
            training.terminate()
    until(lambda: not browser.execute_script("return document.querySelectorAll('.live-run').length"), 120)
    until(lambda: "unfinished" in text(browser, "#run-list"))
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert complaints(browser) == []
    ui.close()


def test_runs_have_their_curves_and_are_compared(browser: Chrome, ui: Ui) -> None:
    show(browser, 1400, dark=False)
    opened(browser, ui, "runs")
    until(lambda: browser.execute_script("return document.querySelectorAll('#run-list .sparkline').length") == 4)
    assert "the loss is not finite" in text(browser, "#run-list")
    for number in (3, 4):
        browser.execute_script("document.querySelector(`#run-list input[value$='${arguments[0]}']`).click()", f"00{number}")
    until(lambda: "−1.28 %" in text(browser, "#comparison-table"))
    curves = browser.execute_script(
        "return [...document.querySelectorAll('.run-curve')].map((one) => [one.dataset.run.slice(-3), one.points.length, getComputedStyle(one).stroke])"
    )
    assert [one[:2] for one in curves] == [["003", 50], ["004", 50]]
    assert curves[0][2] != curves[1][2]
    for width in WIDTHS:
        for dark in (False, True):
            show(browser, width, dark=dark)
            assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert violations(browser) == []  # on a phone in the dark
    show(browser, 1400, dark=False)
    assert violations(browser) == []
    assert complaints(browser) == []


def test_the_page_opens_with_the_newest_run_and_says_what_b_changes(browser: Chrome, ui: Ui) -> None:
    for width in WIDTHS:
        show(browser, width, dark=width == 768)
        opened(browser, ui, "plan")
        assert browser.execute_script("return document.getElementById('recipe').value") == "run:diverged-001"
        browser.find_element(By.ID, "copy").click()
        until(lambda: "±0 % against A" in text(browser, "#card-B"))
        slider = browser.find_element(By.ID, "slider-width")
        browser.execute_script("arguments[0].value = arguments[0].max; arguments[0].dispatchEvent(new Event('input'))", slider)
        until(lambda: "−" in text(browser, "#card-B .change.bad"))
        until(lambda: "−" in text(browser, "#platforms .of-b"))
        until(lambda: "…" not in text(browser, "#platforms"))
        for dark in (False, True):
            show(browser, width, dark=dark)
            assert browser.execute_script(OVERLAPS) == []
            assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert violations(browser) == []
    show(browser, 1400, dark=False)
    assert violations(browser) == []
    assert complaints(browser) == []


def test_a_resource_has_one_color_in_a_and_b_and_never_theirs(browser: Chrome, ui: Ui) -> None:
    show(browser, 1400, dark=False)
    opened(browser, ui, "plan")
    browser.find_element(By.ID, "copy").click()
    browser.execute_script(
        "const machine = document.getElementById('choice-machine'); machine.value = 'cpu-2s'; machine.dispatchEvent(new Event('change'))"
    )
    until(lambda: "cpu-2s" in text(browser, "#card-B .name"))
    until(lambda: "against A" in text(browser, "#card-B"))
    blocks = browser.execute_script(
        "return [...document.querySelectorAll('.timeline')].map((svg) => [...svg.querySelectorAll('[data-resource]')].map((one) => [one.dataset.resource, getComputedStyle(one).fill]))"
    )
    assert len(blocks) == 2
    colors = {
        resource: {color for one in blocks for of, color in one if of == resource} for one in blocks for resource, _ in one
    }
    assert all(len(of) == 1 for of in colors.values())
    assert len({color for of in colors.values() for color in of}) == len(colors)
    own = browser.execute_script(
        "return ['a', 'b'].map((one) => { const made = document.createElement('i'); made.style.color = `var(--${one})`; document.body.append(made); return getComputedStyle(made).color })"
    )
    assert not set(own) & {color for of in colors.values() for color in of}
    lanes = browser.execute_script(
        "return [...document.querySelectorAll('.timeline')].map((svg) => [...svg.querySelectorAll('text.lane-name')].map((one) => one.textContent))"
    )
    assert all(len(set(of)) == len(of) for of in lanes)
    counts = browser.execute_script(
        "return [...document.querySelectorAll('.timeline')].map((svg) => ['[data-task]', '.lane-name', '.on-block, .below'].map((one) => svg.querySelectorAll(one).length))"
    )
    assert all(named >= resources for _, resources, named in counts)  # the longest task of each; others may be too short
    rows = browser.execute_script(
        "return [...document.querySelectorAll('.tasks')].map((one) => one.querySelectorAll('tbody tr').length)"
    )
    assert rows == [tasks for tasks, _, _ in counts]  # the table has them all
