"""Streams, screens, cameras and windows for real; each test skips where the server or the device is missing.

On Debian: ``apt install gir1.2-gst-rtsp-server-1.0 python3-gi gstreamer1.0-plugins-good xvfb`` and ``pip install mss``.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from small_weights import saved, untrained

from yolofleet.inference.predict import frames as reading
from yolofleet.inference.predict import pictures, results, sources
from yolofleet.inference.predict.results import show_image
from yolofleet.inference.predict.sources import Source, check_ends
from yolofleet.support.errors import ConfigError, DataError

SYSTEM_PYTHON = "/usr/bin/python3"  # Debian's bindings of GStreamer are for this one
RTSP_SERVER = """
import sys, gi
gi.require_version("Gst", "1.0"); gi.require_version("GstRtspServer", "1.0")
from gi.repository import Gst, GstRtspServer, GLib
Gst.init(None)
server = GstRtspServer.RTSPServer.new()
server.set_address("127.0.0.1"); server.set_service(sys.argv[1])
camera = GstRtspServer.RTSPMediaFactory.new()
camera.set_launch("( videotestsrc is-live=true pattern=red ! video/x-raw,format=I420,width=160,height=120,framerate=20/1 "
                  "! jpegenc ! rtpjpegpay name=pay0 pt=26 )")
