"""Exports of labelling tools (tests/label_tools.py): docs/label-tools.md names each of them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from commands import called, working_in
from label_rows import index_of, rows_by_name
from label_tools import READ_EXPORTS, UNREAD_EXPORTS
from pages import BLOCKS
from walks import sampled

from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.labels import ASSUMED, KINDS
from yolofleet.data.datasets.sources import load_dataset

PAGE = [
    block
    for block in BLOCKS
    if block.page.name == "label-tools.md" and block.remark == "tests/unit/datasets/test_label_tools.py"
]
EVERY = pytest.mark.parametrize("name", READ_EXPORTS)


def written(name: str, folder: Path) -> str:
    """Write an export in ``folder``; return what ``--data`` takes."""
    export = READ_EXPORTS[name]
    export.write(folder / name)
    return str(folder / name) + export.data


@EVERY
def test_an_export_is_read_as_it_comes_from_its_tool(tmp_path: Path, name: str) -> None:
    export = READ_EXPORTS[name]
    spec = load_dataset(written(name, tmp_path))
    assert spec.names == export.names and list(spec.splits) == list(export.splits)
    for split, expected in export.splits.items():
        index = build_index(spec, split)
        found = rows_by_name(index)
        assert found.keys() == expected.keys()
        assert all(np.allclose(found[image], rows, atol=1e-4) for image, rows in expected.items())
        lost = {
            kind: n
            for kind, n in index.problem_kinds.items()
            if KINDS[kind].action != ASSUMED or kind in export.kinds
        }
        assert lost == export.kinds


@pytest.mark.parametrize("name", sampled(READ_EXPORTS, 2))
def test_the_converted_export_has_the_same_boxes(tmp_path: Path, name: str) -> None:
    data, out = written(name, tmp_path), str(tmp_path / "out")
    done = called("data", "convert", data, "--to", "yolo", "--out", out)
    assert done.code == 0, done.err
    for split in READ_EXPORTS[name].splits:
        source, copy = index_of(data, split), index_of(out, split)
        assert copy.names == source.names == READ_EXPORTS[name].names
        assert np.allclose(copy.boxes_cxcywh_unit, source.boxes_cxcywh_unit, atol=1e-5)


@pytest.mark.parametrize(("name", "is_folder"), sampled(product(UNREAD_EXPORTS, (True, False)), 3))
def test_the_refusal_of_another_format_names_it_and_the_way_out(
    tmp_path: Path, name: str, is_folder: bool
) -> None:
    write, file, form = UNREAD_EXPORTS[name]
    write(tmp_path / name)
    data = str(tmp_path / name) + ("" if is_folder else file)
    for verb in (["data", "check", data], ["train", "--data", data, "--model", "yolov5n", "--device", "cpu"]):
        with working_in(tmp_path):
            done = called(*verb)
        assert done.code == 2 and form in done.err and "docs/label-tools.md" in done.err, done.err


@pytest.mark.parametrize("block", PAGE, ids=str)
def test_the_commands_of_the_page_run(tmp_path: Path, block) -> None:
    for words in block.commands():
        name = words[words.index("check") + 1].split("/")[0]
        data = written(name, tmp_path)
        assert data == str(tmp_path / words[words.index("check") + 1])
        with working_in(tmp_path):
            done = called(*words[1:])
        assert done.code == 0, done.err


def test_the_page_has_every_export() -> None:
    shown = {words[3].split("/")[0] for block in PAGE for words in block.commands()}
    assert shown == set(READ_EXPORTS)
