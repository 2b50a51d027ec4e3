"""`yolofleet weights`: what a file holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from yolofleet.cli.commands import Command
from yolofleet.errors import StorageError


def inspect(file: str, json_out: str) -> int:
    """Header, and number and size of the tensors; ``--json`` has every tensor's shape."""
    from yolofleet.checkpoint.reader import read_weights, resolve_weights

    path = resolve_weights(file)
    weights = read_weights(path)
    header = weights.header
    shapes = {name: list(tensor.shape) for name, tensor in weights.tensors.items()}
    facts: dict[str, Any] = {
        "file": str(path),
        "mib": round(Path(path).stat().st_size / 2**20, 2),
        "family": header.family,
        "model": header.description.name,
        "classes": header.nc,
        "names": list(header.names),
        "strides_px": list(header.strides),
        "img_px": header.img,
        "tensors": len(shapes),
        "values": sum(math.prod(shape) for shape in shapes.values()),
    }
    if json_out:
        text = json.dumps({**facts, "shapes": shapes}, indent=2, ensure_ascii=False)
        _write(text, json_out)
        if json_out == "-":
            return 0
    for name, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        click.echo(f"{name:<12} {text}")
    return 0


def _write(text: str, json_out: str) -> None:
    if json_out == "-":
        click.echo(text)
        return
    try:
        Path(json_out).write_text(text + "\n", encoding="utf-8")
    except OSError as problem:
        raise StorageError(f"{json_out} cannot be written: {problem.strerror}") from None


inspect_command = Command(
    "inspect",
    params=[
        click.Argument(["file"]),
        click.Option(
            ["--json", "json_out"], default="", metavar="FILE", help="as JSON to a file, or - for here"
        ),
    ],
    callback=inspect,
    help="Show what the weights file FILE holds (.safetensors, or a foreign .pt). Nothing in it is executed.",
)
