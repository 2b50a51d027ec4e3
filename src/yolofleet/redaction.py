"""Remove secrets and personal names from text that leaves the machine or a trusted process.

No rule recognises every secret. These rules remove too much rather than too little: values with a telling name, values that the
environment stores under such a name, the formats of well-known tokens, and user data and queries of URLs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

REMOVED = "[removed]"
_SECRET = r"(?:secret|token|passw|passphrase|pwd|api[\s_-]?key|access[\s_-]?key|private[\s_-]?key|account[\s_-]?key|credential|auth(?!or)|cookie|signature)"
_REST = r"[\w.-]{0,60}"  # of the name
_WORDS = r"(?:KEY|PASS|PW|AUTH|CREDS?)"  # of names in capitals, such as SSH_KEY, PGPASS and DB_PASS
SECRET_NAME = re.compile(rf"{_SECRET}|(?:^|_){_WORDS}(?:_|$)|PASS$", re.IGNORECASE)
FOLDERS = {"PWD", "OLDPWD"}  # variables of shells
SHORTEST = 4  # characters of a value of the environment; shorter ones would remove parts of words


def _without_query(url: re.Match[str]) -> str:
    return f"{url[1]}?{REMOVED}" if url[2] else url[0]


# A log may have a line of megabytes, so the time of a rule is linear: an unbounded part either ends a pattern or stops at
# the next possible start, so no two attempts read the same text.
_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?s)-----BEGIN [A-Z ]{1,40}-----.*?(?:-----END [A-Z ]{1,40}-----|\Z)", REMOVED),
        (r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)[^\s/\"'<>]{1,4096}@", rf"\1{REMOVED}@"),
        (r"(?<![\w:/])//[^\s/@:\"'<>]{1,64}:[^\s/\"'<>]{1,256}@", f"//{REMOVED}@"),
        (r"(?i)(\bhttps://hooks\.slack\.com/services/)[\w/]+", rf"\1{REMOVED}"),
        (r"(?i)(\bhttps?://[^\s?#\"'<>]+)([?#][^\s\"'<>,)\]}]+)?", _without_query),
        (r"(?i)\b(bearer|basic)(\s+)[a-z0-9+/=._~-]{6,}", rf"\1\2{REMOVED}"),
        (r"(?i)\b((?:set-)?cookie\s{0,3}:\s{0,3})[^\s\"'][^\n\"']*", rf"\1{REMOVED}"),
        (
            r"([\s\"'](?:-u|--user)[\s,=\"']{1,4})[^\s\"',:]{1,64}:[^\s\"',]+",
            rf"\1{REMOVED}",
        ),  # curl -u NAME:PASSWORD
        # NAME=value, NAME: value, "NAME": "value", also inside a JSON string; the quotes stay, so JSON stays JSON
        (
            rf"(?i)({_SECRET}{_REST}\\?[\"']?\s{{0,3}}[=:]\s{{0,3}})(\\?[\"'])[^\n]*?\2",
            rf"\1\2{REMOVED}\2",
        ),
        (rf"(?i)({_SECRET}{_REST}\"\s{{0,3}}:\s{{0,3}})[^\s\"'\[{{,}}\]\\]+", rf'\1"{REMOVED}"'),
        (
            rf"(?i)({_SECRET}{_REST}\s{{0,3}}[=:]\s{{0,3}})(?!\[removed\])[^\s\"'\[{{,;}}\])\\]+",
            rf"\1{REMOVED}",
        ),
        # lists and mappings of one line, and quoted text of several lines
        (
            rf"(?i)({_SECRET}{_REST}\\?[\"']?\s{{0,3}}[=:]\s{{0,3}})"
            r"(?!\[removed\])[\[{](?:[^\[\]{}\n]|[\[{][^\[\]{}\n]{0,1000}[\]}]){0,1000}[\]}]",
            rf'\1"{REMOVED}"',
        ),
        (
            rf"(?i)({_SECRET}{_REST}\s{{0,3}}[=:]\s{{0,3}}([\"']))[^\"'\n]{{0,1000}}\n[^\"']{{0,4000}}\2",
            rf"\1{REMOVED}\2",
        ),
        # SSH_KEY=value, pass: value, password is value
        (
            rf"\b((?:[A-Z][A-Z0-9_]{{0,60}}_)?{_WORDS}(?:_[A-Z0-9_]{{1,60}})?\s{{0,3}}[=:]\s{{0,3}}[\"']?)[^\s\"',;]+",
            rf"\1{REMOVED}",
        ),
        (r"(\b[A-Z]{1,60}PASS\s{0,3}[=:]\s{0,3}[\"']?)[^\s\"',;]+", rf"\1{REMOVED}"),
        (r"(?im)(^\s{0,20}pass\s{0,3}[=:]\s{0,3}|\bpass=)[^\s\"',;]+", rf"\1{REMOVED}"),
        (
            r"(?i)(\b(?:password|passwd|passphrase)\s{1,3}(?:is|was)\s{1,3}[\"']?)[^\s\"',;]+",
            rf"\1{REMOVED}",
        ),
        # --name value, also as neighbours in a list of arguments
        (
            rf"(?i)((?<!-)--[\w-]{{0,60}}{_SECRET}{_REST}\\?[\"']?,?\s{{1,3}}\\?[\"']?)(?!-|\[removed\])[^\s,\"'\]\\]+",
            rf"\1{REMOVED}",
        ),
        (
            r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bhf_\w{16,}"
            r"|\bnpm_\w{20,}|\bpypi-[\w-]{16,}|\bSG\.[\w-]{10,}\.[\w-]{10,}|\bdckr_pat_[\w-]{16,}|\bya29\.[\w.-]{16,}"
            r"|\bsk-[\w-]{16,}|\bxox[a-z]-[\w-]{8,}|\bAIza[\w-]{20,}|\beyJ[\w-]{6,}(?:\.[\w-]*){0,2}"
            r"|\b(?:local-)?[0-9a-f]{40}\b",  # Weights & Biases; also a commit, which is no loss
            REMOVED,
        ),
        (r"[\w.+-]{1,64}@[\w-]{1,63}\.[\w.-]{1,190}\w", REMOVED),  # addresses of mail
        (r"((?:/home|/Users|[A-Za-z]:\\Users)[/\\])[^/\\\s\"':,;]{1,64}", r"\1[user]"),
    )
)


_BLOCK = re.compile(
    rf"(\s{{0,200}})(?:- )?[\"']?[\w.-]{{0,60}}{_SECRET}{_REST}[\"']?\s{{0,3}}[=:]\s{{0,3}}(?:[>|][+-]?\d?|[\[{{])?\s{{0,20}}(?:#.*)?",
    re.IGNORECASE,
)


def _without_blocks(text: str) -> str:
    """Remove the lines below a secret name that has no value in its own line: YAML's blocks and lists, indented JSON."""
    lines, secret_indent = [], -1
    for line in text.split("\n"):
        content = line.lstrip(" \t")
        indent = len(line) - len(content)
        is_inside = indent > secret_indent or (indent == secret_indent and content.startswith("- "))
        if secret_indent >= 0 and content.strip() and is_inside:
            line = line[:indent] + REMOVED
        elif content.strip() or secret_indent < 0:
            found = _BLOCK.fullmatch(line.rstrip("\r")) if len(line) < 500 else None
            secret_indent = indent if found else -1
        lines.append(line)
    return "\n".join(lines)


