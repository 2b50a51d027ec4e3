"""The table of formats: how each is recognised, what it can do, and which packages it needs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from yolofleet.errors import ConfigError
from yolofleet.text import did_you_mean, shown


@dataclass(frozen=True)
class Format:
    """One kind of exported file.

    Attributes:
        suffix: of the file; of a folder's name where the format is several files.
        marker: a file by which such a folder is recognised; "" = the format is one file.
        writes, runs: modules to import for writing and for running it.
        dynamic: free sizes and batches are possible. nms, half, simplify: so are those.
    """

    name: str
    suffix: str
    marker: str = ""
    writes: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    dynamic: bool = False
    nms: bool = False
    half: bool = True
    simplify: bool = False

    @property
    def module(self) -> ModuleType:
        """``yolofleet.export.<name>``: ``write`` and ``open_file``."""
        return import_module(f"yolofleet.export.{self.name}")

    def path_beside(self, weights: Path) -> Path:
        """Where an export of ``weights`` lies unless somebody says otherwise."""
        return weights.with_name(weights.stem + self.suffix)


FORMATS = {
    format.name: format
    for format in (
        Format(
            "onnx",
            ".onnx",
            writes=("onnx",),
            runs=("onnx", "onnxruntime"),
            dynamic=True,
            nms=True,
            simplify=True,
        ),
        Format("torchscript", ".torchscript", dynamic=True, half=False),
        Format(
            "openvino",
            "_openvino",
            marker="model.xml",
            writes=("onnx", "openvino"),
            runs=("openvino",),
            dynamic=True,
            nms=True,
        ),
        Format("ncnn", "_ncnn", marker="model.ncnn.param", writes=("pnnx",), runs=("ncnn",)),
        Format("tflite", ".tflite", writes=("litert_torch",), runs=("ai_edge_litert",), half=False),
        Format("coreml", ".mlpackage", writes=("coremltools",), runs=("coremltools",)),
        Format("tensorrt", ".engine", writes=("onnx", "tensorrt"), runs=("tensorrt",)),
    )
}
REFUSED = {
    "paddle": "the only converter (X2Paddle, last released in 2024) works by writing Python source and running it"
}
SLIM = "onnxslim"  # what --simplify needs


def format_named(name: str) -> Format:
    """
    Raises:
        ConfigError: unknown (with the nearest name), or known and not offered.
    """
    if name in REFUSED:
        raise ConfigError(
            f"--format {name} is not offered: {REFUSED[name]}",
            hint="--format onnx: Paddle's own tools and others read it",
        )
    if name not in FORMATS:
        listed = f"one of {', '.join(FORMATS)}"
        raise ConfigError(f"--format {shown(name)} is not known", hint=did_you_mean(name, FORMATS) or listed)
    return FORMATS[name]


def format_of(path: Path) -> Format | None:
    """The format of an existing file or folder by its name and form; None = not an exported one."""
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
    """Those that cannot be imported here."""
    return [name for name in modules if find_spec(name) is None]


def need(format: Format, modules: tuple[str, ...], what: str) -> None:
    """
    Raises:
        ConfigError: a package is missing; says how to install it.
    """
    absent = missing(modules)
    if absent:
        raise ConfigError(f"{what} needs {' and '.join(absent)}", hint=install_line(format))


def install_line(format: Format) -> str:
    """The command that installs what a format needs."""
    return f'{Path(sys.executable).name} -m pip install "yolofleet[{format.name}]"'
