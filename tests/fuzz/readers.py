"""The readers of what strangers make: each makes one broken or hostile case and says what to run on it.

Most are a row of ``FILES``: one file among good ones is changed, and whole verbs read it, messages included.
``tests/damage.py`` calls the readers of the same files with fixed kinds of damage, and unit tests of a reader have the
attacks that were made by hand for it.
"""

from __future__ import annotations

import json
import platform
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
from corpus import EXPORTS, RECIPE, TRAIN, exports
from harness import Action, Case, Reader
from mutate import (
    EDGES,
    NUMBERS,
    WORDS,
    changed_file,
    json_text,
    mutate_bytes,
    mutate_text,
    mutate_tree,
    odd_name,
    special,
)
from small_files import FLEET_FILE, TINY_YAML, TWO_LEVELS_CFG

LOGS = Path(__file__).resolve().parents[1] / "unit" / "doctor" / "logs"
RUN_SMALL = ["--img", "64", "--threads", "1"]
SPECIAL = 0.06  # share of cases with a pipe, device, link ... in the place of a file

READERS: dict[str, Reader] = {}


def reader(make: Reader) -> Reader:
    """Add a function to the table under its name."""
    READERS[make.__name__.replace("_", "-")] = make
    return make


def put(case: Case, path: Path, data: bytes) -> None:
    """Write ``data``; sometimes something else is in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if case.rng.random() < SPECIAL:
        special(case.rng, path)


def copied(case: Case, name: str) -> Path:
    """Copy a good file or folder into the working folder."""
    source, target = case.corpus.get(name), case.folder / Path(name).name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    return target


def picked(case: Case, folder: Path, pattern: str = "*") -> Path:
    """Return one file below a folder."""
    return case.rng.choice(sorted(path for path in folder.rglob(pattern) if path.is_file()))


def changed(case: Case, path: Path) -> None:
    """Change a file of the working folder."""
    put(case, path, changed_file(case.rng, path.name, path.read_bytes()))


# -- what reads a file: each returns the words of a command, for a file or folder of the working folder


def use_weights(case: Case, name: str) -> Action:
    more = ["--cfg", "ppyoloe-s"] if name.endswith(".pdparams") else []
    out = f"out{case.rng.choice(('.safetensors', '.weights', '.pdparams'))}"
    verbs: list[list[str]] = [
        ["inspect", name],
        ["inspect", name, "--json", "-"],
        ["verify", name],
        ["convert", name, out],
    ]
    if case.rng.random() < 0.3:
        return predict(case, "--weights", name, "--source", str(case.corpus.get("pictures") / "a.jpg"), *more)
    return ["weights", *case.rng.choice(verbs), *more]


def predict(case: Case, *more: str) -> list[str]:
    """Return the words of a prediction, with good weights unless ``more`` names others."""
    weights = [] if "--weights" in more else ["--weights", str(case.corpus.get("best.safetensors"))]
    return ["predict", *weights, *RUN_SMALL, *more]


def use_description(case: Case, name: str) -> Action:
    """Read the description, and build its network where that is cheap."""
    if case.rng.random() < 0.2:
        return ["train", "--cfg", name, "--data", str(case.corpus.get("set")), *TRAIN, "--max-steps", "1"]
    return ["weights", "inspect", str(case.corpus.get("tiny.weights")), "--cfg", name]


def use_exported(case: Case, name: str) -> Action:
    source = str(case.corpus.get("pictures") / "a.jpg")
    verbs: list[list[str]] = [
        ["weights", "inspect", name],
        ["bench", "--weights", name, "--passes", "1", "--threads", "1"],
        ["predict", "--weights", name, "--source", source, "--threads", "1"],
    ]
    return case.rng.choice(verbs)


def use_data(case: Case, name: str) -> Action:
    """Check, count or convert a data set, or train a step with it."""
    rng = case.rng
    verb = rng.choice(("check", "check", "check", "stats", "convert", "train"))
    if verb == "train":
        return [
            "train",
            "--data",
            name,
            "--cfg",
            str(case.corpus.get("tiny.yaml")),
            *TRAIN,
            "--max-steps",
            "1",
        ]
    if verb == "convert":
        form, images = rng.choice(("yolo", "coco", "voc")), rng.choice(("copy", "link", "symlink", "none"))
        return ["data", "convert", name, "--to", form, "--out", "out", "--images", images]
    more = [flag for flag in ("--decode", "--duplicates") if verb == "check" and rng.random() < 0.5]
    return ["data", verb, name, *more, *rng.choice(([], ["--json", "-"]))]


def use_pictures(case: Case, name: str) -> Action:
    more = case.rng.choice(([], ["--save-txt"], ["--save-csv", "--save-json"], ["--save-crop"]))
    return predict(case, "--source", name, *more)


def use_log(case: Case, name: str) -> Action:
    return ["doctor", "--log", name, *case.rng.choice(([], ["--json", "-"]))]


def use_run(case: Case, name: str) -> Action:
    if case.rng.random() < 0.3:
        return ["checkpoints", case.rng.choice(("list", "verify")), name]
    more = ["--device", "cpu", "--threads", "1", "--workers", "0", "--epochs", "2"]
    return ["train", "--resume", name, *more, *case.rng.choice(([], ["--dry-run"]))]


def use_archive(case: Case, name: str) -> Action:
    def unpack() -> None:
        """unpack(archive, folder)."""
        damage.unpacked(Path(name))

    return unpack


def planned(flag: str) -> Callable[[Case, str], Action]:
    """Return the use of a file that ``flag`` of a training names, up to its plan."""
    return lambda case, name: train(case, flag, name, "--dry-run")


def train(case: Case, *more: str) -> list[str]:
    """Return the words of a training on the good data set."""
    return ["train", "--data", str(case.corpus.get("set")), "--model", "yolov5n", *more]


def use_config(case: Case, name: str) -> Action:
    """Give a stranger's configuration to a verb; the command line keeps the case small."""
    verb = case.rng.choice(("train", "val", "predict", "bench"))
    more = {
        "train": ["--dry-run"],
        "val": ["--project", "runs", "--device", "cpu", "--batch", "2", *RUN_SMALL],
        "predict": ["--project", "runs", "--device", "cpu", *RUN_SMALL],
        "bench": RUN_SMALL,
    }
    return [verb, "--config", name, *more[verb]]


