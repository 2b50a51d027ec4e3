"""Bad input over all verbs: what each mistake ends with."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from commands import called, working_in
from golden_run import SMALLEST, contents, copy_run, lined

from yolofleet.support import errors

MACROS = {
    "@job": [*SMALLEST, "--epochs", "1", "--device", "cpu", "--no-plots"],
    "@train": ["train", "--data", "set", "--cfg", "thin.yaml", "@job"],
    "@val": ["val", "--weights", "last.safetensors", "--data", "set", "--img", "64", "--device", "cpu"],
    "@predict": ["predict", "--weights", "last.safetensors", "--img", "64", "--device", "cpu"],
    "@scheduled": ["--data", "set", "--cfg", "thin.yaml"],
}
WEIGHTS = "last.safetensors"


@dataclass(frozen=True)
class Case:
    """A command line with a mistake.

    Attributes:
        command: words, or one text that has no spaces inside words; starts in a folder with ``set`` (a data set),
            ``thin.yaml`` (a network), ``exp`` (a run) and ``last.safetensors``.
        names: what the message must name, separated by ``|``.
        prepare: makes the mistake in the folder.
        variables: of the environment.
        varies: the first line depends on the machine or is another package's, so it is not recorded.
        messages: lines that begin with a class of errors.
    """

    title: str
    command: str
    names: str
    prepare: Callable[[], object] = lambda: None
    variables: tuple[tuple[str, str], ...] = ()
    varies: bool = False
    messages: int = 1

    def argv(self) -> list[str]:
        words = self.command.split()
        while any(word in MACROS for word in words):
            words = [part for word in words for part in MACROS.get(word, [word])]
        return words


def write(path: str, content: str | bytes) -> Callable[[], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda: Path(path).write_bytes(data)


def replace(path: str, old: str, new: str) -> Callable[[], object]:
    return lambda: Path(path).write_text(Path(path).read_text(encoding="utf-8").replace(old, new), "utf-8")


def cut(pattern: str) -> Callable[[], object]:
    """Keep the first half of each file."""

    def halve() -> None:
        for path in Path().glob(pattern):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return halve


def spoil(pattern: str) -> Callable[[], object]:
    """Change the last byte of each file."""

    def change() -> None:
        for path in Path().glob(pattern):
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    return change


def overwrite(pattern: str) -> Callable[[], object]:
    """Replace each file's content by what is no image."""

    def junk() -> None:
        for path in Path().glob(pattern):
            path.write_bytes(b"no image")

    return junk


def remove(path: str) -> Callable[[], object]:
    return lambda: shutil.rmtree(path)


def empty(path: str) -> Callable[[], object]:
    def clear() -> None:
        shutil.rmtree(path)
        Path(path).mkdir()

    return clear


def folder(path: str, **files: str) -> Callable[[], object]:
    def make() -> None:
        Path(path).mkdir()
        for name, text in files.items():
            (Path(path) / name.replace("_", ".")).write_text(text)

    return make


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch owned",)


def fake_ssh() -> None:
    """A login that OpenSSH refuses: exit code 255."""
    Path("bin").mkdir()
    Path("bin/ssh").write_text("#!/bin/sh\necho 'ssh: Could not resolve hostname gone' >&2\nexit 255\n")
    Path("bin/ssh").chmod(0o755)


