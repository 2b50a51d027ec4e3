"""What breaks first as a fleet grows: parts of the design whose cost depends on the number of ranks or hosts.

The costs of one request, connection, line or byte are measured (benchmarks/README.md, "Costs that grow with a fleet"), on CPUs
and on one machine. Multiplied to 4,096 ranks they are estimates, and a real network adds to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from yolofleet.plan.forecast import Forecast
from yolofleet.plan.formula import GLOO_HOP_S, count_exchange_s, predict
from yolofleet.plan.machine import Machine
from yolofleet.plan.simulation import MOST_RANKS
from yolofleet.plan.workload import Workload
from yolofleet.report.console import duration

# benchmarks/simulation.py store: of the server and the two relays of another host
KEY_CHECK_S, KEY_FETCH_S, REQUEST_S = 0.4e-6, 3.0e-6, 1.05e-4
# benchmarks/simulation.py logins, on a busy machine
LOGIN_S, LAUNCHER_LOGIN_S = 1.0, 0.065
# benchmarks/simulation.py ways; each host tries two ports of each other host
PREFLIGHT_S, REACH_S, READ_WAY_S, FIND_WAY_S = 1.1, 2 * 5e-4, 2 * 3.5e-6, 2e-8
MOST_HOSTS = 1024  # limit of --hosts, as in hosts/fleet.py
LOGINS_AT_ONCE = 32  # as in hosts/login.py
# benchmarks/simulation.py gather
DETECTION_BYTES, DETECTIONS = 31, 100  # size of a detection, and their number in an image
# payload of a rank without images: its confusion matrix of 80 classes, and numbers of objects
CLASSES_BYTES = 56_700
MERGE_RANK_S = 5.7e-4  # every rank merges the payload of each rank
# benchmarks/simulation.py logs: time of the launcher for a line of a rank's log
LOG_LINE_S, LOOK_HOST_S = 4e-5, 4e-7
CONNECTIONS = 2  # from a rank to the store: the process group's and the watchdog's
OPEN_FILES = 1024  # soft limit of Linux
OTHER_FILES = 64  # other open files of a process
HEARTBEATS_PER_S, HEARTBEATS_MISSED = 16, 4  # as in parallel/watchdog.py
# in this time a rank that hangs must be named: docs/distributed.md, "A run that hangs"
NAMED_WITHIN_S = 60.0
SHARE = 0.05  # largest share of a step or a validation: a part that takes more stops scaling
START_SHARE_S = 60.0  # longest time of a part of the start
COLUMNS = ("from ranks", "part", "at this size", "with 4,096 ranks", "remedy", "with the remedy")


@dataclass(frozen=True)
class Limit:
    """A part of the design that stops scaling.

    Attributes:
        ranks: the smallest simulated fleet where it has. there, largest: what it costs there, and with the most ranks.
        remedy: what to do. then: the cost with the remedy, with the most ranks; "" = unknown.
        built: the remedy is a setting; else it is not built, and this is a limit.
    """

    part: str
    ranks: int
    there: str
    largest: str
    remedy: str
    then: str
    built: bool

    def row(self) -> list[str]:
        return [f"{self.ranks:,}", self.part, self.there, self.largest, self.remedy, self.then or "-"]


@dataclass(frozen=True)
class _Cost:
    """The cost of a part on one fleet. The part stops scaling if ``cost`` exceeds ``most``."""

    part: str
    cost: float
    most: float
    text: str
    remedy: str
    then: str
    built: bool = False


def what_breaks(forecast: Forecast, *, grows: bool) -> list[Limit]:
    """Return the parts that stop scaling with 1, 2, 4 ... of the last machine of a fleet, to ``MOST_RANKS`` devices.

    Args:
        grows: the step has as many images for each device on all fleets; else as many as that of ``forecast``.
    """
    work, machine = replace(forecast.work, shares=()), forecast.fleet[-1]
    most = max(MOST_RANKS // machine.devices, 1)
    counts = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
    first: dict[str, tuple[int, _Cost]] = {}
    last: dict[str, _Cost] = {}
    for count in counts:
        fleet = [machine] * count
        if grows:
            times = count * machine.devices / forecast.likely.devices
            micro_batches = max(round(times * forecast.work.step_images / work.micro_batch), 1)
            work = replace(work, step_images=micro_batches * work.micro_batch)
        ranks = sum(machine.devices for machine in fleet)
        for cost in _costs(work, fleet, ranks, len(fleet)):
            last[cost.part] = cost
            if cost.cost > cost.most and cost.part not in first:
                first[cost.part] = ranks, cost
    found = [
        Limit(part, ranks, cost.text, last[part].text, last[part].remedy, last[part].then, cost.built)
        for part, (ranks, cost) in first.items()
    ]
    return sorted(found, key=lambda limit: limit.ranks)


def _costs(work: Workload, fleet: Sequence[Machine], ranks: int, hosts: int) -> Iterator[_Cost]:
    predicted = predict(work, fleet)
    step = predicted.step
    micro_batches = work.step_images // work.micro_batch
    yield _Cost(
        "images of a step",
        ranks,
        micro_batches,
        f"{max(ranks - micro_batches, 0):,} of {ranks:,} ranks idle",
        f"--per-device, or --nominal-batch {ranks * work.micro_batch}",
        "none idle",
        built=True,
    )
    late = step.stragglers / step.total
    yield _Cost(
        "stragglers",
        late,
        SHARE,
        f"{late:.0%} of a step",
        "none: all ranks wait for the slowest in each step",
        "",
    )
    exposed = max(step.all_reduce - count_exchange_s(fleet), 0.0)
    yield _Cost(
        "all-reduce",
        exposed,
        SHARE * step.total,
        f"{exposed / step.total:.0%} of a step",
        "--reduce fast16, a larger --nominal-batch",
        f"{exposed / step.total / 2:.0%} of a step",
        built=True,
    )
    counts = count_exchange_s(fleet)
    tree = 2 * math.ceil(math.log2(ranks)) * GLOO_HOP_S if ranks > 1 else 0.0
    yield _Cost(
        "count exchange",
        counts,
        SHARE * step.total,
        f"{1000 * counts:.3g} ms, {counts / step.total:.0%} of a step",
        "a tree in place of gloo's ring (not built)",
        f"{1000 * tree:.2g} ms, {tree / (step.total - counts + tree):.1%}",
    )
    named_s, by_host = (HEARTBEATS_MISSED * max(1.0, n / HEARTBEATS_PER_S) for n in (ranks, hosts))
    yield _Cost(
        "heartbeats",
        named_s,
        NAMED_WITHIN_S,
        f"a rank that hangs is named after {duration(named_s)}",
        "one heartbeat for each host (not built)",
        duration(by_host),
    )
    remote = ranks - fleet[0].devices
    files = 2 * (CONNECTIONS * remote + hosts - 1) + OTHER_FILES
    yield _Cost(
        "connections to the store",
        files if hosts > 1 else 0,
        OPEN_FILES,
        f"{files:,} open files of the first host's agent, limit {OPEN_FILES:,}",
        f"ulimit -n {1 << max(files, 1).bit_length()} on the hosts",
        "none refused",
        built=True,
    )
    peers = ranks - 1 + OTHER_FILES
    yield _Cost(
        "connections between ranks",
        peers,
        OPEN_FILES,
        f"{peers:,} open files of a rank, limit {OPEN_FILES:,}",
        f"ulimit -n {1 << peers.bit_length()} on the hosts",
        "none refused",
        built=True,
    )
    # each rank looks for the 2 N keys of the others, at best once, waits for N more, and fetches N twice
    meets_s = ranks**2 * (3 * KEY_CHECK_S + 2 * KEY_FETCH_S)
    yield _Cost(
        "rendezvous",
        meets_s,
        START_SHARE_S,
        f"{duration(meets_s)} of the store's time",
        "a counter in place of a key of each rank (not built)",
        duration(ranks * (REQUEST_S + 2 * KEY_FETCH_S)),
    )
    launch_s = math.ceil(hosts / LOGINS_AT_ONCE) * LOGIN_S + hosts * LAUNCHER_LOGIN_S
    yield _Cost(
        "logins",
        launch_s,
        START_SHARE_S,
        f"{duration(launch_s)} for {hosts:,} logins",
        "a scheduler starts the ranks (docs/schedulers.md)",
        "no logins",
        built=True,
    )
    yield _Cost(
        "hosts of --hosts",
        hosts,
        MOST_HOSTS,
        f"{hosts:,} hosts, at most {MOST_HOSTS:,}",
        "a scheduler starts the ranks (docs/schedulers.md)",
        "no limit",
        built=True,
    )
    # the hosts try at the same time; the launcher reads each answer, and looks for those of a host among all
    checks_s = PREFLIGHT_S + hosts * REACH_S + hosts**2 * READ_WAY_S + hosts**3 * FIND_WAY_S
    yield _Cost(
        "preflight checks",
        checks_s,
        START_SHARE_S,
        f"{duration(checks_s)}: each of {hosts:,} hosts reaches each",
        "a scheduler starts the ranks (docs/schedulers.md)",
        "no checks",
        built=True,
    )
    longest = math.ceil(work.val_images / ranks) * DETECTIONS * DETECTION_BYTES + CLASSES_BYTES
    received = ranks * longest
    link = min((m.between for m in fleet), key=lambda one: one.bytes_s) if hosts > 1 else fleet[0].inside
    gather_s = received / link.bytes_s + (ranks - 1) * GLOO_HOP_S + ranks * MERGE_RANK_S
    small = ranks * longest - (ranks - 1) * CLASSES_BYTES
    without_s = small / link.bytes_s + (ranks - 1) * GLOO_HOP_S + ranks * MERGE_RANK_S
    yield _Cost(
        "validation gather",
        gather_s if ranks > 1 and work.val_images else 0.0,
        SHARE * (work.steps * step.total + predicted.validation),
        f"{received / 1e6:.0f} MB to each rank, {duration(gather_s)}",
        "sum the confusion matrices, in place of gathering them (not built)",
        duration(without_s),
    )
    epoch_s = work.steps * step.total + predicted.validation
    logs_s = ranks * (LOG_LINE_S + hosts * LOOK_HOST_S)
    yield _Cost(
        "log collection",
        logs_s,
        epoch_s,
        f"{duration(logs_s)} of the launcher for a line of each rank in each epoch of {duration(epoch_s)}",
        "a scheduler starts the ranks, which log to its disks (docs/schedulers.md)",
        "no lines sent",
        built=True,
    )
