"""Paddle's weights files: one that Paddle's own tensors were written to, and files of whole models, both ways."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import parity

from yolofleet.families.build import build_model
from yolofleet.families.networks.description import preset as any_preset
from yolofleet.families.ppyoloe import pdparams_file as paddle
from yolofleet.families.ppyoloe.description import preset
from yolofleet.families.weights.transfer import model_from_weights
from yolofleet.families.weights.value import Weights, WeightsHeader
from yolofleet.support.errors import CheckpointError

TINY = replace(preset("ppyoloe-plus-s"), name="tiny", width_multiple=0.125)


def weights(description, nc):
    """A fresh network whose statistics are not the ones of a fresh network."""
    model = build_model(description, nc, seed=3)
    with torch.no_grad():
        for n, t in model.state_dict().items():
            if n.endswith(("running_mean", "running_var", "alpha")):
                t.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(n)))
    tensors = {n: t for n, t in model.state_dict().items() if not n.endswith("num_batches_tracked")}
    return Weights(tensors, WeightsHeader.of(model, img=640))


@pytest.fixture(scope="module")
def tiny():
    return weights(TINY, 3)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], t), name


def test_a_file_of_paddle_comes_back_bit_for_bit(tmp_path):
    with np.load(parity("ppyoloe_model/few_tensors.npz")) as file:
        expected = {name: file[name] for name in file.files}
    path = tmp_path / "few ü.pdparams"
    path.write_bytes(expected.pop("pdparams").tobytes())  # protocol 2, numpy 1
    arrays = paddle.read_arrays(path)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == expected[name].dtype == np.float32
        assert np.array_equal(array, expected[name])
    # there is one weight of them, but no bias
    with pytest.raises(CheckpointError, match="no class predictions"):
        paddle.read(path)


def test_what_is_written_is_what_numpy_pickles(tmp_path, tiny):
    """``paddle.load`` is Python's pickle with encoding latin1, and Paddle wants every name of its own model."""
    path = tmp_path / "model.pdparams"
    paddle.write(path, tiny)
    found = pickle.loads(path.read_bytes(), encoding="latin1")
    assert all(
        type(a) is np.ndarray and a.dtype == np.float32 and a.flags.c_contiguous for a in found.values()
    )
    assert np.array_equal(found.pop("yolo_head.proj_conv.weight"), np.arange(17).reshape(1, 17, 1, 1))
    assert len(found) == 429 - 1
    same({paddle.our_name(n): torch.from_numpy(a.copy()) for n, a in found.items()}, tiny.tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pdparams"]


@pytest.mark.parametrize(("name", "nc"), [("ppyoloe-s", 80), ("ppyoloe-plus-s", 1)])
def test_a_model_is_found_by_its_shapes(tmp_path, name, nc):
    given = weights(preset(name), nc)
    paddle.write(tmp_path / "w.pdparams", given)
    found = paddle.read(tmp_path / "w.pdparams")
    assert found.header == replace(given.header, extra={"img": "not stated by the file"})
    same(found.tensors, given.tensors)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_files_as_paddle_writes_them(tmp_path, tiny, protocol):
    """With the table of internal names and the fixed projection; of a run: the moving average and the last step."""
    arrays = {paddle.paddle_name(n): t.numpy() for n, t in tiny.tensors.items()}
    arrays["yolo_head.proj_conv.weight"] = np.arange(17, dtype=np.float32).reshape(1, 17, 1, 1)
    table = {n: f"conv2d_{i}.w_0" for i, n in enumerate(arrays)}
    for suffix in (".pdparams", ".pdema"):
        path = (tmp_path / "best_model").with_suffix(suffix)
        path.write_bytes(pickle.dumps({**arrays, "StructuredToParameterName@@": table}, protocol=protocol))
        found = paddle.read(path, TINY)
        same(found.tensors, tiny.tensors)
    name = "yolo_head.pred_cls.0.bias"
    assert torch.equal(model_from_weights(found).get_parameter(name), tiny.tensors[name])


def test_half_and_double_precision_become_single(tmp_path, tiny):
    for dtype in (np.float16, np.float64):
        arrays = {paddle.paddle_name(n): t.numpy().astype(dtype) for n, t in tiny.tensors.items()}
        (tmp_path / "w.pdparams").write_bytes(pickle.dumps(arrays))
        expected = {
            n: torch.from_numpy(arrays[paddle.paddle_name(n)].astype(np.float32)) for n in tiny.tensors
        }
        same(paddle.read(tmp_path / "w.pdparams", TINY).tensors, expected)


def test_a_model_that_is_not_built_in_needs_its_description(tmp_path, tiny):
    paddle.write(tmp_path / "w.pdparams", tiny)
    with pytest.raises(CheckpointError, match="fits none of the models ppyoloe-s"):
        paddle.read(tmp_path / "w.pdparams")
    assert paddle.read(tmp_path / "w.pdparams", TINY).description == TINY
    with pytest.raises(CheckpointError, match="do not fit the model ppyoloe-plus-s"):
        paddle.read(tmp_path / "w.pdparams", preset("ppyoloe-plus-s"))


def test_other_models_are_not_written(tmp_path):
    model = build_model(any_preset("yolov5n"), 1)
    with pytest.raises(CheckpointError, match=r"cannot write yolov5n as \.pdparams"):
        paddle.write(tmp_path / "w.pdparams", Weights(model.state_dict(), WeightsHeader.of(model, img=640)))
    assert not list(tmp_path.iterdir())
