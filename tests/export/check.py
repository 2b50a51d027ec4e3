"""Export a small network of every family to one format and compare it; run by ``environments.py``.

python tests/export/check.py tflite
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from exported import SIZE_HW, metadata_of, network
from small_data import yolo_set

from yolofleet.inference.export.exporter import export
from yolofleet.inference.export.formats import FORMATS


def main(format: str) -> int:
    for name in ("yolov5n", "yolov3-tiny", "darknet-yolov3-tiny", "ppyoloe-s"):
        model = network(name)
        began_s = time.monotonic()
        with TemporaryDirectory() as folder:
            out = Path(folder, "model" + FORMATS[format].suffix)
            figures = export(model, FORMATS[format], metadata_of(model), SIZE_HW, out)
            quantizes = bool(FORMATS[format].quantizes) and model.description.family != "darknet"
            if quantizes:
                data = str(yolo_set(Path(folder, "set"), {f"{i}": "0 0.5 0.5 0.4 0.4\n" for i in range(6)}))
                int8 = dataclasses.replace(metadata_of(model), int8=True)
                small = export(model, FORMATS[format], int8, SIZE_HW, out, data=data, calibration_images=4)
        if not figures["verified"]:
            print(f"{format} {name}: written, not run: {figures['why_not']}", flush=True)
            return 1
        result = f"boxes within {figures['box_px']:.1e} px, scores within {figures['score']:.1e} ({figures['runtime']})"
        if quantizes:
            result += f", 8 bits: {small['mib']} instead of {figures['mib']} MiB, {small['agreement']:.0%} of the boxes agree"
        print(f"{format} {name}: {result}, {time.monotonic() - began_s:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
