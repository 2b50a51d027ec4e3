"""``make soak MINUTES=30 SEED=1``: random faults on three machines, one after another, while small trainings run.

Each training must end with the weights of one process that nothing disturbs, to the bit, and leave nothing behind. The
table at the end says for each kind of fault how long training stood still: from the fault to the end of the next epoch but one,
with the time that the fault itself lasts. The same seed gives the same faults; their moments depend on the speed of the
machine. Not among them: a clock that jumps. Network namespaces share the clock, and libfaketime breaks Python's sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from commands import SMALL_YOLOV5N as SMALL  # noqa: E402
from commands import small_shapes, yolofleet  # noqa: E402
from desk import Command, agent_of, impatient, nothing_left, session_of, worker_of  # noqa: E402
from machines import Lab, Machine, machines, missing  # noqa: E402

EPOCHS = 80
ARGS = [
    *SMALL,
    *("--threads", "1", "--reduce", "exact", "--val-period", "0", "--no-plots"),
    "--epochs",
    str(EPOCHS),
]
HOSTS = ("--hosts", "m1:cpu:1,m2:cpu:1,m3:cpu:1")
RESTARTS = ("--restarts", "1000")
DISK = "1500m"  # of each machine
STUCK_S = 900.0  # without an epoch: the soak has failed
GAPS_S = (2.0, 8.0)  # of training between two faults


@dataclass
class Soak:
    """The faults of one training.

    Attributes:
        lost: the machine that does not come back.
        stood_still_s: by kind of fault.
    """

    lab: Lab
    folder: Path
    draws: random.Random
    command: Command
    is_detached: bool
    stood_still_s: dict[str, list[float]] = field(default_factory=dict)
    lost: Machine | None = None

    @property
    def machine(self) -> Machine:
        return self.draws.choice([host for host in self.lab.hosts if host is not self.lost])

    def epochs(self) -> int:
        """The last epoch that the person has seen."""
        found = re.findall(r"^epoch (\d+)/\d+: box", self.command.said, re.MULTILINE)
        return max(map(int, found), default=0)

    def is_over(self) -> bool:
        return self.command.process.poll() is not None

    # -- faults ------------------------------------------------------------------------------------

    def kill_worker(self) -> None:
        os.kill(worker_of(self.machine), signal.SIGKILL)

    def kill_agent(self) -> None:
        os.kill(agent_of(self.machine), signal.SIGKILL)

    def kill_host_agent(self) -> None:
        self._kill(self.machine, "hosts.host_agent")

    def kill_launcher(self) -> None:
        """It is somewhere on a host if the run is detached. Else the run ends, and is resumed."""
        if self.is_detached:
            module = "detached.launcher"
            machine = next(
                m for m in self.lab.hosts if any(module in words for words in m.processes().values())
            )
            self._kill(machine, module)
            return
        self.command.process.kill()
        self.command.end()
        nothing_left(self.lab)
        hosts = [host.name for host in self.lab.hosts if host is not self.lost]
        named = ("--hosts", ",".join(f"{name}:cpu:1" for name in hosts), *RESTARTS)
        self.command = Command(self.lab, self.folder / "own", "train", "--resume", "runs/train/exp", *named)

    def first_host_lost(self) -> None:
        """For good, with its disk."""
        self.lost = self.lab.hosts[0]
        self.lost.power_off()

    def host_off_and_on(self) -> None:
        machine = self.machine
        machine.power_off()
        time.sleep(self.draws.uniform(10, 20))
        machine.power_on()

    def link_down(self) -> None:
        machine = self.machine
        machine.unplug()
        time.sleep(self.draws.uniform(1, 60))
        machine.plug()

    def slow_link(self) -> None:
        machine = self.machine
        machine.limit_rate("4mbit")
        time.sleep(self.draws.uniform(5, 20))
        machine.limit_rate("")

    def stopped_worker(self) -> None:
        pid = worker_of(self.machine)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.draws.uniform(1, 6))
        os.kill(pid, signal.SIGCONT)

    def full_disk(self) -> None:
        """For some seconds."""
        filler, machine = self.folder / "own/filler", self.machine
        machine.run("sh", "-c", f"head -c 2G /dev/zero > '{filler}'", check=False)
        time.sleep(self.draws.uniform(2, 8))
        machine.run("rm", "-f", filler)

    def second_run(self) -> None:
        """Somebody resumes the run that runs."""
        again = Command(self.lab, self.folder / "own", "train", "--resume", "runs/train/exp", *HOSTS)
        code = again.end()
        assert code in (2, 4), f"exit code {code}\n{again.said}"  # 4: a host is lost just then

    def _kill(self, machine: Machine, module: str) -> None:
        os.kill(next(pid for pid, words in machine.processes().items() if module in words), signal.SIGKILL)

    def faults(self) -> list[Callable[[], None]]:
        """Return the faults that the run can bear. Of two hosts, it cannot lose either."""
        found = [
            self.kill_worker,
            self.kill_agent,
            self.kill_launcher,
            self.stopped_worker,
            self.slow_link,
            self.full_disk,
            self.second_run,
        ]
        # A detached run of three hosts cannot lose one while another one does not take part again yet.
        together = re.findall(r"(?:started again as|hosts,) (\d+) process", self.command.said)[-1:] == ["3"]
        if self.lost is None and (together or not self.is_detached):
            found += [self.kill_host_agent, self.host_off_and_on, self.link_down]
            found += [self.first_host_lost] if self.epochs() > EPOCHS // 2 else []
        return found

    # -- one training ------------------------------------------------------------------------------

    def follow(self) -> None:
        """Make faults until the training has ended."""
        while self._trains(1):
            time.sleep(self.draws.uniform(*GAPS_S))
            if self.is_over() or self.epochs() > EPOCHS - 10:
                break
            fault, seen, began_s = self.draws.choice(self.faults()), self.epochs(), time.monotonic()
            print(f"  {fault.__name__} after {seen} epochs", flush=True)
            try:
                fault()
            except (StopIteration, ProcessLookupError):  # what it looks for is being started again
                continue
            if not self._trains(2):  # the end of the epoch of the fault may have come before anybody noticed
                break
            took_s = time.monotonic() - began_s
            print(f"    {took_s:.1f} s", flush=True)
            self.stood_still_s.setdefault(fault.__name__, []).append(took_s)
        code = self.command.end()
        assert code == 0, f"exit code {code}\n{self.command.said}"

    def _trains(self, epochs: int) -> bool:
        """Wait for more epochs; return False when the training has ended."""
        seen, gives_up_at_s = self.epochs(), time.monotonic() + STUCK_S
        while self.epochs() < seen + epochs:
            if self.is_over():
                return False
            assert time.monotonic() < gives_up_at_s, f"no epoch for {STUCK_S:.0f} s\n{self.command.said}"
            time.sleep(0.1)
        return True


@contextmanager
def three_machines(folder: Path) -> Iterator[Lab]:
    """Each with its own disk."""
    own = folder / "own"
    for made in (own, folder / "tmp"):
        made.mkdir(exist_ok=True)
    with machines(3, private=[own], disk=DISK, environment=session_of(folder)) as lab:
        yield lab


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    if missing():
        print(missing())
        return 1
    draws, stood_still_s = random.Random(asked.seed), dict[str, list[float]]()
    with TemporaryDirectory(prefix="yolofleet-soak-") as made:
        folder = Path(made)
        data = small_shapes(folder)
        yolofleet(folder, "train", "--data", data, *ARGS, "--device", "cpu", "--name", "quiet")
        quiet = json.loads((folder / "runs/train/quiet/results.json").read_text())["weights_sha256"]
        ends_at_s, number = time.monotonic() + 60 * asked.minutes, 0
        while time.monotonic() < ends_at_s:
            is_detached = number % 2 == 1
            number += 1
            print(f"training {number}, {'detached' if is_detached else 'with its launcher'}", flush=True)
            with three_machines(folder) as lab:
                train = ("train", "--data", data, *ARGS, *impatient(folder, HOSTS[1], 8), *RESTARTS)
                command = Command(lab, folder / "own", *train, *(["--detach"] if is_detached else []))
                if is_detached:
                    assert command.end() == 0, command.said
                    command = Command(lab, folder / "own", "fleet", "attach", *HOSTS)
                Soak(lab, folder, draws, command, is_detached, stood_still_s).follow()
                text = lab.desk.run("cat", folder / "own/runs/train/exp/results.json").stdout
                assert json.loads(text)["weights_sha256"] == quiet, command.said
                nothing_left(lab)
    rows = sorted(stood_still_s.items())
    print(
        f"{sum(len(times) for _, times in rows)} faults in {number} trainings, all with the weights {quiet[:12]}"
    )
    print(f"{'fault':<18} {'times':>5} {'stood still, median':>20} {'longest':>9}")
    for name, times in rows:
        print(f"{name:<18} {len(times):>5} {median(times):>18.1f} s {max(times):>7.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
