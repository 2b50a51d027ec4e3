"""The report of a run and the comparison of runs, without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_rows import rows_of
from report_runs import evaluated, made_run, split_of

from yolofleet.cli.app import run
from yolofleet.data.datasets.index import DataIndex
from yolofleet.inference.evaluate.figures import shared_sample
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.runs.report.clock import PHASES
from yolofleet.runs.report.compare import comparison, unpaired
from yolofleet.runs.report.history import MOST_SPANS, best_of, judgement_of, plain, read_run
from yolofleet.runs.report.page import page, write_report
from yolofleet.runs.report.results import OF_BOXES, Judgement
from yolofleet.tasks.boxes import page as page_module
from yolofleet.tasks.boxes.page import label_figures, page_of
from yolofleet.tasks.task import sampled

HOSTILE = "</script><script>alert(1)</script>"
NAMES = (HOSTILE, "red\x1b[31m", "\u202eturned", "<!--", "@DATA@", "猫", "two\nlines", "h")
UPLOT = {  # version 1.6.32 from npm
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot-LICENSE.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def index(cache: None, tmp_path: Path) -> DataIndex:
    return split_of(tmp_path / "data", ("a", "b", "c"))


class Elements(HTMLParser):
    """The elements of a page, and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.tags[-1][0] if self.tags else "", []).append(data)


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    values: dict[str, Any] = json.loads(found[1])
    return values


def test_a_report_holds_all_parts_and_asks_for_nothing_from_the_network(tmp_path, index):
    folder = made_run(tmp_path / "run", index)
    text = write_report(folder).read_text(encoding="utf-8")
    values = data_of(text)["run"]
    assert values["finished"] and values["verb"] == "train" and values["batch"]
    assert len(values["curves"]["epoch"]) == 6
    assert {"curves", "confusion", "errors", "images", "labels"} <= values["figures"].keys()
    assert values["results"]["weights_sha256"] == "0" * 64
    assert ["epochs", "6", "command line", True] in values["settings"]["settings"]
    # uPlot names its home page in a comment, and SVG's name is not asked for
    addresses = set(re.findall(r"(?:https?|wss?)://[\w./-]+", text))
    assert addresses <= {"https://github.com/leeoniya/uPlot"}
    for tag, attributes in Elements(text).tags:
        assert tag not in ("iframe", "object", "embed", "form", "base"), tag
        assert not any(name.startswith("on") for name in attributes), attributes
        assert not str(attributes.get("src", "")).strip(), attributes


def test_the_policy_of_the_page_lets_only_its_own_script_and_style_run(tmp_path):
    text = write_report(made_run(tmp_path / "run", None)).read_text(encoding="utf-8")
    parts = Elements(text)
    policy = next(a["content"] for t, a in parts.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy and "default-src 'none'" in policy and "unsafe" not in policy

    def digest(tag: str) -> str:
        whole = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(whole) == 1
        return base64.b64encode(hashlib.sha256(whole[0].encode()).digest()).decode()

    assert f"script-src 'sha256-{digest('script')}'" in policy
    assert f"style-src 'sha256-{digest('style')}'" in policy


def test_names_and_paths_of_strangers_stay_text(tmp_path):
    split = split_of(tmp_path / "data <b>", NAMES, 8)
    folder = made_run(tmp_path / "run <img src=x onerror=alert(1)>@STYLE@", split, hosts=(HOSTILE, "b"))
    text = write_report(folder).read_text(encoding="utf-8")
    scripts = re.findall(r"<script\b", re.sub(r"<script>.*?</script>", "<script>", text, flags=re.DOTALL))
    assert len(scripts) == 2, "the data and ours"
    assert HOSTILE not in text
    assert "<!--" not in text.split('type="application/json">')[1].split("</script>")[0]
    assert "<title>run &lt;img src=x onerror=alert(1)&gt;@STYLE@: report</title>" in text
    names = data_of(text)["run"]["figures"]["names"]
    assert names[0] == HOSTILE and names[1] == "red\\x1b[31m" and names[2] == "\\u202eturned"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)


def test_values_of_any_kind_become_plain():
    nested: Any = "x"
    for _ in range(40):
        nested = [nested]
    odd = {"a\x1b": float("nan"), "b": float("inf"), "c": b"\x00", "d": nested, 3: None, "e": 2**70}
    values = plain(odd)
    assert values["a\\x1b"] is None and values["b"] is None and values["3"] is None
    assert json.loads(json.dumps(values)) == values


