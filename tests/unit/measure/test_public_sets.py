"""Cells and table of benchmarks/public_sets.py, with a stand-in for the trainer, and a repository of this disk for GitHub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from label_tools import pictures, roboflow_coco, text, xml
from small_data import write_picture

from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.data.datasets.sources import load_dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import accuracy_study
import public_sets
from accuracy_study import read_rows
from public_sets import EQUAL, SETS, digest, fetch, main, report


def row(arm: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"arm": arm, "seed": seed, "epochs": 30, "cpu_s": 90.0, "sha256": f"{seed}" * 64, **more}


def test_the_table_has_means_of_seeds_and_says_what_is_open() -> None:
    rows = [
        row("bccd/yolov5n", seed, **{"mAP50": value, "mAP50-95": 0.5}) for seed, value in ((0, 0.6), (1, 0.8))
    ]
    rows += [row("bccd/yolov5", 0, **{"mAP50": 0.25, "mAP50-95": 0.125})]
    rows += [row("bccd/yolov5n", 2, epochs=7, **{"mAP50": 0.0, "mAP50-95": 0.0})]  # of another table
    rows += [row("bccd/yolov5n", EQUAL, epochs=1, sha256="a" * 64, sha256_2="a" * 64)]
    rows += [row("bccd/dfine-n", EQUAL, epochs=2, sha256="a" * 64, sha256_2="b" * 64)]
    lines = report(rows, 30).splitlines()
    assert len(lines) == 2 + 6 * len(SETS)
    # t(1) = 12.7062, times half of the distance of two values, 0.1
    assert (
        "| bccd | yolov5n | 2 | 0.700 ± 1.271 | 0.500 ± 0.000 | 1.5 | 000000000000 | equal after 1 epoch: aaaaaaaaaaaa |"
        in lines
    )
    assert (
        "| bccd | dfine-n | 0 | open | open |  |  | DIFFERENT after 2 epochs: aaaaaaaaaaaa, bbbbbbbbbbbb |"
        in lines
    )
    assert "| bccd | ppyoloe-s | 0 | open | open |  |  | open |" in lines
    assert "| bccd | yolov5 | 1 | 0.250 | 0.125 | 1.5 | 000000000000 |  |" in lines


def test_cells_are_listed_with_their_hours_and_unknown_ones_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    kept = [
        row("bccd/yolov5n", 0),
        row("bccd/yolov5n", EQUAL, epochs=1),
        row("bccd/dfine-n", EQUAL, epochs=5),
    ]
    results.write_text("".join(json.dumps(each) + "\n" for each in kept))
    assert main(["--list", "--results", str(results), "--epochs", "30"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "/" in line)
    # a seed that is left takes 90 core seconds, as the one that is done; the comparison after five epochs does not count,
    # because one after one epoch is asked for
    assert [listed[f"bccd/yolov5n/{cell}"] for cell in ("equal", "seed0", "seed1")] == [
        "done",
        "done",
        "0.03 core hours",
    ]
    assert listed["bccd/dfine-n/equal"] != "done"
    order = list(listed)
    assert order[0].endswith("/equal") and order[-1].endswith("/seed2")
    with pytest.raises(SystemExit):
        main(["--cell", "bccd/yolov5n/seed9", "--data", ".", "--work", str(tmp_path)])
    assert "no such cell: {'bccd/yolov5n/seed9'}" in capsys.readouterr().err


STAND_IN = """#!{python}
import json, sys
from pathlib import Path
words = sys.argv[1:]
if words[0] == "-c":
    sys.exit(print("stand-in 1"))
if words[2] == "val":
    Path(words[words.index("--json") + 1]).write_text('{{"metrics": {{"mAP50": 0.5, "mAP50-95": 0.25}}}}')
    sys.exit()
