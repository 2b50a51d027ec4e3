"""Classify the lines of a log of NCCL, gloo, torchrun, Python, SLURM or the kernel.

One pass, whatever the size; memory holds one entry for each kind of finding. Each line is compared with the patterns of
``log_rules.yaml``. Besides, this module recognises ends of processes (exit codes, signals), torchrun's summary, and the
last lines of Python tracebacks. The finding that explains the others comes first.

Most lines of a long log differ from earlier ones only in their numbers. The meaning of such a line is remembered, so it
is not examined again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from yolofleet.fleet.doctor.findings import LEVELS, Finding, Level
from yolofleet.fleet.doctor.log_rules import (
    BY_CODE,
    DIGITS,
    MET,
    NCCL_ERROR,
    NO_DIGITS,
    NUMBERED,
    ORDERS,
    PATTERNS,
    SIGNAL_NAMES,
    SIGNALS,
    Rule,
    first_match,
    front,
)
from yolofleet.support.errors import YolofleetError

OWN_ERROR = "yolofleet-error"
LONGEST = 1 << 14  # characters of a line that are examined: half from its start, half from its end
SHOWN = 240  # characters of a line in a finding
MOST_RANKS = 16  # in a finding
REMEMBERED = 1 << 16  # lines without their numbers
SUMMARY = 14  # most lines of torchrun's "Root Cause"
IGNORED = 40  # most lines of a traceback after "Exception ignored in"


def of_several(readers: Mapping[str, Reader], files: int) -> list[Finding]:
    """Return one finding of each kind, from the file where it explains most.

    Args:
        readers: by the names of the files.
        files: number of files; those without a reader were not read.
    """
    by_code: dict[str, list[tuple[_Seen, Level, str]]] = defaultdict(list)
    for name, reader in readers.items():
        for seen, level in reader.results():
            by_code[seen.rule.code].append((seen, level, name))
    kinds = [sorted(found, key=lambda one: _key(*one[:2])) for found in by_code.values()]
    kinds.sort(key=lambda found: _key(*found[0][:2]))
    findings = []
    for (seen, level, name), *others in kinds:
        finding = _finding(seen, level)
        more = f", and in {len(others)} more file{'s' if len(others) > 1 else ''}" if others else ""
        findings.append(replace(finding, where=f"{_short(name)}, {finding.where}{more}"))
    if all(finding.level in ("ok", "note") for finding in findings):
        lines = sum(reader.lines for reader in readers.values())
        findings.insert(0, _clean(f"{len(readers)} files, {lines} lines"))
    if files > len(readers):
        what = f"{len(readers)} of {files} files were read"
        findings.append(Finding("log-unread", "warn", "", what, "", "yolofleet doctor --log FILE"))
    return findings


def _clean(amount: str) -> Finding:
    return Finding("log-clean", "ok", "", f"{amount}, and no known error")


def classify(lines: Iterable[str]) -> list[Finding]:
    """Return what a log means.

    Args:
        lines: any number of any length, with or without line ends. Lines of several ranks may be mixed.

    Returns:
        At least one finding, the worst first, and among equal levels the cause before its effects. A healthy log has
        no ``warn`` and no ``fault``.
    """
    return Reader().through(lines).findings()


_COLOUR = re.compile("\x1b\\[[0-9;?]{0,16}[A-Za-z]")
_RANK = re.compile(r"\[rank ?(\d{1,6})\]|\[default(\d{1,6})\]|\brank (\d{1,6})\]|\bfor rank (\d{1,6})\b")
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]{0,120}(?:Error|Exception|Expired))(?:: (.*)|:?\s*)$")
_NOT_OURS = ("ChildFailedError", "CalledProcessError", "ProcessExitedException", "ProcessRaisedException")
_OWN = {kind.__name__ for kind in YolofleetError.__subclasses__()}
_END = re.compile(
    r"(?:(?:exit|return)[ _]?code *[:=]? *|exited with code |exit status:? )(?P<code>-?\d{1,10})"
    r"|\b(?:on|with|by|received) signal:? (?P<number>\d{1,3})\b"
    rf"|(?:<signals\.|\b(?:on|with|by|received) (?:signal )?)sig(?P<name>{'|'.join(SIGNAL_NAMES)})\b"
)
# else it may be a small program that a run called
_OF_A_RUN = ("exitcode", "rank", "task", "worker", "process ")
_WINDOWS = {0xC0000005: 11, 0xC000013A: 2}  # access violation, Ctrl-C
_TENTATIVE = re.compile(r"\[w[\d ]|nccl info|retry|ipv6 network addresses|\buserwarning: ")
_HOST = r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]{0,252})"  # goes into a command, so nothing that a shell or a program would interpret
_PLACES = (  # (host, 29500), port: 29500, 10.0.0.1<29500>, [host]:29500
    re.compile(rf"\({_HOST}, (?P<port>\d{{1,5}})\)", re.ASCII),
    re.compile(r"\bport: (?P<port>\d{1,5})\b", re.ASCII),
    re.compile(rf"{_HOST}<(?P<port>\d{{1,5}})?>", re.ASCII),
    re.compile(rf"(?:{_HOST}|::)\]?:(?P<port>\d{{1,5}}) ", re.ASCII),
)
_FIELD = re.compile(r"^\s*(rank|host)\s*: (\S+)")


@dataclass
class _Seen:
    """What is remembered of one kind of finding."""

    rule: Rule
    line: int
    text: str
    count: int = 0
    ranks: set[int] = field(default_factory=set)
    firm: bool = False  # at least once it was more than a failed attempt
    healed: bool = False  # the processes met after the last failed attempt
    root: bool = False  # torchrun names it as the first failure
    explained: bool = False  # the lines after it name the cause
    host: str = ""
    fix: str = ""


class Reader:
    def __init__(self) -> None:
        self.seen: dict[str, _Seen] = {}
        self.known: dict[int, Rule | None] = {}  # hash of a line without its numbers -> its meaning
        self.lines = 0
        self.summary_left = 0  # expected lines of torchrun's summary
        self.summary: dict[str, str] = {}
        self.own_left = 0  # expected lines of an error of yolofleet
        self.last_error_left = 0  # expected lines of an error of NCCL
        self.last_error_next = False  # the next line names NCCL's error
        self.nccl_warn = 0  # the first line with NCCL WARN; 0 = none so far
        self.ignored_left = 0  # expected lines of an error that Python ignored
        self.ignored_front = ""  # text before each of them

    # -- reading ---------------------------------------------------------------------------------------------

    def through(self, lines: Iterable[str]) -> Reader:
        """Examine all lines. Remember only what was found."""
        for number, line in enumerate(lines, 1):
            self.line(line, number)
        self.known.clear()
        return self

    def line(self, raw: str, number: int) -> None:
        """Examine a line; ``number`` counts from 1."""
        self.lines = number
        if len(raw) > LONGEST:
            raw = f"{raw[: LONGEST // 2]} {raw[-LONGEST // 2 :]}"
        key = hash(raw.encode("utf-8", "replace").translate(None, DIGITS))  # 8 times as fast as with str
        expected = self.summary_left or self.own_left or self.last_error_left or self.ignored_left
        if not expected and key in self.known:
            rule = self.known[key]
            if rule is not None:
                text = _tidy(raw)
                self._hit(rule, text, text.lower(), number)
            return
        text = _tidy(raw)
        low = text.lower()
        if not self.nccl_warn and "nccl warn" in low:
            self.nccl_warn = number
        self._follow(text, low)
        if "exception ignored in" in low:  # harmless: Python prints it at the end of a process or object
            self.ignored_left, self.ignored_front = IGNORED, text[: front(text)]
        elif self.ignored_left and self._is_ignored(text):
            self.ignored_left = 0
        elif "root cause" in low:
            self.summary_left, self.summary = SUMMARY, {}
        elif any(sign in low for sign in MET):
            for seen in self.seen.values():
                seen.healed = not seen.firm
        elif rule := first_match(PATTERNS, low):
            self._hit(rule, text, low, number)
            self._remember(key, low, rule)
        elif ("exit" in low or "sig" in low) and (end := _END.search(low)):
            self._ended(end, text, low, number)
        elif not self._exception(text, low, number):
            self._remember(key, low, None)

    def _remember(self, key: int, low: str, rule: Rule | None) -> None:
        if first_match(NUMBERED, low.translate(NO_DIGITS)) is None:
            if len(self.known) >= REMEMBERED:
                self.known.clear()
            self.known[key] = rule

    def _follow(self, text: str, low: str) -> None:
        """Examine a line after one that announced it."""
        if self.last_error_left:
            self.last_error_left -= 1
            self._last_error(text, low)
        if self.own_left:
            self.own_left -= 1
            self._advice(text)
        if self.summary_left:
            self.summary_left -= 1
            if match := _FIELD.match(text):
                self.summary[match[1]] = match[2]

    def _hit(self, rule: Rule, text: str, low: str, number: int, *, root: bool = False) -> _Seen:
        tentative = _TENTATIVE.search(low) is not None
        seen = self.seen.get(rule.code)
        if seen is None or (not tentative and not seen.firm) or (root and not seen.root):
            before = seen
            seen = self.seen[rule.code] = _Seen(rule, number, text)
            if before is not None:
                seen.count, seen.ranks = before.count, before.ranks
        seen.count += 1
        seen.firm |= not tentative
        seen.healed = False
        rank = _RANK.search(low)
        if rank and len(seen.ranks) <= MOST_RANKS:
            seen.ranks.add(int(next(group for group in rank.groups() if group)))
        if rule.code == NCCL_ERROR:
            self.last_error_left = 4
        return seen

    def _last_error(self, text: str, low: str) -> None:
        """Examine a line after an error of NCCL: ``Last error:``, and in the next line the error."""
        seen = self.seen[NCCL_ERROR]
        rule = first_match(PATTERNS, low)
        if rule is not None and rule.code != NCCL_ERROR and rule.level == "fault":
            seen.explained = True
        elif self.last_error_next:
            seen.text = f"{seen.text} {text}"
        self.last_error_next = low.endswith("last error:")

    # -- ends of processes -----------------------------------------------------------------------------------

    def _ended(self, end: re.Match[str], text: str, low: str, number: int) -> None:
        """Recognise exit codes, statuses and signals, in the words of torchrun, Python, shells, SLURM and MPI."""
        signal = _signal_of(end)
        if signal is None or not (signal in SIGNALS or any(word in low for word in _OF_A_RUN)):
            return
        root = self.summary_left > 0
        seen = self._hit(SIGNALS.get(signal, BY_CODE["worker-failed"]), text, low, number, root=root)
        if root:
            seen.root, seen.host = True, self.summary.get("host", "")
            if self.summary.get("rank", "").isdigit():
                seen.ranks = {int(self.summary["rank"])}
            self.summary_left = 0

    # -- exceptions ------------------------------------------------------------------------------------------

    def _exception(self, text: str, low: str, number: int) -> bool:
        """Recognise the last line of a traceback, and errors of yolofleet itself."""
        match = _EXCEPTION.match(text, front(text))
        if match is None:
            return False
        name = match[1].rsplit(".", 1)[-1]
        if name in _OWN and match[1] == name:
            self._hit(BY_CODE[OWN_ERROR], text, low, number)
            self.own_left = 4
        elif name not in _NOT_OURS:
            self._hit(BY_CODE["python-error"], text, low, number)
        return True

    def _is_ignored(self, text: str) -> bool:
        """Return whether this is the last line of a traceback that Python printed and ignored."""
        self.ignored_left -= 1
        begin = front(text)
        return text[:begin] == self.ignored_front and _EXCEPTION.match(text, begin) is not None

    def _advice(self, text: str) -> None:
        """Take the advice from a ``try`` line of an error of yolofleet."""
        key, _, value = text.partition(":")
        if key.strip() == "try":
            seen = self.seen[OWN_ERROR]
            seen.fix = seen.fix or value.strip()
            self.own_left = 0

    # -- results ---------------------------------------------------------------------------------------------

    def results(self) -> list[tuple[_Seen, Level]]:
        """Return what was found, with its level."""
        self._point_to_nccl_warn()
        unmet = any(seen.firm and seen.rule.unmet for seen in self.seen.values())
        return [(seen, self._level(seen, unmet)) for seen in self.seen.values()]

    def _point_to_nccl_warn(self) -> None:
        """Let NCCL's error name the line with ``NCCL WARN``, and come after the finding of that line."""
        error = self.seen.get(NCCL_ERROR)
        if error is None or not self.nccl_warn:
            return
        why = f"NCCL failed. Line {self.nccl_warn}, with `NCCL WARN`, says what failed."
        error.rule = replace(error.rule, why=why, fix="")
        error.explained |= any(
            seen.rule.level == "fault" and "nccl warn" in seen.text.lower()
            for code, seen in self.seen.items()
            if code != NCCL_ERROR
        )

    def findings(self) -> list[Finding]:
        """Return the findings, the worst first."""
        sorted_results = sorted(self.results(), key=lambda one: _key(*one))
        findings = [_finding(seen, level) for seen, level in sorted_results]
        if all(level in ("ok", "note") for _, level in sorted_results):
            clean = _clean(f"{self.lines} lines")
            findings.insert(0, clean if self.lines else replace(clean, seen="the log is empty"))
        return findings

    @staticmethod
    def _level(seen: _Seen, unmet: bool) -> Level:
        """Return a level: a failed attempt is a fault only if the processes did not meet in the end."""
        if seen.firm or seen.rule.level != "fault":
            return seen.rule.level
        return "note" if seen.healed else "fault" if unmet else "warn"


