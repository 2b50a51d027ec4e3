"""What the doctor makes of several hosts: each is a table of answers here; real ones are in tests/cluster."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from test_doctor import HEALTHY, LO, card

from yolofleet.config.schema import TrainConfig
from yolofleet.fleet.doctor.examination import Peer
from yolofleet.fleet.doctor.findings import Finding
from yolofleet.fleet.doctor.host_differences import (
    differences,
    judge_all_reduce,
    judge_clocks,
    judge_data,
    judge_speeds,
    rounds,
    same_machines,
)
from yolofleet.fleet.doctor.host_facts import UNSEEN, ConnectionTest, DataAnswer, HostFacts, Measured, Summed
from yolofleet.fleet.doctor.hosts import broken_ways, examine
from yolofleet.fleet.doctor.network import Endpoint, Target, judge_way
from yolofleet.fleet.hosts.remote import Refused
from yolofleet.fleet.launch.preflight import folder_problem
from yolofleet.fleet.resources import RunResources, resources_of
from yolofleet.support.errors import ClusterError

CPU = resources_of(TrainConfig(device="cpu", img=64, batch=4))


class Host:
    """A host that answers as told.

    Attributes:
        ways: address of another host -> outcome; connected where nothing is said.
    """

    def __init__(self, name: str, number: int, **changes: Any) -> None:
        self.name = name
        self.asked: list[str] = []
        self.facts = copy.deepcopy(HEALTHY) | {
            "host": name,
            "cards": [copy.deepcopy(LO), card("eth0", f"10.0.0.{number}/24")],
            "names": {"addresses": [f"10.0.0.{number}"], "problem": ""},
        }
        self.facts |= changes
        self.ways: dict[str, str] = {}
        self.answers: dict[str, Any] = {
            "data": {"splits": {"train": {"digest": "a" * 32, "images": 8, "labels": 20}}, "problem": ""},
            "all_reduce": {"seconds": 0.04, "barrier_s": 0.001, "problem": ""},
            "measure": {"round_trip_s": 1e-4, "bytes_per_s": 1e8, "problem": ""},
            "free_port": {"port": 4000},
            "unlisten": {},
            "firewall": {"kind": "ufw", "readable": True, "rules": ["drop"], "chains": []},
        }

    def ask(self, probe: str, arguments: Mapping[str, Any]) -> Any:
        self.asked.append(probe)
        if probe == "facts":
            slow = ("libraries", "gpus", "firewall", "clock", "infiniband") if arguments["quick"] else ()
            return {name: fact for name, fact in self.facts.items() if name not in slow}
        if probe == "time":
            return {"time_s": time.time()}
        if probe == "look_up":
            known = {
                name: {"addresses": [f"10.0.0.{name[1:]}"], "problem": ""} for name in arguments["names"]
            }
            return self.answers.get(probe, known)
        if isinstance(self.answers.get(probe), Exception):
            raise self.answers[probe]
        if probe == "listen":
            self.listens_on = arguments["addresses"]
            return {"ports": [port or 40000 for port in arguments["ports"]], "problems": {}}
        if probe == "reach":
            self.targets = arguments["targets"]
            return [self.attempt(target) for target in arguments["targets"]]
        return self.answers[probe]

    def attempt(self, target: Mapping[str, Any]) -> dict[str, Any]:
        own = next(text.partition("/")[0] for text in self.facts["cards"][1]["addresses"])
        outcome = self.ways.get(target["address"], "connected")
        return {**target, "outcome": outcome, "own": own, "card": "eth0", "said": "said", "elapsed_s": 0.0}


def models(made: Mapping[str, dict[str, Any]]) -> dict[str, HostFacts]:
    return {name: HostFacts.model_validate(facts) for name, facts in made.items()}


def hosts(count: int = 3) -> list[Host]:
    return [Host(f"m{number}", number) for number in range(1, count + 1)]


def examined(
    made: list[Host], *, settings: RunResources = CPU, quick: bool = False, **stated: Mapping[str, str]
) -> dict[str, Finding]:
    """By code; those that are not in order. ``stated``: what the fleet file says of a host."""
    peers = [Peer(host.name, host.ask, "cpu", **stated.get(host.name, {})) for host in made]
    found = examine(peers, settings, port=29500, quick=quick)
    # the package of the machine that runs this test is not the hosts'
    return {f.code: f for f in found.findings if f.level != "ok" and f.code != "package-differs"}


def test_a_healthy_fleet_is_measured_and_nothing_is_wrong() -> None:
    made = hosts()
    peers = [Peer(host.name, host.ask, "cpu") for host in made]
    found = examine(peers, CPU, port=29500)
    assert {f.code for f in found.findings if f.level != "ok"} == {"package-differs"}
    assert found.endpoints == {f"m{n}": Endpoint(f"10.0.0.{n}", "eth0") for n in (1, 2, 3)}
    assert {"ways", "speed", "all-reduce", "clocks"} <= {f.code for f in found.findings}
    assert [host.asked.count("measure") for host in made] == [2, 2, 2]
    assert all(host.asked[-2:] == ["unlisten", "all_reduce"] or host is made[0] for host in made)


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        ("refused", "way-refused", "ufw allow from 10.0.0.0/24"),
        ("prohibited", "way-prohibited", "ufw allow from 10.0.0.0/24"),
        ("dropped", "way-dropped", "ufw allow from 10.0.0.0/24"),
        ("silent", "way-silent", "interface: INTERFACE"),
        ("no-route", "way-no-route", "ip route get 10.0.0.3"),
        ("self", "way-self", "address: ADDRESS of m3"),
        ("other", "way-other", "ip neigh"),
        ("stalls", "way-stalls", "ip link set eth0 mtu 1400 (on m2: eth0)"),
    ],
)
@pytest.mark.parametrize("quick", [False, True])
def test_each_way_that_is_closed_is_told_apart(outcome, code, words, quick) -> None:
    made = hosts()
    made[2].facts["firewall"] = {"kind": "ufw", "readable": True, "rules": [], "chains": []}
    made[1].ways["10.0.0.3"] = outcome
    found = examined(made, quick=quick)
    found.pop("firewall", None)
    assert set(found) == {code}
    assert (found[code].level, found[code].where) == ("fault", "m2 -> m3")
    assert words in found[code].fix
    assert "measure" not in made[0].asked  # nothing to measure on


def test_the_address_that_is_let_in_is_the_one_behind_a_router() -> None:
    test = ConnectionTest(own="10.9.0.2", card="eth0", outcome="dropped", said="x")
    facts = HostFacts.model_validate(Host("m3", 3).facts)
    target = Target("m3", "10.0.0.3", 1, "x")
    fix = judge_way("m2", target, test, facts, UNSEEN.model_copy(update={"kind": "ufw"})).fix
    assert fix.endswith("ufw allow from 10.9.0.2")


def test_a_card_that_others_do_not_share_is_passed_over_and_named() -> None:
    made = hosts()
    made[2].facts["cards"].insert(1, card("eth1", "192.168.7.3/24"))
    for other in made[:2]:
        other.ways["192.168.7.3"] = "silent"
    found = examined(made)
    assert set(found) == {"card-unshared", "card-several"}
    assert found["card-unshared"].level == "warn" and found["card-unshared"].where == "m3"
    assert "NCCL_SOCKET_IFNAME=eth0" in found["card-unshared"].fix


def test_a_wrong_card_in_the_fleet_file_is_a_fault_that_names_the_right_one() -> None:
    made = hosts()
    made[2].facts["cards"].append(card("eth1", "192.168.7.3/24"))
    for other in made[:2]:
        other.ways["192.168.7.3"] = "no-route"
    found = examined(made, m3={"interface": "eth1"})
    assert found["card-unshared"].level == "fault"
    assert found["card-unshared"].fix == "in fleet.yaml: interface: eth0"
    assert "way-no-route" in found
    assert examined(hosts(), m3={"interface": "eth7"})["way-no-card"].where == "m3"


def test_hosts_listen_for_the_port_check_only_where_others_try_them() -> None:
    made = hosts()
    made[1].facts["cards"] += [card("docker0", "172.17.0.1/16"), card("eth1", "192.168.7.2/24")]
    made[2].facts["cards"] = [copy.deepcopy(LO), card("docker0", "172.17.0.1/16")]
    found = examined(made, m1={"address": "10.9.9.9"})
    assert [made[0].listens_on, made[1].listens_on] == [["10.9.9.9", "10.0.0.1"], ["10.0.0.2", "192.168.7.2"]]
    assert "listen" not in made[2].asked and found["way-no-card"].where == "m3"


def test_a_long_message_goes_each_way_before_a_run_but_not_to_the_rendezvous() -> None:
    made = hosts()
    examined(made, quick=True)
    tried = [(host.name, to["host"], to["port"], to["long"]) for host in made for to in host.targets]
    assert sorted(tried) == sorted(
        (one, other, port, port != 29500)
        for one in ("m1", "m2", "m3")
        for other, port in (("m1", 40000), ("m1", 29500), ("m2", 40000), ("m3", 40000))
        if one != other
    )


def test_ways_between_hosts_that_have_met_are_asked_without_their_facts() -> None:
    made = hosts()
    endpoints = {f"m{n}": Endpoint(f"10.0.0.{n}", "eth0") for n in (1, 2, 3)}
    peers = [Peer(host.name, host.ask) for host in made]
    assert broken_ways(peers, endpoints) == {}
    made[1].ways["10.0.0.3"] = "stalls"
    made[0].answers["listen"] = Refused("m1: cannot listen on 10.0.0.1:0: Cannot assign requested address")
    found = broken_ways(peers, endpoints)
    assert {way: one.code for way, one in found.items()} == {
        ("m2", "m3"): "way-stalls", ("m1", "m1"): "host-lost"}  # fmt: skip
    assert not any("facts" in host.asked for host in made)


def test_a_host_with_ipv6_addresses_alone_is_told_that_hosts_meet_over_ipv4() -> None:
    made = hosts()
    made[2].facts["cards"] = [copy.deepcopy(LO), card("eth0", "fe80::1/64", "fd00::3/64")]
    found = examined(made, quick=True)
    assert (found["way-no-card"].level, found["way-no-card"].where) == ("fault", "m3")
    assert "IPv4" in found["way-no-card"].seen and "fd00::3/64" in found["way-no-card"].seen
    assert "not IPv6" in found["way-no-card"].why and "sudo ip address add" in found["way-no-card"].fix


def test_only_the_ways_of_a_host_that_comes_back_are_tried() -> None:
    made = hosts()
    endpoints = {f"m{n}": Endpoint(f"10.0.0.{n}", "eth0") for n in (1, 2, 3)}
    assert broken_ways([Peer(host.name, host.ask) for host in made], endpoints, "m3") == {}
    assert [[to["host"] for to in host.targets] for host in made] == [["m3"], ["m3"], ["m1", "m2"]]


def test_a_host_that_is_lost_on_the_way_is_a_finding_and_the_others_go_on() -> None:
    made = hosts()
    made[1].answers["measure"] = ClusterError("m2 did not answer within 60 s", hint="is it switched on?")
    found = examined(made)
    assert set(found) == {"host-lost"}
    assert (found["host-lost"].where, found["host-lost"].fix) == ("m2", "is it switched on?")


def test_a_busy_rendezvous_matters_on_the_first_host_alone() -> None:
    made = hosts()
    for host in made:
        host.facts["port"] = {"port": 29500, "busy": True, "pid": 7, "command": "old", "user": "me"}
    found = examined(made)
    assert set(found) == {"port-busy"} and found["port-busy"].where == "m1"


def test_software_that_differs() -> None:
    made = {host.name: host.facts for host in hosts()}
    same = {"yolofleet": "0.1.0", "package_sha256": "0" * 64}
    assert [f.code for f in differences(models(made), same)] == ["same-software"]
    other = {**same, "package_sha256": "1" * 64}
    assert [f.code for f in differences(models(made), other)] == ["package-differs"]
    made["m3"]["software"] |= {"torch": "2.6.0", "cv2": "4.9", "python": "3.11.9"}  # a patch level is none
    made["m3"]["libraries"] = {"problems": {}, "torch": {**HEALTHY["libraries"]["torch"], "nccl": "2.21"}}
    made["m3"]["gpus"] = {**HEALTHY["gpus"], "driver": "535"}
    found = {f.code: f for f in differences(models(made), same)}
    assert set(found) == {"torch-differs", "libraries-differ", "nccl-differs", "drivers-differ"}
    assert found["torch-differs"].seen == "torch is not the same: m1, m2: 2.13.0+cu128; m3: 2.6.0"
    assert found["torch-differs"].fix == "pip install torch==2.13.0 on every host"
    made["m3"]["software"]["torch"] = "2.13.0+cu126"
    [build] = [f for f in differences(models(made), same) if f.code == "torch-differs"]
    assert build.level == "warn" and "--index-url" in build.fix, "they meet"
    here = {"yolofleet": "0.2.0", "package_sha256": "1"}
    [package] = [f for f in differences(models(made), here) if f.code == "package-differs"]
    assert "install yolofleet 0.2.0 from" in package.fix, "this machine's"


def test_one_machine_under_two_names_is_named_and_its_ways_are_not_judged() -> None:
    made = hosts()
    for host in made:
        host.facts["network_id"] = f"boot{host.name} net:[1]"
    assert examined(made) == {}
    made[2].facts = made[0].facts
    made[0].ways["10.0.0.1"] = made[2].ways["10.0.0.1"] = "self"
    found = examined(made)
    assert set(found) == {"same-machine"}
    assert found["same-machine"].seen == "m1 and m3 are the same machine"
    assert found["same-machine"].fix.startswith("name it once, with all its devices: m1:8")


def test_machines_that_only_look_alike_are_several() -> None:
    made = {host.name: host.facts for host in hosts(2)}
    for facts in made.values():
        facts["network_id"] = "boot net:[1]"
    assert not same_machines(models(made)), "a copy of a running virtual machine has an address of its own"
    made["m2"]["cards"] = made["m1"]["cards"]
    assert same_machines(models(made))
    for facts in made.values():
        facts["network_id"] = ""
    assert not same_machines(models(made)), "it cannot be seen"


def test_clocks() -> None:
    assert [f.code for f in judge_clocks({"a": 0.5, "b": -0.5}, {})] == ["clocks"]
    [wrong] = judge_clocks({"a": 0.1, "b": 3600.0, "c": 0.0}, {})
    assert (wrong.where, wrong.seen) == ("b", "its clock is 60 min ahead of the others'")
    [mine] = judge_clocks({"a": 100.0, "b": 100.1}, {})  # all but this machine agree
    assert (mine.where, mine.seen) == ("this machine", "its clock is 100 s behind the others'")
    slow = judge_clocks({"a": 3.0}, {"a": 4.0})  # proves nothing
    assert [f.code for f in slow] == ["clocks"]


def digests(digest: str, images: int, labels: int) -> DataAnswer:
    split = {"digest": digest, "images": images, "labels": labels}
    return DataAnswer.model_validate({"splits": {"train": split}, "problem": ""})


def test_data_sets() -> None:
    same = digests("a" * 32, 8, 20)
    other = digests("b" * 32, 7, 18)
    chosen = {name: "set.yaml" for name in "abc"}
    assert [f.code for f in judge_data({"a": same, "b": same}, chosen)] == ["data"]
    [wrong] = judge_data({"a": same, "b": other, "c": same}, chosen)
    assert wrong.code == "data-differs"
    assert wrong.seen.endswith("a, c: 8 images, 20 labels (aaaaaaaa); b: 7 images, 18 labels (bbbbbbbb)")
    missing = DataAnswer(problem="data set set.yaml does not exist")
    late = DataAnswer(problem="no answer", late=True)
    found = judge_data({"a": same, "b": missing, "c": late}, chosen)
    assert [(f.code, f.level, f.where) for f in found] == [
        ("data-missing", "fault", "b"),
        ("data-unknown", "note", "c"),
    ]


def test_names_that_others_take_for_somebody_else() -> None:
    made = hosts()
    itself = {"addresses": ["127.0.1.1"], "problem": ""}
    made[0].answers["look_up"] = {"m1": itself, "m2": itself, "m3": {"addresses": [], "problem": "unknown"}}
    found = examined(made)
    assert set(found) == {"name-wrong", "name-unknown"}
    assert found["name-wrong"].fix == "on m1, in /etc/hosts: 10.0.0.2 m2"


def test_hosts_that_all_call_themselves_localhost_need_no_line_for_it() -> None:
    made = hosts()
    for host in made:
        host.facts |= {"host": "localhost", "names": {"addresses": ["127.0.0.1"], "problem": ""}}
        host.answers["look_up"] = {"localhost": {"addresses": ["127.0.0.1"], "problem": ""}}
    assert set(examined(made)) == {"host-name-loopback"}


def test_speeds() -> None:
    good = Measured(round_trip_s=1e-4, bytes_per_s=1e9)
    endpoints = {name: Endpoint(f"10.0.0.{name}", "eth0") for name in "123"}
    ways = [(a, b) for a in "123" for b in "123" if a != b]
    assert [f.code for f in judge_speeds(dict.fromkeys(ways, good), endpoints)] == ["speed"]
    measured = {**dict.fromkeys(ways, good), ("1", "2"): good.model_copy(update={"bytes_per_s": 1e8})}
    assert [f.code for f in judge_speeds(measured, endpoints)] == ["way-slow", "speed"]
    measured["1", "2"] = Measured(bytes_per_s=None, problem="Connection reset by peer")
    assert judge_speeds(measured, endpoints)[0].code == "way-breaks"


def test_cards_with_packets_of_unequal_size() -> None:
    made = hosts()
    made[1].facts["cards"][1]["mtu"] = 9000
    made[1].facts["cards"][1]["name"] = "ens5"
    found = examined(made)
    assert found["mtu-differs"].fix == "the same everywhere:\non m2: sudo ip link set ens5 mtu 1500"


def test_a_sum_that_fails_is_a_fault() -> None:
    assert judge_all_reduce({"a": Summed(problem="Connection refused")})[0].level == "fault"


def test_the_order_of_measuring_leaves_each_host_to_one_other() -> None:
    for count in (2, 3, 4, 8):
        names = [f"m{i}" for i in range(count)]
        pairs = [pair for one in rounds(names) for pair in one]
        assert sorted(pairs) == sorted((a, b) for a in names for b in names if a != b)
        for one in rounds(names):
            busy = [name for pair in one for name in pair]
            assert len(busy) == len(set(busy))
    many = [pair for one in rounds([f"m{i}" for i in range(40)]) for pair in one]
    assert len(many) == 40  # each to the next


@pytest.mark.parametrize(
    ("problem", "code"),
    [(Refused("b: No such file or directory"), "folder-missing"), (ClusterError("b is lost"), "host-lost")],
)
def test_a_host_that_is_lost_at_its_folder_is_not_said_to_have_none(problem: ClusterError, code: str) -> None:
    def ask(_request: str, **_arguments: Any) -> None:
        raise problem

    remote: Any = SimpleNamespace(name="b", host=SimpleNamespace(folder="/runs"), ask=ask)
    found = folder_problem(remote)
    assert found is not None and (found.code, found.where, found.level) == (code, "b", "fault")
