"""Download public data sets, and place them where ``--data NAME`` finds them.

``catalogue`` lists the sets with the digests of their files. A part without a digest is not downloaded; a person
who has the file puts it into the set's ``downloads`` folder.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from yolofleet.data.datasets.archive import unpack
from yolofleet.data.datasets.bigjson import JsonError, read_lists
from yolofleet.data.datasets.catalogue import Part, PublicDataset, datasets
from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.datasets.writers import write_yolo
from yolofleet.storage.atomic import exclusive, write_text
from yolofleet.storage.fetch import DownloadError, Patience, by_hand, fetch
from yolofleet.support.errors import ConfigError, DataError, StorageError
from yolofleet.support.text import inform, nearest, size_text

DOWNLOADS = "downloads"  # folder of a data set that holds archives until they are unpacked
DATASETS_FOLDER = Path("datasets")  # below the working folder
ARCHIVES = (".zip", ".tar", ".tar.gz")


def download_dataset(
    name: str,
    folder: Path = DATASETS_FOLDER,
    *,
    parts: Sequence[str] = (),
    keep_archives: bool = False,
    patience: Patience | None = None,
    tell: Callable[[str], None] | None = None,
) -> Path:
    """Fetch, verify and unpack a data set below ``folder``; parts that are already there are not fetched again.

    Args:
        parts: names of parts (see ``PublicDataset.part_names``); default: what training and validation need.
        keep_archives: keep each archive after it is unpacked.
        tell: called with progress messages; default: print to standard error.
    Returns:
        the data set's own folder, such as ``datasets/coco``.
    Raises:
        ConfigError: no such data set or part.
        DownloadError: a part cannot be downloaded, or has no published digest; complete parts are kept.
        DataError: an archive is damaged or unsafe.
        StorageError: the disk is full or cannot be written.
    """
    tell = tell or inform
    dataset = _named(name)
    chosen = dataset.chosen(parts)
    root = folder / dataset.folder
    downloads = root / DOWNLOADS
    waiting = [part for part in chosen if not _mark(downloads, part).is_file()]
    _check_obtainable(dataset, waiting, downloads)
    tell(f"{dataset.title}: {dataset.licence}; {dataset.origin}")
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        with exclusive(root / ".lock") as is_mine:
            if not is_mine:
                raise DownloadError(f"another process is downloading into {root}", hint="wait until it ends")
            for part in waiting:
                _place(part, root, keep_archives, patience, tell)
            if dataset.name == "coco":
                for split in ("train2017", "val2017"):
                    write_coco_labels(root, split, tell)
                _write_coco_test_list(root)
    except OSError as problem:
        raise StorageError(
            f"{problem.filename or root} cannot be written: {problem.strerror or problem}",
            hint="check the disk, or choose another folder",
        ) from None
    tell(f"{root} is ready")
    return root


def _named(name: str) -> PublicDataset:
    for dataset in datasets():
        if dataset.name == name:
            return dataset
    names = [dataset.name for dataset in datasets()]
    near = nearest(name, names)
    raise ConfigError(
        f"no data set {name!r:.60} to download", hint=f"{near}?" if near else f"one of: {', '.join(names)}"
    )


def _check_obtainable(dataset: PublicDataset, parts: Sequence[Part], downloads: Path) -> None:
    """Raise DownloadError, before anything is fetched, if a part must be downloaded by hand."""
    missing = [
        part.item for part in parts if part.item.digest is None and not (downloads / part.item.name).is_file()
    ]
    if missing:
        shown = "; ".join(by_hand(item, downloads) for item in missing[:4])
        more = f"; and {len(missing) - 4} more files" if len(missing) > 4 else ""
        raise DownloadError(
            f"{len(missing)} files of {dataset.name} have no published digest, so they are not downloaded",
            source=dataset.origin,
            hint=f"{shown}{more}; then give the same command again",
        )


def _mark(downloads: Path, part: Part) -> Path:
    """Return the path of the empty file that marks a part as complete."""
    return downloads / f".{part.item.name}.done"


def _place(
    part: Part, root: Path, keep_archives: bool, patience: Patience | None, tell: Callable[[str], None]
) -> None:
    """Fetch one part, then unpack it or move it to its folder."""
    downloads = root / DOWNLOADS
    path = fetch(part.item, downloads, patience=patience, tell=tell)
    if path.name.endswith(ARCHIVES):
        tell(f"unpacking {part.item.name} ({size_text(path.stat().st_size)})")
        unpack(path, root / part.into, strip=part.strip)
        if not keep_archives:
            path.unlink()
    else:
        (root / part.into).mkdir(parents=True, exist_ok=True)
        path.replace(root / part.into / path.name)
    _mark(downloads, part).touch()


def write_coco_labels(root: Path, split: str, tell: Callable[[str], None]) -> None:
    """Write ``labels/SPLIT`` and the list ``SPLIT.txt`` that ``coco.yaml`` names, from the split's JSON.

    Does nothing if the list exists, or if annotations or images are missing. Crowd regions are left out; COCO's own
    accuracy needs the JSON itself, which has these regions and the areas of outlines.

    Raises:
        DataError: the annotations are damaged.
        OSError: a file cannot be written.
    """
    listing, annotations = root / f"{split}.txt", root / "annotations" / f"instances_{split}.json"
    if listing.is_file() or not annotations.is_file() or not (root / "images" / split).is_dir():
        return
    tell(f"writing labels of {split}")
    index = build_index(load_dataset(str(annotations)), "train", strict=False)
    names = [Path(path).name for path in index.paths]
    (root / "labels").mkdir(exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=root / "labels", prefix=f".{split}-"))
    try:
        write_yolo(beside, split, names, index)
        if (root / "labels" / split).is_dir():
            shutil.rmtree(root / "labels" / split)
        (beside / "labels" / split).rename(root / "labels" / split)
        write_text(listing, "".join(f"./images/{split}/{name}\n" for name in names))
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_coco_test_list(root: Path) -> None:
    """Write ``test-dev2017.txt``, the list of images whose detections COCO's server evaluates."""
    listing, about = root / "test-dev2017.txt", root / "annotations" / "image_info_test-dev2017.json"
    if listing.is_file() or not about.is_file():
        return
    try:
        images = [entry["file_name"] for _, entry in read_lists(about, ("images",)) if entry is not None]
    except (JsonError, KeyError, TypeError) as problem:
        raise DataError(f"{about} is not COCO's list of images: {problem}") from None
    write_text(listing, "".join(f"./images/test2017/{name}\n" for name in images))
