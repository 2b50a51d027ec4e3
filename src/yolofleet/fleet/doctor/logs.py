"""Reads a log of NCCL, gloo, torchrun, Python, SLURM or the kernel, and says what it means.

One pass, whatever the size, over a file or all files of a run; what is kept is one entry per kind of finding. Each line is held against the patterns
of ``log_rules``; besides, ends of processes (exit codes, signals), torchrun's summary and the last lines of Python
tracebacks are understood. The finding that explains the others comes first.

Most lines of a long log differ from earlier ones in their numbers only: what such a line turned out to mean is
remembered, so it is not examined again.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from yolofleet.errors import ConfigError, YolofleetError
from yolofleet.files.foreign import open_foreign
from yolofleet.fleet.doctor.findings import LEVELS, Finding, Level
from yolofleet.fleet.doctor.log_rules import (
    BY_CODE,
    MET,
    NCCL_ERROR,
    ORDERS,
    RULES,
    SIGNAL_NAMES,
    SIGNALS,
    Rule,
)
from yolofleet.text import size_text

OWN_ERROR = "yolofleet-error"
LONGEST = 1 << 14  # characters of a line that are looked at: half from its start, half from its end
SHOWN = 240  # characters of a line in a finding
MOST_RANKS = 16  # named in a finding
REMEMBERED = 1 << 16  # lines without their numbers
LOG_SUFFIXES = (".log", ".out", ".err")  # ours and torchrun's; SLURM's
MOST_FILES = 1024  # of a folder; a run has one for each rank and host
MOST_LOG_BYTES = 1 << 30  # about half a minute; a sparse file can claim terabytes
SUMMARY = 14  # lines that torchrun's "Root Cause" has at most
IGNORED = 40  # lines that a traceback after "Exception ignored in" has at most


def read_log(path: Path | str) -> list[Finding]:
    """What a log means: a file, all logs of a folder (a run's, or the folder ``logs`` in it; of torchrun's --log-dir,
    those in the folders below), or ``-``, standard input.

    Returns:
        As :func:`classify`; of a folder, one of a kind, with the file in which it explains most.

    Raises:
        ConfigError: it cannot be read.
    """
    if str(path) == "-":
        return classify(_pieces(sys.stdin))
    folder = Path(path)
    if not folder.is_dir():
        return _read(folder).findings()
    folder = folder / "logs" if (folder / "logs").is_dir() else folder
    try:
        names = _logs_in(folder, "*") or _logs_in(folder, "**/*")
    except OSError as why:
        raise ConfigError(f"cannot read {folder}: {why.strerror or why}", source="--log") from None
    if not names:
        kinds = ", ".join(f"*{suffix}" for suffix in LOG_SUFFIXES)
        raise ConfigError(
            f"none of {kinds} in {folder}", source="--log", hint="a log, or the folder logs of a run"
        )
    return _of_several({name: _read(folder / name) for name in names[:MOST_FILES]}, len(names))


def _logs_in(folder: Path, pattern: str) -> list[str]:
    """Their paths in the folder, rank-2 before rank-10."""
    found = (file for file in folder.glob(pattern) if file.suffix in LOG_SUFFIXES and file.is_file())
    return sorted((str(file.relative_to(folder)) for file in found), key=_natural)


def _natural(name: str) -> list[tuple[str, int]]:
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d{0,9})", name)]


def _read(path: Path) -> _Reader:
    try:
        with open_foreign(path) as file:
            if os.fstat(file.fileno()).st_size > MOST_LOG_BYTES:
                raise ConfigError(
                    f"{path} has more than the {size_text(MOST_LOG_BYTES)} that are read",
                    source="--log",
                    hint="give its last part: tail -c 500M LOG | yolofleet doctor --log -",
                )
            # PowerShell's ">" writes UTF-16
            encoding = "utf-16" if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
            file.seek(0)
            with io.TextIOWrapper(file, encoding=encoding, errors="replace") as text:
                return _Reader().through(_pieces(text))
    except (OSError, ValueError) as why:
        raise ConfigError(
            f"{path} cannot be read: {getattr(why, 'strerror', None) or why}",
            source="--log",
            hint="give the file of a log, or --log - for standard input",
        ) from why


def _of_several(readers: Mapping[str, _Reader], files: int) -> list[Finding]:
    """One finding of a kind, from the file where it explains most.

    Args:
        readers: by the names of the files.
        files: that there are; the others were not read.
    """
    by_code: dict[str, list[tuple[_Seen, Level, str]]] = defaultdict(list)
    for name, reader in readers.items():
        for seen, level in reader.told():
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
    return Finding("log-clean", "ok", "", f"{amount}, and no error that is known")


def classify(lines: Iterable[str]) -> list[Finding]:
    """What a log means.

    Args:
        lines: of any number and length, with or without line ends. Several ranks may be mixed.

    Returns:
        At least one finding, worst first and among equally bad ones the cause before what follows from it. A
        healthy log has no ``warn`` and no ``fault``.
    """
    return _Reader().through(lines).findings()


def _pieces(file: TextIO) -> Iterator[str]:
    """Lines of a text file; a piece at a time where a line never ends."""
    while piece := file.readline(1 << 20):
        yield piece


# -- patterns ------------------------------------------------------------------------------------------------


_DIGITS = b"0123456789"
_NO_DIGITS = dict.fromkeys(_DIGITS)  # for str.translate


_FRONT = re.compile(r"(?:[\s>*`|]|\[[^\]]{0,60}\]:?|\([^)]{0,60}\)){0,20}")


def _front(line: str) -> int:
    """Where the program's own words start, after what launchers and people put before a line."""
    match = _FRONT.match(line)
    return match.end() if match else 0


