"""`yolofleet weights`: inspect, verify, convert, list and download weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from yolofleet.cli.commands import JSON, QUIET, option, verb
from yolofleet.storage.atomic import emit_json
from yolofleet.support.errors import CheckpointError, ConfigError
from yolofleet.support.text import echo, inform, quoted

if TYPE_CHECKING:
    from yolofleet.families.networks.description import ModelDescription
    from yolofleet.families.weights.contents import Contents


CFG = option(
    "--cfg",
    "name or description file of the model, if the weights file does not contain it",
    default="",
    metavar="MODEL",
)


def _found(file: str) -> Path:
    """Return the weights file of a path, a published name, an address or the folder of a run; download it if needed."""
    from yolofleet.config.schema.fields import file_of_weights
    from yolofleet.families.weights.catalogue import resolve_weights

    return resolve_weights(file_of_weights(file))


@verb(
    "inspect",
    click.Argument(["file"]),
    CFG,
    JSON,
    help="Show the contents of FILE: weights and checkpoints of yolofleet, YOLOv5's .pt, Darknet's .weights, Paddle's "
    ".pdparams, or .onnx. Nothing in it is executed.",
)
def inspect_command(file: str, cfg: str, json_out: str) -> int:
    from yolofleet.families.weights.contents import contents, published_as

    path = _found(file)
    found = contents(path, _description(cfg))
    same, _, sha256 = published_as(path)
    facts: dict[str, Any] = {
        "file": str(path),
        "kind": found.kind,
        "mib": round(path.stat().st_size / 2**20, 2),
        "sha256": sha256,
    }
    if same:
        facts["published"] = f"as {same.item.name}: {same.item.origin}"
        facts["licence"] = same.item.licence
    facts |= facts_of(found)
    emit_json({**facts, "shapes": found.shapes}, json_out, indent=2)
    if json_out == "-":
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = [f"{key} {item}" for key, item in value.items()]
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        echo(f"{name:<12} {text}")
    return 0


def facts_of(found: Contents) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if found.weights is not None:
        header = found.weights.header
        facts = {
            "family": header.family,
            "model": header.description.name,
            "classes": header.nc,
            "names": list(header.names),
            "strides_px": list(header.strides),
            "img_px": header.img,
        }
        if header.assumed:
            facts["assumed"] = list(header.assumed.values())
    elif found.problem is not None:
        facts["unusable"] = f"{found.problem.what}; {found.problem.hint}"
    if found.interface:
        facts["interface"] = list(found.interface)
    if found.training:
        facts["training"] = dict(found.training)
    return {**facts, "tensors": len(found.shapes), "values": found.values}


@verb(
    "verify",
    click.Argument(["file"]),
    CFG,
    JSON,
    help="Check the digest, the tensors and the values of FILE, and compare it with the published file of that name. The "
    "exit code is 3 if a check fails.",
)
def verify_command(file: str, cfg: str, json_out: str) -> int:
    from yolofleet.families.weights.contents import contents, published_as
    from yolofleet.families.weights.format import non_finite, read_tensors
    from yolofleet.families.weights.reader import OURS, STATE

    path = _found(file)
    checks: list[tuple[str, bool, str]] = []  # what, whether, detail
    same, called, sha256 = published_as(path)
    found = contents(path, _description(cfg))
    if found.kind in (OURS, STATE):  # reading compares it
        checks.append(("digest", True, "the content has the SHA-256 that its header says"))
    if same or called:
        detail = f"it is {same.item.name} of {same.item.origin}" if same else f"sha256 {sha256}"
        if called and not same:
            detail += f" is not {called.item.digest} of {called.item.name}, {called.item.origin}"
        checks.append(("published", same is not None, detail))
    if found.weights is not None:
        header = found.weights.header
        partial = header.extra.get("partial")
        detail = f"{len(found.shapes)} tensors are those of {header.description.name}, {header.nc} classes"
        checks.append(("fits", not partial, str(partial or detail)))
    elif found.kind != STATE and found.problem is not None:
        checks.append(("fits", False, f"{found.problem.what}; {found.problem.hint}"))
    if found.weights is not None or found.kind == STATE:
        bad = non_finite(found.weights.tensors if found.weights is not None else read_tensors(path)[0])
        detail = f"not finite: {', '.join(bad[:3])}" if bad else f"{found.values:,} values"
        checks.append(("finite", not bad, detail))
    is_good = all(whether for _, whether, _ in checks)
    listed = [{"check": what, "ok": whether, "detail": detail} for what, whether, detail in checks]
    values = {"file": str(path), "kind": found.kind, "sha256": sha256, "ok": is_good, "checks": listed}
    emit_json(values, json_out, indent=2)
    if json_out != "-":
        echo(f"{path}: {found.kind}, sha256 {sha256}")
        for what, whether, detail in checks:
            echo(f"{what:<10} {'right' if whether else 'WRONG'}  {detail}")
    return 0 if is_good else CheckpointError.exit_code


@verb(
    "convert",
    click.Argument(["file"], metavar="IN"),
    click.Argument(["out"]),
    CFG,
    QUIET,
    help="Convert the weights file IN to OUT. The suffix of OUT chooses the format: .safetensors (yolofleet, with YOLOv5's "
    "tensor names), .weights (Darknet networks, with a .cfg in the same folder), .pdparams (PP-YOLOE). Without a suffix "
    "it is a folder for Hugging Face's transformers (RT-DETRv2, D-FINE, RF-DETR).",
)
def convert_command(file: str, out: str, cfg: str) -> int:
    from yolofleet.families.family import load
    from yolofleet.families.table import FAMILIES, weights_files
    from yolofleet.families.weights.reader import read_weights
    from yolofleet.families.weights.value import write_weights

    writers = {".safetensors": write_weights}
    for one in weights_files():
        if one.write:
            writers.setdefault(one.suffixes[0], load(one.write))
    target = Path(out)
    suffix = "/" if out.endswith("/") else target.suffix.lower() or "/"  # "/": a folder
    if suffix not in writers:
        hints = {
            ".pt": f"{target.with_suffix('.safetensors')}: it has YOLOv5's tensor names, so YOLOv5 takes it with "
            "model.load_state_dict(safetensors.torch.load_file(FILE), strict=False); a .pt is a program, which is "
            "not written",
            ".onnx": f"yolofleet export --weights {quoted(file)} --format onnx",
        }
        raise ConfigError(
            f"weights are not written as {suffix}",
            source="command line",
            hint=hints.get(suffix, f"OUT ends in {', '.join(writers)}"),
        )
    if target.exists():
        raise ConfigError(f"{target} exists", source="command line", hint="another name, or delete it")
    source = _found(file)
    weights = read_weights(source, _description(cfg))
    if "partial" in weights.header.extra:
        raise CheckpointError(
            f"{weights.header.extra['partial']}", hint="start from it: yolofleet train --weights FILE"
        )
    for assumption in weights.header.assumed.values():
        inform(f"note: {assumption}")
    own = FAMILIES[weights.header.family].weights_files  # several families may write files with one suffix
    mine = next((load(one.write) for one in own if suffix in one.suffixes and one.write), writers[suffix])
    mine(target, weights)
    echo(f"{target}: {weights.description.name}, {len(weights.tensors)} tensors")
    use = FAMILIES[weights.header.family].safetensors_use
    if suffix == ".safetensors" and use:
        echo(use.format(file=str(target)))
    return 0


@verb("list", JSON, help="List the published weights that --weights accepts by name.")
def list_command(json_out: str) -> int:
    from yolofleet.families.weights.catalogue import known_weights, weights_folder

    rows = [
        {
            "name": entry.name,
            "file": entry.item.name,
            "size_bytes": entry.item.size_bytes,
            "digest": entry.item.digest,
            "licence": entry.item.licence,
            "origin": entry.item.origin,
            "url": entry.item.urls[0],
            "path": str(entry.path) if entry.is_here else None,
        }
        for entry in known_weights()
    ]
    emit_json({"folder": str(weights_folder()), "weights": rows}, json_out, indent=2)
    if json_out == "-":
        return 0
    from yolofleet.runs.report.screen_table import ScreenTable

    table = ScreenTable("name", "MiB", "state", "licence", numbers=("MiB",))
    for entry in known_weights():
        size, item = entry.item.size_bytes, entry.item
        state = "here" if entry.is_here else "on request" if item.digest else "by hand"
        table.add_row(entry.name, f"{size / 2**20:.1f}" if size else "", state, item.licence.split(" (")[0])
    table.show()
    echo(CAPTION.format(folder=weights_folder()))
    return 0


@verb(
    "download",
    click.Argument(["name"]),
    option("--from", "copy a file that you downloaded by hand", name="source", default="", metavar="FILE"),
    option("--sha256", "SHA-256 that the file must have, if none is published", default="", metavar="HEX"),
    QUIET,
    help="Store the published weights NAME in the cache folder, check them, and print their path.",
)
def download_command(name: str, source: str, sha256: str) -> int:
    from yolofleet.families.weights.catalogue import checked_sha256, find_or_download, import_weights
    from yolofleet.storage.foreign import digest_of

    digest = checked_sha256(sha256) if sha256 else None
    if source:
        path = import_weights(name, Path(source), sha256=digest)
    else:
        path = find_or_download(name, sha256=digest)
    echo(f"{path}")
    if source:
        echo(f"sha256 {digest_of(path)}")
    return 0


@verb(
    "push",
    click.Argument(["run"]),
    click.Argument(["name"], metavar="hf:USER/NAME"),
    option("--public", "make a new repository public; the default is a private one", is_flag=True),
    QUIET,
    help="Upload the best weights of the training RUN, its card README.md and the picture in the card to the Hugging Face hub, and "
    "print the name to load them by. A new repository is private. Needs the extra hub, and a login: hf auth login, or HF_TOKEN.",
)
def push_command(run: str, name: str, public: bool) -> int:
    from yolofleet.cli.commands import named_run
    from yolofleet.families.weights.hub import OURS, push
    from yolofleet.runs.report.card import PICTURE, card
    from yolofleet.runs.report.folder import RunFolder
    from yolofleet.runs.report.history import read_run
    from yolofleet.storage.foreign import digest_of

    folder = RunFolder(named_run(run))
    weights = folder.weights / OURS
    if not weights.is_file():
        raise ConfigError(
            f"{folder.shown} has no weights/{OURS}",
            source="command line",
            hint="name the folder of a training",
        )
    picture = folder.path / PICTURE
    text = folder.card if folder.card.is_file() else card(folder, read_run(folder)).encode()
    files = [(folder.card.name, text), (OURS, weights)]
    files += [(PICTURE, picture)] if picture.is_file() else []
    inform(f"uploading to {name}: {', '.join(there for there, _ in files)}")
    pushed, address = push(name, files, public=public)
    echo(f"{address}\nsha256 {digest_of(weights)}\nuse it with --weights {pushed}")
    return 0


def _description(cfg: str) -> ModelDescription | None:
    if not cfg:
        return None
    from yolofleet.families.networks.description import describe

    return describe(cfg)


CAPTION = "here: in {folder}; on request: yolofleet downloads and checks it; by hand: no digest is known, download it yourself"
