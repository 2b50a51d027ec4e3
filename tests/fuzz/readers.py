"""The readers of what strangers make: each makes one broken or hostile case and says what to run on it.

Most run a whole verb, messages included. A function is run where no verb reaches a reader without a network or several
processes.
"""

from __future__ import annotations

import json
import shutil
import socket
import struct
import tarfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import yaml
from corpus import RECIPE, TRAIN, exports
from harness import Action, Case, Reader, environment_of
from mutate import (
    CALL,
    EDGES,
    NUMBERS,
    WORDS,
    XML_BITS,
    YAML_BITS,
    json_text,
    memo_fan_out,
    mutate_bytes,
    mutate_pickle,
    mutate_safetensors,
    mutate_text,
    mutate_tree,
    mutate_zip,
    odd_name,
    special,
    with_tag,
    zipped,
)
from small_data import encoded, exif, picture, png_chunk
from small_files import FLEET_FILE, TINY_YAML, TWO_LEVELS_CFG

LOGS = Path(__file__).resolve().parents[1] / "unit" / "doctor" / "logs"
RUN_SMALL = ["--img", "64", "--threads", "1"]
SPECIAL = 0.06  # share of cases with a pipe, device, link ... in the place of a file

READERS: dict[str, Reader] = {}


def reader(make: Reader) -> Reader:
    """Add a function to the table under its name."""
    READERS[make.__name__.replace("_", "-")] = make
    return make


def here(case: Case, name: str, data: bytes | None = None) -> Path:
    """Write ``data`` as ``name`` into the working folder; sometimes something else is in its place."""
    path = case.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if data is not None:
        path.write_bytes(data)
    if case.rng.random() < SPECIAL:
        special(case.rng, path)
    return path


def copied(case: Case, name: str) -> Path:
    """Copy a good file or folder into the working folder."""
    source, target = case.corpus.get(name), case.folder / Path(name).name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    return target


def picked(case: Case, folder: Path, pattern: str = "*") -> Path:
    """Return one file below a folder."""
    return case.rng.choice(sorted(path for path in folder.rglob(pattern) if path.is_file()))


# -- weights -------------------------------------------------------------------------------------------------


def use_weights(case: Case, name: str, *more: str) -> Action:
    """Look into, check, convert or use a weights file."""
    verb = case.rng.randrange(6)
    if verb < 2:
        return ["weights", "inspect", name, *more, *case.rng.choice(([], ["--json", "-"]))]
    if verb == 2:
        return ["weights", "verify", name, *more]
    if verb == 3:
        return [
            "weights",
            "convert",
            name,
            f"out{case.rng.choice(('.safetensors', '.weights', '.pdparams'))}",
            *more,
        ]
    source = case.corpus.get("pictures") / "a.jpg"
    return ["predict", "--weights", name, "--source", str(source), *RUN_SMALL, *more]


def pickled(case: Case, _: str, content: bytes) -> bytes:
    """Change the pickle of an archive, or bytes of another member."""
    return mutate_pickle(case.rng, content) if content[:1] == b"\x80" else mutate_bytes(case.rng, content)


@reader
def torch_zip(case: Case) -> Action:
    good = case.corpus.read(case.rng.choice(("module.pt", "state.pt")))
    kind = case.rng.random()
    if kind < 0.15:
        data = zipped([("archive/data.pkl", bomb(case)), ("archive/data/0", bytes(16))])
    else:
        data = mutate_zip(case.rng, good, lambda name, content: pickled(case, name, content))
    here(case, "x.pt", data)
    return use_weights(case, "x.pt")


