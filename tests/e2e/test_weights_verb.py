"""`yolofleet weights`: every form of file, whole, broken and hostile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from commands import Outcome, called, working_in
from reference import parity, reference

from yolofleet.families.build import build_model
from yolofleet.families.darknet import weights_file as darknet
from yolofleet.families.darknet.cfg import DarknetDescription, read_cfg
from yolofleet.families.networks.description import describe
from yolofleet.families.weights.format import write_tensors
from yolofleet.families.weights.reader import read_weights
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights
from yolofleet.support.errors import NumericsError


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Callable[..., Outcome]]:
    """Run the verb in this process, offline, in an empty folder."""

    def call(*argv: object) -> Outcome:
        done = called("weights", *map(str, argv))
        assert "Traceback" not in done.err
        return done

    with working_in(tmp_path):
        yield call


def weights_of(model: str, nc: int = 3) -> Weights:
    network = build_model(describe(model), nc)
    network.names = ("cat", "dog", "a bird")[:nc]
    return Weights(
        dict(network.state_dict()),
        WeightsHeader.of(network, img=64, extra={"epoch": 4, "best": {"mAP50": 0.5}}),
    )


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights of mine") / "best.safetensors"
    write_weights(path, weights_of("yolov5n"))
    return path


@pytest.fixture(scope="module")
def paddle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("paddle") / "best.safetensors"
    write_weights(path, weights_of("ppyoloe-s"))
    return path


@pytest.fixture
def tiny_darknet(tmp_path: Path) -> Path:
    """A small network of Darknet's with its .cfg beside it."""
    description = read_cfg(parity("darknet/mini_tiny.cfg"))
    assert isinstance(description, DarknetDescription)
    network = build_model(description, description.nc)
    path = tmp_path / "mini.weights"
    darknet.write(path, Weights(dict(network.state_dict()), WeightsHeader.of(network, img=64)))
    return path


def state(folder: Path) -> Path:
    tensors = {"model/a": torch.ones(2, 3), "sgd/a": torch.zeros(2, 3)}
    values = {"state": {"images_seen": 640, "progress": {"epoch": 2}}, "step": 10}
    write_tensors(folder / "step-00000010.safetensors", tensors, values)
    return folder / "step-00000010.safetensors"


# -- inspect


def test_weights_of_ours_are_told_with_their_training(weights, ours):
    facts = weights("inspect", ours, "--json", "-").facts
    assert facts["kind"] == "weights of yolofleet" and len(facts["sha256"]) == 64
    assert (facts["family"], facts["model"], facts["classes"]) == ("yolov5", "yolov5n", 3)
    assert facts["names"] == ["cat", "dog", "a bird"] and facts["img_px"] == 64
    assert facts["training"] == {"epoch": 4, "best.mAP50": 0.5}
    assert facts["shapes"]["model.0.conv.weight"] == [16, 3, 6, 6]
    assert facts["tensors"] == len(facts["shapes"])
    text = weights("inspect", ours).out
    assert "training     best.mAP50 0.5, epoch 4" in text and "cat, dog, a bird" in text


def test_a_training_state_is_told_with_its_step(weights, tmp_path):
    facts = weights("inspect", state(tmp_path), "--json", "-").facts
    assert facts["kind"] == "training state of yolofleet" and "--resume" in facts["unusable"]
    assert facts["training"] == {"step": 10, "images_seen": 640, "progress.epoch": 2}
    assert facts["shapes"] == {"model/a": [2, 3], "sgd/a": [2, 3]} and facts["values"] == 12


def test_a_darknet_file_is_told_by_its_cfg(weights, tiny_darknet):
    facts = weights("inspect", tiny_darknet, "--json", "-").facts
    assert (facts["kind"], facts["family"]) == ("Darknet weights", "darknet")
    assert facts["training"] == {"darknet.version": "0, 2, 5", "darknet.seen": 0}
    cfg = tiny_darknet.with_suffix(".cfg").rename(tiny_darknet.with_name("other.cfg"))
    facts = weights("inspect", tiny_darknet, "--json", "-").facts
    assert "no mini.cfg beside it" in facts["unusable"] and facts["tensors"] == 0
    assert weights("inspect", tiny_darknet, "--cfg", cfg, "--json", "-").facts["family"] == "darknet"


