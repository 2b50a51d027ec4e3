"""Data and runs in emulators of Azure Blob Storage (Azurite) and Google Cloud Storage; `make test-emulators` installs them."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import SMALL, Outcome, ran, results, small_shapes, yolofleet

AZURITE = Path(sys.prefix) / "azurite/node_modules/.bin/azurite-blob"
# the account and the key that Azurite documents for everybody
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PACKAGES = {"az": ("adlfs",), "gs": ("gcsfs", "gcp_storage_emulator")}
BUCKET = "bucket"
CONNECTED = {"YOLOFLEET_OFFLINE": "0"}  # tests forbid connections; these stay on this machine
ARGS = [*SMALL, "--threads", "1", "--reduce", "exact", "--val-period", "0", "--epochs", "3"]
MAKE_BUCKET = "import fsspec, sys; fsspec.filesystem(sys.argv[1]).mkdir(sys.argv[2])"
UPLOAD = "import fsspec, sys; fsspec.filesystem(sys.argv[1]).put(sys.argv[2], sys.argv[3], recursive=True)"
CREATE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from yolofleet.files.object_writer import ObjectWriter

writer = ObjectWriter(sys.argv[1])
with ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(lambda number: writer.create("one", b"%d" % number), range(4))))
"""

pytestmark = pytest.mark.store


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"the emulator ended with code {process.returncode}")


@pytest.fixture(scope="module", params=["az", "gs"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The scheme of a running emulator, which this process and its children use."""
    scheme, port, folder = str(request.param), free_port(), tmp_path_factory.mktemp("emulator")
    if missing := [name for name in PACKAGES[scheme] if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: make test-emulators")
    if scheme == "az":
        if not AZURITE.exists():
            pytest.skip("needs Azurite: make test-emulators")
        command = [
            str(AZURITE),
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            str(port),
            "--location",
            str(folder),
        ]
        command += ["--skipApiVersionCheck", "--silent"]
        address = f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
        access = {
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};{address}"
        }
    else:
        program = str(Path(sys.executable).with_name("gcp-storage-emulator"))
        command = [program, "start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
        access = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
    with (folder / "log").open("wb") as log, pytest.MonkeyPatch.context() as patch:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(port, process)
            for name, value in access.items():
                patch.setenv(name, value)
            patch.setenv("YOLOFLEET_CACHE", str(folder / "cache"))
            subprocess.run([sys.executable, "-c", MAKE_BUCKET, scheme, BUCKET], check=True)
            yield scheme
        finally:
            process.terminate()
            process.wait()


def verb(folder: Path, *words: str | Path) -> Outcome:
    return yolofleet(folder, *words, variables=CONNECTED)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_data_and_copies_of_a_run_are_those_of_a_disk(store: str, tmp_path: Path) -> None:
    data, root = small_shapes(tmp_path), f"{store}://{BUCKET}"
    verb(tmp_path, "data", "shard", data, "--out", f"{root}/shards", "--size", "64KiB")
    verb(tmp_path, "data", "unshard", f"{root}/shards", "--out", "back")
    assert files(tmp_path / "back") == files(data.parent)
    verb(tmp_path, "train", "--data", data, *ARGS, "--device", "cpu", "--name", "local")
    local = tmp_path / "runs/train/local"
    copied = ("--checkpoint-to", f"{root}/run", "--name", "run")
    verb(tmp_path, "train", "--data", f"{root}/shards/data.yaml", *ARGS, "--device", "cpu:2", *copied)
    run = tmp_path / "runs/train/run"
    assert results(run)["weights_sha256"] == results(local)["weights_sha256"]
    shutil.rmtree(run)
    verb(tmp_path, "train", "--resume", local, "--epochs", "4")
    verb(tmp_path, "train", "--resume", f"{root}/run", "--epochs", "4")
    assert results(run)["weights_sha256"] == results(local)["weights_sha256"]
    assert verb(tmp_path, "checkpoints", "verify", f"{root}/run").out.count("whole") == 2
    # the copy is a folder of objects like any other
    verb(tmp_path, "data", "unshard", f"{root}/run/", "--out", "copy")
    for name in ("results.csv", "results.json", "weights/last.safetensors"):
        assert (tmp_path / "copy" / name).read_bytes() == (run / name).read_bytes(), name
    pictures = ("predict", "--weights", run / "weights/last.safetensors", "--img", "64", "--conf", "0.001")
    val = data.parent / "images/val"
    ran(tmp_path, sys.executable, "-c", UPLOAD, store, f"{val}/", f"{BUCKET}/pictures/", variables=CONNECTED)
    verb(tmp_path, *pictures, "--source", f"{root}/pictures/", "--name", "there")
    verb(tmp_path, *pictures, "--source", val, "--name", "here")
    drawn = [files(tmp_path / "runs/predict" / name) for name in ("there", "here")]
    assert len(drawn[0]) > 1 and drawn[0] == drawn[1]


def test_of_several_that_create_an_object_one_has_made_it(store: str, tmp_path: Path) -> None:
    if store == "gs":
        pytest.skip("this emulator ignores the condition that gcsfs sends")
    done = ran(tmp_path, sys.executable, "-c", CREATE, f"{store}://{BUCKET}/lease", variables=CONNECTED)
    assert done.out.strip() == "1"
