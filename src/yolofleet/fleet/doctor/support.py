"""Write one archive for an issue report: versions, facts, findings, and the configuration and logs of a run.

Every text of this machine and of a run passes :class:`Redaction` first. Nothing is sent.
"""

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

from yolofleet.fleet.doctor.findings import Finding, as_json, print_findings
from yolofleet.support.errors import ConfigError
from yolofleet.support.files.atomic import write_bytes
from yolofleet.support.files.foreign import open_foreign
from yolofleet.support.redaction import Redaction
from yolofleet.support.text import echo, size_text

NAME = "yolofleet-support"
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


def write_support(findings: Sequence[Finding], facts: Mapping[str, Any], run: str, to: TextIO) -> Path:
    """Write ``yolofleet-support.zip`` into the working folder, with the next free number, and print what it holds.

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
            archive.writestr(f"{NAME}/{name}", text)
        for name, text in _run_files(run) if run else ():
            archive.writestr(f"{NAME}/run/{name}", clean(text))
        files = len(archive.namelist())
    names = (Path(f"{NAME}{number if number > 1 else ''}.zip") for number in count(1))
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
