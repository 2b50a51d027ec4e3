"""The board in headless Chromium: it follows runs without a reload, nothing is executed, phone, dark colours, keyboard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import pytest
from board_runs import Served, grow, publish, report_ranks, served
from browser import ENTER, RIGHT, TAB, Browser, browser, missing
from report_runs import made_run, split_of

from yolofleet.runs.report.folder import RunFolder

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

WAIT_S = 900
BAD_NAME = "<img src=x onerror=\"document.title='owned'\">"
EPOCHS = "return document.querySelector('.chart .u-legend .u-value')?.textContent"
ZOOMED = "return [...document.querySelectorAll('.panel button')].filter((b) => !b.hidden && b.textContent === 'Show all').length"
HIDDEN = "return document.querySelectorAll('.chart')[1].querySelectorAll('.u-off').length"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunFolder]:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    index = split_of(tmp_path / "data", [BAD_NAME, *"abcdefg"], 8, side_px=320)
    made = [
        made_run(tmp_path / "runs" / "train" / name, index, finished=False, epochs=6)
        for name in ("exp", BAD_NAME.replace("/", "_"))
    ]
    made.append(made_run(tmp_path / "runs" / "train" / "exp3", None))
    publish(made[0], epoch=6, epochs=300)
    publish(made[1], "failed", why=f"ClusterError: {BAD_NAME}")
    publish(made[2], "ended")
    made[1].log(0).write_text(f"{BAD_NAME}\n")
    return made


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path) as session:
        yield session


def until(chromium: Browser, script: str, wanted: object = True) -> None:
    """Wait until a script returns a value."""
    deadline_s = time.monotonic() + WAIT_S
    while (found := chromium.run(script)) != wanted:
        assert time.monotonic() < deadline_s, (script, found, chromium.messages())
        time.sleep(0.1)


def opened(chromium: Browser, board: Served, folder: RunFolder | None = None) -> None:
    """Open the list with the token, then the page of a run; a later reload would lose ``window.stays``."""
    chromium.open(board.url)
    if folder is not None:
        chromium.open(f"http://{board.host}/runs/{board.id_of(folder)}")
    until(chromium, "return document.documentElement.dataset.ready", "yes")
    chromium.run("window.stays = true")


def test_pages_open_without_a_message_and_fit_the_screen(runs: list[RunFolder], chromium: Browser) -> None:
    with served([runs[0].path.parent]) as board:
        for width in (1280, 390):
            chromium.show_as(width)
            chromium.open(board.url)
            assert chromium.run("return document.querySelectorAll('.runs tbody tr').length") == len(runs), (
                "the page arrives with its rows"
            )
            for folder in (None, *runs):
                opened(chromium, board, folder)
                where = f"{folder}, {width} px"
                assert chromium.messages() == [], where
                assert chromium.run("return location.search + document.cookie") == "", where
                assert chromium.run("return document.querySelectorAll('.problem').length") == 0, where
                assert chromium.run("return document.documentElement.scrollWidth") <= width, where
                assert chromium.run("return document.title") != "owned", where
                assert chromium.run("return document.querySelectorAll('script').length") == 2, where
        opened(chromium, board)
        states = "return [...document.querySelectorAll('.runs .state')].map((e) => e.textContent).sort()"
        assert chromium.run(states) == ["ended", "failed", "running"]
        chromium.run("document.querySelector('.runs a').focus()")
        chromium.press(ENTER)
        until(chromium, "return document.querySelectorAll('canvas.timeline').length", 1)
        assert chromium.run("return document.querySelectorAll('.uplot canvas').length") >= 8
        assert "node-b" in chromium.run(
            "return document.querySelector('[aria-label=\"Seconds of the ranks\"]').innerText"
        )
        assert chromium.run("return document.querySelectorAll('button[type=button]').length") == 0, (
            "read-only"
        )


def test_a_page_follows_the_run_and_keeps_what_the_user_did(runs: list[RunFolder], chromium: Browser) -> None:
    with served([runs[0].path.parent]) as board:
        chromium.show_as(1280)
        opened(chromium, board, runs[0])
        assert chromium.run(EPOCHS) == "6"
        chromium.run("document.querySelector('.chart').focus()")
        chromium.press(RIGHT)
        chromium.press("+")
        assert chromium.run(ZOOMED) == 1
        before = chromium.run(HIDDEN)
        chromium.run(
            "document.querySelectorAll('.chart')[1].querySelector('.u-series:not(:first-child) th').click()"
        )
        hidden = chromium.run(HIDDEN)
        assert hidden != before
        for epoch in (7, 8):
            grow(runs[0], epoch)
            publish(runs[0], epoch=epoch, epochs=300)
        legend = "return document.querySelectorAll('.chart')[3].querySelector('.u-value').textContent"
        until(chromium, legend, "8")
        until(chromium, "return document.querySelector('.live p').textContent.startsWith('epoch 8 / 300')")
        assert chromium.run(ZOOMED) == 1 and chromium.run(HIDDEN) == hidden
        assert chromium.run("return document.activeElement === document.querySelector('.chart')")
        publish(runs[0], "stopped", why="SIGTERM")
        until(chromium, "return document.querySelector('.state').textContent", "stopped")
        publish(runs[0], epoch=8, epochs=300, restarts=1)  # resumed
        until(chromium, "return document.querySelector('.state').textContent", "running")
        assert chromium.run("return window.stays") is True and chromium.messages() == []
        runs[0].path.rename(runs[0].path.parent.parent / "away")
        until(chromium, "return document.querySelector('.live').innerText.includes('This run is gone')")


def test_a_page_shows_what_the_ranks_do(runs: list[RunFolder], chromium: Browser) -> None:
    table = "return document.querySelector('[aria-label=\"Ranks now\"]')?.innerText || ''"
    report_ranks(runs[0], host=BAD_NAME)
    with served([runs[0].path.parent]) as board:
        for width in (390, 1280):
            chromium.show_as(width)
            opened(chromium, board, runs[0])
            assert BAD_NAME in chromium.run(table) and "slowest" in chromium.run(table)
            assert chromium.run("return document.documentElement.scrollWidth") <= width
        report_ranks(runs[0], quiet_s=120.0)
        until(
            chromium,
            "return document.querySelector('[aria-label=\"Ranks now\"] .bad')?.textContent",
            "no progress",
        )
        publish(runs[0], "ended")
        until(chromium, table, "")
        assert chromium.run("return window.stays") is True and chromium.messages() == []


def test_the_list_follows_runs_that_come_and_go(runs: list[RunFolder], chromium: Browser) -> None:
    count = "return document.querySelectorAll('.runs tbody tr').length"
    with served([runs[0].path.parent]) as board:
        opened(chromium, board)
        chromium.run(
            "[...document.querySelectorAll('.runs a')].find((a) => a.textContent === 'exp3').focus()"
        )
        publish(made_run(runs[0].path.parent / "new", None))
        until(chromium, count, 4)
        assert chromium.run("return document.activeElement.textContent") == "exp3"
        runs[0].path.rename(runs[0].path.parent.parent / "away")
        until(chromium, count, 3)
        assert chromium.run("return window.stays") is True and chromium.messages() == []


def test_a_page_connects_again_by_itself(runs: list[RunFolder], chromium: Browser) -> None:
    lost = "return document.querySelector('.lost').hidden"
    with served([runs[0].path.parent]) as board:
        opened(chromium, board, runs[0])
        assert chromium.run(lost)
    until(chromium, lost, False)
    grow(runs[0], 7)
    with served([runs[0].path.parent], before=board):
        until(chromium, EPOCHS, "7")
        assert chromium.run(lost) and chromium.run("return window.stays") is True


def test_buttons_ask_the_run(runs: list[RunFolder], chromium: Browser) -> None:
    press = "[...document.querySelectorAll('button[type=button]')].find((b) => b.textContent.startsWith('{}')).click()"
    said = "return document.querySelector('[role=status]').textContent.split(':')[0]"
    with served([runs[0].path.parent], ["stop", "save"]) as board:
        opened(chromium, board, runs[0])
        chromium.run(press.format("save"))
        until(chromium, said, "Asked to save")
        assert runs[0].take_request("save")
        chromium.run(press.format("stop"))
        assert "again" in chromium.run("return document.querySelector('button[type=button]').textContent")
        assert not runs[0].request("stop").exists(), "one click stops nothing"
        chromium.run(press.format("stop"))
        until(chromium, said, "Asked to stop")
        assert runs[0].request("stop").exists()
        until(chromium, "return document.querySelector('.live').innerText.includes('not taken yet')")
        assert chromium.messages() == []
        opened(chromium, board, runs[1])
        assert chromium.run(
            "return [...document.querySelectorAll('button[type=button]')].every((b) => b.disabled)"
        )


def test_every_control_is_reached_and_seen_by_the_keyboard(runs: list[RunFolder], chromium: Browser) -> None:
    chromium.show_as(1280)
    with served([runs[0].path.parent], ["stop", "save"]) as board:
        for folder in (None, runs[2]):
            publish(runs[2])
            opened(chromium, board, folder)
            until(
                chromium,
                "return [...document.querySelectorAll('button[type=button]')].every((b) => !b.disabled)",
            )
            for _ in range(200):
                chromium.press(TAB)
                seen = chromium.run(
                    "const e = document.activeElement; if (e === document.body || e.dataset.reached) return null;"
                    "e.dataset.reached = 'yes'; const s = getComputedStyle(e);"
                    "return parseFloat(s.outlineWidth) > 0 && s.outlineStyle !== 'none'"
                )
                if seen is None:
                    break
                assert seen
            left = chromium.run(
                "return [...document.querySelectorAll('button, input, select, a, .chart, canvas.timeline')]"
                ".filter((e) => e.offsetParent && !e.dataset.reached).map((e) => e.outerHTML.slice(0, 90))"
            )
            assert left == []


def test_dark_colours_follow_the_system(runs: list[RunFolder], chromium: Browser, tmp_path: Path) -> None:
    means = {}
    with served([runs[0].path.parent]) as board:
        for dark in (False, True):
            chromium.show_as(800, 700, dark=dark)
            opened(chromium, board)
            picture = cv2.imread(str(chromium.picture(tmp_path / f"{dark}.png")))
            assert picture is not None
            means[dark] = picture.mean()
    assert means[True] < 80 < 180 < means[False]
