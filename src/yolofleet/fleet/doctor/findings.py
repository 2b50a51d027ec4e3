"""Findings of the doctor: what it saw, why that matters and what to type. ``findings.yaml`` declares all of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

import yaml

from yolofleet.support.errors import ClusterError
from yolofleet.support.text import echo, inform, is_quiet

Level = Literal["ok", "note", "warn", "fault"]
LEVELS: tuple[Level, ...] = get_args(Level)  # from healthy to broken
PLURALS = {"ok": "in order", "note": "notes", "warn": "warnings", "fault": "faults"}
TABLE = Path(__file__).with_name("findings.yaml")
Text = str | Mapping[str, str]  # the same for all levels, or one for each


@dataclass(frozen=True)
class Finding:
    """One thing that the doctor saw."""

    code: str  # stable name for programs and documents, such as ``port-busy``
    # ``ok``: as it should be; ``note``: worth knowing; ``warn``: works, but slower or not for long;
    # ``fault``: a run cannot start or continue
    level: Level
    where: str  # the host, pair of hosts, rank or line that it is about; "" = this machine
    seen: str  # what was measured or read, with the values
    why: str = ""  # what it means for a run; "" = nothing to add
    fix: str = ""  # a command to type, or a sentence; "" = nothing to do

    def __post_init__(self) -> None:
        """Replace control characters: names, variables and logs may hold them, and a terminal would obey them."""
        for name, text in asdict(self).items():
            object.__setattr__(self, name, "".join(c if c.isprintable() or c == "\n" else "?" for c in text))

    def render(self) -> str:
        """Return the text for a person: one line, then ``why`` and ``try`` if they are not empty."""
        where = f"{self.where}: " if self.where else ""
        lines = [f"{self.level:<5} {self.code}: {where}{' '.join(self.seen.splitlines())}"]
        for label, text in (("why", self.why), ("try", self.fix)):
            lines += [
                f"  {label if i == 0 else '':<3} {':' if i == 0 else ' '} {line}"
                for i, line in enumerate(text.splitlines())
            ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Kind:
    """A row of ``findings.yaml``, which describes the fields. The first level is the default."""

    section: str  # the heading above the row
    code: str
    levels: tuple[Level, ...]
    meaning: str
    seen: Text
    why: Text = ""
    fix: Text = ""
    advice: str = ""

    def text(self, name: str, level: Level, values: Mapping[str, Any]) -> str:
        """Return one of its texts at a level, filled with values."""
        template = getattr(self, name)
        if not isinstance(template, str):
            template = template[level]
        return str(template.format_map(values))


@lru_cache(maxsize=1)
def kinds() -> dict[str, Kind]:
    """Return all kinds of findings but those of logs, by code."""
    found = {}
    for section, rows in load_table(TABLE).items():
        for code, row in rows.items():
            level = row.pop("level")
            levels = tuple(level) if isinstance(level, list) else (level,)
            assert set(levels) <= set(LEVELS), f"{TABLE}: {code}: level {level}"
            found[code] = Kind(section, code, levels, **row)
    return found


def load_table(path: Path) -> Any:
    """Return a YAML file of this package, read by the fast loader if PyYAML was built with it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_bytes(), Loader=loader)


def finding(code: str, where: str = "", *, level: str | None = None, **values: Any) -> Finding:
    """Return a finding of ``findings.yaml``.

    Args:
        level: one of the row's levels; by default its first.
        values: for the row's texts.
    """
    kind = kinds()[code]
    chosen = next((one for one in kind.levels if level in (None, one)), None)
    assert chosen is not None, f"{code} has no level {level}"
    seen, why, fix = (kind.text(name, chosen, values) for name in ("seen", "why", "fix"))
    return Finding(code, chosen, where, seen, why, fix)


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level of the findings; ``ok`` for none."""
    return max((f.level for f in findings), key=LEVELS.index, default="ok")


def print_findings(findings: Sequence[Finding], stream: TextIO) -> None:
    """Print findings, the worst last, then their numbers. Equal findings of several hosts are printed once.

    ``--quiet`` leaves out findings that are no fault.
    """
    wheres: dict[Finding, list[str]] = {}
    for one in findings:
        wheres.setdefault(replace(one, where=""), []).append(one.where)
    for one, where in sorted(wheres.items(), key=lambda entry: LEVELS.index(entry[0].level)):
        if one.level == LEVELS[-1] or not is_quiet():
            echo(replace(one, where=", ".join(where)).render(), to=stream)
    counts = Counter(one.level for one in wheres)
    words = PLURALS | {level: PLURALS[level].removesuffix("s") for level in counts if counts[level] == 1}
    totals = [f"{counts[level]} {words[level]}" for level in reversed(LEVELS) if counts[level]]
    inform("", to=stream)
    echo(", ".join(totals) or "nothing found", to=stream)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings for JSON."""
    return {"worst": worst(findings), "findings": list(map(asdict, findings))}


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 4 if there is a fault, else 0."""
    return ClusterError.exit_code if worst(findings) == "fault" else 0


def stream_for(json_out: str) -> TextIO:
    """Return where to print findings: standard error if JSON goes to standard output."""
    return sys.stderr if json_out == "-" else sys.stdout
