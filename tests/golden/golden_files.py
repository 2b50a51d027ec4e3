"""The files that verbs leave behind and the figures that they give: names of files, keys, columns, tensors; no values."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from commands import DEADLINE_S, Outcome, called, environment, working_in
from golden_run import SMALLEST, STORED, copy_run
from safetensors import safe_open

from yolofleet.data.datasets.shapes import NAMES
from yolofleet.families.build import outline
from yolofleet.families.networks.description import describe, preset_names

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = "exp/weights/last.safetensors"
PLACES = {name: "<class>" for name in NAMES}  # keys that are data
OF_BUILDS = ("cuda", "rocm", "xpu")  # among versions: only builds of torch for GPUs have them


def keys(value: Any, path: str = "") -> Iterator[str]:
    """Return the path of each leaf: ``a.b``, and ``a[].b`` for the items of a list."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            if path.endswith(("versions", "reported")) and name in OF_BUILDS:
                continue
            name = PLACES.get(name, name)
            yield from keys(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from keys(item, f"{path}[]")
    else:
        yield path


def unique(lines: Iterable[str]) -> list[str]:
    return sorted(set(lines))


# -- files


def tree(run: Path, place: Path, before: dict[str, list[str]]) -> list[str]:
    """Return each file of a run with what is in it; ``before`` has those of earlier runs, and gets these."""
    found: dict[str, list[str]] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = re.sub(
            r"\d{6}(?=[._])|(?<=step-)\d+|(?<=_)\d+(?=\.)", "<number>", path.relative_to(run).as_posix()
        )
        for word in NAMES:
            name = name.replace(f"/{word}/", "/<class>/")
        found.setdefault(name, []).extend(inside(path))
    lines: list[str] = []
    for name, words in ((name, unique(words)) for name, words in found.items()):
        lines += [name, *(f"    {line}" for line in but_for(words, before))]
        before[f"{run.relative_to(place).as_posix()}/{name}"] = words
    return lines


def but_for(words: list[str], before: dict[str, list[str]]) -> list[str]:
    """Return the words of a file, or the earlier file that has most of them and the difference from it."""
    twin = min(before, key=lambda name: len({*words} ^ {*before[name]}), default="")
    other = before.get(twin, [])
    less, more = ([word for word in one if word not in two] for one, two in ((other, words), (words, other)))
    if len(words) < 4 or 2 * len(less + more) > len(words):
        return words
    return [f"as {twin}", *(f"- {word}" for word in less), *(f"+ {word}" for word in more)]


def inside(path: Path) -> list[str]:
    """Return keys, columns or groups of tensors of a file; nothing of other kinds."""
    if path.suffix == ".json":
        return list(keys(json.loads(path.read_text(encoding="utf-8"))))
    if path.suffix == ".jsonl":
        return [
            line for text in path.read_text(encoding="utf-8").splitlines() for line in event(json.loads(text))
        ]
    if path.suffix == ".yaml":
        return list(keys({**yaml.safe_load(path.read_text(encoding="utf-8")), "sources": "..."}))
    if path.suffix == ".csv":
        return [",".join(next(csv.reader(path.open(encoding="utf-8"))))]
    if path.suffix == ".txt":
        return [f"{len(line.split())} columns" for line in path.read_text(encoding="utf-8").splitlines()]
    return tensors_of(path) if path.suffix == ".safetensors" else []


def event(values: dict[str, Any]) -> Iterator[str]:
    for key in keys(values):
        yield f"event {values['kind']}: {key}"


def tensors_of(path: Path) -> list[str]:
    """Return groups of tensors with their counts, and the keys of the metadata."""
    with safe_open(str(path), "pt") as file:
        names, metadata = list(file.keys()), file.metadata() or {}
    groups = [re.sub(r"(?<=/).*(?=/)|(?<=^model/).*|(?<=^ema/).*|^model\..*", "*", name) for name in names]
    lines = [f"{groups.count(group)} tensors {group}" for group in groups]
    for key, text in metadata.items():
        value = {key: text} if key == "sha256" else {key: json.loads(text)}
        lines += [f"metadata {name}" for name in keys(value)]
    return lines


def done(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome.out + outcome.err
    return outcome


def folders_text(place: Path) -> str:
    """Return what training on two processes, validation and prediction leave behind.

    They are started by the scripts of the root folder; the default places are ``runs/<verb>/exp``.
    """
    copy_run(place)
    argv = ["--data", "set", "--cfg", "thin.yaml", *SMALLEST, "--epochs", "1", "--device", "cpu:2"]
    trained = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *argv],
        cwd=place,
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    small = ["--weights", WEIGHTS, "--img", "64", "--device", "cpu", "--conf", "0", "--max-det", "3"]
    with working_in(place):
        saved = ["--save-txt", "--save-conf", "--save-json"]
        done(called(*small, "--data", "set", "--workers", "0", *saved, script=ROOT / "val.py"))
        source = ["--source", "set/images/val"]
        done(called(*small, *source, *saved, "--save-csv", "--save-crop", script=ROOT / "detect.py"))
    lines, before = [], dict[str, list[str]]()
    for run in sorted((place / "runs").glob("*/*")):
        lines += [f"[{run.relative_to(place).as_posix()}]", *tree(run, place, before), ""]
    return "\n".join(lines)


# -- figures as JSON

QUICK_VERBS = (
    f"val --weights {WEIGHTS} --data set --img 64 --device cpu --workers 0 --no-plots",
    f"bench --weights {WEIGHTS} --img 64 --device cpu --passes 1 --threads 1",
    "doctor --quick --device cpu",
    "doctor --log nccl.log",
    "data check set --duplicates",
    "data stats set --img 64",
    "weights list",
    f"weights inspect {WEIGHTS}",
    "weights inspect exp/checkpoints/step-00000004.safetensors",
    f"weights verify {WEIGHTS}",
)
SELFTEST = "selftest --device cpu:2 --steps 2 --img 64"
LOG = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"


def figures_text(place: Path) -> str:
    """Return the keys of what verbs write with ``--json``."""
    copy_run(place)
    (place / "set" / "labels" / "train" / "000000.txt").write_text("7 0.5 0.5 0.1 0.1\n")
    (place / "nccl.log").write_text(LOG)
    with working_in(place):
        return "\n".join(figures_of(line) for line in QUICK_VERBS)


def selftest_text(place: Path) -> str:
    """As :func:`figures_text`, of the selftest: four minutes on two cores."""
    with working_in(place):
        return figures_of(SELFTEST)


def figures_of(line: str) -> str:
    found = called(*line.split(), "--json", "figures.json")
    assert Path("figures.json").exists(), found.err
    lines = keys(json.loads(Path("figures.json").read_text(encoding="utf-8")))
    Path("figures.json").unlink()
    short = (re.sub(r"^shapes\..*", "shapes.<tensor>", name) for name in lines)
    return "\n".join([f"[{line} --json]", *unique(short), ""])


# -- exported files


def torchscript_text(place: Path) -> str:
    """Return figures and facts of an export as TorchScript, which needs no other package."""
    return exported(place, "torchscript", [[]], torchscript_facts)


def onnx_text(place: Path) -> str:
    """Return figures and facts of an export as ONNX."""
    return exported(place, "onnx", [[], ["--nms"]], onnx_facts)


def exported(
    place: Path, format: str, variants: list[list[str]], facts: Callable[[Path], Iterator[str]]
) -> str:
    copy_run(place)
    lines = []
    with working_in(place):
        for more in variants:
            name = f"net{''.join(more).replace('--', '-')}.{format}"
            argv = ["--weights", WEIGHTS, "--format", format, "--img", "64", *more, "--out", name]
            done(called(*argv, "--json", "figures.json", script=ROOT / "export.py"))
            figures = json.loads(Path("figures.json").read_text(encoding="utf-8"))
            lines += [f"[export --format {' '.join([format, *more])} --json]", *unique(keys(figures)), ""]
            lines += [f"[{name}]", *unique(facts(Path(name))), ""]
    return "\n".join(lines)


def torchscript_facts(path: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as file:
        for name in file.namelist():
            where = name.partition("/extra/")[2]
            if where:
                yield from (f"extra {where}: {key}" for key in keys(json.loads(file.read(name))))


def onnx_facts(path: Path) -> Iterator[str]:
    import onnx

    model = onnx.load(str(path))
    for opset in model.opset_import:
        yield f"opset {opset.domain or 'onnx'} {opset.version}"
    for kind, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            sides = [side.dim_param or side.dim_value for side in value.type.tensor_type.shape.dim]
            yield f"{kind} {value.name} {sides}"
    for entry in model.metadata_props:
        yield from (f"metadata {entry.key}: {key}" for key in keys(json.loads(entry.value)))


# -- networks


def network_line(name: str) -> str:
    description = describe(name)
    network = outline(description, 80)
    rows = [f"{key} {value.dtype} {tuple(value.shape)}" for key, value in network.state_dict().items()]
    digest = hashlib.sha256("\n".join(sorted(rows)).encode()).hexdigest()
    count = sum(value.numel() for value in network.parameters())
    return f"{name}  {description.family}  {count}  {len(rows)}  {digest[:16]}"


def networks_text(_: Path) -> str:
    """Return every built-in network's family, number of parameters and tensors, and a digest of names, types and
    shapes of its tensors, which weights files hold; and those of the stored run's network in full."""
    lines = ["[model: family, parameters, tensors, SHA-256 of their names, types and shapes]"]
    lines += map(network_line, preset_names())
    lines += ["", "[tensors in weights of the stored run]"]
    with safe_open(str(STORED / WEIGHTS), "pt") as file:
        for name in sorted(file.keys()):
            part = file.get_slice(name)
            lines.append(f"{name}  {part.get_dtype()}  {part.get_shape()}")
    return "\n".join(lines) + "\n"
