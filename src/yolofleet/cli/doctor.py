"""`yolofleet doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_doctor
from yolofleet.config.schema import DoctorConfig


def run(given: dict[str, Any], config_file: str) -> int:
    config = resolve_doctor(given, config_file=config_file).value
    from yolofleet.doctor import run as doctor

    findings = examine(config)
    doctor.tell(findings, doctor.stream_for(config.json_out))
    values = doctor.as_json(findings)
    if config.json_out == "-":
        print(json.dumps(values), flush=True)
    elif config.json_out:
        from yolofleet.report.folder import write_json

        write_json(Path(config.json_out), values)
    return doctor.exit_code(findings)


def examine(config: DoctorConfig) -> list[Any]:
    """What the settings ask for: a log, or this machine."""
    from yolofleet.doctor import run as doctor

    if config.log:
        from yolofleet.doctor.logs import read_log

        return read_log(config.log)
    return doctor.examine_here(doctor.planned(config), port=config.port)


command = SchemaCommand(
    "doctor",
    DoctorConfig,
    run,
    help="Say what is wrong with this machine, a fleet or a log, why it matters and what to type. Exit code 4 when a "
    "run could not start or go on.",
)
