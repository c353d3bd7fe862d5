"""A real browser for tests: chromium, driven over the WebDriver protocol, which needs nothing but
HTTP and JSON."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")

CONTRAST = """
const channels = (color) => color.match(/[\\d.]+/g).map(Number);
function luminance(color) {
  const linear = (value) => (value <= 10 ? value / 3295 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const [red, green, blue] = channels(color).map(linear);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function background(one) {
  const color = one.ownerDocument.defaultView.getComputedStyle(one).backgroundColor;
  return channels(color)[3] === 0 ? background(one.parentElement) : color;
}
"""
"""Functions in JavaScript: the contrast of two colours, and the colour behind an element."""


class Browser:
    """One window."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        _call(f"{self._session}/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns; `arguments[0]` in it is the first argument."""
        return _call(f"{self._session}/execute/sync", script=script, args=list(arguments))

    def click(self, selector: str) -> None:
        """A real click, at the place where the element is."""
        found = _call(f"{self._session}/element", using="css selector", value=selector)
        (element,) = found.values()
        _call(f"{self._session}/element/{element}/click")

    def wait_for(self, script: str, timeout_s: float = 20.0) -> Any:
        """What the script returns as soon as that is true."""
        end = time.monotonic() + timeout_s
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"not within {timeout_s} s: {script}"
            time.sleep(0.05)
        return found

    def errors(self) -> list[str]:
        """What the pages wrote to the console as errors since the last call, such as what a policy
        has blocked."""
        entries = _call(f"{self._session}/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def resize(self, width: int) -> None:
        """Show pages as in a window of this width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, width: int, *, dark: bool) -> bytes:
        """The whole page as PNG."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._devtools("Emulation.setEmulatedMedia", features=features)
        self.resize(width)
        self.run("scrollTo(0, 0)")
        time.sleep(0.3)
        shot = self._devtools("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return _call(f"{self._session}/goog/cdp/execute", cmd=command, params=parameters)


@contextmanager
def browser() -> Iterator[Browser]:
    """A new browser without cookies."""
    assert CHROMIUM and DRIVER
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "successfully on port" in line)
            address = "http://127.0.0.1:" + line.strip().rstrip(".").split()[-1]
            chrome = {"binary": CHROMIUM, "args": OPTIONS}
            wanted = {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
            made = _call(f"{address}/session", capabilities={"alwaysMatch": wanted})
            session = f"{address}/session/{made['sessionId']}"
            try:
                yield Browser(session)
            finally:
                urllib.request.urlopen(
                    urllib.request.Request(session, method="DELETE"), timeout=30
                ).close()
        finally:
            process.terminate()


def _call(address: str, /, **body: Any) -> Any:
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"]) from None
