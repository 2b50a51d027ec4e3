"""Old spellings: what each YOLOv5 flag becomes, what it says, and why some are refused."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from reference import parity

from yolofleet.cli.commands import SchemaCommand
from yolofleet.config.load import resolve_train
from yolofleet.config.schema import Frozen, TrainConfig, ValConfig, flag_of
from yolofleet.config.schema.verbs import ExportConfig, PredictConfig
from yolofleet.config.words.aliases import rewrite
from yolofleet.config.words.earlier import EARLIER
from yolofleet.support.errors import ConfigError

MODELS: dict[str, type[Frozen]] = {
    "train": TrainConfig,
    "val": ValConfig,
    "predict": PredictConfig,
    "export": ExportConfig,
}


def flags_of(verb):
    """Flags and whether they take a value, as the command line has them."""
    command = SchemaCommand(verb, MODELS[verb], lambda **_: 0)
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert options == command.params
    return {opt: not p.is_flag for p in options for opt in (*p.opts, *p.secondary_opts)}


FLAGS = {verb: flags_of(verb) for verb in MODELS}


def words(verb, line):
    """The rewritten command line as one text, and the notes."""
    done = rewrite(verb, ["" if word == "''" else word for word in line.split()], FLAGS[verb])
    return " ".join(done.argv), done.notes


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("--data coco.yaml --weights yolov5s.pt --batch 64 --device 0,1 --epochs 3 --img 640",
         "--data=coco.yaml --weights=yolov5s.pt --batch=64 --device=0,1 --epochs=3 --img=640"),
        ("--batch_size 32 --img-size 320 --imgsz 416", "--batch=32 --img=320 --img=416"),
        ("--batch-size=32 --exist_ok --sync_bn", "--batch=32 --exist-ok --sync-bn"),
        ("--weights '' --cfg yolov5s.yaml", "--weights= --cfg=yolov5s.yaml"),
        ("--hyp hyp.scratch-high.yaml", "--recipe=hyp.scratch-high.yaml"),
        ("--label-smoothing 0.1", "--set=label_smoothing=0.1"),
        ("--cache", "--cache=ram"),
        ("--cache --epochs 3", "--cache=ram --epochs=3"),
        ("--cache disk", "--cache=disk"),
        ("--cache=disk", "--cache=disk"),
        ("--resume", "--resume=auto"),
        ("--resume runs/train/exp/weights/last.pt", "--resume=runs/train/exp/weights/last.pt"),
        ("--freeze 10", "--freeze=10"),
        ("--freeze 0 1 2 --epochs 3", "--freeze=0,1,2 --epochs=3"),
        ("--imgsz 640 640", "--img=640"),
        ("--device ''", "--device="),
        ("--device cuda:0,1", "--device=cuda:0,1"),
        ("--device CPU", "--device=CPU"),
        ("--local_rank 1 --batch 4", "--batch=4"),
        ("--local-rank=0 --batch 4", "--batch=4"),
        ("--workers -1", "--workers=-1"),
        ("--no-plots --plots", "--no-plots --plots"),
        ("--set lr0=0.1 --set box=1", "--set=lr0=0.1 --set=box=1"),
        ("extra -h", "extra -h"),
    ],
)  # fmt: skip
def test_train_flags_that_mean_the_same_change_silently(line, becomes):
    assert words("train", line) == (becomes, [])


@pytest.mark.parametrize(
    ("verb", "line", "becomes", "note"),
    [
        ("train", "--cos-lr", "--lr-schedule=cosine", "--cos-lr is now --lr-schedule cosine"),
        ("train", "--ips 10.0.0.1,b", "--hosts=10.0.0.1,b", "--ips 10.0.0.1,b is now --hosts 10.0.0.1,b"),
        ("val", "--selected_gpu 0,1", "--device=0,1", "--selected_gpu 0,1 is now --device 0,1"),
        ("train", "-c configs/ppyoloe/ppyoloe_crn_s_300e_coco.yml",
         "--model=ppyoloe-s --recipe=ppyoloe-300e --epochs=300 --data=coco.yaml",
         "-c configs/ppyoloe/ppyoloe_crn_s_300e_coco.yml is now --model ppyoloe-s --recipe ppyoloe-300e --epochs 300 "
         "--data coco.yaml"),
        ("train", "-c ppyoloe_plus_crn_l_80e_coco.yml",
         "--model=ppyoloe-plus-l --recipe=ppyoloe-plus-80e --epochs=80 --data=coco.yaml",
         "-c ppyoloe_plus_crn_l_80e_coco.yml is now --model ppyoloe-plus-l --recipe ppyoloe-plus-80e --epochs 80 "
         "--data coco.yaml"),
        ("train", "--eval", "", "--eval has no effect: training validates after every epoch (--val-period)"),
        ("export", "--inplace", "", "--inplace has no effect: it does not change the result"),
        ("train", "--artifact_alias best", "", "--artifact_alias has no effect: yolofleet has no artifact store"),
        ("val", "--conf-thres 0.1", "--conf=0.1", "--conf-thres 0.1 is now --conf 0.1"),
        ("val", "--half", "--precision=fp16", "--half is now --precision fp16"),
        ("val", "--task test", "--split=test", "--task test is now --split test"),
        ("train", "--batch-size 0.8", "--batch=0.8", None),
        ("train", "--batch -1", "--batch=-1", None),
        ("predict", "--save-format 1", "--txt-format=voc", "--save-format 1 is now --txt-format voc"),
        ("predict", "--data d.yaml", "", "--data has no effect: the weights file contains the class names"),
        ("predict", "--classes 0 2 person", "--classes=0 --classes=2 --classes=person", None),
        ("predict", "--imgsz 320 320 --source 0", "--img=320 --source=0", None),
    ],
)  # fmt: skip
def test_renamed_flags_say_their_new_name_once(verb, line, becomes, note):
    assert words(verb, line) == (becomes, [note] if note else [])
    assert words(verb, f"{line} {line}")[1] == ([note] if note else [])


def test_flags_win_over_a_configuration_of_paddledetection_wherever_they_stand():
    for line in ("--epochs 3 -c ppyoloe_crn_s_300e_coco.yml", "-c ppyoloe_crn_s_300e_coco.yml --epochs 3"):
        assert words("train", line)[0].startswith("--model=ppyoloe-s ")
        assert words("train", line)[0].endswith("--epochs=3")


@pytest.mark.parametrize(
    ("verb", "line", "says"),
    [
        ("train", "--evolve_population x", "not with a population"),
        ("train", "--resume_evolve x", "goes on by its folder"),
        ("train", "--quad", "an epoch would not show each image"),
        (
            "train",
            "-c configs/yolov3/yolov3_darknet53_270e_coco.yml",
            "is not a configuration of PaddleDetection for PP-YOLOE on COCO",
        ),
        ("train", "-c --eval", "-c needs a value"),
        ("train", "--bucket gs://x", "not to a bucket"),
        ("train", "--entity me", "Weights & Biases"),
        ("train", "--imgsz 640 480", "--img 640 480: expected one size"),
        ("train", "--img", "--img needs a value"),
        ("train", "--weights --data x", "--weights needs a value"),
        ("train", "--plots=yes", "--plots takes no value, got yes"),
        ("train", "--freeze --epochs 3", "--freeze needs a value"),
        ("train", "--epohcs 3", "did you mean --epochs?"),
        ("train", "--cos_lrr", "did you mean --cos-lr?"),
        ("train", "--zzz", "yolofleet train --help lists them"),
        ("train", "--=3", "train has no --"),
        ("train", "--nproc_per_node 2", "this is an option of torchrun"),
        ("train", "--dist-url tcp://10.0.0.1:29500", "--master_addr 10.0.0.1 --master_port 29500 train.py"),
        ("train", "--dist-rank 0", "the launcher numbers the processes"),
        ("train", "-o epoch", "-o epoch is not KEY=VALUE"),
        ("train", "-o snapshot_epohc=3", "did you mean snapshot_epoch?"),
        ("train", "-o norm_type=gn", "yolofleet has no such key or value"),
        ("train", "-o TrainReader.batch_size=8", "--batch with the total"),
        ("val", "--save-hybrid", "would inflate the metrics"),
        ("val", "--dnn", "OpenCV"),
        ("val", "--task speed", "val measures accuracy"),
        ("predict", "--update", "never rewritten"),
        ("export", "--weights a.pt b.pt c.pt", "--weights with 3 files"),
    ],
)
def test_what_cannot_be_used_says_why(verb, line, says):
    with pytest.raises(ConfigError) as caught:
        words(verb, line)
    assert says in caught.value.render()
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("--data d --lr0 3", "--data d --set lr0=3"),
        ("--data d --close-mosaic 10 --lr0=3", "--data d --set close_mosaic=10 --set lr0=3"),
        ("--adam --data d", "--optimizer Adam --data d"),
        ("--data d --batch-size 32 --accumulate 4", "--data d --batch-size 32 --nominal-batch 128"),
        ("--accumulate 4", "--nominal-batch 64"),
        ("--use_vdl True --data d", "--log tensorboard --data d"),
        ("--data d --amp", "--data d"),
        ("--amp False --data d", "--precision fp32 --data d"),
        (
            "data=d model=yolov5n epochs=1 imgsz=320 device=[0,1] amp=False exist_ok=True cache=True resume=False lr0=1",
            "--data d --model yolov5n --epochs 1 --imgsz 320 --device 0,1 --precision fp32 --exist-ok --cache --set lr0=1",
        ),
        ("mode=train model=a.pt data=d --set lr0=1", "--weights a.pt --data d --set lr0=1"),
        ("task=detect model=a.pt data=d", "--weights a.pt --data d"),
        ("task=segment model=yolov5n-seg data=d", "--model yolov5n-seg --data d"),
        ("model=yolov5n.pt task=segment", "--weights yolov5n.pt --model yolov5n-seg"),
        ("model=yolov5n-seg.pt task=detect", "--weights yolov5n-seg.pt --model yolov5n"),
        ("--weights dfine-n --task masks", "--weights dfine-n --model dfine-n-seg"),
        ("--task=boxes --model yolov5n-seg", "--model yolov5n-seg --model yolov5n"),
        ("--cfg yolov5n-seg.yaml --task boxes", "--cfg yolov5n-seg.yaml --cfg yolov5n"),
    ],
)
def test_settings_of_other_trainers_are_translated_with_one_note(line, becomes):
    ours, notes = words("train", line)
    typed, more = words("train", becomes)
    assert ours == typed and len(notes) == 1 + len(more)
    after = notes[0].partition(" is now ")[2]
    assert after and (after in becomes or after == "left out: it changes nothing")


@pytest.mark.parametrize(
    ("verb", "line", "says"),
    [
        ("train", "--lr0 3 --epohcs 3", "did you mean --epochs?"),
        ("train", "epohcs=3", "did you mean --epochs?"),
        ("val", "lr0=3", "val has no --lr0"),
        ("train", "--accumulate 4 --batch auto", "train has no --accumulate"),
        ("train", "--model yolov5n --task pose", "--task pose: expected boxes or masks"),
        ("train", "--weights best.safetensors --task boxes", "the command line does not name a network"),
        ("predict", "task=segment model=yolov5n.pt", "--task segment: yolov5n was trained on boxes"),
    ],
)
def test_settings_without_a_certain_meaning_are_refused(verb, line, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        words(verb, line)


def test_a_number_of_gpus_is_not_taken_for_the_number_of_a_gpu():
    with pytest.raises(ConfigError) as caught:
        words("train", "--gpus 2")
    assert "--device 0,1 for the number, or --device 2 for that one GPU" in caught.value.hint
    assert words("train", "--gpus 0,1")[0] == "--device=0,1" and words("train", "--gpus 0")[0] == "--device=0"


def test_every_field_of_the_schema_has_one_flag_and_a_help_text():
    for model in MODELS.values():
        flags = [flag_of(name, field) for name, field in model.model_fields.items()]
        assert len(set(flags)) == len(flags)
        assert all(field.description for field in model.model_fields.values())


# Flags that the reference keeps and this version refuses with a sentence, or the other way round.
REFUSED = {
    ("train", "--entity"),
    ("train", "--bbox_interval"),
    ("export", "--cache"),
    ("export", "--device"),
    ("export", "--opset"),
    ("export", "--workspace"),
}
ACCEPTED = {("train", "--evolve"), ("export", "--inplace")}
OUTCOMES = ("kept", "renamed", "no effect", "refused")
SCRIPTS = {
    "train": "train.py",
    "val": "val.py",
    "predict": "detect.py",
    "export": "export.py",
    "torchrun": "torchrun",
}


def outcome(verb, flag, example):
    """What becomes of a flag with a value that its program takes: one of OUTCOMES.

    The command line is parsed to the end, so a new name that our parser does not have is an error. An option of
    torchrun stands behind the script here, where YOLOv5 would refuse it, too.
    """
    given = {}
    verb = "train" if verb == "torchrun" else verb
    command = SchemaCommand(verb, MODELS[verb], lambda found, **_: given.update(found) or 0)
    line = [flag, *example.split()]
    try:
        done = rewrite(verb, line, FLAGS[verb])
    except ConfigError as problem:
        assert problem.what.startswith(f"{flag}: ") and problem.hint, f"{verb} {flag}: {problem.what}"
        return "refused"
    if not done.argv:
        assert done.notes or flag == "--local_rank", "no flag is ignored silently"
        return "no effect"
    if done.argv != ["--evolve=300"]:  # cli/train.py calls tune
        command.main(line, standalone_mode=False)
        assert given, f"{verb} {flag} sets nothing"
    names = {argument.partition("=")[0] for argument in done.argv}
    is_earlier = verb == "train" and flag[2:].replace("-", "_") in EARLIER
    return "kept" if names == {flag.replace("_", "-")} and not is_earlier else "renamed"


def test_the_documentation_counts_the_flags_of_yolov5_that_are_kept_renamed_and_refused():
    rows = [row.split(",") for row in parity("yolov5_flags.csv").read_text(encoding="utf-8").splitlines()[1:]]
    counts = {verb: dict.fromkeys(OUTCOMES, 0) for verb in SCRIPTS}
    for verb, flag, example, verdict in rows:
        found = outcome(verb, flag, example)
        is_refused = (verdict == "drop" and (verb, flag) not in ACCEPTED) or (verb, flag) in REFUSED
        assert (found == "refused") == is_refused, f"{verb} {flag}: {found}, the reference: {verdict}"
        if verdict != "spelling":
            counts[verb][found] += 1
    table = [
        f"| `{SCRIPTS[verb]}` | {' | '.join(map(str, count.values()))} |" for verb, count in counts.items()
    ]
    guide = (Path(__file__).parents[3] / "docs/coming-from/yolov5-flags.md").read_text(encoding="utf-8")
    assert [line for line in guide.splitlines() if line in table] == table, "the table is:\n" + "\n".join(
        table
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": "Lion:C:"}, "does not name a class"),
        ({"optimizer": "LAMB"}, "--optimizer pytorch_optimizer:Lamb"),
        ({"optimizer": "ScheduleFreeAdamW"}, "--optimizer AdamW --lr-schedule constant"),
        ({"minutes": 5, "lr_schedule": "cosine"}, "needs the length of the run from the start"),
        ({"set": ("lr_factors=backbone",)}, "is not PART:FACTOR"),
        ({"set": ("lr_layer_decay=0",)}, "lr_layer_decay"),
    ],
)
def test_rates_that_cannot_be_are_refused(settings, says):
    with pytest.raises(ConfigError) as caught:
        resolve_train({"data": "shapes", "model": "yolov5n", **settings})
    assert says in caught.value.render()


@pytest.mark.parametrize(
    ("settings", "decay"),
    [
        ({}, "linear"),
        ({"lr_schedule": "cosine"}, "cosine"),
        ({"minutes": 5}, "cooldown"),
        ({"minutes": 5, "lr_schedule": "constant"}, "constant"),
    ],
)
def test_the_minutes_choose_the_schedule(settings, decay):
    config, _ = resolve_train({"data": "shapes", "model": "yolov5n", **settings})
    assert config.value.lr_decay == decay
