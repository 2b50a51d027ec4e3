"""Fleets as users write them, what each host is told, and what is said when a run on them ends."""

from __future__ import annotations

import base64
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_data import yolo_set
from small_files import FLEET_FILE

from yolofleet.cli import main
from yolofleet.cli.train import plan
from yolofleet.config.decide import Decided
from yolofleet.config.load import resolve_train, resolve_val
from yolofleet.config.resolve import Resolved
from yolofleet.config.stored.job import load_job
from yolofleet.fleet.hosts.endings import Ending, print_cause
from yolofleet.fleet.hosts.fleet import Fleet, Host, load_fleet, parse_hosts
from yolofleet.fleet.hosts.messages import Exit, LastWords, answer_of
from yolofleet.fleet.hosts.messages import Log as LogMessage
from yolofleet.fleet.hosts.remote import SSH_OPTIONS, Remote, argv_on
from yolofleet.fleet.hosts.requests import claim
from yolofleet.fleet.hosts.wire_protocol import STOPPED_BY_LAUNCHER as RECALLED
from yolofleet.fleet.hosts.wire_protocol import STOPPED_ON_REQUEST as ASKED
from yolofleet.fleet.launch.folders import Folders, Site, fetch_folder
from yolofleet.fleet.launch.machines import RunPlan, fleet_of, resume_options
from yolofleet.fleet.launch.plan import plan_run, start
from yolofleet.fleet.launch.watch import Watch
from yolofleet.runs.report.folder import RunFolder
from yolofleet.support.errors import CheckpointError, ClusterError, ConfigError, Stopped
from yolofleet.support.system.children import START


def test_the_short_form() -> None:
    fleet = parse_hosts("a:8, b:0+2,me@c.example:cpu:4,d:+3")
    assert [(host.name, host.device) for host in fleet.hosts] == [
        ("a", "0,1,2,3,4,5,6,7"), ("b", "0,2"), ("me@c.example", "cpu:4"), ("d", "3")
    ]  # fmt: skip
    assert fleet.processes == 15
    assert [fleet.first_rank(node) for node in range(4)] == [0, 8, 10, 14]


def test_bare_names_have_the_devices_of_the_command() -> None:
    assert [host.device for host in parse_hosts("a,b:cpu:2", "0,1").hosts] == ["0,1", "cpu:2"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a", "has no devices"),
        ("-oProxyCommand=touch:1", "is not a host"),
        ("a;b:1", "is not a host"),
        ("a:1,", "is not a host"),
    ],
)
def test_what_is_no_fleet_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_hosts(text)


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET_FILE)
    fleet = load_fleet(path)
    env = {"NCCL_DEBUG": "WARN", "A": "1"}
    assert fleet.hosts == (
        Host("node-a", "0,1", python="/opt/yf/bin/python", env=env),
        Host("b", "0,2", python="/opt/yf/bin/python", env=env),
        Host("c", "cpu:4", interface="ib0", python="/opt/yf/bin/python", folder="~/work", data="/fast/coco.yaml", env={**env, "A": "off"}),
    )  # fmt: skip
    assert (fleet.port, fleet.silence_s, fleet.source) == (29600, 30, str(path))


def test_one_of_hosts_and_fleet_and_no_devices_beside(tmp_path: Path) -> None:
    train = {"data": "d.yaml", "model": "yolov5n"}
    assert fleet_of(resolve_train(train)[0]) is None
    assert fleet_of(resolve_val({"data": "d", "weights": "w.safetensors", "hosts": "a:2"})) == parse_hosts(
        "a:2"
    )
    for more, says in (
        ({"hosts": "a:2", "fleet": "f.yaml"}, "both name"),
        ({"hosts": "a:2", "device": "0"}, "no effect"),
        ({"hosts": "a:2", "parallel": "dp"}, "one process"),
    ):
        with pytest.raises(ConfigError, match=says):
            fleet_of(resolve_train({**train, **more})[0])


def test_a_worker_does_not_start_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    config, recipe = resolve_train({"data": "d", "model": "yolov5n", "hosts": "a:2"})
    with pytest.raises(ConfigError, match="already started this one as one of several"):
        start(plan_run(config, recipe))


def test_a_dry_run_names_the_hosts() -> None:
    config, recipe = resolve_train({"data": "d", "model": "yolov5n", "hosts": "a:2,b:cpu:1"})
    would_run = plan(Decided(config, recipe), fleet_of(config)).partition("would run\n")[2].splitlines()
    assert [" ".join(line.split()) for line in would_run[:3]] == [
        "3 processes, by ssh:", "a ranks 0 to 1 0,1", "b rank 2 cpu:1"
    ]  # fmt: skip


