"""``yolofleet export``: write a file for another runtime, then compare what it gives with the network."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from torch import Tensor

from yolofleet.checkpoint.catalogue import resolve_weights
from yolofleet.checkpoint.reader import load_weights
from yolofleet.checkpoint.weights import model_from_weights
from yolofleet.config.schema import ExportConfig
from yolofleet.errors import CheckpointError, ConfigError, StorageError, YolofleetError
from yolofleet.export.export_metadata import ExportMetadata, Suppression
from yolofleet.export.formats import FORMATS, Format, format_named, format_of, install_line, missing, need
from yolofleet.export.graph import ExportGraph, ExportJob
from yolofleet.export.runtime import Runtime, open_exported
from yolofleet.export.trial import first_line
from yolofleet.export.verify import (
    batches_of,
    compare,
    compare_suppressed,
    generated_pictures,
    real_pictures,
)
from yolofleet.files.atomic import emit_json, make_folder
from yolofleet.models.detector import Detector
from yolofleet.models.fuse import fuse
from yolofleet.report.console import Console


def export_command(config: ExportConfig) -> int:
    """Run the verb; returns the exit code.

    Raises:
        YolofleetError: anything foreseen; NumericsError when the file does not compute what the network does.
    """
    format = format_named(config.format)
    check_abilities(format, config)
    need(format, format.writes, f"--format {format.name}")
    source = resolve_weights(config.weights)
    if format_of(source) is not None:
        raise ConfigError(f"{source} is an exported file", hint="export the weights that it was made from")
    weights = load_weights(str(source), config.cfg)
    model = model_from_weights(weights)
    size_hw = size_of(config.img, weights.header.img, max(model.strides))
    facts = facts_of(model, config, size_hw)
    out = config.out or format.path_beside(source)
    check_target(out, format)
    with Console(stream=sys.stderr if config.json_out == "-" else None) as console:
        console.header(
            "yolofleet export",
            {
                "weights": f"{source}: {facts.model}, {len(facts.names)} classes",
                "format": f"{format.name}, {form_text(facts, size_hw)}",
                "file": str(out),
            },
        )
        figures = export(model, format, facts, size_hw, out, simplify=config.simplify, data=config.data)
        console.summary(verdict_text(figures), {"file": str(out), "size": f"{figures['mib']} MiB"})
    emit_json(figures, config.json_out)
    return 0


def export(
    model: Detector,
    format: Format,
    facts: ExportMetadata,
    size_hw: tuple[int, int],
    out: Path,
    *,
    simplify: bool = False,
    data: str = "",
) -> dict[str, Any]:
    """Write, compare, and only then put into place.

    Args:
        size_hw: of the images that are traced and compared, pixels.
        data: data set whose pictures are compared; "" = generated ones.
    Returns:
        JSON-able figures: file, format, mib, verified, runtime, difference, ...

    Raises:
        NumericsError: the file differs from the network by more than rounding; it is removed.
        ConfigError, CheckpointError: a package is missing or refuses. StorageError: the disk refused.
    """
    pictures = real_pictures(data) if data else generated_pictures()
    job = ExportJob(ExportGraph(model, half=facts.half), facts, size_hw, simplify)
    make_folder(out.parent)
    try:
        # beside the file, not in TMPDIR, which may be another disk and small; a runtime may still hold a file on Windows
        with TemporaryDirectory(
            dir=out.parent, prefix=".yolofleet-export-", ignore_cleanup_errors=True
        ) as temporary:
            made = Path(temporary, "made", out.name)
            made.parent.mkdir()
            _write(format, job, made)
            figures: dict[str, Any] = {
                "file": str(out),
                "format": format.name,
                "mib": round(size_bytes(made.parent) / 2**20, 2),
                "facts": json.loads(facts.to_json()),
                "pictures": data or "generated",
                "verified": False,
            }
            figures |= _verified(format, job, made, model, batches_of(facts, size_hw, pictures))
            for file in made.parent.iterdir():
                replace(file, out.parent / file.name)
    except OSError as problem:
        raise StorageError(
            f"cannot write {out}: {problem.strerror or problem}",
            hint="free some space, or choose another --out; some converters also need room in TMPDIR",
        ) from None
    return figures


def _write(format: Format, job: ExportJob, path: Path) -> None:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some converters talk
            format.module.write(job, path)
    except OSError:
        raise
    except Exception as problem:  # each converter has exceptions of its own
        _check_disk(path.parent)
        if isinstance(problem, YolofleetError):
            raise
        raise CheckpointError(
            f"{' and '.join(format.writes) or 'torch'} cannot convert this network: {first_line(problem)}",
            hint="--format onnx has the fewest limits; another version of the package may know more",
        ) from problem


def _check_disk(folder: Path) -> None:
    """Raise OSError if ``folder`` takes no more data: some converters fail then without saying why."""
    with TemporaryFile(dir=folder) as file:
        file.write(bytes(1 << 20))


def _verified(
    format: Format, job: ExportJob, path: Path, model: Detector, batches: list[Tensor]
) -> dict[str, Any]:
    """What running the file showed, or why it was not run."""
    if absent := missing(format.runs):
        return {"why_not": f"{' and '.join(absent)} is not installed", "install": install_line(format)}
    with TemporaryDirectory(dir=path.parent.parent, ignore_cleanup_errors=True) as temporary:
        plain_path, plain_job = path, job
        if job.facts.nms is not None:
            plain_job = dataclasses.replace(job, facts=dataclasses.replace(job.facts, nms=None))
            plain_path = Path(temporary, path.name)
            _write(format, plain_job, plain_path)
        try:
            runtime, plain = open_exported(path, is_ours=True), open_exported(plain_path, is_ours=True)
        except ConfigError as problem:  # it runs elsewhere
            return {"why_not": problem.what, "install": problem.hint}
        difference = compare(plain, fuse(model), batches)
        difference.check(job.facts.half)
        if format.name == "torchscript":  # its users load it with torch.jit, we do not
            runtime = Runtime(path, format.module.open_with_torch(path, job.facts))
            difference = compare(runtime, fuse(model), batches)
            difference.check(job.facts.half)
        figures: dict[str, Any] = {
            "verified": True,
            "runtime": runtime.place,
            "images": difference.images,
            "predictions": difference.boxes,
            "box_px": difference.box_px,
            "score": difference.score,
        }
        if job.facts.nms is not None:
            kept = compare_suppressed(runtime, plain, batches)
            kept.check(job.facts.half)
            figures |= {"boxes": kept.boxes, "kept_box_px": kept.box_px, "kept_score": kept.score}
    return figures


def replace(made: Path, target: Path) -> None:
    """Put a file or folder in the place of an older one; what else lies in an older folder stays."""
    if not target.is_dir():
        made.replace(target)
        return
    for part in made.iterdir():
        replace(part, target / part.name)


def check_abilities(format: Format, config: ExportConfig) -> None:
    """
    Raises:
        ConfigError: something was asked for that the format cannot do.
    """
    asked = {
        "--dynamic": (config.dynamic != "none", format.dynamic, "dynamic"),
        "--nms": (config.nms, format.nms, "nms"),
        "--half": (config.half, format.half, "half"),
        "--simplify": (config.simplify, format.simplify, "simplify"),
    }
    for flag, (wanted, possible, ability) in asked.items():
        if wanted and not possible:
            able = ", ".join(f.name for f in FORMATS.values() if getattr(f, ability))
            raise ConfigError(
                f"{flag} is not possible for {format.name}", hint=f"leave it out; {able} can do it"
            )


def size_of(img: str, trained_px: int, stride: int) -> tuple[int, int]:
    """Height and width of ``--img``, rounded up to the stride."""
    sides = [int(side) for side in img.split(",")] if img else [trained_px]
    height, width = (-(-side // stride) * stride for side in (sides[0], sides[-1]))
    return height, width


def facts_of(model: Detector, config: ExportConfig, size_hw: tuple[int, int]) -> ExportMetadata:
    return ExportMetadata(
        family=model.description.family,
        model=model.description.name,
        names=model.names,
        strides=model.strides,
        size_hw=None if config.dynamic in ("size", "both") else size_hw,
        batch=None if config.dynamic in ("batch", "both") else config.batch,
        half=config.half,
        nms=Suppression(config.conf, config.iou, config.max_det, config.agnostic_nms) if config.nms else None,
    )


def check_target(out: Path, format: Format) -> None:
    """
    Raises:
        ConfigError: another suffix, or something else lies there.
    """
    if not format.marker and out.suffix.lower() != format.suffix:
        raise ConfigError(
            f"--out {out}: a {format.name} file ends in {format.suffix}", hint=f"--out {out}{format.suffix}"
        )
    if out.exists() and format_of(out) is not format and (out.is_dir() or format.marker):
        raise ConfigError(f"--out {out} is there and no {format.name} export", hint="another name")


def size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def form_text(facts: ExportMetadata, size_hw: tuple[int, int]) -> str:
    """``batch 1, 640 x 640 px``, with what is free and what is inside."""
    size = f"{size_hw[0]} x {size_hw[1]} px (height x width)"
    if facts.size_hw is None:
        size = f"any size in steps of {facts.stride} px"
    parts = [f"batch {facts.batch}" if facts.batch else "any batch", size]
    if facts.half:
        parts.append("16 bits inside")
    if facts.nms:
        parts.append(f"suppression inside (conf {facts.nms.conf:g}, iou {facts.nms.iou:g})")
    return ", ".join(parts)


def verdict_text(figures: dict[str, Any]) -> str:
    """One line on what running the file showed."""
    if not figures["verified"]:
        return f"exported, NOT VERIFIED: {figures['why_not']} (to verify: {figures['install']})"
    text = (
        f"exported and verified: {figures['runtime']} against the network on {figures['images']} pictures "
        f"({figures['pictures']}): boxes within {figures['box_px']:.2g} px, scores within {figures['score']:.2g}"
    )
    if "boxes" not in figures:
        return text
    if not figures["boxes"]:
        return f"{text}; no boxes there whose suppression could be compared: --data with pictures of yours has some"
    return f"{text}; after suppression {figures['boxes']} boxes, within {figures['kept_box_px']:.2g} px"
