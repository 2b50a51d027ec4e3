"""Run the stages of ``make test-gpu STAGES=all`` on the simulated accelerator: ``python tests/accelerator/gpu_check_on_mini.py --minutes 3
--device 0,1``.

Only this process and its forks have the accelerator, so a run has one process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import miniature


def register(folder: Path) -> None:
    """Register a package of a device outside of PyTorch, so that only torch can count the devices."""
    package = folder / "mini-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mini\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nmini = mini:start\n")


if __name__ == "__main__":
    miniature.install()
    with TemporaryDirectory() as temporary:
        register(Path(temporary))
        sys.path[:0] = [temporary, str(Path(__file__).parents[1])]
        from gpu_check.__main__ import main

        sys.exit(main(sys.argv[1:]))