def test_a_state_dict_of_another_model_is_listed_and_said_to_be_unusable(weights, tmp_path):
    torch.save({"epoch": 3, "net": {"a.weight": torch.zeros(4, 5), "b": [torch.zeros(2)]}}, tmp_path / "x.pt")
    done = weights("inspect", "x.pt", "--json", "-")
    assert done.code == 0 and done.facts["kind"] == "torch checkpoint"
    assert done.facts["shapes"] == {"net.a.weight": [4, 5], "net.b.0": [2]} and done.facts["values"] == 22
    assert done.facts["training"] == {"epoch": 3} and "has no model" in done.facts["unusable"]
    safetensors.torch.save_file({"a": torch.zeros(4, 5)}, tmp_path / "x.safetensors")
    facts = weights("inspect", "x.safetensors", "--json", "-").facts
    assert facts["kind"] == "safetensors" and facts["shapes"] == {"a": [4, 5]} and "unusable" in facts


def test_a_paddle_file_is_told_and_an_unfit_one_listed(weights, paddle, tmp_path):
    assert weights("convert", paddle, "x.pdparams").code == 0
    facts = weights("inspect", "x.pdparams", "--json", "-").facts
    assert (facts["kind"], facts["model"], facts["classes"]) == ("Paddle weights", "ppyoloe-s", 3)
    with np.load(parity("ppyoloe_model/few_tensors.npz")) as file:
        (tmp_path / "few.pdparams").write_bytes(file["pdparams"].tobytes())
    facts = weights("inspect", tmp_path / "few.pdparams", "--json", "-").facts
    assert facts["tensors"] == 14 and "unusable" in facts


def test_an_onnx_file_is_told_with_its_interface(weights, tmp_path, monkeypatch):
    (tmp_path / "none.onnx").write_bytes(b"\x08\x08")
    monkeypatch.setitem(sys.modules, "onnx", None)  # not installed
    facts = weights("inspect", "none.onnx", "--json", "-").facts
    assert facts["kind"] == "ONNX model" and "pip install onnx" in facts["unusable"]
    monkeypatch.undo()
    onnx = pytest.importorskip("onnx")
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["images", "w"], ["output"])],
        "g",
        [onnx.helper.make_tensor_value_info("images", kind, ["batch", 3])],
        [onnx.helper.make_tensor_value_info("output", kind, ["batch", 3])],
        [onnx.numpy_helper.from_array(np.zeros(3, np.float32), "w")],
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "a.onnx")
    facts = weights("inspect", "a.onnx", "--json", "-").facts
    assert facts["interface"] == ["input images FLOAT [batch, 3]", "output output FLOAT [batch, 3]"]
    assert facts["shapes"] == {"w": [3]}
    (tmp_path / "bad.onnx").write_bytes(b"\x00\xff no")
    assert weights("inspect", "bad.onnx").code == 3


def test_published_weights_are_recognised_by_their_digest(weights):
    facts = weights("inspect", reference("weights/yolov5n.pt"), "--json", "-").facts
    assert facts["published"].startswith("as yolov5n.pt") and "AGPL" in facts["licence"]
    assert facts["training"]["date"].startswith("2022")
    tiny = reference("weights/yolov3-tiny.weights")
    assert "yolov3-tiny.weights" in weights("inspect", tiny, "--json", "-").facts["published"]


# -- verify


def test_whole_weights_and_states_are_right(weights, ours, tmp_path):
    done = weights("verify", ours)
    assert done.code == 0 and done.out.count("right") == 3 and "WRONG" not in done.out
    assert weights("verify", state(tmp_path)).code == 0


def test_values_that_are_not_finite_are_found(weights, tmp_path):
    bad = weights_of("yolov5n")
    bad.tensors["model.0.conv.weight"][0, 0, 0, 0] = float("nan")
    with pytest.raises(NumericsError, match=r"x\.safetensors has NaN or infinity in model\.0\.conv\.weight"):
        write_weights(tmp_path / "x.safetensors", bad)
    assert not list(tmp_path.glob("*x.safetensors*"))
    torch.save(bad.tensors, tmp_path / "x.pt")
    done = weights("verify", "x.pt")
    assert done.code == 3 and "model.0.conv.weight is not finite" in done.out


def test_a_file_of_a_published_name_must_be_that_file(weights, ours, tmp_path):
    done = weights("verify", reference("weights/yolov5n.pt"), "--json", "report.json")
    assert done.code == 0 and "published  right" in done.out
    assert json.loads((tmp_path / "report.json").read_text())["ok"] is True
    torch.save(safetensors.torch.load_file(ours), tmp_path / "yolov5n.pt")
    done = weights("verify", "yolov5n.pt")
    assert done.code == 3 and "published  WRONG" in done.out and "v7.0" in done.out