def bomb(case: Case) -> bytes:
    """Return a small pickle that calls something or grows."""
    rng = case.rng
    count = rng.choice((1000, 200_000, 1_500_000))
    return rng.choice(
        (
            lambda: b"\x80\x02" + CALL + b".",
            lambda: b"\x80\x02}X\x05\x00\x00\x00model" + CALL + b"s.",
            lambda: memo_fan_out(rng.choice((10, 30, 200)), rng.choice((2, 20, 200))),
            lambda: b"\x80\x04(" + b"\x8f" * count + b"l.",
            lambda: b"\x80\x02(" + b"}" * count + b"l.",
            lambda: b"\x80\x02" + b"(" * count + b".",
            lambda: b"\x80\x02]q\x00" + b"h\x00a" * count + b".",
            lambda: b"\x80\x02(" + b"N\x85" * count + b"l.",
            lambda: b"\x80\x02N" + b"\x85" * count + b".",
            lambda: b"\x80\x02X" + struct.pack("<I", 2**31 - 1) + b"x.",
            lambda: b"\x80\x02I" + b"9" * count + b"\n.",
            lambda: b"\x80\x02\x8b" + struct.pack("<i", 1000) + b"\xff" * 1000 + b".",
            lambda: b"\x80\x04" + b"\x95" + struct.pack("<Q", 2**62) + b"N.",
            lambda: b"\x80\x02cbuiltins\ndict\n" + b"(" + b"K\x01" * (count // 10) + b"tR.",
        )
    )()


@reader
def torch_legacy(case: Case) -> Action:
    here(case, "x.pt", mutate_pickle(case.rng, case.corpus.read("legacy.pt")) if case.rng.random() < 0.6 else mutate_bytes(case.rng, case.corpus.read("legacy.pt")))  # fmt: skip
    return use_weights(case, "x.pt")


@reader
def safetensors(case: Case) -> Action:
    good = case.corpus.read(case.rng.choice(("best.safetensors", "plain.safetensors")))
    here(case, "x.safetensors", mutate_safetensors(case.rng, good))
    return use_weights(case, "x.safetensors")


@reader
def our_weights_with_a_right_digest(case: Case) -> Action:
    """Anybody can compute the digest, so what it covers is a stranger's all the same."""
    forge(case, case.corpus.get("best.safetensors"), case.folder / "x.safetensors")
    return use_weights(case, "x.safetensors")


def forge(case: Case, good: Path, target: Path) -> None:
    """Write a file of our format with a changed header or tensors, and a digest that fits."""
    import torch

    from yolofleet.checkpoint.format import DIGEST, read_tensors, tensors_sha256

    tensors, header = read_tensors(good)
    rng = case.rng
    if rng.random() < 0.3:
        name = rng.choice(list(tensors))
        tensors[name] = rng.choice(
            (
                lambda t: t.to(torch.float64) * float("nan"),
                lambda t: t.to(torch.complex64),
                lambda t: t.to(torch.bool),
                lambda t: -t.abs() if t.is_floating_point() else -t,
                lambda t: t.reshape(-1),
                lambda t: t.to(torch.uint8),
                lambda t: torch.zeros(0, *t.shape),
                lambda t: t.to(torch.float32) * 1e38,
                lambda t: torch.zeros(()),
            )
        )(tensors[name])
    elif rng.random() < 0.1:
        del tensors[rng.choice(list(tensors))]
    else:
        header = mutate_tree(rng, header)
    if not isinstance(header, dict):
        header = {}
    metadata = {}
    for key, value in header.items():
        text = json.dumps(value, sort_keys=rng.random() < 0.5)
        if rng.random() < 0.25:
            text = mutate_text(rng, text).decode("utf-8", "replace")
        metadata[str(key)] = text
    import safetensors.torch

    tensors = {str(name): tensor.contiguous() for name, tensor in tensors.items()}
    clean = {k.encode("utf-8", "replace").decode(): v for k, v in metadata.items()}
    digest = tensors_sha256(tensors, clean)
    safetensors.torch.save_file(tensors, str(target), {**clean, DIGEST: digest})


@reader
def darknet_weights(case: Case) -> Action:
    data, cfg = case.corpus.read("tiny.weights"), TWO_LEVELS_CFG
    if case.rng.random() < 0.5:
        cfg = mutate_text(case.rng, cfg).decode("utf-8", "replace")
    else:
        data = mutate_bytes(case.rng, data)
    here(case, "tiny.cfg", cfg.encode())
    here(case, "tiny.weights", data)
    return use_weights(case, "tiny.weights", *case.rng.choice(([], ["--cfg", "tiny.cfg"])))


@reader
def paddle(case: Case) -> Action:
    good = case.corpus.read("ppyoloe.pdparams")
    kind = case.rng.random()
    data = (
        bomb(case)
        if kind < 0.15
        else mutate_pickle(case.rng, good)
        if kind < 0.6
        else mutate_bytes(case.rng, good)
    )
    here(case, "x.pdparams", data)
    return use_weights(case, "x.pdparams", "--cfg", "ppyoloe-s")


# -- descriptions of networks --------------------------------------------------------------------------------

YAML_BOMBS = (
    "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "".join(f"k{i}: &k{i} {{{', '.join(f'<<: *k{j}' for j in range(max(0, i - 3), i)) or 'x: 1'}, y{i}: 1}}\n" for i in range(40)),
    "m0: &m0 {a: 1, b: 2}\n" + "".join(f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 10)}]}}\n" for i in range(1, 9)),
    "nc: " + ":".join(["1"] * 3000) + "\n",
    "nc: 1" + ":59" * 100_000 + "\n",
    "nc: " + "9" * 100_000 + "\n",
    "? " * 3000 + "\n",
    "a: " + "[" * 20_000 + "\n",
    "&a a: *a\n",
    "x: &x [*x]\n",
    "- " * 5000,
    "{" * 10_000,
    "a: !!binary " + "A" * 100_000 + "\n",
    "a: '" + "\n" * 200_000 + "'\n",
    "# " + "x" * 1_000_000 + "\n",
    "".join(f"k{i}: {i}\n" for i in range(60_000)),
)  # fmt: skip


def yaml_of(case: Case, text: str) -> bytes:
    """Return broken YAML: changed text, a changed tree, a strange tag or a small bomb."""
    kind = case.rng.random()
    if kind < 0.12:
        piece = case.rng.choice(YAML_BOMBS)
        return (piece if case.rng.random() < 0.5 else text + piece).encode()
    if kind < 0.22:
        return with_tag(case.rng, text)
    if kind < 0.5:
        tree = mutate_tree(case.rng, yaml.safe_load(text))
        try:
            return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
        except RecursionError:  # nested too deeply for the writer
            pass
    return mutate_text(case.rng, text, YAML_BITS)


@reader
def network_yaml(case: Case) -> Action:
    here(case, "net.yaml", yaml_of(case, TINY_YAML))
    return use_description(case, "net.yaml")


@reader
def network_cfg(case: Case) -> Action:
    here(case, "net.cfg", mutate_text(case.rng, TWO_LEVELS_CFG))
    return use_description(case, "net.cfg")


def use_description(case: Case, name: str) -> Action:
    """Read the description, and build its network where that is cheap."""
    if case.rng.random() < 0.15:
        return ["train", "--cfg", name, "--data", str(case.corpus.get("set")), *TRAIN, "--max-steps", "1"]
    if case.rng.random() < 0.5:
        return ["weights", "inspect", str(case.corpus.get("tiny.weights")), "--cfg", name]
    return lambda: describe_and_outline(name)


def describe_and_outline(name: str) -> None:
    """describe(name), and the shapes of its network."""
    from yolofleet.families import outline
    from yolofleet.models.description import describe

    outline(describe(name), 4)


# -- exported files ------------------------------------------------------------------------------------------


def use_exported(case: Case, name: str) -> Action:
    """Look into or run an exported file."""
    verb = case.rng.randrange(4)
    if verb == 0:
        return ["weights", "inspect", name]
    if verb == 1:
        return ["bench", "--weights", name, "--passes", "1", "--threads", "1"]
    source = case.corpus.get("pictures") / "a.jpg"
    return ["predict", "--weights", name, "--source", str(source), "--threads", "1"]


