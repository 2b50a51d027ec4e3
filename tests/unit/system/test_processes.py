"""What /proc and the control groups tell of processes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from yolofleet.support.system.cgroup import OomKills, oom_kills
from yolofleet.support.system.proc import children, descendants, started_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def machine(folder: Path, cgroup: str, counts: dict[str, int], machine: int = 9) -> tuple[Path, Path]:
    """Make a /proc whose own process is in the control groups ``cgroup``, and the counts in some files of those; return both folders."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(cgroup)
    (folder / "proc/vmstat").write_text(f"pgfault 7\noom_kill {machine}\n")
    for name, count in counts.items():
        file = folder / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"oom 3\noom_kill_disable 1\noom_kill {count}\n")
    return folder / "proc", folder / "groups"


@pytest.mark.parametrize(
    ("cgroup", "counts", "group"),
    [
        ("0::/user.slice/s.scope\n", {"user.slice/s.scope/memory.events": 4, "memory.events": 8}, 4),
        ("0::/\n", {"memory.events": 4}, 4),  # a container's own
        ("0::/\n", {}, None),  # the machine's root has none
        ("5:cpu:/\n4:memory:/job/1\n0::/\n", {"memory/job/1/memory.oom_control": 4}, 4),
        ("4:cpuset,memory:/docker/abc\n", {"memory/memory.oom_control": 4}, 4),  # seen from inside of it
        ("", {}, None),
    ],
)
def test_the_own_control_groups_count_comes_first(
    tmp_path: Path, cgroup: str, counts: dict[str, int], group: int | None
) -> None:
    assert oom_kills(*machine(tmp_path, cgroup, counts)) == OomKills(group, 9)


def test_counts_since_the_start() -> None:
    assert OomKills(3, 9).since(OomKills(1, 9)) == OomKills(2, 0)
    assert OomKills(3, None).since(OomKills(None, 9)) == OomKills(None, None)


def test_a_process_may_have_any_bytes_in_its_name(tmp_path: Path) -> None:
    program = bytes(tmp_path) + b"/\xff) R 1 ("
    shutil.copy(os.fsencode(shutil.which("sleep") or "/bin/sleep"), program)
    with subprocess.Popen([program, "60"]) as child:
        assert child.pid in descendants(os.getpid()) and child.pid in children(os.getpid())
        assert started_at(child.pid).isdecimal()
        child.kill()
    assert child.pid not in descendants(os.getpid()) and started_at(child.pid) == ""


FAULTS = """
import resource, sys
import numpy as np
from yolofleet.support.system.proc import reuse_freed_memory

if sys.argv[1] == "reuse":
    reuse_freed_memory()

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        blocks = [np.ones(2 << 20, np.uint8) for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(5)
print(faults(20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again_without_new_pages() -> None:
    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True).stdout)

    assert faults("reuse") < faults("default") / 10
