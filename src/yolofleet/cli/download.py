"""Offer to download a public data set before a run that needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from yolofleet.config.schema import RunSettings, ValConfig
from yolofleet.support.errors import ConfigError, DataError
from yolofleet.support.text import size_text


def offer_download(settings: RunSettings | ValConfig, splits: Sequence[str], *, agreed: bool) -> None:
    """Download a public data set if ``splits`` are missing and the user agrees.

    Args:
        agreed: the user gave --download. Otherwise ask the user, but only at a terminal.

    Raises:
        ConfigError: --download cannot apply.
        YolofleetError: the download failed.
    """
    from yolofleet.data.datasets.built_in import built_in_of

    name = built_in_of(settings.data)
    if not (name or agreed):
        return
    from yolofleet.data.datasets.catalogue import datasets
    from yolofleet.data.datasets.download import DATASETS_FOLDER, download_dataset
    from yolofleet.data.datasets.sources import load_dataset
    from yolofleet.fleet.launch.plan import is_worker

    known = next((dataset for dataset in datasets() if dataset.name == name), None)
    alone = not (settings.hosts or settings.fleet or is_worker())
    if agreed and (known is None or not alone):
        why = (
            f"{settings.data} is not one of them"
            if known is None
            else "this is one of several processes or hosts"
        )
        raise ConfigError(
            f"--download fetches public data sets to this machine, and {why}",
            source="command line",
            hint="leave it out; yolofleet data list shows them, yolofleet data download NAME fetches one",
        )
    at_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if known is None or not alone or not (agreed or at_terminal):
        return
    try:
        spec = load_dataset(settings.data)
        for split in splits:
            spec.sources(split)
        return
    except DataError:
        pass
    size = known.size_bytes()
    what = f"{known.title} is not here. Download {size_text(size) if size else 'it'} to {DATASETS_FOLDER / known.folder}"
    if agreed or click.confirm(f"{what}? Licence: {known.licence}.", default=False, err=True):
        download_dataset(name)
