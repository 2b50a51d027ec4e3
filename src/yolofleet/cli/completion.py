"""`yolofleet completion`: what a shell needs to complete verbs, options and values."""

from __future__ import annotations

from contextlib import suppress

import click
from click.shell_completion import get_completion_class, shell_complete

from yolofleet.cli.commands import Command
from yolofleet.support.errors import YolofleetError
from yolofleet.support.text import echo

COMPLETE = "_YOLOFLEET_COMPLETE"  # the variable by which the script of a shell asks for completions


def complete(app: click.Command, instruction: str) -> int:
    """Print the completions of the command line in ``COMP_WORDS``. ``asked`` is for example ``bash_complete``."""
    # a message would appear in the line that the user types
    with suppress(YolofleetError, click.ClickException):
        return shell_complete(app, {}, "yolofleet", COMPLETE, instruction)
    return 1


def _script(shell: str) -> int:
    kind = get_completion_class(shell)
    assert kind is not None, shell
    app = click.get_current_context().find_root().command
    echo(kind(app, {}, "yolofleet", COMPLETE).source().rstrip("\n"))
    return 0


command = Command(
    "completion",
    params=[click.Argument(["shell"], type=click.Choice(["bash", "zsh", "fish"]))],
    callback=_script,
    help='Write the completion script of a shell. For bash: `eval "$(yolofleet completion bash)"` in ~/.bashrc.',
)
