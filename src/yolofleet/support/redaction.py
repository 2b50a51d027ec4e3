"""Remove secrets and personal names from text that leaves the machine or a trusted process.

No rule recognises every secret. These rules remove too much rather than too little: values with a telling name, values that the
environment stores under such a name, the formats of well-known tokens, and user data and queries of URLs.
"""

from __future__ import annotations

import getpass
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

REMOVED = "[removed]"
SHORTEST = 6  # characters of a value of the environment; shorter ones would remove parts of words

# Parts of patterns, all with ``re.VERBOSE``. Each comment has an example.
_IS = r"\s{0,3} (?: [=:]{1,2}>? | -> ) \s{0,3}"  # between a name and its value
_SECRET = r"""(?:
    secret | passw | passphrase | pwd  # client_secret
  | token (?! s | i[sz] )  # HF_TOKEN; neither tokenizer nor tokens/s
  | (?: api | access | private | account | ssh | wandb | comet | storage | encryption | licen[cs]e ) [\s_-]? key (?! -[a-z] | s?point )
  | (?-i: (?<= [A-Z0-9] ) _ (?: KEY | PAT ) (?! [A-Za-z] ) )  # CLEARML_KEY
  | credential | auth (?! or ) | cookie | signature | connection_?string  # authorization; not author
  | (?: (?<! per ) [_.-] | pg | db | smtp ) pass (?! [\w-] )  # pgpass
)"""
_REST = r"[\w.-]{0,60}"  # of the name
_FLAGS = re.IGNORECASE | re.VERBOSE
SECRET_NAME = re.compile(_SECRET, _FLAGS)
# KEY_DATA, MyKey, DB_PW; neither MONKEY nor COMPASS
_VARIABLE = re.compile(
    r"(?i: (?<![a-z]) (?: keys? | pass | pw | creds? ) ) (?![A-Za-z]) | [a-z](?:Key|Pass)s? (?![a-z])",
    re.VERBOSE,
)
# --api-key: its value is the next argument
_OPTION = re.compile(rf"-u | --user | --[\w-]{{0,60}}{_SECRET}{_REST}", _FLAGS)
# Starts of tokens: AWS, GitHub, Hugging Face, Slack, Google; a JSON web token, also of Neptune; PyPI
_TOKEN_STARTS = r"AKIA|ASIA|gh[pousr]_|github_pat_|hf_|xox[a-z]-|AIza|ya29\.|eyJ|pypi-"


def _without_query(url: re.Match[str]) -> str:
    return f"{url[1]}?{REMOVED}" if url[2] else url[0]


class Rule(NamedTuple):
    """One kind of secret."""

    # a line that has such a secret between « and »; tests/unit/doctor/test_redaction.py walks RULES
    example: str
    pattern: str  # with ``re.VERBOSE``: white space outside of [] does not count
    # default: the first group stays, all else is removed
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
    Rule("https://hooks.slack.com/«services/T00/B00/x1»", r"(?i) \b (hooks\.slack\.com/) [\w/+-]+"),
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
        rf"\1\2{REMOVED}\2",
    ),
    Rule(
        "- db-password: «let me in»",  # a line of YAML
        rf"""(?im) ^ ((?:[ \t]|-[ \t]){{0,60}} ["']? [\w.-]{{0,60}}?{_SECRET}{_REST} (?<!error)(?<!exception) ["']? :[ \t]+)
        (?! \[removed\][ \t]*$ | [\d.]+$ ) [^\n]+""",
    ),
    # -- arguments of programs --
    Rule(
        "['--api-key', '«letmein»']",
        rf"""(?i) ((?<!-)--[\w-]{{0,60}}{_SECRET}{_REST}\\?["']?,?\s{{1,3}}\\?["']?) (?!-|\[removed\]) [^\s,"'\]\\]+""",
    ),
    # -- tokens by their form --
    Rule("get «hf_0a1b2c3d4e5f6g7h»", rf"\b (?: {_TOKEN_STARTS} ) [\w.-]{{16,}}"),
    # of Weights & Biases; also a commit, which is no loss
    Rule("wandb «0123456789abcdef0123456789abcdef01234567»", r"\b (?:local-)? [0-9a-f]{40} \b"),
    # -- persons --
    Rule("mail «bob.x+y@mail.example.org»", r"[\w.+-]{1,64} @ [\w-]{1,63} \. [\w.-]{1,190} \w"),
    Rule("/home/«bob»/runs", r"((?:/home|/Users|[A-Za-z]:\\Users)[/\\]) [^/\\\s\"':,;]{1,64}", r"\1[user]"),
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
        home = home.rstrip("/\\")
        rules = [("|".join(words), REMOVED)] if words else []
        if home and Path(home) != Path(home).parent:  # a part of a longer path, or of "//root:@host", stays
            rules.append((rf"(?<![\w.~-])(?<![^/]/)(?<!^/){re.escape(home)}(?![\w-]|\.\w)", "~"))
        self._rules = [*((re.compile(pattern), new) for pattern, new in rules), *_COMPILED]
        if len(user) >= 3 and user != "root":
            self._rules.append((re.compile(rf"(?<![\w-]){re.escape(user)}(?![\w-])"), "[user]"))
        self._short = lru_cache(4096)(self._text)  # rows of JSON repeat their names

    @classmethod
    def of_this_account(cls) -> Redaction:
        """Return the redaction of the environment, the home folder and the user of this process."""
        user = ""
        with suppress(OSError, KeyError):  # an account without a name, as in containers
            user = getpass.getuser()
        return cls(os.environ, home=str(Path.home()), user=user)

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
        if inherited and value is not None and not isinstance(value, bool):
            return REMOVED
        if not isinstance(value, str):
            return value
        return self._short(value) if len(value) < 200 else self._text(value)

    def _text(self, text: str) -> str:
        for pattern, replacement in self._rules:
            text = pattern.sub(replacement, text)
        return text


def _is_secret_variable(name: str, value: str) -> bool:
    """Return whether a variable of the environment holds a secret that a log may repeat."""
    if name in ("PWD", "OLDPWD") or len(value) < SHORTEST:
        return False
    return any(kind.search(name) for kind in (SECRET_NAME, _VARIABLE))
