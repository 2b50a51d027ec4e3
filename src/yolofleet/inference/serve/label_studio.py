"""Label Studio's protocol for ML backends: the tasks of a request, their images, and the results.

Source: the documentation of Label Studio and of label-studio-ml-backend. A task names its image as a ``data:`` URL, or by an
address or a path of Label Studio's server. No address is opened, unless it begins with the one of ``--label-studio-url``.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import json
import os
import re
import xml.parsers.expat
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from yolofleet.inference.predict.labelling import label_studio_prediction
from yolofleet.inference.predict.results import Prediction
from yolofleet.storage.request import Redirects, Refused, Transient, open_url
from yolofleet.support.errors import DataError
from yolofleet.support.text import listed, shown, size_text

MOST_TASKS = 1000
MOST_VALUES = 2_000_000  # of the JSON of a request: each takes 64 bytes of memory or more
MAX_INTERFACE_CHARACTERS = 1 << 20
FETCH_S = 20.0  # longest wait for Label Studio
KEY = "LABEL_STUDIO_API_KEY"
_ADDRESS = re.compile(r"(https?:/)?/[\w.:\[\]/~?&=%,;@+!$()*'#-]*")
_CONTROLS = {"RectangleLabels": "rectanglelabels", "PolygonLabels": "polygonlabels"}


@dataclass(frozen=True)
class Interface:
    """What a labelling interface calls its parts.

    Attributes:
        key: of the image in the data of a task; None: the only one.
        image: name of the image.
        controls: type of a result -> name of the control. The defaults are those of ``predict --save-as label-studio``.
        labels: type of a result -> the labels of the first control of that type; none if they come from the task.
    """

    key: str | None = None
    image: str = "image"
    controls: dict[str, str] = field(default_factory=lambda: {kind: kind for kind in _CONTROLS.values()})
    labels: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: str) -> Interface:
        """Return that of a labelling configuration (XML). Raise DataError if it cannot be read."""
        tags: dict[str, dict[str, str]] = {}  # the first one of each name
        labels: dict[str, set[str]] = {}
        inside = ""  # the control whose labels follow

        def start(tag: str, attributes: dict[str, str]) -> None:
            nonlocal inside
            inside = inside or (tag if tag in _CONTROLS and tag not in tags else "")
            if inside and tag == "Label":
                labels.setdefault(_CONTROLS[inside], set()).update(
                    map(attributes.get, ("value", "alias"), ("", ""))
                )
            tags.setdefault(tag, attributes)

        def end(tag: str) -> None:
            nonlocal inside
            inside = "" if tag == inside else inside

        parser = xml.parsers.expat.ParserCreate()
        parser.StartElementHandler, parser.EndElementHandler = start, end
        parser.StartDoctypeDeclHandler = _refuse_doctype
        try:
            parser.Parse(config[:MAX_INTERFACE_CHARACTERS], True)
        except (xml.parsers.expat.ExpatError, ValueError) as problem:
            what = f"label_config cannot be read: {problem}"
            raise DataError(
                what, hint="send the labelling interface of the project, or leave it out"
            ) from None
        image = tags.get("Image", {})
        controls = {kind: tags[tag].get("name", "") for tag, kind in _CONTROLS.items() if tag in tags}
        key = image.get("value", "").removeprefix("$") or None
        return cls(key, image.get("name", "image"), controls, labels)

    def missing(self, names: Sequence[str], *, masks: bool) -> list[str]:
        """Return the classes that it has no label for. Raise DataError if it has no place for what the network finds."""
        tag = "PolygonLabels" if masks else "RectangleLabels"
        hint = "add one with the names of the classes"
        if (kind := _CONTROLS[tag]) not in self.controls:
            raise DataError(f"the labelling interface has no <{tag}>", hint=hint)
        known = self.labels.get(kind) or {*names}
        missing = [name for name in names if name not in known]
        if len(missing) == len(names):
            what = f"<{tag}> of the labelling interface has no label for {listed([*map(shown, names)])}"
            raise DataError(what, hint=hint)
        return missing


def _refuse_doctype(*_: object) -> None:
    raise ValueError("it has a document type")


def read_request(body: bytes) -> tuple[list[Any], Interface]:
    """Return the tasks of a request, and the labelling interface. Raise DataError if it is something else."""
    try:
        if sum(map(body.count, (b"{", b"[", b","))) > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
        request = json.loads(body)
    except (ValueError, RecursionError) as problem:
        why = "it is too deep" if isinstance(problem, RecursionError) else problem
        raise DataError(f"the body is not JSON that can be read: {why}", hint='{"tasks": [...]}') from None
    tasks = request.get("tasks") if isinstance(request, dict) else None
    if not isinstance(tasks, list) or not 0 < len(tasks) <= MOST_TASKS:
        hint = "an image, or the field `file` of a form, needs another Content-Type than application/json"
        raise DataError(f"the JSON has no list `tasks` of 1 to {MOST_TASKS} tasks", hint=hint)
    config = request.get("label_config")
    return tasks, Interface.of(config) if config and isinstance(config, str) else Interface()


def picture_of(task: Any, what: str, key: str | None, prefix: str, limit_bytes: int) -> bytes:
    """Return the content of the image of a task.

    Args:
        what: the task, for messages.
        prefix: value of ``--label-studio-url``.

    Raises:
        DataError: the task has no image, its address is neither a ``data:`` URL nor below ``prefix``, or the image cannot be
            fetched.
    """
    data = task.get("data") if isinstance(task, dict) else None
    values = data if isinstance(data, dict) else {}
    value = (
        values.get(key)
        if key
        else next(iter(values.values()), None)
        if len(values) == 1
        else values.get("image")
    )
    if not isinstance(value, str):
        raise DataError(f"{what} has no image", hint='{"data": {"image": "data:image/jpeg;base64,..."}}')
    if value[:5].lower() == "data:":
        head, comma, content = value.partition(",")
        try:
            if not (comma and head.lower().endswith(";base64")):
                raise ValueError
            return base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError):
            raise DataError(
                f"{what} has a data: URL that is not base64", hint="data:image/jpeg;base64,..."
            ) from None
    return _fetched(_below(value, what, prefix), what, limit_bytes)


def _below(value: str, what: str, prefix: str) -> str:
    """Return the address of an image of Label Studio. Raise DataError if it is not below ``prefix``."""
    root = prefix.rstrip("/") + "/"
    address = root + value[1:] if value.startswith("/") else value
    path = urlsplit(address).path if _ADDRESS.fullmatch(address) else ".."
    has_dots = re.search(r"(^|/)(\.|%2e)+(/|$)", path, re.IGNORECASE)
    if not prefix or has_dots or not address.startswith(root):
        hint = f"start the server with --label-studio-url, and set {KEY}, or send data: URLs"
        raise DataError(
            f"{what} names an image that this server does not open: {shown(value[:200])}", hint=hint
        )
    return address


class _NoRedirects(Redirects):
    def redirect_request(self, *_: Any) -> None:
        raise Refused("it redirects to another address")


def _fetched(address: str, what: str, limit_bytes: int) -> bytes:
    """Return the bytes at an address. Raise DataError if they cannot be fetched, or the address redirects to another one."""
    key = os.environ.get(KEY)
    try:
        with open_url(
            address, {"Authorization": f"Token {key}"} if key else {}, FETCH_S, _NoRedirects()
        ) as answer:
            content: bytes = answer.read(limit_bytes + 1)
    except (Refused, Transient, OSError, http.client.HTTPException) as problem:
        raise DataError(
            f"{what}: Label Studio does not give its image: {problem}",
            hint=f"check --label-studio-url and {KEY}",
        ) from None
    if len(content) > limit_bytes:
        raise DataError(f"{what} has an image of more than {size_text(limit_bytes)}", hint="--max-mib")
    return content


def result_of(prediction: Prediction, interface: Interface, number: int, version: str) -> dict[str, Any]:
    """Return the prediction of a task, with the names of the interface."""
    found = label_studio_prediction(prediction, number)
    rows = [row for row in found["result"] if row["type"] in interface.controls]
    for row in rows:
        row |= {"from_name": interface.controls[row["type"]], "to_name": interface.image}
    return {**found, "result": rows, "model_version": version}
