"""Micro-batches are a function of their keys; loader processes start, fail, die and end in an orderly way."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from label_rows import of_images, rows_of
from test_sample import FULL, IMG, PLAIN, Pictures, samples
from walks import sampled

from yolofleet.data.datasets.index import build_index
from yolofleet.data.datasets.shapes import make_shapes
from yolofleet.data.datasets.sources import load_dataset
from yolofleet.data.geometry.shapes import Shapes
from yolofleet.data.input.cache import ImageCache, Mode
from yolofleet.data.input.loader import Loader
from yolofleet.data.input.order import Orders, RectOrders
from yolofleet.data.input.sample import MicroBatch, MicroBatchKey, TrainSamples, train_loader
from yolofleet.data.input.shared_buffers import mapped
from yolofleet.inference.evaluate.batches import val_batches, val_loader
from yolofleet.support.errors import DataError, StorageError

TESTS = [str(Path(__file__).parents[level]) for level in (0, 2)]  # of this module and of label_rows
forks = pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")


def count_labels(labels: Shapes, images: int, size_hw: tuple[int, int], keys: list) -> tuple:
    """Stands in for a loss's match."""
    return len(labels), images, size_hw, os.getpid()


def keys(count: int | None = None, images: int = 3):
    numbers = itertools.count() if count is None else range(count)
    for n in numbers:
        yield MicroBatchKey(n // 2, n % 2, tuple(divmod(n * images + i, 12) for i in range(images)))


def images_of(batch: MicroBatch) -> torch.Tensor:
    return batch.images_on(torch.device("cpu"))


def alive(pids: list[int]) -> list[int]:
    return [
        pid
        for pid in pids
        if Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    ]


def wait_until(condition) -> None:
    while not condition():  # pytest's limit ends a hang
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_micro_batches_are_those_of_the_keys_whatever_the_workers(workers):
    made = samples()
    with train_loader(made, keys(), count_labels, workers=workers, prefetch=2) as loader:
        for key, batch in zip(keys(5), loader, strict=False):
            assert (batch.step, batch.ordinal) == (key.step, key.ordinal)
            assert images_of(batch).shape == (3, 3, IMG, IMG) and images_of(batch).dtype == torch.uint8
            expected = [made.sample(*sample) for sample in key.samples]
            for i, (image, labels) in enumerate(expected):
                assert np.array_equal(images_of(batch)[i].permute(1, 2, 0).numpy(), image)
                assert np.array_equal(rows_of(of_images(batch.labels, i, i + 1)), rows_of(labels))
            assert batch.targets[:3] == (len(batch.labels), 3, (IMG, IMG))
            assert (batch.targets[3] == os.getpid()) == (workers == 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_images_arrive_channels_last_and_without_a_copy(workers):
    with train_loader(samples(), keys(2), count_labels, workers=workers) as loader:
        for batch in loader:
            assert images_of(batch).is_contiguous(memory_format=torch.channels_last)
            assert images_of(batch).permute(0, 2, 3, 1).is_contiguous()
            shared = {buffer.data_ptr() for buffer in mapped.values()}
            assert (images_of(batch).data_ptr() in shared) == (workers > 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_images_stay_channels_last(workers):
    with train_loader(samples(), keys(2), count_labels, workers=workers, pin_memory=True) as loader:
        for batch in loader:
            assert images_of(batch).is_pinned() and images_of(batch).permute(0, 2, 3, 1).is_contiguous()
            assert batch.targets[1] == 3
    pictures: Any = Pictures(4)  # val_loader calls get
    index = index_of([(image.shape[1], image.shape[0]) for image in pictures.images])
    batches = val_batches(index, IMG, 4, 32)
    with val_loader(index, batches, IMG, workers=workers, cache=pictures, pin_memory=True) as val:
        for val_batch, images, ways_back in val:
            assert images.is_pinned() and len(images) == len(ways_back) == len(val_batch.image_idx)


@pytest.mark.parametrize("workers", [0, 2])
def test_keys_are_taken_lazily(workers):
    taken = []

    def stream():
        for key in keys():
            taken.append(key)
            yield key

    with train_loader(samples(), stream(), count_labels, workers=workers, prefetch=2) as loader:
        for _ in range(3):
            next(loader)
    assert 3 <= len(taken) <= 3 + 2 * workers


@pytest.mark.parametrize("workers", [0, 2])
def test_a_finite_stream_ends(workers):
    loader = train_loader(samples(), keys(3), count_labels, workers=workers)
    assert len(list(loader)) == 3
    loader.close()


def test_multi_scale_resizes_images_and_matches_at_that_size():
    made = samples()
    sized = [MicroBatchKey(0, 0, ((0, 1), (0, 2)), size) for size in (96, IMG, None)]
    large, same, plain = train_loader(made, sized, count_labels, workers=0)
    image, _ = made.sample(0, 1)
    assert images_of(large).shape == (2, 3, 96, 96)
    assert large.targets[2] == (96, 96)
    assert np.array_equal(
        images_of(large)[0].permute(1, 2, 0).numpy(),
        cv2.resize(image, (96, 96), interpolation=cv2.INTER_LINEAR),
    )
    assert np.array_equal(rows_of(large.labels), rows_of(plain.labels))
    assert torch.equal(images_of(same), images_of(plain))


def test_files_on_disk_come_through_index_and_cache_the_same_in_any_process(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    spec = load_dataset(str(make_shapes(tmp_path / "data", images=10, val_images=3, img=IMG)))
    index, val_index = build_index(spec, "train"), build_index(spec, "val")
    some = [MicroBatchKey(n, 0, tuple((0, 3 * n + i) for i in range(3))) for n in range(3)]
    made, validated = [], []
    modes: list[tuple[int, Mode]] = [(0, "none"), (2, "ram"), (1, "disk")]
    for workers, mode in modes:
        cache, val_cache = ImageCache(index, IMG, mode), ImageCache(val_index, IMG, mode)
        with contextlib.closing(cache), contextlib.closing(val_cache):
            stream = TrainSamples(index, cache, FULL, img=IMG, seed=0, epochs=2)
            with train_loader(stream, some, count_labels, workers=workers) as loader:
                made.append(
                    [
                        (images_of(batch).numpy().tobytes(), rows_of(batch.labels).tobytes())
                        for batch in loader
                    ]
                )
            batches = val_batches(val_index, IMG, 2, 32)
            with val_loader(val_index, batches, IMG, workers=workers, cache=val_cache) as loader:
                validated.append([(batch, images.numpy().tobytes(), back) for batch, images, back in loader])
    assert made[0] == made[1] == made[2]
    assert validated[0] == validated[1] == validated[2]


class Broken(Pictures):
    def get(self, image: int, seen: object = None) -> np.ndarray:
        if image == 7:
            raise StorageError("images/7.jpg is truncated", source="images/7.jpg", hint="replace the file")
        return super().get(image)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_ours_arrives_as_it_was_raised(workers):
    made = samples(PLAIN)
    made.cache = Broken()
    with pytest.raises(StorageError) as caught:
        for _ in train_loader(made, keys(4), count_labels, workers=workers):
            pass
    assert caught.value.render().splitlines() == [
        "StorageError: images/7.jpg is truncated",
        "  from : images/7.jpg",
        "  try  : replace the file",
    ]


class Deadly(Pictures):
    def get(self, image: int, seen: object = None) -> np.ndarray:
        if image == 7 and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().get(image)


def test_a_buffer_is_not_filled_again_while_a_part_of_it_is_held():
    """A loader process has ten buffers, and nine parts are held."""
    made = samples()
    with train_loader(made, keys(60), count_labels, workers=1) as loader:
        held = [batch.images[1] for number, batch in enumerate(loader) if number % 7 == 0]
    expected = list(train_loader(made, keys(60), count_labels, workers=0))
    for mine, batch in zip(held, expected[::7], strict=True):
        assert torch.equal(mine, batch.images[1])


def test_buffers_that_are_filled_again_hold_what_they_should():
    made = samples()
    expected = train_loader(made, keys(60), count_labels, workers=0)
    with train_loader(made, keys(60), count_labels, workers=2) as loader:
        for mine, theirs in zip(loader, expected, strict=True):
            assert torch.equal(images_of(mine), images_of(theirs))


@forks
@pytest.mark.parametrize("workers", [1, 4])
def test_a_killed_loader_process_is_explained(workers):
    handler = signal.getsignal(signal.SIGCHLD)
    made = samples(PLAIN)
    made.cache = Deadly()
    loader = train_loader(made, keys(), count_labels, workers=workers)
    pids = [process.pid for process in loader._workers]
    with pytest.raises(DataError) as caught:
        for _ in range(4):
            next(loader)
    assert caught.value.what == "a loader process was killed (exit -9): most likely out of memory"
    assert caught.value.hint == f"--workers {workers // 2} or --cache disk"
    assert not alive(pids)
    assert signal.getsignal(signal.SIGCHLD) == handler


@forks
def test_the_death_of_a_loader_process_does_not_interrupt_the_step_under_way():
    with train_loader(samples(), keys(), count_labels, workers=1) as loader:
        next(loader)
        os.kill(loader._workers[0].pid, signal.SIGKILL)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:  # DataLoader's own handler of SIGCHLD would raise here
            sum(range(1000))


def fails(labels: Shapes, images: int, size_hw: tuple[int, int], keys: list) -> None:
    raise AssertionError("a mistake of ours")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_of_ours_keeps_its_traceback(workers):
    with (
        pytest.raises(AssertionError, match="a mistake of ours") as caught,
        train_loader(samples(), keys(2), fails, workers=workers) as loader,
    ):
        next(loader)
    assert workers == 0 or "in fails" in str(caught.value)


@forks
def test_a_consumer_that_stops_early_leaves_no_process():
    loader = train_loader(samples(), keys(), count_labels, workers=2, prefetch=4)
    next(loader)
    pids = [process.pid for process in loader._workers]
    assert len(alive(pids)) == 2
    loader.close()
    assert not alive(pids)
    assert list(loader) == []
    loader.close()


@forks
def test_loader_processes_leave_signals_to_their_parent():
    with train_loader(samples(), keys(), count_labels, workers=2) as loader:
        next(loader)
        for process in loader._workers:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                os.kill(process.pid, number)
        for _ in range(20):
            next(loader)


PARENT = """
import multiprocessing, os, signal, sys, time
sys.path[:0] = {tests}
from test_loader import *
loader = train_loader(samples(), keys(), count_labels, workers=2)
next(loader)
print(*(process.pid for process in loader._workers), flush=True)
{end}
"""


@pytest.mark.long
@forks
@pytest.mark.parametrize("end", sampled(["os.kill(os.getpid(), signal.SIGKILL)", "1 / 0"], 2))
def test_loader_processes_end_with_their_parent(end):
    code = PARENT.format(tests=TESTS, end=end)
    parent = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=900
    )
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not alive(pids))


ENDING_THREADS = """
import signal, sys, threading
sys.path[:0] = {tests}
from test_loader import *
from yolofleet.data.input.loader import Loader

over = threading.Event()

def use_opencv(*_):
    pixels = cv2.imdecode(cv2.imencode(".jpg", np.zeros((64, 64, 3), np.uint8))[1], cv2.IMREAD_COLOR)
    cv2.warpAffine(cv2.cvtColor(cv2.resize(pixels, (40, 40)), cv2.COLOR_BGR2HSV), np.eye(2, 3), (30, 30))
    return None, torch.zeros(1)

def threads_end():
    while not over.is_set():
        some = [threading.Thread(target=use_opencv) for _ in range(8)]
        [thread.start() for thread in some], [thread.join() for thread in some]

def load():
    with Loader(use_opencv, range(1), workers=4, prefetch=1, pin_memory=False) as loader:
        next(loader)

ending = threading.Thread(target=threads_end)
ending.start()
for _ in range({loaders}):
    signal.alarm(120)  # ends this process if a loader process waits for a mutex
    thread = threading.Thread(target=load)  # its first use of OpenCV
    thread.start()
    thread.join()
signal.alarm(0)
over.set()
ending.join()
"""


@forks
@pytest.mark.slow
def test_loader_processes_start_while_threads_that_used_opencv_end():
    code = ENDING_THREADS.format(tests=TESTS, loaders=600)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, f"{run.returncode}\n{run.stderr}"


BESIDE_THREADS_OF_OPENCV = """
import threading
import cv2, numpy as np
from yolofleet.data.images.decode import set_opencv_threads

over = threading.Event()
pixels = np.zeros((640, 640, 3), np.uint8)

def use_opencv():
    while not over.is_set():
        cv2.cvtColor(pixels, cv2.COLOR_BGR2HSV)

using = [threading.Thread(target=use_opencv) for _ in range(2)]
[thread.start() for thread in using]
for _ in range(12_000):
    cv2.setNumThreads(2)  # as a new process has it
    set_opencv_threads(1)
over.set()
"""


def test_other_threads_may_be_in_opencv_when_it_loses_its_threads():
    run = subprocess.run(
        [sys.executable, "-c", BESIDE_THREADS_OF_OPENCV], capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, f"{run.returncode}\n{run.stderr}"


FORKED_BESIDE_THREADS_OF_OPENCV = """
import os, signal, sys, threading
import cv2, numpy as np
from yolofleet.data.images.decode import set_opencv_threads
from yolofleet.data.input.loader import Loader

cv2.setNumThreads(3)
cv2.cvtColor(np.zeros((640, 640, 3), np.uint8), cv2.COLOR_BGR2HSV)
for _ in range(8):  # which memory a new thread gets is chance
    if child := os.fork():
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(code)
    else:
        break
else:
    sys.exit()
signal.alarm(60)  # ends this process if it waits for a thread which the fork did not copy
over = threading.Event()
threads = [threading.Thread(target=over.wait) for _ in range(40)]  # some of them have the stacks of those
[thread.start() for thread in threads]
for workers in (0, 1, 1):
    with Loader(str, range(1), workers=workers, prefetch=1, pin_memory=False) as loader:
        assert list(loader) == ["0"]
set_opencv_threads(1)
over.set()
cv2.cvtColor(np.zeros((640, 640, 3), np.uint8), cv2.COLOR_BGR2HSV)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are not forked")
def test_a_forked_process_may_have_lost_the_threads_of_opencv():
    run = subprocess.run(
        [sys.executable, "-c", FORKED_BESIDE_THREADS_OF_OPENCV], capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, f"{run.returncode}\n{run.stderr}"


def test_a_loader_gives_opencv_its_threads_back():
    before = cv2.getNumThreads()
    try:
        cv2.setNumThreads(3)
        for workers in (0, 1):
            with Loader(str, range(1), workers=workers, prefetch=1, pin_memory=False) as loader:
                assert list(loader) == ["0"]
            assert cv2.getNumThreads() == 3
    finally:
        cv2.setNumThreads(before)


STOPPED_AT_THE_START = """
import os, signal, threading, time
from yolofleet.data.input.loader import Loader
from yolofleet.support.errors import Stopped
from yolofleet.support.system.signals import stoppable

signals = iter([signal.SIGTERM])
# in a hook, Python drops exceptions of handlers; another thread takes the signals that the forking thread blocks
os.register_at_fork(after_in_parent=lambda: [signal.pthread_kill(other.ident, number) or time.sleep(0.2) for number in signals])
other = threading.Thread(target=time.sleep, args=(60,), daemon=True)
other.start()
try:
    with stoppable():
        Loader(str, iter(range(10**9)), workers=2, prefetch=2, pin_memory=False)
except Stopped as problem:
    print(problem.source)
    kept = problem.__context__  # with the loader in its frames, as an error that is being shown
"""


@forks
def test_a_stop_signal_while_loader_processes_start_ends_all_of_them():
    run = subprocess.run(
        [sys.executable, "-c", STOPPED_AT_THE_START], capture_output=True, text=True, timeout=300
    )
    assert (run.returncode, run.stdout) == (0, "SIGTERM\n"), run.stderr


@pytest.mark.long
@forks
def test_shared_memory_that_is_too_small_is_explained(tmp_path):
    code = textwrap.dedent(f"""
        import sys
        sys.path[:0] = {TESTS}
        from test_loader import *
        many = (MicroBatchKey(n, 0, tuple((0, i % 12) for i in range(120))) for n in range(20))
        try:
            for batch in train_loader(samples(PLAIN), many, count_labels, workers=2):
                pass
        except DataError as error:
            print(error.what)
    """)
    command = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} {tmp_path / 'small.py'}"
    (tmp_path / "small.py").write_text(code)
    run = subprocess.run(
        ["unshare", "--mount", "bash", "-c", command], capture_output=True, text=True, timeout=900
    )
    if "unshare" in run.stderr or "mount" in run.stderr:
        pytest.skip("mount namespaces are not allowed here")
    assert run.stdout.strip() == "shared memory (/dev/shm) is too small for the loader processes", run.stderr


def index_of(sizes_wh: list[tuple[int, int]]):
    return types.SimpleNamespace(sizes_wh=np.array(sizes_wh, np.int32).reshape(-1, 2), is_mirrored=False)


# Batch shapes of YOLOv5 v7.0 (640 px, pad 0.5, stride 32) with the image of each batch that decides it: the
# least wide of the wide, the least high of the high. Recorded from the original over 254 images.
RECORDED = [
    ((640, 384), (416, 672)),
    ((640, 425), (448, 672)),
    ((640, 428), (448, 672)),
    ((640, 480), (512, 672)),
    ((640, 555), (576, 672)),
    ((640, 640), (672, 672)),
    ((591, 640), (672, 608)),
    ((480, 640), (672, 512)),
    ((427, 640), (672, 448)),
]


@pytest.mark.parametrize(("size_wh", "padded_hw"), RECORDED)
def test_padded_shape_is_that_of_the_original(size_wh, padded_hw):
    (batch,) = val_batches(index_of([size_wh]), 640, 8, 32)
    assert batch.size_hw == padded_hw


def test_validation_batches_hold_every_image_once_in_groups_of_one_shape():
    rng = np.random.default_rng(0)
    sizes = [(640, 480), (480, 640), (500, 500), (333, 500)]
    index = index_of([sizes[k] for k in rng.integers(0, 4, 100)])
    batches = val_batches(index, 320, 8, 32)
    assert sorted(i for batch in batches for i in batch.image_idx) == list(range(100))
    assert [batch.ordinal for batch in batches] == list(range(len(batches)))
    assert max(len(batch.image_idx) for batch in batches) == 8
    assert len(batches) <= 100 // 8 + 4
    shape_of = {i: batch.size_hw for batch in batches for i in batch.image_idx}
    assert shape_of == {i: b.size_hw for b in val_batches(index, 320, 3, 32) for i in b.image_idx}
    for batch in batches:
        assert list(batch.image_idx) == sorted(batch.image_idx)
    assert val_batches(index_of([]), 320, 8, 32) == []


@pytest.mark.parametrize("stride", [32, 64])
def test_padded_shapes_are_multiples_of_the_stride_and_hold_the_image(stride):
    rng = np.random.default_rng(1)
    sizes = rng.integers(20, 3000, (300, 2)).tolist()
    for batch in val_batches(index_of(sizes), 416, 1, stride):
        width, height = sizes[batch.image_idx[0]]
        ratio = 416 / max(width, height)
        assert batch.size_hw[0] % stride == batch.size_hw[1] % stride == 0
        assert batch.size_hw[0] >= round(height * ratio) and batch.size_hw[1] >= round(width * ratio)
        assert batch.size_hw[0] - height * ratio < stride * 1.5 + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_images_are_letterboxed_and_lead_back(workers):
    pictures: Any = Pictures(10)  # native images are twice as large; val_loader calls get
    index = index_of([(2 * image.shape[1], 2 * image.shape[0]) for image in pictures.images])
    batches = val_batches(index, IMG, 4, 32)
    with val_loader(index, batches, IMG, workers=workers, cache=pictures) as loader:
        results = list(loader)
    assert [batch for batch, _, _ in results] == batches
    for batch, images, ways_back in results:
        assert images.shape == (len(batch.image_idx), 3, *batch.size_hw)
        assert images.is_contiguous(memory_format=torch.channels_last)
        for number, image, way_back in zip(batch.image_idx, images, ways_back, strict=True):
            source = pictures.images[number]
            top, left = (batch.size_hw[0] - len(source)) // 2, (batch.size_hw[1] - IMG) // 2
            rgb = image.permute(1, 2, 0).numpy()
            assert np.array_equal(rgb[top : top + len(source), left : left + IMG], source[:, :, ::-1])
            assert (rgb[:top] == 114).all() and (rgb[:, :left] == 114).all()
            whole = np.array([[left, top, left + IMG, top + len(source)]], float)
            assert np.abs(way_back.to_native(whole) - [0, 0, 2 * IMG, 2 * len(source)]).max() <= 1


@pytest.mark.parametrize("workers", [0, 1])
def test_micro_batches_of_rectangular_training_have_one_shape_each(workers):
    pictures: Any = Pictures(12)
    index = index_of([(image.shape[1], image.shape[0]) for image in pictures.images])
    orders = RectOrders(Orders(pictures, 0), index, 3, 4)
    made = TrainSamples(pictures, pictures, FULL, img=IMG, seed=0, epochs=10, orders=orders)
    shapes = set()
    with train_loader(made, keys(4), count_labels, workers=workers) as loader:
        for key, batch in zip(keys(4), loader, strict=True):
            numbers = [orders.image_of(*sample) for sample in key.samples]
            height = max(len(pictures.images[number]) for number in numbers)
            assert images_of(batch).shape == (3, 3, -(-height // 4) * 4, IMG)
            assert batch.targets[2] == tuple(images_of(batch).shape[2:])
            shapes.add(batch.targets[2])
    assert len(shapes) > 2
    larger = MicroBatchKey(0, 0, next(keys(1)).samples, 2 * IMG)
    with train_loader(made, [larger], count_labels, workers=workers) as loader:
        assert images_of(next(loader)).shape[3] == 2 * IMG
