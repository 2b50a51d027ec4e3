"""Masks from coefficients and prototypes, and what the task does with them."""

import tracemalloc

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mask_sets import native, random_masks, scored

from yolofleet.data.geometry import rle
from yolofleet.data.geometry.boxes import DecodedMasks
from yolofleet.data.geometry.letterbox import Letterbox, letterbox
from yolofleet.data.geometry.table import as_objects
from yolofleet.support.errors import ConfigError
from yolofleet.tasks.boxes.matching import ScoredBoxes
from yolofleet.tasks.masks.draw import one_polygon, painted, polygons
from yolofleet.tasks.masks.found import FoundMasks, OnMap, native_mask
from yolofleet.tasks.masks.matching import ScoredMasks
from yolofleet.tasks.masks.task import MASKS
from yolofleet.tasks.task import Limits

LIMITS = Limits(0.1, 0.5, 300)


def decoded_of(rows, images=1, prototypes=4, cells=(16, 16), seed=0):
    """Boxes cx, cy, w, h, score of one class, with random masks."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.tensor([[*row[:4], 1, row[4]] for row in rows]).expand(images, -1, -1).clone()
    coefficients = torch.randn(images, len(rows), prototypes, generator=generator)
    return DecodedMasks(table, coefficients, torch.randn(images, prototypes, *cells, generator=generator))


def blob(cells, centre_xy, radius):
    """Logits [h, w] of a disc, in cells."""
    y, x = np.mgrid[: cells[0], : cells[1]] + 0.5
    return (radius - np.hypot(x - centre_xy[0], y - centre_xy[1])).astype(np.float32)


def test_logits_are_enlarged_as_torch_does_it_where_the_image_is_the_input():
    """Half-pixel centres, borders repeated; then the box cuts."""
    rng = np.random.default_rng(0)
    prototypes = rng.standard_normal((5, 12, 16)).astype(np.float32)
    coefficients = rng.standard_normal(5).astype(np.float32)
    logits = torch.from_numpy(np.einsum("d,dyx->yx", coefficients, prototypes))
    whole = F.interpolate(logits[None, None], size=(48, 64), mode="bilinear", align_corners=False)[
        0, 0
    ].numpy()
    for box in (
        (0, 0, 64, 48),
        (3.4, 10.6, 31.5, 40.49),
        (60, 40, 64, 48),
        (9.5, 7.5, 10.4, 8.4),
        (5, 5, 5, 9),
    ):
        mask = native_mask(coefficients, prototypes, np.array(box), native(48, 64))
        x, y = np.arange(64) + 0.5, np.arange(48)[:, None] + 0.5
        within = (x >= box[0]) & (x < box[2]) & (y >= box[1]) & (y < box[3])
        differs = (rle.decode(mask.runs, mask.size_hw) != ((whole > 0) & within)) & (np.abs(whole) > 1e-5)
        assert mask.size_hw == (48, 64) and not differs.any()


def test_a_window_of_many_pixels_is_computed_in_bands_with_equal_bits(monkeypatch):
    rng = np.random.default_rng(1)
    prototypes = rng.standard_normal((3, 9, 9)).astype(np.float32)
    args = (np.ones(3, np.float32), prototypes, np.array([1.2, 0.7, 30, 33.3]), native(36, 36))
    whole = native_mask(*args)
    monkeypatch.setattr("yolofleet.tasks.masks.found._PIXELS_AT_ONCE", 100)
    assert (native_mask(*args).runs == whole.runs).all()


def test_a_mask_lies_where_the_object_is_in_the_image_as_it_was_read():
    """A disc in the letterboxed image is a disc at its place in the image, for any shape of it."""
    for height, width in ((50, 90), (300, 200), (640, 640)):
        _, back = letterbox(np.zeros((height, width, 3), np.uint8), (320, 256))
        middle = np.array([width * 0.4, height * 0.55])
        on_input = middle * back.scale_xy + [back.pad_left, back.pad_top]
        radius_px = 0.2 * min(width, height)
        prototype = blob((80, 64), on_input / 4, radius_px * back.scale_xy[0] / 4)[None]
        box = np.concatenate([middle - radius_px, middle + radius_px])
        mask = native_mask(np.ones(1, np.float32), prototype, box, back)
        y, x = np.mgrid[:height, :width] + 0.5
        disc = np.hypot(x - middle[0], y - middle[1]) < radius_px
        inside = rle.decode(mask.runs, mask.size_hw)
        assert (inside & disc).sum() / (inside | disc).sum() > 0.93


def test_found_masks_belong_to_the_boxes_that_suppression_keeps():
    rows = [(20, 20, 16, 16, 0.6), (20.5, 20, 16, 16, 0.9), (45, 44, 20, 24, 0.7), (20, 20, 16, 16, 0.05)]
    decoded = decoded_of(rows, images=2)
    found, cut = MASKS.found(decoded, LIMITS)
    assert cut == 0
    for n, one in enumerate(found):
        assert one.scores.tolist() == pytest.approx([0.9, 0.7])
        for mask, row in zip(one.masks, (1, 2), strict=True):
            assert torch.equal(torch.from_numpy(mask.coefficients), decoded.coefficients[n, row])
            assert torch.equal(mask.prototypes, decoded.prototypes[n])
        nothing, _ = MASKS.found(decoded, Limits(0.99, 0.5, 300))
        assert len(nothing[n]) == len(nothing[n].native(native(64, 64))) == 0


def test_masks_of_400_objects_on_an_image_of_1280_px_take_little_memory():
    """All of them as pixels would be 655 MB, as logits four times that."""
    side, each = 1280, 400
    rng = np.random.default_rng(0)
    prototypes = torch.from_numpy(rng.standard_normal((32, side // 4, side // 4)).astype(np.float32))
    middle, half = rng.uniform(0, side, (each, 2)), rng.uniform(10, 320, (each, 2))
    boxes = np.clip(np.concatenate([middle - half, middle + half], axis=1), 0, side)
    masks = as_objects([OnMap(row, prototypes) for row in rng.standard_normal((each, 32)).astype(np.float32)])
    ids = np.zeros(each, np.int64)
    found = FoundMasks(ids, ids, np.full(each, 0.5, np.float32), boxes, masks)
    tracemalloc.start()
    tracemalloc.reset_peak()
    table = MASKS.collected([0], [found], [native(side, side)], False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) == each and table.pixels.min() >= 0 and table.pixels.max() > 10_000
    assert peak < 64 << 20, f"{peak / 2**20:.0f} MiB"


def test_rows_of_a_table_keep_their_masks():
    _, table = random_masks(3, images=4, classes=2, most_labels=3, most_found=9)
    masks = table.masks()
    for chosen in (np.arange(len(table))[::-2], table.scores > 0.5, slice(1, 3), np.zeros(0, int)):
        part = table.rows(chosen)
        rows = np.arange(len(table))[chosen]
        assert part.pixels.tolist() == table.pixels[rows].tolist()
        assert all((a == masks[row]).all() for a, row in zip(part.masks(), rows, strict=True))
    again = ScoredMasks.joined([table.rows(slice(0, 2)), table.rows(slice(2, None)), table.rows(slice(0, 0))])
    assert all((a == b).all() for a, b in zip(vars(again).values(), vars(table).values(), strict=True))
    assert type(table.boxes) is ScoredBoxes


def test_a_label_without_a_mask_is_neither_found_nor_missed():
    """Its box is a crowd for masks: a detection there does not count. For boxes it is an object."""
    square = rle.encode(np.ones((10, 10), bool), (40, 40), (5, 5))
    index, _ = random_masks(0, images=1, classes=1, most_labels=0, most_found=0)
    index.sizes_wh, index.offsets = np.array([[40, 40]]), np.array([0, 2])
    index.classes, index.crowd, index.area_px = np.zeros(2, int), np.zeros(2, bool), np.full(2, 100.0)
    index.boxes_cxcywh_unit = np.array([[0.25, 0.25, 0.25, 0.25], [0.75, 0.75, 0.25, 0.25]])
    index.masks = [square, np.zeros(0, np.uint32)]
    other = rle.encode(np.ones((10, 10), bool), (40, 40), (25, 25))
    found = scored([(0, 0, square, 0.9, 40), (0, 0, other, 0.8, 40)])
    metrics = MASKS.metrics([MASKS.judged(index, np.array([0]), found, None)], ["a"])
    assert metrics.figures["mask mAP50-95"] == pytest.approx(1)
    assert metrics.figures["mAP50-95"] == pytest.approx(1)
    assert metrics.per_class["a"]["mask labels"] == 1 and metrics.per_class["a"]["labels"] == 2
    alone = MASKS.metrics([MASKS.judged(index, np.array([0]), found.rows([1]), None)], ["a"])
    assert (alone.figures["mask mAP50"], alone.figures["mask P"]) == (0, 0)
    assert MASKS.judgement.fitness(metrics.figures) == pytest.approx(2)
    assert {*MASKS.columns.values(), *MASKS.of_class, *MASKS.fitness_of} <= set(metrics.figures)
    assert set(MASKS.of_class.values()) <= set(metrics.per_class["a"])
    assert [title for title, *_ in MASKS.tables(metrics)] == ["by size", "masks by size"]


def test_polygons_hold_parts_and_holes_and_one_polygon_joins_them():
    inside = np.zeros((60, 60), bool)
    inside[5:30, 5:30], inside[12:20, 12:20], inside[40:50, 35:55] = True, False, True
    mask = rle.Mask((60, 60), rle.encode(inside))
    assert sorted(_area(ring) for ring in polygons(mask)) == [-64, 200, 625]
    whole = one_polygon(mask)
    assert _area(whole) == 25 * 25 - 64 + 200
    filled = np.zeros((60, 60), np.uint8)
    cv2.fillPoly(filled, [whole.astype(np.int32)], 1)
    assert not filled[14:18, 14:18].any() and filled[7:10, 7:28].all() and filled[42:48, 37:53].all()
    assert len(one_polygon(rle.Mask((9, 9), rle.encode(np.zeros((9, 9), bool))))) == 0
    dot = rle.encode(np.ones((1, 1), bool), (9, 9), (4, 4))
    assert one_polygon(rle.Mask((9, 9), dot)).tolist() == [[4, 4], [5, 4], [5, 5], [4, 5]]


def test_json_has_the_exact_mask_and_polygons_of_it():
    (found,), _ = MASKS.found(decoded_of([(30, 30, 40, 40, 0.9)]), LIMITS)
    found = found.native(native(64, 64))
    (box,) = MASKS.to_json(found, ["cat"])
    assert (box["class"], box["name"], box["box_xyxy_px"]) == (0, "cat", [10, 10, 50, 50])
    runs = rle.from_text(box["segmentation"]["counts"], (64, 64))
    assert box["segmentation"]["size"] == [64, 64] and (runs == found.masks[0].runs).all()
    assert box["area_px"] == rle.area(runs) > 0
    assert sum(_area(np.reshape(ring, (-1, 2))) for ring in box["polygons"]) == pytest.approx(
        box["area_px"], rel=0.1
    )
    assert (MASKS.bitmaps(found, (64, 64))[0] == rle.decode(runs, (64, 64))).all()
    assert MASKS.bitmaps(found.rows([]), (64, 64)).shape == (0, 64, 64)
    (values,) = MASKS.yolo_values(found, (64, 64))
    assert values.min() >= 10 / 64 and values.max() <= 50 / 64 and len(values) % 2 == 0


def test_drawing_colours_the_pixels_inside_alone():
    inside = np.zeros((40, 60), bool)
    inside[10:20, 10:30] = True
    mask = rle.Mask((40, 60), rle.encode(inside))
    image = np.full((40, 60, 3), 100, np.uint8)
    drawn = painted(image, [mask], np.array([0]))
    assert (image == 100).all() and (drawn[12:18, 12:28] != 100).any(axis=2).all()
    near = cv2.dilate(inside.astype(np.uint8), np.ones((5, 5))) > 0
    assert (drawn[~near] == 100).all()


def test_differences_of_masks_count_where_their_sign_does():
    rows = [(20, 20, 16, 16, 0.6), (45, 44, 20, 24, 0.7), (12, 50, 8, 8, 0.4)]
    ours = decoded_of(rows, images=2)
    for in_order in (True, False):
        assert MASKS.difference(ours, ours, (64, 64), in_order=in_order).mask == 0
        turned = ours._replace(coefficients=-ours.coefficients)
        found = MASKS.difference(ours, turned, (64, 64), in_order=in_order)
        assert found.mask and found.mask > 0.5 and found.place == found.score == 0
        near = ours._replace(prototypes=ours.prototypes + 1e-5)
        slight = MASKS.difference(ours, near, (64, 64), in_order=in_order).mask
        assert slight is not None and 0 <= slight < 1e-3
    order = torch.tensor([2, 0, 1])
    mixed = DecodedMasks(ours.decoded[:, order], ours.coefficients[:, order], ours.prototypes)
    assert MASKS.difference(ours, mixed, (64, 64), in_order=False).mask == 0
    assert MASKS.difference(ours, mixed, (64, 64), in_order=True).place > 1
    broken = ours._replace(prototypes=ours.prototypes * torch.nan)
    assert MASKS.difference(ours, broken, (64, 64), in_order=True).place == torch.inf


def test_options_that_masks_have_no_meaning_for_are_refused_by_name():
    MASKS.check({"--save-txt": True, "rows()": True, "--tile": False})
    for flag in ("--tile", "--nms", "--int8"):
        with pytest.raises(ConfigError, match=f"{flag}: it is for boxes, and the network finds masks"):
            MASKS.check({flag: True})


def test_a_letterbox_with_half_a_pixel_of_padding_moves_masks_by_half_a_pixel():
    back = Letterbox((1.0, 1.0), 0.5, 0.0, (40, 41), (40, 40))
    prototype = np.where(np.arange(41) < 21, 1, -1)[None, None] * np.ones((1, 40, 1), np.float32)
    mask = native_mask(np.ones(1, np.float32), prototype.astype(np.float32), np.array([0, 0, 40, 40.0]), back)
    # the logit is 0 at 21 px of the input, which is 20.5 px of the image: the centre of its column 20
    assert rle.box(mask.runs, 40) in ((0, 0, 20, 40), (0, 0, 21, 40))


def _area(ring):
    x, y = ring.T
    return float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2)
