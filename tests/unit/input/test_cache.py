import errno
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from label_rows import index_of
from small_data import write_picture, yolo_set
from walks import sampled

from yolofleet.data.input import cache as cache_module
from yolofleet.data.input.cache import ImageCache, reduction_for, resized_wh, shared_file, shared_memory
from yolofleet.storage.caches import cache_root
from yolofleet.support.errors import DataError
from yolofleet.support.system.cgroup import available_bytes

LABEL = "0 0.5 0.5 0.2 0.4\n"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="shared memory files and /proc")
GIB = 2**30


@pytest.fixture(autouse=True)
def no_leaks(tmp_path, monkeypatch):
    """A folder of its own, in shared memory where there is such a thing, and empty at the end."""
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "cache"))
    shared = cache_module.MEMORY_FOLDERS[0]
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        monkeypatch.setattr(cache_module, "MEMORY_FOLDERS", (Path(folder),))
        yield
        assert named_files() == []


def named_files():
    return sorted(cache_module.MEMORY_FOLDERS[0].iterdir())


@pytest.fixture
def index(tmp_path):
    """Five images of several shapes."""
    yolo_set(tmp_path / "data", {})
    for number, (width, height) in enumerate([(64, 48), (30, 90), (128, 128), (33, 7), (61, 64)]):
        write_picture(
            tmp_path / "data" / "images" / "train" / f"it's {number}.jpg", width, height, seed=number
        )
    (tmp_path / "data" / "labels" / "train").mkdir(parents=True)
    (tmp_path / "data" / "labels" / "train" / "it's 0.txt").write_text(LABEL)
    return index_of(tmp_path / "data")


@pytest.fixture
def decodes(monkeypatch):
    """A list with an entry for each image that this process decodes from bytes."""
    seen = []
    decode = cv2.imdecode

    def counted(data, flags):
        seen.append(len(data))
        return decode(data, flags)

    monkeypatch.setattr(cv2, "imdecode", counted)
    return seen


def expected(index, image, img):
    """Written out once more: the longer side becomes img, up by INTER_LINEAR, down by INTER_AREA."""
    pixels = cv2.imread(index.path(image))
    assert pixels is not None
    height, width = pixels.shape[:2]
    ratio = img / max(width, height)
    if ratio == 1:
        return pixels
    size = (min(img, int(np.ceil(width * ratio))), min(img, int(np.ceil(height * ratio))))
    return cv2.resize(pixels, size, interpolation=cv2.INTER_LINEAR if ratio > 1 else cv2.INTER_AREA)


def assert_right(cache, index, img=64):
    for image in range(len(index)):
        pixels = cache.get(image)
        assert np.array_equal(pixels, expected(index, image, img))
        assert not pixels.flags.writeable


def test_sizes_keep_the_aspect_and_never_exceed_the_side():
    sizes = np.array([[640, 480], [480, 640], [500, 375], [1, 1000], [33, 7], [3000, 2999]])
    # 7 x 640 / 33 = 135.8 -> 136; 0.64 -> 1; 2999 x 640 / 3000 = 639.8 -> 640
    assert resized_wh(sizes, 640).tolist() == [
        [640, 480],
        [480, 640],
        [640, 480],
        [1, 640],
        [640, 136],
        [640, 640],
    ]
    many = np.random.default_rng(0).integers(1, 5000, (20000, 2))
    for img in (320, 416, 640, 1283):
        resized = resized_wh(many, img)
        assert (resized.max(1) == img).all()
        assert (resized.min(1) >= 1).all()
        assert (np.abs(resized - many * (img / many.max(1, keepdims=True))) < 1).all()


@pytest.mark.parametrize("mode", ["none", "ram", "disk", "auto"])
@pytest.mark.parametrize("img", [32, 64, 200])
def test_every_mode_gives_the_same_pixels(index, decodes, mode, img):
    if mode == "auto" and sys.platform != "linux":
        pytest.skip("free memory is not known")
    cache = ImageCache(index, img, mode)
    assert cache.mode == {"auto": "ram"}.get(mode, mode)
    assert_right(cache, index, img)
    assert_right(cache, index, img)
    assert len(decodes) == (10 if mode == "none" else 5)
    assert f"cache: {cache.mode}" in cache.note
    kept = cache.get(2)
    cache.close()
    assert np.array_equal(kept, expected(index, 2, img))  # still valid
    assert np.array_equal(cache.get(2), kept)


