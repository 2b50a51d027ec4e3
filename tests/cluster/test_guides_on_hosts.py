"""The guides' commands for several machines run as they stand: on each machine by hand, nothing shared but the data."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from commands import DEADLINE_S, environment, small_shapes
from guides import given, guide_folder, put_weights
from machines import Lab, Machine, machines

MORE = ("--batch", "8", "--nominal-batch", "8", "--micro-batch", "1")  # work for eight ranks

# {G} GPUs of a machine, {N} machines, this is number {R}
TWO_MACHINES = (
    'python -m torch.distributed.launch --nproc_per_node {G} --nnodes {N} --node_rank {R} --master_addr "10.77.0.1" '
    "--master_port 1234 train.py --batch 64 --data coco.yaml --cfg yolov5s.yaml --weights ''"
)
TWO_MACHINES_TORCHRUN = (
    "python -m torch.distributed.run --nproc_per_node {G} --nnodes {N} --node_rank {R} --master_addr 10.77.0.1 "
    "--master_port 1234 train.py --batch 64 --data coco.yaml --weights yolov5s.pt"
)
FOUR_NODES = (
    "CUDA_VISIBLE_DEVICES='{GPUS}' python -m torch.distributed.launch --nproc_per_node {G} --nnodes 4 --node_rank {R} "
    '--master_addr "10.77.0.1" --master_port 5678 train.py --batch 128 --data ./data/coco.yaml --cfg yolov5s.yaml'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("guides")
    guide_folder(made / "yolov5", small_shapes(made, images=16, val_images=4))
    (made / "own").mkdir()
    return made


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[Lab]:
    """``own`` is each machine's own disk."""
    session = {name: environment(folder)[name] for name in ("YOLOFLEET_OFFLINE", "OMP_NUM_THREADS")}
    with machines(3, private=[folder / "own"], environment=session) as made:
        yield made


@pytest.fixture
def checkout(lab: Lab, folder: Path) -> Path:
    """One on each machine's own disk, new; commands are given there."""
    own = folder / "own"
    for machine in lab.machines:
        machine.run("sh", "-c", f"rm -rf {own}/* && cp -a {folder}/yolov5 {own}")
    os.chdir(folder)
    return own / "yolov5"


def together(checkout: Path, commands: Sequence[tuple[Machine, list[str]]]) -> list[str]:
    """Run each on its machine, all at the same time, to the end; what each said. All end with 0."""
    running = [
        subprocess.Popen(
            machine.argv("env", f"--chdir={checkout}", *argv),
            env=environment(checkout),  # a cache of each machine's own
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for machine, argv in commands
    ]
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), "\n----\n".join(said)
    return said


def trained_together(lab: Lab, checkout: Path, ranks_of: dict[str, set[int]]) -> None:
    """Results on the first machine, copies on the second; logs of its own ranks on each; all ranks computed."""
    run = checkout / "runs" / "train"
    for machine in lab.hosts:
        listed = machine.run("find", run, "-type", "f", check=False).stdout.split()
        names = [Path(file).relative_to(run) for file in listed]
        logs = {int(name.stem[5:]) for name in names if name.match("logs/rank-?.log")}
        assert logs == ranks_of.get(machine.name, set())
        with_results = {name.parts[0] for name in names if name.name in ("results.json", "best.safetensors")}
        assert with_results == ({"exp"} if machine in lab.hosts[:2] else set())
    found = json.loads(lab.hosts[0].run("cat", run / "exp" / "results.json").stdout)
    count = sum(map(len, ranks_of.values()))
    assert found["fleet"] == {"processes": count, "device": "cpu", "hosts": list(ranks_of)}
    assert found["steps"] == 2
    told = lab.hosts[0].run("cat", run / "exp" / "logs" / "rank-0.log").stdout
    assert f"{count} processes (" in told


@pytest.mark.parametrize("command", [TWO_MACHINES, TWO_MACHINES_TORCHRUN], ids=["launch", "torchrun"])
def test_two_machines_with_two_gpus_each(lab: Lab, folder: Path, checkout: Path, command: str) -> None:
    if ".pt" in command:
        put_weights(folder / "yolov5")
        for machine in lab.hosts:
            machine.run("cp", "-a", folder / "yolov5" / "yolov5s.pt", checkout)
    said = together(
        checkout,
        [
            (machine, given(command.format(G=2, N=2, R=node), "cpu", *MORE))
            for node, machine in enumerate(lab.hosts[:2])
        ],
    )
    trained_together(lab, checkout, {"m1": {0, 1}, "m2": {2, 3}})
    assert "epoch 1/1" in said[0] and "epoch 1/1" not in said[1], "output is on the first machine"


def test_four_nodes_made_of_three_machines(lab: Lab, checkout: Path) -> None:
    """The third machine is nodes 2 and 3, each with its share of the GPUs; both run in the one checkout."""
    m1, m2, m3 = lab.hosts
    nodes = [(m1, "0,1", 2), (m2, "0", 1), (m3, "0", 1), (m3, "2", 1)]
    commands = [
        (machine, given(FOUR_NODES.format(GPUS=gpus, G=count, R=node), "cpu", *MORE))
        for node, (machine, gpus, count) in enumerate(nodes)
    ]
    together(checkout, commands)
    trained_together(lab, checkout, {"m1": {0, 1}, "m2": {2}, "m3": {3, 4}})


IPS = (
    "yolofleet train --ips=10.77.0.1,10.77.0.2,10.77.0.3 --selected_gpu 0,1,2,3,4,5,6,7 "
    "--model ppyoloe-s --recipe ppyoloe-300e --data coco.yaml --batch 192"
)


def test_the_addresses_of_fleetrun(lab: Lab, checkout: Path) -> None:
    """From one command, not from one on each machine."""
    (said,) = together(checkout, [(lab.desk, given(IPS, "cpu", *MORE[:4]))])
    trained_together(lab, checkout, {"m1": {0}, "m2": {1}, "m3": {2}})
    assert "--ips 10.77.0.1,10.77.0.2,10.77.0.3 is now --hosts" in said
