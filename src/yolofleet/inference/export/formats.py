"""The table of export formats: how yolofleet recognises each, what it supports, and which packages it needs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from yolofleet.support.errors import ConfigError, install_hint
from yolofleet.support.text import did_you_mean, shown


@dataclass(frozen=True)
class Format:
    """One kind of exported file.

    Attributes:
        suffix: of the file name, or of the folder name if the format has several files.
        marker: a file that identifies such a folder; "" = the format has one file.
        writes, runs: modules needed to write and to run it.
        dynamic: supports variable image sizes and batches.
        quantizes: modules needed for ``--int8``; () = not supported.
        nms, half, simplify: supports the option of that name.
        danger: why opening a stranger's file can execute code; "" = the file is data, which its runtime checks.
    """

    name: str
    suffix: str
    marker: str = ""
    writes: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    quantizes: tuple[str, ...] = ()
    dynamic: bool = False
    nms: bool = False
    half: bool = True
    simplify: bool = False
    danger: str = ""

    @property
    def module(self) -> ModuleType:
        """The module ``yolofleet.inference.export.<name>``, which has ``write``, ``parts`` and ``open_file``."""
        return import_module(f"yolofleet.inference.export.{self.name}")

    def path_beside(self, weights: Path, kind: str = "") -> Path:
        """Return the default path of an export of ``weights``: ``best.onnx``, or ``best_half.onnx`` for kind ``_half``."""
        return weights.with_name(f"{weights.stem}{kind}{self.suffix}")


UNCHECKED = "{} does not check the numbers in its files, and a wrong one can overwrite memory"

FORMATS = {
    format.name: format
    for format in (
        Format(
            "onnx",
            ".onnx",
            writes=("onnx",),
            runs=("onnx", "onnxruntime"),
            quantizes=("onnxruntime",),
            dynamic=True,
            nms=True,
            simplify=True,
        ),
        Format(
            "torchscript", ".torchscript", dynamic=True, half=False, danger="a TorchScript file is a program"
        ),
        Format(
            "openvino",
            "_openvino",
            marker="model.xml",
            writes=("onnx", "openvino"),
            runs=("openvino",),
            quantizes=("onnxruntime",),
            dynamic=True,
            nms=True,
        ),
        Format(
            "ncnn",
            "_ncnn",
            marker="model.ncnn.param",
            writes=("pnnx",),
            runs=("ncnn",),
            danger=UNCHECKED.format("ncnn"),
        ),
        Format(
            "tflite",
            ".tflite",
            writes=("litert_torch",),
            runs=("ai_edge_litert",),
            quantizes=("ai_edge_quantizer",),
            half=False,
            danger=UNCHECKED.format("LiteRT"),
        ),
    )
}
WITHOUT_TENSORFLOW = (
    "its converters need TensorFlow, which yolofleet does not use",
    "--format tflite; or --format onnx, and convert that file with onnx2tf",
)
ENGINE = (
    "an engine fits one model of GPU and one version of TensorRT",
    "--format onnx, whose file TensorRT's trtexec turns into an engine where it will run",
)
REFUSED = {  # reason and hint
    **dict.fromkeys(("tensorrt", "engine"), ENGINE),
    "coreml": ("its files run on macOS only", "--format torchscript, which Apple's coremltools reads"),
    "paddle": (
        "its only converter (X2Paddle, last released in 2024) writes Python source and executes it",
        "--format onnx, which Paddle's tools can read",
    ),
    **dict.fromkeys(("saved_model", "pb", "tfjs", "edgetpu"), WITHOUT_TENSORFLOW),
}
SLIM = "onnxslim"  # package that --simplify needs


def format_named(name: str) -> Format:
    """Return the format of that name. Raise ConfigError if yolofleet does not support it."""
    if name in REFUSED:
        why, hint = REFUSED[name]
        raise ConfigError(f"--format {name} is not supported: {why}", hint=hint)
    if name not in FORMATS:
        listed = f"expected one of {', '.join(FORMATS)}"
        raise ConfigError(f"--format {shown(name)} is not known", hint=did_you_mean(name, FORMATS) or listed)
    return FORMATS[name]


def format_of(path: Path) -> Format | None:
    """Return the format of an existing file or folder; None if it is not an exported one."""
    for format in FORMATS.values():
        if format.marker:
            if (path.is_dir() and (path / format.marker).is_file()) or (
                path.is_file() and path.name == format.marker
            ):
                return format
        elif path.suffix.lower() == format.suffix and path.exists():
            return format
    return None


def missing(modules: tuple[str, ...]) -> list[str]:
    """Return the modules that are not installed."""
    return [name for name in modules if find_spec(name) is None]


def need(format: Format, modules: tuple[str, ...], what: str) -> None:
    """Raise ConfigError, which hints at the command to install it, if one of ``modules`` is missing; ``what`` needs them."""
    absent = missing(modules)
    if absent:
        raise ConfigError(f"{what} needs {' and '.join(absent)}", hint=install_hint(format.name))
