"""The self-test's plan, verdicts and causes, on records made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from yolofleet.cli import main
from yolofleet.config.load import resolve_train
from yolofleet.config.schema.verbs import SelftestConfig
from yolofleet.measure.selftest import contract
from yolofleet.measure.selftest.checks import (
    ROUNDING,
    Comparison,
    Leg,
    Record,
    cause_of,
    distance,
    fleet_of,
    further_legs,
    is_broken,
    judge,
    plan,
)

pytestmark = pytest.mark.long

REPORTED = {"device": "NVIDIA A", "threads": 1, "torch": "2.9", "deterministic": True, "data": "d"}


def records_of(device: str = "0,1") -> list[Record]:
    """Of a fleet that keeps the contract: exact sums equal, fast ones off by 5e-7, default kernels by more."""
    off = {"exact": 0.0, "fast": 5e-7, "default": 0.3}
    return [
        Record(leg, "a" * 64 if leg.kind == "exact" else "b" * 64, off[leg.kind], 1e-7, 0.5, REPORTED)
        for leg in plan(device)
    ]


def changed(records: list[Record], title: str, **values) -> list[Record]:
    assert title in [r.leg.title for r in records]
    return [replace(r, **values) if r.leg.title == title else r for r in records]


def test_every_kind_of_fleet_is_in_the_plan_and_can_be_trained(tmp_path):
    legs = plan("0,1,2")
    assert [(leg.title, leg.device, leg.processes) for leg in legs] == [
        ("exact: one process", "0", 1),
        ("exact: one process again", "0", 1),
        ("exact: 3 processes", "0,1,2", 3),
        ("exact: 3 processes, shares 3,1,3", "0,1,2", 3),
        ("exact: DataParallel", "0,1,2", 1),
        ("fast: one process", "0", 1),
        ("fast: 3 processes, shares 3,1,3", "0,1,2", 3),
        ("fast: DataParallel", "0,1,2", 1),
        ("default: 3 processes", "0,1,2", 3),
    ]
    comparison = Comparison(SelftestConfig(img=64), legs, tmp_path)
    settings = [resolve_train(comparison.settings_of(leg), source="test")[0].value for leg in legs]
    own = {"device", "parallel", "shares", "reduce", "threads", "deterministic", "micro_batches_per_pass"}
    assert len({config.model_dump_json(exclude=own) for config in settings}) == 1
    assert settings[-1].threads == 0 and not settings[-1].deterministic
    assert {(c.threads, c.deterministic) for c in settings[:-1]} == {(1, True)}


def test_one_device_is_compared_with_itself():
    assert {leg.device for leg in plan("0")} == {"0"} and {leg.processes for leg in plan("0")} == {1}
    assert judge(records_of("0")).cause is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_two_processes_where_the_cpu_is_all_there_is():
    assert fleet_of("auto") == fleet_of("cpu") == "cpu:2" and fleet_of("cpu:3") == "cpu:3"


def test_the_contract_holds_with_equal_bits_and_rounding():
    verdict = judge(records_of())
    assert verdict.cause is None
    assert verdict.text == (
        "the contract holds here: 5 exact runs, one SHA-256; fast sums are off by at most 5e-07, as rounding is "
        "(limit 1e-05)"
    )
    assert further_legs(records_of()) == []


@pytest.mark.parametrize(
    ("title", "values", "how", "cause"),
    [
        ("exact: one process again", {"sha256": "c" * 64}, "cccccccccccc instead of aaaaaaaaaaaa",
         "a kernel is not deterministic"),
        ("exact: 2 processes", {"sha256": "c" * 64}, "cccccccccccc", "only several processes differ"),
        ("exact: DataParallel", {"sha256": "c" * 64}, "cccccccccccc", "only DataParallel differs"),
        ("fast: DataParallel", {"update_difference": 0.5}, "off by 5e-01, more than rounding",
         "only DataParallel differs"),
        ("fast: 2 processes, shares 3,1", {"update_difference": 0.5}, "off by 5e-01", "only fast sums differ"),
        ("fast: one process", {"loss_difference": float("nan")}, "off by", "only fast sums differ"),
        ("exact: 2 processes", {"problem": "ClusterError: rank 1 is not like the others\n  try  : this"},
         "did not get to its end", "exact: 2 processes: ClusterError: rank 1 is not like the others"),
        ("exact: 2 processes", {"sha256": "c" * 64, "reported": REPORTED | {"device": "NVIDIA B"}}, "cccccccccccc",
         "mixed hardware: device is NVIDIA B in exact: 2 processes, NVIDIA A in the reference"),
        ("exact: one process again", {"sha256": "c" * 64, "reported": REPORTED | {"threads": 2}}, "cccccccccccc",
         "different numbers of threads: threads is 2"),
        ("exact: one process again", {"sha256": "c" * 64, "reported": REPORTED | {"torch": "2.8"}}, "cccccccccccc",
         "different builds of torch"),
        ("exact: 2 processes", {"sha256": "c" * 64, "reported": REPORTED | {"new": 1}}, "cccccccccccc",
         "the runs report different things: new is 1"),
        ("exact: 2 processes", {"sha256": "c" * 64, "reported": REPORTED | {"data": "e", "device": "B"}},
         "cccccccccccc", "mixed hardware"),
    ],
)  # fmt: skip
def test_each_way_to_break_it_is_named(title, values, how, cause):
    verdict = judge(changed(records_of(), title, **values))
    assert verdict.text.startswith(f"the fleet changed the result: {title} (") and how in verdict.text
    assert verdict.cause is not None and cause in verdict.cause.what and verdict.cause.hint


def test_a_device_that_alone_gives_other_bits_is_found_by_a_further_run():
    records = changed(records_of(), "exact: 2 processes", sha256="c" * 64)
    further = further_legs(records)
    assert further == [Leg("exact", "one process on device 1", "1")]
    found = [*records, replace(records[0], leg=further[0], sha256="d" * 64)]
    cause = judge(found).cause
    assert cause is not None and "device 1 alone gives other weights than device 0" in cause.what
    found[-1] = replace(found[-1], reported=REPORTED | {"device": "NVIDIA B"})
    cause = judge(found).cause
    assert cause is not None and "mixed hardware" in cause.what
    assert "one process on device 1" in cause.what


def test_no_further_run_on_a_cpu_or_for_a_fault_of_one_process():
    assert further_legs(changed(records_of("cpu:2"), "exact: 2 processes", sha256="c" * 64)) == []
    assert further_legs(changed(records_of(), "exact: one process again", sha256="c" * 64)) == []


def test_a_pattern_without_a_name_asks_for_a_report():
    records = changed(records_of(), "exact: 2 processes", sha256="c" * 64)
    records = changed(records, "exact: DataParallel", sha256="c" * 64)
    broken = [r for r in records if is_broken(r, records[0])]
    assert "not known" in cause_of(records, broken).what and "report" in cause_of(records, broken).hint


def test_default_kernels_are_not_judged_and_rounding_has_a_limit():
    records = records_of()
    assert not is_broken(replace(records[-1], update_difference=9.0), records[0])
    assert not is_broken(replace(records[5], update_difference=ROUNDING), records[0])
    assert is_broken(replace(records[5], update_difference=2 * ROUNDING), records[0])


def test_differences_are_summed_over_all_tensors():
    a = {"x": torch.tensor([3.0, 0.0]), "y": torch.tensor([[4.0]])}
    assert distance(a, {name: torch.zeros_like(t) for name, t in a.items()}) == 5.0  # sqrt(9 + 16)


def test_the_table_keeps_its_columns():
    records = changed(records_of(), "exact: 2 processes", problem="ClusterError: gone")
    rows = [contract.COLUMNS, *(contract.cells_of(record, records[0]) for record in records)]
    lines = [contract.table_line([record.leg for record in records], row) for row in rows]
    assert len({len(line) for line in lines if "FAILED" not in line}) == 1
    failed = [line for line in lines if "FAILED" in line]
    assert len(failed) == 1 and failed[0].startswith("exact: 2 processes ")
    assert "exact / other: 1.00 (fast: one process)" in contract.cost(records)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--steps", "1"], "--steps 1 is below 2"),
        (["--device", "99"], "no CUDA device 99"),
        (["--model", "yolov5q"], "yolov5q"),
        (["--precision", "fp16", "--device", "cpu:2"], "CPUs do not compute in fp16"),
    ],
)
def test_mistakes_end_with_exit_code_2(argv, says, capsys, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["selftest", *argv]) == 2
    assert says in capsys.readouterr().err


def test_it_is_not_started_by_torchrun(capsys, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert main(["selftest"]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_it_has_help_and_takes_no_configuration_of_another_verb(tmp_path: Path, capsys):
    assert main(["selftest", "--help"]) == 0
    assert "--steps" in capsys.readouterr().out
    (tmp_path / "a.yaml").write_text("verb: val\n")
    assert main(["selftest", "--config", str(tmp_path / "a.yaml")]) == 2
    assert "is the configuration of val, not of selftest" in capsys.readouterr().err


def test_each_device_is_checked_in_a_process_of_its_own():
    done = [*contract.checked_devices(["cpu"])]
    assert [check["name"] for check in done] == [f"resume with {name}" for name in ("SGD", "Adam", "AdamW")]
    assert all(check["passed"] and check["device"] == "cpu" for check in done)
    assert contract.check_line(done[0]).startswith("cpu     resume with SGD")


def test_a_device_that_ends_its_process_is_a_failed_check():
    (check,) = contract.checked_devices(["99"])
    assert not check["passed"] and "exit code 1" in check["detail"]
    assert contract.check_line(check).split()[:4] == ["99", "all", "checks", "FAILED"]
