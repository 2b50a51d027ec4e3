"""Costs that grow with a fleet, and real runs beside the simulation of `yolofleet plan --simulate`.

    python benchmarks/simulation.py store          # the watchdog's and the start's requests to the rendezvous store
    python benchmarks/simulation.py connections    # how many the relay on the store's host takes
    python benchmarks/simulation.py counts         # the sum of the loss counts through gloo, and files that it opens
    python benchmarks/simulation.py gather         # the end of a validation of COCO's size
    python benchmarks/simulation.py logs           # a line of a rank's log, on the launcher
    python benchmarks/simulation.py ways           # the preflight check that each host reaches each
    python benchmarks/simulation.py logins         # ssh logins; needs root, openssh-server
    python benchmarks/simulation.py runs --data bccd/data.yaml

`runs` probes this machine with two processes, simulates 2, 3 and 4 processes, and trains with them. They share its cores: each
gets its part of them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from yolofleet.hosts.relay import Relay, _proof
from yolofleet.hosts.torchrun import Rendezvous
from yolofleet.parallel.listener import LOOPBACK, open_listener

HERE = Path(__file__).resolve()
REPEATS = 3
SECRET = "ab" * 32
HEARTBEAT = "x" * 300


def seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median of the seconds that a call takes."""
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def store(args: argparse.Namespace) -> None:
    """Measure requests with one key for each rank, straight and through the two relays of another host."""
    from yolofleet.parallel.store import connect_store, host_store

    port = free_port()
    relays = [Relay(Rendezvous(node, 2, LOOPBACK, port, "lo", secret=SECRET)) for node in (0, 1)]
    handle = relays[0].end.listener
    assert handle is not None  # this host owns the store
    server = host_store(socket.socket(fileno=os.dup(handle)), 60.0)
    for relay in relays:
        relay.start()
    near, far = (connect_store(LOOPBACK, end, 60.0) for end in (server.port, relays[1].end.port))
    print(
        "| keys | way | set 1, us | check 1, us | check all, us a key | fetch all, us a key | fetch all, MB/s |"
    )
    print("|---|---|---|---|---|---|---|")
    for count in args.sizes or (256, 1024, 4096):
        for key in (keys := [f"heartbeat/{rank}" for rank in range(count)]):
            server.set(key, HEARTBEAT)
        for name, client in (("on the store's host", near), ("through the relays", far)):
            print(f"| {count} | {name} | {requests(client, keys)} |")
    for relay in relays:
        relay.close()


def requests(client: Any, keys: list[str]) -> str:
    """Return the cells of one way to the store."""
    one = seconds(lambda: [client.set("one", HEARTBEAT) for _ in range(100)]) / 100
    question = seconds(lambda: [client.check(["question"]) for _ in range(100)]) / 100
    check, fetch = (
        seconds(lambda: client.check(keys)) / len(keys),
        seconds(lambda: client.multi_get(keys)) / len(keys),
    )
    us = " | ".join(
        f"{1e6 * value:.{digits}f}" for value, digits in ((one, 0), (question, 0), (check, 2), (fetch, 2))
    )
    return f"{us} | {len(HEARTBEAT) / fetch / 1e6:.0f}"


def connections(args: argparse.Namespace) -> None:
    """Count the connections that the relay on the store's host takes with a limit of open files."""
    print("| soft limit of open files | connections |")
    print("|---|---|")
    for limit in args.sizes or (1024, 4096):
        command = [sys.executable, str(HERE), "relay-here", "--size", str(limit)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as relay:
            assert relay.stdout and relay.stdin
            port = int(relay.stdout.readline())
            opened: list[socket.socket] = []
            while len(opened) < limit:
                opened.append(socket.create_connection((LOOPBACK, port), timeout=2.0))
                try:
                    theirs, mine = opened[-1].recv(32, socket.MSG_WAITALL), os.urandom(32)
                    opened[-1].sendall(mine + _proof(bytes.fromhex(SECRET), b"caller", theirs, mine))
                    if len(opened[-1].recv(32, socket.MSG_WAITALL)) < 32:
                        break
                    opened[-1].settimeout(0.004)
                    if not opened[-1].recv(1):  # the relay could not connect with the store
                        break
                except TimeoutError:
                    if opened[-1].gettimeout() == 2.0:
                        break
            print(f"| {limit} | {len(opened) - 1} |", flush=True)
            for one in opened:
                one.close()
            relay.stdin.close()


def relay_here(args: argparse.Namespace) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.size, hard))
    relay = Relay(Rendezvous(0, 2, LOOPBACK, port := free_port(), "lo", secret=SECRET))
    # a store whose process is another one: the kernel takes the connections
    assert relay.end.listener is not None
    store = socket.socket(fileno=os.dup(relay.end.listener))
    store.listen(4096)
    relay.start()
    print(port, flush=True)
    sys.stdin.read()
    os._exit(0)