@dataclass(frozen=True)
class _Pattern:
    """A pattern of ``log_rules``, taken apart."""

    parts: tuple[str, ...]
    at_start: bool
    at_end: bool
    rule: Rule

    def fits(self, line: str) -> bool:
        """Whether a line in lower case, without blanks at its ends, has all parts in their order."""
        if self.at_start and not line.startswith(self.parts[0], _front(line)):
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

    def without_numbers(self) -> _Pattern:
        return replace(self, parts=tuple(part.translate(_NO_DIGITS) for part in self.parts))


def _first_fit(patterns: Iterable[tuple[str, _Pattern]], line: str) -> Rule | None:
    """The rule of the first pattern that fits.

    Args:
        patterns: each after its longest part, which most lines do not have.
    """
    for longest, pattern in patterns:
        if longest in line and pattern.fits(line):
            return pattern.rule
    return None


def _keyed(patterns: Iterable[_Pattern]) -> list[tuple[str, _Pattern]]:
    return [(max(pattern.parts, key=len), pattern) for pattern in patterns]


def _taken_apart(rules: Iterable[Rule]) -> tuple[_Pattern, ...]:
    return tuple(
        _Pattern(
            tuple(part for part in pattern.strip("^$").split("*") if part.strip()),
            pattern.startswith("^"),
            pattern.endswith("$"),
            rule,
        )
        for rule in rules
        for pattern in rule.patterns
    )


_PATTERNS = _keyed(_taken_apart(RULES))
# Lines that differ in their numbers only have the same meaning, unless they fit one of these.
_NUMBERED = _keyed(p.without_numbers() for _, p in _PATTERNS if p.without_numbers() != p)

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
_OF_A_RUN = (
    "exitcode",
    "rank",
    "task",
    "worker",
    "process ",
)  # else perhaps of a small program that it called
_WINDOWS = {0xC0000005: 11, 0xC000013A: 2}  # access violation, Ctrl-C
_TENTATIVE = re.compile(r"\[w[\d ]|nccl info|retry|ipv6 network addresses|\buserwarning: ")
_HOST = r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]{0,252})"  # goes into a command: nothing that a shell or an option would be
_PLACES = (  # (host, 29500), port: 29500, 10.0.0.1<29500>, [host]:29500
    re.compile(rf"\({_HOST}, (?P<port>\d{{1,5}})\)", re.ASCII),
    re.compile(r"\bport: (?P<port>\d{1,5})\b", re.ASCII),
    re.compile(rf"{_HOST}<(?P<port>\d{{1,5}})?>", re.ASCII),
    re.compile(rf"(?:{_HOST}|::)\]?:(?P<port>\d{{1,5}}) ", re.ASCII),
)
_FIELD = re.compile(r"^\s*(rank|host)\s*: (\S+)")


@dataclass
class _Seen:
    """What is kept of a kind of finding.

    Attributes:
        firm: at least once it was more than a failed attempt.
        healed: the processes met after the last attempt that failed.
        root: torchrun names it as the first failure.
        explained: the lines after it said what it was.
    """

    rule: Rule
    line: int
    text: str
    count: int = 0
    ranks: set[int] = field(default_factory=set)
    firm: bool = False
    healed: bool = False
    root: bool = False
    explained: bool = False
    host: str = ""
    fix: str = ""


