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
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.history import plain, read_run
from yolofleet.storage.atomic import write_text
from yolofleet.support.text import screen_line

BATCH_PX, BATCH_BYTES = (1280, 800, 400), 1_000_000  # the picture of a training batch: sides to try, limit


def write_report(folder: RunFolder, target: Path | None = None) -> Path:
    """Write the report of a run from its other files, into its folder if there is no ``target``; return the path.

    Write the card of a training beside it, unless there is a ``target``.

    Raises:
        ConfigError: it is not the folder of a run. StorageError: the page cannot be written.
    """
    run = read_run(folder)
    if target is None and run["verb"] == "train":
        from yolofleet.runs.report.card import write_card  # not for a validation

        write_card(folder, run)
    run |= with_pictures(folder, run["figures"])
    target = target or folder.report
    write_text(target, page(f"{run['name']}: report", {"kind": "run", "run": run}))
    return target


def with_pictures(folder: RunFolder, figures: dict[str, Any], *, follow: bool = True) -> dict[str, Any]:
    """Return the parts of a report that hold pictures: ``figures`` and ``batch``, a training batch as JPEG in base64.

    Args:
        figures: of :func:`history.read_figures`.
        follow: False: a symbolic link counts as missing.
    """
    if images := figures.get("images"):  # only comparisons need images without a picture
        figures = figures | {"images": [image for image in images if image.get("jpeg")]}
    return {"figures": figures, "batch": _picture(folder.plots / "train_step0.jpg", follow)}


def _picture(path: Path, follow: bool) -> str:
    """Return a picture of the run folder as a smaller JPEG in base64; "" if the picture is missing."""
    from yolofleet.runs.report.draw import picture_base64

    if not path.is_file() or (path.parent.is_symlink() and not follow):
        return ""
    sizes = (picture_base64(path, side_px, follow=follow) for side_px in BATCH_PX)
    return next((jpeg for jpeg in sizes if len(jpeg) <= BATCH_BYTES), "")


@cache
def page_texts() -> dict[str, str]:
    """Return the style and the script of a page, and their digests for a Content-Security-Policy."""
    assets = files("yolofleet.runs.report") / "assets"
    texts = {name: (assets / name).read_text(encoding="utf-8") for name in _ASSETS}
    style = texts["uPlot.min.css"] + texts["page.css"]
    script = texts["uPlot.iife.min.js"] + texts["page.js"]
    return {
        "HTML": texts["page.html"],
        "STYLE": style,
        "SCRIPT": script,
        "STYLE_SHA256": _digest(style),
        "SCRIPT_SHA256": _digest(script),
    }


def policy(*, connect: str = "'none'") -> str:
    """Return the Content-Security-Policy of a page.

    Args:
        connect: where the script may send requests: ``'self'`` for the page of a board.
    """
    texts = page_texts()
    return (
        f"default-src 'none'; img-src data:; connect-src {connect}; style-src 'sha256-{texts['STYLE_SHA256']}'; "
        f"script-src 'sha256-{texts['SCRIPT_SHA256']}'; base-uri 'none'; form-action 'none'"
    )


def page(title: str, values: Mapping[str, Any], *, connect: str = "'none'") -> str:
    """Return the HTML of a report.

    Args:
        values: for assets/page.js; of any origin.
        connect: see :func:`policy`.
    """
    texts = page_texts()
    # In a script element only "<" can begin markup. json escapes the line separators too.
    data = json.dumps(plain(values), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        **texts,
        "TITLE": html.escape(screen_line(title)),
        "POLICY": policy(connect=connect),
        "DATA": data,
    }
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], texts["HTML"])


_ASSETS = ("page.html", "page.css", "page.js", "uPlot.iife.min.js", "uPlot.min.css")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
