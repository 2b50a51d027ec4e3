"""Published weights: names, urls, licences, digests. No torch here.

Only files with a publicly known digest are downloaded. The digests of Darknet's files come from tables of several
libraries, those of the YOLOv5 v7.0 release from tables of projects that pin them. yolov3-tiny.weights and yolov5n.pt were
compared with the files. A wrong digest can refuse a good file, but cannot accept a bad one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from yolofleet.config.hub_names import is_hub_name
from yolofleet.config.words.unknown import instead_of
from yolofleet.families.family import load
from yolofleet.families.table import FAMILIES, weights_files
from yolofleet.families.weights.hub import OURS, TRANSFORMERS, cached_weights, hub_weights
from yolofleet.storage.atomic import write_text
from yolofleet.storage.caches import cache_folder
from yolofleet.storage.fetch import DIGESTS, DownloadError, Item, adopt, check_online, fetch
from yolofleet.support.errors import CheckpointError, ConfigError
from yolofleet.support.text import nearest


@dataclass(frozen=True)
class KnownWeights:
    """Published weights with a name.

    Attributes:
        name: value for ``--weights``; also the name of their built-in model.
        item: the file. Its name and its stem also work, if no other entry has them as a name.
    """

    name: str
    item: Item

    @property
    def path(self) -> Path:
        """Path of the file in the cache."""
        return weights_folder() / self.item.name

    @property
    def is_here(self) -> bool:
        return self.path.is_file()


def weights_folder() -> Path:
    """Return the cache's folder of weights; users may put files there."""
    return cache_folder("weights", makes=False)  # a dry run leaves no folder


def known_weights() -> list[KnownWeights]:
    """Return the published weights of all families."""
    return [
        KnownWeights(name, item)
        for family in FAMILIES.values()
        for name, item in load(family.published)().items()
    ]


def entry_of(name: str) -> KnownWeights | None:
    """Return the entry of a bare name: ``yolov5s``, ``yolov5s.pt``, ``darknet-yolov3``, ``yolov3.weights``."""
    every = known_weights()
    named = (entry for entry in every if name in (entry.name, entry.item.name))
    return next(named, None) or next((entry for entry in every if Path(entry.item.name).stem == name), None)


def resolve_weights(name: str, *, download: bool = True) -> Path:
    """Return the file of ``name``: a path, a folder of Hugging Face's transformers or of the hub, or a name of published weights.

    Args:
        download: fetch published weights that are not in the cache; else return the path that they would get.

    Raises:
        CheckpointError: the file is missing; the hint says where to put it.
        DownloadError, StorageError: the download failed.
    """
    path = Path(name)
    if is_hub_name(name):
        found = hub_weights(name) if download else cached_weights(name)
        return found.path if found else path
    if path.is_file():
        return path
    if path.is_dir():
        for file in (TRANSFORMERS[0], OURS):  # the second is of a repository that `weights push` has filled
            if (path / file).is_file():
                return path / file
        if (path / "config.json").is_file():
            old = path / "pytorch_model.bin"
            raise CheckpointError(
                f"{name} has a config.json and {old.name}, but no model.safetensors"
                if old.exists()
                else f"{name} has a config.json, but no model.safetensors",
                hint="write it with transformers: AutoModelForObjectDetection.from_pretrained(FOLDER).save_pretrained(OUT, "
                "max_shard_size='1TB')",
            )
        raise CheckpointError(
            f"{name} is a folder, neither of a run nor of transformers",
            hint=f"give a file, a folder with weights/{OURS} or {OURS}, or one with config.json and model.safetensors",
        )
    if path.name != name:
        raise CheckpointError(f"weights file {name} does not exist", hint="check the path")
    return find_or_download(name, download=download)


