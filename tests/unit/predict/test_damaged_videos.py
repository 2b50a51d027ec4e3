"""Videos with damaged frames, and videos that are cut off: what can be read is used, and the rest is counted."""

import json
import re

import cv2
import numpy as np
import pytest
from small_weights import saved, untrained

from yolofleet.config.load import resolve_predict
from yolofleet.inference.predict.run import predict_command
from yolofleet.inference.predict.sources import Source

FRAMES = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a video whose frames are pictures of their own, and where each begins and ends."""
    path = tmp_path_factory.mktemp("video") / "whole.avi"
    video = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 5.0, (64, 48))
    if not video.isOpened():
        pytest.skip("this OpenCV writes no MJPEG")
    for number in range(FRAMES):
        video.write(np.full((48, 64, 3), 20 * number, np.uint8))
    video.release()
    data = path.read_bytes()
    starts = [found.start() + 8 for found in re.finditer(b"00dc(?=....\xff\xd8)", data, re.DOTALL)]
    sizes = [int.from_bytes(data[start - 4 : start], "little") for start in starts]
    return data, list(zip(starts, sizes, strict=True))


def damaged(whole, *numbers):
    data, places = bytearray(whole[0]), whole[1]
    for number in numbers:
        start, size = places[number]
        data[start : start + size] = bytes(size)
    return bytes(data)


def read(tmp_path, data, **settings):
    path = tmp_path / "clip.avi"
    path.write_bytes(data)
    source = Source(str(path), **settings)
    return source, list(source)


@pytest.mark.parametrize("lost", [(0,), (1,), (5,), (10,), (3, 4, 5, 6), (2, 7, 9)])
def test_frames_behind_a_damaged_one_are_read_with_their_own_numbers(whole, tmp_path, lost):
    source, frames = read(tmp_path, damaged(whole, *lost))
    assert [frame.number for frame in frames] == [n for n in range(FRAMES) if n not in lost]
    for frame in frames:  # the number is that of the content
        assert abs(float(frame.image.mean()) - 20 * frame.number) < 5
    assert source.lost == len(lost) and not source.problems
    (loss,) = source.losses
    assert f"{len(lost)} cannot be decoded, the first is frame {lost[0] + 1}" in loss


def test_a_damaged_last_frame_and_a_video_that_is_cut_off_are_counted(whole, tmp_path):
    source, frames = read(tmp_path, damaged(whole, FRAMES - 1))
    assert len(frames) == FRAMES - 1 and source.lost == 1
    data, places = whole
    source, frames = read(tmp_path, data[: places[7][0]])
    assert [frame.number for frame in frames] == list(range(7)) and source.lost == FRAMES - 7
    assert f"it ends after 7 of the {FRAMES} that it states" in source.losses[0]


def test_a_whole_video_lacks_nothing(whole, tmp_path):
    for stride in (1, 5):
        source, frames = read(tmp_path, whole[0], vid_stride=stride)
        assert len(frames) == -(-FRAMES // stride) and not source.lost and not source.losses


def test_every_nth_frame_stays_the_nth_behind_a_damaged_one(whole, tmp_path):
    source, frames = read(tmp_path, damaged(whole, 4), vid_stride=3)
    assert [frame.number for frame in frames] == [0, 3, 6, 9] and source.lost == 1
    source, frames = read(tmp_path, damaged(whole, 3), vid_stride=3)
    assert [frame.number for frame in frames] == [0, 6, 9]


def test_a_stream_of_unknown_length_goes_on_behind_damaged_frames_and_ends(tmp_path, monkeypatch):
    reads = [True, False, False, True, False, True]

    class Capture:  # OpenCV's interface, as of a stream that states neither length nor time
        def __init__(self, *_):
            self.left = list(reads)

        def isOpened(self):
            return True

        def get(self, _):
            return -1.0

        def grab(self):
            return self.left.pop(0) if self.left else False

        def retrieve(self):
            return True, np.zeros((4, 4, 3), np.uint8)

        def release(self):
            pass

    monkeypatch.setattr(cv2, "VideoCapture", Capture)
    (tmp_path / "clip.avi").write_bytes(b"x")
    source = Source(str(tmp_path / "clip.avi"))
    assert [frame.number for frame in source] == [0, 3, 5] and source.lost == 3


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return saved(untrained(2), tmp_path_factory.mktemp("weights") / "best.safetensors")


def test_predict_writes_all_readable_frames_and_warns(whole, weights, tmp_path, capsys):
    clip = tmp_path / "clip.avi"
    clip.write_bytes(damaged(whole, 4))
    given = {"weights": str(weights), "source": str(clip), "img": 64, "device": "cpu", "save_json": True}
    config = resolve_predict({**given, "project": str(tmp_path / "out")}, source="test").value
    assert predict_command(config) == 0
    told = capsys.readouterr().out
    assert "warning: " in told and "lacks frames: 1 cannot be decoded, the first is frame 5" in told
    assert "11 images (1 more could not be read)" in told
    found = json.loads((tmp_path / "out" / "exp" / "predictions.json").read_text())
    assert [image["frame"] for image in found] == [n for n in range(FRAMES) if n != 4]
    assert len(list(Source(str(tmp_path / "out" / "exp" / "clip.mp4")))) == FRAMES - 1


def test_python_keeps_the_results_and_warns(whole, weights, tmp_path, capsys):
    from yolofleet import load_model

    clip = tmp_path / "clip.avi"
    clip.write_bytes(damaged(whole, 4))
    results = load_model(weights, img=64, device="cpu").predict(clip)
    assert len(results) == FRAMES - 1
    assert "lacks frames: 1 cannot be decoded" in capsys.readouterr().err
