"""Does an exported file find what the network finds, on a whole data set, and how fast is it?

    python benchmarks/exports.py --weights yolov5n.pt --data coco128.yaml --formats onnx,torchscript,openvino,ncnn
    python benchmarks/exports.py --weights yolov5n.pt --data coco128.yaml --formats onnx,openvino,tflite --int8
    python benchmarks/exports.py --model ppyoloe-s --data coco128.yaml --images 16

Each format is exported, once for images of one size and once, where it can, for any. Then all images pass the network
and the file: the largest difference of predictions, of boxes after suppression (conf 0.25, iou 0.45), COCO's figures
of both, and milliseconds of CPU time an image at batch 1 on one thread, turn by turn. Exit code 1 when boxes differ by
more than 0.5 px, scores by more than 0.001, or figures in the third digit; with ``--int8``, when mAP50-95 of an 8-bit
file differs by more than 0.02.

``--model`` takes a network with drawn weights, for families of which there are none at hand; then predictions alone
are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yolofleet.config.schema import ValConfig
from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.geometry.boxes import Decoded
from yolofleet.families.build import build_model
from yolofleet.families.networks.description import describe
from yolofleet.families.networks.detector import Detector, fuse
from yolofleet.families.weights.reader import load_weights
from yolofleet.families.weights.transfer import model_from_weights
from yolofleet.inference.evaluate.batches import val_batches, val_loader
from yolofleet.inference.evaluate.run import EvaluationSettings, Validation
from yolofleet.inference.export.export_metadata import ExportMetadata
from yolofleet.inference.export.exporter import export
from yolofleet.inference.export.formats import FORMATS, missing
from yolofleet.inference.export.runtime import Runtime, open_exported
from yolofleet.runs.report.screen_table import aligned
from yolofleet.tasks.boxes.differences import partners_difference
from yolofleet.tasks.boxes.found import FoundBoxes
from yolofleet.tasks.boxes.task import BOXES
from yolofleet.tasks.task import Limits

LIMIT_PX, LIMIT_SCORE = 0.5, 1e-3
LIMIT_MAP_INT8 = 0.02
PASSES = 15
COLUMNS = (
    *("format", "size", "MiB", "runs here", "predictions off px", "scores off", "boxes", "boxes off px"),
    *("scores off", "mAP50-95", "network's", "ms", "network's ms"),
)


class Alone:
    """The one process of an evaluation."""

    rank, size = 0, 1

    def all_gather_bytes(self, payload: bytes, /) -> list[bytes]:
        return [payload]


@dataclass
class Row:
    """What was found out about one file; differences are the largest over all images.

    Attributes:
        runtime: that ran the file.
        why_not: why nothing ran it here; "": it ran.
    """

    format: str
    size: str
    mib: float
    runtime: str = ""
    why_not: str = ""
    int8: bool = False
    box_px: float = 0.0
    score: float = 0.0
    boxes: int = 0
    kept_px: float = 0.0
    kept_score: float = 0.0
    map_file: float = 0.0
    map_network: float = 0.0
    ms_file: float = 0.0
    ms_network: float = 0.0

    @property
    def is_equal(self) -> bool:
        if self.why_not:
            return True
        if self.int8:
            return abs(self.map_file - self.map_network) <= LIMIT_MAP_INT8
        return (
            max(self.box_px, self.kept_px) <= LIMIT_PX
            and max(self.score, self.kept_score) <= LIMIT_SCORE
            and round(self.map_file, 3) == round(self.map_network, 3)
        )

    def cells(self) -> list[str]:
        head = [self.format, self.size, f"{self.mib:.2f}"]
        if self.why_not:
            return [*head, f"no: {self.why_not}", *"-" * (len(COLUMNS) - 4)]
        off = [f"{self.box_px:.1e}", f"{self.score:.1e}", f"{self.boxes}", f"{self.kept_px:.1e}"]
        figures = [f"{self.kept_score:.1e}", f"{self.map_file:.4f}", f"{self.map_network:.4f}"]
        return [*head, self.runtime, *off, *figures, f"{self.ms_file:.0f}", f"{self.ms_network:.0f}"]


def drawn(name: str, nc: int, pictures: Tensor) -> Detector:
    """A network whose output depends on the image, as a trained one's does and a fresh one's hardly: the statistics
    of all normalisations are those of ``pictures``, and the last layers' weights are drawn, too."""
    model = build_model(describe(name), nc)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # plain mean
            elif isinstance(module, nn.Conv2d) and module.bias is not None:  # no normalisation after it
                module.weight.normal_(0, 1 / module.weight[0].numel() ** 0.5, generator=generator)
                module.bias.zero_()
        model.train()(pictures)
    return model.eval()


def first_pictures(index: DataIndex, img: int) -> Tensor:
    """[4, 3, H, W] in 0..1."""
    batch = val_batches(index, img, 4, 32)[:1]
    with val_loader(index, batch, img, workers=0) as loaded:
        return next(iter(loaded))[1].float() / 255


