"""Pods in miniature: the containers of a rendered Job, each process 1 of its own, as Kubernetes would run them. They
meet, are warned by the preStop hook or killed, are started again and resume. (The scheduler itself is played here.)"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import SMALL_YOLOV5N as SMALL
from commands import environment, results, small_shapes, yolofleet
from guides import ROOT
from machines import CARD, Lab, Machine, machines

from yolofleet.cli.app import run

DEADLINE_S = 900
STEPS = ["--epochs", "8", "--max-steps", "24", "--save-every", "2steps", "--val-period", "0", "--threads", "1", "--device", "cpu",
         "--reduce", "exact"]  # fmt: skip


class Pod:
    def __init__(self, machine: Machine, index: int, container: dict[str, Any], folder: Path) -> None:
        self.machine = machine
        self.hook = container["lifecycle"]["preStop"]["exec"]["command"]
        self.probe = container["readinessProbe"]["exec"]["command"]
        known = {"JOB_COMPLETION_INDEX": str(index), "JOB_UID": "7f"}
        command = [re.sub(r"\$\((\w+)\)", lambda m: known[m[1]], word) for word in container["command"]]
        self.process = subprocess.Popen(
            machine.argv("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command),
            env=environment(folder) | {"GLOO_SOCKET_IFNAME": CARD},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        )  # fmt: skip

    @property
    def first_process(self) -> int:
        """Process 1 of the container, as this machine counts: the agent."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def exec(self, *command: str) -> subprocess.Popen[bytes]:
        """In the container."""
        return subprocess.Popen(
            ["nsenter", f"--target={self.first_process}", "--pid", "--mount", *command],
            stdout=subprocess.DEVNULL,
        )

    def is_ready(self) -> bool:
        return self.exec(*self.probe).wait() == 0

    def end(self) -> tuple[int, str]:
        said = self.process.communicate(timeout=DEADLINE_S)[0]
        code = self.process.returncode
        return (128 - code if code < 0 else code), said


def start(lab: Lab, container: dict[str, Any], folder: Path) -> list[Pod]:
    return [Pod(host, index, container, folder) for index, host in enumerate(lab.hosts)]


@pytest.fixture
def job(tmp_path: Path, capsys: Any, monkeypatch: Any) -> dict[str, Any]:
    """The specification of the Job that the command of docs/schedulers.md renders, of a smaller run."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "schedulers.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^yolofleet (render kubernetes .*nodes=2.*)$", page, re.MULTILINE)
    here = f"gpus=0,mount={tmp_path},python={sys.executable},grace_s=60,name=yf"
    smaller = [*SMALL, *STEPS, "--data", str(small_shapes(tmp_path)), "--kubernetes", here]
    assert run([*shlex.split(command), *smaller]) == 0
    _, manifest = yaml.safe_load_all(capsys.readouterr().out)
    return dict(manifest["spec"])


def begun(lab: Lab, job: dict[str, Any], folder: Path) -> list[Pod]:
    """Its pods, after the first checkpoint."""
    for machine in lab.hosts:  # the headless service
        with machine.hosts_file.open("a") as hosts:
            hosts.writelines(f"{host.address} yf-{i}.yf\n" for i, host in enumerate(lab.hosts))
    (container,) = job["template"]["spec"]["containers"]
    pods = start(lab, container, folder)
    _wait(lambda: [*folder.glob("runs/train/*/checkpoints/step-*")])
    return pods


def is_counted(job: dict[str, Any], code: int) -> bool:
    """Whether a pod that ended so is replaced and counted; one that is ignored is replaced, too."""
    for rule in job["podFailurePolicy"]["rules"]:
        if code in rule.get("onExitCodes", {}).get("values", ()):
            assert rule["action"] == "Ignore", code
            return False
    return True


def test_pods_meet_are_warned_and_resume(job: dict[str, Any], tmp_path: Path) -> None:
    (container,) = job["template"]["spec"]["containers"]
    with machines(2) as lab:
        pods = begun(lab, job, tmp_path)
        assert all(pod.is_ready() for pod in pods)
        hook = pods[1].exec(*pods[1].hook)  # one pod is evicted
        ends = [pod.end() for pod in pods]
        hook.kill()
        assert [code for code, _ in ends] == [75, 75], ends
        assert not is_counted(job, 75)
        ends = [pod.end() for pod in start(lab, container, tmp_path)]
        assert [code for code, _ in ends] == [0, 0], ends
        assert "resumed after step" in ends[0][1]
        assert lab.left_behind() == {}
    assert [run.name for run in tmp_path.glob("runs/train/*")] == ["coco-7f"]
    assert results(tmp_path / "runs" / "train" / "coco-7f")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_pod_and_the_ones_that_fail_with_it_are_replaced(
    job: dict[str, Any], tmp_path: Path, killed: int
) -> None:
    """Each as soon as it has ended, whatever the others do, as a Job of Kubernetes replaces them."""
    (container,) = job["template"]["spec"]["containers"]
    failed, said = 0, ""
    with machines(2) as lab:
        pods = begun(lab, job, tmp_path)
        os.kill(pods[killed].first_process, signal.SIGKILL)
        waiting = {0, 1}
        while waiting:
            index = _wait(lambda: [i for i in waiting if pods[i].process.poll() is not None])[0]
            code, words = pods[index].end()
            said += words
            if code == 0:
                waiting.remove(index)
                continue
            failed += is_counted(job, code)
            assert failed <= job["backoffLimit"], said
            pods[index] = Pod(lab.hosts[index], index, container, tmp_path)
        assert lab.left_behind() == {}
    (found,) = tmp_path.glob("runs/train/*")
    assert "resumed after step" in said and found.name == "coco-7f"
    args = ["train", "--data", small_shapes(tmp_path), *SMALL, *STEPS]
    yolofleet(tmp_path, *args, "--project", tmp_path / "quiet", "--name", "one")
    assert results(found)["weights_sha256"] == results(tmp_path / "quiet" / "one")["weights_sha256"]
    print(f"{failed} failed pods")


def _wait(find: Any) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found