def free_port() -> int:
    with open_listener(LOOPBACK) as listener:
        return int(listener.getsockname()[1])


def counts(args: argparse.Namespace) -> None:
    """Measure the sum of seven integers over processes of this machine."""
    print(f"{os.cpu_count()} cores; a ring has 2 (N - 1) hops")
    print("| processes | ring of gloo, us | a hop, us | recursive doubling, us | open files of a process |")
    print("|---|---|---|---|---|")
    for size in args.sizes or (2, 3, 4, 8):
        with TemporaryDirectory() as folder:
            command = [
                sys.executable,
                str(HERE),
                "counts-of-rank",
                "--file",
                f"{folder}/store",
                "--size",
                str(size),
            ]
            ranks = [
                subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
                for rank in range(size)
            ]
            said = [rank.communicate()[0] for rank in ranks]
        files, us, *doubling = map(float, said[0].split())
        other = f"{doubling[0]:.0f}" if doubling else "-"
        print(f"| {size} | {us:.0f} | {us / (2 * (size - 1)):.0f} | {other} | {files:.0f} |", flush=True)


def counts_of_rank(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(args.file, args.size)
    dist.init_process_group(
        "gloo", store=store, rank=args.rank, world_size=args.size, timeout=timedelta(seconds=60)
    )
    values = torch.zeros(7, dtype=torch.int64)

    def many() -> None:
        for _ in range(300):
            dist.all_reduce(values)

    def by_doubling() -> None:
        """Sum by recursive doubling: log2 N rounds, in each of which two ranks exchange their sums."""
        theirs = torch.zeros_like(values)
        for _ in range(300):
            for power in range((args.size - 1).bit_length()):
                partner = args.rank ^ (1 << power)
                sending = dist.isend(values, partner)
                assert sending is not None  # both ranks are of the group
                dist.recv(theirs, partner)
                sending.wait()
                values.add_(theirs)

    found = []
    for way in (many, *([by_doubling] if args.size & (args.size - 1) == 0 else [])):
        way()
        found.append(1e6 * seconds(way) / 300)
    print(len(list(Path("/proc/self/fd").iterdir())), *found, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def gather(args: argparse.Namespace) -> None:
    """Measure what each rank receives and computes at the end of a validation of COCO's size."""
    sys.path.insert(0, str(HERE.parent))
    import numpy as np
    from coco_metrics import CLASSES, random_sets
    from safetensors.numpy import load as load_arrays

    from yolofleet.evaluate.gather import PARTS, Shard, records_of
    from yolofleet.evaluate.matching import match_detections, merge

    images = 5000
    labels, found = random_sets(images)
    confusion = np.zeros((CLASSES + 1, CLASSES + 1), np.int64)
    whole = match_detections(labels, found, classes=CLASSES, images_seen=images)
    print("5,000 images, 100 detections an image, 80 classes")
    print("| ranks | received by each, MB | of a rank without images, KB | merge, s |")
    print("|---|---|---|---|")
    for ranks in args.sizes or (1, 8, 64, 512, 4096):
        order = np.argsort(whole.image % ranks, kind="stable")
        borders = np.searchsorted((whole.image % ranks)[order], np.arange(ranks + 1))

        def payload(rows: Any) -> bytes:
            own = {
                name: getattr(whole, name)[rows]
                for name in ("class_idx", "score", "image", "rank", "hit", "miss")
            }
            return Shard().to_bytes(replace(whole, **own), confusion, dict.fromkeys(PARTS, 0.0), False)

        payloads = [payload(order[borders[rank] : borders[rank + 1]]) for rank in range(ranks)]

        def merged(payloads: list[bytes]) -> None:
            shards = [load_arrays(one) for one in payloads]
            merge([records_of(shard) for shard in shards])
            np.sum([shard["confusion"] for shard in shards], axis=0)

        received = ranks * max(map(len, payloads))  # each is padded to the longest
        merge_s = seconds(partial(merged, payloads), 1)
        empty = payload(np.zeros(0, np.int64))
        print(f"| {ranks} | {received / 1e6:.1f} | {len(empty) / 1e3:.1f} | {merge_s:.2f} |", flush=True)


def logs(args: argparse.Namespace) -> None:
    """Measure what the launcher does for a line of a rank's log."""
    from yolofleet.files.atomic import open_append
    from yolofleet.hosts.fleet import parse_hosts
    from yolofleet.hosts.messages import Log, message_of
    from yolofleet.launch.watch import Watch

    line = json.dumps({"type": "log", "rank": 3, "text": "x" * 300})
    print("| hosts | read and write a line, us | look after the hosts, us |")
    print("|---|---|---|")
    with TemporaryDirectory() as folder:

        def write() -> None:
            for number in range(1000):
                message = message_of(json.loads(line))
                assert isinstance(message, Log)
                with open_append(Path(folder) / f"rank-{number}.log") as file:
                    file.write(message.text.encode())

        def repeat(work: Callable[[], None], times: int) -> None:
            for _ in range(times):
                work()

        for hosts in args.sizes or (16, 128, 512):
            fleet = parse_hosts(",".join(f"h{number}:8" for number in range(hosts)))
            remotes: Any = [
                SimpleNamespace(name=host.name, heard_at_s=time.monotonic()) for host in fleet.hosts
            ]
            watch = Watch(fleet, remotes, lambda *_: None)
            look_s = seconds(partial(repeat, watch._stop_if_needed, 100)) / 100
            print(f"| {hosts} | {1e6 * seconds(write) / 1000:.0f} | {1e6 * look_s:.0f} |", flush=True)


def ways(args: argparse.Namespace) -> None:
    """Measure the check that each host reaches each: connections of one host, and what the launcher does with the answers."""
    from yolofleet.doctor.connections import listen, reach, unlisten
    from yolofleet.doctor.host_facts import ANSWERS

    token, port = "ab" * 16, free_port()
    listen({"token": token, "ports": [port], "addresses": [LOOPBACK], "seconds": 60})
    print(
        "| hosts | a host reaches one, us | the launcher reads an answer, us | and looks for it, ns a pair |"
    )
    print("|---|---|---|---|")
    for hosts in args.sizes or (32, 128, 512):
        names = [f"h{number}" for number in range(hosts)]
        targets = [{"address": LOOPBACK, "port": port, "token": token, "host": name} for name in names]
        reach_s = seconds(partial(reach, {"targets": targets})) / hosts
        said = json.dumps(reach({"targets": targets}))
        read_s = seconds(lambda: ANSWERS["reach"].validate_python(json.loads(said))) / hosts  # noqa: B023
        pairs = {(source, to): [1, 2] for source in names for to in names}
        look_s = seconds(lambda: [one for (_, to), two in pairs.items() if to == "h1" for one in two])  # noqa: B023
        print(
            f"| {hosts} | {1e6 * reach_s:.0f} | {1e6 * read_s:.1f} | {1e9 * look_s / len(pairs):.0f} |",
            flush=True,
        )
    unlisten({"token": token})


def logins(args: argparse.Namespace) -> None:
    """Log in to machines in miniature, which share the cores with this one."""
    sys.path[:0] = [str(HERE.parent.parent / "tests" / "cluster"), str(HERE.parent.parent / "tests")]
    from machines import machines

    print("| hosts | wall, s | CPU of the launcher, s a host | wall of the preflight checks, s |")
    print("|---|---|---|---|")
    with machines(16) as lab:
        for count in args.sizes or (1, 2, 4, 8, 16):
            done = lab.desk.run(sys.executable, HERE, "logins-here", "--size", str(count), timeout_s=200)
            print(done.stdout.strip(), flush=True)


def logins_here(args: argparse.Namespace) -> None:
    from yolofleet.hosts.fleet import parse_hosts
    from yolofleet.hosts.login import logged_in

    fleet = parse_hosts(",".join(f"m{i + 1}:cpu:1" for i in range(args.size)))
    began_s = time.perf_counter()
    with logged_in(fleet):
        wall_s = time.perf_counter() - began_s
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(one.ru_utime + one.ru_stime for one in used)
    names = ",".join(host.name + ":cpu:1" for host in fleet.hosts)
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "yolofleet", "fleet", "check", "--hosts", names], capture_output=True
    )
    check_s = time.perf_counter() - began_s
    print(f"| {args.size} | {wall_s:.2f} | {cpu_s / args.size:.3f} | {check_s:.1f} |")


