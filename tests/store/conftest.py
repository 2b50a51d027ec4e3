import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from server import Faults, Store, missing, proxy, s3_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if "store" in item.path.parts:
            item.add_marker(pytest.mark.store)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the thread that fsspec has for all of a process, which no test can leave behind then."""
    if any("store" in item.path.parts for item in session.items) and not missing():
        from fsspec.asyn import get_loop

        get_loop()


@pytest.fixture(scope="module", autouse=True)
def closed_connections() -> Iterator[None]:
    """Close the connections that file systems of a module keep for later requests."""
    yield
    import s3fs

    for found in gc.get_objects():
        if isinstance(found, s3fs.S3FileSystem) and found._s3 is not None:
            s3fs.S3FileSystem.close_session(found.loop, found._s3)
            found._s3 = None


@pytest.fixture(autouse=True)
def restored_working_folder() -> Iterator[None]:
    """Return to the working folder after a test; machines run commands in that of this process."""
    before = Path.cwd()
    yield
    os.chdir(before)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with s3_server(tmp_path_factory.mktemp("s3") / "server.log") as running:
        yield running


@pytest.fixture
def faults(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Faults]:
    """A proxy before the store, which this process and its children use; their cache is empty."""
    with proxy(store) as (port, faults):
        for name, value in store.environment(port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
        yield faults
