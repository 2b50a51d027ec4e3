"""Settings that trainings of earlier versions had, and what became of them.

A command line, a call and a file of a user get the setting of today with a note, or an error that says what to do instead. The
``config.yaml`` of a run lists all its settings, so only what has no effect any more gives a note there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from yolofleet.config.resolve import COMMAND_LINE, DEFAULT, Layer, Sourced
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown


@dataclass(frozen=True)
class Earlier:
    """A setting of an earlier version.

    Attributes:
        default: its value that changes nothing today.
        now: returns the settings of today for another value; None: nothing replaces the setting.
        instead: what to do where nothing replaces it.
    """

    default: Any
    now: Callable[[Any], dict[str, Any]] | None = None
    instead: str = ""


def _periods(unit: str) -> Callable[[Any], dict[str, Any]]:
    return lambda number: {} if str(number) in ("auto", "-1") else {"save_every": (f"{number}{unit}",)}


GONE = "yolofleet has no such setting any more"
MULTI_SCALE = {"size_low": 0.5, "size_high": 1.5}
EARLIER = {
    "multi_scale": Earlier(False, lambda _: {"set": tuple(f"{k}={v}" for k, v in MULTI_SCALE.items())}),
    "optimizer_class": Earlier("", lambda name: {"optimizer": name}),
    "compile": Earlier(False, lambda _: {"passes": "compiled"}),
    "cuda_graphs": Earlier("auto", lambda word: {"passes": "graphs" if _text(word) == "true" else "plain"}),
    "save_period": Earlier("auto", _periods("epochs")),
    "save_steps": Earlier(0, _periods("steps")),
    "save_minutes": Earlier("auto", _periods("min")),
    "tensorboard": Earlier(False, lambda _: {"log": ("tensorboard",)}),
    "log_server": Earlier((), instead="--log mlflow=http://SERVER:5000"),
    "accept_changed_data": Earlier(False, lambda _: {"allow": ("changed-data",)}),
    "linked_folders": Earlier(False, lambda _: {"allow": ("linked-folders",)}),
    "batch_memory": Earlier(0.9, instead="--batch 0.8 uses 80 % of the memory"),
    "results_to": Earlier("", instead="--checkpoint-to copies results and states to an address"),
    "spares": Earlier("", instead="--hosts a:8,b:8,c:8:spare"),
    "host_timeout": Earlier(0.0, instead="silence_s in the file of --fleet"),
    "min_hosts": Earlier(1, instead="--min-devices, with the devices of so many hosts"),
    "disk_cache": Earlier("", instead="the variable YOLOFLEET_DISK_CACHE=200GiB"),
    "verbose": Earlier(False, instead="yolofleet val --verbose shows the metrics of each class"),
    "check_steps": Earlier(50, instead="all ranks compare their weights every 50 steps"),
    "prefetch": Earlier(4, instead="each loader process prepares four micro-batches in advance"),
    "pin_memory": Earlier(True, instead="copies to GPUs use page-locked memory"),
    "channels_last": Earlier(True, instead="images and weights have the channels-last memory layout"),
    "cudnn_benchmark": Earlier("auto", instead="cuDNN chooses kernels by timing them, unless image sizes vary; --deterministic stops that"),
    "augment_on": Earlier(
        "cpu",
        instead="the CPU augments the images; single pixels of rotated, sheared and mixed images differ from those of a device",
    ),
    "asynchronous": Earlier(False, instead="tune chooses the trials of a generation together (--generation)"),
}  # fmt: skip


def of_today(name: str, value: Any, source: str) -> dict[str, Any]:
    """Return the settings of today for an earlier setting and its value; ``set`` changes the recipe.

    Raises:
        ConfigError: nothing replaces it, or the value is none of the setting's.
    """
    earlier = EARLIER[name]
    is_switch = isinstance(earlier.default, bool) or (name == "cuda_graphs" and _text(value) != "auto")
    if is_switch and value is not None and earlier.now is not None:
        value = _switch(name, value, source)
    if value is None or _text(value) == _text(earlier.default):
        return {}
    if earlier.now is None:
        # without the value, which may hold a secret
        raise ConfigError(f"{name}: {GONE}", source=source, hint=earlier.instead)
    return earlier.now(value)


def _switch(name: str, value: Any, source: str) -> bool:
    """Return the value of a switch. Raise ConfigError if it is neither true nor false."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        raise ConfigError(f"{name}: expected true or false, got {shown(value)}", source=source) from None


