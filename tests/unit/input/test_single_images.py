"""Objects, holes and transforms land where the labels say; numbers are worked by hand."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from label_rows import rows_of, shapes_of

from yolofleet.config.recipe import load_recipe
from yolofleet.config.transforms import TRANSFORMS, transform_of
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.single_images import Transforms, cut_hole, paste_objects
from yolofleet.support.errors import ConfigError, install_hint

needs_albumentations = pytest.mark.skipif(
    find_spec("albumentations") is None, reason="the extra yolofleet[albumentations] is not installed"
)
SQUARE = np.array([[0.25, 0.5], [0.5, 0.5], [0.5, 0.75], [0.25, 0.75]])  # 10 x 8 pixels of 40 x 32


class Numbers(np.random.Generator):
    """A generator that returns given numbers."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.numbers = list(numbers)

    def random(self, count: Any = None, *_: Any) -> Any:  # type: ignore[override]
        if count is None:
            return self.numbers.pop(0)
        return np.array([self.numbers.pop(0) for _ in range(count)])


def grey(width: int, height: int, value: int = 100) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def source() -> np.ndarray:
    image = grey(40, 32, 0)
    image[16:24, 10:20] = np.arange(1, 11, dtype=np.uint8)[:, None] * 10  # columns 10, 20, ... 100
    return image


def test_an_object_is_pasted_with_its_pixels_and_its_box() -> None:
    # room: 50 - 10 = 40 columns, 20 - 8 = 12 rows; 0.5 of 41 and of 13
    image, labels = paste_objects(
        Numbers(0.5, 0.5, 0.9), grey(50, 20), Shapes.none(), source(), [3], [[SQUARE]]
    )
    assert rows_of(labels).tolist() == [pytest.approx([3, 25 / 50, 10 / 20, 10 / 50, 8 / 20])]
    assert (image[6:14, 20:30, 0] == np.arange(10, 110, 10)).all()
    image[6:14, 20:30] = 100
    assert (image == 100).all()
    mirrored, _ = paste_objects(Numbers(0, 0, 0.1), grey(50, 20), Shapes.none(), source(), [3], [[SQUARE]])
    assert (mirrored[:8, :10, 0] == np.arange(100, 0, -10)).all()


def test_only_the_inside_of_a_polygon_is_pasted() -> None:
    triangle = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    image, _ = paste_objects(
        Numbers(0, 0, 0.9), grey(32, 32, 0), Shapes.none(), grey(32, 32, 200), [0], [[triangle]]
    )
    rows, columns = np.nonzero(image[..., 0])
    assert (rows + columns).max() <= 32 and (image[..., 0] > 0).mean() == pytest.approx(0.5, abs=0.06)


def test_an_object_with_two_parts_has_one_box() -> None:
    parts = [
        np.array([[0, 0], [0.25, 0], [0.25, 0.5], [0, 0.5]]),
        np.array([[0.5, 0], [0.75, 0], [0.75, 0.5], [0.5, 0.5]]),
    ]
    image, labels = paste_objects(
        Numbers(0, 0, 0.9), grey(32, 32), Shapes.none(), grey(32, 32, 200), [1], [parts]
    )
    assert rows_of(labels).tolist() == [pytest.approx([1, 12 / 32, 8 / 32, 24 / 32, 16 / 32])]
    assert (image[:16, :8] == 200).all() and (image[:16, 9:15] == 100).all()
    assert (image[:16, 16:24] == 200).all()


def test_an_object_that_is_too_large_or_hides_a_label_is_not_pasted() -> None:
    image, labels = paste_objects(Numbers(0, 0, 0.9), grey(9, 20), Shapes.none(), source(), [3], [[SQUARE]])
    assert not len(labels) and (image == 100).all()
    hidden = shapes_of([[1, 0.1, 0.2, 0.1, 0.2]])  # 5 x 4 pixels at (2.5, 2): 20 of them below the object
    image, labels = paste_objects(Numbers(0, 0, 0.9), grey(50, 20), hidden, source(), [3], [[SQUARE]])
    assert labels is hidden and (image == 100).all()
    wide = shapes_of([[1, 0.5, 0.5, 1, 1]])
    image, labels = paste_objects(
        Numbers(0, 0, 0.9, 0.01, 0, 0.9), grey(50, 20), wide, source(), [3, 4], [[SQUARE], [SQUARE]]
    )
    assert labels.classes.tolist() == [1, 3]  # the second would hide the first


