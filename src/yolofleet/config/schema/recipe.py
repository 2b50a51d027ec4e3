"""The hyperparameters of a training."""

from __future__ import annotations

import math
from typing import Literal

from yolofleet.config.schema.fields import Frozen, Optimizer, Unit, setting


class Recipe(Frozen):
    """Hyperparameters: together with data, model and seed they decide the result of a run.

    These are the ones that every network has. A family adds those of its loss in a subclass (``families/*/hyperparameters.py``).
    The defaults are the values of YOLOv5's recipe ``scratch-low``; tests/parity compares the results with the original.
    Each model family has a default recipe. A recipe file has any of these keys; an unknown key is an error.
    """

    # optimiser
    lr0: float = setting(0.01, "initial learning rate", gt=0)
    lrf: float = setting(0.01, "final learning rate as a fraction of lr0", ge=0, le=1)
    momentum: float = setting(0.937, "SGD momentum, Adam beta1", ge=0, lt=1)
    nesterov: bool = setting(True, "SGD with Nesterov's momentum")
    weight_decay: float = setting(0.0005, "weight decay of convolution weights, for the nominal batch", ge=0)
    decay_biases: bool = setting(False, "apply weight decay to the biases of convolutions too")
    rates: Literal["epoch", "step"] = setting(
        "epoch",
        "epoch: YOLOv5's schedule, one value per epoch, linear or cosine; step: PP-YOLOE's schedule, one value per "
        "step, a linear rise from 0 and then a cosine",
    )
    flat_fraction: Unit = setting(
        0.0, "with rates=step: fraction of the run before the cosine begins; 1: constant after the warm-up"
    )
    horizon: float = setting(
        1.0, "with rates=step: end of the cosine, in multiples of the length of the run", ge=1
    )
    reference_epochs: int = setting(
        0,
        "with rates=step: number of epochs that warmup_epochs was chosen for; warm-up scales with --epochs",
        ge=0,
    )
    warmup_epochs: float = setting(
        3.0, "length of the warm-up, epochs; with rates=epoch at least 100 batches", ge=0
    )
    warmup_steps: int = setting(
        0,
        "with rates=step: length of the warm-up, steps, at most a tenth of the run; 0 = warmup_epochs",
        ge=0,
    )
    warmup_momentum: float = setting(0.8, "momentum at the first step", ge=0, lt=1)
    warmup_bias_lr: float = setting(0.1, "learning rate of biases at the first step", ge=0)
    lr_factors: str = setting(
        "",
        "factors of the learning rates of layers: PART:FACTOR, ...; a part is backbone, or a prefix or pattern (model.*.bias) of "
        "parameter names; the factors of all parts that fit are multiplied",
    )
    lr_layer_decay: float = setting(
        1.0,
        "factor of the learning rate from each layer to the one before it; the last layer has lr0",
        gt=0,
        le=1,
    )
    clip_norm: float = setting(10.0, "limit of the total gradient norm; 0 = off", ge=0)
    ema_decay: float = setting(
        0.9999, "decay of the moving average of the weights; 0 = no average", ge=0, lt=1
    )
    ema_rule: Literal["ramp", "threshold", "constant"] = setting(
        "ramp",
        "factor of the decay after n steps; ramp: 1 - exp(-n / ema_tau); threshold: at most (1 + n) / (10 + n); constant: 1",
    )
    ema_tau: float = setting(2000.0, "steps over which the decay ramps up", gt=0)
    reference_batch: int = setting(
        64, "nominal batch for which lr0 was chosen; the default of --nominal-batch", ge=1
    )
    reference_optimizer: Optimizer = setting(
        "SGD", "optimizer for which lr0 was chosen; the default of --optimizer"
    )
    # sampling
    repeat_threshold: float = setting(
        0.001,
        "--sampler repeat-factor: classes in a smaller share of the images occur more often",
        gt=0,
        le=1,
    )
    # augmentation
    size_low: float = setting(
        1.0, "smallest image size in training, as a fraction of --img; drawn for each step", gt=0, le=1
    )
    size_high: float = setting(1.0, "largest image size in training, as a fraction of --img", ge=1, le=4)
    hsv_h: Unit = setting(0.015, "hue gain, fraction")
    hsv_s: Unit = setting(0.7, "saturation gain, fraction")
    hsv_v: Unit = setting(0.4, "value gain, fraction")
    degrees: float = setting(0.0, "rotation, +- degrees", ge=0, le=180)
    translate: Unit = setting(0.1, "translation, +- fraction of the image")
    scale: Unit = setting(0.5, "scale gain, +-")
    shear: float = setting(0.0, "shear, +- degrees", ge=0, le=90)
    perspective: float = setting(0.0, "perspective, +-", ge=0, le=0.001)
    flipud: Unit = setting(0.0, "probability of a vertical flip")
    fliplr: Unit = setting(0.5, "probability of a horizontal flip")
    mosaic: Unit = setting(1.0, "probability of a mosaic")
    mosaic9: Unit = setting(0.0, "fraction of the mosaics that have nine images instead of four")
    mixup: Unit = setting(0.0, "probability of mixing two mosaics")
    close_mosaic: float = setting(
        0, "number of last epochs without mosaic and mixup; below 1: fraction of the epochs", ge=0
    )
    close_augment: float = setting(
        0,
        "number of last epochs whose images are only flipped, and all have the size --img; below 1: fraction of the epochs",
        ge=0,
    )
    copy_paste: Unit = setting(
        0.0, "probability of pasting each object of another image into an image; needs labels with polygons"
    )
    cutout: Unit = setting(0.0, "probability of a grey square in an image")
    albumentations: tuple[str, ...] = setting(
        (),
        "transforms of albumentations in order, such as [Blur p=0.01, CLAHE p=0.01] (needs the package albumentations)",
    )


class GivenRecipe(Recipe, extra="allow"):
    """Hyperparameters while the family of the network is not known: the shared ones, and others as somebody gave them."""


def closing_epoch(last: float, epochs: int) -> float:
    """Return the epoch, counted from 0, with which the last epochs of a run begin; infinity if ``last`` selects no epoch.

    Args:
        last: ``close_mosaic`` or ``close_augment``: their number, or below 1 their fraction.
    """
    closed = last if last >= 1 else round(last * epochs)
    return epochs - closed if closed else math.inf
