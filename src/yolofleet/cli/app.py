"""The table of verbs, and the one place where a failure becomes a message and an exit code."""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click
from click.shell_completion import get_completion_class, shell_complete

from yolofleet import __version__
from yolofleet.cli.commands import Command, Verbs, print_notes
from yolofleet.fleet.launch.schedulers.table import SCHEDULERS
from yolofleet.support.errors import (
    ConfigError,
    DeviceError,
    Stopped,
    StorageError,
    YolofleetError,
    refused_path,
)
from yolofleet.support.system.signals import STOP_SIGNALS, StopSignal, handling, interrupt_once
from yolofleet.support.text import announce, echo, set_quiet
from yolofleet.training.parallel.users_torchrun_errors import is_told

LAUNCHERS = ("fleetrun", "paddle.distributed.launch")  # of PaddleDetection
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
UNREAD = 141  # 128 + SIGPIPE
TRACEBACK = "YOLOFLEET_TRACEBACK"
# what the loader of shared libraries says, and the kernel
_NO_MEMORY = re.compile("failed to map segment|[Cc]annot (allocate memory|create shared object)")
COMPLETE = "_YOLOFLEET_COMPLETE"  # the variable by which the script of a shell asks for completions

DATA = Verbs(
    "data",
    {
        "list": "list the data sets that --data accepts by name",
        "make": "generate the data set 'shapes'",
        "preview": ("yolofleet.cli.data_sets:preview_command", "show augmented training images"),
        "download": "download and verify a public data set",
        "check": "read every label and image, and list the errors",
        "stats": "count images, labels and box sizes, and give advice",
        "split": ("yolofleet.cli.data_sets:split_command", "divide images into train, val and test"),
        "merge": ("yolofleet.cli.data_sets:merge_command", "join data sets by the names of their classes"),
        "convert": "convert a data set to YOLO, COCO or Pascal VOC format",
        "shard": "write a data set as a few tar files, for a bucket or a slow disk",
        "index": "list the files of a data set for a web server",
        "unshard": "write the files of shards into a folder",
    },
    help="Download, check and convert data sets.",
)
WEIGHTS = Verbs(
    "weights",
    {
        "list": "list the published weights that --weights accepts by name",
        "download": "download published weights into the cache folder",
        "inspect": "show the contents of a file, without executing it",
        "verify": "check the digest, values and origin of a file",
        "convert": "convert weights to another format",
        "push": "upload the weights of a training to the Hugging Face hub",
    },
    help="Download, check and convert weights files.",
)
CHECKPOINTS = Verbs(
    "checkpoints",
    {"list": "list the checkpoints of a run", "verify": "read every checkpoint and check its digest"},
    where="yolofleet.cli.report:{verb}_command",
    help="List and verify the checkpoints of a run.",
)
RENDER = Verbs(
    "render",
    {name: f"write {row.file}" for name, row in SCHEDULERS.items()},
    help="Write a training run as a job for a scheduler, to standard output.",
)
FLEET = Verbs(
    "fleet",
    {
        "check": "check that hosts can work together",
        "run": "run a command on every host",
        "ps": "list jobs on the hosts",
        "status": "show what every rank of a run does",
        "attach": "show a run that was started with --detach",
        "add": "add a host to a running training",
        "logs": "show the logs of a job",
        "stop": "stop a job on all hosts",
    },
    help="Work on several hosts over ssh. `yolofleet train --hosts ...` trains on them.",
)
BENCH = Verbs(
    "bench",
    {
        "inference": "measure weights or an exported file; `yolofleet bench --weights ...` is the same",
        "train": "measure the parts of a training, and name the bottleneck",
        "start": "measure the parts of the time until the first step of a training",
        "scaling": "train on 1, 2, 4 ... devices, and write a table and a picture",
    },
    default="inference",
    help="Measure speed on this machine.",
)
REPORT = Verbs(
    "report",
    {
        "run": "write the page of a run; `yolofleet report RUN` is the same",
        "compare": "compare runs on one page",
    },
    default="run",
    default_takes_arguments=True,
    help="Show runs as HTML pages that need no network: `yolofleet report runs/train/exp`.",
)
PLAN = Verbs(
    "plan",
    {
        "fleets": "predict a training on fleets; `yolofleet plan --machine ...` is the same",
        "probe": "measure this machine, or hosts, for predictions",
    },
    default="fleets",
    help="Predict the speed, the time and the cost of a training.",
)
APP = Verbs(
    "yolofleet",
    {
        "train": "train a detector",
        "tune": ("yolofleet.cli.train:tune_command", "search recipe values with many short trainings"),
        "val": ("yolofleet.cli.inference:val", "measure the accuracy of weights on a data set"),
        "predict": ("yolofleet.cli.inference:predict", "detect objects in images and videos"),
        "serve": "detect objects in images that programs send over HTTP",
        "report": (REPORT, "write the page of a run, or compare runs on one page"),
        "board": "show runs in a browser while they go on",
        "export": (
            "yolofleet.cli.inference:export",
            "write a network as a file for another runtime, and verify it",
        ),
        "bench": (BENCH, "measure the speed of weights, of a training, or of several devices"),
        "plan": (PLAN, "predict the speed, the time and the cost of a training on fleets"),
        "data": (DATA, "download, generate, check, count and convert data sets"),
        "render": (RENDER, "write a training run as a job for a scheduler, such as SLURM"),
        "weights": (WEIGHTS, "list, download, inspect, check and convert weights files"),
        "checkpoints": (CHECKPOINTS, "list and verify the checkpoints of a run"),
        "fleet": (FLEET, "check hosts, run commands on them, list and stop jobs"),
        "doctor": "find problems of a machine, of several hosts, or in a log",
        "selftest": (
            "yolofleet.cli.doctor:selftest_command",
            "test on this machine that the number of processes does not change the result",
        ),
        "completion": ("yolofleet.cli.app:completion_command", "write the completion script of a shell"),
    },
    help="Train YOLO object detectors on one CPU, one GPU, several GPUs or several machines.",
    epilog="yolofleet VERB --help shows the options of a verb. The flags of YOLOv5 work too.",
    where="yolofleet.cli.{verb}:command",
)
click.version_option(__version__, prog_name="yolofleet", message="%(prog)s %(version)s")(APP)