def test_a_hole_is_grey_and_drops_the_labels_that_it_hides() -> None:
    # side: (1/16 + 7/16 x 0.5) x 32 = 9 pixels around (32, 16)
    inside = [0, 32 / 64, 16 / 32, 6 / 64, 6 / 32]
    beside = [1, 40 / 64, 16 / 32, 20 / 64, 6 / 32]
    image, labels = cut_hole(Numbers(0.5, 0.5, 0.5), grey(64, 32, 0), shapes_of([inside, beside]))
    rows, columns = np.nonzero(image[..., 0] == 114)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) in [(12, 19, 28, 35), (11, 20, 27, 36)]
    assert rows_of(labels).tolist() == [pytest.approx(beside)]
    image, _ = cut_hole(Numbers(0.5, 0, 0), grey(64, 32, 0), Shapes.none())
    assert (image[..., 0] == 114).sum() == 16  # a quarter is inside


@needs_albumentations
def test_transforms_follow_from_the_key_alone_and_take_colours_in_order() -> None:
    texts = ["GaussNoise p=0.5", "RGBShift r_shift_limit=[40,40] g_shift_limit=[0,0] b_shift_limit=[0,0] p=1"]
    transforms, again = Transforms(texts), pickle.loads(pickle.dumps(Transforms(texts)))
    image, seen = grey(16, 16), []
    for number in range(20):
        first = transforms(np.random.default_rng(number), image)
        transforms(np.random.default_rng(99), image)
        assert np.array_equal(first, transforms(np.random.default_rng(number), image))
        assert np.array_equal(first, again(np.random.default_rng(number), image))
        assert first[..., 2].mean() - first[..., 0].mean() == pytest.approx(40, abs=15)  # red is last in BGR
        seen.append(float(first[..., 0].std()))
    assert (image == 100).all() and 3 < sum(value > 0 for value in seen) < 17


@needs_albumentations
def test_every_transform_that_a_recipe_may_have_keeps_size_and_type() -> None:
    image = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    for name in TRANSFORMS:
        changed = Transforms([f"{name} p=1"])(np.random.default_rng(1), image)
        assert changed.shape == image.shape and changed.dtype == np.uint8, name


@needs_albumentations
def test_a_parameter_that_albumentations_does_not_know_is_an_error() -> None:
    for text in ("Blur zzz=1", "Blur blur_limit=x"):
        with pytest.raises(ConfigError, match=r"albumentations refuses .Blur"):
            Transforms([text])


@needs_albumentations
def test_albumentations_does_not_ask_the_internet_for_a_newer_version() -> None:
    code = (
        "import urllib.request, os; urllib.request.urlopen = lambda *a, **k: os._exit(7)\n"
        "from yolofleet.data.input.single_images import albumentations_version; print(albumentations_version())\n"
        "assert 'NO_ALBUMENTATIONS_UPDATE' not in os.environ"
    )
    env = {name: value for name, value in os.environ.items() if name != "NO_ALBUMENTATIONS_UPDATE"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("2.0."), done.stderr


def test_without_albumentations_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "albumentations", None)
    with pytest.raises(ConfigError) as caught:
        Transforms(["Blur"])
    assert install_hint("albumentations") in caught.value.render()


def test_a_transform_has_plain_parameters() -> None:
    assert transform_of("Blur") == ("Blur", {})
    assert transform_of("Blur blur_limit=[3,5] p=1e-2") == ("Blur", {"blur_limit": (3, 5), "p": 0.01})
    for text, says in (
        ("Blurr", "did you mean Blur?"),
        ("", "is not a transform"),
        ("Lambda image=x", "is not a transform"),
        ("Blur p", "p in Blur p is not a parameter"),
        ("Blur p=", "is not a parameter"),
        ("Blur p={a:1}", "is not a parameter"),
        ("Blur blur_limit=[[1]]", "is not a parameter"),
        ("Blur __class__=[", "not YAML"),
    ):
        with pytest.raises(ConfigError) as caught:
            transform_of(text)
        assert says in caught.value.render(), text


def test_transforms_are_a_list_of_the_recipe() -> None:
    recipe = load_recipe("", ["albumentations=[Blur p=0.01, CLAHE]"]).value
    assert recipe.albumentations == ("Blur p=0.01", "CLAHE")
