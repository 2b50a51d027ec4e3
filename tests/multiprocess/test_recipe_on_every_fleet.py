"""One table: each part of a recipe gives the same weights on one process, and on two that are killed and resumed.

Each run is the whole command in forked processes, which find torch loaded. The longer suites run the whole table.
What a table of short runs cannot show stands elsewhere: ``--minutes`` in test_run_ends.py, ``tune`` in test_tune.py, a user's
own code in test_user_code.py, RT-DETR and D-FINE in test_detr_families.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
from commands import DEADLINE_S, kill, results, small_shapes, started_ranks
from small_files import TINY_YAML

from yolofleet.config.schema import Optimizer
from yolofleet.inference.evaluate.gather import Evaluation
from yolofleet.training import loop, validations

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have loaded torch")
# 20 images in steps of 8: an epoch ends within a step
RUN = ["--img", "64", "--batch", "8", "--nominal-batch", "8", "--micro-batch", "2", "--epochs", "3", "--threads", "1",
       "--workers", "0", "--reduce", "exact", "--no-plots", "--save-every", "1steps", "--keep-last", "99"]  # fmt: skip
KILLED_AFTER = 4  # steps, in the middle of the second epoch
LOW = "lr0=0.001 warmup_bias_lr=0 warmup_epochs=0"  # rates that every optimizer and family stands
FAMILIES = ("yolov5n", "yolov3-tiny", "darknet-yolov3-tiny", "ppyoloe-s")
WITH_SETTINGS = {
    "sampler weights": "--image-weights",
    "sampler balanced": "--sampler balanced",
    "rectangles": "--rect",
    "rectangles of several scales": "--rect --multi-scale --fraction 0.6",
    "several scales": "--multi-scale",
    "fraction": "--fraction 0.6",
    "one class": "--single-cls",
    "frozen layers": "--freeze 3",
    "frozen pattern": "--freeze model.?.bn.*,*.conv.weight",
    "scaled rate": "--lr-scale sqrt",
    "early stop": "--epochs 30 --patience 1 --set lr0=1e-9 --set warmup_bias_lr=0",
    "transfer": "--weights other.safetensors --freeze backbone",
    **{f"schedule {name}": f"--lr-schedule {name}" for name in ("linear", "cosine", "constant", "cooldown")},
}
WITH_VALUES = {
    "copy-paste": "copy_paste=0.5",
    "cutout": "cutout=0.5",
    "mosaic of nine, mix-up": "mosaic9=0.5 mixup=0.5",
    "geometry": "degrees=9 shear=2 perspective=0.0005 flipud=0.3",
    "flat rate, several sizes, last epochs only flipped": "rates=step flat_fraction=0.5 warmup_steps=2 size_low=0.5 "
    "close_augment=0.4",
    "label smoothing, focal loss": "label_smoothing=0.1 fl_gamma=1.5",
    "factors of layers": "lr_factors=backbone:0.1,*.bn.*:2",
    "decay of layers": "lr_layer_decay=0.8",
    "no average": "ema_decay=0",
    "average threshold": "ema_rule=threshold",
    "average constant": "ema_rule=constant ema_decay=0.9",
}


def values(text: str) -> str:
    return " ".join(f"--set {value}" for value in text.split())


TABLE = {
    **WITH_SETTINGS,
    "sampler repeat-factor": f"--sampler repeat-factor {values('repeat_threshold=0.9')}",
    **{name: values(text) for name, text in WITH_VALUES.items()},
    **{
        f"last epochs without mosaics, {name}": f"--model {name} {values(f'close_mosaic=1 {LOW}')}"
        for name in FAMILIES
    },
    **{f"optimizer {name}": f"--optimizer {name} {values(LOW)}" for name in get_args(Optimizer)},
}
ALBUMENTATIONS = pytest.param(
    "--set|albumentations=[GaussNoise p=0.5, Blur p=0.3]",
    id="albumentations",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(find_spec("albumentations") is None, reason="needs yolofleet[albumentations]"),
    ],
)
# many parts at once, for every change of the code
TOGETHER = {
    "images": f"--image-weights --fraction 0.9 --optimizer pytorch_optimizer:Lamb --freeze *.0.bn.* "
    f"{values(f'copy_paste=0.5 cutout=0.5 mosaic9=0.3 mixup=0.3 close_mosaic=1 lr_layer_decay=0.8 {LOW}')}",
    "steps": f"--rect --sampler repeat-factor --optimizer NAdam --lr-schedule constant "
    f"--weights other.safetensors {values(f'repeat_threshold=0.9 lr_factors=backbone:0.5 {LOW}')}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Polygons in ``small shapes``, a small network, and its weights for other classes."""
    import_module("torch._dynamo")  # else each process loads it for its optimizer: a second
    folder = tmp_path_factory.mktemp("recipes")
    data = small_shapes(folder)
    for file in data.parent.glob("labels/train/*.txt"):
        rows = [list(map(float, line.split())) for line in file.read_text().splitlines()]
        file.write_text(
            "\n".join(
                f"{c:.0f} {x - w / 2} {y} {x} {y - h / 2} {x + w / 2} {y} {x} {y + h / 2}"
                for c, x, y, w, h in rows
            )
        )
    (folder / "tiny.yaml").write_text(TINY_YAML)
    more = data.with_name("more.yaml")
    more.write_text(data.read_text() + "  4: moon\n")
    ran(
        folder,
        ["train", "--data", str(more), "--cfg", "tiny.yaml", *RUN, "--max-steps", "1", "--name", "other"],
    )
    (folder / "runs/train/other/weights/last.safetensors").rename(folder / "other.safetensors")
    return folder