def onnx(case: Case) -> Action:
    import onnx as library

    rng, good = case.rng, case.corpus.read("model.onnx")
    if rng.random() < 0.4:
        data = mutate_bytes(rng, good)
    else:
        model = library.load_from_string(good)
        change_onnx(case, model)
        data = model.SerializeToString()
    here(case, "x.onnx", data)
    return use_exported(case, "x.onnx")


def change_onnx(case: Case, model: Any) -> None:
    """Change one part of a parsed ONNX file."""
    rng, graph = case.rng, model.graph
    kind = rng.randrange(9)
    if kind == 0:
        node = rng.choice(graph.node)
        node.op_type = rng.choice(
            ("Loop", "If", "Scan", "Identity", "PyOp", "x", "ConstantOfShape", "Resize", "Expand", "Tile")
        )
    elif kind == 1:
        tensor = rng.choice(graph.initializer)
        del tensor.dims[:]
        tensor.dims.extend(rng.choices(EDGES[:16], k=rng.choice((0, 1, 3, 30))))
    elif kind == 2:
        place = rng.choice([*graph.input, *graph.output])
        place.type.tensor_type.elem_type = rng.choice((0, 999, 7, 8, 16, -1 & 0x7FFFFFFF))
    elif kind == 3:
        place = rng.choice([*graph.input, *graph.output])
        for dim in place.type.tensor_type.shape.dim:
            dim.dim_value = rng.choice((0, 1, 1000, 2**31, 2**62))
    elif kind == 4:
        if model.metadata_props:
            entry = rng.choice(model.metadata_props)
            entry.value = mutate_text(rng, entry.value).decode("utf-8", "replace").replace("\0", "0")
    elif kind == 5:
        node = rng.choice([n for n in graph.node if n.attribute])
        attribute = rng.choice(node.attribute)
        attribute.i = rng.choice(EDGES[:-1])
        if attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(EDGES[:-1])
    elif kind == 6:
        node = rng.choice(graph.node)
        node.input[rng.randrange(len(node.input)) if node.input else 0 :] = [rng.choice(graph.node).output[0]]
    elif kind == 7:
        tensor = rng.choice(graph.initializer)
        tensor.data_location = 1
        for key, value in (
            ("location", rng.choice(WORDS)),
            ("offset", rng.choice(NUMBERS)),
            ("length", rng.choice(NUMBERS)),
        ):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value.encode("utf-8", "replace").decode()
    else:
        for _ in range(rng.choice((1, 3))):
            del graph.node[rng.randrange(len(graph.node))]


def torchscript(case: Case) -> Action:
    def change(name: str, content: bytes) -> bytes:
        if name.endswith(".py"):
            return mutate_text(case.rng, content.decode(), SCRIPT_BITS)
        return pickled(case, name, content)

    here(case, "x.torchscript", mutate_zip(case.rng, case.corpus.read("model.torchscript"), change))
    return use_exported(case, "x.torchscript")


SCRIPT_BITS = (
    *('torch.save([1], "../outside/ran")', 'torch.from_file("../outside/ran", True, 4)', "while True:\n    pass", "ops.aten.save"),
    *("torch.zeros([1000000, 1000000])", "torch.repeat_interleave(input, 1000000000)", "import os", "torch.mul", "print", "raise"),
)  # fmt: skip


def openvino(case: Case) -> Action:
    folder = copied(case, "model_openvino")
    name = case.rng.choice(("model.xml", "model.xml", "model.bin"))
    data = (folder / name).read_bytes()
    here(case, f"{folder.name}/{name}", mutate_text(case.rng, data.decode(), XML_BITS) if name.endswith("xml") and case.rng.random() < 0.7 else mutate_bytes(case.rng, data))  # fmt: skip
    return use_exported(case, case.rng.choice((folder.name, f"{folder.name}/model.xml")))


def ncnn(case: Case) -> Action:
    folder = copied(case, "model_ncnn")
    name = case.rng.choice(("model.ncnn.param", "model.ncnn.param", "model.ncnn.bin", "yolofleet.json"))
    data = (folder / name).read_bytes()
    if name.endswith("json"):
        data = json_text(case.rng, mutate_tree(case.rng, json.loads(data)))
    else:
        data = (
            mutate_text(case.rng, data.decode())
            if name.endswith("param") and case.rng.random() < 0.7
            else mutate_bytes(case.rng, data)
        )
    here(case, f"{folder.name}/{name}", data)
    return use_exported(case, folder.name)


def tflite(case: Case) -> Action:
    here(case, "x.tflite", mutate_bytes(case.rng, case.corpus.read("model.tflite")))
    return use_exported(case, "x.tflite")


READERS.update({name: globals()[name] for name in exports()})


# -- data sets -----------------------------------------------------------------------------------------------


def use_data(case: Case, data: str, *, decode: bool = False) -> Action:
    """Check, count or convert a data set, or train a step with it."""
    verb = case.rng.randrange(9)
    if verb < 4 or decode:
        more = [flag for flag in ("--decode", "--duplicates") if decode or case.rng.random() < 0.3]
        return ["data", "check", data, *more, *case.rng.choice(([], [], ["--json", "-"], ["--limit", "0"]))]
    if verb < 6:
        return ["data", "stats", data, *case.rng.choice(([], ["--json", "-"]))]
    if verb == 8:
        return [
            "train",
            "--data",
            data,
            "--cfg",
            str(case.corpus.get("tiny.yaml")),
            *TRAIN,
            "--max-steps",
            "1",
        ]
    form, images = (
        case.rng.choice(("yolo", "coco", "voc")),
        case.rng.choice(("copy", "link", "symlink", "none")),
    )
    return ["data", "convert", data, "--to", form, "--out", "out", "--images", images]


