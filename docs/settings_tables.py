"""Write the tables of recipe.md and coming-from/yolov5-flags.md from the settings: ``python docs/settings_tables.py``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from yolofleet.config.resolve import COMMAND_LINE
from yolofleet.config.schema import Recipe
from yolofleet.config.words.earlier import EARLIER, of_today
from yolofleet.config.words.spellings import FLEETRUN, MACHINES, SPELLINGS
from yolofleet.families.table import FAMILIES

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- table: python docs/settings_tables.py writes it -->\n", "<!-- end of the table -->\n"
YOLOV5_FLAGS = (
    HERE.parent / "tests" / "parity" / "data" / "yolov5_flags.csv"
)  # verb, flag, values of an example
SCRIPTS = {"train": "train", "val": "val", "predict": "detect", "export": "export"}


def hyperparameters() -> Iterator[str]:
    """Yield the rows of all networks, then those of each loss: families may share one."""
    losses: dict[type[Recipe], list[str]] = defaultdict(list)
    for family in FAMILIES.values():
        losses[family.hyperparameters].append(family.name)
    yield "| networks | key | default | meaning |"
    yield "|---|---|---|---|"
    for model, names in {Recipe: ["all"], **losses}.items():
        for name, field in model.model_fields.items():
            if model is Recipe or name not in Recipe.model_fields:
                value = field.default
                default = f"{value:.4g}" if isinstance(value, float) else str(value).lower()
                yield f"| {', '.join(names)} | `{name}` | {default} | {field.description} |"


def yolov5_flags() -> Iterator[str]:
    """Yield a row for each new name, and one for each script and other outcome: an error or note gives the reason."""
    renamed: dict[str, dict[str, list[str]]] = defaultdict(
        lambda: defaultdict(list)
    )  # here -> there -> scripts
    others: dict[tuple[str, str], list[str]] = defaultdict(list)  # outcome, script -> flags
    for verb, flag, values in known_flags():
        here, script = outcome(verb, flag.replace("_", "-"), values), SCRIPTS[verb]
        if here.startswith("--"):
            renamed[here][" ".join([flag, *values])].append(script)
        else:
            others[here, script].append(flag)
    yield "| flags of YOLOv5 | scripts | here |"
    yield "|---|---|---|"
    for here, spelled in renamed.items():
        scripts = dict.fromkeys(script for names in spelled.values() for script in names)
        yield f"| {', '.join(f'`{there}`' for there in spelled)} | {', '.join(scripts)} | `{here}` |"
    for (here, script), flags in sorted(others.items()):
        yield f"| {' '.join(f'`{flag}`' for flag in flags)} | {script} | {here} |"


def known_flags() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the verb, the flag and the values of an example, for each flag of YOLOv5 v7.0 and of earlier versions."""
    lines = [line.split(",") for line in YOLOV5_FLAGS.read_text(encoding="utf-8").splitlines()[1:]]
    examples = {
        flag: values.split() for _, flag, values, _ in reversed(lines)
    }  # the first one for all scripts
    for verb in SCRIPTS:
        listed = [flag for name, flag, _, _ in lines if name == verb]
        spelled = {flag.replace("_", "-") for flag in listed} | MACHINES.keys() | FLEETRUN.keys()
        earlier = [
            flag for flag, way in SPELLINGS[verb].items() if flag not in spelled and (way.note or way.refusal)
        ]
        for flag in (*listed, *earlier):
            yield verb, flag, examples.get(flag, [])


def outcome(verb: str, flag: str, values: list[str]) -> str:
    """Return our flags for a flag with these values, or what becomes of it."""
    spelling = SPELLINGS[verb].get(flag)
    if spelling is not None and spelling.refusal:
        return "refused"
    argv = spelling.to(values) if spelling is not None else [flag]
    if (name := flag[2:].replace("-", "_")) in EARLIER and verb == "train":
        now = of_today(name, *(values or [True]), COMMAND_LINE)
        argv = [f"--{EARLIER[name].new.replace('_', '-')}={value}" for value in now]
    if {argument.partition("=")[0] for argument in argv} == {flag}:
        return "kept"
    return " ".join(argument.replace("=", " ", 1) for argument in argv) or "no effect"


def page(name: str, table: Callable[[], Iterator[str]]) -> str:
    """Return the text of a page with its table as it must be."""
    text = (HERE / name).read_text(encoding="utf-8")
    inner = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert len(inner.findall(text)) == 1, f"{name} has no place for the table"
    lines = "\n".join(table())
    return inner.sub(lambda _: f"{BEGIN}\n{lines}\n\n{END}", text)


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "recipe.md": hyperparameters,
    "coming-from/yolov5-flags.md": yolov5_flags,
}

if __name__ == "__main__":
    for name, table in PAGES.items():
        (HERE / name).write_text(page(name, table), encoding="utf-8")
