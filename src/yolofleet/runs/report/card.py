"""Write the card of a training: ``README.md`` with the front matter that model hubs read.

Class names, paths and settings may be of any origin. In the YAML they are values that PyYAML quotes, in the Markdown
:func:`_plain` escapes them, and no secret that :class:`Redaction` recognises gets in.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from yolofleet.config.hub_names import HUB_NAME
from yolofleet.config.resolve import DEFAULT
from yolofleet.config.schema import flag_of, group_of
from yolofleet.config.stored.job import load_job
from yolofleet.runs.report.folder import RunFolder
from yolofleet.runs.report.history import mapping
from yolofleet.runs.report.results import METRICS, OF_BOXES
from yolofleet.runs.report.sealed import is_replaceable, sealed
from yolofleet.storage.atomic import write_text
from yolofleet.storage.foreign import digest_of
from yolofleet.storage.yaml_lines import write_yaml
from yolofleet.support.errors import ConfigError
from yolofleet.support.redaction import Redaction
from yolofleet.support.text import inform, screen_line

BEST = "best.safetensors"
PICTURE, LEAST_SCORE = "plots/val_predictions.jpg", 0.25  # of the predictions that it shows
MOST_CLASSES = 100  # rows of the table of classes
MOST_LETTERS = 100  # of a name
# settings of execution that say where a run computes, which the result does not depend on
_OF_FLEET = ("device", "workers", "threads", "shares", "stage", "parallel", "timeout_s", "stall_s")
_REPEATED = ("input", "your own code", "length and batch size", "method", "validation", "execution")
# licence of start weights -> the hub's name of it, and what follows for the result
_LICENCES = (
    ("AGPL-3.0", "agpl-3.0", "The result is built with these weights, and their authors ask that such work "
     "has their licence. Publish it, or a service with it, under AGPL-3.0, or train from other weights."),
    ("Apache-2.0", "apache-2.0", "You may publish the result, also under other terms, with a notice of the "
     "start weights and their licence."),
    ("public domain", "other", "The start weights set no conditions."),
)  # fmt: skip
_USE = (
    "Install yolofleet from a checkout of its repository: it is not on PyPI yet. From a repository on the Hugging Face hub, "
    "`--weights hf:USER/NAME` takes the file by name."
)
_UNKNOWN = "yolofleet does not know the licence of this file. Ask its authors before you publish the result."
_SCRATCH = (
    "The run started from random weights, so no licence of other weights applies. Choose a licence for the result, and "
    "replace `unknown` in the first lines of this file."
)


def write_card(folder: RunFolder, run: Mapping[str, Any]) -> None:
    """Write the card of a run, unless its place has a file that a person wrote or changed.

    Args:
        run: values of :func:`yolofleet.runs.report.history.read_run`.
    Raises:
        StorageError: it cannot be written.
    """
    if is_replaceable(folder.card):
        write_text(folder.card, sealed(card(folder, run)))
    else:
        inform(f"{folder.card} stays as it is: it is not a card as yolofleet wrote it; delete it to get one")


def card(folder: RunFolder, run: Mapping[str, Any]) -> str:
    """Return the text of the card: front matter, figures, data, weights, licence, and the command that repeats the run."""
    hide = Redaction.of_this_account()
    start, data = mapping(run["inputs"].get("weights")), mapping(run["inputs"].get("data"))
    words, is_exact, named_data = _command(folder, hide)
    licence, follows = _licence(start)
    kind, best = _kind(run["task"]["columns"].values()), _best_figures(run)
    front: dict[str, Any] = {"license": licence}
    if licence == "other":
        front["license_name"] = screen_line(start.get("licence"), limit=MOST_LETTERS)
    front |= {"library_name": "yolofleet", "tags": ["yolofleet", *([kind] if kind else [])]}
    front |= {"pipeline_tag": kind} if kind else {}
    front |= {"base_model": match[1]} if (match := HUB_NAME.fullmatch(str(start.get("given")))) else {}
    data_name = re.sub(r"[^\w.-]+", "-", named_data)[:MOST_LETTERS].strip(".-") or "unnamed"
    if best:
        measured = [{"type": name, "value": value} for name, value in best.items()]
        place = {"name": data_name, "type": data_name, "split": "val"}
        result = {"task": {"type": kind or "other"}, "dataset": place, "metrics": measured}
        front["metrics"] = list(best)
        front["model-index"] = [{"name": screen_line(run["name"], limit=MOST_LETTERS), "results": [result]}]
    parts = [f"---\n{write_yaml(front)}---\n\n# {_plain(run['name'])}"]
    parts += [_summary(run, kind, hide), *([_figures(run, best)] if best else [])]
    if (folder.path / PICTURE).is_file():
        parts.append(f"Predictions with a score of at least {LEAST_SCORE} on images of the validation:")
        parts.append(f"![Predictions on images of the validation]({PICTURE})")
    parts += _classes(run)
    images, rows = mapping(run["inputs"].get("data_images")), []
    for split, digest in data.items():
        count = f", {_plain(images[split])} images" if split in images else ""
        rows.append([f"index of `{_code(split)}`{count}, BLAKE2b", f"`{_code(digest)}`"])
    if (best_file := folder.weights / BEST).is_file():
        rows.append([f"`weights/{BEST}`, SHA-256 of the file", f"`{digest_of(best_file)}`"])
    if same := run["results"].get("weights_sha256"):
        rows.append(["tensors of the last weights, SHA-256", f"`{_code(same)}`"])
    parts += ["## Data and weights", f"Data set: {_plain(named_data)}.", _table(["what", "digest"], rows)]
    parts += ["## Use", _USE, _fenced("yolofleet predict --weights best.safetensors --source FOLDER")]
    parts += ["## Licence", _start_text(start, hide), follows]
    parts += ["## Repeat this training", _fenced(words), _same_bits(run, is_exact)]
    fleet, versions = (mapping(run["results"].get(name)) for name in ("fleet", "versions"))
    versions = {**versions, "processor": mapping(run["inputs"].get("kernels")).get("device", "unknown")}
    rows = [[_plain(name), _plain(version)] for name, version in versions.items()]
    rows.append(["fleet", _fleet_text(fleet)])
    return "\n\n".join([*parts, _table(["made with", "version"], rows)]) + "\n"


def _kind(figures: Any) -> str:
    """Return the hub's name of the task with these figures; "" for a task of a user."""
    figures = set(map(str, figures))
    if any(name.startswith("mask ") for name in figures):
        return "image-segmentation"
    return "object-detection" if figures == set(OF_BOXES.columns.values()) else ""


