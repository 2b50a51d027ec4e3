"""A person pastes the commands of a message into a shell: each value in them is quoted, by one function."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yolofleet
from yolofleet.support.text import quoted

SRC = Path(yolofleet.__file__).parent
QUOTING = ("quoted", "shlex.join", "typed", "_either")  # typed quotes, _either lists numbers
PATHS = "callbacks|cfg|config|data|fleet|hosts|json|log|out|project|recipe|resume|source|space|stage|weights"
# A command up to a value: of yolofleet, an option that takes a path, or a command of the shell.
COMMAND = re.compile(
    rf"\byolofleet [a-z]+ (?:(?!: |; |, |\. ).)*$|--({PATHS})[ =]$|\b(mkdir -p|rm|cp|mv|cat|chmod)( -\w+)* $"
)
SAFE = {  # names of tables of this package, numbers, and texts whose parts are quoted
    "cli/board.py": "package",
    "cli/data.py": "name",
    "cli/fleet.py": "where",
    "config/loggers.py": "','.join([*names, name])",
    "data/datasets/description.py": "built_in",
    "data/datasets/scan.py": "where",
    "families/weights/catalogue.py": "entry.name",
    "measure/loading.py": "words",
}


def unquoted(tree: ast.Module, safe: str = "") -> Iterator[str]:
    """Yield the values of commands in f-strings that no function quotes, without ``safe``."""
    hints = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "hint":
            hints |= {id(part) for part in ast.walk(node.value)}
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any("hint" in ast.unparse(target) for target in targets):
                hints |= {id(part) for part in ast.walk(node.value)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        before = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                before += str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue)
            value = part.value
            function = value.func if isinstance(value, ast.Call) else None
            called = ast.unparse(function) if function else ""
            match = COMMAND.search(before)
            is_list = ast.unparse(value).startswith("' '.join(map(quoted")
            is_command = match and (id(node) in hints or match[0].startswith("yolofleet"))
            if is_command and called not in QUOTING and not is_list and ast.unparse(value) != safe:
                yield f"{before[-24:]}{{{ast.unparse(value)}}}"
            before += "X"


def test_every_value_of_a_command_in_a_message_is_quoted():
    found = {
        f"{path.relative_to(SRC)}: {value}"
        for path in sorted(SRC.rglob("*.py"))
        for value in unquoted(
            ast.parse(path.read_text("utf-8")), SAFE.get(path.relative_to(SRC).as_posix(), "")
        )
    }
    assert not found, "\n".join(sorted(found))


def test_the_walk_sees_values_that_are_not_quoted():
    seen = [*unquoted(ast.parse('E(hint=f"or --out {out}; yolofleet data check {data} lists {more}")'))]
    assert seen == ["or --out {out}", "X; yolofleet data check {data}", "leet data check X lists {more}"]
    assert not [*unquoted(ast.parse('E(f"--out {out}", hint=f"yolofleet data check {quoted(data)}")'))]


def test_a_quoted_value_is_one_word_that_does_nothing():
    assert quoted(Path("q;touch x;/data.yaml")) == "'q;touch x;/data.yaml'"
    assert quoted("plain/data.yaml") == "plain/data.yaml"
