"""The lease of a detached run: who may supervise it, whatever the hosts have heard."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from yolofleet.fleet.hosts import jobs, lease, requests
from yolofleet.fleet.hosts.lease import Lease, is_majority
from yolofleet.fleet.hosts.messages import answer_of

FIRST = Lease("exp-1", "train exp", 1, "a", (("a", "b", "c"),), 0, 20.0)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_two_groups_of_hosts_are_never_both_a_majority() -> None:
    for names in ("a", "ab", "abc", "abcd", "abcde"):
        groups = [set(found) for count in range(len(names) + 1) for found in combinations(names, count)]
        for group in groups:
            assert not (is_majority([names], group) and is_majority([names], set(names) - group))
    assert is_majority(["ab"], {"a"}) and not is_majority(["ab"], {"b"})  # the first host decides
    assert not is_majority(["abc", "a"], {"b", "c"}) and is_majority(["abc", "a"], {"a", "b"})  # of each list


def test_a_host_whose_lease_was_renewed_votes_for_nobody_else() -> None:
    lease.write(FIRST)
    assert not answered("vote", job="exp-1", holder="b", term=2).granted
    assert answered("vote", job="exp-1", holder="a", term=2).granted  # whose launcher has died


def test_a_host_whose_lease_is_over_votes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lease.write(FIRST)
    now_s = lease.clock() + FIRST.lasts_s + lease.MARGIN_S + 1
    monkeypatch.setattr(lease, "clock", lambda: now_s)
    assert answered("vote", job="exp-1", holder="b", term=0).granted  # only asked
    assert answered("vote", job="exp-1", holder="b", term=2).granted
    assert not answered("vote", job="exp-1", holder="c", term=3).granted
    assert not lease.renew_lease(asdict(FIRST))  # the first launcher comes back
    assert lease.renew_lease(asdict(replace(FIRST, term=2, holder="b")))


def test_a_run_that_has_ended_gets_no_launcher() -> None:
    lease.write(FIRST)
    lease.end_lease({"job": "exp-1", "code": 0})
    lease.end_lease({"job": "exp-1", "code": 3})  # the first end counts
    vote = answered("vote", job="exp-1", holder="a", term=2)
    assert vote.code == 0 and not vote.granted
    assert not lease.renew_lease(asdict(FIRST))


def test_a_run_without_processes_is_listed_and_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    lease.write(FIRST)
    (job,) = answer_of("list_jobs", json.loads(json.dumps(requests.list_jobs({}))))
    assert (job.job, job.runs, job.ranks) == ("exp-1", True, (0, 0))
    requests.end_job({"job": "exp-1", "deadline_s": 1})  # on a host where it runs no process
    assert (known := lease.read("exp-1")) is not None and known.code is None
    now_s = lease.clock() + FIRST.lasts_s + lease.MARGIN_S + 1
    monkeypatch.setattr(lease, "clock", lambda: now_s)
    assert not requests.end_job({"job": "exp-1", "deadline_s": 1})["left"]
    ended = lease.read("exp-1")
    assert ended is not None and ended.code == 75
    assert requests.list_jobs({}) == []


def test_a_host_that_was_started_again_knows_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    lease.write(FIRST)
    monkeypatch.setattr(lease, "machine_id", lambda: "since another start")
    assert lease.read("exp-1") is None and answered("vote", job="exp-1", holder="b", term=2) is None
    assert lease.list_leases({}) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"voters": 7}', json.dumps({"voters": [[]], "job": 1})]
)
def test_a_broken_file_is_no_lease(text: str) -> None:
    lease.write(FIRST)
    jobs.file_of("exp-1", "lease").write_text(text)
    assert lease.read("exp-1") is None


@pytest.mark.parametrize("job", ["", "../x", "a/b", ".lock", "a\0b", "a\nb", "a\x1b[2J", "n" * 5000])
def test_the_name_of_a_job_is_no_path(job: str) -> None:
    with pytest.raises(ValueError, match="not the name of a job"):
        jobs.file_of(job, "lease")
    with pytest.raises(ValueError, match="not the name of a job"):
        requests.has_added({"job": job})
    jobs.write(jobs.Record(job, "", "", "", 0, (0, 0), (0, ""), 0.0))
    assert not jobs.records()


def answered(request: str, **arguments: object) -> Any:
    """The answer as the asking host gets it."""
    return answer_of(request, json.loads(json.dumps(getattr(lease, request)(arguments))))