def test_each_host_is_told_its_own_devices_and_data(tmp_path: Path) -> None:
    config, recipe = resolve_train(
        {"data": "d.yaml", "model": "yolov5n", "hosts": "a:8,b:cpu:2", "epochs": "7"}
    )
    fleet = Fleet((Host("a", "0,1"), Host("b", "cpu:2", data="/b/d.yaml")), "fleet.yaml")
    for node, (device, data) in enumerate((("0,1", "d.yaml"), ("cpu:2", "/b/d.yaml"))):
        path = tmp_path / "job.yaml"
        path.write_text(RunPlan(config, recipe, fleet, 1, None).text_for_host(fleet, node, ""))
        there = load_job(path)
        assert (there.config.value.device, there.config.value.data, there.config.value.epochs) == (
            device,
            data,
            7,
        )
        assert there.config.value.hosts == "" and there.config.sources["device"] == "fleet.yaml"
        assert there.recipe == recipe


@pytest.mark.parametrize(("asked", "told"), [("figures.json", ""), ("-", "-"), ("", "")])
def test_figures_go_into_a_file_of_this_machine_not_of_the_hosts(
    tmp_path: Path, asked: str, told: str
) -> None:
    config = resolve_val({"data": "d", "weights": "w", "hosts": "a:1", "json_out": asked})
    fleet = parse_hosts("a:1")
    plan = RunPlan(config, None, fleet, 1, None)
    (tmp_path / "job.yaml").write_text(plan.text_for_host(fleet, 0, ""))
    assert load_job(tmp_path / "job.yaml").config.value.json_out == told


@pytest.mark.skipif(sys.platform != "linux", reason="hosts of a fleet run Linux")
@pytest.mark.parametrize(("folder", "code"), [(".", 0), ("file", 3)])
def test_figures_that_cannot_be_written_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, code: int
) -> None:
    """The host is checked, but plays its validation: a real one takes a minute, and only its results matter."""

    def follow(*_: object) -> None:
        (tmp_path / "runs/val/exp/results.json").write_text('{"metrics": {}}')

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "file").touch()
    yolo_set(tmp_path / "d", {"a": "0 0.5 0.5 0.2 0.4\n"})
    monkeypatch.setattr(Watch, "follow", follow)
    monkeypatch.setattr(Watch, "explain", lambda *_: 0)
    val = ["val", "--data", "d", "--weights", "w", "--hosts", "localhost:cpu", "--json", f"{folder}/f.json"]
    assert main(val) == code
    assert (tmp_path / "f.json").is_file() == (code == 0)


def test_ssh_is_asked_for_nothing_but_the_host_agent() -> None:
    argv = argv_on(Host("me@n1", "cpu", python="/my env/python", env={"A": "b'c; rm"}))
    assert argv[0] == "ssh" and argv[-2] == "me@n1" and set(SSH_OPTIONS) < set(argv)
    command = ["env", "A=b'c; rm", "/my env/python", "-c", START, "yolofleet.fleet.hosts.host_agent"]
    assert shlex.split(argv[-1]) == ["exec", *command]


# -- the end -------------------------------------------------------------------------------------------------


def watch_of(*endings: dict[str, Any] | str, wishes: int = 0) -> Watch:
    """Hosts n0 ... with a process each, which ended in this order; a text: the host was lost."""
    fleet = Fleet(tuple(Host(f"n{i}", "cpu") for i in range(len(endings))))
    watch = Watch(fleet, [Remote(host) for host in fleet.hosts], lambda *_: None)
    watch.stop_requests = wishes
    for number, ending in enumerate(endings):
        if isinstance(ending, str):
            watch.nodes[number].lost = ending
        else:
            watch.nodes[number].ending = Exit.model_validate({"code": 0, **ending})
        watch._ended(number)
    return watch


def words(rank: int, message: str, exit_code: int, time: float, secondary: bool = False) -> dict[str, Any]:
    return {
        "rank": rank, "host": f"n{rank}", "message": message, "exit_code": exit_code, "time": time, "secondary": secondary
    }  # fmt: skip


STOPPED = "stopped by the launcher"
KILLED = "Root Cause:\n[0]:\n  rank      : 1 (local_rank: 0)\n  exitcode  : -9 (pid: 7)\n"