def _text(value: Any) -> str:
    """Return a value as a text that is equal for 4, 4.0 and "4", and for true, on and "True"."""
    text = "" if value in ((), []) else str(value).lower()
    try:
        return f"{float(text):g}"
    except ValueError:
        return {"on": "true", "off": "false"}.get(text, text)


def in_todays_words(layer: Layer, *, is_stored: bool = False) -> tuple[Layer, Layer, tuple[str, ...]]:
    """Return the settings of today, values of the recipe that replace those of a stored run, and notes.

    Args:
        is_stored: they are those of a run of perhaps an earlier version.

    Raises:
        ConfigError: a user asks for what yolofleet does not have any more, or for one thing by two names.
    """
    today = {name: entry for name, entry in layer.items() if name not in EARLIER}
    of_recipe: dict[str, Sourced] = {}
    notes = []
    for name, (value, source) in ((name, layer[name]) for name in EARLIER if name in layer):
        try:
            moved = of_today(name, value, source)
        except ConfigError as problem:
            if not is_stored:
                raise
            if source != DEFAULT:
                notes.append(f"{name} ({source}) has no effect: {problem.hint}")
            continue
        for new, its in moved.items():
            if is_stored and new == "set":
                of_recipe |= {key: Sourced(number, source) for key, number in MULTI_SCALE.items()}
            elif isinstance(its, tuple):
                had = today[new].value if new in today else ()
                texts = (had,) if isinstance(had, str) else had or ()
                if isinstance(texts, (list, tuple)):  # resolve refuses anything else
                    today[new] = Sourced((*texts, *its), source)
            elif name == "cuda_graphs" and its == "plain" and "compile" in layer and new in today:
                continue  # compiled passes had no graphs of ours either way
            elif new in layer and not is_stored:
                raise ConfigError(
                    f"{name} is now {new}, which is also set", source=source, hint="leave one out"
                )
            else:
                today[new] = Sourced(its, source)
        if moved and not is_stored:
            words = {
                new: " ".join(its) if isinstance(its, tuple) else shown(its) for new, its in moved.items()
            }
            now = ", ".join(f"{new} {word}" for new, word in words.items())
            notes.append(f"{name} {shown(value)} ({source}) is now {now}")
    return today, of_recipe, tuple(notes)


def arguments_of_today(name: str, value: Any) -> list[str]:
    """Return the arguments of today for an earlier flag of a training. Raise ConfigError if nothing replaces it."""
    from yolofleet.config.schema import TrainConfig, flag_of

    moved = of_today(name, value, COMMAND_LINE)
    return [
        f"{flag_of(new, TrainConfig.model_fields[new])}={one}"
        for new, its in moved.items()
        for one in (its if isinstance(its, tuple) else [its])
    ]


def of_validation(layer: Layer) -> Layer:
    """Return the settings of a stored validation without those of tiles, which validations do not have any more."""
    return {name: entry for name, entry in layer.items() if name not in ("tile", "overlap")}


def fingerprint_of_today(then: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint that a checkpoint of an earlier version would have today."""
    recipe = then["recipe"] | (MULTI_SCALE if then["settings"].get("multi_scale") else {})
    kernels = {k: was for k, was in then["kernels"].items() if k != "channels_last" or not was}
    settings = {k: was for k, was in then["settings"].items() if k not in EARLIER or k == "optimizer_class"}
    return {**then, "settings": settings, "recipe": recipe, "kernels": kernels}
