"""Translate a command line with the flags of other trainers into ours, or refuse it with a reason.

``rewrite`` changes a command line before it is parsed. It writes each flag as ``--flag=value``, so that a value cannot look
like a flag. Underscores and hyphens are equivalent. No flag is silently ignored: a flag without effect gives a note.
``spellings.py`` has the table of flags.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from yolofleet.config.words.spellings import FROM_LAUNCHER, OFF, ON, SPELLINGS, Spelling, Values
from yolofleet.config.words.unknown import instead_of
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import nearest, shown


@dataclass(frozen=True)
class Rewritten:
    argv: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Verb:
    """A verb in messages.

    Attributes:
        typed: as the user typed it; shown: its name before ``--help``.
        left_out: flags of the verb with the same spellings that this one does not take.
        why: what to say of these flags, such as ``does not change the prediction of plan``.
    """

    typed: str
    shown: str
    left_out: frozenset[str] = frozenset()
    why: str = ""


def rewrite(
    spelled_as: str, argv: Sequence[str], flags: Mapping[str, bool], verb: Verb | None = None
) -> Rewritten:
    """Return the command line ``argv`` with our flags, and notes for the user.

    Args:
        spelled_as: the verb whose spellings these are.
        flags: our flags of the command, and whether each takes a value.
        verb: of the user, if that is another one.

    Raises:
        ConfigError: a flag is unknown or refused, or its value is missing.
    """
    known = _known(spelled_as, flags)
    usable = [flag for flag, way in known.items() if not way.refusal and way is not FROM_LAUNCHER]
    verb = verb or Verb(spelled_as, spelled_as)
    meant, notes = _meant(argv, known)
    result: list[str] = []
    rest = list(meant)
    while rest:
        token = rest.pop(0)
        if token == "--":  # no options follow
            result += [token, *rest]
            break
        if not token.startswith("--") and token not in known:
            if ASSIGNMENT.match(token) and spelled_as in SPELLINGS:  # these verbs take no other words
                raise _unknown(verb, f"--{token.partition('=')[0]}", usable)
            result.append(token)
            continue
        spelled, equals, value = token.partition("=")
        flag = spelled.replace("_", "-")
        spelling = known.get(flag)
        if flag in verb.left_out:
            raise _left_out(verb, spelled)
        if spelling is None:
            raise _unknown(verb, spelled, flags if verb.left_out else usable)
        if spelling.refusal:
            raise ConfigError(f"{spelled}: {spelling.refusal}", source="command line", hint=spelling.hint)
        values = _values(spelled, spelling.values, [value] if equals else None, rest)
        arguments = spelling.to(values)
        if arguments and verb.why:  # plan takes the model of -c, and not its recipe
            arguments = [argument for argument in arguments if argument.partition("=")[0] in flags]
            if not arguments:
                raise _left_out(verb, spelled)
        at = 0 if spelled == "-c" else len(result)  # at the start, because later flags override earlier ones
        result[at:at] = arguments
        if isinstance(spelling.note, str):
            notes.append(f"{spelled} {spelling.note}")
        elif spelling.note and arguments:
            notes.append(
                f"{' '.join([spelled, *map(shown, values)])} is now {' '.join(arguments).replace('=', ' ')}"
            )
    return Rewritten(result, list(dict.fromkeys(notes)))


def _known(spelled_as: str, flags: Mapping[str, bool]) -> dict[str, Spelling]:
    known = {flag: Spelling("one" if takes else "none", _keep(flag, takes)) for flag, takes in flags.items()}
    return known | SPELLINGS.get(spelled_as, {})


def _keep(flag: str, takes: bool) -> Callable[[list[str]], list[str]]:
    return lambda values: [f"{flag}={values[0]}"] if takes else [flag]


def _values(flag: str, wanted: Values, attached: list[str] | None, rest: list[str]) -> list[str]:
    """Remove a flag's values from ``rest`` and return them; stop at a flag, which a negative number is not."""
    if wanted == "none":
        if attached:
            raise ConfigError(f"{flag} takes no value, got {shown(attached[0])}", source="command line")
        return []
    if attached is not None:
        return attached
    taken: list[str] = []
    while rest and not re.match(r"--.|-[A-Za-z]", rest[0]) and (wanted == "some" or not taken):
        taken.append(rest.pop(0))
    if not taken and wanted != "maybe":
        raise ConfigError(f"{flag} needs a value", source="command line")
    return taken


def _left_out(verb: Verb, spelled: str) -> ConfigError:
    return ConfigError(f"{shown(spelled)} {verb.why}", source="command line", hint="leave it out")


def _unknown(verb: Verb, spelled: str, known: Collection[str]) -> ConfigError:
    near = nearest(spelled.replace("_", "-")[2:], [flag[2:] for flag in known if flag.startswith("--")])
    near_hint = f"did you mean --{near}?" if near else f"yolofleet {verb.shown} --help lists them"
    hint = instead_of("setting", spelled[2:].partition("=")[0]) or near_hint
    return ConfigError(f"{verb.typed} has no {shown(spelled)}", source="command line", hint=hint)


