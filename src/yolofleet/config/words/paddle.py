"""Translate commands of PaddleDetection, whose launchers and scripts are programs of their own, into ours.

PaddleDetection's configurations are not read, because they name Python classes. The name of a PP-YOLOE configuration for
COCO says everything that decides: model, schedule and data set. Its batch is 8 images for each device.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from yolofleet.config.resolve import COMMAND_LINE
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import nearest, shown

SCRIPTS = {"train.py": "train", "eval.py": "val", "infer.py": "predict"}
IMAGES_PER_DEVICE = 8

# options of the launchers, and the spelling of `yolofleet train`
OF_LAUNCHER = {
    "--ips": "--ips",
    "--gpus": "--selected-gpu",
    "--selected-gpu": "--selected-gpu",
    "--selected-gpus": "--selected-gpu",
    "--devices": "--selected-gpu",
}
WITHOUT_EFFECT = {
    "--log-dir": "the logs of all ranks are in the folder logs of the run",
    "--started-port": "FLAGS_START_PORT, or `port` in the file of --fleet, chooses one",
}
# keys of -o, and our arguments; of those in SWITCHES only some values are known
KEYS = {
    "epoch": "--epochs={}",
    "worker_num": "--workers={}",
    "LearningRate.base_lr": "--set=lr0={}",
    "pretrain_weights": "--weights={}",
    "weights": "--weights={}",
    "ema_decay": "--set=ema_decay={}",
    "save_dir": "--project={}",
    "TrainDataset.dataset_dir": "--data={}",
    "EvalDataset.dataset_dir": "--data={}",
    "snapshot_epoch": "--save-every={}epochs --val-period={}",
}
SWITCHES = {
    ("use_gpu", "false"): ["--device=cpu"],
    ("use_gpu", "true"): [],
    ("use_ema", "false"): ["--set=ema_decay=0"],
    ("use_ema", "true"): [],
    ("norm_type", "sync_bn"): ["--sync-bn"],
    ("norm_type", "bn"): [],
}
BATCHES = ("TrainReader.batch_size", "EvalReader.batch_size")
# options of the scripts that other programs of ours spell differently
OF_SCRIPT = {
    "predict": {
        "--infer-img": "--source",
        "--infer-dir": "--source",
        "--output-dir": "--project",
        "--draw-threshold": "--conf",
        "--save-results": "--save-txt",
    },
    "val": {"--output-eval": "--project", "--classwise": "--verbose", "--json-eval": "--save-json"},
}


def arguments_of_config(values: list[str]) -> list[str]:
    """Return model, recipe, epochs and data set from the name of a PP-YOLOE configuration. Raise ConfigError for another."""
    line, size, epochs = _named(values[0])
    return [
        f"--model={line}-{size}",
        "--recipe=" + ("ppyoloe-plus-80e" if line == "ppyoloe-plus" else "ppyoloe-300e"),
        f"--epochs={epochs}",
        "--data=coco.yaml",
    ]


def _named(config: str) -> tuple[str, str, str]:
    """Return line, size and epochs of a configuration by its name, such as ppyoloe, s and 300."""
    name = config.replace("\\", "/").rpartition("/")[2]
    match = re.fullmatch(r"ppyoloe_(plus_)?crn_([smlx])_(\d{1,4})e_coco(?:\.ya?ml)?", name)
    if match is None:
        raise ConfigError(
            f"-c {shown(config)} is not a configuration of PaddleDetection for PP-YOLOE on COCO",
            source=COMMAND_LINE,
            hint="use --model, --data, --epochs and --recipe; --config FILE reads settings of yolofleet",
        )
    return ("ppyoloe-plus" if match[1] else "ppyoloe"), match[2], match[3]


def arguments_of_values(values: list[str], devices: int = 0) -> list[str]:
    """Return our arguments for ``KEY=VALUE`` of ``-o``.

    Args:
        devices: of the run; 0: not known, so a batch for each device cannot be translated.
    Raises:
        ConfigError: yolofleet has no such key, or no such value of it.
    """
    found: list[str] = []
    for text in values:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"-o {shown(text)} is not KEY=VALUE", source=COMMAND_LINE)
        if key in BATCHES:
            found.append(f"--batch={_batch(text, value, devices)}")
        elif (key, value.lower()) in SWITCHES:
            found += SWITCHES[key, value.lower()]
        elif key in KEYS:
            found += [form.replace("{}", value) for form in KEYS[key].split(" ")]
        else:
            known = (*KEYS, *BATCHES, *(name for name, _ in SWITCHES))
            near = nearest(key, known)
            raise ConfigError(
                f"-o {shown(text)}: yolofleet has no such key or value",
                source=COMMAND_LINE,
                hint=f"did you mean {near}?" if near else "--set KEY=VALUE has the keys of our recipes",
            )
    return found


def _batch(text: str, value: str, devices: int) -> int:
    if not value.isdecimal() or not devices:
        raise ConfigError(
            f"-o {shown(text)}: PaddleDetection counts the images of each device, and yolofleet those of all",
            source=COMMAND_LINE,
            hint="--batch with the total",
        )
    return int(value) * devices


def command_of(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command of yolofleet for ``fleetrun [OPTIONS] tools/train.py [OPTIONS]``, and notes for the user.

    The devices of the launcher are counted, because the batch there is that of each device.

    Raises:
        ConfigError: an option of the launcher or the script is not known here.
    """
    launcher, *rest = argv
    machines: dict[str, str] = {}
    notes: list[str] = []
    while rest and rest[0].startswith("-"):
        spelled, equals, value = rest.pop(0).partition("=")
        flag = spelled.replace("_", "-")
        if flag not in OF_LAUNCHER and flag not in WITHOUT_EFFECT:
            raise ConfigError(
                f"{launcher} {shown(spelled)}: yolofleet has no such option",
                source=COMMAND_LINE,
                hint=f"options before the script: {', '.join(OF_LAUNCHER)}",
            )
        if not equals and not rest:
            raise ConfigError(f"{launcher} {spelled} needs a value", source=COMMAND_LINE)
        value = value if equals else rest.pop(0)
        if flag in OF_LAUNCHER:
            machines[OF_LAUNCHER[flag]] = value
        else:
            notes.append(f"{spelled} has no effect: {WITHOUT_EFFECT[flag]}")
    script = rest.pop(0) if rest else ""
    verb = SCRIPTS.get(script.replace("\\", "/").rpartition("/")[2])
    if verb is None:
        raise ConfigError(
            f"{launcher} {shown(script)}: expected one of tools/{', tools/'.join(SCRIPTS)}",
            source=COMMAND_LINE,
            hint=f"yolofleet {launcher} --gpus 0,1 tools/train.py -c configs/ppyoloe/ppyoloe_crn_s_300e_coco.yml",
        )
    if verb == "predict" and "--selected-gpu" in machines:
        machines = {"--device": machines["--selected-gpu"].partition(",")[0]}
    given = [f"{flag}={value}" for flag, value in machines.items()]
    devices = len(machines.get("--ips", "").split(","))
    devices *= len(machines["--selected-gpu"].split(",")) if "--selected-gpu" in machines else 0
    command = [verb, *given, *_of_script(verb, rest, devices)]
    words = [part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return command, [f"{launcher} is now {shlex.join(['yolofleet', *words])}", *notes]


def _of_script(verb: str, argv: Sequence[str], devices: int) -> list[str]:
    """Return the arguments of a script; a configuration decides first, so that other options replace its values."""
    config: list[str] = []
    found: list[str] = []
    rest = list(argv)
    while rest:
        spelled, equals, value = rest.pop(0).partition("=")
        flag = spelled.replace("_", "-")
        if flag in ("-c", "--config"):
            value = value if equals else (rest.pop(0) if rest else "")
            if verb == "train":
                config = arguments_of_config([value])
                if devices:
                    config += [f"--batch={IMAGES_PER_DEVICE * devices}", f"--micro-batch={IMAGES_PER_DEVICE}"]
            elif _named(value) and verb == "val":
                config = ["--data=coco.yaml"]
        elif flag in ("-o", "--opt"):
            values = [value] if equals else []
            while rest and not rest[0].startswith("-"):
                values.append(rest.pop(0))
            found += arguments_of_values(values, devices)
        elif flag == "--fleet":
            continue  # it chose Paddle's engine for several machines
        else:
            ours = OF_SCRIPT.get(verb, {}).get(flag, spelled)
            found.append(f"{ours}={value}" if equals else ours)
    return [*config, *found]
