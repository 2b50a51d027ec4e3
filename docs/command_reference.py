"""Write the texts of `--help` as manual pages: ``python docs/command_reference.py FOLDER``. The site uses them, too."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from yolofleet import __version__
from yolofleet.cli.app import APP


class Recorder(click.HelpFormatter):
    """Keep the sections of a help text instead of drawing them."""

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[tuple[str, list[tuple[str, str]]]] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.sections.append((name, []))
        yield

    def write_dl(self, rows: Sequence[tuple[str, str]], *_: Any, **__: Any) -> None:
        self.sections[-1][1].extend((flag.strip(), text) for flag, text in rows)


def commands(group: click.Group = APP, path: str = "yolofleet") -> Iterator[tuple[str, click.Command]]:
    """Yield the words and the object of each command, groups before their members."""
    yield path, group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def sections_of(command: click.Command, path: str) -> tuple[str, list[tuple[str, list[tuple[str, str]]]]]:
    """Return the line of usage and the sections of a command's help."""
    context = click.Context(command, info_name=path)
    recorder = Recorder()
    command.format_options(context, recorder)
    return " ".join([path, *command.collect_usage_pieces(context)]), recorder.sections


def markdown() -> str:
    """Return one page with every option of every command."""
    lines = [
        "# Commands",
        "",
        f"Every command and option of version {__version__}, as `--help` shows them.",
        "",
    ]
    for path, command in commands():
        usage, sections = sections_of(command, path)
        lines += [f"## {path}", "", plain(command.help or ""), "", "```text", usage, "```", ""]
        for title, rows in sections:
            lines += [
                f"**{title}**",
                "",
                f"| {'verb' if title == 'Verbs' else 'option'} | meaning |",
                "|---|---|",
            ]
            lines += [f"| `{flag}` | {plain(text)} |" for flag, text in rows]
            lines.append("")
    return "\n".join(lines)


def plain(text: str) -> str:
    """Escape what Markdown would not show as it stands."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))


def manual(path: str, command: click.Command) -> str:
    """Return the manual page of one command in the format of man(7)."""
    name = path.replace(" ", "-")
    usage, sections = sections_of(command, path)
    summary = (command.help or path).split(". ")[0].rstrip(".")
    lines = [
        f'.TH "{name.upper()}" 1 "" "yolofleet {__version__}" "User Commands"',
        *(".SH NAME", f"{troff(name)} \\- {troff(summary)}"),
        *(".SH SYNOPSIS", troff(usage)),
        *(".SH DESCRIPTION", troff(command.help or "")),
        ".SH OPTIONS",
    ]
    for title, rows in sections:
        lines.append(f'.SS "{title}"')
        for flag, text in rows:
            lines += [".TP", f"\\fB{troff(flag)}\\fR", troff(text)]
    return "\n".join([*lines, ".SH SEE ALSO", "yolofleet VERB \\-\\-help shows the same text.", ""])


def troff(text: str) -> str:
    """Escape what man(7) would read as a request or a hyphen."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for path, command in commands():
        (folder / f"{path.replace(' ', '-')}.1").write_text(manual(path, command), encoding="utf-8")