def _best_figures(run: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of the best weights, by their names; empty without a validation."""
    curves, best = run["curves"], run["best"]
    if not best:
        return {}
    epochs = curves.get("epoch", [])
    at = epochs.index(best["epoch"]) if best["epoch"] in epochs else -1
    columns = {c: f for c, f in run["task"]["columns"].items() if at >= 0 and c in curves}
    found = {c.removeprefix(METRICS): curves[c][at] for c in columns if curves[c][at] is not None}
    return found or {run["task"]["main"]: best["main"]}


def _summary(run: Mapping[str, Any], kind: str, hide: Redaction) -> str:
    what = {"object-detection": "Finds boxes of objects", "image-segmentation": "Finds masks of objects"}
    names = run["figures"].get("names") or []
    some = ", ".join(_plain(name) for name in names[:20])
    of = f" of {len(names)} class{'es' * (len(names) != 1)}: {some}" if names else ""
    of += f" and {len(names) - 20} more" if len(names) > 20 else ""
    network = dict((row[0], row[1]) for row in run["settings"]["settings"])
    model = network.get("model") or network.get("cfg") or network.get("weights") or "a network of its own"
    ended = "" if run["finished"] else " The run has not finished: the figures are those so far."
    return (
        f"{what.get(kind, 'A network with a task of its own')}{of}. Trained from {_plain(hide(Path(model).name))} by "
        f"yolofleet, {_plain(run['results'].get('steps') or 0)} steps.{ended}"
    )


def _figures(run: Mapping[str, Any], best: Mapping[str, float]) -> str:
    rows = [[_plain(name), f"{value:.4f}"] for name, value in best.items()]
    which = f"The validation of epoch {run['best']['epoch']}, whose weights are `weights/best.safetensors`:"
    return f"## Figures\n\n{which}\n\n{_table(['figure', 'value'], rows)}"


def _classes(run: Mapping[str, Any]) -> list[str]:
    """Return the table of classes of the last validation, as report.json has it."""
    per_class = {name: mapping(row) for name, row in mapping(run["figures"].get("per_class")).items()}
    columns = list(next(iter(per_class.values()), {}))
    if not columns:
        return []
    first = list(per_class.items())[:MOST_CLASSES]
    rows = [[_plain(name), *(_number(row.get(column)) for column in columns)] for name, row in first]
    more = len(per_class) - len(rows)
    table = _table(["class", *map(_plain, columns)], rows) + (f"\n\nand {more} more classes" if more else "")
    return ["By class, in the last validation of the run:", table]


def _licence(start: Mapping[str, Any]) -> tuple[str, str]:
    """Return the hub's name of the licence, and what follows from that of the start weights."""
    if not start:
        return "unknown", _SCRATCH
    known = str(start.get("licence", "")).lower()
    if known.startswith("none ("):  # of a run from scratch, as training/start_facts.py says
        return "unknown", _SCRATCH
    for name, hub, text in _LICENCES:
        if known.startswith(name.lower()):
            return hub, text
    is_of_hub = re.fullmatch(r"[a-z0-9.-]{2,60}", known)  # a card states it
    return (known, "The terms of this licence hold for the result.") if is_of_hub else ("unknown", _UNKNOWN)


def _start_text(start: Mapping[str, Any], hide: Redaction) -> str:
    if not start:
        return "Start weights: none."
    facts = [_plain(_public(str(start.get("given", "")), hide))]
    facts += [f"{name} {_plain(start[name])}" for name in ("licence", "origin") if start.get(name)]
    facts += [f"SHA-256 `{_code(start.get('sha256'))}`"]
    return f"Start weights: {', '.join(facts)}."


def _command(folder: RunFolder, hide: Redaction) -> tuple[str, bool, str]:
    """Return the command that repeats the run on any fleet, whether its sums are exact, and the name of its data set."""
    try:
        job = load_job(folder.config)
    except ConfigError:  # another version wrote it
        return "yolofleet train --config config.yaml", False, "unnamed"
    config, words = job.config, ["yolofleet", "train"]
    for name, field in type(config.value).model_fields.items():
        value = getattr(config.value, name)
        if not config.is_given(name) or group_of(field) not in _REPEATED or name in (*_OF_FLEET, "set"):
            continue
        if isinstance(value, bool) or (isinstance(value, int) and value < 0):
            words += config.spelled(name).split(" ")
        elif value not in (None, ""):
            for one in value if isinstance(value, tuple) else (value,):
                words += [flag_of(name, field), str(one)]
    if job.recipe is not None:
        values = job.recipe.value.model_dump(mode="json")
        for name, source in job.recipe.sources.items():
            if not source.startswith(("recipe ", DEFAULT)):
                words += ["--set", f"{name}={values[name]}"]
    is_exact = config.value.reduce == "exact"
    words += [] if config.is_given("reduce") else ["--reduce", config.value.reduce]
    path = Path(_public(config.value.data, hide))
    name = path.parent.name if path.stem in ("data", "dataset") and path.parent.name else path.stem
    return shlex.join(screen_line(_public(word, hide)) for word in words), is_exact, name


def _same_bits(run: Mapping[str, Any], is_exact: bool) -> str:
    sha256 = run["results"].get("weights_sha256")
    if not (is_exact and sha256 and run["finished"]):
        return (
            "Repeated on another fleet, this training gives equal figures up to rounding. With `--reduce exact` the weights "
            "have the same SHA-256 on any fleet."
        )
    return (
        f"**The same SHA-256 on any fleet:** with the same data, version of torch and kind of processor, the command above ends "
        f"with `{_code(sha256)}` on one process or on many. Add `--device cpu:4`, `--device all` or `--hosts`."
    )


def _fleet_text(fleet: Mapping[str, Any]) -> str:
    """Return the fleet without names of hosts, which are private."""
    names, count = fleet.get("hosts"), fleet.get("processes") or 1
    hosts = len(names) if isinstance(names, list) else 1
    text = f"{count} process{'es' * (count != 1)} on {hosts} machine{'s' * (hosts != 1)}"
    return _plain(f"{text}, {fleet['device']}" if fleet.get("device") else text)


def _number(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return ""
    return f"{value:.4f}" if isinstance(value, float) and value >= 0 else f"{value:g}" if value >= 0 else "-"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _plain(value: Any) -> str:
    """Return a value as text of one line in which Markdown finds no markup, link or address."""
    text = screen_line(value, limit=MOST_LETTERS)
    return re.sub(r"([\\`*_{}\[\]<>#|&~$@:!])|(?<=www)(\.)", r"\\\1\2", text).strip() or "(no name)"


def _public(word: str, hide: Redaction) -> str:
    """Return a word of a command without secrets, and of an absolute path its last two names, and the name of a run."""
    if HUB_NAME.fullmatch(word):  # its commit looks like a secret
        return word
    path = Path(hidden := hide(word))
    kept = 3 if path.parts[-2:] == ("weights", BEST) else 2  # all runs have such a file
    return "/".join(path.parts[1:][-kept:]) if path.is_absolute() else hidden


def _code(value: Any) -> str:
    """Return a digest for a code span."""
    return re.sub(r"[^\w.:-]", "", str(value))[:MOST_LETTERS]


def _fenced(text: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}sh\n{text}\n{fence}"
