"""Run YOLOv5 7.0.14 in an environment of its own, without a network. Nothing here imports it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import yaml


def version_of(python: str, package: str) -> str:
    """Return the versions of ``package`` and torch in another environment; "" if they are not there."""
    code = f"from importlib.metadata import version as v; print('{package}', v('{package}') + ', torch', v('torch'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/")
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def copy_data(data: Path, folder: Path) -> Path:
    """Copy the data set for one run of YOLOv5, which writes beside the labels; return the new YAML file.

    Its validation split becomes one image. YOLOv5 7.0.14 cannot train without validation (``--noval`` ends in an
    UnboundLocalError), and nothing here uses its figures.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(data.parent, folder, copy_function=shutil.copyfile)
    for each in (folder, *folder.rglob("*")):
        each.chmod(0o755 if each.is_dir() else 0o644)
    content = yaml.safe_load(data.read_text())
    first = min(path for path in (folder / content["val"]).iterdir() if path.suffix in (".jpg", ".png"))
    (folder / "one.txt").write_text(f"{first}\n")
    (folder / data.name).write_text(yaml.safe_dump({**content, "path": str(folder), "val": "one.txt"}))
    return folder / data.name


def environment(python: str, folder: Path) -> dict[str, str]:
    """Return the variables that let YOLOv5 start offline, and make its settings folder in ``folder``."""
    settings = folder / "settings"
    (settings / "Ultralytics").mkdir(parents=True, exist_ok=True)
    find = "import matplotlib as m; print(m.get_data_path())"
    done = subprocess.run([python, "-c", find], capture_output=True, text=True)
    font = Path(done.stdout.strip(), "fonts", "ttf", "DejaVuSans.ttf")
    if font.exists():  # YOLOv5 downloads Arial.ttf unless a file has its name
        for place in (settings, settings / "Ultralytics"):
            shutil.copyfile(font, place / "Arial.ttf")
    return {
        "PYTHONPATH": "",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # it reads its own checkpoint as a pickle
        "YOLO_OFFLINE": "1",
        "YOLO_AUTOINSTALL": "false",
        "YOLO_CONFIG_DIR": str(settings),
        "YOLOV5_CONFIG_DIR": str(settings),
    }


def train_command(
    python: str, data: Path, folder: Path, weights: str = "", model: str = "yolov5n", batch: int = 16
) -> list[str]:
    """Return the first words of a training on a new copy of the data set; no ``weights``: ``model`` from scratch."""
    start = ["--weights", weights] if weights else ["--cfg", f"{model}.yaml", "--weights", ""]
    copy = copy_data(data, folder / "data")
    size = ["--batch-size", str(batch)]
    return [python, "-m", "yolov5.train", "--data", str(copy), *start, *size, "--noplots"]
