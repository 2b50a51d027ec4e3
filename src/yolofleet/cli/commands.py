"""click's commands as yolofleet needs them: verbs imported when used, options made from a schema."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

import click
from click.shell_completion import CompletionItem

from yolofleet.support.errors import ConfigError
from yolofleet.support.text import echo, inform, is_quiet, nearest, set_quiet, shown

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from yolofleet.config.schema import Frozen


def option(flag: str, help: str, *, name: str = "", **more: Any) -> click.Option:
    """Return an option; its help ends with its default, unless that is empty or 0.

    Args:
        name: of the parameter; "": that of the flag.
        more: as for click.
    """
    if default := more.get("default"):
        help += f"  [{default}]"
    return click.Option([flag, name] if name else [flag], help=help, **more)


DOWNLOAD = option(
    "--download", "download the public data set (coco128, coco, voc) if it is missing", is_flag=True
)
JSON = option(
    "--json",
    "write the result as JSON to FILE, or to standard output (-)",
    name="json_out",
    default="",
    metavar="FILE",
)
# key of click's context: the verb as the user typed it, if its default verb follows
TYPED = "yolofleet.typed"
HELP_ALL = "yolofleet.help_all"  # key of click's context: whether the help shows all settings
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
FLAG_COLUMNS = 38  # an option with a longer list of choices has a line of its own, which leaves 38 of 80 columns to texts


def job_option(scheduler: str, what: str) -> click.Option:
    """Return an option such as ``--slurm KEY=VALUE,...``; its help lists all keys."""
    from yolofleet.fleet.launch.schedulers.table import load

    names = ", ".join(load(scheduler).settings.model_fields)
    return option(
        f"--{scheduler}",
        f"{what}; keys: {names}; or a YAML file with these keys",
        multiple=True,
        metavar="KEY=VALUE,...",
    )


class Verbs(click.Group):
    """A group whose members are ``module:attribute`` and a summary; --help imports none of them.

    Args:
        members: by verb, its command and the summary, or the summary alone of a command that is at ``where``.
        where: ``module:attribute`` of such a command, with ``{verb}`` for the verb; by default the module of the group.
        default: the member that runs if the arguments begin with one of its options instead of a verb; "" = none.
        default_takes_arguments: it also runs if they begin with a word that is not a verb.
    """

    def __init__(
        self,
        name: str,
        members: Mapping[str, str | tuple[str | click.Command, str]],
        *,
        where: str = "",
        default: str = "",
        default_takes_arguments: bool = False,
        **extra: Any,
    ) -> None:
        super().__init__(
            name,
            context_settings=SETTINGS,
            subcommand_metavar="VERB ...",
            invoke_without_command=True,
            callback=_help_if_bare,
            **extra,
        )
        where = where or f"yolofleet.cli.{name}:{{verb}}_command"
        self.members = {
            verb: (where.format(verb=verb), member) if isinstance(member, str) else member
            for verb, member in members.items()
        }
        self.default, self.default_takes_arguments = default, default_takes_arguments

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if (with_verb := self._with_verb(args)) is not args:
            ctx.meta[TYPED] = ctx.command_path
        return super().parse_args(ctx, with_verb)

    def _with_verb(self, args: list[str]) -> list[str]:
        """Put the default verb in front of arguments that begin with an option, or with a word that is not a verb."""
        has_no_verb = not args or args[0].startswith("-")
        has_no_verb |= self.default_takes_arguments and args[:1] != [] and args[0] not in self.members
        if self.default and has_no_verb and args[:1] not in (["-h"], ["--help"]):
            return [self.default, *args]
        return args

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.members)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.members:
            return None
        member = self.members[cmd_name][0]
        if isinstance(member, str):
            module, attribute = member.split(":")
            member = getattr(import_module(module), attribute)
        assert isinstance(member, click.Command)
        return member

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        args = self._with_verb(args)
        command = self.get_command(ctx, args[0])
        if command is not None:
            return args[0], command, args[1:]
        from yolofleet.config.words.aliases import in_our_words
        from yolofleet.config.words.spellings import TASKS, VERBS
        from yolofleet.config.words.unknown import instead_of

        near = VERBS.get(args[0]) or nearest(args[0], self.members)
        hint = f"did you mean {near}?" if near else f"verbs: {', '.join(self.members)}"
        hint = instead_of("verb", args[0]) or hint
        wanted = self.get_command(ctx, args[1]) if args[0] in TASKS and len(args) > 1 else None
        if isinstance(wanted, Command):
            # without the ending of Ultralytics' models of other tasks, as in yolo11n-pose.pt
            words = [re.sub(r"-(cls|pose|obb)(?=\.|$)", "", word) for word in args[2:]]
            argv = in_our_words(args[1], words, wanted.flags(ctx))
            hint = shlex.join(["yolofleet", args[1], *argv])
            if args[0] not in ("detect", "segment"):
                hint = f"yolofleet only finds boxes and masks: {hint}"
            if other := next((found for word in argv if (found := instead_of("model", word))), None):
                hint += f"; {other}"
        raise ConfigError(
            f"{ctx.command_path} has no verb {shown(args[0])}", source="command line", hint=hint
        )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a verb from the table. Click would import the module of every verb for its summary."""
        verbs = self.members.items()
        found = [CompletionItem(name, help=text) for name, (_, text) in verbs if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self.members.items()])