@reader
def data_yaml(case: Case) -> Action:
    folder = copied(case, "set")
    text = (folder / "data.yaml").read_text()
    if case.rng.random() < 0.3:
        text += "download: touch ../outside/ran\n"
    here(case, "set/data.yaml", yaml_of(case, text))
    return use_data(case, case.rng.choice(("set", "set/data.yaml")))


@reader
def yolo_labels(case: Case) -> Action:
    folder = copied(case, "set")
    paths = sorted(path for path in (folder / "labels").rglob("*") if path.is_file())
    for path in case.rng.sample(paths, case.rng.choice((1, 2))):
        here(case, str(path.relative_to(case.folder)), mutate_text(case.rng, path.read_text()))
    return use_data(case, "set")


@reader
def image_lists(case: Case) -> Action:
    folder = copied(case, "set")
    images = sorted((folder / "images" / "train").iterdir())
    lines = [f"./images/train/{path.name}" for path in images]
    lines.insert(case.rng.randrange(len(lines)), case.rng.choice(WORDS))
    data = yaml.safe_load((folder / "data.yaml").read_text())
    (folder / "data.yaml").write_text(yaml.safe_dump({**data, "train": "train.txt"}))
    text = "\n".join(lines) + "\n"
    here(
        case,
        "set/train.txt",
        mutate_text(case.rng, text) if case.rng.random() < 0.6 else text.encode("utf-8", "replace"),
    )
    return use_data(case, "set")


@reader
def names_of_files(case: Case) -> Action:
    """Images and labels with names that screens and systems trip over."""
    folder = copied(case, "set")
    for _ in range(2):
        image = picked(case, folder / "images")
        label = Path(str(image.with_suffix(".txt")).replace("/images/", "/labels/"))
        name = odd_name(case.rng, image.suffix)
        try:
            image.rename(image.with_name(name))
            if label.is_file() and case.rng.random() < 0.7:
                label.rename(label.with_name(name[: -len(image.suffix)] + ".txt"))
                if case.rng.random() < 0.5:
                    label.with_name(name[: -len(image.suffix)] + ".txt").write_text("7 1 2 x\n0 nan 1 1 1\n")
            elif case.rng.random() < 0.5:
                image.with_name(name).write_bytes(b"no image")
        except OSError:
            pass
    if case.rng.random() < 0.4:
        source = case.rng.choice(("set/images/train", "set/images/train/*"))
        weights = str(case.corpus.get("best.safetensors"))
        save = case.rng.choice(([], ["--save-txt"], ["--save-csv", "--save-json"], ["--save-crop"]))
        return ["predict", "--weights", weights, "--source", source, *RUN_SMALL, *save]
    return use_data(case, "set")


@reader
def coco_json(case: Case) -> Action:
    folder = copied(case, "coco")
    path = picked(case, folder, "*.json")
    here(case, str(path.relative_to(case.folder)), coco_of(case, path))
    return use_data(case, "coco")


def coco_of(case: Case, path: Path) -> bytes:
    text = path.read_text()
    if case.rng.random() < 0.15:
        return mutate_text(case.rng, text)
    tree = json.loads(text)
    if case.rng.random() < 0.25 and tree["images"]:
        case.rng.choice(tree["images"])["file_name"] = case.rng.choice(WORDS)
    if case.rng.random() < 0.2:
        case.rng.choice(tree["categories"])["name"] = case.rng.choice(WORDS)
    return json_text(case.rng, mutate_tree(case.rng, tree))


@reader
def objects365(case: Case) -> Action:
    folder = copied(case, "coco")
    for split in ("train", "val"):
        found = sorted((folder / "annotations").glob(f"*{split}*.json"))
        data = coco_of(case, found[0]) if case.rng.random() < 0.7 else found[0].read_bytes()
        found[0].unlink()
        here(case, f"coco/annotations/zhiyuan_objv2_{split}.json", data)
    return use_data(case, "coco")


@reader
def crowdhuman_odgt(case: Case) -> Action:
    folder = copied(case, "crowd")
    name = case.rng.choice(("annotation_train.odgt", "annotation_val.odgt"))
    lines = (folder / name).read_text().splitlines()
    at = case.rng.randrange(len(lines))
    if case.rng.random() < 0.6:
        tree = json.loads(lines[at])
        if case.rng.random() < 0.3:
            tree["ID"] = case.rng.choice(WORDS)
        data = "\n".join(lines[:at]).encode() + json_text(case.rng, mutate_tree(case.rng, tree))
    else:
        data = mutate_text(case.rng, "\n".join(lines))
    here(case, f"crowd/{name}", data)
    return use_data(case, "crowd")


@reader
def voc_xml(case: Case) -> Action:
    folder = copied(case, "voc")
    kind = case.rng.random()
    if kind < 0.7:
        path = picked(case, folder / "Annotations")
        text = path.read_text()
        if case.rng.random() < 0.3:
            text = (
                case.rng.choice(XML_BITS) + text.partition("?>")[2]
                if text.startswith("<?xml")
                else case.rng.choice(XML_BITS) + text
            )
        data = (
            mutate_text(case.rng, text, (*XML_BITS, *WORDS))
            if case.rng.random() < 0.8
            else text.encode("utf-8", "replace")
        )
    else:
        path = picked(case, folder / "ImageSets")
        data = mutate_text(case.rng, path.read_text())
    here(case, str(path.relative_to(case.folder)), data)
    return use_data(case, "voc")


# -- pictures and videos -------------------------------------------------------------------------------------