server.get_mount_points().add_factory("/camera", camera)
assert server.attach(None)
print(server.get_bound_port(), flush=True)
GLib.MainLoop().run()
"""


@contextmanager
def started(*argv, pass_fds=()):
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=pass_fds)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def rtsp_server(port="0"):
    return started(SYSTEM_PYTHON, "-c", RTSP_SERVER, port)


@pytest.fixture(scope="module")
def gstreamer():
    trial = "import gi; gi.require_version('GstRtspServer', '1.0'); from gi.repository import GstRtspServer"
    try:
        subprocess.run([SYSTEM_PYTHON, "-c", trial], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("GStreamer's RTSP server is not installed")


def test_an_rtsp_stream_is_read_and_connected_again_after_it_stopped(gstreamer, monkeypatch):
    monkeypatch.setattr(reading, "RECONNECT_S", (0.1, 0.5))
    notes: list[str] = []
    with rtsp_server() as server:
        port = server.stdout.readline().decode().strip()
        source = Source(f"rtsp://someone:secret@127.0.0.1:{port}/camera", is_argument=True)
        source.note = notes.append
        frames = iter(source)
        first = [next(frames) for _ in range(5)]
    with rtsp_server(port) as server:  # the first one was killed
        server.stdout.readline()
        while not notes:  # frames that the killed server had sent
            first.append(next(frames))
        again = [next(frames) for _ in range(5)]
    rest = [*frames]
    every = [*first, *again, *rest]
    assert [frame.number for frame in every] == list(range(len(every)))
    assert all(frame.image.shape == (120, 160, 3) for frame in every)
    assert np.abs(every[-1].image.mean(axis=(0, 1)) - (0, 0, 255)).max() < 40  # BGR
    assert "stopped after" in notes[0] and "connecting again" in notes[0]
    assert source.problems == [
        f"the rest of rtsp://someone:***@127.0.0.1:{port}/camera: it stopped after {len(every)} frames, "
        "and 2 new connections failed"
    ]
    assert "secret" not in source.name + str(notes) + every[0].path


PREDICT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
from yolofleet.cli import main
sys.exit(main(["predict", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_stream_and_keeps_its_results(gstreamer, tmp_path):
    saved(untrained(3), tmp_path / "a.safetensors")
    folder = tmp_path / "found"
    words = ["--weights", tmp_path / "a.safetensors", "--img", "64", "--device", "cpu", "--save-json"]
    words += ["--project", tmp_path, "--name", "found", "--source"]
    with rtsp_server() as server:
        url = f"rtsp://127.0.0.1:{server.stdout.readline().decode().strip()}/camera"
        with started(sys.executable, "-c", PREDICT, *map(str, words), url) as predict:
            for line in predict.stdout:
                if b"frame 5" in line:
                    break
            predict.send_signal(signal.SIGINT)
            said = predict.communicate(timeout=900)[0].decode()
    assert predict.returncode == 0 and "stopped on request" in said
    assert len(json.loads((folder / "predictions.json").read_text())) >= 5
    assert len(list(folder.glob("*.mp4"))) == 1


def test_an_rtsp_server_without_such_a_stream_is_a_problem_at_once(gstreamer):
    with rtsp_server() as server:
        port = server.stdout.readline().decode().strip()
        source = Source(f"rtsp://someone:secret@127.0.0.1:{port}/nothing", is_argument=True)
        assert list(source) == []
    assert "has no such stream" in source.problems[0] and "secret" not in source.problems[0]


@pytest.fixture
def white_display(monkeypatch):
    if shutil.which("Xvfb") is None:
        pytest.skip("Xvfb is not installed")
    reading, writing = os.pipe()
    options = ("-screen", "0", "320x240x24", "-wr", "-noreset", "-nolisten", "tcp")
    try:
        with started("Xvfb", "-displayfd", str(writing), *options, pass_fds=[writing]):
            if not select.select([reading], [], [], 60)[0]:
                pytest.skip("Xvfb does not start here")
            monkeypatch.setenv("DISPLAY", ":" + os.read(reading, 20).decode().strip())
            yield
    finally:
        os.close(reading)
        os.close(writing)


def test_pictures_of_a_screen(white_display):
    pytest.importorskip("mss", reason="mss is not installed")
    for spec in ("screen", "screen:0"):
        frames = iter(Source(spec, is_argument=True, vid_stride=2))
        first, second = next(frames), next(frames)
        assert first.image.shape == (240, 320, 3) and first.image.min() == 255
        assert (first.path, first.number, second.number, first.is_file) == (spec, 0, 2, False)
        frames.close()  # type: ignore[attr-defined]
    absent = Source("screen:7", is_argument=True)
    assert list(absent) == [] and absent.problems == ["there is no screen 7: screens are 1 to 1"]


def test_a_machine_without_a_display_has_no_screen(monkeypatch):
    pytest.importorskip("mss", reason="mss is not installed")
    if sys.platform != "linux":
        pytest.skip("this system needs no DISPLAY")
    monkeypatch.delenv("DISPLAY", raising=False)
    source = Source("screen", is_argument=True)
    assert list(source) == [] and "cannot take a picture of the screen" in source.problems[0]


@pytest.fixture
def windows_untried():
    results._check_windows.cache_clear()
    yield
    results._check_windows.cache_clear()


SHOW = """
import numpy as np
from yolofleet.inference.predict.results import show_image
assert show_image(np.zeros((40, 60, 3), np.uint8), wait_ms=50) == 255  # no key was pressed
"""


def test_an_image_is_shown_in_a_window(white_display):
    # Qt never closes its connection to the display, so another process shows the image.
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True)
    if "this OpenCV cannot open windows" in done.stderr:
        pytest.skip("this OpenCV cannot open windows")
    assert done.returncode == 0, done.stderr


def test_a_window_on_a_machine_without_a_display_is_refused(monkeypatch, windows_untried):
    if sys.platform != "linux":
        pytest.skip("this system needs no DISPLAY")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(ConfigError, match="cannot open"):  # with Qt, OpenCV would abort this process
        show_image(np.zeros((40, 60, 3), np.uint8), wait_ms=50)


CAMERAS = sorted(Path("/dev").glob("video*"))


@pytest.mark.skipif(not CAMERAS, reason="this machine has no camera")
def test_a_camera_gives_frames():
    frames = iter(Source(CAMERAS[0].name.removeprefix("video")))
    assert next(frames).image.ndim == 3
    frames.close()  # type: ignore[attr-defined]


@pytest.mark.skipif(bool(CAMERAS) or sys.platform != "linux", reason="this machine may have a camera")
def test_a_machine_without_a_camera_says_so():
    source = Source("0")
    assert list(source) == [] and source.problems == ["cannot open camera 0: this machine has no camera"]


@pytest.mark.parametrize("spec", ["0", "screen", "screen:2", "rtsp://me:secret@10.0.0.1/x", "RTSPS://h/x"])
def test_a_source_without_an_end_needs_stream(spec):
    with pytest.raises(ConfigError, match="may have no end") as caught:
        check_ends(spec)
    assert "secret" not in caught.value.render()


def test_a_source_with_an_end_needs_no_stream(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "0").mkdir()
    for spec in ("0", "screens", "a.jpg", "http://10.0.0.1/a.mp4", "-"):
        check_ends(spec)


def test_a_password_is_part_of_no_name():
    for scheme in ("rtsp", "http", "HTTPS"):
        shown = sources.without_password(f"{scheme}://me:se:cr@t@host:80/a@b?c=d:e@f")
        assert shown == f"{scheme}://me:***@host:80/a@b?c=d:e@f"
    for plain in ("rtsp://host:8554/a@b", "rtsp://me@host/x", "C:/me:you@x.jpg", "a:b@c"):
        assert sources.without_password(plain) == plain


def test_a_url_with_a_password_is_left_to_ffmpeg(monkeypatch):
    monkeypatch.setattr(pictures, "WAIT_S", 2.0)
    source = Source("http://me:secret@127.0.0.1:1/a.jpg", is_argument=True)
    assert list(source) == [] and source.problems[0].startswith("cannot open http://me:***@127.0.0.1:1/a.jpg")
    with pytest.raises(DataError):
        Source("http://me:secret@127.0.0.1:1/a.jpg")
