"""Which images and which orders a run trains on follows from its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from label_rows import index_of
from small_data import yolo_set

from yolofleet.config.schema import Recipe, TrainConfig
from yolofleet.data.datasets.index import DataIndex
from yolofleet.data.input.order import RectOrders, SampledOrders
from yolofleet.support.errors import DataError
from yolofleet.training.rank.inputs import training_samples, used_part


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataIndex:
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    labels = {f"{number}": None for number in range(9)} | {"9": "0 0.5 0.5 0.2 0.2"}
    return index_of(yolo_set(tmp_path, dict(labels)))


def config(**values: object) -> TrainConfig:
    return TrainConfig.model_validate({"data": "x", "model": "yolov5n", "batch": 8, **values})


def test_the_seed_decides_which_images_a_fraction_keeps(index: DataIndex) -> None:
    assert used_part(index, config()) is index
    kept = {}
    for seed in range(20):
        try:
            kept[seed] = used_part(index, config(fraction=0.5, seed=seed)).paths
        except DataError as problem:
            assert "--fraction 0.5 leaves 5 training images, none with a label" in problem.what
    assert 2 < len(kept) < 18 and all(len(paths) == 5 for paths in kept.values())
    assert len(set(kept.values())) > 2


def test_settings_decide_the_orders(index: DataIndex) -> None:
    def orders(**values: object) -> object:
        made = training_samples(config(**values), Recipe(), index, None, img=64, stride=32)  # type: ignore[arg-type]
        return made.orders

    assert isinstance(orders(sampler="balanced"), SampledOrders)
    rect = orders(rect=True, sampler="weights", micro_batch=4)
    assert isinstance(rect, RectOrders) and isinstance(rect.sampled, SampledOrders)
    assert (rect.micro_batch, rect.stride, rect.sampled.sampler) == (4, 32, "weights")
