"""The search space of `yolofleet tune`: files, errors, and the spaces of the model families."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from yolofleet.config.load import resolve_tune
from yolofleet.config.recipe import load_recipe, recipe_of
from yolofleet.config.schema import Recipe
from yolofleet.config.stored.job import dump_config
from yolofleet.families.table import FAMILIES
from yolofleet.measure.tune.space import Choices, Range, default_space, read_space
from yolofleet.support.errors import ConfigError


def space_of(tmp_path: Path, text: str, family: str = "rtdetr") -> dict[str, Range | Choices]:
    file = tmp_path / "space.yaml"
    file.write_text(text)
    return read_space(file, FAMILIES[family])


def test_ranges_have_the_type_of_the_recipes_value(tmp_path: Path) -> None:
    found = space_of(tmp_path, "lr0: [1e-3, 1, log]\ndenoising: [0, 10]\nnesterov: [true, false]\n")
    assert found == {
        "lr0": Range(0.001, 1.0, True),
        "denoising": Range(0, 10),
        "nesterov": Choices((True, False)),
    }
    assert isinstance(found["lr0"].listed()[1], float)
    assert found["lr0"].rounded(0.0123456) == 0.01235
    assert Range(0.0, 0.12344).rounded(0.123439) == 0.1234
    assert Range(0.00123456, 1.0).rounded(0.00123457) == 0.001235
    assert Range(0.1, 0.123444).rounded(0.1234437) == 0.1234
    assert Range(0.12345, 0.2).rounded(0.123451) == 0.1235
    assert Range(0.12341, 0.2).rounded(0.123411) == 0.12341, "rounding must not leave the range"


def test_one_value_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    family = FAMILIES["rtdetr"]
    assert read_space("lr0=[0.001, 1, log]", family) == {"lr0": Range(0.001, 1.0, True)}
    for text, says in (
        ("lr0=0.1", "lr0: 0.1 is not a range"),
        ("lr1=[0.1,1]", "lrf?"),
        ("lr0=[", "not YAML"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_space(text, family)
        assert says in caught.value.render() and "--space" in caught.value.render()
    (tmp_path / "a=b.yaml").write_text("nesterov: [true, false]\n")
    assert read_space("a=b.yaml", family) == {"nesterov": Choices((True, False))}


@pytest.mark.parametrize("name", ["yolov5", "darknet", "ppyoloe", "rtdetr", "dfine"])
def test_the_default_space_of_a_family_contains_its_recipe(name: str) -> None:
    family = FAMILIES[name]
    recipe = recipe_of(load_recipe(family.recipe), replace(family, network_values=""), None).value
    for key, part in default_space(family).items():
        assert getattr(recipe, key) in part, key


def test_a_family_of_a_user_has_the_default_space_without_what_its_loss_does_not_read() -> None:
    found = default_space(replace(FAMILIES["yolov5"], name="toy", hyperparameters=Recipe))
    assert "lr0" in found and "box" not in found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr1: [0.1, 1]", "did you mean lrf?"),
        ("lr0: 0.1", "lr0: 0.1 is not a range"),
        ("lr0: [0.1]", "is not a range"),
        ("lr0: [0.1, 1, linear]", "is not a range"),
        ("lr0: [0.1, 0.1]", "has no numbers between"),
        ("lr0: [0, 0.1]", "lr0: 0 is not above 0"),
        ("momentum: [0, 0.9, log]", "must begin above 0"),
        ("momentum: [0.5, 1.5]", "momentum: 1.5 is not below 1"),
        ("denoising: [0, 2.5]", "denoising: 2.5 is not a whole number"),
        ("lr0: [.nan, 1]", "lr0"),
        ("rates: [epoch]", "is not a list of two or more different choices"),
        ("rates: [epoch, week]", "week is not one of epoch, step"),
        ("", "names no values to search"),
    ],
)
def test_a_wrong_space_is_one_message_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        space_of(tmp_path, text)
    assert says in caught.value.render()
    assert "space.yaml" in caught.value.render()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"exist_ok": True}, "unknown setting exist_ok"),
        (
            {"devices_per_trial": 2, "fleet": "f"},
            "--devices-per-trial 2 and --fleet f are mutually exclusive",
        ),
        ({"trials": 0}, "--trials 0 is below 1"),
        ({"resume": "nowhere"}, "nowhere is not the folder of a study"),
    ],
)
def test_settings_of_a_study_are_checked(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_tune({"data": "d", "model": "yolov5n", **given})
    assert says in caught.value.render()


def test_a_clash_names_the_flag_and_the_source_of_each_setting(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("data: d\nmodel: yolov5n\ndevices_per_trial: 2\n")
    with pytest.raises(ConfigError) as caught:
        resolve_tune({"hosts": "a:2"}, config_file=str(file))
    assert caught.value.source == f"--devices-per-trial {file}:3, --hosts command line"


def test_async_of_an_older_version_is_refused_in_a_call_and_without_effect_in_a_stored_study(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="no such setting any more"):
        resolve_tune({"data": "d", "model": "yolov5n", "asynchronous": True})
    config, recipe = resolve_tune({"data": "d", "model": "yolov5n"})
    text = dump_config(config, recipe).replace(
        "devices_per_trial", "asynchronous: true\ndevices_per_trial", 1
    )
    text = text.replace("sources:\n", "sources:\n  asynchronous: command line\n", 1)
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "study.journal").touch()
    found, _ = resolve_tune({"resume": str(tmp_path)})
    assert any("asynchronous" in note and "has no effect" in note for note in found.notes)