CONFIG = """data: DATA
source: DATA/images/val
weights: WEIGHTS
model: yolov5n
epochs: 3
batch: 16
img: 64
device: cpu
passes: 1
threads: 1
classes: ['0', circle]
hyperparameters: {lr0: 0.01}
set: [lr0=0.1]
"""

# reader -> a file or folder of the corpus, or (name, text); the pattern of the file in it that is changed; what reads it
FILES: dict[str, tuple[str | tuple[str, str], str, Callable[[Case, str], Action]]] = {
    **{name: (name, "", use_weights) for name in ("module.pt", "state.pt", "legacy.pt", "best.safetensors", "plain.safetensors", "ppyoloe.pdparams")},
    "network-yaml": (("net.yaml", TINY_YAML), "", use_description),
    "network-cfg": (("net.cfg", TWO_LEVELS_CFG), "", use_description),
    **{name: (EXPORTS[name], "*", use_exported) for name in exports()},
    "data-yaml": ("set", "data.yaml", use_data),
    "yolo-labels": ("set", "labels/*/*.txt", use_data),
    "image-lists": ("listed", "train.txt", use_data),
    "images": ("set", "images/*/*", use_data),
    "coco-json": ("coco", "annotations/*.json", use_data),
    "voc-xml": ("voc", "Annotations/*.xml", use_data),
    "labelme-json": ("labelme", "*/*.json", use_data),
    "mask-images": ("masked", "masks/*/*.png", use_data),
    "voc-lists": ("voc", "ImageSets/Main/*.txt", use_data),
    "pictures": ("pictures", "*", use_pictures),
    "videos": ("videos", "*", use_pictures),
    "shards": ("shards", "*", use_data),
    "archives": ("archives", "*", use_archive),
    "recipes": (("hyp.yaml", RECIPE), "", planned("--recipe")),
    "fleet-files": (("fleet.yaml", f"grace_s: 5\n{FLEET_FILE}"), "", planned("--fleet")),
    "config-files": (("config.yaml", CONFIG), "", use_config),
    "run-folders": ("run", "*", use_run),
}  # fmt: skip


