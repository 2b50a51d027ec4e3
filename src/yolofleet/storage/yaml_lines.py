"""Read and write YAML files of settings: mappings of scalars and lists, with the line number of each key.

Scalars follow YAML 1.2: ``1e-3`` is a number, ``on`` and ``2020-01-01`` are text. Tags construct no objects. Aliases,
duplicate keys and files above 1 MiB are errors.

The module reads the nodes of PyYAML, because ``safe_load`` drops line numbers, keeps the last of two equal keys, expands
aliases without limit and reads ``1e-3`` as text. ruamel.yaml keeps line numbers, but it expands aliases and merge keys,
makes dates, octal numbers and bytes, and needed 29 s for 3,000 nested brackets (0.19.1, as its round-trip loader).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from yolofleet.storage.foreign import read_foreign_text
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown

MAX_BYTES = 1 << 20
TAG = "tag:yaml.org,2002:"
NO_ALIASES = "aliases (*name) are not supported"
YAML_1_1_BOOLEANS = re.compile("(?:y|Y)es|YES|(?:n|N)o|NO|(?:o|O)n|ON|(?:o|O)ff|OFF")
_HINTS = (  # a part of PyYAML's message, what to do
    (NO_ALIASES, "replace each alias by its value"),
    ("character '\\t'", "indent with spaces, not with tabs"),
    ("escape", "\\ begins an escape in double quotes; write / in a path, or use single quotes"),
    ("", "quote text with : # or brackets, and indent lines of one level equally"),
)
SCALARS = (  # tag, pattern, first characters
    ("null", r"(~|null|Null|NULL|)", [*"~nN", ""]),
    ("bool", r"(true|True|TRUE|false|False|FALSE)", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+", [*"-+0123456789"]),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+."]),
)


class Located(NamedTuple):
    """A value and its line number, from 1; the values of nested mappings are ``Located`` too."""

    value: Any
    line: int


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = yaml.parser.Parser.peek_event(self).start_mark
            raise yaml.composer.ComposerError(None, None, NO_ALIASES, mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(TAG + _tag, re.compile(f"^(?:{_pattern})$"), _first)
# the words are written in quotes
_Dumper.add_implicit_resolver(TAG + "bool", re.compile(f"^(?:{YAML_1_1_BOOLEANS.pattern})$"), [*"yYnNoO"])


def read_yaml(
    path: Path, *, limit_bytes: int = MAX_BYTES, follow: bool = True, as_typed: Collection[str] = ()
) -> dict[str, Located]:
    """Return the mapping in a file.

    Args:
        as_typed: keys below which numbers stay text, such as 010 and 1e3. Words that YAML 1.1 takes for booleans are
            errors there.
        follow: False: a symbolic link is an error.
        limit_bytes: maximum size of the file. Parsing takes up to 30 us a byte.
    Raises:
        ConfigError: the file is missing, is not a YAML mapping, or has a key twice; it names the line.
    """
    try:
        text = read_foreign_text(path, limit_bytes=limit_bytes, follow=follow)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", hint="check the path") from None
    except UnicodeDecodeError as problem:
        before = problem.object[: problem.start]
        what = (
            "it is in UTF-16"
            if problem.object[:2] in (b"\xff\xfe", b"\xfe\xff")
            else f"it is not UTF-8 ({problem.reason})"
        )
        raise ConfigError(
            f"{path} cannot be read: {what}",
            source=f"{path}:{before.count(10) + 1}",
            hint="expected a text file in UTF-8; an editor can save it so",
        ) from None
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the path
        raise ConfigError(
            f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}",
            hint="expected a text file in UTF-8",
        ) from None
    node = _compose(text, str(path))
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{path} does not hold `key: value` lines",
            source=f"{path}:1",
            hint="check that it is the right file",
        )
    return _mapping(node, str(path), as_typed)


def read_scalar(text: str, source: str) -> Any:
    """Return the value of ``text`` as in a file: number, true/false, null, text or list; raise ConfigError if it is not YAML."""
    node = _compose(text, source)
    return text if node is None else _value(node, source)


def write_yaml(values: dict[str, Any]) -> str:
    """Return YAML text in block style, in the order of ``values``; :func:`read_yaml` returns equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _compose(text: str, source: str) -> Any:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as problem:
        line = f":{problem.problem_mark.line + 1}" if problem.problem_mark else ""
        what = str(problem.problem or problem.context)
        hint = next(hint for part, hint in _HINTS if part in what)
        raise ConfigError(f"not YAML: {what}", source=source + line, hint=hint) from None
    except (yaml.YAMLError, ValueError) as problem:
        raise ConfigError(
            f"not YAML: {' '.join(str(problem).split())[:200]}",
            source=source,
            hint="expected a text file in UTF-8 without control characters",
        ) from None
    except RecursionError:
        raise ConfigError(
            "not a settings file: nested too deeply", source=source, hint="check that it is the right file"
        ) from None


def _mapping(
    node: yaml.MappingNode, source: str, as_typed: Collection[str] = (), *, typed: bool = False
) -> dict[str, Located]:
    found: dict[str, Located] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(
                "a key must be a plain word", source=f"{source}:{line}", hint="a line is key: value"
            )
        key = str(key_node.value)
        if key in found:
            raise ConfigError(
                f"{shown(key)} is set twice, in lines {found[key].line} and {line}",
                source=source,
                hint="remove one",
            )
        found[key] = Located(_value(value_node, source, typed=typed or key in as_typed), line)
    return found


def _value(node: Any, source: str, *, typed: bool = False) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, source, typed=typed)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, source, typed=typed) for item in node.value]
    text, kind = node.value, node.tag.removeprefix(TAG)
    if typed and node.style is None and YAML_1_1_BOOLEANS.fullmatch(text):
        raise ConfigError(
            f"{text} is true or false for many readers of YAML",
            source=f"{source}:{node.start_mark.line + 1}",
            hint=f'write "{text}" in quotes',
        )
    if typed and kind in ("int", "float"):
        return str(text)
    try:
        if kind in ("str", "int"):
            return str(text) if kind == "str" else int(text)
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if kind in ("bool", "null"):
            return None if kind == "null" else text.lower() == "true"
    except ValueError:
        pass
    raise ConfigError(
        f"{shown(text)} with tag {shown(node.tag)} cannot be read",
        source=f"{source}:{node.start_mark.line + 1}",
        hint="write a plain number, text, true, false or a list",
    )
