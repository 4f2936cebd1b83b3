"""What every page must keep in a real Chromium: charts with data, ticks that say their values, texts apart, no barrier for anybody."""

from __future__ import annotations

from importlib import resources
from typing import Any

from selenium.webdriver import Chrome

from tests.ui.browser import until

WIDTHS = (1400, 768, 390)
"""Of a desktop, a tablet and a phone."""
DRAW_ALL = "plots.forEach((_, index) => draw(index)); return plots.length"
RESIZE_ALL = "Promise.all(plots.map((plot) => Plotly.Plots.resize(plot))).then(arguments[0], arguments[0])"
EMPTY = """
return plots.filter((plot) => !plot.calcdata?.length || plot.calcdata.some((trace) => !trace.length) || !plot.querySelector('svg, canvas'))
  .map((plot) => plot.getAttribute('aria-label').slice(0, 60));
"""
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
const texts_of = (root) => [...root.querySelectorAll('svg text, .legend button, ul.legend li:not(:has(button))')]
  .filter((one) => one.textContent.trim() && getComputedStyle(one).visibility !== 'hidden' && one.style.opacity !== '0')
  .map((one) => [one.textContent, one.getBoundingClientRect()]).filter(([, box]) => box.width && box.height);
for (const plot of document.querySelectorAll('.figure, .timeline-of')) {
  const what = (plot.getAttribute('aria-label') ?? plot.className).slice(0, 40);
  const texts = texts_of(plot.closest('figure') ?? plot);
  for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
    const [[one, a], [other, b]] = [texts[i], texts[j]];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left), high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    const is_inside = one === other && Math.abs(a.left - b.left) < 1 && Math.abs(a.top - b.top) < 1;
    if (wide > 1.5 && high > 3 && !is_inside) found.push(`${what}: "${one}" and "${other}"`);
  }
  for (const [text, box] of texts) if (box.left < -1 || box.right > document.documentElement.clientWidth + 1) found.push(`${what}: "${text}" is cut`);
}
return found;
"""
VIOLATIONS = """
const done = arguments[arguments.length - 1];
axe.run({ exclude: [['.figure .svg-container']] }, { resultTypes: ['violations'] }).then((found) => done(found.violations
  .filter((one) => ['serious', 'critical'].includes(one.impact))
  .map((one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.html.slice(0, 120) + ' ' + (node.any[0]?.message ?? '')).join(' | ')}`)),
  (error) => done([String(error)]));
"""


def show(driver: Chrome, width: int, *, dark: bool) -> None:
    """Make the window this wide, light or dark; a page that is open follows."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def resize(driver: Chrome, width: int) -> None:
    """Make the window of an open page this wide, with all its charts."""
    show(driver, width, dark=False)
    driver.set_script_timeout(120)
    driver.execute_async_script(RESIZE_ALL)


def draw_all(driver: Chrome) -> int:
    """Draw all charts of a page, also those that are out of sight; their number."""
    until(lambda: driver.execute_script("return document.querySelectorAll('.figure[data-drawn]').length"))
    return int(driver.execute_script(DRAW_ALL))


def violations(driver: Chrome) -> list[Any]:
    """Serious and critical violations that axe-core finds, by rule, each with its first parts; a chart is one image to it."""
    script = (resources.files("selenium_axe_python") / "axe-core" / "axe.min.js").read_text(encoding="utf-8")
    driver.execute_script(script)  # no script element: the page may allow none
    driver.set_script_timeout(120)
    return list(driver.execute_async_script(VIOLATIONS))


def check_charts(driver: Chrome) -> None:
    """Every chart that is drawn has data, ticks where their values are, and no text on another."""
    assert driver.execute_script(EMPTY) == []
    assert driver.execute_script(WRONG_TICKS) == []
    assert driver.execute_script(OVERLAPS) == []
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
