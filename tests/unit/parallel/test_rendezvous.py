"""torchrun's agents of several hosts meet within --timeout-s, or name the hosts that did not come."""

import json
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed import DistStoreError

from yolofleet.fleet.hosts.agent_process import (
    JobSpec,
    Rendezvous,
    ServedAgent,
    StoreEnd,
    agent_arguments,
    agent_environment,
)
from yolofleet.support.errors import ClusterError
from yolofleet.support.listener import LOOPBACK, open_listener
from yolofleet.training.parallel.rendezvous import LoopbackRendezvous
from yolofleet.training.parallel.torchrun_agent import MOST_WORDS, not_met


def test_hosts_meet_whichever_comes_first() -> None:
    listener = open_listener(LOOPBACK)
    port, places = listener.getsockname()[1], {}
    hosts = ["m1", "m2", "m3"]

    def meet(node: int) -> None:
        mine = LoopbackRendezvous(node, hosts, "run", port, None if node else listener, 600)
        places[node] = mine.next_rendezvous()

    threads = [threading.Thread(target=meet, args=(node,)) for node in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {node: (place.rank, place.world_size) for node, place in places.items()} == {
        0: (0, 3), 1: (1, 3), 2: (2, 3)}  # fmt: skip


def test_the_first_host_says_for_whom_it_waits_and_then_who_did_not_come(
    capfd: pytest.CaptureFixture[str],
) -> None:
    alone = LoopbackRendezvous(0, ["m1", "m2", "m3"], "run", 0, None, 1)
    with pytest.raises(ClusterError, match=r"m2, m3 did not reach m1 within 1 s \(--timeout-s\)") as caught:
        alone.next_rendezvous()
    assert "m1 waits for m2, m3, at most 1 s (--timeout-s)" in capfd.readouterr().out
    assert caught.value.hint == "yolofleet doctor --hosts m1,m2,m3"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="hosts of a fleet run Linux")
def test_the_process_of_an_agent_tells_who_did_not_come_and_serves_the_next_attempt(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    agent = ServedAgent(agent_environment(os.environ), None, log)
    try:
        for secret in ("a", "b"):
            place = Rendezvous(0, 2, LOOPBACK, 0, "lo", secret, hosts=["m1", "m2"], timeout_s=1)
            with open_listener(LOOPBACK) as store:
                end = StoreEnd(store.getsockname()[1], store.fileno())
                agent.begin(agent_arguments(JobSpec(tmp_path, 1, rendezvous=place), end.port), end)
                assert agent.wait() == 1
            assert agent.why.startswith("ClusterError: m2 did not reach m1 within 1 s (--timeout-s)")
            assert agent.lives
    finally:
        agent.close()


def test_torchs_own_words_of_a_lost_store_become_one_error() -> None:
    torchs = DistStoreError(f"wait timeout after 600000ms, keys: /x\n{'traceback ' * 2000}")
    told = not_met(torchs)
    assert told.startswith("ClusterError: the hosts lost each other while they started the processes\n")
    assert "wait timeout after 600000ms" in told and "traceback" not in told and "doctor --hosts" in told
    assert not_met(RuntimeError("a worker failed")) == ""
    long = ClusterError("x" * 10**6)
    assert len(json.dumps({"code": 1, "why": not_met(long)})) < MOST_WORDS + 100
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        one.sendall(json.dumps({"code": 1, "why": not_met(long)}).encode())
        assert len(json.loads(other.recv(1 << 16))["why"]) == MOST_WORDS
