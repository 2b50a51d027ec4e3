"""A test that leaves something behind fails, and the message names it (``tests/leaks.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
LEAKING = """
import os, pathlib, signal, socket, subprocess, sys, threading
import pytest

kept = []

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

def test_orphan():  # its parent has ended: only its environment says where it comes from
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(601)'])"
    subprocess.run([sys.executable, "-c", code])

def test_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, name="waits for ever", daemon=True).start()

def test_file():
    kept.append(open("notes.txt"))

def test_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_variable():
    os.environ["LEFT_BY_A_TEST"] = "1"

def test_removed_variable():
    del os.environ["IS_HERE"]

def test_folder(tmp_path):
    os.chdir(tmp_path)

def test_signal():
    signal.signal(signal.SIGUSR1, lambda *_: None)

def test_family():
    from yolofleet.families.table import FAMILIES

    FAMILIES["mine"] = FAMILIES["yolov5"]

def test_entry():
    pathlib.Path("runs/exp").mkdir(parents=True)
"""
CLEAN = """
import os, subprocess, sys, threading
import pytest

@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.PIPE)
    before = os.environ.pop("IS_HERE")
    os.environ["OF_THE_SERVER"] = "1"
    yield process
    del os.environ["OF_THE_SERVER"]
    os.environ["IS_HERE"] = before
    process.kill()
    process.communicate()

def test_server(server):
    assert server.poll() is None

def test_server_with_other_variables(server, monkeypatch, tmp_path):
    monkeypatch.setenv("OF_THE_SERVER", "2")
    monkeypatch.chdir(tmp_path)

def test_things_that_end_soon():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
    threading.Thread(target=threading.Event().wait, args=(0.5,)).start()
"""


def run(folder: Path, text: str) -> str:
    (folder / "notes.txt").touch()
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").touch()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "leaks", "-p", "no:cacheprovider", "-v", "test_it.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS), "IS_HERE": "1"},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_whatever_a_test_leaves_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_TEST_LEAVES_S", "0.2")
    found = run(tmp_path, LEAKING)
    assert "11 passed, 11 errors" in found
    messages = found.partition("= ERRORS =")[2]
    for name, words in {
        "process": "time.sleep(600)",
        "orphan": "time.sleep(601)",
        "thread": "thread waits for ever (Event.wait)",
        "file": "notes.txt",
        "port": ", listens on port ",
        "variable": "environment variable LEFT_BY_A_TEST=1",
        "removed_variable": "environment variable IS_HERE is gone",
        "folder": "/test_folder0",
        "signal": "handler of signal 10: <function test_signal.<locals>.<lambda>",
        "family": "family of networks mine",
        "entry": f"{tmp_path / 'runs'} in the checkout",
    }.items():
        message = messages.partition(f"ERROR at teardown of test_{name} ")[2].partition("\n_____")[0]
        assert "this test leaves behind:" in message and words in message, name


def test_fixtures_of_a_module_and_what_ends_soon_are_no_leak(tmp_path):
    assert "3 passed" in (found := run(tmp_path, CLEAN)) and "error" not in found, found


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_fixture_of_a_module_that_leaves_its_server_fails_the_last_test(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_TEST_LEAVES_S", "0.2")
    found = run(tmp_path, CLEAN.replace("process.kill()", "return"))
    assert "3 passed, 1 error" in found
    assert "ERROR at teardown of test_things_that_end_soon" in found and "time.sleep(600)" in found
