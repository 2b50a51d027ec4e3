"""Commands of PaddleDetection, and what becomes of them."""

from __future__ import annotations

import shlex

import pytest

from yolofleet.cli import main
from yolofleet.config.load import resolve_train
from yolofleet.config.resolve import DEFAULT, Resolved
from yolofleet.config.schema import TrainConfig
from yolofleet.config.words.paddle import command_of
from yolofleet.fleet.launch.machines import START_PORT, fleet_of
from yolofleet.support.errors import ConfigError

CONFIG = "-c configs/ppyoloe/ppyoloe_crn_s_300e_coco.yml"
NAMED = "--model=ppyoloe-s --recipe=ppyoloe-300e --epochs=300 --data=coco.yaml"


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        # 8 images for each of 8 GPUs, and of 4 x 8 GPUs
        (
            f"fleetrun --selected_gpu 0,1,2,3,4,5,6,7 tools/train.py {CONFIG} --eval",
            f"train --selected-gpu=0,1,2,3,4,5,6,7 {NAMED} --batch=64 --micro-batch=8 --eval",
        ),
        (
            f"fleetrun --ips=10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4 --selected_gpu 0,1,2,3,4,5,6,7 tools/train.py {CONFIG}",
            f"train --ips=10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4 --selected-gpu=0,1,2,3,4,5,6,7 {NAMED} --batch=256 --micro-batch=8",
        ),
        (
            f"paddle.distributed.launch --gpus 0,1 tools/train.py --eval {CONFIG} -r runs/a",
            f"train --selected-gpu=0,1 {NAMED} --batch=16 --micro-batch=8 --eval -r runs/a",
        ),
        (
            f"fleetrun --gpus 0,1 tools/train.py {CONFIG} -o TrainReader.batch_size=4 epoch=7 use_ema=False --amp",
            f"train --selected-gpu=0,1 {NAMED} --batch=16 --micro-batch=8 --batch=8 --epochs=7 --set=ema_decay=0 --amp",
        ),
        (f"fleetrun tools/train.py {CONFIG} --fleet", f"train {NAMED}"),
        (
            f"fleetrun --gpus 2,3 tools/eval.py {CONFIG} -o weights=a.pdparams --classwise",
            "val --selected-gpu=2,3 --data=coco.yaml --weights=a.pdparams --verbose",
        ),
        (
            f"fleetrun --gpus 2,3 tools/infer.py {CONFIG} -o weights=a.pdparams --infer_img=b.jpg --draw_threshold 0.4",
            "predict --device=2 --weights=a.pdparams --source=b.jpg --conf 0.4",
        ),
    ],
)
def test_commands_become_ours(line, becomes):
    command, notes = command_of(line.split())
    assert " ".join(command) == becomes
    assert notes[0].startswith(f"{line.split()[0]} is now yolofleet ")
    assert command_of(["fleetrun", "--log_dir=x", *line.split()[1:]])[1][1].startswith(
        "--log_dir has no effect"
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("fleetrun", "expected one of tools/train.py, tools/eval.py, tools/infer.py"),
        ("fleetrun --gpus", "fleetrun --gpus needs a value"),
        (
            "fleetrun --heter_devices a tools/train.py",
            "fleetrun --heter_devices: yolofleet has no such option",
        ),
        ("fleetrun tools/export_model.py", "fleetrun tools/export_model.py: expected one of"),
        (
            "fleetrun tools/train.py -c configs/yolov3.yml",
            "is not a configuration of PaddleDetection for PP-YOLOE",
        ),
        ("fleetrun tools/eval.py -c", "is not a configuration of PaddleDetection for PP-YOLOE"),
        (f"fleetrun tools/train.py {CONFIG} -o TrainReader.batch_size=4", "those of all"),
        ("fleetrun tools/\x1b[2Jevil.py", "evil.py': expected one of"),
    ],
)
def test_other_commands_are_refused_by_name(line, says, capsys):
    assert main(line.split(" ")) == 2
    printed = capsys.readouterr().err
    assert says in printed and "\x1b" not in printed and "Traceback" not in printed


def test_a_command_runs_as_ours_does(capsys):
    assert main(shlex.split(f"fleetrun tools/train.py {CONFIG} --dry-run --device cpu --data shapes")) == 0
    assert "note: fleetrun is now yolofleet train --model ppyoloe-s" in capsys.readouterr().err


def fleet(monkeypatch, port=None, **given):
    monkeypatch.delenv(START_PORT, raising=False)
    if port is not None:
        monkeypatch.setenv(START_PORT, port)
    config, _ = resolve_train({"data": "d.yaml", "model": "yolov5n", **(given or {"hosts": "a:1,b:1"})})
    return fleet_of(config)


def test_the_first_port_comes_from_paddles_variable_if_no_file_says_another(monkeypatch, tmp_path):
    assert fleet(monkeypatch).port == 29500
    assert fleet(monkeypatch, "17000").port == 17000
    for text in ("80", "65536", "x", "", "9" * 400, "-1"):
        with pytest.raises(ConfigError, match="is not a port from 1024 to 65000"):
            fleet(monkeypatch, text)
    file = tmp_path / "fleet.yaml"
    file.write_text("port: 18000\nhosts: [{host: a, gpus: 1}, {host: b, gpus: 1}]\n")
    assert fleet(monkeypatch, "17000", fleet=str(file)).port == 18000
    assert fleet_of(Resolved(TrainConfig(), dict.fromkeys(TrainConfig.model_fields, DEFAULT))) is None
