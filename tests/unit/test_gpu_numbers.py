"""GPUs have the numbers of nvidia-smi in every verb, in the Python interface and in all child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import yolofleet
from yolofleet.support.system.children import module_environment

ASK = "import os, yolofleet; print(os.environ['CUDA_DEVICE_ORDER'])"


@pytest.mark.parametrize("given", ["", "FASTEST_FIRST"])
def test_the_package_sets_the_order_unless_the_user_did(given: str) -> None:
    without = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"}
    environment = without | ({"CUDA_DEVICE_ORDER": given} if given else {})
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == (given or "PCI_BUS_ID"), done.stderr
    assert module_environment(os.environ)["CUDA_DEVICE_ORDER"] == os.environ["CUDA_DEVICE_ORDER"]


def test_one_place_decides_about_the_order() -> None:
    package = Path(yolofleet.__file__).parent
    found = [
        path for path in package.rglob("*.py") if "CUDA_DEVICE_ORDER" in path.read_text(encoding="utf-8")
    ]
    assert found == [package / "__init__.py"]