def test_an_unfinished_run_has_a_report_of_what_is_there(tmp_path, capsys):
    folder = made_run(tmp_path / "run", None, finished=False)
    with folder.events(0).open("a") as events:
        events.write(
            '{"time": 1e9, "kind": "phases", "epoch": 9, "seconds": [[1, 2]]}\n[1]\n{"time": "x"}\n{"cut'
        )
    assert run(["report", str(folder.path)]) == 0
    assert capsys.readouterr().out.strip() == str(folder.report)
    values = data_of(folder.report.read_text(encoding="utf-8"))["run"]
    assert not values["finished"] and values["figures"] == {} and len(values["timeline"]["spans"]) == 6


def test_an_unfinished_run_has_versions_and_figures_so_far(tmp_path, index):
    folder, done = made_run(tmp_path / "run", index, finished=False), made_run(tmp_path / "done", index)
    found = read_run(folder)["results"]
    assert found["versions"] == {"torch": "2.9"}, "the later start has none"
    assert found["fleet"] == {"processes": 2, "device": None, "hosts": ["node-a", "node-b"]}
    assert found["steps"] == 60 and found["images_seen"] == 960 and found["best"]["epoch"] == 6
    lines = {name: values for name, _, *values in comparison([read_run(folder), read_run(done)])["figures"]}
    assert lines["mAP50-95"][0] == pytest.approx((1 - 0.9**6) / 2, abs=1e-5) and lines["seconds"][0] == 60
    assert None not in lines["precision"] + lines["best epoch"] + lines["processes"]


def test_damaged_starts_make_no_failure(tmp_path):
    folder = made_run(tmp_path / "run", None, finished=False)
    with folder.events(0).open("a") as events:
        events.write(
            '{"time": 2e9, "kind": "start", "step": 1, "versions": [1], "kernels": 3, "hosts": [[1]]}\n'
        )
    assert read_run(folder)["results"]["fleet"]["device"] is None


def test_the_best_epoch_is_chosen_as_the_training_does():
    def row(epoch: int, map50: str, map50_95: str) -> dict[str, str]:
        return {"epoch": str(epoch), "metrics/mAP50": map50, "metrics/mAP50-95": map50_95}

    def epoch(*rows: dict[str, str]) -> float:
        return best_of(rows, OF_BOXES)["epoch"]

    assert best_of([], OF_BOXES) == best_of([row(1, "", "")], OF_BOXES) == {}
    assert epoch(row(1, "0", "0"), row(2, "0", "0")) == 2
    assert epoch(row(1, "0.9", "0.40"), row(2, "0.1", "0.41"), row(3, "0.9", "0.40")) == 1
    assert epoch(row(1, "0.5", "0.4"), row(2, "nan", "1e999"), row(3, "x", "0.1")) == 1


CIRCLES = Judgement({"metrics/overlap": "overlap"}, {"overlap": "overlap"}, {"overlap": 1.0})


def test_a_run_of_a_users_task_is_shown_by_its_own_figures(tmp_path):
    folder = made_run(tmp_path / "run", None, finished=False)
    folder.results_csv.write_text(
        folder.results_csv.read_text().replace("metrics/mAP50-95", "metrics/overlap")
    )
    folder.status.write_text(json.dumps({"state": "running", "task": CIRCLES.stored()}))
    found, last = read_run(folder), pytest.approx((1 - 0.9**6) / 2, abs=1e-5)
    assert found["best"] == {"epoch": 6, "main": last, "fitness": last} and found["task"]["main"] == "overlap"
    assert found["results"]["metrics"] == {"overlap": last}
    assert comparison([found, found])["figures"][0] == ["overlap", True, last, last]


@pytest.mark.parametrize("task", [3, {"columns": {}}, CIRCLES.stored() | {"fitness_of": {"overlap": None}}])
def test_a_damaged_task_of_a_run_counts_as_boxes(tmp_path, task):
    folder = made_run(tmp_path / "run", None, finished=False)
    folder.status.write_text(json.dumps({"task": task}))
    assert judgement_of(folder) is OF_BOXES


def test_a_folder_that_is_used_again_shows_the_last_run(tmp_path):
    folder = made_run(tmp_path / "run", None)
    before = folder.events(0).read_text()
    folder.events(0).write_text(before + before.splitlines()[0] + "\n")  # it starts once more
    values = read_run(folder)
    assert len(values["timeline"]["attempts"]) == 1 and not values["finished"]