@reader
def images(case: Case) -> Action:
    folder = copied(case, "set")
    rng = case.rng
    source = picked(case, case.corpus.get("pictures"))
    data = bomb_image(case) if rng.random() < 0.15 else mutate_bytes(rng, source.read_bytes())
    name = f"set/images/train/x{rng.choice((source.suffix, '.jpg', '.png'))}"
    here(case, name, data)
    (folder / "labels" / "train" / "x.txt").write_text("0 .5 .5 .1 .1\n")
    if rng.random() < 0.5:
        return [
            "predict",
            "--weights",
            str(case.corpus.get("best.safetensors")),
            "--source",
            rng.choice((name, "set/images/train")),
            *RUN_SMALL,
        ]
    return use_data(case, "set", decode=rng.random() < 0.7)


def bomb_image(case: Case) -> bytes:
    """Return a small file that claims a large image, or is costly to decode."""
    rng, image = case.rng, picture(40, 30)
    side = rng.choice((23_000, 30_000, 65_500, 2**31 - 1))
    kind = rng.randrange(7)
    if kind == 0:  # the size in the frame header of a JPEG
        data = bytearray(encoded(image))
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">HH", min(side, 65_500), min(side, 65_500))
        return bytes(data)
    if kind == 1:
        wide = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        body = zlib.compress(bytes(min(side * 3 + 1, 200_000) * 10))
        return (
            b"\x89PNG\r\n\x1a\n"
            + png_chunk(b"IHDR", wide)
            + png_chunk(b"IDAT", body)
            + png_chunk(b"IEND", b"")
        )
    if kind == 2:
        return (
            b"BM"
            + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, side, -side, 1, 24, 0, 0, 0, 0, 0, 0)
            + bytes(46)
        )
    if kind == 3:  # many scans of a progressive JPEG
        data = case.corpus.get("pictures").joinpath("progressive.jpg").read_bytes()
        first = data.index(b"\xff\xda")
        scans = data[first:-2].split(b"\xff\xda")[1:]
        return data[:first] + b"".join(b"\xff\xda" + rng.choice(scans) for _ in range(300)) + b"\xff\xd9"
    if kind == 4:  # a directory of TIFF tags that leads to itself
        return exif(1)[:-4] + struct.pack("<I", 8) + bytes(100)
    if kind == 5:
        wide = min(side, 2**24) - 1
        return (
            b"RIFF"
            + struct.pack("<I", 30)
            + b"WEBPVP8X"
            + struct.pack("<I", 10)
            + bytes(4)
            + wide.to_bytes(3, "little") * 2
        )
    return (
        b"GIF89a"
        + struct.pack("<HH", min(side, 65535), min(side, 65535))
        + b"\x80\0\0"
        + bytes(6)
        + b",\0\0\0\0"
        + struct.pack("<HH", min(side, 65535), min(side, 65535))
        + b"\0\x02\x01\0\0;"
    )


@reader
def predict_lists(case: Case) -> Action:
    rng = case.rng
    pictures = sorted(copied(case, "pictures").iterdir())
    lines = [f"pictures/{path.name}" for path in rng.sample(pictures, 3)] + [rng.choice(WORDS)]
    rng.shuffle(lines)
    if rng.random() < 0.3:
        special(rng, pictures[0])
        lines.append(f"pictures/{pictures[0].name}")
    text = "\n".join(lines) + "\n"
    here(
        case,
        "list.txt",
        mutate_text(rng, text, copies=100) if rng.random() < 0.5 else text.encode("utf-8", "surrogatepass"),
    )
    source = rng.choice(
        ("list.txt", "list.txt", "pictures", "pictures/*", rng.choice(WORDS).replace("\0", "") or "x")
    )
    return ["predict", "--weights", str(case.corpus.get("best.safetensors")), "--source", source, *RUN_SMALL]


@reader
def videos(case: Case) -> Action:
    source = picked(case, case.corpus.get("videos"))
    data = mutate_bytes(case.rng, source.read_bytes())
    if case.rng.random() < 0.15:
        text = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n#EXTINF:1,\nfile:///etc/passwd\n"
        data = case.rng.choice(
            (text, "ffconcat version 1.0\nfile /etc/passwd\n", "RIFF", "\x00" * 1000)
        ).encode()
    name = f"x{case.rng.choice((source.suffix, '.mp4', '.ts', '.mkv', '.gif'))}"
    here(case, name, data)
    return [
        "predict",
        "--weights",
        str(case.corpus.get("best.safetensors")),
        "--source",
        name,
        *RUN_SMALL,
        *case.rng.choice(([], ["--save-txt"])),
    ]


# -- archives ------------------------------------------------------------------------------------------------


@reader
def archives(case: Case) -> Action:
    rng = case.rng
    source = picked(case, case.corpus.get("archives"))
    kind = rng.random()
    if kind < 0.4:
        data = mutate_bytes(rng, source.read_bytes())
    elif kind < 0.7:
        data = mutate_zip(
            rng,
            case.corpus.get("archives").joinpath("a.zip").read_bytes(),
            lambda _, content: mutate_bytes(rng, content),
        )
    else:
        data = hostile_tar(case)
    here(case, f"x{source.suffix}", data)
    return lambda: unpacked(f"x{source.suffix}")


def unpacked(name: str) -> None:
    """unpack(archive, folder)."""
    from yolofleet.files.archive import unpack

    unpack(Path(name), Path("out"), strip="")


def hostile_tar(case: Case) -> bytes:
    import io

    rng, out = case.rng, io.BytesIO()
    with tarfile.open(
        fileobj=out,
        mode=rng.choice(("w", "w:gz")),
        format=rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)),
    ) as file:
        for _ in range(3):
            info = tarfile.TarInfo(
                rng.choice(("a", "../../outside/x", "/tmp/x", "a/b", "a" * 300, *WORDS[:30])).replace(
                    "\0", "0"
                )
                or "x"
            )
            info.type = rng.choice(
                (
                    tarfile.REGTYPE,
                    tarfile.REGTYPE,
                    tarfile.SYMTYPE,
                    tarfile.LNKTYPE,
                    tarfile.CHRTYPE,
                    tarfile.FIFOTYPE,
                    tarfile.DIRTYPE,
                    tarfile.GNUTYPE_SPARSE,
                )
            )
            info.linkname = rng.choice(("../../outside", "/etc/passwd", "a"))
            info.mode = rng.choice((0, 0o777, 0o4777))
            content = bytes(rng.choice((0, 10, 1 << 20))) if info.type == tarfile.REGTYPE else b""
            info.size = len(content)
            try:
                file.addfile(info, io.BytesIO(content))
            except (ValueError, UnicodeError):
                continue
    return out.getvalue() if rng.random() < 0.7 else mutate_bytes(rng, out.getvalue())


