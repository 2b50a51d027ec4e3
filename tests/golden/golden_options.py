"""What can be typed and called: options, old spellings, built-in names and the Python interface; no wording."""

from __future__ import annotations

import inspect
import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import click
from commands import called

import yolofleet
from yolofleet.cli.app import APP
from yolofleet.config.recipe import load_recipe, recipe_names
from yolofleet.config.schema import Frozen, flag_of, may_be_in_files, rules_of
from yolofleet.config.words.earlier import EARLIER
from yolofleet.config.words.spellings import SPELLINGS
from yolofleet.data.datasets.labels import KINDS
from yolofleet.families.networks.description import preset_names
from yolofleet.families.table import FAMILIES
from yolofleet.fleet.hosts.fleet import HOST_KEYS
from yolofleet.fleet.launch.schedulers.table import SCHEDULERS, load
from yolofleet.support.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    "train.py",
    "val.py",
    "detect.py",
    "export.py",
    *(f"segment/{verb}.py" for verb in ("train", "val", "predict")),
)
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
# values for spellings that do not accept "7"; an empty text is a flag without a value
SAMPLES = {
    "-c": ["ppyoloe_plus_crn_s_80e_coco.yml", "yolov3_darknet53_270e_coco.yml"],
    "--batch": ["7", "-1"],
    "--batch-size": ["7", "-1"],
    "--device": ["cuda:0, 1", ""],
    "--include": ["onnx", "engine", "onnx engine"],
    "--ips": ["a,b"],
    "--save-format": ["0", "1"],
    "--task": ["val", "test", "study"],
    "--weights": ["a.pt", "a.pt b.pt"],
}


