"""What ``doctor --log`` says about logs: real ones from public threads, made-up ones, and rubbish."""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from yolofleet.fleet.doctor import log_files, log_rules, logs
from yolofleet.fleet.doctor.findings import LEVELS, Finding, worst
from yolofleet.fleet.doctor.log_files import read_log
from yolofleet.fleet.doctor.logs import classify
from yolofleet.support.errors import ClusterError, ConfigError

HERE = Path(__file__).parent
EXCERPTS = json.loads((HERE / "logs" / "table.json").read_text(encoding="utf-8"))


def sick(findings: list[Finding]) -> list[str]:
    return [f.code for f in findings if f.level in ("warn", "fault")]


def of(text: str) -> list[Finding]:
    return classify(text.splitlines(keepends=True))


# -- real logs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda e: e["file"].removesuffix(".txt"))
def test_a_log_from_a_public_thread_is_read_right(excerpt):
    found = sick(read_log(HERE / "logs" / excerpt["file"]))
    assert (found[0] if found else None) == excerpt["code"], excerpt["link"]


def test_the_excerpts_are_many_linked_and_all_listed():
    assert sum(e["code"] is not None for e in EXCERPTS) >= 40
    assert sum(e["code"] is None for e in EXCERPTS) >= 8
    assert all(
        re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", e["link"]) for e in EXCERPTS
    )
    assert {e["file"] for e in EXCERPTS} == {p.name for p in (HERE / "logs").glob("*.txt")}
    codes = {rule.code for rule in log_rules.RULES}
    assert {e["code"] for e in EXCERPTS} - {None} <= codes


# -- which finding comes first -------------------------------------------------------------------------------

LOST = "[rank1]: RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1234\n"
SLOW = "[rank3]:[E1 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600013 milliseconds before timing out.\n"
SUMMARY = """Failures:
[1]:
  time      : 2026-01-01_00:00:00
  host      : node-a
  rank      : 1 (local_rank: 1)
  exitcode  : {other} (pid: 11)
  error_file: <N/A>
  traceback : x
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : node-b
  rank      : 6 (local_rank: 2)
  exitcode  : {root} (pid: 12)
  error_file: <N/A>
  traceback : x
============================================================
"""


def test_the_killed_rank_explains_the_others_that_lost_it():
    first, *others = of(LOST + SLOW + SUMMARY.format(root=-9, other=-6))
    assert (first.code, first.level) == ("killed", "fault")
    assert first.where.startswith("rank 6 on node-b, line ")
    assert {f.code for f in others} == {"peer-lost", "collective-timeout", "aborted"}


def test_an_error_that_names_its_cause_comes_before_signals_and_lost_peers():
    oom = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    found = of(LOST + oom + SUMMARY.format(root=1, other=-15))
    assert [f.code for f in found] == ["gpu-memory", "worker-failed", "peer-lost", "ended-by-others"]
    assert found[0].where == "rank 2, line 2"


