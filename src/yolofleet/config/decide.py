"""What a run does: its recipe, the images of a batch, of a step and of a micro-batch.

A pure function decides it from the settings of the user, the family and the weights of the network, and the number of training
images. Nothing changes the result but a measurement of memory (``--batch auto``), which checks its own.

A batch that the user typed changes here alone, and only if the training set has fewer images (``with_at_most``), which a note
says. A recipe changes the default batch (``with_references``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from yolofleet.config.recipe import DEFAULT_SOURCE, family_warnings, recipe_of
from yolofleet.config.resolve import DEFAULT, Resolved, with_values
from yolofleet.config.schema import (
    MICRO_BATCHES,
    Recipe,
    TrainConfig,
    WorkloadSettings,
    default_micro_batch,
    divisors,
    step_images_of,
)
from yolofleet.families.family import Family
from yolofleet.support.errors import ConfigError

Workload = TypeVar("Workload", bound=WorkloadSettings)
MOST_TIMES = 100  # the images of a training set: a larger batch is a mistake
OF_IMAGES = " training images"  # the end of the source of a batch that they limit
FEW_IMAGES = 1000  # with fewer training images, a family may have another recipe, and devices no work
# setting -> the field of a recipe that names its value for lr0, and the settings that decide it
REFERENCES = {
    "nominal_batch": ("reference_batch", ("nominal_batch",)),
    "optimizer": ("reference_optimizer", ("optimizer",)),
}


def chosen_instead(config: Resolved[Workload], recipe: Resolved[Recipe]) -> str:
    """Return what the user chose of what a recipe's learning rate depends on, with its source; "" for nothing."""
    if recipe.sources["lr0"] not in (DEFAULT, DEFAULT_SOURCE):
        return f"lr0 {recipe.value.lr0:g} ({recipe.sources['lr0']})"
    asked = (name for _, names in REFERENCES.values() for name in names if name in config.sources)
    return next((f"{config.spelled(n)} ({config.sources[n]})" for n in asked if config.is_given(n)), "")


def _is_users(config: Resolved[Any], name: str) -> bool:
    """Return whether the user set a value; one of a recipe may be another for the network of the run."""
    return config.is_given(name) and not config.sources[name].startswith("recipe ")


