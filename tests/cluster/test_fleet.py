"""One command, several machines: the same result as one process, and nothing left behind however it ends.

FLEET_REPEATS=20 provokes every end so often.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import SMALL_YOLOV5N as SMALL
from commands import environment, small_shapes, yolofleet
from desk import AGENT, DEADLINE_S, Command, agent_of, nothing_left, session_of, worker_of
from machines import Lab, Machine, machines

import yolofleet as yolofleet_package

REPEATS = int(os.environ.get("FLEET_REPEATS", "1"))
HOSTS = """
silence_s: 5
grace_s: 6
hosts: [m1:cpu:1, m2:cpu:1]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seen by all machines, as on NFS; ``own`` in it is each machine's own."""
    made = tmp_path_factory.mktemp("shared")
    (made / "own").mkdir()
    (made / "tmp").mkdir()
    (made / "fleet.yaml").write_text(HOSTS)
    return made


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return small_shapes(folder)


@pytest.fixture(scope="module")
def lab(folder: Path, data: Path) -> Iterator[Lab]:
    with machines(3, private=[folder / "own"], environment=session_of(folder)) as made:
        yield made


def results(run: Path) -> dict:
    return json.loads((run / "results.json").read_text())


EXACT = [*SMALL, "--epochs", "2", "--threads", "1", "--reduce", "exact"]


@pytest.fixture(scope="module")
def trained_alone(folder: Path, data: Path) -> Path:
    """By one process."""
    yolofleet(folder, "train", "--data", data, *EXACT, "--device", "cpu", "--name", "alone")
    return folder / "runs" / "train" / "alone"


def import_s(machine: Machine, modules: str) -> float:
    """CPU seconds."""
    program = f"import os, {modules}; t = os.times(); print(t.user + t.system)"
    return float(machine.run(sys.executable, "-c", program).stdout)