GPU_FAULT = "[74889.6] NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.\n"
MEMORY_FAULT = "RuntimeError: CUDA error: an illegal memory access was encountered\n"
FILES = "OSError: [Errno 24] Too many open files\n"
ORDINAL = "RuntimeError: CUDA error: invalid device ordinal\n"
DISK_FULL = "OSError: [Errno 28] No space left on device\n"
NCCL_FAILED = "ncclSystemError: System call failed.\nLast error:\n"
LOST_OURS = ClusterError("rank 1 lost the other ranks in a collective").render() + "\n"
IGNORED = 'Exception ignored in: <function It.__del__ at 0x7f>\nTraceback (most recent call last):\n  File "x", line 1, in y\nBrokenPipeError: [Errno 32] Broken pipe\n'
OTHER_RANK = "[rank1]: " + "\n[rank1]: ".join(IGNORED.splitlines()[:3])
XID = "NVRM: Xid (PCI:0000:02:00): {}, pid=1, name=python\n"
EXIT = "failed (exitcode: {}) local_rank: 0 (pid: 1) of binary: python\n"


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (MEMORY_FAULT + LOST + GPU_FAULT, ["gpu-fault", "cuda-illegal", "peer-lost"]),  # hardware first
        (FILES + ORDINAL, ["too-many-files", "device-ordinal"]),  # of two equal causes, the earlier one
        (ORDINAL + FILES, ["device-ordinal", "too-many-files"]),
        ("W1 api.py] something\n" + SUMMARY.format(root=-11, other=-9), ["segfault", "killed"]),  # torchrun's root
        (NCCL_FAILED + "Net : Connection closed by remote peer a<1>\n", ["peer-lost", "nccl-error"]),
        (LOST_OURS + DISK_FULL, ["disk-full", "peer-lost"]),  # our own error about lost peers is no cause
        (IGNORED * 2, []),
        (IGNORED + "ValueError: 7 is odd\n", ["python-error"]),
        (f"{OTHER_RANK}\n[rank0]: ValueError: 7 is odd\n[rank1]: BrokenPipeError: x\n", ["python-error"]),
        (IGNORED.splitlines()[0] + "\nepoch 1" * 50 + "\nValueError: 7 is odd\n", ["python-error"]),
        ("\x1b[31;1m(Worker pid=7, ip=10.0.0.2)\x1b[0m [rank0]: MemoryError\n", ["host-memory"]),
        (XID.format(31) + XID.format(79) + XID.format(31), ["gpu-fault", "gpu-program"]),  # numbers that matter
        (EXIT.format(-11) + EXIT.format(-15), ["segfault", "ended-by-others"]),
    ],
)  # fmt: skip
def test_the_finding_that_explains_the_others_comes_first(text, codes):
    assert sick(of(text)) == codes


def test_an_error_of_nccl_shows_its_next_line():
    alone = of(NCCL_FAILED + "something new\n")
    assert sick(alone) == ["nccl-error"]
    assert "something new" in alone[0].seen


GUIDE_NO_ROUTE = """(1) dist.init_process_group(backend='nccl')
(2) NCCL WARN Connect to 192.168.1.2<> failed : No route to host
(3) dist.init_process_group(backend='nccl', init_method='env://')  # distributed backend
site-packages/torch/distributed/distributed_c10d.py", line 442, in init_process_group
barrier()
in barrier
work = _default_pg.barrier()
RuntimeError: NCCL error in: /pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:784, unhandled system error, NCCL version 2.7.8
"""
GUIDE_REFUSED = """machinename:33983:34116 [2] include/socket.h:403 NCCL WARN Connect to 192.168.1.2<50565> failed : Connection refused
machinename:33983:34116 [2] NCCL INFO bootstrap.cc:95 -> 2
"""


def test_an_error_of_nccl_names_the_line_that_says_what_failed():
    cause, error = of(GUIDE_NO_ROUTE)
    assert (cause.code, error.code) == ("no-route", "nccl-error")
    assert "ip route get 192.168.1.2" in cause.fix
    assert "Line 2, with `NCCL WARN`" in error.why and error.fix == ""
    unknown = "a:1:2 [0] x.cc:1 NCCL WARN Something new\n" + GUIDE_NO_ROUTE.splitlines()[-1]
    assert [(f.code, "Line 1," in f.why) for f in of(unknown)] == [("nccl-error", True)]


def test_a_port_that_nccl_chose_is_not_taken_for_the_rendezvous_port():
    (finding,) = of(GUIDE_REFUSED)
    assert (finding.code, finding.level) == ("nccl-refused", "fault")
    assert "firewall" in finding.why and "wrong network interface" in finding.why
    assert "--master_port" not in (finding.fix or "") and "firewall-cmd" in finding.fix


# -- attempts ------------------------------------------------------------------------------------------------

TRIES = "[W socket.cpp:697] [c10d] The client socket has failed to connect to [node-a]:29500 (errno: 111 - Connection refused).\n"


MET = "a:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1e0 - Init COMPLETE\n"
NEVER_MET = "[E socket.cpp:610] [c10d] The client socket has failed to connect to any network address of (node-a, 29500).\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TRIES, [("connection-refused", "warn")]),  # nobody knows how it ended
        (TRIES * 3 + MET, [("log-clean", "ok"), ("connection-refused", "note")]),
        (TRIES + MET + TRIES, [("connection-refused", "warn")]),  # and then again
        (TRIES + NEVER_MET, [("connection-refused", "fault"), ("unreachable", "fault")]),
        (TRIES + DISK_FULL, [("disk-full", "fault"), ("connection-refused", "warn")]),
    ],
)
def test_a_refused_attempt_matters_by_whether_the_processes_met(text, found):
    assert [(f.code, f.level) for f in of(text)] == found


