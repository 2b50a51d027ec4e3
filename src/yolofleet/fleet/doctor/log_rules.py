"""Read ``log_rules.yaml``, the table of what lines of logs mean, and find the rule of a line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from yolofleet.fleet.doctor.findings import LEVELS, Level, load_table

TABLE = Path(__file__).with_name("log_rules.yaml")
ORDERS = ("machine", "named", "ended", "unnamed", "follows", "explained")  # the cause first


@dataclass(frozen=True)
class Rule:
    """A row of the table, which describes the fields."""

    section: str  # the heading above the row
    code: str
    why: str
    patterns: tuple[str, ...] = ()
    fix: str = ""
    level: Level = "fault"
    order: str = "named"
    unmet: bool = False
    shown: str = ""


def _read() -> tuple[Rule, ...]:
    rules = []
    for section, rows in load_table(TABLE).items():
        for row in rows:
            rule = Rule(section, **{**row, "patterns": tuple(row.get("patterns", ()))})
            assert rule.level in LEVELS and rule.order in ORDERS, f"{TABLE}: {rule.code}"
            assert all(isinstance(pattern, str) for pattern in rule.patterns), f"{TABLE}: {rule.code}"
            rules.append(rule)
    return tuple(rules)


RULES = _read()
BY_CODE = {rule.code: rule for rule in reversed(RULES)}  # the first of several that share a code

# Lines that say that the processes have met: attempts to connect that failed before were tried again and worked.
MET = ("init complete", "connected all rings", "connected all trees", "rendezvous complete")

NCCL_ERROR = "nccl-error"
SIGNALS = {
    1: BY_CODE["hangup"],
    2: BY_CODE["interrupted"],
    4: BY_CODE["illegal-instruction"],
    6: BY_CODE["aborted"],
    7: BY_CODE["shm-full"],
    9: BY_CODE["killed"],
    11: BY_CODE["segfault"],
    15: BY_CODE["ended-by-others"],
}
SIGNAL_NAMES = {"hup": 1, "int": 2, "ill": 4, "abrt": 6, "bus": 7, "kill": 9, "segv": 11, "term": 15}


# -- the rule of a line --------------------------------------------------------------------------------------

DIGITS = b"0123456789"
NO_DIGITS = dict.fromkeys(DIGITS)  # for str.translate


_FRONT = re.compile(r"(?:[\s>*`|]|\[[^\]]{0,60}\]:?|\([^)]{0,60}\)){0,20}")


def front(line: str) -> int:
    """Return where a program's own words start, after what launchers and people put before a line."""
    match = _FRONT.match(line)
    return match.end() if match else 0


@dataclass(frozen=True)
class Pattern:
    """A pattern of the table, split at its ``*``."""

    parts: tuple[str, ...]
    at_start: bool
    at_end: bool
    rule: Rule

    def fits(self, line: str) -> bool:
        """Return whether a line in lower case, without blanks at its ends, has all parts in their order."""
        if self.at_start and not line.startswith(self.parts[0], front(line)):
            return False
        if self.at_end and not line.endswith(self.parts[-1]):
            return False
        at = 0
        for part in self.parts:
            at = line.find(part, at)
            if at < 0:
                return False
            at += len(part)
        return True

    def without_numbers(self) -> Pattern:
        """Return the pattern without digits."""
        return replace(self, parts=tuple(part.translate(NO_DIGITS) for part in self.parts))


def first_match(patterns: Iterable[tuple[str, Pattern]], line: str) -> Rule | None:
    """Return the rule of the first pattern that fits a line; None without one.

    Args:
        patterns: each with its longest part before it, which most lines do not have.
    """
    for longest, pattern in patterns:
        if longest in line and pattern.fits(line):
            return pattern.rule
    return None


def _by_longest_part(patterns: Iterable[Pattern]) -> list[tuple[str, Pattern]]:
    return [(max(pattern.parts, key=len), pattern) for pattern in patterns]


def _split(rules: Iterable[Rule]) -> tuple[Pattern, ...]:
    return tuple(
        Pattern(
            tuple(part for part in pattern.strip("^$").split("*") if part.strip()),
            pattern.startswith("^"),
            pattern.endswith("$"),
            rule,
        )
        for rule in rules
        for pattern in rule.patterns
    )


PATTERNS = _by_longest_part(_split(RULES))
# Lines that differ only in numbers have the same meaning, unless they fit one of these patterns.
NUMBERED = _by_longest_part(p.without_numbers() for _, p in PATTERNS if p.without_numbers() != p)
