"""Every family in every format that runs here, of fixed and of variable batch and size: right files pass, wrong ones do not."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
from exported import metadata_of, pictures, spread

from yolofleet.families.networks.detector import Detector
from yolofleet.inference.export.exporter import export, verdict_text
from yolofleet.inference.export.formats import FORMATS
from yolofleet.inference.export.runtime import open_exported
from yolofleet.inference.export.verify import (
    batches_of,
    check_difference,
    compare,
    generated_images,
    part_of_limits,
)
from yolofleet.support.errors import NumericsError
from yolofleet.tasks.table import task_of

pytestmark = pytest.mark.long

SIZE_HW = (64, 96)
FAMILIES = ("yolov5n", "darknet-yolov3-tiny", "ppyoloe-s", "rtdetr-toy", "dfine-toy", "rfdetr-toy") + (
    MASKS := ("yolov5n-seg", "rtdetr-toy-seg", "dfine-toy-seg", "rfdetr-toy-seg")
)
HERE = [name for name in ("torchscript", "onnx", "openvino") if not [
    module for module in (*FORMATS[name].writes, *FORMATS[name].runs) if find_spec(module) is None
]]  # fmt: skip
FORMS = {"fixed": (2, SIZE_HW), "batch": (None, SIZE_HW), "size": (1, None), "both": (None, None)}
QUICK = {
    ("yolov5n", "torchscript", "both"),
    ("ppyoloe-s", "torchscript", "both"),
    ("rtdetr-toy", "onnx", "fixed"),
    ("dfine-toy-seg", "torchscript", "both"),
    ("rfdetr-toy-seg", "torchscript", "both"),
    ("yolov5n-seg", "onnx", "both"),
    ("yolov5n-seg", "openvino", "fixed"),
}
CASES = [
    pytest.param(*case, seed, id=" ".join(map(str, (*case, seed))), marks=marks)
    for case in ((family, name, form) for family in FAMILIES for name in HERE for form in FORMS)
    for seed in range(3)
    for marks in [[] if case in QUICK and seed == 0 else [pytest.mark.slow]]
]


def changed(model: Detector, kind: str) -> Detector:
    """Return a copy with one wrong value: in the last layer of scores, boxes or coefficients, in the prototypes, or in a norm."""
    wrong = copy.deepcopy(model)
    named = dict(wrong.named_parameters()) | dict(wrong.named_buffers())
    end, part, at = {
        "scores": ("bias", "" if model.needs_nms else "dec_score_head", -1),
        "boxes": ("bias", "" if model.needs_nms else "dec_bbox_head", 0),
        "norm": ("running_mean", "", 0),
        "coefficients": ("bias", "" if model.needs_nms else "masks.mix", -1),
        "prototypes": ("bias", "proto.cv3" if model.needs_nms else "masks.project", 0),
    }[kind]
    if model.needs_nms and model.task == "masks":
        part, at = {"boxes": (".m.2.", 0), "scores": (".m.2.", 4 + model.nc), "norm": (".cv", 0)}.get(
            kind, (part or ".m.2.", at)
        )
    if model.description.family == "rfdetr":  # it has no batch normalisation
        end, part, at = {
            "scores": ("bias", "class_embed", -1),
            "boxes": ("bias", "bbox_embed", 0),
            "norm": ("bias", "encoder.norm", 0),
            "coefficients": ("bias", "masks.mix", -1),
            "prototypes": ("bias", "masks.blocks", 0),
        }[kind]
    chosen = [named[name] for name in named if name.endswith(end) and part in name][-1].view(-1)
    with torch.no_grad():
        chosen[at] += 2
    return wrong


@pytest.mark.parametrize(("family", "format", "form", "seed"), CASES)
def test_a_right_file_passes_and_the_file_of_another_weight_does_not(
    family, format, form, seed, tmp_path, monkeypatch
):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    model, (batch, size_hw) = spread(family, seed), FORMS[form]
    metadata = metadata_of(model, batch=batch, size_hw=size_hw)
    out = tmp_path / f"file{FORMATS[format].suffix}"
    figures = export(model, FORMATS[format], metadata, SIZE_HW, out)
    assert figures["verified"]
    masks = f", masks within {figures['mask']:.2g} of their largest logit" if family in MASKS else ""
    text = f"boxes within {figures['box_px']:.2g} px, scores within {figures['score']:.2g}{masks}"
    assert verdict_text(figures).endswith(text)
    runtime = open_exported(out)
    for kind in ("scores", "boxes", "norm", "coefficients", "prototypes")[: 5 if family in MASKS else 3]:
        batches = batches_of(metadata, SIZE_HW, generated_images())
        with pytest.raises(NumericsError, match="differs from the network"):
            check_difference(compare(runtime, changed(model, kind), batches), half=False)
            print(f"a wrong value of {kind} is not noticed")
    for height, width in ((32, 32), (192, 128)) if size_hw is None else ():
        images = pictures(1, (height, width))
        with torch.inference_mode():
            ours = model.decode(model(images))
        found = task_of(model).difference(ours, runtime(images), (height, width), in_order=model.needs_nms)
        assert part_of_limits(found, half=False) <= 1, (height, width)


@pytest.mark.parametrize("family", ["rtdetr-toy", "dfine-toy"])
def test_rows_in_another_order_and_another_one_of_two_equal_cells_are_no_difference(family):
    """Rounding decides both in other runtimes."""
    model: Any = spread(family, 0)
    images = pictures(3)

    class Other:
        """A runtime whose scores of cells are rounded another way."""

        metadata = metadata_of(model, batch=None)

        def __init__(self, kept: int, taken: int) -> None:
            self.kept, self.taken = kept, taken

        @torch.inference_mode()
        def __call__(self, images):
            maps = model.image_part(images)
            scores = model.decoder.candidates(*model.decoder.memory_of(maps))[2].amax(2)
            order = scores.argsort(1, descending=True)[:, [*range(self.kept - 1, -1, -1), self.taken]]
            return model.decode(model(images, None, maps, order))

    tied: Any = spread(family, 0)
    tied.decoder.enc_score_head.weight.data.mul_(1e-3)  # the same order, in nearly equal scores
    model.decoder.enc_score_head.load_state_dict(tied.decoder.enc_score_head.state_dict())
    for taken in (19, 20, 21):
        check_difference(compare(cast(Any, Other(19, taken)), model, [images]), half=False)
    with pytest.raises(NumericsError):  # a cell whose score is lower by more than rounding
        check_difference(
            compare(cast(Any, Other(19, 40 if family == "rtdetr-toy" else 25)), model, [images]), half=False
        )


def test_neighbours_of_equal_scores_that_change_places_are_no_difference():
    """A cell's place decides which learned query of RF-DETR it becomes."""
    model, images = cast(Any, spread("rfdetr-toy", 0)), pictures(1)
    model.decoder.enc_out_class_embed[0].weight.data.mul_(1e-4)  # the same order, in nearly equal scores
    with torch.inference_mode():
        maps = model.image_part(images)
        scores = model.decoder.candidates(*model.decoder.memory_of(maps))[2].amax(2)[0]
    order = scores.argsort(descending=True).tolist()

    class Other:
        """A runtime that takes the cells of a list."""

        metadata = metadata_of(model, batch=None)

        def __init__(self, cells: list[int]) -> None:
            self.cells = torch.tensor(cells[: model.queries])[None]

        @torch.inference_mode()
        def __call__(self, images):
            return model.decode(model(images, None, maps, self.cells))

    near = min(range(model.queries), key=lambda i: scores[order[i]] - scores[order[i + 1]])
    swapped = [*order[:near], order[near + 1], order[near], *order[near + 2 :]]
    check_difference(compare(cast(Any, Other(swapped)), model, [images]), half=False)
    with pytest.raises(NumericsError):  # more places than rounding changes
        check_difference(
            compare(cast(Any, Other(order[:19][::-1] + order[19:])), model, [images]), half=False
        )