# -- settings ------------------------------------------------------------------------------------------------


@reader
def recipes(case: Case) -> Action:
    here(case, "hyp.yaml", yaml_of(case, RECIPE))
    flag = case.rng.choice(("--recipe", "--hyp"))
    return train(case, flag, "hyp.yaml", "--dry-run")


def train(case: Case, *more: str) -> list[str]:
    """Return the words of a training on the good data set."""
    return ["train", "--data", str(case.corpus.get("set")), "--model", "yolov5n", *more]


CONFIGS = {
    "train": "data: DATA\nmodel: yolov5n\nepochs: 3\nbatch: 16\ndevice: cpu\nproject: runs\nhyperparameters: {lr0: 0.01}\nset: [lr0=0.1]\n",
    "val": "data: DATA\nweights: WEIGHTS\nimg: 64\nbatch: 2\ndevice: cpu\nplots: false\n",
    "predict": "source: DATA/images/val\nweights: WEIGHTS\nimg: 64\ndevice: cpu\nclasses: ['0', circle]\n",
    "bench": "weights: WEIGHTS\nimg: 64\npasses: 1\nthreads: 1\n",
    "doctor": "quick: true\nlog: LOG\n",
}
LAUNCHES = (
    "fleet: fleet.yaml\n",
    "hosts: localhost:cpu:2\n",
    "json_out: ../outside/victim.txt\n",
    "project: ../outside\n",
    "device: cpu:2\n",
)


@reader
def config_files(case: Case) -> Action:
    rng = case.rng
    verb = rng.choice(list(CONFIGS))
    text = (
        CONFIGS[verb]
        .replace("DATA", str(case.corpus.get("set")))
        .replace("WEIGHTS", str(case.corpus.get("best.safetensors")))
    )
    text = text.replace("LOG", str(LOGS / "disk-dolly.txt"))
    if rng.random() < 0.2:
        text += rng.choice(LAUNCHES)
        stranger_program(case)
        data = text.encode()
    else:
        data = yaml_of(case, text)
    here(case, "config.yaml", data)
    more = (
        ["--dry-run"]
        if verb == "train"
        else ["--log", str(LOGS / "disk-dolly.txt")]
        if verb == "doctor"
        else []
    )
    if verb in ("val", "predict", "bench"):  # sizes are a user's to choose: these keep the case small
        more += ["--img", "64", "--threads", "1"]
    if verb in ("val", "predict"):
        more += ["--project", "runs", "--device", "cpu"] + (["--batch", "2"] if verb == "val" else [])
    return [verb, "--config", "config.yaml", *more]


def stranger_program(case: Case) -> None:
    """A fleet file whose interpreter is a stranger's program, and a module that a stranger's PYTHONPATH would offer."""
    script = case.folder / "evil"
    script.write_text("#!/bin/sh\ntouch ../outside/ran\n")
    script.chmod(0o755)
    (case.folder / "sitecustomize.py").write_text("open('../outside/ran', 'w')\n")
    text = f"hosts:\n  - host: localhost\n    device: cpu:2\n    python: {script}\n    env: {{PYTHONPATH: {case.folder}}}\n"
    (case.folder / "fleet.yaml").write_text(text)


@reader
def run_folders(case: Case) -> Action:
    """The folder of a run, from elsewhere, given to --resume and to `checkpoints`."""
    rng, run = case.rng, copied(case, "run")
    kind = rng.randrange(10)
    states = sorted((run / "checkpoints").glob("*.safetensors"))
    if kind < 3:
        forge(case, states[-1], states[-1])
    elif kind == 3:
        states[-1].write_bytes(mutate_safetensors(rng, states[-1].read_bytes()))
    elif kind == 4:
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_bytes(yaml_of(case, text))
    elif kind == 5:
        stranger_program(case)
        text = (run / "config.yaml").read_text()
        for name in ("fleet", "hosts", "project"):
            text = "\n".join(line for line in text.splitlines() if not line.startswith(f"{name}:")) + "\n"
        (run / "config.yaml").write_text(text + rng.choice(LAUNCHES[:2]))
    elif kind == 6:
        for state in states:
            state.unlink()
        (run / "checkpoints" / "where.txt").write_bytes(
            mutate_text(rng, "node-a:/runs/train/exp\n") if rng.random() < 0.7 else b"\xff\xfe:\xfd"
        )
    elif kind == 7:
        name = rng.choice(
            (
                "step-00000001.safetensors",
                "step-99999999999999999999.safetensors",
                "step-x.safetensors",
                "step-0.safetensors",
            )
        )
        path = run / "checkpoints" / name
        path.write_bytes(b"x")
        special(rng, path)
    elif kind == 8:
        path = picked(case, run)
        special(rng, path)
    else:
        folder = rng.choice(("checkpoints", "logs", "weights"))
        shutil.rmtree(run / folder, ignore_errors=True)
        (run / folder).symlink_to("../../outside")
    if rng.random() < 0.3:
        for name in ("results.csv", "events.jsonl", "logs/rank-0.log", "results.json"):
            path = run / name
            if path.is_file() and not path.is_symlink() and rng.random() < 0.5:
                path.write_bytes(mutate_text(rng, path.read_text()))
    verb = rng.randrange(6)
    if verb == 0:
        return ["checkpoints", rng.choice(("list", "verify")), "run"]
    where = rng.choice(("run", "run", str(Path("run/checkpoints") / states[-1].name)))
    more = ["--dry-run"] if verb < 3 else []
    return [
        "train",
        "--resume",
        where,
        "--device",
        "cpu",
        "--threads",
        "1",
        "--workers",
        "0",
        "--epochs",
        "2",
        *more,
    ]