@pytest.mark.parametrize(
    ("endings", "wishes", "code", "says", "says_not"),
    [
        ([{}, {}], 0, 0, "", "Error"),
        (  # the cause is on the second host, and the first one's rank only lost it
            [
                {"code": 1, "words": [words(0, "ClusterError: lost", 4, 1.0, True)]},
                {"code": 1, "words": [words(1, "DataError: x.jpg", 3, 2.0)]},
            ],
            0, 3, "x.jpg\n  on   : rank 1, host n1", "lost",
        ),
        (  # ranks that were asked to stop because a host was lost do not hide that
            ["nothing heard from it", {"code": 1, "words": [words(1, "Stopped: saved", 75, 3.0)], "why": STOPPED}],
            0, 4, "n0 is lost, with rank 0: nothing heard", "Stopped",
        ),
        (  # Ctrl-C
            [{"code": 1, "words": [words(0, "Stopped: saved", 75, 3.0)], "why": STOPPED}] * 2,
            1, 75, "Stopped: saved", "lost",
        ),
        (  # `fleet stop`
            [{"code": 1, "words": [words(0, "Stopped: saved", 75, 3.0)], "why": ASKED}, "Connection closed"],
            0, 75, "Stopped: saved", "lost",
        ),
        (  # somebody killed an agent; its workers saved
            [{"code": -signal.SIGKILL, "words": [words(0, "Stopped: saved", 75, 3.0)]}, {"code": 1, "why": STOPPED}],
            0, 4, "agent of rank 0 on n0 was ended by SIGKILL", "Stopped",
        ),
        (  # a rank was killed; the other lost it
            [{"code": 1, "words": [words(0, "ClusterError: lost", 4, 1.0, True)]}, {"code": 1, "log": KILLED}],
            0, 4, "rank 1 on n1 was killed (SIGKILL)", "lost",
        ),
        (  # nothing but a log
            [{"code": 1, "log": "ModuleNotFoundError: No module named 'torch'"}, {"code": -15, "why": STOPPED}],
            0, 4, "could not be started on n0", "Stopped",
        ),
    ],
)  # fmt: skip
def test_the_cause_is_said(
    capsys: pytest.CaptureFixture[str],
    endings: Sequence[dict[str, Any] | str],
    wishes: int,
    code: int,
    says: str,
    says_not: str,
) -> None:
    assert watch_of(*endings, wishes=wishes).explain("") == code
    said = capsys.readouterr().err
    assert says in said and says_not not in said


STALL = """ClusterError: all ranks wait in collective 71 (all_reduce float32 [8]) since 14:45:38
  state: no other rank can look at its process
  stack: yolofleet/training/parallel/world.py:354 wait
         yolofleet/training/step.py:127 train_step
  try  : the network between them drops packets; then yolofleet train --resume r --hosts n0,n1"""


def test_a_failure_before_another_attempt_has_its_cause_and_what_to_try() -> None:
    """Rank 0 reports a stall of all ranks: its host is not to blame. The host agent of n1 has seen a stopped process."""
    stopped = "rank 1: process 7 is stopped (state T: SIGSTOP, Ctrl-Z or a paused container)"
    failure = watch_of(
        {"code": 1, "words": [{**words(0, STALL, 4, 1.0), "of_all": True}]},
        {"code": 1, "why": STOPPED, "stopped": [stopped]},
    ).failure()
    assert failure is not None and failure.may_pass and failure.host == ""
    assert failure.text == STALL.splitlines()[0]
    assert failure.details.splitlines() == [
        "  state: no other rank can look at its process",
        "  try  : the network between them drops packets",
        f"  n1: {stopped}",
    ]


def test_a_rank_that_only_lost_the_others_is_not_to_blame() -> None:
    lost = {"code": 1, "words": [words(0, "ClusterError: rank 0 lost the other ranks", 4, 1.0, True)]}
    failure = watch_of(lost, {"code": 1, "why": STOPPED}).failure()
    assert failure is not None and failure.host == "" and failure.may_pass
    bug = {"code": 1, "words": [words(1, "this is a bug in yolofleet:\nTraceback\n  x\nKeyError: 3", 1, 1.0)]}
    failure = watch_of({"code": 1, "why": STOPPED}, bug).failure()
    assert failure is not None and (failure.host, failure.details) == ("n1", "")


