"""Translate the flags of YOLOv5, PaddleDetection and launchers into ours, or refuse them with a reason.

``rewrite`` changes a command line before it is parsed. It writes each flag as ``--flag=value``, so that a value cannot look
like a flag. Underscores and hyphens are equivalent. No flag is silently ignored: a flag without effect gives a note.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from yolofleet.config.device import MOST_PROCESSES
from yolofleet.errors import ConfigError
from yolofleet.text import nearest, shown

Values = Literal["none", "one", "maybe", "some"]


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


def _device(values: list[str]) -> list[str]:
    return ["--device=" + (values[0].lower().replace(" ", "").replace("cuda:", "") or "auto")]


def _batch(values: list[str]) -> list[str]:
    if re.fullmatch(r"0?\.[0-9]+", values[0]):  # a share of the memory
        return ["--batch=auto", f"--batch-memory={values[0]}"]
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


def _formats(values: list[str]) -> list[str]:
    names = {"engine": "tensorrt"}
    return [f"--format={','.join(names.get(value, value) for value in values)}"]


def _paddle_config(values: list[str]) -> list[str]:
    """Return model, recipe, epochs and data set from the name of a PP-YOLOE configuration of PaddleDetection."""
    name = values[0].replace("\\", "/").rpartition("/")[2]
    match = re.fullmatch(r"ppyoloe_(plus_)?crn_([smlx])_(\d{1,4})e_coco(?:\.ya?ml)?", name)
    if match is None:
        raise ConfigError(
            f"-c {shown(values[0])} is not a configuration of PaddleDetection for PP-YOLOE on COCO",
            hint="use --model, --data, --epochs and --recipe; --config FILE reads settings of yolofleet",
        )
    family, recipe = ("ppyoloe-plus", "ppyoloe-plus-80e") if match[1] else ("ppyoloe", "ppyoloe-300e")
    return [f"--model={family}-{match[2]}", f"--recipe={recipe}", f"--epochs={match[3]}", "--data=coco.yaml"]


def _gpus(values: list[str]) -> list[str]:
    count = values[0].strip()
    if count.isdecimal() and 0 < int(count) <= MOST_PROCESSES:
        several = ",".join(map(str, range(int(count))))
        raise ConfigError(
            f"--gpus {count} is GPU number {count} in PaddleDetection, and a number of GPUs in other programs",
            source="command line",
            hint=f"--device {several} for the number, or --device {count} for that one GPU",
        )
    return _device(values)


EVOLVE = Spelling(
    "maybe",
    lambda given: [f"--evolve={(given or ['300'])[0]}"],
    note="is now yolofleet tune, with as many --trials",
)
TTA = switch("--augment")
FROM_LAUNCHER = Spelling("one")  # launchers add it; the worker reads its rank from the environment
IMG = Spelling("some", _img)
BATCH = Spelling("one", _batch)
DEVICE = Spelling("one", _device)
HALF = switch("--precision=fp16")
OPENCV_DNN = refused("yolofleet does not run networks with OpenCV", "leave it out")
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
    "--ips": renamed(
        "--hosts"
    ),  # PaddleDetection's fleetrun; --device applies to hosts without devices in the list
    "--selected-gpu": Spelling("one", _device, note=True),
    "--selected-gpus": Spelling("one", _device, note=True),
    "--gpus": Spelling("one", _gpus, note=True),
    **dict.fromkeys((f"--{name}" for name in TORCHRUN), TORCHRUN_OPTION),
    "--dist-url": refused("the hosts find each other automatically", "--hosts a:8,b:8", "one"),
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
    "--eval": Spelling("none", note="has no effect: training validates after every epoch (--val-period)"),
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
    },
    "val": {
        **MACHINES,
        "--img": IMG,
        "--imgsz": IMG,
        "--img-size": IMG,
        "--batch": same("--batch"),
        "--batch-size": same("--batch"),
        "--device": DEVICE,
        "--weights": same("--weights", "some"),
        "--conf-thres": renamed("--conf"),
        "--iou-thres": renamed("--iou"),
        "--task": Spelling("one", _task, note=True),
        "--half": HALF,
        "--local-rank": FROM_LAUNCHER,
        "--tta": TTA,
        "--classes": same("--classes", "some"),
        "--agnostic": switch("--agnostic-nms"),
        "--save-hybrid": refused("adding labels to the predictions would inflate the metrics", "--save-txt"),
        "--dnn": OPENCV_DNN,
    },
    "predict": {
        "--img": IMG,
        "--imgsz": IMG,
        "--img-size": IMG,
        "--device": DEVICE,
        "--weights": same("--weights", "some"),
        "--classes": same("--classes", "some"),
        "--agnostic": switch("--agnostic-nms"),
        "--conf-thres": renamed("--conf"),
        "--iou-thres": renamed("--iou"),
        "--view-img": switch("--show"),
        "--save-format": Spelling("one", _txt_format, note=True),
        "--nosave": switch("--save=none"),
        "--line-thickness": renamed("--line-width"),
        "--half": HALF,
        "--data": Spelling(note="has no effect: the weights file contains the class names"),
        "--local-rank": FROM_LAUNCHER,
        "--tta": TTA,
        "--update": refused("weights are never rewritten in place", "yolofleet weights inspect"),
        "--dnn": OPENCV_DNN,
    },
}
SPELLINGS["export"] = {
    "--img": Spelling("some", _height_width),
    "--imgsz": Spelling("some", _height_width),
    "--img-size": Spelling("some", _height_width),
    "--batch-size": same("--batch"),
    "--weights": Spelling("some", _one_model),
    "--include": Spelling("some", _formats, note=True),
    "--dynamic": Spelling("maybe", lambda given: [f"--dynamic={(given or ['both'])[0]}"]),
    "--conf-thres": renamed("--conf"),
    "--iou-thres": renamed("--iou"),
    "--opset": refused("files have opset 17", "leave it out", "one"),
    "--inplace": Spelling("none", note="has no effect: it does not change the result"),
    "--verbose": Spelling("none", note="has no effect: TensorRT prints warnings only"),
    "--device": refused("export writes files on the CPU; TensorRT uses the first GPU", "leave it out", "one"),
    "--optimize": refused(
        "TorchScript files for phones are not available", "--format ncnn, tflite or coreml"
    ),
    "--per-tensor": refused(
        "--int8 has one scale for each output channel, which is more accurate", "leave it out"
    ),
    "--keras": refused("yolofleet writes TensorFlow Lite files without TensorFlow", "leave it out"),
    "--mlmodel": refused("Core ML files are packages (.mlpackage)", "leave it out"),
    "--cache": refused("yolofleet builds TensorRT engines without a timing cache", "leave it out", "one"),
    "--workspace": refused("TensorRT chooses its own workspace", "leave it out", "one"),
    "--topk-per-class": refused("there is one limit for all classes", "--max-det", "one"),
    "--topk-all": refused("the limit of boxes has another name", "--max-det", "one"),
}
TASKS = ("detect", "segment", "classify", "pose", "obb")  # before the verb, in Ultralytics' command
VERBS = {"detect": "predict", "test": "val", "inspect": "weights inspect"}


@dataclass(frozen=True)
class Rewritten:
    argv: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Verb:
    """A verb in messages.

    Attributes:
        typed: as the user typed it; shown: its name before ``--help``.
        left_out: flags of the verb with the same spellings that this one does not take.
        why: what to say of these flags, such as ``does not change the prediction of plan``.
    """

    typed: str
    shown: str
    left_out: frozenset[str] = frozenset()
    why: str = ""


def rewrite(
    spelled_as: str, argv: Sequence[str], flags: Mapping[str, bool], verb: Verb | None = None
) -> Rewritten:
    """Return the command line ``argv`` with our flags, and notes for the user.

    Args:
        spelled_as: the verb whose spellings these are.
        flags: our flags of the command, and whether each takes a value.
        verb: of the user, if that is another one.

    Raises:
        ConfigError: a flag is unknown or refused, or its value is missing.
    """
    known = _known(spelled_as, flags)
    usable = [flag for flag, way in known.items() if not way.refusal and way is not FROM_LAUNCHER]
    verb = verb or Verb(spelled_as, spelled_as)
    result, notes = [], []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":  # no options follow
            result += [token, *rest]
            break
        if not token.startswith("--") and token not in known:
            if ASSIGNMENT.match(token) and token not in (meant := _meant(argv, known)):
                raise ConfigError(
                    f"{verb.typed} takes flags, not {shown(token)}",
                    source="command line",
                    hint=_command(verb, meant),
                )
            result.append(token)
            continue
        spelled, equals, value = token.partition("=")
        flag = spelled.replace("_", "-")
        spelling = known.get(flag)
        if flag in verb.left_out:
            raise _left_out(verb, spelled)
        if spelling is None:
            if not verb.left_out and token not in (meant := _meant(argv, known)):
                hint = _command(verb, meant)
                raise ConfigError(f"{verb.typed} has no {shown(spelled)}", source="command line", hint=hint)
            raise _unknown(verb, spelled, flags if verb.left_out else usable)
        if spelling.refusal:
            raise ConfigError(f"{spelled}: {spelling.refusal}", source="command line", hint=spelling.hint)
        values = _values(spelled, spelling.values, [value] if equals else None, rest)
        arguments = spelling.to(values)
        if arguments and verb.why:  # plan takes the model of -c, and not its recipe
            arguments = [argument for argument in arguments if argument.partition("=")[0] in flags]
            if not arguments:
                raise _left_out(verb, spelled)
        at = 0 if spelled == "-c" else len(result)  # at the start, because later flags override earlier ones
        result[at:at] = arguments
        if isinstance(spelling.note, str):
            notes.append(f"{spelled} {spelling.note}")
        elif spelling.note:
            notes.append(
                f"{' '.join([spelled, *map(shown, values)])} is now {' '.join(arguments).replace('=', ' ')}"
            )
    return Rewritten(result, list(dict.fromkeys(notes)))


def _known(spelled_as: str, flags: Mapping[str, bool]) -> dict[str, Spelling]:
    known = {flag: Spelling("one" if takes else "none", _keep(flag, takes)) for flag, takes in flags.items()}
    return known | SPELLINGS.get(spelled_as, {})


def _keep(flag: str, takes: bool) -> Callable[[list[str]], list[str]]:
    return lambda values: [f"{flag}={values[0]}"] if takes else [flag]


def _values(flag: str, wanted: Values, attached: list[str] | None, rest: list[str]) -> list[str]:
    """Remove a flag's values from ``rest`` and return them; stop at a flag, which a negative number is not."""
    if wanted == "none":
        if attached:
            raise ConfigError(f"{flag} takes no value, got {shown(attached[0])}", source="command line")
        return []
    if attached is not None:
        return attached
    taken: list[str] = []
    while rest and not re.match(r"--.|-[A-Za-z]", rest[0]) and (wanted == "some" or not taken):
        taken.append(rest.pop(0))
    if not taken and wanted != "maybe":
        raise ConfigError(f"{flag} needs a value", source="command line")
    return taken