def one_of(name: str) -> Reader:
    """Return the reader of a row of ``FILES``."""
    good, pattern, use = FILES[name]

    def make(case: Case) -> Action:
        if isinstance(good, tuple):
            path = case.folder / good[0]
            text = good[1].replace("DATA", str(case.corpus.get("set")))
            path.write_text(text.replace("WEIGHTS", str(case.corpus.get("best.safetensors"))))
        else:
            path = copied(case, good)
        damaged = picked(case, path, pattern) if path.is_dir() else path
        changed(case, damaged)
        at_file = use is use_archive or (use is use_pictures and case.rng.random() < 0.5)
        return use(case, str((damaged if at_file else path).relative_to(case.folder)))

    return make


READERS.update({name: one_of(name) for name in FILES})

# -- what is more than one changed file


@reader
def our_files_with_a_right_digest(case: Case) -> Action:
    """Anybody can compute the digest, so what it covers is a stranger's all the same."""
    if case.rng.random() < 0.5:
        forge(case, copied(case, "best.safetensors"))
        return use_weights(case, "best.safetensors")
    forge(case, picked(case, copied(case, "run") / "checkpoints", "step-*"))
    return use_run(case, "run")


def forge(case: Case, path: Path) -> None:
    """Write a file of our format with a changed header or tensor, and a digest that fits."""
    import safetensors.torch
    import torch

    from yolofleet.families.weights.format import DIGEST, read_tensors, tensors_sha256

    tensors, header = read_tensors(path)
    rng = case.rng
    if rng.random() < 0.3:
        name = rng.choice(list(tensors))
        tensor = tensors.pop(name)
        changes: list[Callable[[], Any]] = [
            lambda: tensor.to(torch.float64) * float("nan"),
            lambda: tensor.to(torch.bool),
            lambda: tensor.reshape(-1),
            lambda: torch.zeros(0, *tensor.shape),
            lambda: tensor.to(torch.float32) * 1e38,
        ]
        if rng.random() < 0.8:  # else it is missing
            tensors[name] = rng.choice(changes)().contiguous()
    else:
        header = mutate_tree(rng, header)
    values = header.items() if isinstance(header, dict) else ()
    metadata = {str(key): json_text(rng, value).decode("utf-8", "replace") for key, value in values}
    clean = {key.encode("utf-8", "replace").decode(): value for key, value in metadata.items()}
    digest = tensors_sha256(tensors, clean)
    safetensors.torch.save_file(tensors, str(path), {**clean, DIGEST: digest})


@reader
def darknet_weights(case: Case) -> Action:
    for name in ("tiny.cfg", "tiny.weights"):
        copied(case, name)
    changed(case, case.folder / case.rng.choice(("tiny.cfg", "tiny.weights")))
    return use_weights(case, "tiny.weights")


@reader
def parts_of_jpegs(case: Case) -> Action:
    """Damaged JPEG files: a part that is decoded has the pixels of the whole, where OpenCV decodes the whole."""
    rng = case.rng

    def action() -> None:
        import cv2
        import numpy as np

        from yolofleet.data.images.decode import decode_image
        from yolofleet.support.errors import DataError

        for _ in range(40):
            width, height, channels = (rng.choice(most) for most in (range(1, 90), range(1, 90), (1, 3)))
            picture = np.frombuffer(rng.randbytes(width * height * channels), np.uint8)
            picture = cv2.blur(picture.reshape(height, width, channels), (3, 3))
            options = [cv2.IMWRITE_JPEG_QUALITY, rng.randint(5, 100), cv2.IMWRITE_JPEG_SAMPLING_FACTOR]
            options += [rng.choice((0x111111, 0x211111, 0x221111, 0x121111)), cv2.IMWRITE_JPEG_RST_INTERVAL]
            _, encoded = cv2.imencode(".jpg", picture, [*options, rng.choice((0, 0, 1, 3))])
            data = mutate_bytes(rng, encoded.tobytes()) if rng.random() < 0.9 else encoded.tobytes()
            reduction = rng.choice((1, 2, 4, 8))
            x1, y1, x2, y2 = (rng.randint(-3, 92) for _ in range(4))
            try:
                part = decode_image(data, "x.jpg", reduction=reduction, seen=(x1, y1, x2, y2))
            except DataError:
                part = None
            try:
                whole = decode_image(data, "x.jpg", reduction=reduction)
            except DataError:
                continue  # of rows below the part nothing is read
            assert part is not None and part.shape == whole.shape, "only a part is an error"
            shown = (slice(max(y1, 0), max(y2, 0)), slice(max(x1, 0), max(x2, 0)))
            assert np.array_equal(part[shown], whole[shown]), "the pixels of a part are others"

    action.__doc__ = "decode_image() of parts of 40 damaged JPEG files"
    return action


