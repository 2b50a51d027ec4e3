"""`yolofleet doctor` and `yolofleet selftest`: check that machines can train, and that they compute the same."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_doctor, resolve_selftest
from yolofleet.config.resolve import Resolved
from yolofleet.config.schema.verbs import DoctorConfig, SelftestConfig
from yolofleet.fleet.doctor.findings import Finding, as_json, exit_code, print_findings, stream_for
from yolofleet.fleet.launch.plan import is_worker
from yolofleet.storage.atomic import emit_json, write_bytes
from yolofleet.storage.foreign import open_foreign
from yolofleet.support.errors import ConfigError, StorageError
from yolofleet.support.redaction import Redaction
from yolofleet.support.text import echo, quoted, size_text

SUPPORT = "yolofleet-support"
OF_A_RUN = ("config.yaml", "results.csv", "results.json", "events.jsonl")
OF_LOGS = re.compile(r"[\w.-]{1,100}\.(log|out|err|jsonl|json|yaml|txt)", re.ASCII)
MOST_LOGS = 256
HEAD_BYTES, TAIL_BYTES = 1 << 20, 3 << 20  # the parts of a longer file that the archive keeps
ABOUT = """yolofleet doctor --support wrote this archive for an issue report. It was not sent anywhere.

findings.txt, .json   the findings of the doctor
facts.json            this machine: memory, disks, GPUs, network interfaces, variables of launchers
versions.txt          installed Python packages
run/                  of the run folder that --log names: configuration, results, events and logs, without their middle
                      if they are long; no weights, checkpoints or pictures

