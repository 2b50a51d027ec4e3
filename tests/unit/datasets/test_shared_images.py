"""Images that are in train and in val, by their paths: said by ``data check``, ``train`` and the report of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import train_args

from yolofleet.cli import main
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.listing import overlap_notes
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.data.datasets.sources import load_dataset

ENDS = ": accuracy on images that were learned says nothing about others"
ALL = "train and val are the same 4 images" + ENDS
SOME = "2 of 3 val images are train images too" + ENDS


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    root = tmp_path_factory.mktemp("overlap") / "set"
    make_shapes(root, images=4, val_images=2, img=64, seed=0)
    return root


@pytest.fixture
def root(shapes, tmp_path):
    return Path(shutil.copytree(shapes, tmp_path / "set"))


def same_folder(root):
    return "train: images/train\nval: images/train\n"


def linked_folder(root):
    for part in ("images", "labels"):
        (root / part / "other").symlink_to(root / part / "train", target_is_directory=True)
    return "train: images/train\nval: images/other\n"


def one_list(root):
    (root / "all.txt").write_text("".join(f"{path}\n" for path in sorted((root / "images/train").iterdir())))
    return "train: images/train\nval: all.txt\n"


def same_coco(root):
    assert main(["data", "convert", str(root), "--to", "coco", "--out", str(root / "coco")]) == 0
    (file,) = (root / "coco").rglob("*train*.json")
    return f"train: {file}\nval: {file}\n"


def shared_list(root):
    train, val = (sorted((root / "images" / split).iterdir()) for split in ("train", "val"))
    (root / "some.txt").write_text("".join(f"{path}\n" for path in [*train[:2], val[0]]))
    return "train: images/train\nval: some.txt\n"


def linked_files(root):
    for path in sorted((root / "images/val").iterdir())[1:]:
        path.unlink()
    for path in sorted((root / "images/train").iterdir())[:2]:
        (root / "images/val" / f"link-{path.name}").symlink_to(path)
    return "train: images/train\nval: images/val\n"


def other_files(root):
    """Equal content and times, but other files: ``--duplicates`` finds these."""
    for path in (root / "images/train").iterdir():
        shutil.copy2(path, root / "images/val" / path.name)
    return "train: images/train\nval: images/val\n"


def description(root, made):
    file = root / "other.yaml"
    file.write_text(f"{made(root)}names: [circle, square, triangle, star]\n")
    return file


@pytest.mark.parametrize(
    ("made", "note"),
    [
        (same_folder, ALL),
        (linked_folder, ALL),
        (one_list, ALL),
        (same_coco, ALL),
        (shared_list, SOME),
        (linked_files, SOME),
        (other_files, ""),
    ],
)
def test_images_of_two_splits_are_found_by_their_real_paths(made, note, root, capsys):
    file = description(root, made)
    spec = load_dataset(str(file))
    indexes = [build_index(spec, split) for split in ("train", "val")]
    assert overlap_notes(indexes) == [note] * bool(note)
    assert main(["data", "check", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (note in said) if note else (ENDS not in said)
    main(["data", "check", str(file), "--json", "-"])
    assert (note in json.loads(capsys.readouterr().out)["notes"]) == bool(note)


def test_a_coco_file_alone_is_both_splits(root, capsys):
    same_coco(root)
    (file,) = (root / "coco").rglob("*train*.json")
    (val,) = (root / "coco").rglob("*val*.json")
    val.unlink()
    assert main(["data", "check", str(file)]) == 0
    assert " ".join(capsys.readouterr().out.split()).count(ALL) == 1


def test_a_training_says_it_at_its_start_and_in_its_report(root, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file, note = description(root, linked_files), SOME
    train = train_args(file, "--plots", "--device", "cpu", "--workers", "0", "--epochs", "1", "--name", "run")
    assert main([*map(str, train)]) == 0
    assert capsys.readouterr().out.count(f"note: {note}") == 1
    run = tmp_path / "runs" / "train" / "run"
    assert json.loads((run / "report.json").read_text())["notes"] == [note]
    assert note in (run / "report.html").read_text()
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert note in (run / "report.html").read_text()