def test_refused_attempts_are_counted_and_their_command_names_the_address():
    first = of(TRIES * 3 + NEVER_MET)[0]
    assert "(3 similar lines)" in first.seen and "nc -zv node-a 29500" in first.fix


# -- ends of processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("ERROR: failed (exitcode: -9) local_rank: 0 (pid: 1) of binary: python", "killed"),
        ("ERROR: failed (exitcode: -7) local_rank: 0 (pid: 1) of binary: python", "shm-full"),
        ("ERROR: failed (exitcode: -11) local_rank: 0 (pid: 1) of binary: python", "segfault"),
        ("ERROR: failed (exitcode: -15) local_rank: 0 (pid: 1) of binary: python", "ended-by-others"),
        ("ERROR: failed (exitcode: -6) local_rank: 0 (pid: 1) of binary: python", "aborted"),
        ("ERROR: failed (exitcode: -4) local_rank: 0 (pid: 1) of binary: python", "illegal-instruction"),
        ("ERROR: failed (exitcode: -1) local_rank: 0 (pid: 1) of binary: python", "hangup"),
        ("ERROR: failed (exitcode: 1) local_rank: 0 (pid: 1) of binary: python", "worker-failed"),
        ("exitcode  : 3221225477 (pid: 5)", "segfault"),  # Windows: access violation
        ("Process finished with exit code 139 (interrupted by signal 11: SIGSEGV)", "segfault"),
        ("container exited with code 137", "killed"),
        ("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL", "killed"),
        ("subprocess.CalledProcessError: Command '[python]' died with <Signals.SIGBUS: 7>.", "shm-full"),
        ("srun: error: node1: task 3: Killed", "killed"),
        ("srun: error: node1: task 3: Out Of Memory", "host-memory"),
        ("srun: error: node1: task 1: Exited with exit code 1", "worker-failed"),
        ("./run.sh: line 3: 4711 Killed                  python train.py", "killed"),
        ("Killed", "killed"),
        ("[node1] Killed", "killed"),
        ("Bus error (core dumped)", "shm-full"),
        ("mpirun noticed that process rank 1 with PID 0 on node a exited on signal 15 (Terminated).", "ended-by-others"),
        ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 1", "hangup"),
    ],
)  # fmt: skip
def test_how_a_process_ended_is_translated(line, code):
    assert sick(of(line)) == [code]


@pytest.mark.parametrize(
    "line",
    [
        "Process finished with exit code 0",
        "W1 api.py:900] Sending process 4711 closing signal SIGTERM",
        "git: Command '['git', 'describe']' returned non-zero exit status 128.",
        "Killing old checkpoints, 3 killed in all",
        "signal handlers are set, sigma 0.5",
        "epoch 3: 0 errors, 0 failed, no exceptions",
    ],
)
def test_what_only_looks_like_an_end_is_none(line):
    assert sick(of(line)) == []


# -- Python, and our own errors ------------------------------------------------------------------------------


def test_the_last_line_of_a_traceback_is_told_with_its_rank():
    text = '[rank5]: Traceback (most recent call last):\n[rank5]:   File "t.py", line 1, in f\n[rank5]: mylib.errors.OddError: 7 is odd\n'
    (found,) = of(text + SUMMARY.format(root=1, other=-15))[:1]
    assert (found.code, found.level, found.where) == ("python-error", "fault", "rank 5, line 3")
    assert "7 is odd" in found.seen


def test_our_own_error_keeps_its_own_advice():
    error = ClusterError(
        "rank 2 (b) was started with img 320, rank 0 (a) with 640", hint="give the same command"
    )
    (found,) = of("epoch 1\n" + error.render() + "\n")
    assert (found.code, found.fix) == ("yolofleet-error", "give the same command")
    assert "img 320" in found.seen


