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

from yolofleet.config.words import instead_of
from yolofleet.errors import CheckpointError, ConfigError
from yolofleet.families.darknet import cfg as darknet_cfg
from yolofleet.files.atomic import write_text
from yolofleet.files.caches import cache_folder
from yolofleet.files.fetch import DIGESTS, DownloadError, Item, adopt, check_online, fetch
from yolofleet.text import nearest

SUFFIXES = (".safetensors", ".pt", ".weights", ".pdparams")


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


def known_weights() -> tuple[KnownWeights, ...]:
    """Return the whole table."""
    return _TABLE


def entry_of(name: str) -> KnownWeights | None:
    """Return the entry of a bare name: ``yolov5s``, ``yolov5s.pt``, ``darknet-yolov3``, ``yolov3.weights``."""
    for entry in _TABLE:
        if name in (entry.name, entry.item.name):
            return entry
    return next((entry for entry in _TABLE if Path(entry.item.name).stem == name), None)


def resolve_weights(name: str, *, download: bool = True) -> Path:
    """Return the file of ``name``: a path, or a name of published weights.

    Args:
        download: fetch published weights that are not in the cache; else return the path that they would get.

    Raises:
        CheckpointError: the file is missing; the hint says where to put it.
        DownloadError, StorageError: the download failed.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise CheckpointError(
            f"{name} is a folder", hint=f"name a file, such as {path / 'weights' / 'best.safetensors'}"
        )
    if path.name != name:
        raise CheckpointError(f"weights file {name} does not exist", hint="check the path")
    return find_or_download(name, download=download)


def find_or_download(
    name: str,
    *,
    sha256: str | None = None,
    tell: Callable[[str], None] | None = None,
    download: bool = True,
) -> Path:
    """Return weights by a bare name (no folder in it): from the cache, else downloaded into it.

    Args:
        sha256: of the file, from the user; needed if the table has none.
        tell: gets licence and progress messages; None: print them on standard error.
        download: False: only check that the file exists or can be downloaded; write nothing.
    Raises:
        CheckpointError: the name is unknown, or the file has no digest; the hint says what to do by hand.
        DownloadError, StorageError: see :func:`yolofleet.files.fetch.fetch`.
    """
    folder = weights_folder()
    entry = entry_of(name)
    names = [name, f"{name}.safetensors"]
    names += [entry.item.name] if entry else [f"{name}{suffix}" for suffix in SUFFIXES]
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
    """Write the ``.cfg`` of Darknet's ``.weights`` beside them, which loading needs."""
    cfg = path.with_suffix(".cfg")
    if path.suffix != ".weights" or cfg.exists():
        return
    write_text(cfg, darknet_cfg.preset(entry.name).cfg())


def _unknown(name: str, folder: Path) -> CheckpointError:
    if other := instead_of("model", name):
        return CheckpointError(f"weights {name} do not exist here", hint=other)
    near = nearest(name, [entry.name for entry in _TABLE])
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


# -- the table -----------------------------------------------------------------------------------------------

_ULTRALYTICS = "AGPL-3.0 (GPL-3.0 when they were released): conditions on what is built with them"
_DARKNET = "public domain (YOLO licence)"
_PADDLE = "Apache-2.0"

_YOLOV5 = {  # size in bytes and SHA-256, release v7.0
    "n": (4_062_133, "4f180cf23ba0717ada0badd6c685026d73d48f184d00fc159c2641284b2ac0a3"),
    "s": (14_808_437, "8b3b748c1e592ddd8868022e8732fde20025197328490623cc16c6f24d0782ee"),
    "m": (42_806_829, "61d933360ba5a7733a36764996c800287d973889d875227f5beedd2473a97a56"),
    "l": (93_622_629, "2f603b7354c25454d1270663a14d8ddc1eea98e5eebc1d84ce0c6e3150fa155f"),
    "x": (174_114_333, "9f27a794fa0308e2606f90565164571d6f0a0ba18a3ce2e5e5d323b71c157859"),
    "n6": (7_190_229, "496c05a2b991da15acc6c4408c63da287f2513a46c6756618776d4dd71170781"),
    "s6": (25_978_837, "95bda9019ada63f37338308d0c81a66047a6fbaba061abaff271ba9334cf2a6f"),
    "m6": (72_308_357, "7afe7fa0f29a8351467200a2a5a33c7996d1155ed6636c7edd8ca70b14951c64"),
    "l6": (154_521_589, "b357b77f646b0190912985937c44e2923441369d5fda69ba86da2aa919212618"),
    "x6": (282_720_357, "257c991b216d625427dc4d9c7c76d6c6d93cf3732797538da34bdc02f97bfef0"),
}
_DARKNET_FILES = {
    "yolov3": (248_007_048, "523e4e69e1d015393a1b0a441cef1d9c7659e3eb2d7e15f793f060a21b32f297"),
    "yolov3-spp": (252_209_544, "87a1e8c85c763316f34e428f2295e1db9ed4abcec59dd9544f8052f50de327b4"),
    "yolov3-tiny": (35_434_956, "dccea06f59b781ec1234ddf8d1e94b9519a97f4245748a7d4db75d5b7080a42c"),
}


def _release(repository: str, tag: str, file: str, size: int | None, sha256: str | None) -> Item:
    page = f"https://github.com/ultralytics/{repository}/releases"
    digest = f"sha256:{sha256}" if sha256 else None
    return Item(file, (f"{page}/download/{tag}/{file}",), size, digest, _ULTRALYTICS, f"{page}/tag/{tag}")


def _ppyoloe(size: str, *, plus: bool) -> KnownWeights:
    file = f"ppyoloe_plus_crn_{size}_80e_coco.pdparams" if plus else f"ppyoloe_crn_{size}_300e_coco.pdparams"
    return KnownWeights(
        f"ppyoloe-plus-{size}" if plus else f"ppyoloe-{size}",
        Item(
            file,
            (f"https://paddledet.bj.bcebos.com/models/{file}",),
            None,
            None,
            _PADDLE,
            "https://github.com/PaddlePaddle/PaddleDetection/tree/release/2.8/configs/ppyoloe",
        ),
    )


_TABLE = (
    *(
        KnownWeights(f"yolov5{size}", _release("yolov5", "v7.0", f"yolov5{size}.pt", *facts))
        for size, facts in _YOLOV5.items()
    ),
    *(
        KnownWeights(name, _release("yolov3", "v9.6.0", f"{name}.pt", None, None))
        for name in ("yolov3", "yolov3-spp", "yolov3-tiny")
    ),
    *(
        KnownWeights(
            f"darknet-{name}",
            Item(
                f"{name}.weights",
                tuple(
                    f"{base}/{name}.weights"
                    for base in ("https://data.pjreddie.com/files", "https://pjreddie.com/media/files")
                ),
                size,
                f"sha256:{sha256}",
                _DARKNET,
                "https://pjreddie.com/darknet/yolo/",
            ),
        )
        for name, (size, sha256) in _DARKNET_FILES.items()
    ),
    *(_ppyoloe(size, plus=plus) for plus in (False, True) for size in ("s", "m", "l", "x")),
)
