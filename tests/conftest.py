import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # tests import `reference`
# a shell's background job ignores Ctrl-C, and so would what tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and a run under nohup does so, too
# each process of a test would compile the package again: 0.7 s
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("CI", None)  # CI services set it, and no progress is drawn there; tests of that rule set it
os.environ.setdefault("YOLOFLEET_OFFLINE", "1")  # a name that is not in the cache must not be fetched
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # for tests that load ONNX Runtime themselves
sys.modules.setdefault("openvino_telemetry", None)  # and for those that load OpenVINO

import leaks  # noqa: E402 (needs the path above)

HERE = Path(__file__).resolve().parent
SPREAD = {  # long tests that share nothing
    "test_miniature_accelerator.py",
    "test_runs_on_gpus.py",
    "test_failures_on_gpus.py",
}
LONGEST_FIRST = ("e2e", "multiprocess", "parity", "unit")
_frozen_modules = 0


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(leaks, "leaks")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the workers of ``-n auto``: two more than cores, because many tests wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """As ``--dist loadfile``, but each test of a file in ``SPREAD`` may run in another worker."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return nodeid if Path(scope).name in SPREAD else scope

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the folders whose tests last longest."""
    place = {name: i for i, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.relative_to(HERE).parts[0], -1))


def pytest_collection_finish() -> None:
    freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # a test has imported many modules: torch's compiler, which optimizers import when they are first used
    if len(sys.modules) >= _frozen_modules + 100:
        freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Restore torch's number of threads, which a command changes that a test calls in this process.

    With two threads in each of four workers on two cores, small operations take up to 50 times as long.
    """
    torch, threads = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdecimal() and torch.get_num_threads() != int(threads):
        torch.set_num_threads(int(threads))


def freeze() -> None:
    """Exempt what exists from garbage collection: the modules that tests import have half a million objects, which each
    full collection would visit. A trial of ``--batch auto`` collects some twenty times."""
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)
