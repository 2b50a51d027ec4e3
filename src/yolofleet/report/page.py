"""Write the report of a run, or a comparison of runs, as one HTML file that needs no network.

The page is a template with a style sheet, uPlot (MIT, see assets/uPlot-LICENSE.txt), our script and the values as JSON.
The script puts values into the page as text, never as HTML. A Content-Security-Policy in the page lets the browser run this
script only, and forbids it to load or send anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from yolofleet.files.atomic import write_text
from yolofleet.report.folder import RunFolder
from yolofleet.report.history import plain, read_run
from yolofleet.text import screen_line

BATCH_PX, BATCH_BYTES = (1280, 800, 400), 1_000_000  # the picture of a training batch: sides to try, limit


def write_report(folder: RunFolder) -> Path:
    """Write ``report.html`` into the folder of a run, from its other files; return the path.

    Raises:
        ConfigError: it is not the folder of a run. StorageError: a file cannot be read or written.
    """
    run = read_run(folder)
    run["batch"] = _picture(folder.plots / "train_step0.jpg")
    if images := run["figures"].get("images"):  # only comparisons need images without a picture
        run["figures"]["images"] = [image for image in images if image.get("jpeg")]
    write_text(folder.report, page(f"{run['name']}: report", {"kind": "run", "run": run}))
    return folder.report


def _picture(path: Path) -> str:
    """Return a picture of the run folder as a smaller JPEG in base64; "" if the picture is missing."""
    from yolofleet.report.draw import picture_base64

    sizes = (picture_base64(path, side_px) for side_px in BATCH_PX) if path.is_file() else ()
    return next((jpeg for jpeg in sizes if len(jpeg) <= BATCH_BYTES), "")


def page(title: str, values: Mapping[str, Any]) -> str:
    """Return the HTML of a report.

    Args:
        values: for assets/page.js; of any origin.
    """
    assets = files("yolofleet.report") / "assets"
    texts = {name: (assets / name).read_text(encoding="utf-8") for name in _ASSETS}
    style = texts["uPlot.min.css"] + texts["page.css"]
    script = texts["uPlot.iife.min.js"] + texts["page.js"]
    # In a script element only "<" can begin markup. json escapes the line separators too.
    data = json.dumps(plain(values), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(screen_line(title)),
        "STYLE_SHA256": _digest(style),
        "SCRIPT_SHA256": _digest(script),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": data,
    }
    return re.sub("@([A-Z0-9_]+)@", lambda match: parts[match[1]], texts["page.html"])


_ASSETS = ("page.html", "page.css", "page.js", "uPlot.iife.min.js", "uPlot.min.css")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
