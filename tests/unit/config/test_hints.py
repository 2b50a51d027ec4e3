"""Every text of the program that names a command or an option names one that exists, with a value that is accepted.

The texts are the string literals of the sources, without docstrings, so a new message needs no line here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import yolofleet
from yolofleet.cli.app import APP
from yolofleet.cli.commands import Command, SchemaCommand, Verbs
from yolofleet.config.recipe import is_hyperparameter
from yolofleet.config.resolve import Sourced, resolve
from yolofleet.config.words.spellings import FROM_LAUNCHER, SPELLINGS
from yolofleet.support.errors import ConfigError

SOURCES = Path(str(yolofleet.__file__)).parent
HOLE = "\0"  # a placeholder of an f-string
# other programs: the options behind their names are theirs
PROGRAMS = re.compile(
    r"\b(torchrun|docker|pip|srun|timeout|kubectl|firewall-cmd)\b(?!.*\byolofleet )", re.DOTALL
)
FOREIGN = {  # options of other programs in texts that do not name them
    "srun": ("kill-on-bad-exit", "wait", "input"),
    "kubectl": ("namespace",),
    "torchrun": ("nproc_per_node",),
    "curl and others, in patterns of secrets": ("user", "api-key"),
}


class Texts(ast.NodeVisitor):
    """Collects the string literals of a file, those that are added up as one, without docstrings."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.found.append((node.lineno, node.value))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values]
        self.found.append((node.lineno, "".join(parts)))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        before = len(self.found)
        self.generic_visit(node)
        if isinstance(node.op, ast.Add) and len(self.found) == before + 2:  # of two literals
            (line, left), (_, right) = self.found[before:]
            self.found[before:] = [(line, left + right)]


def texts() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCES.rglob("*.py")):
        collected = Texts()
        collected.visit(ast.parse(path.read_text(encoding="utf-8")))
        for line, text in collected.found:
            yield f"{path.relative_to(SOURCES)}:{line}", text


@cache
def commands() -> dict[tuple[str, ...], click.Command]:
    """All verbs by their words, with the groups."""
    found: dict[tuple[str, ...], click.Command] = {}
    waiting: list[tuple[tuple[str, ...], click.Command]] = [((), APP)]
    while waiting:
        words, command = waiting.pop()
        found[words] = command
        if isinstance(command, Verbs):
            context = click.Context(command)
            for name in command.list_commands(context):
                member = command.get_command(context, name)
                assert member is not None
                waiting.append(((*words, name), member))
    return found


@cache
def options_of(command: click.Command) -> dict[str, click.Option | None]:
    """The options of a verb; None: an accepted spelling of another trainer."""
    found: dict[str, click.Option | None] = {}
    if isinstance(command, Command):
        spellings = SPELLINGS.get(command.spelled_as, {})
        known = [flag for flag, way in spellings.items() if not way.refusal and way is not FROM_LAUNCHER]
        found = dict.fromkeys(known)
    for parameter in command.get_params(click.Context(command)):
        if isinstance(parameter, click.Option):
            found |= dict.fromkeys([*parameter.opts, *parameter.secondary_opts], parameter)
    return found


def tokens_of(text: str) -> list[str]:
    """The words of a command up to the end of its phrase."""
    phrase = re.split(r"[`;\n]|\s\(|\)|[,.:]\s|[,.:]$| ->", text, maxsplit=1)[0]
    return phrase.split()


def is_open(value: str) -> bool:
    """Whether a value stands for others: a placeholder, NAME, <name>, ... ."""
    return (
        HOLE in value or "..." in value or re.search(r"[A-Z]{1,}", value) is not None or value.startswith("<")
    )


def fault_of_value(command: click.Command, flag: str, option: click.Option, value: str) -> str:
    """What the verb says against a value; "" if it accepts it."""
    value = value.strip("'\"")
    if is_open(value):
        return ""
    if flag == "--set":
        return "" if is_hyperparameter(value.partition("=")[0]) else f"no {value} in the recipe"
    try:
        if isinstance(command, SchemaCommand) and option.name in command.model.model_fields:
            given = (value,) if option.multiple else value
            resolve(command.model, [{str(option.name): Sourced(given, "a hint")}])
        else:
            option.type.convert(value, option, None)
    except (ConfigError, click.ClickException) as problem:
        return str(problem)
    return ""


