"""Tables that translate each flag of YOLOv5, PaddleDetection and launchers to our flags, or give the reason for refusing it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from yolofleet.support.device_names import MOST_PROCESSES
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import shown

Values = Literal["none", "one", "maybe", "some"]
ON = ("true", "on", "yes", "1")  # words of flags and settings that take a word
OFF = ("false", "none", "off", "no", "0")
TXT_FORMATS = {"0": "yolo", "1": "voc"}


@dataclass(frozen=True)
class Spelling:
    """The translation of a flag.

    Attributes:
        values: number of its values; ``maybe``: none or one, ``some``: one or more.
        to: returns our arguments for the values.
        note: True: print the translation; a text: print the flag and this text.
        refusal: reason for refusing the flag; ``hint`` says what to do instead.
    """

    values: Values = "one"
    to: Callable[[list[str]], list[str]] = lambda values: []
    note: bool | str = False
    refusal: str = ""
    hint: str | None = None


def same(flag: str, values: Values = "one") -> Spelling:
    """Translate to ``flag``, without a note."""
    return Spelling(values, lambda given: [f"{flag}={value}" for value in given])


def renamed(flag: str) -> Spelling:
    """Translate to ``flag`` with the same value, with a note."""
    return Spelling("one", lambda given: [f"{flag}={value}" for value in given], note=True)


def switch(*argv: str) -> Spelling:
    """Translate a flag without value to ``argv``, with a note."""
    return Spelling("none", lambda given: list(argv), note=True)


def refused(why: str, hint: str | None = None, values: Values = "none") -> Spelling:
    return Spelling(values, refusal=why, hint=hint)


def _img(values: list[str]) -> list[str]:
    if len(values) > 2 or len(set(values)) > 1:
        raise ConfigError(
            f"--img {' '.join(map(shown, values))}: expected one size, for square images",
            hint=f"--img {max(values, key=lambda v: (len(v), v))}; images keep their aspect ratio",
        )
    return [f"--img={values[0]}"]


def _one_model(values: list[str]) -> list[str]:
    if len(values) > 1:
        raise ConfigError(
            f"--weights with {len(values)} files: an export has one network",
            hint="run the command once for each file",
        )
    return [f"--weights={values[0]}"]


def _sync_bn(values: list[str]) -> list[str]:
    """YOLOv3-SPP takes a word, as in ``--syncBN True``."""
    word = values[0] if values else "True"
    if word.lower() not in (*ON, *OFF):
        raise ConfigError(f"--syncBN {shown(word)}: expected True or False", source="command line")
    return ["--sync-bn" if word.lower() in ON else "--no-sync-bn"]


def _task(values: list[str]) -> list[str]:
    if values[0] in ("speed", "study"):
        raise ConfigError(f"--task {values[0]} is not available: val measures accuracy", hint="leave it out")
    return [f"--split={values[0]}"]


def _paddle_config(values: list[str]) -> list[str]:
    from yolofleet.config.words.paddle import arguments_of_config  # few commands need it

    return arguments_of_config(values)


def _paddle_values(values: list[str]) -> list[str]:
    from yolofleet.config.words.paddle import arguments_of_values

    return arguments_of_values(values)


def _gpus(values: list[str]) -> list[str]:
    count = values[0].strip()
    if count.isdecimal() and 0 < int(count) <= MOST_PROCESSES:
        several = ",".join(map(str, range(int(count))))
        raise ConfigError(
            f"--gpus {count} is GPU number {count} in PaddleDetection, and a number of GPUs in other programs",
            source="command line",
            hint=f"--device {several} for the number, or --device {count} for that one GPU",
        )
    return [f"--device={values[0]}"]


def _dist_url(values: list[str]) -> list[str]:
    meeting = re.fullmatch(r"tcp://(.+):([0-9]+)", values[0])
    if meeting is not None:
        raise ConfigError(
            f"--dist-url {shown(values[0])}: a launcher starts the processes and decides where they meet",
            source="command line",
            hint=f"on each machine: torchrun --nnodes N --node_rank R --nproc_per_node G --master_addr {shown(meeting[1])} "
            f"--master_port {meeting[2]} train.py ...; or once: yolofleet train --hosts a:G,b:G ...",
        )
    return []


EVOLVE = Spelling(
    "maybe",
    lambda given: [f"--evolve={(given or ['300'])[0]}"],
    note="is now yolofleet tune, with as many --trials",
)
OVERLAP = "has no effect: every object has a mask of its own, so masks may overlap"
FROM_LAUNCHER = Spelling("one")  # launchers add it; the worker reads its rank from the environment
IMG = ("--img", "--imgsz", "--img-size")
DEVICE = same("--device")
TORCHRUN = [
    "nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "local-addr", "rdzv-backend",
    "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone", "max-restarts", "monitor-interval",
    "start-method", "event-log-handler", "role", "module", "no-python", "run-path", "log-dir", "redirects",
    "tee", "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "logs-specs",
    "numa-binding", "signals-to-handle", "shutdown-timeout", "virtual-local-rank", "use-env",
]  # fmt: skip
TORCHRUN_OPTION = refused(
    "this is an option of torchrun, which starts the processes",
    "put it before train.py (torchrun OPTIONS train.py ...), or use --hosts a:8,b:8 instead of torchrun",
    "one",
)
MACHINES = {
    # PaddleDetection's fleetrun; --device applies to hosts without devices in the list
    "--ips": renamed("--hosts"),
    "--selected-gpu": renamed("--device"),
    "--selected-gpus": renamed("--device"),
    "--gpus": Spelling("one", _gpus, note=True),
    **dict.fromkeys((f"--{name}" for name in TORCHRUN), TORCHRUN_OPTION),
    "--dist-url": Spelling("one", _dist_url, note="has no effect: the launcher decides where processes meet"),
    "--world-size": Spelling("one", note="has no effect: the launcher, or --device, counts the processes"),
    **dict.fromkeys(
        ("--rank", "--dist-rank"),
        refused("the launcher numbers the processes", "--hosts a:8,b:8, or torchrun --node_rank", "one"),
    ),
    "--dist-backend": Spelling("one", note="has no effect: GPUs have NCCL, and CPUs gloo"),
}

FLEETRUN = {  # PaddleDetection's tools/train.py, and train_multi_GPU.py of YOLOv3-SPP
    "--syncBN": Spelling("maybe", _sync_bn, note=True),
    "-c": Spelling("one", _paddle_config, note=True),
    "-o": Spelling("some", _paddle_values, note=True),
    "-r": renamed("--resume"),
    "--eval": Spelling("none", note="has no effect: training validates after every epoch (--val-period)"),
}

INFERENCE = {  # of val and predict
    **dict.fromkeys(IMG, Spelling("some", _img)),
    "--device": DEVICE,
    "--weights": same("--weights", "some"),
    "--classes": same("--classes", "some"),
    "--agnostic": switch("--agnostic-nms"),
    "--conf-thres": renamed("--conf"),
    "--iou-thres": renamed("--iou"),
    "--half": switch("--precision=fp16"),
    "--local-rank": FROM_LAUNCHER,
    "--tta": switch("--augment"),
    "--dnn": refused("yolofleet does not run networks with OpenCV", "leave it out"),
}


SPELLINGS: dict[str, dict[str, Spelling]] = {
    "train": {
        **MACHINES,
        **FLEETRUN,
        **dict.fromkeys(IMG, Spelling("some", _img)),
        "--batch": same("--batch"),
        "--batch-size": same("--batch"),
        "--device": DEVICE,
        "--hyp": same("--recipe"),
        "--label-smoothing": Spelling("one", lambda given: [f"--set=label_smoothing={given[0]}"]),
        "--freeze": Spelling("some", lambda given: [f"--freeze={','.join(given)}"]),
        "--cache": Spelling("maybe", lambda given: [f"--cache={(given or ['ram'])[0]}"]),
        "--cache-images": switch("--cache=ram"),
        "--resume": Spelling("maybe", lambda given: [f"--resume={(given or ['auto'])[0]}"]),
        "--nosave": switch("--save-every=0"),
        "--noval": switch("--val-period=0"),
        "--noautoanchor": switch("--no-autoanchor"),
        "--noplots": switch("--no-plots"),
        "--cos-lr": switch("--lr-schedule=cosine"),
        "--local-rank": FROM_LAUNCHER,
        "--artifact-alias": Spelling(note="has no effect: yolofleet has no artifact store"),
        "--image-weights": switch("--sampler=weights"),
        "--quad": refused(
            "it leaves out three of four images half of the time, so an epoch would not show each image",
            "raise --img: the mosaics of the recipe join four images, too",
        ),
        "--evolve": EVOLVE,
        "--evolve-population": refused(
            "a search begins with ranges of values, not with a population",
            "yolofleet tune --space FILE",
            "one",
        ),
        "--resume-evolve": refused("a search goes on by its folder", "yolofleet tune --resume FOLDER", "one"),
        "--bucket": refused(
            "results go to a folder, not to a bucket", "--project FOLDER, then copy the folder", "maybe"
        ),
        "--entity": refused(
            "Weights & Biases reads its entity from a variable", "--log wandb and WANDB_ENTITY=NAME", "one"
        ),
        "--upload-dataset": refused("data sets are not uploaded", "leave it out", "maybe"),
        "--bbox-interval": refused(
            "pictures are not sent to Weights & Biases", "--log wandb for figures", "one"
        ),
        "--mask-ratio": Spelling(
            note="has no effect: masks are learned at a quarter of the image, a ratio of 4"
        ),
        "--overlap-mask": Spelling("maybe", note=OVERLAP),
        "--no-overlap": Spelling("none", note=OVERLAP),
    },
    "val": {
        **MACHINES,
        **INFERENCE,
        "--batch": same("--batch"),
        "--batch-size": same("--batch"),
        "--task": Spelling("one", _task, note=True),
        "--save-hybrid": refused("adding labels to the predictions would inflate the metrics", "--save-txt"),
    },
    "predict": {
        **INFERENCE,
        "--view-img": switch("--show"),
        "--save-format": Spelling(
            "one", lambda given: [f"--txt-format={TXT_FORMATS.get(given[0], given[0])}"], note=True
        ),
        "--nosave": switch("--save=none"),
        "--line-thickness": renamed("--line-width"),
        "--data": Spelling(note="has no effect: the weights file contains the class names"),
        "--retina-masks": Spelling(
            "maybe", note="has no effect: masks always have the size of the image, and edges as fine"
        ),
        "--update": refused("weights are never rewritten in place", "yolofleet weights inspect"),
    },
}
SPELLINGS["export"] = {
    **dict.fromkeys(IMG, Spelling("some", lambda given: [f"--img={','.join(given)}"])),
    "--batch-size": same("--batch"),
    "--weights": Spelling("some", _one_model),
    "--include": Spelling("some", lambda given: ["--format=" + ",".join(given)], note=True),
    "--dynamic": Spelling("maybe", lambda given: [f"--dynamic={(given or ['both'])[0]}"]),
    "--conf-thres": renamed("--conf"),
    "--iou-thres": renamed("--iou"),
    "--opset": refused("files have opset 17", "leave it out", "one"),
    "--inplace": Spelling("none", note="has no effect: it does not change the result"),
    "--verbose": Spelling("none", note="has no effect: it is for TensorRT, which yolofleet does not use"),
    "--device": refused("export writes files on the CPU", "leave it out", "one"),
    "--optimize": refused("TorchScript files for phones are not available", "--format ncnn or tflite"),
    "--per-tensor": refused(
        "--int8 has one scale for each output channel, which is more accurate", "leave it out"
    ),
    "--keras": refused("yolofleet writes TensorFlow Lite files without TensorFlow", "leave it out"),
    "--mlmodel": refused("yolofleet writes no Core ML files", "leave it out"),
    "--cache": refused("yolofleet builds no TensorRT engines", "leave it out", "one"),
    "--workspace": refused("yolofleet builds no TensorRT engines", "leave it out", "one"),
    "--topk-per-class": refused("there is one limit for all classes", "--max-det", "one"),
    "--topk-all": refused("the limit of boxes has another name", "--max-det", "one"),
}
TASKS = ("detect", "segment", "classify", "pose", "obb")  # before the verb, in Ultralytics' command
VERBS = {"detect": "predict", "test": "val", "inspect": "weights inspect"}