@pytest.mark.parametrize(
    ("lost", "command", "hint"),
    [
        (1, "train --resume r --hosts n0,n1:cpu,n2 --device cpu", "--hosts n0,n2 --device cpu   # without n1;"),
        (0, "train --resume r --hosts n0,n1,n2", "--hosts n1,n2   # without n0"),
        (1, "train --resume r --fleet f.yaml", "--fleet f.yaml   # once n1 is back, or without it in that file"),
    ],
)  # fmt: skip
def test_after_the_loss_of_a_host_the_hint_resumes_without_it(
    capsys: pytest.CaptureFixture[str], lost: int, command: str, hint: str
) -> None:
    endings: list[dict[str, Any] | str] = [{"code": 1, "why": STOPPED}] * 3
    endings[lost] = "nothing heard from it"
    watch_of(*endings).explain(f"yolofleet {command}")
    said = capsys.readouterr().err
    assert f"n{lost} is lost" in said and hint in said


def test_the_message_of_a_stop_names_the_signal_that_the_launcher_got(
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = words(0, Stopped("saved", source="SIGTERM", hint="resume").render(), 75, 3.0)
    for asked, source in (("SIGUSR1", "SIGUSR1"), ("Ctrl-C", "Ctrl-C"), ("", "SIGTERM")):
        assert (
            print_cause([Ending(1, [LastWords.model_validate(saved)], "", "agent.log")], "resume", asked)
            == 75
        )
        assert f"  from : {source}\n" in capsys.readouterr().err


def test_the_host_that_saw_the_most_steps_tells_how_far_the_run_is() -> None:
    assert watch_of({"code": 1, "step": 3}, {"code": 1, "step": 7}, "lost").steps == 7
    assert watch_of("lost").steps == -1


def test_a_port_that_somebody_took_is_recognised() -> None:
    busy = {
        "code": 1,
        "log": "The server socket has failed to listen on any local network address. EADDRINUSE",
    }
    assert watch_of(busy, {"code": 1}).met_busy_port
    assert not watch_of(busy, {"code": 1, "words": [words(1, "x", 3, 1.0)]}).met_busy_port
    assert not watch_of(busy, {"code": 1}, wishes=1).met_busy_port


@pytest.mark.parametrize(
    ("endings", "wishes", "code", "says"),
    [
        (
            [{"code": 127, "why": "there is no command x"}, {"code": 3}, {"code": -15, "why": RECALLED}],
            0,
            127,
            "n0: there is no command x\nn1: ended with exit code 3\n",
        ),
        ([{"code": -15, "why": RECALLED}, {"code": 75, "why": RECALLED}], 1, 75, "n0: stopped on request\n"),
        ([{"code": 0, "why": ASKED}, {"code": -15, "why": ASKED}], 0, 75, "n0: stopped on request\n"),
        ([{"code": 3}, {"code": -15, "why": RECALLED}], 1, 3, "n0: ended with exit code 3\n"),
        ([{}, {}], 1, 0, ""),
        ([{"code": -signal.SIGKILL}], 0, 137, "n0: ended by SIGKILL\n"),
        ([{"code": -40}], 0, 168, "n0: ended by signal 40\n"),
    ],
)
def test_a_plain_commands_exit_code(
    capsys: pytest.CaptureFixture[str], endings: Sequence[dict[str, Any]], wishes: int, code: int, says: str
) -> None:
    assert watch_of(*endings, wishes=wishes).command_code() == code
    assert capsys.readouterr().err == says


def test_each_line_of_a_host_has_its_name_however_it_comes() -> None:
    watch = watch_of({}, {})
    shown: list[str] = []
    watch.stdout.write = shown.append  # type: ignore[method-assign, assignment]  # stands in for the terminal
    for text in ("one\ntw", "o\n", "\n", "three", "\n"):
        watch._show(1, text)
    assert "".join(shown) == "n1: one\nn1: two\nn1: \nn1: three\n"


def test_a_host_writes_the_logs_of_its_own_ranks_only() -> None:
    fleet, written = parse_hosts("a:2,b:2"), []
    watch = Watch(fleet, [Remote(host) for host in fleet.hosts], lambda *log: written.append(log))
    for rank in (-7, -1, 0, 1, 2, 3, 4, 10**14):
        watch._take(1, LogMessage(rank=rank, text="words"))
    assert written == [(1, rank, "words") for rank in (-1, 2, 3)]


def test_an_agent_that_a_nameless_signal_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch_of({"code": -40}).explain("") == 4
    assert "was ended by signal 40" in capsys.readouterr().err


class FakeHost(Remote):
    """Answers requests from a table."""

    def __init__(self, name: str, answers: dict[str, Any]) -> None:
        super().__init__(Host(name, "cpu"))
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, request: str, timeout_s: float = 0, **arguments: Any) -> Any:
        self.asked.append((request, arguments))
        answer = self.answers[request]
        return answer_of(request, answer(arguments) if callable(answer) else answer)


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ({"hosts": "a,b", "device": "0,1"}, "--hosts a,b --device 0,1"),
        ({"hosts": "a:2,b:2", "sync_code": True}, "--hosts a:2,b:2 --sync-code"),
        ({"fleet": "f.yaml"}, "--fleet f.yaml"),
        (
            {"hosts": "a", "recipe_class": "m:R", "callbacks": ("m:A", "m:B"), "preempt_notice": "./n 5"},
            "--hosts a --recipe-class m:R --preempt-notice './n 5' --callbacks m:A --callbacks m:B",
        ),
    ],
)
def test_what_goes_on_from_the_states_can_be_typed(given: dict[str, Any], hosts: str) -> None:
    settings = resolve_train({"data": "d", "model": "yolov5n", **given})[0].value
    command = Folders(RunFolder(Path("r")), [], "").resume_command(resume_options(settings))
    assert command == f"yolofleet train --resume r {hosts}"


