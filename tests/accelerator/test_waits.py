"""Where the host waits for the device in training, validation and prediction, and in which type convolutions compute.

The counters below are the list of allowed waits: a new one fails the tests. After a wait the device has nothing to do
until the host has given it the next work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from commands import small_shapes
from miniature import Accelerator, Wait
from small_training import SmallRun, described, small_run
from walks import sampled

from yolofleet.config.recipe import load_recipe, recipe_of
from yolofleet.config.schema import ValConfig
from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.data.datasets.index import DataIndex, build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.geometry.boxes import Decoded
from yolofleet.data.geometry.nms import detections
from yolofleet.families.build import build_model, family_loss, family_of
from yolofleet.families.networks import detector as detector_module
from yolofleet.families.ppyoloe import loss as ppyoloe_module
from yolofleet.families.yolov5 import loss as yolov5_module
from yolofleet.inference.evaluate.run import EvaluationSettings, Validation
from yolofleet.inference.predict.predictor import Predictor
from yolofleet.support.devices import HostCopy
from yolofleet.training import step as step_module
from yolofleet.training.parallel.world import World

ZERO = torch.device("mini", 0)
FAMILIES = {  # model, fraction of the run
    "yolov5": ("yolov5-narrow", 0.0),
    "yolov3": ("yolov3-narrow", 0.0),
    "darknet": ("darknet-narrow", 0.0),
    "ppyoloe-atss": ("ppyoloe-narrow", 0.0),
    "ppyoloe-aligned": ("ppyoloe-narrow", 0.9),
}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Place = tuple[str, str]  # ``file.py:function`` of the package, and what it waits for
Waits = Counter[Place]

# Each for one micro-batch or one pass. Predicted boxes decide how much is matched, and a tensor needs its size.
ALIGNMENT: Waits = Counter(
    {
        ("assign.py:task_aligned", "aten::unique_consecutive"): 1,  # how many cells match
        ("assign.py:task_aligned", "aten::nonzero"): 1,  # how many cells several labels want
        ("assign.py:task_aligned", "copy to the host"): 1,  # how many matches lie on each level
    }
)
# The first step of exact sums has no last one that tells the grid. It must know whether it overflowed.
FIRST_EXACT_STEP = ("exact.py:_choose_scales", "aten::_local_scalar_dense")
# The norm of the step before the last one: the device has done that work long ago.
LATE_NORM = ("devices.py:read", "event")
# Suppression needs the number of boxes, so validation and prediction wait for each pass before they suppress.
PASS: Waits = Counter({("devices.py:wait_for", "event"): 1})
# Loss sums of validation, read just before the device is waited for anyway.
VALIDATION: Waits = PASS + Counter({("run.py:predictions", "copy to the host"): 1})
# Suppression: how many boxes are left decides each size, and how often the loop runs.
SUPPRESSION = {
    ("nms.py:_detections", "aten::nonzero"),  # boxes above the lowest score, and their classes
    ("nms.py:_detections", "copy to the host"),  # how many there are of each image
    ("nms.py:_nms_of_images", "aten::equal"),  # whether another pass over the block is needed
    ("nms.py:_nms_of_images", "aten::_local_scalar_dense"),  # whether another block is needed
    ("nms.py:_nms_of_images", "aten::index"),  # boxes that are left
    ("nms.py:_nms_of_images", "copy to the host"),  # how many there are of each image
    ("task.py:found", "copy to the host"),  # the result
}


@dataclass
class Step:
    """What the accelerator saw in one step.

    Attributes:
        waits: for work of the same step.
        late: for work that is at least a step old.
    """

    waits: Waits
    late: Waits
    unpinned: list[Wait]
    types: set[torch.dtype]


def counted(waits: list[Wait]) -> Waits:
    return Counter((wait.where, wait.what) for wait in waits)


def types_of_convolutions(accelerator: Accelerator) -> set[torch.dtype]:
    return {dtype for name, dtype in accelerator.seen_dtypes if "convolution" in name}


def family_run(family: str, **settings: object) -> SmallRun:
    model, progress = FAMILIES[family]
    run = small_run(model, **{"devices": (str(ZERO),), "images": 2, "pin": True, **settings})  # type: ignore[arg-type]
    run.progress = progress
    if run.state.scaler.enabled:  # a scale that needs no search
        run.state.scaler.load_state_dict({"scale": 256.0, "_growth_tracker": 0})
    return run


def watched_step(accelerator: Accelerator, run: SmallRun) -> Step:
    shares = run.micro_batches(run.step)
    accelerator.reset()
    before = accelerator.devices[0].operations
    run.do(1, shares=shares)
    operations = accelerator.devices[0].operations - before
    return Step(
        waits=counted([wait for wait in accelerator.waits if wait.behind < operations]),
        late=counted([wait for wait in accelerator.waits if wait.behind >= operations]),
        unpinned=list(accelerator.unpinned),
        types=types_of_convolutions(accelerator),
    )


def waits_of_loss(family: str) -> Waits:
    return ALIGNMENT if family == "ppyoloe-aligned" else Counter()


# A loss or network that waits does so in each precision, and a precision is the same for each network: the smallest
# network has all of them, and each other network one or two. The longer suites run all combinations.
PASSES = [
    *(("yolov3", precision) for precision in PRECISIONS),
    *(("yolov5", "bf16"), ("darknet", "fp16"), ("ppyoloe-atss", "bf16"), ("ppyoloe-aligned", "fp16")),
]
STEPS = [
    *(("yolov3", "fp32", True), ("yolov3", "bf16", False), ("yolov3", "fp16", True)),
    *(("yolov5", "bf16", False), ("darknet", "fp16", True)),
    ("ppyoloe-atss", "bf16", False),
]
ALL_STEPS = [
    *product(("yolov5", "yolov3", "ppyoloe-atss"), PRECISIONS, (False, True)),
    *product(("darknet", "ppyoloe-aligned"), ("fp32", "fp16"), (True,)),
]


def and_slow(quick: Sequence[tuple[object, ...]], every: Iterable[tuple[object, ...]]) -> list[object]:
    """These combinations, and the others of ``every`` as slow ones."""
    return [*quick, *(pytest.param(*one, marks=pytest.mark.slow) for one in every if one not in quick)]


@pytest.mark.parametrize(("family", "precision", "exact"), and_slow(STEPS, ALL_STEPS))
def test_a_steady_step_waits_for_nothing_and_computes_in_the_type_that_was_asked_for(
    accelerator: Accelerator, family: str, precision: str, exact: bool
):
    run = family_run(family, precision=precision, exact=exact)
    weight = next(run.state.model.parameters())
    before = weight.detach().clone()
    first = watched_step(accelerator, run)
    allowed = waits_of_loss(family)
    if exact:
        allowed = allowed + Counter({FIRST_EXACT_STEP: len(run.state.buckets.buckets)})
    assert (first.waits, first.unpinned) == (allowed, [])
    run.do(1)
    while any(getattr(bucket.format, "is_wide", False) for bucket in run.state.buckets.buckets):
        run.do(1)  # some parameters have had no gradient yet
    steady = watched_step(accelerator, run)
    assert (steady.waits, steady.unpinned) == (waits_of_loss(family), [])
    assert steady.late == {LATE_NORM: 1}
    assert steady.types == {PRECISIONS[precision]}
    assert weight.isfinite().all() and not torch.equal(weight, before)


@pytest.mark.parametrize(("family", "images"), sampled([("yolov3", 8), ("ppyoloe-atss", 4)], 2))
def test_a_steady_step_of_two_devices_waits_for_nothing(accelerator: Accelerator, family: str, images: int):
    run = family_run(family, devices=("mini:0", "mini:1"), images=images)
    run.do(2)
    steady = watched_step(accelerator, run)
    assert (steady.waits, steady.unpinned, steady.late) == ({}, [], {LATE_NORM: 1})


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> DataIndex:
    folder = tmp_path_factory.mktemp("shapes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLOFLEET_CACHE", str(folder / "cache"))
        return build_index(load_dataset(str(small_shapes(folder, images=2, val_images=4))), "val")


def up_to_suppression(accelerator: Accelerator) -> Waits:
    waits = counted(accelerator.waits)
    return Counter({place: count for place, count in waits.items() if place not in SUPPRESSION})


def validate(accelerator: Accelerator, family: str, precision: str, index: DataIndex) -> None:
    """Two batches of two images."""
    name, progress = FAMILIES[family]
    model = build_model(described(name), len(index.names))
    recipe = recipe_of(load_recipe(), family_of(model.description), model.description).value
    loss = family_loss(model, recipe, 64).at(progress)
    model = model.to(ZERO).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    accelerator.reset()
    Validation(
        model, index, EvaluationSettings(ValConfig(img=64, batch=2, max_det=5), precision),
        world=World.single(ZERO), device=ZERO, loss=loss,
    ).evaluate()  # fmt: skip


def predict(accelerator: Accelerator, family: str, precision: str, index: DataIndex) -> None:
    """Two passes of one picture."""
    model = build_model(described(FAMILIES[family][0]), len(index.names))
    predictor = Predictor(
        model.eval(),
        PredictConfig(device="0", precision=precision, img=64, conf=0.0001, max_det=5),
        index.names,
    )
    accelerator.reset()
    predictor.predict([np.full((48, 64, 3), grey, np.uint8) for grey in (90, 160)])


@pytest.mark.parametrize(("family", "precision"), and_slow(PASSES, product(FAMILIES, PRECISIONS)))
def test_validation_waits_once_for_its_losses_and_once_before_suppression(
    accelerator: Accelerator, family: str, precision: str, index: DataIndex
):
    validate(accelerator, family, precision, index)
    once = VALIDATION + waits_of_loss(family)
    assert up_to_suppression(accelerator) == once + once
    assert accelerator.unpinned == []
    assert types_of_convolutions(accelerator) == {PRECISIONS[precision]}


def test_suppression_waits_as_often_for_nine_images_as_for_two(accelerator: Accelerator):
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 400, 8, generator=generator) * torch.tensor([64.0, 64, 20, 20, 1, 1, 1, 1])

    def waits(images: int) -> Waits:
        decoded = image.expand(images, -1, -1).contiguous().to(ZERO)
        accelerator.reset()
        detections(Decoded(decoded), conf=0.01, iou=0.5, max_det=50, multi_label=True)
        return counted(accelerator.waits)

    assert waits(2) == waits(9) != Counter()


@pytest.mark.parametrize(
    ("family", "precision"), and_slow(PASSES[:-1], product(list(FAMILIES)[:-1], PRECISIONS))
)
def test_prediction_waits_once_before_suppression(
    accelerator: Accelerator, family: str, precision: str, index: DataIndex
):
    predict(accelerator, family, precision, index)
    assert up_to_suppression(accelerator) == PASS + PASS
    assert accelerator.unpinned == []
    assert types_of_convolutions(accelerator) == {PRECISIONS[precision]}


# -- faults put back -----------------------------------------------------------------------------------------


def read_loss(loss: object) -> Callable[..., torch.Tensor]:
    def sums(self: object, raws: object, targets: object) -> torch.Tensor:
        found: torch.Tensor = original(self, raws, targets)
        found.sum().item()
        return found

    original = type(loss).sums  # type: ignore[attr-defined]
    return sums


@pytest.mark.parametrize("family", sampled(["yolov3", "ppyoloe-atss"], 2))
def test_a_loss_that_the_host_reads_is_seen(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, family: str
):
    run = family_run(family)
    monkeypatch.setattr(type(run.loss), "sums", read_loss(run.loss))
    step = watched_step(accelerator, run)
    assert {what: count for (_, what), count in step.waits.items()} == {"aten::_local_scalar_dense": 1}


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize(
    ("family", "module"), sampled([("yolov3", yolov5_module), ("ppyoloe-atss", ppyoloe_module)], 2)
)
def test_targets_copied_from_pageable_memory_are_seen(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, family: str, module: object, non_blocking: bool
):
    monkeypatch.setattr(module, "to_device", lambda t, device: t.to(device, non_blocking=non_blocking))
    step = watched_step(accelerator, family_run(family))
    assert sum(step.waits.values()) >= 6
    assert len(step.unpinned) == (sum(step.waits.values()) if non_blocking else 0)


def test_anchors_copied_by_the_decoding_are_seen(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, index: DataIndex
):
    monkeypatch.setattr(detector_module, "to_device", lambda t, device: t.to(device))
    predict(accelerator, "darknet", "fp32", index)
    assert up_to_suppression(accelerator) - PASS - PASS == {("detector.py:decode", "copy to the device"): 4}


def test_a_norm_that_is_read_at_once_is_seen(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_module, "UNREAD_NORMS", 0)
    assert watched_step(accelerator, family_run("yolov3")).waits == {LATE_NORM: 1}
    monkeypatch.setattr(step_module, "HostCopy", lambda norm: HostCopy(torch.tensor(float(norm))))
    assert watched_step(accelerator, family_run("yolov3")).waits != {}


def test_autocast_of_another_device_leaves_convolutions_in_float32(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
):
    run = family_run("yolov3", precision="bf16")
    monkeypatch.setattr(step_module, "autocast", lambda *_: torch.autocast("cpu", torch.bfloat16))
    assert watched_step(accelerator, run).types == {torch.float32}


@pytest.mark.skipif(torch.cuda.is_available(), reason="autocast works")
def test_autocast_that_switches_itself_off_fails_the_step(monkeypatch: pytest.MonkeyPatch):
    run = family_run("yolov3", precision="bf16")
    monkeypatch.setattr(step_module, "autocast", lambda *_: torch.autocast("cuda", torch.bfloat16))
    with pytest.raises(UserWarning, match="Disabling"):
        run.do(1)
