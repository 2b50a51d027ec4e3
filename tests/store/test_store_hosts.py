"""Several machines that read a data set from a store on another one, each into a cache of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

import server
from commands import SMALL_YOLOV5N as SMALL
from commands import small_shapes, yolofleet
from desk import Command, nothing_left, session_of
from machines import Lab, Machine, machines, missing
from server import BUCKET, Store

from yolofleet.data.datasets.pack import shard
from yolofleet.storage.caches import DISK_CACHE

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]
ARGS = [*SMALL, "--threads", "1", "--reduce", "exact", "--val-period", "0", "--no-plots", "--workers", "1"]
HOSTS = ["m1:cpu:1", "m2:cpu:1", "m3:cpu:1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set, and the same in shards, on this disk; ``own`` is each machine's own."""
    made = tmp_path_factory.mktemp("store")
    for name in ("own", "tmp"):
        (made / name).mkdir()
    small_shapes(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOLOFLEET_CACHE", str(made / "packing"))
        shard(str(small_shapes(made)), str(made / "shards"), 100_000, lambda *_: None)
    return made


@dataclass
class Running:
    """Three hosts, a desk, and the machine of the store."""

    lab: Lab
    store: Machine
    environment: dict[str, str]
    server: subprocess.Popen[str]

    def command(self, folder: Path, *args: str | Path, machine: Machine | None = None) -> Command:
        return Command(self.lab, folder / "own", *args, machine=machine, variables=self.environment)

    def upload(self, folder: Path, name: str) -> None:
        """Put the files of a folder into the bucket, below ``name``."""
        assert self.server.stdin and self.server.stdout
        print(json.dumps([str(folder), name]), file=self.server.stdin, flush=True)
        assert self.server.stdout.readline().strip() == name


@pytest.fixture
def running(folder: Path) -> Iterator[Running]:
    with laboratory(folder) as made:
        yield made


@contextmanager
def laboratory(folder: Path) -> Iterator[Running]:
    own = folder / "own"
    variables = session_of(folder) | {"YOLOFLEET_CACHE": str(own / "cache"), "YOLOFLEET_OFFLINE": "0"}
    # the key of the store's user is known after its machine has started, so it comes from a file of the provider
    profile = folder / "credentials"
    variables |= Store("10.77.0.4", server.PORT).environment() | {"AWS_SHARED_CREDENTIALS_FILE": str(profile)}
    del variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"]
    with machines(4, private=[own], environment=variables) as lab:
        machine = lab.hosts[3]
        data = small_shapes(folder).parent
        command = [
            sys.executable,
            server.__file__,
            machine.address,
            str(folder / "server.log"),
            "20",
            str(data),
        ]
        process = subprocess.Popen(
            machine.argv(*command, str(folder / "shards")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout
            made = json.loads(process.stdout.readline())
            profile.write_text(
                f"[default]\naws_access_key_id = {made['key']}\naws_secret_access_key = {made['secret']}\n"
            )
            yield Running(Lab(lab.hosts[:3], lab.desk), machine, variables, process)
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait()


@pytest.fixture(scope="module")
def quiet(folder: Path) -> dict[int, str]:
    """SHA-256 of the weights of one process on the local disk, by the number of epochs."""
    found = {}
    for epochs in (3, 20, 100):
        name, data = f"quiet{epochs}", small_shapes(folder)
        yolofleet(
            folder, "train", "--data", data, *ARGS, "--epochs", str(epochs), "--device", "cpu", "--name", name
        )
        found[epochs] = json.loads((folder / "runs" / "train" / name / "results.json").read_text())[
            "weights_sha256"
        ]
    return found


def weights_of(running: Running, folder: Path, name: str = "exp") -> str:
    results = running.lab.desk.run("cat", folder / f"own/runs/train/{name}/results.json").stdout
    return str(json.loads(results)["weights_sha256"])


@pytest.mark.parametrize("count", [2, 3])
def test_files_and_shards_give_one_hash_on_several_hosts(
    running: Running, folder: Path, quiet: dict[int, str], count: int
) -> None:
    form = {2: small_shapes(folder).parent.name + "/data.yaml", 3: "shards"}[count]
    running.store.limit_rate("100mbit")
    hosts = ("--hosts", ",".join(HOSTS[:count]))
    command = running.command(
        folder, "train", "--data", f"s3://{BUCKET}/{form}", *ARGS, "--epochs", "3", *hosts
    )
    assert command.end() == 0, command.said
    assert weights_of(running, folder) == quiet[3], command.said
    nothing_left(running.lab)
    for host in running.lab.hosts[:count]:
        text = host.run("du", "-s", folder / "own/cache/objects").stdout
        assert int(text.split()[0]) > 100, "each host has a cache of its own"


def with_little_disk(folder: Path, hosts: Sequence[str]) -> tuple[str, str]:
    """Return the options for hosts whose caches hold less than the data set; it writes a file."""
    file = folder / "little.yaml"
    file.write_text(f"defaults: {{env: {{{DISK_CACHE}: 100KB}}}}\nhosts: [{', '.join(hosts)}]\n")
    return "--fleet", str(file)


def test_a_host_is_lost_while_its_cache_fills(running: Running, folder: Path, quiet: dict[int, str]) -> None:
    running.store.limit_rate("8mbit")  # the first epochs read what the index has not kept
    command = running.command(
        folder,
        *("train", "--data", f"s3://{BUCKET}/shards", *ARGS, "--epochs", "20", "--cache", "none"),
        *with_little_disk(folder, HOSTS),
    )
    command.wait_for("^epoch 3/")
    running.lab.hosts[2].power_off()
    command.wait_for("started again as 2 processes")
    assert command.end() == 0, command.said
    assert weights_of(running, folder) == quiet[20], command.said
    nothing_left(running.lab)


def test_an_outage_of_a_minute_costs_no_restart(
    running: Running, folder: Path, quiet: dict[int, str]
) -> None:
    command = running.command(
        folder,
        *("train", "--data", f"s3://{BUCKET}/shards", *ARGS, "--epochs", "20", "--cache", "none"),
        *with_little_disk(folder, HOSTS[:2]),
    )
    command.wait_for("^epoch 3/")
    running.store.unplug()
    time.sleep(60)
    running.store.plug()
    assert command.end() == 0, command.said
    assert "started again" not in command.said, command.said
    assert weights_of(running, folder) == quiet[20], command.said


def test_a_bucket_that_changes_is_not_mixed_into_a_run_of_two_hosts(
    running: Running, folder: Path, tmp_path: Path, quiet: dict[int, str]
) -> None:
    """Another command on a host of the run, a resume, and a restart after the loss of a host."""
    data, other = small_shapes(folder).parent, tmp_path / "other"
    shutil.copytree(data, other)
    for path in (other / "images/train").iterdir():
        path.write_bytes(path.read_bytes() + b"others")
    running.upload(data, "changing")
    address, hosts = f"s3://{BUCKET}/changing/data.yaml", ("--hosts", ",".join(HOSTS[:2]))
    args = ("train", "--data", address, *ARGS, "--cache", "none", *hosts)
    changed = "20 changed: images/train/000000.png (other content)"

    command = running.command(folder, *args, "--epochs", "20")
    command.wait_for("^epoch 3/")
    running.upload(other, "changing")
    for host in running.lab.hosts[:2]:
        check = running.command(folder, "data", "check", address, machine=host)
        assert check.end() == 0, check.said
    assert command.end() == 0, command.said
    assert weights_of(running, folder) == quiet[20], command.said
    resume = ("train", "--resume", "runs/train/exp", "--epochs", "21", *hosts)
    refused = running.command(folder, *resume)
    assert refused.end() == 3 and changed in refused.said, refused.said
    accepted = running.command(folder, *resume, "--allow", "changed-data")
    assert accepted.end() == 0, accepted.said
    assert "warning: the run goes on with another data set: " in accepted.said, accepted.said
    assert weights_of(running, folder) != quiet[20]

    command = running.command(folder, *args, "--epochs", "100", "--name", "lost")
    command.wait_for("^epoch 3/")
    running.upload(data, "changing")
    running.lab.hosts[1].power_off()
    assert command.end() == 3 and changed in command.said, command.said
    nothing_left(Lab(running.lab.hosts[:1], running.lab.desk))


# -- copies of the run -----------------------------------------------------------------------------------------

RUN = f"s3://{BUCKET}/runs/gone"
COPIED = ("train", "--data", f"s3://{BUCKET}/shards", *ARGS, "--epochs", "100", "--checkpoint-to", RUN)


def states_at(running: Running, folder: Path) -> list[int]:
    """Steps of the states in the bucket, as the desk sees them."""
    said = running.command(folder, "checkpoints", "list", RUN)
    return (
        [int(line.split()[1]) for _, line in said.lines if line.startswith("step ")]
        if said.end() == 0
        else []
    )


def wait_for_states(running: Running, folder: Path, after: int = 0) -> int:
    while not (found := [step for step in states_at(running, folder) if step > after]):
        pass
    return max(found)


def test_all_machines_are_switched_off_for_good(
    running: Running, folder: Path, quiet: dict[int, str]
) -> None:
    command = running.command(folder, *COPIED, "--hosts", ",".join(HOSTS[:2]))
    command.wait_for("^epoch 3/")
    wait_for_states(running, folder)
    for host in running.lab.hosts[:2]:
        host.power_off()
    command.process.kill()  # the desk is gone as well
    command.end()
    running.lab.desk.run("rm", "-rf", folder / "own/runs", folder / "own/cache")
    again = running.command(folder, "train", "--resume", RUN, "--hosts", HOSTS[2])
    assert again.end() == 0, again.said
    assert "resumed after step" in again.said and "has not ended on" in again.said, again.said
    assert weights_of(running, folder, "gone") == quiet[100], again.said
    nothing_left(Lab(running.lab.hosts[2:], running.lab.desk))
    # the copy is whole: it is the run that a third fleet would find
    ended = running.command(folder, "train", "--resume", RUN, "--hosts", HOSTS[2])
    assert ended.end() == 0 and "the run had ended already" in ended.said, ended.said


@pytest.mark.parametrize("fault", ["off", "cut off"])
def test_the_host_that_copies_is_lost_and_another_one_goes_on(
    running: Running, folder: Path, quiet: dict[int, str], fault: str
) -> None:
    """A host that is cut off still runs: it must not write over the copies of the others when it is back."""
    command = running.command(folder, *COPIED, "--hosts", ",".join(HOSTS))
    command.wait_for("^epoch 3/")
    step = wait_for_states(running, folder)
    first = running.lab.hosts[0]
    first.power_off() if fault == "off" else first.unplug()
    command.wait_for("started again as 2 processes")
    assert "goes on on" not in command.said
    wait_for_states(running, folder, after=step)
    if fault == "cut off":
        first.plug()
    assert command.end() == 0, command.said
    assert weights_of(running, folder) == quiet[100], command.said
    running.lab.desk.run("rm", "-rf", folder / "own/runs", folder / "own/cache")
    ended = running.command(folder, "train", "--resume", RUN, "--hosts", HOSTS[2])
    assert ended.end() == 0 and "the run had ended already" in ended.said, ended.said


def test_a_second_fleet_is_refused(running: Running, folder: Path) -> None:
    command = running.command(folder, *COPIED, "--epochs", "900", "--hosts", ",".join(HOSTS[:2]))
    command.wait_for("^epoch 3/")
    wait_for_states(running, folder)
    second = running.command(folder, "train", "--resume", RUN, "--hosts", HOSTS[2])
    assert second.end() == 2 and "goes on on" in second.said and "Traceback" not in second.said, second.said
    command.process.terminate()
    assert command.end() == 75, command.said
    third = running.command(folder, "train", "--resume", RUN, "--hosts", HOSTS[2], "--max-steps", "1")
    assert third.end() == 0 and "had ended already" in third.said, third.said
    nothing_left(running.lab)