def options_text(_: Path) -> str:
    """Return every option of every verb, a line each; options that train has alike are named in one line."""
    sections = _named_if_alike([_verb(path, command) for path, command in verbs()])
    sections += [[f"[keys of --{name}]", *_keys(load(name).settings)] for name in SCHEDULERS]
    sections.append(["[keys of a host in a fleet file]", *sorted(HOST_KEYS)])
    sections.append(["[keys of a recipe]", *_recipe_keys()])
    earlier = sorted(f"{name}  ->  {row.new or 'nothing'}" for name, row in EARLIER.items())
    sections.append(["[earlier settings of a training, and what replaces them]", *earlier])
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def verbs(group: click.Group = APP, path: str = "yolofleet") -> Iterator[tuple[str, click.Command]]:
    """Return the verbs in their order, with those of groups; what has two names comes twice."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from verbs(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _verb(path: str, command: click.Command) -> list[str]:
    model: type[Frozen] | None = getattr(command, "model", None)
    rows = []
    for parameter in command.params:
        field = model.model_fields.get(str(parameter.name)) if model else None
        if isinstance(parameter, click.Argument):
            rows.append(_argument(parameter))
        elif model is None or field is None:
            rows += [] if parameter.name in EARLIER else [_option(parameter)]
        else:
            assert isinstance(parameter, click.Option)
            rows.append(
                _setting(
                    path, "/".join([*parameter.opts, *parameter.secondary_opts]), model, str(parameter.name)
                )
            )
    title = f"[{path}]"
    train = APP.get_command(click.Context(APP), "train")
    if model is not None and model is getattr(train, "model", None) and command is not train:
        title, rows = (
            f"[{path}, which has all settings of train]",
            [row for row in rows if "  files " not in row],
        )
    return [title, *sorted(rows)]


def _named_if_alike(sections: list[list[str]]) -> list[list[str]]:
    """Return the sections of verbs in which the rows that train has, too, are one line with their flags."""
    train = next(rows for title, *rows in sections if title == "[yolofleet train]")
    of_train = {re.sub("  resume (as before|may change)", "", row) for row in train}
    found = []
    for title, *rows in sections:
        alike = [row for row in rows if row in of_train] if rows != train else []
        if len(alike) > 3:
            flags = " ".join(row.partition("  ")[0] for row in alike)
            rows = [*(row for row in rows if row not in alike), f"as train has them: {flags}"]
        found.append([title, *rows])
    return found


def _setting(path: str, flags: str, model: type[Frozen], name: str) -> str:
    field = model.model_fields[name]
    words = [flags, *_type(model, name), f"files {'yes' if may_be_in_files(field) else 'no'}"]
    if path == "yolofleet train":
        words.append(f"resume {'as before' if rules_of(field).fixed is True else 'may change'}")
    if flag_of(name, field) != "--" + name.replace("_", "-"):
        words.append(f"named {name} in files and in Python")
    return "  ".join(words)


@cache
def _schema(model: type[Frozen]) -> dict[str, Any]:
    return model.model_json_schema()


def _keys(model: type[Frozen]) -> list[str]:
    return sorted("  ".join([name, *_type(model, name)]) for name in model.model_fields)


def _recipe_keys() -> list[str]:
    return sorted({key for family in FAMILIES.values() for key in _keys(family.hyperparameters)})


def _type(model: type[Frozen], name: str) -> list[str]:
    """Return type, limits and default of a setting as words."""
    schema = _schema(model)["properties"][name]
    kind = next((part for part in schema.get("anyOf", []) if part.get("type") != "null"), schema)
    words = "|".join(map(str, kind["enum"])) if "enum" in kind else str(kind.get("type", "any"))
    if words == "array":
        words = f"list of {kind['items']['type']}"
    limits = [f"{sign} {kind[key]:g}" for key, sign in BOUNDS.items() if key in kind]
    limits += [kind["pattern"]] if "pattern" in kind else []
    return [" ".join([words, *limits]), f"default {_shown(model.model_fields[name].default)}"]


def _shown(value: object) -> str:
    return f"{value:.12g}" if type(value) is float else repr(value)


def _argument(parameter: click.Argument) -> str:
    words = [f"{parameter.human_readable_name.upper()}", "required" if parameter.required else "optional"]
    return "  ".join([*words, *(["several"] if parameter.nargs != 1 else [])])


def _option(parameter: click.Parameter) -> str:
    """Return an option that is not a setting."""
    assert isinstance(parameter, click.Option)
    flags, kind = "/".join([*parameter.opts, *parameter.secondary_opts]), parameter.type
    if parameter.is_flag:
        return f"{flags}  switch"
    if isinstance(kind, click.Choice):
        words = "|".join(map(str, kind.choices))
    elif isinstance(kind, click.IntRange):
        words = f"integer {'' if kind.min is None else kind.min}..{'' if kind.max is None else kind.max}"
    else:
        words = kind.name
    default = parameter.default if isinstance(parameter.default, str | int | float) else None
    more = ["required"] if parameter.required else [f"default {default!r}"]
    return "  ".join([flags, words, *more, *(["repeatable"] if parameter.multiple else [])])


def spellings_text(_: Path) -> str:
    """Return what each old spelling sets, by parsing it: a line for each number of values that it takes."""
    lines = []
    for verb, spellings in SPELLINGS.items():
        lines.append(f"[{verb}]")
        for flag, spelling in sorted(spellings.items()):
            counts = {"none": [""], "one": ["7"], "maybe": ["", "7"], "some": ["7", "7 8"]}[spelling.values]
            for sample in SAMPLES.get(flag, counts):
                values = [sample] if spelling.values == "one" else sample.split()
                shown = " ".join([flag, *(value or "''" for value in values)])
                lines.append(f"{shown}  ->  {_parsed(verb, [flag, *values])}")
        lines.append("")
    return "\n".join(lines)


def _parsed(verb: str, argv: list[str]) -> str:
    command = APP.get_command(click.Context(APP), verb)
    assert command is not None
    notes = io.StringIO()
    try:
        with redirect_stderr(notes):
            parsed = command.make_context(verb, argv).params
    except (ConfigError, click.UsageError):
        return "refused"
    given = {
        name: value for name, value in parsed.items() if value not in (None, (), "", False) or value is False
    }
    given = {name: value for name, value in given.items() if name not in ("dry_run", "download")}
    words = " ".join(f"{name}={_words(value)}" for name, value in sorted(given.items())) or "no effect"
    return words + "  with a note" * bool(notes.getvalue())


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def names_text(_: Path) -> str:
    """Return names that users type or import: scripts, extras, variables, models, recipes, the Python interface."""
    sections = {
        "commands": _declared("project.scripts"),
        "scripts, and the verb that each is": [f"{script} = {_verb_of(script)}" for script in SCRIPTS],
        "extras": sorted(_declared("project.optional-dependencies")),
        "environment variables": sorted(
            {name for text in _sources() for name in re.findall(r"YOLOFLEET_[A-Z_]+", text)}
        ),
        "models": preset_names(),
        **{f"recipe {name}, where it is not the default": _recipe(name) for name in recipe_names()},
        "published weights": sorted(_published()),
        "kinds of problems with labels": sorted(KINDS),
        "data sets": sorted(
            path.stem for path in (ROOT / "src" / "yolofleet").rglob("config/datasets/*.yaml")
        ),
        "Python": sorted(_interface()),
    }
    return "\n\n".join("\n".join([f"[{title}]", *lines]) for title, lines in sections.items()) + "\n"


def _declared(table: str) -> list[str]:
    """Return the names in a table of pyproject.toml; Python 3.10 has no reader for it."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r"^([\w-]+) =", text.split(f"[{table}]\n")[1].split("\n[")[0], re.MULTILINE)


def _published() -> list[str]:
    return [row["name"] for row in json.loads(called("weights", "list", "--json", "-").out)["weights"]]


def _sources() -> Iterator[str]:
    for path in (ROOT / "src" / "yolofleet").rglob("*.py"):
        yield path.read_text(encoding="utf-8")


def _recipe(name: str) -> list[str]:
    """Return the values of a recipe that differ from the defaults of the families."""
    default = {
        key: field.default for f in FAMILIES.values() for key, field in f.hyperparameters.model_fields.items()
    }
    return sorted(
        f"{key} = {_shown(value)}" for key, value in load_recipe(name).value if value != default[key]
    )


def _verb_of(script: str) -> str:
    """Ask the script for help in this process, and return the verb that answers."""
    out = called("--help", script=ROOT / script).out
    return out.splitlines()[0].removeprefix("Usage: ").removesuffix(" [OPTIONS]")


def _interface() -> Iterator[str]:
    """Return a line for each public name of the package, each of their methods, and each attribute of results."""
    from yolofleet.cli.api import BenchResult, ExportResult, TrainResult, ValResult
    from yolofleet.inference.predict.predictor import Prediction

    for name in yolofleet.__all__:
        value = getattr(yolofleet, name)
        if callable(value):
            yield f"{name}({_parameters(value)})"
    results = (TrainResult, ValResult, ExportResult, BenchResult, Prediction)
    own = (yolofleet.Model, yolofleet.Callback, yolofleet.TrainingRecipe)
    for kind in (*own, *results):
        for name, member in vars(kind).items():
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                yield f"{kind.__name__}.{name}"
            elif callable(member):
                yield f"{kind.__name__}.{name}({_parameters(member)})"
    yield from (f"{kind.__name__}.{field.name}" for kind in results for field in fields(kind))


def _parameters(function: Any) -> str:
    parts = list(inspect.signature(function).parameters.values())
    if is_settings := "__signature__" in vars(function):  # options.txt has these
        parts = [part for part in parts if part.kind is not part.KEYWORD_ONLY]
    texts = [
        f"{'**' * (part.kind is part.VAR_KEYWORD)}{part.name}"
        + ("" if part.default is part.empty else f"={part.default!r}")
        for part in parts
    ]
    return ", ".join([*texts, *["**settings"] * is_settings])
