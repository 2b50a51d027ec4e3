"""`yolofleet doctor`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_doctor
from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import DoctorConfig
from yolofleet.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from yolofleet.doctor.findings import Finding
    from yolofleet.hosts.fleet import Fleet
    from yolofleet.hosts.remote import Remote
    from yolofleet.hosts.ssh import Unreachable


def run(given: dict[str, Any], config_file: str) -> int:
    resolved = resolve_doctor(given, config_file=config_file)
    from yolofleet.doctor.run import as_json, exit_code, stream_for, tell

    json_out = resolved.value.json_out
    check_target(json_out)
    findings = examine(resolved)
    tell(findings, stream_for(json_out))
    if resolved.value.support:
        from yolofleet.doctor.probes import run_probe
        from yolofleet.doctor.support import write_support

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
    from yolofleet.files.atomic import emit_json

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
        from yolofleet.doctor.log_files import read_log

        return read_log(config.log)
    from yolofleet.hosts.fleet import named_fleet

    hosts = config.hosts if resolved.is_given("hosts") else None
    # a host without devices is examined as if it trained on its CPU, so its GPUs are not counted
    device = config.device.replace("auto", "cpu")
    fleet = named_fleet(hosts, config.fleet if resolved.is_given("fleet") else None, device)
    if fleet is not None:
        return examine_fleet(fleet, resolved)
    from yolofleet.config.resources import resources_of
    from yolofleet.doctor.run import examine_here

    return examine_here(resources_of(config), port=config.port, quick=config.quick)


def examine_fleet(fleet: Fleet, resolved: Resolved[DoctorConfig]) -> list[Finding]:
    """Log in to every host and return the findings, with one for each unreachable host."""
    from yolofleet.config.resources import resources_of
    from yolofleet.doctor.hosts import examine
    from yolofleet.hosts.login import logged_in
    from yolofleet.launch.preflight import peer_of

    config = resolved.value
    port = config.port if resolved.is_given("port") else fleet.port
    wanted = resources_of(config)
    lost: list[Unreachable] = []
    with logged_in(fleet, lost=lost) as remotes:
        findings = [unreached(problem) for problem in lost]
        strays = [finding for finding in map(enter, remotes) if finding]
        outside = {finding.where for finding in strays}
        peers = [peer_of(remote) for remote in remotes if remote.name not in outside]
        found = examine(peers, wanted, port=port, folders=[str(wanted.results)], quick=config.quick)
    return [*findings, *strays, *found.findings]


def unreached(problem: Unreachable) -> Finding:
    from yolofleet.doctor.findings import finding

    what = problem.what.removeprefix(f"{problem.host}: ")
    return finding(
        f"ssh-{problem.kind}", problem.host, seen=what, why=problem.source or "", fix=problem.hint or ""
    )


def enter(remote: Remote) -> Finding | None:
    """Change to the host's folder. Return a finding if that fails."""
    from yolofleet.doctor.findings import finding
    from yolofleet.errors import ClusterError
    from yolofleet.hosts.remote import Refused

    folder = remote.host.folder or str(Path.cwd())
    try:
        remote.ask("enter", folder=folder)
    except Refused as problem:
        said = problem.what.removeprefix(f"{remote.name}: ")
        return finding("folder-missing", remote.name, folder=folder, problem=said)
    except ClusterError as problem:
        return finding(
            "host-lost", remote.name, seen=problem.what, why="asked for its folder", fix=problem.hint or ""
        )
    return None


command = SchemaCommand(
    "doctor",
    DoctorConfig,
    run,
    help="Check this machine, several hosts, or a log. Print each problem, its consequence and a command to fix it. The "
    "exit code is 4 if a run could not start or continue.",
)
