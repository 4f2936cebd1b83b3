"""The what-if page and the report in a real Chromium: quick, complete, usable by keyboard, by ear and on a phone."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from rowstead.records.store import RunStore, StoreEntry
from rowstead.report.page import report_page
from rowstead.report.theme import DARK, LIGHT
from rowstead.spec.parse import parse
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec
from rowstead.spec.yaml_text import read_text
from rowstead.ui.server import Ui
from tests.report.test_page import a_store
from tests.ui.browser import chromium, complaints, unnamed, until

pytestmark = pytest.mark.slow

DELAY = """
const [id, step, done] = [arguments[0], arguments[1], arguments[2]];
const slider = document.getElementById(id), card = document.getElementById('cards');
const before = card.textContent, start = performance.now();
const seen = new MutationObserver(() => { if (card.textContent !== before) { seen.disconnect(); done(performance.now() - start); } });
seen.observe(card, { childList: true, subtree: true, characterData: true });
slider.value = Number(slider.value) + step;
slider.dispatchEvent(new Event('input', { bubbles: true }));
"""


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ui]:
    page = Ui(runs=a_store(tmp_path_factory.mktemp("ui") / "runs"))
    page.start()
    yield page
    page.close()


@pytest.fixture(scope="module")
def wide() -> Iterator[Chrome]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def page(ui: Ui, wide: Chrome) -> Iterator[Chrome]:
    opened(wide, ui)
    yield wide
    assert complaints(wide) == []


def opened(driver: Chrome, ui: Ui) -> None:
    driver.get(ui.address)
    until(lambda: len(driver.find_elements(By.CSS_SELECTOR, "#platforms tbody tr")) > 8)
    settle(driver)


def settle(driver: Chrome) -> None:
    """Wait until every platform has its figure."""
    until(lambda: "…" not in text(driver, "#platforms") and not driver.execute_script("return document.hidden"))


def text(driver: Chrome, selector: str) -> str:
    """What a part of the page says at this moment; parts are replaced as figures come."""
    return str(driver.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))


def throughput(driver: Chrome, which: str = "A") -> str:
    return text(driver, f"#card-{which} .value")


def test_numbers_follow_a_slider_within_a_fifth_of_a_second(page: Chrome) -> None:
    page.set_script_timeout(30)
    sliders = ("slider-width", "slider-num_sparse", "slider-ids", "slider-batch_size", "slider-top-width", "slider-num_dense")
    for slider in sliders:
        # Other processes of the machine only ever add to it: the least of several is the page's own.
        delays_ms: list[float] = []
        while len(delays_ms) < 3 or (min(delays_ms) >= 200 and len(delays_ms) < 20):
            delays_ms.append(page.execute_async_script(DELAY, slider, (-1) ** len(delays_ms)))
        assert min(delays_ms) < 200, f"{slider}: {delays_ms}"


def test_every_slider_and_choice_changes_something(page: Chrome) -> None:
    Select(page.find_element(By.ID, "choice-placement")).select_by_value("remote")
    for slider in page.find_elements(By.CSS_SELECTOR, "input[type=range]"):
        before = text(page, "#results")
        slider.send_keys(Keys.ARROW_RIGHT)
        until(lambda before=before: text(page, "#results") != before)


def test_every_chart_has_data(page: Chrome) -> None:
    bars = page.execute_script(
        "return [...document.querySelectorAll('#platforms .track i')].map((i) => parseFloat(i.style.width))"
    )
    assert len(bars) > 8
    assert max(bars) == 100
    assert all(bar >= 0 for bar in bars)
    assert len(page.find_elements(By.CSS_SELECTOR, "#timelines rect[data-task]")) > 3
    assert len(page.find_elements(By.CSS_SELECTOR, "#memories .memory")) >= 2
    for measure in ("samples_per_j", "watts"):
        page.execute_script(f"document.querySelector('input[value={measure}]').click()")
        heading = "samples/J" if measure == "samples_per_j" else "watts"
        until(lambda heading=heading: heading in text(page, "#platforms thead"))


def test_two_scenarios_are_side_by_side(page: Chrome) -> None:
    page.find_element(By.ID, "copy").click()
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, "#cards .scenario")) == 2)
    of_a = throughput(page, "A")
    Select(page.find_element(By.ID, "choice-machine")).select_by_value("bigbasin-32")
    until(lambda: throughput(page, "B") != of_a)
    assert throughput(page, "A") == of_a
    assert "bigbasin-32" in text(page, "#card-B")
    settle(page)
    assert page.execute_script("return document.querySelectorAll('tr[data-machine=zion] .bar').length") == 2


def test_recipes_are_loaded_and_saved(page: Chrome, tmp_path: Path) -> None:
    Select(page.find_element(By.ID, "recipe")).select_by_value("m3")
    until(lambda: "m3" in text(page, "#card-A") and "481 GB" in text(page, "#card-A"))
    assert page.find_element(By.CSS_SELECTOR, "#slider-num_sparse").get_attribute("aria-valuetext") == "127"
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.find_element(By.ID, "save").click()
    until(lambda: list(tmp_path.glob("*.yaml")))
    (saved,) = tmp_path.glob("*.yaml")
    spec = until(lambda: parse(RunSpec, read_text(saved.read_text(), what="it")))
    assert len(spec.tables) == 127
    page.find_element(By.ID, "file").send_keys(str(saved))
    until(lambda: "m3" in text(page, "#recipe-note"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("name: x\nmodle: {}\n")
    page.find_element(By.ID, "file").send_keys(str(wrong))
    until(lambda: "modle" in text(page, "#trouble"))
    assert [one for one in complaints(page) if "400" not in one] == []  # the refusal itself is no fault of the page


def test_the_keyboard_is_enough(page: Chrome) -> None:
    focused = "return document.activeElement.id || document.activeElement.value || document.activeElement.className"
    reached = []
    for _ in range(40):
        ActionChains(page).send_keys(Keys.TAB).perform()
        reached.append(page.execute_script(focused))
    for wanted in ("skip", "view-runs", "copy", "recipe", "save", "slider-num_dense", "choice-machine", "slider-num_servers"):
        assert wanted in reached, wanted
    slider = page.find_element(By.ID, "slider-width")
    page.execute_script("arguments[0].focus()", slider)
    before = throughput(page)
    ActionChains(page).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    until(lambda: throughput(page) != before)
    outline = page.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


def test_every_part_has_a_name_for_a_screen_reader(page: Chrome) -> None:
    assert unnamed(page) == []
    until(lambda: "samples per second" in page.execute_script("return document.getElementById('spoken').textContent"))
    page.find_element(By.ID, "view-runs").click()
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#run-list tbody tr"))
    assert unnamed(page) == []


def test_runs_and_their_reports_are_browsed(page: Chrome) -> None:
    page.find_element(By.ID, "view-runs").click()
    (link,) = until(lambda: page.find_elements(By.CSS_SELECTOR, "#run-list tbody a"))
    page.get(str(link.get_attribute("href")))
    until(lambda: page.execute_script("return document.querySelectorAll('.figure[data-drawn]').length"))
    assert "plain-001" in page.find_element(By.TAG_NAME, "h1").text + page.find_element(By.TAG_NAME, "main").text
    refused = page.execute_async_script(
        "const done = arguments[0]; fetch('/api/runs').then(() => done('answered')).catch(() => done('refused'))"
    )
    assert refused == "refused"  # a report's scripts may ask this server for nothing
    complaints(page)


def test_on_a_phone_nothing_is_cut_and_the_figures_stay_in_sight(ui: Ui) -> None:
    with chromium(390, 844, phone=True, dark=True) as driver:
        opened(driver, ui)
        assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        short = driver.find_element(By.ID, "short")
        assert short.is_displayed()
        before = short.text
        driver.execute_script("document.getElementById('slider-width').scrollIntoView()")
        driver.find_element(By.ID, "slider-width").send_keys(Keys.ARROW_RIGHT)
        until(lambda: short.text != before)
        back = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert sum(map(int, re.findall(r"\d+", back))) < 150
        small = driver.execute_script(
            "return [...document.querySelectorAll('button, select, input[type=range], .switch span')].filter((one) => one.offsetParent"
            " && one.getBoundingClientRect().height < 20).map((one) => one.id || one.textContent)"
        )
        assert small == []
        assert complaints(driver) == []


def test_on_a_phone_the_last_lines_stay_above_the_bar(ui: Ui) -> None:
    with chromium(390, 844, phone=True) as driver:
        opened(driver, ui)
        # Scrolled again each time: figures that come later make the page longer.
        under = "scrollTo(0, document.body.scrollHeight); return document.getElementById('memories').getBoundingClientRect().bottom - document.getElementById('short').getBoundingClientRect().top"
        until(lambda: driver.execute_script(under) <= 0)


def test_trouble_is_seen_in_every_view(page: Chrome) -> None:
    page.find_element(By.ID, "view-runs").click()
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#run-list tbody tr"))
    assert len(page.find_elements(By.CSS_SELECTOR, "#study-list tbody tr")) > 8  # studies are listed beneath the runs
    page.execute_script("window.fetch = () => Promise.reject(new Error('the server has gone'))")
    page.find_element(By.ID, "view-runs").click()
    until(lambda: page.find_element(By.ID, "trouble").is_displayed())
    assert "the server has gone" in text(page, "#trouble")


# the report

DRAW_ALL = "plots.forEach((_, index) => draw(index)); return plots.length"
EMPTY = """
return plots.filter((plot) => !plot.calcdata?.length || plot.calcdata.some((trace) => !trace.length) || !plot.querySelector('svg, canvas'))
  .map((plot) => plot.getAttribute('aria-label').slice(0, 80));