def with_references(config: Resolved[Workload], recipe: Resolved[Recipe]) -> Resolved[Workload]:
    """Return the settings with the images of a step and the optimizer that the recipe names, where the user named none.

    A default batch becomes the images of a step if these are fewer, and the next multiple of a micro-batch that the user named.
    """
    changed: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for setting, (field, names) in REFERENCES.items():
        source = recipe.sources[field]
        is_named = any(_is_users(config, name) for name in names if name in config.sources)
        if setting in config.sources and not is_named and source not in (DEFAULT, DEFAULT_SOURCE):
            changed[setting], sources[setting] = getattr(recipe.value, field), source
    micro_batch = config.value.micro_batch if config.is_given("micro_batch") else 0
    notes = config.notes
    if not _is_users(config, "batch"):
        together, most = max(micro_batch, 1), type(config.value).model_fields["batch"].default
        step_images = changed.get("nominal_batch", most)
        fitting = -(-min(step_images, most) // together) * together
        if fitting != most:
            changed["batch"] = fitting
            sources["batch"] = sources.get("nominal_batch", config.spelled("micro_batch"))
        if fitting > most:
            notes += (
                f"a batch has {fitting} images: the default {most} is no multiple of {config.spelled('micro_batch')}",
            )
    if changed.keys() & {"batch", "nominal_batch"}:
        changed["micro_batch"] = micro_batch  # 0: the default of the new values
    return replace(with_values(config, changed, sources), notes=notes)


@dataclass(frozen=True)
class Decided:
    """What a run does: its settings and its recipe, as nothing changes them any more; notes and warnings about the choice.

    Attributes:
        few_images: whether it has fewer than FEW_IMAGES training images, so that a device without work is no error.
    """

    config: Resolved[TrainConfig]
    recipe: Resolved[Recipe]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    few_images: bool = False


def decide(
    config: Resolved[TrainConfig],
    recipe: Resolved[Recipe],
    family: Family,
    network: Any,
    images: int,
    *,
    new_classes: bool = False,
    stored: Mapping[str, Any] | None = None,
) -> Decided:
    """Return the settings and the recipe of a run that starts, from the values of the user and what its files say.

    Args:
        family, network: of the run; ``network`` is a description.
        images: of the training set.
        new_classes: the run starts from weights of other classes.
        stored: hyperparameters of a run that is started again, so its weights are not read; None: it starts now.

    Raises:
        ConfigError: the batch does not fit the images, the micro-batch does not divide it, the network has no such
            hyperparameter, or it would be compiled for each image size of the recipe.
    """
    chosen = usual = recipe_of(recipe, family, network)
    notes: list[str] = []
    few, start, is_meant = family.small_scratch_recipe, "from scratch", True
    if config.value.weights:
        few, start, is_meant = family.small_recipe, "for new classes from weights", new_classes
    if few and DEFAULT_SOURCE in recipe.sources.values():
        small = recipe_of(recipe, family, network, few)
        instead = chosen_instead(config, recipe)
        if stored is not None:
            # earlier versions stored those of all families
            fits = small.value.model_dump(mode="json").items() <= stored.items()
        else:
            fits = is_meant and images < FEW_IMAGES
        if fits and instead:
            notes.append(
                f"recipe {few}, {start} on fewer than {FEW_IMAGES:,} images, is not used because of {instead}; "
                f"--recipe {few} chooses it"
            )
        elif fits:
            chosen = small
    check_compiled(config, chosen)
    fitting, of_images = with_at_most(with_references(config, chosen), images)
    check_micro_batch(fitting)
    if chosen is not usual:
        r, nominal = chosen.value, fitting.value.nominal_batch
        step = step_images_of(fitting.value.batch, nominal) if fitting.value.batch > 0 else nominal
        notes.append(
            f"recipe {few} {start} on {images:,} images (fewer than {FEW_IMAGES:,}): "
            f"steps of {step} images, {r.reference_optimizer}, lr0 {r.lr0:g}; --recipe {family.recipe} is the default otherwise"
        )
    warnings = tuple(family_warnings(recipe, family, network))
    return Decided(fitting, chosen, (*notes, *of_images), warnings, images < FEW_IMAGES)


def check_compiled(config: Resolved[TrainConfig], recipe: Resolved[Recipe]) -> None:
    """Raise ConfigError if the network is compiled and the recipe changes the image size."""
    sizes = recipe.value.size_low, recipe.value.size_high
    if config.value.passes == "compiled" and sizes != (1, 1):
        raise config.error(
            "passes",
            f" and a recipe with images of {sizes[0]:g} to {sizes[1]:g} x --img are mutually exclusive: each image size would be compiled",
            hint="--set size_low=1 --set size_high=1, or leave out --passes",
        )


def with_at_most(config: Resolved[Workload], images: int) -> tuple[Resolved[Workload], tuple[str, ...]]:
    """Return the settings with a batch of at most ``images``, and a note about it. A step has as many batches as before.

    Raises:
        ConfigError: the batch, or a micro-batch that the user named, is too large for so few images.
    """
    c = config.value
    if c.batch <= images:
        return config, ()
    micro_batch = c.micro_batch if config.is_given("micro_batch") else 0
    if c.batch > MOST_TIMES * images or micro_batch > images:
        name = "micro_batch" if micro_batch > images else "batch"
        raise config.error(
            name,
            f" is more than {'the' if micro_batch > images else f'{MOST_TIMES} times the'} {images} training images",
            hint=f"{config.flag(name)} {images}, or more images",
        )
    if micro_batch > 0:
        batch = images // micro_batch * micro_batch
    else:
        batch = next((size for size in range(images, 0, -1) if default_micro_batch(size, size)), images)
    values = {"batch": batch, "nominal_batch": c.nominal_batch}
    if not _is_users(config, "nominal_batch"):
        values["nominal_batch"] = batch * round(step_images_of(c.batch, c.nominal_batch) / c.batch)
    nominal = values["nominal_batch"]
    values["micro_batch"] = micro_batch or default_micro_batch(batch, nominal) or batch
    changed = with_values(config, values, dict.fromkeys(("batch", "nominal_batch"), f"{images}{OF_IMAGES}"))
    note = (
        f"{config.spelled('batch')} ({config.sources['batch']}) is more than the {images} training images: a batch has {batch}, "
        f"a step {step_images_of(batch, nominal)}"
    )
    return changed, (note,)


def check_micro_batch(config: Resolved[Any]) -> None:
    """Raise ConfigError unless the micro-batch divides the batch."""
    batch, micro = config.value.batch, config.value.micro_batch
    if batch < 0:
        return
    if micro <= 0:
        if not default_micro_batch(batch, batch):
            raise _no_micro_batch(batch, config.sources["batch"])
        return
    if batch % micro == 0:
        return
    near = sorted(sorted(divisors(batch), key=lambda d: (abs(d - micro), d))[:3])
    raise ConfigError(
        f"--micro-batch {micro} does not divide --batch {batch} (remainder {batch % micro})",
        source=config.sources_of("micro_batch", "batch"),
        hint=f"--batch {(batch // micro + 1) * micro}, or --micro-batch {_either(near)}",
    )


def _no_micro_batch(batch: int, source: str) -> ConfigError:
    """Return the error for a batch without a default micro-batch."""
    smaller = next((n for n in range(batch - 1, 0, -1) if default_micro_batch(n, n)), None)
    larger = next(n for n in range(batch + 1, 2 * batch + MICRO_BATCHES.start) if default_micro_batch(n, n))
    sizes = f"{MICRO_BATCHES.start} to {MICRO_BATCHES.stop - 1}"
    return ConfigError(
        f"--batch {batch} cannot be cut into micro-batches of {sizes} images: none of these divides it",
        source=f"--batch {source}",
        hint=(f"--batch {smaller} or {larger}" if smaller else f"--batch {larger}")
        + f", or choose --micro-batch: {_either(divisors(batch))}",
    )


def _either(numbers: list[int]) -> str:
    """Return the numbers as text, such as ``8, 10 or 20``."""
    *first, last = map(str, numbers)
    return " or ".join([", ".join(first), last]) if first else last
