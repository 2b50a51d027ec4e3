"""The machines that the other tests here use: they behave as machines do, and nothing of them is left."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from machines import machines


def test_machines_reach_each_other_by_name_and_are_gone_afterwards(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with machines(2, private=[own], environment={"WHERE": "in the lab"}) as lab:
        said = lab.desk.run(
            "ssh", "m1", f"hostname; echo $WHERE; touch {own}/here; ssh m2 ls {own} '&&' hostname"
        )
        assert said.stdout.split("\n") == ["m1", "in the lab", "m2", ""]
        assert lab.left_behind() == {}
        sleeper = subprocess.Popen(lab.hosts[0].argv("sleep", "600"))
        while not lab.hosts[0].processes():  # it is on its way there
            time.sleep(0.01)
        assert lab.left_behind() == {"m1": [f"{sleeper.pid} sleep 600"]}
        lab.hosts[1].unplug()
        silent = ["ssh", "-oConnectTimeout=1", "m2", "true"]
        assert "timed out" in lab.desk.run(*silent, check=False).stderr
        lab.hosts[1].plug()
        lab.desk.run("ssh", "m2", "true")
        namespaces = [machine.namespace for machine in lab.machines]
    assert sleeper.wait() == -9
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(namespace in left for namespace in namespaces)
