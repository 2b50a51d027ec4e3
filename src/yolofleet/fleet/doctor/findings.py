"""What the doctor says: one finding is what was seen, why it matters and what to type."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, get_args

Level = Literal["ok", "note", "warn", "fault"]
LEVELS: tuple[Level, ...] = get_args(Level)  # from healthy to broken


@dataclass(frozen=True)
class Finding:
    """One thing that the doctor saw.

    Attributes:
        code: stable name for programs and documents, such as ``port-busy``.
        level: ``ok``: as it should be; ``note``: worth knowing; ``warn``: works, but slower or not for long;
            ``fault``: a run cannot start or go on.
        where: host, pair of hosts, rank or line that it is about; "" = here.
        seen: what was measured or read, with the values.
        why: what it means for a run; "" = nothing to add.
        fix: a command that one can type, or a sentence; "" = nothing to do.
    """

    code: str
    level: Level
    where: str
    seen: str
    why: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        """Names, variables and logs hold anything: nothing of it is obeyed by a terminal, or refused by a file."""
        for name, text in asdict(self).items():
            object.__setattr__(self, name, "".join(c if c.isprintable() or c == "\n" else "?" for c in text))

    def to_dict(self) -> dict[str, str]:
        """For JSON: the attributes by name."""
        return asdict(self)

    def render(self) -> str:
        """As a person reads it: one line, then ``why`` and ``try`` where there is something to say."""
        where = f"{self.where}: " if self.where else ""
        seen = " ".join(self.seen.splitlines())
        lines = [f"{self.level:<5} {self.code}: {where}{seen}"]
        lines += [
            f"  why : {line}" if i == 0 else f"        {line}" for i, line in enumerate(self.why.splitlines())
        ]
        lines += [
            f"  try : {line}" if i == 0 else f"        {line}" for i, line in enumerate(self.fix.splitlines())
        ]
        return "\n".join(lines)


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level among them; ``ok`` for none."""
    return max((f.level for f in findings), key=LEVELS.index, default="ok")