def claimed(settings: Any, host: Any, resumed: Path | None = None) -> Folders:
    """The folders of a run with these settings, as the launcher claims them."""
    plan = RunPlan(Resolved(settings, {}, ()), None, Fleet((Host("n0", "cpu"),)), 1, resumed)
    return Folders.claim(plan, [host])


def test_a_host_of_any_name_has_a_disk_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def claim(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"folder": "/there", "owner": arguments["owner"], "made": True, "linked": ""}

    settings = resolve_train({"data": "d", "model": "yolov5n"})[0].value
    for name in ("launcher", "localhost", "here"):
        host = FakeHost(name, {"claim": claim, "unclaim": None, "list_files": []})
        assert claimed(settings, host).states_are_elsewhere


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x"])
def test_a_host_cannot_write_outside_of_the_runs_folder(tmp_path: Path, name: str) -> None:
    host = FakeHost("n0", {"list_files": [[name, 3]], "read_piece": {"data": "YWJj", "offset": 0, "size": 3}})
    with pytest.raises(ClusterError, match="outside"):
        fetch_folder(host, "/there", tmp_path / "here")
    assert not (tmp_path / "x").exists()


def test_a_name_that_a_host_has_already_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def claim(arguments: dict[str, Any]) -> dict[str, Any]:
        taken = arguments["folder"] == "runs/train/exp"
        owner = "" if taken else "n0"
        return {"folder": f"/there/{arguments['folder']}", "owner": owner, "made": not taken, "linked": ""}

    host = FakeHost("n0", {"claim": claim, "unclaim": None, "list_files": []})
    settings = resolve_train({"data": "d", "model": "yolov5n"})[0].value
    folders = claimed(settings, host)
    assert folders.here == RunFolder(Path("runs/train/exp2"))
    assert folders.sites == [Site("/there/runs/train/exp2", "n0", True)]
    assert not Path("runs/train/exp").exists()
    folders.log(0, 3, "words\n")
    assert Path("runs/train/exp2/logs/rank-3.log").read_text() == "words\n"
    folders.begin("verb: train\n", [host], is_resumed=False)
    assert (
        Path("runs/train/exp2/checkpoints/where.txt").read_text() == "n0:/there/runs/train/exp2/checkpoints\n"
    )
    folders.fetch([host], saved=False, discard=True)
    assert not Path("runs/train/exp2").exists() and host.asked[-1][0] == "unclaim"


def test_only_a_folder_that_a_host_made_itself_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old = Path("runs/train/exp")
    (old / "logs").mkdir(parents=True)
    (old / "logs" / "rank-1.log").write_text("of an earlier day")
    words = {"folder": "/there/exp", "owner": "n0", "made": False, "linked": ""}
    host = FakeHost("n0", {"claim": words, "unclaim": None, "list_files": []})
    settings = resolve_train({"data": "d", "model": "yolov5n"})[0].value
    folders = claimed(settings, host, old)
    folders.fetch([host], saved=False, discard=True)
    assert not any(arguments["discard"] for request, arguments in host.asked if request == "unclaim")
    assert (old / "logs" / "rank-1.log").exists()

    mark = {"mark": ".fleet-1", "owner": "n0", "used": True, "may_link": False}
    there = claim({"folder": "old", **mark})
    assert (there["owner"], there["made"]) == ("n0", True)
    assert claim({"folder": "old", **mark})["made"] is False
    assert claim({"folder": "runs/train/exp", **mark, "used": False})["owner"] == ""