def test_a_disk_cache_is_found_again_by_the_next_run(index, decodes):
    first = ImageCache(index, 64, "disk")
    assert_right(first, index)
    first.close()
    second = ImageCache(index, 64, "disk")
    assert_right(second, index)
    assert len(decodes) == 5
    assert_right(ImageCache(index, 48, "disk"), index, 48)  # another size is another file
    assert len(list((cache_root() / "images").iterdir())) == 2


@pytest.mark.parametrize("place", [0.05, 0.3, 0.6, 0.95])
def test_a_torn_write_is_noticed_and_done_again(index, decodes, place):
    cache = ImageCache(index, 64, "disk")
    assert_right(cache, index)
    cache.close()
    (file,) = (cache_root() / "images").iterdir()
    data = bytearray(file.read_bytes())
    start = 8192  # behind the header and the checksums
    torn = start + int((len(data) - start) * place)
    data[torn : torn + 64] = bytes(64)
    file.write_bytes(bytes(data))
    again = ImageCache(index, 64, "disk")
    assert_right(again, index)
    assert len(decodes) == 6
    assert_right(again, index)
    assert len(decodes) == 6


@pytest.mark.parametrize("content", [b"", b"YFIMAGE1", bytes(5000), b"x" * 100_000])
def test_a_file_that_is_no_cache_is_laid_out_again(index, content):
    ImageCache(index, 64, "disk").close()
    (file,) = (cache_root() / "images").iterdir()
    file.write_bytes(content)
    cache = ImageCache(index, 64, "disk")
    assert cache.covered == 5
    assert_right(cache, index)


def test_an_image_that_changed_during_the_run_is_an_error(index):
    cache = ImageCache(index, 64, "ram")
    write_picture(Path(index.path(0)), 50, 50)
    with pytest.raises(DataError, match="has 50 x 50 pixels; the index has 64 x 48"):
        cache.get(0)
    Path(index.path(1)).unlink()
    with pytest.raises(DataError, match="does not exist"):
        cache.get(1)
    cache.close()


# memory


def test_a_cache_that_does_not_fit_covers_a_part(index, decodes, monkeypatch):
    # the free memory of a machine cannot be chosen
    monkeypatch.setattr(cache_module, "available_bytes", lambda: 60_000)
    cache = ImageCache(index, 64, "ram")
    # 80 % of 60000 is 48000: a block of 8192, 64x48x3 = 9216, 22x64x3 = 4224, 64x64x3 = 12288, 64x14x3 = 2688,
    # together 36608; the fifth needs 61x64x3 = 11712
    assert cache.covered == 4
    assert "4 of 5 images" in cache.note
    assert_right(cache, index)
    assert_right(cache, index)
    assert len(decodes) == 6
    cache.close()
    assert ImageCache(index, 64, "auto").mode == "none"
    assert "but only" in ImageCache(index, 64, "auto").note
    monkeypatch.setattr(cache_module, "available_bytes", lambda: 9000)
    assert ImageCache(index, 64, "ram").mode == "none"


def test_two_caches_do_not_count_the_same_memory_twice(index, monkeypatch):
    # the free memory of a machine cannot be chosen; half of this is 70000, and one cache needs 48320
    monkeypatch.setattr(cache_module, "available_bytes", lambda: 140_000)
    first = ImageCache(index, 64, "auto")
    assert first.mode == "ram"
    second = ImageCache(index, 60, "auto")
    assert second.mode == "none"
    first.close()
    third = ImageCache(index, 60, "auto")
    assert third.mode == "ram"
    third.close()


