"""Write the reference of the doctor's findings, from the tables of the package. The site uses it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from yolofleet.fleet.doctor.findings import kinds
from yolofleet.fleet.doctor.log_rules import RULES, Rule


def markdown() -> str:
    """Return one page with every finding of machines and of logs."""
    head = [
        "# Findings of the doctor",
        "",
        "[Check machines and logs](../doctor.md) describes the commands.",
        "",
    ]
    logs = [
        "## Logs",
        "",
        "A line matches a rule if it has the words below, in upper or lower case; `…` stands for anything between. "
        "The levels are `fault`, `warn` and `note` (harmless).",
        "",
    ]
    return "\n".join([*head, "## Machines", "", *findings(), "", *logs, *log_rules()])


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


if __name__ == "__main__":
    print(markdown())
