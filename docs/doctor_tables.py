"""Write the tables of doctor.md and doctor-logs.md from the tables of the package: ``python docs/doctor_tables.py``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from yolofleet.doctor.findings import kinds
from yolofleet.doctor.log_rules import RULES, Rule

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- tables: python docs/doctor_tables.py writes them -->\n", "<!-- end of the tables -->\n"


def findings() -> Iterator[str]:
    yield "| code | what it means | what to do |"
    yield "|---|---|---|"
    for section, rows in groupby(kinds().values(), lambda kind: kind.section):
        yield f"| **{section}** | | |"
        for kind in rows:
            yield f"| `{kind.code}` | {kind.meaning} | {kind.advice} |".replace("|  |", "| |")


def log_rules() -> Iterator[str]:
    sections = {section: list(rows) for section, rows in groupby(RULES, lambda rule: rule.section)}
    for section in sorted(sections, key=lambda name: name == "Harmless"):  # last, though they are tried first
        yield f"### {section}\n"
        names = ("code", "meaning") if section == "Harmless" else ("code", "looks like", "meaning")
        yield f"| {' | '.join(names)} |"
        yield "|" + "---|" * len(names)
        known: set[str] = set()
        for rule in sections[section]:
            cells = [
                f"`{rule.code}`",
                rule.shown or ", ".join(map(pattern_text, rule.patterns[:2])),
                rule.why,
            ]
            if section == "Harmless":
                del cells[1]
            if rule.code not in known | first_in_another(rule):
                yield f"| {' | '.join(cells)} |"
            known.add(rule.code)
        yield ""


def first_in_another(rule: Rule) -> set[str]:
    """Return the code of a rule that an earlier section lists."""
    first = next(one for one in RULES if one.code == rule.code)
    return {rule.code} if first.section != rule.section else set()


def pattern_text(pattern: str) -> str:
    words = [part for part in pattern.strip("^$").split("*") if part.strip()]
    return f"`{' … '.join(part.strip() for part in words)}`"


def page(name: str, table: Callable[[], Iterator[str]]) -> str:
    """Return the text of a page with its tables as they must be."""
    text = (HERE / name).read_text(encoding="utf-8")
    inner = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert len(inner.findall(text)) == 1, f"{name} has no place for the tables"
    lines = "\n".join(table()).strip()
    return inner.sub(lambda _: f"{BEGIN}\n{lines}\n\n{END}", text)


PAGES: dict[str, Callable[[], Iterator[str]]] = {"doctor.md": findings, "doctor-logs.md": log_rules}

if __name__ == "__main__":
    for name, table in PAGES.items():
        (HERE / name).write_text(page(name, table), encoding="utf-8")
