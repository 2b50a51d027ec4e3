"""Merge layers of settings into one frozen, checked value that stores the source of each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from yolofleet.config.schema import AUTO, Recipe, TrainConfig, choices_of, flag_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import did_you_mean, shown

T = TypeVar("T", bound=BaseModel)
Value_co = TypeVar("Value_co", bound=BaseModel, covariant=True)
Training = TypeVar("Training", bound=TrainConfig)

DEFAULT = "default"
COMMAND_LINE = "command line"
# source of a setting of a resumed run that came from the command line then
FIRST_START = "first start of the run"
MEASURED = "measured memory (--batch auto)"  # source of a batch that the ranks have chosen
MAX_INT = 2**31 - 1


class Sourced(NamedTuple):
    """A raw value and its source: ``command line``, ``runs/a.yaml:12``, ``recipe scratch-low``."""

    value: Any
    source: str


Layer = Mapping[str, Sourced]


def layer_of(values: Mapping[str, Any], source: str) -> dict[str, Sourced]:
    """Return a layer whose values have one source."""
    return {name: Sourced(value, source) for name, value in values.items()}


RETIRED_OPTIMIZERS = {  # former values of --optimizer: what to use instead
    "Lion": "pip install pytorch-optimizer, and --optimizer pytorch_optimizer:Lion in a new run",
    "LAMB": "pip install pytorch-optimizer, and --optimizer pytorch_optimizer:Lamb in a new run",
    "LARS": "pip install pytorch-optimizer, and --optimizer pytorch_optimizer:LARS in a new run",
    "ScheduleFreeSGD": "--optimizer SGD --lr-schedule constant in a new run, which validates a moving average",
    "ScheduleFreeAdamW": "--optimizer AdamW --lr-schedule constant in a new run, which validates a moving average",
}


@dataclass(frozen=True)
class Resolved(Generic[Value_co]):
    """Final settings of a command.

    Attributes:
        notes: messages to print once, for example about obsolete keys and renamed flags.
    """

    value: Value_co
    sources: Mapping[str, str]
    notes: tuple[str, ...] = field(default=(), compare=False)

    def is_given(self, name: str) -> bool:
        """Return whether a user, a file or a recipe set this value; else it is the default."""
        return self.sources[name] != DEFAULT

    def spelled(self, name: str) -> str:
        """Return the setting and its value as on a command line, such as ``--batch 40``."""
        flag, value = self.flag(name), getattr(self.value, name)
        if AUTO in type(self.value).model_fields[name].metadata and value < 0:
            return f"{flag} {'auto' if value == -1 else -value / 100}"
        if isinstance(value, bool):
            return flag if value else f"--no-{flag[2:]}"
        return f"{flag} {value_text(value)}"

    def error(self, name: str, problem: str, *, hint: str) -> ConfigError:
        """Return an error about a setting: its flag and its value, what follows them, and the source of the value."""
        return ConfigError(f"{self.spelled(name)}{problem}", source=self.sources[name], hint=hint)

    def flag(self, name: str) -> str:
        """Return the flag of a setting, such as ``--async`` for ``asynchronous``."""
        return flag_of(name, type(self.value).model_fields[name])

    def sources_of(self, *names: str) -> str:
        """Return the sources of several settings, such as ``--micro-batch runs/a.yaml:12, --batch command line``."""
        sources = {name: self.sources[name] for name in names}
        if len(set(sources.values())) == 1:
            return sources[names[0]]
        return ", ".join(
            f"{self.flag(name)} {'by default' if source == DEFAULT else source}"
            for name, source in sources.items()
        )


def value_text(value: Any) -> str:
    """Return a value of a setting as a text of one line; that of a list has its members."""
    return " ".join(map(shown, value)) or "none" if isinstance(value, tuple) else shown(value)


def resolve(model: type[T], layers: Sequence[Layer], notes: Sequence[str] = ()) -> Resolved[T]:
    """Merge ``layers`` over the defaults and check the result; a later layer overrides an earlier one.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type or outside its range.
    """
    given: dict[str, Sourced] = {}
    for layer in layers:
        for name, entry in layer.items():
            if name not in model.model_fields and model.model_config.get("extra") != "allow":
                from yolofleet.config.words.unknown import instead_of  # errors alone need it

                raise ConfigError(
                    f"unknown setting {shown(name)}",
                    source=entry.source,
                    hint=(instead_of("setting", name) if hasattr(model, "verb") else None)
                    or did_you_mean(name, model.model_fields)
                    or f"yolofleet {getattr(model, 'verb', 'VERB')} --help lists the settings",
                )
            given[name] = entry
    for name, entry in given.items():
        if (field := model.model_fields.get(name)) is None:
            continue
        # pydantic accepts true as a number, and a mapping as any type
        if isinstance(entry.value, dict) or (isinstance(entry.value, bool) and field.annotation is not bool):
            raise _refused(model, name, entry, f"is not {_kind(field)}")
    try:
        value = model.model_validate({name: entry.value for name, entry in given.items()})
    except ValidationError as problem:
        raise _config_error(model, given, problem) from None
    for name, entry in given.items():
        number = getattr(value, name)
        # the run itself reports a hyperparameter that makes its gradients infinite
        if isinstance(number, int if issubclass(model, Recipe) else (int, float)) and abs(number) > MAX_INT:
            raise _refused(model, name, entry, f"is larger than {MAX_INT}")
        # the model stores a share of the memory as a negative number
        if name == "batch" and number < -1 and str(entry.value).startswith("-"):
            raise _refused(model, name, entry, "is below 1")
    sources = {**dict.fromkeys(model.model_fields, DEFAULT), **{name: given[name].source for name in given}}
    return Resolved(value, sources, tuple(notes))


def with_values(config: Resolved[T], values: Mapping[str, Any], sources: Mapping[str, str]) -> Resolved[T]:
    """Return the settings with other ``values``, whose ``sources`` are known; the result is checked as a whole.

    Raises:
        pydantic.ValidationError: a value is outside its range, which is a fault of the program.
    """
    value = type(config.value).model_validate({**dict(config.value), **values})
    return replace(config, value=value, sources={**config.sources, **sources})


def training_of(config: Resolved[Any], model: type[Training]) -> Resolved[Training]:
    """Return the training that a verb measures, predicts or repeats: its own settings, and defaults for all others."""
    own = {name: getattr(config.value, name) for name in model.model_fields if name in config.sources}
    sources = {name: config.sources.get(name, DEFAULT) for name in model.model_fields}
    return Resolved(model(**own), sources, config.notes)


def _config_error(model: type[BaseModel], given: Layer, problem: ValidationError) -> ConfigError:
    """Return an error that describes the first problem and names the other settings."""
    errors = problem.errors(include_url=False, include_context=True)
    names = list(dict.fromkeys(str(e["loc"][0]) for e in errors))
    first, name = errors[0], names[0]
    field, entry = model.model_fields[name], given[name]
    kind, context = str(first["type"]), first.get("ctx", {})
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        words = {"gt": "not above", "ge": "below", "lt": "not below", "le": "above"}
        bound = next(b for b in words if b in context)
        what = f"is {words[bound]} {context[bound]:g}"
        hint = f"allowed: {allowed_range(field)}"
    elif kind == "literal_error":
        choices = choices_of(field)
        what = f"is not one of {', '.join(choices)}"
        hint = (
            RETIRED_OPTIMIZERS.get(str(entry.value))
            or did_you_mean(str(entry.value), choices)
            or _written(model, name, entry.source, choices[0])
        )
    else:
        what, hint = f"is not {_kind(field)}", f"expected: {field.description}"
    if kind == "value_error":
        what = str(context["error"])
    if len(names) > 1:
        hint += f" (also wrong: {', '.join(names[1:])})"
    return _refused(model, name, entry, what, hint)


def _refused(
    model: type[BaseModel], name: str, entry: Sourced, what: str, hint: str | None = None
) -> ConfigError:
    return ConfigError(
        f"{_written(model, name, entry.source, shown(entry.value))} {what}",
        source=entry.source,
        hint=hint or f"expected: {model.model_fields[name].description}",
    )


def _written(model: type[BaseModel], name: str, source: str, value: str) -> str:
    """Return a setting as its source spells it: ``--batch 3``, ``--set lr0=3`` or, in a file, ``batch: 3``."""
    if source != COMMAND_LINE:
        return f"{name}: {value}"
    if issubclass(model, Recipe):
        return f"--set {name}={value}"
    return f"{flag_of(name, model.model_fields[name])} {value}"


def _kind(field: FieldInfo) -> str:
    if get_origin(field.annotation) is tuple:
        return "a list of strings"
    if choices := choices_of(field):
        return f"one of {', '.join(choices)}"
    words = {int: "a whole number", float: "a finite number", bool: "true or false"}
    has_form = any(getattr(constraint, "pattern", None) for constraint in field.metadata)
    return words.get(field.annotation, "of this form" if has_form else "a string")  # type: ignore[arg-type]


def allowed_range(field: FieldInfo) -> str:
    """Return the bounds of a number as text, such as ``at least 0, at most 1``; "" if there are none."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = ((word, getattr(m, name, None)) for name, word in words.items() for m in field.metadata)
    return ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
