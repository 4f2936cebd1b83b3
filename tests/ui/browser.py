"""A real Chromium for tests: found or refused with what to install, never skipped."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

WANTED = "the browser tests need Chromium and its driver: apt-get install chromium chromium-driver (make browser does it)"


def found(*names: str) -> str:
    """The first program of these names; an error that says what to install where there is none."""
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    raise RuntimeError(WANTED)


@contextlib.contextmanager
def chromium(width: int = 1300, height: int = 900, *, dark: bool = False, phone: bool = False) -> Iterator[webdriver.Chrome]:
    """A browser with a window of this size."""
    options = webdriver.ChromeOptions()
    options.binary_location = found("chromium", "chromium-browser", "google-chrome")
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-unsafe-swiftshader", "--hide-scrollbars",
        f"--window-size={width},{height}",
    ):  # fmt: skip
        options.add_argument(argument)
    if dark:
        options.add_argument("--blink-settings=preferredColorScheme=0")
    if phone:
        metrics = {"width": width, "height": height, "pixelRatio": 2}
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(found("chromedriver", "chromium-driver")))
    try:
        yield driver
    finally:
        driver.quit()


def until(condition: Callable[[], Any], deadline_s: float = 60.0) -> Any:
    """What a condition gives once it holds; an error when it does not by the deadline."""
    end_s = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end_s:
            raise AssertionError(f"it did not come to that in {deadline_s:g} s: {condition}")
        time.sleep(0.02)


def complaints(driver: webdriver.Chrome) -> list[str]:
    """Errors in the console."""
    return [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]  # type: ignore[no-untyped-call]


def unnamed(driver: webdriver.Chrome) -> list[str]:
    """Roles of parts that can be used, and have no name for those who cannot see them."""
    tree = driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})
    wanted = {"slider", "button", "link", "combobox", "radio", "textbox", "checkbox", "table", "img", "region", "radiogroup"}
    return [
        node["role"]["value"]
        for node in tree["nodes"]
        if not node.get("ignored") and node.get("role", {}).get("value") in wanted and not node.get("name", {}).get("value")
    ]
