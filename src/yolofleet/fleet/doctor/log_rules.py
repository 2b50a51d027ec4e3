"""Read ``log_rules.yaml``, the table of what lines of logs mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from yolofleet.fleet.doctor.findings import LEVELS, Level, load_table

TABLE = Path(__file__).with_name("log_rules.yaml")
ORDERS = ("machine", "named", "ended", "unnamed", "follows", "explained")  # the cause first


@dataclass(frozen=True)
class Rule:
    """A row of the table, which describes the fields.

    Attributes:
        section: the heading above the row.
    """

    section: str
    code: str
    why: str
    patterns: tuple[str, ...] = ()
    fix: str = ""
    level: Level = "fault"
    order: str = "named"
    unmet: bool = False
    shown: str = ""

    @property
    def rank(self) -> int:
        """Its place among several findings; the lowest explains the others."""
        return ORDERS.index(self.order)


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
