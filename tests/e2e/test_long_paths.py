"""A name that is too long for the disk, as the value of every option, argument and setting: one message, no traceback."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from commands import SMALL, called, small_shapes, working_in
from small_files import TINY_YAML
from walks import chosen, sampled

from yolofleet.cli.app import APP
from yolofleet.cli.commands import SchemaCommand, Verbs
from yolofleet.support.errors import StorageError, refused_path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="names of 255 bytes")

LONG = "a" * 300
NO_PLOTS = ["--no-plots"]  # a second each, and their names have no value of the user in them
TRAIN = ["--data", "small shapes", "--cfg", "tiny.yaml", *SMALL[2:-1], "--max-steps", "1", "--device", "cpu"]
WEIGHTS = ["--weights", "run/weights/last.safetensors", "--device", "cpu"]
SOURCE = ["--source", "small shapes/images/val"]
# what each verb needs to reach the code that uses a value; the other verbs need nothing, or their arguments
NEEDS = {
    "train": TRAIN,
    "val": [*WEIGHTS, "--data", "small shapes"],
    "predict": [*WEIGHTS, *SOURCE],
    "export": ["--weights", WEIGHTS[1], "--format", "torchscript"],
    "bench inference": [*WEIGHTS, "--source", SOURCE[1]],
    "render slurm": TRAIN,
    "render kubernetes": TRAIN,
}
ENDLESS = {"selftest"}  # it has no option that is a path, and an accepted value starts minutes of work


def commands_in(verbs: Verbs, before: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(verbs)
    for name in verbs.members:
        member = verbs.get_command(context, name)
        if isinstance(member, Verbs):
            yield from commands_in(member, f"{before}{name} ")
        elif member is not None and name not in ENDLESS:
            yield before + name, member


COMMANDS = dict(commands_in(APP))


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("long")
    small_shapes(folder, images=8, val_images=4)
    (folder / "tiny.yaml").write_text(TINY_YAML)
    with working_in(folder):
        assert called("train", *TRAIN, *NO_PLOTS, "--project", ".", "--name", "run").code == 0
        yield


def check(*words: str | Path) -> None:
    done = called(*words, *(NO_PLOTS if words[0] in ("train", "val") else []))
    assert done.code in (0, 2, 3, 4), (words, done)
    assert "Traceback" not in done.err, words


@pytest.mark.parametrize("verb", sampled(COMMANDS, 7))
def test_a_long_name_is_a_message(verb: str) -> None:
    command = COMMANDS[verb]
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    for option in command.params:
        if isinstance(option, click.Option) and not (option.is_flag or option.count):
            others = ["missing"] * (len(arguments) if verb not in NEEDS else 0)
            check(*verb.split(), *NEEDS.get(verb, ()), *others, option.opts[0], LONG)
    for place in range(len(arguments)):
        check(*verb.split(), *(LONG if i == place else "missing" for i in range(len(arguments))))


@pytest.mark.parametrize(
    "verb", chosen((v for v, command in COMMANDS.items() if isinstance(command, SchemaCommand)), "export")
)
def test_a_long_name_in_a_file_is_a_message(verb: str, tmp_path: Path) -> None:
    command = COMMANDS[verb]
    assert isinstance(command, SchemaCommand)
    needs = NEEDS.get(verb, [])
    for name in command.model.model_fields:
        given = [
            word
            for flag, value in zip(needs[::2], needs[1::2], strict=True)
            if flag != f"--{name}"
            for word in (flag, value)
        ]
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump({name: LONG}))
        check(*verb.split(), *given, "--config", tmp_path / "settings.yaml")


@pytest.mark.slow
def test_a_long_name_in_processes_of_a_launcher_is_a_message() -> None:
    check("train", *TRAIN[:2], *TRAIN[4:-1], "cpu:2", "--weights", LONG)


def test_a_path_that_the_system_refuses_is_no_bug() -> None:
    """Root may enter every folder, so the error is made here."""
    denied = refused_path(PermissionError(errno.EACCES, "Permission denied", "/data/a.pt"))
    assert isinstance(denied, StorageError) and "/data/a.pt: Permission denied" in denied.render()
    for other in (
        OSError(errno.EACCES, "no path"),
        FileNotFoundError(errno.ENOENT, "", "a"),
        ValueError("a"),
    ):
        assert refused_path(other) is None