@reader
def names_of_files(case: Case) -> Action:
    """Images and labels with names that screens and systems trip over."""
    rng, folder = case.rng, copied(case, "set")
    for _ in range(2):
        image = picked(case, folder / "images")
        label = Path(str(image.with_suffix(".txt")).replace("/images/", "/labels/"))
        name = odd_name(rng, image.suffix)
        try:
            image = image.rename(image.with_name(name))
            if label.is_file() and rng.random() < 0.5:
                label.rename(label.with_name(name[: -len(image.suffix)] + ".txt")).write_text(
                    "7 1 2 x\n0 nan 1 1 1\n"
                )
            elif rng.random() < 0.5:
                image.write_bytes(b"no image")
        except OSError:
            pass
    if rng.random() < 0.4:
        return use_pictures(case, rng.choice(("set/images/train", "set/images/train/*")))
    return use_data(case, "set")


@reader
def predict_lists(case: Case) -> Action:
    rng = case.rng
    pictures = sorted(copied(case, "pictures").iterdir())
    lines = [f"pictures/{path.name}" for path in rng.sample(pictures, 3)] + [rng.choice(WORDS)]
    special(rng, pictures[0])
    lines.append(f"pictures/{pictures[0].name}")
    # predicting the pictures of a whole disk, or 200 pictures with crops of all boxes, is no fault
    found = mutate_text(rng, "\n".join(lines) + "\n", copies=50).splitlines(keepends=True)
    put(case, case.folder / "list.txt", b"".join(line for line in found if line.strip() != b"/"))
    words = [word.replace("\0", "") or "x" for word in WORDS if word != "/"]
    return use_pictures(case, rng.choice(("list.txt", "list.txt", rng.choice(words))))


@reader
def programs_of_strangers(case: Case) -> Action:
    """A configuration whose fleet file names a stranger's program, beside a module that its PYTHONPATH would offer."""
    rng = case.rng
    script = case.folder / "evil"
    script.write_text("#!/bin/sh\ntouch ../outside/ran\n")
    script.chmod(0o755)
    (case.folder / "sitecustomize.py").write_text("open('../outside/ran', 'w')\n")
    host = (
        f"host: localhost\n    device: cpu:2\n    python: {script}\n    env: {{PYTHONPATH: {case.folder}}}\n"
    )
    (case.folder / "fleet.yaml").write_text(f"hosts:\n  - {host}")
    launches = ["fleet: fleet.yaml\n", "hosts: localhost:cpu:2\n"]
    if rng.random() < 0.5:
        path = copied(case, "run") / "config.yaml"
        kept = [line for line in path.read_text().splitlines() if not line.startswith(("fleet:", "hosts:"))]
        path.write_text("\n".join([*kept, rng.choice(launches)]))
        return use_run(case, "run")
    launches += ["json_out: ../outside/victim.txt\n", "project: ../outside\n"]
    (case.folder / "config.yaml").write_text(f"data: {case.corpus.get('set')}\n{rng.choice(launches)}")
    return ["train", "--config", "config.yaml", "--dry-run"]


@reader
def run_folders_of_links(case: Case) -> Action:
    """The folder of a run in which a folder leads out of it, or another file stands where a state belongs."""
    rng, run = case.rng, copied(case, "run")
    if rng.random() < 0.5:
        folder = run / rng.choice(("checkpoints", "logs", "weights"))
        shutil.rmtree(folder, ignore_errors=True)
        folder.symlink_to("../../outside")
    else:
        name = rng.choice(("step-00000001", "step-99999999999999999999", "step-x", "step-0"))
        special(rng, run / "checkpoints" / f"{name}.safetensors")
    return use_run(case, "run")


