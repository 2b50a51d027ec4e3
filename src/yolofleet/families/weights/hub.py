"""Weights on the Hugging Face hub, by name: ``hf:USER/NAME`` or ``hf:USER/NAME@REVISION``. No torch here.

The package huggingface_hub (extra ``hub``) asks, downloads and uploads. Its cache is read here, so that an offline machine
needs no package. A file of weights is used only if it has the SHA-256 that the hub states for that commit. Nothing of a
repository is executed, and only the files of ``known_files`` are fetched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yolofleet.config.hub_names import HUB, HUB_NAME
from yolofleet.storage.atomic import make_folder, write_text
from yolofleet.storage.fetch import DownloadError
from yolofleet.storage.foreign import digest_of, open_foreign, read_foreign_text, reading
from yolofleet.storage.request import OFFLINE, is_offline
from yolofleet.support.errors import CheckpointError, ConfigError, StorageError, YolofleetError, install_hint
from yolofleet.support.redaction import Redaction
from yolofleet.support.text import inform, listed, screen_line, shown

COMMIT = re.compile("[0-9a-f]{40}")
SHA256 = re.compile("[0-9a-f]{64}")
OURS, TRANSFORMERS, CARD = "best.safetensors", ("model.safetensors", "config.json"), "README.md"
MAX_CARD_BYTES = 1 << 20
_LOG_IN = "log in with a token that may do this: hf auth login, or set HF_TOKEN; check USER in the name"
_OFFLINE_HUB = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class HubWeights:
    """A file of weights of the hub in the client's cache, with the digest that the hub states.

    Attributes:
        name: with the commit: ``hf:USER/NAME@COMMIT``.
        licence: as the card of the repository states it; "": it states none.
    """

    name: str
    path: Path
    sha256: str
    licence: str

    @property
    def origin(self) -> str:
        repository, commit = _parts(self.name)
        return f"{_endpoint()}/{repository}/tree/{commit}"


def hub_weights(name: str) -> HubWeights:
    """Return the weights of a name; download them if the cache of the client lacks them.

    Raises:
        CheckpointError: the name is wrong, the repository has no weights, or a file has another digest than the hub states.
        DownloadError: the hub cannot be reached, or refuses. ConfigError: the client is not installed.
    """
    pinned = pinned_name(name)
    found = cached_weights(pinned)
    if found is not None:
        return found
    if _is_offline():
        raise DownloadError(
            f"{name} is not in the cache of the hub's client, {_cache()}, and downloads are switched off",
            hint=f"leave out {OFFLINE} and {_OFFLINE_HUB[0]}, or give a folder that has the files",
        )
    _fetch(pinned)
    found = cached_weights(pinned)
    assert found is not None
    inform(f"{name}: {found.path.name} of commit {_parts(pinned)[1]}, sha256 {found.sha256}")
    return found


def cached_weights(name: str) -> HubWeights | None:
    """Return the weights of a name with its commit from the cache of the client; None if they are not there.

    Raises:
        CheckpointError: the name is wrong, or the file has another digest than the hub stated.
    """
    folder = _snapshot(*_parts(name))
    with reading(folder, CheckpointError):  # a link whose file was deleted counts as missing
        present = folder.iterdir() if folder.is_dir() else ()
        found = known_files([one.name for one in present if one.is_file()])
    if not found:
        return None
    path = folder / found[0]
    with reading(path, CheckpointError):
        stated, real = path.resolve().name, digest_of(path)
    if not SHA256.fullmatch(stated):
        raise CheckpointError(
            f"{name}: the hub states no SHA-256 of {path.name}, because the repository does not keep it in LFS",
            hint="download the file yourself, and give its path",
        )
    if real != stated:
        raise CheckpointError(
            f"{path} has the SHA-256 {real}, and the hub states {stated}",
            hint=f"delete {path.resolve()}, and repeat the command",
        )
    return HubWeights(name, path, real, _licence(folder / CARD))


def pinned_name(name: str) -> str:
    """Return the name with the commit that its revision, by default ``main``, is now. Raises as :func:`hub_weights`."""
    repository, revision = _parts(name)
    if COMMIT.fullmatch(revision):
        return name
    reference = _snapshot(repository, "").parent / "refs" / revision
    if _is_offline():
        try:
            commit = read_foreign_text(reference, limit_bytes=100).strip()
        except (OSError, ValueError):
            commit = ""
        if not COMMIT.fullmatch(commit):
            raise DownloadError(
                f"the cache of the hub's client does not know {name}: {reference} is missing",
                hint="download it on a machine with a network, or give a folder that has the files",
            )
    else:
        with _asking(name) as (_, api):
            commit = str(api.model_info(repository, revision=revision).sha)
        with suppress(StorageError):  # as the client does, so that the name works later without a network
            make_folder(reference.parent)
            write_text(reference, commit)
    return f"{HUB}{repository}@{commit}"


def known_files(names: Sequence[str]) -> list[str]:
    """Return the files of a repository that are read, the weights first; [] if it has no weights."""
    several = [name for name in names if name.endswith(".pth") and "/" not in name]
    for files in ((OURS,), TRANSFORMERS, several if len(several) == 1 else ()):
        if files and set(files) <= set(names):
            return [*files, *({CARD} & set(names))]
    return []


def _fetch(name: str) -> None:
    """Download the known files of a name with its commit into the cache."""
    repository, commit = _parts(name)
    with _asking(name) as (_, api):
        every = [one.rfilename for one in api.model_info(repository, revision=commit).siblings]
        found = known_files(every)
        if not found:
            raise CheckpointError(
                f"{name} has no weights that yolofleet reads: {listed([shown(one) for one in every])}",
                hint=f"expected {OURS}, {' with '.join(TRANSFORMERS)}, or one .pth file; give the path of another file",
            )
        for file in reversed(found):  # the weights last: their presence says that the others are there
            api.hf_hub_download(repository, file, revision=commit, cache_dir=_cache())


def push(name: str, files: Sequence[tuple[str, Path | bytes]], *, public: bool) -> tuple[str, str]:
    """Upload files, each with its name there, in one commit; return the name with the commit, and its address.

    Args:
        files: names and paths or contents. A path may be that of a file in a store, whose content is not here yet.
        public: of a repository that does not exist yet. One that exists stays as it is.
    Raises:
        CheckpointError, DownloadError, ConfigError: as :func:`hub_weights`.
    """
    repository, _ = _parts(name)
    if "@" in name:
        raise CheckpointError(
            f"{name} names a revision, and a push makes a new one", hint=name.partition("@")[0]
        )
    if _is_offline():
        raise DownloadError(
            f"cannot push to {name}: {OFFLINE} or {_OFFLINE_HUB[0]} is set", hint="leave it out"
        )
    with ExitStack() as opened, _asking(name) as (client, api):
        operations = []
        for there, content in files:
            if isinstance(content, Path):
                with reading(content, CheckpointError):
                    operations.append(
                        client.CommitOperationAdd(there, opened.enter_context(open_foreign(content)))
                    )
            else:
                operations.append(client.CommitOperationAdd(there, content))
        api.create_repo(repository, private=not public, exist_ok=True)
        commit = api.create_commit(repository, operations, commit_message="Upload weights of yolofleet")
    return f"{HUB}{repository}@{commit.oid}", str(commit.commit_url)


def _parts(name: str) -> tuple[str, str]:
    """Return the repository and the revision of a name."""
    match = HUB_NAME.fullmatch(name)
    if match is None:
        raise CheckpointError(
            f"{shown(name)} is not a name of weights on the hub",
            hint=f"{HUB}USER/NAME, or {HUB}USER/NAME@REVISION",
        )
    return match[1], match[2] or "main"


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _cache() -> Path:
    """Return the cache of the client, which it would choose itself."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home, "hub")
    return Path(cache).expanduser()