class _Reader:
    def __init__(self) -> None:
        self.seen: dict[str, _Seen] = {}
        self.known: dict[int, Rule | None] = {}  # hash of a line without its numbers -> its meaning
        self.lines = 0
        self.summary_left = 0  # lines of torchrun's summary still to come
        self.summary: dict[str, str] = {}
        self.own_left = 0  # lines that an error of ours still may have
        self.last_error_left = 0  # lines that an error of NCCL still may have
        self.last_error_next = False  # the next line says what NCCL's error was
        self.nccl_warn = 0  # the first line in which NCCL says what failed; 0 = none so far
        self.ignored_left = 0  # lines in which the error that Python ignored may still come
        self.ignored_front = ""  # what stands before them

    # -- reading ---------------------------------------------------------------------------------------------

    def through(self, lines: Iterable[str]) -> _Reader:
        """Look at all lines, and remember what was found alone."""
        for number, line in enumerate(lines, 1):
            self.line(line, number)
        self.known.clear()
        return self

    def line(self, raw: str, number: int) -> None:
        """Look at a line.

        Args:
            number: counted from 1.
        """
        self.lines = number
        if len(raw) > LONGEST:
            raw = f"{raw[: LONGEST // 2]} {raw[-LONGEST // 2 :]}"
        key = hash(raw.encode("utf-8", "replace").translate(None, _DIGITS))  # 8 times as fast as with str
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
        if "exception ignored in" in low:  # at the end of a process or an object: it harms nobody
            self.ignored_left, self.ignored_front = IGNORED, text[: _front(text)]
        elif self.ignored_left and self._is_ignored(text):
            self.ignored_left = 0
        elif "root cause" in low:
            self.summary_left, self.summary = SUMMARY, {}
        elif any(sign in low for sign in MET):
            for seen in self.seen.values():
                seen.healed = not seen.firm
        elif rule := _first_fit(_PATTERNS, low):
            self._hit(rule, text, low, number)
            self._remember(key, low, rule)
        elif ("exit" in low or "sig" in low) and (end := _END.search(low)):
            self._ended(end, text, low, number)
        elif not self._exception(text, low, number):
            self._remember(key, low, None)

    def _remember(self, key: int, low: str, rule: Rule | None) -> None:
        if _first_fit(_NUMBERED, low.translate(_NO_DIGITS)) is None:
            if len(self.known) >= REMEMBERED:
                self.known.clear()
            self.known[key] = rule

    def _follow(self, text: str, low: str) -> None:
        """Lines after one that announced them."""
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
        """What follows an error of NCCL: ``Last error:`` and, in the line after it, what it was."""
        seen = self.seen[NCCL_ERROR]
        rule = _first_fit(_PATTERNS, low)
        if rule is not None and rule.code != NCCL_ERROR and rule.level == "fault":
            seen.explained = True
        elif self.last_error_next:
            seen.text = f"{seen.text} {text}"
        self.last_error_next = low.endswith("last error:")

    # -- ends of processes -----------------------------------------------------------------------------------

    def _ended(self, end: re.Match[str], text: str, low: str, number: int) -> None:
        """Exit codes, statuses and signals, in the words of torchrun, Python, shells, SLURM and MPI."""
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
        """The last line of a traceback, and the errors of yolofleet itself."""
        match = _EXCEPTION.match(text, _front(text))
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
        """The last line of a traceback that Python told and ignored."""
        self.ignored_left -= 1
        front = _front(text)
        return text[:front] == self.ignored_front and _EXCEPTION.match(text, front) is not None

    def _advice(self, text: str) -> None:
        """A ``try`` line of one of our errors."""
        key, _, value = text.partition(":")
        if key.strip() == "try":
            seen = self.seen[OWN_ERROR]
            seen.fix = seen.fix or value.strip()
            self.own_left = 0

    # -- telling ---------------------------------------------------------------------------------------------

    def told(self) -> list[tuple[_Seen, Level]]:
        self._point_to_nccl_warn()
        unmet = any(seen.firm and seen.rule.unmet for seen in self.seen.values())
        return [(seen, self._level(seen, unmet)) for seen in self.seen.values()]

    def _point_to_nccl_warn(self) -> None:
        """Let NCCL's error name the line with ``NCCL WARN``, and stand after the finding of that line."""
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
        told = sorted(self.told(), key=lambda one: _key(*one))
        findings = [_finding(seen, level) for seen, level in told]
        if all(level in ("ok", "note") for _, level in told):
            clean = _clean(f"{self.lines} lines")
            findings.insert(0, clean if self.lines else replace(clean, seen="the log is empty"))
        return findings

    @staticmethod
    def _level(seen: _Seen, unmet: bool) -> Level:
        """An attempt that failed is a fault only if the processes did not meet in the end."""
        if seen.firm or seen.rule.level != "fault":
            return seen.rule.level
        return "note" if seen.healed else "fault" if unmet else "warn"


def _key(seen: _Seen, level: Level) -> tuple[int, int, bool, int]:
    """Sorts what explains most to the front."""
    order = ORDERS.index("explained") if seen.explained else seen.rule.rank
    return -LEVELS.index(level), order, not seen.root, seen.line


def _signal_of(end: re.Match[str]) -> int | None:
    """What a match of _END tells: the signal that ended a process, 0 for an error, None for success."""
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
        why = f"It was tried again, and worked. {why}"
    elif not seen.firm and level == "warn":
        why = f"A warning, or an attempt that perhaps was repeated and worked: the log does not say. {why}"
    times = f" ({seen.count} lines like it)" if seen.count > 1 else ""
    fix = _filled(seen.fix or seen.rule.fix, seen.text)
    return Finding(seen.rule.code, level, _short(where), _short(seen.text) + times, why, fix)


def _filled(fix: str, text: str) -> str:
    """A command with the address and port that the line names, where it names them."""
    place = next((match for pattern in _PLACES if (match := pattern.search(text))), None)
    if place is None:
        return fix
    if host := place.groupdict().get("host"):
        fix = re.sub(r"\b(ADDRESS|NAME)\b", host, fix)
    return re.sub(r"\bPORT\b", place["port"], fix) if place["port"] else fix


def _tidy(raw: str) -> str:
    """A line without colours and blanks around it."""
    return (_COLOUR.sub("", raw) if "\x1b" in raw else raw).strip()


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