@reader
def log_files(case: Case) -> Action:
    name = case.rng.choice(("x.log", "logs/rank-0.log", "logs/agent.log"))
    text = picked(case, LOGS, "*.txt").read_text(errors="replace")
    put(case, case.folder / name, mutate_text(case.rng, text))
    return use_log(case, case.rng.choice((name, str(Path(name).parent))))


# -- hosts, launchers, servers


@reader
def host_lists(case: Case) -> Action:
    text = mutate_text(case.rng, "a:8,b:0+2,me@c.example:cpu:4,d:+3").decode("utf-8", "replace")
    return train(case, "--hosts", text.replace("\0", ""), "--dry-run")


@reader
def host_frames(case: Case) -> Action:
    """What a host agent answers: a script in its place says whatever it likes."""
    rng = case.rng
    now_s = time.time()
    software = {"python": "3.12", "torch": "2.13", "yolofleet": "0", "numpy": "2"}
    job = {"job": "exp-a", "title": "train", "folder": "/r", "node": 0, "ranks": [0, 2], "runs": True, "began_s": now_s - 60, "ended_s": 0, "code": None}  # fmt: skip
    words = [{"rank": 0, "host": "x", "message": rng.choice(WORDS), "exit_code": 3, "time": now_s}]
    frames: list[Any] = [
        {"type": "hello", "protocol": 1, "platform": "linux", "pid": 7, "software": software, "time_s": now_s, "machine": platform.node()},
        {"type": "reply", "id": 1, "value": [job]},
        {"type": "beat"},
        {"type": "reply", "id": 2, "value": "/tmp/x"},
        {"type": "reply", "id": 3, "value": {"offset": 0, "data": "YWJj", "size": 3}},
        {"type": "output", "text": rng.choice(WORDS)},
        {"type": "log", "rank": 0, "text": rng.choice(WORDS)},
        {"type": "reply", "id": 4, "error": rng.choice(WORDS)},
        {"type": "exit", "code": 1, "words": words, "log": "", "why": rng.choice(WORDS), "stopped": [], "killed": {"group": None, "machine": 0}},
    ]  # fmt: skip
    lines = []
    for frame in frames:
        frame = mutate_tree(rng, frame) if rng.random() < 0.35 else frame
        lines.append(json_text(rng, frame).replace(b"\n", b" ") if rng.random() < 0.9 else rng.randbytes(50))
    if rng.random() < 0.15:
        lines.insert(
            rng.randrange(len(lines)), rng.choice((b"x" * (20 << 20), b"[" * 100_000, b"\x1b[2J" * 10))
        )
    program = case.folder / "trusted-agent"
    (case.folder / "frames").write_bytes(b"\n".join(lines) + b"\n")
    program.write_text(f"#!/bin/sh\ncat {case.folder}/frames\nsleep 1\nexit {rng.choice((0, 1, 255))}\n")
    program.chmod(0o755)
    (case.folder / "fleet.yaml").write_text(
        f"hosts: [{{host: localhost, device: cpu:2, python: {program}}}]\n"
    )
    verb = rng.choice(
        ("fleet ps --all", "fleet logs", "fleet stop --now", "fleet check", "fleet run", "doctor --quick")
    )
    return [*verb.split(), "--fleet", "fleet.yaml", *(["--", "true"] if verb == "fleet run" else [])]


