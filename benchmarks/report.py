"""The report of a run: seconds at the end of a training, size, and seconds to open it in Chromium.

The run is made up: photographs are smooth noise of 640 x 480 pixels, which compress badly, and every image has detections
by the hundred. ``seconds at the end`` is all that rank 0 does for ``report.json`` and ``report.html``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import browser, missing, opened_s  # (tests/)
from report_runs import evaluated, made_run, split_of

from yolofleet.evaluate.matching import ScoredBoxes, joined
from yolofleet.report.figures import shared_sample, write_figures
from yolofleet.report.page import write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--detections", type=int, default=100, help="of each image")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = [f"class {number}" for number in range(given.classes)]
        index = split_of(folder / "data", names, given.images, side_px=640)
        run = made_run(folder / "run", None, epochs=300)
        evaluation, rng = evaluated(index), np.random.default_rng(0)
        count = given.images * given.detections
        found = ScoredBoxes(
            np.repeat(np.arange(given.images), given.detections),
            rng.integers(0, given.classes, count),
            np.hstack([rng.uniform(0, 400, (count, 2)), rng.uniform(10, 200, (count, 2))]),
            rng.random(count) ** 4,
        )
        object.__setattr__(evaluation, "detections", joined([evaluation.detections, found]))
        began_s = time.perf_counter()
        write_figures(run, {"train": index, "val": index}, evaluation, shared_sample(evaluation, None))
        figures_s = time.perf_counter() - began_s
        write_report(run)
        page_s = time.perf_counter() - began_s - figures_s
        print(
            f"seconds at the end: {figures_s + page_s:.2f} ({figures_s:.2f} report.json, {page_s:.2f} page)"
        )
        print(
            f"report.html: {run.report.stat().st_size / 1e6:.2f} MB, report.json: {run.report_json.stat().st_size / 1e6:.2f} MB"
        )
        if missing():
            print(missing())
            return
        with browser(folder) as session:
            for name, width_px in (("desktop", 1280), ("phone", 390)):
                session.show_as(width_px)
                times = sorted(opened_s(session, run.report) for _ in range(5))
                print(f"opened in Chromium, {name}: {times[2]:.2f} s (median of 5)")


if __name__ == "__main__":
    main()