SETTINGS = [
    *("--model", "yolov5n", "--img", "320", "--batch", "48", "--nominal-batch", "48", "--micro-batch", "4"),
    *("--threads", "1", "--workers", "0", "--cache", "ram"),
]
SHORT = ["--val-period", "0", "--save-period", "0", "--save-minutes", "0", "--no-plots", "--epochs", "6"]


def yolofleet(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "yolofleet", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def runs(args: argparse.Namespace) -> None:
    from yolofleet.plan.formula import predict
    from yolofleet.plan.library import network_of
    from yolofleet.plan.probe import machine_of, read_probe
    from yolofleet.plan.simulation import simulate
    from yolofleet.plan.workload import Workload

    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if not args.probe:
            args.probe = str(folder / "probe.json")
            yolofleet(
                "plan", "probe", "--data", args.data, *SETTINGS, "--device", "cpu:2", "--out", args.probe
            )
        probe, network = read_probe(Path(args.probe)), network_of("yolov5n")
        work = Workload(
            network, 320, args.images, 0, probe.image_bytes, 6, 48, 4, workers=0, cache="ram", precision="fp32", val_period=0
        )  # fmt: skip
        simulated = {}
        for size in args.sizes or (2, 3, 4):
            machine = machine_of(probe, work, network_of(probe.model), size)
            simulated[size] = simulate(work, [machine]), predict(work, [machine])
            print(
                f"{size} processes, simulated before the run: {simulated[size][0].rate_img_s:.2f} images/s",
                flush=True,
            )
        rates: dict[int, list[float]] = {size: [] for size in (args.sizes or (2, 3, 4))}
        for number in range(args.repeats):
            for size in args.sizes or (2, 3, 4):
                name = f"{size}-{number}"
                yolofleet(
                    *("train", "--data", args.data, *SETTINGS, *SHORT, "--set", "warmup_epochs=0"),
                    *("--device", f"cpu:{size}", "--project", str(folder), "--name", name),
                )
                with (folder / name / "results.csv").open() as file:
                    rows = [row for row in csv.DictReader(file, skipinitialspace=True) if row["images_per_s"]]
                rates[size] += [float(row["images_per_s"]) for row in rows[1:]]
        print(
            "| processes | simulated, images/s | formula, images/s | trained, images/s | error of the simulation | parts, ms |"
        )
        print("|---|---|---|---|---|---|")
        for size, (found, formula) in simulated.items():
            real = statistics.median(rates[size])
            parts = ", ".join(f"{name} {1000 * value:.0f}" for name, value in found.waits.items() if value)
            print(
                f"| {size} | {found.rate_img_s:.2f} | {formula.rate_img_s:.2f} | {real:.2f} "
                f"| {found.rate_img_s / real - 1:+.1%} | {parts} |"
            )
        print(json.dumps({"rates": rates, "probe": json.loads(Path(args.probe).read_text())}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = {
        "store": store, "counts": counts, "gather": gather, "logs": logs, "ways": ways, "logins": logins, "runs": runs,
        "connections": connections, "counts-of-rank": counts_of_rank, "relay-here": relay_here, "logins-here": logins_here,
    }  # fmt: skip
    parser.add_argument("part", choices=sorted(every))
    parser.add_argument("--data", default="", help="data set of `runs`")
    parser.add_argument("--images", type=int, default=205, help="its training images")
    parser.add_argument(
        "--probe", default="", help="probe of this machine with two processes; default: make one"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[], help="keys, processes, ranks or hosts of the other parts"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--file", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    args = parser.parse_args()
    every[args.part](args)


if __name__ == "__main__":
    main()
