"""The values of ``--log``: NAME or NAME=ADDRESS."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from yolofleet.config.resolve import Resolved
from yolofleet.config.schema import RunSettings
from yolofleet.support.errors import ConfigError, install_hint
from yolofleet.support.text import did_you_mean, quoted, shown

# the package that each logger needs; the extra of pyproject.toml has the name of the logger
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
SENDS = [name for name in PACKAGES if name != "tensorboard"]  # to a server, if the user names one
ALWAYS = {"csv": "results.csv", "jsonl": "events.jsonl", "json": "events.jsonl"}


def loggers_of(config: RunSettings) -> dict[str, str]:
    """Return the loggers of a run, and the address of the server that each sends to; "" = none."""
    found: dict[str, str] = {}
    for text in filter(None, (part.strip() for value in config.log for part in value.split(","))):
        name, _, address = text.partition("=")
        found[name] = address or found.get(name, "")
    return found


def logger_names(config: RunSettings) -> list[str]:
    """Return the names of the loggers of a run."""
    return list(loggers_of(config))


def servers_of(config: RunSettings) -> dict[str, str]:
    """Return the address by logger, of the loggers that send to a server."""
    return {name: address for name, address in loggers_of(config).items() if address}


def wandb_server(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the address to which ``--log wandb`` sends without an address, "" = none, and a note about it.

    As in W&B's own client, a key in ``WANDB_API_KEY`` or netrc means that the user wants the run on the server.
    """
    from yolofleet.storage.request import OFFLINE, is_forbidden

    address = environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    reason = ""
    if (mode := environ.get("WANDB_MODE", "")) in ("offline", "dryrun", "disabled"):
        reason = f"WANDB_MODE={mode}"
    elif is_forbidden(address):
        reason = f"{OFFLINE} is set"
    elif not (environ.get("WANDB_API_KEY") or _has_netrc_entry(address, environ)):
        reason = "there is no key in WANDB_API_KEY or netrc (`wandb login` writes one)"
    if reason:
        return "", f"--log wandb writes into the run folder and sends nothing: {reason}"
    return (
        address,
        f"--log wandb sends the run to {shown(address)}; WANDB_MODE=offline keeps it in the run folder",
    )


def _has_netrc_entry(address: str, environ: Mapping[str, str]) -> bool:
    for path in filter(None, (environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with suppress(OSError, ValueError, RuntimeError, NetrcParseError):
            if urlsplit(address).hostname in netrc(Path(path).expanduser()).hosts:
                return True
    return False


def check_loggers(config: Resolved[Any]) -> None:
    """Raise ConfigError if ``--log`` has an unknown name, or an address that cannot be used."""
    source = config.sources["log"]
    for name, address in loggers_of(config.value).items():
        try:
            url = urlsplit(address)
            is_usable = url.scheme in ("http", "https") and bool(url.hostname) and address.isprintable()
            has_secret = url.username is not None or bool(url.query or url.fragment)
        except ValueError:
            is_usable = has_secret = False
        # a value without a known name may be an address; the message leaves it out: a secret would reach logs
        if has_secret or (name not in PACKAGES and any(character in name + address for character in "@?#")):
            raise ConfigError(
                f"{f'--log {name}=...' if name in PACKAGES else 'a value of --log'} has a user, a query or a fragment, which may "
                "hold a secret",
                source=source,
                hint="give the address alone; docs/report.md names the variable for the key of each server",
            )
        if name not in PACKAGES:
            if name in ALWAYS:
                hint = f"leave it out: every run writes {ALWAYS[name]}"
            else:
                hint = did_you_mean(name, PACKAGES) or f"one or more of {', '.join(PACKAGES)}, with commas"
            raise ConfigError(f"--log {shown(name)} is not a logger", source=source, hint=hint)
        if address and (name not in SENDS or not is_usable):
            raise ConfigError(
                f"--log {shown(f'{name}={address}')}: expected NAME=ADDRESS, with NAME one of {', '.join(SENDS)}",
                source=source,
                hint="--log mlflow=http://127.0.0.1:5000",
            )


def check_usable(config: RunSettings) -> None:
    """Raise ConfigError if the package of a logger is not installed, or its server must not be reached. Imports no package."""
    from yolofleet.storage.request import OFFLINE, is_forbidden  # loads ssl, which --help does not need

    for name, address in servers_of(config).items():
        if is_forbidden(address):
            raise ConfigError(
                f"--log {name}={address} is on another machine, and {OFFLINE} is set",
                source="environment",
                hint=f"unset it, or --log {quoted(name)}: the logger then writes into the run folder",
            )
    for name in logger_names(config):
        package = PACKAGES[name]
        found = find_spec(package)
        if found is None or found.origin is None:  # a folder of that name is not a package
            raise ConfigError(
                f"--log {name} needs the package {package}, which is not installed", hint=install_hint(name)
            )
