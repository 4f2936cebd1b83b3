"""Charts and the live view in a real Chromium: ticks say their values, texts do not overlap, runs under way are followed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

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

pytestmark = pytest.mark.slow

WIDTHS = (1400, 768, 390)
DRAW_ALL = "plots.forEach((_, index) => draw(index)); return plots.length"

WRONG_TICKS = """
const number = (text) => {
  const found = text.replace('−', '-').replace(/[,\\u200b]/g, '').match(/^(-?[\\d.]+)([kMGTµmn%]?)$/);
  return found && found[1] * ({ k: 1e3, M: 1e6, G: 1e9, T: 1e12, m: 1e-3, 'µ': 1e-6, n: 1e-9, '%': 1e-2 }[found[2]] ?? 1);
};
const wrong = [];
for (const plot of plots) for (const [name, along] of [['xaxis', 'x'], ['yaxis', 'y']]) {
  const axis = plot._fullLayout?.[name];
  if (!axis || !['log', 'linear'].includes(axis.type) || !plot._fullLayout._has('cartesian')) continue;
  const box = plot.getBoundingClientRect();
  const ticks = [...plot.querySelectorAll(`.${along}axislayer-above .${along}tick text`)].filter((tick) => tick.getBoundingClientRect().width);
  const values = ticks.map((tick) => number(tick.textContent));
  if (ticks.length < 2) wrong.push(`${plot.getAttribute('aria-label').slice(0, 40)}: ${name} has ${ticks.length} ticks`);
  ticks.forEach((tick, i) => {
    const own = tick.getBoundingClientRect(), at = along === 'x' ? own.x + own.width / 2 - box.x : own.y + own.height / 2 - box.y;
    const wanted = axis._offset + axis.d2p(values[i]);
    if (values[i] === null || Math.abs(at - wanted) > 4) wrong.push(`${plot.getAttribute('aria-label').slice(0, 40)}: ${name} ${tick.textContent} at ${at}, not ${wanted}`);
  });
}
return wrong;
"""
OVERLAPS = """
const found = [];
for (const plot of plots) {
  const texts = [...plot.querySelectorAll('.xtick text, .ytick text, .xtitle, .ytitle'), ...plot.parentElement.querySelectorAll('.legend button')]
    .map((one) => [one.textContent, one.getBoundingClientRect()]).filter(([, box]) => box.width && box.height);
  for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
    const [[one, a], [other, b]] = [texts[i], texts[j]];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left), high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1.5 && high > 3) found.push(`${plot.getAttribute('aria-label').slice(0, 40)}: "${one}" and "${other}"`);
  }
  for (const [text, box] of texts) if (box.left < -1 || box.right > innerWidth + 1) found.push(`${plot.getAttribute('aria-label').slice(0, 40)}: "${text}" is cut`);
}
return found;
"""
EMPTY = "return plots.filter((plot) => !plot.calcdata?.length || plot.calcdata.some((trace) => !trace.length)).map((plot) => plot.getAttribute('aria-label').slice(0, 60))"


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


def show(driver: Chrome, width: int, *, dark: bool) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


@pytest.mark.parametrize("width", WIDTHS)
def test_charts_have_data_and_honest_ticks_and_no_text_on_another(
    browser: Chrome, root: Path, tmp_path: Path, width: int
) -> None:
    page = tmp_path / "report.html"
    page.write_text(report_page([root]), encoding="utf-8")
    show(browser, width, dark=width == 768)
    browser.get(page.as_uri())
    until(lambda: browser.execute_script("return document.querySelectorAll('.figure[data-drawn]').length"))
    assert browser.execute_script(DRAW_ALL) > 6
    assert browser.execute_script(EMPTY) == []
    assert browser.execute_script(WRONG_TICKS) == []
    assert browser.execute_script(OVERLAPS) == []
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert complaints(browser) == []


@pytest.fixture
def ui(root: Path) -> Iterator[Ui]:
    page = Ui(runs=root)
    page.start()
    yield page
    page.close()


def test_the_live_view_follows_a_run_while_it_trains(browser: Chrome, ui: Ui, root: Path) -> None:
    show(browser, 390, dark=False)
    folder = RunFolder.create(root, "live")
    folder.write_spec(load_recipe("quickstart"))
    shown = "return [...document.querySelectorAll('.live-run')].map((run) => [run.dataset.run, run.querySelector('.value')?.textContent, run.querySelectorAll('.sparkline').length])"

    def seen() -> Any:
        return browser.execute_script(shown)

    with folder.lock(), closing(EventLog(folder.events_file)) as events:
        events.write("train", step=10, loss=0.6, ne=0.9, samples_per_s=1e4, waiting_share=0.1, num_samples=100)
        browser.get(ui.address)
        until(lambda: browser.execute_script("return document.querySelectorAll('#platforms tbody tr').length") > 8)
        browser.find_element(By.ID, "view-runs").click()
        until(lambda: seen() == [["live-001", "10", 3]])
        events.write("train", step=1_020, loss=0.5, ne=0.8, samples_per_s=1e4, waiting_share=0.1, num_samples=10_200)
        until(lambda: seen() == [["live-001", "1,020", 3]])
        assert "training" in browser.find_element(By.ID, "run-list").text
        assert "the loss is not finite" in browser.find_element(By.ID, "run-list").text
    until(lambda: seen() == [])
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert complaints(browser) == []


def test_blocks_of_one_kind_have_one_color_in_a_and_b_and_never_theirs(browser: Chrome, ui: Ui) -> None:
    show(browser, 1400, dark=False)
    browser.get(ui.address)
    until(lambda: browser.execute_script("return document.querySelectorAll('#platforms tbody tr').length") > 8)
    browser.find_element(By.ID, "copy").click()
    browser.execute_script(
        "const machine = document.getElementById('choice-machine'); machine.value = 'cpu-2s'; machine.dispatchEvent(new Event('change'))"
    )
    until(lambda: "cpu-2s" in browser.find_element(By.CSS_SELECTOR, "#card-B .name").text)
    until(lambda: "against A" in browser.find_element(By.ID, "card-B").text)
    blocks = browser.execute_script(
        "return [...document.querySelectorAll('.timeline')].map((svg) => [...svg.querySelectorAll('[data-phase]')].map((one) => [one.dataset.phase, getComputedStyle(one).fill]))"
    )
    assert len(blocks) == 2
    colors = {phase: {color for one in blocks for of, color in one if of == phase} for one in blocks for phase, _ in one}
    assert all(len(of) == 1 for of in colors.values())
    assert len({color for of in colors.values() for color in of}) == len(colors)
    own = browser.execute_script(
        "return ['a', 'b'].map((one) => { const made = document.createElement('i'); made.style.color = `var(--${one})`; document.body.append(made); return getComputedStyle(made).color })"
    )
    assert not set(own) & {color for of in colors.values() for color in of}
    lanes = browser.execute_script(
        "return [...document.querySelectorAll('.timeline')].map((svg) => [...svg.querySelectorAll('text.quiet-text')].map((one) => one.textContent))"
    )
    assert all(len(set(of)) == len(of) for of in lanes)
