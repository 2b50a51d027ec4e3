"""Run a training or a validation on the hosts of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from yolofleet.config.checks import check_train
from yolofleet.config.load import Resolved, dump_config
from yolofleet.config.resolve import DEFAULT
from yolofleet.config.resources import resources_of
from yolofleet.config.resume import options_to_repeat
from yolofleet.config.schema import Recipe, TrainConfig, ValConfig, flag_of
from yolofleet.errors import YolofleetError
from yolofleet.extend.user_code import source_files
from yolofleet.files.atomic import write_bytes
from yolofleet.hosts.fleet import Fleet
from yolofleet.hosts.login import logged_in
from yolofleet.launch.job_on_hosts import run_job
from yolofleet.launch.lease_renewal import Supervision
from yolofleet.launch.machines import WITH_HOSTS, restart_rules
from yolofleet.launch.plan import RunPlan
from yolofleet.launch.preflight import FleetJob, check
from yolofleet.report.folder import RunFolder
from yolofleet.report.page import write_report
from yolofleet.system.signals import stoppable

OF_THE_LAUNCHER = (  # settings that the processes on the hosts do not need
    *("hosts", "fleet", "sync_code", "detach", "restarts"),
    *WITH_HOSTS,
)


def run_on_hosts(plan: RunPlan, supervision: Supervision | None = None) -> tuple[int, RunFolder]:
    """Run a plan on its hosts. Return the exit code and the run's folder on this machine.

    Args:
        supervision: of a detached run, if this process supervises it.
    Raises:
        YolofleetError: the run cannot be started, or the file of ``--json`` cannot be written.
    """
    assert plan.fleet is not None
    settings = plan.config.value
    job = replace(job_of(plan), supervision=supervision)
    if supervision is not None and supervision.term > 1:  # the folder is this run's own
        job = replace(job, may_link=True)
    code, folder = run_job(job, plan.fleet)
    if code == 0 and not settings.plots:
        folder.discard_report()
    if code == 0 and folder.report_json.is_file():
        with suppress(
            YolofleetError
        ):  # the results are complete; `yolofleet report` shows why the page is missing
            write_report(folder)
    if settings.json_out not in ("", "-") and code == 0 and folder.results_json.is_file():
        # Without that file, the launcher has printed why it is missing.
        write_bytes(Path(settings.json_out), folder.results_json.read_bytes(), into_special=True)
    return code, folder


def check_hosts(config: Resolved[TrainConfig], fleet: Fleet) -> None:
    """Check the hosts of a study as before a training with the settings of its trials: each trial then runs on one of them.

    Raises:
        ClusterError, ConfigError: a host cannot be reached, lacks a file or the data, or differs from the others.
    """
    plan = RunPlan(config, None, fleet, 1, None)
    with stoppable(), logged_in(fleet) as remotes:
        check(job_of(plan), fleet, remotes)


def job_of(plan: RunPlan) -> FleetJob:
    """Return what the launcher must know of a run.

    Raises:
        ConfigError: a host's settings contradict each other.
    """
    assert plan.fleet is not None
    settings, is_resumed = plan.config.value, plan.resumed is not None
    return FleetJob(
        verb=settings.verb,
        text=partial(text_for_host, plan.config, plan.recipe),
        resources=resources_of(settings),
        make_folder=plan.folder,
        files=files_read(settings),
        is_resumed=is_resumed,
        may_exist=is_resumed or settings.exist_ok,
        may_link=settings.linked_folders,
        syncs_package=settings.sync_code,
        rules=restart_rules(settings),
        resume_options=resume_options(settings) if plan.recipe is not None else None,
    )


def text_for_host(
    config: Resolved[Any],
    recipe: Resolved[Recipe] | None,
    fleet: Fleet,
    number: int,
    members: Sequence[int],
) -> str:
    """Return the configuration for one host: with its own devices and data, and without the fleet.

    Args:
        number: of the host in the fleet.
        members: numbers of all hosts that take part, in the order of their ranks.
    Raises:
        ConfigError: its settings are mutually exclusive.
    """
    host, model = fleet.hosts[number], type(config.value)
    left = [name for name in OF_THE_LAUNCHER if name in model.model_fields]
    own: dict[str, Any] = {name: model.model_fields[name].default for name in left}
    own |= {"device": host.device, "shares": shares_of(config.value.shares, fleet, members)}
    sources = {**config.sources, **dict.fromkeys(left, DEFAULT), "device": fleet.source}
    if host.data:
        own["data"], sources["data"] = host.data, fleet.source
    if config.value.json_out not in ("", "-"):  # it names a file of this machine
        own["json_out"], sources["json_out"] = "", DEFAULT
    there = Resolved(config.value.model_copy(update=own), sources, config.notes)
    if recipe is not None:
        check_train(there, recipe)
    return dump_config(there, recipe)


def shares_of(shares: str, fleet: Fleet, members: Sequence[int]) -> str:
    """Return the part of ``--shares`` for the ranks of some hosts; "" if it names none for them."""
    numbers = shares.split(",")
    if len(numbers) != fleet.processes:
        return shares  # none, or auto
    if not all(number < len(fleet.active) for number in members):
        return ""  # a spare has no share
    return ",".join(numbers[rank] for number in members for rank in fleet.ranks(number))


def files_read(settings: TrainConfig | ValConfig) -> list[str]:
    """Return the names of files that every rank reads."""
    weights = settings.weights if isinstance(settings, ValConfig) else (settings.weights,)
    names = [*weights, str(settings.cfg)]
    own_optimizer = getattr(settings, "optimizer_class", "")
    code = [settings.recipe_class, own_optimizer, *getattr(settings, "callbacks", ())]
    for name in code:
        if ".py:" in name:
            names += source_files(name.rpartition(":")[0])
    return [name for name in dict.fromkeys(names) if name and Path(name).suffix]


def resume_options(settings: TrainConfig | ValConfig) -> list[str]:
    """Return the options of the command that resumes the run that its folder does not keep."""
    options = ["--fleet", settings.fleet] if settings.fleet else ["--hosts", settings.hosts]
    if not (settings.fleet or settings.hosts):
        options = []
    elif settings.device != "auto":  # hosts that are named without devices use the devices of --device
        options += ["--device", settings.device]
    if settings.sync_code:
        options.append("--sync-code")
    options += options_to_repeat(settings)
    for name in WITH_HOSTS:
        field = TrainConfig.model_fields[name]
        value = getattr(settings, name, field.default)
        if value != field.default:
            options += [flag_of(name, field), f"{value:g}" if isinstance(value, float) else str(value)]
    return options
