import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if "cluster" in item.path.parts:
            item.add_marker(pytest.mark.cluster)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def restored_working_folder() -> Iterator[None]:
    """Return to the working folder after a test; the machines run commands in that of this process."""
    before = Path.cwd()
    yield
    os.chdir(before)
