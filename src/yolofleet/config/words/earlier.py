"""Settings that trainings of earlier versions had, and what became of them.

A command line, a call and a file of a user get the setting of today with a note, or an error that says what to do instead. The
``config.yaml`` of a run lists all its settings, so only what has no effect any more gives a note there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from yolofleet.config.resolve import COMMAND_LINE, DEFAULT, Layer, Sourced
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown


class Earlier(NamedTuple):
    """A setting of an earlier version.

    Attributes:
        default: its value that changes nothing today.
        new: the setting that replaces it; "" = none.
        becomes: the value of ``new`` for another value, or a function that returns it. That of a list is added to the list.
        instead: what to do where nothing replaces it.
    """

    default: Any
    new: str = ""
    becomes: Any = None
    instead: str = ""


def _every(unit: str, default: Any = "auto") -> Earlier:
    # -1 is YOLOv5's default
    return Earlier(default, "save_every", lambda n: () if str(n) == "-1" else (f"{n}{unit}",))


MULTI_SCALE = {"size_low": 0.5, "size_high": 1.5}
EARLIER = {
    "multi_scale": Earlier(False, "set", tuple(f"{key}={value}" for key, value in MULTI_SCALE.items())),
    "optimizer_class": Earlier("", "optimizer", str),
    "compile": Earlier(False, "passes", "compiled"),
    "cuda_graphs": Earlier("auto", "passes", lambda is_on: "graphs" if is_on else "plain"),
    "save_period": _every("epochs"),
    "save_steps": _every("steps", 0),
    "save_minutes": _every("min"),
    "tensorboard": Earlier(False, "log", ("tensorboard",)),
    "log_server": Earlier((), instead="--log mlflow=http://SERVER:5000"),
    "accept_changed_data": Earlier(False, "allow", ("changed-data",)),
    "linked_folders": Earlier(False, "allow", ("linked-folders",)),
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


def of_today(name: str, value: Any, source: str) -> Any:
    """Return the value of ``new`` for a value of an earlier setting; None: it changes nothing.

    Raises:
        ConfigError: the setting has no replacement, or it never had such a value.
    """
    earlier = EARLIER[name]
    if earlier.new and value is not None and (isinstance(earlier.default, bool) or name == "cuda_graphs"):
        try:
            value = value if _text(value) == earlier.default else TypeAdapter(bool).validate_python(value)
        except ValidationError:
            raise ConfigError(
                f"{_spelled(name, source)}: expected true or false, got {shown(value)}", source=source
            ) from None
    if value is None or _text(value) == _text(earlier.default):
        return None
    if not earlier.new:  # without the value, which may hold a secret
        raise ConfigError(
            f"{_spelled(name, source)}: yolofleet has no such setting any more",
            source=source,
            hint=earlier.instead,
        )
    return (earlier.becomes(value) if callable(earlier.becomes) else earlier.becomes) or None


def _spelled(name: str, source: str, value: Any = ()) -> str:
    """Return a setting as its source spells it, with its value, or once for each value of a list."""
    flag = "--" + name.replace("_", "-") if source == COMMAND_LINE else name
    if source == COMMAND_LINE and isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    values = value if isinstance(value, (list, tuple)) else (value,)
    return " ".join(f"{flag} {shown(one)}" for one in values) or flag


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
        ConfigError: a user asks for what yolofleet does not have any more, or for different things by two names.
    """
    today = {name: entry for name, entry in layer.items() if name not in EARLIER}
    if is_stored and (batch := layer.get("batch")) and isinstance(batch.value, int) and batch.value < -1:
        today["batch"] = Sourced(-batch.value / 100, batch.source)  # a share of the memory
    of_recipe: dict[str, Sourced] = {}
    notes = []
    for name, (value, source) in ((name, layer[name]) for name in EARLIER if name in layer):
        where = "" if source == COMMAND_LINE else f" ({source})"
        try:
            now = of_today(name, value, source)
        except ConfigError as problem:
            if not is_stored:
                raise
            if source != DEFAULT:
                notes.append(f"{name} ({source}) has no effect: {problem.hint}")
            continue
        new = EARLIER[name].new
        had = today[new].value if new in today else None
        if now is None:
            if not is_stored:
                notes.append(f"{_spelled(name, source, value)}{where} has no effect: it is the default")
            continue
        if is_stored and new == "set":
            of_recipe |= {key: Sourced(number, source) for key, number in MULTI_SCALE.items()}
            continue
        if had == "compiled" and now == "plain":  # compiled passes had no graphs of ours either way
            now = had
        if isinstance(now, tuple):
            texts = (had,) if isinstance(had, str) else had or ()
            if isinstance(texts, (list, tuple)):  # resolve refuses anything else
                today[new] = Sourced((*texts, *now), source)
        elif had not in (None, now) and not is_stored:
            raise ConfigError(
                f"{_spelled(name, source, value)} is now {_spelled(new, source, now)}, and {_spelled(new, source, had)} is also set",
                source=source,
                hint="leave one out",
            )
        else:
            today[new] = Sourced(now, source)
        if not is_stored:
            notes.append(f"{_spelled(name, source, value)}{where} is now {_spelled(new, source, now)}")
    return today, of_recipe, tuple(notes)


def of_validation(layer: Layer) -> Layer:
    """Return the settings of a stored validation without those of tiles, which validations do not have any more."""
    return {name: entry for name, entry in layer.items() if name not in ("tile", "overlap")}


def fingerprint_of_today(then: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint that a checkpoint of an earlier version would have today."""
    recipe = then["recipe"] | (MULTI_SCALE if then["settings"].get("multi_scale") else {})
    kernels = {k: was for k, was in then["kernels"].items() if k != "channels_last" or not was}
    settings = {k: was for k, was in then["settings"].items() if k not in EARLIER or k == "optimizer_class"}
    return {**then, "settings": settings, "recipe": recipe, "kernels": kernels}
