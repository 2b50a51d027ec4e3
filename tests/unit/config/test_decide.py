"""What a run decides about its recipe and its batch, from the settings, the weights and the number of images."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from walks import sampled

from yolofleet.config.decide import Decided, decide
from yolofleet.config.load import resolve_train
from yolofleet.config.recipe import recipe_names
from yolofleet.config.schema import default_micro_batch, step_images_of
from yolofleet.config.stored.job import dump_config
from yolofleet.families.networks.description import describe
from yolofleet.families.table import FAMILIES
from yolofleet.support.errors import ConfigError
from yolofleet.training.parallel.partition import Partition
from yolofleet.training.schedule import StepPlan, StepSplitter


def decided(model: str, images: int, *, new_classes: bool = False, **given: Any) -> Decided:
    """Return what a run of a built-in network decides; ``new_classes``: from weights of it for other classes."""
    start = {"weights": f"{model}.safetensors"} if new_classes else {"model": model}
    config, recipe = resolve_train({"data": "d", **start, **given})
    description = describe(model)
    return decide(config, recipe, FAMILIES[description.family], description, images, new_classes=new_classes)


def sizes(found: Decided) -> tuple[int, int, int]:
    """Return the images of a batch, of a step and of a micro-batch."""
    c = found.config.value
    return c.batch, step_images_of(c.batch, c.nominal_batch), c.micro_batch


@pytest.mark.parametrize(
    ("model", "images", "given", "expected", "optimizer"),
    [
        # enough images: the family's own values
        ("yolov5n", 2000, {}, (16, 64, 8), "SGD"),
        ("ppyoloe-s", 2000, {}, (16, 64, 8), "SGD"),
        ("dfine-s", 2000, {}, (16, 32, 8), "AdamW"),
        ("yolov5n", 16, {"recipe": "scratch-low"}, (16, 64, 8), "SGD"),
        # a batch of at most the images, and as many batches in a step as before
        ("yolov5n", 15, {"recipe": "scratch-low"}, (15, 60, 5), "SGD"),
        ("yolov5n", 13, {"recipe": "scratch-low"}, (13, 52, 13), "SGD"),
        ("yolov5n", 6, {"recipe": "scratch-low"}, (6, 24, 6), "SGD"),
        ("yolov5n", 3, {"recipe": "scratch-low"}, (3, 12, 3), "SGD"),  # no default micro-batch is below 4, so the batch is one
        ("yolov5n", 1, {"recipe": "scratch-low"}, (1, 4, 1), "SGD"),
        ("yolov5n", 6, {"nominal_batch": 64}, (6, 66, 6), "SGD"),  # as the user says
        ("yolov5n", 6, {"batch": 64}, (6, 6, 6), "SGD"),
        ("yolov5n", 37, {"batch": 64}, (36, 36, 9), "SGD"),  # 37 cannot be cut
        ("yolov5n", 6, {"recipe": "scratch-low", "micro_batch": 2}, (6, 24, 2), "SGD"),
        ("yolov5n", 6, {"recipe": "scratch-low", "micro_batch": 4}, (4, 16, 4), "SGD"),
        ("dfine-s", 10, {}, (10, 20, 10), "AdamW"),  # 10 is nearer to 8 than 5
        # recipes for few images of new classes
        ("yolov5n", 500, {"new_classes": True}, (16, 16, 8), "AdamW"),
        ("yolov5n", 500, {"new_classes": True, "batch": 16}, (16, 16, 8), "AdamW"),
        ("yolov5n", 500, {"new_classes": True, "batch": 20}, (20, 20, 10), "AdamW"),
        ("yolov5n", 1000, {"new_classes": True}, (16, 64, 8), "SGD"),
        ("dfine-s", 500, {"new_classes": True}, (8, 8, 4), "AdamW"),
        ("dfine-s", 500, {"new_classes": True, "batch": 16}, (16, 16, 8), "AdamW"),
        ("dfine-s", 500, {"new_classes": True, "micro_batch": 16}, (16, 16, 16), "AdamW"),
        ("dfine-s", 500, {"new_classes": True, "micro_batch": 2}, (8, 8, 2), "AdamW"),
        ("dfine-s", 500, {"new_classes": True, "batch": 16, "micro_batch": 16}, (16, 16, 16), "AdamW"),
        ("dfine-s", 6, {"new_classes": True}, (6, 6, 6), "AdamW"),
        ("rtdetrv2-r18", 500, {"new_classes": True, "batch": 64}, (64, 64, 8), "AdamW"),
        ("dfine-s", 500, {"recipe": "dfine-few", "micro_batch": 16}, (16, 16, 16), "AdamW"),
        ("dfine-s", 500, {"new_classes": True, "nominal_batch": 32}, (16, 32, 8), "AdamW"),
        ("ppyoloe-s", 500, {"new_classes": True}, (16, 16, 8), "AdamW"),
        # a step of another size, other families and recipes, and what rules out the recipe for few images
        ("yolov5n", 17, {"recipe": "scratch-low"}, (16, 64, 8), "SGD"),
        ("yolov5n", 16, {"recipe": "scratch-low", "batch": 17}, (16, 64, 8), "SGD"),
        ("yolov5n", 64, {"batch": 64}, (64, 64, 8), "SGD"),
        ("yolov5n", 63, {"batch": 64}, (63, 63, 9), "SGD"),
        ("yolov5n", 100, {"recipe": "scratch-low", "batch": 24}, (24, 72, 8), "SGD"),
        ("yolov5n", 100, {"recipe": "scratch-low", "batch": 24, "micro_batch": 6}, (24, 72, 6), "SGD"),
        ("yolov5n", 100, {"batch": 24, "nominal_batch": 24}, (24, 24, 8), "SGD"),
        ("yolov5n", 100, {"nominal_batch": 16}, (16, 16, 8), "SGD"),
        ("yolov5n", 100, {"nominal_batch": 8}, (16, 16, 8), "SGD"),
        ("yolov5n", 100, {"recipe": "scratch-low", "micro_batch": 1}, (16, 64, 1), "SGD"),
        ("yolov5n", 100, {"recipe": "scratch-low", "micro_batch": 16}, (16, 64, 16), "SGD"),
        ("yolov5n", 2000, {"micro_batch": 32}, (32, 64, 32), "SGD"),
        ("yolov5n", 2000, {"recipe": "demo"}, (16, 16, 8), "SGD"),
        ("yolov5n", 2000, {"recipe": "finetune"}, (16, 16, 8), "AdamW"),
        ("yolov5n", 2000, {"recipe": "scratch-high"}, (16, 64, 8), "SGD"),
        ("yolov5n", 2000, {"optimizer": "AdamW"}, (16, 64, 8), "AdamW"),
        ("yolov5n", 999, {"new_classes": True}, (16, 16, 8), "AdamW"),
        ("yolov5n", 500, {"new_classes": True, "optimizer": "SGD"}, (16, 64, 8), "SGD"),
        ("yolov5n", 500, {"new_classes": True, "recipe": "scratch-low"}, (16, 64, 8), "SGD"),
        ("yolov5n", 500, {"new_classes": True, "set": ("lr0=0.02",)}, (16, 64, 8), "SGD"),
        ("yolov5n", 500, {"new_classes": True, "set": ("box=0.1",)}, (16, 16, 8), "AdamW"),
        ("dfine-n", 2000, {}, (16, 128, 16), "AdamW"),
        ("dfine-n", 100, {}, (16, 128, 16), "AdamW"),
        ("deim-s", 2000, {}, (16, 32, 8), "AdamW"),
        ("dfine-s", 2000, {"optimizer": "SGD"}, (16, 32, 8), "SGD"),
        ("rtdetrv2-r50", 2000, {}, (16, 16, 8), "AdamW"),
        ("rtdetrv2-r50", 500, {"new_classes": True}, (8, 8, 4), "AdamW"),
        ("rtdetrv2-r50", 2000, {"recipe": "deim"}, (16, 32, 8), "AdamW"),
        ("dfine-n", 2000, {}, (16, 128, 16), "AdamW"),
        ("dfine-n", 2000, {"recipe": "dfine"}, (16, 128, 16), "AdamW"),  # also where it is typed
        ("dfine-n", 2000, {"recipe": "deim"}, (16, 128, 16), "AdamW"),
        ("dfine-n", 2000, {"recipe": "deim", "nominal_batch": 32}, (16, 32, 8), "AdamW"),
        ("ppyoloe-s", 3, {}, (3, 3, 3), "SGD"),
        # a recipe for few images from scratch
        ("yolov5n", 999, {}, (16, 16, 8), "SGD"),
        ("yolov5n", 1000, {}, (16, 64, 8), "SGD"),
        ("yolov5n", 500, {"batch": 64}, (64, 64, 8), "SGD"),
        ("yolov5n", 500, {"batch": 4}, (4, 16, 4), "SGD"),
        ("yolov5n", 500, {"recipe": "scratch-high"}, (16, 64, 8), "SGD"),
        ("yolov5n", 500, {"set": ("lr0=0.02",)}, (16, 64, 8), "SGD"),
        ("yolov5n", 6, {}, (6, 6, 6), "SGD"),
        ("yolov5n", 6, {"micro_batch": 4}, (4, 4, 4), "SGD"),
        ("yolov5n", 1, {}, (1, 1, 1), "SGD"),
        ("ppyoloe-s", 999, {}, (16, 16, 8), "SGD"),
        ("ppyoloe-plus-s", 999, {}, (16, 16, 8), "SGD"),
        ("ppyoloe-s", 1000, {}, (16, 64, 8), "SGD"),
        ("ppyoloe-s", 500, {"recipe": "ppyoloe-300e"}, (16, 64, 8), "SGD"),
        ("ppyoloe-s", 500, {"nominal_batch": 64}, (16, 64, 8), "SGD"),
        ("ppyoloe-s", 500, {"batch": 64}, (64, 64, 8), "SGD"),
        ("darknet-yolov3-tiny", 2000, {}, (16, 64, 8), "SGD"),
        ("darknet-yolov3-tiny", 500, {"new_classes": True}, (16, 64, 8), "SGD"),
    ],
)  # fmt: skip
def test_the_batch_the_step_and_the_micro_batch(
    model: str, images: int, given: dict[str, Any], expected: tuple[int, int, int], optimizer: str
) -> None:
    found = decided(model, images, **given)
    assert (sizes(found), found.config.value.optimizer) == (expected, optimizer)
    if expected[0] < given.get("batch", min(16, found.recipe.value.reference_batch)):
        assert any(f"than the {images} training images" in note for note in found.notes), found.notes


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch": 602}, "--batch 602 is more than 100 times the 6 training images"),
        ({"batch": 100000}, "--batch 100000 is more than 100 times"),
        ({"micro_batch": 8}, "--micro-batch 8 is more than the 6 training images"),
    ],
)
def test_a_batch_that_so_few_images_cannot_fill_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        decided("yolov5n", 6, **given)
    assert caught.value.source == "command line" and caught.value.hint
    assert sizes(decided("yolov5n", 6, batch=600))[0] == 6


def test_a_compiled_network_has_images_of_one_size() -> None:
    decided("yolov5n", 2000, passes="compiled")
    for model, texts in (("yolov5n", ("size_low=0.5",)), ("dfine-s", ())):
        with pytest.raises(ConfigError, match="each image size would be compiled"):
            decided(model, 2000, passes="compiled", set=texts)


def test_the_recipe_for_few_images_does_not_depend_on_a_typed_default() -> None:
    one, other = (decided("dfine-s", 50, new_classes=True, **given) for given in ({}, {"batch": 16}))
    assert one.recipe.value == other.recipe.value
    assert sum("recipe dfine-few for new classes" in note for note in one.notes) == 1
    assert "steps of 16 images" in " ".join(other.notes)


@pytest.mark.parametrize(
    "given", [{"optimizer": "SGD"}, {"nominal_batch": 32}, {"set": ("lr0=0.001",)}], ids=str
)
def test_a_choice_that_rules_out_the_recipe_for_few_images_is_named(given: dict[str, Any]) -> None:
    (note,) = decided("dfine-s", 50, new_classes=True, **given).notes
    name, value = next(iter(given.items()))
    words = {"set": "lr0 0.001"}.get(name, f"--{name.replace('_', '-')} {value}")
    assert (
        f"dfine-few, for new classes from weights on fewer than 1,000 images, is not used because of {words} (command line)"
        in note
    )
    # the user named a recipe
    assert decided("dfine-s", 50, new_classes=True, recipe="dfine", **given).notes == ()


def test_a_recipe_for_few_images_from_scratch_is_said_once_and_kept() -> None:
    (note,) = decided("ppyoloe-s", 50).notes
    assert note.startswith(
        "recipe ppyoloe-few from scratch on 50 images (fewer than 1,000): steps of 16 images, SGD, lr0 0.01;"
    )
    (note,) = decided("ppyoloe-s", 50, nominal_batch=32).notes
    assert (
        "ppyoloe-few, from scratch on fewer than 1,000 images, is not used because of --nominal-batch 32"
        in note
    )
    first = decided("ppyoloe-s", 50)
    config, recipe = resolve_train({"data": "d", "model": "ppyoloe-s"})
    parts = config, recipe, FAMILIES["ppyoloe"], describe("ppyoloe-s"), 50
    again = decide(*parts, stored=first.recipe.value.model_dump(mode="json"))
    assert (again.config.value, again.recipe.value) == (first.config.value, first.recipe.value)
    # a run that began before this recipe was there goes on with its own
    usual = decided("ppyoloe-s", 50, recipe="ppyoloe-300e")
    earlier = decide(*parts, stored=usual.recipe.value.model_dump(mode="json"))
    assert (sizes(earlier), earlier.recipe.value, earlier.notes) == (sizes(usual), usual.recipe.value, ())


def test_a_run_that_is_started_again_keeps_what_it_decided() -> None:
    first = decided("dfine-s", 50, new_classes=True, batch=16)
    config, recipe = resolve_train({"data": "d", "weights": "dfine-s.safetensors", "batch": 16})
    description = describe("dfine-s")
    again = decide(
        config, recipe, FAMILIES["dfine"], description, 50, stored=first.recipe.value.model_dump(mode="json")
    )
    assert (again.config.value, again.recipe.value) == (first.config.value, first.recipe.value)


MODELS = ("yolov5n", "ppyoloe-s", "dfine-n")
IMAGES = (1, 2, 3, 5, 6, 7, 8, 13, 16, 17, 31, 37, 64, 100, 999, 1000, 2000)
BATCHES = (None, 1, 2, 4, 8, 16, 24, 37, 64, 256, 100_000)
MICRO_BATCHES = (None, 1, 2, 4, 6, 8, 16, 32, 64)
DEVICES = (1, 2, 3, 8)


def work_of_each_rank(found: Decided, images: int, devices: int) -> list[int]:
    """Return the images of each rank in a full step. Raise ConfigError if the run is refused."""
    batch, step, micro_batch = sizes(found)
    splitter = StepSplitter(
        partition=Partition.equal(devices), rank=0, replicas=1, micro_batch=micro_batch, batch=batch,
        dataset_images=images, sync_bn=False, sizes=(1, 1), img=640, stride=32, seed=0,
    )  # fmt: skip
    splitter.check(step)
    plan = StepPlan(0, 0, step, 0.0, 0.0, 0.0)
    ranks = (StepSplitter(**{**vars(splitter), "rank": rank}) for rank in range(devices))
    return [sum(len(key.samples) for key in rank.keys(plan)) for rank in ranks]


@pytest.mark.parametrize(("model", "part"), sampled(itertools.product(MODELS, range(3)), 4))
def test_every_run_is_refused_or_gives_each_rank_a_micro_batch_in_each_step(model: str, part: int) -> None:
    recipes: Sequence[str | None] = (None, *recipe_names())[part::3]
    rng, ran, refused = random.Random(model), 0, 0  # a part of all combinations, the same in each run
    for recipe, new_classes in itertools.product(recipes, (False, True)):
        grid = list(itertools.product(BATCHES, MICRO_BATCHES))
        for batch, micro_batch in [(None, None), (None, 16), *rng.sample(grid, 3)]:
            named = {"recipe": recipe, "batch": batch, "micro_batch": micro_batch}
            given = {name: value for name, value in named.items() if value is not None}
            for images in rng.sample(IMAGES, 3):
                try:
                    found = decided(model, images, new_classes=new_classes, **given)
                except ConfigError as error:
                    refused += 1
                    assert error.hint, (given, images)
                    if "training images" not in error.what:
                        break  # it does not depend on the images
                    continue
                batch_now, step, micro = sizes(found)
                assert batch_now <= images and step % batch_now == batch_now % micro == 0 and micro > 0
                for devices in DEVICES:
                    try:
                        work = work_of_each_rank(found, images, devices)
                    except ConfigError as error:
                        refused += 1
                        assert devices > step // micro and error.hint
                        continue
                    ran += 1
                    assert min(work) >= micro and sum(work) == step, (given, images, devices, work)
    assert ran > 30 and refused > 15


def test_two_devices_have_work_with_every_default() -> None:
    for batch in range(8, 65):
        if (micro := default_micro_batch(batch, batch)) and any(
            batch % d == 0 for d in range(4, batch // 2 + 1)
        ):
            assert batch // micro >= 2, batch


def test_a_resumed_run_keeps_the_step_that_its_recipe_had_then(tmp_path: Path) -> None:
    """Earlier versions took 32 images where the recipe has 128 for this network."""
    config, recipe = resolve_train({"data": "d", "model": "dfine-n", "recipe": "deim"})
    assert config.value.nominal_batch == 32 and config.sources["nominal_batch"] == "recipe deim"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-00000010.safetensors").write_text("state")
    (tmp_path / "config.yaml").write_text(dump_config(config, recipe))
    description = describe("dfine-n")
    for run, step in ((resolve_train({"resume": str(tmp_path)}), 32), ((config, recipe), 128)):
        found = decide(*run, FAMILIES["dfine"], description, 2000)
        assert sizes(found)[1] == step