def _left_out(verb: Verb, spelled: str) -> ConfigError:
    return ConfigError(f"{shown(spelled)} {verb.why}", source="command line", hint="leave it out")


def _unknown(verb: Verb, spelled: str, known: Collection[str]) -> ConfigError:
    near = nearest(spelled.replace("_", "-")[2:], [flag[2:] for flag in known if flag.startswith("--")])
    hint = f"did you mean --{near}?" if near else f"yolofleet {verb.shown} --help lists them"
    return ConfigError(f"{verb.typed} has no {shown(spelled)}", source="command line", hint=hint)


# -- what users of other trainers type, for hints ---------------------------------------------------------------

ASSIGNMENT = re.compile(
    r"[A-Za-z]\w*=.*", re.DOTALL
)  # data=coco.yaml, as Ultralytics' command takes its settings
OFF = ("false", "none", "off", "no", "0")


def in_our_words(spelled_as: str, argv: Sequence[str], flags: Mapping[str, bool]) -> list[str]:
    """Return the arguments of a verb with our flags for those of other trainers and for ``name=value``."""
    return _meant(argv, _known(spelled_as, flags))


def _command(verb: Verb, argv: Sequence[str]) -> str:
    return f"yolofleet {verb.typed} {shlex.join(argv)}"


def _meant(argv: Sequence[str], known: Mapping[str, Spelling]) -> list[str]:
    """Translate like :func:`in_our_words`, and keep what has no counterpart."""
    result: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        flag, equals, value = token.partition("=")
        spelling = known.get(flag.replace("_", "-"))
        if spelling is not None:
            result += [token, *([] if equals else _values(flag, spelling.values, None, rest))]
            continue
        if not (token.startswith("--") or ASSIGNMENT.fullmatch(token)):
            result.append(token)
            continue
        following = [] if equals or not rest or rest[0].startswith("--") else [rest[0]]
        ours = _ours(flag.removeprefix("--"), value or "".join(following), argv, known)
        result += [token] if ours is None else ours
        if ours is not None:
            del rest[: len(following)]
    return result


