"""Data and runs in emulators of Azure Blob Storage and Google Cloud Storage, and in Ceph's S3 server.

`make test-extra EXTRA=emulators` installs the emulators; Ceph comes from the distribution.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import SMALL, Outcome, ran, results, small_shapes, yolofleet
from servers import azurite, gcp_storage_emulator, radosgw

BUCKET = "bucket"
CONNECTED = {"YOLOFLEET_OFFLINE": "0"}  # tests forbid connections; these stay on this machine
ARGS = [*SMALL, "--threads", "1", "--reduce", "exact", "--val-period", "0", "--epochs", "3"]
MAKE_BUCKET = "import fsspec, sys; fsspec.filesystem(sys.argv[1]).mkdir(sys.argv[2])"
UPLOAD = "import fsspec, sys; fsspec.filesystem(sys.argv[1]).put(sys.argv[2], sys.argv[3], recursive=True)"
CREATE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from yolofleet.storage.object_writer import ObjectWriter

writer = ObjectWriter(sys.argv[1])
with ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(lambda number: writer.create("one", b"%d" % number), range(4))))
"""

pytestmark = pytest.mark.store


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("az", azurite), id="azurite"),
        pytest.param(("gs", gcp_storage_emulator), id="gcp-storage-emulator"),
        pytest.param(("s3", radosgw), id="radosgw"),
    ],
)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The scheme of a running server, which this process and its children use."""
    (scheme, server), folder = request.param, tmp_path_factory.mktemp("server")
    with server(folder) as access, pytest.MonkeyPatch.context() as patch:
        for name, value in access.items():
            patch.setenv(name, value)
        patch.setenv("YOLOFLEET_CACHE", str(folder / "cache"))
        subprocess.run([sys.executable, "-c", MAKE_BUCKET, scheme, BUCKET], check=True)
        yield scheme


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


def test_wrong_credentials_are_refused_with_the_reason(store: str, tmp_path: Path) -> None:
    if store != "s3":
        pytest.skip("this emulator has one account, which everybody knows")
    variables = CONNECTED | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    refused = ran(
        tmp_path, sys.executable, "-c", CREATE, f"s3://{BUCKET}/refused", code=1, variables=variables
    )
    assert "SignatureDoesNotMatch" in refused.err
