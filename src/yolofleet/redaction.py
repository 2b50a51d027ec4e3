"""Remove secrets and personal names from text that leaves the machine or a trusted process.

No rule recognises every secret. These rules remove too much rather than too little: values with a telling name, values that the
environment stores under such a name, the formats of well-known tokens, and user data and queries of URLs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

REMOVED = "[removed]"
SHORTEST = 4  # characters of a value of the environment; shorter ones would remove parts of words
SHORTEST_OF_KEYS = 6  # the same, if only a part of the name tells; it may be a key of a table

# Parts of patterns, all with ``re.VERBOSE``. Each comment has an example.
_IS = r"\s{0,3} (?: [=:]{1,2}>? | -> ) \s{0,3}"  # between a name and its value
# Numbers are counts and weights under these names.
_NOT_COUNT = rf"""(?!  # max_tokens: 5
    s\b \\?["']? {_IS} [\s\[+-]{{0,40}} [\d.]{{1,20}} (?![\w-])
)"""
_NOT_NUMBER = rf"""(?!  # cls_pw: 1.0, forward pass: 3 ms
    \\?["']? {_IS} [+-]? (?: \d{{1,5}} | \d{{0,9}}\.\d{{1,20}} ) (?: e[+-]?\d+ )? (?: ms | s | % )? (?! \w | \.\w )
)"""
_TELLING = rf"""
    secret  # client_secret
  | token (?! i[sz] | s/s ) {_NOT_COUNT}  # HF_TOKEN; neither tokenizer nor tokens/s
  | passw | passphrase | pwd  # db_password
  | (?: api | access | private | account ) [\s_-]? key  # api-key
  | credential | auth (?! or )  # authorization; not author
  | cookie | signature | connection_?string  # AZURE_STORAGE_CONNECTION_STRING
"""
_KEYS = r"""
    (?-i: (?<= [A-Z0-9] ) _ (?: KEY | PAT ) (?! [A-Za-z] ) )  # WANDB_KEY
  | (?<! [a-z] ) (?: ssh | wandb | encryption | licen[cs]e | signing | master | deploy | storage ) [_-]? key (?! [\w-] )  # ssh-key
"""
_SHORT = rf"""
    (?: (?<! [a-z] ) | (?<= pg ) | (?<= db ) )  # pgpass
    (?<! forward\  ) (?<! backward\  ) (?<! per[_-] )
    (?: pass | pw | creds? ) \d{{0,2}} (?! [\w-] ) {_NOT_NUMBER}  # smtp.pass
"""
_SECRET = rf"(?: {_TELLING} | {_KEYS} | {_SHORT} )"
_REST = r"[\w.-]{0,60}"  # of the name
_FLAGS = re.IGNORECASE | re.VERBOSE
SECRET_NAME = re.compile(_SECRET, _FLAGS)
_TELLING_NAME = re.compile(_TELLING, _FLAGS)
_VARIABLE = re.compile(  # KEY_DATA, MyKey, SMTPPASS; neither MONKEY nor BYPASS
    r"(?i: (?<![a-z]) keys? | (?<!by)(?<!com) pass ) (?![A-Za-z]) | [a-z]Keys? (?![a-z])", re.VERBOSE
)
# --api-key: its value is the next argument
_OPTION = re.compile(rf"-u | --user | --[\w-]{{0,60}}{_SECRET}{_REST}", _FLAGS)
_KEY_LINE = re.compile(  # - "db-password": value
    r"""((?: [ \t] | -[ \t] )*) ["']? [\w.-]{1,90} (?P<end>) ["']? [ \t]{0,3} : (?: [ \t]+ | $ ) (?P<value>.*)""",
    re.MULTILINE | re.VERBOSE,
)
_STATE = r"""(?:  # the password is wrong
    a | an | the | not | no | now | in | too | set | unset | empty | missing | required | needed | wrong | right | correct
  | incorrect | invalid | valid | expired | known | unknown | stored | removed | given | read | used | sent | never | only
  | always | optional ) (?! [\w-] | \.\w )"""
_PROSE = re.compile(_STATE, _FLAGS)
# Starts of well-known tokens: AWS, GitHub, GitLab, Hugging Face, OpenAI, Slack, Google, Docker Hub, PyPI, Databricks, JSON web token
_TOKEN_STARTS = (
    r"AKIA|ASIA|gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[a-z]-|AIza|ya29\.|dckr_pat_|pypi-|dapi|eyJ"
)


def _without_query(url: re.Match[str]) -> str:
    return f"{url[1]}?{REMOVED}" if url[2] else url[0]


def _without_value(named: re.Match[str]) -> str:
    """Keep the quotes, so JSON stays JSON; a bare value of JSON gets some."""
    bare_json = '"' if not named[2] and '"' in named[1] and "\\" not in named[1] else ""
    mark = named[2] or bare_json
    closed = mark if bare_json or named[0].endswith(mark) else ""
    return f"{named[1]}{mark}{REMOVED}{closed}"


class Rule(NamedTuple):
    """One kind of secret.

    Attributes:
        example: a line that has such a secret between « and »; tests/unit/doctor/test_redaction.py walks RULES.
        pattern: with ``re.VERBOSE``: white space outside of [] does not count.
        replacement: default: the first group stays, all else is removed.
    """

    example: str
    pattern: str
    replacement: str | Callable[[re.Match[str]], str] = ""

    @property
    def compiled(self) -> tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]:
        found = re.compile(self.pattern, re.VERBOSE)
        return found, self.replacement or (rf"\g<1>{REMOVED}" if found.groups else REMOVED)


# A log may have a line of megabytes, so the time of a rule is linear: an unbounded part either ends a pattern or stops at
# the next possible start, so no two attempts read the same text.
RULES = (
    # -- text with a known frame --
    Rule(
        "-----BEGIN PRIVATE KEY-----«b3BlbnNzaC1rZXk»-----END PRIVATE KEY-----",
        r"(?s) -----BEGIN[ ][A-Z ]{1,40}----- .*? (?: -----END[ ][A-Z ]{1,40}----- | \Z)",
    ),
    Rule(
        "git clone https://bob:«let//me@in»@example.org/x",  # to the last "@": a password may hold one
        r"(//) [^\s/\"'<>]{1,4096} @",
        rf"\1{REMOVED}@",
    ),
    Rule(
        "https://hooks.slack.com/«services/T00/B00/x1»",
        r"(?i) \b (hooks\.slack\.com/ | discord(?:app)?\.com/api/webhooks/) [\w/+-]+",
    ),
    Rule(
        "get https://example.org/data.zip?«sig=a1&se=2»",
        r"(?i) (\bhttps?://[^\s?#\"'<>]+) ([?#][^\s\"'<>,)\]}]+)?",
        _without_query,
    ),
    Rule("sv=2024&sig=«aB3%2Fd4f5»&x=1", r"(?i) \b (sig=) [^\s&\"'<>]{6,}"),  # of Azure
    Rule("Bearer «a1b2c3d4»", r"(?i) \b (bearer|basic) (\s+) [a-z0-9+/=._~-]{6,}", rf"\1\2{REMOVED}"),
    Rule(
        "Set-Cookie: «id=1; session=x1»",
        r"(?i) \b ((?:(?:set-)?cookie|authorization) \s{0,3}:\s{0,3}) [^\s\"'][^\n\"']*",
    ),
    Rule(
        "curl -u «bob:letmein» http://a.b/",
        r"([\s\"'](?:-u|--user)[\s,=\"']{1,4}) [^\s\"',:]{1,64} : [^\s\"',]+",
    ),
    # -- NAME=value, NAME: value, "NAME": "value", also inside a JSON string --
    # A value is the text between two quotes (an apostrophe inside a word closes nothing), the rest of the line after a quote that
    # is never closed or the start of a list or an object, or one word.
    Rule(
        "{'db_password': '«let me in»'}",
        rf"""(?i) ({_SECRET}{_REST}\\?["']?{_IS}) (?!\[removed\])
        (?: (\\?["'])(?!\[removed\]) (?: [^\n]*?(?<!\\)\2 | [\s\S]{{1,4096}}?(?<!\\)\2(?!\w) | [^\n"']+ )
          | [\[{{][^\n]*
          | [^\s"'\[{{,;}}\])\\]+ )""",
        _without_value,
    ),
    # -- words --
    Rule(
        "the passphrase was «correct-horse-battery»",
        rf"""(?i) (\b(?:password|passwd|passphrase)\s{{1,3}}(?:is|was)\s{{1,3}}["']?) (?!{_STATE}) [^\s"'\[]{{3,}}""",
    ),
    Rule(
        "token «a1b2c3», HF_TOKEN «a1b2c3» and secret is «passWord»",  # with a digit or an inner capital
        r"""(?i) ((?:\b|_)(?:password|passwd|passphrase|secret|token|api[ _-]?key)\s{1,3}(?:(?:is|was)\s{1,3})?["']?)
        (?=[^\s\d"'\[]{0,60}(?:\d|(?-i:[a-z][A-Z]))) [^\s"'\[]{6,}""",
    ),
    # -- arguments of programs --
    Rule(
        "['--api-key', '«letmein»']",
        rf"""(?i) ((?<!-)--[\w-]{{0,60}}{_SECRET}{_REST}\\?["']?,?\s{{1,3}}\\?["']?) (?!-|\[removed\]) [^\s,"'\]\\]+""",
    ),
    Rule("sshpass -p «letmein» ssh node", r"(\bsshpass\s+-p\s?) [^\s\"']+"),
    # -- tokens by their form --
    Rule("get «hf_0a1b2c3d4e5f6g7h»", rf"\b (?: {_TOKEN_STARTS} ) [\w.-]{{16,}}"),
    # of Weights & Biases; also a commit, which is no loss
    Rule("wandb «0123456789abcdef0123456789abcdef01234567»", r"\b (?:local-)? [0-9a-f]{40} \b"),
    # -- persons --
    Rule("mail «bob.x+y@mail.example.org»", r"[\w.+-]{1,64} @ [\w-]{1,63} \. [\w.-]{1,190} \w"),
    Rule(
        "/home/«bob»/runs",
        r"((?:/home|/Users|[A-Za-z]:\\Users)[/\\]) [^/\\\s\"':,;]{1,64}",
        r"\1[user]",
    ),
)
_COMPILED = [rule.compiled for rule in RULES]


class Redaction:
    """Removes secrets and names that the environment and the account of this process contain.

    Args:
        environment: its values with a telling name (token, password, ...) are removed wherever they occur.
        home: becomes ``~``. user: becomes ``[user]`` where it stands alone; "root" stays because it names nobody.
    """

    def __init__(self, environment: Mapping[str, str], *, home: str = "", user: str = "") -> None:
        values = {v for k, v in environment.items() if _is_secret_variable(k, v)}
        # JSON and URLs store another spelling of some characters
        values |= {form for v in values for form in (json.dumps(v)[1:-1], quote(v, safe=""))}
        words = [re.escape(value) for value in sorted(values, key=len, reverse=True)]
        self._values = re.compile("|".join(words)) if words else None
        home = home.rstrip("/\\")
        self._home: re.Pattern[str] | None = None
        if home and Path(home) != Path(home).parent:  # a part of a longer path, or of "//root:@host", stays
            self._home = re.compile(rf"(?<![\w.~-])(?<![^/]/)(?<!^/){re.escape(home)}(?![\w-]|\.\w)")
        self._short = lru_cache(4096)(self._text)  # rows of JSON repeat their names
        alone = len(user) >= 3 and user != "root"
        self._user = re.compile(rf"(?<![\w-]){re.escape(user)}(?![\w-])") if alone else None

    def __call__(self, text: str) -> str:
        """Return ``text`` without secrets. JSON, as a whole or as lines of the text, stays JSON."""
        cleaned_json = self._json(text)
        if cleaned_json is not None:
            return cleaned_json
        result: list[str] = []
        others: list[str] = []  # neighbours that are not JSON: some rules read several lines
        for line in text.splitlines(keepends=True):
            cleaned = self._json(line) if line.startswith("{") else None
            if cleaned is None:
                others.append(line)
            else:
                result += [self._text("".join(others)), cleaned]
                others = []
        return "".join([*result, self._text("".join(others))])

    def _json(self, text: str) -> str | None:
        """Return the JSON ``text`` without secrets; None if it is not an object or a list."""
        if not text.lstrip().startswith(("{", "[")):
            return None
        try:
            value = json.loads(text)
            cleaned = self._clean(value, "")
            if cleaned == value:
                return text
            stripped = text.strip()
            end = text[len(text.rstrip()) :]
            return json.dumps(cleaned, indent=2 if "\n" in stripped else None) + end
        except (ValueError, RecursionError):
            return None

    def _clean(self, value: Any, name: str) -> Any:
        """Return a JSON value without secrets; everything below a secret name is one."""
        inherited = name if SECRET_NAME.search(name) else ""
        if isinstance(value, dict):
            return {self._short(key): self._clean(inner, inherited or key) for key, inner in value.items()}
        if isinstance(value, list):
            before = ["", *(str(inner)[:200] if isinstance(inner, str) else "" for inner in value)]
            return [
                REMOVED
                if isinstance(inner, str) and _OPTION.fullmatch(option) and not inner.startswith("-")
                else self._clean(inner, inherited)
                for option, inner in zip(before, value, strict=False)
            ]
        if value is None or isinstance(value, bool):
            return value
        if _names_secret(name, str(value)):
            return REMOVED
        if not isinstance(value, str):
            return value
        return self._short(value) if len(value) < 200 else self._text(value)

    def _text(self, text: str) -> str:
        if self._values is not None:
            text = self._values.sub(REMOVED, text)
        if self._home is not None:
            text = self._home.sub("~", text)
        text = "".join(_without_blocks(text))
        for pattern, replacement in _COMPILED:
            text = pattern.sub(replacement, text)
        return self._user.sub("[user]", text) if self._user is not None else text


def _is_secret_variable(name: str, value: str) -> bool:
    """Return whether a variable of the environment holds a secret that a log may repeat."""
    if name in ("PWD", "OLDPWD") or value.lower() in ("true", "false", "none", "null"):
        return False
    shortest = SHORTEST if _TELLING_NAME.search(name) else SHORTEST_OF_KEYS
    return len(value) >= shortest and any(kind.search(name) for kind in (SECRET_NAME, _VARIABLE))


def _names_secret(name: str, value: str) -> bool:
    """Return whether ``name: value`` is a secret: under some names, numbers are not."""
    found = SECRET_NAME.search(f"{name}: {value[:40]}")
    return found is not None and found.end() <= len(name)


def _without_blocks(text: str) -> Iterator[str]:
    """Yield the lines of ``text`` without the values of secret keys, with all that YAML counts to them on further lines."""
    column, has_items, at = -1, False, 0
    for line in text.splitlines(keepends=True):
        begin, at = at, at + len(line)
        content = line.lstrip(" \t")
        indent = len(line) - len(content)
        if column >= 0 and content.strip():
            if indent > column or (has_items and indent == column and content.startswith("- ")):
                continue
            column = -1
        if column < 0 and SECRET_NAME.search(line[:200]) and (key := _KEY_LINE.match(text, begin)):
            name = SECRET_NAME.search(text, begin, key.end("end") + 64)  # and what follows: is it a number?
            if name is not None and name.end() <= key.end("end"):
                column, has_items = len(key[1]), not key["value"].strip()
                if not _PROSE.match(key["value"]):  # InvalidToken: The token has expired
                    line = (
                        f"{text[begin : key.start('value')].rstrip()} {REMOVED}{line[len(line.rstrip()) :]}"
                    )
        yield line