def _ours(name: str, value: str, argv: Sequence[str], known: Mapping[str, Spelling]) -> list[str] | None:
    """Return yolofleet's arguments for a setting of another trainer; None if it has no counterpart."""
    from yolofleet.config.schema import Recipe

    name, is_on = name.replace("_", "-"), value.lower() not in OFF
    if name == "model" and (value.endswith((".pt", ".safetensors")) or "--model" not in known):
        name = "weights"
    if name in ("task", "mode") and "--weights" in known:
        return []
    if "--precision" in known and name == "amp":
        return [] if is_on else ["--precision", "fp32"]
    if "--optimizer" in known and name in ("adam", "adamw"):
        return ["--optimizer", {"adam": "Adam", "adamw": "AdamW"}[name]] if is_on else []
    if "--log" in known and name == "use-vdl":
        return ["--log", "tensorboard"] if is_on else []
    if "--nominal-batch" in known and name == "accumulate" and value.isdecimal():
        batch = re.search(r"(?:^| )(?:--)?batch(?:[-_]size)?[ =](\d+)", " ".join(argv))
        return ["--nominal-batch", str(int(value) * int(batch[1] if batch else 16))]
    spelling = known.get(f"--{name}")
    if spelling is None:
        field = name.replace("-", "_")
        in_recipe = value and "--set" in known and field in Recipe.model_fields
        return ["--set", f"{field}={value}"] if in_recipe else None
    if spelling.values == "none":
        return [f"--{name}"] if is_on else [f"--no-{name}"] if f"--no-{name}" in known else []
    if value.lower() in ("true", "false"):
        return [f"--{name}"] if is_on and spelling.values == "maybe" else []
    return [f"--{name}", value.strip("[]").replace(" ", "") if name == "device" else value]
