"""Copy the images of a run to a local disk of each host (``--stage``)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from yolofleet.datasets.index import DataIndex
from yolofleet.input.stage import StagedImages, check_room, copy_for
from yolofleet.parallel.world import World
from yolofleet.report.console import NullConsole
from yolofleet.system.disks import network_disk
from yolofleet.terminal import duration
from yolofleet.text import size_text

ROUND_S = 5.0  # ranks meet after this time, so a collective does not time out while a slower host copies


def stage_images(
    folder: Path, indexes: Sequence[DataIndex], world: World, console: NullConsole
) -> list[StagedImages]:
    """Copy the image files of each index into ``folder`` on every host; return the copies.

    Images that are there already are not copied again. Collective: every rank.

    Raises:
        StorageError: the folder cannot be written, or its disk is too small.
    """
    with world.activity.doing("staging"):
        if kind := network_disk(folder):
            console.warn(
                f"--stage {folder} is itself on a network disk ({kind}): reading from it may not be faster"
            )
        staged = [StagedImages(index, folder) for index in indexes]
        check_room(staged, folder)
        for images in staged:
            _copy(images, world, console)
    return staged


def _copy(images: StagedImages, world: World, console: NullConsole) -> None:
    """Copy the images that are missing, divided among the ranks of each host. Collective: every rank."""
    # By number and not by place in the list: another rank may see fewer missing ones, because one has begun to copy.
    mine = [n for n in images.missing().tolist() if n % world.local_size == world.local_rank]
    source, left = iter(mine), len(mine)
    began_s = time.monotonic()
    total = 0.0
    while True:
        (left_everywhere,) = world.sum_rows([float(left)])
        total = total or left_everywhere
        now_s = time.monotonic()
        if left_everywhere == 0:
            break
        what = f"copying {images.index.split} images"
        console.progress(what, total - left_everywhere, total, "images")
        left -= copy_for(ROUND_S, images, source)
        world.activity.tick()
    size = size_text(float(images.index.stamps[:, 0].sum()))
    took = f"copied in {duration(now_s - began_s)}" if total else "there already"
    console.note(f"staged {len(images.index)} {images.index.split} images, {size}, in {images.file}: {took}")
    gathered = world.all_gather_bytes(json.dumps(list(images.failures.values())).encode())
    failures = [why for packed in gathered for why in json.loads(packed)]
    if failures:
        console.warn(
            f"{len(failures)} images could not be copied and are read from the data set: {failures[0]}"
        )
