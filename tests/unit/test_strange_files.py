"""Data sets and images that somebody else made: named pipes, devices, links, and headers that promise too much."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from hostile import before_frame

from yolofleet.config.resume import find_run
from yolofleet.config.schema import TrainConfig
from yolofleet.datasets.index import build_index
from yolofleet.datasets.sources import load_dataset
from yolofleet.doctor.log_files import read_log
from yolofleet.errors import ConfigError, DataError
from yolofleet.files.atomic import write_json
from yolofleet.images.decode import read_image
from yolofleet.images.header import IMAGE_SUFFIXES, MAX_PIXELS, header_of_file, read_header
from yolofleet.predict.sources import Source, find_items

pytestmark = pytest.mark.skipif(os.name != "posix", reason="named pipes and devices")


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.zeros((16, 16, 3), np.uint8))
    return path


def yolo_set(root: Path) -> Path:
    for name in "abc":
        picture(root / "images" / "train" / f"{name}.png")
        label = root / "labels" / "train" / f"{name}.txt"
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text("0 0.5 0.5 0.5 0.5\n")
    (root / "data.yaml").write_text("train: images/train\nval: images/train\nnames: [a]\n")
    return root / "data.yaml"


def test_a_label_that_links_to_nothing_does_not_hide_the_others(tmp_path: Path) -> None:
    data = yolo_set(tmp_path / "set")
    labels = tmp_path / "set" / "labels" / "train"
    for name in "ab":
        (labels / f"{name}.txt").unlink()
        (labels / f"{name}.txt").symlink_to("nowhere")
    (labels / "b.txt").unlink()
    (labels / "b.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    index = build_index(load_dataset(str(data)), "train")
    assert len(index) == 2 and index.unlabelled == 0
    assert [problem.kind for problem in index.problems] == ["labels-unreadable"]


def test_no_file_among_sources_or_logs_is_passed_over(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "clip.mp4").symlink_to("/dev/zero")
    picture(tmp_path / "good.png")
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


# -- headers that promise too much


@pytest.mark.parametrize("suffix", sorted(IMAGE_SUFFIXES | {".gif"}))
def test_every_suffix_that_is_accepted_is_read(tmp_path: Path, suffix: str) -> None:
    pixels = np.full((60, 80) if suffix in (".pbm", ".pgm") else (60, 80, 3), 200, np.uint8)
    written_as = {".dib": ".bmp", ".jfif": ".jpg", ".mpo": ".jpg"}.get(suffix, suffix)
    if not cv2.haveImageWriter(f"a{written_as}"):
        pytest.skip(f"this OpenCV writes no {written_as}")
    file = tmp_path / f"a{suffix}"
    file.write_bytes(cv2.imencode(written_as, pixels)[1].tobytes())
    header = header_of_file(str(file))
    assert header is not None and header.fault is None and header.size_wh == (80, 60)
    assert read_image(file).shape == (60, 80, 3)


def test_a_jpeg_with_bytes_before_its_frame_is_read(tmp_path: Path) -> None:
    """As libjpeg reads it: bytes that are no marker are skipped, and comments may be empty."""
    pixels = np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)
    data = cv2.imencode(".jpg", pixels)[1].tobytes()
    file = tmp_path / "a.jpg"
    file.write_bytes(data)
    plain = read_image(file)
    for inserted in (b"\0\0", b"\xff\0", b"\xff" * 5000, b"\xff\xfe\0\2" * 9, b"\xff\xd0\xff\x01"):
        file.write_bytes(data[:20] + inserted + data[20:])  # behind JFIF's segment
        assert np.array_equal(read_image(file), plain)


@pytest.mark.long
def test_opencv_has_our_limit_of_pixels_before_it_is_loaded() -> None:
    """A second wall behind the headers. OpenCV reads the variable once, when it is loaded."""
    code = (
        "import yolofleet.geometry.letterbox, cv2, numpy as np\n"
        f"data = np.frombuffer({before_frame(b'', 23000)!r}, np.uint8)\n"
        "try:\n    print(cv2.imdecode(data, cv2.IMREAD_COLOR))\n"
        "except cv2.error as problem:\n    print(problem)\n"
    )
    clean = {name: text for name, text in os.environ.items() if not name.startswith("OPENCV_")}
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean, timeout=900
    )
    assert "CV_IO_MAX_IMAGE_PIXELS" in told.stdout + told.stderr
    value = "import os, yolofleet; print(os.environ['OPENCV_IO_MAX_IMAGE_PIXELS'])"
    told = subprocess.run(
        [sys.executable, "-c", value], capture_output=True, text=True, env=clean, timeout=60
    )
    assert int(told.stdout) == MAX_PIXELS


def test_a_blank_image_of_60_million_pixels_is_read(tmp_path: Path) -> None:
    """The bound must not refuse what exists: blank images compress best."""
    blank = np.zeros((6000, 10000), np.uint8)
    for suffix in (".jpg", ".png", ".webp"):
        _, data = cv2.imencode(suffix, blank)
        header = read_header(data.tobytes())
        assert header is not None and header.fault is None and header.size_wh == (10000, 6000)


def test_a_jpeg_that_ends_inside_its_frame_is_refused(tmp_path: Path) -> None:
    """The end-of-image mark stands where the frame has its width, and the count of components is missing."""
    file = tmp_path / "a.jpg"
    file.write_bytes(b"\xff\xd8\xff\xc0" + struct.pack(">HBH", 11, 8, 1) + b"\xff\xd9")
    with pytest.raises(DataError, match=r"a\.jpg"):
        read_image(file)


def test_a_usual_progressive_jpeg_is_read(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "a.jpg"), pixels, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
    assert read_image(tmp_path / "a.jpg").shape == (300, 400, 3)


# -- words in files


def test_a_number_with_an_underscore_is_no_number(tmp_path: Path) -> None:
    data = yolo_set(tmp_path / "set")
    (tmp_path / "set" / "labels" / "train" / "a.txt").write_text("0 0.5_0 0.5 0.5 0.5\n0 .5 .5 .5 .5\n")
    index = build_index(load_dataset(str(data)), "train")
    assert [(problem.line, problem.kind) for problem in index.problems] == [(1, "label-unreadable")]


# -- run folders


def stored_run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "exp"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").touch()
    return folder


def test_a_run_whose_states_are_elsewhere_says_where(tmp_path: Path) -> None:
    folder = stored_run(tmp_path)
    (folder / "checkpoints" / "where.txt").write_text("node-a:/data/exp/checkpoints\n")
    with pytest.raises(ConfigError, match="are on node-a, in /data/exp/checkpoints"):
        find_run(TrainConfig(resume=str(folder)), is_named=False)


def test_a_where_txt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    folder = stored_run(tmp_path)
    (folder / "checkpoints" / "where.txt").write_bytes(b"node-\xff\xfe:/work")
    with pytest.raises(ConfigError, match=r"where\.txt cannot be read"):
        find_run(TrainConfig(resume=str(folder)), is_named=False)


def test_a_where_txt_that_is_a_link_is_not_shown(tmp_path: Path) -> None:
    """Its target would stand in the message."""
    folder = stored_run(tmp_path)
    (tmp_path / "secret").write_text("password")
    (folder / "checkpoints" / "where.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"where\.txt cannot be read: it is a symbolic link") as caught:
        find_run(TrainConfig(resume=str(folder), linked_folders=True), is_named=False)
    assert "password" not in caught.value.render()


def test_resume_auto_passes_a_state_that_links_to_nothing(tmp_path: Path) -> None:
    folder = stored_run(tmp_path)
    (folder / "checkpoints" / "step-000000001.safetensors").symlink_to("nowhere")
    found = find_run(TrainConfig(resume="auto", project=folder.parent), is_named=False)
    assert found is not None and found.folder == folder


# -- folders


def voc_set(root: Path, *lists: str) -> Path:
    picture(root / "JPEGImages" / "a.png")
    (root / "Annotations").mkdir()
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
    (root / "Annotations" / "a.xml").write_text(
        f"<annotation><object><name>x</name>{box}</object></annotation>"
    )
    (root / "ImageSets" / "Main").mkdir(parents=True)
    for name in lists:
        (root / "ImageSets" / "Main" / f"{name}.txt").write_text("a\n")
    return root


def test_a_voc_folder_without_a_list_of_test_images_is_no_error(tmp_path: Path) -> None:
    from yolofleet.cli.app import run

    assert load_dataset(str(voc_set(tmp_path / "set", "train", "val"))).missing == {}
    assert run(["data", "check", str(tmp_path / "set")]) == 0


def test_the_yaml_of_another_program_is_not_the_data_set(tmp_path: Path) -> None:
    root = voc_set(tmp_path / "set", "train", "val")
    (root / "environment.yml").write_text("name: torch\nchannels: [conda-forge]\ndependencies: [python]\n")
    (root / "docker-compose.yaml").write_text("services: {a: {image: b}}\n")
    assert load_dataset(str(root)).splits["train"][0].kind == "voc"


def test_a_generated_set_that_does_not_fit_on_the_disk_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import resource

    from yolofleet.cli.app import run

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # bytes of a file; a picture has more
    try:
        code = run(["data", "make", "shapes", "--out", str(tmp_path / "set"), "--images", "2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 3 and "cannot write" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_set_that_is_refused_does_not_say_that_labels_were_dropped(tmp_path: Path) -> None:
    data = yolo_set(tmp_path / "set")
    (tmp_path / "set" / "labels" / "train" / "a.txt").write_text("7 .5 .5 .5 .5\n")
    with pytest.raises(DataError, match="class 7") as caught:
        build_index(load_dataset(str(data)), "train")
    assert "dropped" not in caught.value.render()


def test_a_file_whose_size_is_known_is_read_without_a_second_copy(tmp_path: Path) -> None:
    sparse = tmp_path / "state.safetensors"
    with sparse.open("wb") as file:
        file.truncate(400 << 20)
    code = (
        "import resource, sys\nfrom yolofleet.files.foreign import read_foreign\n"
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
