"""Write the folder of another server around a verified ONNX file: a model of Triton's repository, or for DeepStream.

No such server has run these folders. Sources: NVIDIA's documentation of Triton's model repository and of nvinfer, and the
documentation and parser of DeepStream-Yolo (marcoslucianops, MIT licence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from yolofleet.config.schema.verbs import ExportConfig, PredictConfig
from yolofleet.families.networks.detector import Detector
from yolofleet.inference.export.export_metadata import KEY, ROWS, ExportMetadata, printable
from yolofleet.inference.export.formats import FORMATS, need
from yolofleet.inference.export.onnx import append_rows, session_of
from yolofleet.inference.export.onnx_check import checked_model
from yolofleet.storage.atomic import write_bytes, write_text
from yolofleet.storage.foreign import check_links
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.boxes.task import BOXES

MOST_IMAGES = 8  # that Triton joins to a batch, if the file accepts any number


@dataclass(frozen=True)
class Server:
    """A server of another project, which reads a folder.

    Attributes:
        flag: the option that names the folder.
        marker: a file that identifies such a folder.
        model: the ONNX file in it.
        finish: writes the other files around the verified ONNX file.
    """

    flag: str
    marker: str
    model: str
    finish: Callable[[Path, ExportMetadata], None]

    def check(self, folder: Path, model: Detector) -> None:
        """Raise ConfigError if ``folder`` is not an older export, the server cannot read ``model``, or a package is missing."""
        if self is DEEPSTREAM and model.task != BOXES.name:
            raise ConfigError(
                f"{self.flag}: its parser reads boxes, and {model.description.name} finds {model.task}",
                hint="--triton, or --format onnx",
            )
        need(FORMATS["onnx"], FORMATS["onnx"].runs, self.flag)
        if folder.is_symlink():
            raise ConfigError(
                f"{folder} is a symbolic link to {folder.readlink()}", hint="choose another name"
            )
        if folder.exists() and not (folder / self.marker).is_file():
            raise ConfigError(
                f"{folder} exists and has no {self.marker}, so {self.flag} did not write it",
                hint="choose another name",
            )
        if folder.is_dir():  # the export also writes into the folders in it
            check_links(folder)


def _write_labels(folder: Path, metadata: ExportMetadata) -> None:
    write_text(folder / "labels.txt", "".join(f"{printable(name)}\n" for name in metadata.names))


# -- Triton


def _pbtxt(text: str) -> str:
    """Return a text as a literal of protobuf's text format."""
    escaped = (
        chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03o}"
        for byte in text.encode()
    )
    return f'"{"".join(escaped)}"'


def _finish_triton(folder: Path, metadata: ExportMetadata) -> None:
    """Write ``labels.txt`` and ``config.pbtxt``.

    Triton refuses a configuration whose dimensions are not those that ONNX Runtime infers, also where the file has none.
    """
    session, any_batch = session_of(folder / TRITON.model), metadata.batch is None
    lines = [
        'backend: "onnxruntime"',
        f"max_batch_size: {MOST_IMAGES if any_batch else 0}",
        *("dynamic_batching { }",) * any_batch,
    ]
    for kind, tensors in (("input", session.get_inputs()), ("output", session.get_outputs())):
        for tensor in tensors:
            assert tensor.type == "tensor(float)", tensor.type
            dims = [side if isinstance(side, int) else -1 for side in tensor.shape]
            lines += [
                f"{kind} {{",
                f"  name: {_pbtxt(tensor.name)}",
                "  data_type: TYPE_FP32",
                f"  dims: {dims[any_batch:]}",  # Triton adds that of the batch
                "}",
            ]
    # Triton sends it to clients, which cannot read labels.txt. `label_filename` is for outputs with one number for each class.
    lines.append(
        f"parameters {{ key: {_pbtxt(KEY)} value {{ string_value: {_pbtxt(metadata.to_json())} }} }}"
    )
    _write_labels(folder, metadata)
    write_text(folder / TRITON.marker, "\n".join([*lines, ""]))


