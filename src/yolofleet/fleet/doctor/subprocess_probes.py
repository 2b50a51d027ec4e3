"""Probes that need torch. Each runs in a child process, so that it can be slow, fail or crash alone.

``python -m yolofleet.fleet.doctor.subprocess_probes NAME`` reads its arguments as JSON from standard input and prints
its answer as JSON in the last line. ``probes.py`` starts it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

from yolofleet.fleet.doctor.machine_facts import LIBRARIES

ALL_REDUCE_BYTES = 4 << 20
ALL_REDUCES, BARRIERS = 4, 20


def libraries(_: Mapping[str, Any]) -> dict[str, Any]:
    """Import every library as a run does, and ask torch what it can do.

    Returns:
        ``problems``: library -> why it cannot be loaded; ``torch``: None if torch is one of them.
    """
    problems: dict[str, str] = {}
    for library in LIBRARIES:
        try:
            import_module(library)
        except Exception as problem:  # a broken installation raises anything
            problems[library] = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return {"problems": problems, "torch": None if "torch" in problems else _torch()}


def _torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": None,
        "arch_list": [],
        "devices": [],
        "problem": "",
    }
    if dist.is_available() and dist.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if torch.version.cuda is None and torch.version.hip is None:
        return facts
    facts["arch_list"] = torch.cuda.get_arch_list()
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as problem:
        facts["problem"] = _words(problem)
        return facts
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        device = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "problem": "",
        }
        try:  # a GPU may be visible and unable to compute
            assert float((torch.ones(1024, device=f"cuda:{number}") * 2).sum()) == 2048, "its result is wrong"
        except (RuntimeError, AssertionError) as problem:
            device["problem"] = _words(problem)
        facts["devices"].append(device)
    return facts


def _words(problem: Exception) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:300]


def all_reduce(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Join the other hosts as a run does, with gloo, and measure sums of 4 MiB.

    Args:
        arguments: ``address`` and ``port`` where rank 0 keeps the store, ``rank``, ``size``, ``deadline_s``.
    Returns:
        ``seconds`` of one sum and ``barrier_s`` of the smallest one, medians; ``problem``, "" if there is none.
    """
    import torch
    import torch.distributed as dist

    from yolofleet.support.listener import open_listener
    from yolofleet.training.parallel.store import connect_store, host_store

    timeout = timedelta(seconds=float(arguments["deadline_s"]))
    rank, size = int(arguments["rank"]), int(arguments["size"])
    address, port = str(arguments["address"]), int(arguments["port"])
    torch.set_num_threads(1)
    try:
        if rank == 0:  # the store has no password, so only this network may reach it
            store = host_store(open_listener(address, port), timeout.total_seconds())
        else:
            store = connect_store(address, port, timeout.total_seconds())
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        large = _median_s(lambda: dist.all_reduce(torch.ones(ALL_REDUCE_BYTES // 4)), ALL_REDUCES)
        small = _median_s(lambda: dist.all_reduce(torch.ones(1)), BARRIERS)
        dist.destroy_process_group()
    except (OSError, RuntimeError, ValueError) as problem:
        return {"seconds": None, "barrier_s": None, "problem": _words(problem)}
    return {"seconds": large, "barrier_s": small, "problem": ""}


def _median_s(work: Callable[[], object], times: int) -> float:
    work()  # the first call opens the connections
    taken = []
    for _ in range(times):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def answer(probe: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Read arguments as JSON from standard input, and print the probe's answer as the last line."""
    print(f"\n{json.dumps(probe(json.load(sys.stdin)))}", flush=True)


if __name__ == "__main__":
    answer({"libraries": libraries, "all_reduce": all_reduce}[sys.argv[1]])