# -- settings as other trainers spell them ----------------------------------------------------------------------

# data=coco.yaml, as Ultralytics' command takes its settings
ASSIGNMENT = re.compile(r"[A-Za-z]\w*=.*", re.DOTALL)


def in_our_words(spelled_as: str, argv: Sequence[str], flags: Mapping[str, bool]) -> list[str]:
    """Return the arguments of a verb with our flags for those of other trainers and for ``name=value``."""
    return _meant(argv, _known(spelled_as, flags))[0]


def _meant(argv: Sequence[str], known: Mapping[str, Spelling]) -> tuple[list[str], list[str]]:
    """Translate like :func:`in_our_words`, and keep what has no counterpart; the note shows what has changed."""
    result: list[str] = []
    before: list[str] = []
    after: list[str] = []
    last: list[str] = []  # replaces what the command line names, wherever that stands
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "resume" and "--resume" in known:  # Ultralytics: yolo train resume model=FILE
            token = "resume=True"
        flag, equals, value = token.partition("=")
        spelling = known.get(flag.replace("_", "-"))
        if spelling is not None:
            as_is = equals or spelling.refusal
            result += [token, *([] if as_is else _values(flag, spelling.values, None, rest))]
            continue
        if token == "--":
            last += [token, *rest]
            break
        if not (token.startswith("--") or ASSIGNMENT.fullmatch(token)):
            result.append(token)
            continue
        following = [] if equals or not rest or rest[0].startswith("--") else [rest[0]]
        name = flag.removeprefix("--")
        ours = _ours(name, value or "".join(following), argv, known)
        (last if name == "task" else result).extend([token] if ours is None else ours)
        if ours is not None:
            del rest[: len(following)]
            before += [token, *following]
            after += ours
    changed = f"{shlex.join(before)} is now {shlex.join(after) or 'left out: it changes nothing'}"
    return [*result, *last], [changed] if before else []


def _resumed_file(argv: Sequence[str]) -> str:
    """Return FILE of ``model=FILE resume=True``, as Ultralytics names the run to resume; "" without them."""
    before = ["", *argv]  # "resume" may be the value of a flag, as in --name resume
    words = (word for at, word in enumerate(argv) if word != "resume" or not before[at].startswith("--"))
    given = dict(word.partition("=")[::2] for word in words)
    file, is_asked = given.get("model", ""), given.get("resume", "False").lower() in ("", *ON)
    return file if is_asked and file.endswith((".pt", ".safetensors")) else ""


def _ours(name: str, value: str, argv: Sequence[str], known: Mapping[str, Spelling]) -> list[str] | None:
    """Return yolofleet's arguments for a setting of another trainer; None if it has no counterpart."""
    from yolofleet.config.recipe import is_hyperparameter
    from yolofleet.config.schema import TrainConfig

    name, is_on = name.replace("_", "-"), value.lower() not in OFF
    if name in ("model", "resume") and "--resume" in known and (file := _resumed_file(argv)):
        return ["--resume", file] if name == "resume" else []
    if name == "model" and (value.endswith((".pt", ".safetensors")) or "--model" not in known):
        name = "weights"
    if name == "task" and "--weights" in known:
        from yolofleet.config.words.task import network_for  # few commands name a task

        return network_for(value, argv, known)
    if name == "mode" and "--weights" in known:
        return []
    if "--precision" in known and name == "amp":
        return [] if is_on else ["--precision", "fp32"]
    if "--optimizer" in known and name in ("adam", "adamw"):
        return ["--optimizer", {"adam": "Adam", "adamw": "AdamW"}[name]] if is_on else []
    if "--log" in known and name == "use-vdl":
        return ["--log", "tensorboard"] if is_on else []
    if "--nominal-batch" in known and name == "accumulate" and value.isdecimal():
        batch = re.search(r"(?:^| )(?:--)?batch(?:[-_]size)?[ =](\S+)", " ".join(argv))
        size = batch[1] if batch else str(TrainConfig.model_fields["batch"].default)
        return ["--nominal-batch", str(int(value) * int(size))] if size.isdecimal() else None
    spelling = known.get(f"--{name}")
    if spelling is None:
        field = name.replace("-", "_")
        in_recipe = value and "--set" in known and is_hyperparameter(field)
        return ["--set", f"{field}={value}"] if in_recipe else None
    if spelling.values == "none":
        return [f"--{name}"] if is_on else [f"--no-{name}"] if f"--no-{name}" in known else []
    if value.lower() in ("true", "false"):
        return [f"--{name}"] if is_on and spelling.values == "maybe" else []
    return [f"--{name}", value.strip("[]").replace(" ", "") if name == "device" else value]