def test_a_warning_of_python_is_no_fault():
    line = "/x/torch/cuda/__init__.py:141: UserWarning: CUDA initialization: Found no NVIDIA driver on your system.\n"
    assert [(f.code, f.level) for f in of(line)] == [("gpu-missing", "warn")]
    assert of(line + line.replace("UserWarning", "RuntimeError"))[0].level == "fault"


# -- forms of text -------------------------------------------------------------------------------------------


def test_what_is_shown_cannot_command_a_terminal():
    (found,) = of("OSError: No space left on device \x1b]0;title\x07\x00\n")
    assert found.seen.isprintable()


@pytest.mark.parametrize("place", ["(-oProxyCommand=x, 22)", "($(reboot), 29500)", "(a;b, 29500)"])
def test_a_log_cannot_put_words_into_a_command(place):
    line = f"[E] The client socket has timed out after 1s while trying to connect to {place}.\n"
    assert "nc -zv ADDRESS" in of(line)[0].fix


def test_files_of_every_encoding_and_line_end_are_read(tmp_path):
    text = "epoch 1\r\nOSError: [Errno 28] No space left on device\r\n"
    for name, content in {
        "unix": text.replace("\r", "").encode(),
        "windows": text.encode(),
        "powershell": text.encode("utf-16"),
        "bom": b"\xef\xbb\xbf" + text.encode(),
        "latin": b"caf\xe9\n" + text.encode(),
        "progress": b"1%\r2%\r3%\r" + text.encode(),
    }.items():
        path = tmp_path / f"{name} ü'.log"
        path.write_bytes(content)
        assert sick(read_log(path)) == ["disk-full"], name


