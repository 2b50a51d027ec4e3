"""Data sets that somebody else made: named pipes, devices, links, and words that are no numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from label_rows import index_of
from small_data import voc_object, voc_set, write_picture, yolo_set

from yolofleet.cli.app import run
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.fleet.doctor.log_files import read_log
from yolofleet.inference.predict.sources import Source, find_items
from yolofleet.storage.atomic import write_json
from yolofleet.support.errors import ConfigError, DataError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="named pipes and devices")


BOX = "0 0.5 0.5 0.5 0.5\n"


def test_a_label_that_links_to_nothing_does_not_hide_the_others(tmp_path: Path) -> None:
    data = yolo_set(tmp_path / "set", {"a": None, "b": BOX, "c": BOX})
    (tmp_path / "set" / "labels" / "train" / "a.txt").symlink_to("nowhere")
    index = index_of(data)
    assert len(index) == 2 and index.unlabelled == 0
    assert [problem.kind for problem in index.problems] == ["labels-unreadable"]


def test_no_file_among_sources_or_logs_is_passed_over(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "clip.mp4").symlink_to("/dev/zero")
    write_picture(tmp_path / "good.png")
    (tmp_path / "list.txt").write_text("pipe\nclip.mp4\ngood.png\n")
    source = Source(str(tmp_path / "list.txt"))
    assert [Path(frame.path).name for frame in source] == ["good.png"]
    assert [word in problem for word, problem in zip(("pipe", "device"), source.problems, strict=True)] == [
        True
    ] * 2
    for name, read, says in (("a.png", find_items, "no pictures"), ("rank-0.log", read_log, "none of")):
        folder = tmp_path / name.partition(".")[2]
        folder.mkdir()
        (folder / name).symlink_to(pipe)
        with pytest.raises((ConfigError, DataError), match=says):
            read(str(folder))


# -- folders


def test_the_yaml_of_another_program_is_not_the_data_set(tmp_path: Path) -> None:
    root = voc_set(tmp_path / "set", {"a": voc_object("x", (1, 1, 9, 9))})
    (root / "environment.yml").write_text("name: torch\nchannels: [conda-forge]\ndependencies: [python]\n")
    (root / "docker-compose.yaml").write_text("services: {a: {image: b}}\n")
    spec = load_dataset(str(root))
    assert spec.splits["train"][0].kind == "voc" and spec.missing == {}  # it has no list of test images
    assert run(["data", "check", str(root)]) == 0


def test_a_generated_set_that_does_not_fit_on_the_disk_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # bytes of a file; a picture has more
    try:
        code = run(["data", "make", "shapes", "--out", str(tmp_path / "set"), "--images", "2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 3 and "cannot write" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_set_that_is_refused_does_not_say_that_labels_were_dropped(tmp_path: Path) -> None:
    data = yolo_set(tmp_path / "set", {"a": "7 .5 .5 .5 .5\n", "b": BOX})
    with pytest.raises(DataError, match="class 7") as caught:
        index_of(data)
    assert "dropped" not in caught.value.render()


def test_a_file_whose_size_is_known_is_read_without_a_second_copy(tmp_path: Path) -> None:
    sparse = tmp_path / "state.safetensors"
    with sparse.open("wb") as file:
        file.truncate(400 << 20)
    code = (
        "import resource, sys\nfrom yolofleet.storage.foreign import read_foreign\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\nbefore = peak()\n"
        "content = read_foreign(sys.argv[1], limit_bytes=1 << 30)\nprint(len(content) >> 20, peak() - before)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, sparse], capture_output=True, text=True, check=True
    ).stdout
    length_mib, grown_mib = map(int, said.split())
    assert length_mib == 400 and grown_mib < 450


def test_a_name_that_is_not_utf8_is_written_and_read_back(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    write_json(tmp_path / "names.json", [name])
    assert json.loads((tmp_path / "names.json").read_text()) == [name]
