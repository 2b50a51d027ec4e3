"""Old spellings: YOLOv5's flags, and those by which others name machines -> today's, in one table; and why some are refused.

``rewrite`` turns a command line into today's flags, each as ``--flag=value`` (so a value is never taken for
a flag), before it is parsed. Underscores and hyphens are the same. Nothing is accepted and silently ignored:
a flag without effect here says so once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from yolofleet.errors import ConfigError
from yolofleet.text import nearest, shown

Values = Literal["none", "one", "maybe", "some"]


@dataclass(frozen=True)
class Spelling:
    """What a spelling becomes.

    Attributes:
        values: how many values follow it; ``maybe`` is none or one, ``some`` is one or more.
        to: values -> today's arguments.
        note: tell the user what it became, or this sentence.
        refusal: why it cannot be used; then ``hint`` says what to do instead.
    """

    values: Values = "one"
    to: Callable[[list[str]], list[str]] = lambda values: []
    note: bool | str = False
    refusal: str = ""
    hint: str | None = None


def same(flag: str, values: Values = "one") -> Spelling:
    """Another spelling of ``flag``."""
    return Spelling(values, lambda given: [f"{flag}={value}" for value in given])


def now(flag: str) -> Spelling:
    """``flag`` with its value is what it is called today; said once."""
    return Spelling("one", lambda given: [f"{flag}={value}" for value in given], note=True)


def switch(*argv: str) -> Spelling:
    """A switch that became ``argv``; said once."""
    return Spelling("none", lambda given: list(argv), note=True)


def refused(why: str, hint: str | None = None, values: Values = "none") -> Spelling:
    return Spelling(values, refusal=why, hint=hint)


def _img(values: list[str]) -> list[str]:
    if len(values) > 2 or len(set(values)) > 1:
        raise ConfigError(
            f"--img {' '.join(map(shown, values))}: only one size, for square images, is available",
            hint=f"--img {max(values, key=lambda v: (len(v), v))}; images keep their shape inside it",
        )
    return [f"--img={values[0]}"]


def _one_model(values: list[str]) -> list[str]:
    if len(values) > 1:
        raise ConfigError(
            f"--weights with {len(values)} files: ensembles are not available yet",
            hint="name one file, and run each",
        )
    return [f"--weights={values[0]}"]


def _device(values: list[str]) -> list[str]:
    return ["--device=" + (values[0].lower().replace(" ", "").replace("cuda:", "") or "auto")]


def _batch(values: list[str]) -> list[str]:
    if values[0] in ("-1", "auto"):
        raise ConfigError(
            f"--batch {values[0]}: finding the batch by itself is not available yet", hint="--batch 16"
        )
    return [f"--batch={values[0]}"]


def _save_period(values: list[str]) -> list[str]:
    return [] if values[0] == "-1" else [f"--save-period={values[0]}"]


def _task(values: list[str]) -> list[str]:
    if values[0] in ("speed", "study"):
        raise ConfigError(f"--task {values[0]} is not available: val measures accuracy", hint="leave it out")
    return [f"--split={values[0]}"]


def _txt_format(values: list[str]) -> list[str]:
    return [f"--txt-format={ {'0': 'yolo', '1': 'voc'}.get(values[0], values[0]) }"]


def _height_width(values: list[str]) -> list[str]:
    return [f"--img={','.join(values)}"]


def _one_format(values: list[str]) -> list[str]:
    if len(values) > 1:
        raise ConfigError(
            f"--include with {len(values)} formats: one file is written at a time",
            hint=f"--format {values[0]}, and again for each",
        )
    names = {"engine": "tensorrt"}
    return [f"--format={names.get(values[0], values[0])}"]


def _paddle_config(values: list[str]) -> list[str]:
    """Return what the name of a PP-YOLOE configuration of PaddleDetection says: model, recipe, epochs and data set."""
    name = values[0].replace("\\", "/").rpartition("/")[2]
    match = re.fullmatch(r"ppyoloe_(plus_)?crn_([smlx])_(\d{1,4})e_coco(?:\.ya?ml)?", name)
    if match is None:
        raise ConfigError(
            f"-c {shown(values[0])}: of PaddleDetection's configurations only those of PP-YOLOE on COCO are known",
            hint="--model, --data, --epochs and --recipe say the same; --config FILE has settings of yolofleet",
        )
    family, recipe = ("ppyoloe-plus", "ppyoloe-plus-80e") if match[1] else ("ppyoloe", "ppyoloe-300e")
    return [f"--model={family}-{match[2]}", f"--recipe={recipe}", f"--epochs={match[3]}", "--data=coco.yaml"]


LATER = "is not available yet"
EVOLVE = refused("the genetic search is not part of train", "start runs with --set key=value", "maybe")
TTA = refused(f"test-time augmentation {LATER}", "leave it out")
LAUNCHED = Spelling("one")  # filled in by launchers; the worker reads its place from the environment
IMG = Spelling("some", _img)
BATCH = Spelling("one", _batch)
DEVICE = Spelling("one", _device)
HALF = switch("--precision=fp16")
ONNX = refused("OpenCV does not run the network here", "leave it out")
OF_TORCHRUN = refused(
    "this is an option of torchrun, which starts the processes",
    "torchrun ... train.py ..., with it before train.py; or leave it out: --hosts a:8,b:8 starts them all",
    "one",
)
MACHINES = {
    "--ips": now("--hosts"),  # PaddleDetection's fleetrun; --device counts for names without devices
    "--selected-gpu": Spelling("one", _device, note=True),
    "--selected-gpus": Spelling("one", _device, note=True),
    "--gpus": Spelling("one", _device, note=True),
    **dict.fromkeys(
        ("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--rdzv-endpoint"),
        OF_TORCHRUN,
    ),
    "--dist-url": refused("machines find each other by themselves", "--hosts a:8,b:8", "one"),
    "--world-size": refused("it follows from the hosts and their devices", "--hosts a:8,b:8", "one"),
    **dict.fromkeys(
        ("--rank", "--dist-rank"),
        refused("it follows from the hosts and their devices", "--hosts a:8,b:8", "one"),
    ),
    "--dist-backend": refused(
        "it follows from the device: NCCL on GPUs, gloo on CPUs", "leave it out", "one"
    ),
}

FLEETRUN = {  # PaddleDetection's tools/train.py
    "-c": Spelling("one", _paddle_config, note=True),
    "--eval": Spelling("none", note="has no effect: every epoch is validated (--val-period)"),
}

SPELLINGS: dict[str, dict[str, Spelling]] = {
    "train": {
        **MACHINES,
        **FLEETRUN,
        "--img": IMG,
        "--imgsz": IMG,
        "--img-size": IMG,
        "--batch": BATCH,
        "--batch-size": BATCH,
        "--device": DEVICE,
        "--hyp": same("--recipe"),
        "--label-smoothing": Spelling("one", lambda given: [f"--set=label_smoothing={given[0]}"]),
        "--freeze": Spelling("some", lambda given: [f"--freeze={','.join(given)}"]),
        "--cache": Spelling("maybe", lambda given: [f"--cache={(given or ['ram'])[0]}"]),
        "--cache-images": switch("--cache=ram"),
        "--resume": Spelling("maybe", lambda given: [f"--resume={(given or ['auto'])[0]}"]),
        "--save-period": Spelling("one", _save_period),
        "--nosave": switch("--save-period=0", "--save-minutes=0"),
        "--noval": switch("--val-period=0"),
        "--noautoanchor": switch("--no-autoanchor"),
        "--noplots": switch("--no-plots"),
        "--cos-lr": switch("--lr-schedule=cosine"),
        "--local-rank": LAUNCHED,
        "--artifact-alias": Spelling(note="has no effect: there is no artifact store"),
        "--rect": refused(f"rectangular training {LATER}", "leave it out: images are padded to a square"),
        "--image-weights": refused(f"drawing images by class accuracy {LATER}", "leave it out"),
        "--quad": refused(
            "four images in one are not offered: it changes the loss", "leave it out, or raise --img"
        ),
        "--evolve": EVOLVE,
        "--evolve-population": EVOLVE,
        "--resume-evolve": EVOLVE,
        "--bucket": refused(
            "results go to a folder, not to a bucket", "--project FOLDER, and copy it", "maybe"
        ),
        "--entity": refused(f"logging to Weights & Biases {LATER}", "--tensorboard", "one"),
        "--upload-dataset": refused("data sets are not uploaded", "leave it out", "maybe"),
        "--bbox-interval": refused(f"logging to Weights & Biases {LATER}", "--tensorboard", "one"),
    },
    "val": {
        **MACHINES,
        "--img": IMG,
        "--imgsz": IMG,
        "--img-size": IMG,
        "--batch": BATCH,
        "--batch-size": BATCH,
        "--device": DEVICE,
        "--weights": Spelling("some", _one_model),
        "--conf-thres": now("--conf"),
        "--iou-thres": now("--iou"),
        "--task": Spelling("one", _task, note=True),
        "--half": HALF,
        "--local-rank": LAUNCHED,
        "--augment": TTA,
        "--tta": TTA,
        "--save-hybrid": refused("labels mixed into the predictions would inflate the figures", "--save-txt"),
        "--dnn": ONNX,
    },
    "predict": {
        "--img": IMG,
        "--imgsz": IMG,
        "--img-size": IMG,
        "--device": DEVICE,
        "--weights": Spelling("some", _one_model),
        "--classes": same("--classes", "some"),
        "--conf-thres": now("--conf"),
        "--iou-thres": now("--iou"),
        "--view-img": switch("--show"),
        "--save-format": Spelling("one", _txt_format, note=True),
        "--nosave": switch("--save=none"),
        "--line-thickness": now("--line-width"),
        "--half": HALF,
        "--data": Spelling(note="has no effect: class names travel inside the weights"),
        "--local-rank": LAUNCHED,
        "--augment": TTA,
        "--tta": TTA,
        "--update": refused("weights are never rewritten in place", "yolofleet weights inspect"),
        "--dnn": ONNX,
    },
}
SPELLINGS["export"] = {
    "--img": Spelling("some", _height_width),
    "--imgsz": Spelling("some", _height_width),
    "--img-size": Spelling("some", _height_width),
    "--batch-size": same("--batch"),
    "--weights": Spelling("some", _one_model),
    "--include": Spelling("some", _one_format, note=True),
    "--dynamic": Spelling("maybe", lambda given: [f"--dynamic={(given or ['both'])[0]}"]),
    "--conf-thres": now("--conf"),
    "--iou-thres": now("--iou"),
    "--opset": refused("files have opset 17", "leave it out", "one"),
    "--inplace": Spelling("none", note="has no effect: it changes nothing that is computed"),
    "--verbose": Spelling("none", note="has no effect: TensorRT says what is worth knowing"),
    "--device": refused("files are written on the CPU; TensorRT takes the first GPU", "leave it out", "one"),
    "--optimize": refused(
        "there is no form of TorchScript for phones any more", "--format ncnn, tflite or coreml"
    ),
    "--int8": refused(f"8 bits {LATER}", "--half"),
    "--per-tensor": refused(f"8 bits {LATER}", "leave it out"),
    "--keras": refused("TensorFlow is not used to write TensorFlow Lite", "leave it out"),
    "--mlmodel": refused("Core ML files are packages (.mlpackage)", "leave it out"),
    "--cache": refused("TensorRT builds without a cache of timings", "leave it out", "one"),
    "--workspace": refused("TensorRT chooses its own workspace", "leave it out", "one"),
    "--topk-per-class": refused("there is one limit for all classes", "--max-det", "one"),
    "--topk-all": refused("it has another name here", "--max-det", "one"),
}
VERBS = {"detect": "predict", "test": "val", "inspect": "weights inspect"}


@dataclass(frozen=True)
class Rewritten:
    argv: list[str]
    notes: list[str]


def rewrite(verb: str, argv: Sequence[str], flags: Mapping[str, bool]) -> Rewritten:
    """Today's command line for ``argv``.

    Args:
        flags: today's flags of the verb, and whether each takes a value.

    Raises:
        ConfigError: an unknown or refused flag, or a value missing.
    """
    known = {flag: Spelling("one" if takes else "none", _keep(flag, takes)) for flag, takes in flags.items()}
    known |= SPELLINGS.get(verb, {})
    result, notes = [], []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":  # what follows is no option of ours
            result += [token, *rest]
            break
        if not token.startswith("--") and token not in known:
            result.append(token)
            continue
        spelled, equals, value = token.partition("=")
        flag = spelled.replace("_", "-")
        spelling = known.get(flag)
        if spelling is None:
            raise _unknown(verb, spelled, known)
        if spelling.refusal:
            raise ConfigError(f"{spelled}: {spelling.refusal}", source="command line", hint=spelling.hint)
        values = _values(spelled, spelling.values, [value] if equals else None, rest)
        became = spelling.to(values)
        at = 0 if spelled == "-c" else len(result)  # the command's own flags, which come later, win
        result[at:at] = became
        if isinstance(spelling.note, str):
            notes.append(f"{spelled} {spelling.note}")
        elif spelling.note:
            notes.append(
                f"{' '.join([spelled, *map(shown, values)])} is now {' '.join(became).replace('=', ' ')}"
            )
    return Rewritten(result, list(dict.fromkeys(notes)))


def _keep(flag: str, takes: bool) -> Callable[[list[str]], list[str]]:
    return lambda values: [f"{flag}={values[0]}"] if takes else [flag]


def _values(flag: str, wanted: Values, attached: list[str] | None, rest: list[str]) -> list[str]:
    """Take a flag's values off ``rest``; what looks like a flag is none (a negative number does not)."""
    if wanted == "none":
        if attached:
            raise ConfigError(f"{flag} takes no value, {shown(attached[0])} was given", source="command line")
        return []
    if attached is not None:
        return attached
    taken: list[str] = []
    while rest and not re.match(r"--.|-[A-Za-z]", rest[0]) and (wanted == "some" or not taken):
        taken.append(rest.pop(0))
    if not taken and wanted != "maybe":
        raise ConfigError(f"{flag} needs a value", source="command line")
    return taken


def _unknown(verb: str, spelled: str, known: Mapping[str, Spelling]) -> ConfigError:
    usable = [
        flag[2:]
        for flag, spelling in known.items()
        if flag.startswith("--") and not spelling.refusal and spelling is not LAUNCHED
    ]
    near = nearest(spelled.replace("_", "-")[2:], usable)
    hint = f"did you mean --{near}?" if near else f"yolofleet {verb} --help lists them"
    return ConfigError(f"{verb} has no {shown(spelled)}", source="command line", hint=hint)