@pytest.mark.parametrize("allowed", [False, True])
def test_a_resumed_run_with_a_linked_folder_on_a_host_needs_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "other", "there"):
        Path(folder).mkdir()
    Path("there/checkpoints").symlink_to(tmp_path / "other")

    def answer(arguments: dict[str, Any]) -> dict[str, Any]:
        return claim({**arguments, "folder": "there"})

    host = FakeHost("n0", {"claim": answer, "unclaim": None, "list_files": []})
    given = {"data": "d", "model": "yolov5n", "linked_folders": allowed}
    settings = resolve_train(given)[0].value
    if allowed:
        assert claimed(settings, host, Path("here")).sites[0].owner == "n0"
        return
    with pytest.raises(
        ConfigError, match=r"on n0, .*/there/checkpoints is a symbolic link to .*/other"
    ) as caught:
        claimed(settings, host, Path("here"))
    assert "--allow linked-folders" in caught.value.render() and f"{tmp_path}/there" in caught.value.render()
    assert [path.name for path in Path("there").iterdir()] == ["checkpoints"]
    assert not list(Path("here").iterdir())


def test_a_host_that_has_every_name_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    host = FakeHost("n0", {"claim": {"folder": "/there/exp", "owner": "", "made": False, "linked": ""}})
    settings = resolve_train({"data": "d", "model": "yolov5n"})[0].value
    with pytest.raises(ClusterError, match="n0 has folders of all 100 names"):
        claimed(settings, host)
    assert not list(Path("runs/train").iterdir())


def test_states_on_another_host_are_looked_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs/train/exp")
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("verb: train\n")
    (run / "checkpoints" / "where.txt").write_text("n7:/far/my runs/exp/checkpoints\n")
    with pytest.raises(ConfigError, match=r"are on n7, in /far/my runs/exp/checkpoints") as caught:
        resolve_train({"resume": str(run), "data": "d", "model": "yolov5n"})
    assert "'n7:/far/my runs/exp/checkpoints'" in caught.value.render()
    assert "--hosts n7:" in caught.value.render()

    words = {"folder": "/there/exp", "owner": "n0", "made": True, "linked": ""}
    host = FakeHost("n0", {"claim": words, "unclaim": None, "list_files": []})
    settings = resolve_train({"data": "d", "model": "yolov5n", "hosts": "n0:1"})[0].value
    folders = claimed(settings, host, run)
    with pytest.raises(CheckpointError, match="no host has a state of this run") as refused:
        folders.begin("", [host], is_resumed=True)
    assert "n7:/far/my runs/exp/checkpoints" in refused.value.render()
    assert (
        folders.resume_command(resume_options(settings))
        == "yolofleet train --resume runs/train/exp --hosts n0:1"
    )


def test_results_come_from_the_host_with_the_newest_state_and_the_last_line_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a full disk on the host of rank 0: the host of the copies has the newest state."""

    def files(letter: str, *steps: int) -> Any:
        def listed(arguments: dict[str, Any]) -> list[list[Any]]:
            if arguments["folder"].endswith("checkpoints"):
                return [["data.json", 5], *([f"step-{step:08d}.safetensors", 9] for step in steps)]
            return [["results.csv", 1]]

        piece = {"data": base64.b64encode(letter.encode()).decode(), "offset": 0, "size": 1}
        return {"list_files": listed, "read_piece": piece, "unclaim": None}

    full = FakeHost("m1", files("1", 12, 15))
    copies = FakeHost("m2", files("2", 36, 40))
    folders = Folders(RunFolder(tmp_path), [Site("/r", "m1", True), Site("/r", "m2", True)], ".mark")
    assert folders.has_states([full, copies])
    folders.fetch([full, copies], saved=True, discard=False)
    assert "states to resume from stay on m2, in /r (the newest: after step 40)" in capsys.readouterr().err
    assert (tmp_path / "results.csv").read_text() == "2"


def test_a_log_that_came_in_part_is_fetched_whole(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("ab")
    answers = {"read_piece": {"data": "YWJj", "offset": 0, "size": 3}}
    fetch_folder(FakeHost("n0", {"list_files": [["logs/rank-0.log", 2]], **answers}), "/there", tmp_path)
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "ab"
    fetch_folder(FakeHost("n0", {"list_files": [["logs/rank-0.log", 3]], **answers}), "/there", tmp_path)
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "abc"
