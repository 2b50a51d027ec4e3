"""Run ``yolofleet export``: write a file for another runtime, and compare its output with the network."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from torch import Tensor

from yolofleet.config.hub_names import HUB_NAME
from yolofleet.config.schema.verbs import ExportConfig
from yolofleet.families.networks.detector import Detector
from yolofleet.families.recipe_class import TrainingRecipe, load_recipe_class
from yolofleet.families.table import FAMILIES
from yolofleet.families.weights.catalogue import resolve_weights
from yolofleet.families.weights.reader import load_weights
from yolofleet.families.weights.transfer import model_from_weights
from yolofleet.inference.export.export_metadata import ExportMetadata, Suppression
from yolofleet.inference.export.formats import FORMATS, Format, format_named, format_of, missing, need
from yolofleet.inference.export.graph import ExportGraph, ExportJob
from yolofleet.inference.export.opened import first_line, remember_export
from yolofleet.inference.export.runtime import image_size, open_exported
from yolofleet.inference.export.servers import Server, folder_of, server_of
from yolofleet.inference.export.verify import (
    batches_of,
    calibration_batches,
    check_difference,
    compare,
    compare_quantized,
    compare_suppressed,
    dataset_images,
    generated_images,
    sides_px,
)
from yolofleet.runs.report.console import Console, NullConsole
from yolofleet.storage.atomic import emit_json, make_folder, writing
from yolofleet.storage.foreign import check_links
from yolofleet.support import devices
from yolofleet.support.errors import CheckpointError, ConfigError, YolofleetError, install_hint
from yolofleet.support.text import quoted
from yolofleet.tasks.table import task_of


def export_command(config: ExportConfig) -> int:
    """Run the command; return the exit code. Raises as :func:`export_all`."""
    with Console(stream=sys.stderr if config.json_out == "-" else None) as console:
        found = export_all(config, console)
    emit_json(found[0] if len(found) == 1 else found, config.json_out)
    return 0


@devices.torch_defaults()
def export_all(config: ExportConfig, console: NullConsole) -> list[dict[str, Any]]:
    """Write one file for each of ``--format``; return the figures of each, see :func:`export`.

    Raises:
        YolofleetError: see :func:`export`; also for wrong settings and weights, before the first file is written.
    """
    formats = [format_named(name) for name in dict.fromkeys(config.format.split(","))]
    server = server_of(config)
    recipe_class = load_recipe_class(config.recipe_class)
    source = resolve_weights(config.weights)
    if format_of(source) is not None:
        raise ConfigError(f"{source} is an exported file", hint="export the weights that it came from")
    weights = load_weights(str(source), config.cfg)
    model = model_from_weights(weights)
    if config.nms and not model.needs_nms:
        raise ConfigError(
            f"--nms: boxes of {model.description.name} need no suppression", hint="leave out --nms"
        )
    task_of(model).check({"--nms": config.nms, "--int8": config.int8})
    for format in formats:  # what no package can mend comes before the packages to install
        check_format(format, config, model)
    for format in formats:
        need(format, format.writes, f"--format {format.name}")
        if config.int8:
            need(format, format.quantizes, f"--format {format.name} --int8")
    sides = [int(side) for side in config.img.split(",") if side]
    size = image_size(model, max(sides, default=0))
    size_hw = size_of(sides or [size.px], max(model.strides))
    metadata = metadata_of(model, config, size_hw)
    kind = "_half" * metadata.half + "_int8" * metadata.int8
    if config.out is not None and len(formats) > 1:
        raise ConfigError(
            f"--out {config.out} is one file, and --format names {len(formats)}",
            hint="leave out --out; the files are written beside the weights",
        )
    beside = _place(config.weights, source)
    outs = [config.out or format.path_beside(beside, kind) for format in formats]
    if server is not None:
        outs = [folder_of(config, outs[0].stem)]
        server.check(outs[0], model)
    else:
        for out, format in zip(outs, formats, strict=True):
            check_target(out, format)
        if config.out is None:
            check_beside(source)
    found = []
    for out, format in zip(outs, formats, strict=True):
        console.header(
            "yolofleet export",
            {
                "weights": f"{source}: {metadata.model}, {len(metadata.names)} classes",
                "format": f"{format.name}, {form_text(metadata, size_hw)}",
                "image size": size.text,
                "file": str(out),
            },
        )
        if size.note:
            console.note(size.note)
        if out.exists():
            console.note(f"{out} exists: this export replaces it")
        console.progress(f"writing and verifying {out.name}")
        figures = export(
            model,
            format,
            metadata,
            size_hw,
            out,
            simplify=config.simplify,
            data=config.data,
            calibration_images=config.calibration_images,
            recipe_class=recipe_class,
            server=server,
        )
        console.summary(verdict_text(figures), {"file": str(out), "size": f"{figures['mib']} MiB"})
        found.append(figures)
    return found


def check_format(format: Format, config: ExportConfig, model: Detector) -> None:
    """Raise if the format lacks an asked option, or cannot hold a network of this family, with the option or at all.

    Raises:
        ConfigError: it names the formats that can do both.
    """
    refused = FAMILIES[model.description.family].no_export
    if format.name in ("ncnn", "tflite") and len(task_of(model).outputs) > 1:
        raise ConfigError(
            f"--format {format.name}: its files have one output, and {model.task} need several",
            hint="--format onnx, torchscript or openvino",
        )
    asked = {
        "": (True, "name"),
        "--dynamic": (config.dynamic != "none", "dynamic"),
        "--nms": (config.nms, "nms"),
        "--half": (config.half, "half"),
        "--simplify": (config.simplify, "simplify"),
        "--int8": (config.int8, "quantizes"),
    }
    for flag, (wanted, ability) in asked.items():
        form = f"{format.name} {flag}".strip()
        possible, reason = bool(getattr(format, ability)), refused.get(form)
        if not wanted or (possible and not reason):
            continue
        others = [f for f in FORMATS.values() if not {f.name, f"{f.name} {flag}"} & refused.keys()]
        able = " or ".join(f.name for f in others if getattr(f, ability))
        raise ConfigError(
            f"--format {form} cannot hold {model.description.name}: {reason}"
            if possible
            else f"{format.name} does not support {flag}",
            hint=(f"leave out {flag}" + (f", or use --format {able}" if able else ""))
            if flag
            else "--format onnx, torchscript or openvino",
        )


def export(
    model: Detector,
    format: Format,
    metadata: ExportMetadata,
    size_hw: tuple[int, int],
    out: Path,
    *,
    simplify: bool = False,
    data: str = "",
    calibration_images: int = 0,
    recipe_class: TrainingRecipe | None = None,
    server: Server | None = None,
) -> dict[str, Any]:
    """Write a file in a temporary folder, verify it, and then move it to ``out``.

    Args:
        size_hw: height and width of the images for tracing and verification, pixels.
        data: data set whose images verify the file; "": generated images.
        calibration_images: images of the training split of ``data`` that find the ranges of an 8-bit file.
        server: makes ``out`` its folder, around the file.
    Returns:
        JSON-able figures: file, format, mib, verified, runtime, difference, ...

    Raises:
        NumericsError: the file differs from the network by more than rounding; it is removed.
        ConfigError, CheckpointError: a package is missing, or cannot convert the network.
        StorageError: a file cannot be written.
    """
    recipe_class = recipe_class or TrainingRecipe()
    images = dataset_images(recipe_class.dataset(data)) if data else generated_images()
    calibration = partial(calibration_batches, recipe_class, data, metadata, size_hw, calibration_images)
    job = ExportJob(ExportGraph(model, half=metadata.half), metadata, size_hw, simplify, calibration)
    make_folder(out.parent)
    hint = "free some space, or choose another --out; some converters also need room in TMPDIR"
    with (
        writing(out, hint),
        # Not in TMPDIR, which may be a small other disk. On Windows, a runtime may still have a file open.
        TemporaryDirectory(dir=out.parent, prefix=".yolofleet-export-", ignore_cleanup_errors=True) as folder,
    ):
        made = Path(folder, "made", out.name)
        file = made / server.model if server else made
        make_folder(file.parent)
        _write(format, job, file)
        figures: dict[str, Any] = {
            "file": str(out),
            "format": format.name,
            "mib": round(size_bytes(made.parent) / 2**20, 2),
            "facts": metadata.to_dict(),
            "pictures": data or "generated",
            "verified": False,
        }
        figures |= _verified(format, job, file, model, batches_of(metadata, size_hw, images))
        remember_export(format, file)
        if server is not None:
            server.finish(made, metadata)
        for part in made.parent.iterdir():
            replace(part, out.parent / part.name)
    return figures


def _write(format: Format, job: ExportJob, path: Path) -> None:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # some converters print
            format.module.write(job, path)
    except OSError:
        raise
    except Exception as problem:  # each converter has its own exceptions
        with TemporaryFile(dir=path.parent) as file:  # some converters do not say that the disk is full
            file.write(bytes(1 << 20))
        if isinstance(problem, YolofleetError):
            raise
        raise CheckpointError(
            f"{' and '.join(format.writes) or 'torch'} cannot convert this network: {first_line(problem)}",
            hint="--format onnx supports the most networks; another version of the package may support this one",
        ) from problem


def _verified(
    format: Format, job: ExportJob, path: Path, model: Detector, batches: list[Tensor]
) -> dict[str, Any]:
    """Return the figures of the verification, or the reason why the file cannot run here."""
    if absent := missing(format.runs):
        return {"why_not": f"{' and '.join(absent)} is not installed", "install": install_hint(format.name)}
    with TemporaryDirectory(dir=path.parent.parent, ignore_cleanup_errors=True) as temporary:
        plain_path = path
        if job.metadata.nms is not None:
            plain_path = Path(temporary, path.name)
            _write(format, job.without_nms(), plain_path)
        runtime, plain = (open_exported(each, trust=bool(format.danger)) for each in (path, plain_path))
        difference = compare(plain, model, batches)
        if job.metadata.int8:
            agreement = compare_quantized(plain, model, batches)
            agreement.check()
            if not agreement.boxes:
                why = "the network finds no boxes to compare in the images"
                return {"why_not": why, "install": "--data with images that have objects"}
        else:
            check_difference(difference, job.metadata.half)
        figures: dict[str, Any] = {
            "verified": True,
            "runtime": runtime.place,
            "images": sum(map(len, batches)),
            "predictions": difference.compared,
            "box_px": difference.place,
            "score": difference.score,
        }
        if difference.mask is not None:
            figures["mask"] = difference.mask
        if job.metadata.int8:
            figures |= {"agreement": agreement.share, "compared_boxes": agreement.boxes}
        if job.metadata.nms is not None:
            kept = compare_suppressed(runtime, plain, batches)
            check_difference(kept, job.metadata.half)
            figures |= {"boxes": kept.compared, "kept_box_px": kept.place, "kept_score": kept.score}
    return figures


def replace(made: Path, target: Path) -> None:
    """Move a file or folder to ``target``; replace files of the same name and keep the other files of a folder."""
    if not target.is_dir():
        made.replace(target)
        return
    for part in made.iterdir():
        replace(part, target / part.name)


def size_of(sides: Sequence[int], stride: int) -> tuple[int, int]:
    """Return height and width of one or two sides, rounded up to the stride, pixels."""
    height, width = (-(-side // stride) * stride for side in (sides[0], sides[-1]))
    return height, width


def metadata_of(model: Detector, config: ExportConfig, size_hw: tuple[int, int]) -> ExportMetadata:
    any_size = config.dynamic in ("size", "both")
    return ExportMetadata(
        family=model.description.family,
        task=model.task,
        outputs=task_of(model).outputs,
        model=model.description.name,
        names=model.names,
        strides=model.strides,
        size_hw=None if any_size else size_hw,
        sides_px=sides_px(size_hw, max(model.strides)) if any_size else None,
        batch=None if config.dynamic in ("batch", "both") else config.batch,
        trained_px=model.trained_px,
        needs_nms=model.needs_nms,
        assumed=dict(model.assumed),
        half=config.half,
        int8=config.int8,
        nms=Suppression(config.conf, config.iou, config.max_det, config.agnostic_nms) if config.nms else None,
    )


def check_target(out: Path, format: Format) -> None:
    """Raise ConfigError if ``out`` has the wrong suffix, or exists and is not an older export."""
    if not format.marker and out.suffix.lower() != format.suffix:
        raise ConfigError(
            f"--out {out}: a {format.name} file ends in {format.suffix}",
            hint=f"--out {quoted(f'{out}{format.suffix}')}",
        )
    if out.exists() and format_of(out) is not format and (out.is_dir() or format.marker):
        raise ConfigError(f"--out {out} exists and is not a {format.name} export", hint="choose another name")
    if format.marker and out.is_symlink():
        raise ConfigError(f"--out {out} is a symbolic link to {out.readlink()}", hint="choose another name")
    if out.is_dir():  # `replace` also writes into the folders in it
        check_links(out)


def _place(name: str, source: Path) -> Path:
    """Return the file beside which exports go: the weights, or one in the working folder if a cache has the weights of a name."""
    if Path(name).exists():
        return source
    of_hub = HUB_NAME.fullmatch(name)
    return Path(f"{of_hub[1].partition('/')[2]}.safetensors" if of_hub else source.name)


def check_beside(weights: Path) -> None:
    """Raise ConfigError if the files beside ``weights`` of a run are not in the folder of that run."""
    folder = weights.parent
    if folder.is_symlink() and (folder.parent / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} is a symbolic link to {folder.readlink()}, and the export would be written there",
            source=f"--weights {weights}",
            hint="--out FILE chooses the place",
        )


def size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def form_text(metadata: ExportMetadata, size_hw: tuple[int, int]) -> str:
    """Return a text such as ``batch 1, 640 x 640 px (height x width)``."""
    size = f"{size_hw[0]} x {size_hw[1]} px (height x width)"
    if metadata.size_hw is None:
        least, most = metadata.sides_px or sides_px(size_hw, metadata.stride)
        size = f"any multiple of {metadata.stride} px, verified from {least} to {most} px"
    parts = [f"batch {metadata.batch}" if metadata.batch else "any batch", size]
    if metadata.half:
        parts.append("computes in 16 bits")
    if metadata.int8:
        parts.append("computes in 8 bits")
    if metadata.nms:
        parts.append(f"with NMS (conf {metadata.nms.conf:g}, iou {metadata.nms.iou:g})")
    return ", ".join(parts)


def verdict_text(figures: dict[str, Any]) -> str:
    """Return the result of the verification as one line."""
    if not figures["verified"]:
        return f"exported, NOT VERIFIED: {figures['why_not']} (to verify: {figures['install']})"
    text = f"exported and verified: {figures['runtime']} against the network on {figures['images']} images ({figures['pictures']}): "
    if "agreement" in figures:
        return f"{text}{figures['agreement']:.0%} of {figures['compared_boxes']} boxes agree"
    placed = "boxes" if "mask" in figures else figures["facts"]["task"]
    text += f"{placed} within {figures['box_px']:.2g} px, scores within {figures['score']:.2g}"
    if "mask" in figures:
        text += f", masks within {figures['mask']:.2g} of their largest logit"
    if "boxes" not in figures:
        return text
    if not figures["boxes"]:
        return f"{text}; NMS could not be compared, because these images have no boxes; verify with --data"
    return f"{text}; after NMS {figures['boxes']} boxes, within {figures['kept_box_px']:.2g} px"
