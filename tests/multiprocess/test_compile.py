"""``--passes compiled``: the compiled network learns what the network learns, on one and on two processes, and after a resume."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import called, small_shapes, working_in, yolofleet
from small_training import narrow_cfg, small_run

from yolofleet.families.weights.format import read_tensors
from yolofleet.support.errors import ConfigError

STEPS = 4
SMALL_DETR = Path(__file__).resolve().parents[1] / "detr_family" / "small_detr.py"
COMPILED = ("--passes", "compiled")


@pytest.fixture(scope="module", autouse=True)
def no_caches_of_other_tests() -> Iterator[None]:
    """A command that another test called in this process may have named the folders of its compiled files."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a network of 13 convolutions. torch compiles only in paths without spaces."""
    made = tmp_path_factory.mktemp("compile")
    (made / "narrow.cfg").write_text(narrow_cfg("darknet-narrow"))
    small_shapes(made)
    return made


def arguments(name: str, *more: str, device: str = "cpu", steps: int = STEPS) -> list[str]:
    given = f"train --data small~shapes/data.yaml --cfg narrow.cfg --img 64 --device {device} --name {name}"
    given += f" --batch 8 --nominal-batch 8 --micro-batch 4 --no-plots --val-period 0 --threads 1 --max-steps {steps}"
    return [word.replace("~", " ") for word in given.split()] + list(more)


def resumed(name: str, *more: str) -> list[str]:
    return ["train", "--resume", f"runs/train/{name}", "--max-steps", str(STEPS), *more]


@pytest.fixture(scope="module")
def eager(folder: Path) -> dict[str, torch.Tensor]:
    yolofleet(folder, *arguments("eager"))
    return weights(folder, "eager")


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "runs" / "train" / name / "weights" / "last.safetensors")[0]


def assert_equal_up_to_rounding(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    for name, t in others.items():
        if t.is_floating_point():
            assert (some[name] - t).norm() <= 2e-3 * t.norm() + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cpu:2"])
def test_compiled_processes_learn_what_one_learns_up_to_rounding(
    folder: Path, eager: dict[str, torch.Tensor], device: str
) -> None:
    name = f"compiled-{device.count('2')}"
    yolofleet(folder, *arguments(name, *COMPILED, device=device))
    assert_equal_up_to_rounding(weights(folder, name), eager)
    assert any((folder / "cache" / "compiled").iterdir()), "not in a folder that other users can write"


@pytest.mark.slow
def test_a_compiled_network_that_reads_targets_learns_the_same(folder: Path) -> None:
    shutil.copy(SMALL_DETR, folder)
    argv = [word for word in arguments("detr") if word not in ("--cfg", "narrow.cfg")]
    argv += ["--recipe-class", f"{SMALL_DETR.name}:Small", "--model", "dfine-toy", "--optimizer", "SGD"]
    argv += ["--set", "lr0=0.01", "--set", "size_low=1", "--set", "size_high=1"]
    yolofleet(folder, *argv)
    yolofleet(folder, *argv, "--name", "detr-compiled", *COMPILED)
    assert_equal_up_to_rounding(weights(folder, "detr-compiled"), weights(folder, "detr"))


@pytest.mark.slow
def test_compiled_passes_of_several_micro_batches_learn_the_same(
    folder: Path, eager: dict[str, torch.Tensor]
) -> None:
    yolofleet(folder, *arguments("together", *COMPILED, "--micro-batches-per-pass", "2"))
    # also the statistics of both micro-batches
    assert_equal_up_to_rounding(weights(folder, "together"), eager)


@pytest.mark.slow
@pytest.mark.parametrize(("begins", "ends"), [("compiled", "plain"), ("plain", "compiled")])
def test_a_resumed_run_may_begin_or_end_to_compile(
    folder: Path, eager: dict[str, torch.Tensor], begins: str, ends: str
) -> None:
    name = f"resumed{begins}"
    yolofleet(folder, *arguments(name, "--passes", begins, steps=2))
    done = yolofleet(folder, *resumed(name, "--passes", ends))
    assert "last bits may differ from the run so far: compile was" in done.out + done.err
    assert_equal_up_to_rounding(weights(folder, name), eager)


@pytest.mark.slow
def test_exact_sums_cannot_continue_a_compiled_run(folder: Path) -> None:
    yolofleet(folder, *arguments("then-exact", *COMPILED, steps=1))
    done = yolofleet(folder, *resumed("then-exact", "--reduce", "exact"), code=ConfigError.exit_code)
    assert "--passes compiled and --reduce exact are mutually exclusive" in done.err


def test_a_machine_that_cannot_compile_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", without_compiler)
    with working_in(folder):
        done = called(*arguments("nothing", *COMPILED))
    assert done.code == ConfigError.exit_code
    assert "cannot compile the network on cpu" in done.err
    assert "No working C++ compiler found" in done.err
    assert "leave out --passes" in done.err
    assert "Traceback" not in done.err


def test_only_passes_of_the_compiled_size_use_the_compiled_network() -> None:
    run, sizes = small_run(images=6, per_pass=2), list[int]()
    replica = run.state.replicas.lead

    def usual(images: torch.Tensor) -> object:
        sizes.append(len(images))
        return replica.model(images)

    replica.usual_pass, replica.usual_images = usual, 4
    run.do(2)  # each step has passes of 4 and of 2 images
    assert sizes == [4, 4]


def test_the_part_that_reads_targets_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets have another shape in each pass, and each shape would be compiled."""
    seen = list[torch.nn.Module]()

    def compile(part: torch.nn.Module, **_: object) -> object:
        seen.append(part)
        return part

    monkeypatch.setattr(torch, "compile", compile)
    replicas = [small_run(name, images=2).state.replicas for name in ("dfine-n", "yolov5-narrow")]
    for each in replicas:
        each.compile(2)
    detr, yolo = (each.lead.model for each in replicas)
    assert list(seen[0].children()) == [detr.backbone, detr.encoder] and seen[1:] == [yolo]
    assert replicas[0].lead.forward(torch.rand(2, 3, 64, 64), None)[0].shape == (2, 20, 4)
