"""Chromium without a screen, driven over chromedriver's HTTP interface (W3C WebDriver): nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLAGS = (
    *(
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-sync", "--hide-scrollbars"),
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)
DEADLINE_S = 900


def missing() -> str:
    """Why no browser can be started here; "" if one can."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return (
        f"{' and '.join(absent)} not installed (apt-get install chromium chromium-driver)" if absent else ""
    )


@dataclass(frozen=True)
class Browser:
    """A session of a browser.

    Attributes:
        address: of the session at chromedriver.
    """

    address: str

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str = "") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.address}{path}", data, {"Content-Type": "application/json"}, method=method or None
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path | str) -> None:
        """Open a file or an address."""
        self.ask("/url", {"url": page if isinstance(page, str) else page.absolute().as_uri()})

    def run(self, script: str) -> Any:
        """The value that a script returns."""
        return self.ask("/execute/sync", {"script": script, "args": []})

    def show_as(self, width_px: int, height_px: int = 900, *, dark: bool = False, scale: float = 1) -> None:
        """Set the size of the screen, and whether the user prefers dark colours."""
        size = {"width": width_px, "height": height_px, "deviceScaleFactor": scale, "mobile": width_px < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def press(self, key: str) -> None:
        """Press a key: a letter, or a code of WebDriver."""
        strokes = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.ask("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def messages(self) -> list[str]:
        """What the page has written to the console, with refused requests and scripts, since the last call."""
        return [entry["message"] for entry in self.ask("/se/log", {"type": "browser"})]

    def picture(self, path: Path, *, whole: bool = False) -> Path:
        """Write a PNG of what is visible, or of the whole page."""
        shot = self._devtools("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def _devtools(self, command: str, values: dict[str, Any]) -> Any:
        return self.ask("/goog/cdp/execute", {"cmd": command, "params": values})


def opened_s(session: Browser, page: Path) -> float:
    """Open a page; return the seconds until it is loaded and its script has drawn everything."""
    session.open(page)
    return float(session.run("return performance.getEntriesByType('navigation')[0].loadEventEnd")) / 1000


TAB, ENTER, RIGHT, DOWN, SPACE = "\ue004", "\ue007", "\ue014", "\ue015", " "


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with an empty profile in ``folder``; end it after the block."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "HOME": str(folder)},
    )
    try:
        assert driver.stdout is not None
        port = next(
            found[1] for line in driver.stdout if (found := re.search(r"successfully on port (\d+)", line))
        )
        home = f"http://127.0.0.1:{port}/session"
        options = {"args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = Browser(home).ask("", {"capabilities": {"alwaysMatch": wanted}})
        session = Browser(f"{home}/{made['sessionId']}")
        try:
            yield session
        finally:
            session.ask("", method="DELETE")
    finally:
        driver.terminate()
        driver.wait(timeout=DEADLINE_S)
        assert driver.stdout is not None
        driver.stdout.close()


if __name__ == "__main__":  # python tests/browser.py PAGE PICTURE [WIDTH [HEIGHT]]: a picture for the docs
    page, picture, *size = sys.argv[1:]
    with tempfile.TemporaryDirectory() as own, browser(Path(own)) as started:
        started.show_as(*map(int, size or ("1180", "1240")))
        print(f"opened in {opened_s(started, Path(page)):.2f} s, {Path(page).stat().st_size / 1e6:.2f} MB")
        started.picture(Path(picture))
