"""The servers of the tests in this folder. Each one runs on 127.0.0.1 inside a block, which gets what a client needs to reach it."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from commands import free_port

AZURITE = Path(sys.prefix) / "azurite/node_modules/.bin/azurite-blob"
# the account and the key that Azurite documents for everybody
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
S3_KEY, S3_SECRET = "trainer", "a-secret-of-this-server-only"
CEPH = ("ceph-authtool", "ceph-mon", "ceph", "ceph-osd", "radosgw-admin", "radosgw")
CEPH_SETTINGS = """
[global]
fsid = {id}
mon host = v2:127.0.0.1:{monitor_port}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = {folder}/keyring
log file = {folder}/$name.log
run dir = {folder}
admin socket =
osd objectstore = memstore
osd pool default size = 1
# a monitor ends where the disk of its folder has less free space, in per cent
mon data avail crit = 0

[mon.a]
mon data = {folder}/mon
public addr = v2:127.0.0.1:{monitor_port}

[osd.0]
osd data = {folder}/osd

[client.admin]
rgw data = {folder}
rgw frontends = beast endpoint=127.0.0.1:{port}
"""


def need(*packages: str) -> None:
    """Skip the test if a package is missing."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: make test-extra EXTRA=emulators")


@contextmanager
def running(folder: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program inside the block."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"the server ended with code {process.returncode}")


@contextmanager
def azurite(folder: Path) -> Iterator[dict[str, str]]:
    """Run the emulator of Azure Blob Storage."""
    need("adlfs")
    if not AZURITE.exists():
        pytest.skip("needs Azurite: make test-extra EXTRA=emulators")
    port = free_port()
    place = ("--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", folder)
    with running(folder, AZURITE, *place, "--skipApiVersionCheck", "--silent") as process:
        wait_for(port, process)
        account = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        address = f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
        yield {"AZURE_STORAGE_CONNECTION_STRING": account + address}


@contextmanager
def gcp_storage_emulator(folder: Path) -> Iterator[dict[str, str]]:
    """Run an emulator of Google Cloud Storage."""
    need("gcsfs", "gcp_storage_emulator")
    port = free_port()
    program = Path(sys.executable).with_name("gcp-storage-emulator")
    with running(folder, program, "start", "--host=127.0.0.1", f"--port={port}", "--in-memory") as process:
        wait_for(port, process)
        yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}


@contextmanager
def radosgw(folder: Path) -> Iterator[dict[str, str]]:
    """Run the S3 server of Ceph with one monitor and one OSD, which keeps objects in memory; it checks credentials."""
    need("s3fs")
    if any(shutil.which(name) is None for name in CEPH):
        pytest.skip("needs Debian's packages ceph-mon, ceph-osd, radosgw and ceph-common")
    settings, port = folder / "ceph.conf", free_port()
    settings.write_text(
        CEPH_SETTINGS.format(folder=folder, id=uuid.uuid4(), port=port, monitor_port=free_port())
    )

    def done(program: str, *words: str | Path) -> str:
        ended = subprocess.run([program, "-c", settings, *words], capture_output=True, text=True)
        assert ended.returncode == 0, f"{program} {words}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    key = done("ceph-authtool", "--gen-print-key").strip()
    (folder / "keyring").write_text(
        "".join(
            f'[{name}]\nkey = {key}\ncaps mon = "allow *"\ncaps osd = "allow *"\n'
            for name in ("mon.", "client.admin", "osd.0")
        )
    )
    with ExitStack() as stack:

        def start(program: str, *words: str) -> subprocess.Popen[bytes]:
            return stack.enter_context(running(folder, program, "-c", settings, "-f", *words))

        done("ceph-mon", "-i", "a", "--mkfs", "--keyring", folder / "keyring")
        start("ceph-mon", "-i", "a")
        (folder / "osd").mkdir()
        osd = str(uuid.uuid4())
        done("ceph", "osd", "new", osd)
        done("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        start("ceph-osd", "-i", "0")
        user = ("--uid", S3_KEY, "--display-name", S3_KEY, "--access-key", S3_KEY, "--secret-key", S3_SECRET)
        done("radosgw-admin", "user", "create", *user)
        wait_for(port, start("radosgw", "-n", "client.admin"))
        yield {
            "AWS_ACCESS_KEY_ID": S3_KEY,
            "AWS_SECRET_ACCESS_KEY": S3_SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
