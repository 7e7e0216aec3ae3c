"""Debian's headless Chromium, which reports policy violations, console messages and scripts run by hostile texts.

`browser()` starts one with its own profile in a temporary directory, and ends it and its driver after the block.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from support.waiting import wait_until

PACKAGES = "Debian packages chromium and chromium-driver"
PHONE, TABLET, DESK = (390, 844), (820, 1180), (1280, 900)

# Runs in every page first, and records refused requests and texts that ran as code.
_EARS = """
window.refused = [];
window.ran = [];
window.fired = () => { window.ran.push("fired"); };
document.addEventListener("securitypolicyviolation", (event) => {
  const place = `${event.sourceFile}:${event.lineNumber}`;
  window.refused.push(`${event.violatedDirective} ${event.blockedURI} ${place} ${event.sample}`);
});
window.addEventListener("error", (event) => {
  window.ran.push(`error: ${event.message} ${event.filename}:${event.lineno}`);
});
window.addEventListener("unhandledrejection", (event) => { window.ran.push(`rejection: ${event.reason}`); });
"""


def installed() -> tuple[str, str] | None:
    """Return the paths of the browser and its driver, or None if one is missing."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    return (found[0], found[1]) if found[0] and found[1] else None


def needed() -> None:
    """Skip the test if there is no browser; fail it in CI."""
    if installed() is None:
        if os.environ.get("CI"):
            pytest.fail(f"not installed: {PACKAGES}")
        pytest.skip(f"not installed: {PACKAGES}")


class Browser:
    """One window. `complaints()` returns the problems of the current page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _EARS})
        self.size(*DESK)

    def size(self, width: int, height: int) -> None:
        """Set the window's size; below 600 pixels of width it is a phone."""
        said = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", said)

    def scheme(self, name: str) -> None:
        """Set the system's color scheme: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def get(self, address: str) -> None:
        self.driver.get(address)

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def press(self, button: Any) -> None:
        """Click a button or a link that leads to another page, and wait until that page is loaded."""
        before = self.run("return performance.timeOrigin")
        loaded = "return document.readyState === 'complete' && performance.timeOrigin !== arguments[0]"

        def arrived() -> bool:
            try:
                return bool(self.run(loaded, before))
            except WebDriverException:  # the old page ended while the script ran
                return False

        button.click()
        wait_until(arrived, "the next page")

    def hold_still(self) -> None:
        """End the page's live updates, so that an element that was found stays in the page."""
        self.run("window.dispatchEvent(new Event('pagehide'))")

    @property
    def text(self) -> str:
        """The page's visible text; empty while a new page has no body yet."""
        return str(self.run("return document.body?.innerText ?? ''"))

    @property
    def path(self) -> str:
        return str(self.run("return location.pathname + location.search"))

    def complaints(self) -> list[str]:
        """Return refused requests, scripts that must not run, and console messages since the last call."""
        said = self.run(
            "const all = [...(window.refused ?? []), ...(window.ran ?? [])];"
            " window.refused = []; window.ran = []; return all"
        )
        return [*said, *(f"console: {one['level']} {one['message']}" for one in self.driver.get_log("browser"))]


@contextmanager
def browser(dark: bool = False) -> Iterator[Browser]:
    """Start a browser with one window."""
    found = installed()
    assert found is not None, PACKAGES
    profile = tempfile.mkdtemp(prefix="tallybook-chromium-")
    options = Options()
    options.binary_location = found[0]
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "disable-sync",
                 "disable-background-networking", "disable-component-update", "disable-default-apps",
                 "disable-extensions",
                 "hide-scrollbars", "mute-audio", "disable-quic", f"user-data-dir={profile}"):  # fmt: skip
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.set_capability("unhandledPromptBehavior", "ignore")
    driver = None
    try:
        driver = webdriver.Chrome(options=options, service=Service(found[1]))
        one = Browser(driver)
        one.scheme("dark" if dark else "light")
        yield one
    finally:
        if driver is not None:
            with suppress(Exception):
                driver.quit()
            driver.service.stop()
        shutil.rmtree(Path(profile), ignore_errors=True)