def faults_of_command(words: list[str]) -> list[str]:
    """What is wrong with the words after ``yolofleet``, as far as they are a command and no prose."""
    verb: tuple[str, ...] = ()
    command: click.Command = APP
    while isinstance(command, Verbs):
        if words and (*verb, words[0]) in commands():
            verb, words = (*verb, words[0]), words[1:]
        elif command.default and words and (words[0].startswith("--") or command.default_takes_arguments):
            verb = (*verb, command.default)
        elif words and words[0].startswith("--") and words[0] not in ("--help", "--version"):
            return [f"yolofleet {' '.join(verb)} takes no {words[0]}"]
        else:
            return []
        command = commands()[verb]
    options, faults = options_of(command), list[str]()
    places = sum(
        99 if one.nargs < 0 else one.nargs
        for one in command.get_params(click.Context(command))
        if isinstance(one, click.Argument)
    )
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not flag.startswith("--"):
            places -= 1
            if places < 0:
                break
            continue
        if flag in ("--", "--help") or HOLE in flag:
            continue
        if flag not in options:
            faults.append(f"yolofleet {' '.join(verb)} has no {flag}")
            continue
        option = options[flag]
        if option is None or option.is_flag or option.count:
            continue
        if not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        if value and (fault := fault_of_value(command, flag, option, value)):
            faults.append(f"yolofleet {' '.join(verb)} {flag} {value}: {fault}")
    return faults


def test_every_command_in_a_text_is_one_that_the_program_accepts() -> None:
    faults, seen = [], 0
    for place, text in texts():
        for found in re.finditer(r"\byolofleet (?=((?:[a-z]+\b|--)[^\n]*))", text):
            words = tokens_of(found[1])
            if words and (words[0] in APP.members or words[0].startswith("--")):
                seen += 1
                faults += [f"{place}: {fault}" for fault in faults_of_command(words)]
    assert seen > 80
    assert not faults, "\n".join(faults)


def test_every_option_in_a_text_is_one_of_some_verb_and_takes_the_value_beside_it() -> None:
    known: dict[str, list[tuple[click.Command, click.Option | None]]] = {}
    for command in commands().values():
        for flag, option in options_of(command).items():
            known.setdefault(flag, []).append((command, option))
    spelled = {flag for table in SPELLINGS.values() for flag in table}
    foreign = {f"--{name}" for names in FOREIGN.values() for name in names}
    faults, seen = [], 0
    for place, text in texts():
        if " " not in text.strip():  # a flag alone is no text, but an argument of a program
            continue
        for found in re.finditer(r"(?<![\w-])(--[a-z][\w-]*)(?:[ =]([^\s,;:`)]*[\d=][^\s;:`)]*))?", text):
            flag, value = found[1].rstrip("-"), (found[2] or "").rstrip(".,")
            seen += 1
            if flag not in known:
                is_ours = not PROGRAMS.search(text[: found.start()]) and not text.startswith(
                    "--[", found.start()
                )
                if is_ours and flag not in foreign | spelled | {"--help", "--version"}:
                    faults.append(f"{place}: no verb has {flag}: {text[:90]!r}")
                continue
            takers = [(command, one) for command, one in known[flag] if one and not one.is_flag]
            if value and takers:
                said = [fault_of_value(command, flag, one, value) for command, one in takers]
                if all(said):
                    faults.append(f"{place}: {flag} {value}: {said[0]}")
    assert seen > 500
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("train --nosuch 3", "has no --nosuch"),
        ("train --epochs many", "is not a whole number"),
        ("export --format onnx --simplify=3", ""),
        ("report A B", ""),
        ("bench --weights x --passes few", "is not a whole number"),
        ("data check DATA shows all", ""),
        ("data check DATA --nosuch", "has no --nosuch"),
        ("train --set nosuch=1", "no nosuch=1 in the recipe"),
    ],
)
def test_the_check_itself_finds_what_is_wrong(text: str, fault: str) -> None:
    found = faults_of_command(text.split())
    assert (fault in " ".join(found)) and bool(fault) == bool(found)
