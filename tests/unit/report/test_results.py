import csv

import pytest

from yolofleet.runs.report.results import ResultsTable, columns, read_rows
from yolofleet.support.errors import StorageError

LOSSES = ("box", "obj", "cls")


def epochs_in(path):
    with path.open(newline="") as f:
        return [int(row["epoch"]) for row in csv.DictReader(f)]


def test_an_epoch_trained_twice_has_one_row_and_later_ones_go(tmp_path):
    table = ResultsTable(tmp_path / "results.csv", LOSSES)
    for epoch in (1, 2, 3, 4):
        table.write({"epoch": epoch, "lr": 0.1 * epoch})
    table.write({"epoch": 2, "lr": 0.5})
    assert epochs_in(table.path) == [1, 2]
    assert read_rows(table.path)[1]["lr"] == "0.5"
    table.write({"epoch": 3})
    table.drop_after(1)
    assert epochs_in(table.path) == [1]


def test_columns_are_fixed_and_unknown_figures_stay_empty(tmp_path):
    table = ResultsTable(tmp_path / "results.csv", LOSSES)
    table.write(
        {"epoch": 1, "train/box_loss": 0.123456789, "metrics/mAP50": float("nan"), "images": 12345678}
    )
    header, row = table.path.read_text().splitlines()
    assert header == ",".join(columns(LOSSES))
    assert row.startswith("1,,12345678,0.123457,,,") and "nan" not in row


def test_rows_of_the_release_before_stay_with_empty_cells_for_new_columns(tmp_path):
    table = ResultsTable(tmp_path / "results.csv", LOSSES)
    before = [name for name in columns(LOSSES) if name not in ("val_seconds", "device_memory_mib")]
    cells = {name: str(number) for number, name in enumerate(before)} | {"epoch": "1"}
    table.path.write_text(",".join(before) + "\n" + ",".join(cells[name] for name in before) + "\n")
    table.drop_after(1)  # a resume
    table.write({"epoch": 2, "val_seconds": 3.5, "device_memory_mib": 1024.25})
    first, second = read_rows(table.path)
    assert first == {**cells, "val_seconds": "", "device_memory_mib": ""}
    assert (second["val_seconds"], second["device_memory_mib"]) == ("3.5", "1024.25")


def test_a_table_that_is_not_ours_is_not_overwritten(tmp_path):
    table = ResultsTable(tmp_path / "results.csv", LOSSES)
    table.path.write_text("epoch,x\nten,1\n")
    with pytest.raises(StorageError, match="cannot read"):
        table.write({"epoch": 1})
    assert table.path.read_text() == "epoch,x\nten,1\n"
