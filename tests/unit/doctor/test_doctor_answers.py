"""Answers of hosts are not believed: what no doctor would say is a finding that names the host and the question."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from test_doctor_fleet import CPU, Host, hosts
from walks import sampled

from yolofleet.fleet.doctor import machine_facts
from yolofleet.fleet.doctor.examination import Peer
from yolofleet.fleet.doctor.findings import Finding
from yolofleet.fleet.doctor.host_facts import ANSWERS, read_answer
from yolofleet.fleet.doctor.hosts import examine
from yolofleet.fleet.doctor.probes import PROBES, run_probe
from yolofleet.fleet.doctor.subprocess_probes import _torch
from yolofleet.support.errors import ClusterError

pytestmark = pytest.mark.long

SETTINGS = replace(CPU, data="set.yaml")


def fleet() -> list[Host]:
    made = hosts()
    made[1].facts["gpu_count"] = 1
    return made


def findings(made: list[Host], *, quick: bool = False) -> list[Finding]:
    peers = [Peer(host.name, host.ask, "0" if host.name == "m2" else "cpu") for host in made]
    return examine(peers, SETTINGS, port=29500, quick=quick).findings


def misfit(probe: str, arguments: Mapping[str, Any], answer: Any) -> str | None:
    """Where an answer is refused; None if it is not."""
    try:
        read_answer("m", probe, arguments, answer)
    except ClusterError as problem:
        return problem.what.partition(f"see {probe}")[2]
    return None


@pytest.mark.parametrize(
    ("probe", "answer", "at"),
    [
        ("time", {"time_s": 3.5, "more": 1}, None),
        ("time", {"time_s": 3}, None),
        ("time", {"time_s": True}, "['time_s']"),
        ("time", {"time_s": float("nan")}, "['time_s']"),
        ("time", {"time_s": 10**400}, "['time_s']"),
        ("time", [], ""),
        ("data", {"problem": "broken"}, None),
        ("data", {"problem": "", "splits": {"train": {"digest": "a", "images": 1, "labels": 2}}}, None),
        ("data", {"problem": "", "splits": {"train": {"digest": "a", "images": "1"}}}, "['splits']['train']['images']"),
        ("data", {"problem": ""}, ""),
        ("measure", {"bytes_per_s": None, "problem": ""}, ""),
        ("listen", {"ports": []}, "['ports']"),
        ("firewall", {"kind": "nft", "readable": True, "rules": ["x" * 200_001], "chains": []}, "['rules'][0]"),
        ("firewall", {"kind": "nft", "readable": True, "rules": [""] * 10_001, "chains": []}, "['rules']"),
    ],
)  # fmt: skip
def test_where_a_value_is_not_of_its_model(probe: str, answer: Any, at: str | None) -> None:
    assert misfit(probe, {}, answer) == at


def test_bytes_of_a_name_that_are_no_text_are_accepted() -> None:
    facts = hosts()[0].facts
    facts["disks"][0]["folder"] = "caf\udce9"
    assert misfit("facts", {}, facts) is None


def test_every_probe_has_a_model_of_its_answer() -> None:
    assert ANSWERS.keys() == PROBES.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="hosts of a fleet run Linux")
def test_what_this_machine_answers_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine_facts.CHILD_S, "libraries", 0.01)  # torch is asked below
    token = "ab" * 16
    to = {"host": "m", "address": "127.0.0.2", "token": token}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("facts", {"folders": ["."], "port": 29500, "quick": True, "count_gpus": True}),
        ("facts", {"folders": ["/none/of it"], "port": 0}),
        ("time", {}),
        ("look_up", {"names": ["localhost", "no such host"]}),
        ("firewall", {}),
        ("listen", {"addresses": ["127.0.0.2"], "ports": [0], "token": token, "seconds": 20}),
        ("free_port", {"address": "127.0.0.2"}),
        ("data", {"data": "none/of it.yaml", "module": CPU.data_digest}),
    ]
    for probe, arguments in asked:
        answer = json.loads(json.dumps(run_probe(probe, arguments)))
        read_answer("m", probe, arguments, answer)
        if probe == "listen":
            to["port"] = answer["ports"][0]
            asked += [
                ("reach", {"targets": [to, {**to, "port": 1}]}),
                ("measure", to),
                ("measure", {**to, "port": 1}),
            ]
    read_answer("m", "unlisten", {}, run_probe("unlisten", {"token": token}))
    libraries = {"problems": {}, "torch": json.loads(json.dumps(_torch()))}
    read_answer("m", "facts", {}, {**hosts()[0].facts, "libraries": libraries})


def test_a_host_of_another_version_is_named_with_the_question_and_the_others_go_on() -> None:
    made = fleet()
    del made[1].facts["cards"][0]["mtu"]
    [lost] = [finding for finding in findings(made) if finding.code == "host-lost"]
    assert (lost.level, lost.where) == ("fault", "m2")
    assert (
        lost.seen
        == "m2 sent an answer to 'facts' that this version cannot read: see facts['cards'][0]['mtu']"
    )
    assert "same version" in lost.fix
    assert made[2].asked[-1] == "all_reduce"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("memory", "total"), None),
        (("host",), "'; reboot; '"),
        (("cards", 1, "name"), "eth0;reboot"),
        (("cards", 1, "addresses"), ["$(reboot)/24"]),
        (("port", "pid"), -1),  # kill -1 would end everything
        (("software", "torch"), "2.13 && reboot"),
        (("firewall", "chains"), [["inet", "own", "in; reboot"]]),
    ],
)
def test_no_host_puts_words_into_a_command_or_nothing_into_a_sum(path: tuple[Any, ...], value: Any) -> None:
    made = fleet()
    inner = made[1].facts
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert [finding.where for finding in findings(made) if finding.code == "host-lost"] == ["m2"]


JUNK: tuple[Any, ...] = (None, True, -1, 0, 3.5, 1e999, float("nan"), 10**30, "", "x", "9" * 5000, "10.0.0.1/24", "::1%x", "\x1b[2J\n", "\ud800",
        [], [[]], {}, {"problem": ""}, {"problem": "broken"}, ["a", "b"])  # fmt: skip


def altered(value: Any, chance: random.Random) -> Any:
    """Something in it, at any depth, is missing, doubled or something else."""
    if chance.random() < 0.15 or not isinstance(value, (dict, list)) or not value:
        return chance.choice(JUNK)
    changed = copy.copy(value)
    at = chance.choice(list(changed) if isinstance(changed, dict) else range(len(changed)))
    how = chance.random()
    if how < 0.2:
        del changed[at]
    elif how < 0.3 and isinstance(changed, list):
        changed.append(changed[at])
    else:
        changed[at] = altered(changed[at], chance)
    return changed


@pytest.mark.parametrize("probe", sampled(sorted(PROBES), 2))
def test_no_answer_is_a_traceback(probe: str) -> None:
    chance = random.Random(probe)
    refused = 0
    for _ in range(30 if probe == "facts" else 8):
        made = fleet()
        liar = made[0] if probe == "free_port" else made[1]
        made[2].ways["10.0.0.2"] = "dropped" if probe == "firewall" else "connected"  # then it is asked for
        honest = liar.ask
        wrong: list[str | None] = []

        def ask(name: str, arguments: Mapping[str, Any], honest: Any = honest, wrong: Any = wrong) -> Any:
            answer = honest(name, arguments)
            if name == probe:
                answer = altered(answer, chance)
                wrong.append(misfit(probe, arguments, answer))
            return answer

        liar.ask = ask  # type: ignore[method-assign, assignment]  # a host that lies
        found = findings(made, quick=probe == "firewall" or (probe == "facts" and chance.random() < 0.5))
        lost = [finding for finding in found if finding.code == "host-lost"]
        assert wrong and bool(lost) is any(at is not None for at in wrong)
        assert all(finding.where == liar.name and repr(probe) in finding.seen for finding in lost)
        for finding in found:
            assert finding.render().replace("\n", "").isprintable() and len(finding.render()) < 20_000
            json.dumps(vars(finding), ensure_ascii=False).encode()
        refused += bool(lost)
    assert refused > 1