@click.pass_context
def _help_if_bare(ctx: click.Context) -> int:
    """Print the help if no verb is given."""
    if ctx.invoked_subcommand is None:
        echo(ctx.get_help())
    return 0


class Command(click.Command):
    """A verb: old spellings are rewritten before its options are read.

    Args:
        spelled_as: the verb whose old spellings these are, when it is another.
        left_out: flags of ``spelled_as`` that this verb does not take.
        unused: what such a flag does not do, for the error; {verb} is what the user typed.
    """

    def __init__(
        self,
        name: str,
        *,
        spelled_as: str = "",
        left_out: Collection[str] = (),
        unused: str = "is a setting of training that {verb} does not take",
        **extra: Any,
    ) -> None:
        super().__init__(name, context_settings=SETTINGS, **extra)
        self.spelled_as = spelled_as or name
        self.left_out, self.unused = frozenset(left_out), unused

    def flags(self, ctx: click.Context) -> dict[str, bool]:
        """Return the flags of the verb, and whether each takes a value."""
        flags: dict[str, bool] = {}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option):
                takes_value = not (parameter.is_flag or parameter.count)
                flags |= dict.fromkeys([*parameter.opts, *parameter.secondary_opts], takes_value)
        return flags

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # an incomplete line: it may end before the value of an option
            return super().parse_args(ctx, args)
        from yolofleet.config.words.aliases import Verb, rewrite

        path, typed = (
            text.removeprefix("yolofleet ")
            for text in (ctx.command_path, ctx.meta.get(TYPED, ctx.command_path))
        )
        verb = Verb(typed, path, self.left_out, self.unused.format(verb=typed))
        rewritten = rewrite(self.spelled_as, args, self.flags(ctx), verb)
        print_notes(rewritten.notes)
        return super().parse_args(ctx, rewritten.argv)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            Path.cwd()
        except OSError:
            raise ConfigError(
                "the working folder does not exist any more", hint="cd to another folder"
            ) from None
        return super().invoke(ctx)


QUIET = option(
    "--quiet",
    "print only errors and the result: no notes and no progress",
    is_flag=True,
    expose_value=False,
    callback=lambda context, option, quiet: set_quiet(quiet),
)


