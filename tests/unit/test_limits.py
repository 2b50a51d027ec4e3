"""The limits of readers in docs/security.md are those of the code, and a larger file is refused unread."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from yolofleet.data.datasets import archive, labelme, reader, vocxml, yolotxt
from yolofleet.data.geometry import tiles
from yolofleet.data.images import decode, header
from yolofleet.families.darknet import cfg as darknet_cfg
from yolofleet.families.networks import description
from yolofleet.families.ppyoloe import pdparams_file as paddle
from yolofleet.families.rtdetr import weights_files as transformers_files
from yolofleet.families.weights import hub, pickle_machine, pickles
from yolofleet.families.weights.pickles import TorchFile
from yolofleet.families.yolov5 import rows
from yolofleet.fleet.doctor import log_files
from yolofleet.fleet.hosts import wire_protocol
from yolofleet.fleet.plan import probe
from yolofleet.inference.export import onnx_check, opened
from yolofleet.inference.export.runtime import open_exported
from yolofleet.measure.tune import study
from yolofleet.runs.board import runs as board
from yolofleet.runs.report import history, results
from yolofleet.storage import object_store, shards, yaml_lines
from yolofleet.support.errors import YolofleetError

ROOT = Path(__file__).resolve().parents[2]


def mib(size_bytes: int) -> str:
    assert size_bytes % 2**20 == 0
    return f"{size_bytes >> 20} MiB"


def gib(size_bytes: int) -> str:
    assert size_bytes % 2**30 == 0
    return f"{size_bytes >> 30} GiB"


OBJECTS = f"pickle {mib(pickle_machine.MAX_PICKLE_BYTES)}, its objects {mib(pickle_machine.MAX_OBJECT_BYTES)}"
LIMITS = {
    "`.pt`, `.pth`": f"{OBJECTS}, {pickles.MAX_MEMBERS:,} members",
    "`.pdparams`": f"{mib(paddle.MAX_STRUCTURE_BYTES)} without the arrays",
    "`config.json` of transformers": mib(transformers_files.MAX_CONFIG_BYTES),
    "card of a repository on the Hugging Face hub": mib(hub.MAX_CARD_BYTES),
    "settings, recipes, data sets, machine libraries (YAML)": mib(yaml_lines.MAX_BYTES),
    "model descriptions (YAML)": f"{rows.MAX_FILE_BYTES:,} bytes",
    "Darknet's `.cfg`": f"{darknet_cfg.MAX_CFG_BYTES:,} bytes",
    "lists of images": mib(reader.MAX_LIST_BYTES),
    "index of shards": (
        f"{gib(shards.MAX_INDEX_BYTES)}, lines of {mib(shards.MAX_LINE_BYTES)}, paths of {shards.MAX_PATH_BYTES} bytes, files of {gib(shards.MAX_FILE_BYTES)}; "
        f"lists of stores {object_store.MOST_OBJECTS:,} objects"
    ),
    "labels of an image, YOLO": mib(yolotxt._MAX_LABEL_BYTES),
    "labels of an image, Pascal VOC": mib(vocxml._MAX_XML_BYTES),
    "labels of an image, labelme": mib(labelme._MAX_JSON_BYTES),
    "images": f"file {gib(decode.MAX_FILE_BYTES)}, {header.MAX_PIXELS:,} pixels",
    "tiles of an image (`--tile`)": f"{tiles.MAX_TILES:,}",
    "archives": f"{archive.MAX_RATIO} times their size, {archive.MAX_MEMBERS:,} members",
    "ONNX": f"{gib(onnx_check.MAX_FILE + 1)}, {onnx_check.MAX_NODES:,} nodes",
    "other exported files": f"{gib(opened.MAX_BYTES)} for each part",
    "results of an earlier run": f"{mib(results.MAX_BYTES)}, {results.MOST_COLUMNS} columns, {results.MOST_ROWS:,} rows",
    "figures and events of a run, for its report": f"{history.REPORT.figures_bytes >> 20} and {mib(history.REPORT.events_bytes)}",
    "figures, events, results and ranks of a run, for the board": (
        f"{board.LIMITS.figures_bytes >> 20}, {board.LIMITS.events_bytes >> 20}, {board.LIMITS.table_bytes >> 20} and "
        f"{mib(board.RANKS_BYTES)}; {board.LIMITS.table_rows:,} epochs; {board.MOST_RANKS} ranks shown; {board.MOST_RUNS} runs, {mib(board.CACHE_BYTES)} of kept pages"
    ),
    "the journal of a study": mib(study.MAX_JOURNAL_BYTES),
    "probes of machines (JSON)": mib(probe.MAX_BYTES),
    "a message of a host": mib(wire_protocol.MOST_MESSAGE_BYTES),
    "a log that the doctor reads": gib(log_files.MOST_LOG_BYTES),
}


def test_the_table_of_limits_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = page.partition("| reader | limit |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert {name: limit for name, limit in rows} == LIMITS


SIZES: list[tuple[str, int, Callable[[Path], Any]]] = [
    ("a.yaml", yaml_lines.MAX_BYTES, yaml_lines.read_yaml),
    ("model.yaml", rows.MAX_FILE_BYTES, lambda path: description.describe(str(path))),
    ("a.cfg", darknet_cfg.MAX_CFG_BYTES, darknet_cfg.read_cfg),
    ("list.txt", reader.MAX_LIST_BYTES, yolotxt.YoloFiles),
    ("label.txt", yolotxt._MAX_LABEL_BYTES, lambda path: reader.read_labels(str(path), yolotxt._MAX_LABEL_BYTES)),
    ("a.xml", vocxml._MAX_XML_BYTES, lambda path: vocxml.read_annotation(str(path))),
    ("a.json", labelme._MAX_JSON_BYTES, lambda path: labelme._read(str(path))),
    ("a.jpg", decode.MAX_FILE_BYTES, decode.read_image),
    ("a.onnx", onnx_check.MAX_FILE, onnx_check.checked_model),
    ("a.torchscript", opened.MAX_BYTES, open_exported),
    ("results.csv", results.MAX_BYTES, results.read_rows),
]  # fmt: skip


@pytest.mark.parametrize(("name", "limit_bytes", "read"), SIZES, ids=[name for name, _, _ in SIZES])
def test_a_file_of_one_byte_more_than_the_limit_is_refused_unread(
    tmp_path: Path, name: str, limit_bytes: int, read: Callable[[Path], Any]
) -> None:
    if name.endswith(".onnx"):
        pytest.importorskip("onnx", reason="the extra yolofleet[onnx] is not installed")
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(limit_bytes + 1)  # a hole: it takes no room on the disk
    with pytest.raises((YolofleetError, OSError, reader.LabelError), match=r"the limit is"):
        read(path)


def test_a_pt_file_with_too_large_a_pickle_or_too_many_members_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", bytes(pickle_machine.MAX_PICKLE_BYTES + 1))
    with pytest.raises(YolofleetError, match="pickle of more than 4194304 bytes"):
        TorchFile(path)
    monkeypatch.setattr(pickles, "MAX_MEMBERS", 2)
    with zipfile.ZipFile(path, "w") as file:
        for name in "bcd":
            file.writestr(f"a/{name}", b"")
    with pytest.raises(YolofleetError, match="has 3 members"):
        TorchFile(path)


def test_objects_of_a_pickle_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", b"\x80\x02" + b"}" * 3_000_000 + b".")
    with pytest.raises(YolofleetError, match="objects of more than 134217728 bytes"):
        TorchFile(path)


def test_an_onnx_file_with_too_many_nodes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra yolofleet[onnx] is not installed")
    nodes = [onnx.helper.make_node("Identity", [f"v{i}"], [f"v{i + 1}"]) for i in range(11)]
    path = tmp_path / "a.onnx"
    path.write_bytes(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], [])).SerializeToString())
    monkeypatch.setattr(onnx_check, "MAX_NODES", 10)
    with pytest.raises(YolofleetError, match="more than 10 nodes"):
        onnx_check.checked_model(path)


def test_an_archive_with_too_many_members_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_MEMBERS", 3)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        for name in "abcd":
            file.writestr(name, b"x")
    with pytest.raises(YolofleetError, match="more than 3 members"):
        archive.unpack(tmp_path / "a.zip", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