@pytest.mark.parametrize("file", ["report.json", "results.json", "events.jsonl", "config.yaml"])
def test_a_damaged_file_costs_only_its_part(tmp_path, index, file):
    folder = made_run(tmp_path / "run", index)
    (folder.path / file).write_bytes(b"\xff{[" * 99)
    values = data_of(write_report(folder).read_text(encoding="utf-8"))["run"]
    assert values["curves"]["epoch"]
    assert bool(values["settings"]["problem"]) == (file == "config.yaml")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"epoch,step\n1,1\n1e999,2\n", "expected a whole number as epoch, got 1e999"),
        (b"epoch,step\n" + b"9" * 9000 + b",2\n", "got 99999999999999999..."),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"epoch,a\n1," + b"x" * 200_000, "field larger than field limit"),
    ],
)
def test_a_damaged_table_costs_only_the_curves(tmp_path, index, capsys, content, words):
    folder, other = made_run(tmp_path / "run", index), made_run(tmp_path / "other", index)
    folder.results_csv.write_bytes(content)
    assert run(["report", str(folder.path)]) == 0
    values = data_of(folder.report.read_text(encoding="utf-8"))["run"]
    assert values["curves_problem"].count(str(folder.path)) == 1 and words in values["curves_problem"]
    assert values["curves"] == {} and values["timeline"] and values["figures"]["confusion"]
    found = comparison([read_run(folder), read_run(other)])
    assert words in found["runs"][0]["curves_problem"] and found["images"] == 6


def test_numbers_that_nobody_can_calculate_with_are_left_out(tmp_path, index):
    one, two = made_run(tmp_path / "one", index), made_run(tmp_path / "two", index)
    huge, table = "9" * 400, "[" + ",".join(["9" * 400] * len(PHASES)) + "]"
    with two.events(0).open("a") as events:
        events.write(f'{{"time": {huge}, "kind": "end"}}\n')
        events.write('{"time": Infinity, "kind": "rollback"}\n')
        events.write(f'{{"time": 2e9, "kind": "start", "step": 1, "start_s": {huge}}}\n')
        events.write(f'{{"time": 2e9, "kind": "phases", "epoch": 9, "seconds": [{table}]}}\n')
    figures = json.loads(two.report_json.read_text())
    for image, size in zip(figures["images"], ("[1e999, 1]", "[Infinity, 1]", f"[{huge}, 1]"), strict=False):
        image["size_wh_px"] = size
    figures["images"][3]["detections"] = [[0, 0, 0, 1, 1, 1]] * 1001
    text = json.dumps(figures).replace('"size_wh_px": "', '"size_wh_px": ').replace(', 1]"', ", 1]")
    two.report_json.write_text(text)
    write_report(two)
    found = comparison([read_run(one), read_run(two)])
    assert found["images"] == 2


def test_what_is_no_run_is_refused(tmp_path, capsys):
    for argv, words in (
        (["report", str(tmp_path)], "is not the folder of a run"),
        (["report", str(tmp_path / "none")], "is not a folder"),
        (["report", "a", "b"], "takes one run folder, got 2"),
        (["report"], "takes one run folder, got 0"),
        (["report", "compare", str(tmp_path)], "cannot compare 1 run:"),
    ):
        assert run(argv) == 2
        assert words in capsys.readouterr().err


def test_a_report_needs_no_torch(tmp_path):
    folder = made_run(tmp_path / "run", None)
    code = "import sys; from yolofleet.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "report", str(folder.path)], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_chart_library_is_the_published_one():
    assets = files("yolofleet.runs.report") / "assets"
    for name, digest in UPLOT.items():
        assert hashlib.sha256((assets / name).read_bytes()).hexdigest() == digest, name


# -- figures -----------------------------------------------------------------------------------------------


def test_the_sample_is_spread_and_bounded(monkeypatch):
    assert sampled(0).tolist() == [] and sampled(3).tolist() == [0, 1, 2]
    monkeypatch.setattr("yolofleet.tasks.task.MOST_IMAGES", 5)
    assert sampled(101).tolist() == [0, 25, 50, 75, 100]


class TwoRanks:
    """Gathers what two ranks send, one after the other."""

    size = 2

    def __init__(self, rank: int, sent: list[bytes]) -> None:
        self.rank, self.sent = rank, sent

    def all_gather_bytes(self, payload: bytes, /) -> list[bytes]:
        self.sent.append(payload)
        return self.sent


