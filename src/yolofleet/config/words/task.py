"""``--task`` of a command line: the network that it names, without masks or with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from yolofleet.families.family import MASKED, load
from yolofleet.families.table import FAMILIES
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import quoted, shown

# whether a network finds masks, by its task in our words and in Ultralytics'
_TASKS = {"boxes": False, "detect": False, "masks": True, "segment": True}


def network_for(task: str, argv: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the arguments that name the network of a command line in its form without masks, or with them.

    Raises:
        ConfigError: the task is unknown, or the command line names no network, or one whose weights are for another task.
    """
    if task not in _TASKS:
        raise ConfigError(
            f"--task {shown(task)}: expected boxes or masks", source="command line", hint="--task boxes"
        )
    given: dict[str, str] = {}
    for token, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, equals, value = token.partition("=")
        given[flag.lstrip("-")] = value if equals else following
    option = next((name for name in ("cfg", "model", "weights") if given.get(name)), "weights")
    named, ending = Path(given.get(option, "")).stem, MASKED if _TASKS[task] else ""
    boxes = named.removesuffix(MASKED)
    if not any(boxes in load(family.preset_names)() for family in FAMILIES.values()):
        if task in ("detect", "segment"):  # in the commands of others it is a habit, and the weights decide
            return []
        raise ConfigError(
            f"--task {task}: the command line does not name a network",
            source="command line",
            hint=f"name it, as in --model yolov5n{ending}, and leave --task out",
        )
    network = boxes + ending
    if network == named:
        return []
    if "--model" not in known:
        raise ConfigError(
            f"--task {task}: {named} was trained on {'boxes' if ending else 'masks'}",
            source="command line",
            hint=f"--weights {quoted(network)}, or leave --task out",
        )
    return ["--cfg" if option == "cfg" else "--model", network]
