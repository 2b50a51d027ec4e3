"""Good files of every kind that yolofleet reads, small, made once and only copied by the cases."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from exported import job_of, metadata_of, network, small
from small_data import encoded, picture, with_exif_jpeg, with_exif_png
from small_files import TINY_YAML, TWO_LEVELS_CFG

from yolofleet.cli import main
from yolofleet.data.datasets.shapes import NAMES, make_shapes
from yolofleet.data.images.decode import read_image
from yolofleet.families.build import build_model
from yolofleet.families.darknet import weights_file as darknet
from yolofleet.families.darknet.cfg import parse_cfg
from yolofleet.families.ppyoloe import pdparams_file as paddle
from yolofleet.families.weights.value import Weights, WeightsHeader, write_weights

YOLOV5_NAMES = ["ape", "bird", "cat"]
RECIPE = "lr0: 0.01\nlrf: 0.1\nmomentum: 0.9\nweight_decay: 0.0005\nwarmup_epochs: 3.0\nbox: 0.05\ncls: 0.5\nobj: 1.0\nmosaic: 1.0\nfliplr: 0.5\n"
TRAIN = ["--img", "64", "--batch", "4", "--nominal-batch", "4", "--micro-batch", "2", "--no-plots", "--threads", "1",
         "--workers", "0", "--epochs", "1", "--device", "cpu"]  # fmt: skip


class Corpus:
    """Files below ``folder``, each made when it is first asked for.

    Methods named after a file or folder return its path.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> Path:
        """Return the file or folder ``name``; the method of its first part makes it."""
        first = name.partition("/")[0]
        if not (self.folder / first).exists():
            make: Callable[[Path], None] = getattr(self, "_" + first.replace(".", "_").replace("-", "_"))
            make(self.folder / first)
        return self.folder / name

    def read(self, name: str) -> bytes:
        return self.get(name).read_bytes()

    def make_all(self) -> None:
        """Make everything, so that no case pays for it."""
        for name in ALL:
            self.get(name)
        for name in EXPORTS:
            if _can_write(name):
                self.get(EXPORTS[name])

    # -- data sets

    def _set(self, path: Path) -> None:
        make_shapes(path, images=4, val_images=2, img=64, seed=3)

    def _shards(self, path: Path) -> None:
        self._quietly("data", "shard", str(self.get("set")), "--out", str(path), "--size", "16KiB")

    def _listed(self, path: Path) -> None:
        """The same with a list of images."""
        shutil.copytree(self.get("set"), path)
        images = sorted((path / "images" / "train").iterdir())
        (path / "train.txt").write_text("".join(f"./images/train/{image.name}\n" for image in images))
        text = (path / "data.yaml").read_text()
        (path / "data.yaml").write_text(re.sub("(?m)^train:.*$", "train: train.txt", text))

    def _convert(self, path: Path, to: str) -> None:
        self._quietly(
            "data", "convert", str(self.get("set")), "--to", to, "--out", str(path), "--images", "copy"
        )

    def _coco(self, path: Path) -> None:
        self._convert(path, "coco")

    def _voc(self, path: Path) -> None:
        self._convert(path, "voc")

    def _labelme(self, path: Path) -> None:
        for image in sorted((self.get("set") / "images").glob("*/*0.*")):
            copy = path / image.parent.name / image.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(image, copy)
            shape = {
                "label": "cat",
                "shape_type": "rectangle",
                "points": [[20, 8], [4, 16]],
                "group_id": None,
            }
            content = {"shapes": [shape], "imagePath": image.name, "imageHeight": None, "imageWidth": None}
            copy.with_suffix(".json").write_text(json.dumps(content))

    def _masked(self, path: Path) -> None:
        for image in sorted((self.get("set") / "images").glob("*/*0.*")):
            shutil.copy(image, _made(path / "images" / image.parent.name) / image.name)
            size = read_image(str(image)).shape[:2]
            numbers = np.zeros(size, np.uint8)
            numbers[4:12, 5:20], numbers[20:30, 8:16] = 1, 2
            mask = _made(path / "masks" / image.parent.name) / f"{image.stem}.png"
            mask.write_bytes(cv2.imencode(".png", numbers)[1].tobytes())

    # -- weights

    def _trained(self) -> Any:
        model = network(nc=len(NAMES))
        model.names = NAMES
        return model

    def _best_safetensors(self, path: Path) -> None:
        model = self._trained()
        write_weights(path, Weights(model.state_dict(), WeightsHeader.of(model, img=64)))

    def _plain_safetensors(self, path: Path) -> None:
        """Of a stranger: names of YOLOv5, no header of ours."""
        import safetensors.torch

        safetensors.torch.save_file(_first_of_yolov5n(), str(path), {"format": "pt"})

    def _module_pt(self, path: Path) -> None:
        self._torch_file(path, legacy=False)

    def _legacy_pt(self, path: Path) -> None:
        self._torch_file(path, legacy=True)

    def _torch_file(self, path: Path, *, legacy: bool) -> None:
        """A checkpoint with module objects, as YOLOv5 saves it."""
        with yolov5_objects() as made:
            content = {
                "epoch": 7,
                "model": None,
                "ema": made(build_model(small("yolov5n"), 3, seed=1).eval()),
                "optimizer": {
                    "state": {0: {"momentum_buffer": torch.zeros(3)}},
                    "param_groups": [{"lr": 0.1}],
                },
                "opt": {"imgsz": 416, "device": ""},
            }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the old format wants source code
                torch.save(content, path, _use_new_zipfile_serialization=not legacy)

    def _state_pt(self, path: Path) -> None:
        torch.save(_first_of_yolov5n(), path)

    def _tiny_cfg(self, path: Path) -> None:
        path.write_text(TWO_LEVELS_CFG)

    def _tiny_weights(self, path: Path) -> None:
        description = parse_cfg(TWO_LEVELS_CFG, name="tiny", source="tiny.cfg")
        model = build_model(description, 3, seed=1)
        self.get("tiny.cfg")
        darknet.write(path, Weights(model.state_dict(), WeightsHeader.of(model, img=64)))

    def _ppyoloe_pdparams(self, path: Path) -> None:
        model = build_model(small("ppyoloe-s"), 3, seed=1)
        paddle.write(path, Weights(model.state_dict(), WeightsHeader.of(model, img=64)))

    # -- exported files

    def _export(self, path: Path, name: str) -> None:
        from yolofleet.inference.export.formats import FORMATS

        model = self._trained()
        FORMATS[name].module.write(job_of(model, metadata_of(model)), path)

    def _model_onnx(self, path: Path) -> None:
        self._export(path, "onnx")

    def _model_torchscript(self, path: Path) -> None:
        self._export(path, "torchscript")

    def _model_openvino(self, path: Path) -> None:
        self._export(path, "openvino")

    def _model_ncnn(self, path: Path) -> None:
        self._export(path, "ncnn")

    def _model_tflite(self, path: Path) -> None:
        self._export(path, "tflite")

    # -- a run

    def _run(self, path: Path) -> None:
        (self.folder / "tiny.yaml").write_text(TINY_YAML)
        argv = ["train", "--data", str(self.get("set")), "--cfg", str(self.folder / "tiny.yaml"), *TRAIN]
        self._quietly(*argv, "--project", str(path.parent), "--name", path.name)

    def _tiny_yaml(self, path: Path) -> None:
        path.write_text(TINY_YAML)

    # -- pictures and videos

    def _pictures(self, path: Path) -> None:
        path.mkdir()
        image = picture(40, 30)
        for suffix in (".jpg", ".png", ".bmp", ".webp", ".tiff", ".jp2", ".gif"):
            with contextlib.suppress(cv2.error, AssertionError):  # a format that this OpenCV does not write
                (path / f"a{suffix}").write_bytes(encoded(image, suffix))
        (path / "turned.jpg").write_bytes(with_exif_jpeg(encoded(image), 6))
        (path / "turned.png").write_bytes(with_exif_png(encoded(image, ".png"), 6))
        (path / "gray16.png").write_bytes(encoded(image[..., 0].astype("uint16") * 257, ".png"))
        done, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
        assert done
        (path / "progressive.jpg").write_bytes(data.tobytes())

    def _videos(self, path: Path) -> None:
        path.mkdir()
        for name, code in (("a.avi", "MJPG"), ("a.mp4", "mp4v")):
            video = cv2.VideoWriter(str(path / name), cv2.VideoWriter.fourcc(*code), 5.0, (64, 48))
            for seed in range(3):
                video.write(picture(64, 48, seed))
            video.release()

    # -- archives

    def _archives(self, path: Path) -> None:
        path.mkdir()
        files = {"set/images/a.jpg": b"a" * 1000, "set/labels/a.txt": b"0 .5 .5 1 1\n", "set/x": b"x" * 512}
        with zipfile.ZipFile(path / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in files.items():
                file.writestr(zipfile.ZipInfo(name), content)
        for kind in ("tar", "tar.gz"):
            with tarfile.open(path / f"a.{kind}", "w:gz" if kind == "tar.gz" else "w") as file:
                for name, content in files.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    file.addfile(info, io.BytesIO(content))

    def _quietly(self, *argv: str) -> None:
        """Run a command line; its words are shown only if it fails."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _variables(self.folder):
            code = main(list(argv))
        assert code == 0, said.getvalue()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


ALL = ("set", "listed", "coco", "voc", "labelme", "masked", "shards", "best.safetensors", "plain.safetensors", "module.pt", "legacy.pt", "state.pt", "tiny.weights",
       "ppyoloe.pdparams", "run", "tiny.yaml", "pictures", "videos", "archives")  # fmt: skip
EXPORTS = {
    "onnx": "model.onnx",
    "torchscript": "model.torchscript",
    "openvino": "model_openvino",
    "ncnn": "model_ncnn",
    "tflite": "model.tflite",
}


def _can_write(name: str) -> bool:
    from yolofleet.inference.export.formats import FORMATS

    return all(find_spec(module) for module in (*FORMATS[name].writes, *FORMATS[name].runs))


def exports() -> list[str]:
    """Return the formats that can be written and run here."""
    return [name for name in EXPORTS if _can_write(name)]


@contextlib.contextmanager
def _variables(folder: Path) -> Any:
    before = dict(os.environ)
    os.environ["YOLOFLEET_CACHE"] = str(folder / "cache")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _first_of_yolov5n() -> dict[str, torch.Tensor]:
    return dict(build_model(small("yolov5n"), 3, seed=1).state_dict())


@contextlib.contextmanager
def yolov5_objects() -> Iterator[Callable[..., Any]]:
    """Give classes at the paths of YOLOv5's releases; yield a function that makes its module object around a model of ours:
    the same tensors in 16 bits, and its ``yaml`` mapping. More arguments become attributes of the object."""
    paths = ("models.yolo.Detector", "models.common.Conv", "models.common.C3")
    modules = {name: types.ModuleType(name) for name in ("models", "models.yolo", "models.common")}
    before = {name: sys.modules.get(name) for name in modules}
    classes = {}
    for where, _, name in (path.rpartition(".") for path in paths):
        classes[name] = type(name, (torch.nn.Module,), {"__module__": where})
        setattr(modules[where], name, classes[name])

    def detect(self: Any) -> None: ...

    detect.__module__, detect.__qualname__ = "models.yolo", "Detector.detect"
    classes["Detector"].detect = detect  # type: ignore[attr-defined]

    def make(
        model: Any, *, activation: Any = torch.nn.SiLU, names: Any = YOLOV5_NAMES, **attributes: Any
    ) -> Any:
        values = model.description.to_dict()
        anchors = [[v for pair in level for v in pair] for level in values.pop("anchors_px")]
        kept = {key: values[key] for key in values if key not in ("family", "name")}
        root = classes["Detector"]()
        root.model = torch.nn.Sequential()
        for name, tensor in model.state_dict().items():
            *way, leaf = name.removeprefix("model.").split(".")
            at: Any = root.model
            for depth, part in enumerate(way):
                if part not in at._modules:
                    at.add_module(part, classes["Conv" if depth else "C3"]())
                at = at._modules[part]
            at.register_buffer(leaf, tensor.half() if tensor.is_floating_point() else tensor)
        root.model._modules["0"].act = activation()
        if "proto" in (head := list(root.model.children())[-1])._modules:
            head.detect = vars(classes["Detector"])["detect"]  # so YOLOv5's files name getattr
        root.yaml, root.yaml_file = {"nc": 80, "anchors": anchors, **kept}, "small.yaml"
        root.names, root.nc = names, 3
        for name, value in attributes.items():
            setattr(root, name, value)
        return root

    sys.modules.update(modules)
    try:
        yield make
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
