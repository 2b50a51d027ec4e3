"""What `yolofleet bench` makes of its measurements: shares of limits, what binds, and the table of several devices."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from yolofleet.cli.app import APP, BENCH
from yolofleet.config.load import resolve_train, resolve_workload
from yolofleet.config.schema.measure import BenchScalingConfig, BenchTrainConfig
from yolofleet.measure import scaling
from yolofleet.measure.bench_verdict import (
    PartSpeed,
    Setup,
    StepTime,
    checkpoint_line,
    in_turn,
    judge,
    part_of,
    wanted_workers,
)
from yolofleet.measure.timing import Seconds, Turns, in_turns
from yolofleet.runs.report.results import ResultsTable
from yolofleet.storage.atomic import jsonable
from yolofleet.support.errors import ConfigError, DataError
from yolofleet.training.parallel.world import World

ON_GPU = Setup(
    processes=2,
    workers=4,
    cores=16,
    cache="none",
    cached=0,
    images=100,
    on_cpu=False,
    precision="fp16",
    reduce="fast",
    micro_batch=8,
    batch=16,
    step_images=64,
)


# -- what binds ----------------------------------------------------------------------------------------------


def test_loader_processes_that_are_slower_than_the_step_bind() -> None:
    time = StepTime(network=0.040, around=0.005, all_reduce=0.005, load=0.100)
    verdict = judge(time, ON_GPU)
    assert verdict.binds == "loader"
    # 4 processes need 0.100 s; 4 x 1.1 x 0.100 / 0.050 = 8.8, so 9 keep up with a step of 0.050 s
    assert verdict.advice["loader"] == "--cache ram, --workers 9"
    assert "0.1 s for its images" in verdict.text


def test_more_loader_processes_than_cores_are_not_proposed() -> None:
    time = StepTime(network=0.010, around=0.0, all_reduce=0.0, load=0.100)
    assert wanted_workers(time, replace(ON_GPU, cores=8)) == 7
    full = replace(ON_GPU, cores=4, workers=3, cache="ram", cached=100)
    assert judge(time, full).advice["loader"] == "more cores, or a smaller --img"
    partly = replace(full, cached=50)
    assert judge(time, partly).advice["loader"] == "--cache disk"


def test_a_loader_that_works_ahead_costs_nothing() -> None:
    time = StepTime(network=0.090, around=0.010, all_reduce=0.0, load=0.099)
    verdict = judge(time, replace(ON_GPU, precision="fp32"))
    assert verdict.binds == "network" and "90% of the time" in verdict.text
    assert set(verdict.advice) == {"network", "step"}
    assert verdict.advice["network"].startswith("--precision bf16")
    assert verdict.advice["step"] == "--micro-batch 16"


def test_a_loader_in_the_process_of_the_network_adds_to_each_step() -> None:
    time = StepTime(network=0.80, around=0.0, all_reduce=0.0, load=0.20)
    on_cpu = replace(ON_GPU, workers=0, on_cpu=True, precision="fp32")
    verdict = judge(time, on_cpu)
    assert verdict.binds == "network" and "80% of the time" in verdict.text
    assert verdict.advice["loader"] == "--cache ram"  # a loader process would take a core from the network
    assert "--precision" not in verdict.advice["network"]


def test_sums_over_ranks_that_are_not_hidden_bind() -> None:
    time = StepTime(network=0.1, around=0.0, all_reduce=0.3, load=0.01)
    verdict = judge(time, replace(ON_GPU, reduce="exact"))
    assert verdict.binds == "all-reduce"
    assert (
        verdict.advice["all-reduce"] == "--reduce fast, --nominal-batch 128 (half as many updates an image)"
    )
    assert judge(time, ON_GPU).advice["all-reduce"].startswith("--reduce fast16, --nominal-batch 128")


def test_a_larger_micro_batch_leaves_no_process_without_work() -> None:
    time = StepTime(network=0.1, around=0.1, all_reduce=0.0, load=0.01)
    small = replace(ON_GPU, batch=16, step_images=16, micro_batch=8)
    assert judge(time, small).advice["step"] == "a larger --batch"  # 16 images are one micro-batch of 16
    assert (
        judge(time, replace(small, processes=1, reduce="exact")).advice["step"]
        == "--reduce fast, --micro-batch 16"
    )


def test_noise_that_makes_the_step_faster_than_the_bare_network_counts_as_nothing() -> None:
    exposed = StepTime(network=0.1, around=-0.01, all_reduce=-0.001, load=0.02).exposed(workers=2)
    assert exposed == {"network": 0.1, "step": 0.0, "all-reduce": 0.0, "loader": 0.0}


def test_rates_of_parts_in_turn() -> None:
    assert in_turn([100, 25]) == pytest.approx(20)  # 10 ms and 40 ms an image are 50 ms


def test_a_part_shows_its_rate_its_limit_and_its_share() -> None:
    part = PartSpeed("loader", 812.34, 1000.0, "images/s", "one copy of the pixels")
    assert part.cells() == ("loader", "812.3 images/s", "1,000 images/s", "0.81", "one copy of the pixels")
    by_cpu = replace(part, share=0.97)
    assert by_cpu.cells()[3] == "0.97"
    # NaN is null there
    assert part_of(json.loads(json.dumps(jsonable(asdict(part))))).of_limit == part.of_limit
    assert PartSpeed("x", 1.0, math.nan, "images/s", "").cells()[2:4] == ("", "")


def test_a_checkpoint_says_how_far_apart_saves_may_be() -> None:
    line = checkpoint_line(15 << 20, 0.25, 0.008)
    assert "15.0 MiB" in line and "stands still 8 ms" in line and "0.8 s apart" in line


def test_works_that_are_compared_take_turns_and_their_times_are_of_one_call() -> None:
    calls: list[str] = []
    found = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, World.single(), 3)
    assert "".join(calls) == "ababab"
    assert found.seconds.keys() == {"a", "b"} and [len(rows) for rows in found.seconds.values()] == [3, 3]


def test_ratios_are_those_of_turns_so_that_a_slow_turn_does_not_count() -> None:
    rows = {"bare": [(1, 1), (10, 4), (1, 1)], "step": [(2, 2), (20, 8), (4, 2)]}
    turns = Turns({name: [Seconds(*pair) for pair in pairs] for name, pairs in rows.items()})
    assert turns.median("step") == Seconds(4, 2)
    assert turns.ratio("bare", "step", by_cpu=False) == turns.ratio("bare", "step", by_cpu=True) == 0.5


# -- several devices -----------------------------------------------------------------------------------------


def resolved(**given: Any) -> Any:
    config, _ = resolve_workload(BenchScalingConfig, {"data": "d", "model": "yolov5n", **given})
    return config


def test_devices_of_a_run_are_the_first_ones_that_are_named() -> None:
    assert scaling.counts_of("4,1,2,1") == [1, 2, 4]
    assert scaling.device_of("auto", 2, gpus=8) == "0,1"
    assert scaling.device_of("4,5,6,7", 3, gpus=8) == "4,5,6"
    assert scaling.device_of("auto", 2, gpus=0) == scaling.device_of("cpu", 2, gpus=8) == "cpu:2"


@pytest.mark.parametrize(
    ("device", "gpus", "says"),
    [
        ("auto", 2, "--devices 4: this machine has 2 GPUs"),
        ("0,1,2", 8, "--device 0,1,2 names 3"),
        ("mps", 0, "one device"),
    ],
)
def test_too_few_devices_are_an_error_that_proposes_what_is_there(device: str, gpus: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scaling.device_of(device, 4, gpus)
    assert says in caught.value.render() and "--device" in (caught.value.hint or "")


def test_runs_differ_in_their_devices_only() -> None:
    config = resolved(devices="1,2", img=320, batch=8, nominal_batch=16, device="cpu", set=("mosaic=0",))
    one, two = (scaling.settings_of(config, count, gpus=0, cores=4) for count in (1, 2))
    assert (one["device"], two["device"]) == ("cpu:1", "cpu:2")
    assert {**one, "device": ""} == {**two, "device": ""}
    assert one["threads"] == 2  # four cores for at most two processes
    assert one["set"] == (*scaling.RECIPE, "mosaic=0") and one["img"] == 320
    for settings in (one, two):
        resolve_train(settings)


def test_a_batch_for_each_device_keeps_the_work_of_a_device() -> None:
    config = resolved(devices="1,4", batch=16, nominal_batch=16, per_device=True, device="0,1,2,3")
    four = scaling.settings_of(config, 4, gpus=4, cores=64)
    assert (four["batch"], four["nominal_batch"], four["threads"]) == (64, 64, 0)
    assert four["micro_batch"] == scaling.settings_of(config, 1, gpus=4, cores=64)["micro_batch"]


def written(path: Path, rows: list[dict[str, float]]) -> Path:
    table = ResultsTable(path, ("box",))
    for row in rows:
        table.write(row)
    return path


def test_the_first_epoch_is_warm_up(tmp_path: Path) -> None:
    rows = [
        {"epoch": 1, "images_per_s": 5.0, "val_seconds": 9.0, "device_memory_mib": 900.0},
        {"epoch": 2, "images_per_s": 10.0, "val_seconds": 2.0, "device_memory_mib": 700.0},
        {"epoch": 3, "images_per_s": 30.0, "val_seconds": 4.0, "device_memory_mib": 800.0},
    ]
    found = scaling.read_scale(written(tmp_path / "results.csv", rows), 2, 16, epoch_images=200)
    assert found == scaling.Scale(2, 16, rate_img_s=20.0, memory_mib=900.0, train_s=10.0, val_s=3.0)


def test_a_run_of_one_epoch_counts_as_it_is_and_one_without_a_rate_is_an_error(tmp_path: Path) -> None:
    one = written(tmp_path / "one.csv", [{"epoch": 1, "images_per_s": 4.0, "val_seconds": 1.0}])
    found = scaling.read_scale(one, 1, 16, epoch_images=8)
    assert (found.rate_img_s, found.train_s, found.val_s) == (4.0, 2.0, 1.0) and math.isnan(found.memory_mib)
    short = written(tmp_path / "short.csv", [{"epoch": 1, "images_per_s": math.nan}])
    with pytest.raises(DataError, match="too few for a rate"):
        scaling.read_scale(short, 1, 16, epoch_images=8)


SCALES = [
    scaling.Scale(1, 16, 100.0, 4096.0, 1200.0, 60.0),
    scaling.Scale(2, 16, 190.0, 4100.4, 631.6, 30.0),
    scaling.Scale(4, 16, 300.0, math.nan, 400.0, math.nan),
]


def test_speed_up_and_efficiency_are_those_of_the_first_run() -> None:
    one, two, four = scaling.table(SCALES)
    assert one == ["1", "16", "100", "1.00", "100%", "4,096 MiB", "20:00", "1:00", "1.00"]
    assert two == ["2", "16", "190", "1.90", "95%", "4,100 MiB", "10:32", "30.0 s", "2.00"]
    assert four[3:] == ["3.00", "75%", "-", "6:40", "-", "-"]
    # from two devices on: 300 / 190 = 1.58 with twice as many
    assert scaling.table(SCALES[1:])[1][3:5] == ["1.58", "79%"]


def test_the_page_has_the_table() -> None:
    page = scaling.markdown("Scaling of yolov5n", {"image": "320 px"}, SCALES)
    lines = page.splitlines()
    assert lines[0] == "# Scaling of yolov5n" and "- image: 320 px" in lines
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 5 and {line.count("|") for line in table} == {len(scaling.COLUMNS) + 1}


# -- the command line ----------------------------------------------------------------------------------------


def test_bench_without_a_verb_measures_weights() -> None:
    context = BENCH.make_context("bench", ["--weights", "a.onnx"])
    name, command, rest = BENCH.resolve_command(context, ["--weights", "a.onnx"])
    assert (name, rest) == ("inference", ["--weights", "a.onnx"]) and command is not None
    assert BENCH.resolve_command(context, ["train", "--img", "64"])[::2] == ("train", ["--img", "64"])
    with pytest.raises(ConfigError, match="did you mean scaling"):
        BENCH.resolve_command(context, ["scalin"])
    assert "bench" in APP.members


@pytest.mark.parametrize("verb", ["train", "scaling"])
def test_settings_that_a_measurement_cannot_use_are_not_offered(verb: str) -> None:
    command = BENCH.get_command(None, verb)  # type: ignore[arg-type]
    assert command is not None
    flags = {flag for parameter in command.params for flag in parameter.opts}
    assert {"--data", "--model", "--img", "--device", "--cache", "--precision", "--json"} <= flags
    assert not {"--resume", "--hosts", "--save-every", "--patience", "--restarts", "--plots"} & flags


def test_the_configuration_of_a_run_can_be_measured(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("verb: train\ndata: d\nmodel: yolov5n\nepochs: 300\nsave_period: '5'\nimg: 320\n")
    config, _ = resolve_workload(BenchTrainConfig, {"steps": "7"}, config_file=str(file))
    assert (config.value.steps, config.value.img) == (7, 320)