def _key(seen: _Seen, level: Level) -> tuple[int, int, bool, int]:
    """Return the sort key of a finding: what explains most comes first."""
    order = "explained" if seen.explained else seen.rule.order
    return -LEVELS.index(level), ORDERS.index(order), not seen.root, seen.line


def _signal_of(end: re.Match[str]) -> int | None:
    """Return the signal of a match of _END; 0 for an error, None for success."""
    if end["name"]:
        return SIGNAL_NAMES[end["name"]]
    if end["number"]:
        return int(end["number"])
    code = int(end["code"])
    if code < 0:
        return -code
    if 128 < code < 160:  # of a shell
        return code - 128
    return _WINDOWS.get(code, 0) if code else None


def _finding(seen: _Seen, level: Level) -> Finding:
    where = f"line {seen.line}"
    if seen.ranks:
        ranks = sorted(seen.ranks)
        named = ", ".join(map(str, ranks[:MOST_RANKS])) + (", ..." if len(ranks) > MOST_RANKS else "")
        where = f"rank {named}{f' on {seen.host}' if seen.host else ''}, {where}"
    why = seen.rule.why
    if seen.healed:
        why = f"A later attempt worked. {why}"
    elif not seen.firm and level == "warn":
        why = f"A warning, or an attempt that may have worked later: the log does not show it. {why}"
    times = f" ({seen.count} similar lines)" if seen.count > 1 else ""
    fix = _filled(seen.fix or seen.rule.fix, seen.text)
    return Finding(seen.rule.code, level, _short(where), _short(seen.text) + times, why, fix)


def _filled(fix: str, text: str) -> str:
    """Return a command with the address and port that the line names."""
    place = next((match for pattern in _PLACES if (match := pattern.search(text))), None)
    if place is None:
        return fix
    if host := place.groupdict().get("host"):
        fix = re.sub(r"\b(ADDRESS|NAME)\b", host, fix)
    return re.sub(r"\bPORT\b", place["port"], fix) if place["port"] else fix


def _tidy(raw: str) -> str:
    """Return a line without colours, and without blanks at its ends."""
    return (_COLOUR.sub("", raw) if "\x1b" in raw else raw).strip()


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