def test_a_log_may_come_from_a_pipe(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Killed\n"))
    assert sick(read_log("-")) == ["killed"]


def test_a_file_that_cannot_be_read_is_said_so(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_log(tmp_path / "none.log")
    with pytest.raises(ConfigError, match=r"none of \*\.log, \*\.out, \*\.err in"):
        read_log(tmp_path)


@pytest.fixture
def run_folder(tmp_path):
    """A run of which rank 2 had no memory, and the others lost it."""
    logs = tmp_path / "exp ü" / "logs"
    logs.mkdir(parents=True)
    for rank in (0, 1, 2, 10):
        words = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n" if rank == 2 else LOST
        (logs / f"rank-{rank}.log").write_text(f"epoch 1\n{words}")
    (logs / "agent.log").write_text(SUMMARY.format(root=1, other=-15))
    (logs / "error-rank-2.json").write_text("OSError: [Errno 28] No space left on device\n")
    return logs.parent


@pytest.mark.parametrize("below", [".", "logs"])
def test_the_logs_of_a_run_are_read_together_and_the_file_is_named(run_folder, below):
    found = read_log(run_folder / below)
    assert [f.code for f in found] == ["gpu-memory", "worker-failed", "peer-lost", "ended-by-others"]
    assert found[0].where == "rank-2.log, line 2"
    assert found[1].where.startswith("agent.log, rank 6 on node-b, line ")
    assert found[2].where == "rank-0.log, rank 1, line 2, and in 2 more files"


@pytest.mark.parametrize(
    "names",
    [
        ("slurm-7.out", "rank-1.err"),
        ("job_1/attempt_0/0/stderr.log", "job_1/attempt_0/1/stderr.log"),  # torchrun's --log-dir
    ],
)
def test_logs_of_other_programs_have_other_names(tmp_path, names):
    words = ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", LOST]
    for name, text in zip(names, words, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    memory, lost = read_log(tmp_path)
    assert (memory.code, lost.code) == ("gpu-memory", "peer-lost")
    for finding, name in zip((memory, lost), names, strict=True):
        assert finding.where.startswith(f"{name}, ")


def test_an_attempt_that_one_rank_repeated_with_success_does_not_excuse_another(run_folder):
    for file in (run_folder / "logs").glob("*.log"):
        file.write_text(TRIES + MET if file.name == "rank-10.log" else "epoch 1\n")
    [clean, tried] = read_log(run_folder)
    assert (clean.code, clean.seen) == ("log-clean", "5 files, 6 lines, and no known error")
    assert (tried.where, tried.level) == ("rank-10.log, line 1", "note")
    (run_folder / "logs" / "rank-1.log").write_text(TRIES)
    [tried] = read_log(run_folder)
    assert (tried.where, tried.level) == ("rank-1.log, line 1, and in 1 more file", "warn")


def test_more_files_than_are_read_at_once_are_said(run_folder, monkeypatch):
    monkeypatch.setattr(log_files, "MOST_FILES", 3)  # agent, rank-0, rank-1
    found = read_log(run_folder)
    assert "gpu-memory" not in {f.code for f in found}
    last = found[-1]
    assert (last.code, last.level, last.seen) == ("log-unread", "warn", "3 of 5 files were read")


def test_an_empty_log_and_a_healthy_one_are_said_so():
    assert of("")[0].seen == "the log is empty"
    (found,) = of("epoch 1\nepoch 2\n")
    assert (found.code, found.level, worst([found])) == ("log-clean", "ok", "ok")
    assert "2 lines" in found.seen


# -- rubbish, and size ---------------------------------------------------------------------------------------


def test_rubbish_is_survived():
    rng = random.Random(0)
    words = [part for _, pattern in log_rules.PATTERNS for part in pattern.parts]
    words += [
        "[",
        "(",
        "[rank",
        "exitcode: ",
        "Root Cause",
        "Last error:",
        "\x1b[",
        "\0",
        "try :",
        "Error: ",
        "9" * 400,
    ]
    for _ in range(100):
        lines = ["".join(rng.choices(words, k=rng.randrange(8))) for _ in range(20)]
        lines += [rng.randbytes(200).decode("latin-1"), rng.randbytes(200).decode("utf-16", "replace")]
        rng.shuffle(lines)
        for finding in classify(lines):
            assert finding.level in LEVELS
            assert len(finding.render()) < 5000
            assert json.loads(json.dumps(vars(finding)))["code"] == finding.code


@pytest.mark.parametrize(
    "stuff", ["[", "(", "a.", "[rank0]:", " ", "exit code ", "9", "*", "Error: ", "(a, 1)"]
)
def test_a_very_long_line_takes_no_time(stuff):
    line = stuff * (400_000 // len(stuff))
    assert sick(classify([line, f"OSError: No space left on device {line}", f"{line} Too many open files"]))


def test_a_long_log_is_read_in_little_memory():
    code = """if True:
        import resource, sys
        from yolofleet.fleet.doctor.logs import classify

        def lines():
            size = i = 0
            while size < 64e6:
                i += 1
                line = f"node-a:{i}:{i} [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0 and so on, as long as a line of a log is\\n"
                size += len(line)
                yield line
            yield "OSError: [Errno 28] No space left on device\\n"

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = classify(lines())
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert found[0].code == "disk-full" and found[0].where.startswith("line 50"), found
        assert grown < 32 * 1024 * (1024 if sys.platform == "darwin" else 1), grown
        assert "torch" not in sys.modules
    """
    pytest.importorskip("resource", reason="Windows does not say how much memory was taken")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_remembered_of_lines_is_bounded(monkeypatch):
    monkeypatch.setattr(logs, "REMEMBERED", 50)
    reader = logs.Reader()
    for number, letters in enumerate((f"{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(600)), 1):
        reader.line(letters, number)
        assert len(reader.known) <= 50


# -- the table -----------------------------------------------------------------------------------------------


def test_no_pattern_hides_behind_an_earlier_one():
    for _, pattern in log_rules.PATTERNS:
        line = " x ".join(part.strip() if len(pattern.parts) == 1 else part for part in pattern.parts)
        line += "" if pattern.at_end else " x"
        rule = log_rules.first_match(log_rules.PATTERNS, line if pattern.at_start else f"x {line}")
        assert rule is not None, pattern
        assert rule.code == pattern.rule.code, pattern


def test_every_rule_says_why_and_what_to_do():
    for rule in log_rules.RULES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.code)
        assert rule.why.endswith((".", "?", ")")), rule.code
        assert rule.fix or rule.level in ("ok", "note") or rule.code in ("yolofleet-error", "log-unread")
        assert all(pattern == pattern.lower() and len(pattern) > 5 for pattern in rule.patterns), rule.code


def test_a_log_that_claims_a_terabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with log.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"has more than the limit of 1\.0 GiB"):
        read_log(log)