def test_a_full_disk_costs_speed_only(index, decodes, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    cache = ImageCache(index, 64, "disk")
    monkeypatch.setattr(cache_module.os, "pwrite", full)
    assert_right(cache, index)
    assert_right(cache, index)
    assert len(decodes) == 10


@linux_only
def test_a_full_shared_memory_does_not_kill(index, tmp_path):
    """Really full: a file size limit stops writes as a full file system does."""
    script = f"""
import os, resource, signal, pickle
os.environ["YOLOFLEET_CACHE"] = {str(tmp_path / "cache")!r}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from yolofleet.data.input.cache import ImageCache
index = pickle.loads({pickle.dumps(index)!r})
cache = ImageCache(index, 64, "ram")
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
shapes = [cache.get(i).shape for i in range(5)] + [cache.get(i).shape for i in range(5)]
print(len(shapes), sum(cache._file.read(i) is not None for i in range(5)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900)
    assert done.stdout.split() == ["10", "1"], done.stderr


def test_no_place_for_a_cache_is_said(index, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("YOLOFLEET_CACHE", str(tmp_path / "file"))
    cache = ImageCache(index, 64, "disk")
    assert cache.mode == "none"
    assert "cache: none (" in cache.note
    assert_right(cache, index)


def test_free_memory_is_the_least_of_machine_and_groups(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert available_bytes(proc, groups) is None
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   8388608 kB\n")
    assert available_bytes(proc, groups) == 8 * GIB
    (proc / "self" / "cgroup").write_text("0::/jobs/one\n")
    (groups / "jobs" / "one").mkdir(parents=True)
    (groups / "jobs" / "one" / "memory.max").write_text("max\n")
    (groups / "jobs" / "one" / "memory.current").write_text("5\n")
    assert available_bytes(proc, groups) == 8 * GIB
    (groups / "jobs" / "memory.max").write_text(f"{4 * GIB}\n")  # a parent's limit counts
    (groups / "jobs" / "memory.current").write_text(f"{3 * GIB}\n")
    assert available_bytes(proc, groups) == 1 * GIB
    (groups / "jobs" / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")  # can be dropped
    assert available_bytes(proc, groups) == 2 * GIB
    (proc / "self" / "cgroup").write_text("5:cpu,memory:/gone\n4:pids:/x\n")
    (groups / "memory").mkdir()
    (groups / "memory" / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (groups / "memory" / "memory.usage_in_bytes").write_text("0\n")
    assert available_bytes(proc, groups) == GIB


# several processes


def _hash_and_count(cache, results):
    """In another process: what it sees and how many images it decoded."""
    decoded = []
    original = cache_module.read_image

    def counted(path, **options):
        decoded.append(path)
        return original(path, **options)

    cache_module.read_image = counted
    total = sum(int(cache.get(image).sum()) for image in range(len(cache.index)))
    results.put((total, len(decoded), cache.mode))


def _open_with_token(index, token, ready, go, results):
    cache = ImageCache(index, 64, "ram", token=token)
    ready.put(cache.mode)
    go.wait(900)
    _hash_and_count(cache, results)
    cache.close()


@linux_only
@pytest.mark.parametrize(
    ("mode", "method"), sampled([("ram", "fork"), ("ram", "spawn"), ("disk", "fork"), ("disk", "spawn")], 3)
)
def test_processes_that_are_started_share_the_copy(index, method, mode):
    context = multiprocessing.get_context(method)
    cache = ImageCache(index, 64, mode)
    assert named_files() == []  # without a name from the start
    results = context.Queue()
    total = sum(int(expected(index, image, 64).sum()) for image in range(5))
    if method == "spawn":  # a process that loads torch takes seconds
        assert_right(cache, index)
    for decodes in (0,) if method == "spawn" else (5, 0):  # the first process fills it for the second
        process = context.Process(target=_hash_and_count, args=(cache, results))
        process.start()
        assert results.get(timeout=900) == (total, decodes, mode)
        process.join(900)
        assert process.exitcode == 0
    assert cache._file is not None and cache._file.read(3) is not None
    cache.close()


@linux_only
def test_local_ranks_share_one_copy_by_their_token(index):
    context = multiprocessing.get_context("fork")
    ready, results = context.Queue(), context.Queue()
    goes = [context.Event() for _ in range(3)]
    processes = [
        context.Process(target=_open_with_token, args=(index, "run 1", ready, go, results)) for go in goes
    ]
    for process in processes:
        process.start()
    mine = ImageCache(index, 64, "ram", token="run 1")
    assert [ready.get(timeout=900) for _ in goes] == ["ram"] * 3
    assert len(named_files()) == 1
    mine.unlink()
    assert named_files() == []
    total = sum(int(expected(index, image, 64).sum()) for image in range(5))
    for go, decodes in zip(goes, (5, 0, 0), strict=True):
        go.set()
        assert results.get(timeout=900) == (total, decodes, "ram")
    for process in processes:
        process.join(900)
        assert process.exitcode == 0
    assert mine._file is not None and mine._file.read(4) is not None
    mine.close()


def _hold(index, token, results):
    cache = ImageCache(index, 64, "ram", token=token)
    cache.get(0)
    results.put(len(named_files()))
    signal.pause()


@linux_only
@pytest.mark.parametrize("token", ["", "run 2"])
def test_nothing_is_left_after_sigkill(index, token, monkeypatch):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_hold, args=(index, token, results))
    process.start()
    assert results.get(timeout=900) == (1 if token else 0)
    if token:
        mine = ImageCache(index, 64, "ram", token=token)
        assert mine.get(0) is not None
        mine.unlink()
        mine.close()
    process.kill()
    process.join(900)
    assert named_files() == []


@linux_only
def test_a_name_that_a_crash_left_is_removed_by_the_next_run(index, monkeypatch):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_hold, args=(index, "run 3", results))
    process.start()
    assert results.get(timeout=900) == 1
    monkeypatch.setattr(cache_module, "_STALE_S", -1.0)
    ImageCache(index, 64, "ram").close()
    assert len(named_files()) == 1  # in use
    process.kill()
    process.join(900)
    assert len(named_files()) == 1
    ImageCache(index, 64, "ram").close()
    assert named_files() == []


def _race(index, start, results):
    start.wait(900)
    cache = ImageCache(index, 64, "disk")
    _hash_and_count(cache, results)


@linux_only
def test_processes_that_start_together_agree(index):
    context = multiprocessing.get_context("fork")
    total = sum(int(expected(index, image, 64).sum()) for image in range(5))
    for _ in range(2):
        start, results = context.Event(), context.Queue()
        processes = [context.Process(target=_race, args=(index, start, results)) for _ in range(4)]
        for process in processes:
            process.start()
        start.set()
        found = [results.get(timeout=900) for _ in processes]
        for process in processes:
            process.join(900)
            assert process.exitcode == 0
        assert {(item[0], item[2]) for item in found} == {(total, "disk")}
        (file,) = (cache_root() / "images").iterdir()
        file.unlink()


@linux_only
def test_images_on_disk_follow_the_umask_and_images_in_memory_are_private(index):
    mask = os.umask(0o027)
    try:
        kept = [ImageCache(index, 64, "disk"), ImageCache(index, 64, "ram", token="together")]
    finally:
        os.umask(mask)
    (on_disk,), (in_memory,) = (cache_root() / "images").iterdir(), named_files()
    assert [path.stat().st_mode & 0o777 for path in (on_disk, in_memory)] == [0o640, 0o600]
    for cache in kept:
        cache.close()


def test_without_a_folder_for_temporary_files_images_are_decoded_each_time(index, monkeypatch):
    def none_is_usable():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none_is_usable)
    assert cache_module._temporary_folders() == []
    with monkeypatch.context() as patched:
        patched.setattr(cache_module, "MEMORY_FOLDERS", ())
        cache = ImageCache(index, 64, "ram")
    assert cache.mode == "none" and "neither /dev/shm nor the folder" in cache.note
    cache.close()


def test_a_jpeg_is_reduced_as_far_as_its_size_allows():
    factors = [reduction_for(side, side, 320) for side in (319, 639, 640, 1279, 1280, 2560, 9992)]
    assert factors == [1, 1, 2, 2, 4, 8, 8]
    assert reduction_for(1280, 427, 320) == 4  # rounding up to 428 moves the last row by a quarter of a pixel
    assert reduction_for(1280, 425, 320) == 2  # 3 of 4 rows would be missing in the last one
    assert reduction_for(426, 1280, 320) == 4


def test_reduced_images_have_the_sizes_of_the_others(index):
    whole, reduced = ImageCache(index, 31, "none"), ImageCache(index, 31, "none", quick=True)
    for image in range(len(index)):
        one, other = whole.get(image), reduced.get(image)
        assert one.shape == other.shape
        # small noisy images; test_decode.py compares smooth ones
        assert np.abs(one.astype(int) - other).mean() < 6


def test_whole_and_reduced_images_are_cached_apart(index):
    with (
        closing(ImageCache(index, 32, "disk")) as whole,
        closing(ImageCache(index, 32, "disk", quick=True)) as reduced,
    ):
        whole.get(2)
        reduced.get(2)
        assert whole._file is not None and reduced._file is not None
        assert whole._file.layout.digest != reduced._file.layout.digest


# JPEGs


def test_jpegs_are_the_same_pixels_whether_they_are_kept_or_not(index, decodes, monkeypatch):
    with closing(ImageCache(index, 64, "jpeg")) as kept:
        first = [kept.get(image) for image in range(len(index))]
        decodes.clear()
        again = [kept.get(image) for image in range(len(index))]
        assert kept.mode == "jpeg" and kept.covered == 5 and "cache: jpeg, 5 of 5" in kept.note
        assert len(decodes) == 5  # of the JPEGs, and none of the files
    # the free memory of a machine cannot be chosen
    monkeypatch.setattr(cache_module, "available_bytes", lambda: 0)
    unkept = ImageCache(index, 64, "jpeg")
    assert unkept.mode == "none"
    for image in range(len(index)):
        pixels = unkept.get(image)
        assert np.array_equal(pixels, first[image]) and np.array_equal(pixels, again[image])
        assert pixels.shape == expected(index, image, 64).shape and not pixels.flags.writeable


def test_jpegs_are_close_to_the_pixels_and_small(tmp_path):
    yolo_set(tmp_path / "data", {})
    write_picture(tmp_path / "data" / "images" / "train" / "smooth.png", 640, 480)
    (tmp_path / "data" / "labels" / "train").mkdir(parents=True)
    (tmp_path / "data" / "labels" / "train" / "smooth.txt").write_text(LABEL)
    index = index_of(tmp_path / "data")
    with closing(ImageCache(index, 640, "jpeg")) as cache:
        difference = np.abs(cache.get(0).astype(int) - expected(index, 0, 640))
        assert difference.mean() < 4
        assert cache._file is not None
        jpeg = cache._file.read(0)
        assert jpeg is not None and jpeg.nbytes < 640 * 480 * 3 / 4


def test_a_cache_that_does_not_fit_says_why_and_names_the_others(index, monkeypatch):
    monkeypatch.setattr(cache_module, "available_bytes", lambda: 60_000)
    note = ImageCache(index, 64, "auto").note
    assert "all images need 47.2 KiB, but only 29.3 KiB may be used" in note
    assert "--cache jpeg" in note and "--cache disk would be larger than the image files" in note


def test_files_with_more_bytes_than_the_pixels_are_cached_on_a_local_disk(tmp_path, decodes, monkeypatch):
    # the free memory and the disks of a machine cannot be chosen
    monkeypatch.setattr(cache_module, "available_bytes", lambda: 20_000)
    yolo_set(tmp_path / "large", {})
    (tmp_path / "large" / "labels" / "train").mkdir(parents=True)
    (tmp_path / "large" / "labels" / "train" / "a.txt").write_text(LABEL)
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)  # PNG cannot make it smaller
    (tmp_path / "large" / "images" / "train").mkdir(parents=True)
    cv2.imwrite(str(tmp_path / "large" / "images" / "train" / "a.png"), noise)
    index = index_of(tmp_path / "large")
    with closing(ImageCache(index, 64, "auto")) as cache:
        assert cache.mode == "disk" and "smaller than the image files" in cache.note
        assert np.array_equal(cache.get(0), cache.get(0)) and len(decodes) == 1
    with monkeypatch.context() as patched, closing(ImageCache(index, 64, "disk")):
        patched.setattr(cache_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=200_000))
        cache = ImageCache(index, 200, "auto")  # 128 kB; half of 200 kB may be used
        assert cache.mode == "none" and "has only 195.3 KiB free" in cache.note
    monkeypatch.setattr(cache_module, "network_disk", lambda _: "nfs4")
    with closing(ImageCache(index, 64, "auto")) as cache:
        assert cache.mode == "none" and "is on a network disk (nfs4)" in cache.note


def test_new_labels_leave_the_images_on_disk_in_use(index, decodes, tmp_path):
    with closing(ImageCache(index, 64, "disk")) as cache:
        cache.get(0)
    (tmp_path / "data" / "labels" / "train" / "it's 0.txt").write_text(LABEL + "1 0.2 0.2 0.1 0.1\n")
    changed = index_of(tmp_path / "data")
    assert changed.key != index.key
    with closing(ImageCache(changed, 64, "disk")) as cache:
        cache.get(0)
    assert len(decodes) == 1


@linux_only
@pytest.mark.parametrize("mode", ["auto", "ram", "jpeg"])
def test_runs_of_a_study_share_memory_and_promise_it_once(index, decodes, monkeypatch, mode):
    with shared_memory() as environment:
        file = shared_file(environment, "train")
        with closing(ImageCache(index, 64, mode, token="one", shared=file)) as first:
            assert "shared by the runs of a study" in first.note
            pixels = [first.get(image) for image in range(len(index))]
            assert named_files() == [], "the kernel frees what has no name"
        # the first run has ended; the second one needs no memory, whatever is free now
        monkeypatch.setattr(cache_module, "available_bytes", lambda: 0)
        decoded = len(decodes)
        with closing(ImageCache(index, 64, mode, shared=file)) as second:
            assert second.covered == len(index)
            assert all(np.array_equal(second.get(image), pixels[image]) for image in range(len(index)))
        assert mode == "jpeg" or len(decodes) == decoded
    with closing(ImageCache(index, 64, mode)) as own:
        assert own.covered == 0, "memory of its own would need some"


@linux_only
def test_a_study_that_is_killed_leaves_its_runs_their_images_and_then_nothing(index):
    code = (
        "import time; from yolofleet.data.input.cache import shared_memory\n"
        "with shared_memory() as found: print(*found.values(), flush=True); time.sleep(600)"
    )
    study = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert study.stdout is not None
    environment = {cache_module.SHARED: study.stdout.readline().strip()}
    cache = ImageCache(index, 64, "ram", shared=shared_file(environment, "train"))
    other = ImageCache(index, 64, "ram", shared=shared_file(environment, "train"))
    study.kill()
    study.communicate()
    assert_right(cache, index)
    cache.close()  # a run that ends leaves the others theirs
    assert_right(other, index)
    other.close()
    assert named_files() == [] and shared_file(environment, "train") is None


@linux_only
def test_memory_of_another_process_is_never_taken_for_that_of_a_study(tmp_path):
    with (tmp_path / "own.txt").open("w+") as own, shared_memory() as environment:
        token, pid, train, val = environment[cache_module.SHARED].split()
        assert shared_file(environment, "train") and shared_file(environment, "val")
        for text in (
            f"{token} {pid} {own.fileno()} {val}",
            f"{token} {pid} {val} {train}",
            f"0000 {pid} {train} {val}",
            f"{token} {pid} 9999 {val}",
            f"{token} x {train} {val}",
            "",
        ):
            assert shared_file({cache_module.SHARED: text}, "train") is None
        assert shared_file({}, "train") is None