TRITON = Server("--triton", "config.pbtxt", "1/model.onnx", _finish_triton)


# -- DeepStream

NVINFER = """\
# Never run: written by yolofleet export --deepstream for nvinfer and the parser of DeepStream-Yolo, but not tested there.
[property]
gpu-id=0
# RGB in 0..1. The picture keeps its shape, in the middle of the input; nvinfer pads with black, yolofleet with grey
net-scale-factor=0.00392156862745098
offsets=0;0;0
model-color-format=0
maintain-aspect-ratio=1
symmetric-padding=1
onnx-file=model.onnx
model-engine-file=model_b{batch}_gpu0_fp32.engine
labelfile-path=labels.txt
# {batch_note}
batch-size={batch}
# 0: 32 bits, 2: 16 bits (then the engine is model_b{batch}_gpu0_fp16.engine)
network-mode=0
network-type=0
process-mode=1
num-detected-classes={classes}
gie-unique-id=1
interval=0
# 2: non-maximum suppression, 4: none
cluster-mode={cluster_mode}
parse-bbox-func-name=NvDsInferParseYolo
custom-lib-path=nvdsinfer_custom_impl_Yolo/libnvdsinfer_custom_impl_Yolo.so
engine-create-func-name=NvDsInferYoloCudaEngineGet

[class-attrs-all]
pre-cluster-threshold={limits.conf:g}
topk={limits.max_det}
"""


def _finish_deepstream(folder: Path, metadata: ExportMetadata) -> None:
    """Give the file the output of DeepStream-Yolo's parser, and write ``labels.txt`` and ``config_infer_primary.txt``."""
    import onnx

    file, limits = folder / DEEPSTREAM.model, PredictConfig()
    model = checked_model(file)
    append_rows(model)
    (entry,) = model.metadata_props
    entry.value = replace(metadata, outputs=(ROWS,)).to_json()
    onnx.checker.check_model(model)
    write_bytes(file, model.SerializeToString())
    text = NVINFER.format(
        batch=metadata.batch or 1,
        batch_note="fixed in the file" if metadata.batch else "for several streams, their number",
        classes=len(metadata.names),
        cluster_mode=2 if metadata.needs_nms else 4,
        limits=limits,
    )
    if metadata.needs_nms:
        text += f"nms-iou-threshold={limits.iou:g}\n"
    _write_labels(folder, metadata)
    write_text(folder / DEEPSTREAM.marker, text)


DEEPSTREAM = Server("--deepstream", "config_infer_primary.txt", "model.onnx", _finish_deepstream)


def server_of(config: ExportConfig) -> Server | None:
    """Return the server that the settings name. Raise ConfigError if they also ask for what it does not support."""
    if config.triton is None and config.deepstream is None:
        return None
    server = TRITON if config.deepstream is None else DEEPSTREAM
    refused = [
        (config.out is not None, "--out", "both say where the file goes"),
        (config.format != "onnx", f"--format {config.format}", "the server gets an ONNX file"),
    ]
    if server is DEEPSTREAM:
        any_size = config.dynamic in ("size", "both")
        refused += [
            (config.triton is not None, "--triton", "both say where the file goes"),
            (
                config.nms,
                "--nms",
                "nvinfer suppresses boxes, with the values of [class-attrs-all] in the file",
            ),
            (config.half, "--half", "network-mode=2 in the configuration computes in 16 bits"),
            (config.int8, "--int8", "TensorRT finds the ranges of 8-bit numbers itself"),
            (any_size, f"--dynamic {config.dynamic}", "nvinfer scales images to one size"),
        ]
    for asked, flag, why in refused:
        if asked:
            raise ConfigError(f"{server.flag} with {flag}: {why}", hint=f"leave out {flag}")
    return server


def folder_of(config: ExportConfig, name: str) -> Path:
    """Return the folder that the server reads for the model ``name``."""
    if config.triton is not None:
        return config.triton / name
    assert config.deepstream is not None
    return config.deepstream if config.deepstream.name.strip(".") else config.deepstream.resolve()