class Redaction:
    """Removes secrets and names that the environment and the account of this process contain.

    Args:
        environment: its values with a telling name (token, password, ...) are removed wherever they occur.
        home: becomes ``~``. user: becomes ``[user]`` where it stands alone; "root" stays because it names nobody.
    """

    def __init__(self, environment: Mapping[str, str], *, home: str = "", user: str = "") -> None:
        names = (name for name in environment if SECRET_NAME.search(name) and name not in FOLDERS)
        values = {environment[name] for name in names if len(environment[name]) >= SHORTEST}
        words = [re.escape(value) for value in sorted(values, key=len, reverse=True)]
        self._values = re.compile("|".join(words)) if words else None
        home = home.rstrip("/\\")
        # not a part of a longer name, and not the user of mysql://root:@host
        whole = rf"(?<!:/){re.escape(home)}(?![\w.-])(?!:[^\s/]{{0,256}}@)"
        self._home = re.compile(whole) if Path(home) != Path(home).parent else None
        alone = len(user) >= 3 and user != "root"
        self._user = re.compile(rf"(?<![\w-]){re.escape(user)}(?![\w-])") if alone else None

    def __call__(self, text: str) -> str:
        """Return ``text`` without secrets."""
        if self._values is not None:
            text = self._values.sub(REMOVED, text)
        if self._home is not None:
            text = self._home.sub("~", text)
        text = _without_blocks(text)
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
        return self._user.sub("[user]", text) if self._user is not None else text
