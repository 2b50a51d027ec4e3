"""`yolofleet selftest`: the runs of the contract."""

from __future__ import annotations

from typing import Any

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_selftest
from yolofleet.config.schema.verbs import SelftestConfig
from yolofleet.fleet.launch.plan import is_worker
from yolofleet.support.errors import ConfigError


def run(given: dict[str, Any], config_file: str) -> int:
    if is_worker():
        raise ConfigError("selftest starts its processes itself", hint="start it without torchrun")
    from yolofleet.measure.selftest.contract import run_contract

    return run_contract(resolve_selftest(given, config_file=config_file).value)


command = SchemaCommand(
    "selftest",
    SelftestConfig,
    run,
    help="Test on the devices of this machine that the number of processes does not change the result. Train the same few "
    "steps with one process, several processes, unequal shares and DataParallel. With exact reduction the weights must be "
    "equal bit for bit, with fast reduction up to rounding. Then check each device: ten steps compared with the CPU, an fp16 "
    "overflow, resuming with each optimizer. Finally kill one process of a run: the others must end, and the run must "
    "resume. If a test fails, print the likely cause and end with exit code 4.",
)
