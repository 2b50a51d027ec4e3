"""The commands of the guides that people come from, as they stand there: where they can be given, and how they are
made small.

Nothing in a command is changed but addresses and ``--device``; sizes are added at its end. Data and weights are found
under the guides' names: ``coco.yaml`` is a small set, ``yolov5s.pt`` a smaller published file.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

from reference import reference

ROOT = Path(__file__).resolve().parents[1]
TINY = "--img 64 --epochs 1 --batch 4 --nominal-batch 4 --micro-batch 2 --no-plots --threads 1"


def guide_folder(folder: Path, data: Path) -> Path:
    """As its reader has it after ``cd yolov5``."""
    folder.mkdir(parents=True)
    for script in ("train.py", "train_multi_GPU.py"):
        (folder / script).symlink_to(ROOT / script)
    (folder / "data").mkdir()
    description = data.read_text().replace("path: .", f"path: {json.dumps(str(data.parent))}")
    for name in ("coco.yaml", "coco_profile.yaml"):
        (folder / "data" / name).write_text(description)
    return folder


def put_weights(folder: Path) -> None:
    """Skips where the published file is not at hand."""
    published = reference("weights/yolov5n.pt")
    for name in ("yolov5s.pt", "yolov5l.pt"):
        if not (folder / name).exists():
            (folder / name).symlink_to(published)


def given(command: str, device: str, *more: str) -> list[str]:
    """Words of ``command`` on a machine without GPUs, with its environment in front.

    Args:
        device: what ``--device`` or ``--selected_gpu`` says instead; "" where hosts say it.
        more: further arguments, after the sizes.
    """
    words = shlex.split(command.replace("\\\n", " "))
    start = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    programs = {"python": [sys.executable], "yolofleet": [sys.executable, "-m", "yolofleet"]}
    words[start : start + 1] = programs[words[start]]
    names_devices = [i for i, word in enumerate(words) if word in ("--device", "--selected_gpu", "--gpus")]
    if names_devices:
        words[names_devices[0] + 1] = device
    elif device:
        words += ["--device", device]
    return ["env", *words, *TINY.split(), *more]
