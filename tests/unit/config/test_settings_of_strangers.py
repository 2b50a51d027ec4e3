"""A configuration or a run folder from somebody else: it names no hosts, starts no program and overwrites no file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from yolofleet.config.load import (
    resolve_bench,
    resolve_doctor,
    resolve_export,
    resolve_predict,
    resolve_selftest,
    resolve_train,
    resolve_tune,
    resolve_val,
    resolve_workload,
)
from yolofleet.config.schema import TrainConfig, ValConfig, may_be_in_files, verbs
from yolofleet.config.schema.measure import BenchScalingConfig, BenchStartConfig, BenchTrainConfig, TuneConfig
from yolofleet.config.stored.job import dump_config
from yolofleet.fleet.launch.machines import fleet_of
from yolofleet.support.errors import ConfigError

MODELS: dict[str, tuple[type[BaseModel], Callable[..., Any], dict[str, Any]]] = {
    "train": (TrainConfig, resolve_train, {"data": "d", "model": "yolov5n"}),
    "tune": (TuneConfig, resolve_tune, {"data": "d", "model": "yolov5n"}),
    "val": (ValConfig, resolve_val, {"data": "d", "weights": "w"}),
    "predict": (verbs.PredictConfig, resolve_predict, {"source": "s", "weights": "w"}),
    "export": (verbs.ExportConfig, resolve_export, {"weights": "w"}),
    "bench": (verbs.BenchConfig, resolve_bench, {"weights": "w"}),
    "bench train": (BenchTrainConfig, partial(resolve_workload, BenchTrainConfig), {"data": "d", "model": "yolov5n"}),
    "bench start": (BenchStartConfig, partial(resolve_workload, BenchStartConfig), {"data": "d", "model": "yolov5n"}),
    "bench scaling": (BenchScalingConfig, partial(resolve_workload, BenchScalingConfig), {"data": "d", "model": "yolov5n"}),
    "doctor": (verbs.DoctorConfig, resolve_doctor, {}),
    "selftest": (verbs.SelftestConfig, resolve_selftest, {}),
}  # fmt: skip
# Texts that a file may give. They are read, or name a new folder; `exist_ok` alone makes it an old one.
READ = {"data", "model", "cfg", "weights", "recipe", "space", "source", "log"}
WORDS = {
    "stages",
    "set",
    "freeze",
    "shares",
    "device",
    "devices",
    "classes",
    "format",
    "img",
    "on_nan",
    "save_every",
}
NEW_FOLDERS = {"project", "name", "stage"}  # files with the name of a hash are added to stage
TYPED = [
    (verb, name)
    for verb, (model, _, _) in MODELS.items()
    for name, field in model.model_fields.items()
    if not may_be_in_files(field)
]


def test_every_text_of_every_verb_is_known_to_read_only_or_counts_on_the_command_line_only() -> None:
    for verb, (model, _, _) in MODELS.items():
        for name, field in model.model_fields.items():
            if field.annotation not in (str, Path, Path | None, tuple[str, ...]):
                continue
            assert not may_be_in_files(field) or name in READ | WORDS | NEW_FOLDERS, (verb, name)


@pytest.mark.parametrize(("verb", "name"), TYPED)
def test_a_setting_of_the_command_line_is_refused_in_a_file(tmp_path: Path, verb: str, name: str) -> None:
    model, resolver, needed = MODELS[verb]
    value = "true" if model.model_fields[name].annotation is bool else "victim"
    file = tmp_path / "a.yaml"
    file.write_text(f"{name}: {value}\n")
    with pytest.raises(ConfigError) as caught:
        resolver(needed, config_file=str(file))
    assert f"{name}: cannot be set in a file" in caught.value.render()
    assert f"{file}:1" in caught.value.render()


def test_the_configuration_of_a_whole_run_repeats_without_hosts_and_files(tmp_path: Path) -> None:
    config = resolve_val({"data": "d", "weights": "w", "hosts": "a:2", "exist_ok": True, "json_out": "x"})
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    again = resolve_val({}, config_file=str(file))
    assert (again.value.hosts, again.value.exist_ok, again.value.json_out) == ("", False, "")
    assert fleet_of(again) is None
    assert f"hosts: a:2 in {file} is ignored; use --hosts" in again.notes
    assert len(again.notes) == 3


def test_the_folder_of_a_run_does_not_say_which_hosts_continue_it(tmp_path: Path) -> None:
    """The fleet file of the audit: ``python:`` in it would be started."""
    evil = tmp_path / "evil.yaml"
    evil.write_text(f"hosts: [{{host: localhost, device: cpu, python: {tmp_path / 'payload'}}}]\n")
    config, recipe = resolve_train({"data": "d", "model": "yolov5n", "fleet": str(evil), "sync_code": True})
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-000000001.safetensors").touch()
    (folder / "config.yaml").write_text(dump_config(config, recipe))
    again, _ = resolve_train({"resume": str(folder)})
    assert (again.value.fleet, again.value.sync_code) == ("", False)
    assert fleet_of(again) is None
    end = f" of {folder / 'config.yaml'} is ignored"  # a long value is cut
    assert any(note.startswith("fleet: ") and note.endswith(end) for note in again.notes)
    asked, _ = resolve_train({"resume": str(folder), "hosts": "a:2"})
    assert asked.value.hosts == "a:2" and asked.value.fleet == ""