def part(evaluation: Evaluation, rank: int) -> Evaluation:
    from dataclasses import replace

    found = evaluation.detections
    return replace(evaluation, detections=found.rows(found.image % 2 == rank))


def test_figures_do_not_depend_on_the_fleet(index):
    whole, sent = evaluated(index), list[bytes]()
    shared_sample(part(whole, 1), TwoRanks(1, sent))
    together = shared_sample(part(whole, 0), TwoRanks(0, sent))
    alone = shared_sample(whole, None)
    assert page_of(whole.metrics, together, index) == page_of(whole.metrics, alone, index)


def pictures(found: dict[str, Any]) -> list[str]:
    return [image["jpeg"] for image in found["images"] if image["jpeg"]]


def test_boxes_are_fractions_of_the_image_and_pictures_are_bounded(monkeypatch, index):
    evaluation = evaluated(index, noise=0.0)
    found = page_of(evaluation.metrics, shared_sample(evaluation, None), index)
    image = found["images"][2]
    first = rows_of(index.labels(2))[0]
    assert image["labels"][0][0] == first[0]
    np.testing.assert_allclose(image["labels"][0][1:3], first[1:3] - first[3:] / 2, atol=1e-4)
    assert all(0.1 <= box[5] <= 1 for box in image["detections"])
    monkeypatch.setattr(page_module, "PICTURE_BYTES", 9000)
    fewer = page_of(evaluation.metrics, shared_sample(evaluation, None), index)
    assert 0 < sum(map(len, pictures(fewer))) <= 9000 and len(pictures(fewer)) < len(pictures(found))


def test_an_image_that_has_gone_costs_only_its_picture(index):
    evaluation = evaluated(index)
    Path(index.path(0)).unlink()
    found = page_of(evaluation.metrics, shared_sample(evaluation, None), index)
    assert not found["images"][0]["jpeg"] and len(pictures(found)) == len(index) - 1


def test_label_statistics_count_each_label_once(index):
    found = label_figures(index)
    assert sum(found["per_class"]) == sum(found["side_counts"]) == len(index.classes) == found["labels"]
    assert np.sum(found["centres"]) == len(index.classes)


# -- the time line -----------------------------------------------------------------------------------------


def test_the_events_of_the_time_line_have_changes_of_shares(tmp_path):
    folder = made_run(tmp_path / "run", None)
    with folder.events(0).open("a") as events:
        events.write(json.dumps({"time": 1e9 + 9, "kind": "shares", "why": "rank 1 computes 3"}) + "\n")
    marks = read_run(folder)["timeline"]["marks"]
    assert {"at_s": 9, "kind": "shares", "text": "rank 1 computes 3"} in marks


def test_the_time_line_has_starts_stragglers_and_no_overlap(tmp_path):
    line = read_run(made_run(tmp_path / "run", None))["timeline"]
    assert [a["restarts"] for a in line["attempts"]] == [0, 1] and line["attempts"][0]["from_s"] == 0
    assert [rank["host"] for rank in line["ranks"]] == ["node-a", "node-b"]
    assert [rank["slowest_epochs"] for rank in line["ranks"]] == [0, 6]  # rank 1 computes 2 s longer
    assert line["ranks"][1]["waited_s"] == pytest.approx(line["ranks"][0]["seconds"]["comm"])
    assert line["marks"][0]["text"] == "started again after step 30: rank 1 was killed"
    borders = [s for span in line["spans"] for s in (span["from_s"], span["to_s"])]
    assert borders == sorted(borders)
    pause = line["spans"][3]["from_s"] - line["spans"][2]["to_s"]
    assert pause == pytest.approx(12, abs=0.01)  # the start-up is drawn in the pause


@pytest.mark.slow
def test_many_epochs_and_ranks_are_added_up(tmp_path):
    folder = made_run(tmp_path / "run", None, hosts=["h"] * 70, epochs=500)
    line = read_run(folder)["timeline"]
    assert len(line["spans"]) <= MOST_SPANS + 2 and sum(span["epochs"] for span in line["spans"]) == 500
    assert len(line["ranks"]) == 64 and line["ranks_in_all"] == 70 and line["ranks"][1]["rank"] == 1
    text = page("x", {"kind": "run", "run": read_run(folder)})
    assert len(text) < 1_000_000


# -- comparison --------------------------------------------------------------------------------------------