"""


def shown_report(driver: Chrome, path: Path) -> None:
    driver.get(path.as_uri())
    until(lambda: driver.execute_script("return document.querySelectorAll('.figure[data-drawn]').length"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "report.html").write_text(report_page([a_store(folder / "runs")]), encoding="utf-8")
    return folder / "report.html"


@pytest.fixture(scope="module")
def drawn(hostile: Path) -> Iterator[Chrome]:
    """The report with all its figures, which takes a browser a while."""
    with chromium() as driver:
        shown_report(driver, hostile)
        driver.set_script_timeout(240)
        assert driver.execute_script(DRAW_ALL) > 50
        yield driver


def test_hostile_names_are_shown_and_never_run(drawn: Chrome) -> None:
    assert drawn.execute_script("return window.hacked") is None
    assert drawn.execute_script("return document.querySelectorAll('main img, main iframe, .figure a').length") == 0
    assert "<img src=x onerror=window.hacked=1>" in drawn.find_element(By.TAG_NAME, "main").text
    assert complaints(drawn) == []


def test_every_figure_of_a_report_has_data(drawn: Chrome) -> None:
    assert drawn.execute_script(EMPTY) == []
    assert unnamed(drawn) == []


def test_a_report_prints_by_day_with_all_figures(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(report_page([a_store(tmp_path / "runs", ["plain"])]), encoding="utf-8")
    with chromium(dark=True) as driver:
        shown_report(driver, page)
        driver.set_script_timeout(240)
        ink, night = "return plots.map((plot) => plot.layout?.font.color).at(-1)", DARK["@text"]
        driver.execute_script("dispatchEvent(new Event('beforeprint'))")
        until(lambda: driver.execute_script("return plots.every((plot) => plot.dataset.drawn)"))
        assert driver.execute_script(ink) == LIGHT["@text"]
        assert driver.execute_script("return plots.every((plot) => plot.querySelector('.main-svg').clientWidth < 700)")
        driver.execute_script("dispatchEvent(new Event('afterprint'))")
        until(lambda: driver.execute_script(ink) == night)
        pdf = driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
        assert len(base64.b64decode(pdf)) > 50_000


def test_a_report_fits_a_phone(hostile: Path) -> None:
    with chromium(390, 844, phone=True) as driver:
        shown_report(driver, hostile)
        assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        assert complaints(driver) == []


def test_ten_thousand_records_open_in_under_three_seconds(wide: Chrome, tmp_path: Path) -> None:
    entries = []
    for number in range(5_000):
        axes = {"a": number % 71, "b": number % 73}
        for kind, machine in (("measured", {}), ("predicted", {"name": "here"})):
            record = Record(
                kind=kind,  # type: ignore[arg-type]
                name="many",
                spec_digest="d",
                date="2026-11-15T12:00:00+00:00",
                machine=machine,  # type: ignore[arg-type]
                figures={"samples_per_s": 1000.0 + number, "nameplate_watts": 100.0, "ne": 0.7 + number / 1e5},
            )
            entries.append(StoreEntry(record=record, source="sweep", study="many", point=str(number), axes=axes))
    RunStore(tmp_path / "runs").add(*entries)
    page = tmp_path / "report.html"
    page.write_text(report_page([tmp_path / "runs"]), encoding="utf-8")
    assert page.stat().st_size < 20e6
    opened_s: list[float] = []
    while len(opened_s) < 2 or (min(opened_s) >= 3 and len(opened_s) < 8):  # other processes only ever add to it
        wide.get(page.as_uri())
        until(lambda: wide.execute_script("return document.querySelectorAll('.figure[data-drawn]').length"))
        opened_s.append(
            wide.execute_script("return performance.getEntriesByName('first-figure')[0]?.startTime ?? performance.now()") / 1e3
        )
    assert min(opened_s) < 3, opened_s
    assert json.dumps(wide.execute_script("return figures.length")) != "0"
