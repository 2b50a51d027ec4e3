"""``Model`` from a script: each verb on one and on two processes, and errors with the text of the command."""

from __future__ import annotations

import io
import multiprocessing
import random
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from commands import called, results, small_shapes, working_in
from small_files import TINY

from yolofleet import Model, attach
from yolofleet.cli import api
from yolofleet.support.errors import ConfigError, DataError, NumericsError
from yolofleet.training.pages import RunPages
from yolofleet.training.parallel.process import lent_process

SMALL = {
    "model": {"img": 64, "batch": 8, "nominal_batch": 8, "micro_batch": 2, "epochs": 1, "seed": 1},
    "run": {"plots": False, "threads": 1, "workers": 0},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_shapes(tmp_path_factory.mktemp("in terface"))


@pytest.fixture(scope="module")
def trained(data: Path) -> dict[str, Model]:
    models = {}
    for name, device in (("one", "cpu"), ("two", "cpu:2")):
        models[name] = Model(str(TINY))
        with working_in(data.parent), redirect_stdout(io.StringIO()) as shown:  # as a notebook's cell
            run = models[name].train(
                data=data, device=device, reduce="exact", name=name, **SMALL["model"], **SMALL["run"]
            )
        assert "epoch 1/1: " in shown.getvalue()
        assert run.folder == Path("runs/train") / name and run.weights.name == "best.safetensors"
        assert models[name].weights == str(run.weights)
    return models


def test_one_and_two_processes_train_the_same_weights(data: Path, trained: dict[str, Model]) -> None:
    hashes = {results(data.parent / "runs" / "train" / name)["weights_sha256"] for name in trained}
    assert len(hashes) == 1


def changed_process(changes: ExitStack) -> None:
    """Set what a notebook may have set for other work, until ``changes`` ends."""
    changes.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    changes.enter_context(torch.device("meta"))
    changes.enter_context(torch.inference_mode())
    changes.enter_context(torch.autocast("cpu", torch.bfloat16))
    changes.callback(cv2.setNumThreads, cv2.getNumThreads())
    cv2.setNumThreads(2)
    changes.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(2)


def state_of_process() -> list[Any]:
    """Return what a training changes while it runs."""
    cudnn, filling = torch.backends.cudnn, torch.utils.deterministic
    return [
        random.getstate(),
        torch.get_rng_state().tolist(),
        torch.get_deterministic_debug_mode(),
        filling.fill_uninitialized_memory,  # type: ignore[attr-defined]
        (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, torch.get_float32_matmul_precision()),
        (torch.get_num_threads(), cv2.getNumThreads()),
        (torch.get_default_dtype(), torch.get_default_device(), torch.is_inference_mode_enabled()),
    ]


def test_settings_of_the_callers_process_change_nothing_and_stay(
    data: Path, trained: dict[str, Model], tmp_path: Path
) -> None:
    picture = str(next((data.parent / "images" / "val").iterdir()))
    settings = {
        "data": data,
        "device": "cpu",
        "reduce": "exact",
        "name": "changed",
        **SMALL["model"],
        **SMALL["run"],
    }
    with working_in(data.parent), ExitStack() as changes:
        plain = trained["one"].predict(picture, conf=1e-4)[0]
        changed_process(changes)
        before, model = state_of_process(), Model(str(TINY))
        model.train(**settings)
        found = model.predict(picture, conf=1e-4)[0]
        exported = model.export(format="torchscript", out=str(tmp_path / "changed.torchscript"))[0]
        assert state_of_process() == before
        assert (
            results(Path("runs/train/changed"))["weights_sha256"]
            == results(Path("runs/train/one"))["weights_sha256"]
        )
    np.testing.assert_array_equal(found.scores, plain.scores)
    assert len(plain.scores) > 0 and exported.verified


def test_a_daemon_process_trains_with_loader_processes(
    data: Path, trained: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker of Celery is, which may start no children by multiprocessing."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with working_in(data.parent):
        settings = {**SMALL["model"], **SMALL["run"], "workers": 1, "reduce": "exact"}
        run = Model(str(TINY)).train(data=data, device="cpu", name="daemon", **settings)
        assert results(run.folder)["weights_sha256"] == results(Path("runs/train/one"))["weights_sha256"]


def test_the_last_run_of_a_process_restores_its_settings() -> None:
    first, second = lent_process(), lent_process()
    with first:
        second.__enter__()
        torch.set_deterministic_debug_mode(1)
    assert torch.get_deterministic_debug_mode() == 1
    second.__exit__(None, None, None)
    assert torch.get_deterministic_debug_mode() == 0


def test_the_figures_of_a_report_count_as_validation(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = set()

    def note_phase(self: RunPages, evaluation: object, _sample: object) -> None:
        if evaluation is not None:
            phases.add(self.clock.phase)

    monkeypatch.setattr(RunPages, "_write_figures", note_phase)
    with working_in(data.parent):
        settings = SMALL["model"] | SMALL["run"] | {"plots": True, "epochs": 2}
        Model(str(TINY)).train(data=data, device="cpu", name="figures", **settings)
    assert phases == {"evaluate"}


@pytest.mark.slow
def test_tune_finds_the_best_trial(data: Path) -> None:
    pytest.importorskip("optuna", reason="the extra yolofleet[tune] is not installed")
    with working_in(data.parent):
        (data.parent / "space.yaml").write_text("lr0: [0.001, 0.1, log]\n")
        found = Model("yolov5n").tune(
            data=data, space="space.yaml", trials=2, device="cpu", **SMALL["model"], threads=1
        )
        assert found.folder == Path("runs/tune/exp") and found.recipe.is_file()
        assert found.best.number in (0, 1) and found.default_fitness is not None


def test_tune_passes_on_the_model_and_its_settings(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies = list[tuple[Any, Any]]()
    monkeypatch.setattr(api, "tune", lambda config, recipe: studies.append((config.value, recipe.value)))
    Model("yolov5n").tune(data=data, space=Path("space.yaml"), trials=2, set=("lr0=0.02",), reduce="fast")
    (config, recipe), *_ = studies
    assert (config.model, config.data, config.space) == ("yolov5n", str(data), "space.yaml")
    assert (config.trials, config.reduce, recipe.lr0) == (2, "fast", 0.02)
    with pytest.raises(ConfigError, match="trails"):
        Model("yolov5n").tune(data=data, trails=2)
    with pytest.raises(ConfigError, match="is not the folder of a study"):
        Model("yolov5n").tune(resume=data.parent)


def test_a_validation_has_the_figures_of_the_command(data: Path, trained: dict[str, Model]) -> None:
    with working_in(data.parent):
        found = trained["one"].val(data=data, device="cpu", img=64, **SMALL["run"])
        words = ["--img", "64", "--no-plots", "--name", "cli"]
        assert called("val", "--weights", trained["one"].weights, "--data", data, *words).code == 0
    command = results(data.parent / "runs" / "val" / "cli")
    assert found.metrics == command["metrics"]
    assert found.per_class == command["per_class"] and found.images == 10


def test_predictions_of_files_and_arrays_and_files_on_request(data: Path, trained: dict[str, Model]) -> None:
    pictures = sorted((data.parent / "images" / "val").glob("*"))[:2]
    with working_in(data.parent):
        model = Model(Path(trained["one"].weights).parents[1])  # the folder of the run
        found = model.predict(pictures, conf=0.001, device="cpu")
        assert [Path(one.path) for one in found] == pictures
        (again,) = model.predict(found[0].image_bgr, conf=0.001, device="cpu")
        np.testing.assert_array_equal(again.boxes_xyxy_px, found[0].boxes_xyxy_px)
        assert not Path("runs/predict").exists()
        next(model.stream(pictures[0], save_json=True, device="cpu"))
        model.predict(pictures[0], save_json=True, device="cpu", name="written")
        assert (Path("runs/predict/written") / "predictions.json").is_file()
        with pytest.raises(DataError):
            model.predict(data, device="cpu")  # not an image


def test_the_speed_and_the_exported_files_are_values(data: Path, trained: dict[str, Model]) -> None:
    with working_in(data.parent):
        assert trained["one"].bench(passes=2, img=64, device="cpu").images_per_s > 0
        (file,) = trained["one"].export(format="torchscript")
        assert file.verified and file.file.is_file() and file.mib > 0.1
        assert Model(file.file).predict(np.zeros((64, 64, 3), np.uint8), conf=0.9) != []


def test_errors_have_the_text_of_the_command(data: Path, trained: dict[str, Model]) -> None:
    with working_in(data.parent):
        with pytest.raises(ConfigError, match="has no weights to val with"):
            Model("yolov5n").val(data=data)
        with pytest.raises(ConfigError, match="did you mean epochs"):
            Model("yolov5n").train(data=data, epoch=1)
        with pytest.raises(ConfigError, match="no known detached run none-of-these"):
            attach("none-of-these")
        settings = {"data": data, **SMALL["model"], **SMALL["run"], "freeze": "99"}
        texts = set()
        for device in ("cpu", "cpu:2"):
            with pytest.raises(ConfigError) as raised:
                Model("yolov5n").train(device=device, **settings)
            assert raised.value.what == "--freeze 99: the model has 25 layers"
            texts.add(str(raised.value).partition("\n  on   :")[0])  # there if one rank alone could say it
        assert len(texts) == 1


@pytest.mark.slow
def test_a_failure_of_a_worker_keeps_its_kind(data: Path) -> None:
    with working_in(data.parent), pytest.raises(NumericsError, match="is not finite"):
        Model(str(TINY)).train(
            data=data, device="cpu:2", set=("lr0=1e30", "warmup_epochs=0"), **SMALL["model"], **SMALL["run"]
        )