def test_a_comparison_shows_what_differs(tmp_path, index, capsys):
    one = made_run(tmp_path / "one", index)
    two = made_run(tmp_path / "two", index, seed=1, epochs=4, settings=["lr_schedule=cosine"])
    out = tmp_path / "out.html"
    assert run(["report", "compare", str(one.path), str(two.path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    found = data_of(out.read_text(encoding="utf-8"))
    assert sorted(row[0] for row in found["settings"]) == ["epochs", "lr_schedule", "seed"]
    assert [run["name"] for run in found["runs"]] == ["one", "two"]
    assert [name for name, *_ in found["classes"]] == ["a", "b", "c"]
    assert found["images"] == 6 and found["differing"] and len(found["disagreements"][0]["detections"]) == 2
    assert found["disagreements"][0]["jpeg"]


def test_equal_runs_agree(tmp_path, index):
    runs = [read_run(made_run(tmp_path / place / "exp", index)) for place in ("p", "q")]
    found = comparison(runs)
    assert found["settings"] == [] and found["differing"] == 0 and found["disagreements"] == []
    assert [run["name"] for run in found["runs"]] == ["p/exp", "q/exp"]


def changed_images(report: Path, change: str) -> None:
    figures = json.loads(report.read_text())
    for number, image in enumerate(figures["images"]):
        if change == "others":
            image["path"] = f"other{number}.jpg"
        elif change == "one other" and not number:
            image["path"] = "other.jpg"
        elif change == "labels" and not number:
            image["labels"] = image["labels"][1:]
    figures["images"] = figures["images"][: 3 if change == "a part" else None]
    report.write_text(json.dumps(figures))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("others", "one on 6, two on 6 of those in the reports; 0 are common, 0 with"),
        ("one other", "5 are common, 5 with equal labels"),
        ("a part", "one on 6, two on 3 of those in the reports; 3 are common, 3 with"),
        ("labels", "6 are common, 5 with equal labels"),
        ("none", ""),
    ],
)
def test_no_accuracy_is_best_if_the_runs_were_validated_on_different_images(tmp_path, index, change, says):
    one, two = made_run(tmp_path / "one", index), made_run(tmp_path / "two", index, seed=1)
    changed_images(two.report_json, change)
    found = comparison([read_run(one), read_run(two)])
    is_better = {name: higher for name, higher, *_ in found["figures"]}
    accuracies = ("mAP50-95", "precision", "best fitness")
    assert [is_better[name] for name in accuracies] == [None if says else True] * 3
    assert is_better["seconds"] is False and says in found["unlike"] and bool(found["unlike"]) == bool(says)


def test_a_detection_agrees_with_one_of_its_class_and_place():
    one = np.array([[0, 0.1, 0.1, 0.2, 0.2, 0.9], [0, 0.5, 0.5, 0.2, 0.2, 0.9], [1, 0.5, 0.5, 0.2, 0.2, 0.3]])
    assert unpaired(one, one) == 0
    other = one.copy()
    other[1, 0] = 2  # another class: both of them are alone
    other[2, 5] = 0.2  # not shown, so the third is alone
    assert unpaired(one, other) == 3
    twice = np.vstack([one, one[:1]])  # a partner has one detection only
    assert unpaired(one, twice) == 1
    assert unpaired(one, np.zeros((0, 6))) == 3


def test_a_run_without_figures_is_compared_by_the_rest(tmp_path, index):
    one, two = made_run(tmp_path / "one", index), made_run(tmp_path / "two", None)
    (tmp_path / "two" / "report.json").write_text('{"images": [{"path": 3}, 7], "per_class": []}')
    found = comparison([read_run(one), read_run(two)])
    assert found["images"] == 0 and found["figures"]
    assert found["left_out"] == ["two: its report.json has no detections of a validation"]


def test_runs_that_cannot_be_compared_by_images_leave_the_others(tmp_path, index):
    bare, one, two, other = (made_run(tmp_path / name, index, seed=at) for at, name in enumerate("abcd"))
    bare.report_json.unlink()
    figures = json.loads(other.report_json.read_text())
    other.report_json.write_text(json.dumps(figures | {"names": ["x", "y", "z"]}))
    found = comparison([read_run(folder) for folder in (bare, one, other, two)])
    assert found["compared"] == [1, 3] and found["images"] == 6 and found["names"] == ["a", "b", "c"]
    assert [line[0] for line in found["left_out"]] == ["a", "d"]
    assert found["left_out"][1] == "d: its classes are not those of b"
