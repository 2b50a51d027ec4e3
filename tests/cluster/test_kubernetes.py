"""Pods in miniature: the containers of a rendered Job, each process 1 of its own, as Kubernetes would run them. They
meet, are warned by the preStop hook, save, are started again and resume. (The scheduler itself is played here.)"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from commands import SMALL, environment, results, small_shapes
from machines import CARD, Lab, Machine, machines

from yolofleet.cli.app import run

DEADLINE_S = 240
STEPS = ["--epochs", "4", "--max-steps", "12", "--val-period", "0", "--threads", "1", "--device", "cpu",
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

    def exec(self, *command: str) -> subprocess.Popen[bytes]:
        """In the container."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return subprocess.Popen(
            ["nsenter", f"--target={children[0]}", "--pid", "--mount", *command], stdout=subprocess.DEVNULL
        )

    def is_ready(self) -> bool:
        return self.exec(*self.probe).wait(10) == 0

    def end(self) -> tuple[int, str]:
        said = self.process.communicate(timeout=DEADLINE_S)[0]
        return self.process.returncode, said


def start(lab: Lab, container: dict[str, Any], folder: Path) -> list[Pod]:
    return [Pod(host, index, container, folder) for index, host in enumerate(lab.hosts)]


def test_pods_meet_are_warned_and_resume(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    data = small_shapes(tmp_path)
    job = f"image=a,nodes=2,claim=work,mount={tmp_path},python={sys.executable},grace_s=60,name=yf"
    assert run(["render", "kubernetes", *SMALL, *STEPS, "--data", str(data), "--kubernetes", job]) == 0
    _, manifest = yaml.safe_load_all(capsys.readouterr().out)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]

    with machines(2) as lab:
        for machine in lab.hosts:  # the headless service
            with machine.hosts_file.open("a") as hosts:
                hosts.writelines(f"{host.address} yf-{i}.yf\n" for i, host in enumerate(lab.hosts))
        pods = start(lab, container, tmp_path)
        (events,) = _wait(
            lambda: [p for p in tmp_path.glob("runs/train/*/events.jsonl") if '"step"' in p.read_text()]
        )
        assert all(pod.is_ready() for pod in pods)
        hook = pods[1].exec(*pods[1].hook)  # one pod is evicted
        ends = [pod.end() for pod in pods]
        hook.kill()
        assert [code for code, _ in ends] == [75, 75], ends
        ends = [pod.end() for pod in start(lab, container, tmp_path)]
        assert [code for code, _ in ends] == [0, 0], ends
        assert "resumed after step" in ends[0][1]
        assert lab.left_behind() == {}
    assert events.parent.name == "exp-7f" and results(events.parent)
    assert [run.name for run in tmp_path.glob("runs/train/*")] == ["exp-7f"]


def _wait(find: Any) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found
