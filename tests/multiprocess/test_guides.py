"""The guides' commands for one machine run as they stand; ``tests/cluster/test_guides_on_hosts.py`` has the others."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import free_port, ran, results, small_shapes
from guides import given, guide_folder, put_weights


@dataclass(frozen=True)
class Guide:
    """A command, what ``--device`` says where there are no GPUs, and what the run says of itself then."""

    command: str
    device: str
    where: str
    processes: int = 2


SCRATCH = "--data coco.yaml --weights '' --cfg yolov5s.yaml"
TRAINED = "--data coco.yaml --weights yolov5s.pt"
TORCHRUN, LAUNCH = "python -m torch.distributed.run", "python -m torch.distributed.launch"
TWO_RANKS = "2 processes (torchrun) on cpu"
PADDLE = "-c configs/ppyoloe/ppyoloe_crn_s_300e_coco.yml"
GUIDES = {
    "one GPU": Guide(
        "python train.py --data coco.yaml --epochs 300 --weights '' --cfg yolov5s.yaml --batch-size 32",
        "cpu", "1 process on cpu", 1),
    "one GPU, profiled": Guide(
        "python train.py --batch-size 16 --data coco_profile.yaml --weights yolov5l.pt --epochs 1 --device 0",
        "cpu", "1 process on cpu", 1),
    "two GPUs": Guide(
        f"python train.py --batch 32 {SCRATCH} --device 0,1", "cpu:2", TWO_RANKS),
    "DataParallel": Guide(
        f"python train.py --batch 32 {SCRATCH} --device 0,1 --parallel dp",
        "cpu:2", "1 process with 2 devices on cpu", 1),
    "DDP from scratch": Guide(
        f"{TORCHRUN} --nproc_per_node 2 train.py\n --batch 64\n {SCRATCH}\n --device 0,1".replace("\n", "\\\n"),
        "cpu", TWO_RANKS),
    "DDP, SyncBN, chosen GPUs, another port": Guide(
        f"{TORCHRUN} --master_port 1234 --nproc_per_node 2 train.py --batch 64 {TRAINED} --device 2,3 --sync-bn",
        "cpu", TWO_RANKS),
    "the old launcher": Guide(
        f"{LAUNCH} --nproc_per_node=2 train.py {SCRATCH}", "cpu", TWO_RANKS),
    "the old launcher, --use_env": Guide(
        f"CUDA_VISIBLE_DEVICES='0,1' {LAUNCH} --nproc_per_node=2 --use_env train.py {SCRATCH}", "cpu", TWO_RANKS),
    "YOLOv3-SPP": Guide(
        f"{LAUNCH} --nproc_per_node=2 --use_env train_multi_GPU.py --data coco.yaml --syncBN True --dist-url env:// "
        "--world-size 2 --cfg yolov3-tiny.yaml", "cpu", TWO_RANKS),
    "fleetrun": Guide(
        f"yolofleet fleetrun --selected_gpu 0,1 tools/train.py {PADDLE} --eval", "cpu:2", TWO_RANKS),
    "fleetrun, keys": Guide(
        f"yolofleet paddle.distributed.launch --gpus 0,1 tools/train.py {PADDLE} --amp --use_vdl false "
        "-o LearningRate.base_lr=0.001 worker_num=1", "cpu:2", TWO_RANKS),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gui des")
    return guide_folder(made / "yolov5", small_shapes(made, images=8, val_images=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_commands_for_one_machine(folder: Path, name: str) -> None:
    guide = GUIDES[name]
    port = str(free_port())
    command = guide.command.replace("1234", port)
    if ".pt" in command:
        put_weights(folder)
    variables = {"PET_MASTER_PORT": port}  # torchrun's default, 29500, may be taken
    done = ran(folder, *given(command, guide.device, "--name", name), variables=variables)
    assert f"  where    {guide.where}" in done.out
    run = folder / "runs" / "train" / name
    found = results(run)
    assert found["fleet"]["processes"] == guide.processes and found["steps"] == 2
    assert (run / "weights" / "best.safetensors").exists()
    assert len(list((run / "logs").glob("rank-?.log"))) == guide.processes


@pytest.mark.slow
def test_paddledetections_commands_after_the_training(folder: Path) -> None:
    """On the weights of a training by its command."""
    train = f"yolofleet fleetrun --selected_gpu 0,1 tools/train.py {PADDLE}"
    ran(folder, *given(train, "cpu:2", "--name", "paddle"))
    weights = folder / "runs/train/paddle/weights/best.safetensors"
    picture = next((folder.parent / "small shapes/images/val").iterdir())
    ours, sizes = [sys.executable, "-m", "yolofleet"], ["--img", "64"]
    evaluated = ["fleetrun", "--gpus", "cpu:2", "tools/eval.py", *PADDLE.split(), "-o", f"weights={weights}"]
    done = ran(folder, *ours, *evaluated, "--classwise", *sizes)
    assert "mAP50" in done.out and "circle" in done.out
    inferred = ["fleetrun", "tools/infer.py", *PADDLE.split(), f"--infer_img={picture}", "--output_dir=drawn"]
    ran(folder, *ours, *inferred, "-o", f"weights={weights}", "use_gpu=false", *sizes)
    assert list((folder / "drawn").rglob(f"*{picture.suffix}"))