@contextmanager
def text_on_stderr(json_out: str) -> Iterator[None]:
    """With ``--json -``, move standard output of the block and of its processes to standard error."""
    if json_out != "-":
        yield
        return
    sys.stdout.flush()
    with redirect_stdout(sys.stderr), ExitStack() as stack:
        with suppress(OSError):
            kept = os.dup(1)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 1)
            os.dup2(2, 1)
        yield


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on the first process only, unless ``--quiet``."""
    for note in notes:
        from yolofleet.support.place import is_first

        if is_first(os.environ):
            inform(f"note: {note}")


def verb(name: str, *params: click.Parameter, help: str) -> Callable[[Callable[..., Any]], Command]:
    """Make a verb of the decorated function, with these arguments and options."""
    return lambda function: Command(name, params=list(params), callback=function, help=help)


class SchemaCommand(Command):
    """A verb whose options are the fields of a model, under their headings.

    Args:
        run: called with what the user set (by field name) and the values of ``extra_options``.
    """

    def __init__(
        self,
        name: str,
        model: type[Frozen],
        run: Callable[..., int],
        *,
        extra_options: Iterable[click.Option] = (),
        **extra: Any,
    ) -> None:
        self.model = model

        options = {name: _option(name, field) for name, field in model.model_fields.items()}
        others: dict[str, click.Option] = {}
        has_earlier = extra.get("spelled_as", name) == "train"
        if has_earlier:
            from yolofleet.config.schema import TrainConfig
            from yolofleet.config.words.earlier import EARLIER

            others = {setting: _option(setting, field) for setting, field in TrainConfig.model_fields.items()}
            others = {setting: other for setting, other in others.items() if setting not in options}
            for setting, row in EARLIER.items():
                owner = options if not row.new or row.new in model.model_fields else others
                owner[setting] = _earlier_option(setting, is_switch=isinstance(row.default, bool))

        def callback(**values: Any) -> int:
            from yolofleet.config.resolve import COMMAND_LINE, layer_of
            from yolofleet.config.words.earlier import in_todays_words

            set_quiet(bool(values.get("quiet")) or is_quiet())
            typed = {name: value for name, value in values.items() if name in options}
            given = {name: value for name, value in typed.items() if value is not None and value != ()}
            if has_earlier:
                today, _, notes = in_todays_words(layer_of(given, COMMAND_LINE))
                print_notes(notes)
                given = {name: entry.value for name, entry in today.items()}
            return run(given, **{name: value for name, value in values.items() if name not in typed})

        from yolofleet.config.schema import rules_of

        config = option(
            "--config",
            "read settings from a YAML file; flags of the command line win",
            name="config_file",
            default="",
            metavar="FILE",
        )
        rare = sum(rules_of(field).rare for field in model.model_fields.values())
        more = [_help_all(rare)] if rare else []
        quiet = [] if "quiet" in options else [QUIET]
        super().__init__(
            name,
            params=[*options.values(), *quiet, config, *extra_options, *more],
            callback=callback,
            left_out=[flag for other in others.values() for flag in (*other.opts, *other.secondary_opts)],
            **extra,
        )

    def get_help(self, ctx: click.Context) -> str:
        ctx.meta.setdefault(HELP_ALL, False)
        return super().get_help(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings: all of them, unless this is ``--help``."""
        from yolofleet.config.schema import HEADINGS, group_of, rules_of

        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            field = self.model.model_fields.get(str(parameter.name))
            if record and (field is None or not rules_of(field).rare or ctx.meta.get(HELP_ALL, True)):
                flag, help = record
                if parameter.secondary_opts:
                    flag = f"--[no-]{parameter.opts[0][2:]}"
                sections.setdefault(group_of(field) if field else "general", []).append((flag, help))
        longest = max(len(flag) for rows in sections.values() for flag, _ in rows)
        width = min(longest, FLAG_COLUMNS)
        for title in sorted(sections, key=HEADINGS.index):
            with formatter.section(title.capitalize()):
                formatter.write_dl(
                    [(flag.ljust(width), help) for flag, help in sections[title]], col_max=width
                )


def _help_all(rare: int) -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
        if is_asked:
            ctx.meta[HELP_ALL] = True
            echo(ctx.get_help())
            ctx.exit()

    help = f"show this message with {rare} more settings, which few need"
    return option("--help-all", help, is_flag=True, is_eager=True, expose_value=False, callback=show)


def _option(name: str, field: FieldInfo) -> click.Option:
    """Return the option of a setting. Its value stays a string; the schema checks and converts it, as for every source."""
    from yolofleet.config.schema import choices_of, flag_of

    flag, kind = flag_of(name, field), field.annotation
    help = (field.description or "") + _default_text(field)
    if kind is bool:
        return click.Option([f"{flag}/--no-{flag[2:]}", name], default=None, help=help)
    metavar, choices = "TEXT", choices_of(field)
    if choices:
        metavar = "|".join(choices)
    elif kind in (int, float):
        metavar = "N" if kind is int else "X"
    elif name in ("project",):
        metavar = "FOLDER"

    def complete(
        _context: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        if choices or kind in (int, float):
            return [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file")]

    return click.Option(
        [flag, name],
        type=str,
        default=None,
        multiple=get_origin(kind) is tuple,
        metavar=metavar,
        help=help,
        shell_complete=complete,
    )


def _earlier_option(name: str, *, is_switch: bool) -> click.Option:
    """Return the hidden option of a setting that trainings of earlier versions had."""
    flag = name.replace("_", "-")
    return click.Option(
        [f"--{flag}/--no-{flag}" if is_switch else f"--{flag}", name], default=None, hidden=True
    )


def _default_text(field: FieldInfo) -> str:
    if field.default in ("", None, ()):
        return ""
    words = {True: "on", False: "off"}
    default = words[field.default] if isinstance(field.default, bool) else f"{field.default}"
    return f"  [{default}]"


def named_run(name: str) -> Path:
    """Return the folder of a run or of runs that a user names. That of an address is mirrored on this machine.

    Raises:
        ConfigError: it does not exist, or is not usable. StorageError: the store cannot be read.
    """
    if "://" in name:
        from yolofleet.storage.mirror import local_path  # only addresses need it

        return local_path(f"{name.removesuffix('/')}/", "RUN", may_change=True)
    if not Path(name).is_dir():
        raise ConfigError(
            f"{shown(name)} is not a folder",
            source="command line",
            hint="name a run folder, such as runs/train/exp, or the address of --checkpoint-to",
        )
    return Path(name)
