"""The machine of a rented notebook: data and HOME that cannot be written, no root, and little or no /dev/shm. Linux and root.

Each test has a mount namespace of its own. Root without capabilities obeys the modes of files, as any other user does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import environment, results, small_shapes
from small_files import TINY

pytestmark = [pytest.mark.slow, pytest.mark.long]

# a script without `if __name__ == "__main__"`
SCRIPT = """
import json, sys
from yolofleet import Model
from yolofleet.support.errors import YolofleetError

said = []
for settings in json.loads(sys.argv[1]):
    try:
        model = Model(settings.pop("model"))
        run = model.train(**settings)
        figures = model.val(data=settings["data"], img=settings["img"], device=settings["device"], workers=settings["workers"], plots=False)
        said.append(f"{run.weights.name} {figures.images}")
    except YolofleetError as problem:
        said.append(str(problem))
print(json.dumps(said))
"""


def in_namespace(folder: Path, shm: str, script: str, *words: str) -> str:
    """Run Python code with HOME and /dev/shm of its own, and without the powers of root; return its last line.

    Args:
        shm: options of the file system at /dev/shm.
    """
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        pytest.skip("needs unshare and setpriv")
    home = folder / "home"
    home.mkdir()
    mounts = f"mount -t tmpfs -o {shm} tmpfs /dev/shm && mount -t tmpfs -o ro,mode=555 tmpfs {home}"
    without_root = "setpriv --bounding-set=-all --inh-caps=-all --no-new-privs"
    command = f'{mounts} && exec {without_root} "$@"'
    own = {
        name: value
        for name, value in environment(folder).items()
        if name not in ("YOLOFLEET_CACHE", "XDG_CACHE_HOME")
    }
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, "sh", sys.executable, "-c", script, *words],
        cwd=folder,
        env=own | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if any(done.stderr.startswith(program) for program in ("unshare:", "mount:", "setpriv:")):
        pytest.skip(f"namespaces are not allowed here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def trained(folder: Path, shm: str, *runs: dict[str, Any]) -> list[str]:
    """Train on a data set that cannot be written; return what each run gives."""
    data = small_shapes(folder)
    before = sorted(data.parent.rglob("*"))
    for path in (*before, data.parent):
        path.chmod(0o555 if path.is_dir() else 0o444)
    sizes = {"img": 64, "batch": 8, "nominal_batch": 8, "micro_batch": 2, "epochs": 1, "threads": 1}
    common = {"data": str(data), "model": str(TINY), "device": "cpu:2", "workers": 1, "plots": False, **sizes}
    found = json.loads(in_namespace(folder, shm, SCRIPT, json.dumps([common | run for run in runs])))
    for path in (data.parent, *before):
        path.chmod(0o755 if path.is_dir() else 0o644)  # so that pytest can remove it
    assert sorted(data.parent.rglob("*")) == before, "nothing is written beside the images"
    return list(found)


def test_data_and_home_that_cannot_be_written(tmp_path: Path) -> None:
    """With 1 GiB of /dev/shm."""
    project = str(tmp_path / "home" / "runs")
    two, again, one, elsewhere = trained(
        tmp_path, "size=1g", {}, {}, {"device": "cpu"}, {"project": project, "epochs": 2}
    )
    assert two == again == one == "best.safetensors 10"
    assert elsewhere.startswith("StorageError: ") and "choose another --project folder" in elsewhere
    runs = [results(tmp_path / "runs/train" / name)["metrics"] for name in ("exp", "exp2")]
    assert runs[0] == runs[1]


def test_shared_memory_that_suffices_for_small_images_alone(tmp_path: Path) -> None:
    large = {"img": 640}
    small, refused, without = trained(tmp_path, "size=8m", {}, large, large | {"workers": 0})
    assert small == without == "best.safetensors 10"
    assert refused.startswith("ClusterError: ") and "/dev/shm: 8.0 MiB free" in refused
    assert "fewer --workers" in refused


def test_no_shared_memory(tmp_path: Path) -> None:
    many, loader, alone = trained(
        tmp_path, "mode=555", {}, {"device": "cpu"}, {"device": "cpu", "workers": 0, "cache": "ram"}
    )
    for refused in (many, loader):
        assert refused.startswith("ClusterError: there is no /dev/shm that this user may write to")
        assert "one process (--device cpu or 0) with --workers 0" in refused
    assert alone == "best.safetensors 10"