def _snapshot(repository: str, commit: str) -> Path:
    """Return the folder of a commit in the cache of the client."""
    return _cache() / f"models--{repository.replace('/', '--')}" / "snapshots" / commit


def _is_offline() -> bool:
    return is_offline() or any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _OFFLINE_HUB
    )


def _licence(card: Path) -> str:
    """Return the licence in the front matter of a card."""
    try:
        text = read_foreign_text(card, limit_bytes=MAX_CARD_BYTES)
    except (OSError, ValueError):
        return ""
    front = text.split("\n---")[0] if text.startswith("---") else ""
    match = re.search(r"^license:\s*['\"]?([A-Za-z0-9.-]{1,60})['\"]?\s*$", front, re.MULTILINE)
    return match[1] if match else ""


@contextmanager
def _asking(name: str) -> Iterator[tuple[Any, Any]]:
    """Yield the package of the client and its interface; raise what it raises as our errors, without secrets."""
    try:
        import huggingface_hub as client
    except ImportError:
        raise ConfigError(f"{name} needs the client of the hub", hint=install_hint("hub")) from None
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    constants.HF_HUB_DISABLE_TELEMETRY = True
    disable_progress_bars()
    try:
        yield client, client.HfApi(endpoint=_endpoint())
    except YolofleetError:
        raise
    except Exception as problem:  # the client raises its own errors and those of its HTTP library
        page, first = f"{_endpoint()}/{_parts(name)[0]}", str(problem).strip().partition("\n")[0]
        if isinstance(problem, errors.GatedRepoError):  # a RepositoryNotFoundError, too
            why, hint = "its authors ask for an agreement", f"accept it at {page}, and log in: hf auth login"
        elif isinstance(problem, errors.RepositoryNotFoundError):
            why, hint = (
                "does not exist, or is private",
                "check the name; log in: hf auth login, or set HF_TOKEN",
            )
        elif isinstance(problem, errors.RevisionNotFoundError):
            why, hint = "the repository has no such revision", f"choose a commit of {page}/commits/main"
        else:
            why = screen_line(Redaction(os.environ)(first), limit=300)
            status = getattr(getattr(problem, "response", None), "status_code", 0)
            hint = _LOG_IN if status in (401, 403) else "check the network, and try again"
        raise DownloadError(f"{name}: {why}", hint=hint) from None
    finally:
        client.close_session()  # a process that is forked later would share its connections
