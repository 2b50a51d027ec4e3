"""Names for `torch.hub.load(FOLDER, NAME, source="local")`; `yolofleet.cli.hub` has what they return."""

import sys
from importlib.util import find_spec
from pathlib import Path

dependencies = ["torch", "numpy", "cv2", "safetensors", "pydantic"]

if find_spec("yolofleet") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))


def _published(name):
    def load(pretrained=True, device=None):
        from yolofleet.cli.hub import published

        return published(name, pretrained, device)

    load.__doc__ = f"Return {name} with its published weights; `device` as in `yolofleet predict --device`."
    return load


def custom(path, device=None, trust=False):
    """Return the model of a weights file, an exported file (`trust` as in `yolofleet predict --trust`) or the folder of a run."""
    from yolofleet.cli.hub import HubModel

    return HubModel(path, device, trust)


for _size in "nsmlx":
    for _name in (f"yolov5{_size}", f"yolov5{_size}6"):
        globals()[_name] = _published(_name)
