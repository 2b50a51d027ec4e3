"""Settings of earlier versions: what a user gets for them, and what a stored run does with them."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_train, resolve_val
from yolofleet.config.recipe import DEFAULT_SOURCE
from yolofleet.config.schema import TrainConfig
from yolofleet.config.stored.job import dump_config, load_config_yaml
from yolofleet.config.words.earlier import EARLIER, fingerprint_of_today, of_today
from yolofleet.support.errors import ConfigError

MINIMAL = {"data": "d.yaml", "model": "yolov5n"}
# setting, value, the note on the command line, what a run reads
MOVED: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("save_steps", 5, "--save-every 5steps", {"save_every": ("5steps",), "save_steps": 5, "save_period": None}),
    ("save_period", "3", "--save-every 3epochs", {"save_period": 3, "save_minutes": None}),
    ("save_minutes", 0.5, "--save-every 0.5min", {"save_minutes": 0.5}),
    ("tensorboard", True, "--log tensorboard", {"log": ("tensorboard",)}),
    ("multi_scale", True, "--set size_low=0.5 --set size_high=1.5", {}),
    ("optimizer_class", "m:C", "--optimizer m:C", {"optimizer": "m:C", "optimizer_class": "m:C"}),
    ("compile", True, "--passes compiled", {"passes": "compiled"}),
    ("cuda_graphs", "on", "--passes graphs", {"passes": "graphs"}),
    ("cuda_graphs", "off", "--passes plain", {"passes": "plain"}),
    ("accept_changed_data", True, "--allow changed-data", {"accept_changed_data": True}),
    ("linked_folders", True, "--allow linked-folders", {"linked_folders": True}),
]  # fmt: skip


def typed(name: str, value: Any) -> list[str]:
    """The arguments that set an earlier setting."""
    flag = name.replace("_", "-")
    return [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]


def parsed(*argv: str) -> tuple[dict[str, Any], list[str]]:
    """What a training gets from a command line, and the notes."""
    given: dict[str, Any] = {}
    notes = io.StringIO()
    command = SchemaCommand("train", TrainConfig, lambda found, **_: given.update(found) or 0)
    with redirect_stderr(notes):
        command.main(list(argv), standalone_mode=False)
    return given, notes.getvalue().splitlines()


def test_each_setting_of_an_earlier_version_is_gone_and_goes_on_or_says_what_to_do() -> None:
    assert not EARLIER.keys() & TrainConfig.model_fields.keys()
    assert {name for name, setting in EARLIER.items() if setting.new} == {name for name, *_ in MOVED}
    assert all(bool(setting.new) != bool(setting.instead) for setting in EARLIER.values())


@pytest.mark.parametrize(("name", "value", "flags", "settings"), MOVED)
def test_a_setting_that_has_another_name_now_is_read_with_a_note(
    name: str, value: Any, flags: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    given, notes = parsed(*typed(name, value))
    assert notes == [f"note: {' '.join(typed(name, value))} is now {flags}"]
    file = tmp_path / "a.yaml"
    file.write_text(f"{name}: {str(value).lower() if value is True else value}\n")
    runs = [resolve_train({**MINIMAL, **given}), resolve_train({**MINIMAL, name: value}, source="a call")]
    if name in ("optimizer_class", "accept_changed_data", "linked_folders"):
        with pytest.raises(ConfigError, match="cannot be set in a file"):
            resolve_train(MINIMAL, config_file=str(file))
    else:
        runs.append(resolve_train(MINIMAL, config_file=str(file)))
        (note,) = runs[-1][0].notes
        assert note.startswith(f"{name} ") and f"({file}:1) is now " in note, "a note about a file names it"
    for config, recipe in runs:
        assert {key: getattr(config.value, key) for key in settings} == settings
        assert (recipe.value.size_low == 0.5) == (name == "multi_scale")


@pytest.mark.parametrize(("name", "value", "flags", "settings"), MOVED)
def test_a_stored_run_of_an_earlier_version_keeps_it_in_silence(
    name: str, value: Any, flags: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    stored = dump_config(*resolve_train(MINIMAL)).replace("sources:", f"sources:\n  {name}: command line")
    for line in ("save_every: []", "log: []", "allow: []"):
        stored = stored.replace(f"{line}\n", "")
    (tmp_path / "config.yaml").write_text(
        f"{name}: {str(value).lower() if value is True else value}\n{stored}"
    )
    config, recipe = load_config_yaml(tmp_path / "config.yaml")
    assert {key: getattr(config.value, key) for key in settings} == settings and not config.notes
    assert (recipe.value.size_low == 0.5) == (name == "multi_scale")


@pytest.mark.parametrize("name", EARLIER)
def test_a_default_of_an_earlier_setting_has_no_effect_and_a_note(name: str) -> None:
    value = EARLIER[name].default
    if value != () and value != "":
        given, notes = parsed(*typed(name, value))
        assert not given
        assert notes == [f"note: {' '.join(typed(name, value))} has no effect: it is the default"]
    (note,) = resolve_train({**MINIMAL, name: value}, source="a call")[0].notes
    assert note.startswith(f"{name} ") and "(a call) has no effect" in note


@pytest.mark.parametrize("name", [name for name, setting in EARLIER.items() if not setting.new])
def test_a_setting_that_is_gone_says_what_to_do(name: str, tmp_path: Path) -> None:
    setting = EARLIER[name]
    with pytest.raises(ConfigError, match="no such setting any more") as caught:
        resolve_train({**MINIMAL, name: "secret"})
    assert caught.value.hint == setting.instead and "secret" not in caught.value.render()
    file = tmp_path / "config.yaml"
    stored = dump_config(*resolve_train(MINIMAL))
    file.write_text(
        f"{name}: {list(setting.default) if setting.default == () else setting.default!r}\n{stored}"
    )
    assert not load_config_yaml(file)[0].notes, "a default"
    file.write_text(f"{name}: secret\n{stored}")
    (note,) = load_config_yaml(file)[0].notes
    assert note.startswith(f"{name} (") and setting.instead in note and "secret" not in note


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimizer_class": "m:C", "optimizer": "m:C"}, ""),
        ({"compile": True, "cuda_graphs": "off"}, ""),
        ({"optimizer_class": "", "optimizer": "AdamW"}, ""),
        ({"optimizer_class": "m:C", "optimizer": "SGD"}, "--optimizer SGD is also set"),
        ({"compile": True, "cuda_graphs": "on"}, "--passes compiled is also set"),
    ],
)
def test_two_names_of_a_setting_clash_only_if_they_disagree(given: dict[str, Any], says: str) -> None:
    argv = [word for name, value in given.items() if value for word in typed(name, value)]
    if not says:
        parsed(*argv)
        resolve_train({**MINIMAL, **given})
        return
    for call in (lambda: parsed(*argv), lambda: resolve_train({**MINIMAL, **given})):
        with pytest.raises(ConfigError, match=says):
            call()


def test_an_earlier_setting_of_trainings_is_unknown_to_other_verbs() -> None:
    with pytest.raises(ConfigError, match="unknown setting augment_on"):
        resolve_val({"data": "d.yaml", "weights": "w.safetensors", "augment_on": "device"})


def test_the_fingerprint_of_a_checkpoint_of_an_earlier_version_is_that_of_today() -> None:
    then = {
        "settings": {
            "batch": 4,
            "multi_scale": True,
            "augment_on": "cpu",
            "optimizer_class": "C with SHA-256 1",
        },
        "recipe": {"lr0": 1, "size_low": 1.0, "size_high": 1.0},
        "kernels": {"threads": 1, "channels_last": True},
    }
    assert fingerprint_of_today(then) == {
        "settings": {"batch": 4, "optimizer_class": "C with SHA-256 1"},
        "recipe": {"lr0": 1, "size_low": 0.5, "size_high": 1.5},
        "kernels": {"threads": 1},
    }
    then["kernels"]["channels_last"] = False  # type: ignore[index]
    assert fingerprint_of_today(then)["kernels"]["channels_last"] is False, "which today's bits differ from"


def test_the_numbers_of_save_every_replace_earlier_ones_of_their_unit() -> None:
    for given, numbers in (
        (("1epochs,10min", "2epochs"), (2, 0, 10)),
        (("500 steps",), (None, 500, None)),
        (("5steps", "0"), (0, 0, 0)),
        (("0", "1step"), (0, 1, 0)),
    ):
        c = resolve_train({**MINIMAL, "save_every": given})[0].value
        assert (c.save_period, c.save_steps, c.save_minutes) == numbers
    for wrong in ("5", "1.5epochs", "auto", "10h", "-1steps"):
        with pytest.raises(ConfigError, match="no whole number of epochs or steps"):
            resolve_train({**MINIMAL, "save_every": wrong})


@pytest.mark.parametrize("off", ["no", "off", "false", "n", 0, "0", False])
@pytest.mark.parametrize("name", ["multi_scale", "compile", "tensorboard", "linked_folders"])
def test_a_switch_that_is_off_in_any_word_changes_nothing(name: str, off: Any) -> None:
    assert of_today(name, off, "a.yaml:1") is None


@pytest.mark.parametrize(("name", "value"), [("multi_scale", "0.5"), ("cuda_graphs", "bogus")])
def test_a_value_that_is_none_of_the_setting_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected"):
        of_today(name, value, "a.yaml:1")


@pytest.mark.parametrize(
    ("earlier", "new", "value", "expected"),
    [
        ("tensorboard: true", "log", "mlflow", ("mlflow", "tensorboard")),
        ("tensorboard: true", "log", "", ("tensorboard",)),
        ("save_steps: 5", "save_every", "2epochs", ("2epochs", "5steps")),
        ("multi_scale: true", "set", "lr0=0.02", ("lr0=0.02", "size_low=0.5", "size_high=1.5")),
    ],
)
def test_an_earlier_setting_is_added_to_one_text(
    tmp_path: Path, earlier: str, new: str, value: str, expected: tuple[str, ...]
) -> None:
    (tmp_path / "a.yaml").write_text(f"data: d\nmodel: yolov5n\n{earlier}\n{new}: {value}\n")
    config, _ = resolve_train({}, config_file=str(tmp_path / "a.yaml"))
    assert tuple(getattr(config.value, new)) == expected


def test_a_value_of_a_family_in_a_file_leaves_the_recipe_open(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: d\nmodel: yolov5n\nhyperparameters: {box: 0.04}\n")
    _, recipe = resolve_train({}, config_file=str(tmp_path / "a.yaml"))
    assert recipe.sources["lr0"] == DEFAULT_SOURCE and recipe.sources["box"].startswith(str(tmp_path))