def run(argv: Sequence[str]) -> int:
    """Run a command line and return its exit code.

    Print each failure once; print a traceback only for a bug of yolofleet.

    Returns:
        0 success, 1 a bug of yolofleet, 2 configuration, 3 data or file, 4 cluster, 5 numerics, 75 stopped, 130
        Ctrl-C, 141 closed pipe.
    """
    _open_closed_streams()
    set_quiet(False)  # an earlier call in this process may have set it
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show must not end the program
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        # the script of `yolofleet completion` sets it when the user presses Tab
        if asked := os.environ.get(COMPLETE):
            return complete(APP, asked)
        if argv and argv[0] in LAUNCHERS:
            from yolofleet.config.words.paddle import command_of

            argv, notes = command_of(argv)
            print_notes(notes)
        # other verbs have handlers of their own, or child processes that would inherit this one
        stops = STOP_SIGNALS if argv and argv[0] in ("data", "weights") else ()
        with handling(interrupt_once, stops), APP.make_context("yolofleet", list(argv)) as context:
            result = APP.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except YolofleetError as problem:
        return _report(problem, argv)
    except click.ClickException as problem:
        return _report(ConfigError(problem.format_message().rstrip("."), source="command line"), argv)
    except StopSignal as stop:
        return _report(Stopped(f"stopped by {stop}; incomplete files were removed"))
    except KeyboardInterrupt:
        announce("\ninterrupted")
        return INTERRUPTED
    except Exception as problem:
        if isinstance(problem, MemoryError) or (
            isinstance(problem, (ImportError, OSError)) and _NO_MEMORY.search(str(problem))
        ):
            what = "this machine has too little memory for this"
            return _report(
                StorageError(what, hint="smaller files, a higher limit (ulimit -v), or a larger machine")
            )
        failed = DeviceError.told_by(str(problem)) if isinstance(problem, RuntimeError) else None
        if failed is not None:
            return _report(failed)
        if isinstance(problem, OSError) and (foreseen := _output_fault()):
            return UNREAD if isinstance(foreseen, BrokenPipeError) else _report(foreseen)
        if (refused := refused_path(problem)) is not None:
            return _report(refused, argv)
        echo(f"{traceback.format_exc()}this is a bug in yolofleet: please report it", to=sys.stderr)
        return 1


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed (`>&-`); child processes inherit it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number is the one that was closed
            os.set_inheritable(null, True)
            setattr(sys, name, open(null, mode, encoding="utf-8"))  # noqa: SIM115  (it stays open)


def _output_fault() -> BrokenPipeError | YolofleetError | None:
    """Return what is wrong with standard output, which an OSError that nobody caught may come from, or None.

    What is left in the buffer of a standard output that cannot be written is dropped.
    """
    try:
        echo()  # a flush alone shows nothing: what was refused is not kept
    except OSError as problem:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(problem, BrokenPipeError):  # `yolofleet ... | head`
            return problem
        return StorageError(
            f"cannot write to standard output: {problem.strerror}",
            hint="send it elsewhere, or free some space",
        )
    return None


def _report(problem: YolofleetError, argv: Sequence[str] = ()) -> int:
    if problem.hint == ConfigError.usual_hint and argv and argv[0] in APP.members:
        problem.hint = problem.hint.replace("VERB", argv[0])
    text = problem.render()
    if os.environ.get(TRACEBACK):
        text = "".join(traceback.format_exception(problem)).rstrip("\n")
    elif is_told(problem):
        return problem.exit_code
    with suppress(OSError):  # standard error may be full as well
        echo(text, to=sys.stderr)
    return problem.exit_code


def complete(app: click.Command, instruction: str) -> int:
    """Print the completions of the command line in ``COMP_WORDS``. ``instruction`` is for example ``bash_complete``."""
    # a message would appear in the line that the user types
    with suppress(YolofleetError, click.ClickException):
        return shell_complete(app, {}, "yolofleet", COMPLETE, instruction)
    return 1


def _script(shell: str) -> int:
    kind = get_completion_class(shell)
    assert kind is not None, shell
    app = click.get_current_context().find_root().command
    echo(kind(app, {}, "yolofleet", COMPLETE).source().rstrip("\n"))
    return 0


completion_command = Command(
    "completion",
    params=[click.Argument(["shell"], type=click.Choice(["bash", "zsh", "fish"]))],
    callback=_script,
    help='Write the completion script of a shell. For bash: `eval "$(yolofleet completion bash)"` in ~/.bashrc.',
)
