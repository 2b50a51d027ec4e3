"""Files of predictions: one for each picture, whatever the pictures are called and wherever they are."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from small_data import write_picture
from small_weights import saved, untrained

from yolofleet.cli import main
from yolofleet.cli.api import Model
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.inference.predict.frames import Frame, Video
from yolofleet.inference.predict.results import Prediction, Predictions, Stems
from yolofleet.inference.predict.sources import Source
from yolofleet.tasks.boxes.found import FoundBoxes

PICTURES = ("d1/a/Image1.png", "d1/b/Image1.png", "d2/Image1.png", "d2/Image1.jpg")
STEMS = ["d1/a/Image1", "d1/b/Image1", "d2/Image1", "d2/Image1_png"]
SAVES = ["--save-txt", "--save-crop", "--save-json", "--conf", "0", "--max-det", "3", "--device", "cpu"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return saved(untrained(4), tmp_path_factory.mktemp("weights") / "w.safetensors")


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(PICTURES):
        write_picture(tmp_path / "in" / name, 64 + 2 * seed, 48, seed)
    return tmp_path / "in"


def files(folder, pattern):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(pattern))


def checked(run, source_root):
    """Each picture has its own files, and their content is that of the picture."""
    assert files(run / "labels", "*.txt") == sorted(f"{stem}.txt" for stem in STEMS)
    rows = {row["path"]: row for row in json.loads((run / "predictions.json").read_text())}
    assert len(rows) == 4
    for stem, name in zip(
        STEMS, ("d1/a/Image1.png", "d1/b/Image1.png", "d2/Image1.jpg", "d2/Image1.png"), strict=True
    ):
        (row,) = [row for path, row in rows.items() if Path(path).resolve() == (source_root / name).resolve()]
        lines = (run / "labels" / f"{stem}.txt").read_text().splitlines()
        assert len(lines) == len(row["detections"])
        x, _, w, _ = map(float, lines[0].split()[1:5])
        left, _, right, _ = row["detections"][0]["box_xyxy_px"]
        assert x * row["width"] == pytest.approx((left + right) / 2, abs=0.02)
        assert w * row["width"] == pytest.approx(right - left, abs=0.02)
        drawn = cv2.imread(str(run / (stem + Path(name).suffix)))
        assert drawn is not None and drawn.shape[1] == row["width"]
        crops = list((run / "crops").glob(f"*/{stem}_[0-9].jpg"))
        assert 0 < len(crops) <= len(lines)
    pictures = [path for path in files(run, "*.png") + files(run, "*.jpg") if not path.startswith("crops")]
    assert len(pictures) == 4


@pytest.mark.parametrize("kind", ["folder", "glob", "absolute list", "relative list"])
def test_files_keep_the_sub_folders_of_the_source(kind, weights, root, monkeypatch):
    source = str(root)
    if kind == "glob":
        source = f"{root}/**/*.*"
    elif kind != "folder":
        (root / "list.txt").write_text("".join(f"{name}\n" for name in sorted(PICTURES)))
        source = str(root / "list.txt")
    if kind == "absolute list":
        (root / "list.txt").write_text("".join(f"{root / name}\n" for name in sorted(PICTURES)))
    assert main(["predict", "--weights", str(weights), "--source", source, *SAVES, "--project", "out"]) == 0
    checked(Path("out/exp"), root)


@pytest.mark.parametrize("kind", ["pictures", "folders"])
def test_several_sources_do_not_share_files(kind, weights, root):
    sources = [root / name for name in sorted(PICTURES)]
    if kind == "folders":
        sources = [root / "d1", root / "d2"]
    found = Model(weights).predict(
        sources,
        save="images",
        save_txt=True,
        save_crop=True,
        save_json=True,
        conf=0,
        max_det=3,
        project="out",
    )
    assert len(found) == 4
    checked(Path("out/exp"), root)
    written = found.save("again")
    assert sorted(str(path.relative_to("again")) for path in written) == sorted(
        [*(f"{stem}.png" for stem in STEMS[:2]), "d2/Image1.jpg", "d2/Image1_png.png"]
    )


def test_val_writes_one_file_for_each_picture_too(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_shapes(tmp_path / "set", images=2, val_images=2, img=64, seed=0)
    val = tmp_path / "set" / "images" / "val"
    labels = tmp_path / "set" / "labels" / "val"
    for place, number in ((val, ".png"), (labels, ".txt")):
        for part, file in zip("ab", sorted(place.iterdir()), strict=True):
            (place / part).mkdir()
            file.rename(place / part / f"one{number}")
    words = ["val", "--weights", str(weights), "--data", "set", "--save-txt", "--conf", "0", "--max-det", "3"]
    assert main([*words, "--device", "cpu", "--workers", "0", "--no-plots", "--project", "out"]) == 0
    assert files(Path("out/exp/labels"), "*.txt") == ["a/one.txt", "b/one.txt"]
    texts = [(Path("out/exp/labels") / part / "one.txt").read_text() for part in "ab"]
    assert [len(text.splitlines()) for text in texts] == [3, 3]


def test_sub_folders_beside_pictures_are_counted_and_not_searched(weights, root, capsys):
    write_picture(root / "top.png")
    assert [Path(item.name).name for item in Source(str(root)).items] == ["top.png"]
    assert main(["predict", "--weights", str(weights), "--source", str(root), *SAVES]) == 0
    assert "1 file; its 2 sub-folders are not searched" in capsys.readouterr().out


def made(path, *, video=False, base="/data"):
    image = np.zeros((4, 4, 3), np.uint8)
    frame = Frame(path, image, video=Video(9, 25.0) if video else None, base=base)
    return Prediction(frame, FoundBoxes.of_rows(np.zeros((0, 6))), ())


def test_no_two_names_can_be_one_file():
    stems = Stems()
    names = [
        "/data/a.jpg",
        "/data/A.png",
        "/data/a.webp",
        "/data/a.WEBP",
        "/elsewhere/a.jpg",
        "/data/labels/a.jpg",
    ]
    assert [stems.of(made(name)) for name in names] == ["a", "A_png", "a_webp", "a_2", "a_jpg", "labels_/a"]
    assert stems.of(made("/data/crops/person/x_0.jpg")) == "crops_/person/x_0"


def test_the_frames_of_a_video_have_names_of_their_own():
    """clip_12.txt is the file of frame 12 of clip.mp4."""
    stems = Stems()
    assert stems.of(made("/data/clip.mp4", video=True)) == "clip"
    assert stems.of(made("/data/clip_12.jpg")) == "clip_12_jpg"
    assert stems.of(made("/data/clip_12.mp4", video=True)) == "clip_12"  # its files are clip_12_N.txt
    assert stems.of(made("/data/CLIP.mov", video=True)) == "CLIP_mov"
    assert [stems.of(made(f"/data/Clip_{n}.jpg")) for n in (7, "x")] == ["Clip_7_jpg", "Clip_x"]
    same = ["clip.gif", "clip.webp", "clip.webp", "clip.webp", "clip.gif", "clip.gif"]
    stems = Stems()
    found = [stems.of(made(f"/data/{name}", video=name.endswith("gif"))) for name in same]
    assert found == ["clip", "clip_webp", "clip-2", "clip-3", "clip_gif", "clip_2"]
    other = Stems()
    assert other.of(made("/data/clip_12.jpg")) == "clip_12"
    assert other.of(made("/data/clip_13.jpg")) == "clip_13"
    assert other.of(made("/data/clip.mp4", video=True)) == "clip_mp4"


def test_a_list_of_predictions_without_files_is_numbered(tmp_path):
    image = np.zeros((4, 4, 3), np.uint8)
    none = FoundBoxes.of_rows(np.zeros((0, 6)))
    found = [Prediction(Frame("image 0", image, is_file=False), none, ())] * 2
    assert [path.name for path in Predictions(found).save(tmp_path)] == ["image 0.jpg", "image 0_2.jpg"]