def test_weights_that_fit_no_description_are_wrong(weights, tiny_darknet):
    assert weights("verify", tiny_darknet).code == 0
    tiny_darknet.write_bytes(tiny_darknet.read_bytes()[:-8])
    done = weights("verify", tiny_darknet)
    assert done.code == 3 and "fits       WRONG" in done.out


# -- convert


def same(a: Weights, b: Weights) -> bool:
    counted = [name for name in a.tensors if not name.endswith("num_batches_tracked")]
    return a.header.nc == b.header.nc and all(
        torch.equal(a.tensors[name], b.tensors[name]) for name in counted
    )


def test_darknet_to_ours_and_back_is_the_same_to_the_bit(weights, tiny_darknet):
    assert weights("convert", tiny_darknet, "mini.safetensors").code == 0
    assert same(read_weights(tiny_darknet), read_weights(Path("mini.safetensors")))
    assert weights("convert", "mini.safetensors", "back.weights").code == 0
    assert Path("back.weights").read_bytes() == tiny_darknet.read_bytes()
    assert read_cfg(Path("back.cfg")).sections == read_cfg(tiny_darknet.with_suffix(".cfg")).sections


def test_yolov5s_users_get_its_names_without_a_pickle(weights, ours, tmp_path):
    torch.save(safetensors.torch.load_file(ours), tmp_path / "x.pt")
    done = weights("convert", "x.pt", "x.safetensors")
    assert (
        done.code == 0
        and "model.load_state_dict(safetensors.torch.load_file('x.safetensors'))"
        in done.out.replace(", strict=False", "")
    )
    network = build_model(describe("yolov5n"), 3)
    network.load_state_dict(safetensors.torch.load_file("x.safetensors"), strict=False)
    assert same(read_weights(ours), Weights(dict(network.state_dict()), read_weights(ours).header))
    done = weights("convert", ours, "y.pt")
    assert done.code == 2 and "load_state_dict" in done.err and not Path("y.pt").exists()


def test_a_form_that_the_family_does_not_have_is_refused_and_nothing_is_left(weights, ours, tmp_path):
    before = sorted(tmp_path.iterdir())
    for out, code in (("x.weights", 3), ("x.pdparams", 3), ("x.onnx", 2), ("x", 3), ("x.bin", 2)):
        assert weights("convert", ours, out).code == code
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_overwritten(weights, ours, tmp_path):
    (tmp_path / "x.safetensors").write_text("mine")
    done = weights("convert", ours, "x.safetensors")
    assert done.code == 2 and "exists" in done.err and (tmp_path / "x.safetensors").read_text() == "mine"


# -- list and download


def test_the_list_says_what_is_here_and_what_can_be(weights, tmp_path):
    folder = tmp_path / "cache" / "weights"
    folder.mkdir(parents=True)
    (folder / "yolov5n.pt").write_bytes(b"")
    rows = {row["name"]: row for row in weights("list", "--json", "-").facts["weights"]}
    assert rows["yolov5n"]["path"] == str(folder / "yolov5n.pt") and rows["yolov5s"]["path"] is None
    assert rows["yolov5s"]["digest"].startswith("sha256:8b3b748c") and rows["ppyoloe-s"]["digest"] is None
    text = weights("list").out
    assert all(name in text for name in rows) and "by hand" in text


def test_a_file_downloaded_by_hand_is_taken_in(weights, tmp_path):
    (tmp_path / "mine").write_bytes(b"hello")
    assert weights("download", "ppyoloe-s", "--from", "mine").code == 0
    path = tmp_path / "cache" / "weights" / "ppyoloe_crn_s_300e_coco.pdparams"
    assert path.read_bytes() == b"hello"
    assert weights("download", "ppyoloe-s").out.strip() == str(path)
    done = weights("download", "ppyoloe-m", "--from", "mine", "--sha256", "0" * 64)
    assert done.code == 3 and "0" * 64 in done.err
    assert weights("download", "ppyoloe-m", "--sha256", "xyz").code == 2
    assert weights("download", "yolov5n", "--from", "mine").code == 3
    assert weights("download", "ppyoloe-l").code == 3
    assert weights("download", "ppyoloe-z").code == 3
