"""The report in headless Chromium: nothing on the console, nothing executed, phone, dark colours, keyboard."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import cv2
import pytest
from browser import DOWN, ENTER, RIGHT, SPACE, TAB, Browser, browser, missing
from report_runs import made_run, split_of

from yolofleet.runs.report.compare import write_comparison
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.page import write_report

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

NAMES = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\x1b[31mred\u202e",
    *"abcde",
)
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("re ports")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLOFLEET_CACHE", str(folder / "cache"))
        index = split_of(folder / "data", NAMES, 16, side_px=320)
        runs = [made_run(folder / name, index, seed=seed) for seed, name in enumerate(("one", "t<b>wo"))]
        bare = made_run(folder / "unfinished", None, finished=False)
    lines = bare.events(0).read_text().splitlines()
    phases = json.loads(lines[1])
    phases["seconds"][1] = [second / 4 for second in phases["seconds"][1]]  # rank 1 lost most of its clock
    bare.events(0).write_text("\n".join([lines[0], json.dumps(phases), *lines[2:]]) + "\n")
    write_comparison(runs, folder / "comparison.html")
    return {
        "run": write_report(runs[0]),
        "unfinished": write_report(bare),
        "comparison": folder / "comparison.html",
    }


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path) as session:
        yield session


def test_pages_open_without_a_message_and_fit_the_screen(pages: dict[str, Path], chromium: Browser) -> None:
    for width in WIDTHS:
        chromium.show_as(width)
        for name, page in pages.items():
            chromium.open(page)
            where = f"{name}, {width} px"
            assert chromium.messages() == [], where
            assert chromium.run("return document.documentElement.dataset.ready") == "yes", where
            assert chromium.run("return document.querySelectorAll('.problem').length") == 0, where
            assert chromium.run("return document.documentElement.scrollWidth") <= width, where
            assert "owned" not in chromium.run("return document.title")
            assert chromium.run("return document.querySelectorAll('script').length") == 2, where
            assert chromium.run("return document.querySelectorAll('.uplot canvas').length") >= 8, where
            chromium.run("document.querySelectorAll('img').forEach((image) => (image.loading = 'eager'))")
            broken = "return [...document.images].filter((i) => i.complete && !i.naturalWidth).length"
            assert chromium.run(broken) == 0, where


def test_the_page_says_which_weights_its_figures_belong_to(pages: dict[str, Path], chromium: Browser) -> None:
    chromium.open(pages["run"])
    cards = chromium.run("return [...document.querySelectorAll('.card span')].map((e) => e.textContent)")
    assert cards[:3] == ["best mAP50-95 (epoch 6)", "last mAP50-95", "last mAP50"]
    notes = chromium.run("return [...document.querySelectorAll('.weights')].map((e) => e.textContent)")
    assert len(notes) == 3 and len(set(notes)) == 1
    assert "after epoch 6" in notes[0] and "best.safetensors is of the same epoch" in notes[0]


def test_the_page_says_what_the_errors_count_and_where_there_are_no_labels(
    pages: dict[str, Path], chromium: Browser, tmp_path: Path
) -> None:
    chromium.open(pages["run"])
    words = chromium.run("return document.body.textContent")
    assert (
        "count detections on these images with a confidence above 0.25, as the confusion matrix does" in words
    )
    run = RunFolder(tmp_path / "run")
    shutil.copytree(pages["run"].parent, run.path)
    values = json.loads(run.report_json.read_text())
    values["per_class"]["a"] |= {"AP": -1, "AP50": -1, "labels": 0, "P": 0, "R": 0}
    run.report_json.write_text(json.dumps(values))
    results = json.loads(run.results_json.read_text())
    results["metrics"] = results.get("metrics", {}) | {"mAP50-95": -1}
    run.results_json.write_text(json.dumps(results))
    chromium.open(write_report(run))
    cards = chromium.run("return [...document.querySelectorAll('.card')].map((e) => e.textContent)")
    assert "no labels" in " ".join(cards)
    table = '[aria-label="Figures of each class"]'
    row = f"return [...document.querySelectorAll('{table} tbody tr')].map((e) => e.textContent).filter((t) => /no labels/.test(t))"
    assert [text.count("no labels") for text in chromium.run(row)] == [4]
    # the best one first
    chromium.run(f"[...document.querySelectorAll('{table} thead button')].at(-1).click()")
    last = f"return [...document.querySelectorAll('{table} tbody tr')].at(-1).textContent"
    assert "no labels" in chromium.run(last)


def test_digests_do_not_widen_a_comparison(pages: dict[str, Path], chromium: Browser) -> None:
    chromium.show_as(390)
    chromium.open(pages["comparison"])
    table = "document.querySelector('[aria-label=\"Final figures\"] table')"
    assert chromium.run(f"return {table}.scrollWidth") < 450
    digests = chromium.run(
        f"return [...{table}.querySelectorAll('[title]')].map((e) => [e.textContent, e.title])"
    )
    assert digests == [["0" * 12 + "…", f"{seed:064x}"] for seed in (0, 1)]
    first = f"{table}.querySelector('tbody th')"
    chromium.run(f"{table}.parentNode.scrollLeft = 100")
    assert chromium.run(
        f"return {first}.getBoundingClientRect().left >= {table}.parentNode.getBoundingClientRect().left"
    )


def test_time_that_no_phase_has_is_grey(pages: dict[str, Path], chromium: Browser) -> None:
    chromium.show_as(1280)
    chromium.open(pages["unfinished"])
    chromium.run("document.querySelector('canvas.timeline').focus()")
    reading = "return document.querySelector('.reading').textContent"
    chromium.press(RIGHT)
    assert "epoch 1: " in chromium.run(reading) and "not recorded" not in chromium.run(reading)
    chromium.press(DOWN)
    assert "rank 1 on node-b, epoch 1: " in chromium.run(reading) and "not recorded " in chromium.run(reading)
    grey = (
        "const c = document.querySelector('canvas.timeline'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const hex = getComputedStyle(document.documentElement).getPropertyValue('--line').trim();"
        "const rgb = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)); let n = 0;"
        "for (let i = 0; i < d.length; i += 4) n += rgb.every((v, at) => d[i + at] === v); return n"
    )
    assert chromium.run(grey) > 500


def test_pictures_have_texts(pages: dict[str, Path], chromium: Browser) -> None:
    chromium.open(pages["run"])
    texts = chromium.run("return [...document.querySelectorAll('.shot img')].map((image) => image.alt)")
    assert texts and all(re.match(r"\d+\.jpg, (labels|detections): \d+ box", text) for text in texts), texts
    assert any(
        " (1 <img src=x" in text or ", 1 <img src=x" in text or "2 <img src=x" in text for text in texts
    )


def test_the_page_may_load_and_send_nothing(pages: dict[str, Path], chromium: Browser) -> None:
    chromium.open(pages["run"])
    chromium.run("const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i)")
    chromium.run(
        "const s = document.createElement('script'); s.text = 'document.title = 1'; document.body.append(s)"
    )
    chromium.run("fetch('http://127.0.0.1:9/').catch(() => 0)")
    found = " ".join(chromium.messages())
    assert (
        all(words in found for words in ("img-src", "script-src", "connect-src", "default-src"))
        or found.count("Content Security Policy") >= 3
    )
    assert chromium.run("return document.title") == "one: report"


def test_dark_colours_follow_the_system(pages: dict[str, Path], chromium: Browser, tmp_path: Path) -> None:
    means = {}
    for dark in (False, True):
        chromium.show_as(800, 700, dark=dark)
        chromium.open(pages["run"])
        picture = cv2.imread(str(chromium.picture(tmp_path / f"{dark}.png")))
        assert picture is not None
        means[dark] = picture.mean()
    assert means[True] < 80 < 180 < means[False]


def test_every_control_is_reached_and_seen_by_the_keyboard(pages: dict[str, Path], chromium: Browser) -> None:
    chromium.show_as(1280)
    chromium.open(pages["run"])
    reached = []
    for _ in range(400):
        chromium.press(TAB)
        here = chromium.run(
            "const e = document.activeElement; if (e === document.body || e.dataset.reached) return null;"
            "e.dataset.reached = 'yes'; const s = getComputedStyle(e);"
            "return [e.tagName, parseFloat(s.outlineWidth) > 0 && s.outlineStyle !== 'none']"
        )
        if here is None:
            break
        reached.append(here)
    assert all(seen for _, seen in reached), [tag for tag, seen in reached if not seen]
    left = chromium.run(
        "return [...document.querySelectorAll('button, input, select, a, .chart, canvas.timeline, .u-series:not(:first-child) th')]"
        ".filter((e) => e.offsetParent && !e.dataset.reached).map((e) => e.outerHTML.slice(0, 90))"
    )
    assert left == []


def test_keys_work_the_charts_the_time_line_and_the_tables(pages: dict[str, Path], chromium: Browser) -> None:
    chromium.show_as(1280)
    chromium.open(pages["run"])
    legend = "return document.querySelector('.chart .u-legend').innerText"
    at_end = chromium.run(legend)
    chromium.run("document.querySelector('.chart').focus()")
    chromium.press(RIGHT)
    assert chromium.run(legend) != at_end, "the values of the first epoch"
    chromium.press("+")
    assert (
        chromium.run("return [...document.querySelectorAll('.panel button')].filter((b) => !b.hidden).length")
        == 1
    )
    chromium.press("0")
    assert (
        chromium.run("return [...document.querySelectorAll('.panel button')].filter((b) => !b.hidden).length")
        == 0
    )
    chromium.run("document.querySelector('.u-series:not(:first-child) th').focus()")
    chromium.press(ENTER)
    assert chromium.run("return document.querySelectorAll('.u-series.u-off').length") == 1
    chromium.run("document.querySelector('canvas.timeline').focus()")
    chromium.press(RIGHT)
    assert "rank 0 on node-a, epoch 1: " in chromium.run(
        "return document.querySelector('.reading').textContent"
    )
    chromium.run("document.querySelector('[aria-label=\"Figures of each class\"] thead button').focus()")
    chromium.press(ENTER)
    assert chromium.run("return document.querySelector('thead th').getAttribute('aria-sort')") == "ascending"
    every = "return document.querySelectorAll('[aria-label=\"Settings: Run\"] tbody tr').length"
    few = chromium.run(every)
    chromium.run("[...document.querySelectorAll('input[type=checkbox]')].at(-2).focus()")
    chromium.press(SPACE)
    assert chromium.run(every) > few
    assert chromium.messages() == []