def find_or_download(
    name: str, *, sha256: str | None = None, tell: Callable[[str], None] | None = None, download: bool = True
) -> Path:
    """Return weights by a bare name (no folder in it): from the cache, else downloaded into it.

    Args:
        sha256: of the file, from the user; needed if the table has none.
        tell: gets licence and progress messages; None: print them on standard error.
        download: False: only check that the file exists or can be downloaded; write nothing.
    Raises:
        CheckpointError: the name is unknown, or the file has no digest; the hint says what to do by hand.
        DownloadError, StorageError: see :func:`yolofleet.storage.fetch.fetch`.
    """
    folder = weights_folder()
    entry = entry_of(name)
    names = [name, f"{name}.safetensors"]
    names += (
        [entry.item.name]
        if entry
        else [f"{name}{file.suffixes[0]}" for file in weights_files() if file.suffixes]
    )
    found = next((folder / one for one in names if (folder / one).is_file()), None)
    if entry is None:
        if found is None:
            raise _unknown(name, folder)
        return found
    if found is None or sha256 is not None:
        item = _with_digest(entry.item, sha256)
        if item.digest is None:
            raise _not_downloaded(entry)
        if not download:
            check_online(item, folder)
            return entry.path
        found = fetch(item, folder, tell=tell)
    if download:
        _describe(entry, found)
    return found


def import_weights(name: str, source: Path, *, sha256: str | None = None) -> Path:
    """Copy a file that the user has downloaded into the cache, under its name.

    Raises:
        CheckpointError: the name is unknown, or the file is missing.
        DownloadError: its size or digest differs from the published one.
        StorageError: the cache cannot be written.
    """
    entry = entry_of(name)
    if entry is None:
        raise _unknown(name, weights_folder())
    if not source.is_file():
        raise CheckpointError(f"{source} is not a file", hint="--from must name the downloaded file")
    path = adopt(_with_digest(entry.item, sha256), source, weights_folder())
    _describe(entry, path)
    return path


def checked_sha256(text: str) -> str:
    """Return 64 hexadecimal digits in lower case; raise ConfigError if ``text`` is not a SHA-256."""
    if not re.fullmatch(rf"[0-9a-fA-F]{{{DIGESTS['sha256']}}}", text):
        raise ConfigError(f"--sha256 {text[:80]} is not a SHA-256", hint="it has 64 hexadecimal digits")
    return text.lower()


def _with_digest(item: Item, sha256: str | None) -> Item:
    """Return the item with the user's digest if the table has none; raise if it differs from the table's."""
    if sha256 is None:
        return item
    digest = f"sha256:{checked_sha256(sha256)}"
    if item.digest is not None and item.digest != digest:
        raise DownloadError(
            f"the published digest of {item.name} is {item.digest}, not {digest}", hint="leave out --sha256"
        )
    return replace(item, digest=digest)


def _describe(entry: KnownWeights, path: Path) -> None:
    """Write the file beside ``path`` that reading it needs, such as the ``.cfg`` of Darknet's ``.weights``."""
    for file in weights_files():
        if file.companion and path.suffix in file.suffixes:
            suffix, text = load(file.companion)(entry.name)
            if not (beside := path.with_suffix(suffix)).exists():
                write_text(beside, text)


def _unknown(name: str, folder: Path) -> CheckpointError:
    if other := instead_of("model", name):
        return CheckpointError(f"weights {name} do not exist here", hint=other)
    near = nearest(name, [entry.name for entry in known_weights()])
    guess = f"did you mean {near}? " if near else ""
    return CheckpointError(
        f"weights {name} are neither here nor in {folder}, and no published file has that name",
        hint=f"{guess}yolofleet weights list shows the known names; or put the file into {folder}, or give its path",
    )


def _not_downloaded(entry: KnownWeights) -> CheckpointError:
    item = entry.item
    return CheckpointError(
        f"cannot download {item.name}, because it has no published digest, and it is not in {weights_folder()} "
        f"(licence: {item.licence})",
        source=item.origin,
        hint=f"get {item.urls[0]}, then: yolofleet weights download {entry.name} --from FILE; or, if you know its "
        f"SHA-256: yolofleet weights download {entry.name} --sha256 HEX",
    )
