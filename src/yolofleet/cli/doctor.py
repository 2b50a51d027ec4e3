"""`yolofleet doctor`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_doctor
from yolofleet.config.resolve import Resolved
from yolofleet.config.schema.verbs import DoctorConfig
from yolofleet.support.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from yolofleet.fleet.doctor.findings import Finding


def run(options: dict[str, Any], config_file: str) -> int:
    resolved = resolve_doctor(options, config_file=config_file)
    from yolofleet.fleet.doctor.findings import as_json, exit_code, print_findings, stream_for

    json_out = resolved.value.json_out
    check_target(json_out)
    findings = examine(resolved)
    print_findings(findings, stream_for(json_out))
    if resolved.value.support:
        from yolofleet.fleet.doctor.probes import run_probe
        from yolofleet.fleet.doctor.support import write_support

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
        raise ConfigError(f"--json {path} is a folder", hint=f"a file in it: --json {path / 'doctor.json'}")
    if not path.parent.is_dir():
        raise ConfigError(
            f"--json {path}: there is no folder {path.parent}",
            hint=f"mkdir -p {shlex.quote(str(path.parent))}",
        )


def write(json_out: str, values: dict[str, Any]) -> None:
    """Write values as JSON. Raise StorageError if the file cannot be written."""
    from yolofleet.support.files.atomic import emit_json

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
    from yolofleet.config.resources import resources_of
    from yolofleet.fleet.doctor.local import examine_here
    from yolofleet.fleet.launch.preflight import examine_fleet

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