# -- several machines ----------------------------------------------------------------------------------------


@reader
def fleet_files(case: Case) -> Action:
    here(case, "fleet.yaml", yaml_of(case, f"grace_s: 5\n{FLEET_FILE}"))
    return train(case, "--fleet", "fleet.yaml", "--dry-run")


@reader
def host_lists(case: Case) -> Action:
    text = (
        mutate_text(case.rng, "a:8,b:0+2,me@c.example:cpu:4,d:+3")
        .decode("utf-8", "replace")
        .replace("\0", "")
    )
    return train(case, "--hosts", text, "--dry-run")


@reader
def host_frames(case: Case) -> Action:
    """What a host agent answers: a script in its place says whatever it likes."""
    import platform

    rng = case.rng
    now_s = time.time()
    software = {"python": "3.12", "torch": "2.13", "yolofleet": "0", "numpy": "2"}
    frames: list[Any] = [
        {"type": "hello", "protocol": 1, "platform": "linux", "pid": 7, "software": software, "time_s": now_s, "machine": platform.node()},
        {"type": "reply", "id": 1, "value": [{"job": "exp-a", "title": "train", "folder": "/r", "node": 0, "ranks": [0, 2], "runs": True, "began_s": now_s - 60, "ended_s": 0, "code": None}]},
        {"type": "beat"},
        {"type": "reply", "id": 2, "value": "/tmp/x"},
        {"type": "reply", "id": 3, "value": {"offset": 0, "data": "YWJj", "size": 3}},
        {"type": "output", "text": rng.choice(WORDS)},
        {"type": "log", "rank": 0, "text": rng.choice(WORDS)},
        {"type": "reply", "id": 4, "error": rng.choice(WORDS)},
        {"type": "exit", "code": 1, "words": [{"rank": 0, "host": "x", "message": rng.choice(WORDS), "exit_code": 3, "time": now_s}], "log": "", "why": rng.choice(WORDS), "stopped": [], "killed": {"group": None, "machine": 0}},
    ]  # fmt: skip
    lines = []
    for frame in frames:
        changed = mutate_tree(rng, frame) if rng.random() < 0.35 else frame
        lines.append(
            json_text(rng, changed).replace(b"\n", b" ") if rng.random() < 0.9 else rng.randbytes(50)
        )
    if rng.random() < 0.15:
        lines.insert(
            rng.randrange(len(lines)),
            rng.choice(
                (b"x" * (20 << 20), b"[" * 100_000, b'{"type": "hello", "protocol": 1}', b"\x1b[2J" * 10)
            ),
        )
    program = case.folder / "trusted-agent"
    (case.folder / "frames").write_bytes(b"\n".join(lines) + b"\n")
    words = rng.choice(WORDS).replace("'", "").replace("\0", "")
    program.write_bytes(
        f"#!/bin/sh\nprintf '%s' '{words}' >&2\ncat {case.folder}/frames\nsleep 1\nexit {rng.choice((0, 1, 255))}\n".encode(
            "utf-8", "replace"
        )
    )
    program.chmod(0o755)
    (case.folder / "fleet.yaml").write_text(
        f"hosts: [{{host: localhost, device: cpu:2, python: {program}}}]\n"
    )
    verb = rng.choice((["fleet", "ps", "--all"], ["fleet", "ps"], ["fleet", "logs"], ["fleet", "stop", "--now"], ["fleet", "check"], ["fleet", "run"], ["doctor", "--quick"]))  # fmt: skip
    more = ["--", "true"] if verb[1:] == ["run"] else []
    return [*verb, "--fleet", "fleet.yaml", *more]


@reader
def watchdog_values(case: Case) -> Action:
    """Values that somebody writes into the store where the ranks meet."""
    rng = case.rng
    member = {
        "rank": 1,
        "host": "b",
        "device": "cpu",
        "pid": 1,
        "started_ticks": 5,
        "machine": "m",
        "log": "/x.log",
    }
    beat = {"number": 1, "phase": "data", "step": 3, "collectives": 4, "waiting": True, "last": "all_reduce", "age_s": 1.0, "limit_s": 30.0, "silence_s": 30.0, "ended": False}  # fmt: skip
    values = {}
    for key, good in (("member/1", member), ("heartbeat/1", beat), ("question", [[1], "stuck"]), ("end", "")):
        if key in ("question", "end") and rng.random() < 0.7:
            continue
        changed = mutate_tree(rng, good) if rng.random() < 0.7 else good
        values[key] = json_text(rng, changed)

    def action() -> None:
        watch(values)

    action.__doc__ = f"the watchdog of two ranks, with {values!r:.400}"
    return action


def watch(values: dict[str, bytes]) -> None:
    """Run the watchdog of rank 0 beside a store that holds forged values of rank 1."""
    print("the watchdog starts", flush=True)  # the other rank may be the one that reports the end
    import torch

    from yolofleet.parallel import watchdog as module
    from yolofleet.parallel.world import World

    store = MemoryStore(values)

    class Joined(World):
        def store(self, name: str) -> Any:
            return store

    module.INTERVAL_S = module.MEET_INTERVAL_S = 0.02
    module.ANSWER_WAIT_S = module.WRITING_WAIT_S = module.CLOSE_WAIT_S = 0.1
    module.HEARTBEATS_PER_S = 1000
    dead: list[Any] = []
    threading.excepthook = lambda problem: dead.append(problem)  # type: ignore[assignment]
    world = Joined(0, 2, 0, 2, torch.device("cpu"))
    watching = module.Watchdog(
        world, stall_s=30.0, timeout_s=60.0, log=Path("logs/rank-0.log"), checkpoints=Path("checkpoints"), resume="", say=lambda error: print(error.render())
    )  # fmt: skip
    with watching:
        deadline_s = time.monotonic() + 0.4
        while time.monotonic() < deadline_s and not dead:
            time.sleep(0.02)
    if dead:
        raise RuntimeError("a thread of the watchdog died") from dead[0].exc_value


