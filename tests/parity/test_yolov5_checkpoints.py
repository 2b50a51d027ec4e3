"""YOLOv5's own files: a training checkpoint, published weights, what their pickles name."""

import hashlib
import json

import numpy as np
import pytest
import torch
from conditioning import compare, perturbed
from reference import parity, reference

from yolofleet.families.build import build_model
from yolofleet.families.networks.description import describe
from yolofleet.families.weights import pickles
from yolofleet.families.weights.pickles import TorchFile
from yolofleet.families.weights.reader import read_weights
from yolofleet.families.weights.transfer import model_from_weights
from yolofleet.families.yolov5 import pt_file as yolov5_pt
from yolofleet.training.optimiser import parameter_groups

FACTS = json.loads(parity("yolov5_model/facts.json").read_text())
# px. These networks amplify relative changes of 1e-6 to 0.5 px in the widest of boxes of up to 1229 px, to 0.005 px in most.
ATOL_PX, RMS_PX = 2.0, 0.02


@torch.no_grad()
def decoded_by(weights, images_u8):
    model = perturbed(model_from_weights(weights))
    return model.decode(model(perturbed(torch.from_numpy(images_u8).float() / 255))).rows.numpy()


def test_a_training_checkpoint_gives_its_moving_average():
    weights = read_weights(reference("fixtures/yolov5/yolov5n_random_nc3.pt"))
    assert weights.header.names == ("RBC", "WBC", "Platelets")
    assert weights.header.strides == (8, 16, 32)
    with np.load(reference("fixtures/yolov5/yolov5n_io.npz")) as io:
        compare(decoded_by(weights, io["input_u8"]), io["ema_eval_decoded"], atol=ATOL_PX, rms=RMS_PX)
    plain = read_weights(reference("fixtures/yolov5/yolov5n_random_nc3_ema_fp16.safetensors"))
    assert plain.tensors.keys() == weights.tensors.keys()
    assert all(torch.equal(t, plain.tensors[name]) for name, t in weights.tensors.items())


def test_without_a_moving_average_the_model_is_taken():
    with TorchFile(reference("fixtures/yolov5/yolov5n_random_nc3.pt")) as file:
        file.root["ema"] = None  # as YOLOv5 strips a finished run's file
        weights = yolov5_pt.from_torch_file(file)
    with np.load(reference("fixtures/yolov5/yolov5n_io.npz")) as io:
        decoded = decoded_by(weights, io["input_u8"])
        compare(decoded[:, ::16], io["model_eval_decoded_every16"], atol=ATOL_PX, rms=RMS_PX)
        assert np.square(decoded - io["ema_eval_decoded"]).mean() > (30 * RMS_PX) ** 2  # 1 % noise


def test_published_weights_are_read():
    path = reference("weights/yolov5n.pt")
    facts = json.loads(reference("fixtures/yolov5/real_weights_info.json").read_text())["yolov5n"]
    assert path.stat().st_size == facts["bytes"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == facts["sha256"]
    weights = read_weights(path)
    names = weights.header.names
    assert (weights.header.nc, len(names)) == (80, facts["n_names"])
    assert (names[0], names[79]) == ("person", "toothbrush")
    shapes = {name: list(t.shape) for name, t in weights.tensors.items()}
    assert shapes == FACTS["state_dict"]["yolov5n"]
    assert len(shapes) == facts["transferred_into_v7_model"][0]
    for name, (shape, _) in facts["buffers_detect"].items():
        assert shapes[f"model.24.{name}"] == shape
    assert weights.tensors["model.24.anchors"].tolist() == facts["anchors_buffer"]
    assert {t.dtype for t in weights.tensors.values()} == {torch.float32, torch.int64}


def test_every_name_in_the_originals_pickles_is_known():
    info = json.loads(parity("yolov5_checkpoints/facts.json").read_text())
    for file, names in info["pickle_globals"].items():
        for name in names:
            path = name.replace(" ", ".").replace("__builtin__.", "builtins.")
            known = path in pickles.REBUILD or path in pickles.INERT_NAMES
            assert known or path.startswith(pickles.INERT_PACKAGES), (file, name)


def test_optimizer_groups_hold_as_many_parameters_as_the_originals():
    info = json.loads(parity("yolov5_checkpoints/facts.json").read_text())
    groups = parameter_groups(build_model(describe("yolov5n"), 3))
    assert [len(group) for group in groups] == info["optimizer_groups"]


@pytest.mark.parametrize("name", ["yolov5n", "yolov5n6"])
def test_a_fresh_network_has_the_originals_number_of_tensors(name):
    assert len(build_model(describe(name), 80).state_dict()) == FACTS["models"][name]["state_dict_len"]