def test_three_machines_learn_what_one_process_learns(
    lab: Lab, folder: Path, data: Path, trained_alone: Path
) -> None:
    """Nothing is shared: each machine has its own disk, where the data lie and results go; the desk has its, too."""
    own = folder / "own"
    for machine in lab.hosts:
        shutil_copy = f"import shutil; shutil.copytree({str(data.parent)!r}, {str(own / 'set')!r})"
        machine.run(sys.executable, "-c", shutil_copy)
    taken = subprocess.Popen(
        lab.hosts[0].argv(sys.executable, "-m", "http.server", "29500"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (folder / "three.yaml").write_text(
        f"defaults: {{folder: {own}}}\nhosts: [m1:cpu:2, m2:cpu:1, {{host: m3, device: cpu, data: {own}/set/data.yaml}}]\n"
    )
    command = Command(lab, own, "train", "--data", "set/data.yaml", *EXACT, "--fleet", folder / "three.yaml")
    checked_s = command.wait_for(r"meeting at 10\.77\.0\.1:29501")  # 29500 is taken
    begun_s, stepped_s = command.wait_for("^yolofleet train"), command.wait_for("epoch 1/2")
    assert command.end() == 0, command.said
    taken.kill()
    taken.wait()
    nothing_left(lab)
    imports_s = 3 * import_s(lab.hosts[0], AGENT)
    imports_s += 4 * import_s(lab.hosts[0], "torch")  # workers
    share = imports_s / ((os.cpu_count() or 1) * begun_s)
    print(
        f"\nfrom the command: checked {checked_s:.1f} s, training begins {begun_s:.1f} s, "
        f"first epoch (3 steps) done {stepped_s:.1f} s, everything ended {command.lines[-1][0]:.1f} s; "
        f"7 imports of torch take {imports_s:.1f} s of CPU, {share:.0%} of what all cores have until training begins"
    )

    there = results_there(lab.hosts[0], own / "runs" / "train" / "exp")
    here = results_there(lab.desk, own / "runs" / "train" / "exp")
    assert here == there, "results are copied to the desk"
    listed = lab.desk.run("ls", "-R", own / "runs" / "train" / "exp").stdout
    assert all(f"rank-{rank}.log" in listed for rank in range(4)) and "last.safetensors" in listed
    assert "step-0" not in listed and "where.txt" in listed and f"stay on m1, in {own}" in command.said
    assert command.said.count("epoch 2/2") == 1, "one view"

    alone = results(trained_alone)
    assert here["weights_sha256"] == alone["weights_sha256"] and here["metrics"] == alone["metrics"]


def test_a_run_whose_states_are_elsewhere_goes_on(lab: Lab, folder: Path) -> None:
    """The run of the test above: the desk has its results, m1 its states."""
    command = Command(
        lab, folder / "own", "train", "--resume", "auto", "--epochs", "3", "--fleet", folder / "three.yaml"
    )
    assert command.end() == 0, command.said
    assert "epoch 3/3" in command.said and "epoch 2/3" not in command.said
    rows = lab.desk.run("cat", folder / "own" / "runs" / "train" / "exp" / "results.csv").stdout
    assert len(rows.splitlines()) == 4
    nothing_left(lab)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_was_stopped_or_killed_goes_on_although_its_states_are_elsewhere(
    lab: Lab, folder: Path, number: signal.Signals
) -> None:
    """The desk does not see the hosts' disks (those of the tests above)."""
    own, name = folder / "own", f"ended-by-{number.name}"
    args = [*SMALL, "--threads", "1", "--epochs", "100000", "--val-period", "0", "--name", name]
    command = Command(lab, own, "train", "--data", "set/data.yaml", *args, "--fleet", folder / "three.yaml")
    command.wait_for("epoch 3/")
    command.process.send_signal(number)
    command.end()
    nothing_left(lab)
    resume = ["train", "--resume", f"runs/train/{name}", "--fleet", str(folder / "three.yaml")]
    if number == signal.SIGINT:
        assert " ".join(resume) in command.said and "stay on m1" in command.said, command.said
    done = int(re.findall(r"epoch (\d+)/", command.said)[-1])
    again = Command(lab, own, *resume, "--epochs", str(done + 2))
    assert again.end() == 0, again.said
    assert f"epoch {done + 2}/{done + 2}" in again.said and "epoch 1/" not in again.said
    assert results_there(lab.desk, own / "runs" / "train" / name)["weights_sha256"]
    lab.hosts[1].run("test", "-f", own / "runs" / "train" / name / "logs" / "rank-2.log")

    alone = Command(lab, own, "train", "--resume", f"runs/train/{name}", "--epochs", str(done + 3))
    assert alone.end() == 2 and "are on m1, in" in alone.said and "--hosts m1:" in alone.said, alone.said
    lab.hosts[0].run("rm", "-r", own / "runs" / "train" / name)  # m1 and its disk are lost; m2 has the copy
    other = Command(lab, own, *resume[:3], "--epochs", str(done + 3), "--hosts", "m3:cpu:1,m2:cpu:1")
    assert other.end() == 0 and f"epoch {done + 3}/{done + 3}" in other.said, other.said
    assert f"epoch {done + 2}/" not in other.said, "it went on where m1 had stopped"
    rows = lab.desk.run("cat", own / "runs" / "train" / name / "results.csv").stdout
    assert len(rows.splitlines()) == 1 + done + 3
    assert results_there(lab.desk, own / "runs" / "train" / name)["weights_sha256"]
    nothing_left(lab)


def results_there(machine: Machine, run: Path) -> dict:
    return json.loads(machine.run("cat", run / "results.json").stdout)


def test_validation_is_shared_by_all_machines(
    lab: Lab, folder: Path, data: Path, trained_alone: Path
) -> None:
    weights = trained_alone / "weights" / "last.safetensors"
    args = ["val", "--weights", weights, "--data", data, "--img", "64", "--no-plots"]
    command = Command(lab, folder, *args, "--hosts", "m1:cpu:1,m2:cpu:1,m3:cpu:1", "--json", "-")
    assert command.end() == 0, command.said
    yolofleet(folder, *args)
    assert results(folder / "runs/val/exp")["metrics"] == results(folder / "runs/val/exp2")["metrics"]
    assert json.loads(command.lines[-1][1])["metrics"] == results(folder / "runs/val/exp")["metrics"]
    nothing_left(lab)


PORT_TAKEN_IN_THE_MEANTIME = """
import sys
from yolofleet.cli import main
from yolofleet.fleet.launch import preflight

free_port, inspect = preflight.free_port, preflight.inspect

def taken_port(fleet, remotes, passed_over=()):  # somebody listens there, and it is not noticed at first
    return free_port(fleet, remotes, passed_over) if passed_over else 29500

preflight.free_port = taken_port

def inspect_blindly(*arguments):
    findings, plan = inspect(*arguments)
    return [finding for finding in findings if finding.code != "port-busy"], plan

preflight.inspect = inspect_blindly
sys.exit(main(sys.argv[1:]))
"""


def test_a_port_that_is_taken_at_the_last_moment_is_replaced(lab: Lab, folder: Path, data: Path) -> None:
    taken = subprocess.Popen(
        lab.hosts[0].argv(sys.executable, "-m", "http.server", "29500"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    args = [
        "train",
        "--data",
        data,
        *SMALL,
        *("--max-steps", "1", "--val-period", "0", "--hosts", "m1:cpu:1,m2:cpu:1"),
    ]
    os.chdir(folder)
    done = lab.desk.run(
        sys.executable, "-c", PORT_TAKEN_IN_THE_MEANTIME, *args, env=environment(folder), timeout_s=DEADLINE_S
    )
    assert "another process took port 29500 of m1; trying another port" in done.stderr
    taken.kill()
    taken.wait()
    nothing_left(lab)


# -- every way to end ----------------------------------------------------------------------------------------


def interrupt(lab: Lab, command: Command) -> None:
    command.process.send_signal(signal.SIGINT)


def kill_launcher(lab: Lab, command: Command) -> None:
    command.process.kill()


def cut_link(lab: Lab, command: Command) -> None:
    lab.hosts[1].unplug()


def kill_worker(lab: Lab, command: Command) -> None:
    os.kill(worker_of(lab.hosts[1]), signal.SIGKILL)


def kill_agent(lab: Lab, command: Command) -> None:
    os.kill(agent_of(lab.hosts[1]), signal.SIGKILL)


def kill_host_agent(lab: Lab, command: Command) -> None:
    host_agent = next(p for p, c in lab.hosts[1].processes().items() if "hosts.host_agent" in c)
    os.kill(host_agent, signal.SIGKILL)


def stop(lab: Lab, command: Command) -> None:
    said = lab.hosts[1].run(sys.executable, "-m", "yolofleet", "fleet", "ps", "--hosts", "m1,m2").stdout
    assert len(re.findall(r"m[12] +[01] +runs .* train runs/train/", said)) == 2, said
    done = lab.hosts[1].run(sys.executable, "-m", "yolofleet", "fleet", "stop", "--hosts", "m1,m2")
    assert "has ended on m1, m2" in done.stdout, done.stdout + done.stderr


SAVED = "Stopped: .*saved"
ENDS: dict[str, tuple[Callable[[Lab, Command], None], int, str]] = {
    "Ctrl-C": (interrupt, 75, SAVED),
    "the launcher is killed": (kill_launcher, -signal.SIGKILL, ""),
    "a cable is pulled": (cut_link, 4, "m2 is lost, with rank 1: no message from it for 5 s"),
    "a worker is killed": (kill_worker, 4, r"rank 1 on m2 was killed \(SIGKILL\)"),
    "an agent is killed": (kill_agent, 4, "agent of rank 1 on m2 was ended by SIGKILL"),
    "a host agent is killed": (kill_host_agent, 4, "m2 is lost, with rank 1"),
    "fleet stop": (stop, 75, SAVED),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("repeat", range(REPEATS))
def test_nothing_is_left_behind(lab: Lab, folder: Path, data: Path, name: str, repeat: int) -> None:
    provoke, code, says = ENDS[name]
    endless = [*SMALL, "--epochs", "100000", "--threads", "1", "--val-period", "0", "--no-autoanchor"]
    endless += ["--restarts", "0"]
    command = Command(lab, folder, "train", "--data", data, *endless, "--fleet", "fleet.yaml")
    try:
        command.wait_for("epoch 1/")
        if name == "Ctrl-C":
            nothing_is_open_to_all(lab)
        began_s = time.monotonic()
        provoke(lab, command)
        assert command.end() == code, command.said
        told_s = time.monotonic() - began_s
        left_s = told_s + nothing_left(lab)
        print(f"\n{name}: the launcher has ended after {told_s:.1f} s, everything after {left_s:.1f} s")
        assert re.search(says, command.said), command.said
    finally:
        lab.hosts[1].plug()
        command.process.kill()


def nothing_is_open_to_all(lab: Lab) -> None:
    """Workers and relays listen on the chosen network interface, the store on loopback."""
    for machine in lab.hosts[:2]:
        addresses = {address for address, _ in machine.listening()}
        assert addresses == {"127.0.0.1", machine.address}, machine.listening()


def test_a_command_on_every_host(lab: Lab, folder: Path) -> None:
    command = Command(
        lab,
        folder,
        *("fleet", "run", "--hosts", "m1:2,m2:1,m3:1", "--", "sh", "-c"),
        "echo $PET_NODE_RANK on $(hostname)",
    )
    assert command.end() == 0, command.said
    assert sorted(line for _, line in command.lines) == ["m1: 0 on m1", "m2: 1 on m2", "m3: 2 on m3"]


def test_hosts_that_differ_are_named_before_anything_starts(lab: Lab, folder: Path, data: Path) -> None:
    other = folder / "other"
    shutil.copytree(data.parent, other)
    next((other / "labels" / "train").glob("*.txt")).unlink()
    (folder / "odd.yaml").write_text(
        f"hosts: [m1:cpu:1, {{host: m2, device: cpu, data: {other}/data.yaml}}]\n"
    )
    command = Command(lab, folder, "train", "--data", data, *SMALL, "--fleet", "odd.yaml")
    assert command.end() == 4
    assert "train images or labels are not the same" in command.said and "m2" in command.said
    command = Command(lab, folder, "train", "--data", data, *SMALL, "--hosts", "m1:cpu:1,m9:cpu:1")
    assert command.end() == 4 and "m9: there is no host of that name" in command.said
    nothing_left(lab)


def test_a_host_with_other_code_is_named_or_sent_this_one(lab: Lab, folder: Path, data: Path) -> None:
    package = Path(yolofleet_package.__file__).parent
    shutil.copytree(package, folder / "old" / "yolofleet", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "old" / "yolofleet" / "training" / "step.py").open("a") as file:
        file.write("raise SystemExit('this is old code')\n")
    (folder / "old.yaml").write_text(
        f"hosts: [m1:cpu:1, {{host: m2, device: cpu, env: {{PYTHONPATH: {folder}/old}}}}]\n"
    )
    args = ["train", "--data", data, *SMALL, "--max-steps", "1", "--val-period", "0", "--fleet", "old.yaml"]
    command = Command(lab, folder, *args)
    assert command.end() == 4 and "yolofleet is not the same" in command.said
    command = Command(lab, folder, *args, "--sync-code")
    assert command.end() == 0, command.said
    assert not list((folder / "tmp").glob("yolofleet-code-*"))
    nothing_left(lab)