Path("run").mkdir()
Path("run/results.csv").write_text("epoch\\n0\\n1\\n")
Path("run/results.json").write_text(json.dumps({{"weights_sha256": "c" * 64, "words": words}}))
"""


def test_a_cell_writes_a_row_and_runs_again_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python, results, data = tmp_path / "python", tmp_path / "results.jsonl", tmp_path / "data"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    (data / "chess").mkdir(parents=True)
    monkeypatch.setattr(accuracy_study, "PYTHON", str(python))
    cells = ("--cell", "chess/dfine-n/equal", "chess/dfine-n/seed0")
    words = [
        *cells,
        "--epochs",
        "2",
        "--data",
        str(data),
        "--work",
        str(tmp_path / "work"),
        "--results",
        str(results),
    ]
    assert main(words) == 0
    rows = read_rows(results)
    assert [(each["seed"], each["epochs"], each["sha256"]) for each in rows] == [
        (EQUAL, 1, "c" * 64),
        (0, 2, "c" * 64),
    ]
    assert rows[0]["sha256_2"] == "c" * 64 and rows[1]["mAP50"] == 0.5
    assert rows[0]["data"] == rows[1]["data"] == digest(data / "chess")
    trained = json.loads((tmp_path / "work/chess/dfine-n/equal/2/run/results.json").read_text())["words"]
    assert trained[-4:] == ["--recipe", "dfine-few", "--device", "cpu:2"] and "dfine-n" in trained
    capsys.readouterr()
    (data / "chess" / "more.txt").write_text("another data set")
    assert main(words) == 0 and read_rows(results) == rows
    printed = capsys.readouterr().out
    assert printed.count(f"sha256 {'c' * 64}: equal") == 2
    assert f"data {digest(data / 'chess')}: was {rows[0]['data']}" in printed


LIBREYOLO = """#!{python}
import json, os, sys
from pathlib import Path
verb, words = sys.argv[1], sys.argv[2:]
run = Path(words[words.index("--project") + 1]) / "run"
if verb == "val":
    assert words[words.index("--model") + 1] == str(run / "weights" / "last.pt")
    print("a line of its log", file=sys.stderr)
    sys.exit(print(json.dumps({{"metrics": {{"mAP50": 0.5, "mAP50_95": 0.25, "recall": 1.0}}}})))
run.mkdir()
(run / "results.csv").write_text("epoch\\n1\\n2\\n")
"""


def test_a_cell_of_libreyolo_has_the_figures_that_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_sets, "version_of", lambda python, package: f"{package} of {python}")
    program, results = tmp_path / "libreyolo", tmp_path / "results.jsonl"
    program.write_text(LIBREYOLO.format(python=sys.executable))
    program.chmod(0o755)
    make_shapes(tmp_path / "data" / "bccd", images=2, val_images=1, img=64, seed=3)
    places = ["--data", str(tmp_path / "data"), "--work", str(tmp_path / "work"), "--results", str(results)]
    python = str(tmp_path / "python")
    assert (
        main(["--cell", "bccd/libreyolo/seed0", "--epochs", "2", "--libreyolo-python", python, *places]) == 0
    )
    (row,) = read_rows(results)
    assert (row["mAP50"], row["mAP50-95"], row["version"]) == (0.5, 0.25, f"libreyolo of {python}")
    assert "sha256" not in row and "commit" in row


@pytest.mark.slow
def test_originals_come_from_their_revisions_and_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, revisions = tmp_path / "host", {}
    root = {name: host / source.repository for name, source in SETS.items()}
    roboflow_coco(root["chess"])
    for seed, name in enumerate("abcd"):  # equal images would stay in one split
        voc = root["cards"] / "images" / ("test" if name == "d" else "train")
        pictures(voc, [f"{name}.jpg"])
        text(voc / f"{name}.xml", xml(f"{name}.jpg"))
        pictures(root["bccd"] / "BCCD" / "JPEGImages", [f"{name}.jpg"])
        text(root["bccd"] / "BCCD" / "Annotations" / f"{name}.xml", xml(f"{name}.jpg"))
        write_picture(root["nuclei"] / "stage1_train" / name / "images" / f"{name}.png", seed=seed)
        mask = np.zeros((48, 64), np.uint8)
        mask[10:20, 10:20] = 255
        (root["nuclei"] / "stage1_train" / name / "masks").mkdir()
        cv2.imwrite(str(root["nuclei"] / "stage1_train" / name / "masks" / "0.png"), mask)
    for split, names in (("train", "a\nb\nc\n"), ("val", "d\n")):
        text(root["bccd"] / "BCCD" / "ImageSets" / "Main" / f"{split}.txt", names)
    for name, folder in root.items():
        git = ("git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@localhost")
        for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "Add images")):
            subprocess.run([*git, *words], check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        revisions[name] = SETS[name]._replace(revision=head.stdout.strip())
    monkeypatch.setattr(public_sets, "SETS", revisions)
    fetch(tmp_path / "data", f"file://{host}")
    for name in SETS:
        assert {"train", "val"} <= set(load_dataset(str(tmp_path / "data" / name)).splits), name
    fetch(tmp_path / "data", "file:///nowhere")  # everything is there
