"""What a board reads: which runs there are, their state and its sign, and hostile folders."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from threading import Thread

import pytest
from board_runs import grow, publish, report_ranks
from report_runs import made_run

from yolofleet.cli.commands import named_run
from yolofleet.runs.board import runs as board_runs
from yolofleet.runs.board.runs import Run, Runs, find_runs
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.results import Judgement
from yolofleet.storage.mirrored import mirror_of
from yolofleet.support.errors import ConfigError, StorageError


def rows_of(runs: Runs) -> list[dict]:
    runs.look()
    return runs.rows()


def row_of(folder: RunFolder) -> dict:
    (row,) = rows_of(Runs([folder.path]))
    return row


def aged(path: Path, seconds: float) -> None:
    """Make a file, or all files of a folder, look older."""
    for file in [path, *(path.rglob("*") if path.is_dir() else ())]:
        os.utime(file, (time.time() - seconds,) * 2)


def test_the_rows_of_runs_in_a_store_follow_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    folder = made_run(tmp_path / "bucket/exp", None, finished=False)
    publish(folder, epoch=3, epochs=300)
    runs = Runs([named_run(f"file://{tmp_path}/bucket")])
    (row,) = rows_of(runs)
    assert (
        row["folder"] == f"file://{tmp_path}/bucket/exp" and row["state"] == "running" and row["epoch"] == 3
    )
    assert not row["may_ask"]  # the run's machine would not see a request
    mirror = mirror_of(str(runs.places[0]))
    assert mirror is not None
    publish(folder, epoch=4, epochs=300)
    mirror.update()
    assert rows_of(runs)[0]["epoch"] == 4
    publish(folder, "ended", epoch=4, epochs=300)
    made_run(tmp_path / "bucket/next", None, epochs=2)
    mirror.update()
    rows = {row["name"]: row for row in rows_of(runs)}
    assert sorted(rows) == ["exp", "next"] and rows["exp"]["state"] == "ended"


def test_runs_are_found_at_every_usual_depth_and_links_are_not_followed(tmp_path: Path) -> None:
    for name in ("runs/train/exp", "runs/val/exp", "runs/tune/exp/trials/001", "elsewhere/exp"):
        made_run(tmp_path / name, None, epochs=2)
    (tmp_path / "runs/tune/exp/config.yaml").write_text("x")
    (tmp_path / "runs/train/linked").symlink_to(tmp_path / "elsewhere/exp")
    (tmp_path / "runs/train/empty").mkdir()
    found = {name: path for path, name in find_runs([tmp_path / "runs"])}
    assert sorted(found) == ["train/exp", "tune/exp/trials/001", "val/exp"]
    assert [name for _, name in find_runs([tmp_path / "runs/train/exp"])] == ["exp"]


def test_folders_full_of_pictures_hide_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yolofleet.runs.board.runs.MOST_IN_FOLDER", 10)
    monkeypatch.setattr("yolofleet.runs.board.runs.MOST_ENTRIES", 30)
    made_run(tmp_path / "train/exp", None, epochs=2)
    pictures = tmp_path / "predict/exp"
    pictures.mkdir(parents=True)
    for number in range(100):
        (pictures / f"{number}.jpg").touch()
    assert [name for _, name in find_runs([tmp_path])] == ["train/exp"]


def test_the_status_of_rank_0_decides_the_row(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "exp", None, finished=False)
    publish(folder, epoch=3, epochs=300, share=0.01)
    row = row_of(folder)
    assert row["state"] == "running" and row["may_ask"] and row["epoch"] == 3 and row["epochs"] == 300
    assert row["rate_img_s"] == 412.3
    assert row["ends_at_s"]
    assert row["best"] == pytest.approx((1 - 0.9**6) / 2, abs=1e-5)
    publish(folder, "stopped", why="SIGTERM")
    row = row_of(folder)
    assert row["state"] == "stopped" and "SIGTERM" in row["sign"] and not row["may_ask"]
    assert row["ends_at_s"] is None and row["rate_img_s"] == pytest.approx(100, abs=1)
    publish(folder, "failed", why="NumericsError: NaN")
    assert row_of(folder)["state"] == "failed"
    publish(folder, "ended")
    assert row_of(folder)["state"] == "ended" and row_of(folder)["share"] == 1


def test_a_run_that_is_silent_has_failed_and_its_last_words_say_why(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "exp", None, finished=False)
    publish(folder)
    aged(folder.status, 60)
    assert row_of(folder)["state"] == "failed" and "no sign of life since" in row_of(folder)["sign"]
    words = {"rank": 1, "message": "ClusterError: no \x1b[31m answer\n  try : this", "exit_code": 4}
    folder.failure(1).write_text(json.dumps(words))
    folder.failure(0).write_text(json.dumps(words | {"rank": 0, "secondary": True}))
    assert row_of(folder)["sign"] == "rank 1: ClusterError: no \\x1b[31m answer"
    folder.failure(1).write_text(json.dumps(words | {"message": "Stopped: on request", "exit_code": 75}))
    assert row_of(folder)["state"] == "stopped"


def test_a_run_that_the_launcher_starts_again_goes_on(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "exp", None, finished=False)
    publish(folder, "failed", why="rank 1 did not answer", time=time.time() - 20)
    event = {"time": time.time() - 10, "kind": "restart", "why": "rank 1 was killed", "step": 3}
    folder.launcher_events.write_text(json.dumps(event) + "\n")
    assert row_of(folder)["state"] == "running"
    assert row_of(folder)["sign"] == "starts again: rank 1 was killed"
    folder.launcher_events.write_text(json.dumps(event | {"time": time.time() - 1000}) + "\n")
    assert row_of(folder)["state"] == "failed"


def test_a_run_without_a_status_is_judged_by_its_files(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "exp", None)
    assert row_of(folder)["state"] == "running" and "a file changed" in row_of(folder)["sign"]
    assert not row_of(folder)["may_ask"], "nobody would take the request"
    aged(folder.path, 1000)
    assert row_of(folder)["state"] == "stopped"
    folder.results_json.write_text(json.dumps({"metrics": {"mAP50-95": 0.25}}))
    folder.results_csv.unlink()
    assert row_of(folder)["state"] == "ended" and row_of(folder)["best"] == 0.25
    task = Judgement({"metrics/overlap": "overlap"}, {}, {"overlap": 1.0}).stored()
    folder.results_json.write_text(json.dumps({"metrics": {"overlap": 0.5}, "task": task}))
    assert row_of(folder)["best"] == 0.5 and row_of(folder)["figure"] == "overlap"


def looked(folder: RunFolder) -> tuple[Runs, Run]:
    """Return the runs of a board on one run folder, and this run."""
    runs = Runs([folder.path])
    runs.look()
    run = runs.get(runs.rows()[0]["id"])
    assert run is not None
    return runs, run


def test_versions_change_with_the_files_only(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "exp", None, finished=False)
    publish(folder)
    runs, run = looked(folder)
    before = run.progress, run.figures
    publish(folder, epoch=131)
    runs.look()
    assert (run.progress, run.figures) == before and run.row["epoch"] == 131
    epochs = json.loads(runs.values(run, "progress"))["curves"]["epoch"]
    grow(folder, 7)
    runs.look()
    assert run.progress != before[0] and run.figures == before[1]
    assert json.loads(runs.values(run, "progress"))["curves"]["epoch"] == [*epochs, 7]


def ranks_of(runs: Runs, run: Run) -> dict:
    runs.look()
    found: dict = json.loads(runs.values(run, "ranks"))["ranks"]
    return found


def test_the_ranks_of_a_running_run_are_shown(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "exp", None, finished=False)
    publish(folder)
    runs, run = looked(folder)
    assert ranks_of(runs, run) == {}
    report_ranks(folder, 4, host="red\x1b[31m<b>" + "x" * 900, quiet_s=90.0)
    found = ranks_of(runs, run)
    assert found["title"].startswith("4 ranks on 3 hosts, step 1300, ") and found["rest"] == ""
    first, second = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"][:2]]
    assert first["host"].startswith("red\\x1b[31m<b>xxx") and len(first["host"]) == 80
    assert first["phase"].startswith("computing 1") and first["note"] == "no progress"
    assert second["note"] == "slowest" and second["img/s"] == "110" and second["temp"] == "61 C"
    report_ranks(folder, 100)
    found = ranks_of(runs, run)
    assert len(found["rows"]) == 64 and found["rest"] == "36 more; of 100: 100 computing, up to 61 C"
    assert found["rows"][1][0] == "1", "the slowest"
    aged(folder.ranks, 100)
    assert ranks_of(runs, run) == {}, "an earlier start has left it"
    report_ranks(folder)
    publish(folder, "ended")
    assert ranks_of(runs, run) == {}


def test_ranks_of_strangers_make_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_run(tmp_path / "exp", None, finished=False)
    publish(folder)
    runs, run = looked(folder)
    for text in (
        "",
        "[" * 100_000,
        "{}",
        '{"time": 1, "ranks": []}',
        '{"time": 1, "ranks": [[1e999]]}',
        "9" * 5000,
    ):
        folder.ranks.write_text(text)
        assert ranks_of(runs, run) == {}, text[:40]
    report_ranks(folder)
    monkeypatch.setattr(board_runs, "RANKS_BYTES", 100)
    runs.look()
    assert run.ranks and ranks_of(runs, run) == {}, "too large"
    monkeypatch.undo()
    folder.ranks.rename(tmp_path / "ranks.json")
    folder.ranks.symlink_to(tmp_path / "ranks.json")
    assert ranks_of(runs, run) == {}
    folder.ranks.unlink()
    os.mkfifo(folder.ranks)
    assert ranks_of(runs, run) == {}


def test_runs_appear_and_vanish(tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "one", None)
    runs = Runs([tmp_path / "runs"])
    runs.look()
    made_run(tmp_path / "runs" / "two", None)
    runs.look()
    assert {row["name"] for row in runs.rows()} == {"one", "two"}
    (tmp_path / "runs" / "one").rename(tmp_path / "gone")
    runs.look()
    assert [row["name"] for row in runs.rows()] == ["two"]
    gone = Runs([tmp_path / "nowhere"])
    gone.look()
    assert gone.rows() == []


def test_a_request_is_a_file_and_only_a_running_run_can_be_asked(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "exp", None, finished=False)
    publish(folder)
    _, run = looked(folder)
    run.ask("save")
    assert folder.request("save").is_file() and not folder.request("stop").exists()
    run.look()
    assert run.row["asked"] == ["save"]
    assert folder.take_request("save") and not folder.take_request("save")
    folder.request("stop").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="symbolic link"):
        run.ask("stop")
    assert not (tmp_path / "precious").exists()
    publish(folder, "ended")
    with pytest.raises(ConfigError, match="ended"):
        run.ask("stop")


SECRET = "do-not-show-this"


def test_nothing_behind_a_symbolic_link_is_shown(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (secret / "logs").mkdir(parents=True)
    (secret / "plots").mkdir()
    (secret / "file").write_text(f"epoch,{SECRET}\n1,2\n")
    (secret / "json").write_text(json.dumps({"names": [SECRET], "metrics": {SECRET: 1}, "time": 1}))
    (secret / "logs" / "rank-0.log").write_text(SECRET)
    (secret / "logs" / "status.json").write_text(json.dumps({"state": "failed", "why": SECRET, "time": 1}))
    (secret / "logs" / "launcher.events.jsonl").write_text(
        json.dumps({"time": time.time(), "kind": "restart", "why": SECRET}) + "\n"
    )
    (secret / "logs" / "error-rank-0.json").write_text(json.dumps({"message": SECRET, "exit_code": 1}))
    run = tmp_path / "runs" / "bad"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("verb: train\n")
    for name, target in (
        ("results.csv", "file"),
        ("events.jsonl", "json"),
        ("report.json", "json"),
        ("results.json", "json"),
        ("logs", "logs"),
        ("plots", "plots"),
    ):
        (run / name).symlink_to(secret / target)
    linked = tmp_path / "runs" / "linked"
    linked.mkdir()
    (linked / "results.json").write_text("{}")
    (linked / "config.yaml").symlink_to(secret / "file")
    runs = Runs([tmp_path / "runs"])
    runs.look()
    assert {row["name"] for row in runs.rows()} == {"bad", "linked"}
    for row in runs.rows():
        found = runs.get(row["id"])
        assert found is not None
        texts = [json.dumps(row), *(runs.values(found, part).decode() for part in ("progress", "figures"))]
        assert SECRET not in "".join(texts)
    with pytest.raises((ConfigError, StorageError)):
        runs.get(runs.rows()[0]["id"]).ask("stop")  # type: ignore[union-attr]


def test_damaged_and_huge_files_make_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        board_runs, "LIMITS", board_runs.LIMITS._replace(table_bytes=10_000, events_bytes=10_000)
    )
    folder = made_run(tmp_path / "a\x1b[31m<b>\u202e", None)
    for name, text in {
        "results.csv": "epoch,step\n" + "1,2\n" * 10_000,
        "events.jsonl": '{"time": 1e400, "kind": ["start"]}\n[' * 10,
        "report.json": "[" * 100_000,
        "results.json": '{"metrics": [1], "best": NaN}',
        "config.yaml": "a: &x [*x]\n",
        "logs/status.json": '{"state": {"a": 1}, "time": "soon", "epoch": [], "share": 1e999, "why": [[]]}',
        "logs/launcher.events.jsonl": '{"time": 1e308, "kind": "restart", "why": {}}\nnull\n',
        "logs/rank-0.log": "\x00\x1b]0;x\x07 a\n" + "x" * 100_000,
        "logs/error-rank-0.json": '{"message": null, "exit_code": "a"}',
        "plots/train_step0.jpg": "no picture",
    }.items():
        (folder.path / name).write_text(text)
    runs = Runs([tmp_path])
    runs.look()
    (row,) = runs.rows()
    run = runs.get(row["id"])
    assert run is not None
    shown = json.dumps(row, ensure_ascii=False)
    assert "\x1b" not in shown and "\u202e" not in shown and len(shown) < 5000
    values = json.loads(runs.values(run, "progress"))
    assert "the limit is" in values["curves_problem"] and values["folder"] and values["settings"]["problem"]
    assert json.loads(runs.values(run, "figures"))["batch"] == ""
    for name in ("results.csv", "logs/status.json", "logs/rank-0.log"):
        (folder.path / name).unlink()
        os.mkfifo(folder.path / name)
    runs.look()
    assert run.row["epoch"] is None and json.loads(runs.values(run, "progress"))["curves"] == {}


def test_a_folder_that_is_replaced_during_a_read_makes_no_failure(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "runs" / "exp", None)
    runs = Runs([tmp_path / "runs"])
    runs.look()
    run = runs.get(runs.rows()[0]["id"])
    assert run is not None
    folder.path.rename(tmp_path / "away")
    assert runs.values(run, "progress") and runs.values(run, "figures")
    run.look()
    (tmp_path / "runs" / "exp").write_text("a file")
    runs.look()
    assert runs.rows() == []


def test_the_values_that_are_kept_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        made_run(tmp_path / str(number), None)
    monkeypatch.setattr(board_runs, "CACHE_BYTES", 10_000)
    monkeypatch.setattr(board_runs, "MOST_RUNS", 3)
    runs = Runs([tmp_path])
    runs.look()
    assert len(runs.rows()) == 3
    for row in runs.rows():
        run = runs.get(row["id"])
        assert run is not None and runs.values(run, "progress")
    assert sum(len(text) for _, text in runs._pages.values()) <= 10_000 or len(runs._pages) == 1


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            "epoch," + ",".join(f"c{n}" for n in range(2000)) + "\n" + ("1," * 2000 + "1\n") * 500,
            "256 columns, got 2,001",
        ),
        ("epoch,step\n" + "1,2\n" * 30_000, "at most 20,000 rows"),
    ],
)
def test_a_table_with_too_many_columns_or_rows_is_named_and_not_read(
    tmp_path: Path, table: str, says: str
) -> None:
    folder = made_run(tmp_path / "exp", None, epochs=2)
    folder.results_csv.write_text(table)
    runs = Runs([tmp_path])
    runs.look()
    (run,) = map(runs.get, [row["id"] for row in runs.rows()])
    assert run is not None
    values = json.loads(runs.values(run, "progress"))
    assert says in values["curves_problem"] and values["curves"] == {}


def test_a_page_that_is_read_for_long_keeps_no_other_page_and_no_list_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("slow", "quick"):
        made_run(tmp_path / name, None, epochs=2)
    runs = Runs([tmp_path])
    runs.look()
    slow, quick = (
        next(r for r in map(runs.get, [row["id"] for row in runs.rows()]) if r and r.name == name)
        for name in ("slow", "quick")
    )
    read = Run.progress_values
    finished = []

    def elsewhere() -> None:
        runs.look()
        finished.append(json.loads(runs.values(quick, "progress"))["name"])

    def progress(run: Run) -> dict:
        if run is slow:
            other = Thread(target=elsewhere, daemon=True)
            other.start()
            other.join(900)
        return read(run)

    monkeypatch.setitem(board_runs.PARTS, "progress", progress)
    assert json.loads(runs.values(slow, "progress"))["name"] == "slow"
    assert finished == ["quick"]