@pytest.fixture(autouse=True)
def different_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so few steps every AP is 0. So each validation gets figures here that depend on its weights."""

    def figures(evaluation: Evaluation) -> list[float]:
        assert evaluation.losses is not None
        loss = sum(evaluation.losses.values())
        return [1e5 * loss * (1 + number) % 1 for number in range(len(evaluation.metrics.per_class))]

    monkeypatch.setattr(validations, "_class_ap_of", figures)


def ran(folder: Path, argv: list[str], *, processes: int = 1, killed: bool = False) -> None:
    """Run a command line in as many ranks, until its end or until they kill themselves."""
    log = folder / f"log {len(list(folder.glob('log *')))}"

    def first() -> None:
        if killed:
            run = folder / "runs/train" / argv[argv.index("--name") + 1]
            loop.train_step = killed_later(loop.train_step, run)

    places = [folder] * processes
    ranks = started_ranks(places, *argv, "--device", "cpu", home=folder, log=log, first=first)
    try:
        codes = [rank.wait(timeout=DEADLINE_S) for rank in ranks]
    finally:
        kill(ranks)
    assert codes == [-signal.SIGKILL if killed else 0] * processes, f"{argv}: {codes}\n{log.read_text()}"


def killed_later(train_step: Callable, run: Path) -> Callable:
    steps = 0

    def step(*args, **kwargs):
        nonlocal steps
        deadline_s = time.monotonic() + DEADLINE_S
        while steps == KILLED_AFTER and time.monotonic() < deadline_s:
            if list(run.glob(f"checkpoints/step-*{KILLED_AFTER}.safetensors")):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
        steps += 1
        return train_step(*args, **kwargs)

    return step


@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(words, id=f"together: {name}") for name, words in TOGETHER.items()),
        *(pytest.param(words, id=name, marks=pytest.mark.slow) for name, words in TABLE.items()),
        ALBUMENTATIONS,
    ],
)
def test_one_process_and_two_that_are_killed_and_resumed_train_the_same_weights(
    folder: Path, request: pytest.FixtureRequest, words: str
) -> None:
    name = request.node.callspec.id
    data = str(folder / "small shapes" / "data.yaml")
    given = words.split("|") if "|" in words else words.split()
    network = [] if "--model" in given else ["--cfg", "tiny.yaml"]
    args = ["train", "--data", data, *network, *RUN, *given]
    ran(folder, [*args, "--name", f"{name} one"])
    ran(folder, [*args, "--name", f"{name} killed"], processes=2, killed=True)
    own = [word for word in given if ":Lamb" in word]
    code = ["--optimizer", *own] if own else []  # a resume loads only code that is named again
    ran(folder, ["train", "--resume", f"runs/train/{name} killed", *code], processes=2)
    one, killed = (results(folder / "runs/train" / f"{name} {run}") for run in ("one", "killed"))
    assert one["steps"] > KILLED_AFTER
    for key in ("steps", "weights_sha256", "metrics"):
        assert killed[key] == one[key], key