@reader
def launcher_variables(case: Case) -> Action:
    rng = case.rng
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    mpi = {f"OMPI_COMM_WORLD_{name}": "2" if "SIZE" in name else "0" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}  # fmt: skip
    mpi |= {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:4", "PMIX_NAMESPACE": "x"}
    srun = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[07-12,2]-ib,gpu3", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "0", "CUDA_VISIBLE_DEVICES": "0"}  # fmt: skip
    values = dict(rng.choice((torchrun, mpi, srun, torchrun | srun)))
    for name in rng.sample(sorted(values), rng.choice((1, 1, 2))):
        text = mutate_text(rng, values.pop(name)).decode("utf-8", "replace")
        if rng.random() < 0.85:
            values[name] = rng.choice((*NUMBERS, *WORDS, str(rng.choice(EDGES)), text))[:2000]
    texts = {name: value.encode("utf-8", "replace").decode() for name, value in values.items()}
    case.env = {name: text for name, text in texts.items() if "\0" not in text}  # no system can hold it
    return train(case, *(["--dry-run"] if rng.random() < 0.8 else ["--timeout-s", "1", *TRAIN]))


STATUSES = ("200 OK", "206 Partial Content", "302 Found", "416 x", "503 x", "404 x", "100 Continue", "999 x", "-1 x", "")  # fmt: skip


@reader
def http_answers(case: Case) -> Action:
    rng = case.rng
    strange = (
        ("Content-Length", rng.choice(NUMBERS)),
        ("Transfer-Encoding", rng.choice(("chunked", "gzip", "x"))),
        (
            "Content-Range",
            rng.choice(("bytes 0-9/900", "bytes 5-9/*", "bytes x", "bytes 99999999999999999999-1/1")),
        ),
        ("Location", rng.choice(("http://127.0.0.1:9/", "file:///etc/passwd", "/again", *WORDS[:20]))),
        ("Retry-After", rng.choice((*NUMBERS, "Wed, 21 Oct 9999 07:28:00 GMT"))),
        ("Content-Type", rng.choice(("text/html; charset=\x1b[2J", "x", ";;;"))),
        ("X" * rng.choice((1, 70_000)), "y"),
    )
    headers = {"Content-Length": "900", "ETag": '"a"', "Connection": "close", **dict(rng.sample(strange, 2))}
    head = f"HTTP/1.1 {rng.choice(STATUSES)}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    body = rng.choice(
        (b"the file\n" * 100, b"<!doctype html><p>x", b"", b"ffffffffffffffff\r\nx", b"3\r\nabc\r\n0\r\n")
    )
    answer = head.encode("utf-8", "replace") + b"\r\n" + body
    if rng.random() < 0.3:
        answer = changed_file(rng, "answer", answer)

    def action() -> None:
        ask(answer)

    action.__doc__ = f"fetch() of an answer that starts {answer[:300]!r}"
    return action


def ask(answer: bytes) -> None:
    """Fetch a file from a server on this machine that sends ``answer`` to each request."""
    from yolofleet.storage.fetch import Item, Patience, fetch

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)
            except OSError:
                if listener.fileno() == -1 or closing.is_set():
                    return

    closing = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        item = Item("x.bin", (address,), 900, "sha256:" + "0" * 64, "free", "https://example.org/")
        patience = Patience(timeout_s=1.0, attempts=2, first_wait_s=0.01, longest_wait_s=0.05)
        try:
            fetch(item, Path("cache"), patience=patience)
        finally:
            closing.set()
            listener.shutdown(socket.SHUT_RDWR)


@reader
def leases(case: Case) -> Action:
    """The lease of a run at an address, beside which somebody else writes."""
    rng, folder = case.rng, case.folder / "store"
    values = {
        "host": "a",
        "process": 7,
        "command": "c",
        "token": "0" * 16,
        "renewed": 3,
        "ended": rng.random() < 0.5,
    }
    for number in rng.sample(range(1, 9), 2):
        put(
            case,
            folder / f".lease/{number:08d}.json",
            changed_file(rng, "a.json", json.dumps(values).encode()),
        )
    for name in ("99999999.json", "clock", "000000001.json", "0.json"):
        if rng.random() < 0.3:
            put(case, folder / ".lease" / name, rng.randbytes(9))

    def action() -> None:
        from yolofleet.runs.checkpoint import bucket_lease
        from yolofleet.storage.object_writer import ObjectWriter
        from yolofleet.support.errors import YolofleetError
        from yolofleet.support.text import echo

        bucket_lease.LEASE_S, bucket_lease.LOOK_S = 0.2, 0.05
        lease = bucket_lease.BucketLease(ObjectWriter(f"file://{folder}"), "d")
        try:
            lease.claim(echo)
            lease.renew()
            lease.renew(ended=True)
        except YolofleetError as problem:
            echo(problem.render())

    action.__doc__ = "claim a lease"
    return action


@reader
def stored_pictures(case: Case) -> Action:
    """A list of pictures in a store."""
    folder = copied(case, "pictures")
    listed = "".join(f"{path.name}\n" for path in sorted(folder.iterdir()))
    put(case, folder / "list.txt", changed_file(case.rng, "list.txt", listed.encode()))
    address = f"file://{folder}/{case.rng.choice(('list.txt', ''))}"
    return ["predict", "--weights", str(case.corpus.get("best.safetensors")), "--source", address, *RUN_SMALL]