class MemoryStore:
    """What the watchdog uses of torch's store."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = dict(values)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        number = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(number).encode()
        return number


@reader
def launcher_variables(case: Case) -> Action:
    rng = case.rng
    torchrun = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    mpi = {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2"))
    }
    mpi |= {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:4", "PMIX_NAMESPACE": "x"}
    srun = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[07-12,2]-ib,gpu3", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "0", "CUDA_VISIBLE_DEVICES": "0"}  # fmt: skip
    values = dict(rng.choice((torchrun, mpi, srun, torchrun | srun)))
    for name in rng.sample(sorted(values), rng.choice((1, 1, 2))):
        if rng.random() < 0.15:
            del values[name]
        else:
            values[name] = rng.choice(
                (
                    *NUMBERS,
                    *WORDS,
                    str(rng.choice(EDGES)),
                    mutate_text(rng, values[name]).decode("utf-8", "replace"),
                )
            )[:2000]
    environment_of(case, {name: value.encode("utf-8", "replace").decode() for name, value in values.items()})
    more = ["--dry-run"] if rng.random() < 0.8 else ["--timeout-s", "1", *TRAIN]
    return train(case, *more)


# -- logs and answers ----------------------------------------------------------------------------------------


@reader
def log_files(case: Case) -> Action:
    rng = case.rng
    text = picked(case, LOGS, "*.txt").read_text(errors="replace")
    kind = rng.random()
    data = (
        mutate_text(rng, text)
        if kind < 0.7
        else mutate_bytes(rng, text.encode())
        if kind < 0.95
        else (text[:3000] * 300).encode()
    )
    name = rng.choice(("x.log", "logs/rank-0.log", "logs/agent.log"))
    here(case, name, data)
    return [
        "doctor",
        "--log",
        rng.choice((name, str(Path(name).parent))),
        *rng.choice(([], [], ["--json", "-"])),
    ]


@reader
def http_answers(case: Case) -> Action:
    rng = case.rng
    body = rng.choice((b"the file\n" * 100, b"<!doctype html><p>x", b""))
    status = rng.choice(
        (
            "200 OK",
            "200 OK",
            "206 Partial Content",
            "302 Found",
            "416 x",
            "503 x",
            "404 Not Found",
            "100 Continue",
            "999 x",
            "2000 x",
            "-1 x",
            "",
        )
    )
    headers = {
        "Content-Length": str(len(body)),
        "Content-Type": "application/octet-stream",
        "ETag": '"a"',
        "Connection": "close",
    }
    headers |= dict(
        rng.sample(
            [
                ("Content-Length", rng.choice(NUMBERS)),
                ("Transfer-Encoding", rng.choice(("chunked", "gzip", "chunked, chunked", "x"))),
                (
                    "Content-Range",
                    rng.choice(("bytes 0-9/900", "bytes 5-9/*", "bytes x", "bytes 99999999999999999999-1/1")),
                ),
                (
                    "Location",
                    rng.choice(
                        (
                            "http://127.0.0.1:9/",
                            "file:///etc/passwd",
                            "ftp://x/",
                            "//x",
                            "/again",
                            *WORDS[:20],
                        )
                    ),
                ),
                ("Retry-After", rng.choice((*NUMBERS, "Wed, 21 Oct 9999 07:28:00 GMT"))),
                ("Content-Encoding", "gzip"),
                ("Content-Type", rng.choice(("text/html; charset=\x1b[2J", "x", "text/html", ";;;"))),
                ("X" * rng.choice((1, 70_000)), "y"),
            ],
            rng.choice((0, 1, 2)),
        )
    )
    head = f"HTTP/1.1 {status}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
    if headers.get("Transfer-Encoding") == "chunked":
        body = rng.choice(
            (
                b"ffffffffffffffff\r\nx",
                b"-1\r\n",
                b"3\r\nabc\r\n0\r\n" + b"T: x\r\n" * 100_000,
                b"x\r\n",
                b"1\r\na\r\n" * 1000,
            )
        )
    answer = head.encode("utf-8", "replace") + body
    kind = rng.random()
    if kind < 0.3:
        answer = mutate_bytes(rng, answer[:5000]) + answer[5000:]
    elif kind < 0.4:
        answer = b"HTTP/1.1 100 Continue\r\n\r\n" * rng.choice((5, 100_000)) + answer

    def action() -> None:
        ask(answer, drip=kind > 0.95)

    action.__doc__ = f"fetch() of an answer that starts {answer[:300]!r}"
    return action


def ask(answer: bytes, *, drip: bool) -> None:
    """Fetch a file from a server on this machine that sends ``answer`` to each request."""
    from yolofleet.files.fetch import Item, Patience, fetch

    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(65536)
                    for at in range(0, len(answer), 10 if drip else 1 << 20):
                        connection.sendall(answer[at : at + (10 if drip else 1 << 20)])
                        if drip:
                            time.sleep(0.05)
                except OSError:
                    pass

    threading.Thread(target=serve, daemon=True).start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
    item = Item("x.bin", (address,), 900, "sha256:" + "0" * 64, "free", "https://example.org/")
    try:
        fetch(
            item,
            Path("cache"),
            patience=Patience(timeout_s=1.0, attempts=2, first_wait_s=0.01, longest_wait_s=0.05),
        )
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