LABELS = "set/labels/train/000000.txt"
DATA_YAML = "set/data.yaml"
DATA = "train: images/train\nval: images/val\n"
TORCHRUN = (
    ("RANK", "first"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1"),
)  # fmt: skip
CASES = [
    # verbs and flags
    Case("unknown verb", "trian", "trian|train"),
    Case("verb of YOLOv5", "detect", "detect|predict"),
    Case("unknown verb of a group", "data chek set", "chek|check"),
    Case("unknown flag", "@train --epohcs 3", "--epohcs|--epochs"),
    Case("flag that is refused", "@train --upload-dataset", "--upload-dataset"),
    Case("flag of torchrun", "@train --nnodes 2", "--nnodes|--hosts"),
    Case("flag without its value", "@train --seed", "--seed"),
    Case("switch with a value", "@train --sync-bn=yes", "--sync-bn|yes"),
    Case("several image sizes", "@train --img 64 96", "--img|64 96"),
    # settings of train
    Case("no number", "@train --threads many", "--threads|many"),
    Case("below the least", "@train --batch 0", "--batch|0|1"),
    Case("above the most", "@train --threads 9999", "--threads|9999|1024"),
    Case("not a choice", "@train --optimizer sdg", "--optimizer|sdg|SGD"),
    Case("not a device", "@train --device nonsense", "--device|nonsense"),
    Case("GPUs that are not there", "@train --device 31", "--device 31|GPU", varies=True),
    Case("micro-batch that does not divide", "@train --batch 8 --micro-batch 3", "--micro-batch 3|--batch 8"),
    Case("more shares than processes", "@train --shares 1,2", "--shares|1,2"),
    Case("batch of no images", "@train --batch 0", "--batch|0"),
    Case("precision that needs a GPU", "@train --precision fp16", "--precision|fp16"),
    Case("layer that is not there", "@train --freeze model.99", "--freeze|model.99"),
    Case("name that leaves the folder", "@train --name ../x", "--name|../x"),
    Case("no model", "train --data set @job", "--model|--cfg|--weights"),
    Case("two models", "@train --model yolov5n", "--model|--cfg"),
    Case("unknown model", "train --data set --model yolov5q @job", "yolov5q"),
    Case("no data set", "train --cfg thin.yaml @job", "--data"),
    Case("recipe that is not there", "@train --recipe nowhere.yaml", "nowhere.yaml"),
    Case("unknown key of a recipe", "@train --set mosiac=1", "mosiac|mosaic"),
    Case("value of a recipe", "@train --set lr0=-1", "lr0|-1"),
    Case("unknown key of a recipe file", "@train --recipe r.yaml", "mosiac|r.yaml:2|mosaic",
         write("r.yaml", "lr0: 0.01\nmosiac: 1\n")),
    Case("configuration that is not there", "@train --config nowhere.yaml", "nowhere.yaml"),
    Case("unknown key of a configuration", "@train --config c.yaml", "epohcs|c.yaml:2|epochs",
         write("c.yaml", "seed: 1\nepohcs: 3\n")),
    Case("configuration with hosts", "@train --config c.yaml", "hosts|c.yaml:1|--hosts",
         write("c.yaml", "hosts: a:8\n")),
    Case("configuration of another verb", "@train --config c.yaml", "c.yaml|val|train",
         write("c.yaml", "verb: val\n")),
    Case("gradient that is not finite",
         "@train --max-steps 9 --epochs 9 --set lr0=1e18 --set warmup_epochs=0 --set clip_norm=0", "lr0"),
    # model descriptions
    Case("network that is not there", "train --data set --cfg nowhere.yaml @job", "nowhere.yaml"),
    Case("unknown module", "@train", "thin.yaml|Convv|Conv", replace("thin.yaml", "Conv, [64", "Convv, [64")),
    Case("layer from nowhere", "@train", "thin.yaml|9", replace("thin.yaml", "[4, 6]", "[4, 9]")),
    Case("darknet section", "train --data set --cfg a.cfg @job", "a.cfg|convolutonal",
         write("a.cfg", "[net]\nwidth=64\nheight=64\n[convolutonal]\nfilters=8\n")),
    # data sets
    Case("data set that is not there", "train --data nowhere.yaml --cfg thin.yaml @job", "nowhere.yaml"),
    Case("data set that is nearly there", "train --data set/dada.yaml --cfg thin.yaml @job",
         "set/dada.yaml|set/data.yaml"),
    Case("description without names", "@train", "set/data.yaml", write(DATA_YAML, DATA)),
    Case("number of classes", "@train", "nc|3|2", write(DATA_YAML, f"{DATA}nc: 3\nnames: [a, b]\n")),
    Case("number of classes without names", "@train", "names|nc: 4", write(DATA_YAML, f"{DATA}nc: 4\n")),
    Case("data set without a split for validation", "@val", "val: images/val",
         write(DATA_YAML, "train: images/train\nnames: [a, b, c, d]\n")),
    Case("unknown key of a data set", "@train", "nmaes|data.yaml:3|names", write(DATA_YAML, f"{DATA}nmaes: [a]\n")),
    Case("description that is a list", "@train", "data.yaml|key: value", write(DATA_YAML, "- images/train\n")),
    Case("description that is empty", "@train", "set", write(DATA_YAML, "")),
    Case("folder that is not there", "@train", "images/trian|data.yaml:1|images/train",
         write(DATA_YAML, "train: images/trian\nval: images/val\nnames: [a]\n")),
    Case("description that is no YAML", "@train", "data.yaml:2",
         write(DATA_YAML, "train: [images\nnames: a: b\n")),
    Case("description that is no text", "@train", "data.yaml", write(DATA_YAML, bytes(range(256)))),
    Case("data set without labels", "@train", "labels/train|6", remove("set/labels")),
    Case("class that is not in names", "@train", "labels/train/000000.txt:1|7|4",
         write(LABELS, "7 0.5 0.5 0.1 0.1\n")),
    Case("labels that are binary", "@train", "labels/train/000000.txt:1", write(LABELS, bytes(range(256)) * 100)),
    Case("folder without images", "@train", "images/train", empty("set/images/train")),
    Case("images that are not pictures", "@train", "train", overwrite("set/images/train/*.jpg")),
    # weights
    Case("weights that are not there", "@train --weights no.pt", "no.pt"),
    Case("weights that are text", "@train --weights text.pt", "text.pt", write("text.pt", "I am no weights\n" * 9)),
    Case("weights that are empty", "@train --weights empty.pt", "empty.pt", write("empty.pt", b"")),
    Case("weights cut in half", f"@train --weights {WEIGHTS}", WEIGHTS, cut(WEIGHTS), varies=True),
    Case("weights that are damaged", f"@train --weights {WEIGHTS}", f"{WEIGHTS}|SHA-256", spoil(WEIGHTS)),
    Case("pickle that runs a program", "weights inspect evil.pt", "evil.pt",
         write("evil.pt", pickle.dumps({"model": Evil()}, protocol=2))),
    # resume
    Case("run that is not there", "train --resume nowhere", "--resume|nowhere"),
    Case("folder that is no run", "train --resume set", "set|config.yaml"),
    Case("no run to continue", "train --resume auto", "--resume|runs/train"),
    Case("run with another batch", "train --resume exp --batch 4", "--batch 4|2|exp/config.yaml"),
    Case("run with a data set that is not there", "train --resume exp --data nowhere.yaml", "nowhere.yaml"),
    Case("run with other labels", "train --resume exp --max-steps 6", "set|--resume exp",
         write(LABELS, "0 0.5 0.5 0.1 0.1\n")),
    Case("run without a whole state", "train --resume exp --max-steps 6",
         "step-00000004|--weights|exp/weights/last.safetensors", cut("exp/checkpoints/*"), varies=True),
    Case("run whose configuration is cut", "train --resume exp", "exp/config.yaml", cut("exp/config.yaml")),
    # val, predict, export, bench
    Case("val without weights", "val --data set", "--weights"),
    Case("val above one", "@val --conf 2", "--conf|2|1"),
    Case("val of a split that is not there", "@val --split test", "test"),
    Case("val with other classes", "@val", f"{WEIGHTS}|4|5", replace(DATA_YAML, "names:", "names:\n  4: moon")),
    Case("predict what is not there", "@predict --source nowhere.jpg", "nowhere.jpg"),
    Case("predict a folder without pictures", "@predict --source letters", "letters|.doc",
         folder("letters", a_doc="Dear Sir")),
    Case("predict files that are not pictures", "@predict --source bad", "bad/x.jpg", folder("bad", x_jpg="no")),
    Case("predict a class that is not there", "@predict --source set/images/val --classes dog", "dog"),
    Case("export without weights", "export", "--weights"),
    Case("export to an unknown format", f"export --weights {WEIGHTS} --format onix", "onix|onnx"),
    Case("export in 8 bits", f"export --weights {WEIGHTS} --int8", "--int8"),
    Case("export of a size that is not a number", f"export --weights {WEIGHTS} --img 64,x", "--img|64,x"),
    Case("bench of weights that are not there", "bench --weights no.pt", "no.pt"),
    Case("bench on two devices", f"bench --weights {WEIGHTS} --device 0,1", "--device|0,1"),
    # data
    Case("data set that cannot be made", "data make circles --out new", "circles|shapes"),
    Case("data set in a folder with files", "data make shapes --out set", "--out|set"),
    Case("check of labels that are lost", "data check set", "set", write(LABELS, "7 0.5 0.5 0.1 0.1\n")),
    Case("statistics of what is not there", "data stats nowhere", "nowhere"),
    Case("conversion into a folder that is there", "data convert set --to coco --out exp", "exp"),
    Case("conversion to an unknown form", "data convert set --to kitti --out new", "kitti|coco", varies=True),
    Case("download of an unknown data set", "data download nowhere", "nowhere|coco"),
    # reports
    Case("a report of what is no run", "report set", "set"),
    Case("a report of several runs", "report exp exp", "2|compare"),
    Case("a comparison of one run", "report compare exp", "1"),
    # the board
    Case("a board of what is no folder", "board nowhere", "nowhere|runs/train"),
    Case("a board that allows what is no request", "board --allow kill exp", "kill|stop,save"),
    Case("a board on what is no address", "board --host nowhere exp", "--host nowhere|127.0.0.1"),
    # weights, checkpoints
    Case("weights in an unknown form", f"weights convert {WEIGHTS} out.xyz", ".xyz"),
    Case("verification of damaged weights", f"weights verify {WEIGHTS}", WEIGHTS, spoil(WEIGHTS)),
    Case("download of unknown weights", "weights download nowhere.pt", "nowhere.pt"),
    Case("states of a folder without any", "checkpoints list set", "set"),
    Case("states that are damaged", "checkpoints verify exp", "1", spoil("exp/checkpoints/*"), messages=0),
    # hosts, jobs
    Case("hosts without devices", "@train --hosts a:x", "a:x"),
    Case("hosts twice", "fleet check --hosts node-x:1,node-x:1", "node-x"),
    Case("hosts that are empty", "fleet ps --hosts=", "--hosts"),
    Case("no hosts", "fleet check", "--hosts|--fleet"),
    Case("lines below zero", "fleet logs --hosts a:1 --lines -1", "--lines|-1", varies=True),
    Case("no command for the hosts", "fleet run --hosts a:1", "COMMAND", varies=True),
    Case("fleet file that is not there", "@train --fleet nowhere.yaml", "nowhere.yaml"),
    Case("unknown key of a fleet file", "@train --fleet f.yaml", "hostss|f.yaml", write("f.yaml", "hostss: [a:1]\n")),
    Case("host that cannot be logged in to", "fleet ps --hosts gone:1", "gone", fake_ssh, (("PATH", "bin:/usr/bin:/bin"),)),
    Case("unknown key of a job", "render slurm @scheduled --slurm nodse=2", "nodse|nodes"),
    Case("job without an image", "render kubernetes @scheduled", "image"),
    Case("no SLURM here", "@train --slurm nodes=2", "sbatch", folder("none"), (("PATH", "none"),)),
    Case("rank that is no number", "@train", "RANK|first", variables=TORCHRUN),
    # doctor, selftest
    Case("log that is not there", "doctor --log nowhere.log", "nowhere.log"),
    Case("port outside the range", "doctor --quick --port 0", "--port|0"),
    Case("figures into a folder", "doctor --quick --json set", "--json|set"),
    Case("selftest of one step", "selftest --steps 1", "--steps|1|2"),
    Case("selftest of an unknown model", "selftest --device cpu:2 --model yolov5q", "yolov5q"),
]  # fmt: skip


def classes() -> list[type[errors.YolofleetError]]:
    """Return every class of errors that was imported so far."""
    found = [errors.YolofleetError]
    for kind in found:
        found += kind.__subclasses__()
    return found


def outcome(case: Case, place: Path) -> dict[str, object]:
    """Make the mistake in the empty folder ``place``; return what is recorded of it."""
    run = copy_run(place)
    shutil.copy(run / "weights" / WEIGHTS, place)
    with working_in(place, **dict(case.variables)):
        case.prepare()
        before = contents(place)
        done = called(*case.argv())
        after = contents(place)
    kinds = {kind.__name__ for kind in classes()}
    messages = [line for line in done.err.splitlines() if line.partition(":")[0] in kinds]
    kind, _, first = messages[0].partition(": ") if messages else ("", "", *done.err.splitlines()[:1])
    # checked here and not recorded, so no record can accept a bad message
    unnamed = [name for name in case.names.split("|") if name not in done.err]
    assert not unnamed and len(messages) == case.messages and done.code not in (0, 1), (case, unnamed, done)
    told: dict[str, object] = {"mistake": case.title, "exit": done.code, "error": kind}
    if changed := sorted(path for path in {*before, *after} if before.get(path) != after.get(path)):
        told["changed"] = changed
    if not case.varies:
        told["first_line"] = first.replace(str(place), "{here}")
    return told


def outcomes(place: Path, every: int = 1) -> Iterator[dict[str, object]]:
    for number, case in islice(enumerate(CASES), 0, None, every):
        (place / str(number)).mkdir()
        yield outcome(case, place / str(number))


def errors_text(place: Path) -> str:
    """Return the record of all mistakes; ``place`` is an empty folder to work in."""
    codes = {kind.__name__: kind.exit_code for kind in classes() if kind.__module__ == errors.__name__}
    mistakes = ",\n".join(lined(values) for values in outcomes(place))
    return f'{{"exit codes": {lined(codes)},\n"mistakes": [\n{mistakes}\n]}}\n'