yolofleet removed what it recognises as a secret: values with names such as token, key or password, also where the text
of a log repeats such a variable, well-known formats of keys, user data and queries of URLs, addresses of mail, your user
name and your home folder. It kept names of hosts, network addresses, class names and other paths. It removed only
the secrets that it recognises, so read the files before you send the archive.
"""


def run(options: dict[str, Any], config_file: str) -> int:
    resolved = resolve_doctor(options, config_file=config_file)
    json_out = resolved.value.json_out
    check_target(json_out)
    findings = examine(resolved)
    print_findings(findings, stream_for(json_out))
    if resolved.value.support:
        from yolofleet.fleet.doctor.probes import run_probe

        facts = run_probe("facts", {"folders": ["."], "quick": True, "count_gpus": True})
        write_support(findings, facts, resolved.value.log, stream_for(json_out))
    write(json_out, as_json(findings))
    return exit_code(findings)


def check_target(json_out: str) -> None:
    """Raise if the file of ``--json`` cannot be created. Runs before the checks, which take minutes.

    Create no folder for the file, because the doctor changes nothing.

    Raises:
        ConfigError: the path is a folder, or its parent folder does not exist.
    """
    path = Path(json_out)
    if json_out in ("", "-"):
        return
    if path.is_dir():
        raise ConfigError(
            f"--json {path} is a folder", hint=f"a file in it: --json {quoted(path / 'doctor.json')}"
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"--json {path}: there is no folder {path.parent}", hint=f"mkdir -p {quoted(path.parent)}"
        )


def write(json_out: str, values: dict[str, Any]) -> None:
    """Write values as JSON. Raise StorageError if the file cannot be written."""
    try:
        emit_json(values, json_out)
    except StorageError as problem:
        raise StorageError(
            problem.what, source="--json", hint="a file elsewhere, or - for standard output"
        ) from None


def examine(resolved: Resolved[DoctorConfig]) -> list[Finding]:
    """Return the findings for a log, a fleet or this machine."""
    config = resolved.value
    if config.log:
        from yolofleet.fleet.doctor.log_files import read_log

        return read_log(config.log)
    from yolofleet.fleet.hosts.fleet import given_fleet

    # a host without devices is examined as if it trained on its CPU, so its GPUs are not counted
    fleet = given_fleet(resolved, config.device.replace("auto", "cpu"))
    from yolofleet.fleet.doctor.local import examine_here
    from yolofleet.fleet.launch.preflight import examine_fleet
    from yolofleet.fleet.resources import resources_of

    if fleet is not None:
        port = config.port if resolved.is_given("port") else fleet.port
        return examine_fleet(fleet, resources_of(config), port=port, quick=config.quick)[0]
    return examine_here(resources_of(config), port=config.port, quick=config.quick)


command = SchemaCommand(
    "doctor",
    DoctorConfig,
    run,
    help="Check this machine, several hosts, or a log. Print each problem, its consequence and a command to fix it. The "
    "exit code is 4 if a run could not start or continue.",
)


# -- --support: an archive for an issue report ---------------------------------------------------------------


def write_support(findings: Sequence[Finding], facts: Mapping[str, Any], run: str, to: TextIO) -> Path:
    """Write ``yolofleet-support.zip`` into the working folder, with the next free number, and print what it holds.

    Every text of this machine and of a run passes :class:`Redaction` first. Nothing is sent.

    Args:
        facts: of this machine, for JSON.
        run: the folder of a run; "" = none.
    Raises:
        ConfigError: ``run`` is not a folder. StorageError: the archive cannot be written.
    """
    clean = Redaction.of_this_account()
    shown = io.StringIO()
    print_findings(findings, shown)
    versions = [f"{package.metadata['Name']}=={package.version}" for package in metadata.distributions()]
    texts = {
        "README.txt": ABOUT,
        "versions.txt": "\n".join(sorted(versions, key=str.lower)) + "\n",
        "findings.txt": clean(shown.getvalue()),
        "findings.json": clean(json.dumps(as_json(findings), indent=2)),
        "facts.json": clean(json.dumps(facts, indent=2)),
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(f"{SUPPORT}/{name}", text)
        for name, text in _run_files(run) if run else ():
            archive.writestr(f"{SUPPORT}/run/{name}", clean(text))
        files = len(archive.namelist())
    names = (Path(f"{SUPPORT}{number if number > 1 else ''}.zip") for number in count(1))
    path = next(name for name in names if not os.path.lexists(name))
    write_bytes(path, content.getvalue(), private=True)
    of_run = f", and configuration, results and logs of {run}" if run else "; --log FOLDER adds a run"
    echo(
        f"\n{path}: {files} files, {size_text(len(content.getvalue()))}: findings, facts of this machine, versions{of_run}. "
        "Recognised secrets, your user name and your home folder were removed; names of hosts and addresses were not. "
        "Look at it before you attach it to an issue: nothing was sent.",
        to=to,
    )
    return path


def _run_files(run: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of the files of a run. Follow no link: the folder may come from somebody else."""
    folder = Path(run)
    if not folder.is_dir():
        raise ConfigError(f"--log {run} is not a folder", hint="--support takes the folder of a run")
    logs = folder / "logs"
    names = list(OF_A_RUN)
    if logs.is_dir() and not logs.is_symlink():
        found = sorted(file.name for file in logs.iterdir() if OF_LOGS.fullmatch(file.name))
        names += [f"logs/{name}" for name in found[:MOST_LOGS]]
    for name in names:
        try:
            with open_foreign(folder / name, follow=False) as file:
                text = file.read(HEAD_BYTES).decode("utf-8", "replace")
                size = file.seek(0, os.SEEK_END)
                rest = min(size - HEAD_BYTES, TAIL_BYTES)
                if rest > 0:
                    file.seek(size - rest)
                    left_out = size - HEAD_BYTES - rest
                    between = f"\n[{size_text(left_out)} left out]\n" if left_out else ""
                    text += between + file.read(rest).decode("utf-8", "replace")
            yield name, text
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as problem:
            yield name, f"[cannot be read: {getattr(problem, 'strerror', None) or problem}]\n"


# -- selftest ------------------------------------------------------------------------------------------------


def run_selftest(given: dict[str, Any], config_file: str) -> int:
    if is_worker():
        raise ConfigError("selftest starts its processes itself", hint="start it without torchrun")
    from yolofleet.measure.selftest.contract import run_contract

    return run_contract(resolve_selftest(given, config_file=config_file).value)


selftest_command = SchemaCommand(
    "selftest",
    SelftestConfig,
    run_selftest,
    help="Test on the devices of this machine that the number of processes does not change the result. Train the same few "
    "steps with one process, several processes, unequal shares and DataParallel. With exact reduction the weights must be "
    "equal bit for bit, with fast reduction up to rounding. Then check each device: ten steps compared with the CPU, an fp16 "
    "overflow, resuming with each optimizer. Finally kill one process of a run: the others must end, and the run must "
    "resume. If a test fails, print the likely cause and end with exit code 4.",
)