def compare(
    network: Detector, runtime: Runtime, index: DataIndex, images: int, img: int, trained: bool, row: Row
) -> None:
    """Predictions of the first ``images``, and boxes of a ``trained`` network: without training, rounding decides
    which of many equal boxes are kept."""
    batches = val_batches(index, img, 1, max(network.strides))[:images]
    size_hw = runtime.metadata.size_hw
    if size_hw is not None:
        batches = [type(b)(b.ordinal, b.image_idx, size_hw) for b in batches]
    with val_loader(index, batches, img, workers=0) as loaded:
        for _, pixels, _ in loaded:
            given = pixels.float() / 255
            with torch.inference_mode():
                ours = network.decode(network(given))
            theirs = runtime(given)
            size_hw = given.shape[2], given.shape[3]
            off = BOXES.difference(ours, theirs, size_hw, in_order=network.needs_nms)
            row.box_px, row.score = max(row.box_px, off.place), max(row.score, off.score)
            if not trained:
                continue
            mine, found = (kept(decoded) for decoded in (ours, theirs))
            row.boxes += len(mine)
            off = partners_difference(mine, found, above=0.25 + LIMIT_SCORE)
            row.kept_px, row.kept_score = max(row.kept_px, off.place), max(row.kept_score, off.score)


def kept(decoded: Decoded) -> FoundBoxes:
    """Return the boxes of one image after suppression."""
    return BOXES.found(decoded, Limits(conf=0.25, iou=0.45, max_det=1000))[0][0]


def map_of(model: Any, index: DataIndex, img: int, size_hw: tuple[int, int] | None) -> float:
    settings = EvaluationSettings(ValConfig(img=img, batch=8), size_hw=size_hw)
    validation = Validation(model, index, settings, world=Alone(), device=torch.device("cpu"))
    return float(validation.evaluate().metrics.figures["mAP50-95"])


def cpu_ms(network: Detector, runtime: Runtime, size_hw: tuple[int, int], row: Row) -> None:
    """Medians of CPU time, turn by turn."""
    images = torch.rand(1, 3, *size_hw, generator=torch.Generator().manual_seed(0))
    plain = images.to(memory_format=torch.channels_last)
    times: dict[str, list[float]] = {"network": [], "file": []}
    turns: list[tuple[str, Any, Tensor]] = [("network", network, plain), ("file", runtime, images)]
    for _ in range(PASSES):
        for name, model, given in turns:
            began_s = time.process_time()
            with torch.inference_mode():
                model.decode(model(given))
            times[name].append(1000 * (time.process_time() - began_s))
    row.ms_network, row.ms_file = (statistics.median(times[name][3:]) for name in ("network", "file"))


def formats_of(options: argparse.Namespace) -> list[tuple[str, bool, bool]]:
    """Return each file to export: its format, whether it takes images of any size, whether it has 8 bits."""
    found = []
    for name in options.formats.split(","):
        found.append((name, False, False))
        if options.int8 or FORMATS[name].dynamic:
            found.append((name, not options.int8, options.int8))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--weights", default="")
    parser.add_argument("--cfg", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--data", required=True)
    parser.add_argument("--formats", default="onnx,torchscript,openvino,ncnn")
    parser.add_argument("--int8", action="store_true", help="8-bit files, beside those of one size")
    parser.add_argument("--calibration-images", type=int, default=64)
    parser.add_argument("--img", type=int, default=640)
    parser.add_argument(
        "--images", type=int, default=0, help="compare only so many, without COCO's figures; 0: all"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    index = build_index(load_dataset(options.data), "val")
    model = (
        model_from_weights(load_weights(options.weights, options.cfg))
        if options.weights
        else drawn(options.model, len(index.names), first_pictures(index, options.img))
    )
    rows: list[Row] = []
    of_network: dict[bool, float] = {}
    for name, free, int8 in formats_of(options):
        if absent := missing(FORMATS[name].writes):
            rows.append(Row(name, "-", 0.0, why_not=f"{' and '.join(absent)} is not installed"))
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(model, index, options, name, free, int8, Path(folder), of_network))
        print("  ".join(rows[-1].cells()), flush=True)
    print("\n".join(aligned(COLUMNS, [r.cells() for r in rows])), flush=True)
    wrong = [f"{row.format} ({row.size})" for row in rows if not row.is_equal]
    print(f"differ: {', '.join(wrong)}" if wrong else "all equal within the limits")
    return 1 if wrong else 0


def measured(
    model: Detector,
    index: DataIndex,
    options: argparse.Namespace,
    name: str,
    free: bool,
    int8: bool,
    folder: Path,
    of_network: dict[bool, float],
) -> Row:
    """Export one file and compare it; ``of_network`` keeps mAP50-95 of the network by ``free``."""
    network = fuse(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    size_hw, images = (options.img, options.img), options.images or len(index)
    out = folder / f"model{FORMATS[name].suffix}"
    metadata = ExportMetadata(
        family=model.description.family,
        model=model.description.name,
        names=model.names,
        strides=model.strides,
        size_hw=None if free else size_hw,
        batch=None if free else 1,
        int8=int8,
    )
    calibration = {"data": options.data, "calibration_images": options.calibration_images}
    figures = export(model, FORMATS[name], metadata, size_hw, out, **calibration)
    size = ("any" if free else f"{size_hw[0]} x {size_hw[1]}") + " int8" * int8
    if not figures["verified"]:
        return Row(name, size, figures["mib"], why_not=figures["why_not"], int8=int8)
    runtime = open_exported(out, threads=1)  # needs no trust: this machine has exported it
    row = Row(name, size, figures["mib"], runtime.place, int8=int8)
    compare(network, runtime, index, images, options.img, bool(options.weights), row)
    if options.weights and not options.images:
        if free not in of_network:
            of_network[free] = map_of(network, index, options.img, metadata.size_hw)
        row.map_network = of_network[free]
        row.map_file = map_of(runtime, index, options.img, metadata.size_hw)
    cpu_ms(network, runtime, size_hw, row)
    return row


if __name__ == "__main__":
    sys.exit(main())
